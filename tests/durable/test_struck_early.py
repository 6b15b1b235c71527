"""A deadline or a cancellation that comes before the call that it strikes has begun: between two attempts, between a claim
and its beginning, while its history is read; and what else comes out of its place in a history. What is to be undone is undone,
once, and later attempts find the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pulse_trio import Job, StepFailed, SyncClient
from pulse_trio.jobs import CancelRequest
from pulse_trio.worker.durable import attempts
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

    begin, resume = Runner._begin, attempts.resume

    def begins(self: Any, job: Any, *given: Any) -> None:
        cancelled(job)
        begin(self, job, *given)

    async def resumes(attempt: Any) -> None:
        cancelled(attempt.running)
        await resume(attempt)

    if when == "before it begins":
        monkeypatch.setattr(Runner, "_begin", begins)
    else:
        monkeypatch.setattr(attempts, "resume", resumes)
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


@pytest.mark.parametrize("answered", ["in the body", "outside"])
@pytest.mark.parametrize("children", [0, 1])
async def test_a_step_that_fails_in_a_blocks_body_comes_before_the_blocks_end_in_the_history(
    children: int, answered: str, trees: Trees
) -> None:
    order = Order()

    async def fails() -> None:
        order.done.append("fails")
        raise ValueError("no")

    @trees.handlers.job
    async def child() -> None: ...

    @trees.handlers.job(durable=True, max_attempts=3)
    async def ship(job: Job) -> None:
        try:
            async with job.durable_nursery() as nursery:
                for _ in range(children):
                    nursery.start_soon(child)
                await job.step(order.act, "charge")
                try:
                    await job.step(fails)
                except StepFailed:
                    if answered == "outside":
                        raise
        finally:
            with job.cleanup():
                await job.step(order.act, "refund")  # noqa: ASYNC102
        raise StepFailed("no", step="fails")

    job_id = trees.enqueue("ship")
    assert (await runs_to_its_end(trees, job_id))[0] == "dead"
    assert "StepFailed" in trees.job(job_id)["error"]
    assert order.done == ["charge", "fails", "refund"]


async def test_the_result_of_a_block_is_there_again_where_the_handler_has_cut_its_scope_after_it(trees: Trees) -> None:
    @trees.handlers.job
    async def child() -> str:
        return "label"

    @trees.handlers.job(durable=True)
    async def ship(job: Job) -> str:
        found = "nothing"
        with job.move_on_after(3600) as scope:
            async with job.durable_nursery() as nursery:
                printed = nursery.start_soon(child)
            found = printed.result
            scope.cancel()
        await job.sleep(0)
        if job.attempt < 3:
            raise ValueError("for now")
        return found

    assert await runs_to_its_end(trees, trees.enqueue("ship")) == ("completed", "label")


async def test_a_second_task_cuts_its_scope_again_where_it_has_cut_it(trees: Trees) -> None:
    order = Order()
    charged, stands, cut = trio.Event(), trio.Event(), trio.Event()

    async def slow() -> None:
        stands.set()
        await cut.wait()

    async def beside(job: Job) -> None:
        await charged.wait()
        await job.step(order.act, "a", key="a")
        await job.step(slow, key="slow")

    async def cuts(job: Job) -> None:
        with job.move_on_after(3600, key="scope") as scope:
            await job.step(order.act, "charge", key="charge")
            charged.set()
            if job.attempt == 1:
                await stands.wait()
            scope.cancel()
            await job.step(order.act, "never", key="never")
        await job.step(order.act, "after", key="after")
        cut.set()

    @trees.handlers.job(durable=True)
    async def ship(job: Job) -> str:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beside, job)
            nursery.start_soon(cuts, job)
        if job.attempt < 3:
            raise ValueError("for now")
        return "shipped"

    assert await runs_to_its_end(trees, trees.enqueue("ship")) == ("completed", "shipped")
    assert order.done == ["charge", "a", "after"]


async def test_a_deadline_that_has_passed_strikes_though_calls_of_other_tasks_have_not_gone_on_yet(
    trees: Trees,
) -> None:
    done: list[str] = []

    def act(what: str) -> None:
        done.append(what)

    async def beside(job: Job, name: str) -> None:
        await job.step(act, f"first {name}", key=f"first {name}")
        await job.step(act, f"second {name}", key=f"second {name}")

    @trees.handlers.job(durable=True)
    async def ship(job: Job) -> bool:
        with job.move_on_after(3600) as patience:
            async with trio.open_nursery() as nursery:
                if job.attempt > 1:
                    for name in "xyz":
                        nursery.start_soon(beside, job, name)
                await job.step(act, "a")
                if job.attempt == 1:
                    raise ValueError("for now")
                await job.step(act, "b")
        return patience.cancelled_caught

    job_id = trees.enqueue("ship")
    await trees.burst()
    deadline_passes(trees, job_id)
    assert await runs_to_its_end(trees, job_id) == ("completed", True)
    assert done == ["a"]


async def test_a_task_that_has_not_had_its_turn_since_it_was_cut_is_no_mismatch(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trio draws which of two tasks has its turn first: the one that is cut again, or one whose new call looks."""
    monkeypatch.setattr("pulse_trio.worker.durable.durable._AT_ONCE", 0.0)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        go, scopes = trio.Event(), list[Any]()

        async def cut() -> None:
            with job.move_on_after(3600, key="patience") as patience:
                scopes.append(patience)
                await job.wait_for_event("never", key="never")
            await job.step(_nothing, key="after")
            await job.wait_for_event("other", key="other")

        async def cuts() -> None:
            await go.wait()
            await job.step(_nothing, key="cuts")
            if job.attempt == 1:
                scopes[0].cancel()

        async def waits() -> None:
            await go.wait()
            await job.wait_for_event("waits", key="waits")

        async with trio.open_nursery() as tasks:
            for one in (cut, cuts, waits):
                tasks.start_soon(one)
            await wait_all_tasks_blocked()
            go.set()
        return "done"

    jobs = [trees.enqueue("order") for _ in range(16)]
    await trees.burst()
    client = SyncClient(trees.dsn)
    for name in ("other", "waits"):
        for job_id in jobs:
            client.send_event(job_id, name)
    with trio.fail_after(30):
        await trees.burst()
    assert [(trees.job(job_id)["error"], trees.job(job_id)["result"]) for job_id in jobs] == [(None, "done")] * 16


async def _nothing() -> None: ...
