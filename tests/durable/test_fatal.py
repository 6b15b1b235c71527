"""What no later attempt would come past: the attempt ends with it, whatever its handler catches."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Fixed, Job, RetryAfter, Snooze, StepFailed, SyncClient, UsageError
from pulse_trio.worker.durable import room

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.trees import Trees


class Unknown:
    """What JSON cannot carry."""


async def book() -> str:
    return "booked"


def _unfit(calls: list[str]) -> Any:
    calls.append("scored")
    return float("nan") if len(calls) == 1 else 0.5


async def test_a_result_that_json_cannot_carry_makes_the_job_dead_though_its_handler_catches_it(trees: Trees) -> None:
    calls: list[str] = []

    async def score() -> float:
        return _unfit(calls)

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        try:
            value: float | None = await job.step(score)
        except Exception:
            value = None
        return f"{await job.step(book)} {value}"

    job_id = trees.enqueue("order")
    await trees.burst()
    found = trees.job(job_id)
    assert (found["state"], found["attempt"], trees.lines(job_id)) == ("dead", 1, [])
    assert found["error"].startswith("UnfitValue: The result of 'step score' holds a NaN")
    SyncClient(trees.dsn).retry(job_id)
    await trees.burst()
    assert (trees.job(job_id)["result"], calls) == ("booked 0.5", ["scored", "scored"])


async def test_in_a_block_too_and_its_children_are_cancelled(trees: Trees) -> None:
    calls: list[str] = []

    async def score() -> float:
        return _unfit(calls)

    @trees.handlers.job
    async def child() -> None:
        await trio.sleep_forever()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(child)
            await nursery.flush()
            await job.step(score)

    job_id = trees.enqueue("order")
    await trees.burst()
    assert (trees.job(job_id)["state"], trees.job(job_id)["attempt"]) == ("dead", 1)
    assert trees.window.value("SELECT state FROM jobs WHERE kind = 'child'") == "cancelled"


async def test_a_result_beyond_the_limit_of_a_history_too(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_SIZE", 100)

    async def large() -> str:
        return "x" * 200

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        try:
            await job.step(large)
        except Exception as error:
            assert "The history of job" in str(error)  # noqa: PT017 -- it is swallowed
        return await job.step(book)

    job_id = trees.enqueue("order")
    await trees.burst()
    assert (trees.job(job_id)["state"], trees.lines(job_id)) == ("dead", [])
    assert trees.job(job_id)["error"].startswith("BeyondLimit: ")


async def test_more_children_than_a_job_may_have_end_it_at_once(trees: Trees) -> None:
    """Its nursery raises that in a group, and it was tried again, twenty times."""

    @trees.handlers.job
    async def pack() -> None: ...

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(pack)
            await nursery.flush()
            trees.window.run("UPDATE durable_job SET children = 100000")
            nursery.start_soon(pack)
            await nursery.flush()

    job_id = trees.enqueue("order")
    await trees.burst()
    found = trees.job(job_id)
    assert (found["state"], found["attempt"]) == ("dead", 1)
    assert "BeyondLimit: A job has at most 100,000 children" in found["error"]


@pytest.mark.parametrize("scope", ["move_on_after", "fail_after"])
async def test_a_scope_in_a_step_is_refused_because_later_attempts_do_not_call_the_step(
    trees: Trees, scope: str
) -> None:
    said: list[str] = []

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        async def fetch() -> None:
            with pytest.raises(UsageError) as caught, getattr(job, scope)(100):
                await trio.lowlevel.checkpoint()
            said.append(str(caught.value))

        async def fetch_in_a_task() -> None:
            async with trio.open_nursery() as tasks:
                tasks.start_soon(fetch)

        await job.step(fetch)
        await job.step(fetch_in_a_task)

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["state"] == "completed"
    refused = f"job.{scope} inside of a step or another durable call: make it in the handler itself."
    assert said == [refused, refused]


async def test_a_durable_call_in_a_task_of_a_step_is_refused_too(trees: Trees) -> None:
    said: list[str] = []

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        async def call() -> None:
            with pytest.raises(UsageError) as caught:
                await job.step(book, key="in a task")
            said.append(str(caught.value))

        async def fetch() -> None:
            async with trio.open_nursery() as tasks:
                tasks.start_soon(call)

        await job.step(fetch)

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["state"] == "completed"
    assert said == ["job.step inside of a step or another durable call: make it in the handler itself."]


async def test_an_annotation_that_json_cannot_carry_is_refused_in_each_attempt(trees: Trees) -> None:
    async def score() -> Any: ...

    score.__annotations__["return"] = Unknown

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        try:
            await job.step(score)
        except Exception as error:
            said = str(error)
        number = await job.step(book)
        await job.wait_for_event("go on")
        return f"{number} {'Unknown' in said}"

    job_id = trees.enqueue("order")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    await trees.burst()
    assert (trees.job(job_id)["state"], trees.job(job_id)["result"]) == ("completed", "booked True")


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (lambda: Discard("no such account"), "Discard: no such account"),
        (lambda: Snooze(0), "Snooze: 0"),
        (lambda: RetryAfter(0), "RetryAfter: 0"),
        (lambda: ExceptionGroup("of one", [Discard("no such account")]), None),
    ],
)
async def test_what_a_step_says_of_its_job_comes_again_where_the_handler_has_caught_it(
    trees: Trees, raised: Callable[[], Exception], said: str | None
) -> None:
    calls: list[str] = []
    caught: list[str] = []

    async def charge() -> None:
        calls.append("charge")
        raise raised()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        try:
            await job.step(charge)
        except (Discard, Snooze, RetryAfter, ExceptionGroup) as error:
            text = str(error) if isinstance(error, (Discard, ExceptionGroup)) else f"{error.seconds:g}"
            caught.append(f"{type(error).__name__}: {text}")
        number = await job.step(book)
        await job.wait_for_event("go on")
        return number

    job_id = trees.enqueue("order")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    await trees.burst()
    assert (trees.job(job_id)["result"], calls) == ("booked", ["charge"])
    assert len(caught) == 2
    assert (
        caught == [said, said]
        if said is not None
        else caught[1] == "Discard: ExceptionGroup: of one (1 sub-exception): Discard: no such account"
    )


@pytest.mark.parametrize("how", ["as it is", "in a nursery"])
async def test_a_snooze_of_a_step_does_not_last_for_ever_after_a_compensation(trees: Trees, how: str) -> None:
    """No attempt called the step again, and none used the budget."""
    calls: list[str] = []

    async def ask() -> None:
        calls.append("ask")
        raise Snooze(0)

    async def free() -> None:
        calls.append("free")

    @trees.handlers.job(durable=True, max_attempts=3, retry=Fixed(0))
    async def order(job: Job) -> None:
        try:
            if how == "as it is":
                await job.step(ask)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(job.step, ask, key="ask"))
        except BaseException:
            with job.cleanup():
                await job.step(free)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        await trees.burst()
    found = trees.job(job_id)
    assert (found["state"], found["attempt"], calls) == ("dead", 3, ["ask", "free"])
    assert found["error"].startswith("StepFailed: A step has raised Snooze, and the handler has made durable calls")


async def test_a_snooze_of_a_step_that_follows_the_failure_of_another_waits_as_often_as_it_must(trees: Trees) -> None:
    calls: list[str] = []

    async def charge() -> None:
        raise OSError("away")

    async def ask() -> None:
        calls.append("ask")
        if len(calls) < 5:
            raise Snooze(0)

    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> None:
        try:
            await job.step(charge)
        except StepFailed:
            await job.step(ask)

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        await trees.burst()
    assert (trees.job(job_id)["state"], len(calls)) == ("completed", 5)


async def test_a_discard_of_a_step_is_the_jobs_after_a_compensation_that_a_kill_interrupts(trees: Trees) -> None:
    calls: list[str] = []
    held = trio.Event()

    async def charge() -> None:
        calls.append("charge")
        raise Discard("no such account")

    async def free() -> None:
        calls.append("free")

    async def tell() -> None:
        calls.append("tell")
        if calls.count("tell") == 1:
            held.set()
            await trio.sleep_forever()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        try:
            await job.step(charge)
        except Discard:
            await job.step(free)  # noqa: ASYNC120 -- `Discard` is raised again
            await job.step(tell)  # noqa: ASYNC120 -- the same
            raise

    job_id = trees.enqueue("order")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trees.burst)
        await held.wait()
        await trees.lose(job_id)
        nursery.cancel_scope.cancel()
    await trees.burst()
    found = trees.job(job_id)
    assert (found["state"], found["error"].splitlines()[0]) == ("dead", "Discard: no such account")
    assert calls == ["charge", "free", "tell", "tell"]


async def test_a_mismatch_in_a_task_of_the_jobs_nursery_is_the_jobs_death_too(trees: Trees) -> None:
    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        async def task() -> None:
            await job.step(book, key="a" if job.attempt == 1 else "b")
            await job.wait_for_event("never", key="never")

        job.nursery.start_soon(task)

    job_id = trees.enqueue("order")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "never")
    await trees.burst()
    assert (trees.job(job_id)["state"], trees.job(job_id)["attempt"]) == ("dead", 2)
    assert "ReplayMismatch" in trees.job(job_id)["error"]
