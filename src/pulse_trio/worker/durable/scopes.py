"""`job.move_on_after` and `job.fail_after`: deadlines that later attempts keep.

The deadline is remembered when the block begins. That it struck is a line, with the calls that stood then: a later attempt is
cancelled while the same calls stand. That a block ended in time is remembered with the next durable call: its deadline may pass
before the next attempt, whose replay may end inside the block. If an exception has left the block, that is the next call of the
task which has the exception: until then the attempt may fail of it, and the next one does again what is in the block.

A task that cuts its own scope short, by `scope.cancel()`, comes to that call again: the replay waits for it, so that the code
before it has run.

A scope that a handler opens while it unwinds for a suspension, or for what else refuses durable calls, is remembered nowhere:
the next attempt does not come to it, or comes to it days later, in a clean-up that is to have its whole time.

Such a deadline may cut an attempt short before it opens a block again that an earlier one had open. The children of that block
are cancelled all the same (left_behind.py), and the calls after the scope do not have the numbers of those in it.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import msgspec
import trio

from ...lines import Kind
from ...trio_internals import is_cancelled_around, scopes_around, waits_for_its_own, waits_for_others
from . import swallowed
from .beginning import is_in_step
from .failures import comes_from_a_cancellation
from .keys import highest_number
from .left_behind import leave_behind
from .places import place_of_the_cut
from .returning import REOPENED_WITHIN
from .so_far import SoFar, told_in
from .stood import Stood, is_left_so, is_opened, late_key, stood, struck_too
from .unremembered import NoScopeOfTrios

if TYPE_CHECKING:
    from collections.abc import Generator

    from ...lines import Line
    from .durable import Durable


class Scope(NoScopeOfTrios):
    """One remembered deadline. `until` is in seconds since 1970, by the database's clock."""

    __slots__ = (
        "_durable",
        "_live_since",
        "_so_far",
        "_stood",
        "asked",
        "inner",
        "key",
        "line",
        "remembered",
        "task",
        "until",
    )

    def __init__(self, durable: Durable, key: str, until: float) -> None:
        self.key = key
        self._durable = durable
        self.until = until
        self.inner = trio.CancelScope()
        self.remembered = until < math.inf
        """Not that of a block's body."""
        self.line: int | None = None
        """The number of the line that says that it struck, once there is one."""
        self._stood: Stood | None = None
        """What its line says, once it is noted or has come again."""
        self._so_far = SoFar()
        self.asked: Literal["", "by its task", "by another"] = ""
        """Who called `cancel` before it struck. In a replay it strikes where it struck, or at the end of the replay."""
        self.task = trio.lowlevel.current_task()
        if ended_key(key) in durable.history.replay.moments:
            self.until = math.inf
        self._live_since: float | None = None
        if durable.history.replay.over and not durable.quiet.holds_up():
            self.goes_on_live(opens=True)

    @property
    def cancelled_caught(self) -> bool:
        """Whether the block was cut short by this scope; known when the block has ended."""
        return self.inner.cancelled_caught or self._so_far.in_time

    @property
    def cancel_called(self) -> bool:
        """Whether its deadline has struck, or `cancel` was called."""
        self._durable.running.run.check("scope.cancel_called")
        struck, replay = self.has_struck, self._durable.history.replay
        if self in self._durable.scopes and trio.lowlevel.current_task() is self.task and not is_in_step(self._durable):
            # The handler may do something else now.
            if struck and replay.over:
                self._so_far.read = True
                self.note(self._durable.keys_that_stand(), cuts=False)
            elif not struck and (line := replay.take_out(self.key, self._is_read)) is not None:
                self.strike_again(line)
                return True
        return struck

    @property
    def has_struck(self) -> bool:
        """The same, where nothing of the handler rests on it."""
        # Trio cancels a scope whose deadline it finds passed when it is asked.
        return self.inner.cancel_called or bool(self.asked) or self._durable.history.replay.comes_late(self.key)

    @property
    def in_main(self) -> bool:
        """Whether it is the main task's."""
        return self.task is self._durable.running.task

    @property
    def is_cut_from_outside(self) -> bool:
        """Whether what is in it is cut short whether it strikes or not."""
        return is_cancelled_around(self.inner)

    def _is_read(self, said: Stood) -> bool:
        """Whether the task had found that it had struck where it stands now."""
        return said.read and self._has_begun(said)

    def _is_here(self, said: Stood) -> bool:
        """Whether it struck in the plain await in which the task may be now."""
        if said.late or said.asked or said.read or not self._has_begun(said):
            return False
        stand = {call.key for call in self._durable.standing.values()}
        return all(key in stand or self._durable.history.replay.has_line(key) for key in said.at)

    def _has_begun(self, said: Stood) -> bool:
        """Whether the task has begun as many calls in it as when it struck."""
        return said.calls is not None and said.calls <= self._so_far.calls

    def is_about_to_be_cancelled(self) -> bool:
        """Whether the next line says that its task cut it short, and that task, in a plain await, comes to that again."""
        replay, stands = self._durable.history.replay, self.task in self._durable.standing
        line = replay.next_line if replay.strikes_next else None
        if line is None or line.key != self.key or stands or not _is_asked(stood(line)):
            return False
        return not waits_for_others(self.task)

    def strike_out_of_order(self) -> None:
        """Lines were handed out before their turn, and that of this scope may come too late: its task has gone on. One that
        waits for tasks of its own has not."""
        if waits_for_its_own(self.task):
            return
        if not self.inner.cancel_called and self.task not in self._durable.standing:
            line = self._durable.history.replay.take_out(self.key, self._is_here)
            if line is not None:
                self.strike_again(line)

    def call_begins(self) -> None:
        """The task begins a call."""
        self._so_far.calls += trio.lowlevel.current_task() is self.task

    def call_stands(self, task: trio.lowlevel.Task) -> None:
        """This task is about to stand in a call."""
        if self._stood is None and task is self.task and self.inner.cancel_called:
            self._so_far.before = True

    def cancel(self) -> None:
        """Cancels the block now."""
        self._durable.running.run.check("scope.cancel")
        if not self.inner.cancel_called:
            self.asked = "by its task" if trio.lowlevel.current_task() is self.task else "by another"
        if not self._durable.history.replay.over:
            replay = self._durable.history.replay
            if self.asked == "by its task" and (line := replay.take_out(self.key, _is_asked)) is not None:
                self.strike_again(line)
            if self.remembered:
                self._durable.hand_out()
            return
        self.inner.cancel()
        # The body of a block that its own task cuts short goes on to its next call: that is noted as the place, and later
        # attempts come to it.
        if self.remembered or self.asked != "by its task":
            self._durable.note_cancellation(of=self)
        self._durable.parts.looks.struck(self._durable.running.claim.id)

    def goes_on_live(self, *, opens: bool = False) -> None:
        """The attempt has come to where the one before was: from now on the deadline counts. If blocks in it are to be opened
        again it waits for them, for a while, so that it reaches their children; and for calls that had ended before."""
        if swallowed.strikes(self._durable, self, self._so_far):
            return
        now = trio.current_time()
        if self._live_since is None:
            self._live_since = now
        deadline = min(self._durable.on_our_clock(self.until), self._so_far.cut_at)
        replay = self._durable.history.replay
        if replay.unopened.hold_back(self.key) or replay.awaits_keys or self._durable.suspension.returning.held:
            deadline = max(deadline, self._live_since + REOPENED_WITHIN)
        # One that has passed as the scope is opened comes before what its task does in it.
        if self._durable.quiet.delivering.holds and not (opens and deadline <= now):
            return
        if self.asked or deadline <= now:
            self._strikes()
        elif deadline < math.inf:
            self._durable.quiet.striking.at(self, deadline)

    def strikes_within(self, seconds: float) -> None:
        """It strikes then at the latest: the body of a block, a child of which has failed."""
        if self._so_far.cut_at == math.inf:
            self._so_far.cut_at = trio.current_time() + seconds
            self.goes_on_live()

    def _strikes(self) -> None:
        """It strikes live. Which tasks are busy is seen before any of them is cut short."""
        if not self.inner.cancel_called:
            self._so_far.opened = self not in self._durable.scopes
            self._so_far.busy = self._durable.quiet.busy()
            self.inner.cancel()
            self._durable.parts.looks.struck(self._durable.running.claim.id)

    @property
    def is_unsaid(self) -> bool:
        """Whether it has struck, and the history does not say so yet."""
        return self.inner.cancel_called and self._stood is None

    def waits(self) -> None:
        """Its deadline does not strike until it `goes_on_live` again: results wait for their turn, which were there before."""
        if not self.inner.cancel_called:
            self.inner.deadline = math.inf

    def note(self, at: tuple[str, ...], *, cuts: bool, clean_up: bool = False) -> None:
        """Remembers that it struck, if it did, while these calls stood. `cuts`: what was cut short is one of them.
        `clean_up`: a clean-up of what it cut short begins, and may not be come to where it strikes earlier again."""
        if not self.inner.cancel_called:
            return
        if cuts:
            self._so_far.late = False
        if clean_up and self._so_far.place is None:
            self._so_far.place = place_of_the_cut()
        if self._stood is None and (line := self._durable.history.replay.struck_by_key(self.key)) is not None:
            self._stood, self.line = stood(line), line.line
        if self._stood is None:
            begun = self._durable.keys.count
            after = self._durable.cancelling.seconds_to(self.inner.deadline)
            asked = self.remembered and self.asked == "by its task"
            self._stood = Stood(at, "", 0, after, begun, asked, self._so_far.read, self._so_far.calls)
            self._count_calls()
            self._durable.quiet.note_cut(self._so_far.busy)
            if self.remembered:
                # It strikes before its task comes again to what it had stood in, a wait for an event, say.
                self._durable.history.replay.unopened.waits.give_up()
            self._durable.history.hold(Kind.SCOPE_CANCELLED, self.key, "", self._said, gets=self._gets)

    def _said(self, _: int) -> str:
        """What its line says. Where no clean-up is in it, it strikes at once again."""
        # It is written with the next call. If that is one of this scope, the replay may strike before it: it has its number all
        # the same.
        self._count_calls()
        assert self._stood is not None  # noqa: S101 -- it is noted
        so_far = self._so_far
        said = told_in(self._stood, so_far)
        if so_far.place is None:
            said = msgspec.structs.replace(said, after=0.0)
        elif said.after:
            said = msgspec.structs.replace(said, place=so_far.place)
        return msgspec.json.encode(said).decode()

    def _count_calls(self) -> None:
        if self.in_main and self.line is None and self._stood is not None and self in self._durable.scopes:
            count = max(self._durable.keys.count, self._highest_number())
            self._stood = msgspec.structs.replace(self._stood, count=count)

    def _gets(self, line: Line) -> None:
        self.line = line.line

    def _highest_number(self) -> int:
        """Of the calls that earlier attempts made in this scope. This one may be cut short before it makes them, and those
        after the scope must not have their numbers: they would find what was remembered for those, moments and children."""
        replay = self._durable.history.replay
        if ended_key(self.key) in replay.moments or replay.resumed is None:
            return 0
        first = replay.resumed.first_block
        return highest_number(replay.moments, (number - first for number in replay.resumed.blocks))

    def strike_again(self, line: Line) -> None:
        """The history has come to where it struck."""
        self._stood, self.line = stood(line), line.line
        told = late_key(self.key) in self._durable.history.replay.moments
        self._so_far.cuts_again = not (self._stood.late or told)
        self.inner.cancel(reason="an earlier attempt was cut short here")

    def _ends_in_time(self, *, raises: bool) -> None:
        """Remembers it before a later call does anything that rests on it."""
        if self.until < math.inf and self._durable.history.replay.over:
            if raises:
                self._durable.failures.leaves_scope(self._has_ended)
            else:
                self._has_ended()

    def _has_ended(self) -> None:
        history, ended = self._durable.history, ended_key(self.key)
        history.replay.moments[ended] = 0.0
        history.hold(Kind.MOMENT, ended, "", "0.0")

    def _is_left_by_a_failure(self, error: BaseException | None) -> bool:
        """Whether a step or a block in it has failed, and the deadline struck on the way out: it has cut nothing short. The
        attempt may fail of that failure; the next one does without it then, and is not to be cut short in its place."""
        return error is not None and self._stood is None and self._durable.failures.is_failure(error)

    def _is_left(self, error: BaseException | None) -> None:
        """The block ends, with this exception or none. What cut a plain await short is remembered here."""
        # What is around it may strike again, and its task go on, before its line has its turn; or a failure that came first.
        failed = error is not None and self._durable.failures.is_failure(error)
        fits = struck_too if self.is_cut_from_outside or failed else is_left_so
        replay = self._durable.history.replay
        if not self.inner.cancel_called and (line := replay.take_out(self.key, fits)) is not None:
            self.strike_again(line)
        elif error is None and not self.inner.cancel_called and (line := replay.take_out(self.key, _is_not_asked)):
            # A plain await in it is quicker than the calls of other tasks that stood when it struck.
            self._so_far.in_time = True
            self.strike_again(line)
        self._so_far.in_time |= error is None and self._is_over_sooner()
        if self.inner.cancel_called and not self._is_left_by_a_failure(error):
            self._is_cut_short()
            if self._so_far.late is None:
                self._so_far.outer = self.is_cut_from_outside
                self._so_far.late = not comes_from_a_cancellation(error) or self._so_far.outer
                if self._so_far.late and self.line is not None and replay.over and not self._so_far.in_time:
                    # Its line was written before that was known, because those of other tasks came after it.
                    self._durable.history.moment(late_key(self.key), float(self.line))
        else:
            self._ends_in_time(raises=error is not None)

    def _is_over_sooner(self) -> bool:
        """Whether it had cut something short in an attempt before, and nothing in this one: not even a durable call, whose
        cancellation the handler has swallowed. A plain await was quicker, or the code has changed."""
        cut_calls = self._stood is not None and self._stood.at
        return self._so_far.cuts_again and not (cut_calls and self._so_far.late is False)

    def _is_cut_short(self) -> None:
        self._durable.note_cancellation(of=self)
        self._count_calls()
        if self.in_main and self._stood is not None:
            self._durable.keys.go_on_after(self._stood.count)
        leave_behind(self._durable, self._durable.history.replay.unopened.leave(self.key))

    @contextmanager
    def opened(self, *, too_slow: str = "") -> Generator[Scope]:
        """The block. `too_slow`: what the `trio.TooSlowError` says that is raised if it was cut short."""
        with self.inner:
            self._durable.scopes.append(self)
            self._durable.history.replay.scopes.add(self.key)
            self._durable.cancelling.moves()
            if not self.inner.cancel_called and (line := self._durable.history.replay.take_out(self.key, is_opened)):
                self.strike_again(line)
            self._durable.hand_out()
            swallowed.await_line(self._durable, self, self._so_far)
            try:
                yield self
            except BaseException as error:
                self._is_left(error)
                raise
            else:
                self._is_left(None)
            finally:
                self.inner.deadline = math.inf
                self._durable.quiet.striking.ends(self)
                self._durable.scopes.remove(self)
                self._durable.quiet.leaves_scope(self.key, struck=self._stood is not None)
                self._durable.history.replay.scopes.discard(self.key)
                self._durable.cancelling.moves()
        if too_slow and self.cancelled_caught:
            raise trio.TooSlowError(too_slow)


def ended_key(key: str) -> str:
    """Under which it is remembered that the scope `key` ended in time."""
    return f"{key} ended"


def innermost(durable: Durable) -> str | None:
    """The key of the remembered scope that the caller is in; None if it is in none."""
    ours = {scope.inner: scope.key for scope in durable.scopes if scope.remembered}
    if ours:
        for scope in scopes_around(trio.lowlevel.current_task()):
            if scope in ours:
                return ours[scope]
    return None


def is_struck(durable: Durable) -> bool:
    """Whether one of the remembered scopes that the caller is in has struck."""
    struck = {scope.inner for scope in durable.scopes if scope.has_struck}
    return bool(struck) and any(scope in struck for scope in scopes_around(trio.lowlevel.current_task()))


def _is_asked(said: Stood) -> bool:
    return said.read or (said.asked and not said.late)


def _is_not_asked(said: Stood) -> bool:
    return not said.asked
