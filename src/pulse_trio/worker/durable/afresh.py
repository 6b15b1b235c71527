"""A handler that has undone what it did, and says so: `raise RetryAfter(60, afresh=True)`. The next attempt forgets the history
first, and begins from the beginning.

Nobody else can say it. A refund in an `except` looks like a message to the customer there, after which the charge stands.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import trio

from ...describing import ask, headline_of, leaves_of
from ...jobs import Discard, RetryAfter
from ...lines import BeyondLimit

if TYPE_CHECKING:
    from ...lines import Resumed
    from .durable import Durable

AFRESH = "0:afresh"
"""The key of the moment that says it. See migrations/0109_begin_afresh.sql."""
_KEPT = (
    "(The history is kept: this attempt failed before it had come to all that earlier ones did, a durable nursery whose "
    "children they have started, say, so it cannot have undone that. The next attempt goes on with the history.)"
)


def is_asked_by(error: BaseException) -> bool:
    """Whether an exception says so. Groups count as `RetryAfter` when every leaf is one."""
    leaves = leaves_of(error)
    return all(issubclass(type(leaf), RetryAfter) for leaf in leaves) and any(map(_says_so, leaves))


def gives_up(error: BaseException) -> bool:
    """Whether an exception says that the job is not to be tried again: `Discard`, or a group of these."""
    return all(issubclass(type(leaf), Discard) for leaf in leaves_of(error))


def _says_so(error: BaseException) -> bool:
    try:
        return ask(lambda: cast("Any", error).afresh is True)
    except Exception:  # an attribute of the user's may raise anything, and then it says nothing
        return False


def add_note(error: BaseException, note: str) -> None:
    with suppress(Exception):  # a method of the user's may raise anything, and then nothing is noted
        ask(lambda: error.add_note(note))


async def remember(durable: Durable, error: BaseException) -> Discard | None:
    """The handler ends with `error`. Remembers that the next attempt begins from the beginning, if that says so: not of a job
    that is being cancelled, and not before the replay has come to all that was done, which the handler cannot have undone.

    Returns what it ends with instead where a clean-up of this attempt has failed: each later one would come to the same."""
    running, history = durable.running, durable.history
    if not is_asked_by(error) or running.cancel_reason not in (None, "timeout") or durable.cancelling.is_held_back:
        return None
    if durable.fatal is not None:
        return None
    if not history.replay.over or not history.replay.unopened.is_empty:
        add_note(error, _KEPT)
        return None
    if (failure := durable.failures.clean_ups.failed) is not None:
        return Discard(
            f"the handler asks for RetryAfter(afresh=True), but a job.cleanup() of it has failed ({headline_of(failure)}), so "
            "not all that it did is undone, and its history is kept. Undo the rest by hand, then run it again from the "
            f"beginning: pulse-trio jobs retry {running.claim.id} --afresh. A step in job.cleanup() may try again itself"
        )
    # Tasks in `job.nursery` may still clean up. One that fails has not undone its part.
    if running.scope_nursery is not None:
        running.scope_nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await running.children_ended()
        if durable.cancelling.a_task_failed or not history.has_lines:
            return None
        history.room.cleans_up = True
        # The lease may be lost: then the next attempt replays.
        with suppress(RuntimeError, BeyondLimit):
            history.moment(AFRESH, 0.0, anew=True)
            await history.written()
    return None


def is_to_begin(found: Resumed) -> bool:
    """Whether an attempt before may have left word of it: the database knows."""
    return any(line.key == AFRESH for line in found.lines)
