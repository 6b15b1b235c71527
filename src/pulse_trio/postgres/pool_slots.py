"""A pool's connections: how one is opened, what the pool knows about it, and how its session is reset for another caller."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from pulse_trio.postgres.connection import Made
from pulse_trio.postgres.reconnecting import connect_or_unavailable

if TYPE_CHECKING:
    from pulse_trio.postgres.connection import TrioConnection
    from pulse_trio.postgres.reconnecting import Configure

    Connection = TrioConnection[Any]


@dataclass(eq=False, slots=True)
class Slot:
    """A connection and what the pool knows about it."""

    connection: Connection
    expires_at: float
    idle_since: float
    made: Made
    begun: bytes = b""
    """The commands that have begun its user's transaction already: his own, or those of another who waited for it."""


# Without repr(): the connection string may have a password.
@dataclass(frozen=True, slots=True, repr=False)
class Opening:
    """How a pool opens its connections. `max_lifetime` in seconds."""

    dsn: str
    configure: Configure | None
    options: dict[str, Any]
    max_lifetime: float

    async def open(self) -> Slot:
        """Connect once; the lifetime is shortened by up to a tenth, so that a fleet does not reconnect at one moment."""
        connection = await connect_or_unavailable(self.dsn, self.configure, **self.options)
        now = trio.current_time()
        expires_at = now + self.max_lifetime * random.uniform(0.9, 1.0)  # noqa: S311 -- spreads load, guards nothing
        return Slot(connection, expires_at, now, Made(connection))


# Like DISCARD ALL, which must be alone, but in one message with the program's own commands and the role's reset.
RESET_SESSION = (
    b"CLOSE ALL; RESET SESSION AUTHORIZATION; RESET ROLE; RESET ALL; DEALLOCATE ALL; UNLISTEN *; "
    b"SELECT pg_catalog.pg_advisory_unlock_all(); DISCARD TEMP; DISCARD SEQUENCES"
)


async def discard_all(connection: Connection) -> None:
    """For `open_pool(reset=...)`: resets a session in one round trip: settings, roles, locks, temporary tables, prepared
    statements, cursors, LISTEN. Through a pooler it changes nothing, because the session is the pooler's."""
    if not connection.pooled:
        await connection.command(RESET_SESSION)
        connection.forget_news()
