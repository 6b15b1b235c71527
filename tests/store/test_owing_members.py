"""What a retry of a member that owes its clean-up, and what asks for such members, reads beside 100,000 others."""

from __future__ import annotations

import pytest

from support.stores import Window

OTHERS = 100_000
ARCHIVED = (
    "INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,"
    " priority, state, queue, kind, args, options)"
    " SELECT n, now(), now(), now(), now(), 9, 1, 0, 20, 0, {state}, 'q', 'noop', '{{}}', '{{\"tree\": 1}}'"
    " FROM generate_series({first}, {last}) n"
)
TABLES = ("job", "member", "durable_job", "history", "cancellation")
SCANNED = (
    "SELECT sum(seq_tup_read) FROM pg_stat_user_tables"
    " WHERE relname LIKE 'job_archive%' OR relname IN ('job', 'member', 'durable_job', 'history', 'cancellation', 'event')"
)
STATEMENTS = {
    "retry_jobs": "SELECT * FROM retry_jobs(ARRAY[12]::bigint[])",
    "delete_jobs": "SELECT * FROM delete_jobs(ARRAY[11]::bigint[])",
    "owing_members": "SELECT * FROM owing_members(ARRAY[11]::bigint[])",
}


def plant(window: Window, root: int, members: int) -> None:
    """A settled root, and its members, which owe their clean-up. No trigger tells of their ends."""
    window.run("SET session_replication_role = replica")
    window.run(ARCHIVED.format(state=4, first=root, last=root))
    window.run(ARCHIVED.format(state=6, first=root + 1, last=root + members))
    window.run(
        "INSERT INTO member (job_id, root_id, parent_id, block, child_key, cut, failed)"
        f" SELECT n, {root}, {root}, 0, n::text, 'parent', true FROM generate_series({root + 1}, {root + members}) n"
    )
    window.run(
        "INSERT INTO durable_job (job_id, root_id, depth, root_ended_at)"
        f" SELECT n, {root}, CASE n WHEN {root} THEN 0 ELSE 1 END, CASE n WHEN {root} THEN now() END"
        f" FROM generate_series({root}, {root + members}) n"
    )
    window.run(
        "INSERT INTO history (job_id, line, kind, key, value, attempt)"
        f' SELECT n, 1, 9, \'\', \'{{"at": [], "reason": "parent"}}\', 1 FROM generate_series({root + 1}, {root + members}) n'
    )
    window.run("RESET session_replication_role")


@pytest.mark.parametrize("statement", STATEMENTS)
def test_beside_100_000_other_members_each_reads_its_own_tree_alone(statement: str, dsn: str) -> None:
    with Window(dsn) as window, Window(dsn) as operator:
        for table in TABLES:
            window.run(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        plant(window, 11, 5)
        window.run(f"ANALYZE {', '.join(TABLES)}, job_archive")
        # Plans that are kept from the first call on, made beside a few rows.
        operator.run("SET plan_cache_mode = force_generic_plan")
        operator.pages(STATEMENTS[statement])
        plant(window, 1_000_000, OTHERS)
        operator.publish_statistics()
        operator.run("SELECT 1")
        before = window.value(SCANNED)
        pages = {"planned before": operator.pages(STATEMENTS[statement])}
        window.run(f"ANALYZE {', '.join(TABLES)}, job_archive")
        with Window(dsn) as fresh:
            pages["planned now"] = fresh.pages(STATEMENTS[statement])
            fresh.publish_statistics()
            fresh.run("SELECT 1")
        operator.publish_statistics()
        operator.run("SELECT 1")
        # A few scans of a small table's page are no matter: of the days to come, say.
        assert window.value(SCANNED) - before < 1000
        assert max(pages.values()) < 1000, pages


def test_the_members_of_a_tree_of_100_000_that_owe_are_found_by_probes(dsn: str) -> None:
    with Window(dsn) as window:
        plant(window, 1_000_000, OTHERS)
        window.run("DELETE FROM history WHERE job_id <> 1050000")
        assert window.run("SELECT o FROM owing_members('{1000000}') o") == [{"o": 1_050_000}]
        window.publish_statistics()
        window.run("SELECT 1")
        before = window.value(SCANNED)
        window.run("SELECT owing_members('{1000000}')")
        window.publish_statistics()
        window.run("SELECT 1")
        assert window.value(SCANNED) == before
