"""A person cancels a durable job in the moment between its handler's end and the writing of its failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Discard, Handlers, Job, RetryAfter, Snooze, SyncClient
from pulse_trio.worker.durable import once_more

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.trees import Trees

FAILURES = {"error": OSError("down"), "retry-after": RetryAfter(60), "snooze": Snooze(60)}


@pytest.mark.parametrize("failure", FAILURES)
async def test_it_runs_once_more_and_undoes_what_it_has_done(trees: Trees, failure: str) -> None:
    """Nothing has told the handler. The job was cancelled as its failure was written, and owed nothing."""
    calls: list[str] = []

    async def act(what: str) -> None:
        calls.append(what)

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(act, "charge")
        try:
            if job.attempt == 1:
                # No beat tells the handler of it before it ends, and no notification.
                trees.window.run("SELECT cancel(%s)", job.id)
                raise FAILURES[failure]
            await job.wait_for_event("packed")
        except trio.Cancelled:
            with job.cleanup():
                await job.step(act, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    found = trees.job(job_id)
    assert (found["state"], found["attempt"], calls) == ("cancelled", 2, ["charge", "refund"])
    assert SyncClient(trees.dsn).job(job_id).cancel_reason == "user"


@pytest.mark.parametrize(("ends", "attempts"), [("raises", 1), ("Discard", 3), ("RetryAfter(afresh=True)", 3)])
@pytest.mark.parametrize("undo_fails", [False, True])
async def test_one_that_ends_for_good_does_what_of_its_compensation_has_failed(
    trees: Trees, ends: str, attempts: int, *, undo_fails: bool
) -> None:
    """It was cancelled, with a charge that was not refunded, and owed nothing."""
    calls: list[str] = []

    async def act(what: str) -> None:
        calls.append(what)

    async def undo(job: Job) -> None:
        if job.attempt == 1:
            trees.window.run("SELECT cancel(%s)", job.id)
            if undo_fails:
                raise OSError("down")
        calls.append("refund")

    async def ship(job: Job) -> None:
        if job.attempt == 1:
            raise ValueError("no box")

    @trees.handlers.job(durable=True, max_attempts=attempts)
    async def order(job: Job) -> None:
        await job.step(act, "charge")
        try:
            try:
                await job.step(ship, job)
            except Exception:
                with job.cleanup():
                    await job.step(undo, job)  # noqa: ASYNC120 -- job.cleanup() is the shield
                raise
        except Exception as error:
            if ends == "Discard":
                raise Discard("undone") from error
            if ends != "raises":
                raise RetryAfter(0, afresh=True) from error
            raise

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    (row,) = trees.window.run("SELECT owes_clean_up(%s) AS owes", job_id)
    if row["owes"]:
        SyncClient(trees.dsn).retry(job_id)
        await trees.burst(log=False)
        (row,) = trees.window.run("SELECT owes_clean_up(%s) AS owes", job_id)
    assert (trees.job(job_id)["state"], calls, row["owes"]) == ("cancelled", ["charge", "refund"], False)


async def test_one_that_gives_up_when_all_is_undone_owes_nothing(trees: Trees) -> None:
    """Another attempt need not fail of plain code: it would not come to the same."""
    calls: list[str] = []

    async def act(what: str) -> None:
        calls.append(what)

    @trees.handlers.job(durable=True, max_attempts=3)
    async def order(job: Job) -> None:
        await job.step(act, "charge")
        try:
            if job.attempt == 1:
                raise OSError("no connection")
            await job.step(act, "ship")
        except OSError as error:
            with job.cleanup():
                await job.step(act, "refund")  # noqa: ASYNC120 -- job.cleanup() is the shield
            trees.window.run("SELECT cancel(%s)", job.id)
            raise Discard("order failed") from error

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    (row,) = trees.window.run("SELECT owes_clean_up(%s) AS owes", job_id)
    assert (trees.job(job_id)["state"], calls, row["owes"]) == ("cancelled", ["charge", "refund"], False)


async def test_one_that_fails_whenever_it_runs_ends_all_the_same(trees: Trees) -> None:
    calls: list[str] = []

    async def act(what: str) -> None:
        calls.append(what)

    @trees.handlers.job(durable=True, max_attempts=50)
    async def order(job: Job) -> None:
        await job.step(act, "charge")
        trees.window.run("SELECT cancel(%s)", job.id)
        raise OSError("down")

    job_id = trees.enqueue("order")
    while trees.job(job_id)["finished_at"] is None:
        trees.again()
        await trees.burst(log=False)
    found = trees.job(job_id)
    assert (found["state"], found["attempt"], calls) == ("cancelled", 2 + once_more.MOST, ["charge"])
    (row,) = trees.window.run("SELECT owes_clean_up(%s) AS owes", job_id)
    assert row["owes"]


async def deadline(job: Job) -> None:
    with job.fail_after(0.05):
        await job.wait_for_event("packed")


async def no_event(job: Job) -> None:
    await job.wait_for_event("packed", timeout=0.05)


async def child(job: Job) -> None:
    async with job.durable_nursery(collect=True) as nursery:
        packing = nursery.start_soon(packs)
    assert packing.outcome is not None
    packing.outcome.unwrap()


async def nursery(_: Job) -> None:
    async def draws() -> None:
        raise OSError("down")

    async with trio.open_nursery() as tasks:
        tasks.start_soon(draws)


packing = Handlers()


@packing.job(max_attempts=1)
async def packs() -> None:
    raise ValueError("no box")


@pytest.mark.parametrize("fails", [deadline, no_event, child, nursery], ids=lambda way: way.__name__)
async def test_what_is_undone_already_is_not_owed(trees: Trees, fails: Callable[[Job], Awaitable[None]]) -> None:
    """What durable calls raise but no step has raised, and plain code in a nursery of Trio's. It ran eight times more, in half
    a minute, and owed its clean-up for ever."""
    calls: list[str] = []

    async def act(what: str) -> None:
        calls.append(what)

    trees.handlers.include(packing)

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(act, "charge")
        try:
            await fails(job)
        except Exception:
            with job.cleanup():
                await job.step(act, "refund")  # noqa: ASYNC120 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "retryable"
    SyncClient(trees.dsn).cancel(job_id)
    trees.again()
    await trees.burst(log=False)
    assert (trees.job(job_id)["state"], calls) == ("cancelled", ["charge", "refund"])
    (row,) = trees.window.run("SELECT owes_clean_up(%s) AS owes", job_id)
    assert not row["owes"]
