"""Tasks behind a lock, and something that cuts them short half-way: in a later attempt Trio gives the lock to others first.
That attempt begins anew, so that those which had their results have them again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Job, StepFailed, SyncClient
from pulse_trio.worker.durable import reordering

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.trees import Trees


async def in_order(names: str, one: Callable[[str], Awaitable[None]]) -> None:
    """Calls `one` for each name, in tasks of a plain nursery that have one lock in this order."""
    lock = trio.Lock()

    async def behind_the_lock(name: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        async with lock:
            await one(name)

    async with trio.open_nursery() as nursery:
        for name in names:
            await nursery.start(behind_the_lock, name)


async def ended(trees: Trees, job_id: int) -> dict[str, Any]:
    """The job, which waits for an event or has begun anew, at its end."""
    with trio.fail_after(30):
        while (job := trees.job(job_id))["finished_at"] is None:
            await trees.burst()
    return job


def outcomes(trees: Trees, job_id: int) -> list[str]:
    """Of its attempts, in order; `anew` of those that began anew."""
    rows = trees.window.run("SELECT outcome, error FROM attempts WHERE job_id = %s ORDER BY attempt", job_id)
    return ["anew" if "starts again from the top" in (row["error"] or "") else row["outcome"] for row in rows]


async def test_tasks_go_on_in_the_same_order_again(trees: Trees) -> None:
    """Behind a limiter, after one event, and where they are cancelled together. Trio's own order is another one each time."""
    program = Path(__file__).parents[1] / "support" / "ordered_tasks.py"
    with trio.fail_after(60):
        await trio.run_process([sys.executable, "-W", "error", program, trees.dsn, "8"])
    jobs = trees.window.run("SELECT id, kind, result FROM jobs ORDER BY id")
    assert [outcomes(trees, job["id"]) for job in jobs] == [["suspended", "completed"]] * 24
    assert [job["result"] for job in jobs if job["kind"] == "crawl"] == [["a"]] * 8
    seen = [job["result"] for job in jobs if job["kind"] != "crawl"]
    assert seen == [[[0, 1, 2, 3, 4]] * 2] * 16


async def same(name: str) -> str:
    return name


async def test_a_deadline_that_struck_half_way_leaves_those_their_results_that_had_them(trees: Trees) -> None:
    calls: list[str] = []

    async def fetch(page: str) -> str:
        calls.append(page)
        if page == "b":
            await trio.sleep_forever()
        return page

    @trees.handlers.job(durable=True, suspend_after=0)
    async def crawl(job: Job) -> tuple[list[str], bool]:
        found: list[str] = []

        async def one(page: str) -> None:
            found.append(await job.step(fetch, page, key=page))

        with job.move_on_after(1) as scope:
            await in_order("cba" if job.attempt == 2 else "abc", one)
        await job.step(same, "after")
        await job.wait_for_event("go on")
        return found, scope.cancelled_caught

    job_id = trees.enqueue("crawl")
    with trio.fail_after(30):
        await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    job = await ended(trees, job_id)
    assert job["error"] is None
    assert (job["result"], calls) == ([["a"], True], ["a", "b"])
    assert outcomes(trees, job_id) == ["suspended", "anew", "completed"]


@pytest.mark.parametrize("wrong", ["cabd", "dabc"], ids=["the one that fails", "one that had no turn"])
async def test_a_failure_leaves_those_their_results_that_had_them(trees: Trees, wrong: str) -> None:
    calls: list[str] = []

    async def fetch(page: str) -> str:
        calls.append(page)
        if page == "c":
            raise ValueError("no such page")
        return page

    @trees.handlers.job(durable=True, suspend_after=0)
    async def crawl(job: Job) -> list[str]:
        found: list[str] = []

        async def one(page: str) -> None:
            found.append(await job.step(fetch, page, key=page))

        try:
            await in_order(wrong if job.attempt == 2 else "abcd", one)
        except* StepFailed:
            pass
        await job.step(same, "after")
        await job.wait_for_event("go on")
        return found

    job_id = trees.enqueue("crawl")
    with trio.fail_after(30):
        await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    job = await ended(trees, job_id)
    assert job["error"] is None
    assert (job["result"], calls) == (["a", "b"], ["a", "b", "c"])
    assert outcomes(trees, job_id) == ["suspended", "anew", "completed"]


async def test_a_clean_up_knows_all_that_was_done_before_it(trees: Trees) -> None:
    """The cancellation, which waits for the end of the replay or comes again in it, comes before no result."""
    undone: list[str] = []

    async def undo(name: str) -> None:
        undone.append(name)
        if len(undone) == 1:
            raise OSError("the network is away")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def book(job: Job) -> None:
        booked: list[str] = []

        async def one(name: str) -> None:
            if name == "b":
                await job.wait_for_event("never", key="b")
            booked.append(await job.step(same, name, key=name))

        try:
            await in_order("ba" if job.attempt in (2, 4) else "ab", one)
        except BaseException:
            with job.cleanup():
                for name in booked:
                    await job.step(undo, name)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id, client = trees.enqueue("book"), SyncClient(trees.dsn)
    with trio.fail_after(30):
        await trees.burst()
    client.cancel(job_id)
    assert (await ended(trees, job_id))["state"] == "cancelled"
    assert undone == ["a"]
    client.retry(job_id)
    assert (await ended(trees, job_id))["state"] == "cancelled"
    assert undone == ["a", "a"]
    assert outcomes(trees, job_id)[:2] == ["suspended", "anew"]
    assert outcomes(trees, job_id)[3:4] == ["anew"]


async def test_a_cancellation_waits_for_results_that_wait_behind_a_call_that_went_on_live(trees: Trees) -> None:
    undone: list[str] = []
    stands = trio.Event()

    @trees.handlers.job(durable=True)
    async def book(job: Job) -> None:
        booked: list[str] = []

        async def one(name: str) -> None:
            booked.append(await job.step(same, name, key=name))
            if job.attempt == 1:
                raise OSError("the network is away")

        async def waits(name: str) -> None:
            if name == "b":
                await job.step(hold, job.attempt, key="b")
            await one(name)

        try:
            await in_order("ba" if job.attempt == 2 else "ab", waits)
        except BaseException:
            if job.cancel_reason == "user":
                with job.cleanup():
                    for name in booked:
                        await job.step(_undo, name)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    async def hold(_: int) -> None:
        stands.set()
        await trio.sleep_forever()

    async def _undo(name: str) -> None:
        undone.append(name)

    job_id, client = trees.enqueue("book"), SyncClient(trees.dsn)
    with trio.fail_after(30):
        await trees.burst()
        trees.again()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trees.burst)
            await stands.wait()
            client.cancel(job_id)
    assert (await ended(trees, job_id))["state"] == "cancelled"
    assert undone == ["a"]
    assert outcomes(trees, job_id) == ["failed", "anew", "cancelled"]


async def test_a_step_that_fails_before_the_results_of_others_have_come_is_done_again(trees: Trees) -> None:
    calls: list[str] = []

    async def fetch(page: str) -> str:
        calls.append(page)
        if page == "b":
            raise ValueError("no such page")
        return page

    @trees.handlers.job(durable=True)
    async def crawl(job: Job) -> list[str]:
        found: list[str] = []

        async def one(page: str) -> None:
            found.append(await job.step(fetch, page, key=page))
            if job.attempt == 1:
                raise OSError("the network is away")

        try:
            await in_order("ba" if job.attempt == 2 else "ab", one)
        except* StepFailed:
            pass
        return [*found, await job.step(same, "after")]

    job_id = trees.enqueue("crawl")
    with trio.fail_after(30):
        await trees.burst()
    trees.again()
    job = await ended(trees, job_id)
    assert (job["result"], calls) == (["a", "after"], ["a", "b", "b"])
    assert outcomes(trees, job_id) == ["failed", "anew", "completed"]


async def test_a_deadline_waits_for_the_results_of_an_attempt_before_while_another_has_the_lock(trees: Trees) -> None:
    """It passes while a call goes on live that had no turn then."""
    held: list[str] = []

    async def hold(page: str) -> str:
        if page == "b":
            # Beyond the deadline, in a step that no cancellation reaches.
            with trio.CancelScope(shield=True):
                await trio.sleep_until(passes)
            held.append(page)
        return page

    passes = 0.0

    @trees.handlers.job(durable=True)
    async def crawl(job: Job) -> tuple[list[str], bool]:
        nonlocal passes
        found: list[str] = []

        async def one(page: str) -> None:
            found.append(await job.step(hold, page, key=page))
            if job.attempt == 1:
                raise OSError("the network is away")
            if page == "a":
                await trio.sleep_forever()

        with job.move_on_after(3) as scope:
            if job.attempt == 1:
                passes = trio.current_time() + 3.1
            await in_order("ba" if job.attempt == 2 else "ab", one)
        return [*sorted(found), await job.step(same, "after")], scope.cancelled_caught

    job_id = trees.enqueue("crawl")
    with trio.fail_after(30):
        await trees.burst()
    trees.again()
    job = await ended(trees, job_id)
    assert (job["result"], held) == ([["a", "b", "after"], True], ["b"])


async def test_a_deadline_that_struck_calls_of_other_tasks_strikes_no_sooner_after_another_order(trees: Trees) -> None:
    @trees.handlers.job(durable=True, suspend_after=0)
    async def crawl(job: Job) -> list[str]:
        found: list[str] = []

        async def before(name: str) -> None:
            await job.step(same, name, key=name)

        async def fetch(page: str) -> None:
            await job.step(same if page != "e" else forever, page, key=page)
            found.append(page)

        await in_order("ab" if job.attempt == 1 else "ba", before)
        with job.move_on_after(1):
            await in_order("cde", fetch)
        await job.step(same, "after")
        await job.wait_for_event("go on")
        return found

    async def forever(_: str) -> str:
        await trio.sleep_forever()
        raise AssertionError

    job_id = trees.enqueue("crawl")
    with trio.fail_after(30):
        await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    job = await ended(trees, job_id)
    assert (job["error"], job["result"]) == (None, ["c", "d"])


async def test_an_order_that_never_comes_again_is_an_error_that_says_so(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reordering, "MOST", 2)

    async def fetch(page: str) -> None:
        if page == "b":
            await trio.sleep_forever()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def crawl(job: Job) -> None:
        async def one(page: str) -> None:
            await job.step(fetch, page, key=page)

        with job.move_on_after(1):
            await in_order("ab" if job.attempt == 1 else "ba", one)
        await job.step(same, "after")
        await job.wait_for_event("go on")

    job_id = trees.enqueue("crawl")
    with trio.fail_after(30):
        await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    job = await ended(trees, job_id)
    assert job["state"] == "dead"
    assert "A limiter, a lock or a semaphore was given to other tasks than before" in job["error"]
    assert outcomes(trees, job_id) == ["suspended", "anew", "anew", "discarded"]


async def test_a_step_that_fails_is_not_called_a_hundred_times_for_an_order_that_never_comes(trees: Trees) -> None:
    """The task that has no line is always first at the lock, and its step fails, before the line of the other one."""
    calls: list[str] = []

    async def fetch(page: str) -> str:
        calls.append(page)
        if page == "a":
            raise ValueError("no such page")
        return page

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=2)
    async def crawl(job: Job) -> list[str]:
        found: list[str] = []

        async def one(page: str) -> None:
            if page == "a" and job.attempt == 1:
                return
            try:
                found.append(await job.step(fetch, page, key=page))
            except StepFailed:
                found.append(f"no {page}")

        await in_order("ab", one)
        if job.attempt == 1:
            raise OSError("down")
        return found

    job_id = trees.enqueue("crawl")
    await trees.burst(log=False)
    trees.again()
    job = await ended(trees, job_id)
    assert (job["result"], calls.count("b")) == (["no a", "b"], 1)
    assert outcomes(trees, job_id) == ["failed", *["anew"] * reordering.MOST_CALLS, "completed"]
    assert calls.count("a") == reordering.MOST_CALLS + 1
