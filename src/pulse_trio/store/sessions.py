"""The sessions of one worker: they say which worker holds a job, and until when it counts as alive.

A session id is 63 random bits, made when the worker starts and again whenever the claiming connection was lost, because after a
failover the server may give out an attempt a second time. A claim keeps the session under which it was made.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import psycopg
import trio

from ..postgres import reconnect_delay
from ..sql import statement

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from ..postgres import TrioConnection
    from .callbacks import Callbacks
    from .links import Links


_REMEMBERED = 100
"""So many sessions of its own a worker remembers."""
_START_TRIES = 5
"""Times that a statement of a worker's start is tried when deadlocks or serialization failures end it."""


class Sessions:
    """`identity` is the worker's entry in `pulse.workers`; `first` the first session's id if another process chose it."""

    def __init__(
        self, links: Links, schema: str, identity: Mapping[str, Any], callbacks: Callbacks, first: int | None
    ) -> None:
        self._links = links
        self._schema = schema
        self._identity = identity
        self._callbacks = callbacks
        self._first = first
        self._generation = 0
        """The generation of the claiming connection that the current session belongs to."""
        self._server = ""
        """When the server started, as a pooled connection last saw it."""
        self.current = 0
        self.ids: list[int] = []
        """The last ones, the current one last; most of them have ended."""
        self._past = set[int]()
        """Those before the current one under which no job was held at the last sign of life."""
        self.epoch_offset = 0.0
        """Seconds by which the database's clock (since 1970) is ahead of Trio's, or a little more; 0 before a session."""

    async def open_session(self) -> int:
        """Registers this worker under a new session id; returns the id."""
        patience = self._links.start_patience
        async with self._links.claims.using(patience=patience) as connection:
            await self.ensure(connection)
        # Connect for beats and reports now: a server without a free connection at the first beat would cost running jobs their
        # leases.
        for link in (self._links.beats, self._links.settles):
            async with link.using(patience=patience):
                pass
        return self.current

    async def ensure(self, connection: TrioConnection[Any]) -> None:
        """Opens a new session if the claiming connection is not the one that the current session belongs to."""
        if connection.pooled:
            await self._notice_another_server(connection)
        generation = self._links.claims.generation
        if self._generation == generation:
            return
        session, self._first = self._first or secrets.randbits(63) or 1, None
        # Before this session can claim: the supervisor has to know which sessions' jobs to hand back.
        self._callbacks.session(session)
        sent = trio.current_time()
        cursor = await despite_conflicts(
            connection, statement("open_session", self._schema), {"session": session, **self._identity}
        )
        ((clock, seen),) = await cursor.fetchall()
        self.set_clock(sent, clock)
        self._links.lineage.accepted(session, seen)
        self._generation = generation
        self.current = session
        self.ids = [*self.ids[1 - _REMEMBERED :], session]

    async def touch(self, running: int, held: AbstractSet[int], *, draining: bool) -> None:
        """Shows a sign of life, and how many jobs this worker runs. `held`: the sessions under which it has claimed those it
        holds. An earlier session without any ends with the second sign of life after it: one process is one worker."""
        async with self._links.beats.using() as connection:
            sent, session = trio.current_time(), self.current
            cursor = await connection.execute(
                statement("touch_sessions", self._schema),
                {"session": session, "sessions": self.ids, "running": running, "draining": draining},
                prepare=True,
            )
            seen: dict[int, float] = dict(await cursor.fetchall())
            if seen:
                self.set_clock(sent, max(seen.values()))
            if session in seen:  # not in a copy that is older than the session
                self._links.lineage.accepted(session, seen[session])
            # Also those that have ended before, where an older copy of the database has them as they were.
            past = {one for one in seen if one != self.current and one not in held}
            over, self._past = sorted(past & self._past), past
            if over:
                await connection.execute(statement("end_sessions", self._schema), {"sessions": over})

    async def end_sessions(self) -> None:
        """Marks every session of this worker as ended."""
        async with self._links.beats.using() as connection:
            await connection.execute(statement("end_sessions", self._schema), {"sessions": self.ids})

    async def end_unstarted(self) -> None:
        """The same for a worker whose start has failed, over the claiming connection: it may have no other."""
        if self.ids:
            async with self._links.claims.using() as connection:
                await connection.execute(statement("end_sessions", self._schema), {"sessions": self.ids})

    async def _notice_another_server(self, connection: TrioConnection[Any]) -> None:
        # A pooler keeps our connection when it switches to another server.
        row = await (await connection.execute("SELECT pg_postmaster_start_time()::text")).fetchone()
        if row is not None and row[0] != self._server:
            self._server = row[0]
            self._generation = 0
            await self._links.lineage.check(connection)

    def set_clock(self, sent: float, clock: float) -> None:
        """Notes the time that the database gave in an answer; `sent`: when it was asked, on Trio's clock."""
        # As if the server had answered when the statement was sent: the offset is rather too great than too small, by one round
        # trip at most.
        self.epoch_offset = clock - sent


async def despite_conflicts(
    connection: TrioConnection[Any], query: bytes, parameters: Mapping[str, Any]
) -> psycopg.AsyncCursor[Any]:
    """Runs one statement of a worker's start, again when PostgreSQL ends it in favour of another transaction. The loops of a
    worker try again by themselves; its start does not."""
    for failures in range(_START_TRIES - 1):
        try:
            return await connection.execute(query, parameters)
        except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
            await trio.sleep(reconnect_delay(failures))
    return await connection.execute(query, parameters)
