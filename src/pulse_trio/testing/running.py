"""Runs one attempt of a handler without a database: on a worker whose store is in memory.

Everything that decides about the attempt is what a worker in production has: the nursery, the deadline, the heartbeats, the
cancellation with its reason, the table of outcomes.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, cast

import anyio.to_thread
import msgspec
import sniffio
import trio

from ..client.requests import request_and_type
from ..errors import ConfigurationError, HandlerStuck, InvalidArguments, PulseTrioError
from ..handlers import Handler, Handlers
from ..observe import AttemptFailed, JobEnded, JobStarted
from ..states import FINISHED, State
from .blocked import ending_blocks
from .memory import EPOCH, MemoryDatabase, MemoryStore, unavailable
from .memory.worker import MemoryWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence

    from ..jobs import CancelReason, Claim, JobRequest
    from ..store import ClaimCursor, ClaimResult, Limited
    from ..worker import Worker
    from ..worker.building import Parts
    from .memory import MemoryJob

P = ParamSpec("P")

WITHOUT_REGISTRY = (
    "Here it runs without its registry, and so without resources and middleware. Pass the registry: handlers=..."
)
_VIRTUAL_LOOKS = 10_000
"""How many times `within` a handler may take on a virtual clock, which jumps over its waits."""


_BEATS = {"lease": 1.0, "heartbeat": 0.1}
"""Seconds, where the lease is to be lost soon."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """What one attempt of a handler did."""

    outcome: str
    """As in `pulse.attempts`: completed, failed, timeout, discarded, cancelled, snoozed or released; "lost" if the attempt had
    lost its lease or its fence, and so reported nothing."""
    state: State
    """What the job is afterwards: completed, retryable, dead, cancelled, scheduled (snoozed) or available (released)."""
    result: Any = None
    """What the handler returned, as the client gets it: through JSON."""
    error: str | None = None
    """The error as it is stored; or the reason of a cancellation."""
    exception: BaseException | None = None
    """What the handler raised; None if it ran in another process."""
    delay: float | None = None
    """Seconds until the job is due again; None if it has ended."""
    progress: list[tuple[float, str | None]] = field(default_factory=list[tuple[float, "str | None"]])
    """Every (fraction, message) that it reported, in order."""
    log: list[logging.LogRecord] = field(default_factory=list[logging.LogRecord])
    """What was logged while it ran, from INFO on; not what the worker logged."""


async def run_job(
    handler: Handler[Any, Any] | Callable[..., Any] | str,
    /,
    *args: Any,
    attempt: int = 1,
    cancel_after: float | None = None,
    cancel_reason: CancelReason = "user",
    cancel_message: str | None = None,
    within: float = 30.0,
    handlers: Handlers | None = None,
    settings: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> JobRun:
    """Runs one attempt of a handler with these arguments, and says what became of it. No database is involved.

    Args:
        handler: a handler, with `handler.options(timeout=...)` if it should have others; a plain function, which is registered
            as by `@handlers.job`; or a kind of `handlers`, followed by its arguments in one dictionary.
        attempt: which attempt this is. The ones before it count as failed.
        cancel_after: seconds after its start at which it is cancelled.
        cancel_reason: what `job.cancel_reason` then says: "user" (a client asked for it, with `cancel_message`), "shutdown",
            "fence-lost", "lease-unproven", "parent" or "sibling" (as for a child in a durable nursery). For "timeout" and
            "deadline" use the handler's options.
        within: seconds of real time after which it is given up.
        handlers: the registry that the handler belongs to, for what is declared there beside it.
        settings: the worker's, by name.

    The other keywords are the handler's arguments. The attempt's time is Trio's: with pytest-trio's `autojump_clock` nothing
    waits. Under asyncio the worker runs in a thread, with a Trio of its own.

    Raises `InvalidArguments` if the arguments do not fit, and `TimeoutError`, which names the handler, if it has not ended
    `within` seconds; it has been cancelled then. Raises `HandlerStuck` if it did not end when it was cancelled.
    """
    run = _OneAttempt(
        handler, args, kwargs, attempt, _Cancellation(cancel_after, cancel_reason, cancel_message), within, handlers
    )
    if sniffio.current_async_library() == "trio":
        return await run.run(settings or {})
    return await anyio.to_thread.run_sync(lambda: trio.run(run.run, settings or {}))


def _blocking(run: Callable[P, Coroutine[Any, Any, JobRun]]) -> Callable[P, JobRun]:
    @wraps(run)
    def blocking(*args: P.args, **kwargs: P.kwargs) -> JobRun:
        return trio.run(partial(run, *args, **kwargs))

    return blocking


run_job_sync = _blocking(run_job)
run_job_sync.__name__ = run_job_sync.__qualname__ = "run_job_sync"
run_job_sync.__doc__ = "`run_job` for tests without an event loop."


def enqueue_in_memory(database: MemoryDatabase, request: JobRequest) -> MemoryJob:
    """Enqueues a client's request in a database in memory. Unique keys are not looked at."""
    now = EPOCH + trio.current_time()
    options: dict[str, Any] = msgspec.json.decode(request.options or "{}")
    if request.deadline_in is not None:
        options["deadline"] = now + request.deadline_in
    if request.expires_in is not None:
        options["expires"] = now + request.expires_in
    job_id = database.enqueue(
        request.kind,
        request.args,
        queue=request.queue,
        priority=request.priority,
        max_attempts=request.max_attempts,
        delay=request.delay or 0.0,
        options=msgspec.json.encode(options).decode() if options else None,
        key=request.key,
    )
    return database.jobs[job_id]


class OneClaim(MemoryStore):
    """Hands out one claim in its life, however soon its job is due again."""

    spent = False

    async def complete_and_claim(
        self, limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Any] = ()
    ) -> ClaimResult:
        """Claims the one job, once."""
        got = await super().complete_and_claim(0 if self.spent else limit, slots, completed)
        self.spent = self.spent or bool(got.claims)
        return got

    async def claim_limited(self, queue: str, limit: int, turns: str = "{}") -> Limited:
        """The same for a job with a key."""
        got = await super().claim_limited(queue, 0 if self.spent else limit, turns)
        self.spent = self.spent or bool(got.claims)
        return got


@dataclass(frozen=True, slots=True)
class _Cancellation:
    after: float | None
    reason: CancelReason
    message: str | None

    def __post_init__(self) -> None:
        if self.reason in ("timeout", "deadline"):
            raise ValueError(
                f"cancel_reason={self.reason!r}: run_job(handler.options({self.reason}=...)) has that reason."
            )

    @property
    def noticed_by(self) -> dict[str, float]:
        """Settings with which the worker notices it soon: it is a heartbeat that finds the lease lost."""
        return _BEATS if self.after is not None and self.reason in ("fence-lost", "lease-unproven") else {}


class _Watch:
    """The attempt's life, as its worker tells it."""

    def __init__(self) -> None:
        self.started = trio.Event()
        self.ended = trio.Event()
        self.exception: BaseException | None = None

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        return {JobStarted: self._starts, JobEnded: self._ends, AttemptFailed: self._fails}

    def _starts(self, _: JobStarted) -> None:
        self.started.set()

    def _fails(self, event: AttemptFailed) -> None:
        self.exception = event.exception

    def _ends(self, _: JobEnded) -> None:
        self.ended.set()


class _Worker(MemoryWorker):
    """Keeps what the handler reports as its progress: all of it, not the newest value of each second."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.said: list[tuple[float, str | None]] = []

    async def _live(self, parts: Parts, task_status: trio.TaskStatus[Worker]) -> None:
        progress = parts.services.progress
        say = progress.say

        def keep(claim: Claim, fraction: float, message: str | None) -> None:
            self.said.append((fraction, message))
            say(claim, fraction, message)

        progress.say = keep
        await super()._live(parts, task_status)


class _OneAttempt:
    def __init__(
        self,
        handler: Handler[Any, Any] | Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        attempt: int,
        cancellation: _Cancellation,
        within: float,
        handlers: Handlers | None,
    ) -> None:
        if attempt < 1:
            raise ValueError(f"attempt is a number from 1 on, got {attempt!r}")
        self._is_alone = handlers is None
        self._handlers, self._request = _asked(handler, args, kwargs, handlers)
        self._attempt = attempt
        self._cancellation = cancellation
        self._within = within

    async def run(self, settings: Mapping[str, Any]) -> JobRun:
        database, watch = MemoryDatabase(), _Watch()
        job = enqueue_in_memory(database, self._request)
        # Due at once: this runs the attempt, whatever the job would have waited for.
        job.run_at, job.attempt, job.failures = trio.current_time(), self._attempt - 1, self._attempt - 1
        job.max_attempts = max(job.max_attempts, self._attempt)
        given: dict[str, Any] = {"cleanup": 1.0, "grace": 0.0, **self._cancellation.noticed_by, **settings}
        instruments = [watch, *given.pop("instruments", ())]
        worker = _Worker(
            self._handlers, database, memory=OneClaim(database), instruments=instruments, log=False, **given
        )
        limit = _Limit(self._within, worker)
        failure: Exception | None = None
        with ending_blocks("run_job()", worker, self._within) as blocked, _logged() as log:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_when_it_has, worker, watch)
                nursery.start_soon(self._cancel, worker, watch, job)
                nursery.start_soon(limit.run)
                try:
                    await worker.run()
                except (PulseTrioError, HandlerStuck) as error:
                    failure = error  # raised as itself, outside of the nursery
                nursery.cancel_scope.cancel()
        if blocked.said:
            raise TimeoutError(blocked.said) from failure
        if limit.passed:
            raise TimeoutError(self._not_ended(watch)) from failure
        if failure is not None:
            if self._is_alone and isinstance(failure, ConfigurationError):
                failure.add_note(WITHOUT_REGISTRY)
            raise failure
        return _run_of(job, worker.said, log, watch.exception)

    def _not_ended(self, watch: _Watch) -> str:
        what = "did not end" if watch.started.is_set() else "did not start"
        return (
            f"{self._request.kind} {what} within {self._within:g} s. Does that handler end? (run_job(..., within=...))"
        )

    async def _end_when_it_has(self, worker: MemoryWorker, watch: _Watch) -> None:
        await watch.ended.wait()
        worker.stop()

    async def _cancel(self, worker: _Worker, watch: _Watch, job: MemoryJob) -> None:
        how, memory = self._cancellation, worker.memory
        if how.after is None:
            return
        await watch.started.wait()
        await trio.sleep(how.after)
        match how.reason:
            case "fence-lost":
                memory.database.steal(job.id)
            case "lease-unproven":
                memory.trouble["beat"] = unavailable
            case "shutdown":
                worker.stop_now()
            case _:
                memory.database.cancel(job.id, how.message if how.reason == "user" else None, cause=how.reason)


class _Limit:
    """Real seconds, on any clock: on one that jumps, the handler's sleeps take none."""

    def __init__(self, seconds: float, worker: MemoryWorker) -> None:
        self._seconds = seconds
        self._worker = worker
        self.passed = False

    async def run(self) -> None:
        end = time.monotonic() + self._seconds
        for _ in range(_VIRTUAL_LOOKS):
            await trio.sleep(max(0.001, end - time.monotonic()))
            if time.monotonic() >= end:
                break
        self.passed = True
        self._worker.stop_now()


def _asked(
    handler: Any, args: tuple[Any, ...], kwargs: dict[str, Any], handlers: Handlers | None
) -> tuple[Handlers, JobRequest]:
    """The registry to run with, and what a client would enqueue."""
    if isinstance(handler, Handlers):
        raise InvalidArguments(
            "run_job takes a handler, or its kind with handlers=...: run_job('kind', {...}, handlers=handlers)."
        )
    if isinstance(handler, str) and handlers is None:
        raise InvalidArguments(
            f"run_job({handler!r}) needs the registry of that kind: run_job({handler!r}, {{...}}, handlers=...)."
        )
    if not isinstance(handler, (str, Handler)):
        # A registry of its own: the function stays as it is.
        handlers = Handlers()
        handler = handlers.job(handler)
    known = cast("Handler[..., Any] | str", handler)
    request, _ = request_and_type(known, handlers, args, kwargs)
    if handlers is None:
        handlers = Handlers()
        # Handlers has no public way to take a handler without its registry: a program has no use for one.
        handlers._add(cast("Handler[..., Any]", known))  # pyright: ignore[reportPrivateUsage] -- as said
    if request.kind not in handlers:
        raise InvalidArguments(f"run_job(..., handlers=...): {handler!r} is not one of these handlers.")
    return handlers, request


@contextmanager
def _logged() -> Generator[list[logging.LogRecord]]:
    """What is logged meanwhile, from INFO on, but for the worker's own events."""
    kept: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name.partition(".")[0] not in ("pulse_trio", "asyncio"):
                kept.append(record)

    root, keep = logging.getLogger(), Keep()
    level = root.level
    root.addHandler(keep)
    root.setLevel(min(level, logging.INFO))
    try:
        yield kept
    finally:
        root.setLevel(level)
        root.removeHandler(keep)


def _run_of(
    job: MemoryJob,
    said: list[tuple[float, str | None]],
    log: list[logging.LogRecord],
    exception: BaseException | None,
) -> JobRun:
    state, now = job.state, trio.current_time()
    ours = [outcome for *_, outcome in job.history if outcome != "rescued"]
    return JobRun(
        ours[-1] if ours else "lost",
        state,
        None if job.result is None else msgspec.json.decode(job.result),
        job.cancel_reason or job.error,
        exception,
        None if state in FINISHED else max(0.0, job.run_at - now),
        said,
        log,
    )
