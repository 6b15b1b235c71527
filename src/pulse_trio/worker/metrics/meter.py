"""Counts a worker's jobs, at a cost that a drain of no-op jobs does not notice.

A job that ends appends its seconds to the list of its pair of queue and kind; a list becomes buckets when it is long, at one
sort for all of it. How many have started follows from how many have ended and how many run. Each claimed batch is looked at
once, for the lists of its jobs and for how long they waited; jobs that were enqueued together share one moment, which is read
once. No lock, no event and no object for each job.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import TYPE_CHECKING

from .catalogue import OTHER, PAIRS, QUEUES
from .figures import Figures

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ...jobs import Outcome
    from ..jobs.common import DatabaseClock, RunningJob
    from .figures import Histogram

_LONG = 512
"""Seconds of ended jobs that wait to become buckets."""


class Pair:
    """The ended attempts of one queue and kind, as their labels are."""

    __slots__ = ("ended", "kind", "queue", "runs", "seconds")

    def __init__(self, queue: str, kind: str, runs: Histogram) -> None:
        self.queue = queue
        self.kind = kind
        self.runs = runs
        self.seconds: list[float] = []
        """Of completed attempts that are in no bucket yet."""
        self.ended: dict[str, int] = {}
        """How many by outcome, but for the completed ones in `seconds`."""

    def fold(self) -> None:
        """Puts what waits into buckets."""
        seconds, self.ended["completed"] = self.seconds[:], self.ended.get("completed", 0) + len(self.seconds)
        # Emptied, not replaced: running jobs know this very list.
        self.seconds.clear()
        self.runs.observe_all(seconds)


class JobMeter:
    """Counts the jobs of one worker. `kinds` are those of its handlers, `queues` those that it serves or declares."""

    def __init__(self, kinds: Collection[str], queues: Collection[str], clock: DatabaseClock) -> None:
        self._kinds = frozenset(kinds)
        self._own = frozenset(queues)
        self._queues = set(queues)
        self._room = len(self._queues) + QUEUES
        self._clock = clock
        self._figures = Figures()
        self._pairs: dict[tuple[str, str], Pair] = {}
        self._labelled: dict[tuple[str, str], Pair] = {}

    def accepted(self, jobs: Sequence[RunningJob], now: float) -> None:
        """A claim has brought these jobs. `now` is Trio's clock."""
        due: str | None = None
        pair: Pair | None = None
        queue = kind = ""
        wait, times = 0.0, 0
        for job in jobs:
            claim = job.claim
            if pair is None or claim.kind != kind or claim.queue != queue:
                if pair is not None and times:
                    self._waited(pair, wait, times)
                    times = 0
                queue, kind = claim.queue, claim.kind
                pair = self._pairs.get((queue, kind)) or self._pair(queue, kind)
                if len(pair.seconds) > _LONG:
                    pair.fold()
            job.pair = pair
            job.begun = -1.0
            if claim.run_at != due:
                if times:
                    self._waited(pair, wait, times)
                    times = 0
                due = claim.run_at
                wait = self._wait(due, now)
            times += 1
        if pair is not None and times:
            self._waited(pair, wait, times)

    def ended(self, job: RunningJob, outcome: Outcome | None, now: float) -> None:
        """An attempt has ended that is not simply completed."""
        pair, kind = job.pair, outcome.kind if outcome is not None else "lost"
        pair.ended[kind] = pair.ended.get(kind, 0) + 1
        if job.begun >= 0:
            pair.runs.observe(now - job.begun)

    def figures(self, jobs: Iterable[RunningJob]) -> Figures:
        """All that was counted, and the `jobs` that run now."""
        figures, running = self._figures, dict.fromkeys(self._queues, 0)
        started: dict[Pair, int] = {}
        for job in jobs:
            if not job.ended and job.begun >= 0:
                running[job.pair.queue] = running.get(job.pair.queue, 0) + 1
                started[job.pair] = started.get(job.pair, 0) + 1
        figures.values["pulse_jobs_running"] = {(queue,): number for queue, number in running.items()}
        for pair in self._labelled.values():
            pair.fold()
            labels = (pair.queue, pair.kind)
            figures.set("pulse_jobs_started_total", pair.runs.count + started.get(pair, 0), labels)
            for outcome, number in pair.ended.items():
                if number:
                    figures.set("pulse_jobs_ended_total", number, (*labels, outcome))
        return figures

    def _pair(self, queue: str, kind: str) -> Pair:
        """The pair of a queue and a kind that were not met together before."""
        labels = (self._label_of(queue), kind if kind in self._kinds else OTHER)
        # The worker's own pairs are as many as its code has; names that producers made up take nothing from them.
        own = queue in self._own and kind in self._kinds
        if not own and labels not in self._labelled and self._foreign() >= PAIRS:
            labels = (OTHER, OTHER)
        pair = self._labelled.get(labels)
        if pair is None:
            pair = self._labelled[labels] = Pair(*labels, self._figures.histogram("pulse_job_run_seconds", labels))
        if len(self._pairs) < 4 * PAIRS:
            # Beyond that, a pair is looked up again each time: its names are a producer's, and may be without end.
            self._pairs[queue, kind] = pair
        return pair

    def _foreign(self) -> int:
        return sum(pair.queue not in self._own or pair.kind == OTHER for pair in self._labelled.values())

    def _label_of(self, queue: str) -> str:
        if queue not in self._queues and len(self._queues) >= self._room:
            return OTHER
        self._queues.add(queue)
        return queue

    def _waited(self, pair: Pair, wait: float, times: int) -> None:
        self._figures.histogram("pulse_job_wait_seconds", (pair.queue,)).observe(wait, times)

    def _wait(self, due: str, now: float) -> float:
        """For how many seconds a job has been due."""
        try:
            moment = datetime.fromisoformat(due).timestamp()
        except ValueError:
            # A moment that Python cannot hold, as -infinity: planted by hand.
            return 0.0
        waited = now + self._clock.epoch_offset - moment
        return waited if 0 < waited < math.inf else 0.0
