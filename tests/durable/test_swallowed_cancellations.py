"""A handler that swallows the `Cancelled` of a plain await in a scope that has struck, and goes on as if that were over.

The first attempt went on; the next one stood in that await for ever, because the line of the scope says that it had cut nothing
short.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import ChildFailed, Discard, Job, SyncClient
from pulse_trio.worker.durable import swallowed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from support.trees import Trees


@contextmanager
def swallowing() -> Generator[None]:
    try:
        yield
    except trio.Cancelled:  # noqa: ASYNC103 -- what the test is about
        pass


async def in_a_body(job: Job, bad: Any) -> None:
    try:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(bad)
            with swallowing():
                await trio.sleep_forever()
    except* ChildFailed:
        pass


async def in_a_scope(job: Job, _: Any) -> None:
    with job.move_on_after(0.1), swallowing():
        await trio.sleep_forever()


async def in_a_scope_that_is_cancelled(job: Job, _: Any) -> None:
    with job.move_on_after(3600) as scope:
        scope.cancel()
        with swallowing():
            await trio.sleep_forever()


@pytest.mark.parametrize("lines_before", [0, 2])
@pytest.mark.parametrize("place", [in_a_body, in_a_scope, in_a_scope_that_is_cancelled])
async def test_a_handler_goes_on_in_the_next_attempt_too(
    trees: Trees, place: Callable[[Job, Any], Any], lines_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swallowed, "WITHIN", 0.2)
    done: list[str] = []

    async def note(what: str) -> None:
        done.append(what)

    @trees.handlers.job
    async def bad() -> None:
        raise Discard("no")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        for n in range(lines_before):
            await job.step(note, f"before {n}")
        await place(job, bad)
        await job.step(note, "after")
        return await job.wait_for_event("ok", type=str)

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst()
        SyncClient(trees.dsn).send_event(job_id, "ok", "good")
        await trees.burst()
    found = trees.job(job_id)
    assert (found["result"], found["error"]) == ("good", None)
    assert done == [f"before {n}" for n in range(lines_before)] + ["after"]
