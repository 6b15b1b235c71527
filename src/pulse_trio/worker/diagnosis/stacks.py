"""Answers where the jobs of this worker are, when somebody asks (`pulse-trio stack`).

A notification says that there is a question; the questions to this worker's sessions are rows, read from the database. So a
forged notification costs one read, and the next waits a while. The answer is made here, on the loop, so that nothing moves
meanwhile. An answer that cannot be written is dropped: the asking program reports a silent worker, and may ask again.
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
    from collections.abc import Callable, Iterable, Sequence

    from ..jobs.running_job import RunningJob

StackAsked = tuple[int, int, int]
"""(request, session, job id)."""

_CUT = "\n... (there is more)"


class AnswerStore(Protocol):
    async def stack_questions(self, sessions: Sequence[int]) -> list[StackAsked]: ...

    async def answer_stack(self, request: int, session: int, answer: str) -> None: ...


class Stacks:
    """`held()` is everything this worker holds, `session()` the session it claims under; `stack_of(held)` is where a job is,
    empty if its handler has ended."""

    def __init__(
        self,
        store: AnswerStore,
        *,
        held: Callable[[], Iterable[RunningJob]],
        session: Callable[[], int],
        stack_of: Callable[[RunningJob], str],
    ) -> None:
        self._store = store
        self._held = held
        self._session = session
        self._stack_of = stack_of
        self._news = Signal()

    def heard(self) -> None:
        """A notification; the question may be to any worker."""
        self._news.give()

    async def run(self) -> None:
        """Answers until cancelled."""
        ration = Ration()
        while True:
            await self._news.wait()
            sessions = {held.claim.session for held in self._held()} | {self._session()}
            try:
                asked = await self._store.stack_questions(sorted(sessions))
                for request, session, job_id in asked:
                    await self._store.answer_stack(request, session, self._answer(session, job_id))
            except DatabaseUnavailable:
                # The settler says so: it has the same connection.
                continue
            ration.looked(found=bool(asked))
            await trio.sleep(ration.pause)

    def _answer(self, session: int, job_id: int) -> str:
        for held in self._held():
            if held.claim.id == job_id and held.claim.session == session:
                # With an outcome and no nursery nothing of it runs any more.
                ended = held.outcome is not None and held.scope_nursery is None
                return (
                    not ended and _capped(self._stack_of(held))
                ) or "its handler has ended; the report is on its way"
        return "the job has just ended, or is about to begin"


def _capped(text: str) -> str:
    """`text` as PostgreSQL takes it, in at most `LIMIT` bytes."""
    encoded = storable(text).encode()
    if len(encoded) <= LIMIT:
        return encoded.decode()
    return encoded[: LIMIT - len(_CUT)].decode(errors="ignore") + _CUT
