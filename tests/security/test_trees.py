"""What stolen logins, and rows that no version of pulse-trio writes, can do to trees, their histories and their events."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.errors import CheckViolation, InsufficientPrivilege

from pulse_trio import Handlers, Job, SyncClient, Worker
from pulse_trio.sql import statement
from pulse_trio.store.links import WORKER_SETTINGS
from support.stores import Window, claim_one, end, open_store

if TYPE_CHECKING:
    from pulse_trio.jobs import Claim
    from support.databases import Databases
    from support.logins import Logins

TABLES = ("member", "durable_job", "history", "event", "recheck", "member_deadline")


def told(window: Window, claim: Claim, line: int, value: str | None = "1", kind: int = 1, **lies: Any) -> list[Any]:
    """Writes a line of a history with the fence of `claim`, or another."""
    given = {
        "ids": claim.id,
        "attempts": claim.attempt,
        "sessions": claim.session,
        "lines": line,
        "kinds": kind,
        "keys": f"{line}:step",
    }
    columns = {name: f"{{{of}}}" for name, of in (given | lies).items()}
    return window.run(
        "SELECT * FROM write_lines(%s::bigint[], %s::int[], %s::bigint[], %s::int[], %s::int[], %s::text[], ARRAY['s'],"
        " ARRAY[%s]::text[], ARRAY[NULL]::bigint[], ARRAY[1])",
        *columns.values(), value,
    )  # fmt: skip


def children(window: Window, claim: Claim) -> Any:
    (row,) = window.run(
        f"SELECT child_id, refused FROM start_children({', '.join(['%s'] * 17)}, ARRAY[NULL]::bigint[])",
        claim.id, claim.attempt, claim.session, 1, ["a"], [None], ["noop"], ["{}"], ["default"], [0], [None], [None], [None],
        [None], [20], [None], [None],
    )  # fmt: skip
    return row["refused"] or row["child_id"]


def kept(window: Window) -> list[Any]:
    return [
        window.run(f"SELECT * FROM {table} ORDER BY 1, 2") for table in ("member", "history", "event", "durable_job")
    ]


async def test_no_role_changes_or_removes_a_line_an_event_or_a_place_in_a_tree(logins: Logins) -> None:
    async with open_store(logins.as_("worker")) as store:
        with Window(logins.dsn) as owner:
            owner.enqueue()
            held = await claim_one(store)
            told(owner, held, 1)
            children(owner, held)
            owner.run("SELECT send_event(%s, 'go')", held.id)
            before = kept(owner)
            for role in ("producer", "waiter", "worker", "operator"):
                with logins.window(role) as thief:
                    for table in TABLES:
                        for query in (f"DELETE FROM {table}", f"TRUNCATE {table}", f"UPDATE {table} SET job_id = 1",
                                      f"INSERT INTO {table} (job_id) VALUES (1)"):  # fmt: skip
                            with pytest.raises(InsufficientPrivilege):
                                thief.run(query)
                    for query in ("SELECT prune_trees('1 s')", "SELECT prune_events()", "SELECT begin_anew(ARRAY[1])",
                                  "SELECT begins_afresh(1)",
                                  "SELECT FROM make_durable(1)", "SELECT look_at(1)", "SELECT cancel_children(1, 'parent')",
                                  "SELECT value FROM history", "SELECT payload FROM event"):  # fmt: skip
                        with pytest.raises((InsufficientPrivilege, psycopg.errors.UndefinedFunction)):
                            thief.run(query)
            assert kept(owner) == before


async def test_a_stolen_worker_writes_no_history_and_starts_no_child_of_what_it_could_not_have_claimed(
    logins: Logins,
) -> None:
    async with open_store(logins.as_("worker")) as store:
        with Window(logins.dsn) as owner, logins.window("worker") as thief:
            owner.enqueue_many(3)
            settled, running, cancelled = [await claim_one(store) for _ in range(3)]
            told(thief, settled, 1)
            told(thief, running, 1)
            await store.settle([end(settled)])
            SyncClient(logins.as_("operator")).cancel(cancelled.id)
            before = kept(owner)
            # Of a job that has ended, and with a fence that is not the running one's.
            assert told(thief, settled, 2) == []
            assert told(thief, running, 2, sessions=running.session + 1) == []
            assert told(thief, running, 2, attempts=running.attempt + 1) == []
            # A line that stands is not replaced, not even by the attempt that wrote it.
            assert told(thief, running, 1, '"another"')
            assert children(thief, settled) == "lost"
            assert children(thief, cancelled) == "cancelling"
            assert thief.run("SELECT * FROM resume(%s, %s, %s)", settled.id, settled.attempt, settled.session) == []
            assert kept(owner) == before
            with pytest.raises(CheckViolation, match="line_fits"):
                told(thief, running, 2, json.dumps("x" * 2**24))
            with pytest.raises(CheckViolation, match="line_fits"):
                told(thief, running, 2, keys="k" * 2000)


async def test_an_event_names_the_login_that_sent_it_and_a_producer_sends_none(logins: Logins) -> None:
    async with open_store(logins.as_("worker")) as store:
        with Window(logins.dsn) as owner:
            owner.enqueue()
            held = await claim_one(store)
            for role in ("waiter", "worker", "operator"):
                with logins.window(role) as sender:
                    assert sender.value("SELECT send_event(%s, 'go')", held.id) is True
            with logins.window("producer") as thief, pytest.raises(InsufficientPrivilege):
                thief.run("SELECT send_event(%s, 'go')", held.id)
            senders = [row["sent_by"] for row in owner.run("SELECT sent_by FROM event ORDER BY id")]
            assert senders == [logins.names[role] for role in ("waiter", "worker", "operator")]
            # Received once, however often it is asked for, and none of another job.
            owner.enqueue()
            other = await claim_one(store)
            with logins.window("worker") as thief:
                thief.use_settings(WORKER_SETTINGS)
                asked = {"ids": f"{{{other.id}}}", "attempts": f"{{{other.attempt}}}", "sessions": f"{{{other.session}}}",
                         "lines": "{1}", "keys": "{k}", "names": "{go}"}  # fmt: skip
                assert thief.connection.execute(statement("receive_events", "pulse"), asked).fetchall() == []
            assert owner.value("SELECT count(*) FROM event WHERE line IS NULL") == 3


# Rows that no version of pulse-trio writes: put there by the owner, or by a damaged disk.

MEMBER = "INSERT INTO member (job_id, root_id, parent_id, block, child_key)"
LINE = "UPDATE history SET {} WHERE job_id = {{bad}}"
HOSTILE = {
    "a kind that there is not": LINE.format("kind = 77"),
    "a moment that is no number": LINE.format("kind = 10, value = '\"soon\"'"),
    "a result of another type": LINE.format("value = '{{\"a\": [1]}}'"),
    "a value as deep as a well": LINE.format("value = (repeat('[', 5000) || repeat(']', 5000))::json"),
    "a key of another call": LINE.format("key = '9:event'"),
    "a failure of what is no list": LINE.format("kind = 7, key = '1:block', value = '{{\"failed\": 7}}'"),
    "a cancellation that says nothing": LINE.format("kind = 9, value = '[]'"),
    "numbers beyond all": LINE.format("line = 2147483647")
    + "; UPDATE durable_job SET first_block = 2147483647, depth = -5, version = -7 WHERE job_id = {bad}",
    "a history of 90 MiB": "INSERT INTO history (job_id, line, kind, key, value, attempt) SELECT {bad}, n, 1, n || ':step',"
    " to_json(repeat('x', 9 * 1024 * 1024)), 1 FROM generate_series(2, 11) n",
    "a child without a job": f"{MEMBER} VALUES (987654, {{bad}}, {{bad}}, 2, '0')",
    "a tree that is its own parent": f"{MEMBER} VALUES ({{bad}}, {{bad}}, {{bad}}, 2, '0')",
}


async def test_rows_that_no_version_writes_harm_their_own_jobs_alone(databases: Databases) -> None:
    handlers = Handlers()

    async def one() -> int:
        return 1

    @handlers.job
    async def child(job: Job) -> int:
        return 2

    @handlers.job(durable=True, max_attempts=2, suspend_after=0)
    async def waits(job: Job) -> int:
        first = await job.step(one)
        await job.wait_for_event("go")
        async with job.durable_nursery() as nursery:
            second = nursery.start_soon(child)
        return first + second.result

    with databases.migrated() as dsn, Window(dsn) as window:
        client = SyncClient(dsn)
        bad = {what: client.enqueue(waits).id for what in HOSTILE}
        good = client.enqueue(waits).id
        await Worker(handlers, dsn, burst=True, poll=0.05, log=False).run()
        for what, job_id in bad.items():
            window.run(HOSTILE[what].format(bad=job_id))
        for job_id in (*bad.values(), good):
            client.send_event(job_id, "go")
        await Worker(handlers, dsn, burst=True, poll=0.05, log=False).run()
        assert (window.job(good)["state"], window.job(good)["result"]) == ("completed", 3)
        dead = window.job(bad["a history of 90 MiB"])
        assert dead["state"] == "dead"
        assert "takes more than 64 MiB" in dead["error"]
        assert "--afresh" in dead["error"]
        for what, job_id in bad.items():
            # It ends, waits for its retry, or goes on where that row says nothing to it. What people read can be read.
            assert window.job(job_id)["state"] in {"dead", "retryable", "completed", "suspended", "available"}, what
            assert client.tree(job_id), what
        window.run("SELECT cancel_jobs_now(ARRAY(SELECT id FROM job))")
        window.run("SELECT recheck_jobs()")
        window.run("UPDATE maintenance SET maintained_at = '-infinity', swept_at = '-infinity'")
        window.run("SELECT upkeep('7 days')")
