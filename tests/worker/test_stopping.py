"""Every way a worker ends, and what its jobs see of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import DatabaseUnavailable, Job, SchemaError, Worker
from pulse_trio.observe import WorkerStarted, WorkerStopped
from pulse_trio.testing.memory import MemoryStore, unavailable

if TYPE_CHECKING:
    from support.stage import Recorder, Stage


@pytest.fixture
def seen() -> list[Any]:
    return []


@pytest.fixture
def sleeper(stage: Stage, seen: list[Any]) -> Stage:
    """A stage with a handler `sleeper(seconds)` that says why it was cancelled."""

    @stage.handlers.job
    async def sleeper(job: Job, seconds: float) -> None:
        try:
            await trio.sleep(seconds)
        except trio.Cancelled:
            seen.append(job.cancel_reason)
            raise
        seen.append("end")

    return stage


def claims_after(stage: Stage, job_ids: list[int]) -> bool:
    return any(stage.database.jobs[i].attempt for i in job_ids)


# stop()


async def test_stop_claims_nothing_more_and_waits_for_what_runs(sleeper: Stage, seen: list[Any]) -> None:
    running = sleeper.enqueue("sleeper", seconds=20)
    async with sleeper.working(concurrency=1) as worker:
        await trio.sleep(1)
        worker.stop()
        waiting = sleeper.enqueue("sleeper", seconds=1)
        await trio.sleep(30)
    assert seen == ["end"]
    assert sleeper.database.state(running) == "completed"
    assert not claims_after(sleeper, [waiting])


async def test_beats_go_on_to_the_last_job(sleeper: Stage) -> None:
    sleeper.enqueue("sleeper", seconds=95)
    async with sleeper.working(grace=200) as worker:
        await trio.sleep(1)
        worker.stop()
    assert len(sleeper.store.sent_beats) == 9
    assert sleeper.outcomes() == ["completed"]
    assert sleeper.store.draining


async def test_after_the_grace_what_is_left_is_cancelled_with_shutdown_and_released(
    sleeper: Stage, seen: list[Any], events: Recorder
) -> None:
    long, short = sleeper.enqueue("sleeper", seconds=1000), sleeper.enqueue("sleeper", seconds=5)
    worker = sleeper.worker(grace=7)
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        await trio.sleep(1)
        worker.stop()
        stopped = trio.current_time()
    assert seen == ["end", "shutdown"]
    assert trio.current_time() - stopped == pytest.approx(7, abs=0.2)
    assert sleeper.database.state(short) == "completed"
    job = sleeper.database.jobs[long]
    assert (job.state, job.failures, job.attempt, job.max_attempts) == ("available", 0, 1, 21)
    assert events.of(WorkerStopped) == [WorkerStopped(1)]


async def test_a_grace_of_nothing_cancels_at_once(sleeper: Stage, seen: list[Any]) -> None:
    sleeper.enqueue("sleeper", seconds=1000)
    async with sleeper.working(grace=0) as worker:
        await trio.sleep(1)
        worker.stop()
    assert seen == ["shutdown"]


async def test_stop_now_cuts_the_grace_short(sleeper: Stage, seen: list[Any]) -> None:
    sleeper.enqueue("sleeper", seconds=1000)
    began = trio.current_time()
    async with sleeper.working(grace=500) as worker:
        await trio.sleep(1)
        worker.stop()
        await trio.sleep(3)
        assert seen == []
        worker.stop_now()
    assert seen == ["shutdown"]
    assert trio.current_time() - began == pytest.approx(4, abs=0.2)
    assert sleeper.outcomes() == ["released"]


async def test_stop_now_alone_is_enough(sleeper: Stage, seen: list[Any]) -> None:
    job_id = sleeper.enqueue("sleeper", seconds=1000)
    async with sleeper.working() as worker:
        await trio.sleep(1)
        worker.stop_now()
    assert seen == ["shutdown"]
    assert sleeper.database.state(job_id) == "available"


async def test_who_is_quiet_before_it_begins_asks_for_no_job_at_all(sleeper: Stage) -> None:
    waiting = sleeper.enqueue("sleeper", seconds=1)
    worker = sleeper.worker()
    worker.quiet()
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        await trio.sleep(30)
        worker.stop()
    assert not {"sweep", "complete_and_claim"} & set(sleeper.store.calls)
    assert not claims_after(sleeper, [waiting])


async def test_quiet_claims_nothing_more_and_runs_on_without_a_limit(sleeper: Stage, seen: list[Any]) -> None:
    sleeper.enqueue("sleeper", seconds=1000)
    async with sleeper.working(grace=1) as worker:
        await trio.sleep(1)
        worker.quiet()
        waiting = sleeper.enqueue("sleeper", seconds=1)
        await trio.sleep(1100)
        assert seen == ["end"]
        assert worker.running == 0
    assert not claims_after(sleeper, [waiting])


async def test_stopping_twice_and_in_any_order_is_stopping_once(sleeper: Stage) -> None:
    sleeper.enqueue("sleeper", seconds=3)
    async with sleeper.working() as worker:
        await trio.sleep(1)
        for ask in (worker.quiet, worker.stop, worker.quiet, worker.stop, worker.stop_now, worker.stop_now):
            ask()
    assert sleeper.outcomes() == ["released"]


@pytest.mark.parametrize("steps", range(40))
async def test_a_worker_stopped_at_any_moment_of_its_start_leaves_no_job_behind(steps: int, sleeper: Stage) -> None:
    job_id = sleeper.enqueue("sleeper", seconds=0.5)
    worker = sleeper.worker(grace=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        worker.stop()
    assert sleeper.database.state(job_id) in ("available", "completed")


async def test_a_worker_stopped_before_it_runs_claims_nothing(sleeper: Stage) -> None:
    job_id = sleeper.enqueue("sleeper", seconds=0)
    worker = sleeper.worker()
    worker.stop()
    report = await worker.run()
    assert (report.ended, report.released) == ({}, 0)
    assert sleeper.database.jobs[job_id].attempt == 0


async def test_a_job_that_fails_while_it_is_shut_down_has_failed(stage: Stage) -> None:
    @stage.handlers.job
    async def clumsy() -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            raise ValueError("on the way out") from None  # noqa: ASYNC104 -- what is raised instead is the test

    job_id = stage.enqueue("clumsy")
    async with stage.working() as worker:
        await trio.sleep(1)
        worker.stop_now()
    assert stage.outcomes() == ["failed"]
    assert stage.database.jobs[job_id].failures == 1


async def test_cleanup_has_its_time_and_its_lease_during_a_shutdown(stage: Stage, seen: list[Any]) -> None:
    @stage.handlers.job
    async def tidy(job: Job) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with job.cleanup():
                seen.append(job.cancel_reason)
                await trio.sleep(4)  # noqa: ASYNC102 -- job.cleanup() is the shield
                seen.append(stage.database.state(job.id))

    job_id = stage.enqueue("tidy")
    async with stage.working() as worker:
        await trio.sleep(8)
        worker.stop_now()
    assert seen == ["shutdown", "running"]
    assert len(stage.store.sent_beats) == 1
    assert stage.database.state(job_id) == "available"


async def test_the_report_counts_what_a_worker_did(stage: Stage) -> None:
    @stage.handlers.job
    async def good() -> None: ...

    @stage.handlers.job
    async def bad() -> None:
        raise ValueError

    @stage.handlers.job
    async def slow() -> None:
        await trio.sleep_forever()

    for kind in ("good", "good", "bad", "slow"):
        stage.enqueue(kind, max_attempts=1)
    worker = stage.worker(grace=2)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                report = await worker.run()
                assert report.ended == {"completed": 2, "failed": 1, "released": 1}
                assert report.released == 1
                scope.cancel()

            await nursery.start(lambda task_status: _start(worker, nursery, run, task_status))
            await trio.sleep(1)
            worker.stop()
            await trio.sleep_forever()


async def _start(worker: Worker, nursery: trio.Nursery, run: Any, task_status: Any) -> None:
    nursery.start_soon(run)
    task_status.started()


# The end of the session


async def test_a_stopped_worker_says_goodbye_and_closes_its_store(sleeper: Stage, events: Recorder) -> None:
    async with sleeper.working():
        await trio.sleep(1)
        assert sleeper.database.sessions == {sleeper.store.session: True}
    assert sleeper.database.sessions == {sleeper.store.session: False}
    assert sleeper.store.closed
    assert events.of(WorkerStarted) == [WorkerStarted(sleeper.store.session, None, 100)]


async def test_reports_are_written_before_the_goodbye(sleeper: Stage) -> None:
    sleeper.enqueue("sleeper", seconds=3)

    async def slow() -> None:
        await trio.sleep(2)

    sleeper.store.trouble["settle"] = slow
    async with sleeper.working() as worker:
        await trio.sleep(1)
        worker.stop()
    assert sleeper.outcomes() == ["completed"]
    assert sleeper.store.calls.index("end_sessions") > max(
        i for i, call in enumerate(sleeper.store.calls) if call in ("settle", "complete_and_claim", "beat")
    )


@pytest.mark.parametrize("stop", ["stop", "stop_now"])
async def test_a_database_that_is_gone_holds_a_stopping_worker_for_a_bounded_time(stop: str, sleeper: Stage) -> None:
    sleeper.enqueue("sleeper", seconds=3)
    worker = sleeper.worker()
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        await trio.sleep(1)
        for operation in ("complete_and_claim", "settle", "beat", "touch", "end_sessions", "rescue"):
            sleeper.store.trouble[operation] = unavailable
        getattr(worker, stop)()
        stopped = trio.current_time()
    assert trio.current_time() - stopped <= 3 + 31


async def test_a_start_without_the_schema_raises_and_closes_the_store(sleeper: Stage) -> None:
    async def missing() -> None:
        raise SchemaError("no schema")

    sleeper.store.trouble["check_schema"] = missing
    with pytest.raises(SchemaError, match="no schema"):
        await sleeper.worker().run()
    assert sleeper.store.closed


async def test_a_start_without_a_database_raises(sleeper: Stage) -> None:
    sleeper.store.trouble["open_session"] = unavailable
    with pytest.raises(DatabaseUnavailable):
        await sleeper.worker().run()
    assert sleeper.store.closed


# Cancelled from outside


async def test_a_cancelled_worker_drains_nothing_and_gives_its_leases_back(sleeper: Stage, seen: list[Any]) -> None:
    ids = [sleeper.enqueue("sleeper", seconds=1000) for _ in range(3)]
    worker = sleeper.worker(grace=500)
    began = trio.current_time()
    with trio.move_on_after(15) as scope:
        await worker.run()
    assert scope.cancelled_caught
    assert trio.current_time() - began == pytest.approx(15, abs=0.2)
    assert seen == ["shutdown"] * 3
    jobs = [sleeper.database.jobs[i] for i in ids]
    assert [(j.state, j.failures, j.max_attempts) for j in jobs] == [("available", 0, 21)] * 3
    assert sleeper.database.sessions == {sleeper.store.session: False}
    assert sleeper.store.closed


async def test_a_cancelled_worker_claims_nothing_afterwards(sleeper: Stage) -> None:
    running = sleeper.enqueue("sleeper", seconds=1000)
    waiting = [sleeper.enqueue("sleeper", seconds=1) for _ in range(50)]
    with trio.move_on_after(0.5):
        await sleeper.worker(concurrency=1).run()
    assert sleeper.database.state(running) == "available"
    assert not claims_after(sleeper, waiting)


@pytest.mark.parametrize("steps", range(40))
async def test_a_worker_cancelled_at_any_moment_leaves_no_job_running(steps: int, sleeper: Stage) -> None:
    for _ in range(3):
        sleeper.enqueue("sleeper", seconds=0.5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleeper.worker().run)
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert "running" not in sleeper.database.states()


async def test_handlers_see_the_reason_before_the_cancellation_and_within_cleanup(
    stage: Stage, seen: list[Any]
) -> None:
    @stage.handlers.job
    async def tidy(job: Job) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            seen.append(job.cancel_reason)
            with job.cleanup():
                await trio.sleep(2)  # noqa: ASYNC102 -- job.cleanup() is the shield
                seen.append((job.cancel_reason, stage.database.state(job.id)))
            raise

    job_id = stage.enqueue("tidy")
    with trio.move_on_after(5):
        await stage.worker().run()
    assert seen == ["shutdown", ("shutdown", "running")]
    assert stage.database.state(job_id) == "available"


@pytest.mark.parametrize("place", ["handler", "child", "both"])
async def test_a_failure_on_the_way_out_stays_the_jobs(place: str, stage: Stage) -> None:
    @stage.handlers.job
    async def clumsy(job: Job) -> None:
        if place != "handler":
            job.nursery.start_soon(clumsy_child)
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            if place != "child":
                raise ValueError("the handler's") from None  # noqa: ASYNC104 -- what is raised instead is the test
            raise

    async def clumsy_child() -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            raise ValueError("the child's") from None  # noqa: ASYNC104 -- what is raised instead is the test

    @stage.handlers.job
    async def innocent() -> None:
        await trio.sleep_forever()

    jobs = [stage.enqueue("clumsy"), stage.enqueue("innocent")]
    with trio.move_on_after(5) as scope:
        await stage.worker().run()
    assert scope.cancelled_caught
    clumsy_job, innocent_job = (stage.database.jobs[i] for i in jobs)
    assert clumsy_job.failures == 1
    assert clumsy_job.error is not None
    assert "ValueError" in clumsy_job.error
    assert (innocent_job.state, innocent_job.failures) == ("available", 0)


async def test_the_handlers_own_failure_is_what_is_told(stage: Stage) -> None:
    @stage.handlers.job
    async def first(job: Job) -> None:
        job.nursery.start_soon(second)
        await trio.sleep(1)
        raise ValueError("the cause")

    async def second() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise RuntimeError("a consequence")

    job = await stage.ended("first", max_attempts=1)
    assert job.error is not None
    assert job.error.startswith("ValueError: the cause")


async def test_a_job_that_ended_just_then_is_reported_as_it_ended(stage: Stage) -> None:
    @stage.handlers.job
    async def done() -> str:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:  # noqa: ASYNC103 -- the value is what counts
            return "what there was to save"  # noqa: ASYNC104 -- a handler may decide to stop in good order
        raise AssertionError

    job_id = stage.enqueue("done")
    with trio.move_on_after(5):
        await stage.worker().run()
    assert stage.database.state(job_id) == "completed"


async def test_the_farewell_of_a_cancelled_worker_is_bounded(sleeper: Stage) -> None:
    sleeper.enqueue("sleeper", seconds=1000)
    began = trio.current_time()
    with trio.move_on_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleeper.worker().run)
            await trio.sleep(1)
            sleeper.store.trouble["settle"] = sleeper.store.trouble["complete_and_claim"] = trio.sleep_forever
    assert trio.current_time() - began <= 5 + 5 + 5.1


async def test_what_a_worker_releases_starts_on_an_idle_one_at_once(sleeper: Stage, seen: list[Any]) -> None:
    # Not with the other's next poll, which here is an hour away.
    other = MemoryStore(sleeper.database)
    async with sleeper.working(poll=3600) as worker:
        await trio.sleep(1)
        job = sleeper.database.jobs[sleeper.enqueue("sleeper", seconds=10)]
        await trio.sleep(1)
        async with sleeper.working(other, poll=3600):
            await trio.sleep(2)
            worker.stop_now()
            released_at = trio.current_time()
            await trio.sleep(1)
            assert (job.session, job.attempt) == (other.session, 2)
            assert trio.current_time() - released_at == pytest.approx(1)
            await trio.sleep(12)
    assert (job.state, seen) == ("completed", ["shutdown", "end"])


async def test_a_worker_nests_in_any_program(sleeper: Stage) -> None:
    one, two = MemoryStore(sleeper.database), MemoryStore(sleeper.database)
    jobs = [sleeper.enqueue("sleeper", seconds=2) for _ in range(10)]
    async with trio.open_nursery() as nursery:
        workers = [await nursery.start(sleeper.worker(store, concurrency=3).run) for store in (one, two)]
        await trio.sleep(10)
        for worker in workers:
            worker.stop()
    assert {sleeper.database.state(i) for i in jobs} == {"completed"}
    assert {outcome.claim.session for store in (one, two) for outcome in store.settled} == {one.session, two.session}


async def test_a_program_error_in_the_store_ends_the_worker_and_gives_its_jobs_back(
    sleeper: Stage, seen: list[Any]
) -> None:
    async def broken() -> None:
        raise ZeroDivisionError("a bug")

    job_id = sleeper.enqueue("sleeper", seconds=1000)
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with sleeper.working():
            await trio.sleep(1)
            sleeper.store.trouble["sweep"] = broken
            await trio.sleep_forever()
    assert seen == ["shutdown"]
    assert sleeper.database.state(job_id) == "available"
