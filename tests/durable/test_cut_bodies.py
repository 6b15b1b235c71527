"""A block's body that is cut short takes its time to unwind: its children are cancelled at once, and none is started any more.

They were cancelled after it: those that waited began and were completed, and what the body started ran."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Job
from pulse_trio.worker.durable.block import Block
from support.stores import Window

if TYPE_CHECKING:
    from pulse_trio.handlers import Handler
    from support.trees import Trees

WAYS = ["a child fails", "a scope around it", "a scope around it strikes", "a plain scope", "a timeout"]


class Yard:
    """Children, and what they did. The body of a parent leaves when its `slow` child has been told."""

    def __init__(self, trees: Trees) -> None:
        self.did: list[str] = []
        self.told = trio.Event()
        self.runs = trio.Event()
        self.over = trio.Event()

        @trees.handlers.job
        async def bad() -> None:
            await self.runs.wait()
            raise Discard("no")

        @trees.handlers.job
        async def slow(job: Job) -> None:
            try:
                self.runs.set()
                await trio.sleep_forever()
            finally:
                self.did.append(f"told: {job.cancel_reason}")
                self.told.set()

        @trees.handlers.job
        async def work(what: str) -> None:
            self.did.append(what)

        self.bad: Handler[..., Any] = bad
        self.slow: Handler[..., Any] = slow
        self.work: Handler[..., Any] = work

    async def unwinds(self) -> None:
        """Returns when the child that ran has been told, or after some seconds, which fails the test."""
        with trio.move_on_after(5):
            await self.told.wait()
        self.did.append("body left")


@pytest.fixture
def yard(trees: Trees) -> Yard:
    return Yard(trees)


@pytest.mark.parametrize("way", WAYS)
async def test_children_end_while_the_body_unwinds(trees: Trees, yard: Yard, way: str) -> None:
    @trees.handlers.job(durable=True, max_attempts=1, timeout=0.5 if way == "a timeout" else None)
    async def parent(job: Job) -> str:
        async def block() -> None:
            async with job.durable_nursery() as children:
                children.start_soon(yard.slow)
                children.start_soon(yard.work.options(delay=3600), "what waited")
                if way == "a child fails":
                    children.start_soon(yard.bad)
                try:
                    await yard.runs.wait()
                    if way == "a scope around it":
                        scope.cancel()
                    await trio.sleep_forever()
                finally:
                    children.start_soon(yard.work, "what was started then")
                    with job.cleanup():
                        await children.flush()  # noqa: ASYNC102 -- job.cleanup() is the shield
                        await yard.unwinds()  # noqa: ASYNC102 -- the same

        if way == "a plain scope":
            with trio.move_on_after(0.5):
                await block()
        elif way.startswith("a scope"):
            with job.move_on_after(0.5 if way.endswith("strikes") else 3600) as scope:
                await block()
        else:
            await block()
        return "over"

    found = await trees.ended(trees.enqueue("parent"))
    assert yard.did == [f"told: {'sibling' if way == 'a child fails' else 'parent'}", "body left"]
    assert found["state"] == ("dead" if way in ("a child fails", "a timeout") else "completed")
    states = trees.window.run(
        "SELECT kind, state FROM jobs WHERE parent_id = %s AND kind <> 'bad' ORDER BY id", found["id"]
    )
    assert [(row["kind"], row["state"]) for row in states] == [("slow", "cancelled"), ("work", "cancelled")]


async def test_what_a_cut_body_adds_is_not_started_with_those_that_are_being_written(
    trees: Trees, yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first child ran before its parent had heard that it was written (a flake of the test above)."""
    added, batches, start = trio.Event(), list[int](), Block._start

    async def held_up(block: Block, batch: Any) -> Any:
        batches.append(len(batch))
        started = await start(block, batch)
        if len(batches) == 1:
            await added.wait()
        return started

    monkeypatch.setattr(Block, "_start", held_up)

    @trees.handlers.job(durable=True, max_attempts=1)
    async def parent(job: Job) -> str:
        with job.move_on_after(3600) as scope:
            async with job.durable_nursery() as children:
                children.start_soon(yard.slow)
                try:
                    await yard.runs.wait()
                    scope.cancel()
                    await trio.sleep_forever()
                finally:
                    children.start_soon(yard.work, "what was started then")
                    added.set()
                    with job.cleanup():
                        await yard.unwinds()  # noqa: ASYNC102 -- job.cleanup() is the shield
        return "over"

    found = await trees.ended(trees.enqueue("parent"))
    assert (found["state"], yard.did, batches) == ("completed", ["told: parent", "body left"], [1])


async def test_a_body_whose_children_are_cancelled_starts_none_any_more(trees: Trees, yard: Yard) -> None:
    """One that was written after that, or beside it, ran until the body had ended (once in some hundred runs under load)."""
    written: list[int] = []

    def children_of(job_id: int) -> int:
        with Window(trees.dsn) as window:
            return window.value("SELECT count(*) FROM jobs WHERE parent_id = %s", job_id)

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> None:
        with job.move_on_after(3600) as scope:
            async with job.durable_nursery() as children:
                children.start_soon(yard.slow)
                await yard.runs.wait()
                scope.cancel()
                with job.cleanup():
                    await yard.unwinds()
                    children.start_soon(yard.work, "what was started then")
                    await children.flush()
                    written.append(await trio.to_thread.run_sync(children_of, job.id))

    found = await trees.ended(trees.enqueue("parent"))
    assert (found["state"], written, yard.did) == ("completed", [1], ["told: parent", "body left"])


@pytest.mark.parametrize("way", ["a child fails", "a scope around it strikes"])
async def test_an_attempt_that_is_lost_while_its_body_unwinds_has_ended_none_for_good_that_goes_on(
    trees: Trees, yard: Yard, way: str
) -> None:
    """Its children know of the end, and its history does not. The next attempt comes to the same."""
    attempts: list[int] = []

    @trees.handlers.job(durable=True, max_attempts=5)
    async def parent(job: Job) -> str:
        attempts.append(job.attempt)
        with job.move_on_after(0.5 if way != "a child fails" else 3600) as scope:
            async with job.durable_nursery() as children:
                children.start_soon(yard.slow)
                if way == "a child fails":
                    children.start_soon(yard.bad)
                try:
                    await trio.sleep_forever()
                finally:
                    with job.cleanup():
                        await yard.unwinds()  # noqa: ASYNC102 -- job.cleanup() is the shield
                        if job.attempt == 1:
                            await trees.dies(job)  # noqa: ASYNC102 -- the same
        return "over" if scope.cancelled_caught else "in time"

    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        await trees.burst(lease=3, heartbeat=0.1, log=False)
    found = await trees.ended(job_id)
    assert attempts[:2] == [1, 2]
    assert found["result" if way != "a child fails" else "state"] == ("over" if way != "a child fails" else "dead")
    states = trees.window.run("SELECT state FROM jobs WHERE parent_id = %s AND kind = 'slow'", job_id)
    assert states == [{"state": "cancelled"}]


@pytest.mark.parametrize("shield", ["a thread", "the end of another block"])
async def test_children_end_while_the_body_stands_in(trees: Trees, yard: Yard, shield: str) -> None:
    """A step in a thread, which nothing ends, and a block whose child cleans up held the others as long as they took."""
    told = threading.Event()

    @trees.handlers.job
    async def patient(job: Job) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with job.cleanup():
                await yard.unwinds()  # noqa: ASYNC102 -- job.cleanup() is the shield

    def waits() -> None:
        told.wait(5)
        yard.did.append("body left")

    @trees.handlers.job(durable=True, max_attempts=1)
    async def parent(job: Job) -> None:
        async with job.durable_nursery() as children:
            children.start_soon(yard.slow)
            children.start_soon(yard.bad)
            if shield == "a thread":
                await job.step(waits)
            else:
                async with job.durable_nursery() as inner:
                    inner.start_soon(patient)

    async def tells() -> None:
        await yard.told.wait()
        told.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tells)
        found = await trees.ended(trees.enqueue("parent"))
        nursery.cancel_scope.cancel()
    assert yard.did == ["told: sibling", "body left"]
    assert found["state"] == "dead"
