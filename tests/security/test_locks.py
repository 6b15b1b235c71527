"""Each role takes every lock that PostgreSQL gives it, on tables, on rows and by advice, and keeps them while a fleet works."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, get_args

import psycopg
import pytest
import trio

from pulse_trio import Handlers, Worker, open_client
from pulse_trio.grants import RoleKind
from support.attacks import LOCK_MODES
from support.catalogue import things
from support.stores import Window

if TYPE_CHECKING:
    from pulse_trio import JobRef
    from support.logins import Logins

WITHIN = 30.0

STOPPED: dict[str, set[str]] = {
    "stranger": set(),
    "producer": set(),
    "waiter": set(),
    # What it may delete rows of: PostgreSQL then lets it lock the whole table. Both stop claims while they are held.
    "operator": {"paused_kind", "schedule"},
    "worker": {
        "batch", "batch_job", "bucket", "job", "permit", "progress", "schedule", "schedule_declaration", "schedule_fire",
        "session",
    },
}  # fmt: skip
"""By role: the tables that it can lock against those who read or write them."""


def dsn_of(logins: Logins, kind: str) -> str:
    return logins.as_stranger if kind == "stranger" else logins.as_(kind)  # pyright: ignore[reportArgumentType]


def locked(connection: psycopg.Connection[Any], place: str, mode: str) -> bool:
    try:
        connection.execute(f"LOCK TABLE {place} IN {mode} MODE NOWAIT".encode())
    except psycopg.errors.InsufficientPrivilege:
        return False
    except psycopg.errors.WrongObjectType:
        return False
    return True


@pytest.mark.parametrize("kind", [*get_args(RoleKind), "stranger"])
def test_the_tables_that_a_role_can_lock_against_others_are_those_that_were_decided(kind: str, logins: Logins) -> None:
    with Window(logins.dsn) as owner:
        tables = [place for thing, place in things(owner) if thing.startswith(("table ", "view "))]
    found: set[str] = set()
    with closing(psycopg.connect(dsn_of(logins, kind), autocommit=True)) as connection:
        for place in tables:
            for mode in LOCK_MODES[3:]:  # the first three are what reading and writing take
                with connection.transaction(force_rollback=True):
                    if locked(connection, f"pulse.{place.removeprefix('pulse.')}", mode):
                        found.add(place.removeprefix("pulse."))
    assert found == STOPPED[kind]


ADVICE = ("migrate", "idle", "idle default", "idle held", "waits", "suspects", "maintain", "prune", "limited held")


def hold(connection: psycopg.Connection[Any], tables: list[str], kind: str) -> int:
    """Takes all that it gets, in one transaction, and leaves it open; returns how many."""
    held = 0
    connection.execute("SET lock_timeout = '300ms'")
    attempts = [f"SELECT pg_advisory_lock(hashtextextended('pulse {name}', 0))" for name in ADVICE]
    attempts += [f"SELECT pg_advisory_lock(hashtextextended('pulse wait {n}', 0))" for n in range(1, 60)]
    for place in tables:
        attempts += [f"LOCK TABLE {place} IN {mode} MODE" for mode in LOCK_MODES[:3]]
        attempts += [f"SELECT 1 FROM {place} FOR {how}" for how in ("UPDATE", "NO KEY UPDATE", "SHARE", "KEY SHARE")]
    if kind != "stranger":
        # Inserted, and not committed; and a job that waits under the key is replaced, and not committed.
        attempts += [
            "SELECT pulse.enqueue('healthy', '{\"n\":1}', unique_key => 'mine')",
            "SELECT pulse.enqueue('healthy', '{\"n\":1}', unique_key => 'waiting', on_conflict => 'replace')",
            "SELECT * FROM pulse.key_holders('{default}', '{waiting}')",
            "SELECT * FROM pulse.reserve(5)",
        ]
    for attempt in attempts:
        try:
            with connection.transaction():
                connection.execute(attempt.encode())
            held += 1
        except psycopg.Error:
            continue
    return held


@pytest.mark.parametrize("kind", ["stranger", "producer", "waiter"])
async def test_a_fleet_works_while_a_role_holds_every_lock_that_it_gets(kind: str, logins: Logins) -> None:
    handlers = Handlers()
    handlers.queue("held", limit=2)
    done: set[int] = set()

    @handlers.job
    async def healthy(n: int) -> int:
        done.add(n)
        return n

    @handlers.job(queue="held", key=lambda n: str(n % 3))
    async def limited(n: int) -> int:
        done.add(n)
        return n

    with Window(logins.dsn) as owner:
        owner.enqueue("default", kind="healthy", args={"n": 0}, unique_key="waiting", delay=3600)
        owner.run("INSERT INTO batch (name, closed_at) VALUES ('held', NULL)")
        # The minute after an upgrade is over, in which claims of limited queues still ask for the lock of the version before.
        owner.run("INSERT INTO claim_turn VALUES ('', now()) ON CONFLICT DO NOTHING")
        owner.run("UPDATE claim_turn SET since = now() - interval '2 min' WHERE queue = ''")
        tables = [f"pulse.{p.removeprefix('pulse.')}" for t, p in things(owner) if t.startswith(("table ", "view "))]
    async with trio.open_nursery() as nursery:
        workers = [
            Worker(handlers, logins.as_("worker"), lease=6, heartbeat=1, watchdog=0.5, poll=0.2, grace=2)
            for _ in range(2)
        ]
        for worker in workers:
            nursery.start_soon(worker.run)
        with closing(psycopg.connect(dsn_of(logins, kind))) as connection:
            held = await trio.to_thread.run_sync(hold, connection, tables, kind)
            assert held > len(ADVICE)
            async with open_client(logins.as_("waiter"), handlers=handlers) as client:
                with trio.fail_after(WITHIN):
                    refs = await client.enqueue_many(healthy.request(n) for n in range(1, 41))
                    keyed = await client.enqueue_many(limited.request(n) for n in range(41, 61))
                    results: set[int] = set()

                    async def wait(ref: JobRef[int]) -> None:
                        results.add(await ref.result(timeout=WITHIN))

                    # At once: a wait that does not get its lock takes a second more.
                    async with trio.open_nursery() as waiting:
                        for ref in (*refs, *keyed):
                            waiting.start_soon(wait, ref)
                    assert results == set(range(1, 61))
                    async with client.batch() as batch:
                        await batch.enqueue(healthy, 61)
                    assert (await batch.wait(timeout=WITHIN)).succeeded
            connection.rollback()
        for worker in workers:
            worker.stop()
    assert done >= set(range(1, 62))
