"""Plans: no statement on the workers' path may read the live table from end to end, whatever it held when it was planned."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio.postgres import TrioConnection
from pulse_trio.postgres.pins import pins_query
from pulse_trio.sql import statement
from pulse_trio.store.links import WATCHDOG_SETTINGS, WORKER_SETTINGS
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from support.databases import Databases

ROWS = 100_000
FENCE = {"ids": "{1,2,3}", "attempts": "{1,1,1}", "sessions": "{1,1,1}"}
STATEMENTS: dict[str, dict[str, Any]] = {
    "complete_and_claim": FENCE | {
        "results": "{1,2,3}", "keep": True, "session": 7, "lease": "30 s", "leases": '{"q1": "2 s"}', "limit": 50,
        "size": 1048576, "queues": "{q0,q1,q2}",
        "priorities": "{1,0,0}", "cursor_run_ats": "{-infinity,-infinity,2000-01-01}", "cursor_ids": "{0,0,7}",
        "paused_kinds": "{}",
    },
    "complete_unlocked": FENCE | {"results": "{1,2,3}", "keep": True},
    "fail": FENCE | {"outcomes": "{failed,snoozed,discarded}", "delays": "{1,1,1}", "errors": "{a,b,c}", "patience": "1 day"},
    "beat": FENCE | {"lease": "30 s", "leases": None},
    "settled": FENCE | {"traceless": "{t,f,t}"},
    "doctor_put_back": {},
    "doctor_recent": {},
    "doctor_left": {"sessions": "{7,8}", "most": 100},
    "doctor_owing": {"most": 2000},
    "doctor_ahead": {"most": 1000},
    "cancel_delivered": FENCE,
    "cancel_requested": {"ids": "{1,2,3}"},
    "running_fences": {"ids": "{1,2,3}"},
    "keys_of_finished": {"ids": "{1,2,3}"},
    "void_claims": FENCE,
    "bury": {"id": 5, "attempt": 1, "session": 7, "outcome": "failed", "error": "it failed", "bare": False},
    "forgive_crash": FENCE | {"expired": "gone", "came_back": "back"},
    "cancel_close": {},
    "cancel_ended": {"ids": "{1,2,3}"},
    "await_transaction": {"id": 7},
    "suspects_due": {"queues": None},
    "claim_suspect": {"session": 7, "lease": "30 s", "queue": "q0", "fresh": True},
    "quarantined": {"id": None},
    "transaction_done": {"id": 7, "attempt": 1, "session": 9, "keep": False},
    "progress": FENCE | {"fractions": "{0,0.5,1}", "messages": "{a,b,NULL}"},
    "slots": {
        "queues": None, "after_queue": "", "after_nth": 1, "after_priority": -(2**31) - 1, "after_keyed": "", "told": "{q0}",
        "most": 256,
    },
    "prune_permits": {},
    "metrics_queues": {"most": 100},
    "queue_settings": {"most": 100},
    "queue_estimates": {},
    "recently_dead": {"most": 100},
    "recent_figures": {"minutes": 60, "probes": 120, "at": None},
    "batches": {"limit": 50, "before": 2**62, "few": 1000, "most": 100000},
    "enqueue_unique": {
        "kinds": "{a,b}", "args": '{"{}","{}"}', "queues": "{q0,q1}", "priorities": "{0,0}", "run_ats": "{NULL,NULL}",
        "delays": "{NULL,NULL}", "max_attempts": "{20,20}", "options": "{NULL,NULL}", "unique_keys": "{a,NULL}",
        "deadlines": "{60,NULL}", "expiries": "{NULL,NULL}", "unique_fors": "{60,NULL}", "unique_afters": "{NULL,NULL}",
        "keys": "{NULL,k}", "replacing": "{true,false}",
    },
    "jobs": {"ids": "{7,8}"},
    "job": {"id": 7},
    "why_waits": {"id": 7},
    "enqueued_as": {"id": 7},
    "outcome": {"id": 7},
    "ended": {"ids": "{1,2,-3}"},
    "batch_live": {"id": 7},
    "batch_status": {"id": 7},
}  # fmt: skip
CLIENTS = {
    "doctor_put_back",
    "doctor_recent",
    "doctor_left",
    "doctor_owing",
    "doctor_ahead",
    "jobs",
    "cancel_ended",
    "enqueue_unique",
    "job",
    "why_waits",
    "enqueued_as",
    "outcome",
    "ended",
    "batch_live",
    "batch_status",
    "await_transaction",
    "transaction_done",
}
"""Run on connections of the application's own, with PostgreSQL's default settings."""
WATCHDOG: dict[str, dict[str, Any]] = {
    "expired": {"limit": 1000},
    "held_by": {"sessions": [1, 2], "limit": 1000},
    "fail": STATEMENTS["fail"],
    "refund": {"ids": "{1,2,3}", "sessions": "{1,2}"},
    "batch_due": {"limit": 100, "aside": []},
    "batch_advance": {"ids": "{1,2,3}"},
    "batch_finish": {"ids": "{1,2,3}"},
}

Connection = TrioConnection[Any]


def fill(window: Window) -> None:
    """A backlog over three queues and two priorities, 1 % of it running with a living lease, and as much archived."""
    window.run(
        "INSERT INTO job (kind, queue, priority, run_at, unique_key, state, attempt, locked_by, lease_until)"
        " SELECT 'noop', 'q' || n % 3, n % 2, now() - interval '1 h' + n * interval '1 ms',"
        "   CASE WHEN n % 50 = 0 THEN 'u' || n END, 1 + running, running, 9 * running,"
        "   CASE running WHEN 1 THEN now() + interval '1 h' ELSE 'infinity' END"
        f" FROM generate_series(1, {ROWS}) n, LATERAL (SELECT (n % 100 = 0)::int AS running) r"
    )
    window.run(
        "INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,"
        " priority, state, queue, kind, args)"
        f" SELECT n + {ROWS}, now(), now(), now(), now(), 9, 1, 0, 20, 0, 4, 'q', 'noop', '{{}}'"
        f" FROM generate_series(1, {ROWS}) n"
    )


@pytest.fixture(scope="module")
def large(databases: Databases) -> Generator[Window]:
    """A live table of 100,000 rows, analyzed."""
    with databases.migrated() as dsn, Window(dsn) as window:
        fill(window)
        window.run("VACUUM ANALYZE job")
        window.run("ANALYZE job_archive")
        yield window


async def connected(dsn: str, settings: dict[str, str]) -> Connection:
    connection = await Connection.connect(dsn, autocommit=True)
    await connection.execute(pins_query(settings))
    return connection


@pytest.fixture
async def worker(large: Window) -> AsyncGenerator[Connection]:
    """A connection set up as the workers' are."""
    async with await connected(large.dsn, WORKER_SETTINGS) as connection:
        yield connection


async def plan(connection: Connection, name: str, parameters: dict[str, Any]) -> str:
    cursor = await connection.execute(b"EXPLAIN (COSTS OFF) " + statement(name, "pulse"), parameters)
    return "\n".join([line for (line,) in await cursor.fetchall()])


def scans(plan: str) -> list[str]:
    """Whole readings of the live table."""
    return re.findall(r"(?:Parallel )?(?:Seq Scan) on (?:pulse\.)?job\b(?!_)", plan)


def settings_of(name: str) -> dict[str, str]:
    return {} if name in CLIENTS else WORKER_SETTINGS


# Not the clients': PostgreSQL's defaults rightly scan an empty table.
@pytest.mark.parametrize("name", [name for name in STATEMENTS if name not in CLIENTS])
async def test_no_statement_scans_an_empty_live_table(name: str, dsn: str) -> None:
    async with await connected(dsn, WORKER_SETTINGS) as connection:
        assert scans(await plan(connection, name, STATEMENTS[name])) == []


@pytest.mark.parametrize("name", STATEMENTS)
async def test_no_statement_scans_a_large_live_table(name: str, large: Window) -> None:
    async with await connected(large.dsn, settings_of(name)) as connection:
        found = scans(await plan(connection, name, STATEMENTS[name]))
    # The doctor asks for running jobs once, for a person. Below PostgreSQL 16 no index knows them.
    without_index = large.value("SELECT to_regclass('job_lease')") is None
    assert found == [] or (without_index and name in ("doctor_left", "doctor_ahead"))


@pytest.mark.parametrize("name", WATCHDOG)
async def test_the_watchdogs_report_finds_its_rows_by_index(name: str, large: Window) -> None:
    async with await connected(large.dsn, WATCHDOG_SETTINGS) as connection:
        found = scans(await plan(connection, name, WATCHDOG[name]))
    # Who died is asked once in a worker's death: it may read the table. So does the watchdog where the lease has no index.
    without_index = large.value("SELECT to_regclass('job_lease')") is None
    assert found == [] or name == "held_by" or (name in ("expired", "refund") and without_index)


async def test_the_watchdogs_scan_reads_the_lease_index(large: Window, dsn: str) -> None:
    if large.value("SELECT to_regclass('job_lease')") is None:
        pytest.skip("below PostgreSQL 16 the watchdog scans")
    for target in (large.dsn, dsn):
        async with await connected(target, WATCHDOG_SETTINGS) as connection:
            text = await plan(connection, "expired", WATCHDOG["expired"])
        assert "Bitmap Index Scan on job_lease" in text
        assert scans(text) == []


async def test_the_claim_walks_its_index_from_the_cursor_in_order(worker: Connection) -> None:
    text = await plan(worker, "complete_and_claim", STATEMENTS["complete_and_claim"])
    assert "Index Scan using job_claim on job" in text
    assert "Tid Scan on job" in text
    walk = text[text.index("Index Scan using job_claim") :].split("->")[0]
    assert "Index Cond" in walk
    assert re.search(r"ROW\(.*run_at.*, id\) >= ROW\(", walk)
    # No sort between the walk and its limit, or the backlog would be sorted for every claim.
    before = text[: text.index("Index Scan using job_claim")].rsplit("Nested Loop", 1)[1]
    assert "Sort" not in before


async def test_the_slots_are_found_by_probes_not_by_a_walk(worker: Connection, large: Window) -> None:
    cursor = await worker.execute(
        b"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) " + statement("slots", "pulse"), STATEMENTS["slots"]
    )
    text = "\n".join([line for (line,) in await cursor.fetchall()])
    assert scans(text) == []
    rows = [float(n) * float(loops) for n, loops in re.findall(r"job_claim on job.*?rows=([\d.]+) loops=(\d+)", text)]
    assert rows
    assert max(rows) <= 20


async def test_a_plan_made_on_an_empty_table_serves_a_large_one(dsn: str) -> None:
    with Window(dsn) as window:
        window.publish_statistics()
    # One prepared connection that lives from empty to large, as a worker's does.
    async with await connected(dsn, WORKER_SETTINGS) as connection:
        for _ in range(10):
            for name in ("complete_and_claim", "beat", "fail", "complete_unlocked", "slots"):
                await connection.execute(statement(name, "pulse"), STATEMENTS[name], prepare=True)
        with Window(dsn) as window:
            fill(window)
            for analyzed in (False, True):
                if analyzed:
                    window.run("ANALYZE job")
                for name in ("complete_and_claim", "beat", "fail", "complete_unlocked", "slots"):
                    text = await prepared_plan(connection, name)
                    assert scans(text) == [], f"{name}, analyzed: {analyzed}"
            before = reads(window)
            for _ in range(5):
                await connection.execute(
                    statement("complete_and_claim", "pulse"), STATEMENTS["complete_and_claim"], prepare=True
                )
                await connection.execute(statement("beat", "pulse"), STATEMENTS["beat"], prepare=True)
            await connection.execute("SELECT pg_stat_force_next_flush()")
            await connection.execute("SELECT 1")
            assert reads(window) == before


async def test_completions_planned_on_an_analyzed_table_of_one_row_read_only_their_own_rows(dsn: str) -> None:
    nothing_claimed = {"limit": 0, "queues": "{}", "priorities": "{}", "cursor_run_ats": "{}", "cursor_ids": "{}"}
    parameters = STATEMENTS["complete_and_claim"] | nothing_claimed
    async with await connected(dsn, WORKER_SETTINGS) as connection:
        with Window(dsn) as window:
            # As autovacuum leaves a queue that was quiet: no plan is made anew before the next ANALYZE.
            window.run("INSERT INTO job (kind, queue) VALUES ('noop', 'q')")
            window.run("VACUUM ANALYZE job")
            await connection.execute(statement("complete_and_claim", "pulse"), parameters, prepare=True)
            fill(window)
            text = await prepared_plan(connection, "complete_and_claim")
            assert re.search(r"Delete on job j\n +->  Index Scan using job_pkey on job j\n +Index Cond", text)


PROBES = (
    "beat",
    "fail",
    "complete_unlocked",
    "progress",
    "settled",
    "forgive_crash",
    "cancel_close",
    "prune_permits",
    "bury",
)


async def test_what_was_planned_on_an_analyzed_table_of_one_row_reads_only_its_own_rows(dsn: str) -> None:
    async with await connected(dsn, WORKER_SETTINGS) as connection:
        with Window(dsn) as window:
            window.run("INSERT INTO job (kind, queue) VALUES ('noop', 'q')")
            # An ANALYZE of its own would mend the plans.
            window.run("ALTER TABLE job SET (autovacuum_enabled = off)")
            window.run("VACUUM ANALYZE job, attempt, cancellation, permit")
            for name in PROBES:
                await connection.execute(statement(name, "pulse"), STATEMENTS[name], prepare=True)
            fill(window)
            running = [row["id"] for row in window.run("SELECT id FROM job WHERE state = 2 ORDER BY id LIMIT 450")]
            window.run(
                "INSERT INTO permit (queue, key, job_id, attempt) SELECT 'q', '', i, 7 FROM unnest(%s::bigint[]) i",
                running,
            )
            window.run(
                "INSERT INTO cancellation (job_id, attempt, requested_by) SELECT i, 7, 'me' FROM unnest(%s::bigint[]) i",
                running,
            )
            window.run(
                "INSERT INTO attempt (job_id, attempt, session, started_at, ended_at, outcome, error)"
                " SELECT i, 2, 9, now(), now(), 'rescued', 'gone' FROM unnest(%s::bigint[]) i", running,
            )  # fmt: skip
            window.publish_statistics()
            # As text, as before: for values of other types psycopg would prepare the statement anew.
            each = {
                "attempts": "2", "sessions": "9", "outcomes": "snoozed", "delays": "1", "errors": "NULL", "results": "1",
                "fractions": "0.5", "messages": "half", "traceless": "true",
            }  # fmt: skip
            lists = {name: "{" + ",".join([value] * 50) + "}" for name, value in each.items()}
            read: dict[str, int] = {}
            for place, name in enumerate(PROBES):
                ids = running[place * 50 : place * 50 + 50]
                own = {"id": ids[0], "attempt": 2, "session": 9} if name == "bury" else {}
                before = entries(window)
                # Not in a transaction that is taken back: then psycopg forgets what it has prepared.
                await connection.execute(
                    statement(name, "pulse"),
                    STATEMENTS[name] | lists | {"ids": "{" + ",".join(map(str, ids)) + "}"} | own,
                    prepare=True,
                )
                await connection.execute("SELECT pg_stat_force_next_flush()")
                await connection.execute("SELECT 1")
                read[name] = int(entries(window) - before)
    # A few probes for each of fifty jobs, and of the 450 that have permits and cancellations. The table has 100,000.
    assert max(read.values()) <= 1000, read
    assert min(read.values()) >= 1, read


def entries(window: Window) -> int:
    """The entries read so far in the indexes of the live table."""
    return window.value("SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relid = 'job'::regclass")


@pytest.mark.parametrize("rows", [0, 1, 3])
async def test_no_statement_of_workers_compares_a_list_with_all_of_a_small_table(rows: int, dsn: str) -> None:
    with Window(dsn) as window:
        window.run("INSERT INTO job (kind, queue) SELECT 'noop', 'q' FROM generate_series(1, %s)", rows)
        window.run("INSERT INTO cancellation (job_id, requested_by) SELECT n, 'me' FROM generate_series(1, %s) n", rows)
        window.run("VACUUM ANALYZE job, cancellation")
    for settings, names in ((WORKER_SETTINGS, STATEMENTS.keys() - CLIENTS), (WATCHDOG_SETTINGS, WATCHDOG.keys())):
        async with await connected(dsn, settings) as connection:
            for name in sorted(names - {"batches"}):  # Shown to people, from a bounded page of batches.
                text = await plan(connection, name, (STATEMENTS | WATCHDOG)[name])
                # Open requests are few, but not compared with each job of a large tree that is cancelled.
                closes = name == "cancel_close"
                key = "job_pkey on job" if closes else "(?:job_pkey on job|cancellation_[a-z]+ on cancellation)"
                walks = re.findall(rf"Scan using {key}\b.*\n(?! +Index Cond)", text)
                assert walks == [], f"{name}\n{text}"


async def prepared_plan(connection: Connection, name: str) -> str:
    """The plan of the statement as this connection has prepared it."""
    cursor = await connection.execute(
        "SELECT name, cardinality(parameter_types) FROM pg_prepared_statements WHERE statement LIKE %s",
        [f"/* pulse-trio {name} */%"],
    )
    row = await cursor.fetchone()
    assert row is not None, f"{name} is not prepared"
    nulls = ", ".join(["NULL"] * row[1])
    cursor = await connection.execute(f"EXPLAIN (COSTS OFF) EXECUTE {row[0]}({nulls})".encode())
    return "\n".join([line for (line,) in await cursor.fetchall()])


def reads(window: Window) -> int:
    return window.value("SELECT seq_scan FROM pg_stat_user_tables WHERE relid = 'job'::regclass")


def test_a_claim_from_a_large_backlog_touches_few_pages(large: Window) -> None:
    nothing_ended = {"ids": "{}", "attempts": "{}", "sessions": "{}", "results": "{}"}
    with Window(large.dsn) as worker:
        worker.use_settings(WORKER_SETTINGS)
        claim_one = STATEMENTS["complete_and_claim"] | {"limit": 1} | nothing_ended
        assert worker.pages(statement("complete_and_claim", "pulse"), claim_one) < 60


def test_every_statement_with_a_plan_that_matters_is_tried_here() -> None:
    named = {path.name.removesuffix(".sql") for path in files("pulse_trio.sql").iterdir() if path.name.endswith(".sql")}
    # These read the archive for people, or touch other tables only.
    for_people = {"attempts", "count_by_state", "workers", "sessions_of", "cancel_ledger", "audit"}
    in_test_searching = {"look_through_jobs", "live_ids", "live_queues"}
    in_test_history = {"matching_jobs"}
    elsewhere = {
        # Reads no table: sets a variable.
        "act_as",
        # Nor do these: they read the server's activity, and the list of its databases.
        "end_transaction",
        "which_copy",
        "which_copy_and_sign",
        # Writes one row of another table.
        "note_enqueue",
        "note_event",
        "reserve_ids",
        "reserve",
        "key_holders",
        # Functions of the owner's: tests/security/test_roles.py counts what they read.
        "enqueue",
        "enqueue_many",
        "retry_job",
        "delete_jobs",
        # Its plans are a function's: tests/store/test_limits.py counts what it reads.
        "claim_limited",
        "claim_cleanups",
        "limit_queue",
        "declare_death_hooks",
        "limits_of_queue",
        "queues",
        "queue_keys",
        "pause_queue",
        "resume_queue",
        "pause_kind",
        "resume_kind",
        "paused_kinds",
        "running_of",
        "wake",
        "announce_idle",
        "withdraw_idle",
        "open_session",
        "touch_sessions",
        "left_leases",
        "stale_sessions",
        "end_sessions",
        "maintain",
        "prune_progress",
        "prune_batches",
        "batch_open",
        "batch_lock",
        "batch_add",
        "batch_close",
        "batch_keep",
        "batch_called",
        "batch_finished",
        "batch_failures",
        "batch_unfinished",
        "hold_waits",
        "drop_waits",
        "waiting_place",
        "cancel_jobs",
        "cancel_jobs_now",
        "release_jobs",
        "complete_jobs",
        "stack_ask",
        "stack_take",
        "stack_answer",
        "stack_questions",
        "set_retention",
        "doctor_server",
        # Reads catalogs only.
        "table_counters",
        "missing_rights",
        "row_security",
        "doctor_storage",
        "doctor_holders",
        "doctor_lockers",
        "doctor_ids",
        "doctor_may_ids",
        "retentions",
        # One row of another table, and the schedules.
        "metrics_turn",
        # Functions of the owner's, for people.
        "tree",
        "lines_of",
        "history_of",
        "unreceived_of",
        "compensated",
        "unfinished_clean_ups",
        "owing_members",
        "tree_places",
        "stuck_trees",
        # Functions: tests/store/test_tree_reads.py counts the pages that they read, and test_tree_operations.py their rows.
        "end_overdue",
        "look_slowly",
        # Functions: tests/store/test_tree_reads.py counts the pages that they read, and test_trees.py their rows.
        "start_children",
        "look_at_block",
        "members",
        "end_block",
        "fail_block",
        "children_like",
        "cancel_block",
        "restart_children",
        "recheck",
        # A function: tests/store/test_transactions.py reads how it finds its row.
        "complete_in_transaction",
        "complete_or_raise",
        # Functions: tests/store/test_tree_reads.py counts the pages that they read.
        "write_lines",
        "resume",
        "begin_afresh",
        "comes_after_deadline",
        "missing_lines",
        "retry_job_afresh",
        "send_event",
        "receive_events",
        "suspend_jobs",
        "note_spans",
        "metrics_schedules",
    }
    # Schedules stand in tables of their own.
    elsewhere |= {name for name in named if name.startswith("schedule")}
    assert named - for_people - in_test_history - in_test_searching - elsewhere == set(STATEMENTS) | set(WATCHDOG)
