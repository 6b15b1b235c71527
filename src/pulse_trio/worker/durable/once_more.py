"""A job that is being cancelled, and whose handler has ended with an exception of its own. No `Cancelled` may have reached it,
or no durable call have come after one: the history has the cancellation all the same, behind its last line. So the next attempt
does not go on, but comes there again, and does the clean-up.

Where the handler was told nothing of it, plain code has failed before: the job runs once more by itself, and then some times
more, later each time (migrations/0083). A client that cannot be opened for a moment leaves no refund to a person.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from ...describing import leaves_of
from ...errors import FailedBefore
from ...handlers import UnfitArguments
from ...lines import BeyondLimit, Kind
from .afresh import add_note, gives_up
from .detours import HALF_WAY
from .failures import comes_from_a_cancellation
from .interrupted import Interrupted
from .keys import highest_number, highest_of
from .stood import Stood

if TYPE_CHECKING:
    from ...jobs import CancelReason
    from .durable import Durable

MOST = 8
"""So many runs begin in which plain code fails again before the handler is told: half a minute. Then the clean-up is owed."""
MOST_DISCARDED = 1
"""The same of one that ends with `Discard`, which says of itself that it comes again. Eight such runs of a child held its
parent up for 40 s."""
ONCE_MORE = "0:once more"
"""The key of the moment that says how many of these have begun."""
OWED = "0:owed"
"""The key of the moment that says of a job that a clean-up of it is owed, though it goes on if nobody asks for that."""
LEFT_UNDONE = "0:left undone"
"""The key of the moment that says of a job that ends for good that a clean-up of it has failed."""
_EACH_TIME = (
    "A job.cleanup() of it has failed in an attempt before, which its history keeps: each attempt ends so. Undo by hand what "
    "is left; pulse-trio jobs retry {} --afresh runs it again from the beginning."
)
_LONGEST = 10.0
"""Seconds after which the cancellation comes in a plain await, if the attempt had not come to the last line."""


async def is_still_to_come(
    durable: Durable, error: BaseException | None, held_back: CancelReason | None, after: float
) -> bool:
    """The handler has ended so, `after` seconds in a plain await. `held_back`: a cancellation that waited for the end of the
    replay. Returns whether the handler was told nothing of the cancellation, and the history has it."""
    history, cancelling = durable.history, durable.cancelling
    reason = durable.running.cancel_reason
    # Where plain code failed first, its clean-ups were refused, whatever the replay came to meanwhile.
    interrupted = isinstance(durable.fatal, Interrupted)
    told = not interrupted and (cancelling.told or comes_from_a_cancellation(error))
    if not history.has_lines:
        return False
    if not (_was_before(durable) or cancelling.is_written):
        if told and reason not in ("user", "deadline"):
            # A child that its block starts again goes on, as long as it has undone nothing.
            with suppress(RuntimeError, BeyondLimit):
                history.moment(OWED, trio.current_time() + durable.parts.clock.epoch_offset, anew=True)
                await history.written()
            return False
        await remember_at_the_end(durable, reason or held_back or "user", after)
    # A scope that the clean-up has opened may have added the cancellation, and waits for nothing. Written after the outcome, it
    # would be refused, and a retry go on as if nobody had cancelled (5 of 40 under load).
    half_way = told and _ends_half_way(durable, error)
    if half_way or history.gone_on < history.latest:
        with suppress(RuntimeError, BeyondLimit):
            await history.written()
    return not told


async def leaves_undone(durable: Durable, error: BaseException) -> None:
    """The job ends for good with this, and a clean-up of it has failed: that may be the last word, unless a person cancels the
    job before it is written (migrations/0116_cancelled_as_they_gave_up.sql)."""
    history = durable.history
    failed = history.has_lines and durable.failures.clean_ups.unanswered
    if failed and durable.running.cancel_reason is None and gives_up(error):
        if LEFT_UNDONE in history.replay.moments and not history.has_news:
            add_note(error, _EACH_TIME.format(durable.running.claim.id))
        # The lease may be lost, or the history have no room: then a person reads the error.
        with suppress(RuntimeError, BeyondLimit):
            history.moment(LEFT_UNDONE, 0.0, anew=True)
            await history.written()


async def times_out_half_way(durable: Durable, error: BaseException | None) -> None:
    """The handler has ended so because its timeout has passed, and perhaps with a clean-up that did not end well."""
    if durable.cancelling.is_written and _ends_half_way(durable, error):
        # The lease may be lost, or the history have no room: then a retry counts the calls on.
        with suppress(RuntimeError, BeyondLimit):
            await durable.history.written()


def _ends_half_way(durable: Durable, error: BaseException | None) -> bool:
    """Remembers that an attempt has ended with its clean-up, and that it did not end well; not again if one before has. Returns
    whether there is something to write."""
    history, failures = durable.history, durable.failures
    if HALF_WAY in history.replay.moments:
        return False
    with suppress(RuntimeError, BeyondLimit):
        history.moment(HALF_WAY, failures.detour.certain([*failures.clean_ups.unanswered, *([error] if error else [])]))
    return True


async def remember_at_the_end(durable: Durable, reason: CancelReason, after: float) -> None:
    """The handler has ended, `after` seconds in a plain await: the history gets the cancellation, if it has not got it yet."""
    history = durable.history
    if not durable.cancelling.noted:
        durable.cancelling.remembers_at_the_end(_stood_at_the_end(durable, reason, after))
    # The lease may be lost, or the history have no room: then a retry finds less.
    with suppress(RuntimeError, BeyondLimit):
        history.let_go()
        await history.written()


async def runs_once_more(durable: Durable, error: BaseException | None) -> bool:
    """Whether the job does, of which that is so, and whose handler has ended with this."""
    resumed, history = durable.history.replay.resumed, durable.history
    if resumed is None or not resumed.cancelling:
        return True
    if error is not None and _comes_again(durable, error):
        return False
    for_good = error is not None and gives_up(error)
    begun = history.replay.moments.get(ONCE_MORE, 0.0)
    if begun >= (MOST_DISCARDED if for_good else MOST):
        return False
    with suppress(RuntimeError, BeyondLimit):
        history.moment(ONCE_MORE, begun + 1, anew=True)
        await history.written()
        return True
    return False


def _comes_again(durable: Durable, error: BaseException) -> bool:
    """Whether each attempt would end with this, before it is told of the cancellation: with the failure of an undo, say."""
    replay = durable.history.replay
    if not replay.over and (replay.next_line is None or replay.next_line.kind is not Kind.CANCELLED):
        return False
    known = any(issubclass(type(leaf), FailedBefore) for leaf in leaves_of(error))
    return known or durable.failures.each_attempt_ends_so(error)


def _stood_at_the_end(durable: Durable, reason: CancelReason, after: float) -> Stood:
    """In no call, behind the last line. An attempt that had not come there says nothing of the place: the next one comes as far
    as the call after it, if that is soon."""
    highest = _highest_number(durable)
    if not durable.history.replay.over:
        return Stood((), reason, highest + 1, _LONGEST, highest)
    begun = durable.keys.count
    return Stood((), reason, max(begun, highest) + 1, after, begun)


def _was_before(durable: Durable) -> bool:
    """Whether an earlier attempt has remembered it."""
    found = durable.history.replay.resumed
    return found is not None and any(line.kind is Kind.CANCELLED for line in found.lines)


def _highest_number(durable: Durable) -> int:
    """Of the main task's calls of which the attempts before have left anything."""
    replay = durable.history.replay
    if (found := replay.resumed) is None:
        return 0
    remembered = highest_number(replay.moments, (number - found.first_block for number in found.blocks))
    return max(remembered, highest_of(line.key for line in found.lines))


def is_the_jobs(error: BaseException | None) -> bool:
    """Whether it says that the handler has failed: not that this worker cannot run it, or that the program ends."""
    leaves = () if error is None else leaves_of(error)
    known = (Exception, SystemExit, trio.Cancelled)
    return all(issubclass(type(leaf), known) and not issubclass(type(leaf), UnfitArguments) for leaf in leaves)
