"""`job.cleanup()` ends without a word when its time is over: what the handler does then says nothing of what it was to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Handlers, Job, SyncClient
from pulse_trio.store import family
from pulse_trio.testing import run_job

if TYPE_CHECKING:
    from trio.testing import MockClock

    from support.trees import Trees


@pytest.mark.parametrize("answer", ["returns", "discards", "raises"])
@pytest.mark.parametrize(
    ("reason", "outcome", "state"),
    [
        ("user", "failed", "cancelled"),
        ("parent", "failed", "cancelled"),
        ("shutdown", "released", "available"),
        ("lease-unproven", "released", "available"),
        ("timeout", "timeout", "retryable"),
    ],
)
async def test_the_attempt_ends_as_its_cancellation_says(
    reason: Any, outcome: str, state: str, answer: str, autojump_clock: MockClock
) -> None:
    handlers, bank, opens = Handlers(), list[str](), trio.Event()

    async def charge() -> None:
        bank.append("charged")

    async def refund() -> None:
        await opens.wait()
        bank.append("refunded")

    @handlers.job(durable=True)
    async def order(job: Job) -> str:
        await job.step(charge)
        try:
            raise OSError("no stock")
        except OSError as error:
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC120 -- job.cleanup() is the shield
            if answer == "raises":
                raise
            if answer == "discards":
                raise Discard("undone") from error
            return "undone"

    if reason == "timeout":
        run = await run_job(order.options(timeout=0.5), handlers=handlers)
    else:
        run = await run_job(order, handlers=handlers, cancel_after=0.5, cancel_reason=reason)
    assert (run.outcome, run.state, run.result, bank) == (outcome, state, None, ["charged"])


async def test_a_retry_does_what_a_clean_up_that_was_cut_has_left_though_the_handler_returned(trees: Trees) -> None:
    bank: list[str] = []
    slow = [True]

    async def charge() -> None:
        bank.append("charged")

    async def refund(job: Job) -> None:
        if slow:
            slow.clear()
            SyncClient(trees.dsn).cancel(job.id)
            await trio.sleep_forever()
        bank.append("refunded")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        await job.step(charge)
        try:
            raise OSError("no stock")
        except OSError:
            with job.cleanup():
                await job.step(refund, job)  # noqa: ASYNC120 -- the same
            return "refunded"

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst(cleanup=0.3)
    assert (trees.job(job_id)["state"], bank) == ("cancelled", ["charged"])
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == [job_id]
    SyncClient(trees.dsn).retry(job_id)
    with trio.fail_after(30):
        await trees.burst()
    assert bank == ["charged", "refunded"]


async def test_a_plain_job_that_returns_keeps_its_result(autojump_clock: MockClock) -> None:
    """It has no history: another attempt would do its work again."""
    handlers = Handlers()

    @handlers.job
    async def order(job: Job) -> str:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:  # noqa: ASYNC103 -- a handler may
            with job.cleanup():
                await trio.sleep_forever()  # noqa: ASYNC102 -- the same
            return "done"  # noqa: ASYNC104 -- a handler may
        return "never"

    run = await run_job(order, handlers=handlers, cancel_after=0.5, cancel_reason="shutdown")
    assert (run.outcome, run.result) == ("completed", "done")


async def test_a_clean_up_whose_time_was_over_before_its_first_call_is_done_by_a_retry(trees: Trees) -> None:
    """That call is not where the handler stood when the job was cancelled."""
    calls: list[str] = []

    async def act(name: str) -> None:
        calls.append(name)

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(act, "charge")
        try:
            if job.attempt == 1:
                SyncClient(trees.dsn).cancel(job.id)
                await trio.sleep_forever()
            await job.sleep(3600)
        finally:
            if job.attempt == 1:
                with job.cleanup():
                    await trio.sleep_forever()  # noqa: ASYNC102
            with job.cleanup():
                await job.step(act, "refund")  # noqa: ASYNC102

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst(log=False, cleanup=0.3)
        assert calls == ["charge"]
        SyncClient(trees.dsn).retry(job_id)
        await trees.burst(log=False)
    assert (trees.job(job_id)["state"], calls) == ("cancelled", ["charge", "refund"]), trees.job(job_id)["error"]
