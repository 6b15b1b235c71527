"""The audit trail: every act has its line, in the act's transaction, and nobody but the owner can change one."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.errors import InsufficientPrivilege

from pulse_trio import Handlers, InvalidArguments, SyncClient, Worker, open_client
from support.stores import Window

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes
    from support.logins import Logins


def lines(window: Window) -> list[tuple[Any, ...]]:
    """act, target, jobs: oldest first."""
    return [(r["act"], r["target"], r["jobs"]) for r in window.run("SELECT * FROM audit ORDER BY id")]


async def test_every_act_of_an_operator_has_its_line_with_the_login_and_the_name(logins: Logins) -> None:
    with Window(logins.dsn) as owner:
        ids = [owner.enqueue("q") for _ in range(4)]
    async with open_client(logins.as_("operator"), actor="Ada") as client:
        await client.cancel_many(ids, reason="enough")
        await client.retry(ids[0])
        await client.retry_many(state="cancelled", queue="q", limit=2)
        await client.delete(ids[0])
        await client.pause("q")
        await client.resume("q")
        await client.pause(kind="noop")
        await client.resume(kind="noop")
        await client.limit_queue("q", limit=3)
        await client.schedule("daily", "noop", cron="@daily")
        await client.pause_schedule("daily")
        await client.resume_schedule("daily")
        await client.run_schedule("daily")
        await client.remove_schedule("daily")
        trail = await client.audit()
        assert (await client.audit(job=ids[0]))[0].act == "delete"
        assert len(await client.audit(act="pause", actor="Ada", since=timedelta(hours=1))) == 3
        assert await client.audit(role="nobody") == []
    assert {(line.role, line.actor) for line in trail} == {(logins.names["operator"], "Ada")}
    assert [(line.act, line.target, line.jobs) for line in reversed(trail)] == [
        ("cancel", None, 4),
        ("retry", None, 1),
        ("retry", None, 2),
        ("delete", None, 1),
        ("pause", "queue q", 0),
        ("resume", "queue q", 0),
        ("pause", "kind noop", 0),
        ("resume", "kind noop", 0),
        ("limit", "queue q", 0),
        ("schedule", "schedule daily", 0),
        ("pause", "schedule daily", 0),
        ("resume", "schedule daily", 0),
        ("enqueue", "schedule daily", 1),
        ("unschedule", "schedule daily", 0),
    ]
    assert trail[-1].details == {"reason": "enough"}
    assert trail[-2].details is None
    assert trail[-3].details == {"filter": "state cancelled, queue q"}
    assert trail[-1].job_ids == ids
    assert trail[-4].details == {"asked_for": {"q noop": 1}}


def test_a_line_is_of_the_acts_transaction_and_of_every_way_to_act(logins: Logins) -> None:
    with Window(logins.dsn) as owner:
        job_id = owner.enqueue()
        with psycopg.connect(logins.as_("operator"), application_name="by hand") as connection:
            SyncClient(connection, actor="Ada").cancel(job_id)
            connection.rollback()
            assert lines(owner) == []
            connection.execute("SELECT pulse.cancel(%s)", [job_id])
            connection.execute("INSERT INTO pulse.queue (name, paused_at, retention) VALUES ('q', now(), '1 day')")
            connection.commit()
        assert lines(owner) == [("cancel", None, 1), ("pause", "queue q", 0), ("retention", "queue q", 0)]
        assert "by hand" in owner.value("SELECT DISTINCT actor FROM audit")
        owner.run("UPDATE maintenance SET retention = '30 days', audit_retention = '5 years'")
        assert lines(owner)[3:] == [("retention", "all queues", 0), ("retention", "audit", 0)]


def test_a_name_is_of_one_transaction_of_its_client(logins: Logins) -> None:
    """Not of the connection, which others use after it."""
    with psycopg.connect(logins.as_("operator"), autocommit=True, application_name="program") as connection:
        SyncClient(connection, actor="Ada").pause("a")
        SyncClient(connection).pause("b")
        with connection.transaction():
            SyncClient(connection, actor="Bob").pause("c")
    with Window(logins.dsn) as owner:
        assert [r["actor"].split(" at ")[0] for r in owner.run("SELECT actor FROM audit ORDER BY id")] == [
            "Ada",
            "program",
            "Bob",
        ]


@pytest.mark.parametrize("kind", ["producer", "worker", "operator"])
def test_no_role_writes_changes_or_removes_a_line(logins: Logins, kind: Any) -> None:
    with Window(logins.dsn) as owner, logins.window(kind) as thief:
        owner.run("INSERT INTO queue (name, paused_at) VALUES ('q', now())")
        before = owner.run("SELECT * FROM audit")
        for query in (
            "INSERT INTO audit_entry (role, actor, act) VALUES ('a', 'b', 'c')",
            "UPDATE audit_entry SET role = 'somebody'",
            "UPDATE audit SET role = 'somebody'",
            "DELETE FROM audit_entry",
            "DELETE FROM audit",
            "TRUNCATE audit_entry",
            "DROP TABLE audit_entry",
            "ALTER TABLE queue DISABLE TRIGGER audit",
            "UPDATE maintenance SET audit_retention = '1 s'",
            "SELECT note_act('pause', 'queue q', NULL)",
            "SELECT do_delete_jobs('{1}')",
            "SELECT do_retry_jobs('{1}')",
            "SELECT do_cancel_jobs('{1}')",
            "SET session_replication_role = replica",
        ):
            with pytest.raises(InsufficientPrivilege):
                thief.run(query)
        assert owner.run("SELECT * FROM audit") == before


async def test_lines_outlast_their_jobs_and_go_after_a_time_of_their_own(logins: Logins) -> None:
    with Window(logins.dsn) as owner:
        job_id = owner.enqueue()
        client = SyncClient(logins.as_("operator"))
        client.cancel(job_id, reason="why")
        client.delete(job_id)
        assert not owner.run("SELECT FROM cancellations")
        assert [line.act for line in client.audit(job=job_id)] == ["delete", "cancel"]
        owner.run("UPDATE audit_entry SET at = at - interval '13 months' WHERE act = 'cancel'")
        owner.run("UPDATE maintenance SET maintained_at = '-infinity'")
        owner.run("SELECT upkeep('7 days')")
        assert [line.act for line in client.audit(job=job_id)] == ["delete"]


async def test_a_worker_writes_a_line_for_what_its_code_changes_and_none_for_what_it_finds(logins: Logins) -> None:
    def handlers(every: float) -> Handlers:
        made = Handlers()
        made.queue("limited", limit=2)

        @made.cron(every=every, name="ticks")
        @made.job(queue="limited")
        async def ticking() -> None: ...

        return made

    with Window(logins.dsn) as owner:
        for _ in range(2):
            await Worker(handlers(1), logins.as_("worker"), burst=True).run()
            owner.run("UPDATE schedule SET next_due = now() - interval '1 s'")
        assert sorted(lines(owner)) == [("limit", "queue limited", 0), ("schedule", "schedule ticks", 0)]
        assert owner.value("SELECT count(*) FROM fires") > 0
        await Worker(handlers(60), logins.as_("worker"), burst=True).run()
        assert lines(owner)[2:] == [("schedule", "schedule ticks", 0)]
        assert {r["role"] for r in owner.run("SELECT role FROM audit")} == {logins.names["worker"]}


def test_a_line_names_at_most_a_thousand_jobs_and_counts_all(logins: Logins) -> None:
    with Window(logins.dsn) as owner:
        ids = owner.enqueue_many(1200)
        SyncClient(logins.as_("operator")).cancel_many(ids)
        (line,) = owner.run("SELECT jobs, cardinality(job_ids) AS named FROM audit")
        assert line == {"jobs": 1200, "named": 1000}


@pytest.mark.parametrize("actor", ["x" * 201, "a\0b", 7])
def test_a_name_that_cannot_be_stored_is_refused(actor: Any) -> None:
    with pytest.raises(InvalidArguments, match="An actor is text of at most 200 characters"):
        SyncClient("", actor=actor)


async def test_the_command_line_says_who_and_shows_the_trail(logins: Logins, processes: Processes) -> None:
    dsn = f"--dsn={logins.as_('operator')}"
    job_id = int(await processes.run("enqueue", "noop", "--as", "Ada", dsn))
    await processes.run("jobs", "cancel", str(job_id), "--as", "Ada\x1b[31m", dsn)
    await processes.run("queues", "pause", "default", dsn)
    printed = await processes.run("audit", dsn)
    assert "default noop: job" in printed
    assert "\x1b[31m" not in printed
    (line,) = json.loads(await processes.run("audit", "--job", str(job_id), "--act", "enqueue", "--json", dsn))
    assert (line["actor"], line["role"], line["job_ids"]) == ("Ada", logins.names["operator"], [job_id])
    (line,) = json.loads(await processes.run("audit", "--target", "queue default", "--since", "1h", "--json", dsn))
    assert line["act"] == "pause"
    assert line["actor"]
