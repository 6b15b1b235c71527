"""Leases of queues on a real database: every claim and every beat writes the lease of the job's own queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pulse_trio.handlers import QueueLimits
from pulse_trio.store import ClaimCursor
from support.stores import Window, claim, claim_one, open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pulse_trio.store import WorkerStore


def leases(window: Window, ids: Sequence[int]) -> list[float]:
    """Seconds that each of these jobs is leased for from now on."""
    left = "SELECT extract(epoch FROM lease_until - clock_timestamp())::float8 AS left FROM job WHERE id = %s"
    return [window.run(left, job_id)[0]["left"] for job_id in ids]


def shorten(window: Window, ids: Sequence[int]) -> None:
    """The leases run out in a second, so that a beat is seen to renew them."""
    window.run("UPDATE job SET lease_until = clock_timestamp() + interval '1 s' WHERE id = ANY (%s)", list(ids))


async def test_one_claim_and_one_beat_lease_each_queues_jobs_for_its_own_time(window: Window, queue: str) -> None:
    names = [queue, f"{queue}-short", f"{queue}/x.y:z_long"]
    ids = [window.enqueue(name) for name in names]
    async with open_store(window.dsn, lease=100, leases={names[1]: 20.5, names[2]: 9000}) as store:
        claims = (await store.complete_and_claim(10, [ClaimCursor(name, 0) for name in names])).claims
        assert sorted(c.id for c in claims) == ids
        assert leases(window, ids) == pytest.approx([100, 20.5, 9000], abs=8)
        shorten(window, ids)
        assert (await store.beat(claims)).renewed == frozenset(claims)
        assert leases(window, ids) == pytest.approx([100, 20.5, 9000], abs=8)


async def test_a_claim_within_limits_has_the_lease_of_its_queue(window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    async with open_store(window.dsn, leases={queue: 500}) as store:
        await store.declare_limits([QueueLimits(queue, limit=1)])
        assert [c.id for c in (await store.claim_limited(queue, 1)).claims] == [job_id]
    assert leases(window, [job_id]) == pytest.approx([500], abs=8)


@pytest.mark.parametrize("limit", [None, 1], ids=["plain", "limited"])
async def test_a_suspects_claim_has_the_lease_of_its_queue(window: Window, queue: str, limit: int | None) -> None:
    job_id = window.enqueue(queue)
    window.run("UPDATE job SET suspect = true, suspected_at = now() WHERE id = %s", job_id)
    async with open_store(window.dsn, leases={queue: 500}) as store:
        if limit is not None:
            await store.declare_limits([QueueLimits(queue, limit=limit)])
        assert [c.id for c in (await store.claim_suspect([queue])).claims] == [job_id]
    assert leases(window, [job_id]) == pytest.approx([500], abs=8)


async def test_each_queues_expired_jobs_are_rescued_and_the_others_stay(
    store: WorkerStore, window: Window, queue: str
) -> None:
    short, long = f"{queue}-short", f"{queue}-long"
    ids = [window.enqueue(name) for name in (short, long)]
    async with open_store(window.dsn, leases={short: 60, long: 600}) as dying:
        for name in (short, long):
            await claim_one(dying, name)
    await store.rescue()
    assert [window.state(job_id) for job_id in ids] == ["running", "running"]
    window.run("UPDATE job SET lease_until = lease_until - interval '61 s' WHERE id = ANY (%s)", ids)
    await store.rescue()
    assert [window.state(job_id) for job_id in ids] == ["available", "running"]


async def test_a_worker_that_knows_no_lease_of_a_queue_claims_for_its_own(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    await claim(store, queue)
    assert leases(window, [job_id]) == pytest.approx([30], abs=8)
