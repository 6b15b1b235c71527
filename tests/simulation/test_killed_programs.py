"""Drawn durable programs end the same when the processes that run them are killed and stopped as undisturbed.

`PULSE_TRIO_KILLED_PROGRAMS=200` plays so many programs, and `PULSE_TRIO_KILLED_SEEDS=7-14` those of these seeds. A process
dies with all that it runs, so a failure may need some programs side by side, and some plays, to come again.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import trio

from support.programs.drawing import draw
from support.programs.killing import KilledStage, open_killed_stage, try_killed
from support.programs.staging import KINDS, Ended, Stage, open_stage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from pulse_trio.testing.faults.processes import Processes

PROGRAMS = int(os.environ.get("PULSE_TRIO_KILLED_PROGRAMS", "6"))
FIRST, _, LAST = os.environ.get("PULSE_TRIO_KILLED_SEEDS", f"1-{PROGRAMS}").partition("-")
SEEDS = range(int(FIRST), int(LAST or FIRST) + 1)
FAULTS = 2
SIDE_BY_SIDE = 4


async def side_by_side(play: Callable[[Any, int], Awaitable[None]], stage: Stage, seeds: Iterable[int]) -> None:
    """Some at once, until all are played."""
    left = iter([*seeds])

    async def play_on() -> None:
        for seed in left:
            await play(stage, seed)

    async with trio.open_nursery() as nursery:
        for _ in range(SIDE_BY_SIDE):
            nursery.start_soon(play_on)


@pytest.mark.timeout(120 + len(SEEDS) * 20)
async def test_drawn_programs_end_the_same_in_processes_that_die(dsn: str, processes: Processes) -> None:
    firsts: dict[int, Ended] = {}
    failed: dict[int, list[str]] = {}

    async def undisturbed(stage: Stage, seed: int) -> None:
        first = await stage.play(draw(seed), KINDS[seed % len(KINDS)])
        if first.wrong:
            failed[seed] = first.wrong
        else:
            firsts[seed] = first

    async def killed(stage: KilledStage, seed: int) -> None:
        if wrong := await try_killed(stage, draw(seed), firsts[seed], seed, FAULTS):
            failed[seed] = wrong

    async with open_stage(dsn) as stage:
        await side_by_side(undisturbed, stage, SEEDS)
    async with open_killed_stage(dsn, processes) as stage:
        await side_by_side(killed, stage, firsts)
    assert not failed, "".join(
        f"\nPULSE_TRIO_KILLED_SEEDS={seed}:\n{json.dumps(draw(seed))}\n" + "\n".join(wrong)
        for seed, wrong in failed.items()
    )
