"""A parent that holds the permit which its children wait for gives it back, also if it polls them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Job, SyncClient
from pulse_trio.jobs import PermitClaim
from support.stores import open_store

if TYPE_CHECKING:
    from support.trees import Trees

LONG = 60
"""Seconds after which a test has failed."""
SHARED: dict[str, Any] = {"key": "shared", "limit": 1}


@pytest.mark.parametrize("where", ["queue", "key"])
async def test_a_parent_that_polls_its_children_gives_its_permit_back(where: str, trees: Trees) -> None:
    keyed = SHARED if where == "key" else {}
    if where == "queue":
        trees.handlers.queue("default", limit=1)

    @trees.handlers.job(**keyed)
    async def small(n: int) -> int:
        return n

    @trees.handlers.job(durable=True, **keyed)
    async def poller(job: Job) -> int:
        async with job.durable_nursery() as nursery:
            children = [nursery.start_soon(small, n) for n in range(3)]
            while not all(child.outcome for child in children):
                await job.sleep(timedelta(seconds=0.5))
        return sum(child.result for child in children)

    job_id = trees.enqueue("poller")
    with trio.fail_after(LONG):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trees.worker(log=False).run)
            while trees.job(job_id)["finished_at"] is None:  # noqa: ASYNC110 -- no event tells of it
                await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
    assert (trees.job(job_id)["result"], trees.job(job_id)["error"]) == (3, None)


@pytest.mark.parametrize(
    ("limits", "options", "holds"),
    [
        ({"limit": 5}, {}, True),
        ({"key_limit": 5}, {"key": "a"}, True),
        ({}, {"key": "a", "limit": 5}, True),
        ({"key_limit": 5, "rate": "100/s"}, {}, False),
        ({"rate": "100/s"}, {}, False),
        ({}, {"key": "a"}, False),
        ({}, {"key": "a", "rate": "100/s"}, False),
    ],
)
async def test_a_claim_says_whether_it_holds_a_permit(
    limits: dict[str, Any], options: dict[str, Any], holds: bool, trees: Trees
) -> None:
    @trees.handlers.job(**options)
    async def small() -> None: ...

    if limits:
        SyncClient(trees.dsn).limit_queue("default", **limits)
    trees.enqueue("small")
    async with open_store(trees.dsn) as store:
        (claim,) = (await store.claim_limited("default", 5)).claims
        held = trees.window.value("SELECT count(*) FROM permit")
    assert (isinstance(claim, PermitClaim), held) == (holds, int(holds))
