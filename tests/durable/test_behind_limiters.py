"""Tasks that make durable calls while they hold a limiter, a lock or a semaphore: Trio gives these to other tasks in each
attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Job, SyncClient
from pulse_trio.worker.durable import durable, resuming
from support.turns import PlainAwait

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.trees import Trees


@pytest.mark.parametrize(
    "make",
    [lambda: trio.CapacityLimiter(1), trio.Lock, lambda: trio.Semaphore(1)],
    ids=["limiter", "lock", "semaphore"],
)
async def test_a_later_attempt_in_which_another_task_has_it_first_goes_on(
    trees: Trees, make: Callable[[], Any]
) -> None:
    calls: list[str] = []
    orders: list[list[str]] = []

    async def fetch(page: str) -> str:
        calls.append(page)
        return page

    @trees.handlers.job(durable=True, suspend_after=0)
    async def crawl(job: Job) -> list[str]:
        limiter, found = make(), list[str]()

        async def one(page: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            async with limiter:
                task_status.started()
                found.append(await job.step(fetch, page, key=f"page {page}"))

        first, *others = "abcd" if job.attempt == 1 else "dcba"
        async with trio.open_nursery() as nursery:
            await nursery.start(one, first)
            for page in others:
                nursery.start_soon(one, page)
        orders.append(found)
        await job.wait_for_event("go on")
        return sorted(found)

    job_id = trees.enqueue("crawl")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    with trio.fail_after(30):
        await trees.burst()
    assert trees.job(job_id)["error"] is None
    assert (trees.job(job_id)["result"], sorted(calls)) == (list("abcd"), list("abcd"))
    assert [order[0] for order in orders] == ["a", "d"]


async def test_a_race_keeps_its_winner_where_no_task_waits_for_another(trees: Trees) -> None:
    """A line is handed out before its turn only where its turn would never come."""
    orders: list[list[str]] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def race(job: Job) -> list[str]:
        found, done = list[str](), trio.Event()

        async def one(name: str) -> None:
            # The first in the second attempt is the last of the first one.
            for _ in range("abc".index(name) if job.attempt == 1 else "cba".index(name)):
                await trio.lowlevel.checkpoint()
            found.append(await job.step(_same, name, key=name))
            if len(found) == 3:
                done.set()

        async with trio.open_nursery() as nursery:
            for name in "abc":
                nursery.start_soon(one, name)
            await done.wait()
        orders.append(found)
        await job.wait_for_event("go on")
        return found

    job_id = trees.enqueue("race")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    with trio.fail_after(30):
        await trees.burst()
    assert trees.job(job_id)["result"] == orders[0] == orders[1]


async def _same(name: str) -> str:
    return name


@pytest.mark.parametrize("what", ["step", "event"])
async def test_a_later_attempt_goes_on_in_which_a_task_has_it_whose_call_has_no_line(trees: Trees, what: str) -> None:
    """The calls that have lines wait behind it."""
    calls: list[str] = []

    async def fetch(page: str) -> str:
        calls.append(page)
        return page

    @trees.handlers.job(durable=True, suspend_after=0)
    async def crawl(job: Job) -> list[str]:
        limiter, found = trio.CapacityLimiter(1), list[str]()

        async def one(page: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            async with limiter:
                task_status.started()
                if page == "b" and what == "event":
                    await job.wait_for_event("b", key="event b")
                found.append(await job.step(fetch, page, key=f"page {page}"))
                if what == "step" and job.attempt == 1:
                    raise OSError("the network is away")

        first, second = "ab" if job.attempt == 1 else "ba"
        async with trio.open_nursery() as nursery:
            await nursery.start(one, first)
            nursery.start_soon(one, second)
        return sorted(found)

    job_id = trees.enqueue("crawl")
    await trees.burst()
    assert calls == ["a"]
    if what == "event":
        SyncClient(trees.dsn).send_event(job_id, "b")
    else:
        trees.again()
    with trio.fail_after(30):
        await trees.burst()
    assert (trees.job(job_id)["result"], calls) == (["a", "b"], ["a", "b"])


async def test_a_scope_that_struck_in_something_plain_strikes_there_though_its_line_comes_later(trees: Trees) -> None:
    struck: list[bool] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        lock = trio.Lock()

        async def first(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            async with lock:
                task_status.started()
                await job.step(_same, "first", key="first")

        async def second(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            async with lock:
                task_status.started()
                with job.move_on_after(0.3, key="patience") as patience:
                    await job.step(_same, "second", key="second")
                    await trio.sleep_forever()
                struck.append(patience.cancelled_caught)
                await job.step(_same, "third", key="third")

        async with trio.open_nursery() as nursery:
            tasks = (first, second) if job.attempt == 1 else (second, first)
            await nursery.start(tasks[0])
            nursery.start_soon(tasks[1])
        await job.wait_for_event("go on")
        return "done"

    job_id = trees.enqueue("order")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    with trio.fail_after(30):
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "done")
    assert struck == [True, True]


@pytest.mark.parametrize("ends", ["after it was started again", "at last"])
@pytest.mark.parametrize("beside", ["behind the lock", "with a call of its own"])
async def test_a_task_that_has_a_lock_and_polls_for_the_end_of_a_child_goes_on(
    beside: str, ends: str, trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next line is that of a task which waits for the lock, and the child is started when the replay is over."""
    monkeypatch.setattr(resuming, "_LONG", 0.5)
    polled: list[int] = []

    @trees.handlers.job
    async def label() -> str:
        return "labelled"

    @trees.handlers.job(durable=True, max_attempts=9)
    async def order(job: Job) -> list[str]:
        lock, has_it, found = trio.Lock(), trio.Event(), list[str]()

        async def polls() -> None:
            async with lock:
                has_it.set()
                if job.attempt == 1 and ends == "at last":
                    raise ConnectionError("for now")
                async with job.durable_nursery(key="labels") as nursery:
                    child = nursery.start_soon(label.options(child_key="label"))
                    if job.attempt == 1:
                        raise ConnectionError("for now")
                    polled.append(job.attempt)
                    while child.outcome is None:  # noqa: ASYNC110 -- as a user writes it
                        await trio.sleep(0.01)
                    found.append(await job.step(_same, child.result, key="labelled"))

        async def waits() -> None:
            async with lock:
                found.append(await job.step(_same, "first", key="first"))

        async def stands() -> None:
            found.append(await job.step(_same, "second", key="second"))

        async with trio.open_nursery() as nursery:
            if job.attempt == 1:
                await waits()
                if beside == "with a call of its own":
                    await stands()
                nursery.start_soon(polls)
            else:
                nursery.start_soon(polls)
                await has_it.wait()
                nursery.start_soon(waits)
                if beside == "with a call of its own":
                    nursery.start_soon(stands)
        return sorted(found)

    job_id = trees.enqueue("order")
    for _ in range(2):
        with trio.fail_after(20):
            await trees.burst(log=False)
        trees.again()
    others = ["second"] if beside == "with a call of its own" else []
    assert (trees.job(job_id)["state"], trees.job(job_id)["result"]) == ("completed", ["first", "labelled", *others])
    assert polled == [2]


async def test_a_scope_that_its_own_task_cuts_short_waits_for_that_task_again(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for their lines and for a limiter meanwhile. The scope was cut short at once, before the code in it that
    its task had run by then: `UnboundLocalError` of what it had assigned there, or one attempt after the other began anew."""
    found: list[int] = []
    plain = PlainAwait()

    def looked(*given: Any) -> bool:
        begins_anew = resuming.give_way(*given)
        plain.end()
        return begins_anew

    monkeypatch.setattr(durable, "give_way", looked)

    async def answers(job: Job, said: trio.Event) -> None:
        await said.wait()
        if job.attempt == 1:
            await trees.dies(job)

    @trees.handlers.job(durable=True)
    async def pick(job: Job) -> bool:
        limiter, said = trio.CapacityLimiter(1), trio.Event()

        async def ask(name: str) -> None:
            async with limiter:
                await job.step(answers, job, said, key=name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "a")
            nursery.start_soon(ask, "b")
            with job.move_on_after(60, key="patience") as patience:
                if job.attempt > 1:
                    await plain.wait()  # until the others have looked whether all wait
                found.append(job.attempt)
                patience.cancel()
                await trio.sleep_forever()
            await job.step(_same, "picked", key="picked")
            said.set()
        return patience.cancelled_caught

    job_id = trees.enqueue("pick")
    with trio.fail_after(30):
        assert (await trees.ended(job_id, lease=3, heartbeat=0.1))["result"] is True
    assert found == [1, 2]
