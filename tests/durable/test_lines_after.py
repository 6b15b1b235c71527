"""A call that has its line after the cancellation of the job has it again in the next attempt."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import trio

from pulse_trio import Job, SyncClient
from pulse_trio.lines import Kind

if TYPE_CHECKING:
    from support.trees import Trees


async def test_a_step_in_a_thread_that_ends_after_the_cancellation(trees: Trees) -> None:
    done: list[str] = []
    cancelled = threading.Event()

    def slow() -> str:
        # Which no cancellation cuts short.
        cancelled.wait(30)
        done.append("slow")
        return "slow"

    async def write(what: str) -> None:
        done.append(what)
        if what == "notify" and done.count("notify") == 1:
            await trees.lose(job_id)
            await trio.sleep_forever()

    async def beside(job: Job, ended: trio.Event) -> None:
        done.append(await job.step(slow, key="slow"))
        ended.set()

    async def waits(job: Job, ended: trio.Event) -> None:
        try:
            await job.sleep(3600, key="sleep")
        finally:
            cancelled.set()
            with job.cleanup():
                await ended.wait()  # noqa: ASYNC102 -- shielded
                await job.step(write, "refund", key="refund")  # noqa: ASYNC102 -- shielded
                await job.step(write, "notify", key="notify")  # noqa: ASYNC102 -- shielded

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        ended = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beside, job, ended)
            nursery.start_soon(waits, job, ended)

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: trees.burst(log=False, lease=3, heartbeat=0.3, cleanup=1))
            while not any(key == "sleep" for _, key, _ in trees.lines(job_id)):  # noqa: ASYNC110 -- no event tells of a line
                await trio.sleep(0.01)
            SyncClient(trees.dsn).cancel(job_id)
        while trees.job(job_id)["finished_at"] is None:
            trees.again()
            await trees.burst(log=False, lease=3, heartbeat=0.3, cleanup=1)
    assert done == ["slow", "slow", "refund", "notify", "slow", "notify"]
    assert [kind for kind, _, _ in trees.lines(job_id) if kind != Kind.MOMENT] == [
        Kind.CANCELLED, Kind.STEP, Kind.STEP, Kind.STEP,
    ]  # fmt: skip
    assert trees.job(job_id)["state"] == "cancelled"
    assert [row["error"] for row in trees.window.run("SELECT error FROM attempts WHERE attempt = 2")] == ["user"]
