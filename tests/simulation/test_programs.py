"""Drawn durable programs end the same with lost, stopped and suspended attempts as without, and a cancelled one undoes what it
has done. The steps that have a line run no more, no history is at odds with its code, and nothing lives when a root is settled.

`PULSE_TRIO_PROGRAMS=1000` plays so many programs instead, each with drawn faults, and `PULSE_TRIO_PROGRAM_SEED=7` that one
(`7-14`: these).
The order in which tasks and jobs go on is the machine's: a failure may need some plays of its seed to come again.
"""

from __future__ import annotations

import json
import os

import pytest
import trio

from support.programs.drawing import draw
from support.programs.staging import Stage, open_stage, try_program

PROGRAMS = int(os.environ.get("PULSE_TRIO_PROGRAMS", "12"))
FIRST, _, LAST = os.environ.get("PULSE_TRIO_PROGRAM_SEED", f"1-{PROGRAMS}").partition("-")
SEEDS = range(int(FIRST), int(LAST or FIRST) + 1)
FAULTS = 4
SIDE_BY_SIDE = 8


@pytest.mark.timeout(120 + len(SEEDS) * 5)
async def test_drawn_programs_end_the_same_whatever_happens_to_their_attempts(dsn: str) -> None:
    seeds = iter(SEEDS)
    failed: dict[int, list[str]] = {}

    async def play(stage: Stage) -> None:
        for seed in seeds:
            if wrong := await try_program(stage, draw(seed), seed, FAULTS):
                failed[seed] = wrong

    async with open_stage(dsn) as stage, trio.open_nursery() as nursery:
        for _ in range(SIDE_BY_SIDE):
            nursery.start_soon(play, stage)
    assert not failed, "".join(
        f"\nPULSE_TRIO_PROGRAM_SEED={seed}:\n{json.dumps(draw(seed))}\n" + "\n".join(wrong)
        for seed, wrong in failed.items()
    )
