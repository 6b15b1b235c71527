"""A handler that cancels a nursery of Trio's own: what the durable calls in it get all the same comes again."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pulse_trio import Job, SyncClient

if TYPE_CHECKING:
    from support.trees import Trees


async def test_steps_that_end_after_it_have_their_results_again(trees: Trees) -> None:
    ways: list[list[Any]] = []
    calls: list[str] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        way, cut = list[Any](), trio.Event()

        async def slow(name: str) -> str:
            calls.append(name)
            with trio.CancelScope(shield=True):
                await cut.wait()
            return name

        async def remind(name: str) -> None:
            way.append(await job.step(slow, name, key=name))
            await trio.lowlevel.checkpoint()
            way.append("not cut")

        async with trio.open_nursery() as nursery:
            for name in "abc":
                nursery.start_soon(remind, name)
            await wait_all_tasks_blocked()
            await job.step(_first)
            nursery.cancel_scope.cancel()
            cut.set()
        ways.append(sorted(way))
        await job.wait_for_event("go on")
        return "done"

    job_id = trees.enqueue("order")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    with trio.fail_after(30):
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "done")
    assert sorted(calls) == ["a", "b", "c"]
    assert ways == [["a", "b", "c"]] * 2


async def _first() -> None: ...


async def test_a_call_in_it_stands_until_the_job_is_cancelled_there_again(trees: Trees) -> None:
    """The job was cancelled before the task had its turn, and its clean-up has made a step since."""
    calls: list[str] = []

    async def act(name: str) -> None:
        calls.append(name)

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        first, charged, noted, cut = trio.Event(), trio.Event(), trio.Event(), trio.Event()

        async def note() -> None:
            if job.attempt == 1:
                await charged.wait()
            else:
                # The other one stands, and is cut short, before this line is handed out.
                for _ in range(20):
                    await trio.lowlevel.cancel_shielded_checkpoint()
            await job.step(act, "note", key="note")
            noted.set()

        async def remind() -> None:
            if job.attempt == 1:
                await first.wait()
            await job.step(act, "charge", key="charge")
            charged.set()
            if job.attempt == 1:
                with trio.CancelScope(shield=True):
                    await cut.wait()
                    SyncClient(trees.dsn).cancel(job.id)
                    while job.cancel_reason is None:  # noqa: ASYNC110 -- it has no event
                        await trio.sleep(0.01)
            try:
                await job.sleep(3600, key="sleep")
            finally:
                with job.cleanup():
                    await job.step(act, "refund", key="refund")  # noqa: ASYNC102
                    if job.attempt == 1:
                        await trees.lose(job.id)  # noqa: ASYNC102

        async with trio.open_nursery() as nursery:
            nursery.start_soon(remind)
            nursery.start_soon(note)
            await job.step(_first)
            first.set()
            if job.attempt == 1:
                await noted.wait()
            nursery.cancel_scope.cancel()
            cut.set()
        await job.sleep(3600)

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst(log=False)
        trees.again()
        await trees.burst(log=False)
    ended = trees.window.run("SELECT outcome, error FROM attempt WHERE job_id = %s ORDER BY attempt", job_id)
    assert ([one["outcome"] for one in ended], calls) == (["rescued", "cancelled"], ["charge", "note", "refund"]), ended


@pytest.mark.parametrize("how", ["suspended", "lost"])
@pytest.mark.parametrize("which", ["move_on_after", "fail_after"])
async def test_a_remembered_scope_behind_one_that_has_cut_a_call_keeps_its_deadline(
    which: str, how: str, trees: Trees
) -> None:
    """Each attempt counted it anew: a suspended job was never cut short, and began for ever."""

    @trees.handlers.job(durable=True, suspend_after=0 if how == "suspended" else 60, max_attempts=3)
    async def order(job: Job) -> str:
        with trio.move_on_after(0.05):
            await job.wait_for_event("quick")
        try:
            with getattr(job, which)(3600) as patience:
                await job.wait_for_event("approved")
        except trio.TooSlowError:
            return "too late"
        return "too late" if patience.cancelled_caught else "approved"

    job_id = trees.enqueue("order")
    remembered = (10, "2:scope", "0:job")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trees.burst, lease=3, heartbeat=0.1))
            while remembered not in trees.lines(job_id):
                await trio.lowlevel.checkpoint()
            if how == "lost":
                trees.time_passes(job_id)
                await trees.lose(job_id)
        trees.time_passes(job_id)
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst(log=False)
    assert (trees.job(job_id)["state"], trees.job(job_id)["result"]) == ("completed", "too late")
    assert trees.job(job_id)["attempt"] == 2
    assert trees.lines(job_id).count(remembered) == 1
