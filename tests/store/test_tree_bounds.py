"""Bounds and leftovers of trees: what one transaction does, holds and counts, and what retention deletes. By the shipped
statements, beside workers' (tests/store/test_tree_operations.py has what they do).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import psycopg
import pytest

from support.stores import Window

from .test_tree_design import Teller, settle, three_tellers, wait_for_lock
from .test_tree_operations import cancel, ended, start, state, suspend, write_line

if TYPE_CHECKING:
    from collections.abc import Generator

    from support.databases import Databases

Job = tuple[int, int]


@pytest.fixture
def workers(databases: Databases) -> Generator[list[Teller]]:
    with databases.migrated() as dsn, three_tellers(dsn) as tellers:
        yield tellers


def long_ended(watch: Teller, root: Job) -> None:
    """As if the root had ended long ago."""
    watch.run("UPDATE durable_job SET root_ended_at = '2020-01-01Z' WHERE job_id = %s", root[0])


def ended_tree(a: Teller, b: Teller, *keys: str) -> tuple[Job, list[Job]]:
    """A root and its children, all completed."""
    root = a.root("q")
    write_line(a, root[0])
    start(a, root, *keys)
    children = b.claim("children")
    b.complete(*children)
    a.complete(root)
    return root, children


# Retention


def test_the_history_of_a_root_is_kept_for_as_long_as_a_retry_can_find_its_row(workers: list[Teller]) -> None:
    a, b, watch = workers
    root, _ = ended_tree(a, b, "0")
    long_ended(watch, root)
    assert watch.value("SELECT prune_trees('7 days')") is False
    assert watch.value("SELECT count(*) FROM history") == 1
    assert watch.value("SELECT moved FROM retry_jobs(ARRAY[%s::bigint])", root[0])
    (again,) = a.claim("q")
    # It goes on after its last line, with the child that it had.
    assert watch.value("SELECT count(*) FROM member WHERE parent_id = %s", again[0]) == 1
    a.complete(again)
    long_ended(watch, root)
    watch.run("DELETE FROM job_archive WHERE id = %s", root[0])
    assert watch.value("SELECT prune_trees('7 days')") is False
    for table in ("job_archive", "member", "durable_job", "history"):
        assert watch.value(f"SELECT count(*) FROM {table}") == 0, table


def test_retention_waits_for_no_row_of_a_tree_and_leaves_what_is_held(workers: list[Teller]) -> None:
    a, b, watch = workers
    root, (first, second) = ended_tree(a, b, "0", "1")
    long_ended(watch, root)
    watch.run("DELETE FROM job_archive WHERE id = %s", root[0])
    a.run("SET lock_timeout = '2s'")
    with b.open():
        # As delete_jobs, forget_history and retry_jobs begin.
        b.run("SELECT FROM job_archive WHERE id = %s FOR UPDATE", second[0])
        assert a.value("SELECT prune_trees('7 days')") is False
        assert watch.run("SELECT job_id FROM member") == [(second[0],)]
        # The rest of it goes with its root, which is kept until then.
        assert watch.value("SELECT count(*) FROM durable_job WHERE job_id = %s", root[0]) == 1
    assert a.value("SELECT prune_trees('7 days')") is False
    assert watch.value("SELECT count(*) FROM member") + watch.value("SELECT count(*) FROM durable_job") == 0
    assert first[0] < second[0]


def test_retention_and_a_deletion_of_a_root_with_its_members_never_wait_for_each_other(workers: list[Teller]) -> None:
    a, b, watch = workers
    root, (child,) = ended_tree(a, b, "0")
    long_ended(watch, root)
    a.run("SET lock_timeout = '5s'")
    with b.open():
        b.run("SELECT FROM job_archive WHERE id = %s FOR UPDATE", child[0])
        with a.open():
            a.value("SELECT prune_trees('7 days')")
            # The deletion goes on to the root's row in durable_job.
            b.run("SET LOCAL lock_timeout = '1s'")
            b.run("SELECT * FROM delete_jobs(%s)", [root[0], child[0]])
    assert watch.value("SELECT count(*) FROM job_archive") == 0


def fill(window: Window, first: int, last: int, *, archived: bool) -> None:
    """Roots that ended long ago, all at one moment, some of whose rows the archive has in days that it could not drop."""
    window.run(
        "INSERT INTO durable_job (job_id, root_id, root_ended_at)"
        " SELECT n, n, '2020-01-01Z' FROM generate_series(%s::int, %s::int) n",
        first,
        last,
    )
    if archived:
        window.run(
            "INSERT INTO job_archive (id, queue, kind, args, state, attempt, max_attempts, created_at, run_at, started_at,"
            " locked_by, finished_at, failures, priority)"
            " SELECT n, 'q', 'root', '{}', 4, 1, 1, now(), now(), now(), 7, now() - interval '1 d' * (n %% 7), 0, 0"
            " FROM generate_series(%s::int, %s::int) n",
            first,
            last,
        )


def test_retention_reads_a_page_of_roots_whose_rows_are_kept_and_goes_on_after_it_in_the_next_round(dsn: str) -> None:
    with Window(dsn) as window:
        window.run("SELECT maintain('7 days')")
        fill(window, 1, 1_700, archived=True)
        fill(window, 1_701, 1_710, archived=False)
        left = "SELECT count(*) FROM durable_job"
        rounds: list[bool] = []
        while not rounds or rounds[-1]:
            assert window.value(left) == 1_710
            rounds.append(window.value("SELECT prune_trees('7 days')"))
        assert rounds == [True, True, True, False]
        assert window.value(left) == 1_700
        # From the beginning again.
        fill(window, 1_701, 1_701, archived=False)
        window.run("DELETE FROM job_archive WHERE id <= 3")
        assert window.value("SELECT prune_trees('7 days')") is True
        assert window.value(left) == 1_698


@pytest.mark.parametrize("analyzed", [False, True])
def test_the_pages_that_retention_reads_do_not_grow_with_the_roots_whose_rows_are_kept(
    analyzed: bool, dsn: str
) -> None:
    with Window(dsn) as window:
        window.run("SELECT maintain('7 days')")
        counts: list[int] = []
        for first, last in ((1, 2_000), (2_001, 20_000)):
            fill(window, first, last, archived=True)
            if analyzed:
                window.run("VACUUM ANALYZE durable_job, job_archive")
            counts.append(window.pages("SELECT prune_trees('7 days')"))
        few, many = counts
        assert many < 2 * few + 200


def test_a_root_whose_row_an_old_worker_did_not_keep_is_noted_as_ended_by_the_slow_look(workers: list[Teller]) -> None:
    a, b, watch = workers
    root = a.root("q")
    write_line(a, root[0])
    start(a, root, "0")
    b.complete(*b.claim("children"))
    live = a.root("q")
    write_line(a, live[0])
    # A worker of the version before, without keep, deletes it and writes no archive.
    watch.run("DELETE FROM job WHERE id = %s", root[0])
    watch.run("SELECT * FROM look_slowly()")
    assert watch.run("SELECT job_id FROM durable_job WHERE root_ended_at IS NOT NULL") == [(root[0],)]
    long_ended(watch, root)
    watch.value("SELECT prune_trees('7 days')")
    assert watch.value("SELECT count(*) FROM member") == 0
    assert watch.run("SELECT job_id FROM durable_job") == [(live[0],)]


def test_a_day_of_the_archive_looks_up_no_member_that_is_younger_than_its_jobs(workers: list[Teller]) -> None:
    a, b, watch = workers
    plain = a.root("plain")
    a.complete(plain)
    watch.run(
        "CREATE TABLE pulse.job_archive_20200101 PARTITION OF pulse.job_archive "
        "FOR VALUES FROM ('2020-01-01Z') TO ('2020-01-02Z')"
    )
    watch.run("UPDATE job_archive SET finished_at = '2020-01-01 12:00Z'")
    watch.run("INSERT INTO member SELECT 1000 + i, 1, 1, 1, i::text FROM generate_series(1, 5000) i")
    watch.run("ANALYZE member")
    fetched = (
        "SELECT sum(seq_tup_read + idx_tup_fetch) FROM pg_stat_xact_user_tables WHERE relid = 'pulse.member'::regclass"
    )
    with watch.open():
        assert watch.value("SELECT keeps_members('job_archive_20200101')") is False
        assert watch.value(fetched) < 10
    old = ended_tree(a, b, "0")[1][0]
    watch.run("UPDATE job_archive SET finished_at = '2020-01-01 13:00Z' WHERE id = %s", old[0])
    assert watch.value("SELECT keeps_members('job_archive_20200101')") is True
    assert watch.run("SELECT id FROM job_archive_20200101") == [(old[0],)]


# Snapshots and locks of callers


def test_a_child_that_is_ended_in_a_snapshot_older_than_its_watch_is_refused(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    start(a, parent, "0")
    (child,) = b.claim("children")
    b.run("BEGIN ISOLATION LEVEL REPEATABLE READ")
    b.run("SELECT count(*) FROM member")
    suspend(a, parent, 0)
    with pytest.raises(psycopg.errors.SerializationFailure):
        b.run("SELECT complete_jobs(ARRAY[%s::bigint])", child[0])
    b.run("ROLLBACK")
    b.complete(child)
    settle(watch)
    assert state(watch, parent) == "available"


def test_a_member_that_is_ended_in_a_snapshot_older_than_its_first_child_is_refused(workers: list[Teller]) -> None:
    a, b, _ = workers
    start(a, a.root("q"), "member")
    (member,) = a.claim("children")
    b.run("BEGIN ISOLATION LEVEL REPEATABLE READ")
    b.run("SELECT count(*) FROM member")
    start(a, member, "first", queue="grandchildren")
    with pytest.raises(psycopg.errors.SerializationFailure):
        b.run("SELECT complete_jobs(ARRAY[%s::bigint])", member[0])
    b.run("ROLLBACK")
    assert state(a, member) == "running"


def test_a_retry_of_a_child_in_an_open_transaction_lets_its_parent_be_renewed(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    start(a, parent, "0")
    (child,) = b.claim("children")
    b.fail(child)
    with watch.open():
        assert watch.value("SELECT moved FROM retry_jobs(ARRAY[%s::bigint])", child[0])
        assert a.beat(parent) == [(0, True, None, None)]
        # Its cancellation waits: else a child would live below a cancelled parent.
        b.run("SET lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            cancel(b, parent[0])


def test_rows_of_a_retry_are_locked_in_the_order_of_ids_whichever_are_parents(workers: list[Teller]) -> None:
    a, b, watch = workers
    first, second = a.root("first"), a.root("second")
    start(a, first, "0")
    start(a, second, "1", queue="others")
    one, other = b.claim("children"), b.claim("others")
    b.fail(*one)
    b.fail(*other)
    with b.open():
        b.run("SELECT FROM job WHERE id = %s FOR UPDATE", second[0])
        retrying = threading.Thread(target=a.run, args=["SELECT * FROM retry_jobs(%s)", [one[0][0], other[0][0]]])
        retrying.start()
        wait_for_lock(watch, a)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            watch.run("SELECT FROM job WHERE id = %s FOR UPDATE NOWAIT", first[0])
    retrying.join()
    assert state(watch, one[0]) == state(watch, other[0]) == "available"


# One transaction


def test_a_deadline_pass_ends_soon_and_says_that_there_is_more(workers: list[Teller]) -> None:
    a, _, watch = workers
    parent = a.root("q")
    start(a, parent, *map(str, range(3)), deadline=0.0)
    # As if the first had taken long.
    watch.run(
        "CREATE FUNCTION pulse.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.03); RETURN NULL; END $$"
    )
    watch.run("CREATE TRIGGER slow AFTER DELETE ON pulse.job FOR EACH ROW EXECUTE FUNCTION pulse.slow()")
    assert watch.value("SELECT end_overdue(100)") == 100
    assert len(ended(watch)) == 1
    assert watch.value("SELECT count(*) FROM member_deadline") == 2


def test_what_a_cancellation_wakes_is_due_after_all_else_is_done(workers: list[Teller]) -> None:
    a, b, watch = workers
    parents = [a.root("q") for _ in range(2)]
    for number, parent in enumerate(parents):
        start(a, parent, f"waits {number}", f"runs {number}", queue=f"of-{number}")
    sleepers = [b.claim(f"of-{number}", 1)[0] for number in range(2)]
    for sleeper in sleepers:
        write_line(b, sleeper[0])
        suspend(b, sleeper)
    # The sweep below the second takes long.
    watch.run(
        "CREATE FUNCTION pulse.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.1); RETURN NULL; END $$"
    )
    watch.run("CREATE TRIGGER slow AFTER DELETE ON pulse.job FOR EACH ROW EXECUTE FUNCTION pulse.slow()")
    cancel(watch, *(parent[0] for parent in parents))
    late = watch.run(
        "SELECT extract(epoch FROM max(d.finished_at) - j.run_at::timestamptz) < 0 FROM job j, job_archive d "
        "WHERE j.id = ANY (%s) GROUP BY j.id",
        [sleeper[0] for sleeper in sleepers],
    )
    assert late == [(True,), (True,)]


def test_jobs_that_are_parked_by_one_sweep_are_swept_below_each_by_a_look_of_its_own(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    start(a, parent, "0", "1")
    for child in b.claim("children"):
        start(b, child, f"below {child[0]}", queue="grandchildren")
        b.fail(child, outcome="released")
    # They wait without a history and have live descendants: the sweep ends them, and they are parked.
    cancel(watch, parent[0])
    assert [state(watch, job) for (job,) in watch.run("SELECT job_id FROM member WHERE parent_id = %s", parent[0])] == [
        "suspended"
    ] * 2
    assert ended(watch) == {}
    settle(watch)
    assert sorted(ended(watch).values()) == [("cancelled", "parent")] * 4


def test_ids_that_are_cancelled_together_are_compared_once(workers: list[Teller]) -> None:
    *_, watch = workers
    jobs = watch.run("INSERT INTO job (kind) SELECT 'plain' FROM generate_series(1, 300) RETURNING id")
    half = [job for (job,) in jobs][::2]
    assert cancel(watch, *half, 10**9) == [(job, "cancelled") for job in half]
    assert watch.value("SELECT count(*) FROM job") == 150
    body = watch.value(
        "SELECT prosrc FROM pg_proc WHERE proname = 'cancel_rows' AND pronamespace = 'pulse'::regnamespace"
    )
    assert "ANY (held)" not in body


# The ledger and the causes


def test_a_job_that_was_told_and_is_parked_by_a_second_request_has_one_open_row(workers: list[Teller]) -> None:
    a, b, watch = workers
    job = a.root("q")
    write_line(a, job[0])
    start(a, job, "0")
    (child,) = b.claim("children")
    suspend(a, job)
    assert cancel(watch, job[0]) == [(job[0], "running")]
    assert cancel(watch, job[0], how="cancel_jobs_now") == [(job[0], "running")]
    assert watch.run("SELECT count(*) FROM cancellations WHERE job_id = %s AND ended_at IS NULL", job[0]) == [(1,)]
    assert cancel(watch, job[0], how="cancel_jobs_now") == [(job[0], "running")]
    b.fail(child, outcome="cancelled")
    settle(watch)
    assert state(watch, job) == "cancelled"


@pytest.mark.parametrize("cause", ["sibling", "deadline"])
def test_below_the_first_level_the_cause_is_the_parent_wherever_it_is_kept(workers: list[Teller], cause: str) -> None:
    a, b, watch = workers
    parent = a.root("q")
    start(a, parent, "0")
    (child,) = b.claim("children")
    start(b, child, "grandchild", queue="grandchildren")
    (grandchild,) = b.claim("grandchildren")
    write_line(b, child[0])
    write_line(b, grandchild[0])
    watch.value("SELECT cancel_block(%s, %s, %s, 0, %s)", parent[0], parent[1], a.session, cause)
    kept = watch.run("SELECT job_id, cause FROM durable_job WHERE cause IS NOT NULL ORDER BY 1")
    assert kept == [(child[0], cause), (grandchild[0], "parent")]
    assert watch.run("SELECT job_id, cause FROM cancellations ORDER BY 1") == kept


# A compensation that kills its process


def test_a_compensation_that_kills_its_process_is_quarantined_and_ends_after_as_many_crashes_as_any_job(
    workers: list[Teller],
) -> None:
    a, _, watch = workers
    job = a.root("q")
    write_line(a, job[0])
    cancel(watch, job[0])
    seen: list[tuple[int, int, bool]] = []
    again = job
    while True:
        a.fail(again, outcome="rescued")
        found = watch.run("SELECT crashes, deaths, suspect FROM job WHERE id = %s", job[0])
        if not found:
            break
        seen += found
        watch.run(
            "UPDATE job SET state = 2, attempt = attempt + 1, locked_by = %s, lease_until = now() + interval '1 min', "
            "started_at = now() WHERE id = %s",
            a.session, job[0],
        )  # fmt: skip
        again = (job[0], again[1] + 1)
    assert seen == [(1, 0, False), (2, 0, True), (3, 1, True), (4, 2, True)]
    assert state(watch, job) == "cancelled"


def crash(teller: Teller, watch: Teller, job: Job) -> Job:
    """The job's worker dies; the next attempt, if there is one."""
    teller.fail(job, outcome="rescued")
    watch.run(
        "UPDATE job SET state = 2, attempt = attempt + 1, locked_by = %s, lease_until = now() + interval '1 min', "
        "started_at = now() WHERE id = %s",
        teller.session, job[0],
    )  # fmt: skip
    return job[0], job[1] + 1


def test_crashes_before_a_cancellation_do_not_use_up_the_tries_of_the_clean_up(workers: list[Teller]) -> None:
    a, _, watch = workers
    job = a.root("q")
    write_line(a, job[0])
    for _ in range(6):
        job = crash(a, watch, job)
    cancel(watch, job[0])
    for _ in range(4):
        job = crash(a, watch, job)
        assert state(watch, job) == "running"
    a.fail(job, outcome="rescued")
    assert state(watch, job) == "cancelled"


@pytest.mark.parametrize("crashes", [1, 5])
def test_a_job_that_crashes_end_before_it_is_told_owes_its_clean_up(crashes: int, workers: list[Teller]) -> None:
    """Its last attempt, or its last try: nothing said that anything was owed, and a retry let the cancelled job go on."""
    a, _, watch = workers
    job = a.root("q")
    write_line(a, job[0])
    if crashes == 1:
        watch.run("UPDATE job SET max_attempts = 1")
    cancel(watch, job[0], reason="enough")
    for _ in range(crashes - 1):
        job = crash(a, watch, job)
    a.fail(job, outcome="rescued")
    assert state(watch, job) == "cancelled"
    assert watch.value("SELECT owes_clean_up(%s)", job[0])
    assert watch.value("SELECT moved FROM retry_jobs(ARRAY[%s::bigint])", job[0])
    (again,) = a.claim("q")
    assert [row[1:] for row in a.beat(again)] == [(True, "user", "enough")]


def test_crashes_of_a_compensation_before_its_last_line_do_not_count(workers: list[Teller]) -> None:
    a, _, watch = workers
    job = a.root("q")
    write_line(a, job[0])
    cancel(watch, job[0])
    a.fail(job, outcome="rescued")
    (again,) = a.claim("q")
    watch.run("INSERT INTO history (job_id, line, kind, key, attempt) VALUES (%s, 2, 1, 'k', %s)", *again)
    a.fail(again, outcome="rescued")
    assert watch.run("SELECT crashes, suspect FROM job") == [(1, False)]
