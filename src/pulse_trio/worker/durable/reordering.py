"""An attempt in which Trio has given a limiter, a lock or a semaphore to other tasks than in those before, so that what they
have written cannot come again in its order: a deadline would cut tasks short that had their results by then, or a failure has.

It is suspended until now, which uses no budget, and the next one begins from the top. A worker with durable handlers keeps
Trio from drawing the order in which tasks go on (`keep_order`), so that is rare: what awaits something plain was quicker, or a
worker of another version has begun the job. Without that, tasks which begin together do so in the order in which they were
started, or in the reverse one, so the right one soon comes again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from ...lines import BeyondLimit
from ...trio_internals import holders_of_what_awaits, scopes_around, tasks_from, waits_for_another_task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...lines import Line
    from .durable import Durable

BEGUN_ANEW = "0:anew"
"""The key of the moment that says which attempt began anew last, and how many in a row."""
MOST = 99
"""So many attempts in a row begin anew: where Trio draws the order, what several nurseries did, one after the other, all comes
again in one of so many."""
MOST_CALLS = 5
"""And so many where a step has failed, which each of them calls again: there may be no order in which the others come first."""
_IN_A_ROW = 1000
_PAUSE, _LONGEST_PAUSE = 0.05, 10.0
"""Seconds for which the replay stands still before that. Where another job holds the limiter it is waited for, twice as long
each time."""


def may_begin_anew(durable: Durable) -> bool:
    """Whether the attempt may end here, as if it had not been."""
    running = durable.running
    return (
        running.cancel_reason is None
        and running.transaction is None
        and running.scope_nursery is not None
        and not running.scope_nursery.cancel_scope.cancel_called
        and durable.fatal is None
        and not any(block.closing for block in durable.blocks)
        and _in_a_row(durable) < MOST
    )


def stands_long_enough(durable: Durable, stood_still: float) -> bool:
    """Whether the replay has stood still long enough for that, in seconds."""
    ours = list(tasks_from(durable.running.task))
    if all(any(one in held for one in ours) for held in map(holders_of_what_awaits, waiting_for_another(durable))):
        return stood_still >= _PAUSE
    return stood_still >= min(_PAUSE * 2.0 ** _in_a_row(durable), _LONGEST_PAUSE)


def may_cut(durable: Durable) -> bool:
    """Whether something is to cut tasks short that may come to lines which are left: what came in an earlier attempt, or comes
    as soon as the replay is over."""
    replay, now = durable.history.replay, trio.current_time()
    passed = any(durable.on_our_clock(scope.until) <= now for scope in durable.scopes)
    return replay.may_cut or durable.cancelling.is_held_back or passed


async def begin_anew_if_lines_are_left(durable: Durable) -> None:
    """A step has failed that went on live before the lines of others came: it would cut these short. It is done again."""
    if durable.history.replay.awaits_keys and _in_a_row(durable) < MOST_CALLS and await begin_anew(durable):
        await trio.lowlevel.checkpoint()


async def begin_anew(durable: Durable) -> bool:
    """Ends the attempt, if it may. Returns whether it does."""
    if not may_begin_anew(durable):
        return False
    attempt, before = durable.running.claim.attempt, _in_a_row(durable)
    with suppress(BeyondLimit):
        # What has written a line is due at once again. Of an attempt in which two steps fail one says it.
        if attempt * _IN_A_ROW > durable.history.replay.moments.get(BEGUN_ANEW, 0.0):
            durable.history.moment(BEGUN_ANEW, float(attempt * _IN_A_ROW + before + 1), anew=True)
        await durable.history.written()
        durable.suspension.begin_anew()
        return True
    return False


def _in_a_row(durable: Durable) -> int:
    """How many attempts before this one have begun anew, one after the other."""
    found = int(durable.history.replay.moments.get(BEGUN_ANEW, 0.0))
    return found % _IN_A_ROW if durable.running.claim.attempt - found // _IN_A_ROW in (0, 1) else 0


def cuts_too_early(durable: Durable, line: Line) -> bool:
    """Whether this, which came after calls that have not come yet, would cut a task short that may come to one: a scope those
    in it, a cancellation of the job all, and a failure perhaps those beside its task."""
    struck = {scope.inner for scope in durable.scopes if scope.key == line.key}
    return any(not struck or not struck.isdisjoint(scopes_around(task)) for task in waiting_for_another(durable))


def waiting_for_another(durable: Durable) -> Iterator[trio.lowlevel.Task]:
    """The tasks that wait for what another one does."""
    for task in tasks_from(durable.running.task):
        if task not in durable.standing and waits_for_another_task(task):
            yield task
