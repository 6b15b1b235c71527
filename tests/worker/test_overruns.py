"""Handlers that do not end when they are cancelled, in virtual time: found, named, and the worker gives up its place."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import trio

from pulse_trio import HandlerStuck, Job
from pulse_trio.observe import HandlerOverran
from pulse_trio.testing.memory import unavailable

if TYPE_CHECKING:
    from pulse_trio.jobs import Outcome
    from support.stage import Stage

CLEANUP = 2.0


class Replaced(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def release(stage: Stage) -> trio.Event:
    """Ends the handler "stuck", which nothing else does; "patient" ends when it is told to."""
    release = trio.Event()

    @stage.handlers.job
    async def stuck() -> str:
        with trio.CancelScope(shield=True):
            await release.wait()
        return "as if nothing had been"

    @stage.handlers.job
    async def patient(job: Job) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with job.cleanup():
                await trio.sleep(CLEANUP - 0.1)  # noqa: ASYNC102 -- what is tried

    return release


async def let_go(release: trio.Event) -> None:
    """The fake process does not end its tasks with itself: they end some time after it would have."""
    await trio.sleep(60)
    release.set()


async def replaced(stage: Stage, **settings: Any) -> tuple[float, list[Outcome]]:
    """Runs a worker until it would be replaced; when, and what it leaves to report."""
    left: list[Outcome] = []
    when = 0.0

    def on_stuck(outcomes: list[Outcome]) -> NoReturn:
        nonlocal when
        when = trio.current_time()
        left.extend(outcomes)
        raise Replaced

    with pytest.RaisesGroup(Replaced, flatten_subgroups=True):
        await stage.worker(cleanup=CLEANUP, grace=1000.0, on_stuck=on_stuck, **settings).run()
    return when, left


async def test_a_stuck_handler_is_named_and_everything_else_is_handed_back_first(
    stage: Stage, release: trio.Event
) -> None:
    stuck = stage.enqueue("stuck", timeout=5)
    others = [stage.enqueue("patient") for _ in range(3)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(let_go, release)
        when, left = await replaced(stage)
    (event,) = stage.events.of(HandlerOverran)
    assert (event.job_id, event.kind, event.attempt, event.reason) == (stuck, "stuck", 1, "timeout")
    assert ", in stuck" in event.stack
    (told,) = stage.events.when(HandlerOverran)
    began = 0.0
    assert 5 + CLEANUP + 1 <= told - began <= 5 + (CLEANUP + 1) * 1.5 + 0.1
    assert when - told <= CLEANUP + 1
    jobs = [stage.database.jobs[i] for i in others]
    assert [(j.state, j.failures, j.max_attempts) for j in jobs] == [("available", 0, 21)] * 3
    (outcome,) = left
    assert (outcome.claim.id, outcome.kind) == (stuck, "timeout")
    assert outcome.error is not None
    assert outcome.error.startswith("HandlerStuck: did not end within")


async def test_a_stuck_job_is_never_reported_complete(stage: Stage, release: trio.Event) -> None:
    stuck = stage.enqueue("stuck", timeout=5, max_attempts=1)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def embedding() -> None:
            with pytest.raises(HandlerStuck, match=rf"job {stuck} \(stuck\)"):
                await stage.worker(cleanup=CLEANUP).run()

        await trio.sleep(100)
        # A program that embeds a worker is told by the event; the lease is kept as long as the handler runs.
        assert len(stage.events.of(HandlerOverran)) == 1
        job = stage.database.jobs[stuck]
        assert job.state == "running"
        assert job.lease_until > trio.current_time()
        release.set()
    assert job.state == "dead"
    assert stage.outcomes() == ["timeout"]
    assert (job.error or "").startswith("HandlerStuck")


async def test_the_successor_reports_what_was_left(stage: Stage, release: trio.Event) -> None:
    stuck = stage.enqueue("stuck", timeout=5, max_attempts=1)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def let_go() -> None:
            await trio.sleep(60)
            release.set()
            stage.store.settled.clear()

        _, left = await replaced(stage)
    job = stage.database.jobs[stuck]
    if job.finished is None:
        from pulse_trio.testing.memory import MemoryStore

        assert job.lease_until < trio.current_time()
        await stage.worker(MemoryStore(stage.database), stuck=left, burst=True).run()
    assert job.state == "dead"
    # Its lease has run out, and the successor does not take it for a dead worker's job.
    assert (job.error or "").startswith("HandlerStuck")


async def test_a_stuck_handler_whose_fence_is_lost_is_found_and_has_nothing_to_report(
    stage: Stage, release: trio.Event
) -> None:
    job_id = stage.enqueue("stuck")
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def take_it_over() -> None:
            await trio.sleep(5)
            stage.database.steal(job_id)

        nursery.start_soon(let_go, release)
        when, left = await replaced(stage)
    assert [event.reason for event in stage.events.of(HandlerOverran)] == ["fence-lost"]
    # Found at the beat after it was taken over.
    assert 10 <= when <= 10 + CLEANUP + 10
    assert left == []


async def test_a_handler_that_hangs_after_its_commit_is_found_and_has_nothing_to_report(
    stage: Stage, release: trio.Event
) -> None:
    @stage.handlers.job
    async def paid(job: Job) -> None:
        async with job.transaction():
            pass
        with trio.CancelScope(shield=True):
            await release.wait()

    job_id = stage.enqueue("paid", timeout=5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(let_go, release)
        _, left = await replaced(stage)
    assert [event.reason for event in stage.events.of(HandlerOverran)] == ["timeout"]
    assert left == []
    assert stage.database.state(job_id) == "completed"


async def test_a_handler_that_waits_for_the_answer_to_its_commit_is_not_taken_for_stuck(stage: Stage) -> None:
    """A timeout struck while nobody could ask whether the commit was done: the worker was replaced, and all its other jobs
    were cancelled, for a handler that could not end."""

    @stage.handlers.job
    async def pay(job: Job) -> None:
        async with job.transaction() as tx:
            await tx.execute("paid")

    @stage.handlers.job
    async def beside() -> None:
        await trio.sleep(25)

    stage.store.silence["commit"] = unavailable
    stage.store.trouble["committed"] = unavailable
    stage.enqueue("pay", timeout=5)
    other = stage.enqueue("beside")
    async with stage.working(cleanup=CLEANUP):
        await trio.sleep(20)
        stage.store.trouble.clear()
        await trio.sleep(10)
    assert stage.events.of(HandlerOverran) == []
    assert (stage.database.jobs[other].state, stage.database.jobs[other].attempt) == ("completed", 1)
    assert stage.database.ledger == ["paid"]


async def test_clean_up_within_its_time_is_no_overrun(stage: Stage, release: trio.Event) -> None:
    stage.enqueue("patient", timeout=5)
    with trio.move_on_after(12):
        await stage.worker(cleanup=CLEANUP).run()
    assert stage.events.of(HandlerOverran) == []
    assert "timeout" in stage.outcomes()


async def test_a_shutdown_too_finds_who_does_not_end(stage: Stage, release: trio.Event) -> None:
    stage.enqueue("stuck")
    worker = stage.worker(cleanup=CLEANUP, grace=1.0)

    async def stop() -> None:
        await trio.sleep(1)
        worker.stop()
        await trio.sleep(20)
        release.set()

    with pytest.RaisesGroup(HandlerStuck):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            nursery.start_soon(stop)
    assert [event.reason for event in stage.events.of(HandlerOverran)] == ["shutdown"]
    assert stage.outcomes() == ["released"]


@pytest.mark.real_clock  # a virtual clock jumps while the thread runs
async def test_a_middleware_around_a_thread_that_does_not_end_is_noticed_when_the_thread_has_ended(
    stage: Stage,
) -> None:
    """Handlers in threads are left out, and what was around one held its job for ever, unseen."""
    begun, thread_may_end = threading.Event(), threading.Event()
    stuck_may_end = trio.Event()

    @stage.handlers.middleware
    async def around(job: Job, call: Any) -> Any:
        with trio.CancelScope(shield=True):
            value = await call()
            await stuck_may_end.wait()
        return value

    @stage.handlers.job
    def work() -> None:
        begun.set()
        thread_may_end.wait()

    stage.enqueue("work")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            worker = stage.worker(cleanup=0.1)

            @nursery.start_soon
            async def run() -> None:
                with pytest.raises(HandlerStuck):
                    await worker.run()

            await trio.to_thread.run_sync(begun.wait)
            worker.stop_now()
            # Longer than the middleware has: the thread's time is not its.
            await trio.sleep(2)
            assert stage.events.of(HandlerOverran) == []
            thread_may_end.set()
            await stage.events.first(HandlerOverran)
            stuck_may_end.set()
    (overran,) = stage.events.of(HandlerOverran)
    assert "stuck_may_end.wait()" in overran.stack


@pytest.mark.real_clock  # as above
@pytest.mark.parametrize("how", ["its timeout", "a person"])
async def test_a_stop_leaves_every_thread_also_one_that_was_cancelled_before(how: str, stage: Stage) -> None:
    """Both were left without a word, and rescued as those of a worker that had crashed."""
    begun, cancelled, may_end = threading.Event(), threading.Event(), threading.Event()

    @stage.handlers.job
    def cut(job: Job) -> None:
        while job.cancel_reason is None:
            may_end.wait(0.01)
        cancelled.set()
        may_end.wait()

    @stage.handlers.job
    def healthy() -> None:
        begun.set()
        may_end.wait()

    first = stage.enqueue("cut", timeout=0.01 if how == "its timeout" else None)
    second = stage.enqueue("healthy")
    left: list[Outcome] = []

    def on_stuck(outcomes: list[Outcome]) -> NoReturn:
        left.extend(outcomes)
        may_end.set()
        raise Replaced

    worker = stage.worker(cleanup=0.1, grace=0.0, on_stuck=on_stuck)

    async def stop() -> None:
        await trio.to_thread.run_sync(begun.wait)
        if how == "a person":
            stage.database.cancel(first)
        await trio.to_thread.run_sync(cancelled.wait)
        assert stage.events.of(HandlerOverran) == []
        worker.stop()

    with trio.fail_after(30), pytest.RaisesGroup(Replaced, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            nursery.start_soon(stop)
    assert {outcome.claim.id: outcome.kind for outcome in left} == {
        first: "timeout" if how == "its timeout" else "cancelled",
        second: "released",
    }
    assert {event.reason for event in stage.events.of(HandlerOverran)} == {"shutdown"}
