"""A loop that does not turn: noticed by a thread, on the real clock."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pulse_trio import Job  # noqa: TC001 -- read by the registry
from pulse_trio.observe import LoopBlocked
from pulse_trio.worker.diagnosis.lag import logger

if TYPE_CHECKING:
    from collections.abc import Generator

    from support.stage import Stage

WARNING = 0.1


pytestmark = pytest.mark.real_clock  # There are real threads and processes here.


class Said(logging.Handler):
    """The warnings, from whichever thread; `anything` is set by the first. A worker's own start and stop are no warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.anything = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.anything.set()


@pytest.fixture
def said() -> Generator[Said]:
    said = Said()
    logger.addHandler(said)
    yield said
    logger.removeHandler(said)


def block(said: Said) -> None:
    """Holds the loop up until the monitor has said so, which nothing but its thread can do meanwhile."""
    assert said.anything.wait(20)


async def told(stage: Stage) -> None:
    with trio.fail_after(20):
        while not stage.events.of(LoopBlocked):  # noqa: ASYNC110 -- the recorder tells nobody
            await trio.sleep(0.01)


@pytest.mark.parametrize("place", ["handler", "child", "nursery of its own", "asyncio", "asyncio task"])
async def test_who_blocks_the_loop_is_named_while_it_does_and_told_when_it_is_over(
    place: str, stage: Stage, said: Said
) -> None:
    async def blocking() -> None:
        block(said)

    async def on_trio(job: Job) -> None:
        if place == "handler":
            await blocking()
        elif place == "child":
            job.nursery.start_soon(blocking)
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(blocking)

    async def on_asyncio() -> None:
        if place == "asyncio":
            await blocking()
        else:
            await asyncio.create_task(blocking())

    if place.startswith("asyncio"):
        stage.handlers.job(name="own", runs="asyncio")(on_asyncio)
    else:
        stage.handlers.job(name="own")(on_trio)
    job_id = stage.enqueue("own")
    async with stage.working(lag_warning=WARNING):
        await told(stage)
    assert said.lines[0].startswith(f"job {job_id} (own) has blocked the event loop for")
    assert ", in blocking\n" in said.lines[0]
    (event,) = stage.events.of(LoopBlocked)
    assert (event.job_id, event.kind) == (job_id, "own")
    assert event.seconds >= WARNING
    assert ", in blocking\n" in event.stack
    assert "pulse_trio/worker" not in event.stack
    assert "/_pytest/" not in event.stack, "the program that runs the worker is no part of the job"


async def test_what_is_no_job_is_told_with_its_stack(stage: Stage, said: Said) -> None:
    async with stage.working(lag_warning=WARNING):
        await wait_all_tasks_blocked()  # the monitor too has begun
        block(said)
        await told(stage)
    (event,) = stage.events.of(LoopBlocked)
    assert (event.job_id, event.kind) == (None, None)
    assert ", in block\n" in event.stack
    assert "/_pytest/" not in event.stack


async def test_a_loop_that_turns_is_not_told(stage: Stage, said: Said) -> None:
    async with stage.working(lag_warning=WARNING):
        for _ in range(20):
            await trio.sleep(0.02)
    assert not said.lines
    assert not stage.events.of(LoopBlocked)


async def test_0_watches_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulse_trio.worker.diagnosis.lag.threading.Thread", None)
    async with stage.working(lag_warning=0):
        await trio.sleep(0.01)
