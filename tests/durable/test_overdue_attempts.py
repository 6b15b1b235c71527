"""A deadline that passes while the job waits for its next attempt: that one is as of a job that a person has cancelled then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Job, RetryAfter, Snooze, SyncClient
from pulse_trio.worker.durable import once_more

if TYPE_CHECKING:
    from support.trees import Trees

CAUSES = ["user", "deadline"]


class Order:
    """Its handler fails of plain code before its first durable call while the bank is `away`."""

    def __init__(self, trees: Trees, cause: str) -> None:
        self.trees, self.cause = trees, cause
        self.calls: list[str] = []
        self.away: Exception | None = None
        self.hangs = False

    async def act(self, what: str) -> None:
        self.calls.append(what)

    async def handle(self, job: Job) -> None:
        if self.away is not None:
            raise self.away
        if self.hangs:
            await trio.sleep_forever()
        await job.step(self.act, "charge")
        try:
            if job.attempt == 1:
                raise RetryAfter(30)
            await job.sleep(3600)
        except trio.Cancelled:
            with job.cleanup():
                await job.step(self.act, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    async def begins(self, **options: Any) -> int:
        """Runs the first attempt. Then the job is cancelled, or its deadline has passed."""
        self.trees.handlers.job(durable=True, max_attempts=3)(self.handle)
        job_id = self.trees.enqueue("handle", **options)
        await self.trees.burst(log=False)
        if self.cause == "user":
            self.trees.window.run("SELECT cancel(%s)", job_id)
        else:
            self.trees.window.run(
                "UPDATE job SET options = (coalesce(options::jsonb, '{}') || jsonb_build_object('deadline',"
                " extract(epoch FROM now()) - 1))::json WHERE id = %s", job_id,
            )  # fmt: skip
        self.trees.again()
        return job_id

    async def is_undone_by_a_retry(self, job_id: int) -> None:
        """The job owes its clean-up, and a retry does it when the bank is there again."""
        assert (self.calls, self.owes(job_id)) == (["charge"], True)
        self.away, self.hangs = None, False
        SyncClient(self.trees.dsn).retry(job_id)
        assert (await self.trees.ended(job_id))["state"] == "cancelled"
        assert (self.calls, self.owes(job_id)) == (["charge", "refund"], False)

    def owes(self, job_id: int) -> bool:
        return self.trees.window.value("SELECT owes_clean_up(%s)", job_id)


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("error", [OSError("away"), RetryAfter(2), Snooze(2)], ids=lambda error: type(error).__name__)
async def test_it_is_put_back_with_pauses_and_undone_when_the_handler_gets_through(
    trees: Trees, cause: str, error: Exception
) -> None:
    """It ran again at once, without end and without using its budget: 140 times a second."""
    order = Order(trees, cause)
    order.away = None
    job_id = await order.begins()
    order.away = error
    for _ in range(3):
        with trio.fail_after(20):
            await trees.burst(log=False)
        assert trees.job(job_id)["finished_at"] is None
        (last,) = trees.window.run(
            "SELECT extract(epoch FROM j.run_at - a.ended_at)::float8 AS pause FROM job j JOIN attempt a"
            " ON a.job_id = j.id AND a.attempt = j.attempt WHERE j.id = %s", job_id,
        )  # fmt: skip
        assert last["pause"] > 0.9
        trees.again()
    order.away = None
    found = await trees.ended(job_id)
    assert (found["state"], found["cancel_reason"]) == ("cancelled", cause)
    assert (order.calls, order.owes(job_id)) == (["charge", "refund"], False)


@pytest.mark.parametrize("cause", CAUSES)
async def test_one_that_fails_each_time_ends_and_owes(trees: Trees, cause: str) -> None:
    order = Order(trees, cause)
    job_id = await order.begins()
    order.away = OSError("away")
    found = await trees.ended(job_id)
    assert (found["state"], found["cancel_reason"]) == ("cancelled", cause)
    assert found["attempt"] == 2 + once_more.MOST
    await order.is_undone_by_a_retry(job_id)


@pytest.mark.parametrize("cause", CAUSES)
async def test_one_that_gives_up_each_time_ends_and_owes(trees: Trees, cause: str) -> None:
    order = Order(trees, cause)
    job_id = await order.begins()
    order.away = Discard("no bank")
    found = await trees.ended(job_id)
    assert (found["state"], found["cancel_reason"]) == ("cancelled", cause)
    await order.is_undone_by_a_retry(job_id)


@pytest.mark.parametrize("cause", CAUSES)
async def test_one_that_times_out_before_it_is_told_ends_and_owes(trees: Trees, cause: str) -> None:
    """It used its budget up with the backoff of its retries, and was dead then."""
    order = Order(trees, cause)
    job_id = await order.begins(timeout=0.3)
    order.hangs = True
    found = await trees.ended(job_id)
    assert (found["state"], found["cancel_reason"], found["attempt"]) == ("cancelled", cause, 2)
    await order.is_undone_by_a_retry(job_id)
