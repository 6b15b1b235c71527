"""Children of jobs on a real PostgreSQL, as a worker's store writes and reads them: starting, adopting, waiting, cancelling,
starting again. Races of open transactions: test_tree_design.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pulse_trio.errors import UsageError
from pulse_trio.jobs import JobRequest
from pulse_trio.sql import statement
from pulse_trio.store import cancelling
from pulse_trio.store.links import WORKER_SETTINGS
from pulse_trio.store.trees import Fence, NewChild, StartedChild
from support.stores import Window, claim, claim_one, end, forged, open_kept_store, open_store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from pulse_trio.jobs import Claim
    from pulse_trio.store import WorkerStore
    from support.connections import KeptLinks
    from support.databases import Databases


class Grove:
    """One database, two workers' stores, and a window on it."""

    def __init__(self, window: Window, a: WorkerStore, b: WorkerStore) -> None:
        self.w, self.a, self.b = window, a, b

    async def root(self, **options: Any) -> Claim:
        self.w.enqueue("roots", kind="root", **options)
        return await claim_one(self.a, "roots")

    async def start(self, parent: Claim, *keys: str, block: int = 0, queue: str = "children", **more: Any) -> list[int]:
        started = await self.a.trees.start_children(of(parent), block, [new(key, queue=queue, **more) for key in keys])
        assert started.refused is None
        return [child.job_id for child in started.children]

    async def run(self, queue: str = "children", *, limit: int = 100) -> list[Claim]:
        """What B runs of a queue, in the order of ids."""
        return sorted(await claim(self.b, queue, limit), key=lambda c: c.id)

    async def settle(self) -> None:
        """Looks until nothing is left to look at."""
        while self.w.value("SELECT count(*) FROM recheck"):
            await self.a.trees.recheck()

    def rechecks(self) -> list[int]:
        return [row["job_id"] for row in self.w.run("SELECT DISTINCT job_id FROM recheck ORDER BY 1")]

    def told(self, job_id: int) -> bool:
        return bool(self.w.value("SELECT cancelling FROM job WHERE id = %s", job_id))

    def archived(self, job_id: int) -> dict[str, Any]:
        (row,) = self.w.run("SELECT state, cancel_reason, result, error FROM job_archive WHERE id = %s", job_id)
        return row


def of(parent: Claim) -> Fence:
    return Fence(parent.id, parent.attempt, parent.session)


def new(key: str, *, digest: bytes = b"digest", **request: Any) -> NewChild:
    return NewChild(JobRequest("child", "{}", **request), key, digest)


@pytest.fixture(scope="module")
def ground(databases: Databases) -> Generator[Window]:
    with databases.migrated() as dsn, Window(dsn) as window:
        yield window


# One by one: TRUNCATE makes each of their files, and those of their indexes, anew.
EMPTIED = (
    "job", "job_archive", "attempt", "cancellation", "member", "durable_job", "history", "recheck", "member_deadline",
)  # fmt: skip


@pytest.fixture(scope="module")
def kept(ground: Window) -> Generator[list[KeptLinks]]:
    """What the stores of one test leave to the next."""
    kept: list[KeptLinks] = []
    yield kept
    for one in kept:
        one.close()


@pytest.fixture
async def grove(ground: Window, kept: list[KeptLinks]) -> AsyncGenerator[Grove]:
    for table in EMPTIED:
        ground.run(f"DELETE FROM {table}")
    async with open_kept_store(ground.dsn, kept) as a, open_kept_store(ground.dsn, kept) as b:
        yield Grove(ground, a, b)


# Starting and adopting


async def test_a_child_is_a_job_with_its_own_options_the_mark_and_the_trace_of_its_parent(grove: Grove) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    grove.w.run("SELECT pulse.enqueue('root', queue => 'roots', traceparent => %s)", trace)
    parent = await claim_one(grove.a, "roots")
    child = JobRequest("child", '{"n": 1}', "children", 3, 7, key="tenant", options='{"timeout": 9}')
    ((job_id, added, fits),), _ = await grove.a.trees.start_children(of(parent), 4, [NewChild(child, "k", b"d")])
    assert (added, fits) == (True, True)
    row = grove.w.job(job_id)
    assert (row["kind"], row["queue"], row["priority"], row["max_attempts"]) == ("child", "children", 3, 7)
    assert grove.w.run("SELECT options, key FROM job WHERE id = %s", job_id) == [
        {"options": {"timeout": 9, "tree": 2, "trace": trace}, "key": "tenant"}
    ]
    assert grove.w.run("SELECT root_id, parent_id, block, child_key, args_digest FROM member") == [
        {"root_id": parent.id, "parent_id": parent.id, "block": 4, "child_key": "k", "args_digest": b"d"}
    ]
    assert job_id > parent.id


async def test_a_child_without_a_queue_or_a_priority_has_its_parents(grove: Grove) -> None:
    parent = await grove.root(priority=0)
    fence = (parent.id, parent.attempt, parent.session)
    (row,) = grove.w.run(
        "SELECT child_id FROM start_children(%s, %s, %s, 0, '{k}', '{NULL}', '{child}', '{\"{}\"}', '{NULL}', '{NULL}',"
        " '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{20}', '{NULL}', '{NULL}', '{NULL}')",
        *fence,
    )
    assert grove.w.job(row["child_id"])["queue"] == "roots"


@pytest.mark.parametrize(("own", "at"), [(None, "parent"), (3600.0, "parent"), (5.0, "own")])
async def test_the_deadline_of_a_child_is_the_earlier_of_its_own_and_its_parents(
    grove: Grove, own: float | None, at: str
) -> None:
    grove.w.run("SELECT pulse.enqueue('root', queue => 'roots', deadline => now() + interval '1 min')")
    parent = await claim_one(grove.a, "roots")
    (child,) = await grove.start(parent, "k", deadline_in=own)
    of_parent, of_child, kept = (
        grove.w.value(query, job)
        for query, job in [
            ("SELECT (options ->> 'deadline')::float8 FROM job WHERE id = %s", parent.id),
            ("SELECT (options ->> 'deadline')::float8 FROM job WHERE id = %s", child),
            ("SELECT extract(epoch FROM deadline)::float8 FROM member_deadline WHERE job_id = %s", child),
        ]
    )
    assert (of_child == of_parent) == (at == "parent")
    assert of_child <= of_parent
    assert kept == pytest.approx(of_child)


async def test_a_key_has_one_child_live_or_finished_and_says_whether_its_arguments_are_the_same(grove: Grove) -> None:
    parent = await grove.root()
    (child,) = await grove.start(parent, "k")
    for _ in range(2):
        again = await grove.a.trees.start_children(of(parent), 0, [new("k"), new("other")])
        assert again.children[0] == StartedChild(child, added=False, fits=True)
        (changed,), _ = await grove.a.trees.start_children(of(parent), 0, [new("k", digest=b"changed")])
        assert changed == (child, False, False)
        await grove.b.settle([end(c) for c in await grove.run()])
    assert grove.w.value("SELECT children FROM durable_job") == 2
    assert grove.w.value("SELECT count(*) FROM member") == 2


async def test_a_thousand_children_and_more_keep_their_order(grove: Grove) -> None:
    parent = await grove.root()
    keys = [f"#{n}" for n in range(2500)]
    ids = await grove.start(parent, *keys)
    assert ids == sorted(ids)
    members = await grove.a.trees.members(of(parent))
    assert {m.key: m.job_id for m in members} == dict(zip(keys, ids, strict=True))


async def test_a_flush_says_why_it_wrote_nothing(grove: Grove) -> None:
    parent = await grove.root()
    with grove.w.connection.transaction():
        grove.w.run("SELECT FROM job WHERE id = %s FOR UPDATE", parent.id)
        assert (await grove.a.trees.start_children(of(parent), 0, [new("k")])).refused == "locked"
        assert (await grove.a.trees.cancel_block(of(parent), 0, "sibling")).refused == "locked"
        assert (await grove.a.trees.look(of(parent), 0)).refused == "locked"
    grove.w.do(cancelling.cancel(parent.id))
    assert await grove.a.trees.start_children(of(parent), 0, [new("k")]) == ([], "cancelling")
    later = of(forged(parent, attempt=parent.attempt + 1))
    assert (await grove.a.trees.start_children(later, 0, [new("k")])).refused == "lost"
    assert (await grove.a.trees.cancel_block(later, 0, "sibling")).refused == "lost"
    assert grove.w.value("SELECT count(*) FROM member") == 0


async def test_a_tree_is_at_most_32_levels_deep(grove: Grove) -> None:
    level = await grove.root()
    for depth in range(1, 32):
        await grove.start(level, "k", queue=f"depth{depth}")
        (level,) = await claim(grove.a, f"depth{depth}")
    with pytest.raises(UsageError, match=rf"A tree is at most 32 levels deep; job {level.id} is at level 32."):
        await grove.start(level, "k")
    assert grove.w.value("SELECT count(DISTINCT root_id) FROM member") == 1
    assert grove.w.value("SELECT max(depth) FROM durable_job") == 30


async def test_a_job_has_at_most_100_000_children_and_those_that_are_there_count_once(grove: Grove) -> None:
    parent = await grove.root()
    (child,) = await grove.start(parent, "0")
    grove.w.run("UPDATE durable_job SET children = 100000")
    assert await grove.start(parent, "0") == [child]
    with pytest.raises(UsageError, match="at most 100,000 children"):
        await grove.start(parent, "1")


@pytest.mark.parametrize(
    ("children", "said"),
    [
        ([new("k" * 257)], "A child_key has at most 256 bytes of UTF-8, got 257."),
        ([new("k"), new("k")], "Two children of one block cannot have the same key."),
        ([new("k", options='{"nonsense": 1}')], "there is no option 'nonsense'"),
        ([new("k", options='{"tree": 1}')], "there is no option 'tree'"),
        ([new("k", queue="no such name")], "queue_name"),
        ([new("k")._replace(job_id=1)], "The id of a child is reserved while its parent runs."),
    ],
)
async def test_a_child_that_cannot_be_is_refused_to_the_handler_that_starts_it(
    grove: Grove, children: list[NewChild], said: str
) -> None:
    parent = await grove.root()
    with pytest.raises(UsageError, match=said):
        await grove.a.trees.start_children(of(parent), 0, children)
    assert grove.w.value("SELECT count(*) FROM member") == 0
    assert await grove.start(parent, "fine")


async def test_a_reserved_id_is_the_childs(grove: Grove) -> None:
    parent = await grove.root()
    reserved = grove.w.value("SELECT id FROM reserve(1) id")
    (child,), _ = await grove.a.trees.start_children(of(parent), 0, [new("k")._replace(job_id=reserved)])
    assert child.job_id == reserved


# Waiting


async def test_of_children_that_complete_the_watched_one_alone_leaves_a_recheck(grove: Grove) -> None:
    parent = await grove.root()
    await grove.start(parent, "0", "1", "2")
    assert await grove.a.trees.look(of(parent), 0) == (True, False, None)
    first, second, watched = await grove.run()
    await grove.b.settle([end(first), end(second)])
    assert grove.rechecks() == []
    await grove.b.settle([end(watched)])
    assert grove.rechecks() == [parent.id]
    assert await grove.a.trees.look(of(parent), 0) == (False, False, None)


async def test_a_look_watches_the_last_of_the_candidates_that_lives_here(grove: Grove) -> None:
    parent, other = await grove.root(), await grove.root()
    first, second, third = await grove.start(parent, "2", "1", "0")
    (elsewhere,) = await grove.start(parent, "0", block=1, queue="later")
    (strange,) = await grove.start(other, "0", queue="later")
    watched = "SELECT job_id FROM member WHERE watched ORDER BY 1"

    async def look(*candidates: int) -> list[int]:
        assert (await grove.a.trees.look(of(parent), 0, candidates)).live
        return [row["job_id"] for row in grove.w.run(watched)]

    claims = await grove.run()
    assert await look(first, second, elsewhere, strange) == [second]
    assert await look(first, third) == [second]  # it lives
    await grove.b.settle([end(claims[1])])
    await grove.settle()
    # Those that have ended are passed over, and so is one that another transaction holds; another child is found then.
    assert await look(second, third) == [second, third]
    await grove.b.settle([end(claims[2])])
    await grove.settle()
    assert await look(second, third) == [first, second, third]
    assert grove.w.value("SELECT options ->> 'tree' FROM job WHERE id = %s", first) == "1"
    await grove.b.settle([end(claims[0])])
    assert await grove.a.trees.look(of(parent), 0, [first, second, third]) == (False, False, None)


@pytest.mark.parametrize("between", ["nothing", "1,100 other jobs", "2,500 ids"])
async def test_a_parent_of_many_children_waits_for_the_one_that_lives(grove: Grove, between: str) -> None:
    # Where few jobs live between the first and the last of them, it is one of these; else they are asked for one by one.
    parent = await grove.root()
    await grove.start(parent, *(f"{n}" for n in range(300)))
    if between == "1,100 other jobs":
        grove.w.enqueue_many(1100, "others")
    elif between == "2,500 ids":
        grove.w.run("SELECT nextval('job_id_seq') FROM generate_series(1, 2500)")
    await grove.start(parent, *(f"{n}" for n in range(300, 600)))
    *most, last = await grove.run(limit=1000)
    assert len(most) == 599
    await grove.b.settle([end(claim) for claim in most])
    await grove.a.settle([end(parent)])
    await grove.settle()
    assert grove.w.state(parent.id) == "suspended"
    await grove.b.settle([end(last)])
    await grove.settle()
    assert grove.w.state(parent.id) == "completed"


async def test_the_mark_says_of_which_child_nobody_asks_anything_at_its_end(grove: Grove) -> None:
    def marks() -> list[int]:
        rows = grove.w.run(
            "SELECT options FROM job WHERE kind = 'child' UNION ALL SELECT options FROM job_archive WHERE kind = 'child'"
        )
        return sorted(row["options"]["tree"] for row in rows)

    parent = await grove.root()
    await grove.start(parent, "0", "1", "2")
    assert marks() == [2, 2, 2]
    assert (await grove.a.trees.look(of(parent), 0)).live
    assert marks() == [1, 2, 2]  # the watched one
    first, second, watched = await grove.run()
    assert (await grove.b.trees.start_children(of(first), 0, [new("grandchild", queue="later")])).refused is None
    assert marks() == [1, 1, 2, 2]  # one that has started a child
    asked = "SELECT ends_in_tree(jsonb_build_object('tree', %s::int)::text::json, %s::smallint)"
    told = {(mark, state): grove.w.value(asked, mark, state) for mark in (1, 2) for state in (4, 5, 6)}
    assert [case for case, by_trigger in told.items() if not by_trigger] == [(2, 4)]
    await grove.b.settle([end(watched), end(second)])
    assert grove.rechecks() == [parent.id]


async def test_a_look_says_when_the_next_is_due(grove: Grove) -> None:
    assert await grove.a.trees.recheck() == (0, None)
    parent = await grove.root()
    grove.w.run("INSERT INTO recheck (job_id) VALUES (%s), (%s)", parent.id, parent.id)
    with Window(grove.w.dsn) as stranger, stranger.connection.transaction():
        stranger.run("SELECT FROM job WHERE id = %s FOR UPDATE", parent.id)
        left, due_in = await grove.a.trees.recheck()
        assert (left, due_in is not None and due_in <= 0.01) == (1, True)
        for _ in range(12):
            grove.w.run("UPDATE recheck SET due_at = now()")
            left, due_in = await grove.a.trees.recheck()
        assert (left, due_in is not None and 0.5 < due_in <= 1) == (1, True)
    grove.w.run("UPDATE recheck SET due_at = now()")
    assert await grove.a.trees.recheck() == (0, None)


async def test_a_child_that_dies_is_told_of_though_nobody_watches_it(grove: Grove) -> None:
    parent = await grove.root()
    await grove.start(parent, "0", "1", max_attempts=1)
    await grove.start(parent, "0", block=1)
    first, *_ = await grove.run()
    await grove.b.settle([end(first, "failed", error="it failed")])
    assert grove.rechecks() == [parent.id]
    assert (await grove.a.trees.look(of(parent), 0)).failed
    assert not (await grove.a.trees.look(of(parent), 1)).failed


async def test_children_that_ended_are_probed_once_however_many_looks_there_are(grove: Grove) -> None:
    parent = await grove.root()
    keys = [f"{n:04}" for n in range(400)]
    await grove.start(parent, *keys)
    # From the last key down, which is the order of the search: each end of a watched one brings a look.
    for ended in sorted(await grove.run(limit=400), key=lambda c: -c.id)[:390]:
        await grove.b.settle([end(ended)])
    fence = (parent.id, parent.attempt, parent.session)
    fetched = "SELECT idx_scan FROM pg_stat_xact_user_tables WHERE relid = 'pulse.job'::regclass"
    probes: list[int] = []
    for _ in range(2):
        with grove.w.connection.transaction():
            before = grove.w.value(fetched)
            assert grove.w.value("SELECT live_child(%s, 0)", fence[0])
            probes.append(grove.w.value(fetched) - before)
    assert probes[0] >= 390
    assert probes[1] < 10


async def test_what_a_child_left_is_told_to_its_parents_attempt(grove: Grove) -> None:
    parent = await grove.root()
    ids = await grove.start(parent, "0", "1", "2", "3", "4", max_attempts=1)
    done, dead, stopped, running = await grove.run(limit=4)
    await grove.b.settle([end(done, result='{"of": 1}'), end(dead, "failed", error="it failed")])
    grove.w.do(cancelling.cancel(stopped.id))
    await grove.b.settle([end(stopped, "cancelled", error="user")])
    members = await grove.a.trees.members(of(parent))
    assert [(m.key, m.job_id, m.kind, m.state) for m in members] == [
        ("0", ids[0], "child", "completed"),
        ("1", ids[1], "child", "dead"),
        ("2", ids[2], "child", "cancelled"),
        ("3", running.id, "child", "running"),
        ("4", ids[4], "child", "available"),
    ]
    assert (members[0].result, members[1].error, members[2].cancel_reason) == ('{"of": 1}', "it failed", "user")
    assert [m.key for m in await grove.a.trees.members(of(parent), 0, ended_only=True)] == ["0", "1", "2"]
    assert [m.key for m in await grove.a.trees.members(of(parent), ids=[ids[1], running.id])] == ["1", "3"]
    assert await grove.a.trees.members(of(parent), 1) == []
    assert {r.id: r.state for r in await grove.a.trees.records(ids[:2])} == {ids[0]: "completed", ids[1]: "dead"}
    grove.w.run("DELETE FROM job_archive WHERE id = %s", ids[0])
    assert (await grove.a.trees.members(of(parent)))[0].state == "gone"


async def test_a_worker_that_keeps_no_completed_jobs_keeps_those_of_a_tree(grove: Grove) -> None:
    parent = await grove.root()
    (child, other) = await grove.start(parent, "0", "1")
    async with open_store(grove.w.dsn, keep=False) as keepless:
        grove.w.enqueue("children")
        claims = await claim(keepless, "children")
        assert len(claims) == 3
        (crossed,) = [c for c in claims if c.id == other]
        grove.w.do(cancelling.cancel(other))
        assert len((await keepless.settle([end(c, result="1") for c in claims if c is not crossed])).accepted) == 2
        assert (await keepless.settle([end(crossed, result="2")])).accepted
    kept = grove.w.run("SELECT id FROM job_archive ORDER BY id")
    assert [row["id"] for row in kept] == [child, other]


# Cancelling


async def test_a_cancelled_block_reaches_what_runs_and_what_waits_and_all_that_they_started(grove: Grove) -> None:
    parent = await grove.root()
    running, waiting = await grove.start(parent, "runs", "waits")
    (elsewhere,) = await grove.start(parent, "0", block=1)
    (child,) = await grove.run(limit=1)
    assert child.id == running
    (below,) = (await grove.b.trees.start_children(of(child), 0, [new("below", queue="below")])).children
    assert await grove.a.trees.cancel_block(of(parent), 0, "sibling") == (True, None)
    assert grove.told(running)
    assert grove.archived(waiting)["cancel_reason"] == "sibling"
    assert grove.archived(below.job_id)["cancel_reason"] == "parent"
    assert grove.w.state(elsewhere) == "available"
    assert grove.w.run("SELECT job_id, attempt, cause, requested_by FROM cancellation") == [
        {"job_id": running, "attempt": 1, "cause": "sibling", "requested_by": "tree"}
    ]
    requested = await grove.b.requested([running])
    assert [request.reason for request in requested.values() if request] == ["sibling"]


async def test_a_block_is_cancelled_for_a_reason_that_there_is(grove: Grove) -> None:
    parent = await grove.root()
    with pytest.raises(psycopg.Error, match="not boredom"):
        grove.w.run("SELECT cancel_block(%s, %s, %s, 0, 'boredom')", parent.id, parent.attempt, parent.session)


async def test_a_sweep_that_is_too_large_for_one_transaction_is_ended_by_rechecks(grove: Grove) -> None:
    parent = await grove.root()
    ids = await grove.start(parent, *map(str, range(5)))
    await grove.run(limit=2)
    with grove.w.connection.transaction():
        grove.w.run("SELECT FROM job WHERE id = %s FOR UPDATE", parent.id)
        assert grove.w.value("SELECT cancel_children(%s, 'parent', most => 2)", parent.id) is False
        grove.w.run("UPDATE durable_job SET sweep = 'parent' WHERE job_id = %s", parent.id)
        grove.w.run("INSERT INTO recheck (job_id) VALUES (%s)", parent.id)
    assert [grove.told(i) for i in ids[:2]] == [True, True]
    await grove.settle()
    assert [grove.archived(i)["cancel_reason"] for i in ids[2:]] == ["parent"] * 3


async def test_a_child_that_waits_with_a_history_runs_once_more_to_see_its_cancellation(grove: Grove) -> None:
    parent = await grove.root()
    (child,) = await grove.start(parent, "0")
    grove.w.run("INSERT INTO history (job_id, line, kind, key, attempt) VALUES (%s, 1, 1, '1:step', 1)", child)
    grove.w.run("UPDATE job SET run_at = far() WHERE id = %s", child)
    assert await grove.a.trees.cancel_block(of(parent), 0, "deadline") == (True, None)
    (again,) = await grove.run()
    assert again.id == child
    assert grove.told(child)
    assert grove.w.value("SELECT cause FROM cancellation WHERE job_id = %s AND ended_at IS NULL", child) == "deadline"


# An outcome that waits for descendants


@pytest.mark.parametrize("result", ['{"x": 1}', "null"])
async def test_an_outcome_that_waits_for_descendants_is_written_as_it_was(grove: Grove, result: str) -> None:
    parent = await grove.root()
    await grove.start(parent, "0")
    (child,) = await grove.run()
    assert (await grove.a.settle([end(parent, result=result)])).accepted
    assert grove.w.run("SELECT FROM job_archive") == []
    await grove.b.settle([end(child, "cancelled", error="parent")])
    await grove.settle()
    assert grove.w.value("SELECT result::text FROM job_archive WHERE id = %s", parent.id) == result
    assert grove.w.value("SELECT root_ended_at IS NOT NULL FROM durable_job WHERE job_id = %s", parent.id)
    assert grove.w.run("SELECT ending, sweep, outcome FROM durable_job WHERE job_id = %s", parent.id) == [
        {"ending": None, "sweep": None, "outcome": None}
    ]


async def test_a_report_that_is_sent_again_counts_though_its_outcome_waits_for_descendants(grove: Grove) -> None:
    parent = await grove.root()
    await grove.start(parent, "0")
    await grove.run()
    await grove.a.settle([end(parent)])
    assert (await grove.a.settle([end(parent)], unsure=True)).accepted
    async with grove.a.transactions.open():
        assert await grove.a.transactions.committed(parent)
    for stale in (forged(parent, attempt=parent.attempt + 1), forged(parent, session=grove.b.session)):
        assert not (await grove.a.settle([end(stale)], unsure=True)).accepted


# Starting again


async def test_children_that_died_or_were_cancelled_are_started_again_and_no_others(grove: Grove) -> None:
    parent = await grove.root()
    ids = await grove.start(parent, "done", "dead", "gone", "runs", max_attempts=1)
    done, dead, gone, running = await grove.run()
    await grove.a.trees.look(of(parent), 0)
    await grove.b.settle([end(done), end(dead, "failed", error="it failed"), end(gone, "cancelled", error="user")])
    await grove.b.settle([end(running, "failed", error="it failed")])
    assert await grove.a.trees.look(of(parent), 0) == (False, True, None)
    assert await grove.a.trees.restart_children(of(parent), ids[:3]) == {dead.id, gone.id}
    assert await grove.a.trees.restart_children(of(parent), ids[:3]) == set()
    assert (await grove.a.trees.look(of(parent), 0)).live
    assert [c.id for c in await grove.run()] == [dead.id, gone.id]
    assert grove.w.attempts(dead.id)[0]["outcome"] == "failed"


async def test_a_child_of_another_job_is_not_started_again(grove: Grove) -> None:
    parent, stranger = await grove.root(), await grove.root()
    (child,) = await grove.start(stranger, "0")
    grove.w.do(cancelling.cancel(child))
    assert await grove.a.trees.restart_children(of(parent), [child]) == set()


async def test_a_child_that_is_started_again_after_its_deadline_has_its_parents(grove: Grove) -> None:
    grove.w.run("SELECT pulse.enqueue('root', queue => 'roots', deadline => now() + interval '1 hour')")
    parent = await claim_one(grove.a, "roots")
    (child,) = await grove.start(parent, "0", deadline_in=0.001)
    grove.w.run("SELECT pg_sleep(0.002)")
    grove.w.do(cancelling.cancel(child))
    assert await grove.a.trees.restart_children(of(parent), [child]) == {child}
    deadline = "SELECT options ->> 'deadline' FROM job WHERE id = %s"
    assert grove.w.value(deadline, child) == grove.w.value(deadline, parent.id)


# Plans


def reads(window: Window) -> dict[str, tuple[int, int]]:
    """How many scans from end to end this session has made of each table, and how many rows it has read."""
    rows = window.run(
        "SELECT relname, seq_scan, coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) AS fetched"
        " FROM pg_stat_xact_user_tables"
        " WHERE schemaname = 'pulse' AND (relname IN ('job', 'member') OR relname LIKE 'job_archive%')"
    )
    return {row["relname"]: (row["seq_scan"], row["fetched"]) for row in rows}


def test_plans_made_on_empty_tables_read_few_rows_of_large_ones(databases: Databases) -> None:
    with databases.migrated() as dsn, Window(dsn) as window:
        window.use_settings(WORKER_SETTINGS)

        def family(parent: int) -> None:
            """All that a worker asks of a tree, of a parent with five children."""
            window.run(
                "UPDATE job SET state = 2, attempt = 1, locked_by = 9, lease_until = now() + interval '1 h' WHERE id = %s",
                parent,
            )
            texts = {"child_keys": "{a,b,c,d,e}", "kinds": "{c,c,c,c,c}", "queues": "{q,q,q,q,q}"}
            nothing = dict.fromkeys(
                ("digests", "run_ats", "delays", "deadlines", "expiries", "options", "keys", "reserved"),
                "{NULL,NULL,NULL,NULL,NULL}",
            )
            asked = {
                "parent": parent, "attempt": 1, "session": 9, "block": 0, "args": '{"{}","{}","{}","{}","{}"}',
                "priorities": "{0,0,0,0,0}", "max_attempts": "{1,1,1,1,1}", "cause": "sibling", "ids": None, "most": 100,
                "ended": False, "candidates": "{}",
            } | texts | nothing  # fmt: skip
            for name in (
                "start_children",
                "look_at_block",
                "end_block",
                "members",
                "cancel_block",
                "look_at_block",
                "recheck",
            ):
                window.connection.execute(statement(name, "pulse"), asked).fetchall()
            ids = [row["job_id"] for row in window.run("SELECT job_id FROM member WHERE parent_id = %s", parent)]
            for name in ("restart_children", "look_at_block", "end_block", "fail_block", "children_like"):
                window.connection.execute(statement(name, "pulse"), asked | {"ids": ids}).fetchall()
            window.run("SELECT complete_jobs(ARRAY[%s::bigint])", parent)
            window.connection.execute(statement("recheck", "pulse"), asked).fetchall()
            assert window.state(parent) == "completed"

        family(window.enqueue())
        window.run(
            "INSERT INTO job (kind, queue, run_at, options) SELECT 'c', 'q' || n % 3, now(), '{\"tree\": 1}'"
            " FROM generate_series(1, 50000) n"
        )
        window.run(
            "INSERT INTO member (job_id, root_id, parent_id, block, child_key)"
            " SELECT id, 1, 1000000 + id % 100, 0, id::text FROM job WHERE kind = 'c'"
        )
        window.run(
            "INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures,"
            " max_attempts, priority, state, queue, kind, args)"
            " SELECT n + 2000000, now(), now(), now(), now(), 9, 1, 0, 20, 0, 4, 'q', 'noop', '{}'"
            " FROM generate_series(1, 50000) n"
        )
        parent = window.enqueue()
        with window.connection.transaction():
            before = reads(window)
            family(parent)
            after = reads(window)
        for name, (scans, rows) in after.items():
            scanned, fetched = before.get(name, (0, 0))
            assert (name, scans - scanned) == (name, 0)
            assert rows - fetched < 500, name
