"""A handler of several tasks gets one result at a time: the next one when what has gone on with the last one has come to rest,
in a durable call, or because it waits for others.

Else two results that come together would race through the handler's code, pass by pass of Trio's loop: a nursery that one of
them cancels takes some passes to end, and meanwhile the other one may be first to say who has won. No line tells how many
passes that were, and a later attempt, which hands both out again, would have another winner. Temporal runs all coroutines of a
workflow until they are blocked before it gives it the next result, for the same reason.

What a task does in a plain await has no such end: it is waited for a moment, once, and a task whose step is being cut short a
little longer. The history says how many such tasks there were (quiet.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ...trio_internals import innermost_scope, is_cancelled_in

if TYPE_CHECKING:
    from .durable import Durable

_PLAIN = 0.01
"""Seconds for which a task in a plain await is waited for; it is passed over then, until it makes a durable call."""
_CLOSING = 1.0
"""Seconds for one that is being cut short in a durable call: a step closes its connection, a thread ends."""
_PASSES, _PAUSE = 5, 0.001
"""So many looks come one pass after the other, those after them at this distance in seconds. Each task gets so many."""


class Delivering:
    """Of one attempt."""

    __slots__ = ("_coming", "_durable", "_entered", "_passed_over", "_queue")

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._queue: dict[trio.lowlevel.Task, trio.Event] = {}
        """The tasks that have results and wait for their turn, the first one first."""
        self._coming = set[trio.lowlevel.Task]()
        """Those whose line is being written: they rest, too, and to look where each of them waits takes some microseconds."""
        self._passed_over = set[trio.lowlevel.Task]()
        """Those that have been waited for."""
        self._entered: dict[trio.lowlevel.Task, object] = {}
        """In which scope each task has come to the durable call that it stands in."""

    def enters(self, task: trio.lowlevel.Task) -> None:
        """The task comes to a durable call."""
        self._passed_over.discard(task)
        self._entered[task] = innermost_scope(task)

    def leaves(self, task: trio.lowlevel.Task) -> None:
        """It has left it."""
        self._passed_over.discard(task)
        del self._entered[task]

    def has(self, task: trio.lowlevel.Task) -> bool:
        """Whether the task waits for its turn, or for its line."""
        return task in self._coming or task in self._queue

    def is_cut(self, task: trio.lowlevel.Task) -> bool:
        """Whether the call that a task stands in is being cut short: it may still end something in a shield of its own."""
        return is_cancelled_in(self._entered.get(task))

    async def turn(self) -> int | None:
        """Returns when the current task may go on with its result, which is written: a cancellation waits, as long as the lease
        is proven. Returns how many others are busy then; None if they are too many to look at."""
        task = trio.lowlevel.current_task()
        busy = None if self._queue else self._durable.quiet.busy(besides=task)
        if self._queue or busy:
            self._queue[task] = first = trio.Event()
            try:
                with trio.CancelScope(shield=True, deadline=self._durable.running.lease_deadline):
                    if next(iter(self._queue)) is not task:
                        await first.wait()
                    busy = await self._others_rest(task)
            finally:
                del self._queue[task]
                for following in self._queue.values():
                    following.set()
                    break
        return None if busy is None else len(busy)

    async def written(self) -> None:
        """Waits until the line that the current task has added is written."""
        task = trio.lowlevel.current_task()
        self._coming.add(task)
        try:
            await self._durable.history.written()
        finally:
            self._coming.discard(task)

    async def _others_rest(self, task: trio.lowlevel.Task) -> list[trio.lowlevel.Task] | None:
        first_seen: dict[trio.lowlevel.Task, tuple[float, int]] = {}
        looks = 0
        while busy := self._durable.quiet.busy(besides=task):
            now = trio.current_time()
            for one in busy:
                since, look = first_seen.setdefault(one, (now, looks))
                in_call = one in self._durable.standing
                # On a loop that is late the time may be over before the task has had a turn.
                if now - since >= (_CLOSING if in_call else _PLAIN) and looks - look >= _PASSES:
                    self._passed_over.add(one)
            if self._passed_over.issuperset(busy):
                break
            looks += 1
            if looks <= _PASSES:
                await trio.lowlevel.checkpoint()
            else:
                await trio.sleep(_PAUSE)
        return busy
