"""The limits of the store in memory: one job after the other, each by the rules of claim_limited in migrations/."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import trio

from ...handlers import QueueLimits, Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .rows import MemoryJob


class MemoryLimits:
    def __init__(self) -> None:
        self.by_queue: dict[str, QueueLimits] = {}
        self.full_at: dict[tuple[str, str], float] = {}

    def of(self, queue: str) -> QueueLimits:
        return self.by_queue.get(queue, QueueLimits(queue))

    def limited(self, queue: str) -> bool:
        limits = self.of(queue)
        return limits.limit is not None or limits.rate is not None

    def choose(
        self, queue: str, jobs: Sequence[MemoryJob], limit: int, turns: str, *, skip: Callable[[MemoryJob], bool]
    ) -> tuple[list[MemoryJob], float | None, bool, str]:
        """What may start now, when another try may bring something, whether something due must wait, and the turns."""
        now = trio.current_time()
        limits = self.of(queue)
        after: dict[str, str] = json.loads(turns)
        chosen: list[MemoryJob] = []
        waits: list[float] = []
        blocked = False
        ours = [job for job in jobs if job.key is not None or self.limited(queue)]
        running = [job.key or "" for job in jobs if job.session]
        for priority in sorted({job.priority for job in ours}, reverse=True):
            waiting: dict[str, list[MemoryJob]] = {}
            for job in sorted(ours, key=lambda job: (job.run_at, job.id)):
                if job.priority == priority and not job.session and not skip(job):
                    waiting.setdefault(job.key or "", []).append(job)
            last = after.get(str(priority), "")
            keys = sorted(waiting, key=lambda key: (key <= last, key))
            while any(waiting.values()):
                for key in keys:
                    if not waiting[key]:
                        continue
                    job = waiting[key].pop(0)
                    if job.run_at > now:
                        waits.append(job.run_at - now)
                        waiting[key].clear()
                        continue
                    pause = self._pause(limits, job, running, now)
                    if len(chosen) >= limit or pause > 0:
                        blocked = True
                        waiting[key].clear()
                        waits.append(pause)
                        continue
                    self._take(limits, job, now)
                    running.append(key)
                    chosen.append(job)
                    after[str(priority)] = key
        soonest = 0.0 if chosen else min(waits, default=math.inf)
        return chosen, (soonest if soonest < math.inf else None), blocked, json.dumps(after)

    def _pause(self, limits: QueueLimits, job: MemoryJob, running: list[str], now: float) -> float:
        """Seconds until the job may start; infinity if that is when another ends."""
        key_limit, key_rate = self._of_key(limits, job)
        full = limits.limit is not None and len(running) >= limits.limit
        if full or (key_limit is not None and running.count(job.key or "") >= key_limit):
            return math.inf
        return max(self._until_token(limits.queue, "", limits.rate, now),
                   self._until_token(limits.queue, job.key or "", key_rate, now))  # fmt: skip

    def _until_token(self, queue: str, key: str, rate: Rate | None, now: float) -> float:
        if rate is None:
            return 0.0
        each = rate.seconds / rate.starts
        missing = max(0.0, self.full_at.get((queue, key), now) - now)
        pause = missing - (rate.starts - 1) * each
        return pause if pause > 1e-9 else 0.0

    def _take(self, limits: QueueLimits, job: MemoryJob, now: float) -> None:
        for key, rate in (("", limits.rate), (job.key or "", self._of_key(limits, job)[1])):
            if rate is not None:
                place = (limits.queue, key)
                self.full_at[place] = max(self.full_at.get(place, now), now) + rate.seconds / rate.starts

    def _of_key(self, limits: QueueLimits, job: MemoryJob) -> tuple[int | None, Rate | None]:
        if job.key is None:
            return None, None
        own = json.loads(job.options or "{}")
        rate = Rate(*own["rate"]) if "rate" in own else limits.key_rate
        return own.get("limit", limits.key_limit), rate
