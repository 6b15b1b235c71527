"""A later attempt on its way back to where those before stood, and a cancellation of its job that waits for that.

The replay may be over before: no line tells of an open block, nor of a wait or a step that had begun, and a handler may await
something plain before it comes to one. Cut short there it would not know of the block's children, or stand before the `try:`
whose compensation is to undo what a lost attempt had done in that step. A call of the handler that goes live meanwhile waits,
and is cut short when every task stands in one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from .own_tasks import own_task

if TYPE_CHECKING:
    from .calls import Call
    from .durable import Durable

REOPENED_WITHIN = 5.0
"""Seconds for which a cancellation waits, of the job or by a deadline that has passed, once the replay is over: so it cuts
blocks short whose children are known. A handler comes to such a block at once, or waits in plain code before it."""
_OPEN_FOR = 0.5
"""The same once all of them are open: between two children of a block it may await something plain, and in its body it may ask
for something again and again."""


class Returning:
    """Of one attempt."""

    __slots__ = ("_durable", "_had_blocks", "_has_called", "_is_back", "_over_since", "_timer")

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._timer: trio.CancelScope | None = None
        """Its deadline is when the cancellation comes wherever the handler is."""
        self._is_back = False
        self._had_blocks = False
        self._has_called = False
        """Whether a call of the handler has gone live."""
        self._over_since = math.inf

    def holds(self) -> bool:
        """Whether a cancellation of the job, which is there, waits."""
        durable = self._durable
        nursery = durable.running.scope_nursery
        if self._is_back or nursery is None:
            return False
        if self._timer is None:
            awaited = durable.history.replay.unopened.awaited
            if not (awaited or self._is_on_its_way()):
                return False
            self._had_blocks = awaited
            self._timer = trio.CancelScope(deadline=trio.current_time() + REOPENED_WITHIN)
            nursery.start_soon(self._later, self._timer, name="a cancellation that waits until the handler is back")
        elif self._had_blocks and not durable.history.replay.unopened.awaited:
            self._timer.deadline = min(self._timer.deadline, trio.current_time() + _OPEN_FOR)
        return True

    def _is_on_its_way(self) -> bool:
        """Whether the handler, whose history has lines, has come to no call since the last of them, a moment ago."""
        resumed = self._durable.history.replay.resumed
        if self._has_called or resumed is None or not resumed.last:
            return False
        return trio.current_time() < self._over_since + REOPENED_WITHIN and not self._durable.all_stand()

    def replay_is_over(self) -> None:
        """Its lines have been handed out."""
        self._over_since = min(self._over_since, trio.current_time())

    async def stands_at(self, call: Call) -> None:
        """The call is about to go live. Where a cancellation waits it stands there, and is cut short when that comes. Not one
        that the handler makes while it handles an exception, which may be the reason for it."""
        self._has_called = True
        if not self.held or call.handles is not None or self._durable.history.replay.unopened.awaited:
            return
        with self._durable.awaiting(call):
            self.waits()
            await trio.lowlevel.checkpoint_if_cancelled()
            with trio.move_on_after(REOPENED_WITHIN):  # not for ever: it may stand in a shield of the handler's
                await trio.sleep_forever()

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
        """The handler has gone on without such a block, because its code has changed; or it has ended."""
        self._has_called = True
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
