"""What the statements of durable jobs read, in pages, on tables that are empty, large, and full of dead rows: as much in each.

They are functions, so EXPLAIN shows no plan of theirs; and their plans are kept by a session that lives from empty to large.
`PULSE_TRIO_TREE_ROWS=1000000` has tables of a million rows.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pulse_trio.sql import statement
from pulse_trio.store.links import WATCHDOG_SETTINGS, WORKER_SETTINGS
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator

    from support.databases import Databases

ROWS = int(os.environ.get("PULSE_TRIO_TREE_ROWS", "60000"))
LINES = 10_000
"""The most lines of one history."""
EVENTS = 9_999
"""Events that one job has not received, but for one as many as it may have."""
WATCHDOGS = {"end_overdue", "look_slowly"}
PLANNED = 7
"""Calls after which a session keeps a plan."""


class Job:
    """A durable job that runs: its fence is attempt 1 of session 9."""

    def __init__(self, window: Window, *, children: int = 0, lines: int = 0, events: int = 0) -> None:
        self.window = window
        self.id = window.enqueue(f"q{children}{lines}{events}")
        window.run(
            "UPDATE job SET state = 2, attempt = 1, locked_by = 9, lease_until = now() + interval '1 h', started_at = now(),"
            " options = '{\"tree\": 1}' WHERE id = %s",
            self.id,
        )
        window.run("INSERT INTO durable_job (job_id, root_id) VALUES (%s, %s)", self.id, self.id)
        window.run(
            "INSERT INTO history (job_id, line, kind, key, value, attempt)"
            " SELECT %s, n, 1, n || ':step', '1', 1 FROM generate_series(1, %s) n",
            self.id,
            lines,
        )
        window.run(
            "INSERT INTO event (job_id, name, payload) SELECT %s, 'go', '1' FROM generate_series(1, %s)",
            self.id,
            events,
        )
        for _ in range(children):
            child = window.enqueue("children", kind="child")
            window.run(
                "INSERT INTO member (job_id, root_id, parent_id, block, child_key) VALUES (%s, %s, %s, 0, %s)",
                child, self.id, self.id, f"{child}",
            )  # fmt: skip


def asked(name: str, job: Job, lines: int = 0) -> dict[str, Any]:
    """The parameters of a statement about one job."""
    fence = {"ids": f"{{{job.id}}}", "attempts": "{1}", "sessions": "{9}"}
    parent = {"parent": job.id, "attempt": 1, "session": 9, "block": 0}
    match name:
        case "write_lines":
            return fence | {
                "lines": f"{{{lines + 1}}}", "kinds": "{1}", "keys": "{k}", "names": "{NULL}", "values": "{1}",
                "events": "{NULL}", "firsts": "{-1}",
            }  # fmt: skip
        case "resume" | "begin_afresh" | "comes_after_deadline":
            return {"id": job.id, "attempt": 1, "session": 9}
        case "missing_lines":
            return fence | {"lines": f"{{{lines + 1}}}", "children": f"{{{job.id}}}"}
        case "receive_events":
            return fence | {"lines": f"{{{lines + 1}}}", "keys": "{k}", "names": "{go}"}
        case "suspend_jobs":
            return fence | {
                "blocks": '{"{0}"}', "fail_blocks": '{"{0}"}', "events": '{"{other}"}', "moments": "{NULL}",
                "said": "{NULL}",
            }  # fmt: skip
        case "start_children":
            nothing = ("digests", "run_ats", "delays", "deadlines", "expiries", "options", "keys", "reserved")
            return parent | dict.fromkeys(nothing, "{NULL}") | {
                "child_keys": "{a}", "kinds": "{c}", "args": '{"{}"}', "queues": "{q}", "priorities": "{0}",
                "max_attempts": "{1}",
            }  # fmt: skip
        case "look_at_block":
            return parent | {"candidates": "{}"}
        case "end_block":
            return parent
        case "children_like":
            return parent | {"digests": "{}"}
        case "fail_block":
            return parent | {"ids": f"{{{job.id}}}"}
        case "members":
            return parent | {"ended": False, "ids": None}
        case "cancel_block":
            return parent | {"cause": "sibling"}
        case "recheck":
            return {"most": 100}
        case "end_overdue":
            return {"limit": 100}
        case "look_slowly":
            return {"after": job.id - 1, "limit": 1}
        case "send_event":
            return {"job_id": job.id, "name": "more", "payload": "1", "event_key": "k"}
        case "retry_job_afresh":
            return {"ids": [job.id], "delay": 0, "spacing": 0, "filter": None, "state": None}
        case _:
            raise AssertionError(name)


BOUNDS = {
    "write_lines": 90, "receive_events": 60, "suspend_jobs": 160, "start_children": 160, "look_at_block": 80, "members": 160,
    "end_block": 80, "fail_block": 80, "children_like": 80, "begin_afresh": 80, "comes_after_deadline": 280,
    "missing_lines": 60, "cancel_block": 250, "recheck": 160, "end_overdue": 120, "look_slowly": 80, "send_event": 180,
}  # fmt: skip
"""Pages, of which each probe of an index takes three or four. What was taken back before leaves dead entries, of which a few
more are touched while another session's snapshot keeps them: by `cancel_block` 174 to 221."""


def read(window: Window, name: str, job: Job, lines: int = 0) -> int:
    """The pages that a statement reads."""
    window.use_settings(WATCHDOG_SETTINGS if name in WATCHDOGS else WORKER_SETTINGS)
    if name == "recheck":
        window.run("INSERT INTO recheck (job_id) VALUES (%s)", job.id)
    if name == "comes_after_deadline":
        window.run('UPDATE job SET options = \'{"tree": 1, "deadline": 1}\' WHERE id = %s', job.id)
    if name == "begin_afresh":
        window.run(
            "INSERT INTO history (job_id, line, kind, key, attempt) VALUES (%s, 20000, 10, '0:afresh', 1)"
            " ON CONFLICT DO NOTHING", job.id,
        )  # fmt: skip
    if name == "end_overdue":
        window.run("DELETE FROM member_deadline WHERE deadline < now()")
        window.run("INSERT INTO member_deadline VALUES (now() - interval '1 s', %s)", job.id)
    return window.pages(statement(name, "pulse"), asked(name, job, lines))


def fill(window: Window) -> None:
    """Other trees: as many jobs, members, lines, events, rechecks and deadlines as `ROWS`, in trees of a hundred."""
    mark = "'{\"tree\": 1}'"
    window.run(
        "INSERT INTO job (id, kind, queue, run_at, options) OVERRIDING SYSTEM VALUE"
        f" SELECT 10000000 + n, 'other', 'z' || n %% 3, '9990-01-01', {mark} FROM generate_series(1, {ROWS}) n".replace(
            "%%", "%"
        )
    )
    window.run(
        "INSERT INTO member SELECT 10000000 + n, 9000000 + n / 100, 9000000 + n / 100, 0, n::text"
        f" FROM generate_series(1, {ROWS}) n"
    )
    window.run(
        f"INSERT INTO durable_job (job_id, root_id) SELECT 10000000 + n, 9000000 + n / 100 FROM generate_series(1, {ROWS}) n"
    )
    window.run(
        "INSERT INTO history (job_id, line, kind, key, value, attempt)"
        f" SELECT 10000000 + n / 10, n % 10 + 1, 1, n::text, '1', 1 FROM generate_series(1, {ROWS}) n"
    )
    window.run(
        f"INSERT INTO event (job_id, name, payload) SELECT 10000000 + n / 10, 'go', '1' FROM generate_series(1, {ROWS}) n"
    )
    window.run(
        f"INSERT INTO recheck (job_id, due_at) SELECT n, now() + interval '1 day' FROM generate_series(1, {ROWS}) n"
    )
    window.run(f"INSERT INTO member_deadline SELECT now() + interval '1 day', n FROM generate_series(1, {ROWS}) n")
    window.run(
        "INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,"
        " priority, state, queue, kind, args)"
        " SELECT 20000000 + n, now(), now(), now(), now(), 9, 1, 0, 20, 0, 4, 'q', 'noop', '{}'"
        f" FROM generate_series(1, {ROWS}) n"
    )
    window.run(
        "INSERT INTO attempt (job_id, attempt, session, started_at, ended_at, outcome)"
        f" SELECT 10000000 + n, 1, 9, now(), now(), 'suspended' FROM generate_series(1, {ROWS}) n"
    )


def bloat(window: Window) -> None:
    """Half of what other trees have is gone, and nothing has vacuumed; of rechecks all, as of a queue."""
    for table in ("job", "member", "durable_job", "history", "event"):
        window.run(f"DELETE FROM {table} WHERE {'id' if table == 'job' else 'job_id'} % 2 = 1 AND"
                   f" {'id' if table == 'job' else 'job_id'} > 10000000")  # fmt: skip
    window.run("UPDATE recheck SET due_at = now() - interval '1 s'")
    window.run("DELETE FROM recheck")


@pytest.fixture(scope="module")
def stages(databases: Databases) -> Generator[dict[str, dict[str, int]]]:
    """The pages that each statement reads, by the state of the tables. One session plans and asks in all of them."""
    with databases.migrated() as dsn, Window(dsn) as window:
        plain, long = Job(window, children=5), Job(window, children=5, lines=LINES, events=EVENTS)
        for table in ("recheck", "member", "durable_job", "history", "event", "member_deadline"):
            window.run(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        found: dict[str, dict[str, int]] = {}

        def ask(stage: str) -> None:
            found[stage] = {name: read(window, name, plain) for name in BOUNDS}
            found[f"{stage}, long history"] = {
                name: read(window, name, long, LINES)
                for name in ("write_lines", "receive_events", "suspend_jobs", "send_event")
            }  # fmt: skip
            found[f"{stage}, long history"]["resume"] = read(window, "resume", long)

        for _ in range(PLANNED):
            ask("empty")
        fill(window)
        ask("large, not analyzed")
        for table in ("job", "member", "durable_job", "history", "event", "recheck", "member_deadline", "attempt"):
            window.run(f"ANALYZE {table}")
        ask("large")
        bloat(window)
        read(window, "recheck", plain)  # the first that comes marks the dead entries
        ask("bloated")
        with Window(dsn) as fresh:
            found["bloated, a new session"] = {name: read(fresh, name, plain) for name in BOUNDS}
        yield found


@pytest.mark.parametrize("name", BOUNDS)
def test_what_a_statement_reads_does_not_grow_with_other_trees(
    stages: dict[str, dict[str, int]], name: str, server_dsn: str
) -> None:
    with psycopg.connect(server_dsn) as server:
        # PostgreSQL 14 to 16 read the job's own lines with more pages, by 90 at the most lines that a history has.
        more = 100 if name == "suspend_jobs" and server.info.server_version < 170000 else 0
    counts = {stage: pages[name] for stage, pages in stages.items() if name in pages}
    if name == "recheck":
        # Entries of rows that are gone stay in the index until autovacuum comes, which is after 1,000 of them.
        del counts["bloated"], counts["bloated, a new session"]
    assert max(counts.values()) <= BOUNDS[name] + more, counts


def test_a_history_of_the_most_lines_is_read_once_by_its_pages_and_not_at_all_to_write_the_next_line(
    stages: dict[str, dict[str, int]],
) -> None:
    counts = {stage: pages["resume"] for stage, pages in stages.items() if "resume" in pages}
    # 10,000 short lines take about 100 pages, in order of the index at most a page for each.
    assert max(counts.values()) < 400, counts


def test_functions_planned_on_an_analyzed_table_of_one_row_read_only_their_own_rows(dsn: str) -> None:
    calls = {
        "members_of": "SELECT * FROM members_of(%(id)s::bigint, 1, 9, NULL, false, NULL)",
        "write_lines": (
            "SELECT * FROM write_lines("
            "ARRAY[%(id)s]::bigint[], '{1}', '{9}', '{1}', '{1}', '{1:step}', '{s}', '{1}', '{NULL}', '{0}')"
        ),
        "cancel_block": "SELECT * FROM cancel_block(%(id)s::bigint, 1, 9, 0, 'sibling')",
        "look_slowly": "SELECT * FROM look_slowly()",
        "cancel_rows": "SELECT * FROM cancel_rows(ARRAY[%(id)s]::bigint[], NULL, NULL, false)",
    }  # fmt: skip
    entries = "SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relid = 'job'::regclass"
    with Window(dsn) as window, Window(dsn) as worker:
        # An ANALYZE of its own would mend the plans.
        window.run("ALTER TABLE job SET (autovacuum_enabled = off)")
        first = Job(window)
        window.run("VACUUM ANALYZE job, member, durable_job, history, cancellation, recheck")
        window.publish_statistics()
        worker.use_settings(WORKER_SETTINGS)
        for call in calls.values():
            worker.connection.execute(call.encode(), {"id": first.id})
        window.run(
            "INSERT INTO job (kind, queue, state, attempt, locked_by, lease_until)"
            " SELECT 'noop', 'many', 2, 1, 9, now() + interval '1 h' FROM generate_series(1, 20000)"
        )
        parent = Job(window, children=50)
        read: dict[str, int] = {}
        for name, call in calls.items():
            before = window.value(entries)
            worker.connection.execute(call.encode(), {"id": parent.id})
            worker.run("SELECT pg_stat_force_next_flush()")
            worker.run("SELECT 1")
            read[name] = int(window.value(entries) - before)
    # A few probes for each of fifty children. Before: all 20,000 for each child.
    assert max(read.values()) <= 1500, read


def test_ids_retried_and_deleted_read_their_own_rows_alone_whatever_was_planned_before(dsn: str) -> None:
    calls = {
        "retry_jobs": "SELECT * FROM retry_jobs(%(ids)s::bigint[])",
        "delete_jobs": "SELECT * FROM delete_jobs(%(ids)s::bigint[])",
    }
    read_so_far = (
        "SELECT sum(idx_tup_read) + (SELECT seq_tup_read FROM pg_stat_user_tables WHERE relid = 'job'::regclass)"
        " FROM pg_stat_user_indexes WHERE relid = 'job'::regclass"
    )
    with Window(dsn) as window, Window(dsn) as operator:
        window.run("ALTER TABLE job SET (autovacuum_enabled = off)")
        first = Job(window)
        window.run("VACUUM ANALYZE job")
        # A session of an operator's, whose plans are kept from the first call on.
        operator.run("SET plan_cache_mode = force_generic_plan")
        for call in calls.values():
            operator.connection.execute(call.encode(), {"ids": [first.id]})
        ids = [
            row["id"]
            for row in window.run("INSERT INTO job (kind) SELECT 'a' FROM generate_series(1, 20000) RETURNING id")
        ]
        read: dict[str, int] = {}
        for name, call in calls.items():
            before = window.value(read_so_far)
            operator.connection.execute(call.encode(), {"ids": ids[:100]})
            operator.publish_statistics()
            operator.run("SELECT 1")
            read[name] = int(window.value(read_so_far) - before)
    # Before: all 20,000 for each of the hundred.
    assert max(read.values()) <= 500, read
