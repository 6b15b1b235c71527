"""A cancellation that comes in the COMMIT of a `job.transaction_step`: the handler gets its result, and can undo it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from pulse_trio import Job  # noqa: TC001 -- read by the registry
from pulse_trio.store.transactions import Begun

if TYPE_CHECKING:
    import pytest

    from support.trees import Trees


async def test_a_handler_that_is_cancelled_in_the_commit_gets_what_was_committed_and_undoes_it(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    running: list[Job] = []
    commit = Begun.commit

    async def cancelled_commit(begun: Begun, *how: Any) -> None:
        await commit(begun, *how)
        runtime: Any = running[0]._runtime  # pyright: ignore[reportPrivateUsage] -- at that very moment
        runtime.cancel("user")

    async def charge(tx: Any) -> str:
        await tx.execute("SELECT 1")
        return "charge"

    async def refund(what: str) -> None:
        calls.append(f"refund {what}")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        running.append(job)
        with monkeypatch.context() as patched:
            patched.setattr(Begun, "commit", cancelled_commit)
            charged = await job.transaction_step(charge)
        try:
            await trio.sleep_forever()
        finally:
            with job.cleanup():
                await job.step(refund, charged)  # noqa: ASYNC102 -- job.cleanup() is the shield

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        await trees.burst()
    assert calls == ["refund charge"]
    assert trees.job(job_id)["state"] == "cancelled"


async def test_a_handler_that_returns_all_the_same_is_completed_whatever_the_worker_had_in_its_nursery(
    trees: Trees,
) -> None:
    """The task that waits for the remembered deadline was cut short, and the job was `cancelled`: nothing was undone, and
    nothing owed."""

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        async def charge() -> None:
            await trio.lowlevel.checkpoint()  # the worker's task begins to wait
            runtime: Any = job._runtime  # pyright: ignore[reportPrivateUsage] -- as the step's last act
            runtime.cancel("user")

        with job.move_on_after(60):
            await job.step(charge)
        return "charged"

    job_id = trees.enqueue("order")
    await trees.burst()
    assert (trees.job(job_id)["state"], trees.job(job_id)["result"]) == ("completed", "charged")
