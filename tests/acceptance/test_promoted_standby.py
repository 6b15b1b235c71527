"""The primary is killed and its streaming standby promoted, under workers and producers with both addresses in their DSN."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import DatabaseUnavailable, Handlers, Job, open_client
from pulse_trio.migrate import migrate_sync
from pulse_trio.observe import DatabaseFound, DatabaseLost, FenceLost, JobStarted
from support.embedded_workers import WITHIN, working
from support.put_back import LEASE_OVER
from support.replicated import PROGRAMS, Pair, open_pair
from support.workers import rows, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pulse_trio import Client

pytestmark = pytest.mark.skipif(
    PROGRAMS is None,
    reason="needs a PostgreSQL with pg_basebackup (Debian: postgresql-15), which is not installed here",
)
FAST = {"lease": 30.0, "heartbeat": 2.0, "watchdog": 0.5, "poll": 0.2, "grace": 5.0, "concurrency": 10}
LEDGER = "CREATE TABLE public.ledger (job bigint, n int)"


@pytest.fixture
async def pair() -> AsyncGenerator[Pair]:
    with ExitStack() as stack:
        pair = await trio.to_thread.run_sync(stack.enter_context, open_pair())
        await trio.to_thread.run_sync(migrate_sync, pair.primary.dsn)
        await trio.to_thread.run_sync(pair.primary.do, LEDGER)
        yield pair


class Trial:
    """The handlers, and what the producer was told."""

    def __init__(self) -> None:
        self.handlers = Handlers()
        self.reserved, self.isolated, self.charged, self.released = (trio.Event() for _ in range(4))
        self.acknowledged: dict[int, int] = {}
        self.runs: list[tuple[str, int]] = []

        @self.handlers.job
        async def pays(job: Job, n: int) -> None:
            async with job.transaction() as tx:
                await tx.execute("INSERT INTO public.ledger VALUES (%s, %s)", [job.id, n])

        @self.handlers.job
        async def returns(job: Job, n: int) -> int:
            self.runs.append(("returns", n))
            return n

        @self.handlers.job(durable=True)
        async def order(job: Job) -> list[int]:
            done = [await job.step(self.note, 1)]
            self.reserved.set()
            await self.isolated.wait()
            done.append(await job.step(self.note, 2))
            self.charged.set()
            await self.released.wait()
            return [*done, await job.step(self.note, 3)]

        @self.handlers.job
        async def held(job: Job) -> str:
            await self.released.wait()
            return "held"

    async def note(self, n: int) -> int:
        self.runs.append(("order", n))
        return n

    async def produce(self, client: Client, count: int) -> None:
        """Enqueues until so many more were acknowledged, whatever is lost on the way."""
        wanted, n = len(self.acknowledged) + count, max(self.acknowledged.values(), default=0)
        while len(self.acknowledged) < wanted:
            n += 1
            try:
                ref = await client.enqueue("pays" if n % 2 else "returns", {"n": n}, max_attempts=5)
            except DatabaseUnavailable:
                await trio.sleep(0.05)
            else:
                self.acknowledged[ref.id] = n


DONE = "SELECT id FROM pulse.jobs WHERE state = 'completed'"
LEFT = "SELECT id FROM pulse.jobs WHERE finished_at IS NULL"


async def test_with_a_synchronous_standby_nothing_acknowledged_is_lost_and_workers_go_on_by_themselves(
    pair: Pair,
) -> None:
    await trio.to_thread.run_sync(pair.wait_for_standby)
    trial = Trial()
    async with open_client(pair.dsn) as client, working(trial.handlers, pair.dsn, **FAST) as heard:
        held = await client.enqueue("held")
        await heard.until(JobStarted, job_id=held.id)
        await trial.produce(client, 20)
        await until(pair.primary.dsn, f"SELECT FROM ({DONE}) done HAVING count(*) >= 10")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trial.produce, client, 40)
            await trio.to_thread.run_sync(pair.fail_over)
        await heard.until(DatabaseLost)
        await heard.until(DatabaseFound)
        trial.released.set()
        await until(pair.standby.dsn, f"SELECT WHERE NOT EXISTS ({LEFT})")
    done = {row[0] for row in rows(pair.standby.dsn, DONE)}
    assert {held.id, *trial.acknowledged} <= done
    # The lease outlasted the failover, so the handler that ran through it was not run again.
    assert [event.attempt for event in heard.of(JobStarted) if event.job_id == held.id] == [1]
    ledger = rows(pair.standby.dsn, "SELECT job, n FROM public.ledger ORDER BY job")
    assert len(ledger) == len({job for job, _ in ledger})
    assert {(job, n) for job, n in trial.acknowledged.items() if n % 2} <= set(ledger)


async def test_with_an_asynchronous_standby_what_it_had_not_received_is_lost_and_workers_go_on(pair: Pair) -> None:
    trial = Trial()
    async with open_client(pair.dsn) as client, working(trial.handlers, pair.dsn, **FAST) as heard:
        await trial.produce(client, 10)
        await until(pair.primary.dsn, f"SELECT WHERE NOT EXISTS ({LEFT})")
        before = await client.enqueue("returns", {"n": 1000}, delay=3600)
        order = await client.enqueue("order")
        await trial.reserved.wait()
        here = await trio.to_thread.run_sync(pair.primary.ask, "SELECT pg_current_wal_lsn()::text")
        await until(pair.standby.dsn, f"SELECT WHERE pg_last_wal_replay_lsn() >= '{here}'")
        await trio.to_thread.run_sync(pair.stop_sending)
        # Acknowledged by the primary alone: a new job, and that the earlier one is due at once and has run.
        lost = await client.enqueue("returns", {"n": 1001}, delay=3600)
        assert await client.retry(before.id) == "available"
        await until(pair.primary.dsn, f"{DONE} AND id = {before.id}")
        assert trial.runs.count(("returns", 1000)) == 1
        trial.isolated.set()
        await trial.charged.wait()
        await trio.to_thread.run_sync(pair.fail_over)
        await heard.until(DatabaseFound)
        # Its second line is gone: the attempt ends, and another one goes on after the first line, when the lease is over.
        await heard.until(FenceLost, job_id=order.id)
        await until(pair.standby.dsn, LEASE_OVER.format(order.id))
        trial.released.set()
        found = dict(rows(pair.standby.dsn, "SELECT id, state FROM pulse.jobs"))
        assert lost.id not in found
        assert found[before.id] == "scheduled"
        # As if that had never happened: the job is run again, and the fleet goes on.
        with trio.fail_after(WITHIN):
            while True:
                try:
                    assert await client.retry(before.id) == "available"
                    break
                except DatabaseUnavailable:
                    await trio.sleep(0.05)
        await until(pair.standby.dsn, f"{DONE} AND id = {before.id}")
        assert trial.runs.count(("returns", 1000)) == 2
        await trial.produce(client, 10)
        await until(pair.standby.dsn, f"SELECT WHERE NOT EXISTS ({LEFT})")
    assert [n for kind, n in trial.runs if kind == "order"] == [1, 2, 2, 3]
    assert set(trial.acknowledged) <= {row[0] for row in rows(pair.standby.dsn, DONE)}
