"""A person cancels a job while a call waits for children that a scope has left behind: each attempt is cancelled there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Job, SyncClient
from pulse_trio.worker.durable import scopes

if TYPE_CHECKING:
    from support.trees import Trees

STEP, CANCELLED = 1, 9


class Left:
    """A block in a scope which only the first attempt opens, with a child that ends when it is told to."""

    def __init__(self, trees: Trees) -> None:
        self.trees = trees
        self.calls: list[str] = []
        self.runs, self.cleans_up, self.clean = trio.Event(), trio.Event(), trio.Event()

        @trees.handlers.job(queue="elsewhere")
        async def child(job: Job) -> None:
            self.runs.set()
            try:
                await trio.sleep_forever()
            finally:
                with job.cleanup():
                    self.cleans_up.set()
                    await self.clean.wait()  # noqa: ASYNC102

        self.child = child

    async def note(self, what: str) -> None:
        self.calls.append(what)

    async def block(self, job: Job) -> None:
        with job.move_on_after(3600):
            if job.attempt > 1:
                await trio.sleep_forever()
            async with job.durable_nursery() as nursery:
                nursery.start_soon(self.child)

    async def compensate(self, job: Job) -> None:
        """The clean-up of a handler. The first worker that comes to its second step dies there."""
        with job.cleanup():
            await job.step(self.note, "refund")  # noqa: ASYNC102
            if "lost" not in self.calls:
                self.calls.append("lost")
                await self.trees.lose(job.id)  # noqa: ASYNC102
            else:
                await job.step(self.note, "tell")  # noqa: ASYNC102

    def begins_after_its_deadline(self, job_id: int) -> None:
        self.trees.window.run(
            "UPDATE history SET value = to_json(extract(epoch FROM now())::float8) WHERE job_id = %s AND key = '1:scope'",
            job_id,
        )
        self.trees.again()


@pytest.fixture
def left(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> Left:
    monkeypatch.setattr(scopes, "REOPENED_WITHIN", 0.0)
    return Left(trees)


async def ends(trees: Trees, job_id: int) -> tuple[object, object]:
    while trees.job(job_id)["finished_at"] is None:  # noqa: ASYNC110 -- no event tells of it
        await trio.sleep(0.01)
    found = trees.job(job_id)
    return found["state"], found["error"]


@pytest.mark.parametrize("what", ["step", "block"])
async def test_the_compensation_is_found_again_by_the_attempt_after_a_lost_one(
    what: str, trees: Trees, left: Left
) -> None:
    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=9)
    async def parent(job: Job) -> None:
        try:
            await left.block(job)
            if what == "step":
                await job.step(left.note, "cut")
            else:
                async with job.durable_nursery():
                    await job.step(left.note, "cut")
        except trio.Cancelled:
            await left.compensate(job)  # noqa: ASYNC102 -- shielded inside
            raise

    job_id = trees.enqueue("parent")
    with trio.fail_after(40):
        await trees.burst(queues=("default",))
        async with trio.open_nursery() as children:
            children.start_soon(trees.worker(queues=("elsewhere",), cleanup=30.0).run)
            await left.runs.wait()
            left.begins_after_its_deadline(job_id)
            async with trio.open_nursery() as second:
                second.start_soon(trees.worker(burst=True, queues=("default",)).run)
                await left.cleans_up.wait()
                SyncClient(trees.dsn).cancel(job_id)
            # The burst may have ended before the job was due again.
            await trees.burst(queues=("default",))
            left.clean.set()
            assert await ends(trees, job_id) == ("cancelled", None)
            children.cancel_scope.cancel()
    assert left.calls == ["refund", "lost", "tell"]
    assert [(kind, key) for kind, key, _ in trees.lines(job_id) if kind in (STEP, CANCELLED)] == [
        (CANCELLED, "job"), (STEP, "4:step"), (STEP, "5:step"),
    ]  # fmt: skip


@pytest.mark.usefixtures("replay_stands_still")
async def test_so_it_is_where_the_call_has_waited_for_its_turn_in_the_replay_first(trees: Trees, left: Left) -> None:
    replayed = trio.Event()

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=9)
    async def parent(job: Job) -> None:
        stamped = trio.Event()

        async def approve() -> None:
            await job.wait_for_event("approved", key="approval")
            for _ in range(20):
                await trio.lowlevel.checkpoint()  # in a replay the other task comes to its step meanwhile
            await job.step(left.note, "approved", key="stamp")
            stamped.set()
            if job.attempt > 2:
                replayed.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(approve)
            try:
                await left.block(job)
                with job.move_on_after(3600):  # now it is written that the other one struck
                    if "lost" in left.calls:
                        await stamped.wait()
                    await job.step(left.note, "cut")
            except trio.Cancelled:
                await left.compensate(job)  # noqa: ASYNC102 -- shielded inside
                raise

    job_id = trees.enqueue("parent")
    with trio.fail_after(40):
        await trees.burst(queues=("default",))
        async with trio.open_nursery() as children:
            children.start_soon(trees.worker(queues=("elsewhere",), cleanup=30.0).run)
            await left.runs.wait()
            left.begins_after_its_deadline(job_id)
            async with trio.open_nursery() as second:
                second.start_soon(trees.worker(queues=("default",)).run)
                await left.cleans_up.wait()
                SyncClient(trees.dsn).send_event(job_id, "approved", None)
                while (STEP, "stamp", "note") not in trees.lines(job_id):  # noqa: ASYNC110 -- no event tells of it
                    await trio.sleep(0.01)
                second.cancel_scope.cancel()
            trees.again()
            async with trio.open_nursery() as third:
                third.start_soon(trees.worker(burst=True, queues=("default",)).run)
                await replayed.wait()
                for _ in range(20):
                    await trio.lowlevel.checkpoint()
                SyncClient(trees.dsn).cancel(job_id)
            await trees.burst(queues=("default",))
            left.clean.set()
            assert await ends(trees, job_id) == ("cancelled", None)
            children.cancel_scope.cancel()
    assert left.calls == ["approved", "refund", "lost", "tell"]
