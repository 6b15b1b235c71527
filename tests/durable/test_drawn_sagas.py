"""Drawn sagas, each with a fault or two: what they did is done or undone in the end, and no unchanged handler is at odds with
its history.

`PULSE_TRIO_SAGAS=200` plays so many programs, `PULSE_TRIO_SAGA_SEED=7-14` those of these seeds.
"""

from __future__ import annotations

import json
import os
from random import Random
from typing import TYPE_CHECKING

import pytest

from support.programs.sagas import Play, draw, faults_of, play

if TYPE_CHECKING:
    from support.trees import Trees

SAGAS = int(os.environ.get("PULSE_TRIO_SAGAS", "8"))
FIRST, _, LAST = os.environ.get("PULSE_TRIO_SAGA_SEED", f"1-{SAGAS}").partition("-")
SEEDS = range(int(FIRST), int(LAST or FIRST) + 1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", SEEDS)
async def test_what_a_drawn_saga_did_is_done_or_undone_in_the_end(trees: Trees, seed: int) -> None:
    random = Random(seed)
    saga = draw(random)
    failed: list[str] = []
    for number, faults in enumerate(faults_of(saga, random)):
        wrong = await play(trees, Play(trees, saga, faults, number))
        failed += [f"{faults}: {one}" for one in wrong]
    assert not failed, f"PULSE_TRIO_SAGA_SEED={seed}\n{json.dumps(saga)}\n" + "\n".join(failed)
