"""The cancellation of an attempt, and where it comes again in the next one, which replays.

Its line has the keys of the calls that stood then, and comes again while these stand. A task in a plain await stands in none,
and no line says how far it had come since the last one. So such a cancellation comes again as long after a task came to a
durable call, or out of one, as it came before, when the main task has begun as many calls: sooner, the code would be cut short
before the place where its clean-up is, or its clean-up's calls would have other numbers. So does the deadline of a remembered
scope, if a clean-up inside of it made a durable call. A scope that its own task has cut short comes again when that task
cuts it short again, or goes beyond that place.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, cast

import msgspec
import trio

from ...describing import leaves_of
from ...errors import ReplayMismatch
from ...lines import BeyondLimit, Kind
from ...trio_internals import scopes_around
from ..jobs.job_states import HELD_BACK
from .afresh import is_asked_by
from .beginning import REFUSED
from .detours import HALF_WAY
from .failures import is_a_cancellation, is_its_word
from .interrupted import Interrupted, is_undone
from .once_more import is_still_to_come, is_the_jobs, remember_at_the_end, runs_once_more, times_out_half_way
from .own_tasks import own_task
from .places import Watch, place_of_the_cut
from .reordering import may_begin_anew
from .scopes import is_struck
from .stood import Stood, stood

if TYPE_CHECKING:
    from ...jobs import CancelReason
    from ...lines import Line
    from .durable import Durable

_LONGEST = 10.0
"""Seconds after which a cancellation comes again wherever the code is (half of the attempt's timeout, if that is less)."""
COMPENSATED = "0:compensated"
"""The key of the moment at which a clean-up has ended well. See migrations/0095_clean_ups_that_did_not_end.sql."""


@dataclass(slots=True)
class _Again:
    timer: trio.CancelScope
    """Its deadline is when the cancellation comes again, if the code does not come to the place before."""
    latest: float
    """When it comes again wherever the code is."""
    line: Line
    watch: Watch | None = None


class Cancelling:
    """Of one attempt. `noted`: the history has it."""

    __slots__ = (
        "_again",
        "_beyond",
        "_came",
        "_count",
        "_durable",
        "_held_back",
        "_moved",
        "_undone",
        "a_task_failed",
        "noted",
        "resumes",
        "told",
    )

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self.noted = False
        self.told = False
        """Whether a durable call of this attempt was cut short by it, or has begun after it."""
        self.resumes = False
        """The history is being read, so it is not known yet where the replay ends."""
        self._held_back: CancelReason | None = None
        """It waits for the end of the replay."""
        self._came = math.inf
        """When the job was cancelled, on Trio's clock."""
        self._moved = trio.current_time()
        """When a task last came to a durable call, or out of one, before the job was cancelled."""
        self._count = 0
        """How many calls the main task had made, in the attempt that was cancelled."""
        self._again: _Again | None = None
        """A cancellation that is to come again in a plain await."""
        self._beyond = False
        """Whether the code had gone on behind that place when it came."""
        self.a_task_failed = False
        """Whether a task of the job's nursery has failed."""
        self._undone: bool | None = None
        """Whether the steps that have ended since the job was cancelled have all succeeded; None if there was none."""

    def begins(self) -> None:
        """An attempt begins that is to read its history. What was asked for since its claim waits, too."""
        running, self.resumes = self._durable.running, True
        if running.reason in HELD_BACK:
            self._held_back, running.reason = running.reason, None

    def moves(self, *, asked: bool = False) -> None:
        """A task comes to a durable call, or out of one. `asked`: it was just asked whether the job is cancelled."""
        running = self._durable.running
        if (running.reason if asked else running.cancel_reason) is None:
            self._moved = running.run.now()
            if self._again is not None and self.awaited is not None:
                self._set(self._again)

    def holds_back(self, reason: CancelReason) -> bool:
        """Whether a cancellation of the job must wait: an attempt that still replays has not come to where it is now, and
        where a result waits for its turn the handler has not gone on with what was there before."""
        quiet = self._durable.quiet
        replays = self.resumes or not self._durable.history.replay.over or quiet.holds_up() or quiet.delivering.holds
        replays = replays or (reason in HELD_BACK and not self.noted and self._durable.suspension.returning.holds())
        if reason in HELD_BACK and not replays and self._comes_before_lines():
            return True
        if reason not in HELD_BACK or not replays or self.noted:
            self._came = min(self._came, trio.current_time())
            if reason in HELD_BACK and not self.noted and not replays:
                quiet.striking.job_is_cancelled()
            return False
        self._held_back = reason
        return True

    @property
    def is_unsaid(self) -> bool:
        """Whether the handler is being cancelled, and the history does not say so yet."""
        return not self.noted and self._durable.running.reason in HELD_BACK

    @property
    def is_written(self) -> bool:
        """Whether the history has the cancellation."""
        return self.noted and not self._durable.history.holds(Kind.CANCELLED)

    @property
    def ends_job(self) -> bool:
        """Whether a failure of the handler ends the job, whose deadline has passed: no attempt has more to undo."""
        return self.is_written or not self._durable.history.has_lines

    @property
    def is_held_back(self) -> bool:
        """Whether one waits for the end of the replay."""
        return self._held_back is not None

    def _comes_before_lines(self) -> bool:
        """Whether calls are still to have their lines, of which a clean-up must know: it comes in the next attempt."""
        durable = self._durable
        if self.noted or not durable.history.replay.awaits_keys or not may_begin_anew(durable):
            return False
        durable.suspension.begin_anew()
        return True

    def goes_on_live(self) -> None:
        """The replay is over, or no result waits for its turn."""
        waits = self.is_held_back and not self.noted and self._durable.suspension.returning.holds()
        if self._durable.quiet.delivering.holds or waits:
            return
        reason, self._held_back = self._held_back, None
        if reason is not None:
            self._durable.running.cancel(reason)

    def is_met(self) -> bool:
        """The handler meets a cancellation. Returns whether the history may have to be told of it: the replay is over."""
        self.told = self.told or self.noted
        return self._durable.history.replay.over

    def note(self, at: tuple[str, ...], *, clean_up: bool) -> None:
        """Remembers it, if there is one, while these calls stood. `clean_up`: one that it has led to begins."""
        running = self._durable.running
        reason = running.cancel_reason
        if reason is None or reason in REFUSED or self.noted:
            return
        self._is_noted()
        self.told = True
        after = self.seconds_to(min(self._came, running.deadline))
        self._count, striking = self._durable.keys.count, self._durable.quiet.striking
        place = (place_of_the_cut() if clean_up and after else None) or ()
        said = Stood(at, reason, self._count, after, before=striking.before, place=place)
        self._durable.quiet.note_cut(striking.seen)
        self._durable.history.hold(Kind.CANCELLED, "job", "", msgspec.json.encode(said).decode())

    def _is_noted(self) -> None:
        self.noted = self._durable.history.room.cleans_up = True

    def seconds_to(self, moment: float) -> float:
        """How long a task stood in a plain await before it was cancelled at a moment, as far as one can know; 0 if none did."""
        if self._durable.all_stand():
            return 0.0
        return min(max(min(moment, trio.current_time()) - self._moved, 0.001), _LONGEST)

    def clean_up_begins(self) -> None:
        """A call begins (it has asked for the reason) in a task that was cancelled, in a clean-up: what was cut short may have
        been no durable call. What is done now rests on the cancellation, and has numbers above those of what came before."""
        struck = self._durable.running.reason is not None or is_struck(self._durable)
        # A deadline that has passed in plain code cuts the next await short.
        is_cut = trio.current_effective_deadline() <= trio.current_time()
        if not struck or (is_cut and not self._is_cut_in_a_clean_up()):
            return
        self._durable.note_cancellation(clean_up=True)
        if self.noted and self._durable.keys.in_main:
            self._durable.keys.go_on_after(self._count)

    def _is_cut_in_a_clean_up(self) -> bool:
        """Whether the caller is in a clean-up of the cancelled job whose time is over: its calls come to nothing."""
        nursery = self._durable.running.scope_nursery
        if nursery is None or self._durable.running.cancel_reason is None:
            return False
        around = takewhile(lambda scope: scope is not nursery.cancel_scope, scopes_around(trio.lowlevel.current_task()))
        return any(scope.shield for scope in around)

    def task_failed(self, error: BaseException) -> None:
        """A task of the job's own nursery ends with an exception."""
        self.a_task_failed = self.a_task_failed or not is_a_cancellation(error)

    def step_ends(self, *, failed: bool) -> None:
        """A step of this attempt has ended."""
        if self._durable.running.cancel_reason is not None:
            self._undone = self._undone is not False and not failed

    def _ends_well(self, error: BaseException | None) -> bool:
        """Whether a handler that ends so has done its clean-up: if it is cancelled, or has said by `Discard` that nothing is
        left to do, after a step of its own; and if it has undone what it did because of a failure that came before."""
        durable = self._durable
        failures = durable.failures
        if error is None or failures.clean_ups.unanswered:
            return error is None
        told = self._undone is True and all(map(is_its_word, leaves_of(error)))
        if told or is_a_cancellation(error):
            return True
        ends_so = failures.each_attempt_ends_so(error) or failures.has_undone(error)
        undone = self._undone is not False and failures.clean_ups.failed is None
        return undone and (is_asked_by(error) or (durable.history.replay.over and ends_so))

    async def ended(self, error: BaseException | None = None) -> bool:
        """The handler has ended, with `error` or a value. If its clean-up has ended well, the history says so: only then a
        retry begins the job anew. Any other does the rest of it. Returns whether the job runs once more for that."""
        durable, history = self._durable, self._durable.history
        reason, fatal = durable.running.cancel_reason, durable.fatal
        if reason == "timeout" and error is not None and fatal is None and self.is_held_back:
            return await self._is_still_to_come(error, may_run=False)
        if isinstance(fatal, Interrupted):
            # Plain code has failed before the cancellation came, whatever its failure has cancelled.
            error, fatal = fatal.error, None
        mismatch = fatal or (history.replay.left() if error is None else None)
        # What comes after a clean-up that was cut short may say that all is undone, and it is not.
        cut = durable.running.cut is not None
        # Plain code had failed, which need not fail again: there is nothing left to come to.
        undone = not cut and issubclass(type(mismatch), ReplayMismatch) and is_undone(durable)
        if not undone and (mismatch is not None or cut or not self._ends_well(error)):
            if (reason or self._held_back) in HELD_BACK and (cut or is_the_jobs(mismatch or error)):
                may_run = not cut and mismatch is None
                return await self._is_still_to_come(mismatch or error, may_run=may_run)
            if reason == "timeout" and mismatch is None:
                await times_out_half_way(durable, error)
            return False
        reason = reason or (self._held_back if undone else None)
        if reason is None or reason in REFUSED:
            return False
        # Tasks in `job.nursery` may still clean up. One that never ends is found as other stuck handlers are.
        with trio.CancelScope(shield=True):
            await durable.running.children_ended()
            if reason in HELD_BACK and not self.noted and (undone or (error and not is_a_cancellation(error))):
                await remember_at_the_end(durable, reason, 0.0)
        # Without a durable call since it no line tells of it. What was called because an undo had failed need not come again.
        if (
            self.a_task_failed
            or durable.running.cut
            or not self.is_written
            or not (history.replay.over or undone or HALF_WAY in history.replay.moments)
        ):
            return False
        # The lease may be lost, or the history have no room: then a retry does the rest, which is nothing.
        with suppress(RuntimeError, BeyondLimit):
            history.moment(COMPENSATED, trio.current_time() + durable.parts.clock.epoch_offset, anew=True)
            await history.written()
        return False

    async def _is_still_to_come(self, error: BaseException | None, *, may_run: bool) -> bool:
        """The handler has ended with an exception of its own, or does not fit its history: a later attempt comes to the
        cancellation again, and does the clean-up. Returns whether the job runs once more for that."""
        durable = self._durable
        if durable.running.cancel_reason is not None:
            # Tasks in `job.nursery` may still clean up, and remember it.
            with trio.CancelScope(shield=True):
                await durable.running.children_ended()
        durable.history.forget_held()
        after = self.seconds_to(min(self._came, durable.running.deadline))
        untold = await is_still_to_come(durable, error, self._held_back, after)
        return untold and may_run and await runs_once_more(durable, error)

    def remembers_at_the_end(self, said: Stood) -> None:
        """The handler has ended before the history had the cancellation, and that says this of it."""
        self._is_noted()
        self._durable.history.hold(Kind.CANCELLED, "job", "", msgspec.json.encode(said).decode())

    # Again

    def again(self, line: Line) -> None:
        """The history has come to it."""
        found = stood(line)
        self._is_noted()
        self._count = found.count
        self.ends()
        self._durable.running.cancel(cast("CancelReason", found.reason))

    def is_early(self, line: Line) -> bool:
        """Whether the code has not come to where it stood, as far as one can know. The line is the next one, and the calls
        that it names stand."""
        found, running = stood(line), self._durable.running
        asked, waits = found.asked or found.read, self._durable.history.replay.unopened.waits
        if line.kind is Kind.CANCELLED and waits.has_failed_after(line.line) and self._has_begun(found):
            return False  # plain code had failed where a call has now, so the code does not come to the place of that
        if not (found.after or asked) or running.scope_nursery is None or self._is_asked_again(line):
            return False
        if self._again is None or self._again.line is not line:
            self.ends()
            self._moved = trio.current_time()
            # The code comes to its own call however long that takes; a guess would leave out what it does before.
            patience = math.inf if asked else min(_LONGEST, (running.timeout_deadline - running.sent) / 2)
            self._again = again = _Again(trio.CancelScope(), self._moved + patience, line)
            self._set(again)
            running.scope_nursery.start_soon(self._later, again, name="a cancellation that comes again")
            if found.place and running.task is not None:
                standing = self._durable.standing
                again.watch = Watch(running.task, standing, found.place, self)
        watch = self._again.watch
        if watch is not None and self._has_begun(found) and watch.is_there():
            return False
        return trio.current_time() < self._again.timer.deadline

    def reached(self) -> None:
        """A task has come to the place."""
        if (line := self.awaited) is not None and self._has_begun(stood(line)):
            self.comes_now()

    def _has_begun(self, found: Stood) -> bool:
        """Whether the main task has begun as many calls as when it came."""
        return self._durable.keys.count >= (found.begun or found.count)

    def _is_asked_again(self, line: Line) -> bool:
        """Whether the handler has called `cancel` of the scope that the line tells of."""
        return any(scope.key == line.key and scope.remembered and scope.asked for scope in self._durable.scopes)

    def _set(self, again: _Again) -> None:
        found = stood(again.line)
        # Where the place is known it is no guess when the code is there.
        here = not (found.asked or found.read or found.place) and self._has_begun(found)
        again.timer.deadline = min(again.latest, self._moved + found.after if here else math.inf)

    @own_task
    async def _later(self, again: _Again) -> None:
        with again.timer:
            await trio.sleep_forever()
        if self._again is again:
            self.comes_now()

    @property
    def awaited(self) -> Line | None:
        """The line, while it is too early for it."""
        # That of a scope may have come otherwise meanwhile: its task has called `cancel`.
        line = self._durable.history.replay.next_line
        return line if self._again is not None and self._again.line is line else None

    def comes_before_a_call(self) -> bool:
        """A call is about to begin. If it is one more than the main task had begun, the cancellation comes before it. Returns
        whether it does, or has come so: the call comes to nothing, and has no number."""
        if not self._durable.keys.in_main:
            return False
        if (line := self.awaited) is not None and self._is_of_main(line):
            self._beyond = True
            self.comes_now()
        # In a shield the handler is where it was then, and what comes after that call had a number.
        self._beyond = self._beyond and trio.current_effective_deadline() == -math.inf
        return self._beyond

    def _is_of_main(self, line: Line) -> bool:
        """Whether the main task, which begins a call, would not have begun that one."""
        ours = {scope.key for scope in self._durable.scopes if scope.in_main}
        return self._has_begun(stood(line)) and (line.kind is Kind.CANCELLED or line.key in ours)

    def comes_now(self) -> None:
        """It comes again wherever the code is."""
        assert self._again is not None  # noqa: S101 -- a line is awaited only while there is one
        self._again.latest = self._again.timer.deadline = -math.inf
        self._durable.hand_out()

    def ends(self) -> None:
        """It has come, or the attempt ends."""
        again, self._again = self._again, None
        if again is not None:
            again.timer.cancel()
            if again.watch is not None:
                again.watch.ends()
