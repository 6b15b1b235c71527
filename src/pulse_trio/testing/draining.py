"""Runs what is due until nothing is: a worker in burst mode, in the test's own event loop where that is Trio's."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import trio
import trio.testing

from ..errors import ConfigurationError, HandlerStuck, PulseTrioError
from ..observe import JobEnded, JobStarted, UnknownKindReleased
from ..worker import Worker
from .blocked import ending_blocks
from .own_trio import CLEANUP, on_trio
from .suspended import drained, suspending_at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from ..handlers import Handlers
    from ..worker import WorkerReport
    from .clock import PulseClock
    from .suspended import DrainReport


_MANY = 10
"""After so many attempts of one kind, its jobs probably run again and again, rather than one of them not ending."""


class _Running:
    """Which jobs run now, and how many attempts of each kind have begun."""

    def __init__(self) -> None:
        self.jobs: dict[int, str] = {}
        self.begun = Counter[str]()

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        return {JobStarted: self._started, JobEnded: self._ended}

    def _started(self, event: JobStarted) -> None:
        self.jobs[event.job_id] = event.kind
        self.begun[event.kind] += 1

    def _ended(self, event: JobEnded) -> None:
        self.jobs.pop(event.job_id, None)


class UnknownKinds:
    """The kinds of claimed jobs that the worker has no handler for. It put them off, for a worker that has."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        return {UnknownKindReleased: self._keep}

    def _keep(self, event: UnknownKindReleased) -> None:
        self.kinds.add(event.kind)

    def refuse(self) -> None:
        """Raises `LookupError` if there are any."""
        if self.kinds:
            kinds = ", ".join(sorted(self.kinds))
            raise LookupError(f"There are jobs of a kind without a handler here: {kinds}. They have not run.")


class PulseWorker:
    """Runs the jobs of one database with the handlers of an application. With a `clock` it moves that instead of leaving a job
    that waits for its time."""

    def __init__(self, dsn: str, handlers: Handlers, *, clock: PulseClock | None = None) -> None:
        self._dsn = dsn
        self._handlers = handlers
        self._clock = clock

    async def drain(self, *, timeout: float = 30.0, **settings: Any) -> DrainReport:  # noqa: ASYNC109 -- says who did not end
        """Runs what is due until nothing is due and nothing runs, and says how many jobs ended how.

        What is due later (a retry with its delay, a schedule) is left alone; but with `pulse_clock` the clock moves on until no
        job waits. A durable job that waits for an event that is not sent, or without a clock for its time or its children,
        stays suspended, and is in the report's `suspended`. `settings` are those of `WorkerSettings`, as `concurrency=1`. Under
        asyncio the worker runs in a thread, with a Trio of its own, which ends when the caller is cancelled.

        Raises `TimeoutError` when that has taken `timeout` seconds; it names the jobs that still ran, and their handlers have
        been cancelled. Raises `LookupError` when a job has no handler, and `ConfigurationError` on Trio's `autojump_clock`. A
        handler that fails raises nothing here: the report counts it.
        """
        if self._clock is not None:
            return await self._clock.run_until_idle(timeout=timeout, **settings)

        def worker(**given: Any) -> Worker:
            given["instruments"] = [*given.get("instruments", ()), unknown]
            return Worker(suspending_at_once(self._handlers), self._dsn, **given)

        unknown = UnknownKinds()
        report = await drain_with(worker, timeout, settings)
        unknown.refuse()
        return await drained(self._dsn, self._handlers, report, settings)

    def drain_sync(self, *, timeout: float = 30.0, **settings: Any) -> DrainReport:
        """`drain` for tests without an event loop."""
        return in_trio(lambda: self.drain(timeout=timeout, **settings))


async def drain_with(make: Callable[..., Worker], seconds: float, settings: Mapping[str, Any]) -> WorkerReport:
    """Runs the worker that `make` makes of these settings, in a burst of at most so many seconds. In a thread, where the caller
    is not on Trio."""
    return await on_trio(lambda: _drain(make, seconds, settings), cleanup=settings.get("cleanup", CLEANUP))


def in_trio(play: Callable[[], Coroutine[Any, Any, DrainReport]]) -> DrainReport:
    """What `play()` returns, in a Trio run of its own."""

    async def main() -> DrainReport:
        return await play()

    return trio.run(main)


async def _drain(make: Callable[..., Worker], seconds: float, settings: Mapping[str, Any]) -> WorkerReport:
    if isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock):
        raise ConfigurationError(
            "The worker talks to PostgreSQL, so it needs real time: use pulse_clock, not autojump_clock."
        )
    running = _Running()
    given: dict[str, Any] = {"cleanup": CLEANUP, **settings}
    instruments = [running, *given.pop("instruments", ())]
    worker = make(burst=True, instruments=instruments, **given)
    late: list[str] = []

    async def watch_time() -> None:
        await trio.sleep(seconds)
        # Before they are cancelled: afterwards none of them runs.
        late.append(_not_ended(seconds, running.jobs, running.begun))
        worker.stop_now()

    failure: Exception | None = None
    report: WorkerReport | None = None
    with ending_blocks("drain()", worker, seconds) as blocked:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_time)
            try:
                report = await worker.run()
            except (PulseTrioError, HandlerStuck) as error:
                failure = error  # raised as itself, outside of the nursery
            nursery.cancel_scope.cancel()
    if blocked.said:
        raise TimeoutError(blocked.said) from failure
    if late:
        raise TimeoutError(late[0]) from failure
    if failure is not None or report is None:
        raise failure or RuntimeError("the worker ended without a report")
    return report


def _not_ended(seconds: float, running: Mapping[int, str], begun: Counter[str]) -> str:
    late = f"drain() did not end within {seconds:g} s"
    often = ", ".join(f"{kind} {times} times" for kind, times in begun.most_common(3))
    if running and max(begun[kind] for kind in running.values()) < _MANY:
        jobs = ", ".join(f"job {job_id} ({kind})" for job_id, kind in sorted(running.items())[:10])
        return f"{late}: {jobs} still ran. Does that handler end?"
    return f"{late}. Attempts begun: {often or 'none'}. Do jobs enqueue others, or put themselves off, without end?"
