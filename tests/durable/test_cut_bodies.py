"""A block's body that was cut short for a failure of which its attempt failed: the next one does it again, or fails again."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Handler, Job, SyncClient
from pulse_trio.store import family
from pulse_trio.worker.durable.failures import Failures
from support.trees import cut_clean_ups

if TYPE_CHECKING:
    from support.trees import Trees

ran: list[str] = []


@pytest.fixture
def pack(trees: Trees) -> Handler[[], str]:
    """A child that dies once."""
    ran.clear()

    @trees.handlers.job
    async def pack() -> str:
        ran.append("pack")
        if ran.count("pack") == 1:
            raise Discard("out of stock")
        return "packed"

    return pack


async def undo() -> None:
    ran.append("undo")


async def attempts(count: int, trees: Trees, job_id: int) -> str:
    for _ in range(count):
        trees.again()
        with trio.fail_after(60):
            await trees.burst()
    return trees.job(job_id)["state"]


@pytest.mark.parametrize("worker", ["that writes marks", "of 1.0.0rc1"])
async def test_the_body_of_a_block_that_an_attempt_failed_of_is_not_cut_short_in_the_next_one(
    worker: str, trees: Trees, pack: Handler[[], str]
) -> None:
    @trees.handlers.job
    async def label() -> str:
        return "labelled"

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> list[str]:
        async with job.durable_nursery() as nursery:
            packed = nursery.start_soon(pack)
            if job.attempt == 1:
                await trio.sleep_forever()
            await job.sleep(0.01)
            labelled = nursery.start_soon(label)
        return [packed.result, labelled.result]

    job_id = trees.enqueue("order")
    assert await attempts(1, trees, job_id) == "retryable"
    if worker == "of 1.0.0rc1":
        trees.window.run("UPDATE session SET marks = NULL")
        trees.window.run("DELETE FROM history WHERE job_id = %s AND kind = 10", job_id)
    assert await attempts(1, trees, job_id) == "completed"
    assert trees.job(job_id)["result"] == ["packed", "labelled"]


@pytest.mark.parametrize("where", ["in the body", "in another task"])
async def test_a_block_fails_again_where_lines_rest_on_that_its_body_was_cut_short(
    where: str, trees: Trees, pack: Handler[[], str]
) -> None:
    @trees.handlers.job(durable=True, max_attempts=9)
    async def order(job: Job) -> str:
        async def beside() -> None:
            try:
                await job.sleep(3600, key="beside")
            finally:
                with trio.CancelScope(shield=True):
                    await job.step(undo, key="undo beside")

        async with trio.open_nursery() as tasks:
            if where == "in another task":
                tasks.start_soon(beside)
            async with job.durable_nursery() as nursery:
                packed = nursery.start_soon(pack)
                try:
                    await job.sleep(7200)
                except trio.Cancelled:
                    if where == "in the body":
                        with trio.CancelScope(shield=True):
                            await job.step(undo)
                    raise
        return packed.result

    job_id = trees.enqueue("order")
    for _ in range(3):
        assert (await attempts(1, trees, job_id), ran) == ("retryable", ["pack", "undo"])


async def test_a_body_that_has_cleaned_up_does_not_go_on_with_the_numbers_of_its_clean_up(
    trees: Trees, pack: Handler[[], str]
) -> None:
    """The plain code before its next call takes less time than before, so nothing stands still."""

    async def act(what: str) -> str:
        ran.append(what)
        return what

    @trees.handlers.job(durable=True, max_attempts=9)
    async def order(job: Job) -> str:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(pack)
            try:
                if job.attempt == 1:
                    await trio.sleep_forever()
                ran.append(await job.step(act, "the rest"))
            finally:
                with job.cleanup():
                    await job.step(act, "undo")  # noqa: ASYNC102
        return "done"

    job_id = trees.enqueue("order")
    for _ in range(3):
        assert (await attempts(1, trees, job_id), ran) == ("retryable", ["pack", "undo"])
    assert "out of stock" in trees.job(job_id)["error"]


@pytest.mark.parametrize("then", ["goes on", "fails", "is lost"])
async def test_what_cut_a_body_short_binds_no_attempt_if_its_own_was_lost_before_anything_rested_on_it(
    then: str, trees: Trees, pack: Handler[[], str]
) -> None:
    """A person starts the child again meanwhile, so nothing cuts the body short any more."""
    lost: list[int] = []

    async def lose(job_id: int) -> None:
        lost.append(job_id)
        await trees.lose(job_id, due=False)
        if len(lost) == 1:
            child = trees.window.value("SELECT job_id FROM member WHERE parent_id = %s", job_id)
            SyncClient(trees.dsn).retry(child)
        trees.again()

    @trees.handlers.job
    async def label() -> str:
        return "labelled"

    @trees.handlers.job(durable=True, max_attempts=9)
    async def order(job: Job) -> list[str]:
        async with job.durable_nursery() as nursery:
            packed = nursery.start_soon(pack)
            if not lost:
                try:
                    await trio.sleep_forever()
                finally:
                    with trio.CancelScope(shield=True):
                        await job.step(lose, job.id)  # what cut the body short has its line when this begins
            await job.sleep(0.01)
            labelled = nursery.start_soon(label)
            await nursery.flush()
            if job.attempt == 2 and then == "fails":
                raise ConnectionError("for now")
            if job.attempt == 2 and then == "is lost":
                await lose(job.id)
        return [packed.result, labelled.result]

    job_id = trees.enqueue("order")
    for _ in range(4):
        await attempts(1, trees, job_id)
    assert trees.job(job_id)["result"] == ["packed", "labelled"]


SOON: dict[str, Any] = {"lease": 3, "heartbeat": 0.1}
"""Settings of a worker that soon notices that a lease is lost."""


async def test_a_worker_that_is_lost_as_plain_code_in_a_body_has_failed_costs_an_attempt_alone(trees: Trees) -> None:
    """The block's failure was a line, and nothing was undone for it: the job was dead."""
    bodies: list[int] = []
    charged: list[int] = []
    failed, told = trio.Event(), trio.Event()

    @trees.handlers.job
    async def label(n: int) -> int:
        return n

    async def charge() -> None:
        charged.append(1)

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> int:
        async def beside() -> None:
            if job.attempt == 1:
                await failed.wait()
            await job.step(trio.lowlevel.checkpoint, key="beside")
            told.set()

        await job.step(charge, key="charge")
        job.nursery.start_soon(beside)
        try:
            async with job.durable_nursery(key="block") as nursery:
                child = nursery.start_soon(label, 7)
                bodies.append(job.attempt)
                if len(bodies) == 1:
                    raise OSError("a file that is not there yet")
        except* OSError:
            failed.set()
            await told.wait()
            await trees.dies(job)
        return child.result

    job_id = trees.enqueue("order")
    # The attempt after that fails in its place, and the next one does the body anew.
    found = await trees.ended(job_id, **SOON)
    assert (found["state"], found["result"]) == ("completed", 7), found["error"]
    assert (bodies, charged) == ([1, 2, 3], [1])


@pytest.mark.parametrize("scope", ["in the block", "around it", "none"])
async def test_a_worker_that_is_lost_before_the_marks_of_what_failed_are_there(
    scope: str, trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a scope was left had its line before them: the next attempt did not come to the block's failure, and wrote another
    one; the job was dead of a mismatch when it was resumed later."""
    done: list[str] = []

    async def flaky() -> None:
        done.append("flaky")
        if done.count("flaky") == 1:
            raise OSError("for a moment")

    async def other(what: str) -> None:
        done.append(what)

    @trees.handlers.job
    async def label() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        await job.step(other, "before")
        with job.move_on_after(600) if scope == "around it" else nullcontext():
            async with job.durable_nursery() as nursery:
                nursery.start_soon(label)
                with job.move_on_after(600) if scope == "in the block" else nullcontext():
                    await job.step(flaky)
                await job.step(other, "in it")
        await job.step(other, "after")
        await job.sleep(0.01)
        await job.step(other, "last")

    real = Failures.forget_those_of
    lost: list[int] = []

    async def forget_those_of(self: Failures, error: BaseException | None = None, **how: bool) -> None:
        claim = self._history.running.claim
        if claim.attempt == 1 and error is not None:
            lost.append(claim.id)
            await trees.lose(claim.id)
            cut_clean_ups(self._history.running)
            await trio.sleep_forever()
        await real(self, error, **how)

    monkeypatch.setattr(Failures, "forget_those_of", forget_those_of)
    job_id = trees.enqueue("order", max_attempts=9)
    found = await trees.ended(job_id, **SOON)
    assert found["state"] == "completed", found["error"]
    assert lost == [job_id]
    assert done == ["before", "flaky", "flaky", "in it", "after", "last"]


async def test_a_body_that_has_undone_its_part_is_done_with_where_the_job_is_cancelled_in_the_backoff(
    trees: Trees, pack: Handler[[], str]
) -> None:
    """It ran eight times more, for half a minute, and owed a clean-up that it had done."""

    async def charge() -> None:
        ran.append("charge")

    async def refund() -> None:
        ran.append("refund")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(pack)
            await job.step(charge)
            try:
                await job.wait_for_event("approved")
            except BaseException:
                with job.cleanup():
                    await job.step(refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise

    job_id = trees.enqueue("order")
    client = SyncClient(trees.dsn)
    with trio.fail_after(60):
        while "refund" not in ran or trees.job(job_id)["state"] in ("running", "suspended", "available"):
            await trees.burst(log=False)
        done = list(ran)
        await trio.to_thread.run_sync(client.cancel, job_id)
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst(log=False)
            trees.again()
    attempts_then = trees.job(job_id)["attempt"]
    assert (trees.job(job_id)["state"], ran) == ("cancelled", done)
    assert client.run(family.unfinished_clean_ups([job_id])) == []
    assert attempts_then <= 3
