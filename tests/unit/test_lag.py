"""The thread that watches a loop ends with it, whatever it does in that moment."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

from pulse_trio.observe import Observer
from pulse_trio.worker.diagnosis.lag import LagMonitor

if TYPE_CHECKING:
    from collections.abc import Callable


class EndsMeanwhile(threading.Event):
    """An event that is set for the end of the loop in the moment in which the thread clears it."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end = end

    def clear(self) -> None:
        self._end()
        self.set()
        super().clear()


def test_the_thread_ends_when_the_loop_ends_while_it_asks_for_a_sign_of_life() -> None:
    monitor = LagMonitor(warning=0.01, observer=Observer([]))
    monitor._turned = EndsMeanwhile(monitor._over.set)
    watching = threading.Thread(
        target=monitor._watch,
        # A loop that has ended calls nothing.
        args=(cast("Any", None), lambda _: None, threading.get_ident(), lambda _: (None, [])),
        daemon=True,
    )
    watching.start()
    watching.join(10)
    assert not watching.is_alive()
