"""The time of one run of a durable handler, its children included: Trio's, and what durable waits have passed.

It moves on where nothing else can happen, which is where each of these jobs waits: to the soonest moment that one of them waits
for. So a parent's remembered deadline strikes over a child that sleeps for longer, as in production.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio
import trio.testing

from .rows import EPOCH

if TYPE_CHECKING:
    from collections.abc import Generator

    from .tree import MemoryTree

_GRACE, _VIRTUAL_GRACE = 2.0, 600.0
"""Seconds for which a job that waits leaves the time to those above it that run: what they wait for, in a plain await, may be
this one. On a virtual clock, where plain sleeps pass at once, they are as long as any of these may be."""


class JobsTime:
    """One job's part of it, with the `tree` of the attempt that it is in."""

    def __init__(self, of_tree: TimeOfTree, above: JobsTime | None = None) -> None:
        self.of_tree = of_tree
        self.tree: MemoryTree | None = None
        self._above: list[JobsTime] = [] if above is None else [above, *above._above]
        self._until: float | None = None

    @contextmanager
    def in_play(self) -> Generator[None]:
        """While the job lives."""
        self.of_tree.jobs.append(self)
        try:
            yield
        finally:
            self.of_tree.jobs.remove(self)
            self.of_tree.tell()

    @contextmanager
    def waiting(self, until: float) -> Generator[None]:
        """While it is suspended, until a moment at the latest."""
        self._until = until
        self.of_tree.tell()
        try:
            yield
        finally:
            self._until = None

    @property
    def level(self) -> int:
        """The job's in its tree."""
        return len(self._above) + 1

    @property
    def until(self) -> float:
        return math.inf if self._until is None else self._until

    @property
    def runs(self) -> bool:
        """Whether it runs, or goes on now."""
        return self._until is None or (self.tree is not None and self.tree.goes_on())

    async def passes(self, tree: MemoryTree) -> bool:
        """Lets time pass for the suspended job, or waits until something has changed. Returns False if nothing here changes
        anything for it."""
        changed, time = tree.changed, self.of_tree
        if running := [job for job in time.jobs if job.runs]:
            for_those_above = all(job in self._above for job in running)
            left = max(0.0, self.until - tree.now)
            with trio.move_on_after(min(left, _grace()) if for_those_above else left):
                await changed.wait()
                return True
            if not for_those_above or tree.goes_on():
                return True
        if (soonest := time.soonest) == math.inf:
            if not running and not tree.any_runs:
                return False
            await changed.wait()  # a child gives up before its parent, and while that runs it may cancel it
        elif soonest <= tree.now:
            await changed.wait()  # until it is cancelled
        else:
            time.pass_to(soonest)
        return True


class TimeOfTree:
    """`offset` is what Trio's clock lacks of it. `cancel_at` is the moment at which the first job is cancelled."""

    def __init__(self) -> None:
        self.offset = EPOCH
        self.cancel_at = math.inf
        self.jobs: list[JobsTime] = []

    @property
    def now(self) -> float:
        return trio.current_time() + self.offset

    @property
    def soonest(self) -> float:
        """The next moment that a job waits for."""
        return min([self.cancel_at, *(job.until for job in self.jobs)])

    def pass_to(self, moment: float) -> None:
        """Sets the clock of all jobs to that moment."""
        self.offset += max(0.0, moment - self.now)
        for job in self.jobs:
            if job.tree is not None:
                job.tree.set_clock(self.offset)
        self.tell()

    def tell(self) -> None:
        """Something has changed."""
        for job in self.jobs:
            if job.tree is not None:
                job.tree.tell()


def _grace() -> float:
    return _VIRTUAL_GRACE if isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock) else _GRACE
