"""Counts the queues for metrics, and notices those that fall behind: one process of the whole schema at a time.

A turn lasts a little longer than the time to the next sample, so that another process takes over when this one is gone. A
sample that took t seconds is not repeated for 1000 t, at least 5 s and at most a minute: scraped once a second, metrics cost
PostgreSQL less than a millisecond a scrape, however many jobs there are.

A sample that fails, for it takes too long, is tried again with fewer jobs. A process that fails with the fewest gives its turn
to another.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable, SchemaError
from ...observe import QueueBacklog, ScheduleLate
from ...store.figures import QueueFigure
from ..outage import rest_after
from .catalogue import QUEUES, SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ...observe import Observer
    from ...store.figures import Sample
    from .figures import Figures

logger = logging.getLogger("pulse_trio")
BACKLOG = 60.0
"""Seconds that a queue's oldest job may have been due before `QueueBacklog`."""
LATE = 60.0
"""Seconds that an occurrence may be late before `ScheduleLate`."""
_CALM = 0.5
"""Below this share of its threshold an alarm is over: a value around the threshold is reported once."""
_SOONEST, _LATEST, _SHARE = 5.0, 60.0, 1000
_MORE = 10.0
"""Seconds by which a turn is longer than the time to the next sample."""
_COUNTED, _ALL, _FEWEST = 10_000, 40_000, 100
"""Jobs counted in a queue, priority and state; in all of them together; and in a queue, priority and state at least."""
_QUICK = 0.012
"""Seconds: after a sample that took no longer, one that had to count fewer jobs counts more again."""
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
        self._holds = False
        """Whether it has the turn, as far as it knows."""
        self._most = self._bound = _COUNTED
        self._failed = False
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
                    # Others report what is wrong with the database.
                    pause = _LATEST
        except trio.ClosedResourceError:
            return  # the worker has ended
        finally:
            if self._holds:
                with trio.move_on_after(_GOODBYE, shield=True):
                    await self._give_back()

    def know(self, queues: Iterable[str]) -> None:
        """These queues, too, are shown even when they have no jobs."""
        self._queues.update(queues)

    async def _give_back(self) -> None:
        self._holds = False
        try:
            await self._store.take_turn(self._who, 0)
        except (DatabaseUnavailable, SchemaError, trio.ClosedResourceError):
            return  # it ends by itself

    async def _turn(self, before: float) -> float:
        """Returns the seconds until the next."""
        expected = max(before, _SOONEST)
        began = trio.current_time()
        mine = await self._store.take_turn(self._who, expected + _MORE)
        if mine is False or (mine is None and not self._holds):
            self._holds, self._sample = False, None
            self._backlogs.forget()
            self._late.forget()
            return _SOONEST
        self._holds = True
        counting = trio.current_time()
        try:
            self._sample = sample = await self._store.sample(self._most, SCHEDULES)
        except (DatabaseUnavailable, SchemaError) as error:
            return await self._count_fewer(error)
        took = trio.current_time() - counting
        pause = max(_SOONEST, rest_after(took, share=_SHARE, longest=_LATEST))
        if took <= _QUICK:
            self._bound = min(_COUNTED, 2 * self._bound)
        elif took > _LATEST / _SHARE:
            # The longest pause is too short for what this took.
            self._bound = max(_FEWEST, self._most // 2)
        self._most = max(_FEWEST, min(self._bound, _ALL // max(1, 2 * len(sample.queues))))
        if pause > expected:
            await self._store.take_turn(self._who, pause + _MORE)
        self._valid_until = began + pause + _MORE
        self._notice(sample)
        return pause

    async def _count_fewer(self, error: Exception) -> float:
        """A sample has failed. Returns the seconds until the next."""
        if not self._failed:
            self._failed = True
            logger.warning(
                "the queues could not be counted for metrics, QueueBacklog and ScheduleLate; this is tried again, and later "
                "failures are not logged: %s",
                error,
            )
        if self._most > _FEWEST:
            self._most = self._bound = max(_FEWEST, self._most // 4)
            return _MORE
        # Another process may be able to.
        await self._give_back()
        return _LATEST

    def tell(self, figures: Figures) -> None:
        """Adds what this process has counted, if it is its turn."""
        sample = self._sample
        if sample is None or trio.current_time() > self._valid_until:
            return
        # A queue that is missing is known to be empty only if all queues were counted.
        for queue in set[str]() if sample.cut_short else self._queues - {found.queue for found in sample.queues}:
            self._tell_queue(figures, QueueFigure(queue, 0, 0, 0, 0.0, False))
        for found in sample.queues:
            if found.queue not in self._queues and len(self._queues) < QUEUES:
                # Shown with 0 from now on: a series that ends when its queue is empty looks like a worker that is gone.
                self._queues.add(found.queue)
            if found.queue in self._queues:
                self._tell_queue(figures, found)
        figures.set("pulse_quarantined_jobs", sample.quarantined)
        for name, late in sample.late.items():
            figures.set("pulse_schedule_late_seconds", late, (name,))

    def _tell_queue(self, figures: Figures, found: QueueFigure) -> None:
        for state in ("available", "scheduled", "running", "suspended"):
            figures.set("pulse_queue_jobs", min(getattr(found, state), _COUNTED), (found.queue, state))
        figures.set("pulse_queue_oldest_seconds", found.oldest, (found.queue,))

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
