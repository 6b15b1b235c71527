"""Which queues with limits or keys are worth a claim, and when.

A claim from such a queue is a statement of its own (`claim_limited`), and while a limit is full it brings nothing. So it is
tried when a sweep finds the queue and something may have changed: a job of it ended here, a producer told of one, a token
is due, or a second has passed (then a job may have ended elsewhere).
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
"""Seconds until a queue whose limit is full is tried again, for what may have ended on other workers."""
_VAIN_LOOKS = 50
"""Looks in a row that may bring nothing before a queue with more keys than one look takes in gets a twentieth of the time."""
_SOON = 0.02
_KNOWN = 1000
"""Queues that are kept in mind between sweeps that do not reach all of them, at most."""


@dataclass(slots=True)
class _Queue:
    turns: str = "{}"
    try_at: float = -math.inf
    """When it is worth a claim, whatever else happens; on Trio's clock."""
    not_before: float = -math.inf
    """Before this a sweep does not make it worth one."""
    vain: int = 0
    """Looks that brought nothing since a job started, ended or arrived."""
    blocked: bool = False
    """Whether a due job had to wait when it was last tried."""


class LimitedQueues:
    """The queues with limits or keys that this worker may claim from."""

    def __init__(self, queues: Sequence[str] | None) -> None:
        self._listed = {queue: place for place, queue in enumerate(queues)} if queues is not None else None
        self._queues: dict[str, _Queue] = {}
        self._last_tried = ""

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __contains__(self, queue: str) -> bool:
        return queue in self._queues

    @property
    def nothing_due(self) -> bool:
        """Whether every queue was tried since the last sweep, and none had a due job that must wait."""
        return all(queue.try_at == math.inf and not queue.blocked for queue in self._queues.values())

    @property
    def next_try(self) -> float:
        """When the next queue is worth a claim, on Trio's clock; infinity if none is known to be."""
        return min((queue.try_at for queue in self._queues.values()), default=math.inf)

    def swept(self, found: Sequence[str], *, whole: bool = True) -> None:
        """Takes a sweep's findings. One that did not reach every queue says nothing of those it did not find: what was not
        tried since it was found, or is to be tried at some moment, stays."""
        kept = [] if whole else [name for name, queue in self._queues.items() if queue.try_at < math.inf][:_KNOWN]
        self._queues = {name: self._queues.get(name) or _Queue() for name in dict.fromkeys([*kept, *found])}
        for name in found:
            queue = self._queues[name]
            queue.try_at = min(queue.try_at, queue.not_before)

    def told(self, name: str) -> None:
        """A job of that queue ended or arrived: it is worth a claim at once."""
        if (queue := self._queues.get(name)) is not None:
            queue.try_at = -math.inf
            queue.vain = 0

    def told_of_all(self) -> None:
        """Jobs were rescued: what they held is free."""
        for name in self._queues:
            self.told(name)

    def ready(self, now: float) -> list[str]:
        """The queues worth a claim now: in the listed order, else in turns, so that none is served before all others."""
        ready = [name for name, queue in self._queues.items() if queue.try_at <= now]
        if self._listed is not None:
            listed = self._listed
            return sorted(ready, key=lambda name: listed.get(name, math.inf))
        return sorted(ready, key=lambda name: (name <= self._last_tried, name))

    def turns(self, name: str) -> str:
        """Whose turn it is in that queue, for its next claim."""
        return self._queues[name].turns

    def claimed(self, name: str, answer: Limited, began: float, now: float) -> None:
        """Takes the answer of a claim that was sent at `began`."""
        queue = self._queues[name]
        queue.turns = answer.turns
        queue.blocked = answer.blocked
        queue.vain = 0 if answer.claims else queue.vain + 1
        queue.try_at = now + self._pause(queue, answer, now - began)
        queue.not_before = now + (_ELSEWHERE if answer.blocked else rest_after(now - began))
        self._last_tried = name

    def refused(self, name: str, until: float) -> None:
        """The database refused a claim: a sweep makes the queue worth another after `until`, on Trio's clock."""
        queue = self._queues[name]
        queue.try_at = math.inf
        queue.not_before = until
        queue.blocked = False
        self._last_tried = name

    def _pause(self, queue: _Queue, answer: Limited, cost: float) -> float:
        if answer.again_in is None:
            return math.inf
        if answer.claims or answer.again_in >= _SOON:
            return answer.again_in
        # Another claimer was at it, or there are more keys than were looked at: at most a fifth of the time goes into that.
        if queue.vain <= _VAIN_LOOKS:
            return max(answer.again_in, rest_after(cost, share=4))
        return max(answer.again_in, rest_after(cost, longest=_ELSEWHERE))
