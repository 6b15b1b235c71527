"""`job.wait_for_event`, `job.sleep`, and the suspension of handlers that only wait."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio
from click.testing import CliRunner

from pulse_trio import Job, SyncClient, open_client
from pulse_trio.cli.jobs import show_job
from pulse_trio.jobs import Claim
from pulse_trio.observe import Observer
from pulse_trio.states import STOPPED
from pulse_trio.store.waits import Received, Waits, Wanted
from pulse_trio.worker.durable.durable import Durable
from pulse_trio.worker.durable.receiving import Receiver
from pulse_trio.worker.durable.suspension import Suspension
from support.stage import parts
from support.stores import Window
from support.trees import running_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.trees import Trees

pytestmark = pytest.mark.real_clock


class Approval(msgspec.Struct):
    by: str
    amount: int = 0


def send(trees: Trees, job_id: int, name: str, payload: Any = None, **options: Any) -> bool:
    return SyncClient(trees.dsn).send_event(job_id, name, payload, **options)


def attempts(trees: Trees, job_id: int) -> list[tuple[int, str, str | None]]:
    return [(a["attempt"], a["outcome"], a["error"]) for a in trees.window.attempts(job_id)]


def look(trees: Trees) -> None:
    """As any worker does on the notification, or within a second."""
    while trees.window.value("SELECT count(*) FROM recheck"):
        trees.window.run("SELECT * FROM recheck_jobs()")


# Events


async def test_an_event_that_was_sent_before_it_is_waited_for_is_received_with_its_type(trees: Trees) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> list[Any]:
        approval = await job.wait_for_event("approved", type=Approval)
        return [type(approval).__name__, approval.by, await job.wait_for_event("note")]

    job_id = trees.enqueue("order")
    send(trees, job_id, "approved", {"by": "ada", "amount": 3})
    send(trees, job_id, "note", None)
    await trees.burst()
    assert trees.job(job_id)["result"] == ["Approval", "ada", None]
    assert trees.lines(job_id) == [(3, "1:event", "approved"), (3, "2:event", "note")]


async def test_an_event_that_is_sent_while_the_handler_waits_in_memory_is_received_at_once(trees: Trees) -> None:
    waiting = trio.Event()

    @trees.handlers.job(durable=True, suspend_after=60)
    async def order(job: Job) -> Any:
        waiting.set()
        return await job.wait_for_event("approved")

    job_id = trees.enqueue("order")
    async with trio.open_nursery() as nursery:
        worker = trees.worker(burst=True)
        nursery.start_soon(worker.run)
        await waiting.wait()
        await trio.to_thread.run_sync(send, trees, job_id, "approved", "yes")
    assert trees.job(job_id)["result"] == "yes"
    assert trees.job(job_id)["attempt"] == 1


async def test_parents_that_fill_their_worker_give_their_slots_to_their_children_before_suspend_after(
    trees: Trees,
) -> None:
    @trees.handlers.job
    async def child() -> str:
        return "done"

    @trees.handlers.job(durable=True, suspend_after=3600)
    async def parent(job: Job) -> Any:
        async with job.durable_nursery() as nursery:
            started = nursery.start_soon(child)
        return started.result

    ids = [trees.enqueue("parent") for _ in range(4)]
    await trees.burst(concurrency=2)
    assert [trees.job(job_id)["result"] for job_id in ids] == ["done"] * 4
    assert trees.job(ids[0])["attempt"] == 2


async def test_later_attempts_get_the_same_event_and_not_the_next(trees: Trees) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> Any:
        got = await job.wait_for_event("approved")
        if job.attempt < 3:
            raise ValueError("not yet")
        return got

    job_id = trees.enqueue("order")
    send(trees, job_id, "approved", 1)
    send(trees, job_id, "approved", 2)
    for _ in range(3):
        trees.again()
        await trees.burst()
    assert trees.job(job_id)["result"] == 1
    assert trees.window.value("SELECT payload FROM event WHERE line IS NULL") == 2


async def test_a_payload_that_does_not_fit_stays_received_and_each_attempt_gets_the_same_error(trees: Trees) -> None:
    errors: list[str] = []

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        try:
            await job.wait_for_event("approved", type=Approval)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            raise

    job_id = trees.enqueue("order")
    send(trees, job_id, "approved", {"by": 7})
    for _ in range(2):
        trees.again()
        await trees.burst()
    assert len(errors) == 2
    assert len(set(errors)) == 1
    assert errors[0].startswith("InvalidEvent: The payload of the event 'approved' of job")
    assert "Expected `str`, got `int` - at `$.by`" in errors[0]


async def test_a_timeout_is_a_line_so_that_an_event_that_comes_later_changes_nothing(trees: Trees) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        try:
            return await job.wait_for_event("approved", timeout=0.05)
        except TimeoutError as error:
            if job.attempt < 2:
                raise ValueError("again") from None
            return str(error)

    job_id = trees.enqueue("order")
    await trees.burst()
    send(trees, job_id, "approved", "late")
    trees.again()
    await trees.burst()
    assert trees.job(job_id)["result"] == "No event 'approved' came within 0.05 s."
    assert [kind for kind, *_ in trees.lines(job_id)] == [10, 4]


@pytest.mark.parametrize("name", ["", "a" * 257, 7])
async def test_a_bad_name_is_refused(trees: Trees, name: Any) -> None:
    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> None:
        await job.wait_for_event(name)

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["error"].startswith("InvalidName: The name of an event")


# Suspension


async def test_a_handler_that_only_waits_is_suspended_and_goes_on_when_its_event_comes(trees: Trees) -> None:
    steps: list[str] = []

    async def charge() -> int:
        steps.append("charged")
        return 5

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> list[Any]:
        try:
            charged = await job.step(charge)
            return [charged, await job.wait_for_event("approved")]
        finally:
            steps.append(f"finally {job.cancel_reason}")

    job_id = trees.enqueue("order")
    await trees.burst()
    assert attempts(trees, job_id) == [(1, "suspended", None)]
    assert steps == ["charged", "finally suspended"]
    row = trees.window.row(job_id)
    assert row is not None
    assert (row["state"], row["locked_by"]) == (1, 0)
    # It costs nothing to look for it, and nothing happens.
    await trees.burst()
    assert trees.job(job_id)["attempt"] == 1
    send(trees, job_id, "approved", "yes")
    look(trees)
    await trees.burst()
    assert trees.job(job_id)["result"] == [5, "yes"]
    assert steps == ["charged", "finally suspended", "finally None"]


async def test_what_a_suspended_handler_returns_is_ignored_and_said_and_what_it_raises_fails_the_attempt(
    trees: Trees,
) -> None:
    @trees.handlers.job(durable=True, suspend_after=0)
    async def returns(job: Job) -> str:
        try:
            await job.wait_for_event("approved")
        except trio.Cancelled:  # noqa: ASYNC103 -- what a handler should not do
            return "swallowed"  # noqa: ASYNC104 -- what a handler should not do
        return "received"

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=1)
    async def raises(job: Job) -> None:
        try:
            await job.wait_for_event("approved")
        finally:
            raise ValueError("in finally")

    first, second = trees.enqueue("returns"), trees.enqueue("raises", max_attempts=1)
    await trees.burst()
    ((_, outcome, said),) = attempts(trees, first)
    assert outcome == "suspended"
    assert said is not None
    assert said.startswith("the handler returned a value while it was being suspended: it is ignored")
    assert trees.job(second)["state"] == "dead"
    assert "ValueError: in finally" in trees.job(second)["error"]
    send(trees, first, "approved")
    look(trees)
    await trees.burst()
    assert (trees.job(first)["result"], trees.job(first)["error"]) == ("received", None)
    # It is told of that attempt, and is no error of the job.
    shown = await _shown(trees, first)
    assert "the handler returned a value while it was being suspended" in shown
    assert "last error" not in shown
    assert "last error (attempt 1):" in await _shown(trees, second)


async def _shown(trees: Trees, job_id: int) -> str:
    arguments = [str(job_id), "--dsn", trees.dsn]
    done = await trio.to_thread.run_sync(lambda: CliRunner().invoke(show_job, arguments))
    assert done.exit_code == 0, done.output
    return done.output


async def test_a_refund_in_a_clean_up_is_not_made_when_the_handler_is_suspended_and_is_made_when_it_is_cancelled(
    trees: Trees,
) -> None:
    calls: list[str] = []

    async def charge() -> int:
        calls.append("charge")
        return 7

    async def refund(amount: int) -> None:
        calls.append(f"refund {amount}")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        charged = await job.step(charge)
        try:
            await job.wait_for_event("approved")
        except BaseException:
            with job.cleanup():
                await job.step(refund, charged)  # noqa: ASYNC102 -- shielded, with a deadline
            raise

    job_id = trees.enqueue("order")
    await trees.burst()
    assert (calls, attempts(trees, job_id)) == (["charge"], [(1, "suspended", None)])
    SyncClient(trees.dsn).cancel(job_id, reason="changed my mind")
    await trees.burst()
    assert calls == ["charge", "refund 7"]
    job = trees.job(job_id)
    assert (job["state"], job["cancel_reason"]) == ("cancelled", "changed my mind")


async def test_a_suspended_job_that_is_cancelled_now_ends_without_its_clean_up(trees: Trees) -> None:
    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        await job.sleep(3600)

    job_id = trees.enqueue("order")
    await trees.burst()
    (result,) = SyncClient(trees.dsn).cancel_many([job_id], now=True)
    assert result.state == "cancelled"
    assert trees.job(job_id)["attempt"] == 1


async def test_a_worker_that_stops_suspends_nothing_and_refuses_the_refund(trees: Trees) -> None:
    calls: list[str] = []
    waiting = trio.Event()

    async def charge() -> None:
        calls.append("charge")

    async def refund() -> None:
        calls.append("refund")

    @trees.handlers.job(durable=True, suspend_after=60)
    async def order(job: Job) -> None:
        await job.step(charge)
        try:
            waiting.set()
            await job.wait_for_event("approved")
        except BaseException:
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC102 -- shielded, with a deadline
            raise

    job_id = trees.enqueue("order")
    worker = trees.worker(grace=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await waiting.wait()
        worker.stop()
    assert calls == ["charge"]
    assert attempts(trees, job_id) == [(1, "released", STOPPED)]


@pytest.mark.parametrize("call", ["start_soon", "flush"])
@pytest.mark.parametrize("reason", ["suspended", "shutdown"])
async def test_a_handler_that_unwinds_starts_no_children(trees: Trees, reason: str, call: str) -> None:
    refused: list[str] = []
    waiting, unwound = trio.Event(), trio.Event()

    @trees.handlers.job
    async def refund() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0 if reason == "suspended" else 60)
    async def order(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            try:
                waiting.set()
                await job.wait_for_event("approved")
            finally:
                with job.cleanup():
                    try:
                        if call == "start_soon":
                            nursery.start_soon(refund)
                        await nursery.flush()  # noqa: ASYNC102 -- what the test is about
                    except BaseException as error:
                        refused.append(str(error).partition(":")[0])
                        raise
                    finally:
                        unwound.set()

    job_id = trees.enqueue("order")
    worker = trees.worker(grace=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await waiting.wait()
        if reason == "suspended":
            await unwound.wait()
        worker.stop()
    assert refused == [f"nursery.{call} is refused while the handler unwinds ({reason})"]
    assert trees.window.run("SELECT FROM member") == []
    assert attempts(trees, job_id) == [(1, "suspended", None) if reason == "suspended" else (1, "released", STOPPED)]


async def test_a_handler_with_a_task_that_does_something_else_is_not_suspended_until_that_has_ended(
    trees: Trees,
) -> None:
    waits, go_on = trio.Event(), trio.Event()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> Any:
        async def other() -> None:
            await go_on.wait()

        if job.attempt == 1:
            job.nursery.start_soon(other)
        waits.set()
        return await job.wait_for_event("approved")

    job_id = trees.enqueue("order")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trees.burst)
        await waits.wait()
        await trio.sleep(0.2)  # the look comes again and again
        assert trees.job(job_id)["state"] == "running"
        go_on.set()
    assert attempts(trees, job_id) == [(1, "suspended", None)]


async def test_two_tasks_that_wait_for_different_events_go_on_with_whichever_comes(trees: Trees) -> None:
    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> list[str]:
        got: list[str] = []

        async def wait(name: str) -> None:
            got.append(await job.wait_for_event(name, key=name))

        async with trio.open_nursery() as nursery:
            for name in ("a", "b"):
                nursery.start_soon(wait, name)
        return got

    job_id = trees.enqueue("order")
    for name in ("b", "a"):
        await trees.burst()
        send(trees, job_id, name, f"got {name}")
        look(trees)
    await trees.burst()
    assert trees.job(job_id)["result"] == ["got b", "got a"]
    assert [outcome for _, outcome, _ in attempts(trees, job_id)][:2] == ["suspended", "suspended"]


async def test_a_plain_scope_with_a_deadline_keeps_a_handler_from_being_suspended(trees: Trees) -> None:
    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        with trio.move_on_after(0.3):
            await job.wait_for_event("approved")
        return "went on"

    job_id = trees.enqueue("order")
    await trees.burst()
    assert (trees.job(job_id)["result"], trees.job(job_id)["attempt"]) == ("went on", 1)


async def test_a_plain_shield_keeps_a_handler_from_being_suspended(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It received the event while it was being suspended, which its wait did not see: the job was suspended for ever, for an
    event that it had. Without an event it did not end, and its worker was replaced."""
    looked = trio.Event()
    look = Suspension._suspend_if_all_wait  # pyright: ignore[reportPrivateUsage] -- no event of the worker tells that

    def look_and_say(self: Suspension) -> None:
        look(self)
        looked.set()

    monkeypatch.setattr(Suspension, "_suspend_if_all_wait", look_and_say)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        with trio.CancelScope(shield=True):
            approval = await job.wait_for_event("approved", type=str)
        return approval

    job_id = trees.enqueue("order")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trees.burst)
        await looked.wait()
        await trio.to_thread.run_sync(send, trees, job_id, "approved", "yes")
    assert (trees.job(job_id)["result"], trees.job(job_id)["attempt"]) == ("yes", 1)


async def test_a_plain_scope_that_gets_its_deadline_later_keeps_a_handler_from_being_suspended(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    stands = trio.Event()
    wait = Suspension.wait

    async def wait_and_say(self: Suspension, *given: Any) -> None:
        stands.set()
        await wait(self, *given)

    monkeypatch.setattr(Suspension, "wait", wait_and_say)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        scope = trio.CancelScope()

        async def limit() -> None:
            await stands.wait()
            scope.deadline = trio.current_time() + 0.3

        async with trio.open_nursery() as nursery:
            nursery.start_soon(limit)
            with scope:
                await job.wait_for_event("approved")
        return "went on"

    job_id = trees.enqueue("order")
    await trees.burst()
    assert (trees.job(job_id)["result"], trees.job(job_id)["attempt"]) == ("went on", 1)


async def test_a_remembered_deadline_wakes_a_suspended_handler(trees: Trees) -> None:
    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        with job.move_on_after(3600) as patience:
            await job.wait_for_event("approved")
        return "no patience" if patience.cancelled_caught else "approved"

    job_id = trees.enqueue("order")
    await trees.burst()
    assert attempts(trees, job_id) == [(1, "suspended", None)]
    until = trees.window.value("SELECT value::text::float8 FROM history WHERE job_id = %s AND kind = 10", job_id)
    due = trees.window.value("SELECT extract(epoch FROM run_at)::float8 FROM job WHERE id = %s", job_id)
    assert due == pytest.approx(until)
    trees.time_passes(job_id)
    await trees.burst()
    assert trees.job(job_id)["result"] == "no patience"


# Sleep


async def test_a_sleep_is_remembered_from_its_first_attempt_and_takes_a_row_not_a_slot(trees: Trees) -> None:
    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        await job.sleep(timedelta(days=14))
        return "slept"

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.window.value(
        "SELECT run_at - now() BETWEEN '13 days 23 h' AND '14 days 1 min' FROM job WHERE id = %s", job_id
    )
    # A wake-up that comes too early sleeps on until the same moment.
    before = trees.window.value("SELECT run_at FROM job WHERE id = %s", job_id)
    trees.again()
    await trees.burst()
    assert trees.window.value(
        "SELECT abs(extract(epoch FROM run_at - %s)) < 0.001 FROM job WHERE id = %s", before, job_id
    )
    trees.time_passes(job_id)
    await trees.burst()
    assert trees.job(job_id)["result"] == "slept"
    assert [kind for kind, *_ in trees.lines(job_id)] == [10, 5]


async def test_sleep_until_keeps_the_first_moment_whatever_later_attempts_compute(trees: Trees) -> None:
    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        # A later attempt computes another one, which is not used.
        await job.sleep_until(datetime.now(UTC) + (timedelta(seconds=0.2) if job.attempt == 1 else timedelta(days=9)))
        return "awake"

    job_id = trees.enqueue("order")
    with trio.fail_after(20):
        while trees.job(job_id)["state"] != "completed":
            await trees.burst()
    assert trees.job(job_id)["result"] == "awake"


async def test_sleep_until_takes_no_naive_datetime(trees: Trees) -> None:
    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> None:
        await job.sleep_until(datetime(2030, 1, 1))

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["error"].startswith("UsageError: job.sleep_until takes a datetime with its time zone")


# With children


async def test_a_handler_whose_children_run_is_suspended_and_goes_on_when_the_last_has_ended(trees: Trees) -> None:
    @trees.handlers.job(queue="children")
    async def child(n: int) -> int:
        return n * n

    @trees.handlers.job(durable=True, suspend_after=0, queue="parents")
    async def parent(job: Job) -> list[int]:
        async with job.durable_nursery() as nursery:
            started = [nursery.start_soon(child, n) for n in range(3)]
        return [one.result for one in started]

    job_id = trees.enqueue("parent", queue="parents")
    await trees.burst(queues=["parents"])
    assert attempts(trees, job_id) == [(1, "suspended", None)]
    await trees.burst(queues=["children"])
    look(trees)
    await trees.burst(queues=["parents"])
    assert trees.job(job_id)["result"] == [0, 1, 4]


async def test_a_childs_failure_wakes_a_handler_that_waits_for_an_event_inside_of_the_block(trees: Trees) -> None:
    @trees.handlers.job(queue="children", max_attempts=1)
    async def child() -> None:
        raise ValueError("broken")

    @trees.handlers.job(durable=True, suspend_after=0, queue="parents")
    async def parent(job: Job) -> str:
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(child)
                await job.wait_for_event("never")
        except ExceptionGroup as group:
            return str(group.exceptions[0])
        return "no failure"

    job_id = trees.enqueue("parent", queue="parents")
    await trees.burst(queues=["parents"])
    assert attempts(trees, job_id) == [(1, "suspended", None)]
    await trees.burst(queues=["children"])
    look(trees)
    await trees.burst(queues=["parents"])
    assert "ValueError: broken" in trees.job(job_id)["result"]


@pytest.mark.parametrize("noticed_by", ["the watchdog", "the next worker"])
async def test_a_deadline_that_passes_during_a_suspension_gives_the_handler_its_clean_up(
    trees: Trees, noticed_by: str
) -> None:
    calls: list[str] = []

    async def charge() -> None:
        calls.append("charge")

    async def refund() -> None:
        calls.append("refund")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        await job.step(charge)
        try:
            await job.wait_for_event("approved")
        except BaseException:
            calls.append(str(job.cancel_reason))
            if job.cancel_reason == "deadline":
                with job.cleanup():
                    await job.step(refund)  # noqa: ASYNC102 -- shielded, with a deadline
            raise

    job_id = trees.enqueue("order", deadline=3600.0)
    await trees.burst()
    assert trees.job(job_id)["state"] == "suspended"
    trees.window.run("""UPDATE job SET options = (options::jsonb || '{"deadline": 5}')::text::json""")
    if noticed_by == "the watchdog":
        trees.window.run("UPDATE member_deadline SET deadline = '2020-01-01Z'")
        assert trees.window.value("SELECT end_overdue()") == 1
        assert trees.job(job_id)["state"] == "available"
    else:
        trees.window.run("DELETE FROM member_deadline")
        trees.again()
    await trees.burst()
    assert calls == ["charge", "suspended", "deadline", "refund"]
    ended = trees.job(job_id)
    assert (ended["state"], ended["cancel_reason"]) == ("cancelled", "deadline")


async def test_a_later_attempt_without_a_history_does_not_begin_after_its_deadline(trees: Trees) -> None:
    calls: list[int] = []

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        calls.append(job.attempt)
        if job.attempt == 1:
            raise ValueError("the first attempt")

    job_id = trees.enqueue("order", deadline=3600.0)
    await trees.burst()
    trees.window.run("""UPDATE job SET options = (options::jsonb || '{"deadline": 5, "tree": 1}')::text::json""")
    trees.again()
    await trees.burst()
    assert calls == [1]
    assert trees.job(job_id)["cancel_reason"] == "deadline"


async def test_an_answer_that_takes_longer_than_a_lease_which_is_renewed_loses_no_event_and_changes_no_order(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection on which events are received is slow, that of the heartbeats is not."""

    @trees.handlers.job(durable=True, suspend_after=3600)
    async def listen(job: Job) -> list[str]:
        return [await job.wait_for_event("said", type=str) for _ in range(2)]

    job_id = trees.enqueue("listen")
    client = SyncClient(trees.dsn)
    for word in ("first", "second"):
        client.send_event(job_id, "said", word)
    worker = trees.worker(log=False, lease=1, heartbeat=0.2)
    receive, late = Waits.receive, list[float]()

    async def receive_late(waits: Waits, wanted: Any) -> Any:
        found = await receive(waits, wanted)
        if not late:
            (job,) = parts(worker).jobs.held
            late.append(job.lease_deadline)
            await trio.sleep_until(job.lease_deadline + 0.1)
            assert job.lease_deadline > trio.current_time()
        return found

    monkeypatch.setattr(Waits, "receive", receive_late)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery, open_client(trees.dsn) as asking:
            nursery.start_soon(worker.run)
            await asking.wait(job_id)
            worker.stop()
    assert trees.job(job_id)["result"] == ["first", "second"]
    assert late
    assert trees.lines(job_id) == [(3, "1:event", "said"), (3, "2:event", "said")]


@pytest.mark.parametrize("why", ["the fence is lost", "its row is locked"])
async def test_a_wait_for_an_event_that_cannot_be_received_now_ends_with_its_job(why: str, trees: Trees) -> None:
    """It asked again until its lease would have been over, and its worker stopped, because a handler did not end."""
    here, go_on, ended = trio.Event(), trio.Event(), trio.Event()

    @trees.handlers.job(durable=True)
    async def listen(job: Job) -> None:
        here.set()
        await go_on.wait()
        try:
            await job.wait_for_event("said")
        finally:
            ended.set()

    job_id = trees.enqueue("listen")
    worker = trees.worker(log=False, lease=600, heartbeat=0.5)
    with trio.fail_after(60), Window(trees.dsn) as holder:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            await here.wait()
            send(trees, job_id, "said")
            if why == "the fence is lost":
                trees.window.run("UPDATE job SET attempt = attempt + 1 WHERE id = %s", job_id)
                go_on.set()
                await ended.wait()
                worker.stop_now()
                return
            with holder.connection.transaction():
                holder.run("SELECT FROM job WHERE id = %s FOR UPDATE", job_id)
                go_on.set()
                (job,) = parts(worker).jobs.held
                while not parts(worker).services.receiver._questions:
                    await trio.lowlevel.checkpoint()
                worker.stop_now()
                await ended.wait()
                assert job.cancel_reason == "shutdown"
    assert trees.job(job_id)["state"] == "available"


class _LooksBeforeItsTurn(trio.abc.Instrument):
    """The task looks whether all others wait, and has not had its turn since it was cancelled."""

    def __init__(self, task: trio.lowlevel.Task, look: Any) -> None:
        self._task, self._look = task, look

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            trio.lowlevel.remove_instrument(self)
            self._look()


async def test_a_handler_that_has_just_cancelled_a_task_is_not_suspended_for_what_that_task_waited_for(
    trees: Trees,
) -> None:
    ways: list[str] = []
    watching = trio.Event()

    @trees.handlers.job(durable=True, suspend_after=3600)
    async def order(job: Job) -> str:
        async def watch() -> None:
            watching.set()
            await job.sleep(3600, key="watch")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await watching.wait()
            await job.wait_for_event("paid")
            runtime = running_of(job)
            (task,) = nursery.child_tasks
            look = runtime.durability.suspension._suspend_if_all_wait
            trio.lowlevel.add_instrument(_LooksBeforeItsTurn(task, look))
            nursery.cancel_scope.cancel()
            ways.append("cancelled")
        return "ok"

    job_id = trees.enqueue("order")
    send(trees, job_id, "paid")
    with trio.fail_after(30):
        await trees.burst()
    assert (trees.job(job_id)["state"], ways) == ("completed", ["cancelled"])


EXPIRED = (
    "UPDATE job SET options ="
    " (options::jsonb || jsonb_build_object('expires', extract(epoch FROM now()) - 1))::text::json"
)


async def test_a_job_that_has_begun_does_not_expire_while_it_is_suspended(trees: Trees) -> None:
    calls: list[str] = []

    async def charge() -> None:
        calls.append("charge")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        await job.step(charge)
        return await job.wait_for_event("approved", type=str)

    started = trees.enqueue("order", expires=3600)
    late = trees.enqueue("order", expires=3600, delay=3000)
    await trees.burst()
    trees.window.run(EXPIRED)
    trees.again()
    SyncClient(trees.dsn).send_event(started, "approved", "Ada")
    await trees.burst()
    assert (trees.job(started)["state"], trees.job(started)["result"]) == ("completed", "Ada")
    assert (trees.job(late)["state"], trees.job(late)["cancel_reason"]) == ("cancelled", "expired")
    assert calls == ["charge"]


@pytest.mark.parametrize("transaction", [False, True])
async def test_a_job_that_has_begun_does_not_expire_when_its_worker_is_lost_in_its_first_step(
    trees: Trees, transaction: bool
) -> None:
    async def within(_: object, job: Job) -> str:
        return await lost_at_first(job)

    async def lost_at_first(job: Job) -> str:
        if job.attempt == 1:
            trees.window.run(EXPIRED)
            await trees.lose(job.id)
            await trio.sleep_forever()
        return "Ada"

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        return await (job.transaction_step(within, job) if transaction else job.step(lost_at_first, job))

    job_id = trees.enqueue("order", expires=3600)
    await trees.burst(log=False, lease=3, heartbeat=0.1)
    found = await trees.ended(job_id)
    assert (found["state"], found["result"], found["cancel_reason"]) == ("completed", "Ada", None), found["error"]


async def test_a_job_that_waits_for_an_event_does_not_expire_when_its_worker_is_stopped(trees: Trees) -> None:
    """It has no line, and is not suspended yet. Its event was lost with it."""
    seen: list[Durable] = []

    @trees.handlers.job(durable=True, suspend_after=60)
    async def order(job: Job) -> str:
        durable = running_of(job).durability
        assert isinstance(durable, Durable)
        seen.append(durable)
        return await job.wait_for_event("approved", type=str)

    job_id = trees.enqueue("order", expires=3600)
    async with trio.open_nursery() as nursery:
        worker = trees.worker(grace=0.05)
        await nursery.start(worker.run)
        while not (seen and seen[0].standing):
            await trio.lowlevel.checkpoint()
        worker.stop()
    trees.window.run(EXPIRED)
    SyncClient(trees.dsn).send_event(job_id, "approved", "Ada")
    trees.again()
    found = await trees.ended(job_id)
    assert (found["state"], found["result"], found["cancel_reason"]) == ("completed", "Ada", None), found["error"]


@pytest.mark.parametrize("key", [None, "approval"])
@pytest.mark.parametrize("in_time", [True, False])
async def test_an_event_that_is_sent_after_the_timeout_is_too_late_whenever_the_job_goes_on(
    trees: Trees, in_time: bool, key: str | None
) -> None:
    """No worker ran meanwhile. The fourth day's approval was taken for one within three days."""

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        try:
            first = await job.wait_for_event("approved", timeout=300, key=key)
        except TimeoutError:
            first = "late"
        return f"{first}, {await job.wait_for_event('approved')}"

    job_id = trees.enqueue("order")
    client = SyncClient(trees.dsn)
    await trees.burst(log=False)
    if in_time:
        client.send_event(job_id, "approved", "1")
    trees.time_passes(job_id)
    client.send_event(job_id, "approved", "2")
    client.send_event(job_id, "approved", "3")
    await trees.burst(log=False)
    assert trees.job(job_id)["result"] == ("1, 2" if in_time else "late, 2")


async def test_a_lost_attempt_in_a_shield_receives_nothing_and_ends(trees: Trees) -> None:
    """Its question and that of the next attempt, of the same worker, were for the same line: it got the other's answer, and its
    handler went on with the event. Or it waited for ever."""
    stands, got = trio.Event(), list[tuple[int, str]]()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        with trio.CancelScope(shield=True):
            if job.attempt == 1:
                stands.set()
            try:
                got.append((job.attempt, await job.wait_for_event("paid", type=str)))
            except RuntimeError as error:
                got.append((job.attempt, str(error)))

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trees.burst)
            await stands.wait()
            await trees.lose(job_id)
            while not got or trees.job(job_id)["attempt"] < 2:
                await trio.lowlevel.checkpoint()
            await trio.to_thread.run_sync(send, trees, job_id, "paid", "yes")
    assert got == [(1, f"job {job_id} lost its lease: it receives no event"), (2, "yes")]


async def test_two_attempts_of_a_job_are_not_asked_for_together() -> None:
    """The one that has lost its lease would get the other's answer."""
    asked: list[list[int]] = []

    class Store:
        async def receive(self, wanted: Sequence[Wanted]) -> dict[tuple[int, int], Received]:
            asked.append([one.claim.attempt for one in wanted])
            return {(one.claim.id, one.line): Received("1") for one in wanted if one.claim.attempt == 2}

    answers: list[tuple[int, Received | None]] = []
    receiver = Receiver(Store(), Observer(()))

    async def ask(attempt: int) -> None:
        running: Any = Proven()
        claim = Claim(7, attempt, 3, 0, 0, "", "mail", "work", "{}", None, 1)
        answers.append((attempt, await receiver.receive(Wanted(claim, 1, "1:event", "paid"), running)))

    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as both:
            both.start_soon(ask, 1)
            both.start_soon(ask, 2)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(receiver.run)
        nursery.cancel_scope.cancel()
    assert sorted(map(len, asked)) == [1, 1]
    assert dict(answers) == {1: None, 2: Received("1")}


class Proven:
    """A job whose lease is proven for long."""

    lease_deadline = math.inf
