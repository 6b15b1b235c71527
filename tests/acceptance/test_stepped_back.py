"""An older copy of the database is put in its place under a running worker: a backup, a snapshot of the disks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest
import trio

from pulse_trio import Handlers, Job, SyncClient
from pulse_trio.observe import DatabaseFound, FenceLost
from support.embedded_workers import Heard, working
from support.put_back import LEASE_OVER, Backup
from support.workers import until

if TYPE_CHECKING:
    from collections.abc import Generator

    from pulse_trio.records import JobRecord
    from support.databases import Databases

pytestmark = pytest.mark.real_clock
FAST = {"lease": 60.0, "heartbeat": 0.3, "watchdog": 0.1, "poll": 0.1, "grace": 5.0, "concurrency": 10, "log": False}


@pytest.fixture
def dsn(databases: Databases) -> Generator[str]:
    """No connection to it is kept."""
    with databases.migrated() as dsn:
        yield dsn


async def is_void(dsn: str, heard: Heard, job_id: int) -> None:
    """The attempt has ended, and its lease is over."""
    await heard.until(FenceLost, job_id=job_id)
    await until(dsn, LEASE_OVER.format(job_id))


async def ended(dsn: str, job_id: int) -> JobRecord:
    with trio.fail_after(30):
        while True:
            record = SyncClient(dsn).job(job_id)
            if record is not None and record.finished_at is not None:
                return record
            await trio.sleep(0.05)


@pytest.mark.parametrize("strangers", [0, 2], ids=["", "strangers have their ids"])
async def test_a_parent_whose_children_are_gone_starts_them_again(strangers: int, dsn: str) -> None:
    """It waited for them for ever, or took the results of the jobs that had got their ids since."""
    backup, handlers = Backup(dsn), Handlers()
    stands, goes_on, children_end, run = trio.Event(), trio.Event(), trio.Event(), list[int]()
    both_run = trio.Event()

    @handlers.job
    async def child(n: int) -> str:
        run.append(n)
        if len(run) == 2:
            both_run.set()
        await children_end.wait()
        return f"child {n}"

    @handlers.job
    async def stranger(n: int) -> str:
        return f"the secret of stranger {n}"

    @handlers.job(durable=True)
    async def parent(job: Job) -> list[str]:
        stands.set()
        await goes_on.wait()
        async with job.durable_nursery() as nursery:
            children = [nursery.start_soon(child, n) for n in range(2)]
        return [one.result for one in children]

    async with working(handlers, dsn, **FAST) as heard:
        job_id = SyncClient(dsn).enqueue(parent).id
        await stands.wait()
        await trio.to_thread.run_sync(backup.take)
        await heard.until(DatabaseFound)
        goes_on.set()
        await both_run.wait()
        await trio.to_thread.run_sync(backup.put_back)
        others = [SyncClient(dsn).enqueue(stranger, n).id for n in range(strangers)]
        await is_void(dsn, heard, job_id)
        children_end.set()
        record = await ended(dsn, job_id)
        assert (record.state, record.result, record.attempt) == ("completed", ["child 0", "child 1"], 2)
        assert [(await ended(dsn, one)).result for one in others] == [
            f"the secret of stranger {n}" for n in range(strangers)
        ]


async def test_an_attempt_leaves_no_hole_in_the_history(dsn: str) -> None:
    """It went on after lines that were gone, and the next attempt was dead with a mismatch that blamed the code."""
    backup, handlers, noted = Backup(dsn), Handlers(), list[str]()
    first, goes_on, third, ends = (trio.Event() for _ in range(4))

    async def note(what: str) -> str:
        noted.append(what)
        return what

    @handlers.job(durable=True)
    async def order(job: Job) -> list[str]:
        done = [await job.step(note, "reserved")]
        first.set()
        await goes_on.wait()
        done += [await job.step(note, "charged"), await job.step(note, "packed")]
        third.set()
        await ends.wait()
        return [*done, await job.step(note, "shipped")]

    async with working(handlers, dsn, **FAST) as heard:
        job_id = SyncClient(dsn).enqueue(order).id
        await first.wait()
        await trio.to_thread.run_sync(backup.take)
        await heard.until(DatabaseFound)
        goes_on.set()
        await third.wait()
        await trio.to_thread.run_sync(backup.put_back)
        await is_void(dsn, heard, job_id)
        ends.set()
        record = await ended(dsn, job_id)
    assert (record.state, record.result) == ("completed", ["reserved", "charged", "packed", "shipped"])
    # What the copy does not know is done again; what it knows is not.
    assert noted == ["reserved", "charged", "packed", "charged", "packed", "shipped"]


async def test_a_plain_attempt_that_the_copy_knows_goes_on(dsn: str) -> None:
    backup, handlers, begun, ends = Backup(dsn), Handlers(), list[int](), trio.Event()
    runs = trio.Event()

    @handlers.job
    async def plain(job: Job) -> str:
        begun.append(job.attempt)
        runs.set()
        await ends.wait()
        return "done"

    async with working(handlers, dsn, **FAST) as heard:
        job_id = SyncClient(dsn).enqueue(plain).id
        await runs.wait()
        await trio.to_thread.run_sync(backup.take)
        await heard.until(DatabaseFound)
        await trio.to_thread.run_sync(backup.put_back)
        ends.set()
        record = await ended(dsn, job_id)
    assert (record.state, record.result, begun) == ("completed", "done", [1])


async def test_what_the_code_declares_is_declared_again(dsn: str) -> None:
    """No schedule fired any more, no limit held, and no job followed a death, as long as the worker lived."""
    backup, handlers = Backup(dsn), Handlers()
    handlers.queue("narrow", limit=1)

    @handlers.job(on_death="gives_up")
    async def charge() -> None: ...

    @handlers.job
    async def gives_up(job_id: int, error: str) -> None: ...

    @handlers.cron("0 3 * * *", name="nightly")
    @handlers.job
    async def nightly() -> None: ...

    declared = """
        SELECT FROM pulse.schedule, pulse.death_hook, pulse.queue q
        WHERE schedule.name = 'nightly' AND q.name = 'narrow' AND q.max_running = 1
    """
    await trio.to_thread.run_sync(backup.take)
    async with working(handlers, dsn, **FAST):
        await until(dsn, declared)
        await trio.to_thread.run_sync(backup.put_back)
        await until(dsn, declared)


CUT_OFF = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name LIKE 'pulse-trio %';
"""


def put_back_without(dsn: str, *gone: str) -> None:
    """As a snapshot of the disks: what says which database it is stays the same."""
    with psycopg.connect(dsn) as connection:
        for statement in gone:
            connection.execute(statement.encode())
        connection.execute(CUT_OFF.encode())


async def test_a_snapshot_of_the_disks_is_noticed_by_the_workers_own_sign_of_life(dsn: str) -> None:
    """The number and the timeline of the database are the same."""
    handlers, noted, second, ends = Handlers(), list[str](), trio.Event(), trio.Event()

    async def note(what: str) -> str:
        noted.append(what)
        return what

    @handlers.job(durable=True)
    async def order(job: Job) -> list[str]:
        done = [await job.step(note, "reserved", key="reserved"), await job.step(note, "charged", key="charged")]
        second.set()
        await ends.wait()
        return [*done, await job.step(note, "shipped", key="shipped")]

    seen = "SELECT FROM pulse.session WHERE ended_at IS NULL AND seen_at > started_at"
    async with working(handlers, dsn, **FAST) as heard:
        job_id = SyncClient(dsn).enqueue(order).id
        await second.wait()
        await until(dsn, seen)
        await trio.to_thread.run_sync(
            put_back_without,
            dsn,
            "DELETE FROM pulse.history WHERE key = 'charged'",
            "UPDATE pulse.session SET seen_at = seen_at - interval '1 min'",
        )
        await is_void(dsn, heard, job_id)
        ends.set()
        record = await ended(dsn, job_id)
    assert (record.state, record.result) == ("completed", ["reserved", "charged", "shipped"])
    assert noted == ["reserved", "charged", "charged", "shipped"]


@pytest.mark.parametrize("gone", ["line", "child"])
async def test_a_snapshot_that_is_a_moment_old_is_noticed_by_what_attempts_have_written(gone: str, dsn: str) -> None:
    """No sign of life of the worker is missing in it."""
    handlers, noted, begun, stands, ends = Handlers(), list[str](), list[int](), trio.Event(), trio.Event()

    async def note(what: str) -> str:
        noted.append(what)
        return what

    @handlers.job
    async def part() -> str:
        begun.append(1)
        await ends.wait()
        return "part"

    @handlers.job(durable=True)
    async def order(job: Job) -> list[str]:
        done = [await job.step(note, "reserved", key="reserved")]
        async with job.durable_nursery() as nursery:
            child = nursery.start_soon(part)
            await nursery.flush()
            if gone == "line":
                done.append(await job.step(note, "charged", key="charged"))
            stands.set()
        return [*done, child.result]

    snapshot = {
        "line": "DELETE FROM pulse.history WHERE key = 'charged'",
        "child": "DELETE FROM pulse.member; DELETE FROM pulse.job WHERE kind = 'part'",
    }
    async with working(handlers, dsn, **FAST) as heard:
        job_id = SyncClient(dsn).enqueue(order).id
        await stands.wait()
        await until(dsn, "SELECT FROM pulse.job WHERE kind = 'part' AND state = 2")
        await trio.to_thread.run_sync(put_back_without, dsn, snapshot[gone])
        await is_void(dsn, heard, job_id)
        ends.set()
        record = await ended(dsn, job_id)
    charged = ["charged"] if gone == "line" else []
    assert (record.state, record.result) == ("completed", ["reserved", *charged, "part"])
    assert noted == ["reserved", *charged, *charged]
