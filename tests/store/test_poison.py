"""Poison pills: what a rescue says of crashes, on a real database."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pulse_trio import ConfigurationError, Handlers
from pulse_trio.handlers import QueueLimits
from pulse_trio.store import operations
from support.stores import Window, claim, claim_one, end, open_store

if TYPE_CHECKING:
    from pulse_trio.jobs import Claim
    from pulse_trio.store import WorkerStore


async def crash_alone(store: WorkerStore, window: Window, queue: str) -> Claim:
    """A worker that holds nothing else dies with the queue's one job; in quarantine, its witness says so."""
    async with open_store(window.dsn) as dying:
        if claims := await claim(dying, queue):
            window.expire(claims[0].id)
            await store.rescue()
        else:
            claims = (await dying.claim_suspect([queue], session=4711)).claims
            assert await store.report_crash(claims[0], "killed by signal 9 (SIGKILL)", alone=True)
    (claimed,) = claims
    return claimed


def set_limit(window: Window, job_id: int, limit: Any) -> None:
    window.run("UPDATE job SET options = %s WHERE id = %s", json.dumps({"crash_limit": limit}), job_id)


@pytest.mark.parametrize(
    ("limit", "before", "deaths"),
    [(None, 2, 3), (1, 1, 1), (2, 1, 2), (5, 4, 5), ("many", 2, 3), (1e300, 9, 0)],
    ids=lambda v: str(v),
)
async def test_a_job_is_dead_when_it_was_seen_to_crash_alone_at_its_crash_limit(
    limit: Any, before: int, deaths: int, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue, max_attempts=9)
    if limit is not None:
        set_limit(window, job_id, limit)
    for number in range(1, before + deaths + 1):
        assert window.state(job_id) == "available"
        row = window.row(job_id)
        assert row is not None
        assert row["suspect"] == (number > before)
        assert (await crash_alone(store, window, queue)).attempt == number
    job = window.job(job_id)
    assert (job["state"], job["attempt"]) == ("dead", before + deaths)
    # The last is dead for want of attempts: no number is too large.
    assert job["error"].startswith(f"CrashLimit: {deaths} times it ran alone" if deaths else "lease expired")
    assert ("killed by signal 9 (SIGKILL)" in job["error"]) == bool(deaths)
    assert {a["outcome"] for a in window.attempts(job_id)} == {"rescued"}


async def test_a_suspect_whose_machine_is_switched_off_again_and_again_is_not_dead_before_its_budget_is_used_up(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue, max_attempts=8)
    for number in range(1, 9):
        assert window.state(job_id) == "available"
        async with open_store(window.dsn) as dying:
            claims = await claim(dying, queue) or (await dying.claim_suspect([queue], session=4711)).claims
            assert [c.attempt for c in claims] == [number]
            window.expire(job_id)
            await store.rescue()
    assert window.state(job_id) == "dead"
    assert window.job(job_id)["error"].startswith("lease expired")


async def test_a_crash_is_told_of_when_it_puts_a_job_in_quarantine(window: Window, queue: str) -> None:
    told: list[tuple[int, str, int]] = []
    job_id = window.enqueue(queue)
    async with open_store(window.dsn, on_suspect=lambda *what: told.append(what)) as store:
        for _ in range(3):
            await crash_alone(store, window, queue)
    assert told == [(job_id, "noop", 2)]


async def test_nobody_else_can_hold_suspects_back(store: WorkerStore, window: Window, queue: str) -> None:
    job_id, locked = window.enqueue(queue), window.enqueue(queue)
    window.run("UPDATE job SET suspect = true WHERE id = ANY (%s)", [job_id, locked])
    with psycopg.connect(window.dsn) as stranger:
        stranger.execute("SELECT pg_advisory_lock(hashtextextended('pulse suspects', 0))")
        stranger.execute("SELECT FROM pulse.job WHERE id = %s FOR UPDATE", [locked])
        assert [c.id for c in (await store.claim_suspect([queue])).claims] == [job_id]
        assert (await store.claim_suspect([queue])).claims == []
        (held,) = [c for c in [window.row(job_id)] if c is not None]
        assert held["state"] == 2


async def test_a_suspect_without_a_key_does_not_wait_for_one_with_a_key_that_may_not_run(
    store: WorkerStore, window: Window, queue: str
) -> None:
    await store.declare_limits([QueueLimits(queue, key_limit=1)])
    window.enqueue(queue, key="k")
    await store.claim_limited(queue, 1)
    window.enqueue(queue, key="k")
    plain = window.enqueue(queue)
    window.run("UPDATE job SET suspect = true WHERE state = 1")
    assert [c.id for c in (await store.claim_suspect([queue])).claims] == [plain]


@pytest.mark.parametrize("fresh", [True, False])
async def test_a_paused_kind_is_not_claimed_whatever_the_last_sweep_found(
    fresh: bool, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    window.run("UPDATE job SET suspect = true, suspected_at = now() WHERE id = %s", job_id)
    window.run("INSERT INTO paused_kind (kind) VALUES ('noop')")
    try:
        assert not await store.suspects_are_due([queue])
        assert (await store.claim_suspect([queue], fresh=fresh)).claims == []
    finally:
        window.run("DELETE FROM paused_kind")
    assert await store.suspects_are_due([queue])


async def test_a_job_that_was_locked_when_its_process_died_is_reported_again(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    window.run("UPDATE job SET suspect = true WHERE id = %s", job_id)
    (claimed,) = (await store.claim_suspect([queue], session=4711)).claims
    with psycopg.connect(window.dsn) as stranger:
        stranger.execute("SELECT FROM pulse.job WHERE id = %s FOR UPDATE", [job_id])
        assert await store.report_crash(claimed, "x", alone=True) is None
    assert await store.report_crash(claimed, "x", alone=True) is True
    assert window.value("SELECT deaths FROM quarantine WHERE id = %s", job_id) == 1


async def test_crashes_are_counted_apart_from_failures(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    await crash_alone(store, window, queue)
    await store.settle([end(await claim_one(store, queue), "failed", error="x")])
    row = window.row(job_id)
    assert row is not None
    assert (row["crashes"], row["failures"], row["suspect"]) == (1, 1, False)


async def test_a_persons_retry_begins_without_crashes(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    for _ in range(5):
        await crash_alone(store, window, queue)
    assert window.state(job_id) == "dead"
    window.do(operations.retry(job_id))
    row = window.row(job_id)
    assert row is not None
    assert (row["crashes"], row["deaths"], row["suspect"]) == (0, 0, False)


async def test_a_suspect_of_a_limited_queue_or_with_a_key_stays_within_its_limits(
    store: WorkerStore, window: Window, queue: str
) -> None:
    await store.declare_limits([QueueLimits(queue, limit=1)])
    job_id = window.enqueue(queue, key="k")
    window.run("UPDATE job SET suspect = true, crashes = 2 WHERE id = %s", job_id)
    other_id = window.enqueue(queue)
    limited = await store.claim_limited(queue, 5)
    assert [c.id for c in limited.claims] == [other_id]
    assert (await store.claim_suspect([queue])).claims == []
    await store.settle([end(limited.claims[0])])
    assert (await store.claim_limited(queue, 5)).claims == []
    (claimed,) = (await store.claim_suspect([queue])).claims
    assert claimed.id == job_id
    # It counts against the limit like any other.
    window.enqueue(queue)
    assert (await store.claim_limited(queue, 5)).claims == []


async def test_suspects_of_paused_queues_and_kinds_wait(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue, kind=f"kind of {queue}")
    window.run("UPDATE job SET suspect = true WHERE id = %s", job_id)
    window.run("INSERT INTO queue (name, paused_at) VALUES (%s, now())", queue)
    swept = await store.sweep([queue])
    assert swept.suspect_due_in is None
    assert (await store.claim_suspect([queue])).claims == []
    window.run("DELETE FROM queue WHERE name = %s", queue)
    window.run("INSERT INTO paused_kind (kind) VALUES (%s)", f"kind of {queue}")
    swept = await store.sweep([queue])
    assert swept.suspect_due_in is None
    assert (await store.claim_suspect([queue])).claims == []
    window.run("DELETE FROM paused_kind")


def test_a_handler_may_say_its_crash_limit() -> None:
    handlers = Handlers()
    assert json.loads(handlers.job(name="a", crash_limit=5)(lambda: None).request().options or "") == {"crash_limit": 5}
    assert handlers.job(name="b", crash_limit=3)(lambda: None).request().options is None
    for wrong in (0, -1, 40_000, "3", 2.5):
        with pytest.raises(ConfigurationError, match="crash_limit"):
            handlers.job(name="c", crash_limit=wrong)(lambda: None)  # type: ignore[call-overload]


@pytest.mark.parametrize("way", ["report", "beat"])
async def test_a_worker_that_comes_back_takes_back_the_crash_once(
    way: str, store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    for _ in range(5):
        claimed = await claim_one(store, queue)
        window.expire(job_id)
        await other.rescue()
        for _ in range(2):
            if way == "report":
                assert (await store.settle([end(claimed, "released")])).refused
            else:
                assert not (await store.beat([claimed])).renewed
        row = window.row(job_id)
        assert row is not None
        assert (row["crashes"], row["suspect"]) == (0, False)
    assert {a["error"] for a in window.attempts(job_id)} == {
        "lease expired: the worker was cut off or stopped, and came back"
    }


async def test_a_suspect_whose_worker_comes_back_is_a_suspect_no_longer(
    store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    claims: list[Claim] = []
    for _ in range(2):
        claims.append(await claim_one(store, queue))
        window.expire(job_id)
        await other.rescue()
    row = window.row(job_id)
    assert row is not None
    assert (row["crashes"], row["suspect"]) == (2, True)
    await store.settle([end(claims[0], "released")])
    row = window.row(job_id)
    assert row is not None
    assert (row["crashes"], row["suspect"]) == (1, False)


async def test_a_process_that_was_seen_to_die_takes_nothing_back(
    store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    claimed = await claim_one(store, queue)
    await other.rescue_sessions([store.session])
    await store.settle([end(claimed, "released")])
    row = window.row(job_id)
    assert row is not None
    assert row["crashes"] == 1
