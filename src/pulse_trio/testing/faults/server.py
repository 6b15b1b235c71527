"""A PostgreSQL of the test's own that can be restarted and crashed."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...embedded.membership import Membership

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

_DURABLE = {"fsync": "on", "synchronous_commit": "on"}


class RestartableServer:
    """An embedded PostgreSQL in a folder; `dsn` stays the same over restarts. Each method blocks: call it by
    `trio.to_thread.run_sync`."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._settings = {**_DURABLE, **(settings or {})}
        self._membership = Membership.join(folder, self._settings)
        self.dsn = self._membership.server.dsn

    def restart(self, down: float = 0.0) -> None:
        """Stops it (its connections end), and starts it `down` seconds later. Returns when it accepts connections."""
        self._membership.leave()
        time.sleep(down)
        self._membership = Membership.join(self._folder, self._settings)

    def crash(self) -> None:
        """Ends it at once, without a checkpoint, as when its machine fails, and starts it again: it recovers from its log.
        Returns when it accepts connections."""
        os.kill(int((self._folder / "data" / "postmaster.pid").read_text().split("\n")[0]), signal.SIGQUIT)
        self.restart()

    def close(self) -> None:
        """Stops it."""
        self._membership.leave()


@contextmanager
def restartable_server(folder: Path, settings: Mapping[str, str] | None = None) -> Generator[RestartableServer]:
    """A PostgreSQL in `folder`, which is made if need be, stopped at the end of the block. It has no schema yet: migrate it
    (`pulse_trio.migrate.migrate_sync`). `settings` are PostgreSQL's. Needs the extra `embedded`. Raises `ConfigurationError` or
    `DatabaseUnavailable`."""
    server = RestartableServer(folder, settings)
    try:
        yield server
    finally:
        server.close()
