"""The figures of queues for metrics: whose turn it is to count them, what is counted, and that it stays bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from psycopg.conninfo import make_conninfo

from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.grants import grant_sync
from pulse_trio.store.figures import QueueFigure
from support.stores import Window, open_store

if TYPE_CHECKING:
    from pulse_trio.store.figures import Sample


def by_queue(sample: Sample) -> dict[str, tuple[int, int, int, bool]]:
    return {found.queue: (found.available, found.scheduled, found.running, found.paused) for found in sample.queues}


async def test_the_turn_is_one_processs_until_it_ends_or_is_given_back(dsn: str) -> None:
    async with open_store(dsn) as one, open_store(dsn) as other:
        assert await one.figures.take_turn(1, 60) is True
        assert await other.figures.take_turn(2, 60) is False
        assert await one.figures.take_turn(1, 60) is True
        assert await one.figures.take_turn(1, 0) is True
        assert await other.figures.take_turn(2, 60) is True
        with Window(dsn) as window:
            window.run("UPDATE maintenance SET metrics_until = now() - interval '1 s'")
            assert await one.figures.take_turn(1, float("inf")) is True
            assert window.value("SELECT metrics_until < now() + interval '130 s' FROM maintenance")
            window.run("UPDATE maintenance SET metrics_until = 'infinity'")
            assert await other.figures.take_turn(2, float("nan")) is True


async def test_a_turn_that_a_maintenance_keeps_locked_is_not_known_and_nobody_waits(dsn: str) -> None:
    async with open_store(dsn) as store:
        assert await store.figures.take_turn(1, 60) is True
        with Window(dsn) as window:
            with window.connection.transaction():
                window.run("SELECT FROM maintenance FOR UPDATE")
                assert await store.figures.take_turn(1, 60) is None
            # Nor does one who may only read it keep anybody from it.
            with window.connection.transaction():
                window.run("SELECT FROM maintenance")
                assert await store.figures.take_turn(1, 60) is True


async def test_without_the_right_there_is_no_turn_and_it_is_said_to_pass(dsn: str) -> None:
    role = f"pulse_trio_worker_{uuid4().hex[:8]}"
    with Window(dsn) as window:
        window.run(f"CREATE ROLE {role}")
        try:
            grant_sync(dsn, {"worker": role})
            async with open_store(make_conninfo(dsn, options=f"-crole={role}")) as store:
                assert await store.figures.take_turn(1, 60) is True
                window.run(f"REVOKE EXECUTE ON FUNCTION take_metrics_turn FROM {role}")
                with pytest.raises(DatabaseUnavailable, match="take_metrics_turn"):
                    await store.figures.take_turn(1, 60)
        finally:
            window.run(f"DROP OWNED BY {role}; DROP ROLE {role}")


def add(window: Window, queue: str, key: str | None, due: str, state: str, count: int) -> None:
    running, named = int(state == "running"), "NULL" if key is None else f"'{key}'"
    window.run(
        "INSERT INTO job (kind, queue, priority, key, run_at, state, attempt, locked_by, lease_until)"
        f" SELECT 'a', '{queue}', n % 3, {named}, now() + interval '{due}', 1 + {running}, {running},"
        f" 7 * {running}, CASE {running} WHEN 1 THEN now() + interval '1 h' ELSE 'infinity' END"
        f" FROM generate_series(1, {count}) n"
    )


async def test_jobs_are_counted_by_queue_and_state_with_and_without_keys(dsn: str) -> None:
    with Window(dsn) as window:
        add(window, "mail", None, "-90 s", "available", 5)
        add(window, "mail", None, "-95 s", "running", 2)
        add(window, "mail", None, "1 h", "available", 4)
        add(window, "mail", "k", "-5 s", "available", 3)
        add(window, "mail", "k", "-5 s", "running", 1)
        add(window, "mail", "k", "1 h", "available", 2)
        add(window, "a.b/c", "k", "1 h", "available", 1)
        add(window, "z", None, "-1 h", "running", 1)
        window.run("INSERT INTO queue (name, paused_at) VALUES ('z', now())")
        window.run("UPDATE job SET suspect = true WHERE queue = 'a.b/c'")
        async with open_store(dsn) as store:
            sample = await store.figures.sample(100, 10)
            assert by_queue(sample) == {"mail": (8, 6, 3, False), "a.b/c": (0, 1, 0, False), "z": (0, 0, 1, True)}
            oldest = {found.queue: found.oldest for found in sample.queues}
            assert 90 <= oldest["mail"] < 900
            assert oldest["a.b/c"] == oldest["z"] == 0
            assert sample.quarantined == 1
            assert not sample.cut_short
            # Bounded: one job of each queue, priority and state, and of those with keys.
            few = await store.figures.sample(1, 10)
            assert {found.queue: found.scheduled for found in few.queues} == {"mail": 3 + 1, "a.b/c": 1, "z": 0}


async def test_suspended_jobs_are_no_scheduled_ones(dsn: str) -> None:
    with Window(dsn) as window:
        for run_at, key, marked in [
            ("far()", None, True), ("now() + interval '1 h'", None, True), ("now() + interval '1 h'", "k", True),
            ("now() + interval '1 h'", None, False), ("now() + interval '1 h'", "k", False),
        ]:  # fmt: skip
            window.run(
                "WITH made AS (INSERT INTO job (kind, queue, attempt, key, run_at, options) "
                f"VALUES ('a', 'mail', 1, %s, {run_at}, '{{\"tree\": 1}}') RETURNING id) "
                "INSERT INTO durable_job (job_id, root_id, suspended) SELECT id, id, %s FROM made",
                key, 1 if marked else None,
            )  # fmt: skip
        async with open_store(dsn) as store:
            (mail,) = (await store.figures.sample(100, 10)).queues
    assert (mail.available, mail.scheduled, mail.suspended) == (0, 2, 3)


async def test_very_many_queues_and_priorities_are_walked_up_to_a_bound(dsn: str) -> None:
    with Window(dsn) as window:
        window.run("INSERT INTO job (kind, queue, priority) SELECT 'a', 'q' || n, n FROM generate_series(1, 600) n")
        window.run("INSERT INTO job (kind, queue, key) SELECT 'a', 'k' || n, 'k' FROM generate_series(1, 300) n")
        async with open_store(dsn) as store:
            sample = await store.figures.sample(10, 10)
    assert len(sample.queues) == 256 + 64
    assert sample.cut_short
    assert QueueFigure("q1", 1, 0, 0, sample.queues[0].oldest, False)._replace(oldest=0) in [
        found._replace(oldest=0) for found in sample.queues
    ]


async def test_schedules_are_late_by_the_time_since_they_were_due(dsn: str) -> None:
    with Window(dsn) as window:
        window.run(
            "INSERT INTO schedule (name, kind, every, next_due, paused_at) VALUES"
            " ('late', 'a', '1 h', now() - interval '90 s', NULL), ('soon', 'a', '1 h', now() + interval '9 s', NULL),"
            " ('paused', 'a', '1 h', now() - interval '90 s', now()),"
            " ('over', 'a', '1 h', NULL, NULL)"
        )
        async with open_store(dsn) as store:
            late = (await store.figures.sample(10, 10)).late
            assert set(late) == {"late", "soon"}
            assert late["soon"] == 0
            assert 90 <= late["late"] < 900
            assert len((await store.figures.sample(10, 1)).late) == 1
