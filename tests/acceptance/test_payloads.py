"""Large payloads over a slow network: all get through, none starts twice, and what is small does not wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import DatabaseUnavailable, Handlers, Job, SyncClient
from pulse_trio.jobs import Outcome
from pulse_trio.observe import JobStarted
from pulse_trio.store import ClaimCursor, TooSlow
from support.embedded_workers import working
from support.stores import Window, claim_one, open_store
from support.workers import rows, until

if TYPE_CHECKING:
    from pulse_trio.testing.faults.proxy import Proxy

SIZE = 200_000
RATE = 1_500_000.0
"""Bytes a second. A statement may take 5 s with the usual lease; half of the jobs' arguments at once take 7."""
COUNT = 60
# A statement may take a second.
SETTINGS: dict[str, Any] = {"lease": 6.0, "heartbeat": 2.0, "cleanup": 0.2, "poll": 0.5}


def enqueue(dsn: str, handlers: Handlers, count: int, size: int, **options: Any) -> list[int]:
    handler = handlers["echo"].options(**options)
    return [e.id for e in SyncClient(dsn).enqueue_many(handler.request("x" * size) for _ in range(count))]


@pytest.fixture
def handlers() -> Handlers:
    handlers = Handlers()

    @handlers.job
    async def echo(payload: str) -> str:
        return payload

    @handlers.job(max_attempts=1)
    async def fail() -> None:
        raise ValueError("at once")

    return handlers


@pytest.mark.parametrize("options", [{}, {"key": "k"}], ids=["plain", "keyed"])
async def test_large_jobs_over_a_slow_link_all_complete_in_their_first_attempt(
    handlers: Handlers, dsn: str, proxy: Proxy, options: dict[str, Any]
) -> None:
    ids = enqueue(dsn, handlers, COUNT, SIZE, **options)
    proxy.limit(RATE)
    async with working(handlers, proxy.dsn, poll=0.5) as heard:
        await until(dsn, f"SELECT FROM pulse.job_archive HAVING count(*) = {COUNT}")
        proxy.forward()
        proxy.limit(1e9)
    assert sorted(event.job_id for event in heard.of(JobStarted)) == ids
    ended = rows(dsn, "SELECT state, attempt, octet_length(result::text) FROM pulse.job_archive")
    assert set(ended) == {(4, 1, SIZE + 2)}


async def test_a_failure_overtakes_large_results(handlers: Handlers, dsn: str, proxy: Proxy) -> None:
    enqueue(dsn, handlers, COUNT, SIZE)
    proxy.to_server.limit(RATE / 4)
    async with working(handlers, proxy.dsn, **SETTINGS) as heard:
        await heard.until(JobStarted)
        failed = SyncClient(dsn).enqueue("fail", max_attempts=1, priority=1).id
        await until(dsn, "SELECT FROM pulse.job_archive WHERE id = %(id)s AND state = 5", {"id": failed})
        completed = rows(dsn, "SELECT count(*) FROM pulse.job_archive WHERE state = 4")[0][0]
        proxy.to_server.limit(1e9)
        await until(dsn, f"SELECT FROM pulse.job_archive WHERE state = 4 HAVING count(*) = {COUNT}")
    assert completed < COUNT


async def test_a_result_that_the_network_does_not_take_fails_its_job_and_keeps_its_lease_until_then(
    dsn: str, proxy: Proxy
) -> None:
    handlers = Handlers()

    @handlers.job(max_attempts=1)
    async def give(job: Job) -> str:
        return "x" * 1_000_000

    job_id = SyncClient(dsn).enqueue("give", max_attempts=1).id
    # 17 s for the one result, and 12 is all there is.
    proxy.to_server.limit(60_000)
    async with working(handlers, proxy.dsn, watchdog=0.5, **SETTINGS):
        ((state, attempt, error),) = await until(
            dsn, "SELECT state, attempt, error FROM pulse.job_archive WHERE id = %(id)s", {"id": job_id}
        )
        proxy.to_server.limit(1e9)
    assert (state, attempt) == (5, 1)
    assert error.startswith("ResultTooSlow: 1,000,002 characters of result could not be written within 12 s")


async def test_a_claim_takes_jobs_until_their_arguments_have_a_megabyte(dsn: str) -> None:
    with Window(dsn) as window:
        for _ in range(20):
            window.enqueue(args={"a": "x" * 300_000})
    async with open_store(dsn) as store:
        first = await store.complete_and_claim(20, [ClaimCursor("default", 0)])
        assert len(first.claims) == 4
        assert first.bounded
        second = await store.complete_and_claim(20, [ClaimCursor("default", 0)])
        # It was quick, and may be twice as large now.
        assert len(second.claims) == 7
        rest = await store.complete_and_claim(20, [ClaimCursor("default", 0)])
        assert len(rest.claims) == 9
        last = await store.complete_and_claim(20, [ClaimCursor("default", 0)])
        assert (last.claims, last.bounded) == ([], False)


@pytest.mark.parametrize("keys", [1, 20])
async def test_so_does_a_claim_from_a_queue_with_keys(dsn: str, keys: int) -> None:
    with Window(dsn) as window:
        ids = [window.enqueue(args={"a": "x" * 300_000}, key=f"k{n % keys}") for n in range(20)]
    async with open_store(dsn) as store:
        turns = "{}"
        claimed: list[list[int]] = []
        for _ in range(3):
            answer = await store.claim_limited("default", 20, turns)
            turns = answer.turns
            claimed.append([claim.id for claim in answer.claims])
            assert "size" not in turns
        assert [len(some) for some in claimed] == [4, 7, 9]
        # In their turns, and the next claim goes on with the next key.
        order = ids if keys == 1 else [ids[n] for n in sorted(range(20), key=lambda n: f"k{n}")]
        assert [job_id for some in claimed for job_id in some] == order


async def test_a_large_job_that_is_locked_does_not_use_up_what_a_claim_may_take(dsn: str) -> None:
    with Window(dsn) as window:
        ids = [window.enqueue(args={"a": "x" * 900_000}, key="k") for _ in range(4)]
        with Window(dsn) as other, other.connection.transaction():
            other.run("SELECT FROM job WHERE id = ANY (%s) FOR UPDATE", ids[:2])
            async with open_store(dsn) as store:
                assert [claim.id for claim in (await store.claim_limited("default", 20)).claims] == ids[2:]


async def test_a_worker_of_the_version_before_claims_without_a_bound(dsn: str) -> None:
    with Window(dsn) as window:
        for _ in range(8):
            window.enqueue(args={"a": "x" * 300_000}, key="k")
        call = "SELECT count((c.claimed).id) FROM claim_limited('default', 7, '30 s', 20, '{}', '{}') c"
        assert window.value(call) == 8


async def test_after_an_outage_small_jobs_are_claimed_as_before(dsn: str, proxy: Proxy) -> None:
    with Window(dsn) as window:
        window.enqueue_many(600)
    async with open_store(proxy.dsn, lease=3.0) as store:
        proxy.refuse()
        proxy.cut()
        for _ in range(30):
            with pytest.raises(DatabaseUnavailable):
                await store.complete_and_claim(200, [ClaimCursor("default", 0)])
        proxy.forward()
        claimed = [len((await store.complete_and_claim(200, [ClaimCursor("default", 0)])).claims) for _ in range(3)]
    assert claimed == [200, 200, 200]


async def test_a_report_that_is_too_slow_says_so_and_a_silent_database_does_not(dsn: str, proxy: Proxy) -> None:
    with Window(dsn) as window:
        window.enqueue()
    async with open_store(proxy.dsn, lease=3.0) as store:
        claimed = await claim_one(store)
        large = Outcome(claimed, "completed", result='"' + "x" * 500_000 + '"')
        proxy.to_server.limit(50_000)
        with pytest.raises(TooSlow) as slow:
            await store.settle([large])
        assert not slow.value.last
        proxy.to_server.limit(1e9)
        proxy.swallow()
        with pytest.raises(Exception, match="results") as silent:
            await store.settle([large], unsure=True)
        assert not isinstance(silent.value, TooSlow)
        proxy.forward()
        with trio.fail_after(20):
            assert (await store.settle([large], unsure=True)).accepted == [large]
