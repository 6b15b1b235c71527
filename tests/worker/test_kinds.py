"""The kinds of handlers, on a store in memory and the real clock: threads and processes know no other.

The table of docs/explanation/handler-kinds.md, cell by cell, and what each kind has of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import ConfigurationError, Handlers, Job
from pulse_trio.observe import FenceLost, LeaseUnproven, TasksLeftBehind
from pulse_trio.states import storable
from pulse_trio.worker.jobs.kinds import in_asyncio, in_process
from pulse_trio.worker.jobs.kinds.asyncio_thread import LoopThread
from pulse_trio.worker.jobs.running_job import RunningJob
from support import kinds_app
from support.ear import Ear
from support.stage import Stage, parts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
    from pathlib import Path

    from pulse_trio import Worker

KINDS = ["trio", "asyncio", "thread", "process"]
CAN_BE_CANCELLED = ["trio", "asyncio", "process"]
SETTINGS: dict[str, Any] = {"lease": 10.0, "heartbeat": 0.1, "cleanup": 2.0, "grace": 10.0, "process_slots": 2}
WITHIN = 30.0


def but(**changes: Any) -> dict[str, Any]:
    """The settings with these changed."""
    return SETTINGS | changes


pytestmark = pytest.mark.real_clock  # There are real threads and processes here.


@pytest.fixture
async def ear(tmp_path: Path) -> AsyncGenerator[Ear]:
    ear = Ear(tmp_path / "ear")
    await ear.open()
    yield ear
    ear.close()


@pytest.fixture
def stage() -> Stage:
    stage = Stage()
    stage.handlers.include(kinds_app.handlers)
    return stage


@asynccontextmanager
async def running(
    stage: Stage, ear: Ear, kind: str, what: str = "wait", **how: Any
) -> AsyncGenerator[tuple[Worker, int]]:
    """A worker and a job whose handler runs; at the end of the block the worker is stopped and waited for."""
    job_id = stage.enqueue(kind, what=what, ear=ear.path, **how)
    with trio.fail_after(WITHIN):
        async with stage.working(**SETTINGS) as worker:
            heard = await ear.hear("started")
            assert heard["reason"] is None
            yield worker, job_id


async def at_once(stage: Stage, kind: str, what: str, **how: Any) -> Any:
    job_id = stage.enqueue(kind, what=what, ear="", **how)
    with trio.fail_after(WITHIN):
        await stage.burst(**SETTINGS)
    return stage.database.jobs[job_id]


async def until(holds: Callable[[], object]) -> None:
    with trio.fail_after(WITHIN):
        while not holds():  # noqa: ASYNC110 -- the store in memory and the system's processes tell nobody
            await trio.sleep(0.01)


async def settled(stage: Stage) -> None:
    await until(lambda: stage.store.settled)


# Success and failure


@pytest.mark.parametrize("kind", KINDS)
async def test_a_value_is_the_result(kind: str, stage: Stage) -> None:
    job = await at_once(stage, kind, "succeed")
    assert (job.state, job.result) == ("completed", '"the value"')


@pytest.mark.parametrize("kind", KINDS)
async def test_an_exception_is_a_failure_told_with_its_place(kind: str, stage: Stage) -> None:
    job = await at_once(stage, kind, "fail")
    assert (job.failures, stage.outcomes()) == (1, ["failed"])
    assert job.error.startswith("ValueError: the reason\n\nTraceback")
    assert 'kinds_app.py", line' in job.error
    assert "pulse_trio/worker" not in job.error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("what", "outcome", "delay"),
    [("snooze", "snoozed", 300), ("retry after", "failed", 300), ("discard", "discarded", 0)],
)
async def test_a_wish_is_granted(kind: str, what: str, outcome: str, delay: float, stage: Stage) -> None:
    await at_once(stage, kind, what)
    (settled,) = stage.store.settled
    assert (settled.kind, settled.delay) == (outcome, delay)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["exit", "group"])
async def test_whatever_is_raised_is_the_jobs_own(kind: str, what: str, stage: Stage) -> None:
    other = stage.enqueue("trio", what="succeed", ear="")
    job = await at_once(stage, kind, what, max_attempts=1)
    assert job.state == "dead"
    assert ("SystemExit" if what == "exit" else "ValueError: one") in job.error
    assert stage.database.state(other) == "completed"


@pytest.mark.parametrize("what", ["exit", "interrupt", "interrupts", "local"])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_never_tried_again_is_known_by_its_class_wherever_it_was_raised(
    kind: str, what: str, stage: Stage
) -> None:
    """Of a process's exception the worker knew its own class alone, and no `BaseException`."""
    handler = next(one for one in kinds_app.handlers if one.kind == kind)
    never = (SystemExit, KeyboardInterrupt, OSError)
    stage.handlers.job(name="picky", runs=handler.runs, discard_on=never)(handler.function)
    stage.handlers.job(name="stubborn", runs=handler.runs, discard_on=ConnectionError)(handler.function)
    dead = await at_once(stage, "picky", what, max_attempts=3)
    tried = await at_once(stage, "stubborn", what, max_attempts=3)
    assert (dead.state, tried.state) == ("dead", "retryable")
    assert {"exit": "SystemExit: 3", "local": "Throttled: too many"}.get(what, "KeyboardInterrupt") in dead.error


@pytest.mark.parametrize("kind", KINDS)
async def test_arguments_that_do_not_fit_are_left_to_a_worker_of_another_version(kind: str, stage: Stage) -> None:
    job_id = stage.enqueue(kind, which="unknown")
    await stage.burst(**SETTINGS)
    assert stage.database.state(job_id) == "scheduled"
    assert stage.outcomes() == ["released"]


# Timeout, cancellation, a lost fence, shutdown


@pytest.mark.parametrize("kind", CAN_BE_CANCELLED)
async def test_a_timeout_ends_the_handler(kind: str, stage: Stage, ear: Ear) -> None:
    async with running(stage, ear, kind, timeout=0.3):
        heard = await ear.hear("ended")
        await settled(stage)
    assert heard["reason"] == "timeout"
    assert stage.outcomes() == ["timeout"]


@pytest.mark.parametrize("kind", CAN_BE_CANCELLED)
async def test_a_cancellation_ends_the_handler(kind: str, stage: Stage, ear: Ear) -> None:
    async with running(stage, ear, kind) as (worker, _):
        cancel(worker)
        heard = await ear.hear("ended")
        await settled(stage)
    assert heard["reason"] == "user"
    assert stage.outcomes() == ["cancelled"]


@pytest.mark.parametrize("kind", CAN_BE_CANCELLED)
async def test_a_lost_fence_ends_the_handler_and_nothing_is_reported(kind: str, stage: Stage, ear: Ear) -> None:
    async with running(stage, ear, kind) as (_, job_id):
        stranger = stage.database.steal(job_id)
        heard = await ear.hear("ended")
    assert heard["reason"] == "fence-lost"
    assert stage.outcomes() == []
    assert stage.database.jobs[job_id].session == stranger


@pytest.mark.parametrize("kind", CAN_BE_CANCELLED)
async def test_a_shutdown_ends_the_handler_and_gives_the_job_back_unharmed(kind: str, stage: Stage, ear: Ear) -> None:
    async with running(stage, ear, kind) as (worker, job_id):
        worker.stop_now()
        heard = await ear.hear("ended")
    assert heard["reason"] == "shutdown"
    job = stage.database.jobs[job_id]
    assert (job.state, job.failures, job.max_attempts) == ("available", 0, 21)


@pytest.mark.parametrize("kind", CAN_BE_CANCELLED)
async def test_a_cancelled_program_ends_the_handler(kind: str, stage: Stage, ear: Ear) -> None:
    job_id = stage.enqueue(kind, what="wait", ear=ear.path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.worker(**SETTINGS).run)
        await ear.hear("started")
        nursery.cancel_scope.cancel()
    assert (await ear.hear("ended"))["reason"] == "shutdown"
    assert stage.database.state(job_id) == "available"


@pytest.mark.parametrize(
    ("kind", "what"), [*((kind, "wait") for kind in CAN_BE_CANCELLED), ("process", "wait, then say")]
)
async def test_a_cancelled_scope_of_a_middleware_ends_the_handler_and_not_the_job(
    kind: str, what: str, stage: Stage, ear: Ear
) -> None:
    own = trio.CancelScope()

    @stage.handlers.middleware
    async def answering(job: Job, call: Callable[[], Awaitable[Any]]) -> Any:
        with own:
            return await call()
        return f"{job.cancel_reason}: the middleware's answer"

    async with running(stage, ear, kind, what) as (_, job_id):
        own.cancel()
        assert (await ear.hear("ended"))["reason"] is None
        await settled(stage)
    assert stage.outcomes() == ["completed"]
    assert stage.database.jobs[job_id].result == '"None: the middleware\'s answer"'


@pytest.mark.parametrize(("what", "reason"), [("timeout", "timeout"), ("cancel", "user"), ("shutdown", "shutdown")])
async def test_a_thread_goes_on_with_its_lease_and_what_it_returns_counts(
    what: str, reason: str, stage: Stage, ear: Ear
) -> None:
    async with running(stage, ear, "thread", timeout=0.3 if what == "timeout" else None) as (worker, job_id):
        if what == "cancel":
            cancel(worker)
        elif what == "shutdown":
            worker.stop_now()
        heard = await ear.hear("ended")
    assert heard["reason"] == reason
    job = stage.database.jobs[job_id]
    assert (job.state, job.result) == ("completed", '"what there was"')


async def test_a_threads_late_result_is_refused_after_a_lost_fence(stage: Stage, ear: Ear) -> None:
    async with running(stage, ear, "thread") as (_, job_id):
        stranger = stage.database.steal(job_id)
        heard = await ear.hear("ended")
    assert heard["reason"] == "fence-lost"
    assert stage.database.jobs[job_id].session == stranger
    assert stage.outcomes() == []
    assert [event.during for event in stage.events.of(FenceLost)] == ["report of completed"]


def cancel(worker: Worker) -> None:
    """What a beat or a notification does when somebody has asked for the job's cancellation."""
    (held,) = parts(worker).jobs.held
    held.cancel("user")


# asyncio


def register(stage: Stage, function: Callable[..., Any]) -> None:
    stage.handlers.job(name="own", runs="asyncio")(function)


async def own(stage: Stage, **how: Any) -> Any:
    job_id = stage.enqueue("own", **how)
    with trio.fail_after(WITHIN):
        await stage.burst(**SETTINGS)
    return stage.database.jobs[job_id]


async def test_what_an_asyncio_task_starts_while_it_is_ended_is_ended_too(stage: Stage) -> None:
    import asyncio

    ends: list[str] = []
    kept: list[asyncio.Task[None]] = []

    async def last() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ends.append("last")

    async def first() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            kept.append(asyncio.create_task(last()))
            await asyncio.sleep(0)  # noqa: ASYNC102 -- what is tried

    async def own() -> None:
        kept.append(asyncio.create_task(first()))
        await asyncio.sleep(0.01)

    stage.handlers.job(name="own", runs="asyncio")(own)
    job_id = stage.enqueue("own")
    async with stage.working():
        with trio.fail_after(500):
            while stage.database.state(job_id) != "completed":  # noqa: ASYNC110 -- the store in memory tells nobody
                await trio.sleep(0.01)
        assert ends == ["last"]


async def test_asyncios_own_tools_work_unchanged(stage: Stage) -> None:
    import asyncio

    import sniffio

    async def handler() -> list[Any]:
        async def double(n: int) -> int:
            await asyncio.sleep(0.01)
            return 2 * n

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(double(n)) for n in range(3)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        read = await reader.read()
        writer.close()
        server.close()
        thread = await asyncio.to_thread(lambda: 7)
        gathered = await asyncio.gather(double(1), double(2))
        assert asyncio.current_task() is not None
        return [[t.result() for t in tasks], len(read), thread, gathered, sniffio.current_async_library()]

    register(stage, handler)
    job = await own(stage)
    assert job.result == '[[0,2,4],0,7,[2,4],"asyncio"]', job.error


async def test_tasks_that_a_handler_leaves_behind_end_with_it(stage: Stage) -> None:
    import asyncio

    ended: list[str] = []

    async def handler() -> str:
        async def outlive(name: str) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)  # noqa: ASYNC102 -- what is tried
                ended.append(name)

        async def nested() -> None:
            asyncio.create_task(outlive("grandchild"), name="grandchild")  # noqa: RUF006 -- left behind is the test

        asyncio.create_task(outlive("child"), name="child")  # noqa: RUF006
        await asyncio.create_task(nested())
        await asyncio.sleep(0)
        return "done"

    register(stage, handler)
    job = await own(stage)
    assert (job.state, sorted(ended)) == ("completed", ["child", "grandchild"])
    (event,) = stage.events.of(TasksLeftBehind)
    assert (event.job_id, event.kind, sorted(event.tasks)) == (job.id, "own", ["child", "grandchild"])


async def test_a_task_that_is_made_as_the_last_one_ends_is_ended_too(stage: Stage) -> None:
    """By a callback, as clients make one that connect again: it went on for as long as the worker."""
    import asyncio

    made: list[asyncio.Task[None]] = []

    async def read() -> None:
        await asyncio.Event().wait()

    def reconnect(_: object = None) -> None:
        if len(made) < 3:
            made.append(asyncio.create_task(read()))
            made[-1].add_done_callback(reconnect)

    async def handler() -> str:
        reconnect()
        await asyncio.sleep(0)
        return "done"

    register(stage, handler)
    job = await own(stage)
    assert (job.state, [task.cancelled() for task in made]) == ("completed", [True] * 3)


async def test_a_task_that_starts_itself_again_for_ever_is_cancelled_more_and_more_slowly(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept Trio's loop busy, so that jobs beside it lost their leases, and wrote 13,000 lines a second."""
    import asyncio

    monkeypatch.setattr(in_asyncio, "_PAUSE", 0.001)
    rounds = 30

    async def hydra() -> None:
        nonlocal rounds
        rounds -= 1
        try:
            await asyncio.Event().wait()
        finally:
            if rounds:
                asyncio.create_task(hydra())  # noqa: RUF006 -- what is tried

    async def handler() -> str:
        asyncio.create_task(hydra())  # noqa: RUF006 -- what is tried
        await asyncio.sleep(0)
        return "done"

    register(stage, handler)
    assert ((await own(stage)).state, rounds) == ("completed", 0)
    assert len(stage.events.of(TasksLeftBehind)) == 2


async def test_a_cancellation_that_a_handler_raises_itself_is_its_own_failure(stage: Stage) -> None:
    import asyncio

    async def handler() -> None:
        raise asyncio.CancelledError("by itself")

    register(stage, handler)
    other = stage.enqueue("asyncio", what="succeed", ear="")
    job = await own(stage, max_attempts=1)
    assert job.state == "dead"
    assert "CancelledError" in (job.error or "")
    assert stage.database.state(other) == "completed"


async def test_an_exception_in_a_callback_ends_neither_the_loop_nor_the_worker(stage: Stage) -> None:
    import asyncio

    async def handler() -> str:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0.01)
        return "unharmed"

    register(stage, handler)
    assert (await own(stage)).result == '"unharmed"'


async def test_asyncio_jobs_share_one_loop(stage: Stage) -> None:
    import asyncio

    loops: set[int] = set()

    async def handler() -> None:
        loops.add(id(asyncio.get_running_loop()))

    register(stage, handler)
    for _ in range(5):
        stage.enqueue("own")
    await own(stage)
    assert len(loops) == 1


async def test_a_handler_that_stops_the_loop_or_ends_it_by_an_exit_ends_no_other(stage: Stage) -> None:
    import asyncio

    both = asyncio.Event()

    async def stops(how: str) -> str:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(None)
        if how == "stop":
            loop.stop()
        else:
            loop.call_soon(exit_now)
        await asyncio.sleep(0.01)
        both.set()
        return how

    def exit_now() -> None:
        raise SystemExit(3)

    async def waits() -> str:
        await both.wait()
        return "unharmed"

    stage.handlers.job(name="waits", runs="asyncio")(waits)
    stage.handlers.job(name="stops", runs="asyncio")(stops)
    jobs = [stage.enqueue("waits"), stage.enqueue("stops", how="stop"), stage.enqueue("stops", how="exit")]
    with trio.fail_after(WITHIN):
        await stage.burst(**SETTINGS)
    assert [stage.database.jobs[i].result for i in jobs] == ['"unharmed"', '"stop"', '"exit"']


async def test_the_context_of_the_worker_is_that_of_an_asyncio_handler(stage: Stage) -> None:
    import asyncio

    import sniffio

    variable: ContextVar[str] = ContextVar("variable")

    async def handler() -> list[str]:
        async def child() -> str:
            return variable.get()

        told = [await asyncio.create_task(child()), await asyncio.to_thread(variable.get)]
        variable.set("the handler's")
        return [*told, sniffio.current_async_library()]

    register(stage, handler)
    variable.set("the worker's")
    # anyio.run(backend="trio") leaves this to all that it starts.
    mark = sniffio.current_async_library_cvar.set("trio")
    try:
        job = await own(stage)
    finally:
        sniffio.current_async_library_cvar.reset(mark)
    assert job.result == '["the worker\'s","the worker\'s","asyncio"]', job.error
    assert variable.get() == "the worker's"


async def test_the_asyncio_loop_is_on_the_workers_clock(stage: Stage) -> None:
    import asyncio

    async def handler(job: Job) -> bool:
        before = asyncio.get_running_loop().time()
        async with asyncio.timeout_at(job.deadline):
            await asyncio.sleep(0.01)
        return before < job.deadline <= before + 5

    register(stage, handler)
    began = trio.current_time()
    job = await own(stage, timeout=5)
    assert job.result == "true", job.error
    assert trio.current_time() < began + 5


async def test_an_asyncio_handler_tells_its_progress(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    said: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        RunningJob,
        "progress",
        lambda _, *what: said.append((threading.get_ident() == here, trio.current_time() > 0, *what)),
    )
    here = threading.get_ident()

    async def handler(job: Job) -> None:
        await job.progress(0.5, "half\0of it")
        with pytest.raises(ValueError, match="a fraction"):
            await job.progress(2)

    register(stage, handler)
    job = await own(stage)
    assert job.state == "completed", job.error
    assert said == [(True, True, 0.5, storable("half\0of it"))]


async def test_a_blocked_asyncio_loop_keeps_no_heartbeat_and_no_other_kind_back(stage: Stage) -> None:
    import threading

    renewed, freed = threading.Event(), threading.Event()

    def blocks() -> bool:
        # Longer than a lease, by the beats that are accepted meanwhile.
        return renewed.wait(WITHIN) and freed.wait(WITHIN)

    async def handler() -> bool:
        return blocks()

    async def on_trio() -> None:
        freed.set()

    register(stage, handler)
    stage.handlers.job(name="other")(on_trio)
    job_id = stage.enqueue("own")
    with trio.fail_after(2 * WITHIN):
        async with stage.working(**but(lease=1.0, heartbeat=0.1)) as worker:
            await until(lambda: parts(worker).jobs.held)
            (held,) = parts(worker).jobs.held
            first = held.lease_deadline
            await until(lambda: held.lease_deadline > first + 1.0)
            renewed.set()
            stage.enqueue("other")
            await until(lambda: stage.database.state(job_id) == "completed")
    assert stage.database.jobs[job_id].result == "true"


async def test_a_lease_that_ends_while_trios_loop_is_blocked_cancels_the_asyncio_handler_meanwhile(
    stage: Stage,
) -> None:
    import asyncio
    import threading

    began, ended = threading.Event(), threading.Event()
    reasons: list[object] = []

    async def handler(job: Job) -> None:
        if job.attempt > 1:
            return
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            reasons.append(job.cancel_reason)
            ended.set()

    async def on_trio() -> bool:
        await until(began.is_set)
        # From here on Trio's loop does not turn until the other handler has ended.
        return ended.wait(WITHIN)

    register(stage, handler)
    stage.handlers.job(name="blocks")(on_trio)
    stage.enqueue("blocks")
    job_id = stage.enqueue("own")
    with trio.fail_after(3 * WITHIN):
        async with stage.working(**but(lease=1.0, heartbeat=0.1)):
            await until(lambda: stage.events.of(LeaseUnproven))
    assert reasons == ["lease-unproven"]
    (event,) = stage.events.of(LeaseUnproven)
    assert event.job_id == job_id


async def test_asyncio_jobs_wait_for_a_loop_that_the_system_has_no_room_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals: list[BaseException] = [OSError(24, "Too many open files"), RuntimeError("can't start new thread")]
    ran: list[str] = []

    def loop_thread(*args: Any) -> LoopThread:
        if refusals:
            raise refusals.pop()
        assert ran == ["other"]
        return LoopThread(*args)

    async def handler() -> None:
        ran.append("own")

    async def other() -> None:
        ran.append("other")

    register(stage, handler)
    stage.handlers.job(name="other")(other)
    stage.enqueue("other")
    monkeypatch.setattr("pulse_trio.worker.jobs.kinds.in_asyncio.LoopThread", loop_thread)
    monkeypatch.setattr("pulse_trio.worker.jobs.kinds.in_asyncio._OPEN_AGAIN", 0.1)
    assert (await own(stage)).state == "completed"
    assert ran == ["other", "own"]


async def test_the_stack_of_a_blocked_asyncio_handler_is_where_it_blocks(stage: Stage) -> None:
    import asyncio
    import threading

    began, goes_on = threading.Event(), threading.Event()

    def blocks() -> None:
        began.set()
        goes_on.wait(WITHIN)

    async def waits() -> None:
        await asyncio.Event().wait()

    async def handler() -> None:
        waiting = asyncio.create_task(waits(), name="the one that waits")
        await asyncio.sleep(0)
        blocks()
        waiting.cancel()

    register(stage, handler)
    stage.enqueue("own")
    with trio.fail_after(WITHIN):
        async with stage.working(**SETTINGS) as worker:
            assert await trio.to_thread.run_sync(began.wait, WITHIN)
            (held,) = parts(worker).jobs.held
            stack = parts(worker).services.calls.where_is(held)
            goes_on.set()
            await settled(stage)
    running, waiting = sorted(stack.split("asyncio task ")[1:])
    assert "(running)\n" in running
    assert ", in blocks\n" in running
    assert "base_events" not in running
    assert waiting.startswith("the one that waits\n")
    assert ", in waits\n" in waiting


async def test_the_stack_of_a_thread_is_the_jobs_own_beside_a_worker_of_another_database(stage: Stage) -> None:
    import threading

    began, ends = threading.Barrier(3), threading.Event()

    def work() -> None:
        began.wait(WITHIN)
        ends.wait(WITHIN)

    def first() -> None:
        work()

    def second() -> None:
        work()

    other = Stage()
    stage.handlers.job(name="own", runs="thread")(first)
    other.handlers.job(name="own", runs="thread")(second)
    assert stage.enqueue("own") == other.enqueue("own")
    with trio.fail_after(WITHIN):
        async with stage.working(**SETTINGS) as worker, other.working(**SETTINGS) as beside:
            await trio.to_thread.run_sync(began.wait, WITHIN)
            stacks = [
                parts(each).services.calls.where_is(held) for each in (worker, beside) for held in parts(each).jobs.held
            ]
            ends.set()
            await settled(stage)
            await settled(other)
    assert [", in first\n" in stack for stack in stacks] == [True, False]
    assert [", in second\n" in stack for stack in stacks] == [False, True]


# Processes


async def test_a_process_knows_its_job_and_is_used_again(stage: Stage) -> None:
    ids = [stage.enqueue("process", what="who", ear="", queue="q") for _ in range(3)]
    with trio.fail_after(WITHIN):
        await stage.burst(**but(process_slots=1))
    told = [json.loads(stage.database.jobs[i].result or "") for i in ids]
    assert [t[:5] for t in told] == [[i, 1, "process", "q", 20] for i in ids]
    assert len({t[5] for t in told}) == 1
    assert told[0][5] != os.getpid()


async def test_a_function_that_was_not_decorated_runs_in_a_process_too(stage: Stage) -> None:
    job_id = stage.enqueue("plain", n=1)
    await stage.burst(**SETTINGS)
    assert stage.database.jobs[job_id].result == "2"


async def test_what_was_deployed_while_a_worker_waited_for_its_database_is_new_to_it(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes import the new code, and the job that they could not begin was failed: it was the old worker's."""
    code = tmp_path / "deployed.py"
    code.write_text("def handler() -> None: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deployed", raising=False)
    stage.handlers.job(name="deployed", runs="process")(importlib.import_module("deployed").handler)
    job_id = stage.enqueue("deployed", max_attempts=1)
    worker = stage.worker(**but(burst=True))
    while code.stat().st_ctime <= worker._plan.made_at:  # in the same tick of the kernel's nobody can tell
        code.write_text("import not_installed\n")
    await worker.run()
    assert (stage.database.state(job_id), stage.outcomes()) == ("scheduled", ["released"])


async def test_a_cancelled_handler_that_does_not_leave_is_killed(stage: Stage, ear: Ear) -> None:
    job_id = stage.enqueue("process", what="deaf", ear=ear.path)
    with trio.fail_after(WITHIN):
        async with stage.working(**but(cleanup=0.2)) as worker:
            pid = (await ear.hear("started"))["pid"]
            cancel(worker)
            await settled(stage)
            assert not is_alive(pid)
    assert stage.outcomes() == ["cancelled"]
    assert stage.database.state(job_id) == "cancelled"


@pytest.mark.parametrize(("what", "how"), [("die", "was killed by SIGSEGV"), ("leave", "ended with exit code 7")])
async def test_a_process_that_dies_fails_its_own_job_alone(what: str, how: str, stage: Stage) -> None:
    other = stage.enqueue("process", what="succeed", ear="")
    job = await at_once(stage, "process", what, max_attempts=1)
    assert job.state == "dead"
    assert job.error.startswith("ProcessDied: The handler's process")
    assert how in job.error
    assert stage.database.state(other) == "completed"


@pytest.mark.parametrize(("met", "state"), [(1, "completed"), (4, "completed"), (5, "dead")])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_process_that_meets_the_workers_signal_before_it_is_up_is_replaced(
    number: signal.Signals, met: int, state: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service manager signals every process at once: a job of one attempt was dead, and had not begun."""
    opens, left = trio.lowlevel.open_process, [f"kill -{number.value} $$"] * met

    async def open_process(command: list[str], **how: Any) -> trio.Process:
        return await opens(["/bin/sh", "-c", left.pop()] if left else command, **how)

    monkeypatch.setattr(trio.lowlevel, "open_process", open_process)
    job = await at_once(stage, "process", "succeed", max_attempts=1)
    assert job.state == state
    if state == "dead":
        assert f"for the handler was killed by {number.name}" in job.error


async def test_a_process_that_says_more_than_any_answer_has_is_killed(stage: Stage) -> None:
    other = stage.enqueue("process", what="succeed", ear="")
    job = await at_once(stage, "process", "babble", max_attempts=1)
    assert job.state == "dead"
    assert "was killed by SIGKILL" in job.error
    assert stage.database.state(other) == "completed"


async def test_the_next_job_gets_a_new_process_when_an_idle_one_has_died(stage: Stage) -> None:
    async with stage.working(**but(process_slots=1)):
        first = stage.enqueue("process", what="who", ear="")
        await settled(stage)
        pid = json.loads(stage.database.jobs[first].result or "")[5]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not is_alive(pid))
        stage.store.settled.clear()
        second = stage.enqueue("process", what="who", ear="")
        await settled(stage)
    assert json.loads(stage.database.jobs[second].result or "")[5] != pid


async def test_a_process_tells_its_progress(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[float, str | None]] = []
    monkeypatch.setattr(RunningJob, "progress", lambda _, fraction, message: said.append((fraction, message)))
    job = await at_once(stage, "process", "say")
    assert (job.result, said) == ('"said"', [(0.5, "half of it")])


async def test_no_process_outlives_its_worker(stage: Stage) -> None:
    job = await at_once(stage, "process", "who")
    assert not is_alive(json.loads(job.result)[5])


@pytest.mark.parametrize("how", ["", ", raise", ", die"])
@pytest.mark.parametrize("what", ["leave a process", "leave an orphan"])
async def test_no_process_that_a_handler_has_started_outlives_its_job(
    what: str, how: str, stage: Stage, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    async with stage.working(**but(process_slots=1)):
        job_id = stage.enqueue("process", what=what + how, ear=str(started), max_attempts=1)
        await settled(stage)
        # It was killed before the outcome was written, and is gone as soon as the system has collected it.
        await until(lambda: not is_alive(int(started.read_text())))
        stage.store.settled.clear()
        # The next job has another process.
        other = stage.enqueue("process", what="succeed", ear="")
        await settled(stage)
    expected = {"": "completed", ", raise": "dead", ", die": "dead"}
    assert stage.database.state(job_id) == expected[how]
    assert stage.database.state(other) == "completed"


@pytest.mark.parametrize("how", ["return", "raise", "exit"])
async def test_a_fork_of_a_handler_that_comes_out_of_it_answers_for_nobody(how: str, stage: Stage) -> None:
    """It answered for its job, took the next order, and the handler's own answer was that of the next job, which was completed
    with it."""
    jobs = [stage.enqueue("process", what=what, ear="") for what in (f"fork, {how}", "succeed") * 3]
    with trio.fail_after(WITHIN):
        await stage.burst(**but(process_slots=1))
    results = [stage.database.jobs[job_id].result for job_id in jobs]
    assert results == ['"what the handler returned"', '"the value"'] * 3


async def test_the_helpers_of_multiprocessing_stay_as_long_as_the_process(stage: Stage) -> None:
    jobs = [stage.enqueue("process", what="share", ear="") for _ in range(2)]
    with trio.fail_after(WITHIN):
        await stage.burst(**but(process_slots=1))
    first, second = (json.loads(stage.database.jobs[job_id].result or "") for job_id in jobs)
    assert first == second
    assert first[0] == 1


async def test_what_a_service_manager_sends_to_every_process_is_not_for_a_handler(stage: Stage, ear: Ear) -> None:
    stage.enqueue("process", what="wait", ear=ear.path)
    async with stage.working(**SETTINGS) as worker:
        pid = (await ear.hear("started"))["pid"]
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
        cancel(worker)
        heard = await ear.hear("ended")
    assert (heard["pid"], heard["reason"]) == (pid, "user")
    assert stage.outcomes() == ["cancelled"]


async def test_the_timeout_of_a_job_that_waits_for_a_process_begins_with_its_handler(stage: Stage, ear: Ear) -> None:
    async with running(stage, ear, "process") as (worker, _):
        stage.enqueue("process", what="wait", ear=ear.path)
        await ear.hear("started")
        # Both slots are taken.
        occupying = list(parts(worker).jobs.held)
        waiting = stage.enqueue("process", what="succeed", ear="", timeout=3)
        await until(lambda: stage.database.state(waiting) == "running")
        await trio.sleep(3.2)
        for held in occupying:
            held.cancel("user")
        await until(lambda: stage.database.state(waiting) != "running")
    assert stage.database.state(waiting) == "completed"


SLOW = """
import os

def work() -> int:
    return os.getpid()

if os.getpid() != int(os.environ["WORKER"]):
    open(os.environ["BEGUN"], "w").close()
    with open(os.environ["GO_ON"]) as line:
        exec(line.readline())
"""


class SlowModule:
    """A module with the handler `work`. A child that imports it waits in it for what the test says, and executes that."""

    def __init__(self, stage: Stage, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "slow_module.py").write_text(SLOW)
        os.mkfifo(folder / "go_on")
        self._begun = folder / "begun"
        # Open at both ends, so that no one waits for the other.
        self._line = os.open(folder / "go_on", os.O_RDWR)
        monkeypatch.setenv("WORKER", str(os.getpid()))
        monkeypatch.setenv("BEGUN", str(self._begun))
        monkeypatch.setenv("GO_ON", str(folder / "go_on"))
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "slow_module", raising=False)
        stage.handlers.job(runs="process")(importlib.import_module("slow_module").work)

    async def is_imported(self) -> None:
        """Waits until a child imports it."""
        await until(self._begun.exists)
        self._begun.unlink()

    def say(self, statement: str) -> None:
        os.write(self._line, f"{statement}\n".encode())

    def close(self) -> None:
        os.close(self._line)


@pytest.fixture
def slow(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[SlowModule]:
    slow = SlowModule(stage, tmp_path, monkeypatch)
    yield slow
    slow.close()


async def test_the_timeout_of_a_job_begins_when_its_process_has_imported_the_handler(
    stage: Stage, slow: SlowModule
) -> None:
    job_id = stage.enqueue("work", timeout=2)
    async with stage.working(**SETTINGS):
        await slow.is_imported()
        await trio.sleep(2.1)  # real time, longer than the timeout: a process has no virtual one
        slow.say("pass")
        await settled(stage)
    assert stage.outcomes() == ["completed"]
    assert stage.database.state(job_id) == "completed"


async def test_an_import_that_does_not_end_fails_the_attempt(
    stage: Stage, slow: SlowModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_process, "_LONGEST_START", 2.0)
    job_id = stage.enqueue("work", timeout=0.1, max_attempts=1)
    async with stage.working(**SETTINGS):
        await slow.is_imported()
        await settled(stage)
    assert stage.outcomes() == ["failed"]
    error = stage.database.jobs[job_id].error or ""
    assert error.startswith("TimeoutError: the handler's process had not imported slow_module after 2 s")


async def test_what_an_import_in_a_process_raises_fails_the_attempt_and_the_next_imports_again(
    stage: Stage, slow: SlowModule
) -> None:
    jobs = [stage.enqueue("work", max_attempts=1) for _ in range(2)]
    async with stage.working(**but(process_slots=1)):
        for statement in ("raise LookupError('not here')", "pass"):
            await slow.is_imported()
            slow.say(statement)
        await until(lambda: len(stage.store.settled) == 2)
    assert [stage.database.state(job_id) for job_id in jobs] == ["dead", "completed"]
    assert (stage.database.jobs[jobs[0]].error or "").startswith("LookupError: not here")


async def test_a_process_that_the_module_has_started_stays_as_long_as_its_process(
    stage: Stage, slow: SlowModule, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    jobs = [stage.enqueue("work") for _ in range(2)]
    async with stage.working(**but(process_slots=1)):
        await slow.is_imported()
        slow.say(f"import subprocess; open({str(started)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))")
        await until(lambda: len(stage.store.settled) == 2)
        helper = int(started.read_text())
        assert is_alive(helper)
    assert len({stage.database.jobs[job_id].result for job_id in jobs}) == 1
    await until(lambda: not is_alive(helper))


async def test_a_job_can_be_cancelled_while_its_process_imports_the_handler(stage: Stage, slow: SlowModule) -> None:
    job_id = stage.enqueue("work")
    async with stage.working(**SETTINGS) as worker:
        await slow.is_imported()
        cancel(worker)
        await settled(stage)
    assert stage.outcomes() == ["cancelled"]
    assert stage.database.state(job_id) == "cancelled"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("place", ["local", "lambda"])
def test_a_function_that_another_process_cannot_import_is_refused_at_registration(place: str) -> None:
    def local() -> None: ...

    function = local if place == "local" else lambda: None
    with pytest.raises(ConfigurationError, match="not at the top level of its module"):
        Handlers().job(name="x", runs="process")(function)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("__main__", "from the script that is run"),
        ("no_such_module", "would not find it"),
        (__name__, "something else"),
    ],
)
async def test_a_function_that_another_process_would_not_find_is_refused_at_the_start(
    module: str, why: str, stage: Stage
) -> None:
    def odd() -> None: ...

    odd.__qualname__, odd.__module__ = "is_alive", module
    stage.handlers.job(name="odd", runs="process")(odd)
    with pytest.raises(ConfigurationError, match=why):
        await stage.burst(**SETTINGS)


@pytest.mark.parametrize(
    ("runs", "is_async", "wanted"),
    [
        ("trio", False, "an async function"),
        ("asyncio", False, "an async function"),
        ("thread", True, "a plain function"),
        ("process", True, "a plain function"),
        ("fork", False, "'trio', 'asyncio', 'thread' and 'process'"),
    ],
)
def test_a_kind_that_does_not_fit_the_function_is_refused(runs: Any, is_async: bool, wanted: str) -> None:
    async def coroutine() -> None: ...

    with pytest.raises(ConfigurationError, match=wanted):
        Handlers().job(name="x", runs=runs)(coroutine if is_async else is_alive)


async def test_trios_own_tools_say_so_elsewhere(stage: Stage) -> None:
    def handler(job: Job) -> str:
        with pytest.raises(RuntimeError, match=r"job\.nursery is for Trio handlers"):
            _ = job.nursery
        return "said"

    stage.handlers.job(name="own")(handler)
    assert (await own(stage)).result == '"said"'
