"""How soon the next notification is obeyed."""

from __future__ import annotations

from pulse_trio.ration import Ration


def test_each_vain_look_doubles_the_pause_up_to_its_end() -> None:
    ration = Ration(0.01, 0.25, free=2)
    pauses: list[float] = []
    for _ in range(9):
        pauses.append(ration.pause)
        ration.looked(found=False)
    assert pauses == [0, 0, 0, 0.01, 0.02, 0.04, 0.08, 0.16, 0.25]


def test_a_look_that_finds_something_ends_the_pause() -> None:
    ration = Ration()
    for _ in range(5000):
        ration.looked(found=False)
    assert ration.pause == 0.25
    ration.looked(found=True)
    assert ration.pause == 0
