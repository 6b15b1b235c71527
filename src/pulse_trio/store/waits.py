"""What running durable jobs wait for: events, received under their fences, those of many jobs in one statement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..sql import statement
from .arrays import numbers, texts
from .rows import each_alone

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

    from ..jobs import Claim
    from ..postgres import TrioConnection
    from .links import WorkerLink


class Wanted(NamedTuple):
    """The next event of a name, which becomes the line `line` of the job's history, under a call's `key`."""

    claim: Claim
    line: int
    key: str
    name: str


class Received(NamedTuple):
    """An event's payload as it was sent; None: the job's lease is lost, its row or the event's is locked for a moment, or the
    database refuses the line of that event, with what it says (`refused`)."""

    payload: str | None
    refused: str | None = None


class Waits:
    """Uses the connection of the histories: an event that is received is a line."""

    def __init__(self, link: WorkerLink, schema: str) -> None:
        self._link = link
        self._schema = schema

    async def receive(self, wanted: Sequence[Wanted]) -> dict[tuple[int, int], Received]:
        """What is there, by job and line; a wait whose event is not there is left out.

        Raises `DatabaseUnavailable`: ask again, with the same lines, because they may be written.
        """
        async with self._link.using() as connection:

            async def receive(some: Sequence[Wanted]) -> dict[tuple[int, int], Received]:
                return await self._receive(connection, some)

            async def alone(one: Wanted, error: psycopg.Error) -> dict[tuple[int, int], Received]:
                # A trigger of the owner's, or an event that no function of the schema has written, too long for a line.
                said = error.diag.message_primary or str(error)
                return {(one.claim.id, one.line): Received(None, said)}

            parts = await each_alone(wanted, receive, alone)
        return {one: received for part in parts for one, received in part.items()}

    async def _receive(
        self, connection: TrioConnection[Any], some: Sequence[Wanted]
    ) -> dict[tuple[int, int], Received]:
        cursor = await connection.execute(
            statement("receive_events", self._schema),
            {
                "ids": numbers([one.claim.id for one in some]),
                "attempts": numbers([one.claim.attempt for one in some]),
                "sessions": numbers([one.claim.session for one in some]),
                "lines": numbers([one.line for one in some]),
                "keys": texts([one.key for one in some]),
                "names": texts([one.name for one in some]),
            },
            prepare=True,
        )
        rows: list[Any] = await cursor.fetchall()
        return {(job_id, line): Received(payload if held else None) for job_id, line, held, payload in rows}
