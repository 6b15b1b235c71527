"""Counts the queues for metrics, and notices those that fall behind: one process of the whole schema at a time.

A turn lasts a little longer than the time to the next sample, so that another process takes over when this one is gone. A
sample that took t seconds is not repeated for 1000 t, at least 5 s and at most a minute: scraped once a second, metrics cost
PostgreSQL less than a millisecond a scrape, however many jobs there are.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable, SchemaError
from ...observe import QueueBacklog, ScheduleLate
from ..outage import rest_after
from .catalogue import QUEUES, SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ...observe import Observer
    from ...store.figures import Sample
    from .figures import Figures

BACKLOG = 60.0
"""Seconds that a queue's oldest job may have been due before `QueueBacklog`."""
LATE = 60.0
"""Seconds that an occurrence may be late before `ScheduleLate`."""
_CALM = 0.5
"""Below this share of its threshold an alarm is over: a value around the threshold is reported once."""
_SOONEST, _LATEST, _SHARE = 5.0, 60.0, 1000
_MORE = 10.0
"""Seconds by which a turn is longer than the time to the next sample."""
_COUNTED, _ALL = 10_000, 40_000
"""Jobs counted in a queue, priority and state, and in all of them together."""
_GOODBYE = 1.0


class FiguresStore(Protocol):
    async def take_turn(self, who: int, seconds: float) -> bool | None: ...

    async def sample(self, most: int, schedules: int) -> Sample: ...


class Sampler:
    """`queues` are shown even when they have no jobs."""

    def __init__(self, store: FiguresStore, observer: Observer, queues: Collection[str] = ()) -> None:
        self._store = store
        self._observer = observer
        self._queues = set(queues)
        self._who = secrets.randbits(62) + 1
        self._sample: Sample | None = None
        self._valid_until = 0.0
        self._most = _COUNTED
        self._backlogs, self._late = Alarm(BACKLOG), Alarm(LATE)

    async def run(self) -> None:
        """Samples until cancelled, when it is this process's turn."""
        pause = 0.0
        try:
            while True:
                await trio.sleep(pause)
                try:
                    pause = await self._turn(pause)
                except (DatabaseUnavailable, SchemaError):
                    # Others report what is wrong with the database; a count that takes too long is tried again later.
                    pause = _LATEST
        except trio.ClosedResourceError:
            return  # the worker has ended
        finally:
            if self._sample is not None:
                with trio.move_on_after(_GOODBYE, shield=True):
                    await self._give_back()

    async def _give_back(self) -> None:
        try:
            await self._store.take_turn(self._who, 0)
        except (DatabaseUnavailable, SchemaError, trio.ClosedResourceError):
            return  # it ends by itself

    async def _turn(self, before: float) -> float:
        """Returns the seconds until the next."""
        expected = max(before, _SOONEST)
        began = trio.current_time()
        mine = await self._store.take_turn(self._who, expected + _MORE)
        if mine is False or (mine is None and self._sample is None):
            self._sample = None
            self._backlogs.forget()
            self._late.forget()
            return _SOONEST
        counting = trio.current_time()
        self._sample = sample = await self._store.sample(self._most, SCHEDULES)
        pause = max(_SOONEST, rest_after(trio.current_time() - counting, share=_SHARE, longest=_LATEST))
        self._most = max(100, min(_COUNTED, _ALL // max(1, 2 * len(sample.queues))))
        if pause > expected:
            await self._store.take_turn(self._who, pause + _MORE)
        self._valid_until = began + pause + _MORE
        self._notice(sample)
        return pause

    def tell(self, figures: Figures) -> None:
        """Adds what this process has counted, if it is its turn."""
        sample = self._sample
        if sample is None or trio.current_time() > self._valid_until:
            return
        for queue in self._queues - {found.queue for found in sample.queues}:
            self._tell_queue(figures, queue, 0, 0, 0, 0.0)
        for found in sample.queues:
            if found.queue not in self._queues and len(self._queues) < QUEUES:
                # Shown with 0 from now on: a series that ends when its queue is empty looks like a worker that is gone.
                self._queues.add(found.queue)
            if found.queue in self._queues:
                self._tell_queue(figures, found.queue, found.available, found.scheduled, found.running, found.oldest)
        figures.set("pulse_quarantined_jobs", sample.quarantined)
        for name, late in sample.late.items():
            figures.set("pulse_schedule_late_seconds", late, (name,))

    def _tell_queue(
        self, figures: Figures, queue: str, available: int, scheduled: int, running: int, oldest: float
    ) -> None:
        for state, number in (("available", available), ("scheduled", scheduled), ("running", running)):
            figures.set("pulse_queue_jobs", min(number, _COUNTED), (queue, state))
        figures.set("pulse_queue_oldest_seconds", oldest, (queue,))

    def _notice(self, sample: Sample) -> None:
        waiting = {found.queue: found for found in sample.queues if not found.paused}
        for queue in self._backlogs.crossed({name: found.oldest for name, found in waiting.items()}):
            self._observer.emit(QueueBacklog(queue, min(waiting[queue].available, _COUNTED), waiting[queue].oldest))
        for name in self._late.crossed(sample.late):
            self._observer.emit(ScheduleLate(name, sample.late[name]))


class Alarm:
    """Says once what has reached a threshold, and again when it has been below half of it in between."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._told: set[str] = set()

    def crossed(self, values: Mapping[str, float]) -> list[str]:
        """The names whose values have reached the threshold now."""
        self._told = {name for name in self._told if values.get(name, 0) >= self._threshold * _CALM}
        new = [name for name, value in values.items() if value >= self._threshold and name not in self._told]
        self._told.update(new)
        return new

    def forget(self) -> None:
        """Another process watches from now on."""
        self._told.clear()
