"""A durable handler that has undone what it did says so with `RetryAfter(0, afresh=True)`: its next attempt begins from the
beginning."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from pulse_trio import Discard, Handlers, InvalidTransition, Job, RetryAfter, Snooze, StepFailed, SyncClient
from pulse_trio.store import history
from pulse_trio.testing import crash_points, run_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.trees import Trees


class Bank:
    """Its steps write down that they were called. `fails` has the names of those that fail once."""

    def __init__(self, *fails: str) -> None:
        self.book: list[str] = []
        self._fails = list(fails)

    def does(self, what: str) -> None:
        if what in self._fails:
            self._fails.remove(what)
            raise OSError(f"{what} is away")
        self.book.append(what)

    async def charge(self) -> None:
        self.does("charge")

    async def refund(self) -> None:
        self.does("refund")

    async def ship(self) -> None:
        self.does("ship")

    async def plain(self, what: str) -> None:
        await trio.lowlevel.checkpoint()
        if what in self._fails:
            self.does(what)


async def nothing_fails(_: Job) -> None:
    """But for a step."""


def order(trees: Trees, bank: Bank, fails: Callable[[Job], Any], **declared: Any) -> Any:
    @trees.handlers.job(durable=True, **declared)
    async def order(job: Job) -> str:
        await job.step(bank.charge)
        try:
            await fails(job)
            await job.step(bank.ship)
        except BaseException:
            with job.cleanup():
                await job.step(bank.refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise RetryAfter(0, afresh=True) from None  # noqa: ASYNC104 -- what it raises is its word on the job
        return "shipped"

    return order


async def test_a_failure_of_plain_code_is_undone_and_the_job_begins_again(trees: Trees) -> None:
    bank = Bank("address")
    job_id = trees.enqueue(order(trees, bank, lambda _: bank.plain("address")).kind)
    assert (await trees.ended(job_id))["state"] == "completed"
    assert bank.book == ["charge", "refund", "charge", "ship"]
    assert trees.job(job_id)["attempt"] == 2


async def test_a_failed_step_is_tried_again_after_the_compensation(trees: Trees) -> None:
    bank = Bank("ship")
    job_id = trees.enqueue(order(trees, bank, nothing_fails).kind)
    assert (await trees.ended(job_id))["state"] == "completed"
    assert bank.book == ["charge", "refund", "charge", "ship"]


async def test_a_compensation_that_fails_keeps_the_history(trees: Trees) -> None:
    bank = Bank("ship", "refund")
    job_id = trees.enqueue(order(trees, bank, nothing_fails).kind)
    assert (await trees.ended(job_id))["state"] == "completed"
    assert bank.book == ["charge", "refund", "charge", "ship"]
    assert trees.job(job_id)["attempt"] == 3


@pytest.mark.parametrize("fails", ["undo car", "plain"])
async def test_an_inner_compensation_that_fails_is_not_forgotten(trees: Trees, fails: str) -> None:
    bank = Bank("ship", fails)

    async def act(what: str) -> None:
        bank.does(what)

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        try:
            await job.step(act, "flight", key="flight")
            try:
                await job.step(act, "car", key="car")
                await job.step(bank.ship)
            except BaseException:
                with job.cleanup():
                    await bank.plain("plain")  # noqa: ASYNC102 -- job.cleanup() is the shield
                    await job.step(act, "undo car", key="undo car")  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise
        except BaseException as error:
            with job.cleanup():
                await job.step(act, "undo flight", key="undo flight")  # noqa: ASYNC102 -- as above
            raise RetryAfter(0, afresh=True) from error  # noqa: ASYNC104 -- what it raises is its word on the job

    found = await trees.ended(trees.enqueue(order.kind))
    assert (found["state"], bank.book) == ("dead", ["flight", "car", "undo flight"])
    assert f"OSError: {fails} is away" in found["error"]
    assert "Undo the rest by hand" in found["error"]


async def test_children_are_started_again_and_events_received_again(trees: Trees) -> None:
    bank, packed, received = Bank("address"), list[int](), list[Any]()

    @trees.handlers.job
    async def pack(number: int) -> int:
        packed.append(number)
        return number

    async def fails(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(pack, 1)
        received.append(await job.wait_for_event("approved"))
        await bank.plain("address")

    job_id = trees.enqueue(order(trees, bank, fails).kind)
    SyncClient(trees.dsn).send_event(job_id, "approved", "yes")
    assert (await trees.ended(job_id))["state"] == "completed"
    assert bank.book == ["charge", "refund", "charge", "ship"]
    assert (packed, received) == ([1, 1], ["yes", "yes"])


async def test_a_job_whose_budget_is_used_up_keeps_its_history_and_a_retry_begins_it_again(trees: Trees) -> None:
    bank = Bank("address")
    job_id = trees.enqueue(order(trees, bank, lambda _: bank.plain("address"), max_attempts=1).kind)
    assert (await trees.ended(job_id))["state"] == "dead"
    (row,) = trees.window.run("SELECT compensated(ARRAY[%s]::bigint[]) AS id", job_id)
    assert row["id"] == job_id
    steps = trees.window.run("SELECT name FROM history WHERE job_id = %s AND kind = 1 ORDER BY line", job_id)
    assert [row["name"].rpartition(".")[2] for row in steps] == ["charge", "refund"]
    SyncClient(trees.dsn).retry(job_id)
    assert (await trees.ended(job_id))["state"] == "completed"
    assert bank.book == ["charge", "refund", "charge", "ship"]


async def test_after_a_timeout(trees: Trees) -> None:
    bank, slow = Bank(), [True]

    async def fails(_: Job) -> None:
        if slow.pop():
            await trio.sleep_forever()

    slow[:] = [False, True]
    job_id = trees.enqueue(order(trees, bank, fails, timeout=0.3).kind)
    assert (await trees.ended(job_id))["state"] == "completed"
    assert bank.book == ["charge", "refund", "charge", "ship"]


async def test_a_cancelled_job_does_not_begin_again(trees: Trees) -> None:
    bank, there = Bank(), trio.Event()

    async def fails(_: Job) -> None:
        there.set()
        await trio.sleep_forever()

    job_id = trees.enqueue(order(trees, bank, fails).kind)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trees.burst)
        await there.wait()
        await trio.to_thread.run_sync(SyncClient(trees.dsn).cancel, job_id)
    assert trees.job(job_id)["state"] == "cancelled"
    assert bank.book == ["charge", "refund"]


async def test_an_attempt_that_has_not_come_to_all_that_was_done_forgets_nothing(trees: Trees) -> None:
    bank, fails = Bank(), [False, True, False]

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(bank.charge)
        if fails.pop(0):
            raise RetryAfter(0, afresh=True)  # the charge of this attempt is undone, it thinks
        await job.step(bank.ship)
        if job.attempt == 1:
            raise OSError("away")

    job_id = trees.enqueue(order.kind)
    assert (await trees.ended(job_id))["state"] == "completed"
    assert bank.book == ["charge", "ship"]
    errors = trees.window.run("SELECT error FROM attempts WHERE job_id = %s ORDER BY attempt", job_id)
    assert ["The history is kept: this attempt failed before" in (row["error"] or "") for row in errors] == [
        False, True, False,
    ]  # fmt: skip


async def test_a_task_that_fails_in_its_clean_up_keeps_the_history(trees: Trees) -> None:
    bank, runs = Bank("address"), list[int]()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        async def beside() -> None:
            try:
                await trio.sleep_forever()
            finally:
                if len(runs) == 1:
                    raise OSError("not undone")

        await job.step(bank.charge)
        runs.append(1)
        if len(runs) == 1:
            job.nursery.start_soon(beside)
            await trio.testing.wait_all_tasks_blocked()
            raise RetryAfter(0, afresh=True)

    job_id = trees.enqueue(order.kind)
    assert (await trees.ended(job_id))["state"] == "completed"
    assert bank.book == ["charge"]


async def test_lines_of_a_task_beside_it_that_come_after_the_compensation_are_waited_for(trees: Trees) -> None:
    """The attempt before was lost when these were written. Each later one ended before them and forgot nothing, until its
    budget was used up."""
    calls, lost = list[str](), list[bool]()
    undone, written = trio.Event(), trio.Event()

    async def act(what: str) -> None:
        calls.append(what)
        if what == "ship" and not lost:
            raise OSError("sold out")

    async def beside(job: Job) -> None:
        await job.step(act, "beside", key="beside")
        if not lost:
            await undone.wait()
        await trio.sleep(0.01)
        await job.step(act, "behind", key="behind")
        written.set()

    @trees.handlers.job(durable=True, max_attempts=4)
    async def order(job: Job) -> None:
        await job.step(act, "charge", key="charge")
        job.nursery.start_soon(beside, job)
        try:
            await job.step(act, "ship", key="ship")
        except StepFailed:
            with job.cleanup():
                await job.step(act, "refund", key="refund")  # noqa: ASYNC120 -- job.cleanup() is the shield
            if not lost:
                undone.set()
                await written.wait()  # noqa: ASYNC120 -- this attempt is lost, and its exception with it
                lost.append(True)
                await trees.lose(job.id)  # noqa: ASYNC120 -- this attempt is lost, and its exception with it
                await trio.sleep_forever()  # noqa: ASYNC120 -- this attempt is lost, and its exception with it
            raise RetryAfter(0, afresh=True) from None

    job_id = trees.enqueue("order")
    await trees.burst(watchdog=5, lease=3, heartbeat=0.3)
    assert (await trees.ended(job_id))["state"] == "completed"
    assert calls.count("refund") == 1
    assert (calls.count("charge"), calls.count("ship")) == (2, 2)


async def test_what_a_step_says_comes_again(trees: Trees) -> None:
    """The attempt that has caught it is lost, and its refund is not written."""
    calls = list[str]()

    async def charge() -> None:
        calls.append("charge")

    async def ship() -> None:
        calls.append("ship")
        if calls.count("ship") == 1:
            raise RetryAfter(0, afresh=True)

    async def refund() -> None:
        calls.append("refund")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(charge)
        try:
            await job.step(ship)
        except RetryAfter:
            await job.step(refund)  # noqa: ASYNC120 -- as a handler would
            if calls.count("refund") == 1 and job.attempt == 1:
                raise OSError("the worker is lost, as far as the history knows") from None
            raise

    job_id = trees.enqueue(order.kind)
    assert (await trees.ended(job_id))["state"] == "completed"
    assert calls == ["charge", "ship", "refund", "charge", "ship"]
    assert trees.job(job_id)["attempt"] == 3


class Broken(RetryAfter):
    def __getattribute__(self, name: str) -> Any:
        if name == "afresh":
            raise ValueError("an attribute of the user's")
        return super().__getattribute__(name)


async def test_an_exception_that_cannot_be_asked_forgets_nothing(trees: Trees) -> None:
    bank = Bank()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(bank.charge)
        if job.attempt == 1:
            raise Broken(0, afresh=True)

    job_id = trees.enqueue(order.kind)
    assert (await trees.ended(job_id))["state"] == "completed"
    assert bank.book == ["charge"]


async def test_what_is_compensated_without_a_word_is_dead_with_what_to_do(trees: Trees) -> None:
    bank = Bank("address")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(bank.charge)
        try:
            await bank.plain("address")
        except OSError:
            await job.step(bank.refund)  # noqa: ASYNC120 -- as a handler would
            raise
        await job.step(bank.ship)

    job = await trees.ended(trees.enqueue(order.kind))
    assert job["state"] == "dead"
    assert "RetryAfter(60, afresh=True)" in job["error"]
    assert bank.book == ["charge", "refund"]


async def test_discard_after_a_compensation_ends_the_job(trees: Trees) -> None:
    bank = Bank("ship")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(bank.charge)
        try:
            await job.step(bank.ship)
        except StepFailed:
            await job.step(bank.refund)  # noqa: ASYNC120 -- as a handler would
            raise Discard("undone") from None

    assert (await trees.ended(trees.enqueue(order.kind)))["state"] == "dead"
    assert bank.book == ["charge", "refund"]


def test_run_job_says_when_it_would_run_again() -> None:
    handlers, bank = Handlers(), Bank("ship")

    @handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(bank.charge)
        try:
            await job.step(bank.ship)
        except StepFailed:
            await job.step(bank.refund)  # noqa: ASYNC120 -- as a handler would
            raise RetryAfter(60, afresh=True) from None

    run = trio.run(run_job, order)
    assert bank.book == ["charge", "refund"]
    assert run.delay == pytest.approx(60, abs=1)


async def test_one_charge_is_left_wherever_the_worker_is_killed(pulse_dsn: str) -> None:
    charged, refunded, shipped, keys = set[str](), set[str](), list[str](), count(1)

    async def draw() -> str:
        return f"key {next(keys)}"

    async def charge(key: str) -> None:
        charged.add(key)

    async def refund(key: str) -> None:
        refunded.add(key)

    async def ship(key: str) -> None:
        if not refunded:
            raise OSError("the first is refused")
        shipped.append(key)

    handlers = Handlers()

    @handlers.job(durable=True)
    async def order(job: Job) -> None:
        key = await job.step(draw)
        try:
            await job.step(charge, key)
            await job.step(ship, key)
        except BaseException:
            with job.cleanup():
                await job.step(refund, key)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise RetryAfter(0, afresh=True) from None  # noqa: ASYNC104 -- what it raises is its word on the job

    points = 0
    async for run in crash_points(order, dsn=pulse_dsn, handlers=handlers):
        assert run.state == "completed", run
        assert len(charged - refunded) == 1, run
        assert set(shipped) == charged - refunded, run
        points += run.reached
        for book in (charged, refunded, shipped):
            book.clear()
    assert points >= 16  # four steps and the word at the end, each struck before and after its line, by two strikes


@pytest.mark.parametrize(
    "error", [RetryAfter(3600), Snooze(3600), OSError("away")], ids=lambda error: type(error).__name__
)
async def test_a_person_lets_a_job_begin_afresh_that_waits_for_its_next_attempt(trees: Trees, error: Exception) -> None:
    """It was due, and kept its history, and nobody was told."""
    calls = list[str]()

    async def charge() -> None:
        calls.append("charge")

    @trees.handlers.job(durable=True, backoff_base=3600)
    async def order(job: Job) -> str:
        await job.step(charge)
        event = await job.wait_for_event("go")
        if job.attempt == 1:
            raise error
        return event

    job_id = trees.enqueue("order")
    client = SyncClient(trees.dsn)
    client.send_event(job_id, "go", "gone")
    await trees.burst(log=False)
    assert trees.job(job_id)["state"] in ("retryable", "scheduled")
    client.retry(job_id, afresh=True)
    await trees.burst(log=False)
    assert (trees.job(job_id)["result"], calls) == ("gone", ["charge", "charge"])


@pytest.mark.parametrize("cancelled", [False, True])
async def test_one_that_has_children_that_live_is_refused_and_one_that_is_cancelled_keeps_its_history(
    trees: Trees, *, cancelled: bool
) -> None:
    """They would be started a second time, or what is to be undone be forgotten. It was retried without a word."""

    @trees.handlers.job(durable=True)
    async def leg(job: Job) -> None:
        await job.wait_for_event("go")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        await job.step(trio.lowlevel.checkpoint)
        if cancelled:
            await job.wait_for_event("go")
        async with job.durable_nursery() as nursery:
            nursery.start_soon(leg)

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    if cancelled:
        trees.window.run("SELECT cancel(%s)", job_id)
    # As after an attempt whose worker was lost, which is not tried again yet.
    trees.window.run("UPDATE durable_job SET suspended = 0 WHERE job_id = %s", job_id)
    trees.window.run("UPDATE job SET run_at = now() + interval '1 h' WHERE id = %s", job_id)
    before = trees.lines(job_id)
    client = SyncClient(trees.dsn)
    if cancelled:
        client.retry(job_id, afresh=True)
    else:
        with pytest.raises(
            InvalidTransition, match=r"children of it live.*Cancel it first, or retry it without --afresh"
        ):
            client.retry(job_id, afresh=True)
        said = client.run(history.retry_batch([job_id], afresh=True))
        assert (said.retried, "children of it live" in said.refused[job_id]) == ([], True)
        assert client.retry(job_id) == "available"
    assert trees.lines(job_id) == before != []
