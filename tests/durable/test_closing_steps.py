"""A remembered deadline strikes around a step that takes a while to close, and another task has its result meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from pulse_trio import Job, SyncClient
from support.turns import closing, waits_for_its_turn

if TYPE_CHECKING:
    import pytest

    from support.trees import Trees


async def test_what_the_deadline_has_cut_short_goes_on_before_that_result_in_each_attempt(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result had its line first, and so its task went on first in a later attempt."""
    ways: list[list[str]] = []
    answer_waits = waits_for_its_turn(monkeypatch, "asks")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        way, cut = list[str](), trio.Event()

        async def closes() -> None:
            await closing(cut, answer_waits)

        async def answer() -> None:
            await cut.wait()

        async def asks() -> None:
            await job.step(answer, key="answer")
            way.append("answer")

        async def waits() -> None:
            with job.move_on_after(0.05, key="patience") as patience:
                await job.step(closes, key="closes")
            way.append(f"cut {patience.cancelled_caught}")
            await job.step(_said, key="said")
            way.append("said")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(asks)
            nursery.start_soon(waits)
        ways.append(way)
        await job.wait_for_event("go on")
        return "done"

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst()
        SyncClient(trees.dsn).send_event(job_id, "go on")
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "done")
    assert ways == [["cut True", "answer", "said"]] * 2


async def _said() -> None: ...
