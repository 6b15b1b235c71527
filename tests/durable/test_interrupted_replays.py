"""Plain code of a handler fails while a later attempt replays. That is no mismatch: the attempt fails of it, undoes nothing,
and the next one replays again."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.lowlevel
import trio.testing

from pulse_trio import Discard, FailedBefore, Job, RetryAfter, Snooze, StepFailed, SyncClient
from pulse_trio.worker.durable import once_more

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from support.trees import Trees


def owes(trees: Trees, job_id: int) -> bool:
    """Whether its clean-up did not end."""
    (row,) = trees.window.run("SELECT owes_clean_up(%s) AS owes", job_id)
    return row["owes"]


def outcomes(trees: Trees, job_id: int) -> list[str]:
    rows = trees.window.run("SELECT outcome FROM attempts WHERE job_id = %s ORDER BY attempt", job_id)
    return [row["outcome"] for row in rows]


class Pages:
    """A step whose calls end in the order of the names that it is given."""

    def __init__(self, order: str) -> None:
        self.called: list[str] = []
        self._ended = {name: trio.Event() for name in order}
        self._before = dict(zip(order, [None, *order], strict=False))

    async def fetch(self, name: str) -> str:
        if (before := self._before[name]) is not None:
            await self._ended[before].wait()
        self.called.append(name)
        self._ended[name].set()
        return name


@asynccontextmanager
async def in_a_nursery() -> AsyncGenerator[None]:
    async with trio.open_nursery():
        yield


@asynccontextmanager
async def plainly(scope: AbstractContextManager[Any]) -> AsyncGenerator[None]:
    with scope:
        yield


AROUND: dict[str, Callable[[Job], Any]] = {
    "nothing": lambda _: nullcontext(),
    "job.move_on_after": lambda job: plainly(job.move_on_after(3600, key="patience")),
    "job.fail_after": lambda job: plainly(job.fail_after(3600, key="patience")),
    "trio.move_on_after": lambda _: plainly(trio.move_on_after(3600)),
    "a nursery": lambda _: in_a_nursery(),
}
FAILURES = {"error": OSError("down"), "snooze": Snooze(0), "retry-after": RetryAfter(0), "exit": SystemExit(1)}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("failure", FAILURES)
async def test_a_task_that_is_cut_before_the_line_of_the_one_that_fails_is_no_mismatch(
    trees: Trees, around: str, failure: str
) -> None:
    """The other task stands in a call that has a line, behind that of the one that fails. It was cancelled for ever in it."""
    pages = Pages("ba")

    async def fetches(job: Job, name: str) -> None:
        if name == "b" and job.attempt == 2:
            await trio.testing.wait_all_tasks_blocked()
            raise FAILURES[failure]
        async with AROUND[around](job) if name == "a" else nullcontext():
            await job.step(pages.fetch, name, key=name)

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> str:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetches, job, "a")
            nursery.start_soon(fetches, job, "b")
        if job.attempt == 1:
            raise ValueError("something else")
        return "all fetched"

    job_id = trees.enqueue("order")
    found = await trees.ended(job_id)
    assert (found["state"], found["result"]) == ("completed", "all fetched")
    second = "snoozed" if failure == "snooze" else "failed"
    assert outcomes(trees, job_id) == ["failed", second, "completed"]
    assert pages.called == ["b", "a"]


@pytest.mark.parametrize("where", ["beside a task", "in a task", "in one task"])
@pytest.mark.parametrize("swallows", [False, True])
async def test_what_the_handler_calls_because_of_it_is_refused(trees: Trees, where: str, *, swallows: bool) -> None:
    pages, undone = Pages("ba"), list[str]()

    async def refund() -> None:
        undone.append("refund")

    async def service(job: Job) -> None:
        await trio.lowlevel.checkpoint()
        if job.attempt == 2:
            raise OSError("down")

    async def fetches(job: Job, name: str) -> None:
        if name == "b":
            await service(job)
        await job.step(pages.fetch, name, key=name)

    async def fetch_all(job: Job) -> None:
        if where == "in one task":
            await fetches(job, "b")
            await fetches(job, "a")
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetches, job, "a")
            if where == "in a task":
                nursery.start_soon(fetches, job, "b")
            else:
                await fetches(job, "b")

    @trees.handlers.job(durable=True, max_attempts=2)
    async def order(job: Job) -> str:
        try:
            await fetch_all(job)
        except BaseException:
            try:
                with job.cleanup():
                    await job.step(refund)  # noqa: ASYNC102, ASYNC120 -- job.cleanup() is the shield
            except Exception:
                if not swallows:
                    raise
            raise
        if job.attempt == 1:
            raise ValueError("something else")
        return "all fetched"

    job_id = trees.enqueue("order")
    found = await trees.ended(job_id)
    # Its budget is used up: no history says that anything was undone, and no code has changed.
    assert (found["state"], undone) == ("dead", [])
    assert "OSError: down" in found["error"].partition("\n")[0]
    SyncClient(trees.dsn).retry(job_id)
    found = await trees.ended(job_id)
    assert (found["state"], found["result"], undone, pages.called) == ("completed", "all fetched", [], ["b", "a"])


@pytest.mark.parametrize("raised", ["by a step", "because of a step", "by a wait", "by a deadline", "by a child"])
async def test_an_exception_that_comes_from_the_history_is_a_mismatch_still(trees: Trees, raised: str) -> None:
    """New code makes another call in its `except`: the exception comes again in each attempt, and so would that call."""
    calls: list[str] = []

    async def act(what: str) -> None:
        calls.append(what)
        if what == "fail":
            raise OSError("down")

    async def undo() -> None:
        calls.append("undo")

    @trees.handlers.job(max_attempts=1)
    async def child() -> None:
        raise Discard("out of stock")

    async def fails(job: Job) -> None:
        if raised == "by a step":
            await job.step(act, "fail")
        elif raised == "because of a step":
            try:
                await job.step(act, "fail")
            except StepFailed as error:
                raise ValueError("not fetched") from error
        elif raised == "by a wait":
            await job.wait_for_event("never", timeout=0)
        elif raised == "by a deadline":
            with job.fail_after(0):
                await job.wait_for_event("never")
        else:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(child)

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        try:
            await fails(job)
        except (StepFailed, ValueError, TimeoutError, trio.TooSlowError, ExceptionGroup):
            if job.attempt == 1:
                await job.step(act, "report")  # noqa: ASYNC120 -- nothing cancels it
            else:
                await job.step(undo)  # noqa: ASYNC120 -- nothing cancels it
        raise OSError("after it")

    job_id = trees.enqueue("order")
    found = await trees.ended(job_id)
    assert (found["state"], found["attempt"]) == ("dead", 2)
    assert found["error"].startswith("ReplayMismatch: ")
    assert calls[-1] == "report"


async def test_a_failure_of_plain_code_after_the_history_is_undone(trees: Trees) -> None:
    calls: list[str] = []

    async def act(what: str) -> None:
        calls.append(what)

    @trees.handlers.job(durable=True, max_attempts=2)
    async def order(job: Job) -> None:
        await job.step(act, "charge")
        try:
            if job.attempt == 2:
                raise OSError("down")
            raise ValueError("something else")
        except OSError:
            await job.step(act, "refund")  # noqa: ASYNC120 -- nothing cancels it
            raise

    job_id = trees.enqueue("order")
    found = await trees.ended(job_id)
    assert (found["state"], calls) == ("dead", ["charge", "refund"])


@pytest.mark.parametrize("what", ["step", "scope"])
async def test_where_a_wait_is_under_way_it_is_refused_too(trees: Trees, what: str) -> None:
    """No line is left, but the sleep has begun: what plain code fails of before it comes before the end of the history."""
    undone: list[str] = []

    async def undo() -> None:
        undone.append("undo")

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=3)
    async def order(job: Job) -> str:
        try:
            if job.attempt == 2:
                raise OSError("down")
            await job.sleep(3600)
        except OSError:
            if what == "step":
                await job.step(undo)  # noqa: ASYNC120 -- nothing cancels it
            else:
                with job.move_on_after(60):
                    await job.step(undo)  # noqa: ASYNC120 -- nothing cancels it
            raise
        return "slept"

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    trees.again()
    await trees.burst(log=False)
    assert outcomes(trees, job_id) == ["suspended", "failed"]
    trees.time_passes(job_id)
    await trees.burst(log=False)
    found = trees.job(job_id)
    assert (found["state"], found["result"], undone) == ("completed", "slept", [])


@pytest.mark.parametrize("beside", ["in a nursery", "in job.nursery"])
async def test_a_cancelled_job_owes_its_clean_up_where_another_task_fails_before_it(trees: Trees, beside: str) -> None:
    """The refund is refused, because a replay undoes nothing; the cancellation is still to come, and a retry does it."""
    calls: list[str] = []

    async def act(what: str) -> None:
        calls.append(what)

    async def pays(job: Job) -> None:
        await job.step(act, "charge", key="charge")
        try:
            await job.wait_for_event("packed", key="packed")
        except trio.Cancelled:
            with job.cleanup():
                await job.step(act, "refund", key="refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    async def reads(job: Job) -> None:
        await job.step(act, "first page", key="first page")
        if 2 <= job.attempt < 3 + once_more.MOST:
            await trio.testing.wait_all_tasks_blocked()
            raise OSError("down")
        await job.step(act, "second page", key="second page")
        await job.sleep(3600, key="pause")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        if beside == "in job.nursery":
            job.nursery.start_soon(reads, job)
            await pays(job)
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reads, job)
            nursery.start_soon(pays, job)

    job_id, client = trees.enqueue("order"), SyncClient(trees.dsn)
    await trees.burst(log=False)
    client.cancel(job_id)
    await trees.ended(job_id)
    assert (trees.job(job_id)["state"], owes(trees, job_id), "refund" in calls) == ("cancelled", True, False)
    client.retry(job_id)
    await trees.burst(log=False)
    assert (trees.job(job_id)["state"], owes(trees, job_id), calls[-1]) == ("cancelled", False, "refund")
    assert calls.count("refund") == 1


@pytest.mark.parametrize("key", [None, "packing"], ids=["numbered", "with a key"])
@pytest.mark.parametrize("failure", FAILURES)
async def test_plain_code_that_fails_before_a_block_that_is_open_undoes_nothing(
    trees: Trees, failure: str, key: str | None
) -> None:
    ledger: list[str] = []

    async def charge() -> None:
        ledger.append("charged")

    async def refund() -> None:
        ledger.append("refunded")

    @trees.handlers.job
    async def pack() -> str:
        return "packed"

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=5)
    async def order(job: Job) -> str:
        await job.step(charge)
        try:
            if job.attempt == 2:
                raise FAILURES[failure]
            async with job.durable_nursery(key=key) as nursery:
                packed = nursery.start_soon(pack.options(queue="packing"))
        except BaseException:
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise
        return packed.result

    job_id = trees.enqueue("order")
    await trees.burst(queues=["default"])
    found = await trees.ended(job_id)
    assert (found["state"], found["result"], ledger) == ("completed", "packed", ["charged"])
    second = "snoozed" if failure == "snooze" else "failed"
    assert outcomes(trees, job_id) == ["suspended", second, "completed"]


@pytest.mark.parametrize("kept", ["no key", "key", "timeout"])
@pytest.mark.parametrize("failure", FAILURES)
async def test_plain_code_that_fails_before_a_wait_for_an_event_undoes_nothing(
    trees: Trees, failure: str, kept: str
) -> None:
    """Also where nothing but its suspension says that the job waits."""
    ledger: list[str] = []
    given: dict[str, Any] = {"no key": {}, "key": {"key": "approval"}, "timeout": {"timeout": timedelta(days=1)}}[kept]

    async def writes(what: str) -> None:
        ledger.append(what)

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=5)
    async def order(job: Job) -> str:
        await job.step(writes, "charged")
        try:
            if job.attempt in (2, 3):
                raise FAILURES[failure]
            return await job.wait_for_event("approved", **given)
        except BaseException:
            with job.cleanup():
                await job.step(writes, "refunded")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "approved", "yes")
    found = await trees.ended(job_id)
    assert (found["state"], found["result"], ledger) == ("completed", "yes", ["charged"])
    then = "snoozed" if failure == "snooze" else "failed"
    assert outcomes(trees, job_id) == ["suspended", then, then, "completed"]


async def test_what_has_failed_before_a_wait_in_its_handling_may_fail_again(trees: Trees) -> None:
    """The wait is a part of what the handler does because of the failure."""
    ledger: list[str] = []

    async def writes(what: str) -> None:
        ledger.append(what)

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=5)
    async def order(job: Job) -> str:
        try:
            raise OSError("always")
        except OSError:
            said = await job.wait_for_event("repaired")
            await job.step(writes, "refunded")
        return said

    job_id = trees.enqueue("order")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "repaired", "yes")
    found = await trees.ended(job_id)
    assert (found["state"], found["result"], ledger) == ("completed", "yes", ["refunded"])


async def test_a_failure_after_the_event_was_received_is_undone(trees: Trees) -> None:
    ledger: list[str] = []

    async def writes(what: str) -> None:
        ledger.append(what)

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(writes, "charged")
        try:
            await job.wait_for_event("approved")
            raise OSError("always")
        except OSError:
            await job.step(writes, "refunded")  # noqa: ASYNC120 -- as a handler would
            raise Discard("undone") from None

    job_id = trees.enqueue("order")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "approved")
    found = await trees.ended(job_id)
    assert (found["state"], ledger, outcomes(trees, job_id)) == (
        "dead",
        ["charged", "refunded"],
        ["suspended", "discarded"],
    )


@pytest.mark.parametrize("where", ["between steps", "in a block"])
async def test_a_compensation_after_plain_code_that_does_not_fail_again_is_named(trees: Trees, where: str) -> None:
    """No line brings such a failure again: the error says that, instead of a change of code."""

    async def done(what: str) -> str:
        return what

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(done, "charge")
        try:
            if where == "in a block":
                async with job.durable_nursery():
                    if job.attempt == 1:
                        raise ConnectionError("away for a moment")
            elif job.attempt == 1:
                raise ConnectionError("away for a moment")
            await job.step(done, "ship", key="ship")
        except BaseException:
            with job.cleanup():
                await job.step(done, "refund", key="refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    found = await trees.ended(job_id)
    assert (found["state"], outcomes(trees, job_id)) == ("dead", ["failed", "discarded"])
    assert "plain code" in found["error"]
    assert f"jobs retry {job_id} --afresh" in found["error"]
    assert "code changed" not in found["error"]
    assert where == "in a block" or "ConnectionError: away for a moment" in found["error"]


class Lost:
    """Attempts whose worker is lost as a step has run, and before that has a line."""

    def __init__(self, trees: Trees) -> None:
        self._trees = trees
        self.ledger: list[str] = []

    async def writes(self, what: str) -> None:
        self.ledger.append(what)

    async def writes_and_is_lost(self, job: Job) -> None:
        self.ledger.append("refunded")
        if self.ledger.count("refunded") == 1:
            await self._trees.lose(job.id)
            await trio.sleep_forever()


@pytest.mark.parametrize("fails", [1, 2])
@pytest.mark.parametrize("returns", [False, True])
async def test_a_compensation_for_plain_code_whose_worker_is_lost_is_not_passed_over(
    trees: Trees, fails: int, *, returns: bool
) -> None:
    """The refund may be paid, and no line says so: the next attempt does not ship, but fails there, too, and refunds again. One
    that makes no call there fails in none: a person has looked who retries that job."""
    lost = Lost(trees)

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> str:
        await job.step(lost.writes, "charged")
        try:
            if job.attempt <= fails:
                raise ConnectionError("away for a moment")
            if not returns:
                await job.step(lost.writes, "shipped")
        except BaseException:
            with job.cleanup():
                await job.step(lost.writes_and_is_lost, job)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise Discard("undone") from None  # noqa: ASYNC104 -- its word on the job
        return "done"

    job_id = trees.enqueue("order")
    await trees.burst(watchdog=5, lease=3, heartbeat=0.3)
    found = await trees.ended(job_id)
    assert found["state"] == "dead"
    if fails == 2 or not returns:
        assert lost.ledger == ["charged", "refunded", "refunded"]
        assert "Discard: undone" in found["error"]
        return
    assert lost.ledger == ["charged", "refunded"]
    assert "had begun to undo what it did when its worker was lost" in found["error"]
    assert "ConnectionError: away for a moment" in found["error"]
    SyncClient(trees.dsn).retry(job_id)
    assert (await trees.ended(job_id))["result"] == "done"
    assert lost.ledger == ["charged", "refunded"]


@pytest.mark.parametrize("call", ["a step", "job.transaction()", "a block"])
@pytest.mark.parametrize("afresh", [False, True])
async def test_what_fails_in_its_place_is_answered_as_it_was(trees: Trees, call: str, *, afresh: bool) -> None:
    lost, said = Lost(trees), list[str]()

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> str:
        await job.step(lost.writes, "charged")
        try:
            if job.attempt == 1:
                raise ConnectionError("away for a moment")
            if call == "job.transaction()":
                async with job.transaction():
                    lost.ledger.append("shipped")
            elif call == "a block":
                async with job.durable_nursery():
                    lost.ledger.append("shipped")
            else:
                await job.step(lost.writes, "shipped")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
            with job.cleanup():
                await job.step(lost.writes_and_is_lost, job)  # noqa: ASYNC120 -- job.cleanup() is the shield
            raise (RetryAfter(0, afresh=True) if afresh else Discard("undone")) from error
        return "done"

    job_id = trees.enqueue("order")
    await trees.burst(watchdog=5, lease=3, heartbeat=0.3)
    found = await trees.ended(job_id)
    assert found["state"] == ("completed" if afresh else "dead")
    assert lost.ledger == ["charged", "refunded", "refunded", *(["charged", "shipped"] if afresh else [])]
    assert said[1].startswith("FailedBefore: an attempt before failed here (ConnectionError: away for a moment)")


@pytest.mark.parametrize("swallows", [False, True])
async def test_a_handler_that_expects_another_exception_there_is_left_to_a_person(
    trees: Trees, *, swallows: bool
) -> None:
    lost = Lost(trees)

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> str:
        await job.step(lost.writes, "charged")
        try:
            if job.attempt == 1:
                raise ConnectionError("away for a moment")
        except ConnectionError:
            with job.cleanup():
                await job.step(lost.writes_and_is_lost, job)  # noqa: ASYNC120 -- job.cleanup() is the shield
            raise Discard("undone") from None
        if swallows:
            with suppress(FailedBefore):
                await job.step(lost.writes, "packed")
        await job.step(lost.writes, "shipped")
        return "done"

    job_id = trees.enqueue("order")
    await trees.burst(watchdog=5, lease=3, heartbeat=0.3)
    found = await trees.ended(job_id)
    assert (found["state"], lost.ledger) == ("dead", ["charged", "refunded"])
    assert "had begun to undo what it did when its worker was lost" in found["error"]
    assert ("now calls step" if swallows else "does not undo it for FailedBefore") in found["error"]
    SyncClient(trees.dsn).retry(job_id)
    assert (await trees.ended(job_id))["result"] == "done"


async def test_a_refund_that_has_failed_has_undone_nothing(trees: Trees) -> None:
    ledger: list[str] = []

    async def writes(what: str) -> None:
        ledger.append(what)

    async def refund() -> None:
        raise OSError("the bank is away")

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(writes, "charged")
        try:
            if job.attempt == 1:
                raise ConnectionError("away for a moment")
            await job.step(writes, "shipped")
        except ConnectionError:
            await job.step(refund)  # noqa: ASYNC120 -- as a handler would
            raise

    found = await trees.ended(trees.enqueue("order"))
    assert (found["state"], ledger) == ("completed", ["charged", "shipped"])


async def test_another_way_that_an_attempt_took_because_plain_code_had_failed_need_not_be_taken_again(
    trees: Trees,
) -> None:
    """It undoes nothing, which `job.cleanup()` would say."""
    lost = Lost(trees)

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> str:
        try:
            if job.attempt == 1:
                raise ConnectionError("the cache is away for a moment")
            found = "cached"
        except ConnectionError:
            await job.step(lost.writes_and_is_lost, job)
            found = "fetched"
        await job.step(lost.writes, found)
        return found

    job_id = trees.enqueue("order")
    await trees.burst(watchdog=5, lease=3, heartbeat=0.3)
    assert (await trees.ended(job_id))["result"] == "cached"


@pytest.mark.parametrize("means", ["channel", "lock"])
async def test_nothing_goes_on_live_beside_a_compensation_that_this_attempt_does_without(
    means: str, trees: Trees
) -> None:
    """Tasks that wait for one another have no order that the history knows, so they may go on live before what is left of it.
    They did so with an order whose charge had been refunded."""
    bank: list[str] = []
    done: list[int] = []

    async def charge() -> None:
        bank.append("charged")

    async def refund() -> None:
        bank.append("refunded")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        send, receive = trio.open_memory_channel[int](0)
        lock = trio.Lock()

        async def make() -> None:
            done.append(job.attempt)

        async def produce() -> None:
            async with lock if means == "lock" else send:
                await job.step(make, key="make")
                if means == "channel":
                    await send.send(1)

        await job.step(charge)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(produce)
                if job.attempt == 1:
                    raise OSError("no client")
                await trio.testing.wait_all_tasks_blocked()
                if means == "lock":
                    async with lock:
                        pass
                else:
                    await receive.receive()
        except BaseException:
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst()
            trees.again()
    error = trees.job(job_id)["error"]
    assert (bank, done) == (["charged", "refunded"], [])
    assert "An attempt before failed of plain code (" in error
    assert f"pulse-trio jobs retry {job_id} --afresh" in error


@pytest.mark.parametrize("how", ["suspended", "lost"])
@pytest.mark.parametrize("where", ["except", "finally", "a scope", "a key"])
async def test_a_block_in_the_handling_of_plain_code_is_opened_again(trees: Trees, where: str, how: str) -> None:
    """The attempt was interrupted at that very block, each time: the job was dead, and its children were completed."""
    go_on = trio.Event()

    @trees.handlers.job
    async def pack() -> str:
        await go_on.wait()
        return "packed"

    @trees.handlers.job(durable=True, max_attempts=3, suspend_after=0 if how == "suspended" else 60)
    async def order(job: Job, prices: dict[str, int]) -> str:
        async def substitute() -> str:
            async with job.durable_nursery(key="instead" if where == "a key" else None) as nursery:
                parcel = nursery.start_soon(pack)
                if how == "lost" and job.attempt == 1:
                    await nursery.flush()
                    await trees.dies(job)
            return str(parcel.result)

        packed = ""
        try:
            return f"{prices['pear']}"
        except KeyError:
            with job.move_on_after(3600) if where == "a scope" else nullcontext():
                if where != "finally":
                    packed = await substitute()
        finally:
            if where == "finally":
                packed = await substitute()  # noqa: ASYNC102 -- what is tried
        return packed

    job_id = trees.enqueue("order", {"prices": {"apple": 1}})
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trees.burst, lease=3, heartbeat=0.1, log=False))
            while trees.job(job_id)["state"] != "suspended" and trees.job(job_id)["attempt"] < 2:
                await trio.lowlevel.checkpoint()
            go_on.set()
        found = await trees.ended(job_id)
    assert (found["state"], found["result"]) == ("completed", "packed")


async def test_a_sys_exit_of_plain_code_that_was_undone_is_named(trees: Trees) -> None:
    """The error said that the code had changed."""
    bank: list[str] = []

    async def note(what: str) -> None:
        bank.append(what)

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(note, "charged")
        try:
            if job.attempt == 1:
                sys.exit("no licence")
            await job.step(note, "shipped")
            await job.step(note, "told")
        except BaseException:
            with job.cleanup():
                await job.step(note, "called back")  # noqa: ASYNC102 -- job.cleanup() is the shield
                await job.sleep(0)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    found = await trees.ended(trees.enqueue("order"))
    assert (found["state"], bank) == ("dead", ["charged", "called back"])
    assert "An attempt before failed of plain code (SystemExit: no licence)" in found["error"]
