"""The fence: (id, attempt, session), each part of it on every write a worker makes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pulse_trio.jobs import Claim
from pulse_trio.store import operations
from support.stores import Window, claim, claim_one, end, forged, open_store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pulse_trio.jobs import OutcomeKind
    from pulse_trio.store import WorkerStore

NOBODY = 10**15
"""An id that no job has."""


async def exchanged(store: WorkerStore, claim: Claim) -> bool:
    settlement = (await store.complete_and_claim(0, [], [end(claim)])).settlement
    assert not settlement.again
    return bool(settlement.accepted)


async def renewed(store: WorkerStore, claim: Claim) -> bool:
    beat = await store.beat([claim])
    assert not beat.locked
    return bool(beat.renewed)


def settled(kind: OutcomeKind) -> Callable[[WorkerStore, Claim], Awaitable[bool]]:
    async def write(store: WorkerStore, claim: Claim) -> bool:
        settlement = await store.settle([end(claim, kind)])
        assert not settlement.again
        return bool(settlement.accepted)

    return write


WRITES: dict[str, Callable[[WorkerStore, Claim], Awaitable[bool]]] = {
    "complete_and_claim": exchanged,
    "beat": renewed,
} | {
    kind: settled(kind)
    for kind in ("completed", "failed", "timeout", "discarded", "cancelled", "snoozed", "released", "rescued")
}


@pytest.mark.parametrize("wrong", ["id", "attempt", "session"])
@pytest.mark.parametrize("write", WRITES)
async def test_a_write_with_one_wrong_part_of_the_fence_is_refused_and_leaves_the_row_alone(
    write: str, wrong: str, store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    ours = await claim_one(store, queue)
    changes = {"id": NOBODY, "attempt": ours.attempt + 1, "session": other.session}
    before = window.row(job_id)

    assert not await WRITES[write](store, forged(ours, **{wrong: changes[wrong]}))

    assert window.row(job_id) == before


@pytest.mark.parametrize("write", WRITES)
async def test_a_write_with_the_right_fence_touches_that_job_alone(
    write: str, store: WorkerStore, window: Window, queue: str
) -> None:
    # Both have the same attempt and session: only the id tells them apart.
    first, second = window.enqueue(queue), window.enqueue(queue)
    ours, _ = await claim(store, queue, 2)
    assert ours.id == first
    before = window.row(second)

    assert await WRITES[write](store, ours)

    assert window.row(second) == before


@pytest.mark.parametrize("write", WRITES)
async def test_a_stale_workers_write_is_refused_after_a_rescue(
    write: str, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    stale = await claim_one(store, queue)
    window.expire(job_id)
    assert (await store.rescue()).rescued == 1
    before = seen(window, job_id)

    assert not await WRITES[write](store, stale)

    assert seen(window, job_id) == before


@pytest.mark.parametrize("same_session", [True, False], ids=["its own worker", "another worker"])
@pytest.mark.parametrize("write", WRITES)
async def test_a_stale_workers_write_is_refused_after_the_next_claim(
    write: str, same_session: bool, store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    stale = await claim_one(store, queue)
    window.expire(job_id)
    await store.rescue()
    again = await claim_one(store if same_session else other, queue)
    assert again.attempt == stale.attempt + 1
    before = seen(window, job_id)

    assert not await WRITES[write](store, stale)

    assert seen(window, job_id) == before


def seen(window: Window, job_id: int) -> dict[str, Any]:
    """The row but for its crashes: who comes back tells that nobody crashed (forgive_crash.sql), and changes nothing else."""
    row = window.row(job_id)
    assert row is not None
    return {name: value for name, value in row.items() if name not in ("crashes", "ctid", "xmin")}


async def test_a_lock_on_the_ledger_keeps_no_beat_back(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    stale = await claim_one(store, queue)
    window.expire(job_id)
    await store.rescue()
    living = await claim_one(store, queue)
    with psycopg.connect(window.dsn) as other:
        other.execute("LOCK TABLE pulse.attempt IN ACCESS EXCLUSIVE MODE")
        beat = await store.beat([stale, living])
    assert beat.renewed == {living}


async def test_a_beat_for_two_attempts_of_one_job_renews_the_living_one_alone(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    stale = await claim_one(store, queue)
    window.expire(job_id)
    await store.rescue()
    living = await claim_one(store, queue)

    beat = await store.beat([stale, living])

    assert living in beat.renewed
    assert stale not in beat.renewed
    assert stale not in beat.locked


@pytest.mark.parametrize("late", [False, True])
async def test_a_completion_of_two_attempts_of_one_job_takes_the_living_ones_result(
    late: bool, store: WorkerStore, window: Window, queue: str
) -> None:
    others = [window.enqueue(queue), window.enqueue(queue), window.enqueue(queue)]
    job_id = others[1]
    claims = {c.id: c for c in await claim(store, queue)}
    window.expire(job_id)
    await store.rescue()
    living = await claim_one(store, queue)
    both = [end(claims[job_id], result='"stale"'), end(living, result='"living"')]
    ends = [*(both if late else reversed(both)), *(end(claims[i], result=f'"{i}"') for i in others if i != job_id)]

    await store.complete_and_claim(0, [], ends)

    expected = {i: str(i) for i in others} | {job_id: "living"}
    archived = window.run("SELECT id, result FROM job_archive WHERE id = ANY (%s)", others)
    assert {row["id"]: row["result"] for row in archived} == expected


@pytest.mark.parametrize("write", WRITES)
async def test_a_report_after_expiry_and_before_the_rescue_counts(
    write: str, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    ours = await claim_one(store, queue)
    window.expire(job_id)

    assert await WRITES[write](store, ours)


async def test_a_beat_after_expiry_keeps_the_watchdog_away(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    ours = await claim_one(store, queue)
    window.expire(job_id)
    await store.beat([ours])

    assert await store.rescue() == (0, 0)
    assert window.state(job_id) == "running"


async def test_a_batch_with_every_wrong_fence_and_a_locked_row_writes_the_right_rows_only(
    store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    # The locked row sends the whole batch through complete_unlocked.sql, which has a fence of its own.
    ids = window.enqueue_many(5, queue)
    right, attempt, session, locked, nobody = await claim(store, queue, 5)
    wrong = [
        forged(attempt, attempt=attempt.attempt + 1),
        forged(session, session=other.session),
        forged(nobody, id=NOBODY),
    ]
    before = {c.id: window.row(c.id) for c in (attempt, session, nobody, locked)}
    with window.connection.transaction():
        window.run("SELECT FROM job WHERE id = %s FOR UPDATE", locked.id)
        outcomes = [end(c) for c in (right, *wrong, locked)]
        accepted, refused, again = (await store.complete_and_claim(0, [], outcomes)).settlement

    assert [o.claim for o in accepted] == [right]
    assert {o.claim for o in refused} == set(wrong)
    assert [o.claim for o in again] == [locked]
    assert {i: window.row(i) for i in before} == before
    assert [i for i in ids if window.row(i) is None] == [right.id]


async def test_attempts_grow_by_one_at_each_claim_and_nothing_lowers_them(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    kinds: list[OutcomeKind] = ["snoozed", "released", "failed", "timeout"]
    for expected, kind in enumerate(kinds, 1):
        claimed = await claim_one(store, queue)
        assert claimed.attempt == expected
        assert (await store.settle([end(claimed, kind)])).accepted
        row = window.row(job_id)
        assert row is not None
        assert row["attempt"] == expected
    window.expire(job_id)
    assert (await claim_one(store, queue)).attempt == len(kinds) + 1


async def test_every_store_has_a_session_of_its_own(room_dsn: str, window: Window) -> None:
    async with open_store(room_dsn) as one, open_store(room_dsn) as two:
        assert len({one.session, two.session, 0}) == 3
        assert 0 < one.session < 2**63


async def around_a_lost_connection(store: WorkerStore, window: Window, queue: str) -> tuple[Claim, Claim]:
    """A claim before the claiming connection was lost, and one after."""
    window.enqueue_many(2, queue)
    before = await claim_one(store, queue)
    window.run(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE application_name = 'pulse-trio claims' AND datname = current_database()"
    )
    with pytest.raises(Exception, match="claims"):
        await claim(store, queue)
    (after,) = await claim(store, queue)
    return before, after


async def test_a_store_takes_a_new_session_when_its_claiming_connection_was_lost(
    store: WorkerStore, window: Window, queue: str
) -> None:
    before, after = await around_a_lost_connection(store, window, queue)

    assert after.session != before.session
    # A claim keeps the session it was made under.
    assert (await store.settle([end(before), end(after)])).refused == []


async def test_an_earlier_session_ends_when_no_job_of_it_is_held(
    store: WorkerStore, window: Window, queue: str
) -> None:
    """A process that lost its connection three times was listed as four workers, for as long as it lived."""

    def shown() -> list[int]:
        rows = window.run(
            "SELECT id FROM workers WHERE pid = %s AND state = 'running' ORDER BY started_at", os.getpid()
        )
        return [row["id"] for row in rows if row["id"] in sessions]

    before, after = await around_a_lost_connection(store, window, queue)
    sessions = [before.session, after.session]
    for _ in range(3):
        await store.touch(2, set(sessions), draining=False)
        assert shown() == sessions  # its job is held
    # Only the newest has slots, and jobs: the two are one worker, and were counted as twice its slots.
    records = {one.id: one for one in window.do(operations.workers()) if one.id in sessions}
    counted = [(records[one].concurrency, records[one].running, records[one].is_live) for one in sessions]
    assert counted == [(0, 0, False), (100, 2, True)]
    await store.touch(1, {after.session}, draining=False)
    assert shown() == sessions  # the job's last report may be on its way
    await store.touch(1, {after.session}, draining=False)
    assert shown() == [after.session]
    assert store.sessions.current == after.session
    assert (await store.settle([end(before), end(after)])).refused == []


@pytest.mark.parametrize("write", WRITES)
async def test_nobody_can_write_what_nobody_holds(write: str, store: WorkerStore, window: Window, queue: str) -> None:
    # The row of a waiting job has the session 0.
    job_id = window.enqueue(queue)
    nobodys = Claim(job_id, 0, 20, 0, 0, "", queue, "noop", "{}", None, 0)
    before = window.row(job_id)
    assert not await WRITES[write](store, nobodys)
    assert window.row(job_id) == before


async def test_nobody_can_complete_what_nobody_holds_beside_a_locked_row(
    store: WorkerStore, window: Window, queue: str
) -> None:
    window.enqueue(queue)
    locked = await claim_one(store, queue)
    waiting = window.enqueue(queue)
    nobodys = end(Claim(waiting, 0, 20, 0, 0, "", queue, "noop", "{}", None, 0))
    with window.connection.transaction():
        window.run("SELECT FROM job WHERE id = %s FOR UPDATE", locked.id)
        assert (await store.settle([end(locked), nobodys])).refused == [nobodys]
    assert window.state(waiting) == "available"
