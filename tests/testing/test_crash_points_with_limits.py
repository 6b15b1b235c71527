"""`crash_points` with a database, of handlers and queues whose limits, rates and pauses would keep a retry waiting."""

from __future__ import annotations

from typing import Any, LiteralString

import psycopg
import pytest

from pulse_trio import Handlers, Job
from pulse_trio.testing import NeverEnds, crash_points, pulse_database

handlers = Handlers()


@handlers.job(max_attempts=5, rate="1/h")
async def rated(job: Job) -> None:
    await job.progress(1.0)


@handlers.job(max_attempts=5, rate="1/h", limit=1, key="of")
async def rated_by_key(job: Job, of: str) -> None:
    await job.progress(1.0)


@handlers.job
async def plain() -> None:
    pass


@handlers.job(max_attempts=5)
async def limited() -> None:
    pass


@handlers.job(rate="1/h", limit=1)
async def rated_child(number: int) -> int:
    return number


@handlers.job(durable=True, max_attempts=5, rate="1/h")
async def rated_order(job: Job) -> int:
    async with job.durable_nursery() as nursery:
        children = [nursery.start_soon(rated_child, number) for number in range(3)]
    return sum([child.result for child in children])


async def points_of(runs: Any) -> list[str]:
    found: list[str] = []
    async for run in runs:
        assert run.state == "completed", str(run)
        found.append(run.point)
    return found


async def test_a_rate_holds_no_retry(dsn: str) -> None:
    """Each retry waited for the next token: `NeverEnds` blamed the handler after 30 s."""
    in_memory = await points_of(crash_points(rated))
    assert await points_of(crash_points(rated, dsn=dsn, timeout=5)) == in_memory
    assert "kill@1" in in_memory


async def test_a_rate_of_a_key_holds_no_retry(dsn: str) -> None:
    assert "kill@1" in await points_of(crash_points(rated_by_key, "x", dsn=dsn, timeout=5))


async def test_a_rate_of_the_queue_holds_no_retry(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO pulse.queue (name, rate_count, rate_seconds) VALUES ('default', 1, 3600)")
    assert await points_of(crash_points(plain, dsn=dsn, timeout=5)) == ["none", "kill@start", "kill@end"]


async def test_a_rate_holds_no_retry_where_a_test_moves_the_clock() -> None:
    with pulse_database(clock=True) as dsn:
        assert "kill@1" in await points_of(crash_points(rated, dsn=dsn, timeout=5))


@pytest.mark.parametrize("clock", [False, True])
async def test_a_rate_holds_no_child(clock: bool) -> None:
    """The second child waited for its token, and nothing let time pass for it: `ConfigurationError`."""
    with pulse_database(clock=clock) as dsn:
        for only in ("none", "kill@2"):
            async for run in crash_points(rated_order, dsn=dsn, handlers=handlers, only=only, timeout=10):
                assert (run.state, run.result) == ("completed", 3), str(run)


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("INSERT INTO pulse.queue (name, paused_at) VALUES ('default', now())", "Its queue, default, is paused."),
        ("INSERT INTO pulse.paused_kind (kind, paused_at) VALUES ('plain', now())", "Its kind, plain, is paused."),
    ],
)
async def test_a_job_that_no_worker_may_claim_says_what_it_waits_for(dsn: str, stop: LiteralString, said: str) -> None:
    """It came back a hundred times, and the handler was blamed."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(stop)
    with pytest.raises(NeverEnds) as failed:
        await points_of(crash_points(plain, dsn=dsn, timeout=5))
    assert str(failed.value) == f"the job of 'plain' waits, and no worker could start it: {said}"


async def test_a_job_that_waits_for_its_key_says_so(dsn: str) -> None:
    """`NeverEnds` said that the handler did not end, and that no handler ran."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO pulse.queue (name, max_running) VALUES ('default', 1)")
        ((other,),) = connection.execute("SELECT pulse.enqueue('other')").fetchall()
        ((session,),) = connection.execute(
            "INSERT INTO pulse.session (id, host, pid, version, concurrency, lease) "
            "VALUES (1000000000, 'h', 1, '1', 1, '1 h') RETURNING id"
        ).fetchall()
        connection.execute("SELECT pulse.claim_limited('default', %s, '1 hour', 1, '{}', '{}')", [session])
    with pytest.raises(NeverEnds) as failed:
        await points_of(crash_points(limited, dsn=dsn, timeout=1))
    assert str(failed.value).startswith(
        "the job of 'limited' waits, and no worker could start it within 1 s: "
        f"Its queue runs at most 1 job at once, and that many run: {other}."
    )
