"""Whether the database that a worker reaches still is what it was, or has stepped back: an older copy is in its place.

A standby that was a moment behind is promoted, a backup or a snapshot is put back: what the worker was told is written is not.
Claims survive that, because their fence is in the row or is not. What a durable handler remembers does not: it goes on after
lines and children that are gone, and its next attempt finds a hole in the history. So each new connection of a worker asks
before anything else. The claims that its worker names are void then, in the database, before any other statement goes to it:
whatever is still under way of these attempts is refused by the fence.

Four things tell. Each stays the same where nothing is lost, and every step back that was tried changes one of them:

- the database's number: a dump that was restored, and renamed;
- its timeline, which each promotion and each recovery to a point in time begins anew;
- this worker's own sign of life, which the database had accepted: a snapshot of the disks, or another server;
- the last line and the last child that running attempts of durable jobs have written: a snapshot that is a moment old.

Connections through a pooler outlive a change of servers. The claiming one asks again when the server's start has changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import psycopg

from ..sql import statement
from .arrays import fences, numbers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ..jobs import Claim
    from ..postgres import TrioConnection

    Ask = Callable[[bytes], Awaitable[bytes | None]]


class Known(NamedTuple):
    """What an attempt has been told is written last: a line of its history, and a child, by its id (0: none)."""

    claim: Claim
    line: int
    child: int


class Follower(Protocol):
    """The worker, as far as it has to know."""

    def known(self) -> Sequence[Known]:
        """Of each attempt that remembers something."""
        ...

    def stepped_back(self, change: str) -> Sequence[Claim]:
        """The database has changed in this way. Returns the claims that are void: their attempts rest on what may be gone."""
        ...


class Lineage:
    """Of one worker."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self.follower: Follower | None = None
        self._known: tuple[int, str | None] | None = None
        """The database's number and timeline."""
        self._sign: tuple[int, float] | None = None
        """A session of the worker, and the time of its last sign of life that the database has accepted."""
        self._void: set[Claim] = set()
        """Claims that are still to be made void."""
        self._tells_timeline = True

    def accepted(self, session: int, clock: float) -> None:
        """The database has accepted a sign of life, at this time on its clock."""
        self._sign = (session, clock)

    async def check(self, connection: TrioConnection[Any], ask: Ask | None = None) -> None:
        """Asks over a new connection, which nothing else has used; by `ask`, which sends the question in one message with what
        a new session needs. Raises psycopg's errors: the connection is no good then."""
        sign = self._sign
        number, timeline, seen = await self._asked(connection, ask or connection.value_of)
        change = self._change(number, timeline)
        # A standby says nothing of its timeline: what was known before it stays known.
        self._known = (number, timeline or (self._known[1] if self._known is not None else None))
        if change is None and sign is not None and self._sign is sign and (seen is None or seen < sign[1]):
            change = "a sign of life of this worker, which it had accepted, is not in it"
        change = change or await self._missing_lines(connection)
        if change is not None:
            self._sign = None
            self._void.update(self.follower.stepped_back(change) if self.follower is not None else ())
        # Also those that another connection is about to make void: nothing goes to the database over this one before that.
        if void := [*self._void]:
            await self.make_void(connection, void)
            self._void.difference_update(void)

    async def make_void(self, connection: TrioConnection[Any], claims: Sequence[Claim]) -> None:
        """From now on the fence refuses all that comes from these attempts."""
        ordered = sorted(claims, key=lambda claim: claim.id)
        await connection.execute(statement("void_claims", self.schema), fences(ordered))

    async def _asked(self, connection: TrioConnection[Any], ask: Ask) -> tuple[int, str | None, float | None]:
        """The database's number, its timeline, and when it has the worker's sign of life, if there is one."""
        try:
            answer = await ask(self._question())
        except psycopg.Error:
            if connection.closed or not self._tells_timeline:
                raise
            # Managed servers may refuse the functions that speak of WAL. The other signs are left.
            self._tells_timeline = False
            answer = await ask(self._question())
        return msgspec.json.decode(answer or b"", type=tuple[int, str | None, float | None])

    def _question(self) -> bytes:
        session = b"NULL" if self._sign is None else b"%d" % self._sign[0]
        # Before a worker has a session nobody knows whether there is a schema.
        name = "which_copy" if self._sign is None else "which_copy_and_sign"
        tells = b"true" if self._tells_timeline else b"false"
        return statement(name, self.schema) % {b"tells_timeline": tells, b"session": session}

    def _change(self, number: int, timeline: str | None) -> str | None:
        if self._known is None:
            return None
        known, before = self._known
        if number != known:
            return "it is another database"
        if timeline and before and timeline != before:
            return f"its timeline is {timeline}, and was {before}: a server was promoted or recovered"
        return None

    async def _missing_lines(self, connection: TrioConnection[Any]) -> str | None:
        known = self.follower.known() if self.follower is not None else ()
        if not known:
            return None
        asked = fences([one.claim for one in known]) | {
            "lines": numbers([one.line for one in known]),
            "children": numbers([one.child for one in known]),
        }
        cursor = await connection.execute(statement("missing_lines", self.schema), asked)
        ((missing,),) = await cursor.fetchall()
        return None if missing is None else f"what job {missing} has written last is not in it"
