"""Counts a worker's jobs, at a cost that a drain of no-op jobs does not notice.

A job that ends appends its seconds to the list of its pair of queue and kind; a list becomes buckets when it is long, all of
it at once. The seconds of a job end with the next job's begin in the same task, which reads the clock anyway. How many have
started follows from how many have ended and how many run. Each claimed batch is looked at once, for the lists of its jobs and
for how long they waited; most often it takes two moments of a batch to know that. No lock, no event and no object for each job:
0.15 us together, beside 4 us that the worker's Python takes for a job without its database.
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
_NEAR = 0.1
"""Waits of one batch that differ by no more than this share count as their mean, if they fall into one bucket."""


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
        seconds, self.seconds = self.seconds, []
        self.ended["completed"] = self.ended.get("completed", 0) + len(seconds)
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
        pair: Pair | None = None
        queue = kind = ""
        queues: set[str] = set()
        for job in jobs:
            claim = job.claim
            # The claims of one statement share their texts (store/claimed.py).
            if claim.kind is not kind or claim.queue is not queue or pair is None:
                queue, kind = claim.queue, claim.kind
                pair = self._pairs.get((queue, kind)) or self._pair(queue, kind)
                queues.add(pair.queue)
                if len(pair.seconds) > _LONG:
                    pair.fold()
            job.pair = pair
            job.begun = -1.0
        if len(queues) == 1:
            self._waited(queues.pop(), [job.claim.run_at for job in jobs], now)
        else:
            for label in queues:
                self._waited(label, [job.claim.run_at for job in jobs if job.pair.queue == label], now)

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

    def _waited(self, queue: str, moments: list[str], now: float) -> None:
        """Jobs of a queue were due at these moments, and were claimed now.

        Reading a moment costs 0.4 us. So they are sorted, and only the first and the last are read; where these two are far
        apart, the same is done with each half.
        """
        moments.sort()
        at, waits = now + self._clock.epoch_offset, self._figures.histogram("pulse_job_wait_seconds", (queue,))
        parts = [(0, len(moments) - 1, _wait(moments[0], at), _wait(moments[-1], at))]
        while parts:
            first, last, longest, shortest = parts.pop()
            if waits.observe_between(longest, shortest, last - first + 1, near=_NEAR):
                continue
            middle = (first + last) // 2
            parts.append((first, middle, longest, _wait(moments[middle], at)))
            parts.append((middle + 1, last, _wait(moments[middle + 1], at), shortest))


def _wait(due: str, now: float) -> float:
    """For how many seconds a job has been due."""
    try:
        waited = now - datetime.fromisoformat(due).timestamp()
    except ValueError:
        # A moment that Python cannot hold, as -infinity: planted by hand.
        return 0.0
    return waited if 0 < waited < math.inf else 0.0
