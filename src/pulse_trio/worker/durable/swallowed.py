"""A scope that had struck while its task stood in a plain await, and whose `Cancelled` the handler has swallowed there; or a
job that was cancelled so.

Its line says that it had cut nothing short (`late`), or only a call that began when it had struck (`before`): so it does where
the await was over in the same moment, or stood in a shield, and nothing tells these apart. The task comes to that await again,
which may never end by itself. So where the replay stands still for some seconds before such a line, and the task is in no
durable call, it comes again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from ...lines import Kind
from .own_tasks import own_task
from .stood import may_be_swallowed, stood, struck_too

if TYPE_CHECKING:
    from ...lines import Line
    from .durable import Durable
    from .scopes import Scope
    from .so_far import SoFar

WITHIN = 10.0
"""Seconds (half of the attempt's timeout, if that is less)."""


def await_line(durable: Durable, scope: Scope, so_far: SoFar) -> None:
    """The scope is open in a replay, and strikes so if its line comes."""
    replay = durable.history.replay
    if not replay.over and any(map(may_be_swallowed, replay.cancellations(Kind.SCOPE_CANCELLED, scope.key))):
        so_far.still_at = replay.latest
        durable.quiet.striking.at(scope, trio.current_time() + _seconds(durable))
        # Trio's own would strike without a look at the replay.
        scope.inner.deadline = math.inf


def strikes(durable: Durable, scope: Scope, so_far: SoFar) -> bool:
    """The time that `striking` was given has come, or the replay is over. Returns whether the scope waits for its line."""
    replay = durable.history.replay
    if so_far.still_at is None:
        return False
    if replay.over:
        so_far.still_at = None
        durable.quiet.striking.ends(scope)
        return False
    its = (line for line in replay.cancellations(Kind.SCOPE_CANCELLED, scope.key) if line is replay.next_line)
    here = any(may_be_swallowed(line) and not stood(line).outer for line in its)
    still = so_far.still_at == replay.latest and scope.task not in durable.standing
    if here and still and (found := replay.take_out(scope.key, struck_too)) is not None:
        so_far.still_at = None
        scope.strike_again(found)
    else:
        await_line(durable, scope, so_far)
    return True


def await_cancellation(durable: Durable) -> None:
    """The history has been read. If the handler may have swallowed the cancellation of its job, that comes so, too."""
    nursery, said = durable.running.scope_nursery, durable.history.replay.cancellations(Kind.CANCELLED, "job")
    line = next(filter(may_be_swallowed, said), None)
    if line is not None and nursery is not None:
        nursery.start_soon(_come_again, durable, line, name="a cancellation that was swallowed")


@own_task
async def _come_again(durable: Durable, line: Line) -> None:
    replay, still_at = durable.history.replay, None
    while not durable.cancelling.noted and not replay.over:
        here = replay.next_line is line and durable.running.task not in durable.standing
        if here and still_at == replay.latest:
            # Not before what is still to come: the line is the next one.
            durable.hand_out(early=True)
            return
        still_at = replay.latest if here else None
        await trio.sleep(_seconds(durable))


def _seconds(durable: Durable) -> float:
    running = durable.running
    return min(WITHIN, (running.timeout_deadline - running.sent) / 2)
