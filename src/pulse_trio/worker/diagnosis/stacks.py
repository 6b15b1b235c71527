"""Answers a client's question (`pulse-trio stack`) where a job of this worker is.

A notification says that there is a question; the questions themselves are rows, which the worker reads for its sessions. So a
forged notification costs one read, and the next one has to wait. The answer is made here, on the loop, so that no task moves
meanwhile. If the database does not answer, the worker looks once more, because a connection that was idle when the server
restarted fails at its next use. An answer that cannot be written then is dropped: the client reports a silent worker, and may
ask again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable
from ...ration import Ration
from ...states import storable
from ..signal import Signal
from .stack import LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..jobs.job_table import JobTable
    from ..jobs.kinds.calls import Calls

StackAsked = tuple[int, int, int]
"""(request, session, job id)."""

_CUT = "\n... (there is more)"


class OwnSession(Protocol):
    @property
    def current(self) -> int:
        """The session that this worker claims under."""
        ...


class Questions(Protocol):
    async def stack_questions(self, sessions: Sequence[int]) -> list[StackAsked]: ...

    async def answer_stack(self, request: int, session: int, answer: str) -> None: ...


class AnswerStore(Protocol):
    @property
    def sessions(self) -> OwnSession: ...

    @property
    def requests(self) -> Questions: ...


class Stacks:
    """Answers the questions to one worker."""

    def __init__(self, store: AnswerStore, jobs: JobTable, calls: Calls) -> None:
        self._store = store
        self._jobs = jobs
        self._calls = calls
        self._news = Signal()

    def heard(self) -> None:
        """Records a notification; the question may be to any worker."""
        self._news.give()

    async def run(self) -> None:
        """Answers until cancelled."""
        ration = Ration()
        while True:
            await self._news.wait()
            try:
                try:
                    found = await self._look()
                except DatabaseUnavailable:
                    found = await self._look()
            except DatabaseUnavailable:
                # `Reports` uses the same connection and reports the outage.
                continue
            ration.looked(found=found)
            await trio.sleep(ration.pause)

    async def _look(self) -> bool:
        """Answers the open questions. Returns whether there were any."""
        sessions = {job.claim.session for job in self._jobs.held} | {self._store.sessions.current}
        asked = await self._store.requests.stack_questions(sorted(sessions))
        for request, session, job_id in asked:
            await self._store.requests.answer_stack(request, session, self._answer(session, job_id))
        return bool(asked)

    def _answer(self, session: int, job_id: int) -> str:
        for job in self._jobs.held:
            if job.claim.id == job_id and job.claim.session == session:
                if job.task is None:
                    return "its handler has not begun: others of its batch come first"
                # A job with an outcome and without a nursery no longer runs.
                ended = job.outcome is not None and job.scope_nursery is None
                return (
                    not ended and _capped(self._calls.where_is(job))
                ) or "its handler has ended; the report is on its way"
        return "the job has just ended, or is about to begin"


def _capped(text: str) -> str:
    """`text` as PostgreSQL takes it, in at most `LIMIT` bytes."""
    encoded = storable(text).encode()
    if len(encoded) <= LIMIT:
        return encoded.decode()
    return encoded[: LIMIT - len(_CUT)].decode(errors="ignore") + _CUT
