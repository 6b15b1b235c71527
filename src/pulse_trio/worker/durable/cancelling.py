"""The cancellation of an attempt, and where it comes again in the next one, which replays.

Its line has the keys of the calls that stood then, and comes again while these stand. A task in a plain await stands in none,
and no line says how far it had come since the last one. So such a cancellation comes again as long after the last line as it
came before, when the main task has begun as many calls: sooner, the code would be cut short before the place where its
clean-up is, or its clean-up's calls would have other numbers.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import msgspec
import trio

from ...describing import leaves_of
from ...lines import BeyondLimit, Kind
from .beginning import REFUSED
from .replay import Stood, stood

if TYPE_CHECKING:
    from ...jobs import CancelReason
    from ...lines import Line
    from .durable import Durable

_HELD_BACK = frozenset({"user", "parent", "sibling", "deadline"})
_LONGEST = 10.0
"""Seconds after which a cancellation comes again wherever the code is (half of the attempt's timeout, if that is less)."""
_LOOK = 0.05
"""Seconds between two looks whether the main task has begun as many calls."""
COMPENSATED = "0:compensated"
"""The key of the moment at which a clean-up has ended well. See migrations/0095_clean_ups_that_did_not_end.sql."""


class Cancelling:
    """Of one attempt. `noted`: the history has it."""

    __slots__ = (
        "_beyond",
        "_came",
        "_count",
        "_due",
        "_durable",
        "_failed",
        "_held_back",
        "_moved",
        "_since",
        "_timer",
        "noted",
    )

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self.noted = False
        self._held_back: CancelReason | None = None
        """It waits for the end of the replay."""
        self._came = math.inf
        """When the job was cancelled, on Trio's clock."""
        self._moved = trio.current_time()
        """When a task last came to a durable call, or out of one."""
        self._count = 0
        """How many calls the main task had made, in the attempt that was cancelled."""
        self._due = 0
        """The number of the line that comes again now, wherever the code is."""
        self._since = math.inf
        """Since when that is the next line, or was."""
        self._timer: trio.CancelScope | None = None
        self._beyond = False
        """Whether the code had gone on behind that place when it came."""
        self._failed = False
        """Whether a task of the job's nursery has failed."""

    def moves(self) -> None:
        """A task comes to a durable call, or out of one."""
        self._moved = trio.current_time()

    def holds_back(self, reason: CancelReason) -> bool:
        """Whether a cancellation of the job must wait: an attempt that still replays has not come to where it is now."""
        if reason not in _HELD_BACK or self._durable.history.replay.over or self.noted:
            self._came = min(self._came, trio.current_time())
            return False
        self._held_back = reason
        return True

    def goes_on_live(self) -> None:
        """The replay is over."""
        reason, self._held_back = self._held_back, None
        if reason is not None:
            self._durable.running.cancel(reason)

    def note(self, at: tuple[str, ...]) -> None:
        """Remembers it, if there is one, while these calls stood."""
        running = self._durable.running
        reason = running.cancel_reason
        if reason is None or reason in REFUSED or self.noted:
            return
        self.noted = True
        after = 0.0
        if not self._durable.all_stand():
            came = min(self._came, running.deadline, trio.current_time())
            after = min(max(came - self._moved, 0.001), _LONGEST)
        self._count = self._durable.keys.count
        value = msgspec.json.encode(Stood(at, reason, self._count, after)).decode()
        self._durable.history.hold(Kind.CANCELLED, "job", "", value)

    def clean_up_begins(self) -> None:
        """A call begins in a task that was cancelled, in a clean-up: what was cut short may have been no durable call. What is
        done now rests on the cancellation, and has numbers above those of what came before it."""
        if self._durable.running.cancel_reason is None or trio.current_effective_deadline() == -math.inf:
            return
        self._durable.note_cancellation()
        if self.noted and self._durable.keys.in_main:
            self._durable.keys.go_on_after(self._count)

    def task_failed(self, error: BaseException) -> None:
        """A task of the job's own nursery ends with an exception."""
        self._failed = self._failed or not _is_a_cancellation(error)

    async def ended(self, error: BaseException | None = None) -> None:
        """The handler has ended, with `error` or a value. If its clean-up has ended well, the history says so: only then a
        retry begins the job anew. Any other does the rest of it."""
        durable, history = self._durable, self._durable.history
        reason = durable.running.cancel_reason
        if reason is None or reason in REFUSED or (error is not None and not _is_a_cancellation(error)):
            return
        # Tasks in `job.nursery` may still clean up. One that never ends is found as other stuck handlers are.
        with trio.CancelScope(shield=True):
            await durable.running.children_ended()
        failed = self._failed or durable.running.cut is not None or durable.mismatch is not None
        # Without a durable call since the cancellation no line tells of it, and no retry comes to it.
        if failed or not self.noted or not history.replay.over or history.holds(Kind.CANCELLED):
            return
        # The lease may be lost, or the history have no room: then a retry does the rest, which is nothing.
        with suppress(RuntimeError, BeyondLimit):
            history.moment(COMPENSATED, trio.current_time() + durable.parts.clock.epoch_offset, anew=True)
            await history.written()

    # Again

    def again(self, line: Line) -> None:
        """The history has come to it."""
        found = stood(line)
        self.noted, self._count = True, found.count
        self.ends()
        self._durable.running.cancel(cast("CancelReason", found.reason))

    def is_early(self, line: Line) -> bool:
        """Whether the code has not come to where it stood, as far as one can know. The line is the next one, and the calls
        that it names stand."""
        found, running = stood(line), self._durable.running
        if not found.after or line.line == self._due or running.scope_nursery is None:
            return False
        if self._timer is None:
            self._since, self._timer = trio.current_time(), trio.CancelScope()
            running.scope_nursery.start_soon(self._later, line, self._timer, name="a cancellation that comes again")
        return not self._is_there(found)

    def _is_there(self, found: Stood) -> bool:
        now, running = trio.current_time(), self._durable.running
        if now >= self._since + min(_LONGEST, (running.timeout_deadline - running.sent) / 2):
            return True
        return now >= self._since + found.after and self._durable.keys.count >= found.count

    async def _later(self, line: Line, timer: trio.CancelScope) -> None:
        found = stood(line)
        with timer:
            await trio.sleep(found.after)
            while not self._is_there(found):  # noqa: ASYNC110 -- no event tells of it
                await trio.sleep(_LOOK)
            self.comes_now(line)

    @property
    def awaited(self) -> Line | None:
        """The line, while it is too early for it."""
        line = self._durable.history.replay.next_line
        return line if self._timer is not None and line is not None and line.kind is Kind.CANCELLED else None

    def comes_before_a_call(self) -> bool:
        """A call is about to begin. If it is one more than the main task had begun, the cancellation comes before it. Returns
        whether it does, or has come so: the call comes to nothing, and has no number."""
        if not self._durable.keys.in_main:
            return False
        line = self.awaited
        if line is not None and self._durable.keys.count >= stood(line).count:
            self._beyond = True
            self.comes_now(line)
        return self._beyond and trio.current_effective_deadline() == -math.inf

    def comes_now(self, line: Line) -> None:
        """It comes again wherever the code is."""
        self._due = line.line
        self._durable.hand_out()

    def ends(self) -> None:
        """It has come, or the attempt ends."""
        if self._timer is not None:
            self._timer.cancel()


def _is_a_cancellation(error: BaseException) -> bool:
    return all(issubclass(type(leaf), trio.Cancelled) for leaf in leaves_of(error))


AGAIN = Cancelling._later.__code__  # pyright: ignore[reportPrivateUsage]
"""The code of the task that waits for its moment."""
