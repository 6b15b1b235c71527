"""In which order blocks that were cut short are left, in a handler of several tasks.

A step that is cut short ends at once, or when it has closed what it has open (`Delivering.comes_out`). A block ends when its
children have, which other workers may run, and no line says so. In a later attempt they have ended before it begins, and the
task of the block would be the first where it was the last. So the history says after which line each was left: a later attempt
leaves it after that line and before the next one, and one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ...lines import Kind
from .beginning import REFUSED
from .interrupted import fails_by_itself

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...jobs import CancelReason
    from ...lines import Line
    from .calls import Call
    from .durable import Durable

LEFT = "0:left"
"""The key of the moments that say so: their name is the block's key, their value the number of the last line that had been
handed out. Their own numbers are the order."""
_LONGEST = 10.0
"""Seconds for which a block waits for what came before it (half of the attempt's timeout, if that is less)."""
_LOOK = 0.05
"""Seconds until it looks whether the attempt fails instead: a task that fails tells nobody."""


class CutBlocks:
    """Of one attempt."""

    __slots__ = ("_durable", "_ends", "_failed", "_moved", "_open", "_told", "entering", "leaving")

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._told: dict[str, int] = {}
        """After which line each block was left that this attempt has not left, the first one first."""
        self._ends = False
        """Whether the attempt ends and leaves the rest to the next one: nothing is waited for any more."""
        self._open = set[str]()
        """The keys of those that are open."""
        self._moved = trio.Event()
        self.entering = set[trio.lowlevel.Task]()
        """The tasks that come to a block, which is not open yet."""
        self.leaving = set[trio.lowlevel.Task]()
        """Those that wait for what came before they left theirs."""
        self._failed: list[BaseException] = []
        """What came out of them."""

    def resumes(self, lines: Sequence[Line]) -> None:
        """The attempts before have written these."""
        told = [line for line in lines if line.kind is Kind.MOMENT and line.key == LEFT]
        self._told = {line.name: int(float(line.value or 0)) for line in sorted(told, key=lambda line: line.line)}

    def has(self, task: trio.lowlevel.Task, *, stands: bool) -> bool:
        """Whether the task waits to leave a block; or comes to one live, and does not stand in a call yet. (In a replay it may
        be on its way to the block's end, where it stood.)"""
        return task in self.leaving or (not stands and task in self.entering and self._durable.history.replay.over)

    def fails(self, failures: Iterable[BaseException]) -> None:
        """These come out of one. It has no line that brings them again where it is not cut short."""
        self._failed += failures

    def has_failed(self, error: BaseException) -> bool:
        """Whether this came out of one."""
        return any(error is one for one in self._failed)

    def opens(self, call: Call) -> None:
        """The block of this call is open."""
        self._open.add(call.key)

    def ends(self, call: Call) -> None:
        """It is not any more."""
        self._open.discard(call.key)
        self._told.pop(call.key, None)
        self.moves()

    def holds_up(self, number: int) -> bool:
        """Whether a block that is open is to be left before the line with this number is handed out."""
        return bool(self._told) and any(after < number for key, after in self._told.items() if key in self._open)

    def moves(self) -> None:
        """A line has been handed out, or a block was left."""
        if self._told:
            self._moved.set()
            self._moved = trio.Event()

    def hears(self, reason: CancelReason) -> None:
        """The job is being cancelled for this reason."""
        if reason in REFUSED:
            self._ends = True
            self.moves()

    async def leaves(self, call: Call) -> None:
        """The children of the block of this call, which was cut short, have ended. Returns when its task may go on."""
        durable = self._durable
        running, replay, history = durable.running, durable.history.replay, durable.history
        if not durable.quiet.has_others() or running.cancel_reason in REFUSED:
            return
        longest = min(_LONGEST, (running.timeout_deadline - running.sent) / 2)
        with trio.CancelScope(shield=True, deadline=running.lease_deadline), durable.awaiting(call):
            self.leaving.add(trio.lowlevel.current_task())
            try:
                durable.hand_out()
                with trio.move_on_after(longest):
                    while self._comes_before(call.key) and not fails_by_itself(durable, call):
                        with trio.move_on_after(_LOOK):
                            await self._moved.wait()
            finally:
                self.leaving.discard(trio.lowlevel.current_task())
            await durable.quiet.delivering.turn()
        if replay.over and call.key not in self._told:
            durable.quiet.delivering.say_what_has_struck()
            after, held = replay.latest, history.holds_what_came_before
            # What cut it short, a failure or a cancellation, has its line just before this one then.
            history.hold(Kind.MOMENT, LEFT, call.key, lambda number: repr(float(number - 1 if held else after)))

    def _comes_before(self, key: str) -> bool:
        """Whether a line or another block does."""
        after = self._told.get(key)
        if after is None or self._ends or self._durable.fatal is not None:
            return False
        replay = self._durable.history.replay
        # The task of the line that was handed out last goes on first.
        if replay.has_given or (replay.next_line is not None and replay.next_line.line <= after):
            return True
        return next(one for one in self._told if one in self._open) != key
