"""A scope that had struck while its task stood in a plain await, and whose `Cancelled` the handler has swallowed there.

Its line says that it had cut nothing short (`late`): so it does where the await was over in the same moment, or stood in a
shield, and nothing tells these apart. The task comes to that await again, which may never end by itself. So where the replay
stands still for some seconds before such a line, and the task is in no durable call, the scope strikes again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from .stood import is_late, stood, struck_too

if TYPE_CHECKING:
    from .durable import Durable
    from .scopes import Scope
    from .so_far import SoFar

WITHIN = 10.0
"""Seconds (half of the attempt's timeout, if that is less)."""


def await_line(durable: Durable, scope: Scope, so_far: SoFar) -> None:
    """The scope is open in a replay, and strikes so if its line comes."""
    replay = durable.history.replay
    if not replay.over and replay.comes_late_at_last(scope.key):
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
    line = replay.next_line
    here = line is not None and line.key == scope.key and is_late(line) and not stood(line).outer
    here = here and so_far.still_at == replay.latest and scope.task not in durable.standing
    if here and (found := replay.take_out(scope.key, struck_too)) is not None:
        so_far.still_at = None
        scope.strike_again(found)
    else:
        await_line(durable, scope, so_far)
    return True


def _seconds(durable: Durable) -> float:
    running = durable.running
    return min(WITHIN, (running.timeout_deadline - running.sent) / 2)
