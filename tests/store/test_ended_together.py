"""Jobs of one tree whose attempts end in one statement, as those of a killed process do: parents are settled last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest

from pulse_trio.jobs import JobRequest
from pulse_trio.store.trees import Fence, NewChild
from support.stores import Window, claim_one, end, open_store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pulse_trio.jobs import Claim
    from pulse_trio.store import WorkerStore

LINE = "INSERT INTO history (job_id, line, kind, key, attempt) VALUES (%s, 1, 1, '1:step', 1)"


class Family:
    """A root, a child and a grandchild, all of which one worker runs; the root is cancelled."""

    def __init__(self, window: Window, store: WorkerStore) -> None:
        self.window, self.store = window, store
        self.claims: list[Claim] = []

    async def begin(self) -> None:
        self.window.enqueue("roots", kind="root")
        self.claims.append(await claim_one(self.store, "roots"))
        for queue in ("children", "grandchildren"):
            parent = self.claims[-1]
            request = NewChild(JobRequest("child", "{}", queue=queue), "0", b"digest")
            await self.store.trees.start_children(Fence(parent.id, parent.attempt, parent.session), 1, [request])
            self.claims.append(await claim_one(self.store, queue))
        self.window.run("SELECT FROM make_durable(%s)", self.claims[-1].id)
        self.window.run("SELECT * FROM cancel_jobs(%s)", [self.claims[0].id])
        await self.settle()

    async def settle(self) -> None:
        while self.window.value("SELECT count(*) FROM recheck"):
            await self.store.trees.recheck()

    async def all_end(self, how: Literal["rescued", "released"]) -> None:
        """In one statement."""
        if how == "released":
            await self.store.settle([end(claim, "released", delay=0.0) for claim in self.claims])
        else:
            self.window.expire(*(claim.id for claim in self.claims))
            await self.store.rescue()
        await self.settle()

    def states(self) -> list[str]:
        return [self.window.state(claim.id) for claim in self.claims]


@pytest.fixture
async def family(dsn: str) -> AsyncGenerator[Family]:
    async with open_store(dsn) as store:
        with Window(dsn) as window:
            family = Family(window, store)
            await family.begin()
            yield family


@pytest.mark.parametrize("how", ["rescued", "released"])
async def test_a_grandchild_that_owes_its_compensation_keeps_all_above_from_being_settled(
    how: Literal["rescued", "released"], family: Family
) -> None:
    family.window.run(LINE, family.claims[2].id)
    await family.all_end(how)
    assert family.states()[:2] == ["suspended", "suspended"]
    assert family.window.run("SELECT cancelling, state FROM job WHERE id = %s", family.claims[2].id) == [
        {"cancelling": True, "state": 1}
    ]
    family.window.make_due(family.claims[2].id)
    again = await claim_one(family.store, "grandchildren")
    assert (again.id, again.attempt) == (family.claims[2].id, 2)
    await family.store.settle([end(again, "cancelled")])
    await family.settle()
    assert family.states() == ["cancelled", "cancelled", "cancelled"]
    assert family.window.value(
        "SELECT root_ended_at IS NOT NULL FROM durable_job WHERE job_id = %s", family.claims[0].id
    )


async def test_a_child_that_owes_its_compensation_ends_with_none_below_it(family: Family) -> None:
    family.window.run(LINE, family.claims[1].id)
    await family.all_end("rescued")
    assert family.states()[0] == "suspended"
    assert family.window.run(
        "SELECT attempt, cancelling FROM job WHERE id = %s AND run_at <= now()", family.claims[1].id
    )
    assert family.states()[2] == "cancelled"


async def test_a_tree_that_owes_nothing_is_settled_with_that_statement(family: Family) -> None:
    await family.all_end("rescued")
    assert family.states() == ["cancelled", "cancelled", "cancelled"]
    assert family.window.value("SELECT count(*) FROM recheck") == 0
