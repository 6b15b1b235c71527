"""What operators do to durable jobs and their trees, told by what they leave: an act that is refused changes nothing, and one
that ends a job at once ends what it has started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import InvalidTransition, Job, SyncClient
from pulse_trio.store import family, history

if TYPE_CHECKING:
    from support.trees import Trees


@pytest.mark.parametrize("ends", ["dead", "cancelled"])
@pytest.mark.parametrize("many", [False, True], ids=["one", "by its id among others"])
async def test_a_refused_retry_from_the_beginning_forgets_nothing(trees: Trees, ends: str, *, many: bool) -> None:
    """Its unique key was in use. Its history was gone all the same, and a plain retry charged again; the clean-up that a
    cancelled job owed was not known any more."""
    book: list[str] = []
    down = {"ship", "refund"}
    client = SyncClient(trees.dsn)

    async def act(what: str) -> None:
        if what in down:
            raise OSError(f"{what} is down")
        book.append(what)

    @trees.handlers.job(durable=True, max_attempts=1, suspend_after=0)
    async def order(job: Job) -> None:
        await job.step(act, "charge")
        try:
            if ends == "cancelled":
                await job.wait_for_event("shipped")
            await job.step(act, "ship")
        except BaseException:
            if ends == "cancelled":
                with job.cleanup():
                    await job.step(act, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order", unique_key="42")
    await trees.burst(log=False)
    if ends == "cancelled":
        client.cancel(job_id)
        await trees.burst(log=False)
    assert (trees.job(job_id)["state"], book) == (ends, ["charge"])
    owes, lines = trees.window.do(family.unfinished_clean_ups([job_id])), trees.lines(job_id)
    assert owes == ([job_id] if ends == "cancelled" else [])
    other = trees.enqueue("order", unique_key="42", delay=3600)

    if many:
        assert list(trees.window.do(history.retry_batch([job_id], afresh=True)).refused) == [job_id]
    else:
        with pytest.raises(InvalidTransition, match=f"the live job {other} on that queue has the same unique key"):
            client.retry(job_id, afresh=True)
    assert trees.lines(job_id) == lines
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == owes

    client.cancel(other)
    down.clear()
    client.retry(job_id, afresh=ends == "dead" and many)
    await trees.burst(log=False)
    if ends == "cancelled":
        assert (trees.job(job_id)["state"], book) == ("cancelled", ["charge", "refund"])
    else:
        assert (trees.job(job_id)["state"], book) == ("completed", ["charge", *["charge"] * many, "ship"])


async def test_a_tree_that_is_cancelled_now_ends_as_a_whole_and_undoes_nothing(trees: Trees) -> None:
    """Its members compensated while the root did not, and held it up for as long as nothing served their queue."""
    book: list[str] = []
    client = SyncClient(trees.dsn)

    async def act(what: str) -> None:
        book.append(what)

    async def waits(job: Job, what: str) -> None:
        await job.step(act, what)
        try:
            await job.wait_for_event("go")
        except BaseException:
            with job.cleanup():
                await job.step(act, f"undo {what}")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    @trees.handlers.job(durable=True, suspend_after=0, queue="leaves")
    async def leaf(job: Job) -> None:
        await waits(job, "leaf")

    @trees.handlers.job(queue="never")
    async def plain() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def branch(job: Job) -> None:
        await job.step(act, "branch")
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(leaf)
                nursery.start_soon(plain)
        except BaseException:
            with job.cleanup():
                await job.step(act, "undo branch")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    @trees.handlers.job(durable=True, suspend_after=0)
    async def root(job: Job) -> None:
        await job.step(act, "root")
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(branch)
        except BaseException:
            with job.cleanup():
                await job.step(act, "undo root")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("root")
    for _ in range(3):
        await trees.burst(log=False, queues=["default", "leaves"])
    assert sorted(book) == ["branch", "leaf", "root"]
    assert client.cancel(job_id, now=True).state == "cancelled"
    tree = client.tree(job_id)
    assert [(job.state, job.cancel_reason) for job in tree] == [("cancelled", "user"), *[("cancelled", "parent")] * 3]
    assert trees.window.do(family.unfinished_clean_ups([job.id for job in tree])) == []
    await trees.burst(log=False, queues=["default", "leaves"])
    assert sorted(book) == ["branch", "leaf", "root"]
    ended = trees.window.run("SELECT count(*) AS all, count(ended_at) AS ended FROM cancellation")
    assert ended == [{"all": 4, "ended": 4}]


async def test_what_an_ordinary_cancellation_has_left_is_ended_by_the_second_one_that_is_to_end_it_now(
    trees: Trees,
) -> None:
    """The root waited for a member that nothing served, and the second call changed nothing."""
    client = SyncClient(trees.dsn)

    @trees.handlers.job(durable=True, suspend_after=0, queue="leaves")
    async def leaf(job: Job) -> None:
        await job.step(note)
        await job.wait_for_event("go")

    async def note() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def root(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(leaf)

    job_id = trees.enqueue("root")
    for _ in range(2):
        await trees.burst(log=False, queues=["default", "leaves"])
    client.cancel(job_id)
    for _ in range(2):
        await trees.burst(log=False, queues=["default"])
    assert trees.job(job_id)["state"] == "suspended"
    client.cancel(job_id, now=True)
    await trees.burst(log=False, queues=["default"])
    assert [job.state for job in client.tree(job_id)] == ["cancelled", "cancelled"]


@pytest.mark.parametrize("crashes", [0, 4, 7])
async def test_a_job_that_is_cancelled_after_crashes_and_right_before_another_undoes_what_it_did(
    trees: Trees, crashes: int
) -> None:
    """After four it ended as cancelled, untold: nothing was undone or owed, and a retry let it go on."""
    book: list[str] = []
    client = SyncClient(trees.dsn)

    async def act(what: str) -> None:
        book.append(what)

    @trees.handlers.job(durable=True, max_attempts=20)
    async def order(job: Job) -> None:
        await job.step(act, "charge")
        try:
            if job.attempt <= crashes:
                await trees.lose(job.id)
            elif job.attempt == crashes + 1:
                client.cancel(job.id)
                await trees.lose(job.id)
            await trio.sleep_forever()
        except BaseException:
            with job.cleanup():
                await job.step(act, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst(log=False, watchdog=5, lease=3, heartbeat=0.3)
    assert (trees.job(job_id)["state"], book) == ("cancelled", ["charge", "refund"])
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == []
