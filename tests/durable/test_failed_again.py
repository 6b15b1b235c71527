"""What two attempts have failed of, one after the other, under one key: the next reads what the second failed of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Job, SyncClient

if TYPE_CHECKING:
    from support.trees import Trees


async def note() -> None: ...


class Failing:
    """Fails twice, each time with another error: as a step, or as a child in a block."""

    def __init__(self, trees: Trees, what: str) -> None:
        self.trees = trees
        self.what = what
        self.calls = 0

        @trees.handlers.job
        async def pack() -> str:
            try:
                return await self.step()
            except ConnectionError as error:
                raise Discard(str(error)) from None

        self.pack = pack

    async def step(self) -> str:
        self.calls += 1
        if self.calls < 3:
            raise ConnectionError(f"away for the time number {self.calls}")
        return "packed"

    async def call(self, job: Job) -> str:
        if self.what == "step":
            return await job.step(self.step)
        async with job.durable_nursery() as nursery:
            packed = nursery.start_soon(self.pack)
        return packed.result

    async def attempt(self, job_id: int) -> dict[str, Any]:
        self.trees.again()
        with trio.fail_after(60):
            await self.trees.burst()
        return self.trees.job(job_id)

    def marks(self, job_id: int) -> list[str]:
        return [
            key.partition(":")[2]
            for kind, key, _ in self.trees.lines(job_id)
            if kind == 10 and key.endswith(("taken", "forgotten", "needed"))
        ]


@pytest.fixture(params=["step", "block"])
def failing(trees: Trees, request: pytest.FixtureRequest) -> Failing:
    return Failing(trees, request.param)


async def test_the_third_attempt_does_it_again_where_nothing_rests_on_either(trees: Trees, failing: Failing) -> None:
    @trees.handlers.job(durable=True, max_attempts=9)
    async def order(job: Job) -> str:
        failed, ticked = trio.Event(), trio.Event()

        async def beats() -> None:
            for number in (1, 2):
                if failing.calls < number:
                    await failed.wait()
                await job.step(note, key=f"tick {number}")
                if failed.is_set():
                    ticked.set()
                    return

        job.nursery.start_soon(beats)
        try:
            return await failing.call(job)
        finally:
            failed.set()
            if failing.calls < 3:
                with trio.CancelScope(shield=True):
                    await ticked.wait()

    job_id = trees.enqueue("order")
    assert "number 1" in (await failing.attempt(job_id))["error"]
    assert "number 2" in (await failing.attempt(job_id))["error"]
    assert ((await failing.attempt(job_id))["result"], failing.calls) == ("packed", 3)
    assert failing.marks(job_id) == ["forgotten", "forgotten"]


async def test_the_third_attempt_gets_the_second_failure_again_where_lines_rest_on_that(
    trees: Trees, failing: Failing
) -> None:
    undone: list[int] = []

    async def undo() -> None:
        undone.append(failing.calls)

    @trees.handlers.job(durable=True, max_attempts=9)
    async def order(job: Job) -> str:
        failed, ticked = trio.Event(), trio.Event()

        async def beats() -> None:
            if not failing.calls:
                await failed.wait()
            await job.step(note, key="tick")
            ticked.set()
            try:
                await job.wait_for_event("go", key="go")
            except trio.Cancelled:
                if failing.calls == 2:
                    with trio.CancelScope(shield=True):
                        await job.step(undo, key="undo")
                raise

        async with trio.open_nursery() as nursery:
            nursery.start_soon(beats)
            try:
                return await failing.call(job)
            finally:
                failed.set()
                with trio.CancelScope(shield=True):
                    await ticked.wait()

    job_id = trees.enqueue("order")
    for attempt, number in ((1, 1), (2, 2), (3, 2), (4, 2)):
        found = await failing.attempt(job_id)
        assert found["state"] == "retryable", attempt
        assert f"number {number}" in found["error"], attempt
    assert (failing.calls, undone) == (2, [2])
    assert failing.marks(job_id) == ["forgotten", "forgotten", "needed"]


@pytest.mark.parametrize("clock", ["is set back", "goes on"])
async def test_a_child_that_fails_again_is_not_started_once_more_though_the_clock_was_set_back(
    clock: str, trees: Trees
) -> None:
    """A failover to a server whose clock is behind. Its end seemed to be from before its parent's failure: it was started
    again, as often as it failed until the clock had caught up."""
    runs: list[int] = []

    @trees.handlers.job(max_attempts=1)
    async def child(job: Job) -> None:
        runs.append(job.attempt)
        raise RuntimeError("no stock")

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=1)
    async def parent(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(child)

    client, root, hour = SyncClient(trees.dsn), trees.enqueue("parent"), "+ interval '1 h'"
    assert (await trees.ended(root))["state"] == "dead"
    for lives in (2, 3):
        if clock == "is set back":
            # As seen from a clock that is an hour behind.
            trees.window.run(f"UPDATE history SET written_at = written_at {hour}")
            trees.window.run(f"UPDATE attempt SET started_at = started_at {hour}, ended_at = ended_at {hour}")
        assert client.retry(root)
        assert (await trees.ended(root))["state"] == "dead"
        assert runs == list(range(1, lives + 1))
