"""Receives the events that this worker's running jobs wait for: those of many jobs in one statement.

A notification `look_for_tree ID` is the reason to ask at once. Each wait asks once a second as well, because a notification
may be lost.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable
from ..outage import Outage
from ..signal import Signal
from .history import while_proven

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...observe import Observer
    from ...store.waits import Received, Wanted
    from ..jobs.running_job import RunningJob

_BATCH = 200
"""Waits in one statement."""
_LOCKED_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
"""Seconds until a wait is asked for again whose job's row, or event, another transaction has locked; doubled each time."""


class WaitStore(Protocol):
    async def receive(self, wanted: Sequence[Wanted]) -> Mapping[tuple[int, int], Received]: ...


class _Question:
    """One wait that asks whether its event is there."""

    __slots__ = ("answer", "answered", "wanted")

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.answered = trio.Event()
        self.answer: Received | None = None


class Receiver:
    """One for each worker."""

    def __init__(self, store: WaitStore, observer: Observer) -> None:
        self._store = store
        self._outage = Outage("events", observer)
        self._questions: list[_Question] = []
        self._work = Signal()
        self._news: dict[int, list[trio.Event]] = {}
        """By job: set when something was sent to it."""

    def heard(self, job_id: int) -> None:
        """A notification: that job may have been sent an event, or something has happened to a child of it."""
        for news in self._news.pop(job_id, ()):
            news.set()

    def news_of(self, job_id: int) -> trio.Event:
        """An event that is set when there is a reason to ask again. Pass it to `forget`."""
        news = trio.Event()
        self._news.setdefault(job_id, []).append(news)
        return news

    def forget(self, job_id: int, news: trio.Event) -> None:
        """That wait is over."""
        waiting = self._news.get(job_id)
        if waiting is not None and news in waiting:
            waiting.remove(news)
            if not waiting:
                del self._news[job_id]

    async def receive(self, wanted: Wanted, running: RunningJob) -> Received | None:
        """The event if it is there, or what the database says that refuses its line; None if it is not there. Asks again while
        the job's row or the event's is locked. A cancellation waits for the answer as long as the lease is proven, because the
        line may be written."""
        pause = _LOCKED_PAUSE
        while True:
            question = _Question(wanted)
            self._questions.append(question)
            self._work.give()
            await while_proven(running, question.answered)
            if question.answer is None or question.answer.payload is not None or question.answer.refused is not None:
                return question.answer
            if trio.current_effective_deadline() == -math.inf or running.cancel_reason == "fence-lost":
                return None  # nothing is written, and the caller is cancelled, or in a shield
            with trio.CancelScope(shield=True):
                await trio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _next(self) -> set[_Question]:
        """One for each job: of two attempts of a job, one of which has lost its lease and stands in a shield, both ask for the
        same line, and the answer of the other would be taken for its own."""
        first: dict[int, _Question] = {}
        for question in self._questions[:_BATCH]:
            first.setdefault(question.wanted.claim.id, question)
        return set(first.values())

    async def run(self) -> None:
        """Asks until cancelled."""
        while True:
            await self._work.wait()
            while batch := self._next():
                try:
                    found = await self._store.receive([question.wanted for question in batch])
                except DatabaseUnavailable as error:
                    await trio.sleep(self._outage.failed(error))
                    continue
                self._outage.over()
                self._questions = [question for question in self._questions if question not in batch]
                for question in batch:
                    question.answer = found.get((question.wanted.claim.id, question.wanted.line))
                    question.answered.set()
