"""A block that is cut short by its handler: the first result wins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Job  # noqa: TC001 -- a handler's annotations are read

if TYPE_CHECKING:
    from support.trees import Trees


async def test_the_first_result_wins_and_a_later_attempt_gets_the_same(trees: Trees) -> None:
    noted: list[str] = []
    seen: list[tuple[list[str], bool]] = []

    async def note(winner: str) -> str:
        noted.append(winner)
        return winner

    @trees.handlers.job
    async def quick(name: str) -> str:
        return name

    @trees.handlers.job
    async def slow(name: str) -> str:
        await trio.sleep_forever()
        return name

    @trees.handlers.job(durable=True)
    async def race(job: Job) -> str:
        with job.move_on_after(3600) as scope:
            async with job.durable_nursery() as nursery:
                runs = [nursery.start_soon(slow, "tortoise"), nursery.start_soon(quick, "hare")]
                while not any(child.outcome for child in runs):  # noqa: ASYNC110 -- as a user writes it
                    await trio.sleep(0.01)
                scope.cancel()
        winner = await job.step(note, next(child.result for child in runs if child.state == "completed"))
        seen.append(([child.state for child in runs], scope.cancelled_caught))
        if job.attempt == 1:
            raise ValueError("not yet")
        return winner

    job_id = trees.enqueue("race")
    with trio.fail_after(20):
        await trees.burst()
        trees.again()
        await trees.burst()
    assert trees.job(job_id)["result"] == "hare"
    assert noted == ["hare"]
    assert seen == [(["cancelled", "completed"], True)] * 2


async def test_a_durable_nursery_says_what_to_use_for_its_missing_cancel_scope(trees: Trees) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        async with job.durable_nursery() as nursery:
            with pytest.raises(AttributeError, match=r"with job\.move_on_after"):
                nursery.cancel_scope  # noqa: B018 -- asking for it raises
        return "said"

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["result"] == "said"
