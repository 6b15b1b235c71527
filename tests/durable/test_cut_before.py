"""A job is cancelled while a task has not left a call yet that its scope has cut: the next attempt is cancelled too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from pulse_trio import Job, SyncClient
from pulse_trio.lines import Kind

if TYPE_CHECKING:
    from support.trees import Trees


async def test_a_call_that_a_scope_has_cut_before_is_not_where_the_job_was_cancelled(trees: Trees) -> None:
    done: list[str] = []

    async def write(what: str) -> str:
        done.append(what)
        if what == "notify" and done.count("notify") == 1:
            await trees.lose(job_id)
            # As a killed process does no more.
            await trio.sleep_forever()
        return what

    async def cut(job: Job, charged: trio.Event, beside: trio.Event, left: trio.Event) -> None:
        with job.move_on_after(3600, key="scope") as scope:
            await job.step(write, "charge", key="charge")
            charged.set()
            if job.attempt == 1:
                await beside.wait()
            scope.cancel()
            await job.sleep(3600, key="sleep")
        left.set()
        await job.wait_for_event("never", key="never")

    async def goes_on(job: Job, charged: trio.Event, beside: trio.Event, left: trio.Event) -> None:
        if job.attempt == 1:
            await charged.wait()
        await job.step(write, "beside", key="beside")
        beside.set()
        # In the second attempt the cut and this line come in one go, and with them the end of the replay.
        if job.attempt != 2:
            await left.wait()
        await job.step(write, "last", key="last")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        events = trio.Event(), trio.Event(), trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cut, job, *events)
                nursery.start_soon(goes_on, job, *events)
        finally:
            with job.cleanup():
                await job.step(write, "refund", key="refund")  # noqa: ASYNC102 -- shielded
                await job.step(write, "notify", key="notify")  # noqa: ASYNC102 -- shielded

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        await trees.burst(log=False)
        assert trees.job(job_id)["state"] == "suspended"
        SyncClient(trees.dsn).cancel(job_id)
        while trees.job(job_id)["finished_at"] is None:
            trees.again()
            await trees.burst(log=False, lease=3, heartbeat=0.3, cleanup=1)
    assert done == ["charge", "beside", "last", "refund", "notify", "notify"]
    assert [row["error"] for row in trees.window.run("SELECT error FROM attempts WHERE attempt = 3")] == ["user"]
    assert [kind for kind, _, _ in trees.lines(job_id) if kind != Kind.MOMENT] == [
        Kind.STEP, Kind.STEP, Kind.SCOPE_CANCELLED, Kind.STEP, Kind.CANCELLED, Kind.STEP, Kind.STEP,
    ]  # fmt: skip
