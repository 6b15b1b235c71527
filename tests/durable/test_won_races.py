"""A race between tasks that is won in the moment in which a remembered scope strikes in another task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from pulse_trio import Job, SyncClient
from pulse_trio.durable_calls import DurableScope

if TYPE_CHECKING:
    from support.trees import Trees


async def test_the_scope_strikes_again_after_the_call_that_lost_has_gone(trees: Trees) -> None:
    """That stood still when the scope struck, for its task had not had its turn. Here the scope's task comes later to where it
    stood then, and by then the loser has gone: the job was dead."""
    ways: list[list[Any]] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def agent(job: Job) -> str:
        stands, gone, scopes = trio.Event(), trio.Event(), list[DurableScope]()

        async def answer() -> None: ...

        async def ask(nursery: trio.Nursery) -> None:
            await stands.wait()
            await job.step(answer, key="answer")
            nursery.cancel_scope.cancel()
            scopes[0].cancel()

        async def other_model() -> None:
            try:
                await job.wait_for_event("never", key="never")
            finally:
                gone.set()

        async def tool() -> None:
            stands.set()
            if job.attempt > 1:
                await gone.wait()
            await job.wait_for_event("tool", key="tool")

        async def race() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, nursery)
                nursery.start_soon(other_model)

        async def bounded() -> None:
            with job.move_on_after(3600, key="patience") as patience:
                scopes.append(patience)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(tool)
            ways.append([job.attempt, await job.step(_late, key="late")])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(race)
            nursery.start_soon(bounded)
        await job.wait_for_event("go on")
        return "done"

    job_id = trees.enqueue("agent")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    with trio.fail_after(30):
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "done")
    assert ways == [[1, "late"], [2, "late"]]


async def _late() -> str:
    return "late"
