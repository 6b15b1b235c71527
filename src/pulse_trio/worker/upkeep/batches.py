"""Finishes batches: when the last job of a batch has ended, stores its counts and enqueues its callback job.

Any number of these may run, anywhere: the batch's row lock decides which one finishes it, in one transaction, so a worker that
dies in the middle leaves it to the next. Reports know nothing of batches; a batch costs a probe at each look while one of its
jobs is known to live.

After a batch was closed (a notification says so) this worker looks soon, at first after 50 ms, then less and less often, down
to every half second. A look that took t seconds is not repeated for 20 t; but the pause is never more than 5 s, because the
network may have been the slow part.

It also deletes finished batches, and progress, when their retention has passed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable
from ...ration import Ration
from ..outage import Outage, rest_after
from ..signal import Signal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...observe import Observer

SOON = 0.05
TICK = 0.5
IDLE = 2.0
"""Seconds between two looks: the first after a batch was closed, the longest while a closed batch has not finished, and while
there is none."""
_PRUNE_EVERY = 3600.0


class BatchStore(Protocol):
    async def finish_batches(self) -> Sequence[int] | None: ...

    async def prune_results(self, retention: float) -> None: ...


class Batches:
    """`retention` in seconds."""

    def __init__(self, store: BatchStore, *, retention: float, observer: Observer) -> None:
        self._store = store
        self._retention = retention
        self._outage = Outage("batches", observer, least=TICK)
        self._prune_at = trio.current_time()
        self._news = Signal()

    def heard(self) -> None:
        """Records a notification: a batch was closed."""
        self._news.give()

    async def run(self) -> None:
        """Finishes batches whose jobs have ended, until cancelled."""
        tick = TICK
        ration = Ration(SOON, free=2)
        told = False
        while True:
            began = trio.current_time()
            try:
                finished = await self._store.finish_batches()
                if trio.current_time() >= self._prune_at:
                    await self._store.prune_results(self._retention)
                    self._prune_at = trio.current_time() + _PRUNE_EVERY
            except DatabaseUnavailable as error:
                pause = self._outage.failed(error)
            else:
                self._outage.over()
                if told or finished:
                    ration.looked(found=bool(finished))
                least = IDLE if finished is None else tick
                tick = min(tick * 1.5, TICK)
                pause = 0 if finished else max(least, rest_after(trio.current_time() - began))
            told = False
            with trio.move_on_after(pause):
                await self._news.wait()
                # A batch's jobs run from now at the earliest; and forged notifications cost one look in this time, no more.
                tick, told = SOON, True
                await trio.sleep(max(SOON, ration.pause))

    async def finish(self) -> bool:
        """Looks once. Returns whether a batch has finished. Raises `DatabaseUnavailable`."""
        return bool(await self._store.finish_batches())
