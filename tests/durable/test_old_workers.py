"""A worker of 1.0.0rc1 takes a job over while both versions run: what it cannot know it tells, and a new worker goes on."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Discard, Job, Snooze, SyncClient
from pulse_trio.store import family
from pulse_trio.worker.durable import cancelling, scopes
from pulse_trio.worker.durable.keys import Keys

if TYPE_CHECKING:
    from support.trees import Trees


async def test_after_a_scope_that_was_cut_short_it_tells_a_mismatch_and_a_retry_by_a_new_worker_goes_on(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    async def note(what: str) -> None:
        calls.append(what)

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        with job.move_on_after(3600):
            if job.attempt > 1:
                await trio.sleep_forever()  # it does not come to the sleep that the first attempt has begun
            await job.sleep(7200)
        await job.step(note, "refund")
        if job.attempt < 4:
            raise ConnectionError("for now")
        return "refunded"

    async def attempt() -> str:
        trees.again()
        with trio.fail_after(60):
            await trees.burst(log=False)
        return trees.job(job_id)["state"]

    job_id = trees.enqueue("order")
    monkeypatch.setattr(scopes, "REOPENED_WITHIN", 0.0)
    assert await attempt() == "suspended"
    trees.window.run(
        "UPDATE history SET value = to_json(extract(epoch FROM now())::float8) WHERE job_id = %s AND key = '1:scope'",
        job_id,
    )
    assert await attempt() == "retryable"
    with monkeypatch.context() as old:
        old.setattr(Keys, "go_on_after", lambda _, __: None)
        assert await attempt() == "dead"
    assert "ReplayMismatch" in trees.job(job_id)["error"]
    SyncClient(trees.dsn).retry(job_id)
    assert await attempt() == "completed"
    assert calls == ["refund"]


@pytest.mark.parametrize("around", ["", "a key", "a scope"])
@pytest.mark.parametrize("lost_in", ["the first step", "the second step"])
async def test_what_it_has_cancelled_in_a_plain_await_is_cancelled_there_again(
    lost_in: str, around: str, trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line says nothing of that await, and it was lost while it compensated. The new worker does the rest, once."""
    monkeypatch.setattr(cancelling, "_LONGEST", 0.5)
    calls: list[str] = []
    stands, key = trio.Event(), "first" if around == "a key" else None

    async def note(what: str) -> None:
        calls.append(what)
        if what == lost_in and calls.count(what) == 1:
            old_line = '{"at": [], "reason": "user"}'
            trees.window.run("UPDATE history SET value = %s WHERE job_id = %s AND kind = 9", old_line, job_id)
            await trees.lose(job_id)
            await trio.sleep_forever()  # as a killed process does no more

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(note, "charge")
        await trio.lowlevel.checkpoint()
        with job.move_on_after(3600) if around == "a scope" else nullcontext():
            try:
                stands.set()
                await trio.sleep_forever()
            finally:
                with job.cleanup():
                    await job.step(note, "the first step", key=key)  # noqa: ASYNC102 -- job.cleanup() is the shield
                    await job.step(note, "the second step")  # noqa: ASYNC102 -- the same

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        async with trio.open_nursery() as old:
            old.start_soon(partial(trees.burst, cleanup=0.5))
            await stands.wait()
            await trio.to_thread.run_sync(SyncClient(trees.dsn).cancel, job_id)
        while trees.job(job_id)["finished_at"] is None:
            trees.again()
            await trees.burst()
    assert (trees.job(job_id)["state"], trees.job(job_id)["error"]) == ("cancelled", None)
    again = ["the first step"] * (lost_in == "the first step")
    assert calls == ["charge", *again, "the first step", "the second step", *["the second step"] * (not again)]
    assert trees.window.do(family.compensated([job_id])) == [job_id]


async def test_a_body_that_a_childs_failure_cut_in_a_plain_await_is_cut_there_again(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancelling, "_LONGEST", 0.5)
    calls: list[str] = []

    async def note(what: str) -> None:
        calls.append(what)
        if calls == ["undo", "close"]:
            old_line = '{"at": [], "reason": ""}'
            trees.window.run("UPDATE history SET value = %s WHERE job_id = %s AND kind = 8", old_line, job_id)
            await trees.lose(job_id)
            await trio.sleep_forever()  # as a killed process does no more

    @trees.handlers.job
    async def child() -> None:
        raise Discard("at once")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(child)
                await nursery.flush()
                await trio.lowlevel.checkpoint()
                try:
                    await trio.sleep_forever()
                finally:
                    with job.cleanup():
                        await job.step(note, "undo")  # noqa: ASYNC102 -- job.cleanup() is the shield
                        await job.step(note, "close")  # noqa: ASYNC102 -- the same
        except ExceptionGroup:
            await job.step(note, "tell")
        return "told"

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst(cleanup=0.5)
            trees.again()
    assert (trees.job(job_id)["state"], trees.job(job_id)["result"]) == ("completed", "told")
    assert calls == ["undo", "close", "close", "tell"]


async def test_a_body_that_snoozed_under_it_does_its_work_in_the_next_attempt(trees: Trees) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        async with job.durable_nursery():
            if job.attempt == 1:
                raise Snooze(3600)
        return "done"

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        await trees.burst()
        assert trees.job(job_id)["state"] == "scheduled"
        trees.window.run("UPDATE session SET marks = NULL")
        trees.window.run("DELETE FROM history WHERE job_id = %s AND kind = 10", job_id)
        trees.again()
        await trees.burst()
    assert (trees.job(job_id)["state"], trees.job(job_id)["result"]) == ("completed", "done")
