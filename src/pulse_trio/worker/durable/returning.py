"""A later attempt on its way back to the blocks that those before had open, and a cancellation of its job that waits for that.

The replay may be over before: no line tells of an open block, and a handler may await something plain before it opens one. Cut
short there it would not know of the children, and its compensation would leave what they have done.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from .own_tasks import own_task

if TYPE_CHECKING:
    from .durable import Durable

REOPENED_WITHIN = 5.0
"""Seconds for which a cancellation waits, of the job or by a deadline that has passed, once the replay is over: so it cuts
blocks short whose children are known. A handler comes to such a block at once, or waits in plain code before it."""
_OPEN_FOR = 0.5
"""The same once all of them are open: between two children of a block it may await something plain, and in its body it may ask
for something again and again."""


class Returning:
    """Of one attempt."""

    __slots__ = ("_durable", "_is_back", "_timer")

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._timer: trio.CancelScope | None = None
        """Its deadline is when the cancellation comes wherever the handler is."""
        self._is_back = False

    def holds(self) -> bool:
        """Whether a cancellation of the job, which is there, waits."""
        durable = self._durable
        nursery = durable.running.scope_nursery
        if self._is_back or nursery is None:
            return False
        if self._timer is None:
            if not durable.history.replay.unopened.awaited:
                return False
            self._timer = trio.CancelScope(deadline=trio.current_time() + REOPENED_WITHIN)
            nursery.start_soon(self._later, self._timer, name="a cancellation that waits for blocks")
        elif not durable.history.replay.unopened.awaited:
            self._timer.deadline = min(self._timer.deadline, trio.current_time() + _OPEN_FOR)
        return True

    @property
    def held(self) -> bool:
        """Whether one does: no deadline comes before it."""
        return self._timer is not None and not self._is_back

    def waits(self) -> None:
        """A call of the handler only waits: where every task stands it comes no further."""
        if self.held and self._durable.all_stand():
            self._goes_on()

    def comes_through(self) -> None:
        """A task has come to the end of a block, or is refused more children."""
        if self.held and not self._durable.history.replay.unopened.awaited:
            self._goes_on()

    def is_given_up(self) -> None:
        """The handler has gone on without such a block: its code has changed."""
        if self.held:
            self._goes_on()

    @own_task
    async def _later(self, timer: trio.CancelScope) -> None:
        with timer:
            await trio.sleep_forever()
        self._goes_on()

    def _goes_on(self) -> None:
        if not self._is_back:
            self.ends()
            self._durable.cancelling.goes_on_live()

    def ends(self) -> None:
        """The handler is back, or the attempt ends."""
        self._is_back = True
        if self._timer is not None:
            self._timer.deadline = -math.inf
