"""Calls that were cancelled, and ended all the same: what they gave is in the history, and later attempts get it too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Job, StepFailed, SyncClient

if TYPE_CHECKING:
    from support.trees import Trees


@pytest.mark.parametrize("how", ["it cancels the nursery", "its step fails"])
async def test_a_task_ends_a_nursery_in_which_steps_cannot_be_interrupted(how: str, trees: Trees) -> None:
    done: list[str] = []
    running, over = trio.Semaphore(0), trio.Event()

    async def slow(what: str) -> str:
        with trio.CancelScope(shield=True):
            running.release()
            await over.wait()
        done.append(what)
        return what

    async def last() -> None:
        for _ in range(3):
            await running.acquire()
        done.append("last")
        if how == "its step fails":
            raise ValueError("no")

    async def note(what: str) -> None:
        done.append(what)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        found: list[str] = []

        async def good(name: str) -> None:
            try:
                found.append(await job.step(slow, name, key=name))
                await job.wait_for_event("never", key=f"never {name}")
            except trio.Cancelled:
                with job.cleanup():
                    await job.step(note, f"undo {name}", key=f"undo {name}")  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise

        async def bad(nursery: trio.Nursery) -> None:
            try:
                await job.step(last, key="last")
            except StepFailed:
                await job.step(note, "undo last", key="undo last")  # noqa: ASYNC120 -- nothing cancels it here
                raise
            finally:
                over.set()
            nursery.cancel_scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                for name in "abc":
                    nursery.start_soon(good, name)
                nursery.start_soon(bad, nursery)
        except* StepFailed:
            pass
        await job.wait_for_event("go on")
        return " ".join(sorted(found))

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst()
    first = sorted(done)
    SyncClient(trees.dsn).send_event(job_id, "go on")
    with trio.fail_after(30):
        await trees.burst()
    assert trees.job(job_id)["error"] is None
    assert (trees.job(job_id)["result"], sorted(done)) == ("a b c", first)
    assert [what for what in first if what.startswith("undo")][:3] == ["undo a", "undo b", "undo c"]


async def test_a_block_had_ended_before_the_scope_around_it_was_cancelled_by_its_own_task(trees: Trees) -> None:
    """In the replay its line comes after that of the step which the task has awaited before."""

    @trees.handlers.job
    async def child() -> int:
        return 7

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> list[int]:
        won, ended = list[int](), trio.Event()

        async def fan_out() -> None:
            async with job.durable_nursery(key="block") as nursery:
                one = nursery.start_soon(child.options(child_key="one"))
                await nursery.flush()
                await stepped.wait()
            won.append(one.result)
            ended.set()

        stepped = trio.Event()
        with job.move_on_after(3600) as scope:
            async with trio.open_nursery() as tasks:
                tasks.start_soon(fan_out)
                await job.step(_nothing)
                stepped.set()
                # Where this comes in the first attempt is where it came in one whose lines were written together.
                if job.attempt == 1 or not trees.window.value("SELECT count(*) FROM history WHERE key = 'block'"):
                    await ended.wait()
                scope.cancel()
        await job.wait_for_event("go on")
        return won

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        while trees.job(job_id)["state"] != "suspended" or not trees.lines(job_id)[-1][1].endswith("scope"):
            await trees.burst()
        SyncClient(trees.dsn).send_event(job_id, "go on")
        await trees.burst()
    assert trees.job(job_id)["error"] is None
    assert trees.job(job_id)["result"] == [7]


async def _nothing() -> None: ...
