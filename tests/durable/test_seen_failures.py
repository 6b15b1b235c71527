"""A handler reads that a child has failed while the block is still open that fails of it: what it does then rests on that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Discard, Job

if TYPE_CHECKING:
    from support.trees import Trees

DEAD = "SELECT count(*) FROM jobs WHERE kind = 'pack' AND state = 'dead'"
noted: list[str] = []


async def note(what: str) -> None:
    noted.append(what)


@pytest.fixture
def declared(trees: Trees) -> Trees:
    """With a child that dies."""
    noted.clear()

    @trees.handlers.job
    async def pack() -> str:
        raise Discard("out of stock")

    return trees


async def burst(trees: Trees, times: int = 1) -> None:
    for _ in range(times):
        trees.again()
        with trio.fail_after(60):
            await trees.burst(log=False)


async def test_a_body_is_cut_as_soon_as_the_failure_of_a_child_is_known(declared: Trees) -> None:
    """Before it reads of that: what it would do because of it rests on a child that the next attempt starts again."""
    trees, pack = declared, declared.handlers["pack"]

    @trees.handlers.job(durable=True, max_attempts=9)
    async def order(job: Job) -> None:
        while job.attempt == 2 and trees.window.value(DEAD) == 0:  # noqa: ASYNC110 -- the database has no event
            await trio.sleep(0.01)
        async with job.durable_nursery() as nursery:
            packed = nursery.start_soon(pack)
            await nursery.flush()
            if job.attempt == 1:
                with trio.CancelScope(shield=True):
                    await trees.lose(job.id)
                await trio.sleep_forever()
            await job.step(note, str(packed.state))

    job_id = trees.enqueue("order")
    await burst(trees)
    assert (trees.job(job_id)["state"], noted) == ("retryable", [])
    assert "out of stock" in trees.job(job_id)["error"]


@pytest.mark.parametrize("then", ["it fails", "it is lost and fails", "what it failed of is unknown"])
@pytest.mark.parametrize("polls", ["durably", "by plain sleeps", "at once"])
async def test_a_child_whose_failure_was_read_of_is_not_started_again_where_lines_rest_on_that(
    polls: str, then: str, declared: Trees
) -> None:
    trees, pack, turns = declared, declared.handlers["pack"], list[int]()

    @trees.handlers.job(durable=True, max_attempts=9)
    async def order(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            packed, turn = nursery.start_soon(pack), 0
            with job.cleanup():
                while polls == "at once" and job.attempt == 1 and packed.outcome is None:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                while packed.outcome is None:
                    turn += 1
                    if polls == "by plain sleeps":
                        await trio.sleep(0.01)
                    else:
                        await job.sleep(0.01)
                if polls != "by plain sleeps":
                    turns.append(turn)
                await job.step(note, f"{packed.state} of {job.attempt}")
                if then == "it is lost and fails" and job.attempt == 1:
                    await trees.lose(job.id)
            await trio.sleep_forever()

    job_id = trees.enqueue("order")
    await burst(trees)
    if then == "what it failed of is unknown":
        trees.window.run("DELETE FROM history WHERE job_id = %s AND key LIKE '%%:forgotten'", job_id)
    await burst(trees, 2)
    job = trees.job(job_id)
    assert (job["state"], noted, len(set(turns)) <= 1) == ("retryable", ["dead of 1"], True), job["error"]
    assert "out of stock" in job["error"]


async def test_a_clean_up_that_asks_how_the_children_ended_is_done_once(declared: Trees) -> None:
    trees, pack = declared, declared.handlers["pack"]

    @trees.handlers.job(durable=True, max_attempts=9)
    async def order(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            packed = nursery.start_soon(pack)
            try:
                await job.sleep(3600)
            finally:
                with job.cleanup():
                    if packed.outcome is None:
                        await job.sleep(0)  # noqa: ASYNC102
                    else:
                        await job.step(note, str(packed.state))  # noqa: ASYNC102

    job_id = trees.enqueue("order")
    for _ in range(3):
        await burst(trees)
        assert (trees.job(job_id)["state"], noted) == ("retryable", ["dead"]), trees.job(job_id)["error"]


async def test_a_failure_that_was_read_of_is_left_out_where_nothing_came_of_it(declared: Trees) -> None:
    trees, ran = declared, list[int]()

    @trees.handlers.job
    async def label() -> None:
        ran.append(1)
        if len(ran) == 1:
            raise Discard("no paper")

    @trees.handlers.job(durable=True, max_attempts=9)
    async def order(job: Job) -> str:
        async with job.durable_nursery() as nursery:
            labelled = nursery.start_soon(label)
            try:
                await job.sleep(0.5)
            except trio.Cancelled:
                noted.append(str(labelled.state))
                raise
        return str(labelled.state)

    job_id = trees.enqueue("order")
    await burst(trees)
    assert (trees.job(job_id)["state"], noted) == ("retryable", ["dead"])
    await burst(trees, 3)
    assert (trees.job(job_id)["state"], trees.job(job_id)["result"]) == ("completed", "completed")
