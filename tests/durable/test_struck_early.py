"""A deadline or a cancellation that comes before the call that it strikes has begun: between two attempts, between a job's claim
and its beginning, while its history is read. What is to be undone is undone, once, and later attempts find the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Job, SyncClient
from pulse_trio.jobs import CancelRequest
from pulse_trio.worker.durable import durable
from pulse_trio.worker.jobs.runner import Runner

if TYPE_CHECKING:
    from support.trees import Trees

STEP, SCOPE_CANCELLED = 1, 8


class Order:
    """What the steps of a handler have done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def act(self, what: str) -> str:
        self.done.append(what)
        return what


async def runs_to_its_end(trees: Trees, job_id: int) -> tuple[object, object]:
    with trio.fail_after(30):
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst()
            trees.again()
    found = trees.job(job_id)
    return found["state"], found["result"]


def deadline_passes(trees: Trees, job_id: int) -> None:
    """That of the handler's first scope, while no worker has the job, which is due now."""
    trees.window.run(
        "UPDATE history SET value = to_json(extract(epoch FROM now())::float8) WHERE job_id = %s AND name = '0:job'"
        " AND line = 1",
        job_id,
    )
    trees.again()


async def test_what_a_deadline_that_passed_between_attempts_has_undone_is_found_after_it(trees: Trees) -> None:
    order = Order()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def ship(job: Job) -> str:
        with job.move_on_after(3600) as patience:
            await job.step(order.act, "charge")
            try:
                await job.wait_for_event("approved")
            except BaseException:
                with job.cleanup():
                    await job.step(order.act, "refund")  # noqa: ASYNC102
                raise
        await job.step(order.act, "tell")
        if job.attempt < 4:
            raise ValueError("for now")
        return f"refunded {patience.cancelled_caught}"

    job_id = trees.enqueue("ship")
    await trees.burst()
    deadline_passes(trees, job_id)
    assert await runs_to_its_end(trees, job_id) == ("completed", "refunded True")
    assert order.done == ["charge", "refund", "tell"]
    kinds = [(kind, key) for kind, key, _ in trees.lines(job_id) if kind in (STEP, SCOPE_CANCELLED)]
    assert kinds == [(STEP, "2:step"), (SCOPE_CANCELLED, "1:scope"), (STEP, "4:step"), (STEP, "5:step")]


async def test_no_step_is_called_after_a_deadline_that_passed_between_attempts(trees: Trees) -> None:
    done: list[str] = []

    def act(what: str) -> None:
        done.append(what)

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> bool:
        with job.move_on_after(3600) as patience:
            await job.step(act, "a")
            if job.attempt == 1:
                raise ValueError("for now")
            await job.step(act, "b")
        return patience.cancelled_caught

    job_id = trees.enqueue("order")
    await trees.burst()
    deadline_passes(trees, job_id)
    assert await runs_to_its_end(trees, job_id) == ("completed", True)
    assert done == ["a"]


async def test_calls_keep_their_numbers_after_a_scope_that_the_handler_has_cut_before_its_last_call(
    trees: Trees,
) -> None:
    order = Order()

    @trees.handlers.job(durable=True)
    async def ship(job: Job) -> str:
        with job.move_on_after(3600) as outer:
            with job.move_on_after(3600) as inner:
                inner.cancel()
                await job.step(order.act, "never")
            outer.cancel()
            await job.step(order.act, "never")
        await job.step(order.act, "after")
        if job.attempt < 3:
            raise ValueError("for now")
        return "shipped"

    job_id = trees.enqueue("ship")
    assert await runs_to_its_end(trees, job_id) == ("completed", "shipped")
    assert order.done == ["after"]


@pytest.mark.parametrize("when", ["before it begins", "while its history is read"])
async def test_a_suspended_job_that_is_cancelled_as_it_begins_again_undoes_what_it_has_done(
    when: str, trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Order()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def ship(job: Job) -> None:
        await job.step(order.act, "charge")
        try:
            await job.wait_for_event("approved")
        finally:
            with job.cleanup():
                await job.step(order.act, "refund")  # noqa: ASYNC102

    def cancelled(running: Any) -> None:
        if running.claim.attempt == 2:
            SyncClient(trees.dsn).cancel(job_id)
            running.ask(CancelRequest("user", None))

    begin, resume = Runner._begin, durable.resume

    def begins(self: Any, job: Any, *given: Any) -> None:
        cancelled(job)
        begin(self, job, *given)

    async def resumes(attempt: Any) -> None:
        cancelled(attempt.running)
        await resume(attempt)

    if when == "before it begins":
        monkeypatch.setattr(Runner, "_begin", begins)
    else:
        monkeypatch.setattr(durable, "resume", resumes)
    job_id = trees.enqueue("ship")
    await trees.burst()
    assert trees.job(job_id)["state"] == "suspended"
    trees.again()
    assert await runs_to_its_end(trees, job_id) == ("cancelled", None)
    assert order.done == ["charge", "refund"]


async def test_a_cancelled_job_undoes_what_it_has_done_though_children_wait_to_be_written(trees: Trees) -> None:
    order = Order()

    @trees.handlers.job
    async def child() -> None: ...

    @trees.handlers.job(durable=True)
    async def ship(job: Job) -> None:
        await job.step(order.act, "charge")
        async with job.durable_nursery() as nursery:
            nursery.start_soon(child)
            SyncClient(trees.dsn).cancel(job.id)
            try:
                await trio.sleep_forever()
            finally:
                with job.cleanup():
                    await job.step(order.act, "refund")  # noqa: ASYNC102

    job_id = trees.enqueue("ship")
    assert await runs_to_its_end(trees, job_id) == ("cancelled", None)
    assert order.done == ["charge", "refund"]
    assert trees.window.run("SELECT 1 FROM jobs WHERE parent_id = %s", job_id) == []
