"""A suspended handler is cut short: by its job's cancellation, or by a deadline that passed meanwhile. Before the place where
it stood it awaits something plain, in which no line tells the next attempt of what is behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Child, ChildFailed, Discard, Job, State, SyncClient
from pulse_trio.worker.durable import returning

if TYPE_CHECKING:
    from support.trees import Trees


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("limit", [None, 3600])
async def test_a_deadline_undoes_what_comes_before_a_wait_for_an_event(
    trees: Trees, limit: float | None, *, between: bool
) -> None:
    """Its compensation was refused, because the job waited for the event, and no attempt came after it."""
    calls: list[str] = []

    async def act(what: str) -> None:
        calls.append(what)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        await job.step(act, "charge")
        try:
            with job.move_on_after(60) as patience:
                await trio.lowlevel.checkpoint()
                await job.wait_for_event("packed", timeout=limit)
            if patience.cancelled_caught:
                if between:
                    await job.step(act, "too late")
                raise Discard("too late")
        except BaseException:
            with job.cleanup():
                await job.step(act, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "suspended"
    moved = (
        "UPDATE history SET value = to_json(extract(epoch FROM now())::float8) WHERE job_id = %s AND key = '2:scope'"
    )
    trees.window.run(moved, job_id)
    trees.again()
    await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "dead"
    assert calls == ["charge", *["too late"] * between, "refund"]


@pytest.mark.parametrize("task", ["main", "another"])
async def test_a_cancelled_job_comes_to_its_children_first(trees: Trees, task: str) -> None:
    """It was cut short before the block, and its compensation saw no children."""
    seen: list[str] = []

    @trees.handlers.job
    async def packs() -> str:
        return "packed"

    @trees.handlers.job(durable=True, suspend_after=0)
    async def ships(job: Job) -> None:
        await job.wait_for_event("lorry")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        children = list[Child[Any]]()

        async def works() -> None:
            await trio.lowlevel.checkpoint()
            async with job.durable_nursery(collect=True, key="parts") as nursery:
                children.append(nursery.start_soon(packs))
                children.append(nursery.start_soon(ships))

        async def note() -> None:
            seen.extend(str(child.state) for child in children)

        await job.step(trio.lowlevel.checkpoint)
        try:
            if task == "main":
                await works()
            else:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(works)
        except BaseException:
            with job.cleanup():
                await job.step(note)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "suspended"
    SyncClient(trees.dsn).cancel(job_id)
    await trees.burst(log=False)
    assert (trees.job(job_id)["state"], seen) == ("cancelled", [State.COMPLETED, State.CANCELLED])


@pytest.mark.parametrize("body", ["waits", "asks"])
async def test_one_that_stood_in_the_body_of_a_block_is_cut_short_there_at_once(
    trees: Trees, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr(returning, "REOPENED_WITHIN", 3600)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def ships(job: Job) -> None:
        await job.wait_for_event("lorry")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        await job.step(trio.lowlevel.checkpoint)
        async with job.durable_nursery() as nursery:
            nursery.start_soon(ships)
            if body == "waits" or job.attempt == 1:
                await job.wait_for_event("packed", key="packed")
            while True:  # noqa: ASYNC110 -- as an author may who asks somewhere else
                await trio.sleep(0.01)

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "suspended"
    SyncClient(trees.dsn).cancel(job_id)
    with trio.fail_after(30):
        await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "cancelled"


async def test_one_that_does_not_come_to_them_is_cut_short_a_little_later(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(returning, "REOPENED_WITHIN", 0.2)
    seen: list[str] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def ships(job: Job) -> None:
        await job.wait_for_event("lorry")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        await job.step(trio.lowlevel.checkpoint)
        try:
            if job.attempt > 1:
                await trio.sleep_forever()
            async with job.durable_nursery() as nursery:
                nursery.start_soon(ships)
        except trio.Cancelled:
            seen.append(str(job.cancel_reason))
            raise

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    SyncClient(trees.dsn).cancel(job_id)
    await trees.burst(log=False)
    assert (trees.job(job_id)["state"], seen) == ("cancelled", ["suspended", "user"])


async def test_a_body_that_a_child_has_cut_short_fails_of_it_again_wherever_that_comes(trees: Trees) -> None:
    """The next attempt is cut short before it has started the child, and was dead: its block had not failed of it."""
    found: list[str] = []

    async def refund() -> None: ...

    @trees.handlers.job(max_attempts=1)
    async def packs() -> None:
        raise ValueError("no box")

    @trees.handlers.job(durable=True, max_attempts=2)
    async def order(job: Job) -> None:
        try:
            async with job.durable_nursery() as nursery:
                await trio.lowlevel.checkpoint()
                nursery.start_soon(packs)
                await trio.sleep_forever()
        except* ChildFailed as group:
            found.extend(str(error) for error in group.exceptions)
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC120 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    ended = await trees.ended(job_id)
    assert "no box" in found[0]
    assert found[1:] == found[:1]
    assert (ended["state"], "Mismatch" in ended["error"]) == ("dead", False)
