"""A task of `job.nursery` undoes what it did because the main task has failed, and the worker is lost meanwhile: what it had
undone rests on that failure, so the next attempt comes to it again, and does the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Discard, Job, RetryAfter, SyncClient
from pulse_trio.jobs import CancelRequest
from pulse_trio.store import family
from support.trees import running_of

if TYPE_CHECKING:
    from support.trees import Trees

PLACES = ["in the first", "between", "in the second", "behind"]


class Bank:
    """Its steps write down that they ran; the worker is lost once, at a place of the compensation."""

    def __init__(self, trees: Trees, place: str) -> None:
        self.book: list[str] = []
        self._trees = trees
        self._place = place

    async def charge(self, what: str) -> None:
        self.book.append(f"charge {what}")

    async def refund(self, job: Job, what: str, place: str) -> None:
        self.book.append(f"refund {what}")
        await self.is_lost(job, place)

    async def undo(self, job: Job, *, keyed: bool = True) -> None:
        """`keyed`: as another task than the main one must."""
        await job.step(self.refund, job, "a", "in the first", key="refund a" if keyed else None)
        await self.is_lost(job, "between")
        await job.step(self.refund, job, "b", "in the second", key="refund b" if keyed else None)
        await self.is_lost(job, "behind")

    async def is_lost(self, job: Job, place: str) -> None:
        if self._place == place:
            self._place = ""
            await self._trees.dies(job)


def undone(place: str) -> list[str]:
    twice = {"in the first": ["a", "a", "b"], "in the second": ["a", "b", "b"]}
    return [f"refund {what}" for what in twice.get(place, ["a", "b"])]


@pytest.mark.parametrize("error", [RuntimeError, Discard, RetryAfter])
@pytest.mark.parametrize("stands", ["in a step", "in a plain await", "in a wait"])
@pytest.mark.parametrize("place", PLACES)
async def test_a_step_of_the_main_task_fails(trees: Trees, place: str, stands: str, error: type[Exception]) -> None:
    """Nothing said that it had: its line is held until the next durable call of the attempt, and was forgotten when the handler
    ended with it, though the other task undid after that."""
    bank, both = Bank(trees, place), trio.Event()

    async def ship() -> None:
        await both.wait()
        raise error("no stock") if error is not RetryAfter else RetryAfter(0)

    async def other(job: Job) -> None:
        await job.step(bank.charge, "b", key="charge b")
        await job.step(bank.charge, "a", key="charge a")
        both.set()
        try:
            match stands:
                case "in a step":
                    await job.step(trio.sleep_forever, key="stands")
                case "in a wait":
                    await job.wait_for_event("never", key="never")
                case _:
                    await trio.sleep_forever()
        except BaseException:
            with job.cleanup():
                await bank.undo(job)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    @trees.handlers.job(durable=True, max_attempts=3)
    async def order(job: Job) -> None:
        job.nursery.start_soon(other, job)
        await job.step(ship)

    job_id = trees.enqueue("order")
    with trio.fail_after(20):
        for _ in range(2):
            await trees.burst(watchdog=5, lease=3, heartbeat=0.3, log=False)
    if error is not RetryAfter:
        assert "no stock" in trees.job(job_id)["error"]
    assert bank.book == ["charge b", "charge a", *undone(place)]


@pytest.mark.parametrize("place", PLACES)
async def test_a_child_of_the_main_task_fails(trees: Trees, place: str) -> None:
    """The block's failure has a line, which the next attempt does without: the child runs again. It came to that after ten
    seconds, though the task that undoes stands in a plain await and is cancelled for it alone."""
    bank, both = Bank(trees, place), trio.Event()

    @trees.handlers.job(max_attempts=1)
    async def ship() -> None:
        await both.wait()
        raise RuntimeError("no stock")

    async def other(job: Job) -> None:
        await job.step(bank.charge, "b", key="charge b")
        both.set()
        try:
            await trio.sleep_forever()
        except BaseException:
            with job.cleanup():
                await bank.undo(job)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    @trees.handlers.job(durable=True, max_attempts=3, suspend_after=60)
    async def order(job: Job) -> None:
        job.nursery.start_soon(other, job)
        async with job.durable_nursery() as nursery:
            nursery.start_soon(ship)

    job_id = trees.enqueue("order")
    with trio.fail_after(20):
        for _ in range(2):
            await trees.burst(watchdog=5, lease=3, heartbeat=0.3, log=False)
    assert "no stock" in trees.job(job_id)["error"]
    assert bank.book == ["charge b", *undone(place)]


async def test_a_task_that_goes_on_with_its_work_does_not_bind_the_next_attempt(trees: Trees) -> None:
    """It is shielded, and undoes nothing. Its line comes after the failure, which the next attempt does without."""
    calls: list[str] = []
    both, over = trio.Event(), trio.Event()

    async def ship(job: Job) -> None:
        calls.append("ship")
        await both.wait()
        if job.attempt == 1:
            raise RuntimeError("no stock")

    async def note(what: str) -> None:
        calls.append(what)

    async def other(job: Job) -> None:
        with trio.CancelScope(shield=True):
            await job.step(note, "begun", key="begun")
            both.set()
            await over.wait()
            await job.step(note, "ended", key="ended")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        job.nursery.start_soon(other, job)
        try:
            await job.step(ship, job)
        finally:
            over.set()
        return "shipped"

    job_id = trees.enqueue("order")
    with trio.fail_after(20):
        await trees.burst(log=False)
        assert (trees.job(job_id)["state"], calls) == ("retryable", ["ship", "begun", "ended"])
        trees.again()
        await trees.burst(log=False)
    assert trees.job(job_id)["result"] == "shipped"
    assert calls == ["ship", "begun", "ended", "ship"]


@pytest.mark.parametrize("asked", ["in the step", "as it fails"])
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("place", PLACES)
async def test_plain_code_fails_as_a_person_cancels(
    trees: Trees, place: str, beside: bool, asked: str, replay_stands_still: None
) -> None:
    """`beside`: another task undoes its part, too. Its line had no cancellation before it, and the attempt after that ended
    with a mismatch, as each `jobs retry` did."""
    bank = Bank(trees, place)

    def ask(job: Job) -> None:
        running = running_of(job)
        running.ask(CancelRequest("user", None))

    async def charge(job: Job) -> None:
        await bank.charge("main")
        await trio.to_thread.run_sync(SyncClient(trees.dsn).cancel, job.id)
        if asked == "in the step":
            ask(job)

    async def other(job: Job) -> None:
        try:
            await job.step(bank.charge, "other", key="charge other")
            await trio.sleep_forever()
        except BaseException:
            if beside:
                with job.cleanup():
                    await job.step(bank.refund, job, "other", "never", key="refund other")  # noqa: ASYNC102 -- job.cleanup() is it
            raise

    @trees.handlers.job(durable=True, max_attempts=6)
    async def order(job: Job) -> None:
        try:
            job.nursery.start_soon(other, job)
            await job.step(bank.charge, "a")
            await job.step(charge, job)
            if job.attempt == 1:
                if asked != "in the step":
                    ask(job)
                raise OSError("for a moment")
            await job.step(bank.charge, "c")
            await trio.sleep_forever()
        except BaseException:
            with job.cleanup():
                await bank.undo(job, keyed=False)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    with trio.fail_after(20):
        for _ in range(3):
            await trees.burst(watchdog=5, lease=3, heartbeat=0.3, log=False)
            trees.again()
    assert (trees.job(job_id)["state"], trees.job(job_id)["error"]) == ("cancelled", None)
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == []
    assert sorted(bank.book[:3]) == ["charge a", "charge main", "charge other"]
    done = [what for what in bank.book[3:] if what != "refund other"]
    assert (done, "refund other" in bank.book) == (undone(place), beside)
