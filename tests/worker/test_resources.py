"""Resources: open before the first job, closed after the last, and what happens when one fails."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator  # noqa: TC003 -- read at run time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import sniffio
import trio
import trio.testing

from pulse_trio import INJECTED, ConfigurationError, Handlers, ResourceFailed, ResourceLost
from pulse_trio.observe import WorkerStarted, WorkerStopped

if TYPE_CHECKING:
    from support.stage import Stage

pytestmark = pytest.mark.real_clock  # There are real threads here.


class Thing:
    """What a resource yields."""

    def __init__(self, where: str = "") -> None:
        self.where = where
        self.is_open = True


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def opens(stage: Stage, told: list[str]) -> list[Thing]:
    """An async resource `thing`."""
    made: list[Thing] = []

    @stage.handlers.resource
    async def thing() -> AsyncIterator[Thing]:
        one = Thing(sniffio.current_async_library())
        made.append(one)
        told.append("opened")
        # A nursery around a yield, as many clients have one.
        if one.where == "trio":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                yield one  # noqa: ASYNC101 -- a resource
                nursery.cancel_scope.cancel()
        else:
            yield one
        one.is_open = False
        told.append("closed")

    return made


async def test_one_instance_serves_all_jobs_and_outlives_them(
    stage: Stage, told: list[str], opens: list[Thing]
) -> None:
    seen: list[Thing] = []

    @stage.handlers.job
    async def work(n: int, thing: Thing) -> None:
        seen.append(thing)
        await trio.lowlevel.checkpoint()
        assert thing.is_open
        told.append("worked")

    for n in range(5):
        stage.enqueue("work", n=n)
    await stage.burst()
    assert stage.outcomes() == ["completed"] * 5
    assert told == ["opened", *["worked"] * 5, "closed"]
    assert set(seen) == set(opens)
    assert len(opens) == 1


async def test_each_kind_of_handler_gets_the_instance_that_it_can_use(stage: Stage, opens: list[Thing]) -> None:
    seen: dict[str, Thing] = {}

    @stage.handlers.job
    async def in_trio(other: Thing) -> None:
        seen["trio"] = other

    @stage.handlers.job(runs="asyncio")
    async def in_asyncio(other: Thing) -> None:
        seen["asyncio"] = other

    @stage.handlers.job
    def in_thread(other: Thing) -> None:
        seen["thread"] = other

    for kind in ("in_trio", "in_asyncio", "in_thread"):
        stage.enqueue(kind)
    await stage.burst()
    assert {kind: thing.where for kind, thing in seen.items()} == {
        "trio": "trio",
        "thread": "trio",
        "asyncio": "asyncio",
    }
    assert len(opens) == 2
    assert not any(thing.is_open for thing in opens)


async def test_a_plain_resource_opens_and_closes_in_a_thread_and_is_for_all_kinds(stage: Stage) -> None:
    threads: list[int] = []
    seen: list[Thing] = []

    @stage.handlers.resource
    def engine() -> Iterator[Thing]:
        threads.append(threading.get_ident())
        yield Thing()
        threads.append(threading.get_ident())

    @stage.handlers.job
    async def in_trio(engine: Thing) -> None:
        seen.append(engine)

    @stage.handlers.job(runs="asyncio")
    async def in_asyncio(engine: Thing) -> None:
        seen.append(engine)

    @stage.handlers.job
    def in_thread(engine: Thing) -> None:
        seen.append(engine)

    for kind in ("in_trio", "in_asyncio", "in_thread"):
        stage.enqueue(kind)
    await stage.burst()
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_resources_open_after_those_that_they_need_and_close_before(stage: Stage, told: list[str]) -> None:
    @stage.handlers.resource
    async def third(second: str, first: str = "") -> AsyncIterator[str]:
        told.append(f"third opened with {second} and {first}")
        yield "3"
        told.append("third closed")

    @stage.handlers.resource
    async def second(first: str) -> AsyncIterator[str]:
        told.append(f"second opened with {first}")
        yield "2"
        told.append("second closed")

    @stage.handlers.resource
    @asynccontextmanager
    async def first() -> AsyncIterator[str]:
        told.append("first opened")
        yield "1"
        told.append("first closed")

    @stage.handlers.job
    async def work(third: str) -> str:
        return third

    job = await stage.ended("work")
    assert job.result == '"3"'
    assert told == [
        "first opened",
        "second opened with 1",
        "third opened with 2 and 1",
        "third closed",
        "second closed",
        "first closed",
    ]


async def test_an_asyncio_resource_has_its_own_loop_to_work_in(stage: Stage) -> None:
    ran: list[str] = []

    @stage.handlers.resource(runs="asyncio")
    async def queue() -> AsyncIterator[asyncio.Queue[str]]:
        given: asyncio.Queue[str] = asyncio.Queue()

        async def work() -> None:
            while True:
                ran.append(await given.get())
                given.task_done()

        async with asyncio.TaskGroup() as group:
            task = group.create_task(work())
            yield given  # noqa: ASYNC101 -- a resource
            task.cancel()

    @stage.handlers.job(runs="asyncio")
    async def say(word: str, queue: asyncio.Queue[str]) -> None:
        queue.put_nowait(word)
        await queue.join()

    for word in ("a", "b"):
        stage.enqueue("say", word=word)
    await stage.burst(concurrency=1)
    assert ran == ["a", "b"]
    assert stage.outcomes() == ["completed"] * 2


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
@pytest.mark.parametrize("how", ["raises", "does not yield", "exits"])
async def test_one_that_cannot_be_opened_ends_the_worker_before_it_claims(kind: Any, how: str, stage: Stage) -> None:
    async def thing():  # type: ignore[no-untyped-def]
        if how == "raises":
            raise ConnectionError("no such host")
        if how == "exits":
            raise SystemExit(3)
        if not how:
            yield 1

    def plain():  # type: ignore[no-untyped-def]
        if how == "raises":
            raise ConnectionError("no such host")
        if how == "exits":
            raise SystemExit(3)
        if not how:
            yield 1

    if kind == "thread":
        stage.handlers.resource(name="thing")(plain)
    else:
        stage.handlers.resource(runs=kind)(thing)

    @stage.handlers.job
    async def work() -> None: ...

    stage.enqueue("work")
    with pytest.raises(ResourceFailed, match=r"'thing' \(.*test_resources.py:\d+\) failed when it was opened") as e:
        await stage.worker(burst=True).run()
    expected = {"raises": "ConnectionError: no such host", "exits": "SystemExit: 3", "does not yield": "didn't yield"}
    assert expected[how] in str(e.value)
    assert stage.store.settled == []


async def test_those_that_are_open_are_closed_when_another_fails(
    stage: Stage, told: list[str], opens: list[Thing]
) -> None:
    @stage.handlers.resource
    async def bad(thing: Thing) -> AsyncIterator[int]:
        raise ValueError
        yield 1

    @stage.handlers.job
    async def work() -> None: ...

    with pytest.raises(ResourceFailed):
        await stage.worker(burst=True).run()
    assert told == ["opened", "closed"]


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_one_that_fails_at_its_end_is_told_once_and_loses_no_job(
    kind: Any, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    async def thing():  # type: ignore[no-untyped-def]
        yield 1
        raise ValueError("no farewell")

    def plain():  # type: ignore[no-untyped-def]
        yield 1
        raise ValueError("no farewell")

    if kind == "thread":
        stage.handlers.resource(name="thing")(plain)
    else:
        stage.handlers.resource(runs=kind)(thing)

    @stage.handlers.job
    async def work() -> None: ...

    stage.enqueue("work")
    with caplog.at_level(logging.ERROR, "pulse_trio"):
        await stage.burst()
    assert stage.outcomes() == ["completed"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "failed when it was closed; no job is affected: ValueError: no farewell" in said


@pytest.mark.parametrize("kind", ["trio", "asyncio"])
async def test_one_that_fails_while_jobs_run_stops_the_worker_and_loses_no_job(
    kind: Any, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    broken, worked = threading.Event(), trio.Event()

    async def breaks() -> None:
        while not broken.is_set():
            if kind == "trio":
                await trio.sleep(0.01)
            else:
                await asyncio.sleep(0.01)
        raise ConnectionError("gone")

    @stage.handlers.resource(runs=kind)
    async def thing():  # type: ignore[no-untyped-def]
        if kind == "trio":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(breaks)
                yield 1  # noqa: ASYNC101 -- a resource
        else:
            async with asyncio.TaskGroup() as group:
                group.create_task(breaks())
                yield 1  # noqa: ASYNC101 -- a resource

    @stage.handlers.job
    async def work() -> None:
        broken.set()
        with trio.fail_after(10):
            await worked.wait()

    async def end(nursery: trio.Nursery) -> None:
        worker = stage.worker(grace=20.0)
        with pytest.raises(ResourceLost, match=r"'thing'.*failed while the worker ran"):
            await worker.run()
        nursery.cancel_scope.cancel()

    stage.enqueue("work")
    with caplog.at_level(logging.ERROR, "pulse_trio"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end, nursery)
            while not caplog.records:  # noqa: ASYNC110 -- the log tells nobody
                await trio.sleep(0.01)
            worked.set()
    assert stage.outcomes() == ["completed"]
    assert len(caplog.records) == 1
    assert "ConnectionError: gone" in caplog.text
    # The event of the worker's end was missing.
    assert len(stage.events.of(WorkerStopped)) == 1


async def test_one_that_does_not_close_in_time_is_cancelled(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    @stage.handlers.resource
    async def slow() -> AsyncIterator[int]:
        yield 1
        await trio.sleep_forever()

    @stage.handlers.job
    async def work(slow: int) -> None: ...

    stage.enqueue("work")
    with trio.fail_after(20):
        await stage.burst(cleanup=0.1)
    assert stage.outcomes() == ["completed"]
    assert "did not close within 0.1 s: it is cancelled" in caplog.text


async def test_one_of_asyncio_that_does_not_close_in_time_is_cancelled_before_those_that_it_needs_close(
    stage: Stage, told: list[str]
) -> None:
    """It was left to run: a nursery raises `Cancelled` in a group, which `except trio.Cancelled` does not catch."""

    @stage.handlers.resource(runs="asyncio")
    async def first() -> AsyncIterator[int]:
        yield 1
        told.append("first closed")

    @stage.handlers.resource(runs="asyncio")
    async def slow(first: int) -> AsyncIterator[int]:
        yield 2
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            told.append("slow cancelled")
            raise

    @stage.handlers.job(runs="asyncio")
    async def work(slow: int) -> None: ...

    stage.enqueue("work")
    with trio.fail_after(20):
        await stage.burst(cleanup=0.1)
    assert stage.outcomes() == ["completed"]
    assert told == ["slow cancelled", "first closed"]


@pytest.mark.parametrize("how", ["stop", "stop now"])
async def test_all_that_do_not_close_have_the_cleanup_time_together_and_less_when_the_worker_stops_now(
    how: str, stage: Stage, autojump_clock: trio.testing.MockClock
) -> None:
    """Each had the clean-up time of its own, however often the worker was told to stop now."""
    closing = trio.Event()

    def slow(name: str) -> None:
        @asynccontextmanager
        async def one() -> AsyncIterator[str]:
            yield name
            closing.set()
            await trio.sleep_forever()

        stage.handlers.resource(name=name)(one)

    for number in range(5):
        slow(f"slow_{number}")

    @stage.handlers.job
    async def work() -> None: ...

    async with trio.open_nursery() as nursery:
        worker: Any = await nursery.start(stage.worker(cleanup=20.0).run)
        worker.stop()
        await closing.wait()
        began = trio.current_time()
        if how == "stop now":
            worker.stop_now()
    limit = 20 if how == "stop" else 5
    assert limit <= trio.current_time() - began <= limit + 1


def opens_for_ever(stage: Stage) -> trio.Event:
    """The job `work` needs a resource whose opening does not end; returns what says that it has begun."""
    opening = trio.Event()

    @stage.handlers.resource
    async def slow() -> AsyncIterator[int]:
        opening.set()
        await trio.sleep_forever()
        yield 1

    @stage.handlers.job
    async def work(slow: int) -> None: ...

    return opening


@pytest.mark.parametrize("how", ["stopped", "cancelled"])
async def test_a_worker_can_be_stopped_while_one_is_opening(how: str, stage: Stage) -> None:
    opening = opens_for_ever(stage)
    stage.enqueue("work")
    worker = stage.worker()
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            await opening.wait()
            if how == "stopped":
                worker.stop()
            else:
                nursery.cancel_scope.cancel()
    assert stage.store.settled == []


async def test_a_worker_that_is_stopped_while_one_is_opening_counts_as_started(stage: Stage) -> None:
    """`nursery.start(worker.run)` raised a RuntimeError of Trio's."""
    opening = opens_for_ever(stage)
    worker = stage.worker()

    async def stop() -> None:
        await opening.wait()
        worker.stop()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop)
            assert await nursery.start(worker.run) is worker


async def test_a_session_is_told_when_all_are_open_and_before_the_first_claim(
    stage: Stage, told: list[str], opens: list[Thing]
) -> None:
    """A supervisor kills a child that is silent after its first session: one whose resources open slowly never came up."""

    @stage.handlers.job
    async def work(thing: Thing) -> None:
        told.append("worked")

    stage.enqueue("work")
    await stage.worker(burst=True, on_session=lambda session: told.append(f"session {session}")).run()
    assert told == ["opened", f"session {stage.store.session}", "worked", "closed"]


async def test_a_session_is_not_told_when_one_cannot_be_opened(stage: Stage, told: list[str]) -> None:
    @stage.handlers.resource
    async def thing() -> AsyncIterator[int]:
        raise ConnectionError
        yield 1

    @stage.handlers.job
    async def work(thing: int) -> None: ...

    with pytest.raises(ResourceFailed):
        await stage.worker(burst=True, on_session=lambda session: told.append(f"session {session}")).run()
    assert told == []
    # The worker has started and stopped, whatever has stopped it.
    assert len(stage.events.of(WorkerStarted)) == len(stage.events.of(WorkerStopped)) == 1


async def test_a_cancelled_worker_closes_them_after_its_jobs(stage: Stage, told: list[str], opens: list[Thing]) -> None:
    @stage.handlers.job
    async def work(thing: Thing) -> None:
        told.append("began")
        try:
            await trio.sleep_forever()
        finally:
            told.append("cancelled" if thing.is_open else "too late")

    stage.enqueue("work")
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(stage.worker().run)
            while "began" not in told:  # noqa: ASYNC110 -- a list tells nobody
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert told == ["opened", "began", "cancelled", "closed"]


async def test_one_that_nobody_declared_is_an_error_at_the_start(stage: Stage) -> None:
    @stage.handlers.job
    async def work(thing: Thing = INJECTED) -> None: ...

    with pytest.raises(
        ConfigurationError, match="'work' asks for the resource 'thing', which its registry does not have"
    ):
        await stage.worker(burst=True).run()


async def test_a_worker_is_started_when_its_resources_are_open(
    stage: Stage, told: list[str], opens: list[Thing]
) -> None:
    @stage.handlers.job
    async def work() -> None: ...

    async with trio.open_nursery() as nursery:
        worker: Any = await nursery.start(stage.worker().run)
        assert told == ["opened"]
        worker.stop()
    assert told == ["opened", "closed"]


def test_handlers_without_resources_have_none() -> None:
    assert len(Handlers().resources) == 0
