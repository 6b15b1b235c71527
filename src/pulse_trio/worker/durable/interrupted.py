"""A replay in which plain code of the handler has failed: a client that could not be opened for a moment, a `Snooze`.

What the handler calls because of it, a refund in its `except`, is at odds with the history, which goes on elsewhere. Its code
has not changed, so that is no mismatch: the call is refused, the attempt ends as the exception says, and the next one replays
again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from ...describing import headline_of, leaves_of, storable
from ...errors import ChildFailed, FailedBefore, ReplayMismatch
from ...lines import BeyondLimit, Kind
from ...trio_internals import failures_in, opened_by
from .afresh import gives_up
from .failures import reasons_of
from .stood import CANCELLATIONS, stood
from .under_way import END

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ...lines import Line
    from .calls import Call
    from .durable import Durable

_TEXT = 200
"""Characters of its headline that are remembered."""
_OURS = f"{__name__.partition('.')[0]}."

OF_CODE = (Exception, SystemExit)
"""What plain code may fail of: a library of the user's calls `sys.exit()`, and the attempt has failed."""
UNDONE = "0:undone"
"""The key of the moment that says, with its name, of which failure of plain code durable calls are made live. It is written
before the first of these: its worker may be lost when the refund is paid, and before that has a line. 1.0: nobody need ask;
2.0: the attempt has failed of it when all `job.cleanup()` of it had ended well."""
ALL = 2.0
UNDONE_BY = "0:undone by"
"""The key of the moment right behind it, where there are others: the number of the main task's call, or `END`. With a half:
the handler had failed where it would have made it, and another task undid something for that."""


class Interrupted(Exception):
    """What the call raises. `error` is what the attempt ends with."""

    def __init__(self, error: BaseException, mismatch: ReplayMismatch) -> None:
        found = str(mismatch).partition(". ")[0]
        super().__init__(
            f"the handler has failed while it replayed its history ({headline_of(error)}), and what it calls then is refused: "
            f"{found}. The next attempt replays again"
        )
        self.error = error


def misfit(durable: Durable, mismatch: ReplayMismatch, calls: Mapping[trio.lowlevel.Task, Call]) -> Exception:
    """These calls of tasks do not fit the history. Returns what they raise."""
    error = plain_failure(durable, calls)
    if error is None:
        return durable.fail(mismatch)
    if (failure := _failed_of(error)) is None:
        return durable.fail(Interrupted(error, mismatch))
    # `FailedBefore` comes in each attempt.
    call = calls.get(trio.lowlevel.current_task())
    if call is None or not durable.keys.in_main or call.key != f"{durable.keys.count}:step":
        return durable.fail(mismatch)
    return _undoes_more(durable, call, failure, call.key) or durable.fail(mismatch)


def undoes_another_level(durable: Durable, call: Call) -> FailedBefore | None:
    """The same for a step of the main task that has no number yet, and is known to be of another level than what had begun."""
    error = plain_failure(durable, {trio.lowlevel.current_task(): call})
    failure = None if error is None else _failed_of(error)
    return None if failure is None else _undoes_more(durable, call, failure, None)


def _undoes_more(durable: Durable, call: Call, failure: str, key: str | None) -> FailedBefore | None:
    """The first durable call after the plain code that had failed raises `FailedBefore`, and may stand one `try` deeper than
    that code. The attempt before did not begin the compensation of that level, because it had done nothing there. So a step of
    this compensation raises the same, without a number, and the level above does what has lines. Returns None in all other
    cases."""
    if not durable.history.replay.unopened.waits.failed_at or durable.quiet.others_run():
        return None
    if not durable.failures.clean_ups.around or not durable.keys.take_back(key):
        return None
    return FailedBefore(
        f"an attempt before failed ({failure}), and did not come to {call} to undo that: so this fails of it, too",
        failure,
    )


def plain_failure(durable: Durable, calls: Mapping[trio.lowlevel.Task, Call]) -> BaseException | None:
    """The exception of plain code because of which one of these was made: in its handling, or in the clean-up of a task that
    was cancelled for it."""
    return next((error for error in _behind(durable, calls) if is_plain(durable, error)), None)


def is_partly_plain(durable: Durable, calls: Mapping[trio.lowlevel.Task, Call]) -> bool:
    """Whether one of these was made because of plain code, or of that and a step: a nursery's group has both."""
    return any(
        issubclass(type(leaf), OF_CODE) and is_plain(durable, leaf)
        for error in _behind(durable, calls)
        for leaf in leaves_of(error)
    )


def _behind(durable: Durable, calls: Mapping[trio.lowlevel.Task, Call]) -> list[BaseException]:
    """The exceptions because of which they were made."""
    found = [call.handles for call in calls.values() if call.handles is not None]
    for task in calls:
        found += _failures_around(durable, task)
    return [error for error in found if all(issubclass(type(leaf), OF_CODE) for leaf in leaves_of(error))]


def note_plain_failure(durable: Durable, call: Call) -> bool:
    """A call begins. Remembers of which failure of plain code it is made. Returns whether that is to be written first: what is
    done in a `job.cleanup()` undoes something. (Elsewhere it may be another way to the same, which a later attempt need not
    take.)"""
    history, task, failures = durable.history, trio.lowlevel.current_task(), durable.failures
    error, waits = plain_failure(durable, {task: call}), history.replay.unopened.waits
    cleans_up = failures.clean_ups.around
    if error is not None and cleans_up and all(one is not error for one in failures.undone):
        failures.undone.append(error)
    if (
        error is None
        and call.handles is not None
        and issubclass(type(call.handles), OF_CODE)
        and all(one is not call.handles for one in failures.answered)
    ):
        failures.answered.append(call.handles)
    if not history.replay.over or error is None or (waits.undoes is not None and waits.undoes[0] == id(error)):
        return False
    said = storable(_failed_of(error) or headline_of(error))[:_TEXT]
    if not cleans_up:
        if UNDONE not in history.replay.moments:
            history.replay.moments[UNDONE] = 1.0
            history.hold(Kind.MOMENT, UNDONE, said, "1.0")
        return False
    # The deadline that was found to have struck, say: that is what it failed of, so each attempt comes to it.
    history.what_came_before()
    history.moment(UNDONE, 0.0, said, anew=True)
    waits.undoing, waits.undoes = "", (id(error), history.latest)
    if durable.quiet.has_others():
        failed = durable.failures.handler_failed
        beside = (
            END if failed is None or all(error is not leaf for leaf in leaves_of(failed)) else durable.keys.count + 1.5
        )
        history.moment(UNDONE_BY, float(durable.keys.count if durable.keys.in_main else beside), anew=True)
    return True


def _failed_of(error: BaseException) -> str | None:
    """What had failed in an attempt before, if this is a `FailedBefore`, in a group it may be."""
    return next((leaf.failure for leaf in leaves_of(error) if isinstance(leaf, FailedBefore)), None)


def fails_by_itself(durable: Durable, call: Call) -> bool:
    """Whether the task in this call is cut short because plain code has failed in a replay, and in no attempt before was a call
    made because it had: what came after this in the history comes no more."""
    replay = durable.history.replay
    if replay.over or replay.unopened.within.get(UNDONE):
        return False
    return plain_failure(durable, {trio.lowlevel.current_task(): call}) is not None


def goes_elsewhere(durable: Durable, *, for_long: bool) -> bool:
    """No call has come for the next line. Whether none will: a call that has no line is made because plain code has failed in
    this replay, or one with that line was made, or stood when it came, because it had failed in an attempt before. Where that
    was no clean-up, the code may be about to fail again, unless only a progress bar, say, has been busy `for_long`."""
    replay = durable.history.replay
    if any(
        not replay.has_line(call.key) and plain_failure(durable, {task: call}) is not None
        for task, call in durable.standing.items()
        if call.turn is not None
    ):
        return True
    line, resumed, told = replay.next_line, replay.resumed, replay.moments.get(UNDONE)
    if line is None or resumed is None or not replay.unopened.within.get(UNDONE):
        return False
    begun = min(one.line for one in resumed.lines if one.key == UNDONE)
    # A cancellation that found such a call has its line before that of the call.
    found = frozenset(stood(line).at if line.kind in CANCELLATIONS else ())
    rests = begun < line.line or any(one.key in found and one.line > begun for one in resumed.lines)
    return rests and (told != 1.0 or for_long)


def comes_after_undoing(durable: Durable) -> bool:
    """Whether what is left of the history has calls of a compensation: an attempt before made them because plain code had
    failed. What goes on live before those would build on what is refunded."""
    last, told = durable.history.replay.last_line, _told_of_undoing(durable)
    # What the last one says counts: that nothing was undone after all, or a person has looked.
    if last is None or not told or float(told[-1].value or 0) == 1.0:
        return False
    return last.line > min(one.line for one in told if float(one.value or 0) != 1.0)


def _told_of_undoing(durable: Durable) -> list[Line]:
    """The moments `UNDONE` of the attempts before, in their order."""
    resumed = durable.history.replay.resumed
    lines = () if resumed is None else resumed.lines
    told = (line for line in lines if line.key == UNDONE and line.kind is Kind.MOMENT)
    return sorted(told, key=lambda line: line.line)


async def leave_undone(durable: Durable, error: BaseException) -> None:
    """The attempt has failed. If no call that it made because of plain code has a line, nothing was undone. If it has failed of
    that, all is: a later attempt of a job that was cancelled meanwhile need not fail again to know it."""
    history = durable.history
    waits = history.replay.unopened.waits
    undone = durable.fatal is None and history.replay.over and durable.failures.has_undone(error)
    # The next attempt, if its worker is lost before it has said that, comes to it again.
    undone = undone and not gives_up(error)
    # Without a live call: all had its lines already.
    nothing = waits.undoes is not None and history.replay.latest < waits.undoes[1]
    if nothing or (undone and (waits.undoes is not None or waits.failed_at)):
        said = history.replay.unopened.within.get(UNDONE, "")
        with suppress(RuntimeError, BeyondLimit):
            history.moment(UNDONE, 1.0 if nothing else 2.0, "" if nothing else said, anew=True)
            await history.written()


def is_undone(durable: Durable) -> bool:
    """Whether an attempt before has undone all that it did, because plain code had failed, and has failed of that."""
    resumed = durable.history.replay.resumed
    lines = () if resumed is None else resumed.lines
    last = max(lines, key=lambda line: (line.kind is not Kind.MOMENT or line.key == UNDONE) * line.line, default=None)
    return last is not None and last.key == UNDONE and last.kind is Kind.MOMENT and float(last.value or 0) == ALL


def explained(durable: Durable, error: Exception) -> Exception:
    """A mismatch, with what an attempt before has made calls because of, if it has: that has not come again."""
    if not isinstance(error, ReplayMismatch):
        return error
    told = [line for line in _told_of_undoing(durable) if line.name]
    if not told:
        return error
    job_id, part = durable.running.claim.id, ""
    if float(told[-1].value or 0) == 0 and not durable.quiet.others_run():
        part = (
            " If only a part is, undo the rest where the handler catches FailedBefore, and "
            f"pulse-trio jobs retry {job_id} goes on."
        )
    return ReplayMismatch(
        f"{str(error).partition('. ')[0]}. An attempt before failed of plain code ({told[-1].name}) and made durable calls "
        "because of it, a refund say. This attempt has not failed there, so it calls something else. If all is undone, run it "
        f"again from the beginning: pulse-trio jobs retry {job_id} --afresh.{part} Put what may fail into a step, whose "
        "failure is remembered. A handler that ends with Discard or RetryAfter(60, afresh=True) when all is undone comes here "
        "only where its worker was lost before that"
    )


def _failures_around(durable: Durable, task: trio.lowlevel.Task | None) -> Iterator[BaseException]:
    """Those in the handler's nurseries that a task is in, and which are cancelled. To a task in the job's own nursery it is
    what the handler has ended with."""
    if task is not durable.running.task and durable.failures.handler_failed is not None:
        yield from leaves_of(durable.failures.handler_failed)
    while task is not None:
        for nursery in opened_by(task):
            if nursery.cancel_scope.cancel_called:
                for error in failures_in(nursery):
                    yield from leaves_of(error)
        task = None if task is durable.running.task or task.parent_nursery is None else task.parent_nursery.parent_task


def is_plain(durable: Durable, error: BaseException) -> bool:
    """Whether it comes neither from a cancellation nor from a durable call: what these raise is in the history, and comes again
    in each attempt. What was raised while such an exception was handled, and does not name it as its cause, may be either. What
    comes out of a block that was cut short comes again only if that is cut short again, by plain code it may be."""
    cut_blocks = durable.quiet.cut_blocks
    return all(issubclass(type(leaf), OF_CODE) for leaf in leaves_of(error)) and not any(
        issubclass(type(one), (trio.Cancelled, ChildFailed))
        or durable.failures.has_raised(one)
        or (_is_raised_by_us(one) and not issubclass(type(one), FailedBefore))
        for one in reasons_of(error, contexts=False)
        if not cut_blocks.has_failed(one)
    )


def _is_raised_by_us(error: BaseException) -> bool:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and str(traceback.tb_frame.f_globals.get("__name__")).startswith(_OURS)


def ends_with(fatal: Exception) -> BaseException:
    """What the attempt ends with, if a call of it has raised this."""
    return fatal.error if isinstance(fatal, Interrupted) else fatal
