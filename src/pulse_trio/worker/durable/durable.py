"""One attempt of a durable handler: its calls, its history, and where its tasks stand.

Every durable call goes the same way: `begin` (beginning.py) names it, `replayed` hands it the line that an earlier attempt
wrote, or says that it goes on live; then it does its work inside `awaiting`, and `record` writes its line before the handler
goes on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import trio

from ...errors import ReplayMismatch
from ...lines import Kind, Line
from ...trio_internals import scopes_around, tasks_from, waits_for_another_task, waits_for_its_own
from . import beginning, entering, steps, waits
from .beginning import VERSION
from .calls import Call, Turn
from .cancelling import Cancelling
from .changed import goes_live
from .failures import Failures, mark
from .history import History
from .interrupted import explained, misfit, note_plain_failure
from .keys import Keys
from .left_behind import await_left_behind
from .opening_scopes import OpenScope
from .own_tasks import is_own
from .quiet import Quiet
from .reordering import begin_anew
from .resuming import give_way, help_on, help_those_who_ask
from .seen import note_what_was_seen
from .standing import Awaiting, keys_of, may_get_its_line
from .suspension import Suspension

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Container, Coroutine, Iterator
    from collections.abc import Set as AbstractSet
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from datetime import datetime

    from ...durable_calls import DurableScope
    from ...handlers import Durability
    from ...jobs import CancelReason, Outcome
    from ..jobs.running_job import RunningJob
    from .attempts import DurableParts
    from .calls import Block
    from .scopes import Scope

_AT_ONCE, _FIRST_LOOK, _LONGEST_LOOK = 0.001, 0.05, 1.0
"""Seconds after which a call that waits for its line checks whether all others wait too: Trio does not say when a task ends.
The call that began last looks at once: behind a limiter each line of the history may need a look."""

RETURNED = Call("block", "")
"""Where the main task of a handler stands that has returned, while tasks of `job.nursery` run."""
RETURNED.scopes = ()


class Durable:
    """Made for each attempt of a durable handler. It implements the calls of `Job`."""

    def __init__(self, running: RunningJob, declared: Durability, parts: DurableParts) -> None:
        self.running = running
        self.parts = parts
        self.history = History(running, parts.writer, declared.version)
        self.failures = Failures(self.history)
        self.standing: dict[trio.lowlevel.Task, Call] = {}
        """The calls in which tasks of the handler stand, by task."""
        self.scopes: list[Scope] = []
        """The remembered scopes that are open."""
        self.fatal: Exception | None = None
        """What the attempt ends with, whatever the handler does with it: no line tells a later attempt of it."""
        self.cancelling = Cancelling(self)
        self.suspension = Suspension(self, declared.suspend_after)
        self.quiet = Quiet(self)
        self.keys = Keys(running, self.quiet.delivering)
        self.blocks: list[Block] = []
        """The blocks with children that are open."""

    @property
    def version(self) -> int:
        """That of the code which made the job's first durable call. It is remembered if it is not 1."""
        remembered = self.history.replay.moments.get(VERSION)
        if remembered is not None:
            return int(remembered)
        return self.history.code_version if self.is_first else 1

    @property
    def is_first(self) -> bool:
        """Whether no attempt before made a durable call, or what they made is forgotten."""
        found = self.history.replay.resumed
        return found is None or found.is_new

    # The calls of `Job`

    def step(self, function: Callable[..., Any], args: tuple[Any, ...], key: str | None) -> Coroutine[Any, Any, Any]:
        return self.keys.called("job.step", steps.step, self, function, args, key)

    def transaction_step(
        self, function: Callable[..., Any], args: tuple[Any, ...], key: str | None
    ) -> Coroutine[Any, Any, Any]:
        return self.keys.called("job.transaction_step", steps.transaction_step, self, function, args, key)

    def nursery(self, *, collect: bool, key: str | None) -> AbstractAsyncContextManager[Any]:
        return entering.open_nursery(self, collect=collect, key=key)

    def scope(self, seconds: float, key: str | None, *, fail: bool) -> AbstractContextManager[DurableScope]:
        return OpenScope(self, seconds, key, fail=fail)

    def sleep(self, seconds: float, key: str | None) -> Coroutine[Any, Any, None]:
        return self.keys.called("job.sleep", waits.sleep, self, seconds, key)

    def sleep_until(self, moment: datetime, key: str | None) -> Coroutine[Any, Any, None]:
        return self.keys.called("job.sleep_until", waits.sleep_until, self, moment, key)

    def wait_for_event(self, name: str, type_: Any, limit: float | None, key: str | None) -> Coroutine[Any, Any, Any]:
        return self.keys.called("job.wait_for_event", waits.wait_for_event, self, name, type_, limit, key)

    def suspended(self, *, returned: bool = False) -> Outcome:
        """The outcome of an attempt that was suspended. `returned`: its handler returned a value all the same."""
        return self.suspension.outcome(returned=returned)

    async def transaction_begins(self) -> None:
        """`job.transaction()` is about to begin."""
        await beginning.begin_transaction(self)

    def transaction_ends(self) -> None:
        """It is about to complete the job."""
        beginning.check_completion(self)

    # What all calls have in common

    async def replayed(self, call: Call, prepare: Callable[[], Awaitable[object]] | None = None) -> Line | None:
        """Waits for the call's turn. Returns its line; None: no attempt before came further, and the call does its work. With a
        line `prepare` is awaited before the replay goes on: no cancellation that came later strikes in it.

        Raises `ReplayMismatch`.
        """
        replay = self.history.replay
        if replay.over and not self.quiet.holds_up():
            try:
                line = replay.by_key(call)
            except ReplayMismatch as error:
                raise misfit(self, error, {trio.lowlevel.current_task(): call}) from None
            if line is not None:
                if prepare is not None:
                    await prepare()
                if not replay.awaits_keys:
                    self._goes_on_live()
                return line
            try:
                await trio.lowlevel.checkpoint_if_cancelled()
            except trio.Cancelled:
                with self.awaiting(call):  # what struck is remembered: a clean-up may come next
                    raise
            await goes_live(self, call)
            return None
        try:
            replay.begin(call)
        except ReplayMismatch as error:
            raise misfit(self, error, {trio.lowlevel.current_task(): call}) from None
        call.turn = turn = trio.Event()
        pause, seen, since, late = _AT_ONCE, replay.next_line, trio.current_time(), False
        try:
            with self.awaiting(call):
                self.hand_out()
                while not turn.is_set():
                    try:
                        with trio.move_on_after(pause, shield=late and may_get_its_line(self, call)):
                            await turn.wait()
                    except trio.Cancelled:  # noqa: ASYNC103 -- it comes again after the line
                        if not (late := may_get_its_line(self, call)):
                            raise
                    if not turn.is_set():
                        first, pause = pause == _AT_ONCE, max(_FIRST_LOOK, min(pause * 2, _LONGEST_LOOK))
                        if first:
                            if replay.idle and replay.is_latest(call):
                                give_way(self)
                            continue
                        self.hand_out()
                        if replay.next_line != seen:
                            seen, since = replay.next_line, trio.current_time()
                        elif replay.idle and not replay.over and help_on(self, since):
                            await begin_anew(self)
                if (instead := self.failures.instead.pop(call, None)) is not None:
                    raise instead
                if call.line is None:
                    # The last line may have been a cancellation of this very call.
                    await trio.lowlevel.checkpoint_if_cancelled()
                elif mark(call.line.line, "needed") in replay.moments:
                    # It decides which way the handler goes: this is written first.
                    await self.history.written()
            if call.line is not None and prepare is not None:
                # One that was cancelled and had ended all the same has its end, as long as the lease is proven. The task of the
                # line before it may cancel it only now: it goes on when this line has been handed out.
                late = late or may_get_its_line(self, call)
                while True:
                    until = self.running.lease_deadline if late else math.inf
                    with trio.CancelScope(shield=late, deadline=until) as ending:
                        await prepare()
                    if not ending.cancelled_caught:
                        break
                    await trio.lowlevel.checkpoint_if_cancelled()
                    # The lease was renewed meanwhile, or is over, which a clean-up's shield keeps from this task for a while.
                    late = trio.current_time() < self.running.lease_deadline
        except BaseException:
            replay.leave(call)
            self.hand_out()
            raise
        finally:
            call.turn = None
        if self.fatal is not None:
            raise self.fatal
        replay.taken(call)
        self.hand_out()
        if call.line is None:
            with self.awaiting(call):
                await trio.lowlevel.checkpoint_if_cancelled()  # by a deadline: the replay may have ended here
                await await_left_behind(self)  # by a scope that the replay has left
                await goes_live(self, call)
                if call.handles is not None and note_plain_failure(self, call):
                    await self.history.written()  # it began while other tasks had lines to come
        return call.line

    def awaiting(self, call: Call) -> Awaiting:
        """The task stands in a durable call while the block is open."""
        return Awaiting(self, call)

    async def record(
        self, call: Call, kind: Kind, value: str | Callable[[int], str] | None = None, *, event_id: int | None = None
    ) -> Line:
        """Writes the call's line, and returns when its turn has come. `value` is JSON, or makes it from the line's number. A
        cancellation waits, as long as the lease is proven. Raises `BeyondLimit`, `CodecError`."""
        if self.fatal is not None:
            await trio.lowlevel.checkpoint()
            raise self.fatal
        async with self.quiet.delivering.writing() as has_others:
            try:
                if has_others:
                    self.quiet.note(call)
                line = self.history.add(kind, call.key, call.name, value, event_id=event_id)
            except Exception as error:
                self.fail(error)
                raise
            await self.history.written(goes_on=True)
        await self.quiet.delivered(call, line.line)
        return line

    def moment(self, call_key: str, seconds: float, within: str = "") -> float:
        """When a call that lasts `seconds` ends, counted from the first attempt that made it: seconds since 1970 by the
        database's clock. Written with the next line; a caller that may be suspended awaits `history.written()` first."""
        return self.history.moment(call_key, trio.current_time() + self.parts.clock.epoch_offset + seconds, within)

    def on_our_clock(self, moment: float) -> float:
        """A remembered moment on Trio's clock."""
        return moment - self.parts.clock.epoch_offset

    def all_stand(self, standing: Container[trio.lowlevel.Task] | None = None, *, or_wait: bool = False) -> bool:
        """Whether every task of the handler stands in a durable call (is `standing`), or waits for tasks of its own that do.
        `or_wait`: or waits for what another task does."""
        return next(self.not_standing(standing, or_wait=or_wait), None) is None

    def not_standing(
        self, standing: Container[trio.lowlevel.Task] | None = None, *, or_wait: bool = False
    ) -> Iterator[trio.lowlevel.Task]:
        """The tasks that do neither."""
        standing = self.standing if standing is None else standing
        for task in tasks_from(self.running.task):
            if (
                task not in standing
                and not is_own(task)
                and not waits_for_its_own(task)
                and not (or_wait and waits_for_another_task(task))
            ):
                yield task

    def stands_still(self, asking: AbstractSet[trio.lowlevel.Task], since: float) -> None:
        """The replay stands still, and these tasks ask for the ends of children that have none."""
        help_those_who_ask(self, asking, since)

    # Cancellation

    def note_cancellation(self, *, of: Scope | None = None, clean_up: bool = False) -> None:
        """A durable call was cancelled, or one begins in a task that was, as its `clean_up`: what struck is remembered, with
        where the tasks stood. `of`: it is known only that this scope has struck."""
        if not self.cancelling.is_met():
            return
        if self.history.replay.over:
            # The handler may have cut its own scope short because of it, and a later attempt waits until it does so again.
            note_what_was_seen(self)
        at, around = self.keys_that_stand(), set(scopes_around(trio.lowlevel.current_task()))
        for scope in self.scopes:
            # What stands in another one may have its result already, and only wait for its turn: whether that struck too late
            # is known when it goes on.
            if scope is of or (of is None and scope.inner in around):
                scope.note(at, cuts=of is None, clean_up=clean_up)
        self.cancelling.note(at, clean_up=clean_up)

    def keys_that_stand(self) -> tuple[str, ...]:
        """Those of the calls in which tasks stand."""
        return keys_of({task: call for task, call in self.standing.items() if call is not RETURNED}, self.scopes)

    def holds_back(self, reason: CancelReason) -> bool:
        """Whether a cancellation of the job must wait: an attempt that still replays has not come to where it is now."""
        self.quiet.cut_blocks.hears(reason)
        return self.cancelling.holds_back(reason)

    def _cancel_again(self, line: Line) -> None:
        """The history has come to a cancellation."""
        if line.kind is Kind.CANCELLED:
            self.cancelling.again(line)
            return
        self.cancelling.ends()
        for scope in self.scopes:
            if scope.key == line.key:
                scope.strike_again(line)

    # Replay

    def hand_out(self, *, early: bool = False, anew: bool = False) -> None:
        """Lets the replay go on, as far as it can now. `early`: a call that waits gets its line before its turn; `anew`: or one
        that has none goes on live."""
        replay = self.history.replay
        while (
            self.fatal is None
            and (early or not self.quiet.holds_up())
            and (turn := self._strikes_anyway() or replay.turn(self.cancelling.is_early, early=early, anew=anew))
        ):
            early = False
            if turn.call is not None:
                turn.call.line = turn.line
                assert turn.call.turn is not None  # noqa: S101 -- it waits
                turn.call.turn.set()
                break
            assert turn.line is not None  # noqa: S101 -- a cancellation
            self._cancel_again(turn.line)
        self.quiet.cut_blocks.moves()
        if replay.out_of_order and not replay.over:
            for scope in self.scopes:
                scope.strike_out_of_order()
        if replay.over and not self.quiet.holds_up():
            self._goes_on_live()

    def _strikes_anyway(self) -> Turn | None:
        """The next line is that of a scope in which all is cut short already, for something else: where its tasks stood then
        they stand no more."""
        line = self.history.replay.next_line
        if line is not None and line.kind is Kind.SCOPE_CANCELLED:
            for scope in self.scopes:
                if scope.key == line.key and scope.is_cut_from_outside:
                    self.history.replay.take_out(scope.key, bool)
                    return Turn(None, line)
        return None

    def opens(self, number: int) -> None:
        """A block is open."""
        self.history.replay.unopened.opened(number)
        self.hand_out()

    def opens_no_more(self) -> None:
        """All tasks stand elsewhere: the other blocks are not opened again."""
        self.history.replay.unopened.give_up()
        self.hand_out()

    def _goes_on_live(self) -> None:
        self.suspension.returning.replay_is_over()
        for scope in self.scopes:
            scope.goes_on_live()
        for block in self.blocks:
            block.goes_on_live()
        self.cancelling.goes_on_live()

    def fail(self, error: Exception) -> Exception:
        """The history does not fit the code, or what was done is no line of it, so that no later attempt would come past it: no
        call of this attempt does anything more, and no line is written. Returns the error, for who raises it."""
        error = explained(self, error)
        if self.fatal is None:
            self.fatal = error
        for call in self.standing.values():
            if call.turn is not None:
                call.turn.set()
        self.quiet.cut_blocks.moves()
        return error

    # The attempt

    def cleans_up(self, scope: trio.CancelScope) -> None:
        """A `job.cleanup()` of the handler begins, with this scope."""
        self.failures.clean_ups.scopes.add(scope)

    def clean_up_failed(self, error: BaseException) -> None:
        """A `job.cleanup()` of the handler ends with this exception."""
        self.failures.clean_ups.fails(error)

    def task_failed(self, error: BaseException) -> None:
        """A task of `job.nursery` ends with an exception: the attempt fails of it."""
        self.failures.task_failed(error)
        self.cancelling.task_failed(error)
