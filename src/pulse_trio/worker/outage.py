"""How each loop of a worker behaves while the database is away: it reports that once, waits longer after each failed try, and
reports when the database is back. Also how rarely a loop repeats slow work.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import trio

from ..errors import DatabaseUnavailable
from ..observe import DatabaseFound, DatabaseLost
from ..postgres import reconnect_delay

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..observe import Observer

T = TypeVar("T")


class Outage:
    """The outages that one loop meets: `loop` names it in the events, and `least` seconds are added to each jittered delay.

    They are added because the jittered delay alone is short at first: every loop of a fleet would come back at the same moment.
    """

    __slots__ = ("_failures", "_least", "_loop", "_observer")

    def __init__(self, loop: str, observer: Observer, *, least: float = 0.0) -> None:
        self._loop = loop
        self._observer = observer
        self._least = least
        self._failures = 0

    def failed(self, error: Exception, *, delay: float | None = None) -> float:
        """Records a failed try. Returns the seconds until the next: `delay` if given, else a time that grows with each
        failure."""
        pause = self._least + reconnect_delay(self._failures) if delay is None else delay
        self._failures += 1
        if self._failures == 1:
            self._observer.emit(DatabaseLost(self._loop, str(error), pause))
        return pause

    def over(self) -> bool:
        """Records a try that succeeded. Returns whether it ends an outage."""
        if not self._failures:
            return False
        self._failures = 0
        self._observer.emit(DatabaseFound(self._loop))
        return True


async def once_it_is_there(act: Callable[[], Awaitable[T]], patience: float) -> T:
    """The answer of `act`, which is called again if the connection breaks in it, as when PostgreSQL restarts, or it waits for
    a lock, for `patience` seconds. Raises what it raised last."""
    deadline, failures = trio.current_time() + patience, 0
    while True:
        try:
            return await act()
        except DatabaseUnavailable as error:
            pause = reconnect_delay(failures, cap=1.0)
            if trio.current_time() + pause >= deadline or not _is_away(error):
                raise
        failures += 1
        await trio.sleep(pause)


def _is_away(error: DatabaseUnavailable) -> bool:
    """Whether the connection broke, the server restarts, somebody's open transaction holds a lock, or an administrator has
    cancelled the statement that waited for it: another answer of the server's own, a deadlock say, has another SQLSTATE."""
    cause = error.__cause__
    if cause is None:
        return True
    state = getattr(cause, "sqlstate", "")
    return state is None or state.startswith(("08", "57", "55P03"))


COST_SHARE = 20
"""Work that took t seconds is not repeated for 20 t, so that it takes at most a twentieth of the time..."""
LONGEST_REST = 5.0
"""...but it is repeated after this many seconds at the latest: the network may have been the slow part. After one answer that
took 5 s, jobs in new slots once waited for 100 s (the simulation found it)."""


def rest_after(cost: float, *, share: int = COST_SHARE, longest: float = LONGEST_REST) -> float:
    """Seconds for which work that took `cost` seconds is not repeated."""
    return min(share * cost, longest)


class Pace:
    """When repeated work was last done and what it cost, in seconds of Trio's clock."""

    __slots__ = ("cost", "ended")

    def __init__(self) -> None:
        self.ended = -math.inf
        self.cost = 0.0

    def took(self, began: float) -> None:
        """Records that the work, begun at `began`, is done."""
        self.ended = trio.current_time()
        self.cost = self.ended - began
