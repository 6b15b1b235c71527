"""Trio's loop and asyncio's hand each other calls, and none is lost, in whatever order the two threads take their steps."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from pulse_trio.worker.jobs.kinds.asyncio_thread import _HandOver

if TYPE_CHECKING:
    from collections.abc import Callable


class Meanwhile(deque[Any]):
    """A list of calls that lets the other thread take its turn right after one was put on it."""

    def __init__(self, others_turn: Callable[[], object]) -> None:
        super().__init__()
        self.others_turn = others_turn

    def append(self, call: Any, /) -> None:
        super().append(call)
        turn, self.others_turn = self.others_turn, lambda: None
        turn()


def test_a_call_after_one_that_was_made_before_its_wake_up_is_made() -> None:
    """The other thread's last look finds the call that is just being put there; the wake-up for it comes after that."""
    wakes: list[Callable[[], object]] = []
    made: list[int] = []
    hand_over = _HandOver(wakes.append)
    hand_over._calls = Meanwhile(hand_over._take)
    for number in range(3):
        hand_over.put(lambda number=number: made.append(number))
        while wakes:
            wakes.pop(0)()
    assert made == [0, 1, 2]


def test_a_failed_call_takes_no_other_with_it() -> None:
    wakes: list[Callable[[], object]] = []
    made: list[str] = []
    hand_over = _HandOver(wakes.append)

    def fails() -> None:
        made.append("failed")
        raise SystemExit(1)

    hand_over.put(fails)
    hand_over.put(lambda: made.append("next"))
    assert len(wakes) == 1
    try:
        wakes.pop()()
    except SystemExit:
        made.append("told")
    assert made == ["failed", "told"]
    wakes.pop()()
    assert made == ["failed", "told", "next"]
    hand_over.put(lambda: made.append("last"))
    wakes.pop()()
    assert made[-1] == "last"
