"""The beginning of a later attempt, which one statement brings what those before have written, and what lets it go on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio
from msgspec.structs import replace

from ...errors import DatabaseUnavailable
from ...jobs import CancelRequest
from ...lines import Kind
from ...states import options_of
from .afresh import is_to_begin
from .astray import of_code_that_fits, without_what_went_astray
from .half_undone import fail_in_body, fail_instead, learn_what_was_undone
from .interrupted import comes_after_undoing, goes_elsewhere, is_partly_plain, misfit, plain_failure
from .keys import block_number
from .legible import check_legible
from .old_lines import completed
from .reordering import cuts_too_early, may_begin_anew, may_cut, stands_long_enough, waiting_for_another
from .replay import Replay
from .standing import is_behind_a_cut, is_cut_now
from .swallowed import await_cancellation

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from ...lines import Line, Resumed
    from ..jobs.running_job import RunningJob
    from .attempts import DurableParts
    from .durable import Durable

_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""Seconds until a database that did not answer is asked again; doubled each time."""
_LONG = 10.0
"""Seconds in which the replay has not gone on, after which a failure that was left out counts as missing."""
_SOON = 0.5
"""The same where no more tasks are busy than were then: what draws a progress bar is no reason to wait."""
_VERY_LONG = 60.0
"""Seconds after which a line is handed out before its turn though a task may still come to its call: it awaits something plain
that is not one of Trio's means of synchronisation, and may wait for a task that waits for its line."""


async def history_of(running: RunningJob, parts: DurableParts, *, goes_on: bool = False) -> Resumed:
    """What the attempts before have written. Waits while the database does not answer; an attempt whose lease is lost ends.
    `goes_on`: its handler is durable, and goes on with that: it is told of a cancellation when it has replayed."""
    pause = _PAUSE
    while True:
        try:
            found = await parts.store.resume(running.claim)
            check_legible(running.claim.id, () if found is None else found.lines)
            if found is not None and is_to_begin(found) and await parts.store.begin_afresh(running.claim):
                found = await parts.store.resume(running.claim)
            # The deadline passed while no worker held the job, and no watchdog has told it so yet?
            late = found is not None and found.lines and not found.cancelling and _is_overdue(running, parts)
            if late and goes_on and await parts.store.comes_after_deadline(running.claim):
                found = await parts.store.resume(running.claim)
            break
        except DatabaseUnavailable:
            await trio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
    if found is None:
        parts.jobs.lose(running)
        running.cancel("fence-lost")
        await trio.lowlevel.checkpoint()
        raise RuntimeError(f"job {running.claim.id} lost its lease before its handler began")
    return found


async def resume(durable: Durable) -> None:
    """Reads the history of a job that has one."""
    running = durable.running
    found = await history_of(running, durable.parts, goes_on=True)
    found = replace(found, lines=without_what_went_astray(found.lines))
    size = sum(len(line.value or "") for line in found.lines)
    replay = Replay(running.claim.id, completed(found.lines))
    replay.resumed = found
    moments = of_code_that_fits(replay.moments, found.lines)
    replay.unopened.found(set(found.blocks) - _ended(found, replay), moments, found.first_block)
    replay.unopened.waits.events.update(found.events)
    learn_what_was_undone(replay.unopened.waits, found.lines)
    durable.history.resumed(replay, found.last, size, known=not found.is_new)
    durable.quiet.resumes(found.lines)
    durable.cancelling.resumes = False
    await_cancellation(durable)
    for said in replay.left_out.marks:
        durable.history.hold(Kind.MOMENT, said, "", repr(float(said.partition(":")[0])))
    if found.cancelling:
        running.ask(CancelRequest(found.cause or "user", found.message))
    elif _is_overdue(running, durable.parts):
        if found.lines:
            running.ask(CancelRequest("deadline", None))
        else:
            running.cancel("deadline")
            await trio.lowlevel.checkpoint()


def help_on(durable: Durable, since: float) -> bool:
    """No call has come for the next line, since a moment on Trio's clock. A failure that was left out because an attempt had
    failed of it is handed out again if the line may rest on it. Without one this is a mismatch, if every task stands in a
    durable call. Returns whether the attempt is to begin anew, because tasks have gone on in another order."""
    replay, caller = durable.history.replay, trio.lowlevel.current_task()
    waiting = [task for task, call in durable.standing.items() if call.turn is not None]
    if any(is_cut_now(task) for task in waiting if task is not caller):
        return False  # it has only not had its turn since
    if durable.quiet.delivering.goes_on:
        return False  # a block that was cut short is about to be left
    stuck = durable.all_stand()
    if stuck and (early := durable.cancelling.awaited) is not None:
        # No task comes any nearer to where it stood.
        durable.cancelling.comes_now()
        if replay.next_line is not early:
            return False
    # A task may stand in a plain await for what comes of the failure. Nothing tells that from a task that does something; the
    # same failure again is no mistake, however slow that is.
    half = (durable.running.timeout_deadline - durable.running.sent) / 2
    stood_still, line = trio.current_time() - since, replay.next_line
    if stuck and durable.cancelling.noted:
        # What has failed in a clean-up is done again though an outer one had undone its part after it: that has its lines then.
        durable.hand_out(early=True, anew=True)
        if _has_gone_on(replay, line):
            return False
    waits_long = stood_still >= _SOON and _only_wait(durable, stood_still)
    long = waits_long or stood_still >= min(_LONG, half)
    if (stuck or long) and durable.failures.recall():
        durable.hand_out()
        return False
    very_long = stood_still >= min(_VERY_LONG, half)
    if ((stuck or waits_long) and fail_instead(durable)) or (
        (stuck or waits_long or very_long) and fail_in_body(durable)
    ):
        return False
    if long and goes_elsewhere(durable, for_long=(waits_long and stood_still >= _LONG) or very_long):
        misfit(durable, replay.stuck(), durable.standing)
        return False
    # Plain code has failed, and its nursery has cut these short: what never stands in a call, a progress bar, is left by that.
    fails = stood_still >= _SOON and any(is_partly_plain(durable, {task: durable.standing[task]}) for task in waiting)
    cut = any(map(is_behind_a_cut, waiting)) or replay.strikes_next
    if ((stuck or fails) and cut) or (fails and long):
        # It had ended all the same, and is cut sooner now: its nursery's failure comes before its line. Or a scope has struck
        # while others stood in calls to which they come no more: a limiter was given to other tasks then. Or that failure has
        # cut the task of the next line short, and a call that had come of another one has its line after it.
        durable.hand_out(early=True)
        if _has_gone_on(replay, line):
            return False
    if (stuck or waits_long) and replay.goes_on_without():
        durable.hand_out()
    elif stuck:
        plain = comes_after_undoing(durable) or plain_failure(durable, durable.standing) is not None
        if replay.out_of_order and not plain and may_begin_anew(durable):
            return True
        misfit(durable, replay.stuck(), durable.standing)
    elif very_long:
        durable.hand_out(early=True)
    else:
        return give_way(durable, stood_still)
    return False


def _has_gone_on(replay: Replay, line: Line | None) -> bool:
    """Whether the replay has, from this line: a call has its turn, or a cancellation has come, and what it cuts short has yet
    to go on."""
    return replay.over or not replay.idle or replay.next_line is not line


def give_way(durable: Durable, stood_still: float | None = None) -> bool:
    """The call of the next line may be behind a limiter or a lock that a task has which waits for a line of its own: this
    attempt may have given them to other tasks. Where every task waits for its line or for another task, that one has its line
    first. If it has none, and the replay has `stood_still` for some seconds, it goes live. Returns whether the attempt is to
    begin anew instead: tasks would be cut short that had ended by then.
    """
    replay = durable.history.replay
    if not _only_wait(durable, stood_still or 0.0) or next(waiting_for_another(durable), None) is None:
        return False
    if any(scope.is_about_to_be_cancelled() for scope in durable.scopes):
        return False
    if (line := replay.comes_before_others()) is not None and cuts_too_early(durable, line):
        if stood_still is None or not stands_long_enough(durable, stood_still):
            return False
        if may_begin_anew(durable):
            return True
        if line.kind is Kind.CANCELLED and durable.running.cancel_reason is None:
            # The clean-up would not know what was done, and say that all is undone.
            misfit(durable, replay.stuck(reordered=True), durable.standing)
            return False
    following = replay.next_line
    durable.hand_out(early=True)
    if stood_still is None or _has_gone_on(replay, following):
        return False
    if durable.failures.recall():
        durable.hand_out()
    elif comes_after_undoing(durable):
        misfit(durable, replay.stuck(), durable.standing)
    elif may_cut(durable) and may_begin_anew(durable):
        return stands_long_enough(durable, stood_still)
    elif durable.cancelling.is_held_back:
        misfit(durable, replay.stuck(reordered=True), durable.standing)
    elif replay.goes_on_by_keys():
        durable.hand_out()
    return False


def _only_wait(durable: Durable, stood_still: float) -> bool:
    """Whether every task waits for its line or for another task, but for as many as were busy when the next line was written:
    what draws a progress bar sleeps between two looks at it, and comes to no call. One of these may still be on its way to a
    call that had begun by then: that is waited for."""
    line = durable.history.replay.next_line
    allowed = 0.0 if line is None else durable.quiet.allowed(line.line)
    busy = list(durable.not_standing(_waiting(durable), or_wait=True))
    if busy and line is not None and stood_still < _LONG and durable.quiet.is_missing(line):
        return False
    if durable.quiet.delivering.ends_soon(busy, trio.current_time() - stood_still):
        return False
    return len(busy) <= (0.0 if allowed == math.inf else allowed)


def help_those_who_ask(durable: Durable, asking: AbstractSet[trio.lowlevel.Task], since: float) -> None:
    """Tasks ask by plain code for the ends of children that have none: these live, or are started when the replay is over.
    Since a moment on Trio's clock no call has come for the next line: its task may be behind a lock that one of these has.
    Where every other task waits for its line, too, or for another task, the replay goes on out of order, or is over."""
    replay, line = durable.history.replay, durable.history.replay.next_line
    half = (durable.running.timeout_deadline - durable.running.sent) / 2
    if trio.current_time() - since < min(_LONG, half):
        return
    if not durable.all_stand(_waiting(durable) | asking, or_wait=True):
        return
    if not durable.failures.recall():
        durable.hand_out(early=True)
    if replay.next_line is not line:
        durable.hand_out()
    elif comes_after_undoing(durable):
        misfit(durable, replay.stuck(), durable.standing)
    elif replay.goes_on_by_keys():
        durable.hand_out()


def _waiting(durable: Durable) -> set[trio.lowlevel.Task]:
    """The tasks that wait for their lines."""
    return {task for task, call in durable.standing.items() if call.turn is not None and not call.turn.is_set()}


def _ended(found: Resumed, replay: Replay) -> set[int]:
    """The numbers of the blocks that have ended."""
    ends = [line for line in found.lines if line.kind in (Kind.BLOCK, Kind.BLOCK_FAILED)]
    keys = [line.key for line in ends if line not in replay.left_out]
    numbers = [block_number(key, replay.moments) for key in keys]
    return {found.first_block + number for number in numbers if number is not None}


def _is_overdue(running: RunningJob, parts: DurableParts) -> bool:
    deadline = options_of(running.claim).deadline
    return deadline is not None and deadline - parts.clock.epoch_offset <= trio.current_time()
