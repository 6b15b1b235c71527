"""Drawn handlers of several tasks that race decide the same in each attempt, whatever happens to the attempts.

`PULSE_TRIO_RACES=200` plays so many programs, `PULSE_TRIO_RACES_SEED=7-14` those of these seeds, and `PULSE_TRIO_RACES_FAULTS`
names what strikes: `none`, `lost`, `cancelled`. What is first is the machine's: a failure may need some plays of its seed to
come again, and `PULSE_TRIO_RACES_PLAYS=20` plays each so often. `PULSE_TRIO_RACES_ORDER=drawn` lets Hypothesis shuffle the
tasks of each pass, as if Trio kept no order. Seeds from 100,000 on draw more kinds (races_more.py).
"""

from __future__ import annotations

import json
import os
from random import Random

import pytest
import trio

from pulse_trio.worker.durable import attempts
from support.programs.race_drawing import MORE, draw
from support.programs.racing import FAULTS, open_track, try_race

PROGRAMS = int(os.environ.get("PULSE_TRIO_RACES", "8"))
FIRST, _, LAST = os.environ.get("PULSE_TRIO_RACES_SEED", f"1-{PROGRAMS}").partition("-")
MENDED = (142, 175, 202)
"""Each failed once, and in most plays: two deadlines that strike at once around a block; a child's end that a loop reads while
another task's result waits for its turn; a deadline after a block that a later attempt leaves."""
SEEDS = [*range(int(FIRST), int(LAST or FIRST) + 1)]
if "PULSE_TRIO_RACES_SEED" not in os.environ:
    SEEDS += [*MENDED, *range(MORE, MORE + PROGRAMS)]
STRIKES = os.environ.get("PULSE_TRIO_RACES_FAULTS", ",".join(FAULTS)).split(",")
PLAYS = int(os.environ.get("PULSE_TRIO_RACES_PLAYS", "1"))
DRAWN = os.environ.get("PULSE_TRIO_RACES_ORDER") == "drawn"
SIDE_BY_SIDE = 6


@pytest.mark.timeout(120 + len(SEEDS) * PLAYS * 5)
async def test_drawn_races_have_the_same_winners_in_each_attempt(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if DRAWN:
        monkeypatch.setattr(attempts, "keep_order", lambda: None)
        # An earlier test may have kept the one that it had.
        monkeypatch.setattr(trio._core._run, "_r", Random())
    seeds = iter([*SEEDS] * PLAYS)
    failed: dict[int, list[str]] = {}

    async with open_track(dsn) as track:

        async def play() -> None:
            for seed in seeds:
                if wrong := await try_race(track, draw(seed), Random(seed), STRIKES):
                    failed[seed] = wrong

        async with trio.open_nursery() as nursery:
            for _ in range(SIDE_BY_SIDE):
                nursery.start_soon(play)
    assert not failed, "".join(
        f"\nPULSE_TRIO_RACES_SEED={seed}:\n{json.dumps(draw(seed))}\n" + "\n".join(wrong)
        for seed, wrong in failed.items()
    )
