"""A moment, or a length of time, that Python cannot hold: no role may write it, and no list, page or worker fails of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from pulse_trio import Handlers, Worker, migrate, open_client
from pulse_trio.cli.doctor import examine
from pulse_trio.migrate import known_migrations, migrate_sync
from pulse_trio.store import health, queues, watching
from support.sites import open_site
from support.stores import Window, claim, end, open_store

if TYPE_CHECKING:
    from support.logins import Logins

IMPOSSIBLE = {
    "timestamptz": (
        "infinity",
        "-infinity",
        "10000-01-01 00:00Z",
        "294000-01-01 00:00Z",
        "0001-01-01 00:00Z",
        "4000-01-01 BC",
    ),
    "interval": ("1100 years", "100000 years"),
}
UNBOUNDED = {
    # Written by each claim, beat and report, which would pay for a CHECK. Whatever reads them reads the nearest moment.
    **{("job", name): "a busy table" for name in ("lease_until", "ripe_at", "started_at", "suspected_at")},
    **{("job_archive", name): "a busy table" for name in ("created_at", "finished_at", "run_at", "started_at")},
    **{("attempt", name): "a busy table" for name in ("started_at", "ended_at")},
    # See tokens_missing (migrations/0134): a claim goes on whatever stands there, and writes what is right.
    ("bucket", "full_at"): "claims go on",
}
COLUMNS = """
SELECT c.relname AS "table", a.attname AS name, coalesce(nullif(t.typbasetype, 0), t.oid)::regtype::text AS type,
       nullif(t.typbasetype, 0) IS NOT NULL AS in_domain, format_type(a.atttypid, NULL) AS declared,
       EXISTS (SELECT FROM pg_roles r WHERE r.rolname = ANY (%s)
               AND (has_column_privilege(r.oid, c.oid, a.attnum, 'INSERT')
                    OR has_column_privilege(r.oid, c.oid, a.attnum, 'UPDATE')))
         AS written,
       ARRAY(SELECT pg_get_expr(k.conbin, k.conrelid) FROM pg_constraint k
             WHERE k.conrelid = c.oid AND k.contype = 'c' AND a.attnum = ANY (k.conkey)) AS checks,
       (SELECT string_agg(format('NULL::%%s AS %%I', format_type(o.atttypid, NULL), o.attname), ', ') FROM pg_attribute o
        WHERE o.attrelid = c.oid AND o.attnum > 0 AND NOT o.attisdropped AND o.attnum <> a.attnum) AS others
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid JOIN pg_type t ON t.oid = a.atttypid
WHERE c.relnamespace = 'pulse'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
AND a.attnum > 0 AND NOT a.attisdropped
AND coalesce(nullif(t.typbasetype, 0), t.oid) IN ('timestamptz'::regtype, 'interval'::regtype)
ORDER BY 1, 2
"""
OF_THE_OWNER = ("maintenance", "migration", "recheck")
"""Only functions of the schema write moments there. A burst waits ten seconds for a recheck that never comes."""
SHORT = {"timestamp with time zone": "timestamptz", "interval": "interval"}


def refuses(window: Window, column: dict[str, Any], value: str) -> bool:
    """Whether no row can get this value in the column, whatever stands in the others."""
    if column["in_domain"]:
        try:
            window.value(f"SELECT '{value}'::{column['declared']}::text")
        except psycopg.errors.CheckViolation:
            return True
        return False
    row = f"(SELECT '{value}'::{column['declared']} AS {column['name']}, {column['others']}) of_row"
    return any(window.value(f"SELECT ({check}) IS FALSE FROM {row}") for check in column["checks"])


def test_every_moment_that_a_role_may_write_is_bounded(logins: Logins) -> None:
    """A waiter closed a batch at "infinity", and /batches failed for everybody; an operator paused a queue then, and the list
    of queues and the doctor did. A new column of a table is found here."""
    with Window(logins.dsn) as window:
        written = [column for column in window.run(COLUMNS, list(logins.names.values())) if column["written"]]
        let_in = {
            (column["table"], column["name"])
            for column in written
            if not all(refuses(window, column, value) for value in IMPOSSIBLE[SHORT[column["type"]]])
        }
    assert len(written) > 20
    assert let_in == set(UNBOUNDED)


async def filled(dsn: str, window: Window) -> list[int]:
    """A database with a row in every table that has a moment."""
    ended, running, waiting, durable = (window.enqueue("mail") for _ in range(4))
    window.run("SELECT FROM make_durable(%s)", durable)
    window.run("INSERT INTO history (job_id, line, kind, key, attempt) VALUES (%s, 1, 1, '1:step', 1)", durable)
    window.run("SELECT send_event(%s, 'e', '1')", durable)
    async with open_store(dsn, lease=60.0) as store:
        (one,) = await claim(store, "mail", 1)
        assert one.id == ended
        await store.settle([end(one)])
        (two,) = await claim(store, "mail", 1)
        assert two.id == running
    window.run("SELECT cancel(%s)", running)
    window.run("UPDATE cancellation SET delivered_at = now()")
    window.run("INSERT INTO progress (job_id, attempt, fraction, updated_at) VALUES (%s, 1, 0.5, now())", running)
    window.run(
        "INSERT INTO attempt (job_id, attempt, session, started_at, ended_at, outcome, error)"
        " VALUES (%s, 1, 1, now(), now(), 'failed', 'no')",
        waiting,
    )
    window.run("UPDATE job SET suspect = true, suspected_at = now() WHERE id = %s", waiting)
    window.run(
        "INSERT INTO queue (name, paused_at, rate_count, rate_seconds) VALUES ('mail', now(), 5, 60), ('free', NULL, 5, 60)"
    )
    window.run("INSERT INTO paused_kind (kind) VALUES ('other')")
    window.run(
        "INSERT INTO schedule (name, kind, cron, next_due, paused_at) VALUES ('a', 'noop', '* * * * *', now(), now())"
    )
    window.run("INSERT INTO schedule (name, kind, every, next_due) VALUES ('b', 'noop', '1 h', now())")
    window.run("INSERT INTO schedule_fire (name, due_at) VALUES ('a', now()), ('b', now())")
    window.run(
        "INSERT INTO batch (name, closed_at, finished_at) VALUES ('x', NULL, NULL), ('y', now(), NULL), ('z', now(), now())"
    )
    window.run("INSERT INTO batch_job (batch_id, job_id) SELECT b.id, %s FROM batch b", ended)
    window.run("INSERT INTO bucket (queue, key, full_at) VALUES ('mail', '', now()), ('free', '', now())")
    return [ended, running, waiting, durable]


@pytest.mark.parametrize(
    "value", ["infinity", "-infinity", "294000-01-01 00:00Z", "4000-01-01 BC", "9999-12-31 23:59:59Z"]
)
async def test_no_list_and_no_page_fails_of_a_moment_that_cannot_be(dsn: str, value: str) -> None:
    """Rows as an older version let them in, all at once."""
    with Window(dsn) as window:
        jobs = await filled(dsn, window)
        for row in window.run(
            "SELECT conrelid::regclass::text AS place, quote_ident(conname) AS name FROM pg_constraint k"
            " JOIN pg_class c ON c.oid = k.conrelid WHERE NOT c.relispartition"
            " AND connamespace = 'pulse'::regnamespace AND contype = 'c'"
        ):
            window.run(f"ALTER TABLE {row['place']} DROP CONSTRAINT {row['name']}")
        window.run("ALTER DOMAIN due_time DROP CONSTRAINT due_time_check")
        written = 0
        for column in window.run(COLUMNS, []):
            if SHORT[column["type"]] == "timestamptz" and column["table"] not in OF_THE_OWNER:
                with window.connection.transaction():
                    window.run("SET LOCAL session_replication_role = replica")
                    window.run(
                        f"UPDATE {column['table']} SET {column['name']} = %s WHERE {column['name']} IS NOT NULL", value
                    )
                written += 1
        assert written > 20

        lists = ("jobs", "queues", "workers", "schedules", "batches", "doctor")
        async with open_site(dsn) as site:
            for path in ("", *lists, *(f"jobs/{job_id}" for job_id in jobs), *(f"batches/{n}" for n in (1, 2, 3))):
                for address in (f"/{path}", f"/api/{path or 'overview'}"):
                    answer = await site.get(address)
                    assert answer.status_code == 200, (address, answer.text[-600:])
        async with open_client(dsn) as client:
            assert {job.id for job in await client.jobs()} == set(jobs)
            for job_id in jobs:
                await client.job(job_id)
                await client.attempts(job_id)
            await client.tree(jobs[3])
            await client.fires("a")
            await client.cancellations(jobs[1])
            assert len(await client.queues()) == 2
            assert len(await client.schedules()) == 2
            await client.workers(gone=True)
            await client.audit()
            assert window.do(health.quarantined())
            assert len(window.do(watching.batches(limit=10))) == 3
            await client.open_batch(1)
        assert "looking" not in {finding.check for finding in examine(dsn, None)}
        if value.endswith("infinity"):
            done = window.enqueue("other")
            handlers = Handlers()
            handlers.job(noop)
            with trio.fail_after(60):
                await Worker(handlers, dsn, burst=True, queues=["other"]).run()
            assert window.value("SELECT state FROM jobs WHERE id = %s", done) == "completed"


async def noop() -> None: ...


def test_rows_of_an_older_version_are_brought_into_the_range(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what writes them next (a queue is resumed, a batch finishes) does not fail of the new bound."""
    before = [m for m in known_migrations() if m.version < 136]
    with monkeypatch.context() as older:
        older.setattr(migrate, "known_migrations", lambda: before)
        migrate_sync(empty_dsn)
    with Window(empty_dsn) as window:
        window.run("INSERT INTO queue (name, paused_at) VALUES ('a', 'infinity'), ('b', NULL), ('c', now())")
        window.run("INSERT INTO paused_kind (kind, paused_at) VALUES ('k', '-infinity')")
        window.run(
            "INSERT INTO schedule (name, kind, every, created_at, paused_at)"
            " VALUES ('s', 'noop', '5000 years', 'infinity', '-infinity')"
        )
        window.run("INSERT INTO schedule_fire (name, due_at) VALUES ('s', 'infinity'), ('s', '294000-01-01')")
        window.run("INSERT INTO batch (closed_at) VALUES ('infinity'), (NULL)")
        window.run(
            "INSERT INTO session (id, host, pid, version, concurrency, lease, longest_lease)"
            " VALUES (1, 'h', 1, '1', 1, '30 s', '5000 years')"
        )
        migrate_sync(empty_dsn)
        window.run("UPDATE queue SET max_running = 1")
        window.run("UPDATE schedule SET problem = 'no'")
        window.run("UPDATE batch SET finished_at = now()")
        window.run("UPDATE session SET running = 0")
        assert [record.name for record in window.do(queues.queues())] == ["a", "b", "c"]
        assert window.value("SELECT paused_at FROM paused_kind").year == 1
