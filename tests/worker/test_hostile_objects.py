"""A worker outlives whatever its handlers raise, by each kind of handler; on a store in memory and the real clock."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import trio

from pulse_trio.describing import error_text
from support import hostile
from support.stage import Stage

KINDS = ["trio", "child", "cancelled", "thread", "asyncio", "process"]
SETTINGS: dict[str, Any] = {"cleanup": 2.0, "process_slots": 2, "concurrency": 20}
DRAWN = int(os.environ.get("PULSE_TRIO_HOSTILE", "150"))
"""Of the 7,000 combinations that tests/unit/test_describing.py tries one by one; always the same ones."""


pytestmark = pytest.mark.real_clock  # There are real threads and processes here.


@pytest.fixture
def stage() -> Stage:
    stage = Stage()
    stage.handlers.include(hostile.handlers)
    return stage


async def run(stage: Stage) -> None:
    try:
        with trio.fail_after(120):
            await stage.burst(**SETTINGS)
    except BaseException as error:  # noqa: ASYNC103 -- pytest cannot show such an exception
        raise AssertionError(error_text(error)) from None  # noqa: ASYNC104 -- as said


@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_outlives_what_its_handlers_raise(kind: str, stage: Stage) -> None:
    drawn = random.Random(7).sample(list(hostile.cases()), DRAWN if kind != "process" else DRAWN // 5)
    asked = [*map(list, drawn), *([shape] for shape in hostile.SHAPES)]
    jobs = [stage.enqueue(kind, what=what, max_attempts=1) for what in asked]
    healthy = stage.enqueue(kind, what=["none"], max_attempts=1)
    await run(stage)
    assert stage.database.jobs[healthy].state == "completed"
    for what, job_id in zip(asked, jobs, strict=True):
        job = stage.database.jobs[job_id]
        snoozes = what[0] == "Snooze"
        assert job.state in ("dead", "scheduled") if snoozes else job.state == "dead", (what, job)
        if job.state == "dead":
            assert job.error, what


@pytest.mark.parametrize("kind", ["trio", "thread", "process"])
async def test_what_can_be_said_of_it_is_on_the_job(kind: str, stage: Stage) -> None:
    asked = {
        "Hostile: mine": ["Exception", "__getattr__", "gives a number"],
        "Hostile: 'mine'": ["KeyError", "__getattr__", "raises KeyError"],
        "Hostile: (its message could not be rendered: str() raised SystemExit)": [
            "Exception", "__str__", "raises SystemExit",
        ],
        "ExceptionGroup: level (1 sub-exception): ValueError: the innermost": ["a group 3,000 deep"],
    }  # fmt: skip
    jobs = {said: stage.enqueue(kind, what=what, max_attempts=1) for said, what in asked.items()}
    await run(stage)
    for said, job_id in jobs.items():
        error = stage.database.jobs[job_id].error
        assert error is not None
        assert error.startswith(f"{said}\n")
        assert "in meet" in error
