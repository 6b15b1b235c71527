"""A job whose step has failed, and which is cancelled while it undoes what it did: it ends as cancelled at once, and has
compensated. No attempt could end otherwise, because the failure and the refund are lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import ChildFailed, Discard, Job, RetryAfter, SyncClient
from pulse_trio.jobs import CancelRequest
from pulse_trio.store import family
from support.trees import running_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.trees import Trees


class Bank:
    """What steps have done. `cancels`: what happens as each begins, by its name."""

    def __init__(self, trees: Trees) -> None:
        self.trees = trees
        self.client = SyncClient(trees.dsn)
        self.done: list[str] = []
        self.refuses: set[str] = set()
        self.cancels: set[str] = set()

    async def act(self, job: Job, what: str) -> None:
        if what in self.cancels:
            self.cancels.discard(what)
            await trio.to_thread.run_sync(self.client.cancel, job.id)
            running = running_of(job)
            running.ask(CancelRequest("user", None))
        if what in self.refuses:
            raise OSError(f"{what} is refused")
        self.done.append(what)


def again(error: BaseException) -> BaseException:
    return error


ENDS: dict[str, Callable[[BaseException], BaseException]] = {
    "the same": again,
    "from it": lambda error: make(ValueError("undone"), error),
    "afresh": lambda _: RetryAfter(0, afresh=True),
    "later": lambda _: RetryAfter(60),
    "discard": lambda _: Discard("undone"),
    "in a group": lambda error: ExceptionGroup("undone", [make(ValueError("undone"), error)]),
}


def make(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


ALL = [
    pytest.param(end, when, plain, id=f"{'plain code fails' if plain else 'a step fails'}-{when}-{end}")
    for end in ENDS
    for when in ("ship", "refund", "the refund is done")
    for plain in (False, True)
]


@pytest.mark.parametrize(("end", "when", "plain"), ALL)
async def test_it_ends_as_cancelled_at_once_and_a_retry_begins_it_anew(
    trees: Trees, end: str, when: str, plain: bool
) -> None:
    bank = Bank(trees)
    bank.refuses, bank.cancels = {"ship"}, {when}

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(bank.act, job, "charge")
        try:
            if plain and "ship" in bank.refuses:
                await bank.act(job, "ship")
            await job.step(bank.act, job, "ship")
        except BaseException as error:
            with job.cleanup():
                await job.step(bank.act, job, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            if when == "the refund is done" and when in bank.cancels:
                bank.cancels.clear()
                bank.client.cancel(job.id)
                running = running_of(job)
                running.ask(CancelRequest("user", None))
            if ENDS[end] is again:
                raise
            raise ENDS[end](error)  # noqa: ASYNC104, B904 -- its word on the job; its cause is a part of the test

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    found = trees.job(job_id)
    assert (found["state"], found["attempt"], bank.done) == ("cancelled", 1, ["charge", "refund"])
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == []
    if end == "discard" and when == "the refund is done":
        return  # as without a cancellation: a retry comes to the same `Discard`
    assert trees.window.do(family.compensated([job_id])) == [job_id]
    bank.refuses.clear()
    bank.client.retry(job_id)
    await trees.burst(log=False)
    assert (trees.job(job_id)["state"], bank.done) == ("completed", ["charge", "refund", "charge", "ship"])


async def test_it_owes_what_a_clean_up_did_not_come_to_though_its_handler_ends_with_discard(trees: Trees) -> None:
    """The inner clean-up has failed, and the job is cancelled in the outer one. It owed nothing, and a retry shipped again. A
    retry comes to the same, and says so."""
    bank = Bank(trees)
    bank.refuses, bank.cancels = {"ship", "take the label off"}, {"refund"}

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(bank.act, job, "charge")
        try:
            try:
                await job.step(bank.act, job, "ship")
            except BaseException:
                with job.cleanup():
                    await job.step(bank.act, job, "take the label off")  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise
        except BaseException as error:
            with job.cleanup():
                await job.step(bank.act, job, "refund")  # noqa: ASYNC102 -- as above
            raise Discard("undone") from error  # noqa: ASYNC104 -- its word on the job

    job_id = trees.enqueue("order")
    for retried in (False, True):
        while trees.job(job_id)["finished_at"] is None:
            trees.again()
            await trees.burst(log=False)
        found = trees.job(job_id)
        assert (found["state"], bank.done) == ("cancelled", ["charge", "refund"])
        last = trees.window.run("SELECT error FROM attempts WHERE job_id = %s ORDER BY attempt DESC LIMIT 1", job_id)
        assert (f"jobs retry {job_id} --afresh runs it again" in last[0]["error"]) == retried
        assert trees.window.do(family.unfinished_clean_ups([job_id])) == [job_id]
        bank.refuses.clear()
        bank.client.retry(job_id)


async def test_it_has_compensated_too_if_it_is_cancelled_while_it_waits_for_its_next_attempt(trees: Trees) -> None:
    bank = Bank(trees)
    bank.refuses = {"ship"}

    async def ship(job: Job) -> None:
        await bank.act(job, "ship")

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(bank.act, job, "charge")
        try:
            if "ship" in bank.refuses:
                await ship(job)
            await job.step(ship, job)
        except BaseException:
            with job.cleanup():
                await job.step(bank.act, job, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    assert (trees.job(job_id)["state"], bank.done) == ("retryable", ["charge", "refund"])
    bank.refuses.clear()
    bank.client.cancel(job_id)
    await trees.burst(log=False)
    assert (trees.job(job_id)["state"], bank.done) == ("cancelled", ["charge", "refund"])
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == []
    assert trees.window.do(family.compensated([job_id])) == [job_id]
    bank.client.retry(job_id)
    await trees.burst(log=False)
    assert (trees.job(job_id)["state"], bank.done) == ("completed", ["charge", "refund", "charge", "ship"])


@pytest.mark.parametrize("end", [Discard, ValueError])
async def test_a_lost_attempt_had_undone_what_it_did_and_the_next_one_does_so_at_once(
    trees: Trees, end: type[Exception]
) -> None:
    """It ran eight times more in half a minute, because it ended with an exception of its own each time."""
    bank = Bank(trees)
    lost: list[int] = []

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        try:
            await job.step(bank.act, job, "charge")
            raise end("plain")
        except BaseException:
            with job.cleanup():
                await job.step(bank.act, job, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
                if not lost:
                    lost.append(job.id)
                    # A claim that is under way as it is lost could run it once more before it is cancelled.
                    bank.client.pause("default")
                    await trees.lose(job.id)  # noqa: ASYNC102 -- job.cleanup() is the shield
                    bank.client.cancel(job.id)
                    bank.client.resume("default")
            raise

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst(log=False)
        while trees.job(job_id)["state"] == "available":
            await trees.burst(log=False)
    found = trees.job(job_id)
    assert (found["state"], found["attempt"], bank.done) == ("cancelled", 2, ["charge", "refund"])
    assert trees.window.do(family.compensated([job_id])) == [job_id]


async def test_a_child_that_undoes_as_its_sibling_dies_holds_nobody_up(trees: Trees) -> None:
    undoes, dead = trio.Event(), trio.Event()

    async def ship(number: int) -> None:
        if number == 0:
            await undoes.wait()
        raise OSError("refused")

    async def refund(job: Job, number: int) -> None:
        if number == 1:
            undoes.set()
            running = running_of(job)
            while running.reason is None:  # noqa: ASYNC110 -- a child's cancellation has no event
                await trio.sleep(0.01)
        dead.set()

    @trees.handlers.job(durable=True, max_attempts=1)
    async def part(job: Job, number: int) -> None:
        try:
            await job.step(ship, number)
        except BaseException:
            with job.cleanup():
                await job.step(refund, job, number)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    @trees.handlers.job(durable=True)
    async def both(job: Job) -> None:
        try:
            async with job.durable_nursery() as nursery:
                for number in range(2):
                    nursery.start_soon(part, number)
        except* ChildFailed as failed:
            raise Discard("a part has failed") from failed

    root = trees.enqueue("both")
    with trio.fail_after(15):
        await trees.burst(log=False)
    assert trees.job(root)["state"] == "dead"
    children = [job for job in SyncClient(trees.dsn).tree(root) if job.id != root]
    assert sorted((job.state, job.attempt) for job in children) == [("cancelled", 1), ("dead", 1)]


@pytest.mark.parametrize("what", ["the refund fails", "plain code fails after it"])
async def test_what_is_not_undone_is_owed(trees: Trees, what: str) -> None:
    bank = Bank(trees)
    bank.refuses, bank.cancels = {"ship"}, {"refund"}
    if what == "the refund fails":
        bank.refuses.add("refund")

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(bank.act, job, "charge")
        try:
            await job.step(bank.act, job, "ship")
        except BaseException:
            with job.cleanup():
                await job.step(bank.act, job, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
                if what == "plain code fails after it" and job.attempt == 1:
                    raise ConnectionError("away") from None  # noqa: ASYNC104 -- what it raises is its word on the job
                await job.step(bank.act, job, "tell")  # noqa: ASYNC102 -- as above
            raise

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    while trees.job(job_id)["finished_at"] is None:
        trees.again()
        await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "cancelled"
    if what == "the refund fails":
        assert trees.window.do(family.unfinished_clean_ups([job_id])) == [job_id]
        assert bank.done == ["charge"]
    else:
        assert bank.done == ["charge", "refund", "tell"]


async def test_what_is_undone_beside_a_block_that_may_start_no_more_children_is_undone(trees: Trees) -> None:
    """The database knows of the cancellation, and the worker does not yet: before the refund is called the child of another
    task's block is to be written, which was refused, and the refund failed of that."""
    undone: list[int] = []

    async def ship(job: Job) -> None:
        trees.window.run("UPDATE job SET cancelling = true WHERE id = %s", job.id)
        raise LookupError("no stock")

    async def refund(job: Job) -> None:
        undone.append(job.id)

    @trees.handlers.job
    async def child() -> None: ...

    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> None:
        failed, starts = trio.Event(), trio.Event()

        async def beside() -> None:
            async with job.durable_nursery(key="block") as nursery:
                starts.set()
                await failed.wait()
                nursery.start_soon(child)
                await trio.sleep_forever()

        async def pays() -> None:
            try:
                await starts.wait()
                await job.step(ship, job, key="ship")
            except Exception:
                failed.set()
                with job.cleanup():
                    # Until the child is to be written.
                    await trio.lowlevel.checkpoint()  # noqa: ASYNC120 -- job.cleanup() is the shield
                    await job.step(refund, job, key="refund")  # noqa: ASYNC120 -- as above
                raise

        async with trio.open_nursery() as tasks:
            tasks.start_soon(beside)
            tasks.start_soon(pays)

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst(log=False, lease=3, heartbeat=0.3)
    assert (trees.job(job_id)["state"], undone) == ("cancelled", [job_id])


async def test_what_is_undone_beside_tasks_that_the_cancellation_has_cut_is_not_owed(trees: Trees) -> None:
    """The worker is lost in the undo, and a person cancels: in the next attempt the tasks beside the one that has failed end
    with `Cancelled`, which the handler raises again with the failure. No attempt of it could end otherwise."""
    client, undone = SyncClient(trees.dsn), list[int]()

    async def fails() -> None:
        raise LookupError("no stock")

    async def undo(job: Job) -> None:
        if job.attempt > 1:
            undone.append(job.attempt)
            return
        await trees.lose(job.id)
        client.cancel(job.id)

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        async def waits() -> None:
            await trio.sleep(0.01)
            await job.wait_for_event("never", key="never")

        async def ships() -> None:
            await job.step(fails, key="ship")

        try:
            async with trio.open_nursery() as tasks:
                tasks.start_soon(waits)
                tasks.start_soon(ships)
        except BaseException:
            with job.cleanup():
                await job.step(undo, job, key="undo")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst(log=False)
        trees.again()
        await trees.burst(log=False)
    assert (trees.job(job_id)["state"], undone) == ("cancelled", [2])
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == []
