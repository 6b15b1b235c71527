"""What attacks on trees found: retries after the end of a block, numbers of blocks, and results that json cannot read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .test_tree_design import Teller, settle
from .test_tree_operations import Job, start, state, workers

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["workers"]

UNREADABLE = '{"name": "a\\u0000b", "session": 1}'


def line(teller: Teller, job: Job, kind: int, key: str, value: str | None = None) -> None:
    """A line of the attempt that runs."""
    number = teller.value("SELECT coalesce(max(line), 0) + 1 FROM history WHERE job_id = %s", job[0])
    teller.run(
        "SELECT FROM write_lines(ARRAY[%s::bigint], ARRAY[%s], ARRAY[%s::bigint], ARRAY[%s], ARRAY[%s], ARRAY[%s],"
        " ARRAY['']::text[], ARRAY[%s], ARRAY[NULL]::bigint[], ARRAY[0])",
        job[0], job[1], teller.session, number, kind, key, value,
    )  # fmt: skip


def retried(teller: Teller, job: Job) -> bool:
    return teller.value("SELECT moved FROM retry_jobs(ARRAY[%s::bigint])", job[0])


def dead_child(a: Teller, b: Teller, block: int) -> tuple[Job, Job]:
    parent = a.root("q")
    start(a, parent, "one", block=block)
    (child,) = b.claim("children")
    b.fail(child)
    settle(a)
    return parent, child


# Retries of members


@pytest.mark.parametrize(
    ("block", "write"),
    [
        (2, lambda a, job: line(a, job, 6, "2:block")),
        (2, lambda a, job: line(a, job, 7, "2:block", '{"failed": []}')),
        (1048577, lambda a, job: (line(a, job, 10, "block mine", "1048577.0"), line(a, job, 6, "mine"))),
    ],
    ids=["ended well", "failed", "by its key"],
)
def test_a_child_is_not_retried_when_its_parent_has_gone_on_after_its_block(
    workers: list[Teller], block: int, write: Callable[[Teller, Job], object]
) -> None:
    a, b, watch = workers
    parent, child = dead_child(a, b, block)
    line(a, parent, 1, "1:step", "1")
    write(a, parent)
    assert not retried(watch, child)
    assert state(watch, child) == "dead"
    assert watch.value("SELECT parent_open FROM tree_places(ARRAY[%s::bigint])", child[0]) is False
    # Another block of the same parent is open.
    start(a, parent, "two", block=block + 1)
    (other,) = b.claim("children")
    b.fail(other)
    assert retried(watch, other)


@pytest.mark.parametrize(("says", "goes_back"), [("a mark", True), ("an old worker's row", True), ("nothing", False)])
def test_a_child_of_which_the_parents_attempt_failed_is_retried(
    workers: list[Teller], says: str, goes_back: bool
) -> None:
    a, b, watch = workers
    parent, child = dead_child(a, b, 2)
    line(a, parent, 7, "2:block", f'{{"failed": [{child[0]}]}}')
    if says == "a mark":
        line(a, parent, 10, f"{watch.value('SELECT max(line) FROM history')}:forgotten", "1.0")
    watch.run(
        "INSERT INTO session (id, host, pid, version, concurrency, lease, marks) VALUES (%s, 'one', 1, '1', 1, '1 h', %s)"
        " ON CONFLICT (id) DO UPDATE SET marks = EXCLUDED.marks",
        a.session, None if says == "an old worker's row" else True,
    )  # fmt: skip
    a.fail(parent, outcome="failed")
    assert retried(watch, child) is goes_back


def test_a_child_of_a_run_that_was_begun_anew_is_not_retried_under_the_next_one(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent, child = dead_child(a, b, 2)
    a.fail(parent)
    watch.run("SELECT forget_history(ARRAY[%s::bigint])", parent[0])
    assert retried(watch, parent)
    assert not retried(watch, child)


# Beginning anew


def test_a_job_begins_anew_as_often_as_it_likes(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent, first = dead_child(a, b, 2)
    a.fail(parent)
    children = [first[0]]
    for _ in range(2):
        watch.run("UPDATE durable_job SET first_block = 1023 * 2097152 WHERE job_id = %s", parent[0])
        watch.run("UPDATE member SET block = 1023 * 2097152 + 2 WHERE job_id = %s", children[-1])
        watch.run("SELECT forget_history(ARRAY[%s::bigint])", parent[0])
        assert retried(watch, parent)
        (parent,) = a.claim("q")
        number = watch.value("SELECT first_block FROM durable_job WHERE job_id = %s", parent[0])
        assert 0 < number < 2**30
        children += start(a, parent, "one", block=number + 2)
        a.complete(*b.claim("children"))
        b.complete((children[-1], 1))
        settle(a)
        a.complete(parent)
    assert len(set(children)) == 3
    kept = watch.run("SELECT job_id, block FROM member WHERE parent_id = %s ORDER BY job_id", parent[0])
    assert [row[0] for row in kept] == children
    assert len({row[1] for row in kept}) == 3
    assert max(row[1] for row in kept[:2]) < 0


# Results


def test_a_parked_result_that_json_cannot_take_apart_stands_and_its_tree_settles(workers: list[Teller]) -> None:
    a, b, watch = workers
    parent = a.root("q")
    start(a, parent, "one")
    (child,) = b.claim("children")
    a.run(
        "SELECT complete_in_transaction(%s, %s, %s, encode(%s, 'hex'), true)", *parent, a.session, UNREADABLE.encode()
    )
    assert state(watch, parent) == "suspended"
    # As `settled` asks it: by the session, and not by what the result says of one.
    assert watch.value("SELECT is_parked(%s, %s, %s)", *parent, a.session) is True
    assert watch.value("SELECT is_parked(%s, %s, 1)", *parent) is False
    b.complete(child)
    settle(watch)
    assert state(watch, parent) == "completed"
    assert watch.value("SELECT result::text FROM job_archive WHERE id = %s", parent[0]) == UNREADABLE
