"""A handler gives up a durable child that is suspended and has a history: the child runs once more, to unwind.
`crash_points`, a worker on the virtual clock and `run_job` let it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Handlers, Job, Snooze, open_client
from pulse_trio.testing import crash_points, run_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio.testing import MockClock

    from pulse_trio.handlers import Handler
    from pulse_trio.testing import PulseClock, PulseWorker

pytestmark = pytest.mark.trio

handlers = Handlers()
done: list[str] = []
LONGEST = 150.0
"""Seconds for all points of a handler. They take 25 on a loaded machine; a point that does not end raises after 30."""


@pytest.fixture
def pulse_handlers() -> Handlers:
    return handlers


@pytest.fixture(autouse=True)
def nothing_done() -> Iterator[None]:
    done.clear()
    yield
    done.clear()


async def act(what: str) -> None:
    await trio.lowlevel.checkpoint()
    if what not in done:
        done.append(what)


@handlers.job(durable=True, max_attempts=5)
async def reservation(job: Job) -> None:
    await job.step(act, "reserved")
    try:
        await job.wait_for_event("paid")
    except BaseException:
        with job.cleanup():
            await job.step(act, "released")  # noqa: ASYNC102 -- job.cleanup() is a shield with a deadline
        raise


@handlers.job(max_attempts=1)
async def fails() -> None:
    raise ValueError("sibling")


@handlers.job(durable=True, max_attempts=5)
async def given_up_by_deadline(job: Job) -> str:
    with job.move_on_after(3600) as patience:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(reservation)
    return "given up" if patience.cancelled_caught else "in time"


@handlers.job(durable=True, max_attempts=5)
async def given_up_by_sibling(job: Job) -> str:
    try:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(reservation)
            await job.sleep(60)
            nursery.start_soon(fails)
    except ExceptionGroup:
        return "given up"
    return "in time"


@handlers.job(durable=True, max_attempts=5)
async def given_up_by_body(job: Job) -> str:
    try:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(reservation)
            await job.sleep(60)
            raise ValueError("body")
    except ExceptionGroup:
        return "given up"


@handlers.job(durable=True, max_attempts=1)
async def given_up_by_death(job: Job) -> str:
    async with job.durable_nursery() as nursery:
        nursery.start_soon(reservation)
        await job.sleep(60)
        await job.step(act, "slept")
        raise ValueError("body")
    return "in time"


WAYS = [
    pytest.param(given_up_by_deadline, id="deadline"),
    pytest.param(given_up_by_sibling, id="sibling"),
    pytest.param(given_up_by_body, id="body"),
]


@pytest.mark.parametrize("handler", WAYS)
async def test_a_child_that_is_given_up_unwinds_whichever_point_is_struck(
    handler: Handler[..., str], pulse_clock: PulseClock, pulse_dsn: str
) -> None:
    with trio.fail_after(LONGEST):
        async for run in crash_points(handler, dsn=pulse_dsn, handlers=handlers):
            assert (run.state, run.result, done) == ("completed", "given up", ["reserved", "released"]), run
            # Where the deadline has passed before a later attempt has come to its children, it may ask for them or not.
            assert run.reached or handler is given_up_by_deadline
            done.clear()


async def test_a_child_whose_parent_died_while_suspended_unwinds(pulse_clock: PulseClock, pulse_dsn: str) -> None:
    """The death ends the parent's only attempt, and nobody but a worker's look at its tree tells the child."""
    ends: list[tuple[str, ...]] = []
    with trio.fail_after(LONGEST):
        async for run in crash_points(given_up_by_death, dsn=pulse_dsn, handlers=handlers):
            assert run.state == "dead", run
            assert "released" in done or "reserved" not in done, run
            ends.append(tuple(done))
            done.clear()
    assert ("reserved", "slept", "released") in ends
    assert ("reserved", "released") in ends


@pytest.mark.parametrize("handler", WAYS)
async def test_a_worker_on_the_virtual_clock_lets_a_given_up_child_unwind(
    handler: Handler[..., str], pulse_clock: PulseClock, pulse_dsn: str, pulse_worker: PulseWorker
) -> None:
    async with open_client(pulse_dsn) as client:
        ref = await client.enqueue(handler)
        report = await pulse_worker.drain()
        assert report.suspended == {}
        assert (await client.job(ref.id)).result == "given up"
    assert done == ["reserved", "released"]


@pytest.mark.parametrize("handler", WAYS)
async def test_run_job_lets_a_given_up_child_unwind(handler: Handler[..., str], autojump_clock: MockClock) -> None:
    """The child was cancelled while it was suspended, and did not run any more."""
    run = await run_job(handler, handlers=handlers)
    assert (run.result, done) == ("given up", ["reserved", "released"])
    found = next(child for child in run.children if child.kind == "reservation")
    assert (found.state, found.error) == ("cancelled", "sibling" if handler is given_up_by_sibling else "parent")


@handlers.job(durable=True)
async def waiting(job: Job, how: str) -> None:
    """It may wait with the same below it."""
    await job.step(act, f"reserved for {how}")
    try:
        if how == "below":
            async with job.durable_nursery() as nursery:
                nursery.start_soon(waiting, "event")
        elif how == "event":
            await job.wait_for_event("paid")
        elif how == "event in time":
            await job.wait_for_event("paid", timeout=7200)
        elif how == "sleep":
            await job.sleep(7200)
        else:
            await trio.sleep_forever()
    except BaseException:
        with job.cleanup():
            await trio.sleep(0.01)  # noqa: ASYNC102 -- job.cleanup() is the shield
            await job.step(act, f"released for {how}: {job.cancel_reason}")  # noqa: ASYNC102 -- as above
        raise


@handlers.job(durable=True)
async def patient(job: Job, how: str) -> str:
    with job.move_on_after(3600) as scope:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(waiting, how)
    return "given up" if scope.cancelled_caught else "in time"


HOW = ("event", "event in time", "sleep", "plain", "below")


@pytest.mark.parametrize("cancelled", [False, True], ids=["by a deadline", "with its parent"])
@pytest.mark.parametrize("how", HOW)
async def test_a_child_undoes_what_it_did_in_run_job_however_it_waits(
    how: str, autojump_clock: MockClock, *, cancelled: bool
) -> None:
    run = await run_job(patient, how, handlers=handlers, cancel_after=60 if cancelled else None)
    assert (run.state, run.result) == (("cancelled", None) if cancelled else ("completed", "given up"))
    below = ["released for event: parent"] if how == "below" else []
    assert [what for what in done if "released" in what] == [*below, f"released for {how}: parent"]
    assert [(child.state, child.error) for child in run.children] == [("cancelled", "parent")]


async def test_a_child_that_run_job_has_not_begun_ends_at_once(autojump_clock: MockClock) -> None:
    @handlers.job(name="hasty", durable=True)
    async def hasty(job: Job) -> None:
        with trio.CancelScope() as scope:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(waiting, "event")
                await nursery.flush()
                scope.cancel()
        await job.step(act, "gone on")

    run = await run_job(hasty, handlers=handlers)
    assert (run.state, done) == ("completed", ["gone on"])
    assert [(child.state, child.error) for child in run.children] == [("cancelled", "parent")]


async def test_a_job_that_waits_and_has_done_nothing_ends_at_once_in_run_job(autojump_clock: MockClock) -> None:
    """It was suspended anew, and cancelled anew, for ever."""

    @handlers.job(name="only waits", durable=True)
    async def only_waits(job: Job) -> None:
        await job.wait_for_event("never")

    run = await run_job(only_waits, handlers=handlers, cancel_after=60)
    assert (run.outcome, run.state, run.error) == ("cancelled", "cancelled", "user")


async def test_a_parent_that_has_only_started_children_ends_at_once_in_run_job_as_in_production(
    autojump_clock: MockClock,
) -> None:
    """It has no history. Its clean-up ran in `run_job`, so a test passed of a handler that leaves the money out."""

    @handlers.job(name="only children", durable=True)
    async def only_children(job: Job) -> None:
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(waiting, "event")
        except BaseException:
            with job.cleanup():
                await job.step(act, "never")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    run = await run_job(only_children, handlers=handlers, cancel_after=60)
    assert (run.state, done) == ("cancelled", ["reserved for event", "released for event: parent"])
    assert [(child.state, child.error) for child in run.children] == [("cancelled", "parent")]


@pytest.mark.parametrize("ends", ["fails", "snoozes"])
async def test_a_childs_next_attempt_in_run_job_has_its_history(ends: str, autojump_clock: MockClock) -> None:
    """Its steps were called again in each of its attempts."""
    calls: list[str] = []

    async def call(what: str) -> None:
        calls.append(what)

    @handlers.job(name=f"ships and {ends}", durable=True)
    async def ships(job: Job) -> None:
        await job.step(call, "charge")
        if job.attempt == 1:
            raise OSError("down") if ends == "fails" else Snooze(1)
        await job.step(call, "ship")

    @handlers.job(name=f"starts what {ends}", durable=True)
    async def starts(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(ships)

    run = await run_job(starts, handlers=handlers)
    assert (run.state, run.children[0].state, calls) == ("completed", "completed", ["charge", "ship"])


async def test_a_job_that_is_cancelled_as_its_wait_ends_ends_in_run_job(autojump_clock: MockClock) -> None:
    """It was due, and no attempt had it: it was ended there, and `run_job` waited for its attempt."""

    @handlers.job(name="scoped", durable=True)
    async def scoped(job: Job) -> None:
        await job.step(act, "reserved")
        try:
            with job.move_on_after(35):
                await job.sleep(50)
            await job.sleep(50)
        except BaseException:
            with job.cleanup():
                await job.step(act, "released")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    run = await run_job(scoped, handlers=handlers, cancel_after=35)
    assert (run.state, run.error, done) == ("cancelled", "user", ["reserved", "released"])
