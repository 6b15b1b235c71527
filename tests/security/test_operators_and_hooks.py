"""What roles may plant beside jobs (hooks of deaths, sessions, results, names in the audit trail) harms no other job."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pulse_trio import Handlers, SyncClient, Worker
from pulse_trio.errors import UsageError
from pulse_trio.migrate import check_sync, migrate_sync
from pulse_trio.store import health
from support.stores import Window, claim_one, end, open_store

if TYPE_CHECKING:
    from support.logins import Logins

MOST = 31_557_600_000
"""Seconds of a thousand years: the longest delay there is."""
HOOK: dict[str, Any] = {
    "kind": "doomed",
    "hook": "mourn",
    "takes": ["job_id"],
    "queue": "care",
    "priority": 0,
    "max_attempts": 5,
}
EXTREMES: dict[str, dict[str, Any]] = {
    "highest priority": {"priority": 2**31 - 1},
    "lowest priority": {"priority": -(2**31)},
    "longest delay": {"delay": MOST},
    "longest deadlines": {"deadline_in": MOST, "expires_in": MOST},
    "longest key": {"key": "k" * 512},
    "most attempts": {"max_attempts": 2**31 - 1},
    "names that are none": {"takes": [None, "x", "args", "kind", "kind"]},
    "all": {
        "takes": ["job_id", "kind", "queue", "error", "attempts", "died_at", "args"],
        "options": {"timeout": 1e9, "deadline": "x"},
    },
}


@pytest.mark.parametrize("case", EXTREMES)
async def test_no_hook_that_a_worker_declares_keeps_a_job_from_dying(case: str, logins: Logins) -> None:
    with logins.window("worker") as worker, Window(logins.dsn) as owner:
        async with open_store(logins.as_("worker")) as store:
            declared = True
            try:
                worker.run(
                    "SELECT declare_death_hooks(%s, %s::text::jsonb, '{}')",
                    store.session,
                    json.dumps([HOOK | EXTREMES[case]]),
                )
            except psycopg.Error:
                # Refused where it is declared: that is the better way.
                declared = False
            doomed = owner.enqueue("q", kind="doomed", args={"n": "x" * 100}, max_attempts=1)
            other = owner.enqueue("q", max_attempts=1)
            first, second = await claim_one(store, "q"), await claim_one(store, "q")
            await store.settle([end(first, "failed", error="E: no"), end(second, "failed", error="E: no")])
        assert [owner.state(job) for job in (doomed, other)] == ["dead", "dead"]
        assert owner.value("SELECT count(*) FROM job WHERE (options ->> 'death_of')::bigint = %s", doomed) == declared


async def test_hooks_that_name_each_other_and_die_make_no_chain(logins: Logins) -> None:
    handlers, calls = Handlers(), list[str]()

    @handlers.job(max_attempts=1, on_death="pong")
    async def ping(job_id: int = 0) -> None:
        calls.append("ping")
        raise RuntimeError("no")

    @handlers.job(max_attempts=1, on_death="ping")
    async def pong(job_id: int = 0) -> None:
        calls.append("pong")
        raise RuntimeError("no")

    with logins.window("producer") as producer:
        producer.enqueue(kind="ping", max_attempts=1)
    await Worker(handlers, logins.as_("worker"), burst=True, log=False).run()
    assert calls == ["ping", "pong"]


@pytest.mark.parametrize(
    "planted",
    [
        "lease = '1001 years'",
        "lease = '0'",
        "seen_at = 'infinity'",
        "seen_at = '-infinity'",
        "seen_at = '294276-12-31 23:00+00'",
        "seen_at = '4000-01-01', lease = '1001 years'",
    ],
)
async def test_no_session_that_a_worker_writes_keeps_others_from_being_seen_and_rescued(
    planted: str, logins: Logins
) -> None:
    with logins.window("worker") as stolen, Window(logins.dsn) as owner:
        async with open_store(logins.as_("worker")) as bad, open_store(logins.as_("worker")) as store:
            try:
                stolen.run(f"UPDATE session SET {planted} WHERE id = %s", bad.session)
            except psycopg.Error:
                return  # refused
            job_id = owner.enqueue("q")
            await claim_one(store, "q")
            owner.expire(job_id)
            await store.rescue()
            assert owner.state(job_id) == "available"
            operator = SyncClient(logins.as_("operator"))
            with logins.window("operator") as looking:
                assert store.session in {row["id"] for row in looking.run("SELECT id, state FROM workers")}
            await store.stale_workers()
            assert [q.name for q in operator.queues()] == ["q"]
            operator.run(health.quarantined())
            assert operator.cancel(job_id).state == "cancelled"


@pytest.mark.parametrize("act", ["cancel", "retry", "pause", "release"])
def test_a_name_of_a_megabyte_takes_little_room_in_the_audit_trail(act: str, logins: Logins) -> None:
    with Window(logins.dsn) as owner, logins.window("operator") as operator:
        job_id = owner.enqueue("q", delay=0 if act == "cancel" else 3600)
        if act == "release":
            owner.run(
                "UPDATE job SET state = 2, locked_by = 1, attempt = 1, lease_until = now() + interval '1 h' WHERE id = %s",
                job_id,
            )
        operator.run("SELECT set_config('pulse_trio.actor', repeat('x', 1000000), false)")
        match act:
            case "cancel":
                operator.run("SELECT cancel_jobs(ARRAY[%s]::bigint[], 'user', repeat('y', 1000000))", job_id)
            case "retry":
                operator.run("SELECT retry_jobs(ARRAY[%s]::bigint[])", job_id)
            case "pause":
                operator.run("INSERT INTO queue (name, paused_at) VALUES ('q', now())")
            case _:
                operator.run("SELECT release_jobs(ARRAY[%s]::bigint[], true, repeat('y', 1000000))", job_id)
        (line,) = owner.run("SELECT act, pg_column_size(a.*) AS size, octet_length(a::text) AS text FROM audit_entry a")
        assert line["act"] == act
        assert line["text"] < 4000


@pytest.mark.parametrize("result", ["{bad", '"\\u0000"', f'"{"x" * 1_100_000}"', "1e999999", "[" * 20000 + "]" * 20000])
def test_a_result_that_is_none_is_refused_and_the_job_runs_on(result: str, logins: Logins) -> None:
    with Window(logins.dsn) as owner, logins.window("operator") as operator:
        job_id = owner.enqueue("q")
        owner.run(
            "UPDATE job SET state = 2, locked_by = 1, attempt = 1, lease_until = now() + interval '1 h' WHERE id = %s",
            job_id,
        )
        with pytest.raises(psycopg.Error):
            operator.run("SELECT complete_jobs(ARRAY[%s]::bigint[], ARRAY[%s]::text[], 'Ada')", job_id, result)
        assert owner.state(job_id) == "running"
        assert owner.value("SELECT count(*) FROM audit_entry") == 0
        assert owner.value("SELECT count(*) FROM attempt") == 0


def test_a_producer_is_not_told_to_become_a_worker_by_the_command_line(logins: Logins) -> None:
    with pytest.raises(
        UsageError,
        match=r"A producer enqueues from code or SQL.*grants --waiter pulse_trio_producer_\w+, or --operator",
    ):
        check_sync(logins.as_("producer"))
    with pytest.raises(UsageError, match=r"The schema pulse belongs to \w+: connect as that role"):
        migrate_sync(logins.as_("producer"))
