"""What running durable jobs wait for: events, received under their fences, those of many jobs in one statement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..sql import statement
from .arrays import numbers, texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..jobs import Claim
    from .links import WorkerLink


class Wanted(NamedTuple):
    """The next event of a name, which becomes the line `line` of the job's history, under a call's `key`."""

    claim: Claim
    line: int
    key: str
    name: str


class Received(NamedTuple):
    """An event's payload as it was sent; None: the job's lease is lost, or its row is locked for a moment."""

    payload: str | None


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
            cursor = await connection.execute(
                statement("receive_events", self._schema),
                {
                    "ids": numbers([one.claim.id for one in wanted]),
                    "attempts": numbers([one.claim.attempt for one in wanted]),
                    "sessions": numbers([one.claim.session for one in wanted]),
                    "lines": numbers([one.line for one in wanted]),
                    "keys": texts([one.key for one in wanted]),
                    "names": texts([one.name for one in wanted]),
                },
                prepare=True,
            )
            rows: list[Any] = await cursor.fetchall()
        return {(job_id, line): Received(payload if held else None) for job_id, line, held, payload in rows}
