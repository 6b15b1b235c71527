"""Clients' requests to a worker about the jobs that it runs: to cancel one, to show where one is.

A notification makes the worker look; these rows hold the requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ..jobs import CancelRequest
from ..sql import statement
from .arrays import fences, numbers
from .links import missing_privileges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..jobs import Claim
    from .links import Links

    Fence = tuple[int, int, int]


class Requests:
    """The open requests to running jobs."""

    def __init__(self, links: Links, schema: str) -> None:
        self._link = links.settles
        # Not behind reports: of a tree's children that are cancelled together, the last are asked for while the first end.
        self._asks = links.beats
        self._schema = schema

    async def requested(self, job_ids: Sequence[int]) -> dict[Fence, CancelRequest]:
        """Of these jobs, the running attempts whose cancellation was requested (id, attempt, session), each with why."""
        async with self._asks.using() as connection:
            cursor = await connection.execute(
                statement("cancel_requested", self._schema), {"ids": numbers(job_ids)}, prepare=True
            )
            return {(row[0], row[1], row[2]): CancelRequest(row[3], row[4]) for row in await cursor.fetchall()}

    async def running_fences(self, job_ids: Sequence[int]) -> set[Fence]:
        """The running attempts of these jobs, by id, attempt and session."""
        async with self._asks.using() as connection:
            cursor = await connection.execute(
                statement("running_fences", self._schema), {"ids": numbers(job_ids)}, prepare=True
            )
            return set(cast("list[Fence]", await cursor.fetchall()))

    async def record_delivered(self, claims: Sequence[Claim]) -> None:
        """Notes in the ledger that the cancellations of these jobs have reached their handlers."""
        parameters = fences(claims)
        del parameters["sessions"]
        async with self._link.using() as connection:
            await connection.execute(statement("cancel_delivered", self._schema), parameters, prepare=True)

    async def stack_questions(self, sessions: Sequence[int]) -> list[tuple[int, int, int]]:
        """The open questions to these sessions about where a job is: (request, session, job id)."""
        # A role whose grants are older than these functions may not call them, and its worker goes on. See: pulse-trio grants
        with missing_privileges("answer where a job is"):
            async with self._link.using() as connection:
                cursor = await connection.execute(
                    statement("stack_questions", self._schema), {"sessions": numbers(sessions)}
                )
                return cast("list[tuple[int, int, int]]", await cursor.fetchall())

    async def answer_stack(self, request: int, session: int, answer: str) -> None:
        """Answers the question where a job is; `answer` has at most 64 KiB."""
        parameters = {"request": request, "session": session, "answer": answer}
        with missing_privileges("answer where a job is"):
            async with self._link.using() as connection:
                await connection.execute(statement("stack_answer", self._schema), parameters)
