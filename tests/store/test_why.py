"""Why a job waits: each cause, made on a real database, is named first, with who holds what."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio.handlers import QueueLimits, Rate
from pulse_trio.store import why
from support.stores import claim, claim_one, end, open_store

if TYPE_CHECKING:
    from pulse_trio.store import WorkerStore
    from pulse_trio.store.why import Facts, Reason
    from support.stores import Window


def reasons(window: Window, job_id: int) -> list[Reason]:
    return window.do(why.why(job_id))


def codes(window: Window, job_id: int) -> list[str]:
    return [reason.code for reason in reasons(window, job_id)]


async def test_a_job_that_runs_or_has_ended_or_never_was_waits_for_nothing(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    claimed = await claim_one(store, queue)
    assert reasons(window, job_id) == []
    await store.settle([end(claimed)])
    assert reasons(window, job_id) == []
    assert reasons(window, 2**62) == []


async def test_a_due_job_with_a_free_worker_is_next_and_says_how_many_come_before(
    store: WorkerStore, window: Window, queue: str
) -> None:
    window.enqueue(queue, priority=5)
    first, second = window.enqueue_many(2, queue)
    assert [(r.code, r.text) for r in reasons(window, second)] == [
        ("next", "It is due, and a worker with a free slot serves its queue; 2 due jobs come before it.")
    ]
    assert "1 due job comes before it" in reasons(window, first)[0].text


async def test_a_paused_queue_and_a_paused_kind_are_named_with_their_time(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue, kind=f"kind of {queue}")
    window.run("INSERT INTO queue (name, paused_at) VALUES (%s, '2026-11-22 12:00Z')", queue)
    window.run("INSERT INTO paused_kind (kind, paused_at) VALUES (%s, '2026-11-22 13:00Z')", f"kind of {queue}")
    at = datetime(2026, 11, 22, 12, tzinfo=UTC)
    assert [(r.code, r.since) for r in reasons(window, job_id)] == [
        ("queue_paused", at),
        ("kind_paused", at + timedelta(hours=1)),
    ]


async def test_a_scheduled_job_says_when_it_is_due_and_what_will_stop_it_then(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue, delay=3600)
    (reason,) = reasons(window, job_id)
    assert reason.code == "scheduled"
    assert reason.until == window.value("SELECT run_at FROM job WHERE id = %s", job_id)
    window.run("INSERT INTO queue (name, paused_at) VALUES (%s, now())", queue)
    assert codes(window, job_id) == ["scheduled", "queue_paused"]


async def test_a_failed_attempt_is_retried_later(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    await store.settle([end(await claim_one(store, queue), "failed", delay=600.0, error="boom")])
    (reason,) = reasons(window, job_id)
    assert (reason.code, reason.text[:36]) == ("retry", "Attempt 1 failed; the next one is du")


def test_without_a_worker_no_job_is_claimed(alone: Window) -> None:
    assert [(r.code, r.text) for r in reasons(alone, alone.enqueue("mail"))] == [("no_worker", "No worker is live.")]


async def test_workers_of_other_queues_do_not_serve_it_and_stale_ones_do_not_count(alone: Window) -> None:
    job_id = alone.enqueue("mail")
    async with open_store(alone.dsn):
        alone.run("UPDATE session SET queues = '{images}'")
        (reason,) = reasons(alone, job_id)
        assert (reason.code, reason.text) == (
            "no_worker",
            "No live worker serves its queue, mail (1 worker is live and serves other queues).",
        )
        alone.run("UPDATE session SET queues = '{mail}', draining = true")
        assert codes(alone, job_id) == ["workers_draining"]
        alone.run("UPDATE session SET draining = false, concurrency = 1, running = 1")
        assert codes(alone, job_id) == ["workers_busy"]
        alone.run("UPDATE session SET running = 0, seen_at = now() - interval '1 day'")
        assert [r.text for r in reasons(alone, job_id)] == ["No worker is live."]


async def test_a_quarantine_process_serves_no_queue(alone: Window) -> None:
    """It runs the one job that it was given: beside workers that all drain, a job was said to wait for a slot."""
    job_id = alone.enqueue("mail")
    async with open_store(alone.dsn), open_store(alone.dsn, concurrency=1, session=4711):
        assert codes(alone, job_id) == ["next"]
        alone.run("UPDATE session SET draining = true WHERE id <> 4711")
        assert codes(alone, job_id) == ["workers_draining"]
        alone.run("UPDATE session SET ended_at = now() WHERE id <> 4711")
        assert [r.text for r in reasons(alone, job_id)] == ["No worker is live."]
        (process,) = alone.run("SELECT concurrency FROM workers WHERE id = 4711")
        assert process["concurrency"] == 0


async def test_a_full_queue_names_the_jobs_that_hold_its_places(store: WorkerStore, window: Window, queue: str) -> None:
    await store.declare_limits([QueueLimits(queue, limit=2)])
    *running, waiting = window.enqueue_many(3, queue)
    await store.claim_limited(queue, 10)
    (reason,) = reasons(window, waiting)
    assert (reason.code, list(reason.jobs)) == ("queue_limit", running)
    assert reason.text == f"Its queue runs at most 2 jobs at once, and that many run: {running[0]}, {running[1]}."


async def test_a_spent_rate_says_when_the_next_start_is_allowed(store: WorkerStore, window: Window, queue: str) -> None:
    await store.declare_limits([QueueLimits(queue, rate=Rate(1, 3600.0))])
    _, waiting = window.enqueue_many(2, queue)
    await store.claim_limited(queue, 10)
    (reason,) = reasons(window, waiting)
    assert reason.code == "queue_rate"
    assert reason.until is not None
    assert timedelta(minutes=55) < reason.until - window.value("SELECT now()") < timedelta(minutes=61)


@pytest.mark.parametrize("own", [True, False], ids=["the job's own limit", "the queue's limit for each key"])
async def test_a_full_key_names_its_jobs_and_another_key_is_free(
    own: bool, store: WorkerStore, window: Window, queue: str
) -> None:
    options: dict[str, Any] = {"limit": 1} if own else {}
    if not own:
        await store.declare_limits([QueueLimits(queue, key_limit=1)])
    first = window.enqueue(queue, key="acme", **options)
    second = window.enqueue(queue, key="acme", **options)
    await store.claim_limited(queue, 10)
    (reason,) = reasons(window, second)
    assert (reason.code, reason.jobs) == ("key_limit", (first,))
    assert codes(window, window.enqueue(queue, key="other", **options)) == ["next"]


async def test_a_rate_that_was_drawn_from_while_the_clock_was_ahead_is_no_reason(
    store: WorkerStore, window: Window, queue: str
) -> None:
    window.enqueue(queue, key="acme", rate="1/h")
    waiting = window.enqueue(queue, key="acme", rate="1/h")
    await store.claim_limited(queue, 10)
    window.run("UPDATE bucket SET full_at = full_at + interval '1 h' WHERE queue = %s", queue)
    assert codes(window, waiting) == ["next"]


async def test_a_key_that_has_used_up_its_rate_waits(store: WorkerStore, window: Window, queue: str) -> None:
    window.enqueue(queue, key="acme", rate="1/h")
    waiting = window.enqueue(queue, key="acme", rate="1/h")
    await store.claim_limited(queue, 10)
    assert codes(window, waiting) == ["key_rate"]


@pytest.mark.parametrize("before", [False, True])
async def test_a_job_that_workers_put_back_again_and_again_has_no_handler(
    store: WorkerStore, window: Window, queue: str, before: bool
) -> None:
    """`before`: a worker that had one has suspended it."""
    job_id = window.enqueue(queue, kind="unheard-of")
    if before:
        claimed = await claim_one(store, queue)
        window.value("SELECT suspend(%s, %s, %s, '{}', '{}', '{go}', NULL)", job_id, claimed.attempt, claimed.session)
        window.make_due(job_id)
    for _ in range(3):
        await store.settle([end(await claim_one(store, queue), "released")])
        window.make_due(job_id)
    assert [r.text for r in reasons(window, job_id)] == [
        "Workers claim it and put it back: none of them has a handler for the kind unheard-of that takes its arguments."
    ]
    # Each time it is due again a moment later, which is no reason of its own.
    window.run("UPDATE job SET run_at = clock_timestamp() + interval '15 s' WHERE id = %s", job_id)
    assert codes(window, job_id) == ["unknown_kind", "scheduled"]


@pytest.mark.parametrize("error", [None, "UnfitArguments: no 'size'"])
async def test_a_job_that_a_worker_has_put_back_once_says_so_at_each_look(
    store: WorkerStore, window: Window, queue: str, error: str | None
) -> None:
    """It was only due in some seconds until it had been put back three times."""
    job_id = window.enqueue(queue, kind="unheard-of")
    for _ in range(2):
        await store.settle([end(await claim_one(store, queue), "released", delay=15.0, error=error)])
        first, second = reasons(window, job_id)
        assert (first.code, second.code) == ("unknown_kind", "scheduled")
        assert first.text == (
            "A worker has claimed it and put it back: it did not have a handler for the kind unheard-of that takes its "
            "arguments."
        )
        # It has come due meanwhile: no worker has claimed it yet.
        window.run("UPDATE job SET run_at = run_at - interval '16 s' WHERE id = %s", job_id)
        window.run("UPDATE attempt SET ended_at = ended_at - interval '16 s' WHERE job_id = %s", job_id)
        assert codes(window, job_id) == ["unknown_kind"]


async def test_a_job_that_was_released_by_a_stopping_worker_or_snoozed_is_not_put_back_as_unfit(
    store: WorkerStore, window: Window, queue: str
) -> None:
    released, snoozed = window.enqueue_many(2, queue)
    claims = {each.id: each for each in await claim(store, queue, 2)}
    await store.settle([end(claims[released], "released"), end(claims[snoozed], "snoozed", delay=60.0)])
    assert codes(window, released) == ["next"]
    assert codes(window, snoozed) == ["scheduled"]


async def test_a_job_in_quarantine_says_since_when(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    window.run("UPDATE job SET suspect = true, suspected_at = '2026-11-22 12:00Z' WHERE id = %s", job_id)
    (reason,) = reasons(window, job_id)
    assert (reason.code, reason.since) == ("quarantined", datetime(2026, 11, 22, 12, tzinfo=UTC))


async def test_a_suspended_job_says_which_event_or_moment_it_waits_for(
    store: WorkerStore, window: Window, queue: str
) -> None:
    for_event, asleep = window.enqueue_many(2, queue)
    for claimed in await claim(store, queue):
        events, until = (["approved"], None) if claimed.id == for_event else ([], 4102444800.0)
        window.value(
            "SELECT suspend(%s, %s, %s, '{}', '{}', %s, %s)",
            claimed.id,
            claimed.attempt,
            claimed.session,
            events,
            until,
        )
    assert [(r.code, r.text, r.until) for r in reasons(window, for_event)] == [
        ("event", "It waits for the event approved.", None)
    ]
    (reason,) = reasons(window, asleep)
    assert (reason.code, reason.until) == ("sleep", datetime(2100, 1, 1, tzinfo=UTC))


async def test_a_parent_names_the_children_that_it_waits_for_and_an_ended_one_too(
    store: WorkerStore, window: Window, queue: str
) -> None:
    parent, child = window.enqueue_many(2, queue)
    claimed = next(c for c in await claim(store, queue) if c.id == parent)
    window.value("SELECT suspend(%s, %s, %s, '{}', '{}', '{}', NULL)", parent, claimed.attempt, claimed.session)
    window.run(
        "UPDATE durable_job SET blocks = '{1}', watching = %s, suspended = %s WHERE job_id = %s",
        [child],
        claimed.attempt,
        parent,
    )
    window.run("UPDATE job SET run_at = far() WHERE id = %s", parent)
    (reason,) = reasons(window, parent)
    assert (reason.code, reason.jobs, reason.until) == ("children", (child,), None)
    window.run("UPDATE durable_job SET ending = 4, outcome = '{}' WHERE job_id = %s", parent)
    (reason,) = reasons(window, parent)
    assert (reason.code, reason.jobs) == ("descendants", (child,))
    assert reason.text.startswith("It has ended as completed")


@pytest.mark.parametrize(
    "options",
    ["[", "[" * 4000, "7", '{"limit": "x"}', '{"limit": 1e999, "rate": [0, 1]}', '{"rate": [1]}', '{"rate": {"a": 1}}'],
)
def test_no_options_of_a_producer_break_the_reasons(options: str, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue, key="acme")
    rows: Any = window.connection.execute(  # the row as the operation reads it
        why_statement(), {"id": job_id}
    ).fetchone()
    facts: Facts = why.Facts(**rows)
    assert [r.code for r in why.reasons_of(replace(facts, options=options, serving_workers=1, free_slots=1))] == [
        "next"
    ]


def why_statement() -> bytes:
    from pulse_trio.sql import statement

    return statement("why_waits", "pulse")


def test_a_look_at_one_job_touches_few_pages_however_many_wait_with_it(alone: Window) -> None:
    alone.run("INSERT INTO job (kind, queue, created_at) SELECT 'noop', 'mail', now() FROM generate_series(1, 50000)")
    alone.run("VACUUM ANALYZE job")
    last = alone.value("SELECT max(id) FROM job")
    assert alone.pages(why_statement(), {"id": last}) < 400
