"""An attempt is lost at each line of a history in turn, before the line and after it: the job ends the same every time."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from pulse_trio import Job, RetryAfter, Snooze, StepFailed, SyncClient
from support.stores import Window, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from support.trees import Trees

    Lose = Callable[[str], Coroutine[Any, Any, None]]

PLACES = [
    f"{when} {name}" for name in ("a", "b", "fails", "left", "right", "slow", "last") for when in ("before", "after")
]


def declare(trees: Trees, calls: Counter[str], lose: Lose) -> None:
    async def work(name: str) -> str:
        calls[name] += 1
        await lose(f"before {name}")
        return name.upper()

    async def fails() -> None:
        calls["fails"] += 1
        await lose("before fails")
        raise ValueError("no")

    async def slow() -> None:
        calls["slow"] += 1
        await lose("before slow")
        await trio.sleep_forever()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> list[str]:
        got: list[str] = []

        async def step(name: str, key: str | None = None) -> None:
            got.append(await job.step(work, name, key=key))
            await lose(f"after {name}")

        await step("a")
        await step("b")
        try:
            await job.step(fails)
        except StepFailed as error:
            got.append(str(error))
            await lose("after fails")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(step, "left", "l")
            nursery.start_soon(step, "right", "r")
        with job.move_on_after(0.1) as patience:
            await job.step(slow)
        got.append(f"cut {patience.cancelled_caught}")
        await lose("after slow")
        await step("last")
        return sorted(got)


@pytest.mark.parametrize("place", PLACES)
async def test_an_attempt_lost_at_any_line_leaves_a_job_that_ends_the_same(place: str, trees: Trees) -> None:
    calls = Counter[str]()
    lost: list[str] = []

    async def lose(at: str) -> None:
        if at == place and not lost:
            lost.append(at)
            await trees.lose(job_id)
            # As a killed process does no more. Its worker's next beat ends it.
            await trio.sleep_forever()

    declare(trees, calls, lose)
    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst(watchdog=5, lease=3, heartbeat=0.3)
    found = trees.job(job_id)
    assert lost == [place]
    assert (found["state"], found["result"]) == (
        "completed", ["A", "B", "LAST", "LEFT", "RIGHT", "Step fails failed: ValueError: no", "cut True"],
    )  # fmt: skip
    # Only what was lost with its attempt was done twice: a line is a line.
    again = {name for name, times in calls.items() if times > 1}
    when, name = place.split()
    # The other task of a pair, and what the lost attempt went on to when its deadline cut the waiting short.
    beside = {"left": {"right"}, "right": {"left"}, "slow": {"last"}}.get(name, set[str]())
    # A failure and a cancellation are remembered when the next durable call begins.
    kept = when == "after" and name not in ("fails", "slow")
    assert again <= (beside if kept else {name} | beside), calls
    assert max(calls.values()) <= 2


ENDS = {
    "snoozed": Snooze(0.0),
    "retried": RetryAfter(0.0),
    "failed": ValueError("for now"),
    "lost": ConnectionError("for now"),
}


@pytest.mark.parametrize("end", ENDS)
async def test_a_block_that_its_body_ended_opens_again_however_the_attempt_ended(end: str, trees: Trees) -> None:
    @trees.handlers.job
    async def child(number: int) -> int:
        return number

    async with open_store(trees.dsn) as other:

        @trees.handlers.job(durable=True, max_attempts=2)
        async def parent(job: Job) -> list[int]:
            try:
                async with job.durable_nursery() as nursery:
                    children = [nursery.start_soon(child, n) for n in range(2)]
                    await nursery.flush()
                    if job.attempt == 1:
                        raise ENDS[end]
            except BaseExceptionGroup:
                if end == "lost":  # its line is written, and its end is not
                    trees.window.run("UPDATE job SET lease_until = now() - interval '1 s' WHERE id = %s", job.id)
                    assert sum(await other.rescue()) == 1  # noqa: ASYNC120 -- what the test is about
                    trees.again()
                    await trio.sleep_forever()  # noqa: ASYNC120 -- what the test is about
                raise
            return [one.result for one in children]

        job_id = trees.enqueue("parent")
        with trio.fail_after(30):
            while trees.job(job_id)["finished_at"] is None:
                trees.again()
                await trees.burst(watchdog=5, lease=3, heartbeat=0.3)
    found = trees.job(job_id)
    assert (found["state"], found["result"], found["error"]) == ("completed", [0, 1], None)


async def test_a_failure_of_the_body_that_the_handler_has_caught_binds_an_attempt_that_waits_behind_it(
    trees: Trees,
) -> None:
    raised: list[int] = []

    @trees.handlers.job
    async def child() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> str:
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(child)
                await nursery.flush()
                if not raised:
                    raised.append(job.attempt)
                    raise ConnectionError("for now")
        except BaseExceptionGroup:
            return f"refused: {await job.wait_for_event('go', type=str)}"
        return "shipped"

    job_id = trees.enqueue("parent")
    await trees.burst()
    assert trees.job(job_id)["state"] == "suspended"
    SyncClient(trees.dsn).send_event(job_id, "go", "by Ada")
    with trio.fail_after(30):
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst()
    # The body's code does not raise again, and its block does: never the other branch.
    assert trees.job(job_id)["result"] == "refused: by Ada"


async def test_no_task_goes_on_before_the_failure_is_written_because_of_which_it_runs(trees: Trees) -> None:
    ran: list[str] = []

    async def fails() -> None:
        raise ValueError("no")

    async def work(name: str) -> None:
        ran.append(name)

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> list[str]:
        with pytest.raises(StepFailed):
            await job.step(fails)
        with Window(trees.dsn) as holder, holder.connection.transaction():
            # The row is locked, so no line is written.
            holder.run("SELECT FROM job WHERE id = %s FOR UPDATE", job.id)
            nursery = job.nursery
            for name in ("left", "right"):
                nursery.start_soon(partial(job.step, work, name, key=name))
            await trio.testing.wait_all_tasks_blocked()
            before = ran.copy()
        return before

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["result"] == []
    assert sorted(ran) == ["left", "right"]


async def test_crashes_count_since_the_last_new_line_alone(trees: Trees) -> None:
    """A job with a budget of two attempts that crashes in each of five, with progress in between."""
    async with open_store(trees.dsn) as other:

        async def work(n: int) -> int:
            return n

        @trees.handlers.job(durable=True, max_attempts=2)
        async def order(job: Job) -> int:
            for n in range(5):
                await job.step(work, n)
                if job.attempt == n + 1:
                    trees.window.run("UPDATE job SET lease_until = now() - interval '1 s' WHERE state = 2")
                    assert sum(await other.rescue()) == 1
                    raise RetryAfter(0)
            return job.attempt

        job_id = trees.enqueue("order")
        for _ in range(8):
            trees.again()
            await trees.burst(watchdog=5)
    found = trees.job(job_id)
    assert (found["state"], found["result"]) == ("completed", 6)


async def test_crashes_without_a_new_line_use_up_the_budget(trees: Trees) -> None:
    async with open_store(trees.dsn) as other:

        async def work() -> int:
            return 1

        @trees.handlers.job(durable=True, max_attempts=3)
        async def order(job: Job) -> None:
            await job.step(work)
            trees.window.run("UPDATE job SET lease_until = now() - interval '1 s' WHERE state = 2")
            assert sum(await other.rescue()) == 1

        job_id = trees.enqueue("order")
        for _ in range(5):
            trees.again()
            await trees.burst(watchdog=5)
    found = trees.job(job_id)
    assert (found["state"], found["attempt"]) == ("dead", 3)


async def test_once_an_attempt_knows_that_it_is_lost_it_begins_no_other_step_of_its_clean_up(trees: Trees) -> None:
    calls: list[str] = []
    waits = trio.Event()

    async def work(name: str) -> None:
        calls.append(name)

    @trees.handlers.job(durable=True)
    async def saga(job: Job) -> None:
        await job.step(work, "charge")
        try:
            try:
                waits.set()
                await job.wait_for_event("never")
            except BaseException:
                with job.cleanup():
                    if job.attempt == 1:
                        await trees.lose(job.id)  # noqa: ASYNC102 -- job.cleanup() is the shield
                    await job.step(work, "unpack")  # noqa: ASYNC102 -- the same
                raise
        except BaseException as error:
            with job.cleanup():
                calls.append(f"{type(error).__name__}: {error}"[:40])
                await job.step(work, "refund")  # noqa: ASYNC102 -- the same
            raise

    job_id = trees.enqueue("saga")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trees.burst)
            await waits.wait()
            SyncClient(trees.dsn).cancel(job_id)
    assert trees.job(job_id)["state"] == "cancelled"
    assert Counter(calls)["refund"] == Counter(calls)["unpack"] == 1
    assert any(call.startswith(f"RuntimeError: job {job_id} lost its lease") for call in calls)


async def test_a_crash_is_given_back_once_however_often_the_job_begins_afresh(trees: Trees) -> None:
    """It forgets the lines which told that the crash had been given back."""
    charged: list[int] = []
    async with open_store(trees.dsn) as other:

        async def charge(attempt: int) -> None:
            charged.append(attempt)

        @trees.handlers.job(durable=True, max_attempts=3)
        async def order(job: Job) -> None:
            await job.step(charge, job.attempt, key="charge")
            if job.attempt == 1:
                trees.window.run("UPDATE job SET lease_until = now() - interval '1 s' WHERE state = 2")
                assert sum(await other.rescue()) == 1
            raise RetryAfter(0, afresh=True)

        job_id = trees.enqueue("order")
        for _ in range(8):
            trees.again()
            await trees.burst(watchdog=5)
    found = trees.job(job_id)
    assert (found["state"], found["attempt"], charged) == ("dead", 4, [1, 3, 4])
