"""What a handler does, and what becomes of its job."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec
import pytest
import trio

from pulse_trio import Discard, Fixed, InvalidArguments, Job, RetryAfter, Snooze, Worker
from pulse_trio.observe import AttemptFailed, JobEnded, JobStarted, UnfitArgumentsReleased, UnknownKindReleased
from pulse_trio.testing.memory import MemoryStore

if TYPE_CHECKING:
    from support.stage import Recorder, Stage


@pytest.mark.parametrize(
    "value",
    [None, 0, "", [], {"a": [1, {"b": None}]}, "ünï\U0001f600", 1.5, True, (1, 2), datetime(2020, 1, 1, tzinfo=UTC),
     UUID(int=7), timedelta(seconds=1), b"bytes", {3, 4}],
    ids=repr,
)  # fmt: skip
async def test_a_handlers_value_is_the_jobs_result(value: Any, stage: Stage) -> None:
    @stage.handlers.job
    async def give() -> Any:
        return value

    job = await stage.ended("give")
    assert job.state == "completed"
    assert (job.result or "null") == msgspec.json.encode(value).decode()


async def test_arguments_arrive_typed(stage: Stage) -> None:
    got: list[Any] = []

    @stage.handlers.job
    async def take(job: Job, at: datetime, ids: list[UUID], note: str = "none") -> None:
        got.extend([job.kind, at, ids, note])

    await stage.ended("take", at="2020-01-01T00:00:00Z", ids=[str(UUID(int=1))])
    assert got == ["take", datetime(2020, 1, 1, tzinfo=UTC), [UUID(int=1)], "none"]


async def test_a_job_knows_who_it_is(stage: Stage) -> None:
    seen: list[Any] = []

    @stage.handlers.job(name="who am i")
    async def handler(job: Job) -> None:
        seen.append((job.id, job.attempt, job.kind, job.queue, job.priority, job.max_attempts, job.cancel_reason))
        seen.append(job.deadline - trio.current_time())
        seen.append(repr(job))
        if job.attempt == 1:
            raise Snooze(5)

    job_id = stage.enqueue("who am i", queue="q", priority=3, max_attempts=9)
    async with stage.working():
        await trio.sleep(8)
    assert seen[0] == (job_id, 1, "who am i", "q", 3, 9, None)
    # Lease 30, margin 6.
    assert seen[1] == pytest.approx(24)
    assert seen[2] == f"<Job {job_id} 'who am i' attempt 1 of queue 'q'>"
    assert seen[3] == (job_id, 2, "who am i", "q", 3, 10, None)


class Odd(BaseException):
    """Neither an Exception nor Trio's."""


FAILURES: list[BaseException] = [
    ValueError("no"),
    ExceptionGroup("several", [ValueError("one"), KeyError("two")]),
    ExceptionGroup("nested", [ExceptionGroup("inner", [ValueError("deep")])]),
    SystemExit(3),
    KeyboardInterrupt(),
    Odd("odd"),
    BaseExceptionGroup("odd ones", [Odd("odd"), ValueError("even")]),
    GeneratorExit(),
    StopIteration(7),
    AssertionError(),
    TimeoutError(),
    trio.TooSlowError(),
    MemoryError(),
    RecursionError(),
]


@pytest.mark.parametrize("error", FAILURES, ids=repr)
@pytest.mark.parametrize("place", ["handler", "child"])
async def test_whatever_is_raised_fails_its_own_job_and_nobody_elses(
    error: BaseException, place: str, stage: Stage
) -> None:
    @stage.handlers.job
    async def bad(job: Job) -> None:
        if place == "child":
            job.nursery.start_soon(child)
            await trio.sleep_forever()
        await child()

    async def child() -> None:
        raise error

    @stage.handlers.job
    async def good() -> int:
        await trio.sleep(1)
        return 7

    siblings = [stage.enqueue("good") for _ in range(2)]
    failed = stage.enqueue("bad", max_attempts=1)
    siblings += [stage.enqueue("good") for _ in range(2)]
    await stage.burst()
    assert [stage.database.jobs[i].result for i in siblings] == ["7"] * 4
    job = stage.database.jobs[failed]
    assert job.state == "dead"
    assert job.error is not None
    assert type(error).__name__ in job.error


async def test_a_failure_backs_off_and_counts(stage: Stage) -> None:
    @stage.handlers.job
    async def bad() -> None:
        raise ValueError("the reason")

    job = await stage.ended("bad")
    assert job.state in ("retryable", "available")
    assert (job.failures, job.max_attempts, job.attempt) == (1, 20, 1)
    assert job.error is not None
    assert job.error.startswith("ValueError: the reason\n\nTraceback")
    assert __file__ in job.error
    assert "pulse_trio" not in job.error.replace(__file__, "")


async def test_a_job_is_dead_when_its_budget_is_used_up(stage: Stage) -> None:
    attempts: list[int] = []

    @stage.handlers.job
    async def bad(job: Job) -> None:
        attempts.append(job.attempt)
        raise ValueError

    job_id = stage.enqueue("bad", max_attempts=3)
    async with stage.working():
        await trio.sleep(60)
    assert attempts == [1, 2, 3]
    assert stage.database.state(job_id) == "dead"


@pytest.mark.parametrize(
    ("error", "state", "waits", "budget", "failures"),
    [
        (Snooze(300), "scheduled", 300, 21, 0),
        (Snooze(timedelta(minutes=5)), "scheduled", 300, 21, 0),
        (RetryAfter(300), "retryable", 300, 20, 1),
        (Discard("never"), "dead", 0, 20, 1),
        (ExceptionGroup("", [Snooze(100), Snooze(300), Snooze(200)]), "scheduled", 300, 21, 0),
        (ExceptionGroup("", [RetryAfter(300), ExceptionGroup("", [RetryAfter(1)])]), "retryable", 300, 20, 1),
        (ExceptionGroup("", [Discard("a"), Discard("b")]), "dead", 0, 20, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", ["handler", "children"])
async def test_a_handlers_wish_is_granted_alone_and_in_groups(
    error: Exception, state: str, waits: float, budget: int, failures: int, place: str, stage: Stage
) -> None:
    @stage.handlers.job
    async def wish(job: Job) -> None:
        if place == "handler":
            raise error
        for inner in error.exceptions if isinstance(error, ExceptionGroup) else [error]:
            job.nursery.start_soon(raising, inner)

    async def raising(inner: Exception) -> None:
        raise inner

    job = await stage.ended("wish")
    assert job.state == state
    assert (job.max_attempts, job.failures) == (budget, failures)
    if waits:
        assert job.run_at - trio.current_time() == pytest.approx(waits, abs=1)


async def test_wishes_that_contradict_each_other_are_a_failure(stage: Stage) -> None:
    @stage.handlers.job
    async def mixed() -> None:
        raise ExceptionGroup("", [Snooze(300), ValueError("and that")])

    job = await stage.ended("mixed")
    assert (job.failures, job.attempt) == (1, 1)
    assert stage.outcomes() == ["failed"]


async def test_snoozing_for_ever_uses_no_budget(stage: Stage) -> None:
    attempts: list[int] = []

    @stage.handlers.job
    async def sleepy(job: Job) -> None:
        attempts.append(job.attempt)
        if job.attempt < 6:
            raise Snooze(1)

    job_id = stage.enqueue("sleepy", max_attempts=1)
    async with stage.working():
        await trio.sleep(60)
    assert attempts == [1, 2, 3, 4, 5, 6]
    assert stage.database.state(job_id) == "completed"


@pytest.mark.parametrize(
    "args", ['{"n": "seven"}', "{}", '{"n": 1, "more": 2}', '{"n": null}', '{"m": 1}'], ids=lambda args: args
)
async def test_arguments_that_do_not_fit_are_put_back_for_another_version_and_say_why(
    args: str, stage: Stage, events: Recorder
) -> None:
    @stage.handlers.job
    async def typed(n: int) -> None: ...

    good = stage.enqueue("typed", n=1)
    bad = stage.database.enqueue("typed", args)
    await stage.burst()
    job = stage.database.jobs[bad]
    assert (job.state, job.max_attempts - job.attempt) == ("scheduled", 20)
    (told,) = events.of(UnfitArgumentsReleased)
    assert told.job_id == bad
    assert "Arguments do not fit typed(n: int)" in told.error.replace("'int'", "int")
    assert stage.database.state(good) == "completed"


async def test_bad_arguments_that_a_handler_itself_raises_are_a_failure_like_any_other(stage: Stage) -> None:
    # A bug in the handler, mended by the next deploy: the job must still be there then.
    @stage.handlers.job
    async def inner(n: int) -> None: ...

    @stage.handlers.job
    async def outer() -> None:
        inner.request("seven")  # type: ignore[arg-type]

    job = await stage.ended("outer")
    assert stage.outcomes() == ["failed"]
    assert job.state != "dead"
    assert job.error is not None
    assert job.error.startswith("InvalidArguments")


async def test_a_result_that_cannot_be_written_is_a_failure(stage: Stage) -> None:
    @stage.handlers.job
    async def give() -> object:
        return object()

    job = await stage.ended("give", max_attempts=1)
    assert job.state == "dead"
    assert job.error is not None
    assert "object" in job.error


@pytest.mark.parametrize("value", ["\0", msgspec.Raw(b'"\\ud800"'), "x" * 1_048_577], ids=["nul", "surrogate", "large"])
async def test_a_result_that_postgresql_cannot_hold_says_so(value: Any, stage: Stage) -> None:
    @stage.handlers.job
    async def give() -> Any:
        return value

    job = await stage.ended("give", max_attempts=1)
    assert job.state == "dead"
    assert job.error is not None
    assert "The result of 'give'" in job.error


async def test_an_unknown_kind_is_put_back_without_using_its_budget(stage: Stage, events: Recorder) -> None:
    job = await stage.ended("of another deploy")
    assert job.state == "scheduled"
    assert (job.attempt, job.max_attempts, job.failures) == (1, 21, 0)
    assert job.run_at - trio.current_time() == pytest.approx(15, abs=1)
    assert events.of(UnknownKindReleased) == [UnknownKindReleased(job.id, "of another deploy")]


@pytest.mark.parametrize(("options", "delay"), [(None, 120), ('{"tree": 1}', 15)])
async def test_a_durable_job_of_an_unknown_kind_is_put_back_for_no_longer_after_suspensions(
    options: str | None, delay: float, stage: Stage
) -> None:
    """Its attempts are those of suspensions, too: each that had suspended three times waited two minutes in a deploy."""
    job = stage.database.jobs[stage.enqueue("of another deploy", options=options)]
    job.attempt = 7
    await stage.burst()
    assert (job.state, job.attempt) == ("scheduled", 8)
    assert job.run_at - trio.current_time() == pytest.approx(delay, abs=1)


@pytest.mark.parametrize("options", ['{"timeout": "soon"}', "[]", '{"backoff_base": "x"}', "3"])
async def test_options_that_nobody_can_read_kill_that_job_alone(options: str, stage: Stage) -> None:
    @stage.handlers.job
    async def fine() -> None: ...

    odd = stage.enqueue("fine", options=options, max_attempts=1)
    good = stage.enqueue("fine")
    await stage.burst()
    assert stage.database.state(odd) == "dead"
    assert stage.database.state(good) == "completed"


async def test_events_tell_each_attempts_life(stage: Stage, events: Recorder) -> None:
    @stage.handlers.job
    async def slow(job: Job) -> None:
        await trio.sleep(3)
        if job.attempt == 1:
            raise RetryAfter(0)

    job_id = stage.enqueue("slow", queue="q")
    await stage.burst()
    assert events.of(JobStarted) == [JobStarted(job_id, "slow", "q", 1), JobStarted(job_id, "slow", "q", 2)]
    ended = events.of(JobEnded)
    assert [(e.job_id, e.kind, e.queue, e.attempt, e.outcome, e.seconds) for e in ended] == [
        (job_id, "slow", "q", 1, "failed", 3.0),
        (job_id, "slow", "q", 2, "completed", 3.0),
    ]
    assert ended[0].error is not None
    assert ended[1].error is None


# Threads


async def test_a_plain_function_runs_in_a_thread_with_its_arguments(stage: Stage) -> None:
    @stage.handlers.job
    def plain(job: Job, n: int, *, m: int = 2) -> list[Any]:
        return [trio.from_thread.run_sync(trio.current_time) is not None, job.attempt, n, m]

    assert (await stage.ended("plain", n=1)).result == "[true,1,1,2]"


async def test_a_failure_in_a_thread_is_the_jobs(stage: Stage) -> None:
    @stage.handlers.job
    def plain() -> None:
        raise ValueError("in the thread")

    job = await stage.ended("plain")
    assert job.failures == 1
    assert job.error is not None
    assert job.error.startswith("ValueError: in the thread")


async def test_unfit_arguments_of_a_thread_put_the_job_back(stage: Stage) -> None:
    @stage.handlers.job
    def plain(n: int) -> None: ...

    assert (await stage.ended("plain", n="x")).state == "scheduled"
    assert stage.outcomes() == ["released"]


async def test_invalid_arguments_can_still_be_discarded_by_hand(stage: Stage) -> None:
    @stage.handlers.job
    async def strict() -> None:
        try:
            raise InvalidArguments("mine")
        except InvalidArguments as error:
            raise Discard("cannot ever work") from error

    job = await stage.ended("strict")
    assert job.state == "dead"
    assert job.error is not None
    assert job.error.startswith("Discard: cannot ever work")


async def test_the_handlers_own_policy_decides_about_a_failure_a_childs_and_a_timeout(stage: Stage) -> None:
    @stage.handlers.job(retry={KeyError: Fixed(40), TimeoutError: Fixed(50)}, discard_on=ValueError)
    async def fail(job: Job, how: str) -> None:
        match how:
            case "raise":
                raise KeyError
            case "child":
                job.nursery.start_soon(bad)
                await trio.sleep_forever()
            case "discard":
                raise ValueError
            case _:
                await trio.sleep_forever()

    async def bad() -> None:
        raise KeyError

    waits = {"raise": 40, "child": 40, "discard": None, "timeout": 50}
    ids = {how: stage.enqueue("fail", how=how, timeout=1 if how == "timeout" else None) for how in waits}
    async with stage.working():
        await trio.sleep(1.5)
        for how, wait in waits.items():
            job = stage.database.jobs[ids[how]]
            assert job.state == ("dead" if wait is None else "retryable"), how
    settled = {o.claim.id: o for o in stage.store.settled}
    assert {how: settled[ids[how]].delay for how in waits} == {how: wait or 0 for how, wait in waits.items()}


async def test_a_failed_attempt_is_told_with_its_exception_as_an_object(stage: Stage, events: Recorder) -> None:
    class Odd(Exception):
        pass

    raised = Odd("why")

    @stage.handlers.job
    async def broken(how: str) -> None:
        if how == "raise":
            raise raised
        if how == "group":
            raise ExceptionGroup("two", [ValueError("a"), ValueError("b")])
        if how == "discard":
            raise Discard("no use")

    for how in ("raise", "group", "discard", "fine"):
        stage.enqueue("broken", how=how)
    await stage.burst()
    told = {event.job_id: event for event in events.of(AttemptFailed)}
    assert [(e.outcome, type(e.exception).__name__) for _, e in sorted(told.items())][:3] == [
        ("failed", "Odd"),
        ("failed", "ExceptionGroup"),
        ("discarded", "Discard"),
    ]
    assert told[1].exception is raised
    assert raised.__traceback__ is not None


@pytest.mark.parametrize("raised", [ZeroDivisionError, SystemExit, Odd])
async def test_an_instrument_that_raises_costs_no_job_and_is_reported_once(
    raised: type[BaseException], stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def listeners(self) -> dict[Any, Any]:
            return dict.fromkeys((JobStarted, JobEnded), self.fail)

        def fail(self, event: Any) -> None:
            raise raised("in the instrument")

    @stage.handlers.job
    async def fine() -> int:
        return 1

    ids = [stage.enqueue("fine") for _ in range(5)]
    with caplog.at_level("ERROR", "pulse_trio"):
        store = MemoryStore(stage.database)
        await Worker(stage.handlers, "", store=store, instruments=[Broken()], burst=True).run()  # type: ignore[arg-type]
    assert {stage.database.state(i) for i in ids} == {"completed"}
    (said,) = caplog.records
    assert "the instrument's" in said.getMessage()
    assert said.exc_info is not None


async def test_an_embedded_worker_logs_what_a_person_must_know(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    @stage.handlers.job
    async def broken() -> None:
        raise ValueError("no luck")

    stage.enqueue("broken")
    with caplog.at_level("INFO", "pulse_trio"):
        async with stage.working():
            await trio.sleep(1)
        assert "attempt 1 failed" in caplog.text
        assert "worker 1 started" in caplog.text or "started: all queues" in caplog.text
        caplog.clear()
        async with stage.working(log=False):
            await trio.sleep(1)
        assert caplog.text == ""


async def test_a_heartbeat_above_a_third_of_the_lease_is_warned_of_and_works(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    sessions: list[int] = []

    @stage.handlers.job
    async def long(job: Job) -> None:
        sessions.append(job.session)
        await trio.sleep(100)

    job_id = stage.enqueue("long")
    await stage.burst(lease=60, heartbeat=30)
    assert stage.database.state(job_id) == "completed"
    assert sessions == [stage.store.session]
    assert "heartbeat is 30 s, above a third of the lease (60 s)" in caplog.text
    caplog.clear()
    await stage.burst(lease=60, heartbeat=20)
    assert "above a third" not in caplog.text
