"""What durable nurseries rest on (docs/explanation/durable-nurseries.md), tried on a real PostgreSQL with the statements of
workers: races of two open transactions, and every operation on a tree at once.
"""

from __future__ import annotations

import json
import random
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pulse_trio.postgres.pins import pins_query
from pulse_trio.sql import statement
from pulse_trio.store.links import WORKER_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from support.databases import Databases

Row = tuple[Any, ...]


class Teller:
    """One connection of one worker (session 1000 + n), with today's statements and those of the design."""

    def __init__(self, dsn: str, session: int = 1001) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.connection.execute("SET search_path = pulse, pg_temp")
        self.connection.execute(pins_query(WORKER_SETTINGS | {"lock_timeout": "0"}))
        self.session = session

    def run(self, query: str, *parameters: Any) -> list[Row]:
        cursor = self.connection.execute(query, parameters or None)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []

    def value(self, query: str, *parameters: Any) -> Any:
        ((value,),) = self.run(query, *parameters)
        return value

    def _exchange(self, ended: Sequence[tuple[int, int]], queues: Sequence[str], limit: int, keep: bool) -> list[Row]:
        ids = sorted(ended)
        return self.connection.execute(
            statement("complete_and_claim", "pulse"),
            {
                "ids": [i for i, _ in ids],
                "attempts": [a for _, a in ids],
                "sessions": [self.session] * len(ids),
                "results": [f'"of {i}"' for i, _ in ids],
                "keep": keep,
                "session": self.session,
                "lease": "30 s",
                "leases": None,
                "size": 1 << 20,
                "queues": list(queues),
                "priorities": [0] * len(queues),
                "cursor_run_ats": ["-infinity"] * len(queues),
                "cursor_ids": [0] * len(queues),
                "limit": limit,
                "paused_kinds": [],
            },
        ).fetchall()

    def claim(self, queue: str, limit: int = 100) -> list[tuple[int, int]]:
        """(id, attempt) of what was claimed."""
        return [(row[0], row[1]) for row in self._exchange([], [queue], limit, True) if row[0] is not None]

    def complete(self, *ended: tuple[int, int], keep: bool = True) -> int:
        return self._exchange(ended, [], 0, keep)[-1][1]

    def fail(self, *ended: tuple[int, int], outcome: str = "discarded", session: int | None = None) -> list[Row]:
        return self.connection.execute(
            statement("fail", "pulse"),
            {
                "ids": [i for i, _ in ended],
                "attempts": [a for _, a in ended],
                "sessions": [session or self.session] * len(ended),
                "outcomes": [outcome] * len(ended),
                "delays": [0.0] * len(ended),
                "errors": ["it failed"] * len(ended),
                "patience": "1 day",
            },
        ).fetchall()

    def beat(self, *held: tuple[int, int]) -> list[Row]:
        return self.connection.execute(
            statement("beat", "pulse"),
            {
                "ids": [i for i, _ in held],
                "attempts": [a for _, a in held],
                "sessions": [self.session] * len(held),
                "lease": "30 s",
                "leases": None,
            },
        ).fetchall()

    def root(self, queue: str) -> tuple[int, int]:
        """A job that this worker runs."""
        made = self.value("SELECT pulse.enqueue('parent', '{}', %s)", queue)
        ((job, attempt),) = self.claim(queue)
        assert job == made
        return job, attempt

    def start(self, parent: tuple[int, int], *keys: str, queue: str = "children", block: int = 0) -> int | None:
        n = len(keys)
        rows = self.run(
            f"SELECT added, refused FROM start_children({', '.join(['%s'] * 17)}, NULL)",
            *parent,
            self.session,
            block,
            list(keys),
            *([column] * n for column in (None, "child", "{}", queue, 0, None, None, None, None, 20, None, None)),
        )
        return None if any(refused for _, refused in rows) else sum(added for added, _ in rows)

    def suspend(
        self, parent: tuple[int, int], *, blocks: Sequence[int] = (0,), events: Sequence[str] = ()
    ) -> bool | None:
        return self.value(
            "SELECT suspend(%s, %s, %s, %s, %s, %s, NULL)",
            *parent,
            self.session,
            list(blocks),
            list(blocks),
            list(events),
        )

    def line(self, job: tuple[int, int], number: int) -> bool:
        """Whether a line of its history was written."""
        query = "SELECT stands FROM write_lines(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
        asked = (*job, self.session, number, 1, f"{number}:step", "step", "1", None, 1)
        return self.run(query, *([value] for value in asked)) == [(True,)]

    def recheck(self) -> int:
        return self.value("SELECT again FROM recheck_jobs()")

    @contextmanager
    def open(self) -> Generator[None]:
        """A transaction; committed at the end of the block."""
        with self.connection.transaction():
            yield


@pytest.fixture
def tree(databases: Databases) -> Generator[str]:
    with databases.migrated() as dsn:
        yield dsn


@contextmanager
def three_tellers(dsn: str) -> Generator[list[Teller]]:
    """Three connections: two workers' and one that looks."""
    tellers = [Teller(dsn, 1001 + n) for n in range(3)]
    with ExitStack() as stack:
        for teller in tellers:
            stack.callback(teller.connection.close)
        yield tellers


@pytest.fixture
def workers(tree: str) -> Generator[list[Teller]]:
    with three_tellers(tree) as tellers:
        yield tellers


def state(teller: Teller, job: int) -> str:
    return teller.value("SELECT state FROM jobs WHERE id = %s", job)


def suspended(teller: Teller, job: int) -> bool:
    query = (
        "SELECT d.suspended = j.attempt AND j.state = 1 AND j.run_at > now() "
        "FROM job j JOIN durable_job d ON d.job_id = j.id WHERE id = %s"
    )
    return teller.value(query, job)


# What the fence of a line is made of


def test_while_a_line_is_written_beats_go_on_and_no_attempt_ends(workers: list[Teller]) -> None:
    a, b, _ = workers
    parent = a.root("q")
    # The first line sets the mark in the job's row; later ones write no row of it.
    assert a.line(parent, 1)
    with b.open():
        b.session = a.session
        assert b.line(parent, 2)
        assert a.beat(parent) == [(0, True, None, None)]
        assert a.fail(parent, outcome="rescued") == [(parent[0], *[None] * 8)]
        a.run("SET lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            a.complete(parent)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            a.run("SELECT cancel_jobs(ARRAY[%s::bigint])", parent[0])
    assert a.fail(parent, outcome="rescued")[0][1] == "retryable"
    assert not b.line(parent, 3)


def test_a_line_that_is_sent_again_after_a_lost_commit_is_the_same_line(workers: list[Teller]) -> None:
    a, *_ = workers
    parent = a.root("q")
    for _ in range(2):
        assert a.line(parent, 1)
    assert a.value("SELECT count(*) FROM history") == 1


# Join and wake


@pytest.mark.parametrize("first_commits", [0, 1])
def test_of_two_last_children_that_end_at_the_same_moment_one_wakes_the_parent_once(
    workers: list[Teller], first_commits: int
) -> None:
    a, b, watch = workers
    parent = a.root("q")
    assert a.start(parent, "0", "1") == 2
    (one,) = a.claim("children", 1)
    (two,) = b.claim("children", 1)
    assert a.suspend(parent)
    order = [(a, one), (b, two)]
    with ExitStack() as opened:
        stacks = []
        for teller, child in order:
            inner = ExitStack()
            inner.enter_context(teller.open())
            opened.callback(inner.close)
            stacks.append(inner)
            assert teller.complete(child) == 1
        assert watch.recheck() == 0
        stacks[first_commits].close()
        watch.recheck()
        assert suspended(watch, parent[0])
        stacks[1 - first_commits].close()
    settle(watch)
    assert state(watch, parent[0]) == "available"
    assert [p[0] for p in a.claim("q")] == [parent[0]]
    watch.recheck()
    assert watch.value("SELECT count(*) FROM recheck") == 0
    assert a.claim("q") == []


@pytest.mark.parametrize("child_first", [True, False])
def test_a_child_that_ends_while_its_parent_goes_to_sleep_is_not_missed(
    workers: list[Teller], child_first: bool
) -> None:
    a, b, watch = workers
    parent = a.root("q")
    a.start(parent, "0")
    (child,) = b.claim("children")
    with ExitStack() as stack:
        stack.enter_context((b if child_first else a).open())
        if child_first:
            assert b.complete(child) == 1
            assert a.suspend(parent)
        else:
            assert a.suspend(parent)
            # The child's end waits for the mark that the parent is setting: in a thread.
            ending = threading.Thread(target=b.complete, args=[child])
            ending.start()
            wait_for_lock(watch, b)
    if not child_first:
        ending.join()
    settle(watch)
    assert state(watch, parent[0]) == "available"


def settle(watch: Teller) -> None:
    """Looks until nothing is left to look at."""
    while watch.value("SELECT count(*) FROM recheck"):
        watch.recheck()


def wait_for_lock(watch: Teller, blocked: Teller) -> None:
    pid = blocked.connection.info.backend_pid
    while not watch.value("SELECT cardinality(pg_blocking_pids(%s)) > 0", pid):
        pass


def test_an_event_whose_sender_commits_after_the_parent_slept_wakes_it(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    with b.open():
        assert b.value("SELECT send_event(%s, 'approved', '1')", parent[0])
        assert a.beat(parent) == [(0, True, None, None)]
        assert a.suspend(parent, blocks=(), events=("approved",))
        watch.recheck()
        assert suspended(watch, parent[0])
    watch.recheck()
    assert state(watch, parent[0]) == "available"


def test_what_comes_while_the_parent_goes_to_sleep_is_left_to_a_look_that_can_see_it_asleep(
    workers: list[Teller],
) -> None:
    a, b, watch = workers
    parent = a.root("q")
    with a.open():
        assert a.suspend(parent, blocks=(), events=("approved",))
        b.value("SELECT send_event(%s, 'approved', '1')", parent[0])
        # It would take the parent for one that runs, and that looks for itself.
        assert watch.recheck() == 1
    assert suspended(watch, parent[0])
    settle(watch)
    assert state(watch, parent[0]) == "available"


def test_a_row_that_a_stranger_holds_for_long_keeps_no_other_parent_waiting(workers: list[Teller]) -> None:
    a, b, watch = workers
    held = a.root("q")
    a.suspend(held, blocks=(), events=("e",))
    free = a.root("q")
    a.suspend(free, blocks=(), events=("e",))
    with b.open():
        b.run("SELECT FROM job WHERE id = %s FOR UPDATE", held[0])
        for _ in range(150):
            watch.value("SELECT send_event(%s, 'e', '1')", held[0])
        watch.value("SELECT send_event(%s, 'e', '1')", free[0])
        assert watch.recheck() == 1
        watch.recheck()
        assert state(watch, free[0]) == "available"


def test_a_failed_child_wakes_its_parent_while_its_siblings_go_on(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    a.start(parent, "0", "1", "2")
    children = b.claim("children")
    a.suspend(parent)
    b.complete(children[0])
    watch.recheck()
    assert suspended(watch, parent[0])
    b.fail(children[1])
    watch.recheck()
    assert state(watch, parent[0]) == "available"
    assert state(watch, children[2][0]) == "running"


# The outcome of a parent waits for its descendants


def ends_of(kind: str) -> Callable[[Teller, tuple[int, int]], None]:
    def end(teller: Teller, job: tuple[int, int]) -> None:
        match kind:
            case "completed":
                assert teller.complete(job) == 1
            case "unlocked":
                ids = {
                    "ids": [job[0]],
                    "attempts": [job[1]],
                    "sessions": [teller.session],
                    "results": ['"x"'],
                    "keep": True,
                }
                assert teller.connection.execute(statement("complete_unlocked", "pulse"), ids).fetchall()
            case "buried":
                fence = {"id": job[0], "attempt": job[1], "session": teller.session, "bare": False}
                said = {"error": "e", "outcome": "failed"}
                assert teller.connection.execute(statement("bury", "pulse"), fence | said).fetchall()
            case _:
                assert teller.fail(job, outcome=kind)

    return end


@pytest.mark.parametrize(
    ("kind", "becomes"),
    [
        ("completed", "completed"),
        ("unlocked", "completed"),
        ("buried", "dead"),
        ("discarded", "dead"),
        ("cancelled", "cancelled"),
    ],
)
def test_whichever_of_todays_statements_ends_a_parent_its_outcome_waits_for_every_descendant(
    workers: list[Teller], kind: str, becomes: str
) -> None:
    a, b, watch = workers
    parent = a.root("q")
    a.start(parent, "runs", "waits")
    children = b.claim("children", 1)
    b.start(children[0], "grandchild", queue="grandchildren")
    ends_of(kind)(a, parent)
    # Waiting for what runs; what waited without descendants ends with the next look.
    assert watch.run("SELECT count(*) FROM job_archive WHERE id = %s", parent[0]) == [(0,)]
    assert suspended(watch, parent[0])
    settle(watch)
    assert watch.value("SELECT cancelling FROM job WHERE id = %s", children[0][0])
    ended = watch.run("SELECT child_key, cancel_reason FROM job_archive JOIN member ON job_id = id ORDER BY 1")
    assert ended == [("grandchild", "parent"), ("waits", "parent")]
    settle(watch)
    assert suspended(watch, parent[0])
    b.fail(children[0], outcome="cancelled")
    settle(watch)
    assert state(watch, parent[0]) == becomes
    assert watch.value("SELECT count(*) FROM job") == 0
    assert watch.value("SELECT count(*) FROM recheck") == 0


@pytest.mark.parametrize("cut_short_by", ["rescued", "released"])
def test_a_cancelled_job_with_a_history_runs_once_more_when_its_compensation_is_cut_short(
    workers: list[Teller], cut_short_by: str
) -> None:
    a, b, _ = workers
    parent = a.root("q")
    a.start(parent, "0")
    assert a.line(parent, 1)
    a.run("SELECT cancel_jobs(ARRAY[%s::bigint])", parent[0])
    # As a watchdog of the version before, or a worker that does not know the kind, ends it.
    assert a.fail(parent, outcome=cut_short_by)[0][1] == "cancelled"
    # A worker that released it may not know the kind: it does not get it back at once.
    assert state(b, parent[0]) == {"rescued": "available", "released": "scheduled"}[cut_short_by]
    b.run("UPDATE job SET run_at = now()")
    (again,) = b.claim("q")
    assert again == (parent[0], parent[1] + 1)
    b.fail(again, outcome="cancelled")
    assert state(b, parent[0]) == "cancelled"


def test_releases_use_up_no_budget_of_a_cancelled_job_that_owes_its_compensation(workers: list[Teller]) -> None:
    """As they use none of others: a worker that does not know its kind releases it each second."""
    a, b, _ = workers
    parent = a.root("q")
    assert a.line(parent, 1)
    a.run("UPDATE job SET max_attempts = 1 WHERE id = %s", parent[0])
    a.run("SELECT cancel_jobs(ARRAY[%s::bigint])", parent[0])
    for _ in range(3):
        a.fail(parent, outcome="released")
        assert state(b, parent[0]) == "scheduled"
        b.run("UPDATE job SET run_at = now()")
        (parent,) = a.claim("q")
    assert b.run("SELECT attempt, max_attempts FROM job") == [(4, 4)]
    # A crash uses budget, and there is none left.
    a.fail(parent, outcome="rescued")
    assert state(b, parent[0]) == "cancelled"


@pytest.mark.parametrize("cut_short_by", ["rescued", "released", "taken away"])
def test_the_ledger_says_cancelled_when_the_compensation_has_ended_and_until_then_each_attempt_hears_why(
    workers: list[Teller], cut_short_by: str
) -> None:
    a, b, watch = workers
    job = a.root("q")
    assert a.line(job, 1)
    a.run("SELECT cancel_jobs(ARRAY[%s::bigint], 'the customer left')", job[0])
    if cut_short_by == "taken away":
        assert a.run("SELECT moved, state FROM release_jobs(ARRAY[%s::bigint], true)", job[0]) == [(True, "scheduled")]
    else:
        a.fail(job, outcome=cut_short_by)
    request = "SELECT reason, ended_as, ended_at IS NULL FROM cancellations"
    assert watch.run(request) == [("the customer left", None, True)]
    watch.run("UPDATE job SET run_at = now()")
    (again,) = b.claim("q")
    told = b.value("SELECT value FROM resume(%s, %s, %s) WHERE line = 0", *again, b.session)
    assert json.loads(told)["message"] == "the customer left"
    b.fail(again, outcome="failed")
    assert watch.run(request) == [("the customer left", "cancelled", False)]
    assert watch.run("SELECT state, cancel_reason FROM jobs") == [("cancelled", "the customer left")]


def test_whoever_ends_a_parent_in_a_snapshot_older_than_its_children_is_refused(workers: list[Teller]) -> None:
    a, b, _ = workers
    a.start(a.root("q"), "member")
    (parent,) = a.claim("children")
    a.start(parent, "ended before", queue="grandchildren")
    a.complete(*a.claim("grandchildren"))
    b.run("BEGIN ISOLATION LEVEL REPEATABLE READ")
    b.run("SELECT count(*) FROM job")
    a.start(parent, "started after", queue="grandchildren")
    with pytest.raises(psycopg.errors.SerializationFailure):
        b.run("SELECT complete_jobs(ARRAY[%s::bigint])", parent[0])
    b.run("ROLLBACK")
    assert state(a, parent[0]) == "running"


def test_a_death_that_waits_for_descendants_is_heard_of_once_at_its_end(workers: list[Teller]) -> None:
    a, b, watch = workers
    watch.run(
        "INSERT INTO death_hook (kind, hook, takes, queue, priority, max_attempts) VALUES ('parent', 'mourn', '{}', 'h', 0, 1)"
    )
    parent = a.root("q")
    a.start(parent, "0")
    (child,) = b.claim("children")
    a.fail(parent)
    mourned = "SELECT count(*) FROM job WHERE kind = 'mourn'"
    assert watch.value(mourned) == 0
    b.fail(child, outcome="cancelled")
    settle(watch)
    assert watch.value(mourned) == 1


def test_a_child_that_is_ending_while_a_later_attempt_starts_it_again_is_not_started_twice(
    workers: list[Teller],
) -> None:
    a, b, watch = workers
    parent = a.root("q")
    a.start(parent, "0")
    (child,) = b.claim("children")
    a.fail(parent, outcome="released")
    (parent,) = a.claim("q")
    with b.open():
        b.complete(child)
        assert a.start(parent, "0") == 0
    assert a.start(parent, "0") == 0
    assert watch.value("SELECT count(*) FROM member JOIN job ON id = job_id") == 0


# Cancellation


def test_no_child_is_born_after_its_parents_cancellation_and_none_before_it_escapes(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    a.start(parent, "0")
    (child,) = a.claim("children")
    with a.open():
        assert a.start(child, "in flight", queue="grandchildren") == 1
        cancelling = threading.Thread(target=b.value, args=["SELECT cancel_jobs(ARRAY[%s::bigint])", parent[0]])
        cancelling.start()
        # It waits for nothing but the parent's own row: the child's, which is locked, is left to the next look.
        cancelling.join()
        assert watch.value("SELECT cancelling FROM job WHERE id = %s", parent[0])
        assert not watch.value("SELECT cancelling FROM job WHERE id = %s", child[0])
    assert a.start(parent, "late") is None
    settle(watch)
    assert watch.value("SELECT cancelling FROM job WHERE id = %s", child[0])
    assert a.start(child, "late", queue="grandchildren") is None
    assert watch.run("SELECT child_key, state FROM job_archive JOIN member ON job_id = id") == [("in flight", 6)]


def test_a_cancel_that_sweeps_below_one_job_before_it_has_the_next_deadlocks_with_a_completion(
    workers: list[Teller],
) -> None:
    a, b, watch = workers
    first = a.root("first")
    second = b.root("second")
    a.start(first, "0")
    (child,) = b.claim("children")
    assert first[0] < second[0] < child[0]
    b.run("SET deadlock_timeout = '10s'")
    with a.open():
        # One pass: the first, its child, and only then the second.
        a.run("SELECT cancel_jobs(ARRAY[%s::bigint])", first[0])
        ended: list[Exception] = []
        completing = threading.Thread(target=catch, args=[ended, lambda: b.complete(second, child)])
        completing.start()
        wait_for_lock(watch, b)
        a.run("SET LOCAL deadlock_timeout = '10ms'")
        with pytest.raises(psycopg.errors.DeadlockDetected), a.open():
            a.run("SELECT cancel_jobs(ARRAY[%s::bigint])", second[0])
    completing.join()
    assert ended == []


def test_a_cancel_of_two_jobs_holds_nothing_below_the_first_while_it_waits_for_the_second(
    workers: list[Teller],
) -> None:
    a, b, watch = workers
    first = a.root("first")
    second = b.root("second")
    a.start(first, "0")
    (child,) = b.claim("children")
    ended: list[Exception] = []
    with b.open():
        assert b.complete(second) == 1
        cancelling = threading.Thread(
            target=catch,
            args=[ended, lambda: a.run("SELECT cancel_jobs(ARRAY[%s, %s]::bigint[])", first[0], second[0])],
        )
        cancelling.start()
        wait_for_lock(watch, a)
        assert b.complete(child) == 1
    cancelling.join()
    assert ended == []
    assert watch.value("SELECT cancelling FROM job WHERE id = %s", first[0])


def catch(errors: list[Exception], act: Callable[[], object]) -> None:
    try:
        act()
    except psycopg.Error as error:
        errors.append(error)


# What plain jobs pay


def test_claims_walk_past_no_suspended_job(workers: list[Teller]) -> None:
    a, *_ = workers
    a.run("INSERT INTO job (kind, queue) SELECT 'plain', 'q' FROM generate_series(1, 1000)")
    a.run("VACUUM ANALYZE job")
    few = buffers_of_a_claim(a)
    a.run(
        "INSERT INTO job (kind, queue, options, run_at) "
        "SELECT 'parent', 'q', '{\"tree\": 1}', far() FROM generate_series(1, 50000)"
    )
    a.run("VACUUM ANALYZE job")
    many = buffers_of_a_claim(a)
    assert many <= few + 10


def buffers_of_a_claim(teller: Teller) -> int:
    query = """
      EXPLAIN (ANALYZE, BUFFERS, FORMAT json)
      SELECT id FROM job WHERE queue = 'q' AND priority = 0 AND (run_at, id) >= ('-infinity', 0)
      AND run_at <= statement_timestamp() AND key IS NULL AND state <> 2 AND NOT suspect ORDER BY run_at, id LIMIT 100
    """
    # The second time: at the first the session may have to read the catalogue, too.
    plan = [teller.value(query)[0]["Plan"] for _ in range(2)][1]
    assert "Index" in json.dumps(plan)
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


# Everything at once

ORPHANS = """
SELECT c.id, m.parent_id FROM member m JOIN job c ON c.id = m.job_id
WHERE NOT EXISTS (SELECT FROM job p WHERE p.id = m.parent_id)
"""
"""In one snapshot: live, although the job that started it is settled."""


@pytest.mark.parametrize("seed", range(4))
def test_every_operation_on_a_tree_at_once_deadlocks_nowhere_loses_no_wake_and_leaves_no_orphan(
    tree: str, seed: int
) -> None:
    """Workers run roots that start children that start grandchildren, suspend, fail, are released and cancelled, while others
    look. No snapshot shows a job whose parent is settled; at rest nothing is live."""
    victims: list[Exception] = []
    orphans: list[Row] = []

    def work(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        teller = Teller(tree, 1001 + number)
        held: list[tuple[int, int]] = []

        def step() -> None:
            held.extend(teller.claim(chance.choice(["0", "1", "2"]), chance.randint(1, 3)))
            chance.shuffle(held)
            some = [held.pop() for _ in range(min(len(held), chance.randint(0, 3)))]
            for job in some:
                ((depth,),) = teller.run("SELECT queue::int FROM job WHERE id = %s", job[0]) or [(2,)]
                what = chance.random()
                if what < 0.5 and depth < 2:
                    teller.start(job, *map(str, range(chance.randint(1, 4))), queue=str(depth + 1))
                    teller.suspend(job)
                elif what < 0.6:
                    teller.beat(job)
                    held.append(job)
                elif what < 0.7:
                    # Not as a rescue: the second of those makes a suspect, which no ordinary claim takes.
                    teller.fail(job, outcome="released")
                elif what < 0.8:
                    teller.fail(job, outcome="discarded")
                elif what < 0.85:
                    teller.run("SELECT cancel_jobs(ARRAY[%s::bigint])", job[0])
                    held.append(job)
                else:
                    teller.complete(job)
            if chance.random() < 0.3:
                # A batch, as workers report: completions in order, failures in any.
                batch = [held.pop() for _ in range(min(len(held), 4))]
                ids = [id_ for id_, _ in batch]
                # No worker does so for a parent and its child: a handler returns when its children have ended. The child
                # would live on for its own children here, and its parent would not know (seen once, on PostgreSQL 15).
                related = teller.run("SELECT 1 FROM member WHERE job_id = ANY (%s) AND parent_id = ANY (%s)", ids, ids)
                for some in [[one] for one in batch] if related else [batch]:
                    teller.complete(*some)
            if chance.random() < 0.2:
                teller.fail(*[held.pop() for _ in range(min(len(held), 4))], outcome="discarded")
            if chance.random() < 0.3:
                teller.recheck()
            orphans.extend(teller.run(ORPHANS))

        try:
            # The roots' queue is empty before the others are: whoever ends early leaves what it holds to `finish`.
            while held or not nothing_claimable(teller):
                step()
        except psycopg.Error as error:
            victims.append(error)
        finally:
            teller.connection.close()

    watch = Teller(tree, 1999)
    watch.run("SELECT pulse.enqueue('root', '{}', '0') FROM generate_series(1, 60)")
    threads = [threading.Thread(target=work, args=[n]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert victims == []
    finish(watch)
    # Not by finished_at, which is taken before the look at the children: one that ends just then has a later one.
    assert orphans == []
    # Every place has its one job, once.
    assert watch.value("SELECT count(*) FROM member") == watch.value("SELECT count(*) FROM job_archive") - 60
    watch.connection.close()


def nothing_claimable(teller: Teller) -> bool:
    return teller.value("SELECT count(*) FROM job WHERE state <> 2 AND run_at <= now()") == 0


def finish(watch: Teller) -> None:
    """What is left over ends: nothing else may be needed than looks and the ends of what runs."""
    for _ in range(200):
        watch.recheck()
        # A resumption that wrote nothing is due a second after the last.
        watch.run("UPDATE job SET run_at = now() WHERE state = 1 AND run_at < now() + interval '1 min'")
        for queue in "012":
            for job in watch.claim(queue):
                watch.complete(job)
        for job in watch.run("SELECT id, attempt, locked_by FROM job WHERE state = 2"):
            watch.fail((job[0], job[1]), outcome="discarded", session=job[2])
        if watch.value("SELECT count(*) FROM job") == 0:
            return
    left = watch.run(
        "SELECT to_json(j), to_json(m), to_json(d) "
        "FROM job j LEFT JOIN member m ON m.job_id = id LEFT JOIN durable_job d ON d.job_id = id"
    )
    raise AssertionError(f"these can go on no more: {left}; rechecks: {watch.run('SELECT job_id FROM recheck')}")
