"""What does not fit a history is told, never silently wrong. Workers in the test's own Trio run."""

from __future__ import annotations

from typing import Any

import trio

from pulse_trio import ChildFailed, Discard, Job
from support.trees import Trees  # noqa: TC001


async def test_what_a_deleted_child_returned_is_not_none(trees: Trees) -> None:
    seen: list[object] = []

    @trees.handlers.job
    async def label() -> int:
        return 42

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            made = nursery.start_soon(label)
        seen.append(made.result)
        raise ConnectionError("away")

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.window.run("DELETE FROM job_archive WHERE kind = 'label'")
    trees.again()
    await trees.burst()
    assert (trees.job(job_id)["state"], seen) == ("dead", [42])
    error = trees.job(job_id)["error"]
    assert "key '#1') was deleted after its block had ended" in error
    assert f"pulse-trio jobs retry {job_id} --afresh" in error


async def test_a_deleted_child_that_its_block_names_as_failed_is_a_failure_again(trees: Trees) -> None:
    seen: list[object] = []

    @trees.handlers.job
    async def label() -> int:
        raise Discard("no paper")

    async def note() -> None: ...

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(label)
        except* ChildFailed as group:
            (failed,) = (leaf for leaf in group.exceptions if isinstance(leaf, ChildFailed))
            seen.append((failed.job.id > job.id, str(failed).partition(") ")[2].partition(":")[0]))
        await job.step(note)
        if job.attempt == 1:
            raise ConnectionError("away")
        return "went on"

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.window.run("DELETE FROM job_archive WHERE kind = 'label'")
    trees.again()
    await trees.burst()
    assert trees.job(job_id)["result"] == "went on"
    assert seen == [(True, "is dead"), (True, "was deleted.")]


async def test_a_child_that_is_deleted_while_its_block_is_open_has_failed(trees: Trees) -> None:
    @trees.handlers.job
    async def label() -> int:
        return 42

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> int:
        async with job.durable_nursery() as nursery:
            made = nursery.start_soon(label)
            await job.wait_for_event("go")
        return made.result

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.window.run("DELETE FROM job_archive WHERE kind = 'label'")
    trees.window.run("SELECT send_event(%s, 'go', 'null')", job_id)
    await trees.burst()
    assert "key '#1') was deleted." in trees.job(job_id)["error"]


async def test_a_sibling_that_was_cancelled_has_no_result(trees: Trees) -> None:
    seen: list[Any] = []

    @trees.handlers.job
    async def fails() -> None:
        raise Discard("broken")

    @trees.handlers.job
    async def waits() -> int:
        await trio.sleep_forever()
        return 42

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> str:
        try:
            async with job.durable_nursery() as nursery:
                sibling = nursery.start_soon(waits)
                nursery.start_soon(fails)
        except* ChildFailed as group:
            seen.append(len(group.exceptions))
        try:
            return f"returned {sibling.result}"
        except ChildFailed as error:
            return str(error).partition(") ")[2]

    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        await trees.burst()
    assert (trees.job(job_id)["result"], seen) == ("was cancelled: sibling", [1])
