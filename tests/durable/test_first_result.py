"""A block that is cut short by its handler: the first result wins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Job, SyncClient

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


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another task"])
async def test_a_replay_sees_at_once_what_its_handler_has_cut_the_block_short_for(
    trees: Trees, *, beside: bool
) -> None:
    """Ten seconds in each later attempt, before: no call followed in the block, so nothing said that the winner was seen."""

    async def note(what: str) -> str:
        return what

    @trees.handlers.job
    async def ask(mirror: str) -> str:
        if mirror == "far":
            await trio.sleep_forever()
        return mirror

    @trees.handlers.job(durable=True, suspend_after=0)
    async def first(job: Job) -> list[str]:
        won = list[str]()
        raced = trio.Event()

        async def race() -> None:
            with job.move_on_after(3600, key="limit") as scope:
                async with job.durable_nursery(key="race") as nursery:
                    answers = [nursery.start_soon(ask.options(child_key=mirror), mirror) for mirror in ("far", "near")]
                    while not any(answer.outcome for answer in answers):  # noqa: ASYNC110 -- as a user writes it
                        await trio.sleep(0.01)
                    scope.cancel()
            won.extend(answer.result for answer in answers if answer.state == "completed")
            raced.set()

        async def remind() -> None:
            await job.wait_for_event("remind", key="remind")
            await raced.wait()
            await job.step(note, "reminded", key="note")

        async with trio.open_nursery() as tasks:
            tasks.start_soon(race)
            if beside:
                tasks.start_soon(remind)
        await job.wait_for_event("go")
        return won

    job_id, client = trees.enqueue("first"), SyncClient(trees.dsn)
    with trio.fail_after(30):
        await trees.burst()
        for event in ("remind", "go"):
            client.send_event(job_id, event)
            await trees.burst()
    assert trees.job(job_id)["result"] == ["near"]


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
