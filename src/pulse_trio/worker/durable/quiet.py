"""How many other tasks of the handler were on their way, in a plain await or out of a call, when a line was written.

No line says that a task has ended. The history says how many others were busy, and stood in no call; a later attempt then
hands the line out when no more of them are. Else a failure, or a cancellation that follows the line, would find a task in its
last await or in a scope that has struck, and it would clean up though it had ended before. The same holds for what comes after
the last line: calls that go on live, deadlines that have passed, the job's cancellation.

The history is told of changes alone, and nothing of a handler that has one task.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from ...lines import BeyondLimit, Kind
from ...trio_internals import is_cancelled, opened_by, tasks_from, waits_for_others
from .begun import BEGUN, Begun
from .cut_blocks import CutBlocks
from .delivering import Delivering
from .own_tasks import is_own, own_task
from .striking import Striking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...lines import Line
    from .calls import Call
    from .durable import Durable

QUIET = "0:quiet"
"""The key of the moments that say so: 1.0 if it was quiet, 2.0 if one task was busy, and so on; 0.0 if it is not known how many
were. They hold from the next line on, or from that whose number is their name. Workers of versions before write 0.0 where
any was busy, and read what is above 1.0 as that."""
_MOST = 200
"""Tasks that are looked at for one line; with more it is not known. A task takes 0.2 us."""
_UNKNOWN = 0.0
_LONGEST = 10.0
"""Seconds for which an attempt waits until it is quiet (half of its timeout, if that is less)."""
_BRIEFLY = 1.0
"""The same after the last line, if the attempt before was lost or has failed: nothing says what was busy when it ended, and
what draws a progress bar since the last line would be waited for."""
_TELL = 2.0
"""Seconds for which the end of an attempt waits until this is written."""
_SOON, _LATER = 0.001, 0.05
"""Seconds between two looks; doubled each time. Trio does not say when a task has ended."""


class Quiet:
    """Of one attempt."""

    __slots__ = (
        "_busy_at",
        "_changes",
        "_durable",
        "_given_up",
        "_place",
        "_said",
        "_since",
        "_watched",
        "begun",
        "cut_blocks",
        "delivering",
        "striking",
    )

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self.delivering = Delivering(durable)
        self.striking = Striking(durable)
        self.cut_blocks = CutBlocks(durable)
        self._changes: list[tuple[int, float]] = []
        """The numbers of the lines from which on so many were busy."""
        self._said: float | None = None
        """What the history says of the newest line."""
        self._place = 0
        """From which line on it says so, at the earliest."""
        self._given_up = True
        """Whether this attempt waits no more."""
        self._since = (0, math.inf)
        """For which line it waits, and since when."""
        self._watched = False
        self.begun = Begun()
        self._busy_at = 0
        """The number of the last line for which tasks were busy, at the earliest."""

    # Live

    def note(self, call: Call) -> None:
        """The current task, which has others beside it, is about to add a line of this call, or to wait for it. It gets what
        that says when it is quiet.

        After which line the call has begun is written before its own line. When that is handed out it is too late: the
        attempt may be lost before the next line, and one of a later attempt come to the call too late, because what another
        line brings has cut its task short."""
        history = self._durable.history
        if not history.replay.over:
            return
        if self._said is None:
            # What is said when it is handed out may be lost with the attempt.
            busy = self.busy(trio.lowlevel.current_task())
            self._said = _UNKNOWN if busy is None else 1.0 + len(busy) + len(self.cut_blocks.entering)
            history.moment(QUIET, self._said, anew=True)
            # It says nothing of the lines before, which may still have to be handed out.
            self._place = history.latest
        # Where some are busy it is not known how many will be as the lines are handed out that are being written now.
        self._tell(call, since=self._busy_at if self._said == 1.0 else history.latest)
        history.let_go()

    def begins(self, call: Call) -> None:
        """The call begins now. Results that wait for their turn come after it, also where a line with a higher number has been
        handed out meanwhile: that of a scope which the handler has cut short."""
        self.begun.begins(call.key, self.delivering.before_results(self._durable.history.replay.latest))

    def opens_scope(self, key: str) -> None:
        """The task opens a remembered scope, whose moment gets the next line. Results that wait for their turn have lower
        numbers, and come after it."""
        self.begun.opens(key)
        history, before = self._durable.history, self.delivering.before_results
        if history.replay.over and self.has_others() and before(history.latest) < history.latest:
            history.hold(Kind.MOMENT, BEGUN, f"+{key}", repr(float(before(history.replay.latest))))

    def leaves_scope(self, key: str, *, struck: bool) -> None:
        """The task leaves a remembered scope, which has `struck` or not."""
        self.begun.leaves(key)
        if struck:
            self.delivering.say_what_has_struck()
            self._durable.history.tell_what_came_before(partial(self.begun.left, key), of=key)

    def _tell(self, call: Call, *, since: int) -> None:
        if (after := self.begun.tells(call.key, since=since)) is not None:
            self._durable.history.hold(Kind.MOMENT, BEGUN, f"={call.key}", repr(float(after)))

    async def delivered(self, call: Call, number: int) -> None:
        """Waits until the current task may go on with what the line with this number says, which is that of the call."""
        if self.has_others():
            busy = await self.delivering.turn(number)
            self._tell(call, since=self._busy_at)
            self._says(busy, number)
        self.begun.ends(call.key)
        self._durable.history.replay.came(number)
        self.cut_blocks.moves()

    def note_held(self, call: Call) -> None:
        """The current task is about to hold a line of this call."""
        if self.has_others():
            self._tell(call, since=self._busy_at)
            busy = self.busy(trio.lowlevel.current_task())
            self._says(None if busy is None else len(busy))

    def note_cut(self, seen: Sequence[trio.lowlevel.Task] | None) -> None:
        """The current task is about to hold a line that says what has cut it short, in a call or in a plain await. `seen`: the
        tasks that were busy before it did, if that is known. Some have come to a call of theirs since, and stand in it; others
        have ended, and were busy all the same."""
        if not self.has_others():
            return
        task, standing = trio.lowlevel.current_task(), self._durable.standing
        before = sum(one not in standing for one in seen or ())
        busy = self.busy(task)
        now = None if busy is None else len(busy) + (task not in standing) + self.delivering.gone()
        self._says(None if now is None else max(before, now))

    def _says(self, busy: int | None, number: int | None = None) -> None:
        history = self._durable.history
        if not history.replay.over:
            return
        if busy is not None:
            # The entry of a block has no line: a later attempt passes it at once, and what comes then is busy, a loop, say.
            busy += len(self.cut_blocks.entering)
        said, place = _UNKNOWN if busy is None else 1.0 + busy, number or history.latest + 1
        if busy != 0:
            self._busy_at = place
            for key, after in self.begun.left_before(place):
                history.hold(Kind.MOMENT, BEGUN, f"-{key}", repr(float(after)))
        behind = place < self._place
        if said != self._said or behind:
            history.hold(Kind.MOMENT, QUIET, "" if number is None else str(number), repr(said))
            if not behind:
                self._said, self._place = said, place

    async def leave_said(self) -> None:
        """The attempt ends otherwise than well. What was to be said with the next line, of lines that are written, is said now:
        the replay after it would wait for tasks that were busy then (for 10 s, once)."""
        history = self._durable.history
        # Of one that is suspended the last line says so.
        if self._durable.fatal is not None or history.lost or self._durable.running.cancel_reason == "suspended":
            return
        # The history may have no room for lines, or the lease be lost.
        with suppress(RuntimeError, BeyondLimit):
            if history.add_held_moments(QUIET):
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _TELL):
                    await history.written(may_be_cut=True)

    def note_suspension(self) -> None:
        """The handler is about to be suspended: every task of it stands. It is said each time, as the last line, which tells
        the next attempt that it was."""
        history = self._durable.history
        if (self._said == 1.0 and self._place == history.latest) or (self._said is None and not self.has_others()):
            return
        self._said = 1.0
        history.moment(QUIET, 1.0, anew=True)
        self._place = history.latest

    def has_others(self) -> bool:
        """Whether the handler has opened a nursery, so that there are other tasks, or were."""
        running = self._durable.running
        assert running.task is not None  # noqa: S101 -- it runs
        return self._said is not None or any(
            nursery is not running.scope_nursery or _has_tasks(nursery) for nursery in opened_by(running.task)
        )

    def others_run(self) -> bool:
        """Whether there are other tasks now."""
        task = self._durable.running.task
        assert task is not None  # noqa: S101 -- it runs
        return task is not trio.lowlevel.current_task() or any(map(_has_tasks, opened_by(task)))

    def busy(self, besides: trio.lowlevel.Task | None = None) -> list[trio.lowlevel.Task] | None:
        """The tasks that are neither in a call nor wait for others, or are being cut short in a call. None: there are too many
        tasks to look at."""
        standing, looked_at, found = self._durable.standing, 0, list[trio.lowlevel.Task]()
        for task in tasks_from(self._durable.running.task):
            looked_at += 1
            if looked_at > _MOST:
                return None
            if task is besides or self.delivering.has(task) or self.cut_blocks.has(task, stands=task in standing):
                continue
            if self._is_cut(task, standing[task]) if task in standing else not _waits(task):
                found.append(task)
        return found

    def _is_cut(self, task: trio.lowlevel.Task, call: Call) -> bool:
        # One that has its line all the same is shielded while it waits for that.
        return self.delivering.is_cut(task) if call.turn is None else is_cancelled(task)

    def allowed(self, place: int) -> float:
        """How many tasks may be busy when the line with this number is handed out: as many as were. Infinite: that is not
        known."""
        index = bisect_right(self._changes, (place, math.inf)) - 1
        said = self._changes[index][1] if index >= 0 else _UNKNOWN
        return math.inf if said == _UNKNOWN else said - 1.0

    # Again

    def resumes(self, lines: Sequence[Line]) -> None:
        """The attempts before have written these."""
        told = [line for line in lines if line.kind is Kind.MOMENT and line.key == QUIET]
        # Of two that say it of the same line the newer one holds.
        changes = {
            int(line.name or line.line): float(line.value or 0) for line in sorted(told, key=lambda line: line.line)
        }
        self._changes = sorted(changes.items())
        if self._changes:
            self._said, self._given_up = self._changes[-1][1], False
        self.begun = Begun(lines)
        self.cut_blocks.resumes(lines)

    def is_missing(self, line: Line) -> bool:
        """Whether a call had begun when this line, the next one, was handed out, and has not now."""
        return self.begun.is_missing(line.line, self._durable.history.replay.has_begun)

    def holds_up(self) -> bool:
        """Whether what comes next in the history has to wait: it was quiet, and is not. Sees to it that it goes on then."""
        if self._given_up:
            return False
        durable = self._durable
        line, now = durable.history.replay.next_line, trio.current_time()
        place = durable.history.latest + 1 if line is None else line.line
        allowed = self.allowed(place)
        if allowed == math.inf or durable.fatal is not None or durable.running.scope_nursery is None:
            return False
        busy = self.busy()
        if busy and self._since[0] == place:
            busy = [task for task in busy if not self._reads(task)]
        # Where none is busy no call is to come.
        rests = busy is not None and len(busy) <= allowed and not self.cut_blocks.holds_up(place)
        if rests and self.delivering.ends_soon(busy or (), self._since[1] if self._since[0] == place else now):
            rests = False  # one of them is cut short, and was not yet, or had ended
        if rests and (not busy or line is None or not self.is_missing(line)):
            self._given_up = line is None
            return False
        if self._since[0] != place:
            self._since = place, now
        half = (durable.running.timeout_deadline - durable.running.sent) / 2
        longest = _LONGEST if line is not None or self._was_suspended() else _BRIEFLY
        if now >= self._since[1] + min(longest, half):
            # What a task awaits was quicker then, and nothing tells how long it takes now. Or what was said of this line is
            # lost with its attempt, and each replay would wait for what draws a progress bar: later ones know of it.
            self._given_up = True
            if line is not None:
                said = _UNKNOWN if busy is None else 1.0 + len(busy)
                durable.history.hold(Kind.MOMENT, QUIET, str(place), repr(said))
            return False
        if not self._watched:
            self._watched = True
            durable.running.scope_nursery.start_soon(self._watch, name="a replay that waits until it is quiet")
        return True

    def _reads(self, task: trio.lowlevel.Task) -> bool:
        """Whether the task has read of children since this attempt began to wait: of what comes later in the history."""
        blocks = self._durable.blocks
        return any(block.seen is not None and block.seen.reads(task, self._since[1]) for block in blocks)

    def _was_suspended(self) -> bool:
        """Whether the attempt before was."""
        found = self._durable.history.replay.resumed
        return found is not None and bool(self._changes) and self._changes[-1][0] == found.last

    @own_task
    async def _watch(self) -> None:
        pause = _SOON
        try:
            while self.holds_up():
                await trio.sleep(pause)
                pause = min(pause * 2, _LATER)
        finally:
            self._watched = False
        self._durable.hand_out()


def _waits(task: trio.lowlevel.Task) -> bool:
    """Whether a task outside of the calls waits for others, or is none of the handler's."""
    return waits_for_others(task) or is_own(task)


def _has_tasks(nursery: trio.Nursery) -> bool:
    """Whether tasks of the handler's are in it."""
    return not all(map(is_own, nursery.child_tasks))
