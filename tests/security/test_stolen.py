"""What a stolen worker's login can do to what has finished, to the attempts, to the ledger and to retention: nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.errors import CheckViolation, InsufficientPrivilege

from pulse_trio import Handlers, SyncClient, UsageError, Worker, open_client
from pulse_trio.handlers import queue_limits
from pulse_trio.store import history, queues
from pulse_trio.store.operations import workers
from support.stores import Window, claim_one, end, open_store

if TYPE_CHECKING:
    from support.logins import Logins

FINISHED = (
    "INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,"
    " priority, state, queue, kind, args, result) "
)
NOTED = "INSERT INTO attempt (job_id, attempt, session, started_at, ended_at, outcome, error) "


def archived(window: Window, job_id: int) -> list[dict[str, object]]:
    return window.run("SELECT id, state, attempt, result FROM jobs WHERE id = %s", job_id)


def test_no_finished_job_can_be_forged(logins: Logins) -> None:
    """Of a job that was cancelled, of one that waits, of one that there never was."""
    with Window(logins.dsn) as owner, logins.window("worker") as thief:
        cancelled, waiting = owner.enqueue(), owner.enqueue()
        owner.run("SELECT cancel(%s)", cancelled)
        before = archived(owner, cancelled)
        for job_id in (cancelled, waiting, 10**9):
            with pytest.raises(InsufficientPrivilege, match="row-level security"):
                thief.run(
                    f"{FINISHED} VALUES (%s, now(), now(), now(), now(), 1, 1, 0, 20, 0, 4, 'default', 'noop', '{{}}', '7')",
                    job_id,
                )
        assert archived(owner, cancelled) == before
        for query in (
            "UPDATE job_archive SET result = '7'",
            "DELETE FROM job_archive",
            "TRUNCATE job_archive",
            "DROP TABLE job_archive_default",
            "ALTER TABLE job_archive DISABLE ROW LEVEL SECURITY",
            "INSERT INTO job_archive_default SELECT * FROM job_archive",
            "COPY job_archive FROM STDIN",
        ):
            with pytest.raises((InsufficientPrivilege, psycopg.errors.FeatureNotSupported)):
                thief.run(query)


async def test_a_finished_job_is_of_the_attempt_that_runs_of_its_session_and_of_this_hour(logins: Logins) -> None:
    async with open_store(logins.as_("worker")) as store:
        with Window(logins.dsn) as owner, logins.window("worker") as thief:
            owner.enqueue()
            held = await claim_one(store)
            row = (
                "SELECT j.id, {at}, now(), now(), now(), {session}, {attempt}, 0, 20, 0, 4, 'default', 'noop', '{{}}', '7'"
                " FROM job j"
            )
            true = {"at": "now()", "session": "j.locked_by", "attempt": "j.attempt"}
            for lie in (
                {"session": "j.locked_by + 1"},
                {"attempt": "j.attempt + 1"},
                {"at": "now() - interval '2 hours'"},
                {"at": "now() + interval '2 hours'"},
                {"at": "'infinity'"},
            ):
                with pytest.raises(InsufficientPrivilege, match="row-level security"):
                    thief.run(FINISHED + row.format(**true | lie))
            # What it may: end what it could have claimed itself.
            with pytest.raises(CheckViolation, match="result_fits"):
                thief.run((FINISHED + row.format(**true)).replace("'7'", "to_json(repeat('x', 1048576))"))
            assert (await store.complete_and_claim(0, [], [end(held, result='"done"')])).settlement.accepted
            assert owner.job(held.id)["result"] == "done"


async def test_no_attempt_can_be_forged_changed_or_removed(logins: Logins) -> None:
    async with open_store(logins.as_("worker")) as store:
        with Window(logins.dsn) as owner, logins.window("worker") as thief:
            owner.enqueue()
            held = await claim_one(store)
            await store.settle([end(held, "failed", error="ValueError: its own")])
            noted = owner.attempts(held.id)
            for values in ("(%s, 1, 1, now(), now(), 'failed', 'x')", "(%s, 2, 1, now(), now(), 'failed', 'x')"):
                with pytest.raises(InsufficientPrivilege, match="row-level security"):
                    thief.run(f"{NOTED} VALUES {values}", held.id)
            for query in (
                "UPDATE attempt SET outcome = 'completed'",
                "UPDATE attempt SET session = 0",
                "DELETE FROM attempt",
                "TRUNCATE attempt",
            ):
                with pytest.raises(InsufficientPrivilege):
                    thief.run(query)
            thief.run("UPDATE attempt SET error = 'lease expired: not so'")
            assert owner.attempts(held.id) == noted


async def test_the_ledger_says_who_asked_whatever_a_worker_writes(logins: Logins) -> None:
    async with open_store(logins.as_("worker")) as store:
        with Window(logins.dsn) as owner, logins.window("worker") as thief:
            waiting = owner.enqueue()
            operator = SyncClient(logins.as_("operator"))
            operator.cancel(waiting, reason="enough")
            owner.enqueue()
            running = await claim_one(store)
            operator.cancel(running.id)
            before = owner.run("SELECT * FROM cancellations ORDER BY id")
            for query in (
                "UPDATE cancellation SET requested_by = 'somebody else'",
                "UPDATE cancellation SET reason = NULL",
                "UPDATE cancellation SET job_id = 1",
                "UPDATE cancellation SET requested_at = now()",
                "DELETE FROM cancellation",
                "INSERT INTO cancellation (job_id, requested_by) VALUES (1, 'me')",
                "UPDATE cancellation SET ended_as = 'anything', ended_at = now()",
                "UPDATE cancellation SET ended_as = 'dead', ended_at = 'infinity'",
            ):
                with pytest.raises(InsufficientPrivilege):
                    thief.run(query)
            # Of the request that has ended nothing changes any more.
            thief.run("UPDATE cancellation SET ended_at = NULL, ended_as = NULL")
            assert owner.run("SELECT * FROM cancellations ORDER BY id") == before
            await store.settle([end(running, "cancelled", error="user")])
            assert owner.value("SELECT ended_as FROM cancellations WHERE job_id = %s", running.id) == "cancelled"


@pytest.mark.parametrize("asked", ["-10 days", "0 s", "1 s"])
def test_a_workers_upkeep_does_not_make_finished_jobs_go_earlier(logins: Logins, asked: str) -> None:
    with Window(logins.dsn) as owner, logins.window("worker") as thief:
        job_id = owner.enqueue()
        owner.run("SELECT cancel(%s)", job_id)
        owner.run("UPDATE job_archive SET finished_at = finished_at - interval '3 days'")
        thief.run("SELECT upkeep(%s)", asked)
        assert owner.job(job_id)["state"] == "cancelled"
        assert owner.run("SELECT FROM cancellations WHERE job_id = %s", job_id)


def test_the_owner_says_how_long_finished_jobs_stay_at_least(logins: Logins) -> None:
    with Window(logins.dsn) as owner, logins.window("worker") as worker:
        job_id = owner.enqueue()
        owner.run("SELECT cancel(%s)", job_id)
        owner.run("UPDATE job_archive SET finished_at = finished_at - interval '3 days'")
        owner.run("UPDATE maintenance SET retention = '1 day'")
        # A worker that is set to keep them for longer does.
        worker.run("SELECT upkeep('10 days')")
        assert owner.run("SELECT FROM jobs WHERE id = %s", job_id)
        owner.run("UPDATE maintenance SET maintained_at = '-infinity'")
        worker.run("SELECT upkeep('1 s')")
        assert not owner.run("SELECT FROM jobs WHERE id = %s", job_id)
        with pytest.raises(InsufficientPrivilege):
            worker.run("UPDATE maintenance SET retention = '1 s'")
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="below zero"):
            owner.run("SELECT maintain('-1 day')")


def test_a_worker_lengthens_a_queues_retention_and_an_operator_shortens_it(logins: Logins) -> None:
    def kept() -> object:
        return owner.value("SELECT retention::text FROM queue WHERE name = 'logs'")

    with Window(logins.dsn) as owner, logins.window("worker") as worker:
        worker.run("INSERT INTO queue (name, retention) VALUES ('logs', '1 s')")
        assert kept() == "7 days"
        worker.run("UPDATE queue SET retention = '9 days'")
        assert kept() == "9 days"
        for shorter in ("NULL", "'1 s'"):
            worker.run(f"UPDATE queue SET retention = {shorter}")
            assert kept() == "9 days"
        with pytest.raises(UsageError, match=r"'logs' are kept for 9 d.*a worker's role may only lengthen that"):
            worker.do(history.set_retention("logs", timedelta(hours=1)))
        assert kept() == "9 days"
        with logins.window("operator") as operator:
            operator.do(history.set_retention("logs", timedelta(hours=1)))
        assert kept() == "01:00:00"
        # One that has none of its own is refused, too, and has none afterwards: the workers' settings may keep it for longer.
        with pytest.raises(UsageError, match=r"'mails' are kept for 7 d.*a worker's role may only lengthen that"):
            worker.do(history.set_retention("mails", timedelta(days=3)))
        assert owner.value("SELECT count(*) FROM queue WHERE name = 'mails' AND retention IS NOT NULL") == 0
        assert owner.value("SELECT count(*) FROM audit WHERE target::text LIKE '%mails%'") == 0
        # What code declares of a queue's limits leaves it.
        worker.do(queues.limit(queue_limits("logs", limit=3, retention=timedelta(minutes=1))))
        assert kept() == "01:00:00"


@pytest.mark.parametrize(
    "change",
    [
        "lease = interval '170000000 years'",
        "lease = interval '-1 s'",
        "seen_at = 'infinity'",
        "started_at = '290000-01-01'",
        "ended_at = '-infinity'",
        "host = repeat('x', 100000)",
    ],
)
async def test_no_session_of_a_worker_makes_the_others_or_the_upkeep_fail(logins: Logins, change: str) -> None:
    async with open_store(logins.as_("worker")):
        with logins.window("worker") as thief, pytest.raises((CheckViolation, psycopg.DataError)):
            thief.run(f"UPDATE session SET {change}")


async def test_the_longest_lease_that_can_be_set_is_looked_at_and_maintained(logins: Logins) -> None:
    async with open_store(logins.as_("worker")):
        with Window(logins.dsn) as owner:
            owner.run("UPDATE session SET lease = '1000 years', seen_at = '2000-01-02'")
            owner.run("UPDATE queue SET retention = '1000 years'")
            owner.run("SELECT upkeep('1000 years')")
            assert [w.state for w in SyncClient(logins.as_("operator")).run(workers())] == ["running"]


async def test_what_a_worker_ends_in_every_way_passes_the_policies(logins: Logins) -> None:
    """Completed, failed, dead, discarded and cancelled under a login that owns nothing."""
    handlers = Handlers()

    @handlers.job
    async def done(n: int) -> int:
        return n

    @handlers.job(max_attempts=2, backoff_base=0.001)
    async def failing() -> None:
        raise ValueError

    async with open_client(logins.as_("operator"), handlers=handlers) as client:
        refs = await client.enqueue_many(done.request(n) for n in range(30))
        dead = await client.enqueue(failing)
        await Worker(handlers, logins.as_("worker"), burst=True, concurrency=4).run()
        assert [(await client.job(ref.id)).result for ref in refs] == list(range(30))
        assert (await client.job(dead.id)).state == "dead"
        assert [a.outcome for a in await client.attempts(dead.id)] == ["failed", "failed"]


def test_a_worker_with_the_rights_of_the_first_version_forges_as_little(logins: Logins) -> None:
    """Between `migrate` and `grants` roles have what they had: whole tables, where it is columns now."""
    with Window(logins.dsn) as owner, logins.window("worker") as thief:
        owner.run(f"GRANT UPDATE ON attempt, cancellation TO {logins.names['worker']}")
        job_id = owner.enqueue()
        owner.run("SELECT cancel(%s, 'enough')", job_id)
        owner.run(f"{NOTED} VALUES (%s, 1, 1, now(), now(), 'failed', 'its own')", job_id)
        before = owner.run("SELECT * FROM cancellations"), owner.attempts(job_id)
        thief.run("UPDATE cancellation SET requested_by = 'somebody else'")
        thief.run("UPDATE attempt SET outcome = 'completed'")
        assert (owner.run("SELECT * FROM cancellations"), owner.attempts(job_id)) == before
        with pytest.raises(InsufficientPrivilege, match="row-level security"):
            thief.run(f"{NOTED} VALUES (%s, 2, 1, now(), now(), 'failed', 'x')", job_id)
