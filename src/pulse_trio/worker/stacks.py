"""Answers where the jobs of this worker are, when somebody asks (`pulse-trio stack`).

The question comes by notification, and a text is the answer: made here, on the loop, so that nothing moves meanwhile. An
answer that cannot be written is dropped: whoever asked is told that the worker is silent, and asks again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..errors import DatabaseUnavailable
from ..states import storable
from .signal import Signal
from .stack import LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .held import Held

StackAsked = tuple[int, int, int]
"""(session, request, job id)."""

_CUT = "\n... (there is more)"


class AnswerStore(Protocol):
    async def answer_stack(self, request: int, session: int, answer: str) -> None: ...


class Stacks:
    """`held()` is everything this worker holds, `session()` the session it claims under; `stack_of(held)` is where a job is,
    empty if its handler has ended."""

    def __init__(
        self,
        store: AnswerStore,
        *,
        held: Callable[[], Iterable[Held]],
        session: Callable[[], int],
        stack_of: Callable[[Held], str],
    ) -> None:
        self._store = store
        self._held = held
        self._session = session
        self._stack_of = stack_of
        self._heard: list[StackAsked] = []
        self._news = Signal()

    def heard(self, asked: StackAsked) -> None:
        """A notification; the job may be any worker's."""
        self._heard.append(asked)
        self._news.give()

    async def run(self) -> None:
        """Answers until cancelled."""
        while True:
            await self._news.wait()
            while self._heard:
                session, request, job_id = self._heard.pop(0)
                if (answer := self._answer(session, job_id)) is None:
                    continue
                try:
                    await self._store.answer_stack(request, session, answer)
                except DatabaseUnavailable:
                    # The settler says so: it has the same connection.
                    continue

    def _answer(self, session: int, job_id: int) -> str | None:
        """What is to be said of a job; None if it is another worker's."""
        for held in self._held():
            if held.claim.id == job_id and held.claim.session == session:
                # With an outcome and no nursery nothing of it runs any more.
                ended = held.outcome is not None and held.scope_nursery is None
                return (
                    not ended and _capped(self._stack_of(held))
                ) or "its handler has ended; the report is on its way"
        if session == self._session():
            return "the job has just ended, or is about to begin"
        return None


def _capped(text: str) -> str:
    """`text` as PostgreSQL takes it, in at most `LIMIT` bytes."""
    encoded = storable(text).encode()
    if len(encoded) <= LIMIT:
        return encoded.decode()
    return encoded[: LIMIT - len(_CUT)].decode(errors="ignore") + _CUT
