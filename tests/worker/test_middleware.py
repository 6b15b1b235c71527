"""Middleware: around every attempt, in order, and none loses a job."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import ConfigurationError, Discard, Handlers, Job, Snooze, current_job
from pulse_trio.observe import JobEnded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from support.stage import Stage

    Call = Callable[[], Awaitable[Any]]

tenant: ContextVar[str] = ContextVar("tenant", default="none")


async def test_the_first_is_the_outermost_and_an_included_registrys_are_the_innermost(stage: Stage) -> None:
    told: list[str] = []
    other = Handlers()

    def named(name: str) -> Any:
        async def middleware(job: Job, call: Call) -> Any:
            assert current_job().id == job.id
            told.append(f"{name} before {job.kind}")
            value = await call()
            told.append(f"{name} after")
            return f"{name}({value})"

        return middleware

    @other.job
    async def theirs() -> str:
        told.append("runs")
        return "x"

    @stage.handlers.job
    async def ours() -> str:
        return "y"

    stage.handlers.middleware(named("a"))
    stage.handlers.include(other)
    stage.handlers.middleware(named("b"))
    other.middleware(named("c"))
    assert (await stage.ended("theirs")).result == '"a(b(c(x)))"'
    assert told == [
        *("a before theirs", "b before theirs", "c before theirs", "runs"),
        *("c after", "b after", "a after"),
    ]
    assert (await stage.ended("ours")).result == '"a(b(y))"'


@pytest.mark.real_clock
@pytest.mark.parametrize("runs", ["trio", "asyncio", "thread"])
async def test_it_is_around_handlers_of_every_kind_and_its_context_reaches_them(runs: Any, stage: Stage) -> None:
    @stage.handlers.middleware
    async def of_tenant(job: Job, call: Call) -> Any:
        token = tenant.set(f"tenant of {job.id}")
        try:
            return await call()
        finally:
            tenant.reset(token)

    async def work() -> str:
        return tenant.get()

    def plain() -> str:
        return tenant.get()

    stage.handlers.job(name="work", runs=runs)(plain if runs == "thread" else work)
    for _ in range(3):
        job = await stage.ended("work")
        assert job.result == f'"tenant of {job.id}"'


@pytest.mark.parametrize(
    "what", [ValueError("no"), Snooze(60), Discard("never")], ids=["failed", "snoozed", "discarded"]
)
@pytest.mark.parametrize("where", ["handler", "before", "after"])
async def test_what_a_middleware_or_the_handler_raises_is_the_outcome(
    what: Exception, where: str, stage: Stage
) -> None:
    @stage.handlers.middleware
    async def raising(job: Job, call: Call) -> Any:
        if where == "before":
            raise what
        value = await call()
        if where == "after":
            raise what
        return value

    @stage.handlers.job
    async def work() -> None:
        if where == "handler":
            raise what

    await stage.ended("work")
    assert stage.outcomes() == [{ValueError: "failed", Snooze: "snoozed", Discard: "discarded"}[type(what)]]


async def test_one_may_answer_an_exception_with_a_result(stage: Stage) -> None:
    @stage.handlers.middleware
    async def forgiving(job: Job, call: Call) -> Any:
        try:
            return await call()
        except LookupError:
            return "none"

    @stage.handlers.job
    async def work() -> None:
        raise LookupError

    assert (await stage.ended("work")).result == '"none"'


@pytest.mark.parametrize("how", ["returns", "returns it unawaited", "swallows"])
async def test_one_that_does_not_call_on_fails_the_attempt_and_is_named(how: str, stage: Stage) -> None:
    ran: list[int] = []

    @stage.handlers.middleware
    async def forgetful(job: Job, call: Call) -> Any:
        if how == "returns it unawaited":
            return call()
        if how == "swallows":
            return None
        return 5

    @stage.handlers.job
    async def work() -> None:
        ran.append(1)

    job = await stage.ended("work")
    assert (ran, stage.outcomes()) == ([], ["failed"])
    assert job.error is not None
    assert "forgetful returned without `await call()`, so the handler did not run" in job.error


async def test_one_that_calls_twice_fails_the_attempt_and_the_handler_runs_once(stage: Stage) -> None:
    ran: list[int] = []

    @stage.handlers.middleware
    async def eager(job: Job, call: Call) -> Any:
        await call()
        return await call()

    @stage.handlers.job
    async def work() -> None:
        ran.append(1)

    job = await stage.ended("work")
    assert (ran, stage.outcomes()) == ([1], ["failed"])
    assert job.error is not None
    assert "eager awaited call() twice" in job.error


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("reason", ["timeout", "user", "shutdown", "program"])
async def test_one_that_swallows_a_cancellation_does_not_change_the_outcome(
    calls: bool, reason: str, stage: Stage
) -> None:
    began = trio.Event()

    @stage.handlers.middleware
    async def swallowing(job: Job, call: Call) -> Any:
        try:
            began.set()
            if calls:
                return await call()
            await trio.sleep_forever()
        except trio.Cancelled:  # noqa: ASYNC103 -- what is tried
            return "all is well"  # noqa: ASYNC104 -- what is tried

    @stage.handlers.job
    async def work() -> None:
        await trio.sleep_forever()

    job_id = stage.enqueue("work", timeout=5.0 if reason == "timeout" else None)
    async with trio.open_nursery() as nursery:
        worker = await nursery.start(stage.worker(grace=1.0).run)
        await began.wait()
        if reason == "user":
            stage.database.cancel(job_id, None)
        if reason == "shutdown":
            worker.stop_now()
        elif reason == "program":
            nursery.cancel_scope.cancel()
        else:
            await stage.events.first(JobEnded)
            worker.stop()
    expected = {"timeout": "timeout", "user": "cancelled", "shutdown": "released", "program": "released"}
    assert stage.outcomes() == [expected[reason]]


async def test_a_timeout_of_its_own_is_its_own_affair(stage: Stage) -> None:
    @stage.handlers.middleware
    async def bounded(job: Job, call: Call) -> Any:
        with trio.move_on_after(1):
            return await call()
        return "late"

    @stage.handlers.job
    async def work() -> None:
        await trio.sleep(5)

    job = await stage.ended("work")
    assert (job.state, job.result) == ("completed", '"late"')


async def test_it_is_given_resources(stage: Stage) -> None:
    @stage.handlers.resource
    async def names():  # type: ignore[no-untyped-def]
        yield {"work": "the work"}

    @stage.handlers.middleware
    async def naming(job: Job, call: Call, names) -> Any:  # type: ignore[no-untyped-def]
        await call()
        return names[job.kind]

    @stage.handlers.job
    async def work() -> None: ...

    assert (await stage.ended("work")).result == '"the work"'


async def test_one_that_asks_for_what_is_not_declared_is_an_error_at_the_start(stage: Stage) -> None:
    @stage.handlers.middleware
    async def asking(job: Job, call: Call, thing: int) -> Any:
        return await call()

    @stage.handlers.job
    async def work() -> None: ...

    with pytest.raises(ConfigurationError, match="asking asks for the resource 'thing'"):
        await stage.worker(burst=True).run()


def test_what_cannot_be_a_middleware_is_refused() -> None:
    handlers = Handlers()

    def plain(job: Job, call: Call) -> None: ...
    async def one(job: Job) -> None: ...
    async def generator(job: Job, call: Call) -> AsyncIterator[int]:
        yield 1

    cases: list[Any] = [plain, one, generator, 5]
    for wrong in cases:
        with pytest.raises(ConfigurationError, match="The middleware "):
            handlers.middleware(wrong)


async def test_a_handler_without_middleware_is_called_directly(stage: Stage) -> None:
    """It costs nothing where there is none: no function is around the call."""
    frames: list[str] = []

    @stage.handlers.job
    async def work() -> None:
        import sys

        frame = sys._getframe(1)
        while frame.f_back is not None:
            frames.append(frame.f_code.co_filename)
            frame = frame.f_back

    await stage.ended("work")
    assert not any(name.endswith("middleware.py") for name in frames if "pulse_trio" in name)
