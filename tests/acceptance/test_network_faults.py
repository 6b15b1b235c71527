"""A network that forgets connections, is slow, or breaks one way: what a worker and its store notice, and how soon."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import DatabaseUnavailable, Handlers, Job, SyncClient
from pulse_trio.observe import DatabaseFound, DatabaseLost, FenceLost, JobsRescued, JobStarted, LeaseUnproven
from pulse_trio.store import ClaimCursor, WorkerStore
from pulse_trio.testing.faults.proxy import open_proxy
from support.embedded_workers import working
from support.stores import Window, claim_one, end, open_store
from support.workers import rows, settled, until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pulse_trio.jobs import Claim
    from pulse_trio.postgres import TrioConnection
    from pulse_trio.testing.faults.proxy import Proxy

POLL = 0.5
SLACK = 0.5  # seconds that a loaded machine may take beyond a deadline of ours
FAST = {"lease": 6.0, "heartbeat": 2.0, "watchdog": 0.5, "cleanup": 0.2, "grace": 5.0}

OPERATIONS: dict[str, Callable[[WorkerStore, Claim], Awaitable[object]]] = {
    "claim": lambda store, _: store.complete_and_claim(1, [ClaimCursor("default", 0)]),
    "report": lambda store, claim: store.settle([end(claim)]),
    "beat": lambda store, claim: store.beat([claim]),
}


@pytest.mark.parametrize("lease", [3.0, 9.0])
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_half_open_connection_is_noticed_within_a_third_of_the_lease(
    operation: str, lease: float, dsn: str, proxy: Proxy
) -> None:
    async with open_store(proxy.dsn, lease=lease) as store:
        with Window(dsn) as window:
            window.enqueue()
        claim = await claim_one(store)
        proxy.swallow()
        began = trio.current_time()
        with pytest.raises(DatabaseUnavailable):
            await OPERATIONS[operation](store, claim)
        assert trio.current_time() - began < lease / 3 + SLACK / 2
        proxy.forward()
        # What is asked next has a connection that works.
        await OPERATIONS[operation](store, claim)


async def test_with_latency_and_jitter_no_beat_is_skipped_and_no_lease_is_lost(dsn: str, proxy: Proxy) -> None:
    handlers, open_ = Handlers(), trio.Event()

    @handlers.job
    async def held(job: Job) -> int:
        await open_.wait()
        return job.attempt

    async def jitter() -> None:
        draw = random.Random(14)
        while True:
            # A fifth of 0.5 to 2 s there and back, as the lease is a fifth of 30 s.
            proxy.delay(draw.uniform(0.1, 0.4) / 2)
            await trio.sleep(0.3)

    job_id = SyncClient(dsn).enqueue("held").id
    async with working(handlers, proxy.dsn, poll=1.0, **FAST) as heard, trio.open_nursery() as nursery:
        await heard.until(JobStarted, job_id=job_id)
        nursery.start_soon(jitter)
        renewals: list[float] = []
        lease = "SELECT extract(epoch FROM lease_until)::float8 FROM pulse.job WHERE lease_until < 'infinity'"
        with trio.fail_after(60):
            while len(renewals) < 6:
                ((until_,),) = rows(dsn, lease)
                if not renewals or until_ > renewals[-1]:
                    renewals.append(until_)
                await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
        proxy.forward()
        # One renewal an interval (2 s): the next begins when it is due, and is late by its own journey alone.
        assert max(b - a for a, b in pairwise(renewals)) < 2.0 + 0.5 + 2 * SLACK
        open_.set()
        assert await settled(dsn, job_id) == ("completed", 1, 1)
        assert heard.of(LeaseUnproven) == heard.of(FenceLost) == heard.of(JobsRescued) == []


async def test_with_more_latency_than_the_lease_allows_a_handler_is_cancelled_before_its_lease_ends(
    dsn: str, proxy: Proxy
) -> None:
    handlers = Handlers()

    @handlers.job
    async def held() -> None:
        await trio.sleep_forever()

    job_id = SyncClient(dsn).enqueue("held").id
    async with working(handlers, proxy.dsn, poll=1.0, **FAST | {"grace": 0.1}) as heard:
        await heard.until(JobStarted, job_id=job_id)
        ((claimed,),) = rows(dsn, "SELECT extract(epoch FROM lease_until)::float8 FROM pulse.job")
        proxy.delay(3.0)
        await heard.until(LeaseUnproven, job_id=job_id)
        ((now, state, attempt, lease),) = rows(
            dsn,
            "SELECT extract(epoch FROM clock_timestamp())::float8, state, attempt, extract(epoch FROM lease_until)::float8 "
            "FROM pulse.job",
        )
        assert (state, attempt) == (2, 1)
        assert now < claimed <= lease
        proxy.forward()


@pytest.mark.parametrize("how", ["terminated", "silent"])
async def test_without_its_listening_connection_a_worker_polls_says_so_and_listens_again(how: str, dsn: str) -> None:
    handlers = Handlers()

    @handlers.job
    async def quick() -> str:
        return "done"

    client = SyncClient(dsn)
    pids = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'pulse-trio listener'"

    async def start_of(job_id: int) -> float:
        await settled(dsn, job_id)
        took = "SELECT extract(epoch FROM started_at - created_at)::float8 FROM pulse.jobs WHERE id = %(id)s"
        return rows(dsn, took, {"id": job_id})[0][0]

    store = WorkerStore(dsn, lease=FAST["lease"])
    async with open_proxy(dsn) as network:
        store.links.listen._dsn = network.dsn  # this connection has a network of its own
        async with working(handlers, dsn, poll=POLL, store=store, **FAST) as heard:
            ((before,),) = await until(dsn, pids)
            if how == "silent":
                # Its keepalives are answered, by the proxy: only asking shows that nobody is there.
                network.swallow()
            else:
                rows(dsn, f"SELECT pg_terminate_backend({before})")
            # A poll finds it. The bound is far from one: the silent network stays so until the job was settled.
            assert await start_of(client.enqueue("quick").id) < POLL + 20 * SLACK
            await heard.until(DatabaseLost, loop="listener")
            network.forward()
            await heard.until(DatabaseFound, loop="listener")
            await until(dsn, f"{pids} AND pid <> {before}")


async def test_a_network_that_falls_silent_before_the_listener_listens_is_noticed(dsn: str) -> None:
    store = WorkerStore(dsn, lease=FAST["lease"])
    async with open_proxy(dsn) as network:
        link = store.links.listen
        link._dsn = network.dsn
        configure = link._configure
        assert configure is not None

        async def configure_and_lose(connection: TrioConnection[Any]) -> None:
            await configure(connection)
            link._configure = configure
            network.swallow()

        link._configure = configure_and_lose
        async with working(Handlers(), dsn, poll=POLL, store=store, **FAST) as heard:
            lost = await heard.until(DatabaseLost, loop="listener")
            assert "did not answer within" in lost.error
            network.forward()
            await heard.until(DatabaseFound, loop="listener")
