"""What people and watchdogs do to trees of jobs: cancel, retry, delete, keep deadlines and what is retained. By the shipped
statements, beside workers' (tests/store/test_tree_design.py has the races of the protocol itself).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio import InvalidTransition, SyncClient
from pulse_trio.sql import statement
from pulse_trio.store.family import StuckJobs, stuck
from pulse_trio.store.operations import run_sync

from .test_tree_design import Teller, settle, three_tellers, wait_for_lock

if TYPE_CHECKING:
    from collections.abc import Generator

    from support.databases import Databases

Job = tuple[int, int]


@pytest.fixture
def workers(databases: Databases) -> Generator[list[Teller]]:
    with databases.migrated() as dsn, three_tellers(dsn) as tellers:
        yield tellers


def state(teller: Teller, job: Job | int) -> str:
    return teller.value("SELECT state FROM jobs WHERE id = %s", job if isinstance(job, int) else job[0])


def start(
    teller: Teller, parent: Job, *keys: str, queue: str = "children", block: int = 0, deadline: float | None = None
) -> list[int]:
    n = len(keys)
    rows = teller.run(
        "SELECT child_id FROM start_children(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        *parent, teller.session, block, list(keys), [None] * n, ["child"] * n, ["{}"] * n, [queue] * n, [0] * n, [None] * n,
        [None] * n, [deadline] * n, [None] * n, [20] * n, [None] * n, [None] * n, [None] * n,
    )  # fmt: skip
    return [row[0] for row in rows]


def write_line(teller: Teller, job: int) -> None:
    """A job with a history, without what writes one."""
    teller.run("SELECT FROM make_durable(%s)", job)
    teller.run(
        "INSERT INTO history (job_id, line, kind, key, attempt) "
        "SELECT %s, coalesce(max(line), 0) + 1, 1, 'k', 1 FROM history WHERE job_id = %s",
        job, job,
    )  # fmt: skip


def suspend(teller: Teller, job: Job, *blocks: int, until: str = "far()") -> None:
    """As the worker's statement leaves a suspended job."""
    teller.run("SELECT FROM make_durable(%s)", job[0])
    teller.run(
        f"UPDATE job SET state = 1, locked_by = 0, lease_until = 'infinity', run_at = {until}, max_attempts = max_attempts + 1 "
        "WHERE id = %s",
        job[0],
    )
    teller.run("UPDATE durable_job SET suspended = %s, blocks = %s WHERE job_id = %s", job[1], list(blocks), job[0])
    teller.run("INSERT INTO recheck (job_id) VALUES (%s)", job[0])
    settle(teller)


def cancel(teller: Teller, *jobs: int, reason: str | None = None, how: str = "cancel_jobs") -> list[tuple[int, str]]:
    return [(row[0], row[2]) for row in teller.run(f"SELECT * FROM {how}(%s, %s)", sorted(jobs), reason)]


def ended(teller: Teller) -> dict[str, tuple[str, str | None]]:
    rows = teller.run(
        "SELECT child_key, state, cancel_reason FROM jobs WHERE parent_id IS NOT NULL AND finished_at IS NOT NULL"
    )
    return {row[0]: (row[1], row[2]) for row in rows}


# Cancel


def test_a_cancellation_tells_what_runs_and_ends_what_waits_at_every_depth(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    start(a, parent, "runs", "waits")
    (child,) = b.claim("children", 1)
    start(b, child, "grandchild", queue="grandchildren")
    assert cancel(watch, parent[0], reason="enough") == [(parent[0], "running")]
    assert ended(watch) == {"waits": ("cancelled", "parent"), "grandchild": ("cancelled", "parent")}
    ledger = watch.run("SELECT job_id, cause, reason, ended_at IS NULL FROM cancellations ORDER BY job_id")
    assert ledger == [(parent[0], None, "enough", True), (child[0], "parent", None, True)]
    assert a.beat(parent) == [(0, True, "user", "enough")]
    assert b.beat(child) == [(0, True, "parent", None)]
    act = watch.run("SELECT act, jobs, details ->> 'members' FROM audit WHERE act = 'cancel'")
    assert act == [("cancel", 1, "3")]


def test_a_cancelled_parent_is_settled_after_its_descendants_and_its_ledger_row_then_says_so(
    workers: list[Teller],
) -> None:
    a, b, watch = workers
    parent = a.root("q")
    start(a, parent, "0")
    (child,) = b.claim("children")
    ((_, request, _),) = watch.run("SELECT * FROM cancel_jobs(%s)", [parent[0]])
    a.fail(parent, outcome="released")
    assert state(watch, parent) == "suspended"
    became = statement("cancel_ended", "pulse")
    assert watch.connection.execute(became, {"ids": [request]}).fetchall() == []
    b.fail(child, outcome="rescued")
    settle(watch)
    assert watch.connection.execute(became, {"ids": [request]}).fetchall() == [(request, "cancelled")]
    assert watch.run("SELECT id, state, cancel_reason FROM jobs ORDER BY id") == [
        (parent[0], "cancelled", "user"), (child[0], "cancelled", "parent"),
    ]  # fmt: skip


def test_a_waiting_job_with_live_descendants_waits_for_them_and_answers_running(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    start(a, parent, "0")
    (child,) = b.claim("children")
    a.fail(parent, outcome="released")
    assert cancel(watch, parent[0]) == [(parent[0], "running")]
    assert state(watch, parent) == "suspended"
    assert cancel(watch, parent[0]) == [(parent[0], "running")]
    b.fail(child, outcome="cancelled")
    settle(watch)
    assert state(watch, parent) == "cancelled"


def test_a_suspended_job_with_a_history_runs_once_more_unless_it_is_to_end_now(workers: list[Teller]) -> None:
    a, _, watch = workers
    jobs = [a.root("q") for _ in range(2)]
    for job in jobs:
        write_line(a, job[0])
        suspend(watch, job)
    assert cancel(watch, jobs[0][0], reason="enough") == [(jobs[0][0], "running")]
    assert state(watch, jobs[0]) == "available"
    assert cancel(watch, jobs[1][0], how="cancel_jobs_now") == [(jobs[1][0], "cancelled")]
    again = a.claim("q")
    assert again == [(jobs[0][0], 2)]
    assert a.beat(again[0]) == [(0, True, "user", "enough")]
    a.fail(again[0], outcome="failed")
    assert watch.run("SELECT state, cancel_reason FROM jobs ORDER BY id") == [
        ("cancelled", "enough"),
        ("cancelled", "user"),
    ]
    assert watch.value("SELECT count(*) FROM cancellations WHERE ended_at IS NULL") == 0


def test_one_that_was_told_and_waits_can_be_ended_now(workers: list[Teller]) -> None:
    a, _, watch = workers
    job = a.root("q")
    write_line(a, job[0])
    suspend(watch, job)
    assert cancel(watch, job[0]) == [(job[0], "running")]
    assert cancel(watch, job[0]) == [(job[0], "running")]
    assert cancel(watch, job[0], how="cancel_jobs_now") == [(job[0], "cancelled")]
    assert watch.run("SELECT count(*), count(ended_at) FROM cancellations") == [(1, 1)]


def test_a_cancel_of_two_jobs_has_both_before_it_goes_below_one(workers: list[Teller]) -> None:
    a, b, watch = workers
    first, second = a.root("first"), b.root("second")
    start(a, first, "0")
    (child,) = b.claim("children")
    with b.open():
        assert b.complete(second) == 1
        cancelling = threading.Thread(target=cancel, args=[a, first[0], second[0]])
        cancelling.start()
        wait_for_lock(watch, a)
        # It waits for the second and holds nothing below the first.
        assert watch.run("SELECT id FROM job WHERE id = %s FOR UPDATE NOWAIT", child[0]) == [(child[0],)]
        assert b.complete(child) == 1
    cancelling.join()
    assert state(watch, second) == "completed"
    assert state(watch, child) == "completed"


def test_children_of_one_block_are_found_by_the_view(workers: list[Teller]) -> None:
    a, _, watch = workers
    parent = a.root("q")
    (child,) = start(a, parent, "parcel-1")
    plain = watch.value("SELECT pulse.enqueue('plain', '{}', 'other')")
    rows = watch.run("SELECT id, parent_id, root_id, child_key FROM jobs ORDER BY id")
    assert rows == [
        (parent[0], None, parent[0], None),
        (child, parent[0], parent[0], "parcel-1"),
        (plain, None, None, None),
    ]
    tree = watch.run("SELECT id, parent_id, child_key, state, children FROM tree_of(%s)", child)
    assert tree == [(parent[0], None, None, "running", 1), (child, parent[0], "parcel-1", "available", 0)]


def test_suspended_jobs_are_counted_apart(workers: list[Teller]) -> None:
    a, _, watch = workers
    job = a.root("q")
    suspend(watch, job)
    watch.run("SELECT pulse.enqueue('plain', '{}', 'q', run_at => now() + interval '1 hour')")
    assert watch.run("SELECT available, scheduled, running, suspended FROM queues WHERE name = 'q'") == [(0, 1, 0, 1)]


# Deadlines


def test_an_unserved_child_ends_with_its_deadline_and_wakes_its_parent(workers: list[Teller]) -> None:
    a, _, watch = workers
    parent = a.root("q")
    start(a, parent, "late", deadline=0.0)
    start(a, parent, "early", deadline=3600.0)
    suspend(watch, parent, 0)
    assert state(watch, parent) == "suspended"
    assert watch.value("SELECT end_overdue()") == 1
    assert ended(watch) == {"late": ("cancelled", "deadline")}
    settle(watch)
    # The other still lives: a failure is for the parent's worker to see, the end of the block is not there yet.
    assert watch.value("SELECT count(*) FROM member_deadline") == 1
    assert watch.value("SELECT end_overdue()") == 0


def test_a_suspended_job_with_a_history_is_told_at_its_deadline_and_ends_a_minute_later(workers: list[Teller]) -> None:
    a, _, watch = workers
    job = a.root("q")
    write_line(a, job[0])
    watch.run("""UPDATE job SET options = options::jsonb || '{"deadline": 5}' WHERE id = %s""", job[0])
    suspend(watch, job)
    watch.run("INSERT INTO member_deadline VALUES ('2020-01-01', %s)", job[0])
    assert watch.value("SELECT end_overdue()") == 1
    assert state(watch, job) == "available"
    assert watch.run("SELECT cause FROM cancellations") == [("deadline",)]
    assert watch.value("SELECT end_overdue()") == 0
    a_minute_passes(watch)
    assert watch.value("SELECT end_overdue()") == 1
    assert watch.run("SELECT state, cancel_reason FROM jobs") == [("cancelled", "deadline")]
    assert watch.run("SELECT count(*) FROM member_deadline") == [(0,)]


def a_minute_passes(watch: Teller) -> None:
    watch.run("UPDATE member_deadline SET deadline = deadline - interval '1 minute'")
    watch.run("UPDATE cancellation SET requested_at = requested_at - interval '1 minute'")
    watch.run("UPDATE attempt SET ended_at = ended_at - interval '1 minute' WHERE ended_at IS NOT NULL")


@pytest.mark.parametrize("told_by", ["its parent", "a person", "an attempt that was lost"])
def test_what_was_told_a_moment_before_its_deadline_is_looked_at_has_its_minute_too(
    told_by: str, workers: list[Teller]
) -> None:
    """The flag says that a job is cancelled, not since when. Of 200 jobs with one deadline half are told by their parent's end
    before the watchdog comes to them."""
    a, b, watch = workers
    parent = a.root("q")
    write_line(a, parent[0])
    start(a, parent, "0", deadline=0.0)
    (child,) = b.claim("children")
    write_line(b, child[0])
    suspend(watch, parent, 0)
    suspend(watch, child)
    match told_by:
        case "its parent":
            cancel(watch, parent[0])
        case "a person":
            cancel(watch, child[0])
        case _:
            cancel(watch, child[0])
            a_minute_passes(watch)
            (again,) = b.claim("children")
            b.fail(again, outcome="rescued")
    watch.run("UPDATE job SET options = options::jsonb || '{\"deadline\": 5}' WHERE id = %s", child[0])
    watch.run("UPDATE member_deadline SET deadline = '2020-01-01'")
    assert watch.value("SELECT end_overdue()") == 1
    # It runs once more, so that its compensation runs.
    assert state(watch, child) == "available"
    a_minute_passes(watch)
    assert watch.value("SELECT end_overdue()") == 1
    assert state(watch, child) == "cancelled"


def test_a_deadline_of_a_row_that_is_locked_is_kept_and_waits_for_nobody(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    (child,) = start(a, parent, "0", deadline=0.0)
    with b.open():
        b.run("SELECT FROM job WHERE id = %s FOR UPDATE", child)
        assert watch.value("SELECT end_overdue()") == 1
    watch.run("UPDATE member_deadline SET deadline = '2020-01-01'")
    watch.value("SELECT end_overdue()")
    assert state(watch, child) == "cancelled"


# Retry and delete


def retry(teller: Teller, *jobs: int) -> list[tuple[bool, str | None]]:
    return [(row[1], row[3]) for row in teller.run("SELECT * FROM retry_jobs(%s)", list(jobs))]


def test_a_settled_root_goes_back_with_its_history_and_its_members_do_not(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    write_line(a, parent[0])
    start(a, parent, "0")
    (child,) = b.claim("children")
    b.fail(child)
    a.fail(parent)
    assert watch.value("SELECT root_ended_at IS NOT NULL FROM durable_job WHERE job_id = %s", parent[0])
    assert retry(watch, child[0]) == [(False, "dead")]
    assert watch.run("SELECT root_id, parent_id, root_lives, parent_open FROM tree_places(%s)", [child[0]]) == [
        (parent[0], parent[0], False, False)
    ]
    assert retry(watch, parent[0]) == [(True, None)]
    assert watch.value("SELECT root_ended_at IS NULL FROM durable_job WHERE job_id = %s", parent[0])
    assert watch.value("SELECT count(*) FROM history") == 1
    assert retry(watch, child[0]) == [(True, None)]


def test_a_member_goes_back_while_its_parent_may_have_children(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    start(a, parent, "0", "1")
    one, two = b.claim("children")
    b.fail(one)
    assert retry(watch, one[0]) == [(True, None)]
    b.fail(*b.claim("children"))
    cancel(watch, parent[0])
    assert retry(watch, one[0]) == [(False, "dead")]
    a.fail(parent, outcome="cancelled")
    assert retry(watch, one[0], parent[0]) == [(False, "dead"), (False, "suspended")]
    assert watch.run("SELECT ends_as, below, root_lives FROM tree_places(%s)", [parent[0]]) == [("cancelled", 1, True)]
    b.fail(two, outcome="cancelled")
    settle(watch)
    assert state(watch, parent) == "cancelled"


def test_a_member_that_goes_back_after_the_last_of_its_siblings_is_waited_for_again(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    start(a, parent, "0", "1")
    one, two = b.claim("children")
    suspend(watch, parent, 0)
    b.fail(one)
    assert retry(watch, one[0]) == [(True, None)]
    b.complete(two)
    settle(watch)
    assert state(watch, parent) == "suspended"
    b.complete(*b.claim("children"))
    settle(watch)
    assert state(watch, parent) == "available"


def end_block(teller: Teller, parent: Job, block: int = 0) -> tuple[bool, bool, str | None]:
    """Whether a child lives, whether one was retried, why it was refused."""
    return teller.run("SELECT live, retried, refused FROM end_block(%s, %s, %s, %s)", *parent, teller.session, block)[0]


def test_a_completed_member_goes_back_no_more_because_its_parent_may_have_its_result(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    start(a, parent, "0")
    b.complete(*b.claim("children"))
    (child,) = watch.run("SELECT job_id FROM member")
    assert retry(watch, *child) == [(False, "completed")]
    a.fail(parent, outcome="failed")
    assert retry(watch, *child) == [(False, "completed")]


@pytest.mark.parametrize("ends", ["it ends", "it is cut"])
def test_a_dead_member_goes_back_until_its_block_ends_and_again_in_a_later_attempt_of_its_parent(
    ends: str, workers: list[Teller]
) -> None:
    a, b, watch = workers
    parent = a.root("q")
    start(a, parent, "0", "1")
    start(a, parent, "other", block=1)
    one, two, other = b.claim("children")
    b.fail(one, other)
    assert retry(watch, one[0]) == [(True, None)]
    b.complete(two)
    # The block, which took the first for dead, waits for it again.
    assert end_block(a, parent) == (True, True, None)
    b.fail(*b.claim("children"))
    if ends == "it ends":
        assert end_block(a, parent) == (False, False, None)
    else:
        assert a.value("SELECT whole FROM cancel_block(%s, %s, %s, 0, 'sibling')", *parent, a.session)
    assert retry(watch, one[0]) == [(False, "dead")]
    assert watch.value("SELECT parent_open FROM tree_places(%s)", [one[0]]) is False
    assert retry(watch, other[0]) == [(True, None)]
    a.fail(parent, outcome="failed")
    watch.run("UPDATE job SET run_at = now() WHERE id = %s", parent[0])
    (parent,) = a.claim("q")
    assert retry(watch, one[0]) == [(True, None)]


@pytest.mark.parametrize("first", ["the retry", "the end of the block"])
def test_of_a_retry_and_the_end_of_its_block_the_second_waits_and_sees_the_first(
    first: str, workers: list[Teller]
) -> None:
    a, b, watch = workers
    parent = a.root("q")
    start(a, parent, "0")
    (child,) = b.claim("children")
    b.fail(child)
    found: list[object] = []
    acts = {
        "the retry": (b, lambda: found.append(retry(b, child[0]))),
        "the end of the block": (a, lambda: found.append(end_block(a, parent))),
    }
    teller, act = acts.pop(first)
    ((late_teller, late),) = acts.values()
    with teller.open():
        act()
        waiting = threading.Thread(target=late)
        waiting.start()
        wait_for_lock(watch, late_teller)
    waiting.join()
    if first == "the retry":
        assert found == [[(True, None)], (True, True, None)]
    else:
        assert found == [(False, False, None), [(False, "dead")]]


@pytest.mark.parametrize("kept", [0, 1])
def test_children_that_are_being_written_while_their_block_is_cut_do_not_escape(
    kept: int, workers: list[Teller]
) -> None:
    """The answer of the statement that writes them was lost; the block cancels what it has."""
    a, b, watch = workers
    parent = a.root("q")
    if kept:
        start(a, parent, "0")
    b.session = a.session
    answers: list[tuple[Any, ...]] = []

    def cut() -> None:
        answers.append(a.run("SELECT whole, refused FROM cancel_block(%s, %s, %s, 0, 'parent')", *parent, a.session)[0])

    with b.open():
        (late,) = start(b, parent, "late")
        cutting = threading.Thread(target=cut)
        cutting.start()
        if kept:
            wait_for_lock(watch, a)
        else:
            # The first child marks its parent's row, which nobody waits for.
            cutting.join()
    cutting.join()
    if not kept:
        assert answers == [(None, "locked")]
        cut()
    assert answers[-1] == (True, None)
    assert state(watch, late) == "cancelled"


def test_a_row_that_is_locked_says_nothing_of_the_children_that_are_to_start_again(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    start(a, parent, "0")
    (child,) = b.claim("children")
    b.fail(child)
    again = "SELECT * FROM restart_children(%s, %s, %s, %s)"
    with watch.open():
        # A cancellation that is rolled back, say.
        watch.run("SELECT FROM job WHERE id = %s FOR UPDATE", parent[0])
        assert a.run(again, *parent, a.session, [child[0]]) == [(None,)]
    assert a.run(again, *parent, a.session, [child[0]]) == [(child[0],)]


def test_a_suspended_job_is_not_hurried(workers: list[Teller]) -> None:
    a, _, watch = workers
    job = a.root("q")
    suspend(watch, job)
    assert retry(watch, job[0]) == [(False, "suspended")]
    assert state(watch, job) == "suspended"


def test_nothing_of_a_live_tree_is_deleted_and_with_its_root_all_of_a_settled_one(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    write_line(a, parent[0])
    start(a, parent, "0", "1")
    one, two = b.claim("children")
    b.complete(one)
    delete = "SELECT deleted, state FROM delete_jobs(%s) ORDER BY id"
    assert watch.run(delete, [parent[0], one[0], two[0]]) == [
        (False, "running"),
        (False, "completed"),
        (False, "running"),
    ]
    a.fail(parent, outcome="released")
    assert watch.run(delete, [parent[0]]) == [(False, "available")]
    (parent,) = a.claim("q")
    b.complete(two)
    a.complete(parent)
    assert watch.run(delete, [parent[0]]) == [(True, None)]
    assert watch.value("SELECT prune_trees('7 days')") is False
    for table in ("job_archive", "member", "durable_job", "history"):
        assert watch.value(f"SELECT count(*) FROM {table}") == 0, table


@pytest.mark.parametrize("ends", ["completed", "dead"])
def test_a_member_is_deleted_with_its_root_and_not_before(ends: str, workers: list[Teller]) -> None:
    """The root may be retried as long as its row is kept, and then asks for what the member returned."""
    a, b, watch = workers
    parent = a.root("q")
    start(a, parent, "0", "1")
    one, two = b.claim("children")
    b.complete(one)
    b.complete(two)
    if ends == "completed":
        a.complete(parent)
    else:
        a.fail(parent)
    assert state(watch, parent) == ends
    delete = "SELECT deleted, state FROM delete_jobs(%s) ORDER BY id"
    assert watch.run(delete, [one[0]]) == [(False, "completed")]
    with b.open():
        # A root that stays, because another transaction has its row, keeps its members.
        b.run("SELECT FROM job_archive WHERE id = %s FOR UPDATE", parent[0])
        assert watch.run(delete, [parent[0], one[0]]) == [(False, ends), (False, "completed")]
    assert watch.run(delete, [parent[0], one[0]]) == [(True, None), (True, None)]
    # The row of its root is gone.
    assert watch.run(delete, [two[0]]) == [(True, None)]


def test_the_refusal_to_delete_a_member_names_its_root(workers: list[Teller]) -> None:
    a, b, _ = workers
    parent = a.root("q")
    start(a, parent, "0")
    (child,) = b.claim("children")
    b.complete(child)
    a.fail(parent)
    with pytest.raises(InvalidTransition, match=rf"jobs delete {parent[0]}\)"):
        SyncClient(a.connection.info.dsn).delete(child[0])


def test_an_enqueue_that_replaces_leaves_a_job_of_a_tree_as_it_is(workers: list[Teller]) -> None:
    a, _, watch = workers
    made = watch.value("SELECT pulse.enqueue('parent', '{\"n\": 1}', 'q', unique_key => 'k')")
    (job,) = a.claim("q")
    suspend(watch, job)
    same = watch.value("SELECT pulse.enqueue('parent', '{\"n\": 2}', 'q', unique_key => 'k', on_conflict => 'replace')")
    assert (same, watch.value("SELECT args ->> 'n' FROM jobs")) == (made, "1")


# Retention


def test_members_are_kept_as_long_as_their_root_and_go_with_it(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    start(a, parent, "0")
    b.complete(*b.claim("children"))
    plain = a.root("plain")
    a.complete(plain)
    old = "2020-01-01 12:00Z"
    watch.run(
        "CREATE TABLE pulse.job_archive_20200101 PARTITION OF pulse.job_archive "
        "FOR VALUES FROM ('2020-01-01Z') TO ('2020-01-02Z')"
    )
    watch.run("UPDATE job_archive SET finished_at = %s", old)
    assert watch.run("SELECT dropped FROM maintain('7 days') WHERE dropped LIKE 'job_archive%%'") == []
    # The rest of that day is gone.
    assert watch.run("SELECT child_key FROM jobs WHERE finished_at IS NOT NULL") == [("0",)]
    a.complete(parent)
    # The root's own row goes first: as long as it is there, it can be retried.
    watch.run("UPDATE job_archive SET finished_at = %s WHERE id = %s", old, parent[0])
    watch.run("UPDATE durable_job SET root_ended_at = %s", old)
    watch.value("UPDATE maintenance SET maintained_at = '-infinity' RETURNING 1")
    watch.value("SELECT upkeep('7 days')")
    assert watch.value("SELECT count(*) FROM member") == 0
    assert watch.run("SELECT dropped FROM maintain('7 days') WHERE dropped LIKE 'job_archive%%'") == [
        ("job_archive_20200101",)
    ]


def test_a_root_that_goes_by_its_queues_own_retention_takes_its_members_along(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("short")
    start(a, parent, "0")
    b.complete(*b.claim("children"))
    a.complete(parent)
    watch.run("INSERT INTO queue (name, retention) VALUES ('short', '1 second'), ('children', '1 second')")
    watch.run("UPDATE job_archive SET finished_at = finished_at - interval '10 seconds'")
    watch.run("UPDATE durable_job SET root_ended_at = root_ended_at - interval '10 seconds'")
    watch.value("SELECT prune('7 days')")
    assert watch.run("SELECT child_key FROM jobs") == [("0",)]
    watch.value("SELECT prune_trees('7 days')")
    assert watch.run("SELECT child_key FROM jobs") == []


# The slow look


def test_a_parent_whose_watched_child_went_without_a_trigger_is_looked_at_slowly(workers: list[Teller]) -> None:
    a, _, watch = workers
    parent = a.root("q")
    (child,) = start(a, parent, "0")
    suspend(watch, parent, 0)
    watch.run("DELETE FROM job WHERE id = %s", child)
    settle(watch)
    assert state(watch, parent) == "suspended"
    assert watch.run("SELECT why, job_id FROM stuck_trees()") == [("unwatched", parent[0])]
    assert watch.run("SELECT * FROM look_slowly()") == [(None, 1)]
    assert watch.run("SELECT * FROM look_slowly()") == [(None, 0)]
    settle(watch)
    assert state(watch, parent) == "available"


def test_children_that_nobody_serves_are_named(workers: list[Teller]) -> None:
    a, _, watch = workers
    parent = a.root("q")
    (child,) = start(a, parent, "0")
    watch.run("UPDATE job SET run_at = now() - interval '1 hour' WHERE id = %s", child)
    suspend(watch, parent, 0)
    assert watch.run("SELECT root_id, job_id, queue, kind, why FROM stuck_trees()") == [
        (parent[0], child, "children", "child", "unserved queue")
    ]
    watch.run("INSERT INTO queue (name, paused_at) VALUES ('children', now())")
    assert watch.run("SELECT why FROM stuck_trees()") == [("paused queue",)]


def test_a_tree_of_many_jobs_that_wait_hides_no_other_tree(workers: list[Teller]) -> None:
    a, _, watch = workers
    large, small = a.root("q"), a.root("q")
    of_large = start(a, large, *map(str, range(300)))
    (paused,) = start(a, large, "paused", queue="other", block=1)
    (of_small,) = start(a, small, "0", queue="printers")
    for n in range(3):
        start(a, large, f"more {n}", queue=f"unserved{n}", block=2 + n)
    watch.run("UPDATE job SET run_at = now() - interval '1 hour' WHERE state = 1")
    watch.run("INSERT INTO queue (name, paused_at) VALUES ('other', now())")
    found = run_sync(watch.connection, "pulse", stuck())
    assert (found.trees, found.at_least) == (2, False)
    assert [(tree.root_id, tree.others) for tree in found.first] == [(large[0], 2), (small[0], 0)]
    first, second, third = found.first[0].waits
    assert first == StuckJobs("unserved queue", "children", None, 300, of_large[0])
    assert second == StuckJobs("paused queue", "other", None, 1, paused)
    assert third.queue == "unserved0"
    assert found.first[1].waits == [StuckJobs("unserved queue", "printers", None, 1, of_small)]
    found = run_sync(watch.connection, "pulse", stuck(trees=1))
    assert ([tree.root_id for tree in found.first], found.trees, found.at_least) == ([large[0]], 2, False)
    # Each tree that is named has its share of what is read: the first one hides none, and says that it may have more.
    found = run_sync(watch.connection, "pulse", stuck(trees=2, most=100))
    assert (found.trees, found.at_least) == (2, False)
    assert [(tree.root_id, tree.at_least) for tree in found.first] == [(large[0], True), (small[0], False)]
    assert sum(jobs.jobs for jobs in found.first[0].waits) == 50
    assert found.first[1].waits == [StuckJobs("unserved queue", "printers", None, 1, of_small)]
    found = run_sync(watch.connection, "pulse", stuck(trees=1, most=100))
    assert ([tree.root_id for tree in found.first], found.trees, found.at_least) == ([large[0]], 1, True)


def test_parents_deep_in_a_tree_that_nothing_watches_are_named_with_its_root(workers: list[Teller]) -> None:
    a, b, watch = workers
    root = a.root("q")
    start(a, root, "0")
    suspend(watch, root, 0)
    (inner,) = b.claim("children")
    (leaf,) = start(b, inner, "0", queue="leaves")
    suspend(watch, inner, 0)
    assert run_sync(watch.connection, "pulse", stuck()).trees == 0
    watch.run("DELETE FROM job WHERE id = %s", leaf)
    (tree,) = run_sync(watch.connection, "pulse", stuck()).first
    assert (tree.root_id, tree.waits) == (root[0], [StuckJobs("unwatched", "children", None, 1, inner[0])])
    # One whose root was deleted by hand too, which a slow look has noted.
    watch.run("DELETE FROM job WHERE id = %s", root[0])
    watch.run("UPDATE durable_job SET root_ended_at = now() WHERE job_id = %s", root[0])
    assert [tree.root_id for tree in run_sync(watch.connection, "pulse", stuck()).first] == [root[0]]


def test_many_trees_that_wait_are_read_up_to_a_bound(workers: list[Teller]) -> None:
    *_, watch = workers
    watch.run(
        "INSERT INTO job (id, kind, queue, run_at, options) SELECT n, CASE WHEN n < 10000 THEN 'parent' ELSE 'child' END, "
        "'packers', now() - interval '1 hour', '{\"tree\": 2}' FROM generate_series(5000, 29999) n "
        "WHERE n NOT BETWEEN 6000 AND 9999"
    )
    # The first tree has half of the children, and the others 10 each.
    watch.run("INSERT INTO durable_job (job_id, root_id, depth) SELECT n, n, 0 FROM generate_series(5000, 5999) n")
    watch.run(
        "INSERT INTO member (job_id, root_id, parent_id, block, child_key, watched, failed) "
        "SELECT n, r, r, 0, n::text, false, false FROM generate_series(10000, 29999) n, "
        "LATERAL (SELECT CASE WHEN n < 20000 THEN 5000 ELSE 5000 + (n - 20000) / 10 END AS r) t"
    )
    watch.run("ANALYZE job")
    watch.run("ANALYZE member")
    explain: Any = b"EXPLAIN (ANALYZE, FORMAT JSON) " + statement("stuck_trees", "pulse")
    ((plan,),) = watch.connection.execute(explain, {"trees": 20, "most": 1000, "each": 50}).fetchall()
    nodes = [plan[0]["Plan"]]
    for node in nodes:
        nodes += node.get("Plans", [])
    (read,) = [node for node in nodes if node["Node Type"] == "Function Scan"]
    assert read["Actual Loops"] == 1
    assert read["Actual Rows"] == 1000
    assert max(node["Actual Rows"] * node["Actual Loops"] for node in nodes) == 1000
    assert plan[0]["Plan"]["Actual Rows"] == 20
    found = run_sync(watch.connection, "pulse", stuck())
    assert (found.trees, len(found.first), found.at_least) == (1000, 20, False)
    assert [(tree.waits[0].jobs, tree.at_least) for tree in found.first[:2]] == [(5000, True), (10, False)]
    found = run_sync(watch.connection, "pulse", stuck(most=1000))
    assert (len(found.first), found.at_least, found.first[0].at_least, found.first[1].at_least) == (
        20,
        True,
        True,
        False,
    )


def test_one_tree_of_many_jobs_that_wait_costs_those_that_are_read(workers: list[Teller]) -> None:
    *_, watch = workers
    watch.run("INSERT INTO job (id, kind, queue, run_at) SELECT 9, 'parent', 'q', far()")
    watch.run("INSERT INTO durable_job (job_id, root_id, depth) VALUES (9, 9, 0)")
    watch.run(
        "INSERT INTO job (id, kind, queue, run_at) SELECT n, 'child', 'packers', now() - interval '1 hour' "
        "FROM generate_series(1001, 21000) n"
    )
    watch.run(
        "INSERT INTO member (job_id, root_id, parent_id, block, child_key, watched, failed) "
        "SELECT n, 9, 9, 0, n::text, false, false FROM generate_series(1001, 21000) n"
    )
    watch.run("ANALYZE job")
    watch.run("ANALYZE member")
    ((plan,),) = watch.connection.execute(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT count(*) FROM trees_that_wait(1000, 100)"
    ).fetchall()
    # Three for each of the hundred, and the catalogue for the plan. All 20,000 jobs would take 60,000.
    assert plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"] < 5000


def test_waiting_plain_jobs_are_cancelled_retried_and_deleted_as_before(workers: list[Teller]) -> None:
    *_, watch = workers
    jobs = [watch.value("SELECT pulse.enqueue('plain', '{}', 'q')") for _ in range(3)]
    assert cancel(watch, *jobs[:2]) == [(job, "cancelled") for job in jobs[:2]]
    assert cancel(watch, jobs[0], 10**9) == [(jobs[0], "cancelled")]
    assert retry(watch, jobs[0], jobs[2]) == [(True, None), (False, "available")]
    assert watch.run("SELECT deleted FROM delete_jobs(%s)", jobs) == [(True,)] * 3


def test_a_caller_that_is_no_operator_cannot_call_the_functions_behind(workers: list[Teller]) -> None:
    *_, watch = workers
    rows: list[Any] = watch.run(
        "SELECT p.proname FROM pg_proc p WHERE p.pronamespace = 'pulse'::regnamespace AND p.proname IN "
        "('cancel_row', 'cancel_below', 'cancel_rows', 'prune_trees', 'keeps_members', 'tree_of', 'end_overdue', 'in_tree') "
        "AND has_function_privilege('public', p.oid, 'EXECUTE')"
    )
    assert rows == []


def test_plans_made_on_empty_tables_read_few_rows_of_large_ones(databases: Databases) -> None:
    with databases.migrated() as dsn:
        a = Teller(dsn)
        if a.connection.info.server_version < 150000:
            a.connection.close()
            pytest.skip("PostgreSQL 14 publishes a session's statistics when it likes")

        def round_of_work(number: int) -> None:
            """What a watchdog and an operator ask of a tree."""
            parent = a.root(f"q{number}")
            start(a, parent, *"abcde", deadline=0.0)
            write_line(a, parent[0])
            suspend(a, parent, 0)
            a.run("SELECT * FROM look_slowly(%s)", parent[0] - 1)
            # One call ends for 20 ms at most; it says 100 where more is due.
            while a.value("SELECT end_overdue()") == 100:
                pass
            assert a.value("SELECT count(*) FROM member_deadline WHERE deadline <= now()") == 0
            cancel(a, parent[0])
            retry(a, parent[0])
            a.run("SELECT * FROM tree_of(%s)", parent[0])
            a.run("SELECT * FROM tree_places(%s)", [parent[0]])
            cancel(a, parent[0], how="cancel_jobs_now")

        for number in range(7):
            round_of_work(number)
        a.run(
            "INSERT INTO job (kind, queue, run_at) SELECT 'plain', 'z' || i % 50, '9990-01-01' FROM generate_series(1, 30000) i"
        )
        a.run(
            "INSERT INTO job (kind, queue, run_at, options) "
            "SELECT 'm', 'y', '9990-01-01', '{\"tree\": 1}' FROM generate_series(1, 9000)"
        )
        a.run("INSERT INTO member SELECT id, 1, 1, 1, id::text FROM job WHERE kind = 'm'")
        a.run("SELECT pg_stat_force_next_flush()")
        before = read_so_far(a)
        round_of_work(7)
        read = {table: rows - before[table] for table, rows in read_so_far(a).items()}
        assert max(read.values()) < 1000, read
        a.connection.close()


def read_so_far(teller: Teller) -> dict[str, int]:
    """How many rows this database's sessions have read of each table."""
    teller.run("SELECT pg_stat_force_next_flush()")
    rows = teller.run(
        "SELECT relname, coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) FROM pg_stat_user_tables "
        "WHERE schemaname = 'pulse' AND (relname IN ('job', 'member') OR relname LIKE 'job_archive%%')"
    )
    return {row[0]: row[1] for row in rows}
