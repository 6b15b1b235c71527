"""Under asyncio the kit runs Trio in a thread: a caller that is cancelled ends what runs there, as on Trio."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import trio

from pulse_trio import Handlers, Job, SyncClient
from pulse_trio.testing import PulseClock, PulseWorker, crash_points, own_trio, pulse_database, run_job

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

handlers = Handlers()
ended: list[str] = []
begun = threading.Event()
go_on = threading.Event()


@handlers.job
async def slow(job: Job) -> None:
    begun.set()
    try:
        await trio.sleep_forever()
    finally:
        ended.append(str(job.cancel_reason))


@handlers.job
def blocking() -> None:
    begun.set()
    go_on.wait()


@pytest.fixture(autouse=True)
def _anew() -> Generator[None]:
    for event in (begun, go_on):
        event.clear()
    ended.clear()
    yield
    go_on.set()
    for thread in _threads():
        thread.join()


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pulse-trio testing"]


async def _begin(call: Callable[[], Awaitable[Any]]) -> asyncio.Task[Any]:
    """A task that makes the call, whose handler has begun."""
    task = asyncio.ensure_future(call())
    await asyncio.get_running_loop().run_in_executor(None, begun.wait)
    return task


CALLS: dict[str, Callable[[str], Awaitable[Any]]] = {
    "drain": lambda dsn: PulseWorker(dsn, handlers).drain(),
    "drain on a clock": lambda dsn: PulseWorker(dsn, handlers, clock=PulseClock(dsn, handlers)).drain(),
    "advance": lambda dsn: PulseClock(dsn, handlers).advance(minutes=1),
    "run_until_idle": lambda dsn: PulseClock(dsn, handlers).run_until_idle(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_drain_that_is_cancelled_ends_its_handlers_and_gives_their_jobs_back(name: str) -> None:
    """The thread went on running handlers after the test, against a database that had been dropped."""
    with pulse_database(clock=True) as dsn:
        client = SyncClient(dsn, handlers=handlers)
        job = client.enqueue(slow)

        async def main() -> None:
            task = await _begin(lambda: CALLS[name](dsn))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (ended, _threads()) == (["shutdown"], [])

        asyncio.run(main())
        assert client.job(job.id).state == "available"


def test_run_job_that_is_cancelled_ends_its_handler() -> None:
    """The handler went on, and kept the process from ending."""

    async def main() -> None:
        task = await _begin(lambda: run_job(slow))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (len(ended), _threads()) == (1, [])

    asyncio.run(main())


def test_crash_points_that_are_cancelled_end_their_handler() -> None:
    """The handler went on."""

    async def main() -> None:
        task = await _begin(lambda: anext(crash_points(slow)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert _threads() == []

    asyncio.run(main())


def test_a_call_that_is_cancelled_as_it_begins_ends() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(run_job(slow))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert _threads() == []

    asyncio.run(main())


def test_a_scope_of_anyio_waits_for_the_end_too() -> None:
    """The scope waited for the handler to end by itself."""

    async def main() -> None:
        with anyio.CancelScope() as scope:
            task = asyncio.current_task()
            assert task is not None

            def cancel() -> None:
                begun.wait()
                loop.call_soon_threadsafe(scope.cancel)

            loop = asyncio.get_running_loop()
            threading.Thread(target=cancel).start()
            await run_job(slow)
        assert (scope.cancelled_caught, len(ended), _threads()) == (True, 1, [])

    asyncio.run(main())


def test_what_does_not_end_is_left_after_some_seconds_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function in a thread cannot be cancelled. However often its caller is, it is waited for."""
    monkeypatch.setattr(own_trio, "FAREWELL", -0.9)

    async def main() -> None:
        task = await _begin(lambda: run_job(blocking, settings={"cleanup": 1.0}))
        task.cancel()
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await task
        assert cancelled.value.__notes__ == [
            "What ran in a thread, with a Trio of its own, has not ended within 0.2 s."
        ]
        (thread,) = _threads()
        assert thread.daemon

    asyncio.run(main())


def test_an_error_is_raised_as_itself() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError, match="slow did not end within"):
            await run_job(slow, within=0.1)

    asyncio.run(main())
