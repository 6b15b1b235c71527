"""A worker of 1.0.0rc1 takes a job over while both versions run: what it cannot know it tells, and a new worker goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from pulse_trio import Job, SyncClient
from pulse_trio.worker.durable import scopes
from pulse_trio.worker.durable.keys import Keys

if TYPE_CHECKING:
    import pytest

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
