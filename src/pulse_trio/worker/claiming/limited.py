"""Which queues with limits or keys are worth a claim, and when.

A claim from such a queue is a statement of its own (`claim_limited`), and while a limit is full it brings nothing. So the
worker tries it when a sweep finds the queue and something may have changed: a job of the queue ended here, a producer notified,
a token is due, or a second has passed (a job may have ended elsewhere).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..outage import rest_after

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...store import Limited

_ELSEWHERE = 1.0
"""Seconds until a queue whose limit is full is tried again, because jobs may have ended on other workers."""
_VAIN_LOOKS = 50
"""A queue with more keys than one look covers gets a twentieth of the time after this many fruitless looks in a row."""
_SOON = 0.02
"""A pause that is shorter is no date of a job or of a token: the answer asks for another look."""
_LONGEST_CLAIM = 0.02
"""Another worker that is at its claim is waited for no longer than this, however long the last claim here took."""
_KNOWN = 1000
"""While sweeps do not reach all queues, the worker remembers at most this many between two sweeps."""


@dataclass(slots=True)
class _Queue:
    turns: str = "{}"
    try_at: float = -math.inf
    """When the queue is worth a claim even if nothing else happens, on Trio's clock."""
    not_before: float = -math.inf
    """A sweep that finds this queue does not cause a claim before this time."""
    took: float = 0.0
    """Seconds that the last claim took which brought jobs."""
    vain: int = 0
    """Fruitless looks since a job last started, ended or arrived."""
    soon: bool = False
    """Whether another worker was at its claim at the last try: a try before `try_at`, within 20 ms, would be in vain too."""
    told: bool = False
    """Whether a job of it has ended or arrived since the claim was sent that is under way, or since the last one."""
    idle: bool = False
    """Whether it was tried since it was last found or told of, and none of its jobs was due, though one may be later."""


class LimitedQueues:
    """The queues with limits or keys that this worker may claim from."""

    def __init__(self, queues: Sequence[str] | None) -> None:
        self._listed = {queue: place for place, queue in enumerate(queues)} if queues is not None else None
        self._queues: dict[str, _Queue] = {}
        self._last_tried = ""

    def __len__(self) -> int:
        return len(self._queues)

    def __contains__(self, queue: str) -> bool:
        return queue in self._queues

    @property
    def listed(self) -> list[str] | None:
        """The worker's queues, with limits or without; None for every queue."""
        return None if self._listed is None else list(self._listed)

    @property
    def nothing_due(self) -> bool:
        """Whether every queue was tried since the last sweep, and none had a due job that has to wait."""
        return all(queue.idle for queue in self._queues.values())

    @property
    def next_try(self) -> float:
        """When the next queue is worth a claim, on Trio's clock; infinity if none is."""
        return min((queue.try_at for queue in self._queues.values()), default=math.inf)

    def swept(self, found: Sequence[str], *, whole: bool = True) -> None:
        """Takes a sweep's findings. An incomplete sweep proves nothing about queues it did not report. Keep those that still
        have a try planned."""
        kept = [] if whole else [name for name, queue in self._queues.items() if queue.try_at < math.inf][:_KNOWN]
        self._queues = {name: self._queues.get(name) or _Queue() for name in dict.fromkeys([*kept, *found])}
        for name in found:
            queue = self._queues[name]
            queue.try_at = min(queue.try_at, queue.not_before)
            queue.idle = False

    def told(self, name: str) -> None:
        """Records that a job of that queue ended or arrived: the queue is worth a claim now."""
        if (queue := self._queues.get(name)) is not None:
            queue.vain = 0
            queue.idle, queue.told = False, True
            if not queue.soon:
                queue.try_at = -math.inf

    def told_of_all(self) -> None:
        """Records that jobs were rescued: their limits may have room."""
        for name in self._queues:
            self.told(name)

    def ready(self, now: float) -> list[str]:
        """The queues worth a claim now, in the listed order; without one they alternate, so that none always comes before the
        others."""
        ready = [name for name, queue in self._queues.items() if queue.try_at <= now]
        if self._listed is not None:
            listed = self._listed
            return sorted(ready, key=lambda name: listed.get(name, math.inf))
        return sorted(ready, key=lambda name: (name <= self._last_tried, name))

    def turns(self, name: str) -> str:
        """The state of the turns in that queue, for the claim that is sent now."""
        self._queues[name].told = False
        return self._queues[name].turns

    def claimed(self, name: str, answer: Limited, began: float, now: float) -> None:
        """Takes the answer to a claim that was sent at `began`."""
        queue = self._queues[name]
        queue.turns = answer.turns
        if answer.claims:
            queue.vain, queue.took = 0, now - began
        else:
            queue.vain += 1
        pause = self._pause(queue, answer, now - began)
        queue.try_at = now + pause
        queue.idle = not answer.claims and not answer.blocked and pause >= _SOON
        queue.soon = answer.blocked and not answer.claims and 0 < pause <= _LONGEST_CLAIM
        queue.not_before = now + (_ELSEWHERE if answer.blocked else rest_after(now - began))
        if queue.told and not answer.claims and not queue.soon:
            # The answer may not know of it: a burst looks as its last job ends, while that is being written.
            queue.try_at, queue.idle = -math.inf, False
        self._last_tried = name

    def refused(self, name: str, until: float) -> None:
        """Records that the database refused a claim: a sweep after `until`, on Trio's clock, makes the queue worth another."""
        queue = self._queues[name]
        queue.try_at = math.inf
        queue.not_before = until
        queue.soon, queue.idle = False, True
        self._last_tried = name

    def _pause(self, queue: _Queue, answer: Limited, cost: float) -> float:
        if answer.again_in is None:
            return math.inf
        if answer.claims or answer.again_in >= _SOON:
            return answer.again_in
        # Another worker was claiming from it, or it has more keys than one look covers. Such looks take at most a fifth of the
        # time, and there is one for each claim of another, of which each takes as long as those here: looking every 5 ms, of
        # four workers each found the others at work four to seven times for each claim that brought jobs.
        if queue.vain <= _VAIN_LOOKS:
            # PostgreSQL held the claim until the other's end, or for as long as it may: the next one takes its place there.
            if answer.waited:
                return 0.0
            return max(answer.again_in, rest_after(cost, share=4), min(queue.took, _LONGEST_CLAIM))
        return max(answer.again_in, rest_after(cost, longest=_ELSEWHERE))
