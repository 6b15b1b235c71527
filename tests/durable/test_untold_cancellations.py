"""A job that is being cancelled, whose handler fails by itself before a `Cancelled` reaches it, or before its clean-up has made
a durable call: it has done no clean-up, and a retry does that, and never goes on."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Job, RetryAfter, Snooze, SyncClient
from pulse_trio.jobs import CancelRequest
from pulse_trio.store import family
from pulse_trio.worker.durable import once_more, resuming
from support.trees import running_of

if TYPE_CHECKING:
    from support.trees import Trees

CANCELLED = 9


class Bank:
    """What the steps of a handler have done."""

    def __init__(self, trees: Trees) -> None:
        self.trees = trees
        self.client = SyncClient(trees.dsn)
        self.done: list[str] = []

    async def act(self, what: str) -> str:
        self.done.append(what)
        return what

    async def burst(self) -> None:
        self.trees.again()
        with trio.fail_after(30):
            await self.trees.burst()

    async def end(self, job_id: int) -> None:
        """The job is run until it has ended."""
        await self.burst()
        while self.trees.job(job_id)["finished_at"] is None:
            await self.burst()

    async def retried(self, job_id: int) -> tuple[object, object]:
        """State and result after a retry of a job that owes its clean-up."""
        assert self.trees.window.do(family.unfinished_clean_ups([job_id])) == [job_id]
        self.client.retry(job_id)
        await self.end(job_id)
        found = self.trees.job(job_id)
        return found["state"], found["result"]

    async def does_the_rest(self, job_id: int) -> None:
        """The job was cancelled, as its history says, and ends so again after a retry, which does its clean-up."""
        assert (self.trees.job(job_id)["state"], self.cancellations(job_id)) == ("cancelled", 1)
        assert await self.retried(job_id) == ("cancelled", None)

    def cancellations(self, job_id: int) -> int:
        """How many lines tell of one."""
        return [kind for kind, _, _ in self.trees.lines(job_id)].count(CANCELLED)


@pytest.mark.parametrize("error", [ValueError("the printer is busy"), Discard("no"), Snooze(60), RetryAfter(60)])
@pytest.mark.parametrize("when", ["between two attempts", "while it replays"])
@pytest.mark.parametrize("too_often", [False, True])
async def test_a_job_whose_plain_code_fails_runs_until_it_does_not_and_cleans_up(
    when: str, error: Exception, too_often: bool, trees: Trees
) -> None:
    """If it fails too often, the clean-up is owed, and a retry does it."""
    bank = Bank(trees)
    most = once_more.MOST_DISCARDED if isinstance(error, Discard) else once_more.MOST
    failures = (2 if when == "while it replays" else 1) + most + too_often

    @trees.handlers.job(durable=True, max_attempts=10)
    async def order(job: Job) -> str:
        await bank.act(f"attempt {job.attempt}")
        await job.step(bank.act, "charge")
        try:
            if when == "while it replays" and job.attempt == 2:
                bank.client.cancel(job.id)
                running = running_of(job)
                running.ask(CancelRequest("user", None))
            await job.step(bank.act, "pack")
            if job.attempt == 1:
                raise ValueError("for now")
            if job.attempt <= failures:
                raise error
            await job.step(bank.act, "ship")
        except trio.Cancelled:
            with job.cleanup():
                await job.step(bank.act, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise
        return "shipped"

    job_id = trees.enqueue("order")
    await bank.burst()
    if when == "between two attempts":
        bank.client.cancel(job_id)
    await bank.end(job_id)
    assert (trees.job(job_id)["state"], bank.cancellations(job_id)) == ("cancelled", 1)
    if too_often:
        assert "refund" not in bank.done
        assert await bank.retried(job_id) == ("cancelled", None)
    assert bank.done == ["attempt 1", "charge", "pack", *(f"attempt {n}" for n in range(2, failures + 2)), "refund"]
    assert bank.cancellations(job_id) == 1
    assert trees.window.do(family.compensated([job_id])) == [job_id]


@pytest.mark.parametrize("error", [ValueError("the printer is busy"), Snooze(60), RetryAfter(60)])
@pytest.mark.parametrize("where", ["plain code", "a step"])
async def test_a_job_that_is_cancelled_as_its_handler_fails_runs_once_more_and_cleans_up(
    where: str, error: Exception, trees: Trees
) -> None:
    """In its first attempt, which replays nothing."""
    bank = Bank(trees)

    async def fails(job: Job) -> None:
        bank.client.cancel(job.id)
        running = running_of(job)
        running.ask(CancelRequest("user", None))
        raise error

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        await job.step(bank.act, "charge")
        try:
            if job.attempt == 1:
                await (job.step(fails, job) if where == "a step" else fails(job))
            await trio.sleep_forever()
        finally:
            if job.cancel_reason == "user" and job.attempt > 1:
                with job.cleanup():
                    await job.step(bank.act, "refund")  # noqa: ASYNC102 -- the same
        return "shipped"

    job_id = trees.enqueue("order")
    await bank.end(job_id)
    assert (trees.job(job_id)["state"], trees.job(job_id)["attempt"], bank.done) == (
        "cancelled",
        2,
        ["charge", "refund"],
    )
    released = trees.window.value("SELECT error FROM attempt WHERE job_id = %s AND outcome = 'released'", job_id)
    assert "the job was cancelled meanwhile, and runs once more to clean up" in released
    assert trees.window.do(family.compensated([job_id])) == [job_id]


async def test_code_that_fails_before_it_has_used_its_history_comes_to_the_whole_of_it_in_the_next_run(
    trees: Trees,
) -> None:
    bank = Bank(trees)

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        try:
            await job.step(bank.act, "charge")
            if job.attempt == 2:
                raise ConnectionError("before it comes to what it did")
            with job.move_on_after(3600):
                await job.step(bank.act, "pack")
                if job.attempt == 1:
                    raise ValueError("for now")
                await job.step(bank.act, "ship")
        except trio.Cancelled:
            with job.cleanup(), job.move_on_after(3600):
                await job.step(bank.act, "refund")  # noqa: ASYNC102 -- the same
            raise
        return "shipped"

    job_id = trees.enqueue("order")
    await bank.burst()
    bank.client.cancel(job_id)
    await bank.end(job_id)
    assert (trees.job(job_id)["state"], bank.cancellations(job_id)) == ("cancelled", 1)
    assert bank.done == ["charge", "pack", "refund"]
    assert trees.window.do(family.compensated([job_id])) == [job_id]


async def test_a_clean_up_that_fails_before_its_first_durable_call_is_done_by_a_retry(trees: Trees) -> None:
    bank = Bank(trees)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        await job.step(bank.act, "charge")
        try:
            await job.wait_for_event("approved")
        except BaseException:
            if job.cancel_reason == "user" and job.attempt == 2:
                raise ConnectionError("the bank's address is not known for a moment")  # noqa: ASYNC104, B904 -- it fails
            with job.cleanup():
                await job.step(bank.act, "refund")  # noqa: ASYNC102 -- the same
            raise
        return "shipped"

    job_id = trees.enqueue("order")
    await bank.burst()
    bank.client.cancel(job_id)
    await bank.burst()
    await bank.does_the_rest(job_id)
    assert bank.done == ["charge", "refund"]


async def test_a_clean_up_in_a_plain_await_that_fails_before_its_first_durable_call_is_done_by_a_retry(
    trees: Trees,
) -> None:
    bank = Bank(trees)
    stands = trio.Event()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        await job.step(bank.act, "charge")
        await trio.sleep(0.01)
        try:
            if job.attempt == 1:
                stands.set()
            await trio.sleep_forever()
        except BaseException:
            if job.attempt == 1:
                raise ConnectionError("the bank's address is not known for a moment")  # noqa: ASYNC104, B904 -- it fails
            with job.cleanup():
                await job.step(bank.act, "refund")  # noqa: ASYNC102 -- the same
            raise
        return "shipped"

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        async with trio.open_nursery() as running:
            running.start_soon(trees.burst)
            await stands.wait()
            await trio.to_thread.run_sync(bank.client.cancel, job_id)
    await bank.does_the_rest(job_id)
    assert bank.done == ["charge", "refund"]


@pytest.mark.parametrize("changed", ["another call", "no call", "another call first"])
async def test_a_job_that_is_cancelled_on_changed_code_compensates_in_a_retry_on_the_old_one(
    changed: str, trees: Trees
) -> None:
    bank = Bank(trees)

    async def other() -> None:
        bank.done.append("other")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        await trio.lowlevel.checkpoint()
        if job.attempt == 2 and changed == "another call":
            await job.step(other)
        if job.attempt == 2 and changed == "no call":
            return "changed"
        if job.attempt == 2 and changed == "another call first":
            await job.wait_for_event("new", timeout=3600)
        await job.step(bank.act, "charge")
        await trio.sleep(0.01)  # a plain await before the clean-up's block: no cancellation comes there
        try:
            await job.wait_for_event("approved", timeout=3600)
        except BaseException:
            with job.cleanup():
                await job.step(bank.act, "refund")  # noqa: ASYNC102 -- the same
            raise
        return "shipped"

    job_id = trees.enqueue("order")
    await bank.burst()
    assert trees.job(job_id)["state"] == "suspended"
    bank.client.cancel(job_id)
    await bank.burst()
    assert trees.job(job_id)["state"] == "cancelled"
    found = trees.window.run("SELECT error FROM attempts WHERE job_id = %s AND attempt = 2", job_id)
    assert found[0]["error"].startswith("ReplayMismatch")
    assert bank.cancellations(job_id) == 1
    assert await bank.retried(job_id) == ("cancelled", None)
    assert bank.done == ["charge", "refund"]


async def test_a_job_that_remembers_nothing_begins_anew(trees: Trees) -> None:
    bank = Bank(trees)

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        if job.attempt == 1:
            bank.client.cancel(job.id)
            running = running_of(job)
            running.ask(CancelRequest("user", None))
            raise ValueError("before its first call")
        return await job.step(bank.act, "charge")

    job_id = trees.enqueue("order")
    await bank.burst()
    assert (trees.job(job_id)["state"], bank.cancellations(job_id)) == ("cancelled", 0)
    bank.client.retry(job_id)
    await bank.burst()
    assert trees.job(job_id)["result"] == "charge"


async def test_a_child_whose_clean_up_fails_before_its_first_durable_call_goes_on_when_its_block_starts_it_again(
    trees: Trees,
) -> None:
    bank = Bank(trees)
    stands = trio.Event()

    @trees.handlers.job(durable=True, max_attempts=1)
    async def child(job: Job) -> str:
        await job.step(bank.act, "charge")
        try:
            stands.set()
            await trio.sleep(math.inf if job.attempt == 1 else 0)
        except trio.Cancelled:
            raise ConnectionError("a connection that does not close") from None  # noqa: ASYNC104 -- it fails
        return "shipped"

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> str:
        async with job.durable_nursery() as nursery:
            shipped = nursery.start_soon(child)
        return shipped.result

    root = trees.enqueue("parent")
    with trio.fail_after(30):
        async with trio.open_nursery() as running:
            running.start_soon(trees.burst)
            await stands.wait()
            await trio.to_thread.run_sync(bank.client.cancel, root)
    assert trees.job(root)["state"] == "cancelled"
    bank.client.retry(root)
    await bank.burst()
    assert trees.job(root)["result"] == "shipped"
    assert bank.done == ["charge"]


async def test_a_child_whose_clean_up_fails_before_its_first_durable_call_owes_it_to_a_retry_of_its_own(
    trees: Trees,
) -> None:
    bank, down = Bank(trees), [True]
    stands, reasons = trio.Event(), list[str | None]()

    @trees.handlers.job(durable=True, max_attempts=1)
    async def child(job: Job) -> None:
        await job.step(bank.act, "charge")
        try:
            stands.set()
            await trio.sleep_forever()
        except trio.Cancelled:
            with job.cleanup():
                reasons.append(job.cancel_reason)
                if down.pop():
                    raise ConnectionError("the bank's client cannot be opened") from None  # noqa: ASYNC104 -- what it raises is its word on the job
                await job.step(bank.act, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(child)

    root = trees.enqueue("parent")
    down[:] = [False, True]
    with trio.fail_after(30):
        async with trio.open_nursery() as running:
            running.start_soon(trees.burst)
            await stands.wait()
            await trio.to_thread.run_sync(bank.client.cancel, root)
    (member,) = [job.id for job in bank.client.tree(root) if job.id != root]
    assert trees.window.do(family.owing_members([root])) == [member]
    assert await bank.retried(member) == ("cancelled", None)
    assert (bank.done, reasons) == (["charge", "refund"], ["parent", "parent"])
    assert trees.window.do(family.compensated([member])) == [member]
    assert trees.window.do(family.owing_members([root])) == []


@pytest.mark.parametrize("refunds", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
async def test_an_order_that_is_cancelled_while_it_undoes_its_own_failure_owes_nothing_once_that_is_done(
    refunds: int, fails: bool, trees: Trees
) -> None:
    bank, down = Bank(trees), [fails]

    async def refund(number: int, job: Job) -> None:
        if number == 1:
            if job.cancel_reason is None:
                bank.client.cancel(job.id)
            running = running_of(job)
            running.ask(CancelRequest("user", None))
        if number == refunds and down[0]:
            down[0] = False
            raise ConnectionError("the bank is down for a moment")
        await bank.act(f"refund {number}")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(bank.act, "charge")
        try:
            raise Discard("nobody approved it")
        except BaseException:
            with job.cleanup():
                for number in range(1, refunds + 1):
                    await job.step(functools.partial(refund, number, job))  # noqa: ASYNC102 -- the same
            raise

    job_id = trees.enqueue("order")
    await bank.end(job_id)
    assert trees.job(job_id)["state"] == "cancelled"
    # A handler that has made a call since knows of the cancellation: it has no second try.
    owed = trees.window.do(family.unfinished_clean_ups([job_id]))
    assert owed == ([job_id] if fails and refunds == 2 else [])
    if owed:
        assert await bank.retried(job_id) == ("cancelled", None)
    assert bank.done == ["charge", *[f"refund {number}" for number in range(1, refunds + 1)]]


@pytest.mark.parametrize("comes", ["before the history is read", "in the replay"])
async def test_a_deadline_that_comes_early_is_followed_by_the_clean_up(
    trees: Trees, comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table is locked, or no connection is free; or the handler has not come to its `try`. The job was cancelled, and owed
    nothing."""
    book: list[str] = []
    reads: list[int] = []
    read = resuming.history_of

    async def act(what: str) -> None:
        book.append(what)

    async def history_of(running: Any, parts: Any, **how: Any) -> Any:
        reads.append(running.claim.attempt)
        if len(reads) == 1 and comes == "before the history is read":
            await trio.sleep_forever()
        return await read(running, parts, **how)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        if job.attempt == 2 and comes == "in the replay":
            await trio.sleep_forever()
        await job.step(act, "charge")
        try:
            await job.wait_for_event("paid")
        except BaseException:
            with job.cleanup():
                await job.step(act, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    # On a loaded machine a second may be over before the next attempt begins, which then is not the one that is tried here.
    job_id = trees.enqueue("order", deadline=3)
    await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "suspended"
    monkeypatch.setattr(resuming, "history_of", history_of)
    trees.again()
    found = await trees.ended(job_id)
    assert (found["state"], found["cancel_reason"], book) == ("cancelled", "deadline", ["charge", "refund"])
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == []
