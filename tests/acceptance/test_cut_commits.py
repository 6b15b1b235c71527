"""The network breaks after each byte in turn of what leads to a COMMIT and of its answer, in either direction.

A few positions are tried each time. `PULSE_TRIO_CUTS=0:1` tries them all, and `1:4` every fourth from the second on.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio
from psycopg.conninfo import make_conninfo

from pulse_trio import DatabaseUnavailable, Handlers, Job, SyncClient, open_client
from pulse_trio.observe import FenceLost, JobStarted
from pulse_trio.postgres import TrioConnection
from support.embedded_workers import working
from support.stores import Window
from support.workers import rows, settled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pulse_trio.testing.faults.proxy import Cut, Direction, Proxy

CALM = {"lease": 60.0, "heartbeat": 20.0, "watchdog": 20.0, "poll": 20.0, "grace": 5.0, "concurrency": 1}
"""Nothing but the job that is tried is said to the database, nearly. With one slot each claim brings as many jobs as it asks
for, so that another follows and takes the completion with it."""
SAMPLE = 16
EXCHANGE = (
    800  # bytes of a sweep, a claim that carries a completion, and their answers: claims that bring nothing may follow
)
QUIET = 0.3  # seconds without a byte, after which an exchange that is measured has ended

directions = pytest.mark.parametrize("direction", ["to_server", "to_client"])


def positions(total: int) -> Iterator[int]:
    """Where to cut: before the first byte, after the last, and between."""
    chosen = os.environ.get("PULSE_TRIO_CUTS")
    first, step = map(int, chosen.split(":")) if chosen else (0, max(1, total // SAMPLE))
    yield from range(first, total, step)
    yield total


async def quiet(cut: Cut) -> int:
    """How many bytes have passed when no more come."""
    before = -1
    while cut.passed[cut.direction] != before:
        before = cut.passed[cut.direction]
        await trio.sleep(QUIET)
    return before


@directions
async def test_an_enqueue_in_a_callers_transaction_is_there_with_the_callers_writes_or_not_at_all(
    direction: Direction, dsn: str, proxy: Proxy
) -> None:
    through = make_conninfo(proxy.dsn, application_name="caller", sslmode="disable", gssencmode="disable")
    with Window(dsn) as window:
        window.run("CREATE TABLE public.ledger (n text)")

        async def attempt(number: int, limit: float) -> tuple[int, bool]:
            """How many bytes passed, and whether the COMMIT was acknowledged, when the server's session has ended."""
            name = f"{number:09}"
            async with open_client(dsn) as client:
                connection = await TrioConnection.connect(through)
                await connection.execute("SELECT pg_advisory_lock(1)")
                await connection.commit()
                cut = proxy.cut_after(direction, limit, of="caller")
                acknowledged = False
                try:
                    async with connection.transaction():
                        await client.using(connection).enqueue("noop", {"n": name})
                        await connection.execute("INSERT INTO public.ledger VALUES (%s)", [name])
                    acknowledged = True
                except (psycopg.OperationalError, DatabaseUnavailable):
                    assert cut.done
                passed = cut.passed[direction]
                await connection.close()
            await trio.to_thread.run_sync(window.run, "SELECT pg_advisory_lock(1), pg_advisory_unlock(1)")
            return passed, acknowledged

        def there(number: int) -> tuple[int, int]:
            return (
                window.value("SELECT count(*) FROM pulse.job WHERE args->>'n' = %s", f"{number:09}"),
                window.value("SELECT count(*) FROM public.ledger WHERE n = %s", f"{number:09}"),
            )

        total, acknowledged = await attempt(0, math.inf)
        assert acknowledged
        outcomes: set[tuple[bool, tuple[int, int]]] = set()
        for number in positions(total):
            _, acknowledged = await attempt(number + 1, number)
            found = there(number + 1)
            outcomes.add((acknowledged, found))
            if direction == "to_server":
                # The transaction commits exactly when the whole of COMMIT has come.
                assert found == ((1, 1) if number == total else (0, 0)), number
            elif acknowledged:
                assert found == (1, 1), number
        assert outcomes <= {(False, (0, 0)), (False, (1, 1)), (True, (1, 1))}
        assert {found for _, found in outcomes} == {(0, 0), (1, 1)}


def handlers_that(arm: Any) -> Handlers:
    handlers = Handlers()

    @handlers.job(max_attempts=1)
    async def pays(job: Job, n: int) -> int:
        with suppress(DatabaseUnavailable, psycopg.OperationalError):
            async with job.transaction() as tx:
                arm(of="pulse-trio transactions")
                await tx.execute("INSERT INTO public.ledger VALUES (%s)", [n])
            return n
        # What was told is that it was rolled back: a handler may do it again at once.
        async with job.transaction() as tx:
            await tx.execute("INSERT INTO public.ledger VALUES (%s)", [n])
        return n

    @handlers.job(max_attempts=1)
    async def returns(job: Job, n: int) -> int:
        arm(of="pulse-trio claims")
        return n

    return handlers


@directions
@pytest.mark.parametrize("kind", ["pays", "returns"])
async def test_a_job_is_completed_once_and_its_writes_are_there_once(
    kind: str, direction: Direction, dsn: str, proxy: Proxy
) -> None:
    limit, cuts = math.inf, list["Cut"]()

    def arm(of: str) -> None:
        cuts.append(proxy.cut_after(direction, limit, of=of))

    with Window(dsn) as window:
        window.run("CREATE TABLE public.ledger (n int)")
    enqueue = partial(trio.to_thread.run_sync, partial(SyncClient(dsn).enqueue, kind))
    through = make_conninfo(proxy.dsn, sslmode="disable", gssencmode="disable")
    async with working(handlers_that(arm), through, direct_dsn=dsn, **CALM) as heard:
        tried: list[int] = []

        async def complete() -> tuple[str, int, Any]:
            job_id = (await enqueue({"n": len(tried)})).id
            tried.append(job_id)
            with trio.fail_after(30):
                await heard.until(JobStarted, job_id=job_id)
                return await settled(dsn, job_id)

        assert (await complete())[:2] == ("completed", 1)  # connections are there from now on
        assert (await complete())[:2] == ("completed", 1)
        total = await quiet(cuts[-1])
        if kind == "returns":
            total = min(total, EXCHANGE)
        done = 0
        for limit in positions(total):
            assert (await complete())[:2] == ("completed", 1), (limit, total)
            cut = cuts[-1]
            # PostgreSQL shows the job completed before its answer has come through the proxy.
            await quiet(cut)
            done += cut.done
            cut.limit = math.inf  # what was not cut yet is left alone: the next job is of another position
        assert done > 1
    assert heard.of(FenceLost) == []
    once = "SELECT count(*), count(DISTINCT id) FROM pulse.jobs WHERE state = 'completed'"
    assert rows(dsn, once) == [(len(tried), len(tried))]
    if kind == "pays":
        assert rows(dsn, "SELECT count(*), count(DISTINCT n) FROM public.ledger") == [(len(tried), len(tried))]
