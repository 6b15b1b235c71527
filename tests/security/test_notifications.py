"""A role that may do nothing but connect notifies on every channel: nothing ends, nothing is ended."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
import trio
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL, Identifier

from pulse_trio import Handlers, Job, JobCancelled, open_client
from support.embedded_workers import WITHIN, working
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator

    from pulse_trio import JobRef


@pytest.fixture
def stranger(dsn: str) -> Generator[psycopg.Connection[Any]]:
    """A connection of a role without any right on the schema."""
    role = f"stranger_{uuid4().hex[:8]}"
    with Window(dsn) as owner:
        owner.run(f"CREATE ROLE {role}")
        try:
            with psycopg.connect(make_conninfo(dsn, options=f"-crole={role}"), autocommit=True) as connection:
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute("SELECT 1 FROM pulse.job")
                yield connection
        finally:
            owner.run(f"DROP ROLE {role}")


def forged(rng: random.Random, known: list[int]) -> str:
    """A payload: a word of ours or another, numbers that exist or do not, and rubbish."""
    word = rng.choice(("cancel", "stack", "look_for_cancel", "look_for_stack", "default", "suspects", "", "\N{FIRE}"))
    number = [rng.choice((*known, -1, 0, 2**63, 10**40, "x", "")) for _ in range(rng.randrange(5))]
    return rng.choice((" ", "  ", "\t", ",")).join(map(str, (word, *number)))[:1000] + "z" * rng.choice((0, 0, 5000))


async def test_random_notifications_on_every_channel_change_nothing(
    dsn: str, stranger: psycopg.Connection[Any]
) -> None:
    handlers = Handlers()
    begun, may_end = trio.Event(), trio.Event()

    @handlers.job(max_attempts=1)
    async def long() -> int:
        begun.set()
        await may_end.wait()
        return 42

    @handlers.job(max_attempts=1)
    async def endless(job: Job) -> None:
        await trio.sleep_forever()

    results: list[int] = []

    async def wait(ref: JobRef[int]) -> None:
        results.append(await ref.result(timeout=WITHIN))

    with Window(dsn) as owner:
        async with working(handlers, dsn) as heard, open_client(dsn) as client:
            ref, cancelled = await client.enqueue(long), await client.enqueue(endless)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait, ref)
                await begun.wait()
                ((session, attempt),) = [
                    (row["locked_by"], row["attempt"]) for row in [owner.row(ref.id)] if row is not None
                ]
                channels = ["pulse", owner.value("SELECT 'end_' || md5('pulse')")]
                rng = random.Random(20261122)
                known = [ref.id, session, attempt, 1, 2]
                exact = [
                    f"cancel {session} {ref.id} {attempt} forged",
                    f"look_for_cancel {ref.id}",
                    f"look_for_stack {ref.id}",
                    str(ref.id),
                    str(-ref.id),
                ]
                for payload in exact * 3 + [forged(rng, known) for _ in range(1500)]:
                    stranger.execute("SELECT pg_notify(%s, %s)", [rng.choice(channels), payload])
                    await trio.lowlevel.checkpoint()
                # The worker hears all of it before this one's, and obeys this one: its row says so.
                await client.cancel(cancelled.id, reason="meant", wait=True)
                with pytest.raises(JobCancelled, match="meant"):
                    await cancelled.result(timeout=WITHIN)
                assert results == []
                assert (await client.job(ref.id)).state == "running"
                assert "long" in (await client.stack(ref.id)).stack
                may_end.set()
        assert results == [42]
        assert [row["ended_as"] for row in owner.run("SELECT ended_as FROM cancellation")] == ["cancelled"]
    assert [type(event).__name__ for event in heard.all if "Lost" in type(event).__name__] == []


@pytest.mark.parametrize("queue", ["default", "random", ""])
async def test_a_flood_of_wake_ups_costs_a_few_looks_and_a_job_starts_all_the_same(
    dsn: str, stranger: psycopg.Connection[Any], queue: str
) -> None:
    handlers = Handlers()

    @handlers.job
    async def quick() -> int:
        return 42

    # Every claim and every sweep reads that table.
    looks = "SELECT seq_scan + idx_scan FROM pg_stat_user_tables WHERE relid = 'queue'::regclass"
    with Window(dsn) as owner:
        async with working(handlers, dsn, poll=60), open_client(dsn) as client:
            assert await (await client.enqueue(quick)).result(timeout=WITHIN) == 42
            before, began = owner.value(looks), trio.current_time()
            sent = 0
            while trio.current_time() - began < 2:
                for _ in range(10):
                    payload = f"q{sent}" if queue == "random" else queue
                    stranger.execute("SELECT pg_notify('pulse', %s)", [payload])
                    sent += 1
                await trio.sleep(0.005)
            enqueued = trio.current_time()
            ref = await client.enqueue(quick)
            assert await ref.result(timeout=WITHIN) == 42
            took = trio.current_time() - enqueued
        looked = owner.value(looks) - before
    assert sent > 200
    assert looked < 150
    assert took < 30  # half of the poll


async def test_what_is_notified_names_jobs_and_queues_and_nothing_else(
    dsn: str, stranger: psycopg.Connection[Any]
) -> None:
    handlers = Handlers()
    begun = trio.Event()

    @handlers.job
    async def held(job: Job, secret: str) -> str:
        begun.set()
        await trio.sleep_forever()
        return secret

    with Window(dsn) as owner:
        for channel in ("pulse", owner.value("SELECT 'end_' || md5('pulse')")):
            stranger.execute(SQL("LISTEN {}").format(Identifier(channel)))
        async with working(handlers, dsn), open_client(dsn) as client:
            ref = await client.enqueue(held, "a secret")
            await begun.wait()
            session = owner.value("SELECT locked_by FROM job WHERE id = %s", ref.id)
            await client.stack(ref.id)
            await client.cancel(ref.id, reason="a private reason", wait=True)
        heard = [note.payload for note in stranger.notifies(timeout=0.1)]
    assert f"look_for_cancel {ref.id}" in heard
    assert set(heard) <= {"default", f"look_for_cancel {ref.id}", f"look_for_stack {ref.id}", str(ref.id)}
    assert not any(str(session) in payload or "reason" in payload for payload in heard)
