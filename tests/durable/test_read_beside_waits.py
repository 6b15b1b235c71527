"""A handler reads the end of a child right after the result of a step, while another task begins to wait for an event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from pulse_trio import Job, SyncClient

if TYPE_CHECKING:
    from support.trees import Trees


async def test_an_end_that_was_read_after_a_step_is_read_after_it_again(trees: Trees) -> None:
    """A wait that came while the step's line was being written hid that its task had gone on: the end counted as one that was
    read before the step, and a later attempt read it there."""
    gate, begun = trio.Event(), trio.Event()
    read: dict[int, list[list[str]]] = {}
    children: list[Any] = []

    @trees.handlers.job
    async def child(waits: bool) -> None:
        if waits:
            await gate.wait()

    async def note(ended: list[str]) -> list[str]:
        gate.set()
        while not children[1].has_ended:  # noqa: ASYNC110 -- to read its state would be remembered
            await trio.sleep(0.001)
        begun.set()
        return ended

    async def note_again(ended: list[str]) -> list[str]:
        return ended

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        mine = read[job.attempt] = []

        async def waits() -> None:
            await begun.wait()
            await job.wait_for_event("go", key="go")

        async with trio.open_nursery() as tasks:
            tasks.start_soon(waits)
            async with job.durable_nursery(key="block", collect=True) as block:
                one, other = (block.start_soon(child.options(child_key=str(late)), late) for late in (False, True))
                children[:] = one, other
                while not (ended := [it.key for it in (one, other) if it.outcome]):  # noqa: ASYNC110 -- as a user writes it
                    await trio.sleep(0.001)
                mine.append(ended)
                await job.step(note, ended, key="first")
                mine.append([it.key for it in (one, other) if it.outcome])
                await job.step(note_again, mine[-1], key="second")

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst(log=False)
        SyncClient(trees.dsn).send_event(job_id, "go")
        await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "completed"
    assert read == {1: [["False"], ["False", "True"]], 2: [["False"], ["False", "True"]]}
