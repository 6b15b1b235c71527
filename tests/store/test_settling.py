"""What each outcome leaves behind: on the live row, in the archive, among the attempts."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio.jobs import Claim, RetryAfter, Snooze
from pulse_trio.states import FINISHED, outcome_of_error, storable
from pulse_trio.store import ClaimCursor, operations, rows
from support.stores import Window, claim, claim_one, end, forged, open_store

if TYPE_CHECKING:
    from pulse_trio.jobs import OutcomeKind
    from pulse_trio.store import WorkerStore

INT_MAX = 2**31 - 1


async def settled(store: WorkerStore, window: Window, queue: str, kind: OutcomeKind, **how: Any) -> dict[str, Any]:
    """A job that was claimed once and ended like this, as pulse.jobs shows it."""
    options = how.pop("options", {})
    job_id = window.enqueue(queue, **options)
    outcome = end(await claim_one(store, queue, priority=options.get("priority", 0)), kind, **how)
    accepted, refused, again = await store.settle([outcome])
    assert (accepted, refused, again) == ([outcome], [], [])
    return window.job(job_id)


async def test_a_completion_is_archived_with_everything_it_had(store: WorkerStore, window: Window, queue: str) -> None:
    options = {"args": {"a": 1}, "priority": 3, "max_attempts": 5, "unique_key": "k", "timeout": 9.0}
    job = await settled(store, window, queue, "completed", result='{"n": [1, 2]}', options=options)
    assert job["state"] == "completed"
    assert {name: job[name] for name in ("queue", "kind", "priority", "attempt", "max_attempts", "unique_key")} == {
        "queue": queue, "kind": "noop", "priority": 3, "attempt": 1, "max_attempts": 5, "unique_key": "k"
    }  # fmt: skip
    assert (job["args"], job["result"]) == ({"a": 1}, {"n": [1, 2]})
    assert (job["error"], job["cancel_reason"], job["lease_until"]) == (None, None, None)
    assert job["worker"] == store.session
    assert job["run_at"] <= job["created_at"] <= job["started_at"] <= job["finished_at"]
    (archived,) = window.run("SELECT options, failures FROM job_archive WHERE id = %s", job["id"])
    assert archived == {"options": {"timeout": 9.0}, "failures": 0}
    assert window.row(job["id"]) is None
    (attempt,) = window.attempts(job["id"])
    assert attempt == {
        "job_id": job["id"],
        "attempt": 1,
        "worker": store.session,
        "started_at": job["started_at"],
        "ended_at": job["finished_at"],
        "outcome": "completed",
        "error": None,
    }


async def test_no_result_is_json_null(store: WorkerStore, window: Window, queue: str) -> None:
    job = await settled(store, window, queue, "completed")
    assert window.value("SELECT result::text FROM job_archive WHERE id = %s", job["id"]) == "null"


@pytest.mark.parametrize(
    ("kind", "state", "failures", "budget"),
    [
        ("failed", "retryable", 1, 20),
        ("timeout", "retryable", 1, 20),
        ("snoozed", "scheduled", 0, 21),
        ("released", "scheduled", 0, 21),
        ("rescued", "retryable", 0, 20),
    ],
)
async def test_an_attempt_that_goes_back_keeps_its_number_and_waits_its_delay(
    kind: OutcomeKind, state: str, failures: int, budget: int, store: WorkerStore, window: Window, queue: str
) -> None:
    before = window.value("SELECT clock_timestamp()")
    job = await settled(store, window, queue, kind, delay=90.5, error="why")
    after = window.value("SELECT clock_timestamp()")

    assert job["state"] == state
    assert before <= job["run_at"] - timedelta(seconds=90.5) <= after
    assert (job["attempt"], job["max_attempts"]) == (1, budget)
    assert (job["worker"], job["lease_until"], job["finished_at"]) == (None, None, None)
    # Why an attempt that did not fail had ended is no error of the job.
    assert job["error"] == (None if kind in ("snoozed", "released") else "why")
    row = window.row(job["id"])
    assert row is not None
    assert row["failures"] == failures
    (attempt,) = window.attempts(job["id"])
    assert (attempt["attempt"], attempt["outcome"], attempt["error"]) == (1, kind, "why")
    assert (attempt["worker"], attempt["started_at"]) == (store.session, job["started_at"])


@pytest.mark.parametrize(
    ("kind", "state", "max_attempts", "failures"),
    [
        ("failed", "dead", 1, 1),
        ("timeout", "dead", 1, 1),
        ("rescued", "dead", 1, 0),
        ("discarded", "dead", 20, 1),
        ("cancelled", "cancelled", 20, 0),
    ],
)
async def test_an_attempt_that_is_the_last_is_archived_with_its_reason(
    kind: OutcomeKind, state: str, max_attempts: int, failures: int, store: WorkerStore, window: Window, queue: str
) -> None:
    options = {"max_attempts": max_attempts}
    job = await settled(store, window, queue, kind, delay=60.0, error="why", options=options)
    assert job["state"] == state
    assert job["state"] in FINISHED
    assert (job["attempt"], job["max_attempts"], job["worker"]) == (1, max_attempts, store.session)
    assert (job["error"], job["cancel_reason"]) == (("why", None) if state == "dead" else (None, "why"))
    assert job["result"] is None
    assert window.value("SELECT failures FROM job_archive WHERE id = %s", job["id"]) == failures
    (attempt,) = window.attempts(job["id"])
    assert (attempt["attempt"], attempt["outcome"], attempt["error"]) == (1, kind, "why")
    assert attempt["ended_at"] is not None


async def test_attempts_show_a_jobs_whole_life(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    for kind in ("failed", "snoozed", "timeout"):
        await store.settle([end(await claim_one(store, queue), kind, error=None if kind == "snoozed" else kind)])
    claimed = await claim_one(store, queue)
    rows = window.attempts(job_id)
    assert [(r["attempt"], r["outcome"]) for r in rows] == [
        (1, "failed"),
        (2, "snoozed"),
        (3, "timeout"),
        (4, "running"),
    ]
    assert (rows[-1]["ended_at"], rows[-1]["worker"]) == (None, store.session)
    assert window.job(job_id)["error"] == "timeout"
    await store.settle([end(claimed)])
    assert [r["outcome"] for r in window.attempts(job_id)] == ["failed", "snoozed", "timeout", "completed"]
    assert window.job(job_id)["error"] is None


async def test_a_budget_raised_to_the_top_does_not_overflow(store: WorkerStore, window: Window, queue: str) -> None:
    for kind in ("snoozed", "released"):
        job = await settled(store, window, f"{queue}.{kind}", kind, options={"max_attempts": INT_MAX})
        assert job["max_attempts"] == INT_MAX


@pytest.mark.parametrize("delay", [1e9, 1e15, 1e300, float("inf"), float("nan"), -5.0, -1e300])
@pytest.mark.parametrize("kind", ["failed", "snoozed"])
async def test_no_delay_can_hold_up_a_batch(
    kind: OutcomeKind, delay: float, store: WorkerStore, window: Window, queue: str
) -> None:
    ids = window.enqueue_many(2, queue)
    first, second = await claim(store, queue)
    outcomes = [end(first, kind, delay=delay, error="x"), end(second, kind, delay=60.0, error="x")]
    assert len((await store.settle(outcomes)).accepted) == 2
    for job_id in ids:
        job = window.job(job_id)
        assert job["state"] in ("retryable", "scheduled", "available")
        assert job["run_at"].year < 5000
    now = window.value("SELECT now()")
    assert window.job(ids[0])["run_at"] >= now - timedelta(seconds=30)


async def test_a_completion_without_keeping_leaves_no_row(room_dsn: str, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    async with open_store(room_dsn, keep=False) as store:
        assert (await store.settle([end(await claim_one(store, queue))])).accepted
        dead = window.enqueue(queue)
        await store.settle([end(await claim_one(store, queue), "discarded", error="x")])
    assert window.run("SELECT FROM jobs WHERE id = %s", job_id) == []
    assert window.state(dead) == "dead"


# Texts that PostgreSQL cannot hold


class Nasty(Exception):
    pass


@pytest.mark.parametrize(
    "message",
    ["a\x00b", "lone \ud800 surrogate \udfff", "\\\x00\\ud800 \"quoted\" {curly}, NULL", "\U0001f600 \uffff", "x" * 50_000_000],
    ids=["nul", "surrogates", "syntax", "planes", "50 MB"],
)  # fmt: skip
async def test_a_failure_always_lands_whatever_its_text(
    message: str, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue, max_attempts=1)
    claimed = await claim_one(store, queue)
    outcome = outcome_of_error(claimed, Nasty(message))
    assert (await store.settle([outcome])).accepted == [outcome]
    job = window.job(job_id)
    assert job["state"] == "dead"
    assert job["error"] == outcome.error
    assert job["error"].startswith(f"Nasty: {storable(message[:10])}")
    assert len(job["error"].encode()) < 100_000


async def test_a_snooze_for_ever_or_for_nonsense_cannot_reach_the_database(
    store: WorkerStore, window: Window, queue: str
) -> None:
    for seconds in (float("inf"), float("nan"), "30", None, timedelta(days=1), 10**400):
        for exception in (Snooze, RetryAfter):
            job_id = window.enqueue(queue)
            claimed = await claim_one(store, queue)
            try:
                raise exception(seconds)  # type: ignore[arg-type]
            except Exception as error:
                outcome = outcome_of_error(claimed, error)
            assert (await store.settle([outcome])).accepted == [outcome]
            assert window.state(job_id) in ("scheduled", "retryable")
            window.run("DELETE FROM job WHERE id = %s", job_id)


@pytest.mark.parametrize("result", ["{", "nonsense", '"\x00"'])
async def test_one_result_that_cannot_be_stored_fails_its_own_job_alone(
    result: str, store: WorkerStore, window: Window, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulse_trio.states.random.uniform", lambda _, high: high)
    ids = window.enqueue_many(5, queue)
    claims = await claim(store, queue)
    outcomes = [end(c, result=result if c.id == ids[2] else "1") for c in claims]

    settlement = await store.settle(outcomes)

    assert len(settlement.accepted) == 5
    assert [window.state(i) for i in ids] == ["completed", "completed", "retryable", "completed", "completed"]
    assert "could not be stored" in window.job(ids[2])["error"]


async def test_one_result_that_cannot_be_stored_does_not_hold_up_the_claims(
    store: WorkerStore, window: Window, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulse_trio.states.random.uniform", lambda _, high: high)
    ids = window.enqueue_many(3, queue)
    bad, good = await claim(store, queue, 2)
    claims, _, settlement, *_ = await store.complete_and_claim(
        1, [ClaimCursor(queue, 0)], [end(bad, result="{"), end(good)]
    )

    assert [c.id for c in claims] == ids[2:]
    assert {o.claim for o in settlement.accepted} == {bad, good}
    assert [window.state(i) for i in ids] == ["retryable", "completed", "running"]


async def test_results_of_every_kind_come_back_as_they_were(store: WorkerStore, window: Window, queue: str) -> None:
    values: list[Any] = ["", "null", 'q"\\,{}\n\t', "\U0001f600\u2028", 0, 1.5, True, None, [], {"": {"NULL": [None]}}]
    ids = window.enqueue_many(len(values), queue)
    claims = await claim(store, queue)
    assert (
        await store.settle([end(c, result=json.dumps(v)) for c, v in zip(claims, values, strict=True)])
    ).refused == []
    assert [window.job(i)["result"] for i in ids] == values


# Reports whose reply was lost


async def test_an_unsure_report_that_was_written_counts(store: WorkerStore, window: Window, queue: str) -> None:
    kinds: list[OutcomeKind] = ["completed", "failed", "timeout", "discarded", "cancelled", "snoozed", "released"]
    window.enqueue_many(len(kinds), queue)
    outcomes = [end(c, kind, delay=60.0) for c, kind in zip(await claim(store, queue), kinds, strict=True)]
    assert len((await store.settle(outcomes)).accepted) == len(kinds)

    again = await store.settle(outcomes, unsure=True)
    assert {o.claim.id for o in again.accepted} == {o.claim.id for o in outcomes}
    assert (again.refused, again.again) == ([], [])
    # Without a doubt it is a report of somebody else's attempt.
    assert len((await store.settle(outcomes)).refused) == len(kinds)


async def test_an_unsure_report_that_was_not_written_is_written(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    outcome = end(await claim_one(store, queue))
    assert (await store.settle([outcome], unsure=True)).accepted == [outcome]
    assert window.state(job_id) == "completed"


@pytest.mark.parametrize("then", ["", "rescued", "claimed by another", "completed by another"])
async def test_an_unsure_completion_that_keeps_no_row_counts_unless_somebody_else_ended_the_attempt(
    then: str, room_dsn: str, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    async with open_store(room_dsn, keep=False) as one, open_store(room_dsn, keep=False) as two:
        outcome = end(await claim_one(one, queue))
        if not then:
            assert (await one.settle([outcome])).accepted == [outcome]
        else:
            window.expire(job_id)
            await two.rescue()
        if then.endswith("by another"):
            theirs = end(await claim_one(two, queue))
            if then.startswith("completed"):
                await two.settle([theirs])
        again = await one.settle([outcome], unsure=True)
    assert (again.refused if then else again.accepted) == [outcome]


@pytest.mark.parametrize("then", ["rescued", "claimed by another", "completed by another"])
async def test_an_unsure_report_of_a_lost_attempt_is_refused(
    then: str, store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    outcome = end(await claim_one(store, queue))
    window.expire(job_id)
    await store.rescue()
    if then != "rescued":
        theirs = await claim_one(other, queue)
        if then == "completed by another":
            await other.settle([end(theirs)])
    assert (await store.settle([outcome], unsure=True)).refused == [outcome]


async def test_an_unsure_report_counts_even_after_a_persons_retry(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    outcome = end(await claim_one(store, queue))
    await store.settle([outcome])
    window.do(operations.retry(job_id))
    assert (await store.settle([outcome], unsure=True)).accepted == [outcome]
    assert window.state(job_id) == "available"


async def test_an_unsure_report_of_another_session_with_the_same_attempt_is_refused(
    store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    # A server that failed over may hand out an attempt a second time: only the session tells them apart.
    window.enqueue(queue)
    theirs = await claim_one(other, queue)
    await other.settle([end(theirs)])
    ours = forged(theirs, session=store.session)
    assert (await store.settle([end(ours)], unsure=True)).refused != []


async def test_a_mixed_batch_is_written_in_one_call(store: WorkerStore, window: Window, queue: str) -> None:
    window.enqueue_many(4, queue)
    a, b, c, d = await claim(store, queue)
    outcomes = [end(a), end(b, "failed", delay=60.0), end(c), end(d, "snoozed", delay=60.0)]
    assert len((await store.settle(outcomes)).accepted) == 4
    assert [window.state(x.id) for x in (a, b, c, d)] == ["completed", "retryable", "completed", "scheduled"]


async def test_settling_nothing_is_nothing(store: WorkerStore) -> None:
    assert await store.settle([]) == ([], [], [])


async def test_a_report_and_a_rescue_at_once_agree_on_one_of_them(
    store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    for _ in range(20):
        ids = window.enqueue_many(20, queue)
        claims = await claim(store, queue)
        window.expire(*ids)
        results: dict[str, Any] = {}

        async def report(*, claims: list[Claim] = claims, to: dict[str, Any] = results) -> None:
            to["report"] = await store.settle([end(c) for c in claims])

        async def rescue(*, to: dict[str, Any] = results) -> None:
            to["rescue"] = await other.rescue()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(report)
            nursery.start_soon(rescue)
        accepted, refused, again = results["report"]
        assert len(accepted) + len(refused) + len(again) == 20
        states = [window.state(i) for i in ids]
        assert states.count("completed") == len(accepted)
        assert states.count("available") == results["rescue"].rescued == len(refused)
        window.run("DELETE FROM job WHERE queue = %s", queue)


@pytest.mark.parametrize("then", ["completed", "failed"])
async def test_an_unsure_report_of_an_earlier_attempt_is_not_taken_for_the_later_one(
    then: OutcomeKind, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    lost = end(await claim_one(store, queue))
    window.expire(job_id)
    await store.rescue()
    assert (await store.settle([end(await claim_one(store, queue), then, delay=60.0)])).accepted
    assert (await store.settle([lost], unsure=True)).refused == [lost]


async def test_an_unsure_report_is_not_taken_for_another_sessions_failure(
    store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    window.enqueue(queue)
    theirs = await claim_one(other, queue)
    await other.settle([end(theirs, "failed", delay=60.0)])
    ours = forged(theirs, session=store.session)
    assert (await store.settle([end(ours)], unsure=True)).refused != []


@pytest.mark.parametrize(
    ("kind", "delay", "woken"),
    [
        ("released", 0.0, True),
        ("rescued", 0.0, True),
        ("released", 15.0, False),
        ("failed", 0.0, False),
        ("snoozed", 0.0, False),
    ],
)
async def test_what_is_handed_over_wakes_an_idle_worker(
    kind: OutcomeKind, delay: float, woken: bool, store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    window.run("LISTEN pulse")
    window.enqueue_many(3, queue)
    claims = await claim(store, queue)
    await other.announce_idle()
    list(window.connection.notifies(timeout=0))
    await store.settle([end(c, kind, delay=delay) for c in claims])
    window.run("SELECT 1")
    assert [n.payload for n in window.connection.notifies(timeout=0)] == [queue] * woken
    await other.withdraw_idle()


async def test_a_report_that_cannot_be_written_of_a_locked_row_is_to_be_sent_again(
    room_dsn: str, store: WorkerStore, window: Window, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for one whose lease is lost: the job ran until its lease was over, and then once more."""
    job_id = window.enqueue(queue)
    refused = end(await claim_one(store, queue), "failed", error="no")

    async def bury_locked(*args: Any) -> tuple[str, str] | None:
        with Window(room_dsn) as other:
            other.run("BEGIN")
            other.run("SELECT FROM job WHERE id = %s FOR NO KEY UPDATE", job_id)
            try:
                return await rows.bury(*args)
            finally:
                other.run("ROLLBACK")

    refuse = f"refuse_{job_id}"
    body = "BEGIN RAISE 'no' USING ERRCODE = '22003'; END"
    window.run(f"CREATE FUNCTION {refuse}() RETURNS trigger LANGUAGE plpgsql AS $${body}$$")
    window.run(
        f"CREATE TRIGGER {refuse} BEFORE UPDATE ON job FOR EACH ROW WHEN (NEW.id = {job_id} AND NEW.state <> 2)"
        f" EXECUTE FUNCTION {refuse}()"
    )
    try:
        with monkeypatch.context() as patched:
            patched.setattr("pulse_trio.store.outcomes.bury", bury_locked)
            settled = await store.settle([refused])
        assert (settled.accepted, settled.refused, settled.again) == ([], [], [refused])
        (written,) = (await store.settle([refused])).accepted
        assert "BadRow: the report of this attempt (failed) could not be written" in (written.error or "")
        assert window.value("SELECT state FROM jobs WHERE id = %s", job_id) == "dead"
    finally:
        window.run(f"DROP FUNCTION {refuse}() CASCADE")
