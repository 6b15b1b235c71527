"""A sweep is bounded, whatever a producer plants: a hundred thousand queues or priorities, due or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pulse_trio.errors import StatementRefused
from pulse_trio.sql import statement
from pulse_trio.store import ClaimCursor
from pulse_trio.store.links import WORKER_SETTINGS
from pulse_trio.store.sweeping import STEPS, Lap
from support.stores import Window, claim, end, open_store

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from pulse_trio.store import Sweep, WorkerStore
    from support.databases import Databases

MANY = 20_000
PAGES_A_STEP = 14
"""Two probes of some pages each, and the queue's row."""


@pytest.fixture(scope="module")
def crowded(databases: Databases) -> Generator[Window]:
    """Queues with a job each: 20,000 scheduled, 2,000 scheduled with a key, 2,000 due; and 20,000 priorities in one queue."""
    with databases.migrated() as dsn, Window(dsn) as window:
        for start, count, columns, values in (
            ("p", MANY, "queue, run_at", "'p' || n, now() + interval '1 day'"),
            ("k", 2000, "queue, key, run_at", "'k' || n, 'a', now() + interval '1 day'"),
            ("d", 2000, "queue", "'d' || n"),
            ("l", MANY, "queue, priority, run_at", "'levels', n, now() + interval '1 day'"),
        ):
            assert start
            window.run(f"INSERT INTO job (kind, {columns}) SELECT 'noop', {values} FROM generate_series(1, {count}) n")
        window.run("VACUUM ANALYZE job")
        yield window


def pages(window: Window, lap: Lap, queues: Sequence[str] | None) -> int:
    """The pages that the next sweep of this lap touches."""
    with window.connection.transaction(force_rollback=True):
        window.use_settings(WORKER_SETTINGS, local=True)
        return window.pages(statement("slots", "pulse"), lap.parameters(queues, []))


async def lap(store: WorkerStore, queues: Sequence[str] | None = None) -> tuple[set[tuple[str, int]], int, Sweep]:
    """What one lap over all slots finds, in how many sweeps, and the last of these."""
    found: set[tuple[str, int]] = set()
    for sweeps in range(1, 1000):
        swept = await store.sweep(queues)
        found |= {(f.queue, f.priority) for f in swept.found}
        if swept.ended:
            return found, sweeps, swept
    raise AssertionError("no end")


async def test_a_sweep_touches_a_bounded_number_of_pages_and_the_next_goes_on_from_there(crowded: Window) -> None:
    async with open_store(crowded.dsn) as store:
        for _ in range(3):
            assert pages(crowded, store.claims._lap, None) < STEPS * PAGES_A_STEP
            swept = await store.sweep(None)
            assert not swept.whole
    async with open_store(crowded.dsn) as store:
        found, sweeps, _ = await lap(store)
    assert {queue for queue, _ in found} == {f"d{n}" for n in range(1, 2001)}
    assert sweeps == pytest.approx((2 * MANY + 2000) / STEPS, abs=2)


async def test_a_worker_of_some_queues_does_not_pay_for_the_others(crowded: Window) -> None:
    queues = ["d7", "no-such", "p9", "k5"]
    assert pages(crowded, Lap(), queues) < 120
    async with open_store(crowded.dsn) as store:
        swept = await store.sweep(queues)
        found = {(f.queue, f.priority) for f in swept.found}
        assert swept.whole
        # All that have jobs, due or not, as long as one sweep reaches everything.
        assert found == {("d7", 0), ("p9", 0)}
        assert swept.limited == []


async def test_priorities_without_end_in_one_queue_do_not_hide_the_next_queue_of_the_list(crowded: Window) -> None:
    async with open_store(crowded.dsn) as store:
        found, sweeps, _ = await lap(store, ["levels", "d3"])
        assert sweeps > MANY / STEPS
    assert found == {("d3", 0)}


async def test_a_queue_whose_producer_notified_is_found_wherever_the_sweep_walks(crowded: Window) -> None:
    async with open_store(crowded.dsn) as store:
        await store.sweep(None)
        found = (await store.sweep(None, ["p19999", "levels", "d1999"])).found
        # Due ones only, as always where one sweep does not reach everything.
        assert "d1999" in {f.queue for f in found}
        crowded.run("INSERT INTO job (kind, queue, priority) VALUES ('noop', 'p19999', 3)")
        found = (await store.sweep(None, ["p19999"])).found
        assert ("p19999", 3) in {(f.queue, f.priority) for f in found}
        await store.settle([end(c) for c in await claim(store, "p19999", priority=3)])


async def test_queues_with_scheduled_keys_only_are_not_claimed_from_and_one_that_comes_due_is(crowded: Window) -> None:
    async with open_store(crowded.dsn) as store:
        *_, last = await lap(store)
        assert last.limited == []
        assert last.keyed_due_in == pytest.approx(86_400, abs=900)
        crowded.run("UPDATE job SET run_at = now() - interval '1 ms' WHERE queue = 'k1234'")
        swept = await store.sweep(None)
        assert swept.limited == ["k1234"]
        (held,) = (await store.claim_limited("k1234", 5)).claims
        await store.settle([end(held)])


async def test_jobs_with_keys_that_come_due_in_queues_that_nobody_serves_lie_in_nobodys_way(crowded: Window) -> None:
    crowded.run("INSERT INTO queue (name, paused_at) VALUES ('paused', now())")
    crowded.run(
        "INSERT INTO job (kind, queue, key, created_at, run_at)"
        " SELECT 'noop', 'paused', 'a' || n, now() - interval '1 h', now() - interval '1 min' FROM generate_series(1, 1200) n"
    )
    crowded.run("UPDATE job SET run_at = now() - interval '1 ms' WHERE queue = 'k77'")
    async with open_store(crowded.dsn, queues=["k77"]) as store:
        sweeps = [await store.sweep(["k77"]) for _ in range(3)]
        assert [swept.found for swept in sweeps] == [[], [], []]
        assert sweeps[-1].limited == ["k77"]


# A row that makes the database refuse a claim


@pytest.fixture
def refuse(window: Window) -> Generator[None]:
    """No job of the kind `refused` can be claimed, for a trigger of the owner's: as an error that cannot be foreseen."""
    window.run(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;"
        "CREATE TRIGGER refuse BEFORE UPDATE ON job FOR EACH ROW WHEN (NEW.kind = 'refused') EXECUTE FUNCTION refuse()"
    )
    yield
    window.run("DROP TRIGGER refuse ON job; DROP FUNCTION refuse")


@pytest.mark.usefixtures("refuse")
async def test_a_row_that_no_claim_can_take_stops_its_own_slot_only(room_dsn: str, window: Window, queue: str) -> None:
    other = f"{queue}-other"
    window.run("INSERT INTO job (kind, queue) VALUES ('refused', %s)", queue)
    window.run("INSERT INTO job (kind, queue, key) VALUES ('refused', %s, 'a')", queue)
    well = window.enqueue(other)
    async with open_store(room_dsn) as store:
        exchange = await store.complete_and_claim(10, [ClaimCursor(queue, 0), ClaimCursor(other, 0)])
        assert [c.id for c in exchange.claims] == [well]
        ((slot, said),) = exchange.refused
        assert slot.queue == queue
        assert "not this one" in said
        with pytest.raises(StatementRefused, match="not this one"):
            await store.claim_limited(queue, 10)
        # With completions on the way, these are written too.
        exchange = await store.complete_and_claim(10, [ClaimCursor(queue, 0)], [end(exchange.claims[0])])
        assert len(exchange.settlement.accepted) == 1
        assert exchange.claims == []


@pytest.mark.usefixtures("refuse")
async def test_a_cancelled_job_that_no_claim_can_take_keeps_no_other_from_a_lent_slot(
    room_dsn: str, window: Window, queue: str
) -> None:
    def cancelled(kind: str, ago: int, key: str | None = None) -> int:
        """A job that runs once more to clean up, due since so many seconds."""
        (row,) = window.run(
            "INSERT INTO job (kind, queue, key, cancelling, run_at)"
            " VALUES (%s, %s, %s, true, now() - %s * interval '1 s') RETURNING id", kind, queue, key, ago,
        )  # fmt: skip
        window.run("INSERT INTO cancellation (job_id, cause, requested_by) VALUES (%s, 'parent', 'tree')", row["id"])
        return row["id"]

    window.run("INSERT INTO queue (name, max_running) VALUES (%s, 1)", queue)
    bad = [cancelled("refused", 9), cancelled("refused", 8, "a"), cancelled("refused", 6)]
    good = [cancelled("noop", 7), cancelled("noop", 5, "a"), cancelled("noop", 4)]
    async with open_store(room_dsn) as store:
        # Beyond the first, although there is room for one alone.
        (one,) = (await store.claim_cleanups([queue], 1)).claims
        assert (one.id, one.attempt, one.session) == (good[0], 1, store.session)
        # From a queue whose limit is reached, too.
        assert [c.id for c in (await store.claim_limited(queue, 1)).claims] == [good[1]]
        assert [c.id for c in (await store.claim_cleanups([queue], 10)).claims] == [good[2]]
        with pytest.raises(StatementRefused, match=f"job {bad[0]}: not this one"):
            await store.claim_cleanups([queue], 10)
        assert (await store.claim_limited(queue, 10)).claims == []
    left = window.run("SELECT id, state, attempt FROM job WHERE queue = %s AND kind = 'refused' ORDER BY id", queue)
    assert [(row["id"], row["state"], row["attempt"]) for row in left] == [(job_id, 1, 0) for job_id in bad]
    # A claim that was undone leaves no permit.
    permits = window.run("SELECT job_id FROM permit WHERE queue = %s ORDER BY job_id", queue)
    assert [row["job_id"] for row in permits] == good
    window.run("DELETE FROM queue WHERE name = %s", queue)
