"""A task catches the failure of its block or step and ends. What other tasks do then rests on that: it binds later attempts."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from pulse_trio import Discard, Job, SyncClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.trees import Trees

WHERE = ["in job.nursery", "in a nursery of another task"]


class Packing:
    """What fails once, in a task that catches it and ends."""

    def __init__(self, trees: Trees) -> None:
        self.trees = trees
        self.calls = 0
        self.ended, self.over = trio.Event(), trio.Event()
        self.problems: list[BaseException] = []

        @trees.handlers.job
        async def pack() -> None:
            try:
                await self.step()
            except ConnectionError:
                raise Discard("out of stock") from None

        self.pack = pack

    async def step(self) -> None:
        self.calls += 1
        if self.calls == 1:
            raise ConnectionError("away")

    async def fails(self, job: Job, what: str) -> None:
        if what == "step":
            await job.step(self.step, key="pack")
        else:
            async with job.durable_nursery(key="pack") as nursery:
                if what == "body":
                    await self.step()
                nursery.start_soon(self.pack)

    def begin(self, job: Job, what: str, where: str) -> None:
        """A new attempt: starts the task."""
        self.ended, self.over, self.problems = trio.Event(), trio.Event(), []

        async def catches() -> None:
            try:
                await self.fails(job, what)
            except* Exception as problems:
                self.problems.append(problems)

        async def around() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tells, catches)
                await self.over.wait()

        if where == WHERE[0]:
            job.nursery.start_soon(self._tells, catches)
        else:
            job.nursery.start_soon(around)

    async def end(self) -> None:
        """Returns when the task is gone."""
        await self.ended.wait()
        await trio.testing.wait_all_tasks_blocked()

    async def _tells(self, catches: Callable[[], Awaitable[None]]) -> None:
        await catches()
        self.ended.set()

    async def attempt(self, job_id: int) -> str:
        self.trees.again()
        with trio.fail_after(60):
            await self.trees.burst(log=False, lease=3, heartbeat=0.3)
        return self.trees.job(job_id)["state"]


@pytest.fixture
def packing(trees: Trees) -> Packing:
    return Packing(trees)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("what", ["step", "block"])
async def test_it_binds_an_attempt_whose_exception_comes_from_it_where_another_task_has_made_a_call_since(
    what: str, where: str, trees: Trees, packing: Packing
) -> None:
    """A person was asked meanwhile, and has said to give up."""

    @trees.handlers.job(durable=True, max_attempts=9)
    async def order(job: Job) -> str:
        packing.begin(job, what, where)
        if job.attempt == 1:
            await packing.end()
        await job.wait_for_event("answer")
        await packing.end()
        packing.over.set()
        if packing.problems:
            raise ValueError("we give up") from packing.problems[0]
        return "shipped"

    job_id = trees.enqueue("order")
    SyncClient(trees.dsn).send_event(job_id, "answer")
    assert await packing.attempt(job_id) == "retryable"
    assert await packing.attempt(job_id) == "retryable"
    assert "we give up" in trees.job(job_id)["error"]
    assert packing.calls == 1


@pytest.mark.parametrize("where", WHERE)
async def test_a_failure_of_a_block_s_body_binds_where_another_task_has_begun_to_wait_and_the_attempt_was_lost(
    where: str, trees: Trees, packing: Packing
) -> None:
    @trees.handlers.job(durable=True, max_attempts=9)
    async def order(job: Job) -> str:
        packing.begin(job, "body", where)
        if job.attempt == 1:
            await packing.end()
            job.nursery.start_soon(lose, job.id)
        await job.wait_for_event("answer", timeout=timedelta(hours=1))
        await packing.end()
        packing.over.set()
        return f"refused: {bool(packing.problems)}"

    async def lose(job_id: int) -> None:
        while not any(key == "1:event" for _, key, _ in trees.lines(job_id)):  # noqa: ASYNC110 -- no event tells of it
            await trio.sleep(0.01)
        await trees.lose(job_id)
        SyncClient(trees.dsn).send_event(job_id, "answer")

    job_id = trees.enqueue("order")
    while trees.job(job_id)["finished_at"] is None:
        await packing.attempt(job_id)
    # The body's code does not raise again, and its block does: never the other branch.
    assert trees.job(job_id)["result"] == "refused: True"


async def test_a_failure_that_still_goes_up_is_none_of_these(trees: Trees, packing: Packing) -> None:
    """Another task makes a call after the task with the exception has ended, and before the nursery around it has raised."""

    async def note() -> None: ...

    @trees.handlers.job(durable=True, max_attempts=9)
    async def order(job: Job) -> str:
        async def fails() -> None:
            try:
                await job.step(packing.step, key="pack")
            finally:
                packing.ended.set()

        async def slow() -> None:
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await noted.wait()

        async def beside() -> None:
            if job.attempt == 1:
                await packing.end()
            await job.step(note, key="note")
            noted.set()

        noted = trio.Event()
        job.nursery.start_soon(beside)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails)
            if job.attempt == 1:
                nursery.start_soon(slow)
        return "packed"

    job_id = trees.enqueue("order")
    assert await packing.attempt(job_id) == "retryable"
    await packing.attempt(job_id)
    assert (trees.job(job_id)["result"], packing.calls) == ("packed", 2)
