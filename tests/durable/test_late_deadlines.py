"""A deadline that passes in a remembered scope and cuts nothing short: what ran could not be interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Job, SyncClient

if TYPE_CHECKING:
    from support.trees import Trees


@pytest.mark.parametrize("fails", [False, True], ids=["move_on_after", "fail_after"])
async def test_a_task_beside_it_does_not_make_a_mismatch_of_it(trees: Trees, fails: bool) -> None:
    called: list[Any] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        async def other() -> None:
            await job.wait_for_event("other", key="other")

        async with trio.open_nursery() as tasks:
            tasks.start_soon(other)
            with (job.fail_after if fails else job.move_on_after)(0.05) as patience:

                async def report() -> str:
                    with trio.CancelScope(shield=True):
                        while not patience.cancel_called:  # noqa: ASYNC110 -- it has no event
                            await trio.sleep(0.01)
                    called.append("report")
                    return "reported"

                await job.step(report)
                called.append(patience.cancel_called)
            called.append((patience.cancel_called, patience.cancelled_caught))
            await job.wait_for_event("main")
        return "done"

    job_id = trees.enqueue("order")
    await trees.burst()
    client = SyncClient(trees.dsn)
    client.send_event(job_id, "other")
    await trees.burst()
    client.send_event(job_id, "main")
    await trees.burst()
    assert trees.job(job_id)["error"] is None
    assert trees.job(job_id)["result"] == "done"
    assert called.count("report") == 1
    assert called[1:] == [True, (True, False)] * (len(called) // 2)


async def test_two_scopes_that_end_at_once_in_two_tasks(trees: Trees) -> None:
    steps: list[str] = []
    both = trio.Event()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def claim(job: Job) -> str:
        async def assessor(name: str) -> None:
            with job.move_on_after(0.05, key=f"patience-{name}") as patience:

                async def report() -> str:
                    with trio.CancelScope(shield=True):
                        while not patience.cancel_called:  # noqa: ASYNC110 -- it has no event
                            await trio.sleep(0.01)
                        steps.append(name)
                        if len(steps) == 2:
                            both.set()
                        await both.wait()
                    return name

                await job.step(report, key=f"report-{name}")
            await job.wait_for_event("go on", key=f"pause-{name}")

        async with trio.open_nursery() as tasks:
            tasks.start_soon(assessor, "a")
            tasks.start_soon(assessor, "b")
        return "done"

    job_id = trees.enqueue("claim")
    await trees.burst()
    client = SyncClient(trees.dsn)
    for _ in range(2):
        client.send_event(job_id, "go on")
        await trees.burst()
    assert trees.job(job_id)["error"] is None
    assert (trees.job(job_id)["result"], sorted(steps)) == ("done", ["a", "b"])


async def test_the_code_after_the_step_is_not_cut_short_in_a_later_attempt(trees: Trees) -> None:
    ways: list[str] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        way = ""
        with job.move_on_after(2) as patience:
            way += await job.step(_quick)
            await trio.lowlevel.checkpoint()
            way += " and plain code"
            with trio.CancelScope(shield=True):
                while not patience.cancel_called:  # noqa: ASYNC110 -- it has no event
                    await trio.sleep(0.01)
        ways.append(f"{way} {patience.cancel_called} {patience.cancelled_caught}")
        await job.wait_for_event("go on")
        return way

    job_id = trees.enqueue("order")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    await trees.burst()
    assert ways == ["quick and plain code True False"] * 2
    assert trees.job(job_id)["result"] == "quick and plain code"


async def _quick() -> str:
    return "quick"


async def test_a_scope_that_its_own_task_ends_is_ended_there_again_wherever_the_others_stand(trees: Trees) -> None:
    ways: list[list[str]] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        way = list[str]()

        async def other() -> None:
            for _ in range(0 if job.attempt == 1 else 20):
                await trio.lowlevel.checkpoint()
            await job.wait_for_event("other", key="other")

        async with trio.open_nursery() as tasks:
            tasks.start_soon(other)
            for _ in range(20 if job.attempt == 1 else 0):
                await trio.lowlevel.checkpoint()
            with job.move_on_after(3600) as scope:
                way.append(await job.step(_quick))
                scope.cancel()
                await trio.lowlevel.checkpoint()
                way.append("not cut")
            way.append(await job.step(_quick))
            ways.append(way)
            await job.wait_for_event("main")
        return "done"

    job_id = trees.enqueue("order")
    await trees.burst()
    client = SyncClient(trees.dsn)
    client.send_event(job_id, "main")
    client.send_event(job_id, "other")
    await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "done")
    assert ways == [["quick", "quick"]] * 2


async def test_what_the_handler_reads_in_the_scope_is_the_same_in_a_later_attempt(trees: Trees) -> None:
    """It does something else if the deadline has passed."""
    ways: list[list[Any]] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        way = list[Any]()

        async def other() -> None:
            await job.wait_for_event("other", key="other")

        async with trio.open_nursery() as tasks:
            tasks.start_soon(other)
            with job.move_on_after(0.05) as patience:

                async def report() -> None:
                    with trio.CancelScope(shield=True):
                        while not patience.cancel_called:  # noqa: ASYNC110 -- it has no event
                            await trio.sleep(0.01)

                way.append(patience.cancel_called)
                await job.step(report)
                way.append(patience.cancel_called)
                await job.step(_late if patience.cancel_called else _quick)
                way.append("not cut")
            ways.append([*way, patience.cancelled_caught])
            await job.wait_for_event("main")
        return "done"

    job_id = trees.enqueue("order")
    await trees.burst()
    client = SyncClient(trees.dsn)
    for name in ("other", "main"):
        client.send_event(job_id, name)
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "done")
    assert ways == [[False, True, True]] * len(ways)


async def _late() -> str:
    return "late"
