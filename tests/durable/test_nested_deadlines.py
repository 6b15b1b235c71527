"""Remembered scopes in each other, of which more than one has struck, beside another task of the handler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Job, SyncClient
from support.turns import PlainAwait

if TYPE_CHECKING:
    from support.trees import Trees

JOBS = 6
"""In which order Trio lets the tasks go on is drawn for each."""


@pytest.mark.parametrize("fails", [False, True], ids=["move_on_after", "fail_after"])
@pytest.mark.parametrize("cancelled", [False, True])
async def test_deadlines_that_passed_while_it_was_suspended_strike_again_in_later_attempts(
    trees: Trees, *, fails: bool, cancelled: bool
) -> None:
    """The outer one ends the task's scopes before the line of the inner one has its turn: there was no scope any more to
    which that belonged, and the job was dead."""
    undone: list[int] = []

    async def undo(job_id: int) -> None:
        undone.append(job_id)

    async def note() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> list[bool]:
        deadline = job.fail_after if fails else job.move_on_after
        struck: list[bool] = []

        async def waits() -> None:
            try:
                with deadline(3600, key="outer") as outer, deadline(3600, key="inner") as inner:
                    await job.wait_for_event("never", key="never")
            except trio.TooSlowError:
                pass
            struck.extend([outer.cancelled_caught, inner.cancelled_caught])

        async def goes_on() -> None:
            try:
                await job.wait_for_event("go", key="go")
            except trio.Cancelled:
                with job.cleanup():
                    await job.step(undo, job.id, key="undo")  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise

        await job.step(note)
        async with trio.open_nursery() as tasks:
            tasks.start_soon(waits)
            tasks.start_soon(goes_on)
        return struck

    ids, client = [trees.enqueue("order") for _ in range(JOBS)], SyncClient(trees.dsn)
    await trees.burst()
    for job_id in ids:
        trees.time_passes(job_id)
    await trees.burst()
    for job_id in ids:
        if cancelled:
            client.cancel(job_id)
        else:
            client.send_event(job_id, "go")
    await trees.burst()
    found = [trees.job(job_id) for job_id in ids]
    assert [job["error"] for job in found if job["error"] is not None and "ReplayMismatch" in job["error"]] == []
    if cancelled:
        assert ([job["state"] for job in found], sorted(undone)) == (["cancelled"] * JOBS, ids)
    else:
        assert [(job["state"], job["result"]) for job in found] == [("completed", [True, False])] * JOBS


async def test_a_task_that_had_left_its_deadline_when_an_outer_one_struck_has_left_it_again(trees: Trees) -> None:
    """It was in a plain await then, so that as many tasks are busy as when it is still being cut short. (Under load that is the
    moment between two durable calls.)"""
    decided: list[tuple[int, dict[str, bool], dict[str, bool]]] = []

    async def remember(said: dict[str, bool]) -> dict[str, bool]:
        return said

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        said: dict[str, bool] = {}

        async def part(name: str) -> None:
            with job.move_on_after(0.05, key=f"limit-{name}") as limit:
                await job.step(trio.sleep_forever, key=f"ask-{name}")
            said[name] = limit.cancelled_caught
            if name == "b":
                await PlainAwait().wait()
            await job.step(trio.sleep_forever, key=f"ask-again-{name}")

        with job.move_on_after(0.2):
            async with trio.open_nursery() as tasks:
                tasks.start_soon(part, "a")
                tasks.start_soon(part, "b")
        first = await job.step(remember, said)
        decided.append((job.attempt, first, dict(said)))
        await job.wait_for_event("go")

    job_id = trees.enqueue("order")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go")
    await trees.burst()
    both = {"a": True, "b": True}
    assert (trees.job(job_id)["state"], decided) == ("completed", [(1, both, both), (2, both, both)])


async def test_an_outer_deadline_that_cut_the_inner_one_short_in_a_plain_await_does_so_again(trees: Trees) -> None:
    """The inner one's line comes first, and belongs to the moment at which its task leaves it. The plain await was over in the
    next attempt, the task made the call after it, and the job was dead (one of 60 drawn races of seed 819)."""
    plain, undone = PlainAwait(), list[int]()

    async def undo(job: Job) -> None:
        undone.append(job.attempt)

    async def note() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        with job.move_on_after(3600, key="outer"):
            try:
                with job.move_on_after(3600, key="inner"):
                    await job.step(note)
                    if job.attempt == 1:
                        # Before it is lost: the next attempt may begin at once.
                        trees.time_passes(job.id)
                        await trees.lose(job.id)
                    if job.attempt == 2:
                        await plain.wait()
                    await trio.lowlevel.checkpoint()
                    await job.wait_for_event("never", key="never")
            except trio.Cancelled:
                with job.cleanup():
                    await job.step(undo, job)  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise
        if job.attempt == 2:
            await trees.lose(job.id)
        await job.step(note)
        return "moved on"

    found = await trees.ended(trees.enqueue("order"))
    assert (found["result"], found["attempt"], undone) == ("moved on", 3, [2])
