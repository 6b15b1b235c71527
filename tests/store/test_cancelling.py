"""Cancelling in the database: what waits at once, what runs by request, and the ledger of both."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio
from psycopg.sql import SQL, Identifier

from pulse_trio import InvalidArguments, SyncClient, UnknownJob, UsageError, open_client
from pulse_trio.grants import grant_sync
from pulse_trio.jobs import CancelRequest
from pulse_trio.sql import statement
from pulse_trio.states import State
from pulse_trio.store import ClaimCursor, cancelling
from support.stores import ENDS_WAITED_FOR, LOCK_WAITED_FOR, Window, claim, claim_one, end

if TYPE_CHECKING:
    from collections.abc import Callable

    from pulse_trio.jobs import Claim, OutcomeKind
    from pulse_trio.store import WorkerStore
    from pulse_trio.store.cancelling import CancellationRecord, CancelResult


def cancel(window: Window, job_id: int, reason: str | None = None) -> CancelResult:
    return window.do(cancelling.cancel(job_id, reason=reason, by="a test"))


def ledger(window: Window, job_id: int) -> CancellationRecord:
    """The one request about a job."""
    (row,) = window.do(cancelling.cancellations(job_id))
    return row


def notified(window: Window) -> list[str]:
    """The payloads that came since the last look; the window listens from its first look on."""
    # Others notified. Their signal is there before their commits are answered, and a statement makes the server heed it.
    window.run("SELECT 1")
    return [notify.payload for notify in window.connection.notifies(timeout=0)]


async def until(met: Callable[[], object]) -> None:
    """Waits for something in the database, which tells nobody, so it is asked."""
    with trio.fail_after(20):
        while not met():  # noqa: ASYNC110
            await trio.sleep(0.01)


# What waits


@pytest.mark.parametrize("delay", [None, 3600.0], ids=["available", "scheduled"])
async def test_a_waiting_job_is_cancelled_at_once_and_never_claimed(
    delay: float | None, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue, delay=delay, unique_key="k", args={"a": 1})
    result = cancel(window, job_id, "not needed")
    assert result.state is State.CANCELLED
    job = window.job(job_id)
    assert (job["state"], job["cancel_reason"], job["attempt"], job["error"]) == ("cancelled", "not needed", 0, None)
    assert (job["args"], job["unique_key"], job["started_at"], job["worker"]) == ({"a": 1}, "k", None, None)
    assert window.row(job_id) is None
    assert await claim(store, queue) == []
    row = ledger(window, job_id)
    assert (row.id, row.attempt, row.reason, row.delivered_at) == (result.cancellation, None, "not needed", None)
    assert (row.ended_as, row.ended_at is not None) == (State.CANCELLED, True)
    # Its unique key is free again.
    assert window.enqueue(queue, unique_key="k") != job_id


async def test_a_job_that_waits_for_its_retry_is_cancelled_with_its_attempts_kept(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    await store.settle([end(await claim_one(store, queue), "failed", delay=600.0, error="first")])
    assert cancel(window, job_id).state is State.CANCELLED
    job = window.job(job_id)
    assert (job["state"], job["cancel_reason"], job["attempt"]) == ("cancelled", "user", 1)
    assert [a["outcome"] for a in window.attempts(job_id)] == ["failed"]


async def test_the_ledger_says_who_asked(window: Window, queue: str, room_dsn: str) -> None:
    job_id = window.enqueue(queue)
    cancel(window, job_id)
    user = window.value("SELECT session_user")
    assert ledger(window, job_id).requested_by == f"{user} a test"
    by_sql = window.enqueue(queue)
    with psycopg.connect(room_dsn, application_name="a script", autocommit=True) as connection:
        connection.execute("SELECT pulse.cancel(%s)", [by_sql])
    assert ledger(window, by_sql).requested_by.startswith(f"{user} a script")


# What runs


async def test_a_running_job_is_marked_and_its_worker_notified(store: WorkerStore, window: Window, queue: str) -> None:
    window.run("LISTEN pulse")
    notified(window)
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    notified(window)
    result = cancel(window, job_id, "a reason of words")
    assert result.state is State.RUNNING
    row = window.row(job_id)
    assert row is not None
    assert (row["state"], row["cancelling"]) == (2, True)
    # The job, and nothing that only its parties know: every role that may connect can listen.
    assert notified(window) == [f"look_for_cancel {job_id}"]
    entry = ledger(window, job_id)
    assert (entry.attempt, entry.reason, entry.ended_at, entry.ended_as) == (1, "a reason of words", None, None)


async def test_a_second_request_joins_the_first_and_says_it_again(
    store: WorkerStore, window: Window, queue: str
) -> None:
    window.run("LISTEN pulse")
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    notified(window)
    first = cancel(window, job_id, "first")
    assert cancel(window, job_id, "second") == first
    assert ledger(window, job_id).reason == "first"
    assert notified(window) == [f"look_for_cancel {job_id}"] * 2


ENDS: list[OutcomeKind] = ["failed", "timeout", "discarded", "cancelled", "snoozed", "released", "rescued"]


@pytest.mark.parametrize("max_attempts", [1, 5])
@pytest.mark.parametrize("kind", ENDS)
async def test_whatever_an_attempt_comes_to_a_job_being_cancelled_ends_as_cancelled(
    kind: OutcomeKind, max_attempts: int, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue, max_attempts=max_attempts)
    claimed = await claim_one(store, queue)
    cancel(window, job_id, "no longer wanted")
    error = None if kind in ("snoozed", "released", "cancelled") else "an error"
    assert (await store.settle([end(claimed, kind, delay=60.0, error=error)])).accepted
    job = window.job(job_id)
    assert (job["state"], job["cancel_reason"], job["error"]) == ("cancelled", "no longer wanted", None)
    (attempt,) = window.attempts(job_id)
    assert (attempt["outcome"], attempt["error"]) == (kind, error)
    row = ledger(window, job_id)
    assert row.ended_as is State.CANCELLED
    assert row.ended_at is not None
    assert abs(row.ended_at - job["finished_at"]) < timedelta(seconds=1)
    # Only an attempt that ended as cancelled had been reached by the request.
    assert (row.delivered_at is not None) == (kind == "cancelled")


async def test_the_reason_in_the_report_is_the_reason_kept(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    claimed = await claim_one(store, queue)
    cancel(window, job_id)
    await store.settle([end(claimed, "cancelled", error="deadline")])
    assert window.job(job_id)["cancel_reason"] == "deadline"


async def test_a_vanished_workers_job_that_was_being_cancelled_is_not_run_again(
    store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    cancel(window, job_id)
    window.expire(job_id)
    await other.rescue()
    assert (window.state(job_id), ledger(window, job_id).ended_as) == ("cancelled", State.CANCELLED)
    assert [a["outcome"] for a in window.attempts(job_id)] == ["rescued"]


async def test_a_request_that_commits_while_a_report_is_under_way_is_still_obeyed(
    store: WorkerStore, window: Window, queue: str, room_dsn: str
) -> None:
    # The report has its snapshot, and finds the row changed when it locks it: EvalPlanQual must decide from the new one.
    job_id = window.enqueue(queue)
    claimed = await claim_one(store, queue)
    window.run(
        "CREATE OR REPLACE FUNCTION public.gate(text) RETURNS bigint[] LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_lock_shared(77); RETURN $1::bigint[]; END $$"
    )
    report = statement("fail", "pulse").replace(b"%(ids)s::bigint[]", b"public.gate(%(ids)s)")
    parameters = {
        "ids": f"{{{job_id}}}", "attempts": "{1}", "sessions": f"{{{claimed.session}}}", "outcomes": "{failed}",
        "delays": "{60}", "errors": "{boom}", "patience": "1 day",
    }  # fmt: skip
    window.run("SELECT pg_advisory_lock(77)")

    def send() -> None:
        with psycopg.connect(room_dsn, autocommit=True) as connection:
            connection.execute(report, parameters)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, send)
        await until(lambda: window.value(LOCK_WAITED_FOR))
        cancel(window, job_id, "in between")
        window.run("SELECT pg_advisory_unlock(77)")
    assert window.state(job_id) == "cancelled"
    # Its ledger row is newer than the report's snapshot: the next tick closes it.
    assert ledger(window, job_id).ended_at is None
    await store.close_cancellations()
    assert ledger(window, job_id).ended_as is State.CANCELLED


async def test_a_report_leaves_a_row_whose_cancellation_is_not_committed_for_later(
    store: WorkerStore, window: Window, queue: str, room_dsn: str
) -> None:
    job_id = window.enqueue(queue)
    failed = end(await claim_one(store, queue), "failed", delay=60.0)
    with psycopg.connect(room_dsn) as connection:
        connection.execute("SELECT pulse.cancel(%s, 'now')", [job_id])
        assert (await store.settle([failed])).again == [failed]
    assert (await store.settle([failed])).accepted == [failed]
    assert (window.state(job_id), window.job(job_id)["cancel_reason"]) == ("cancelled", "now")


async def test_a_request_that_meets_a_claim_finds_a_running_job(
    store: WorkerStore, window: Window, queue: str, room_dsn: str
) -> None:
    job_id = window.enqueue(queue)
    results: list[CancelResult] = []

    def ask() -> None:
        results.append(SyncClient(room_dsn).cancel(job_id))

    with psycopg.connect(room_dsn) as connection:
        connection.execute(
            "UPDATE pulse.job SET state = 2, attempt = 1, locked_by = 7, lease_until = now() + interval '1 h' WHERE id = %s",
            [job_id],
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, ask)
            await until(lambda: window.value(LOCK_WAITED_FOR))
            connection.commit()
    assert [r.state for r in results] == [State.RUNNING]
    assert (window.state(job_id), ledger(window, job_id).attempt) == ("running", 1)


async def test_a_claim_passes_a_job_that_is_just_being_cancelled(
    store: WorkerStore, window: Window, queue: str, room_dsn: str
) -> None:
    first, second = window.enqueue_many(2, queue)
    with psycopg.connect(room_dsn) as connection:
        connection.execute("SELECT pulse.cancel(%s)", [first])
        assert [c.id for c in await claim(store, queue)] == [second]
        connection.rollback()
    assert [c.id for c in await claim(store, queue)] == [first]


async def test_a_request_that_is_rolled_back_changes_nothing(
    store: WorkerStore, window: Window, queue: str, room_dsn: str
) -> None:
    waiting = window.enqueue(queue, delay=60.0)
    running = window.enqueue(queue)
    await claim_one(store, queue)
    with psycopg.connect(room_dsn) as connection:
        SyncClient(connection).cancel_many([waiting, running])
        connection.rollback()
    assert [window.state(i) for i in (waiting, running)] == ["scheduled", "running"]
    assert window.do(cancelling.cancellations(running)) == []


# Beats, completions and the ledger's end


async def test_a_beat_brings_the_request_along_with_its_reason(store: WorkerStore, window: Window, queue: str) -> None:
    ids = window.enqueue_many(3, queue)
    claims = await claim(store, queue)
    cancel(window, ids[0], "why")
    cancel(window, ids[1])
    beat = await store.beat(claims)
    assert beat.renewed == set(claims)
    assert beat.cancelling == {claims[0]: CancelRequest(message="why"), claims[1]: CancelRequest()}


async def test_delivery_is_written_once(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    claimed = await claim_one(store, queue)
    await store.record_delivered([claimed])
    cancel(window, job_id)
    await store.record_delivered([claimed])
    first = ledger(window, job_id).delivered_at
    assert first is not None
    await store.record_delivered([claimed])
    assert ledger(window, job_id).delivered_at == first


async def test_a_handler_that_completes_all_the_same_has_completed_and_the_ledger_says_so_at_once(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id, plain = window.enqueue_many(2, queue)
    reached, ordinary = await claim(store, queue)
    cancel(window, job_id)
    outcomes = [end(reached, result="7", cancelling=True), end(ordinary)]
    assert set((await store.settle(outcomes)).accepted) == set(outcomes)
    assert [window.state(i) for i in (job_id, plain)] == ["completed", "completed"]
    assert (window.job(job_id)["result"], ledger(window, job_id).ended_as) == (7, State.COMPLETED)


async def test_a_completion_that_crossed_with_the_request_is_closed_by_the_next_tick(
    store: WorkerStore, window: Window, queue: str
) -> None:
    ids = window.enqueue_many(2, queue)
    first, second = await claim(store, queue)
    for job_id in ids:
        cancel(window, job_id)
    await store.complete_and_claim(0, [ClaimCursor(queue, 0)], [end(first)])
    assert ledger(window, ids[0]).ended_at is None
    await store.close_cancellations()
    row = ledger(window, ids[0])
    assert (row.ended_as, row.ended_at) == (State.COMPLETED, window.job(ids[0])["finished_at"])
    # The other still runs.
    assert ledger(window, ids[1]).ended_at is None
    await store.settle([end(second, "released")])
    assert ledger(window, ids[1]).ended_as is State.CANCELLED


async def test_a_job_retried_after_its_cancellation_begins_without_it(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    claimed = await claim_one(store, queue)
    cancel(window, job_id)
    await store.settle([end(claimed, "cancelled")])
    SyncClient(window.dsn).retry(job_id)
    again = await claim_one(store, queue)
    assert (await store.beat([again])).cancelling == {}
    await store.settle([end(again, "failed", delay=60.0)])
    assert window.state(job_id) == "retryable"


async def test_the_ledger_is_pruned_with_the_jobs(store: WorkerStore, window: Window, queue: str) -> None:
    old, new = window.enqueue(queue), window.enqueue(queue)
    for job_id in (old, new):
        cancel(window, job_id)
    window.run("UPDATE cancellation SET ended_at = now() - interval '2 h' WHERE job_id = %s", old)
    window.run("UPDATE maintenance SET maintained_at = '-infinity'")
    await store.maintain(3600.0)
    assert window.do(cancelling.cancellations(old)) == []
    assert ledger(window, new).ended_as is State.CANCELLED


# Asking


@pytest.mark.parametrize("kind", ["completed", "discarded", "cancelled"])
async def test_a_finished_job_is_left_as_it_is(
    kind: OutcomeKind, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    await store.settle([end(await claim_one(store, queue), kind)])
    before = window.job(job_id)
    result = cancel(window, job_id)
    assert (result.state, result.cancellation) == (before["state"], None)
    assert window.job(job_id) == before
    assert window.do(cancelling.cancellations(job_id)) == []


async def test_an_unknown_job_says_so(window: Window) -> None:
    with pytest.raises(UnknownJob, match="There is no job 123456789"):
        cancel(window, 123456789)
    assert window.value("SELECT cancel(123456789)") is None


@pytest.mark.parametrize(
    ("reason", "why"),
    [("x" * 1001, "1001 characters; the limit is 1000"), ("a\0b", "NUL"), ("\ud800", "surrogate"), (7, "text")],
)
async def test_a_reason_that_cannot_be_kept_is_refused_before_anything_is_written(
    reason: Any, why: str, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    with pytest.raises(InvalidArguments, match=why):
        cancel(window, job_id, reason)
    assert window.state(job_id) == "available"


async def test_the_longest_reason_fits_into_a_notification(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    claimed = await claim_one(store, queue)
    reason = "\U0001f600" * 1000
    cancel(window, job_id, reason)
    assert (await store.beat([claimed])).cancelling == {claimed: CancelRequest(message=reason)}


@pytest.mark.parametrize("job_id", [0, -1, 2**63, True, "7"])
async def test_what_is_no_id_is_refused(job_id: Any, window: Window) -> None:
    with pytest.raises(InvalidArguments, match="whole number above 0"):
        cancel(window, job_id)


async def test_many_are_cancelled_at_once_in_the_order_of_their_ids(
    store: WorkerStore, window: Window, queue: str
) -> None:
    ids = window.enqueue_many(4, queue)
    running = {c.id for c in await claim(store, queue, 2)}
    results = window.do(cancelling.cancel_many([*reversed(ids), ids[0], 987654321], reason="all of them"))
    assert [(r.job_id, r.state) for r in results] == [(i, "running" if i in running else "cancelled") for i in ids]
    assert window.do(cancelling.cancel_many([])) == []


async def test_cancels_in_opposite_orders_beside_settlements_do_not_deadlock(
    store: WorkerStore, window: Window, queue: str, room_dsn: str
) -> None:
    for _ in range(5):
        ids = window.enqueue_many(200, queue)
        claims = await claim(store, queue, 200)

        async def ask(order: list[int]) -> None:
            async with open_client(room_dsn) as client:
                await client.cancel_many(order)

        async def settle(claims: list[Claim] = claims) -> None:
            outcomes = [end(c) if c.id % 2 else end(c, "failed", delay=60.0) for c in claims]
            while outcomes:
                outcomes = (await store.settle(outcomes)).again

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, ids)
            nursery.start_soon(ask, ids[::-1])
            nursery.start_soon(settle)
        ends = {window.state(i) for i in ids}
        assert ends <= {"completed", "cancelled", "retryable"}


async def test_waiting_ends_when_the_handler_has(store: WorkerStore, window: Window, queue: str, room_dsn: str) -> None:
    ids = window.enqueue_many(3, queue)
    running, crossed = await claim(store, queue, 2)
    got: list[CancelResult] = []

    async def ask() -> None:
        async with open_client(room_dsn) as client:
            got.append(await client.cancel(running.id, reason="stop", wait=True))
            got.extend(await client.cancel_many(ids, wait=True))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await until(lambda: window.do(cancelling.cancellations(running.id)))
        assert got == []
        await store.settle([end(running, "cancelled")])
        await until(lambda: window.do(cancelling.cancellations(crossed.id)))
        # Not told that it was being cancelled: nobody closes its ledger row yet, and the wait must not mind.
        await store.complete_and_claim(0, [], [end(crossed)])
    assert [r.state for r in got] == ["cancelled", "cancelled", "completed", "cancelled"]


async def test_waiting_in_a_transaction_of_ones_own_is_refused(window: Window, queue: str, room_dsn: str) -> None:
    job_id = window.enqueue(queue)
    with psycopg.connect(room_dsn) as connection, pytest.raises(UsageError, match="before you commit"):
        SyncClient(connection).cancel(job_id, wait=True)
    assert window.state(job_id) == "available"
    assert SyncClient(room_dsn).cancel(job_id, wait=True).state is State.CANCELLED


async def test_who_waits_for_a_waiting_jobs_end_is_told(room_dsn: str) -> None:
    async with open_client(room_dsn) as client:
        ref = await client.enqueue("noop", {}, delay=600)

        async def cancel_when_waited_for() -> None:
            with psycopg.connect(room_dsn, autocommit=True) as connection:
                await until(lambda: connection.execute(ENDS_WAITED_FOR).fetchone() == (2,))
                ((channel,),) = connection.execute("SELECT 'end_' || md5('pulse')").fetchall()
                connection.execute(SQL("LISTEN {}").format(Identifier(channel)))
                connection.execute("SELECT pulse.cancel(%s)", [ref.id])
                assert [n.payload for n in connection.notifies(timeout=5, stop_after=1)] == [str(ref.id)]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_when_waited_for)
            assert (await ref.wait(10)).state is State.CANCELLED


async def test_a_reference_cancels_its_job(room_dsn: str) -> None:
    async with open_client(room_dsn) as client:
        ref = await client.enqueue("noop", {}, delay=600)
        assert (await ref.cancel(reason="changed my mind")).state is State.CANCELLED
        (row,) = await client.cancellations(ref.id)
        assert row.reason == "changed my mind"


async def test_the_databases_clock_is_known_from_the_session_on_and_kept_up_to_date(
    store: WorkerStore, window: Window
) -> None:
    def difference() -> float:
        """What the store takes for the database's time, beyond what it is: a round trip at most, never less."""
        now = trio.current_time()
        return now + store.epoch_offset - window.value("SELECT extract(epoch FROM clock_timestamp())::float8")

    # Both clocks are read anew here, the database's later.
    assert -0.5 < difference() < 0.5
    store.sessions.epoch_offset = 0.0
    await store.touch(0, set(), draining=False)
    assert -0.5 < difference() < 0.5


async def test_who_may_only_enqueue_may_not_cancel_until_it_is_granted(alone: Window) -> None:
    job_id = alone.enqueue("q")
    alone.run("CREATE ROLE pulse_trio_no_cancelling")
    grant_sync(alone.dsn, {"producer": "pulse_trio_no_cancelling"})
    try:
        with psycopg.connect(alone.dsn, autocommit=True) as connection:
            connection.execute("SET ROLE pulse_trio_no_cancelling")
            client = SyncClient(connection)
            connection.execute("SELECT pulse.enqueue('noop')")
            with pytest.raises(UsageError, match="permission denied for function cancel_jobs"):
                client.cancel(job_id)
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute("SELECT pulse.cancel(%s)", [job_id])
            alone.run("GRANT EXECUTE ON FUNCTION cancel_jobs, cancel TO pulse_trio_no_cancelling")
            assert client.cancel(job_id).state is State.CANCELLED
            assert connection.execute("SELECT pulse.cancel(%s)", [job_id]).fetchone() == ("cancelled",)
    finally:
        alone.run("DROP OWNED BY pulse_trio_no_cancelling")
        alone.run("DROP ROLE pulse_trio_no_cancelling")
