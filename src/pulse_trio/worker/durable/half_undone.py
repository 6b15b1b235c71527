"""A worker that was lost while its handler undid what it had done, because plain code had failed: the next attempt does the
rest.

No line brings such a failure again. So a durable call of the handler fails in its place, of `FailedBefore`, and what of the
compensation has lines is replayed. `UNDONE` and `UNDONE_BY` say what is known of the place (interrupted.py).
"""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import msgspec
import trio

from ...describing import leaves_of
from ...errors import FailedBefore, ReplayMismatch
from ...lines import BeyondLimit, Kind
from .afresh import gives_up, is_asked_by
from .calls import Block, Call
from .failures import reasons_of
from .interrupted import ALL, UNDONE, UNDONE_BY, plain_failure
from .keys import block_number
from .mismatches import failed_no_more, mismatch
from .stood import is_late, stood
from .under_way import END

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...lines import Line
    from .durable import Durable
    from .replay import Replay
    from .under_way import UnderWay


def learn_what_was_undone(waits: UnderWay, lines: Sequence[Line]) -> None:
    """From the lines of the attempts before: which of them had begun to undo what they did, because plain code had failed. Not
    where the last of these has undone all and failed of it: the next one need not do it again."""
    told = sorted(
        (line for line in lines if line.kind is Kind.MOMENT and line.key == UNDONE), key=lambda line: line.line
    )
    if not told or float(told[-1].value or 0) == ALL:
        return
    waits.marks = told
    numbers = {
        line.line - 1: float(line.value or 0) for line in lines if line.kind is Kind.MOMENT and line.key == UNDONE_BY
    }
    for mark, then in zip(told, [*told[1:], None], strict=True):
        until = math.inf if then is None else then.line
        followed = any(mark.line < line.line < until and line.kind is not Kind.MOMENT for line in lines)
        # What the last one says before the next line counts: that nothing was undone after all, or a person has looked.
        if float(mark.value or 0) or (then is not None and not followed):
            continue
        if mark.line in numbers:
            waits.numbers[mark.line] = numbers[mark.line]
        if not followed:
            waits.undoing = mark.name or "it"


async def check_undone(durable: Durable, call: Call | None = None) -> None:
    """The handler makes this `call`, or has returned. An attempt before had begun to undo what it did in this place, because
    plain code had failed, and this one goes on as if it had not. The call fails in the place of that: the handler undoes it
    again, as it does each step again whose worker is lost; what of it has lines is replayed. Raises `FailedBefore`, or, where
    the handler does not answer that, `ReplayMismatch`."""
    history, waits = durable.history, durable.history.replay.unopened.waits
    if durable.running.cancel_reason is not None or durable.cancelling.noted:
        if call is not None and (failure := _failure_of_cancelled(durable, call)) is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise failure
        return
    if call is not None and call.kind == "block" and history.replay.unopened.has(call.key):
        return  # it had children then, and no end: plain code had failed in its body
    if call is not None and plain_failure(durable, {trio.lowlevel.current_task(): call}) is not None:
        return
    alone = not durable.quiet.others_run()
    in_main = durable.keys.in_main
    if call is not None and alone and in_main and _is_in_failed_body(durable) and not history.replay.fits(call):
        await trio.lowlevel.checkpoint()
        raise failed_before(durable, str(call))
    mark = _next_failure(durable) if call is None else _failure_before(durable, alone=alone)
    place = END if mark is None else _place_of(durable, mark)
    # Alone, nothing of another task fails any more: what is done now would be done after all.
    if (
        history.replay.over
        and waits.undoing
        and (call is None or (alone and (mark is None or waits.failed_at == place)))
    ):
        raise await _passed_over(durable, "has returned" if call is None else f"now calls {call}")
    # A call that fits is made whether that comes or not. And one that failed so, and is not answered, is the mismatch.
    if mark is None or call is None or waits.failed_at == place or (place != END and history.replay.fits(call)):
        return
    waits.failed_at = place
    if durable.keys.in_main:
        # What was cut short then had numbers, too.
        durable.keys.go_on_after((waits.number_of(mark) or 1) - 1)
    await trio.lowlevel.checkpoint()
    raise _failed_before(mark.name or "it", call)


def _failure_of_cancelled(durable: Durable, call: Call) -> FailedBefore | None:
    """The job is cancelled, and the main task begins this call. What fails in its place, if plain code had failed there before
    the task was told: the handler may undo for that alone, and what it undid has the numbers that come now."""
    replay, keys = durable.history.replay, durable.keys
    waits = replay.unopened.waits
    if not keys.in_main or trio.current_effective_deadline() > -math.inf or replay.fits(call):
        return None
    mark = waits.failed_in(keys.count + 1, replay.latest)
    if mark is None or waits.failed_at == (place := _place_of(durable, mark)):
        return None
    waits.failed_at = place
    return _failed_before(mark.name or "it", call)


def _is_in_failed_body(durable: Durable) -> bool:
    """Whether the main task is in the body of a block whose end is the next line, and the block failed of plain code in its
    body, not of a child: the body made no call after that."""
    return _failed_body(durable) is not None


def _failed_body(durable: Durable) -> Block | None:
    """That block."""
    line = durable.history.replay.next_line
    if line is None or line.kind is not Kind.BLOCK_FAILED:
        return None
    said = msgspec.json.decode(line.value or "{}")
    if said.get("body") is not True or said.get("failed"):
        return None
    number = block_number(line.key, durable.history.replay.moments)
    its = (block for block in durable.blocks if block.number == number and not block.left_behind and not block.closing)
    return next(its, None)


def check_scope(durable: Durable, key: str | None, what: str) -> None:
    """The same for a remembered scope that is about to be entered, where there are `marks`: its `with` raises. The attempt
    before did not enter it, so the first call of the compensation had its number."""
    replay = durable.history.replay
    waits = replay.unopened.waits
    call = Call("scope", key or f"{durable.keys.count + 1}:scope")
    call.handles = sys.exception()
    if call.key in replay.moments or not durable.keys.in_main or durable.quiet.others_run():
        return
    mark = _next_failure(durable)
    if (
        mark is None
        or mark.line in waits.numbers
        or durable.running.cancel_reason is not None
        or durable.cancelling.noted
    ):
        return
    place = _place_of(durable, mark)
    if waits.failed_at == place or plain_failure(durable, {trio.lowlevel.current_task(): call}) is not None:
        return
    waits.failed_at = place
    raise _failed_before(mark.name or "it", what)


def fail_instead(durable: Durable) -> bool:
    """The replay does not come to the next line, right before which plain code had failed. One of the calls that wait fails in
    its place. Where the main task has answered that, any task will do: the nursery around it cancels the others. Where another
    task has, it is that one, if no others have come to calls without lines. Returns whether there is one."""
    replay, mark = durable.history.replay, _next_failure(durable)
    waits, main = replay.unopened.waits, durable.running.task
    number = None if mark is None else waits.number_of(mark)
    if mark is None or number is None or replay.over or waits.failed_at == (place := _place_of(durable, mark)):
        return False
    without = {
        task: call
        for task, call in durable.standing.items()
        if call.turn is not None and not replay.has_line(call.key) and plain_failure(durable, {task: call}) is None
    }
    others = [call for task, call in without.items() if task is not main]
    # A block that is cut short with the others leaves as it did then.
    others.sort(key=lambda call: call.kind == "block")
    if main in without and durable.keys.count < number:
        call = without[main]
        durable.keys.go_on_after(number - 1)
    elif others and (number != END or len(without) == 1):
        call = others[0]
    else:
        return False
    waits.failed_at = place
    _fails(durable, call, _failed_before(mark.name or "it", call))
    return True


def fail_in_body(durable: Durable) -> bool:
    """The same of a block's end, of which plain code in its body was the reason, where a task of the body stands in a call that
    has no line: beside other tasks it was not known as it came there that it comes no further. The main task, or, where that
    waits in a nursery of the body, one of the tasks in there, whose failure cancels the others."""
    replay, main = durable.history.replay, durable.running.task
    block = _failed_body(durable)
    if block is None or main is None:
        return False
    call = durable.standing.get(main)
    if call is None:
        without = [
            other
            for task, other in durable.standing.items()
            if other.turn is not None and not replay.has_line(other.key) and block.holds(task)
        ]
        # A block that is cut short with the others leaves as it did then.
        call = min(without, key=lambda other: other.kind == "block", default=None)
    elif call.turn is None or replay.has_line(call.key) or not durable.keys.take_back(call.key):
        # (The calls because of that failure had the numbers from here on.)
        return False
    if call is None:
        return False
    _fails(durable, call, failed_before(durable, str(call)))
    return True


def _fails(durable: Durable, call: Call, error: FailedBefore) -> None:
    """A call that waits for its line raises this."""
    assert call.turn is not None  # noqa: S101 -- it waits
    durable.failures.instead[call] = error
    call.turn.set()


def failed_before(durable: Durable, what: str) -> FailedBefore:
    """What fails in the place of plain code in a block's body: the history says that the block failed of it."""
    waits = durable.history.replay.unopened.waits
    waits.failed_body = True
    return _failed_before(waits.marks[-1].name if waits.marks else "plain code", what)


def _failed_before(failure: str, what: object) -> FailedBefore:
    return FailedBefore(
        f"an attempt before failed here ({failure}), and the handler has not undone all that it had done. "
        f"This attempt has not failed, so {what} fails instead, to be answered as that was",
        failure,
    )


def _next_failure(durable: Durable) -> Line | None:
    """The moment which says that plain code had failed right before the line that comes next, or behind the last one."""
    replay = durable.history.replay
    waits, line = replay.unopened.waits, _comes_next(replay)
    if replay.over or (line is None and replay.next_line is not None):
        return waits.marks[-1] if waits.undoing else None
    if line is None:
        return None
    # What the last one before it says: that nothing was undone after all, it may be.
    told = [mark for mark in waits.marks if replay.latest < mark.line < line.line]
    return told[-1] if told and not float(told[-1].value or 0) else None


def _comes_next(replay: Replay) -> Line | None:
    """The next line, but for those which say of a scope that it struck too late, because what is around it was cut short: the
    failure itself may have cut that short, and what is known of it comes after them."""
    line, resumed = replay.next_line, replay.resumed
    if line is None or resumed is None or not _is_cut_from_outside(line):
        return line
    rest = [one for one in resumed.lines if one.line > line.line and one.kind is not Kind.MOMENT]
    return min((one for one in rest if not _is_cut_from_outside(one)), key=lambda one: one.line, default=None)


def _is_cut_from_outside(line: Line) -> bool:
    return is_late(line) and stood(line).outer


def _failure_before(durable: Durable, *, alone: bool) -> Line | None:
    """The same for the call that the current task begins. Where there were other tasks it may have been in any of them, and
    what they do now comes in another order: of the main task it is known which of its calls were begun then."""
    replay, main = durable.history.replay, durable.keys.in_main
    waits, number, mark = replay.unopened.waits, durable.keys.count + 1, _next_failure(durable)
    begun = None if mark is None else waits.number_of(mark)
    if mark is not None and begun is None:
        return mark if alone else None
    if mark is not None and waits.is_the_handlers(mark) and not main:
        return None  # the main task fails, and then cancels this one
    if mark is not None and begun != END and replay.over:
        # All that has lines has come, and nothing was done after that but to undo it.
        return mark if not main or number <= cast("int", begun) else None
    return waits.failed_in(number, replay.latest) if main else None


def _place_of(durable: Durable, mark: Line) -> int:
    """The number of the line that comes after it, or `END`."""
    resumed = durable.history.replay.resumed
    lines = () if resumed is None else resumed.lines
    return min((line.line for line in lines if line.line > mark.line and line.kind is not Kind.MOMENT), default=END)


async def check_answer(durable: Durable, error: BaseException) -> None:
    """The handler has ended with this. If that is what `check_undone` has raised, and nothing was undone for it, the handler
    expects another exception there: a person decides."""
    replay, job_id = durable.history.replay, durable.running.claim.id
    if durable.fatal is not None:
        return
    waits, line = replay.unopened.waits, replay.next_line
    if waits.failed_body and _is_of_it(error):
        if waits.marks or durable.failures.undone:
            # All is undone: each attempt would come to the same.
            durable.fail(failed_no_more(job_id, []))
        # Else the attempt has failed of its block as that before it had, whose worker was lost. The next one does it anew.
    elif not any(issubclass(type(leaf), FailedBefore) for leaf in leaves_of(error)):
        return
    elif replay.over and waits.undoing:
        await _passed_over(durable, "does not undo it for FailedBefore, which the next call has raised in its place")
    elif line is not None and waits.failed_at == line.line:
        durable.fail(mismatch(job_id, line, "the handler ends with FailedBefore, which came before it"))


def _is_of_it(error: BaseException) -> bool:
    """Whether the handler ends with `FailedBefore`, or with what comes of it and does not say what comes then."""
    if is_asked_by(error) or gives_up(error):
        return False
    return any(issubclass(type(one), FailedBefore) for one in reasons_of(error, contexts=False))


async def _passed_over(durable: Durable, now: str) -> Exception:
    """Ends the attempt, and returns the error."""
    history, waits = durable.history, durable.history.replay.unopened.waits
    failure, waits.undoing = waits.undoing, ""
    # A person who retries the job has seen whether it is undone.
    with suppress(RuntimeError, BeyondLimit):
        history.moment(UNDONE, 1.0, anew=True)
        await history.written()
    job_id = durable.running.claim.id
    return durable.fail(
        ReplayMismatch(
            f"job {job_id}: an attempt before failed of plain code ({failure}), and had begun to undo what it did when its "
            f"worker was lost; this one has not failed there, and {now}. Look whether that is undone. If so, run the job "
            f"again from the beginning: pulse-trio jobs retry {job_id} --afresh; if not, pulse-trio jobs retry {job_id} goes on"
        )
    )
