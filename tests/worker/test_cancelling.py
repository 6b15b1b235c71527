"""How a cancellation, a deadline or an expiry reaches a job, and what becomes of it."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pulse_trio import Discard, Job, RetryAfter, Snooze
from pulse_trio.jobs import CancelRequest
from pulse_trio.observe import CancellationDelivered, DatabaseFound, DatabaseLost, JobDied, JobEnded, JobStarted
from pulse_trio.testing.memory import EPOCH, unavailable
from support.stage import parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pulse_trio.jobs import CancelReason
    from pulse_trio.testing.memory import MemoryJob
    from support.stage import Recorder, Stage


class Log:
    """What handlers saw, and when."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, Any]] = []

    def __call__(self, entry: Any) -> None:
        self.entries.append((trio.current_time(), entry))

    @property
    def what(self) -> list[Any]:
        return [entry for _, entry in self.entries]


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def sleeper(stage: Stage, log: Log) -> Stage:
    """A stage with a handler `sleeper(seconds)` that logs its start, its end and why it was cancelled."""

    @stage.handlers.job
    async def sleeper(job: Job, seconds: float = 1000.0) -> None:
        log("start")
        try:
            await trio.sleep(seconds)
        except trio.Cancelled:
            log((job.cancel_reason, job.cancel_message))
            raise
        log("end")

    return stage


def moments(**seconds: float) -> str:
    """A row's options with moments so many seconds from now."""
    now = trio.current_time() + EPOCH
    return json.dumps({name: now + value for name, value in seconds.items()})


def state_of(job: MemoryJob) -> tuple[str, str | None]:
    return str(job.state), job.cancel_reason


# Delivery


@pytest.mark.parametrize("message", ["no longer wanted", "two  spaces", None])
async def test_a_notification_cancels_the_handler_at_once_with_its_reason(
    message: str | None, sleeper: Stage, log: Log, events: Recorder
) -> None:
    job = sleeper.database.jobs[sleeper.enqueue("sleeper")]
    async with sleeper.working():
        await trio.sleep(3)
        asked_at = trio.current_time()
        sleeper.database.cancel(job.id, message)
        await trio.sleep(1)
        assert log.entries[-1] == (asked_at, ("user", message))
        assert state_of(job) == ("cancelled", message or "user")
        assert job.delivered
    assert events.of(CancellationDelivered) == [CancellationDelivered(job.id, "sleeper", 1, message, "user", job.queue)]
    assert [e.outcome for e in events.of(JobEnded)] == ["cancelled"]
    assert sleeper.outcomes() == ["cancelled"]


@pytest.mark.parametrize("notify", [True, False])
@pytest.mark.parametrize("cause", ["parent", "sibling", "deadline"])
async def test_a_member_of_a_tree_is_told_why_it_is_cancelled(
    cause: CancelReason, notify: bool, sleeper: Stage, log: Log, events: Recorder
) -> None:
    job = sleeper.database.jobs[sleeper.enqueue("sleeper")]
    async with sleeper.working():
        await trio.sleep(3)
        sleeper.database.cancel(job.id, cause=cause, notify=notify)
        await trio.sleep(20)
        assert log.entries[-1][1] == (cause, None)
        assert state_of(job) == ("cancelled", cause)
    assert events.of(CancellationDelivered) == [CancellationDelivered(job.id, "sleeper", 1, None, cause, job.queue)]


async def test_when_the_notification_is_lost_the_next_beat_brings_it(sleeper: Stage, log: Log) -> None:
    job = sleeper.database.jobs[sleeper.enqueue("sleeper")]
    async with sleeper.working():
        await trio.sleep(3)
        asked_at = trio.current_time()
        sleeper.database.cancel(job.id, "why", notify=False)
        await trio.sleep(10)
        at, seen = log.entries[-1]
        assert seen == ("user", "why")
        assert at - asked_at <= 10
    assert (state_of(job), job.delivered) == (("cancelled", "why"), True)


async def test_only_the_job_that_is_meant_is_cancelled(sleeper: Stage, log: Log) -> None:
    ids = [sleeper.enqueue("sleeper", seconds=5) for _ in range(20)]
    async with sleeper.working():
        await trio.sleep(1)
        for job_id in ids[::2]:
            sleeper.database.cancel(job_id)
        await trio.sleep(8)
    states = [sleeper.database.state(i) for i in ids]
    assert states == ["cancelled", "completed"] * 10


@pytest.mark.parametrize(
    "payload",
    [
        "look_for_cancel {id}",
        "look_for_cancel {id} {session} {attempt} because I say so",
        "cancel {session} {id} {attempt} because I say so",
        "look_for_cancel ",
        "look_for_cancel x",
        "look_for_cancel -1",
        "look_for_cancel 99999999999999999999",
        "look_for_cancel \N{ARABIC-INDIC DIGIT ONE}",
        "look_for_cancel  {id}",
        "look_for_stack {id}",
        "stack {session} 1 {id}",
        "resume {id}",
        " ",
        "",
        "\N{FIRE}" * 2000,
    ],
)
async def test_a_notification_that_anybody_can_forge_changes_nothing(payload: str, sleeper: Stage) -> None:
    job = sleeper.database.jobs[sleeper.enqueue("sleeper", seconds=5)]
    async with sleeper.working():
        await trio.sleep(1)
        for listener in sleeper.database.listeners:
            listener(payload.format(id=job.id, session=job.session, attempt=job.attempt))
        await trio.sleep(8)
    assert job.state == "completed"


@pytest.mark.parametrize("part", ["attempt", "session"])
async def test_a_request_about_another_attempt_or_session_is_not_obeyed(part: str, sleeper: Stage) -> None:
    job = sleeper.database.jobs[sleeper.enqueue("sleeper", seconds=5)]

    async def another(job_ids: Sequence[int]) -> dict[tuple[int, int, int], CancelRequest]:
        assert list(job_ids) == [job.id]
        fence = {"id": job.id, "attempt": job.attempt, "session": job.session} | {part: 12345}
        return {(fence["id"], fence["attempt"], fence["session"]): CancelRequest()}

    async with sleeper.working():
        await trio.sleep(1)
        sleeper.store.requested = another
        for listener in sleeper.database.listeners:
            listener(f"look_for_cancel {job.id}")
        await trio.sleep(8)
    assert job.state == "completed"


async def test_a_flood_of_forged_requests_costs_a_few_reads_and_a_real_one_is_heard_in_it(sleeper: Stage) -> None:
    flooded = sleeper.database.jobs[sleeper.enqueue("sleeper")]
    meant = sleeper.database.jobs[sleeper.enqueue("sleeper")]
    async with sleeper.working() as worker:
        await trio.sleep(1)
        for _ in range(2000):
            for listener in sleeper.database.listeners:
                listener(f"look_for_cancel {flooded.id}")
                listener("look_for_stack 1")
            await trio.sleep(0.001)
        for question in ("requested", "stack_questions"):
            # Two seconds of it, one read in each quarter of a second at most once it has gone on for a while.
            assert sleeper.store.calls.count(question) <= 20
        for number in range(50_000):
            parts(worker).services.cancellations.heard(10**6 + number)
        sleeper.database.cancel(meant.id, "meant")
        await trio.sleep(10)
        assert (flooded.state, state_of(meant)) == ("running", ("cancelled", "meant"))
        assert len(parts(worker).jobs.expected.ids) <= 20_000


async def test_a_request_that_overtakes_the_reply_to_the_claim_cancels_the_job_as_it_begins(
    sleeper: Stage, log: Log, events: Recorder
) -> None:
    async def slow() -> None:
        for job in sleeper.database.jobs.values():
            del sleeper.store.silence["complete_and_claim"]
            sleeper.database.cancel(job.id, "at once")
            await trio.sleep(2)

    async with sleeper.working():
        await trio.sleep(1)  # it listens
        sleeper.store.silence["complete_and_claim"] = slow
        job_id = sleeper.enqueue("sleeper")
        await trio.sleep(5)
        assert state_of(sleeper.database.jobs[job_id]) == ("cancelled", "at once")
    # One read of the row later, and not with the next beat.
    assert log.what in ([], ["start", ("user", "at once")])
    assert log.entries == [] or log.entries[-1][0] == log.entries[0][0]
    assert len(events.of(CancellationDelivered)) == 1


async def test_requests_for_jobs_that_are_not_here_are_forgotten(sleeper: Stage) -> None:
    async with sleeper.working() as worker:
        await trio.sleep(1)
        for number in range(100):
            for listener in sleeper.database.listeners:
                listener(f"look_for_cancel {number + 1000}")
        await wait_all_tasks_blocked()
        assert len(parts(worker).jobs.expected.ids) == 100
        await trio.sleep(20)
        assert parts(worker).jobs.expected.ids == set()


async def test_a_request_for_a_job_whose_outcome_stands_changes_nothing(sleeper: Stage, events: Recorder) -> None:
    job = sleeper.database.jobs[sleeper.enqueue("sleeper", seconds=1)]
    ready = trio.Event()
    sleeper.store.trouble["settle"] = ready.wait
    async with sleeper.working() as worker:
        await trio.sleep(0.5)
        worker.quiet()  # so that the report cannot travel with a claim
        await trio.sleep(1)
        sleeper.database.cancel(job.id)
        await trio.sleep(30)
        assert not job.delivered
        ready.set()
    assert job.state == "completed"
    assert events.of(CancellationDelivered) == []


async def test_a_draining_worker_still_hears_requests(sleeper: Stage, log: Log) -> None:
    job_id = sleeper.enqueue("sleeper")
    async with sleeper.working() as worker:
        await trio.sleep(3)
        worker.quiet()
        await trio.sleep(1)
        asked_at = trio.current_time()
        sleeper.database.cancel(job_id)
        await trio.sleep(1)
        assert log.entries[-1] == (asked_at, ("user", None))


async def test_the_database_away_delays_the_ledger_and_not_the_cancellation(sleeper: Stage, log: Log) -> None:
    job = sleeper.database.jobs[sleeper.enqueue("sleeper")]
    async with sleeper.working():
        await trio.sleep(3)
        sleeper.store.trouble["record_delivered"] = unavailable
        sleeper.store.trouble["settle"] = unavailable
        asked_at = trio.current_time()
        sleeper.database.cancel(job.id)
        await trio.sleep(2)
        assert log.entries[-1] == (asked_at, ("user", None))
        assert (job.delivered, job.state) == (False, "running")
        sleeper.store.trouble.clear()
        await trio.sleep(15)
        assert job.state == "cancelled"
        calls = sleeper.store.calls.count("record_delivered")
        await trio.sleep(60)
        assert sleeper.store.calls.count("record_delivered") == calls


@pytest.mark.parametrize("read", ["requested", "running_fences"])
async def test_a_request_that_cannot_be_read_at_first_comes_with_a_beat_at_once(
    read: str, sleeper: Stage, log: Log, events: Recorder
) -> None:
    """As after a restart of the server: the connection that was idle meanwhile fails at its next use, and only then."""
    job, other = (sleeper.database.jobs[sleeper.enqueue("sleeper")] for _ in range(2))
    failed_at: list[float] = []

    async def fails_once() -> None:
        del sleeper.store.trouble[read]
        failed_at.append(trio.current_time())
        await unavailable()

    async with sleeper.working():
        await wait_all_tasks_blocked()
        assert log.what == ["start", "start"]
        sleeper.store.trouble[read] = fails_once
        if read == "running_fences":
            # It is read for jobs without a request: another notification, about a job that was taken from this worker.
            sleeper.database.steal(other.id)
            for listener in sleeper.database.listeners:
                listener(f"look_for_cancel {other.id}")
        sleeper.database.cancel(job.id, "why")
        await events.first(CancellationDelivered)
        await wait_all_tasks_blocked()
        assert len(failed_at) == 1
        reason = ("user", "why")
        assert [entry for entry in log.entries if entry[1] == reason] == [(failed_at[0], reason)]
        assert state_of(job) == ("cancelled", "why")


async def test_a_request_whose_notification_nobody_heard_comes_as_soon_as_the_worker_listens_again(
    sleeper: Stage, log: Log, events: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = sleeper.database.jobs[sleeper.enqueue("sleeper")]
    connection, listen = trio.CancelScope(), sleeper.store.listen

    async def listen_until_it_is_lost(on_notify: Callable[[str], None]) -> None:
        with connection:
            await listen(on_notify)
        sleeper.store.trouble["listen"] = unavailable
        monkeypatch.undo()
        await unavailable()

    monkeypatch.setattr(sleeper.store, "listen", listen_until_it_is_lost)
    async with sleeper.working():
        await events.first(JobStarted)
        await wait_all_tasks_blocked()
        connection.cancel()
        await events.first(DatabaseLost)
        sleeper.database.cancel(job.id, "why")
        await wait_all_tasks_blocked()
        assert log.what == ["start"]
        sleeper.store.trouble.clear()
        await events.first(DatabaseFound)
        await wait_all_tasks_blocked()
        assert log.entries[-1] == (events.when(DatabaseFound)[0], ("user", "why"))


async def test_many_at_once_are_recorded_together(sleeper: Stage) -> None:
    ids = [sleeper.enqueue("sleeper") for _ in range(50)]
    async with sleeper.working():
        await trio.sleep(3)
        for job_id in ids:
            sleeper.database.cancel(job_id)
        await trio.sleep(1)
    assert {sleeper.database.state(i) for i in ids} == {"cancelled"}
    assert sleeper.store.calls.count("record_delivered") <= 2


async def test_the_workers_timeout_is_for_jobs_that_have_none_of_their_own(stage: Stage) -> None:
    ended: list[tuple[str, float]] = []

    @stage.handlers.job
    async def slow(job: Job, name: str) -> None:
        began = trio.current_time()
        assert job.deadline - began <= 23
        try:
            await trio.sleep_forever()
        finally:
            ended.append((f"{name} {job.cancel_reason}", trio.current_time() - began))

    @stage.handlers.job
    async def quick() -> None: ...

    async with stage.working(timeout=8, lease=30, heartbeat=10):
        stage.enqueue("slow", name="own", timeout=3)
        stage.enqueue("slow", name="worker's")
        # In nurseries that earlier jobs have left: their deadlines are not this job's.
        for _ in range(20):
            stage.enqueue("quick")
        await trio.sleep(1)
        stage.enqueue("slow", name="later")
        await trio.sleep(12)
    assert ended[:3] == [("own timeout", 3), ("worker's timeout", 8), ("later timeout", 8)]
    (first, *_) = [job for job in stage.database.jobs.values() if job.error and "worker" in job.error]
    assert first.error == "TimeoutError: ran longer than the worker's setting `timeout`"


# What the handler does with it


async def test_nothing_of_a_job_runs_any_more_when_its_outcome_is_written(stage: Stage) -> None:
    alive: set[str] = set()
    at_settlement: list[set[str]] = []

    async def child(name: str) -> None:
        alive.add(name)
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await trio.sleep(len(name) / 4)  # noqa: ASYNC120 -- children that take their time to end
            raise
        finally:
            alive.discard(name)

    @stage.handlers.job
    async def family(job: Job) -> None:
        job.nursery.start_soon(child, "ours")
        async with trio.open_nursery() as own:
            own.start_soon(child, "own")
            async with trio.open_nursery() as deeper:
                deeper.start_soon(child, "deepest")
                await child("handler")

    async def look() -> None:
        at_settlement.append(set(alive))

    job_id = stage.enqueue("family")
    async with stage.working():
        await trio.sleep(1)
        assert alive == {"ours", "own", "deepest", "handler"}
        stage.store.trouble["settle"] = look
        stage.database.cancel(job_id)
        await trio.sleep(30)
        assert stage.database.state(job_id) == "cancelled"
    assert at_settlement == [set()]


async def test_cleanup_has_its_time_with_the_lease_held(stage: Stage, log: Log) -> None:
    @stage.handlers.job
    async def tidy(job: Job) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with job.cleanup():
                await trio.sleep(3)  # noqa: ASYNC102 -- a shield with a deadline, which the checker cannot know
                log((job.cancel_reason, stage.database.state(job.id)))
            log("after")

    job_id = stage.enqueue("tidy")
    async with stage.working():
        await trio.sleep(9)
        stage.database.cancel(job_id)
        await trio.sleep(5)
        assert log.what == [("user", "running"), "after"]
        # A beat was due meanwhile.
        assert len(stage.store.sent_beats) == 1
        assert stage.database.state(job_id) == "cancelled"


@pytest.mark.parametrize("error", [ValueError("on the way out"), Snooze(60), Discard("no")], ids=repr)
async def test_what_a_cancelled_handler_raises_is_on_record_and_the_job_is_cancelled(
    error: Exception, stage: Stage
) -> None:
    @stage.handlers.job
    async def clumsy() -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:  # noqa: ASYNC103
            raise error from None  # noqa: ASYNC104 -- what is raised instead is the test

    job = stage.database.jobs[stage.enqueue("clumsy")]
    async with stage.working():
        await trio.sleep(1)
        stage.database.cancel(job.id, "why")
        await trio.sleep(1)
    assert state_of(job) == ("cancelled", "why")
    assert stage.outcomes() != ["cancelled"]


async def test_a_handler_that_completes_all_the_same_has_completed(stage: Stage) -> None:
    @stage.handlers.job
    async def stubborn() -> str:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:  # noqa: ASYNC103
            return "saved"  # noqa: ASYNC104 -- a handler may decide to stop in good order
        raise AssertionError

    job = stage.database.jobs[stage.enqueue("stubborn")]
    async with stage.working():
        await trio.sleep(1)
        stage.database.cancel(job.id)
        await trio.sleep(1)
        assert (job.state, job.result) == ("completed", '"saved"')
    # Written apart from other completions, so that the ledger's end is in the same transaction.
    assert [o.cancelling for o in stage.store.settled] == [True]
    assert "settle" in stage.store.calls


async def test_a_thread_is_told_and_keeps_its_slot_and_lease_until_it_ends(stage: Stage) -> None:
    began, told, go = threading.Event(), threading.Event(), threading.Event()
    seen: list[Any] = []

    @stage.handlers.job
    def blocking(job: Job) -> str:
        began.set()
        told.wait(30)
        seen.append((job.cancel_reason, job.cancel_message))
        go.wait(30)
        return "done"

    job = stage.database.jobs[stage.enqueue("blocking")]
    other = stage.enqueue("blocking")
    async with stage.working(concurrency=1) as worker:
        await trio.sleep(0.5)
        assert began.wait(30)  # virtual time outruns the thread; before it has begun a cancelled job just ends
        stage.database.cancel(job.id, "stop")
        await wait_all_tasks_blocked()
        assert (worker.running, job.state, stage.database.state(other)) == (1, "running", "available")
        stage.database.cancel(other)
        told.set()
        go.set()
        await trio.sleep(1)
    assert seen == [("user", "stop")]
    assert job.state == "completed"


async def test_the_first_reason_stays(sleeper: Stage, stage: Stage, log: Log) -> None:
    @stage.handlers.job
    async def slow(job: Job) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with job.cleanup():
                await trio.sleep(2)  # noqa: ASYNC102 -- a shield with a deadline, which the checker cannot know
                log((job.cancel_reason, job.cancel_message))

    job = stage.database.jobs[stage.enqueue("slow", timeout=3)]
    async with stage.working():
        await trio.sleep(4)
        stage.database.cancel(job.id, "why")
        await trio.sleep(5)
    assert log.what == [("timeout", "why")]
    # Somebody does not want it any more: a timeout is no reason to try again.
    assert (stage.outcomes(), state_of(job)) == (["timeout"], ("cancelled", "why"))


async def test_a_job_being_cancelled_when_the_worker_stops_is_not_released(sleeper: Stage) -> None:
    job = sleeper.database.jobs[sleeper.enqueue("sleeper")]
    async with sleeper.working() as worker:
        await trio.sleep(1)
        sleeper.database.cancel(job.id, "why", notify=False)
        worker.stop_now()
    assert sleeper.outcomes() == ["released"]
    assert state_of(job) == ("cancelled", "why")


# Deadlines of the whole job


async def test_a_running_job_is_cancelled_at_its_deadline_and_not_tried_again(sleeper: Stage, log: Log) -> None:
    began = trio.current_time()
    job = sleeper.database.jobs[sleeper.enqueue("sleeper", options=moments(deadline=45))]
    async with sleeper.working():
        await trio.sleep(100)
    assert log.entries == [(pytest.approx(began, abs=0.1), "start"), (pytest.approx(began + 45), ("deadline", None))]
    assert state_of(job) == ("cancelled", "deadline")
    assert not job.delivered


@pytest.mark.parametrize("last_attempt", [False, True])
@pytest.mark.parametrize(
    ("word", "listed"),
    [
        (ValueError("no refund"), "failed"),
        (Discard("no more"), "failed"),
        (RetryAfter(1), "failed"),
        (Snooze(1), "cancelled"),
    ],
    ids=repr,
)
async def test_whatever_a_handler_says_when_its_deadline_has_passed_that_has_ended_the_job(
    word: Exception, listed: str, stage: Stage, log: Log, events: Recorder, *, last_attempt: bool
) -> None:
    @stage.handlers.job
    async def cleans_up(job: Job) -> None:
        log(job.attempt)
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            raise word from None  # noqa: ASYNC104 -- what the handler says instead

    job = stage.database.jobs[stage.enqueue("cleans_up", options=moments(deadline=5))]
    if last_attempt:
        job.max_attempts = 1
    async with stage.working():
        await trio.sleep(100)
    assert log.what == [1]
    assert state_of(job) == ("cancelled", "deadline")
    assert [outcome for _, _, outcome in job.history] == [listed]
    assert events.of(JobDied) == []


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize(("name", "reason"), [("deadline", "deadline"), ("expires", "expired")])
async def test_a_job_claimed_too_late_is_never_started(
    name: str, reason: str, attempt: int, sleeper: Stage, log: Log, events: Recorder
) -> None:
    job = sleeper.database.jobs[sleeper.enqueue("sleeper", options=moments(**{name: 5}))]
    job.attempt = attempt - 1
    await trio.sleep(5)
    await sleeper.burst()
    assert log.what == []
    assert state_of(job) == ("cancelled", reason)
    assert events.of(JobStarted) == []
    assert [(e.outcome, e.error) for e in events.of(JobEnded)] == [("cancelled", reason)]


async def test_a_job_too_late_needs_no_handler_to_end(stage: Stage) -> None:
    job = stage.database.jobs[stage.enqueue("of another deploy", options=moments(deadline=-1))]
    await stage.burst()
    assert state_of(job) == ("cancelled", "deadline")


async def test_expiry_is_about_the_start_alone(sleeper: Stage) -> None:
    job = sleeper.database.jobs[sleeper.enqueue("sleeper", seconds=60, options=moments(expires=5))]
    await sleeper.burst()
    assert job.state == "completed"


@pytest.mark.parametrize(
    ("options", "left", "reason"),
    [
        ({"timeout": 20.0, "deadline": 23.0}, 20, "timeout"),
        ({"timeout": 23.0, "deadline": 20.0}, 20, "deadline"),
        ({"deadline": 100.0}, 24, None),
    ],
    ids=str,
)
async def test_the_earliest_deadline_is_the_jobs(
    options: dict[str, float], left: float, reason: str | None, stage: Stage
) -> None:
    seen: list[Any] = []

    @stage.handlers.job
    async def look(job: Job) -> None:
        seen.append(job.deadline - trio.current_time())
        try:
            await trio.sleep(30)
        finally:
            seen.append(job.cancel_reason)

    row = json.dumps(options | {"deadline": options["deadline"] + trio.current_time() + EPOCH})
    stage.enqueue("look", options=row)
    await stage.burst()
    assert seen == [pytest.approx(left, abs=0.1), reason]


async def test_a_retry_that_would_begin_after_the_deadline_ends_the_job_at_the_deadline(stage: Stage, log: Log) -> None:
    @stage.handlers.job(backoff_base=1000.0)
    async def broken() -> None:
        log("tried")
        raise ValueError("the last word")

    began = trio.current_time()
    options = json.loads(moments(deadline=30)) | {"backoff_base": 1000.0}
    job = stage.database.jobs[stage.enqueue("broken", options=json.dumps(options))]
    async with stage.working():
        await trio.sleep(1)
        assert job.state == "retryable"
        assert job.error is not None
        assert job.error.startswith("ValueError: the last word")
        assert job.run_at == pytest.approx(began + 30, abs=0.1)
        await trio.sleep(31)
        assert state_of(job) == ("cancelled", "deadline")
    assert log.what == ["tried"]


async def test_a_failure_before_the_deadline_is_tried_again_as_usual(stage: Stage, log: Log) -> None:
    @stage.handlers.job
    async def once_more(job: Job) -> None:
        log(job.attempt)
        if job.attempt == 1:
            raise ValueError

    job = stage.database.jobs[stage.enqueue("once_more", options=moments(deadline=3600))]
    async with stage.working():
        await trio.sleep(10)
    assert (log.what, job.state) == ([1, 2], "completed")


async def test_the_deadline_is_the_databases_whatever_the_workers_clock_says(sleeper: Stage, log: Log) -> None:
    # A worker whose clock was set a day back: it knows the difference.
    sleeper.store.epoch_offset = EPOCH - 86_400
    began = trio.current_time()
    sleeper.enqueue("sleeper", options=json.dumps({"deadline": EPOCH - 86_400 + began + 12}))
    await sleeper.burst()
    assert log.entries[-1] == (pytest.approx(began + 12), ("deadline", None))
