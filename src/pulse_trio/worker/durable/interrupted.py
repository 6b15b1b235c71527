"""A replay in which plain code of the handler has failed: a client that could not be opened for a moment, a `Snooze`.

What the handler calls because of it, a refund in its `except`, is at odds with the history, which goes on elsewhere. Its code
has not changed, so that is no mismatch: the call is refused, the attempt ends as the exception says, and the next one replays
again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ...describing import headline_of, leaves_of, storable
from ...errors import ChildFailed, ReplayMismatch
from ...lines import Kind
from ...trio_internals import failures_in, opened_by
from .failures import reasons_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .calls import Call
    from .durable import Durable

_TEXT = 200
"""Characters of its headline that are remembered."""
_OURS = f"{__name__.partition('.')[0]}."


UNDONE = "0:undone"
"""The key of the moment that says, with its name, of which failure of plain code durable calls were made live."""


class Interrupted(Exception):
    """What the call raises. `error` is what the attempt ends with."""

    def __init__(self, error: Exception, mismatch: ReplayMismatch) -> None:
        found = str(mismatch).partition(". ")[0]
        super().__init__(
            f"the handler has failed while it replayed its history ({headline_of(error)}), and what it calls then is refused: "
            f"{found}. The next attempt replays again"
        )
        self.error = error


def misfit(durable: Durable, mismatch: ReplayMismatch, calls: Mapping[trio.lowlevel.Task, Call]) -> Exception:
    """These calls of tasks do not fit the history. Returns what they raise."""
    error = plain_failure(durable, calls)
    return durable.fail(mismatch if error is None else Interrupted(error, mismatch))


def plain_failure(durable: Durable, calls: Mapping[trio.lowlevel.Task, Call]) -> Exception | None:
    """The exception of plain code because of which one of these was made: in its handling, or in the clean-up of a task that
    was cancelled for it."""
    found = [call.handles for call in calls.values() if call.handles is not None]
    for task in calls:
        found += _failures_around(durable, task)
    return next((error for error in found if isinstance(error, Exception) and _is_plain(error)), None)


def note_plain_failure(durable: Durable, call: Call) -> None:
    """A call begins. Remembers of which failure of plain code it is made, before its own line."""
    history = durable.history
    if not history.replay.over or UNDONE in history.replay.moments:
        return
    if (error := plain_failure(durable, {trio.lowlevel.current_task(): call})) is not None:
        history.replay.moments[UNDONE] = 0.0
        history.hold(Kind.MOMENT, UNDONE, storable(headline_of(error))[:_TEXT], "0.0")


def explained(durable: Durable, error: Exception) -> Exception:
    """A mismatch, with what an attempt before has made calls because of, if it has: that has not come again."""
    resumed = durable.history.replay.resumed
    if not isinstance(error, ReplayMismatch):
        return error
    told = (
        [] if resumed is None else [line for line in resumed.lines if line.key == UNDONE and line.kind is Kind.MOMENT]
    )
    if not told:
        return error
    job_id = durable.running.claim.id
    return ReplayMismatch(
        f"{str(error).partition('. ')[0]}. An attempt before failed of plain code ({told[-1].name}) and made durable calls "
        "because of it, a refund say. This attempt has not failed there, so it calls something else. If all is undone, run it "
        f"again from the beginning: pulse-trio jobs retry {job_id} --afresh. Put what may fail into a step, or raise "
        "RetryAfter(60, afresh=True) when all is undone, which begins again by itself, or Discard"
    )


def _failures_around(durable: Durable, task: trio.lowlevel.Task | None) -> Iterator[BaseException]:
    """Those in the handler's nurseries that a task is in, and which are cancelled."""
    while task is not None:
        for nursery in opened_by(task):
            if nursery.cancel_scope.cancel_called:
                for error in failures_in(nursery):
                    yield from leaves_of(error)
        task = None if task is durable.running.task or task.parent_nursery is None else task.parent_nursery.parent_task


def _is_plain(error: Exception) -> bool:
    """Whether it comes neither from a cancellation nor from a durable call: what these raise is in the history, and comes again
    in each attempt. What was raised while such an exception was handled, and does not name it as its cause, may be either."""
    return all(issubclass(type(leaf), Exception) for leaf in leaves_of(error)) and not any(
        issubclass(type(one), (trio.Cancelled, ChildFailed)) or _is_raised_by_us(one)
        for one in reasons_of(error, contexts=False)
    )


def _is_raised_by_us(error: BaseException) -> bool:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and str(traceback.tb_frame.f_globals.get("__name__")).startswith(_OURS)


def ends_with(fatal: Exception) -> Exception:
    """What the attempt ends with, if a call of it has raised this."""
    return fatal.error if isinstance(fatal, Interrupted) else fatal
