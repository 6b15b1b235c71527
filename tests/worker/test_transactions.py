"""`job.transaction()`: the handler's own writes and the job's completion together, whatever happens meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Job, Snooze
from pulse_trio.observe import EndedAfterCommit, FenceLost, JobEnded
from pulse_trio.testing.memory import unavailable

if TYPE_CHECKING:
    from support.stage import Recorder, Stage


@pytest.fixture
def pay(stage: Stage) -> Stage:
    @stage.handlers.job
    async def pay(job: Job, seconds: float = 0, after: float = 0) -> None:
        async with job.transaction() as tx:
            await tx.execute(f"paid by {job.attempt}")
            await trio.sleep(seconds)
            tx.result = {"attempt": job.attempt}
        await trio.sleep(after)

    return stage


async def test_writes_result_and_completion_come_together(pay: Stage, events: Recorder) -> None:
    job_id = pay.enqueue("pay")
    report = await pay.burst()
    job = pay.database.jobs[job_id]
    assert (job.state, job.result, pay.database.ledger) == ("completed", '{"attempt":1}', ["paid by 1"])
    assert report.ended == {"completed": 1}
    # It was not reported a second time.
    assert "settle" not in pay.store.calls
    assert [e.outcome for e in events.of(JobEnded)] == ["completed"]
    assert events.of(EndedAfterCommit) == []


async def test_the_result_may_be_given_beforehand(stage: Stage) -> None:
    @stage.handlers.job
    async def given(job: Job) -> int:
        async with job.transaction(result=7):
            pass
        return 7

    assert (await stage.ended("given")).result == "7"


@pytest.mark.parametrize(
    ("error", "state"),
    [(ValueError("no"), "retryable"), (Discard("no"), "dead"), (Snooze(50), "scheduled"), (SystemExit(), "retryable")],
)
async def test_what_the_block_raises_rolls_back_and_goes_its_usual_way(
    error: BaseException, state: str, stage: Stage
) -> None:
    @stage.handlers.job
    async def fail(job: Job) -> None:
        async with job.transaction() as tx:
            await tx.execute("written")
            raise error

    job_id = stage.enqueue("fail")
    async with stage.working():
        await trio.sleep(1)
        assert stage.database.state(job_id) == state
    assert stage.database.ledger == []


async def test_a_result_that_json_cannot_carry_rolls_back(stage: Stage) -> None:
    @stage.handlers.job
    async def bad(job: Job) -> None:
        async with job.transaction(result=object()) as tx:
            await tx.execute("written")

    job = await stage.ended("bad", max_attempts=1)
    assert (job.state, stage.database.ledger) == ("dead", [])


async def test_a_timeout_in_the_block_rolls_back(pay: Stage) -> None:
    job = await pay.ended("pay", seconds=60, timeout=5, max_attempts=1)
    assert (job.state, pay.database.ledger, pay.outcomes()) == ("dead", [], ["timeout"])


async def test_statements_may_take_what_is_left_of_the_timeout(pay: Stage) -> None:
    await pay.ended("pay", timeout=5)
    await pay.ended("pay")
    assert pay.store.transactions.seconds == [pytest.approx(5, abs=0.1), float("inf")]


@pytest.mark.parametrize("seconds", [5, 15, 60])
async def test_a_lost_fence_rolls_back_and_cancels_the_handler(seconds: float, stage: Stage, events: Recorder) -> None:
    seen: list[Any] = []

    @stage.handlers.job
    async def slow(job: Job) -> None:
        try:
            async with job.transaction() as tx:
                await tx.execute("written")
                await trio.sleep(seconds)
        finally:
            seen.append(job.cancel_reason)

    job_id = stage.enqueue("slow")
    async with stage.working():
        await trio.sleep(1)
        stage.database.steal(job_id)
        await trio.sleep(70)
    assert seen == ["fence-lost"]
    assert stage.database.ledger == []
    assert len(events.of(FenceLost)) == 1
    assert stage.store.settled == []


async def test_a_locked_row_delays_the_commit_and_nothing_else(pay: Stage) -> None:
    job_id = pay.enqueue("pay", seconds=1)
    async with pay.working():
        await trio.sleep(0.5)
        with pay.database.lock(job_id):
            await trio.sleep(12)
            assert pay.database.state(job_id) == "running"
        await trio.sleep(1)
        assert pay.database.state(job_id) == "completed"
    assert pay.database.ledger == ["paid by 1"]


async def test_a_cancellation_during_a_commit_that_is_done_leaves_the_job_completed(
    stage: Stage, events: Recorder
) -> None:
    undone: list[int] = []

    @stage.handlers.job
    async def pay(job: Job) -> None:
        try:
            async with job.transaction(result=1) as tx:
                await tx.execute("paid")
        except trio.Cancelled:
            undone.append(job.id)
            raise

    async def slowly() -> None:
        # As the real connection does it: COMMIT is answered, whoever is cancelled meanwhile.
        with trio.CancelScope(shield=True):
            await trio.sleep(8)

    stage.store.silence["commit"] = slowly
    job = await stage.ended("pay", timeout=5)
    assert (job.state, job.result, stage.database.ledger) == ("completed", "1", ["paid"])
    # The handler is told of its cancellation, for that is what struck; the job is what the commit made it.
    assert undone == [job.id]
    assert events.of(FenceLost) == []
    assert [e.outcome for e in events.of(JobEnded)] == ["completed"]


async def test_after_the_commit_no_beat_is_sent_and_none_can_cancel_the_handler(pay: Stage, events: Recorder) -> None:
    job_id = pay.enqueue("pay", seconds=5, after=16)
    async with pay.working(grace=100):
        await trio.sleep(18)
        assert pay.database.state(job_id) == "completed"
    assert pay.store.sent_beats == []
    assert events.of(FenceLost) == []
    assert [e.outcome for e in events.of(JobEnded)] == ["completed"]


async def test_a_beat_that_finds_the_row_gone_while_the_commit_is_answered_cancels_nobody(
    stage: Stage, events: Recorder
) -> None:
    went_on: list[int] = []

    @stage.handlers.job
    async def long(job: Job) -> None:
        async with job.transaction() as tx:
            await tx.execute("written")
            await trio.sleep(19)
        await trio.lowlevel.checkpoint()
        went_on.append(job.attempt)

    async def slowly() -> None:
        # The beat at 20 s passes the commit's answer.
        await trio.sleep(2)

    stage.store.silence["commit"] = slowly
    job = await stage.ended("long")
    assert (job.state, stage.database.ledger, went_on) == ("completed", ["written"], [1])
    assert len(stage.store.sent_beats) == 2
    assert events.of(FenceLost) == []


async def test_a_beat_that_found_the_fence_lost_during_a_commit_that_failed_still_counts(stage: Stage) -> None:
    seen: list[Any] = []

    @stage.handlers.job
    async def long(job: Job) -> None:
        try:
            async with job.transaction() as tx:
                await tx.execute("written")
                await trio.sleep(19)
        except Exception:
            try:
                await trio.sleep(10)
            finally:
                seen.append(job.cancel_reason)

    job_id = stage.enqueue("long")

    async def stolen() -> None:
        stage.database.locked.discard(job_id)
        stage.database.steal(job_id)
        await trio.sleep(2)
        await unavailable()

    stage.store.trouble["commit"] = stolen
    async with stage.working():
        await trio.sleep(40)
    assert seen == ["fence-lost"]
    assert stage.database.ledger == []


# A commit without an answer


async def test_a_commit_whose_answer_was_lost_is_looked_into_and_counts(pay: Stage, events: Recorder) -> None:
    pay.store.silence["commit"] = unavailable
    job = await pay.ended("pay")
    assert (job.state, job.attempt, pay.database.ledger) == ("completed", 1, ["paid by 1"])
    assert [e.outcome for e in events.of(JobEnded)] == ["completed"]


async def test_a_commit_that_never_was_is_a_failure_that_is_retried(pay: Stage) -> None:
    pay.store.trouble["commit"] = once(pay, "commit")
    job_id = pay.enqueue("pay")
    async with pay.working():
        await trio.sleep(10)
    job = pay.database.jobs[job_id]
    assert (job.state, job.attempt, job.failures, pay.database.ledger) == ("completed", 2, 1, ["paid by 2"])


def once(stage: Stage, operation: str) -> Any:
    async def strike() -> None:
        del stage.store.trouble[operation]
        await unavailable()

    return strike


@pytest.mark.parametrize("done", [True, False])
async def test_a_commit_nobody_can_ask_about_is_an_unproven_lease_and_runs_nothing_twice(
    done: bool, stage: Stage, pay: Stage
) -> None:
    (stage.store.silence if done else stage.store.trouble)["commit"] = unavailable
    for operation in ("committed", "beat", "settle"):
        stage.store.trouble[operation] = unavailable
    job_id = pay.enqueue("pay", seconds=1)
    async with pay.working():
        await trio.sleep(23)
        assert pay.events.of(JobEnded) == []
        await trio.sleep(3)
        # Cancelled at the lease's end, and to be released; the report is fenced.
        assert [e.outcome for e in pay.events.of(JobEnded)] == ["released"]
        stage.store.silence.clear()
        stage.store.trouble.clear()
        await trio.sleep(60)
    job = stage.database.jobs[job_id]
    assert job.state == "completed"
    assert stage.database.ledger == ["paid by 1" if done else "paid by 2"]


async def test_an_unanswered_commit_is_not_looked_into_past_the_lease(stage: Stage) -> None:
    """Found by `make chaos SEED=5`, with a margin shorter than the time to find out: two attempts' handlers at a time."""
    ended: list[float] = []

    @stage.handlers.job
    async def pay(job: Job) -> None:
        try:
            async with job.transaction() as tx:
                await tx.execute("paid")
                await trio.sleep(27)
        finally:
            ended.append(trio.current_time())

    for operation in ("commit", "committed", "beat", "settle"):
        stage.store.trouble[operation] = unavailable
    stage.enqueue("pay")
    begun = trio.current_time()
    async with stage.working(cleanup=0.5):  # so the handler is cancelled 1.5 s before the lease of 30 s ends
        await trio.sleep(60)
    assert 28.5 <= ended[0] - begun < 30


# After the commit


async def test_what_the_handler_raises_or_returns_after_the_commit_is_told_and_changes_nothing(
    stage: Stage, events: Recorder
) -> None:
    async def child() -> None:
        await trio.lowlevel.checkpoint()
        raise TypeError("too late as well")

    @stage.handlers.job
    async def late(job: Job, how: str) -> Any:
        async with job.transaction(result="the result") as tx:
            await tx.execute(how)
        if how == "raise":
            raise ValueError("too late")
        if how == "child":
            # Not in a thread: virtual time would not wait for it, and what goes on past its lease is stuck.
            job.nursery.start_soon(child)
        return "another result" if how == "return" else None

    for how in ("raise", "child", "return"):
        job = await stage.ended("late", how=how)
        assert (job.state, job.attempt, job.result) == ("completed", 1, '"the result"')
    assert stage.database.ledger == ["raise", "child", "return"]
    raised, failed, returned = events.of(EndedAfterCommit)
    assert raised.error.startswith("ValueError: too late")
    assert "TypeError" in failed.error
    assert "tx.result" in returned.error


async def test_a_worker_that_stops_cancels_what_goes_on_after_its_commit(pay: Stage) -> None:
    pay.enqueue("pay", after=1000)
    worker = pay.worker(grace=2)
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        await trio.sleep(1)
        began = trio.current_time()
        worker.stop()
    assert trio.current_time() - began == pytest.approx(2, abs=0.1)
    assert pay.database.ledger == ["paid by 1"]


# Mistakes


async def test_a_job_has_one_transaction(stage: Stage) -> None:
    seen: list[str] = []

    @stage.handlers.job
    async def twice(job: Job) -> None:
        async with job.transaction() as tx:
            await tx.execute("first")
            seen.append(await refused(job))
        seen.append(await refused(job))

    async def refused(job: Job) -> str:
        with pytest.raises(RuntimeError) as said:
            async with job.transaction():
                raise AssertionError("never here")
        return str(said.value)

    assert (await stage.ended("twice")).state == "completed"
    assert "savepoint" in seen[0]
    assert "no second" in seen[1]
    assert stage.database.ledger == ["first"]


async def test_after_a_rollback_the_handler_may_try_again(stage: Stage) -> None:
    @stage.handlers.job
    async def again(job: Job) -> None:
        try:
            async with job.transaction() as tx:
                await tx.execute("first")
                raise ValueError
        except ValueError:
            pass
        async with job.transaction() as tx:
            await tx.execute("second")

    assert (await stage.ended("again")).state == "completed"
    assert stage.database.ledger == ["second"]


async def test_a_thread_has_no_transaction(stage: Stage) -> None:
    @stage.handlers.job
    def threaded(job: Job) -> str:
        with pytest.raises(RuntimeError, match=r"for Trio handlers; this one has runs='thread'"):
            job.transaction()
        return "told"

    assert (await stage.ended("threaded")).result == '"told"'


async def test_a_job_that_has_ended_has_no_transaction(stage: Stage) -> None:
    kept: list[Job] = []

    @stage.handlers.job
    async def leak(job: Job) -> None:
        kept.append(job)

    await stage.ended("leak")
    with pytest.raises(RuntimeError, match="only while the job runs"):
        async with kept[0].transaction():
            raise AssertionError("never here")


@pytest.mark.parametrize("ends", ["while the job is reported", "long after"])
async def test_a_transaction_that_outlives_its_handler_fails_the_job_and_is_rolled_back(
    ends: str, stage: Stage, events: Recorder, nursery: trio.Nursery
) -> None:
    begun, go_on = trio.Event(), trio.Event()
    told: list[str] = []

    async def elsewhere(job: Job) -> None:
        try:
            async with job.transaction() as tx:
                await tx.execute("written")
                begun.set()
                await go_on.wait()
        except RuntimeError as error:
            told.append(str(error))

    @stage.handlers.job(max_attempts=1)
    async def careless(job: Job) -> str:
        nursery.start_soon(elsewhere, job)
        await begun.wait()
        if ends == "while the job is reported":
            go_on.set()
        return "too early"

    job_id = stage.enqueue("careless", max_attempts=1)
    async with stage.working():
        await trio.sleep(1)
        go_on.set()
        await trio.sleep(1)
        job = stage.database.jobs[job_id]
        assert job.state == "dead"
        assert "its job.transaction() was still open" in (job.error or "")
    assert stage.database.ledger == []
    assert [ended.outcome for ended in events.of(JobEnded)] == ["failed"]
    (said,) = told
    assert f"the handler of job {job_id} has returned" in said


async def test_a_commit_under_way_when_its_handler_returns_is_decided_by_the_fence(
    stage: Stage, nursery: trio.Nursery
) -> None:
    committing, go_on = trio.Event(), trio.Event()

    async def held_back() -> None:
        committing.set()
        await go_on.wait()

    async def elsewhere(job: Job) -> None:
        async with job.transaction() as tx:
            await tx.execute("written")

    @stage.handlers.job(max_attempts=1)
    async def careless(job: Job) -> None:
        nursery.start_soon(elsewhere, job)
        await committing.wait()

    stage.store.silence["commit"] = held_back  # the server has done it; its answer is on its way
    job_id = stage.enqueue("careless", max_attempts=1)
    async with stage.working():
        await trio.sleep(1)
        go_on.set()
        await trio.sleep(1)
    job = stage.database.jobs[job_id]
    assert (job.state, stage.database.ledger) == ("completed", ["written"])
