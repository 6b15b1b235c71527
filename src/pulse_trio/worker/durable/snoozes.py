"""A `Snooze` that a step has raised, and after which the handler has made durable calls, to undo what it did, say.

It is a line then, and each attempt gets it again there. A snooze uses no budget, so a job that ends with it would go on for
ever (184 attempts in 20 s were seen). It counts as a failure, as what else a step raises does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...describing import leaves_of
from ...errors import StepFailed
from ...jobs import Snooze

if TYPE_CHECKING:
    from .durable import Durable


def as_failure(durable: Durable, error: BaseException) -> StepFailed | None:
    """What the attempt ends with instead of `error`, if that is such a snooze."""
    if durable.fatal is not None or durable.running.cancel_reason is not None:
        return None
    if not all(issubclass(type(leaf), Snooze) and durable.failures.comes_again(leaf) for leaf in leaves_of(error)):
        return None
    return StepFailed(
        "A step has raised Snooze, and the handler has made durable calls after it: so each attempt gets that Snooze again and "
        "does not call the step, and it counts as a failure. If the handler has undone what it did, let it raise "
        "RetryAfter(seconds, afresh=True) in its place: the next attempt begins from the beginning"
    )
