"""`run_job`: one attempt of a handler, without a database."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import trio

from pulse_trio import Discard, Handlers, Job, RetryAfter, Snooze, State
from pulse_trio.errors import InvalidArguments
from pulse_trio.testing import run_job, run_job_sync

logger = logging.getLogger("shop")
handlers = Handlers()


@handlers.job(max_attempts=3)
async def welcome(job: Job, name: str, template: str = "plain") -> dict[str, object]:
    logger.info("welcome %s", name)
    for n in range(4):
        await job.progress(n / 4, f"step {n}")
    return {"name": name, "template": template, "attempt": job.attempt}


@handlers.job
async def sleeper(job: Job, seconds: float) -> str:
    """Says why it was cancelled, in its clean-up."""
    try:
        await trio.sleep(seconds)
    finally:
        logger.info("cancelled: %s %s", job.cancel_reason, job.cancel_message)
    return "slept"


@handlers.job(runs="thread")
def in_thread(words: list[str]) -> int:
    return len(words)


@handlers.job(runs="asyncio")
async def in_asyncio(n: int) -> int:
    import asyncio

    await asyncio.sleep(0)
    return n + 1


@handlers.job(runs="process")
def in_process(n: int) -> int:
    return n * 2


@pytest.mark.trio
async def test_a_run_has_the_result_every_progress_and_the_handlers_log() -> None:
    run = await run_job(welcome, "Ada", template="vip", attempt=2)
    assert (run.outcome, run.state, run.delay, run.error) == ("completed", "completed", None, None)
    assert run.result == {"name": "Ada", "template": "vip", "attempt": 2}
    assert run.progress == [(0, "step 0"), (0.25, "step 1"), (0.5, "step 2"), (0.75, "step 3")]
    assert [record.getMessage() for record in run.log] == ["welcome Ada"]


@pytest.mark.trio
@pytest.mark.parametrize(
    ("raised", "attempt", "outcome", "state", "delay"),
    [
        (RetryAfter(3600), 1, "failed", "retryable", 3600),
        (RetryAfter(0), 1, "failed", "available", 0),
        (Snooze(60), 1, "snoozed", "scheduled", 60),
        (Discard("never"), 1, "discarded", "dead", None),
        (ValueError("no"), 3, "failed", "dead", None),
    ],
)
async def test_a_run_says_what_becomes_of_the_job(
    raised: Exception, attempt: int, outcome: str, state: str, delay: float | None
) -> None:
    calls: list[int] = []

    async def handler(job: Job) -> None:
        calls.append(job.attempt)
        raise raised

    run = await run_job(Handlers().job(max_attempts=3)(handler), attempt=attempt)
    assert (run.outcome, run.state) == (outcome, state)
    assert calls == [attempt]
    assert run.delay == (None if delay is None else pytest.approx(delay, abs=1))
    if outcome in ("failed", "discarded"):
        assert run.exception is raised


@pytest.mark.trio
async def test_the_delay_of_a_failure_is_the_backoff_of_that_attempt() -> None:
    async def handler() -> None:
        raise ValueError

    fixed = Handlers().job(retry=lambda context: 10 * context.attempt)(handler)
    assert (await run_job(fixed, attempt=4)).delay == pytest.approx(40, abs=1)


@pytest.mark.parametrize("how", ["fails", "is cut short"])
async def test_the_error_of_a_clean_up_is_that_of_the_attempt_though_the_job_is_cancelled(
    how: str, autojump_clock: trio.testing.MockClock
) -> None:
    """It was the reason of the cancellation, and of a clean-up that was cut short there was nothing to be seen."""
    handlers = Handlers()

    @handlers.job
    async def refund(job: Job) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with job.cleanup():
                if how == "fails":
                    raise OSError("the refund was refused")
                await trio.sleep_forever()  # noqa: ASYNC102 -- job.cleanup() is the shield

    run = await run_job(refund, cancel_after=1, cancel_message="why", within=60)
    assert (run.outcome, run.state) == ("failed", State.CANCELLED)
    assert run.error is not None
    assert run.error.startswith("OSError: the refund was refused" if how == "fails" else "CleanupCut: ")


@pytest.mark.trio
@pytest.mark.parametrize(
    ("reason", "outcome", "state"),
    [
        ("user", "cancelled", "cancelled"),
        ("shutdown", "released", "available"),
        ("parent", "cancelled", "cancelled"),
        ("sibling", "cancelled", "cancelled"),
        ("fence-lost", "lost", "running"),
        ("lease-unproven", "released", "available"),
    ],
)
async def test_a_cancelled_run_tells_the_handler_the_reason(reason: str, outcome: str, state: str) -> None:
    run = await run_job(sleeper, 60, cancel_after=0.01, cancel_reason=reason, cancel_message="enough")  # type: ignore[arg-type]
    said = "enough" if reason == "user" else None
    assert [record.getMessage() for record in run.log] == [f"cancelled: {reason} {said}"]
    assert (run.outcome, run.state) == (outcome, state)


@pytest.mark.trio
async def test_on_a_clock_that_jumps_a_timeout_of_an_hour_takes_no_time(autojump_clock: trio.testing.MockClock) -> None:
    began = time.monotonic()
    run = await run_job(sleeper.options(timeout=3600), 7200, within=170)
    assert run.outcome == "timeout"
    assert [record.getMessage() for record in run.log] == ["cancelled: timeout None"]
    assert (await run_job(sleeper.options(deadline=60), 3600, within=170)).state == "cancelled"
    assert (await run_job(sleeper, 60, within=170)).result == "slept"
    assert time.monotonic() - began < 170  # however slow the machine is: a small part of the hour


@pytest.mark.trio
async def test_children_in_the_jobs_nursery_are_part_of_the_run() -> None:
    async def handler(job: Job) -> None:
        async def child() -> None:
            raise ValueError("the child's")

        job.nursery.start_soon(child)

    run = await run_job(handler)
    assert run.outcome == "failed"
    assert "the child's" in (run.error or "")


@pytest.mark.parametrize(
    ("handler", "argument", "result"), [(in_thread, ["a", "b"], 2), (in_asyncio, 1, 2), (in_process, 21, 42)]
)
def test_handlers_of_every_kind_run_without_a_loop(handler: object, argument: object, result: int) -> None:
    assert run_job_sync(handler, argument).result == result  # type: ignore[arg-type]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_it_runs_under_asyncio_too() -> None:
    assert (await run_job(sleeper, 0)).result == "slept"


@pytest.mark.trio
async def test_a_kind_and_a_plain_function_can_be_run() -> None:
    assert (await run_job("welcome", {"name": "Ada"}, handlers=handlers)).outcome == "completed"

    async def plain(n: int) -> int:
        return n

    assert (await run_job(plain, 3)).result == 3


@pytest.mark.trio
async def test_wrong_uses_say_whose_fault_it_is() -> None:
    with pytest.raises(InvalidArguments, match="welcome"):
        await run_job(welcome, nobody="Ada")
    with pytest.raises(InvalidArguments, match="needs the registry"):
        await run_job("welcome", {"name": "Ada"})
    with pytest.raises(InvalidArguments, match="not one of these handlers"):
        await run_job(welcome, "Ada", handlers=Handlers())
    with pytest.raises(ValueError, match=r"handler\.options\(timeout="):
        await run_job(welcome, "Ada", cancel_after=1, cancel_reason="timeout")
    misspelt: Any = "fence_lost"
    offered = "user, parent, sibling, fence-lost, lease-unproven, shutdown"
    with pytest.raises(ValueError, match=rf"'fence_lost' is none of {offered}\.$"):
        await run_job(welcome, "Ada", cancel_after=1, cancel_reason=misspelt)
    # It was offered, and ended in an AttributeError.
    with pytest.raises(ValueError, match="a durable handler that only waits has that reason by itself"):
        await run_job(welcome, "Ada", cancel_after=1, cancel_reason="suspended")


@pytest.mark.trio
async def test_a_handler_that_never_ends_is_named_and_cancelled() -> None:
    with pytest.raises(TimeoutError, match=r"sleeper did not end within 0\.1 s"):
        await run_job(sleeper, 3600, within=0.1)
