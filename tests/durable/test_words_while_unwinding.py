"""What a durable handler raises while it unwinds for its suspension, or because its worker stops, says nothing about the job
where it comes from that: the next attempt stands where this one did. (A `Discard` was obeyed, and the job was dead.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Discard, Job, RetryAfter, Snooze, SyncClient
from support.trees import running_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.trees import Trees

WORDS: dict[str, Callable[[BaseException], BaseException]] = {
    "discard": lambda error: caused(Discard("no trip"), error),
    "discard, no cause": lambda _: Discard("no trip"),
    "afresh": lambda error: caused(RetryAfter(0, afresh=True), error),
    "snooze": lambda error: caused(Snooze(0), error),
    "failure": lambda error: caused(ValueError("no trip"), error),
    "group": lambda error: ExceptionGroup("no trip", [caused(Discard("no trip"), error)]),
}


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("undoes", [True, False])
@pytest.mark.parametrize("reason", ["suspended", "shutdown"])
@pytest.mark.parametrize("word", WORDS)
async def test_it_says_nothing(trees: Trees, word: str, reason: str, undoes: bool) -> None:
    """`undoes`: an inner level calls its refund, which is refused."""
    done: list[str] = []

    async def act(what: str) -> None:
        done.append(what)

    async def room(job: Job) -> None:
        try:
            await job.step(act, "charge")
            if reason == "shutdown" and job.attempt == 1:
                running = running_of(job)
                running.cancel("shutdown")
            await job.wait_for_event("go")
        except BaseException:
            if undoes:
                with job.cleanup():
                    await job.step(act, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    @trees.handlers.job(durable=True, max_attempts=2, suspend_after=0)
    async def trip(job: Job) -> str:
        try:
            await room(job)
        except BaseException as error:
            raise WORDS[word](error)  # noqa: ASYNC104, B904 -- what is tried
        return "ok"

    job_id = trees.enqueue("trip")
    await trees.burst(log=False)
    SyncClient(trees.dsn).send_event(job_id, "go")
    trees.again()
    await trees.burst(log=False)
    found = trees.job(job_id)
    assert (found["state"], found["result"], found["error"], done) == ("completed", "ok", None, ["charge"])
    failed = trees.window.run("SELECT 1 FROM attempts WHERE job_id = %s AND outcome IN ('failed', 'discarded')", job_id)
    assert failed == []


async def test_a_failure_of_its_own_is_one(trees: Trees) -> None:
    """A client that cannot be closed, say: that comes again."""

    @trees.handlers.job(durable=True, max_attempts=1, suspend_after=0)
    async def trip(job: Job) -> None:
        try:
            await job.wait_for_event("go")
        finally:
            raise OSError("no connection")

    job_id = trees.enqueue("trip")
    with trio.fail_after(10):
        await trees.burst(log=False)
    assert "no connection" in trees.job(job_id)["error"]
