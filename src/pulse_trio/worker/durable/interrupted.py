"""A replay in which plain code of the handler has failed: a client that could not be opened for a moment, a `Snooze`.

What the handler calls because of it, a refund in its `except`, is at odds with the history, which goes on elsewhere. Its code
has not changed, so that is no mismatch: the call is refused, the attempt ends as the exception says, and the next one replays
again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ...describing import leaves_of
from ...errors import ChildFailed
from .failures import reasons_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...errors import ReplayMismatch
    from .calls import Call
    from .durable import Durable

_OURS = __name__.rpartition(".")[0]


class Interrupted(Exception):
    """What the call raises. `error` is what the attempt ends with."""

    def __init__(self, error: Exception, mismatch: ReplayMismatch) -> None:
        found = str(mismatch).partition(". ")[0]
        super().__init__(
            f"the handler has failed while it replayed its history, and what it calls then is refused: {found}. The next "
            "attempt replays again"
        )
        self.error = error


def misfit(durable: Durable, mismatch: ReplayMismatch, calls: Iterable[Call]) -> Exception:
    """These calls do not fit the history. Returns what they raise, and the attempt ends with."""
    error = plain_failure(calls)
    return durable.fail(mismatch if error is None else Interrupted(error, mismatch))


def plain_failure(calls: Iterable[Call]) -> Exception | None:
    """The exception of plain code because of which one of these was made."""
    handled = (call.handles for call in calls)
    return next((error for error in handled if isinstance(error, Exception) and _is_plain(error)), None)


def _is_plain(error: Exception) -> bool:
    """Whether it comes neither from a cancellation nor from a durable call: what these raise is in the history, and comes again
    in each attempt."""
    return all(issubclass(type(leaf), Exception) for leaf in leaves_of(error)) and not any(
        issubclass(type(one), (trio.Cancelled, ChildFailed)) or _is_raised_by_us(one) for one in reasons_of(error)
    )


def _is_raised_by_us(error: BaseException) -> bool:
    traceback = error.__traceback__
    while traceback is not None:
        if str(traceback.tb_frame.f_globals.get("__name__")).startswith(_OURS):
            return True
        traceback = traceback.tb_next
    return False


def ends_with(fatal: Exception) -> Exception:
    """What the attempt ends with, if a call of it has raised this."""
    return fatal.error if isinstance(fatal, Interrupted) else fatal
