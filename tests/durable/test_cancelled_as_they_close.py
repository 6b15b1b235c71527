"""A job that is cancelled, or times out, while its block waits for its children, which a scope of the handler had cut short:
the next attempt is cancelled there too, though the children have ended since."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Job, open_client
from support.trees import running_of

if TYPE_CHECKING:
    from support.trees import Trees


@pytest.mark.parametrize("how", ["a deadline", "scope.cancel()"])
@pytest.mark.parametrize("by", ["a person", "timeout"])
async def test_a_job_that_is_cancelled_as_its_cut_block_closes_undoes_the_same_again(
    trees: Trees, how: str, by: str
) -> None:
    """The line of the cancellation had no call: the next attempt went on behind the scope, and the charge stood."""
    effects, goes_on = list[str](), list[int]()
    begun, closing, told = trio.Event(), trio.Event(), trio.Event()

    async def do(what: str) -> str:
        effects.append(what)
        return what

    async def undo(job: Job, what: str) -> str:
        effects.append(f"undo {what}")
        if job.attempt == 1 and by == "a person":
            await trees.dies(job)
        return what

    @trees.handlers.job
    async def pack(job: Job) -> None:
        with trio.CancelScope(shield=True):
            begun.set()
            while running_of(job).cancel_reason is None:
                await trio.lowlevel.checkpoint()
            closing.set()
            await told.wait()

    @trees.handlers.job(durable=True, max_attempts=3, timeout=1 if by == "timeout" else None)
    async def order(job: Job) -> str:
        await job.step(do, "charge")
        try:
            with job.move_on_after(60 if how == "scope.cancel()" else 0.2) as patience:
                async with job.durable_nursery() as nursery:
                    nursery.start_soon(pack)
                    with trio.CancelScope(shield=True):  # the deadline may pass before the child is claimed
                        await nursery.flush()
                        await begun.wait()
                    if how == "scope.cancel()":
                        patience.cancel()
            goes_on.append(job.attempt)
            return "done"
        except BaseException:
            told.set()
            with job.cleanup():
                await job.step(partial(undo, job), "charge")  # noqa: ASYNC102 -- a clean-up has its deadline
            raise

    job_id = trees.enqueue("order")

    async def cancels() -> None:
        await closing.wait()
        async with open_client(trees.dsn) as client:
            await client.cancel(job_id)

    settings: dict[str, Any] = {"lease": 3, "heartbeat": 0.1}
    async with trio.open_nursery() as tasks:
        if by == "a person":
            tasks.start_soon(cancels)
        await trees.burst(**settings)
    for _ in range(3):
        trees.again()
        await trees.burst(**settings)
    found = trees.job(job_id)
    assert goes_on == []
    assert found["state"] == ("cancelled" if by == "a person" else "dead"), found["error"]
    assert "ReplayMismatch" not in (found["error"] or "")
    assert effects.count("charge") == 1
    assert "undo charge" in effects
