"""An act by filter is done to jobs that are still in the state that the filter names: a colleague may have acted on them since
they were found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pulse_trio import SyncClient, UsageError
from pulse_trio.store import history
from support.stores import Window, claim, end, open_store

if TYPE_CHECKING:
    from pulse_trio.store.filtering import JobFilter

CANCELLED: JobFilter = {"state": "cancelled", "queue": "default"}


def cancelled(dsn: str) -> tuple[SyncClient, list[int]]:
    client = SyncClient(dsn)
    ids = [client.enqueue("k", {"n": n}, queue="default").id for n in range(4)]
    client.cancel_many(ids)
    return client, ids


@pytest.mark.parametrize("afresh", [False, True])
async def test_jobs_that_somebody_has_retried_and_that_have_completed_are_not_run_again(
    dsn: str, *, afresh: bool
) -> None:
    client, ids = cancelled(dsn)
    found = client.run(history.chosen_for_action(CANCELLED))
    assert found == ids
    client.retry_many(state="cancelled", queue="default", limit=2)
    async with open_store(dsn) as store:
        await store.settle([end(one) for one in await claim(store)])
    done = client.run(history.retry_batch(found, chosen=CANCELLED, afresh=afresh))
    assert done.retried == ids[2:]
    assert done.refused == {
        job_id: f"Job {job_id} is not cancelled any more, or somebody acts on it at this moment: look again."
        for job_id in ids[:2]
    }
    states = [client.job(job_id).state for job_id in ids]
    assert states == ["completed"] * 2 + ["available"] * 2


def test_jobs_that_somebody_has_retried_and_that_wait_again_are_not_deleted(dsn: str) -> None:
    client, ids = cancelled(dsn)
    found = client.run(history.chosen_for_action(CANCELLED))
    client.retry(ids[0])
    done = client.run(history.delete_batch(found, chosen=CANCELLED))
    assert done.deleted == ids[1:]
    assert list(done.refused) == ids[:1]
    assert client.job(ids[0]).state == "available"
    # By their ids they are deleted whatever their state is, as long as they do not run.
    assert client.run(history.delete_batch(ids[:1])).deleted == ids[:1]


def test_jobs_that_are_being_acted_on_at_this_moment_are_left_alone(dsn: str, window: Window) -> None:
    client, ids = cancelled(dsn)
    with window.connection.transaction():
        window.run("SELECT FROM job_archive WHERE id = %s FOR UPDATE", ids[1])
        assert client.delete_many(state="cancelled", queue="default").deleted == [ids[0], *ids[2:]]
    assert client.job(ids[1]).state == "cancelled"


async def test_running_jobs_say_for_themselves_why_nothing_is_done(dsn: str) -> None:
    client = SyncClient(dsn)
    job_id = client.enqueue("k", queue="default").id
    async with open_store(dsn) as store:
        (running,) = await claim(store)
        done = client.delete_many(state="running", queue="default")
        assert "is running: cancel it first" in done.refused[job_id]
        await store.settle([end(running)])
    with pytest.raises(UsageError, match="which state"):
        client.delete_many(queue="default")
