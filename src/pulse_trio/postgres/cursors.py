"""Server-side cursors that are closed even when cancelled.

Client-side cursors need no classes of their own: what they leave unfinished, `TrioConnection.wait` settles.
"""

from __future__ import annotations

from psycopg import AsyncRawServerCursor, AsyncServerCursor
from psycopg.rows import Row

from pulse_trio.postgres.shield import Mode, running_in


class TrioServerCursor(AsyncServerCursor[Row]):
    """A server-side cursor; its CLOSE is sent even when the surrounding scope is cancelled."""

    __module__ = "pulse_trio.postgres"
    __slots__ = ()

    async def close(self) -> None:
        """Close the cursor on the server; bounded when cancelled."""
        with running_in(Mode.FINISH):
            await super().close()


class TrioRawServerCursor(AsyncRawServerCursor[Row]):
    """`TrioServerCursor` for queries with PostgreSQL's own `$1` placeholders."""

    __module__ = "pulse_trio.postgres"
    __slots__ = ()

    async def close(self) -> None:
        """Close the cursor on the server; bounded when cancelled."""
        with running_in(Mode.FINISH):
            await super().close()
