"""Runs one attempt of a handler without a database: on a worker whose store is in memory.

Everything that decides about the attempt is what a worker in production has: the nursery, the deadline, the heartbeats, the
cancellation with its reason, the table of outcomes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial, wraps
from itertools import count
from typing import TYPE_CHECKING, Any, ParamSpec, cast

import msgspec
import trio

from ..client.requests import request_and_type
from ..errors import ConfigurationError, HandlerStuck, InvalidArguments, PulseTrioError
from ..handlers import Handler, Handlers
from ..states import FINISHED, State
from .blocked import Limit, ending_blocks
from .durable_runs import Given, Resuming, children_of, encoded_events, steps_of
from .given_resources import GivenResources
from .job_runs import JobRun, logged, run_of
from .memory import EPOCH, MemoryDatabase, unavailable
from .memory.one_job import OneClaim
from .memory.time_of_tree import JobsTime, TimeOfTree
from .memory.worker import MemoryWorker
from .own_trio import CLEANUP, on_trio
from .stubs import events_of, kind_of, with_stubs
from .suspended import suspending_at_once
from .watched import NOT_CANCELLED, Cancellation, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping

    from ..errors import ResourceFailed, ResourceLost
    from ..jobs import CancelReason, Claim, JobRequest
    from ..worker import Worker
    from ..worker.building import Parts
    from .memory import MemoryJob
    from .memory.tree import MemoryChild, MemoryTree

P = ParamSpec("P")

WITHOUT_REGISTRY = (
    "Here it runs without its registry, and so without resources and middleware. Pass the registry: handlers=..."
)
_ATTEMPTS = 100
"""After so many attempts a child counts as one that never ends."""


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
    children: Mapping[Handler[..., Any] | str, Any] | None = None,
    events: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
    resources: Mapping[str | type[Any], Any] | None = None,
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
        children: for a durable handler, what children come to instead of running: by handler or kind a result, an exception,
            or a function of the child's arguments, which may be async. The others run in place, with `handlers`, to their end.
        events: for a durable handler, what is sent to its job before it begins: payloads by name, or pairs of both.
        resources: what is given in the place of resources, which then are not opened: by name, or by the type that is asked for
            (as `Client`). Of the others, those that other handlers of the registry ask for are not opened either.
        settings: the worker's, by name.

    The other keywords are the handler's arguments. The attempt's time is Trio's: with pytest-trio's `autojump_clock` nothing
    waits. Durable sleeps, waits and deadlines pass at once when nothing else can happen; then the handler begins again from the
    top, as in production, and its steps are remembered. Under asyncio the worker runs in a thread, with a Trio of its own.

    Raises `InvalidArguments` if the arguments do not fit, and `TimeoutError`, which names the handler, if it has not ended
    `within` seconds; it has been cancelled then. Raises `HandlerStuck` if it did not end when it was cancelled, and
    `ResourceFailed`, from the resource's own exception, if a resource cannot be opened: the handler has not begun then.
    """
    asked = _asked(handler, args, kwargs, handlers, children, events)
    cancellation = Cancellation(cancel_after, cancel_reason, cancel_message)
    stubs = frozenset(kind_of(child) for child in children or ())
    given = Given(GivenResources(asked[0], resources), stubs, events_of(events))
    run = _OneAttempt(asked, attempt, cancellation, within, given, alone=handlers is None)
    chosen = settings or {}
    return await on_trio(lambda: run.run(chosen), cleanup=chosen.get("cleanup", CLEANUP))


def _blocking(run: Callable[P, Coroutine[Any, Any, JobRun]]) -> Callable[P, JobRun]:
    @wraps(run)
    def blocking(*args: P.args, **kwargs: P.kwargs) -> JobRun:
        return trio.run(partial(run, *args, **kwargs))

    return blocking


run_job_sync = _blocking(run_job)
run_job_sync.__name__ = run_job_sync.__qualname__ = "run_job_sync"
run_job_sync.__doc__ = "`run_job` for tests without an event loop."


def enqueue_in_memory(database: MemoryDatabase, request: JobRequest, *, offset: float = EPOCH) -> MemoryJob:
    """Enqueues a client's request in a database in memory. Unique keys are not looked at. `offset`: of its clock, to Trio's."""
    now = offset + trio.current_time()
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


class _Worker(MemoryWorker):
    """Keeps what the handler reports as its progress: all of it, not the newest value of each second."""

    memory: OneClaim

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.said: list[tuple[float, str | None]] = []

    async def _live(self, parts: Parts, task_status: trio.TaskStatus[Worker]) -> ResourceFailed | ResourceLost | None:
        progress = parts.services.progress
        say = progress.say

        def keep(claim: Claim, fraction: float, message: str | None) -> None:
            self.said.append((fraction, message))
            say(claim, fraction, message)

        progress.say = keep
        return await super()._live(parts, task_status)


class _OneAttempt:
    def __init__(
        self,
        asked: tuple[Handlers, JobRequest],
        attempt: int,
        cancellation: Cancellation,
        within: float,
        given: Given,
        *,
        alone: bool,
        time: JobsTime | None = None,
    ) -> None:
        if attempt < 1:
            raise ValueError(f"attempt is a number from 1 on, got {attempt!r}")
        self._is_alone = alone
        self._handlers, self._request = asked
        self._given = given
        self._settings: Mapping[str, Any] = {}
        self._worker: _Worker | None = None
        self._child_failed: Exception | None = None
        """Why a child could not be run, which is not the handler's fault."""
        self._begun: tuple[Watch, Resuming] | None = None
        self._time = JobsTime(TimeOfTree()) if time is None else time
        self._attempt = attempt
        self._cancellation = cancellation
        self._within = within

    async def run(self, settings: Mapping[str, Any]) -> JobRun:
        worker, job, watch = self._prepared(settings, 1)
        limit = Limit(self._within, worker)
        failure: Exception | None = None
        with ending_blocks("run_job()", worker, self._within) as blocked, logged() as log:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(limit.run)
                with self._time.in_play():
                    failure = await self._live(worker, job, watch)
                nursery.cancel_scope.cancel()
        if blocked.said:
            raise TimeoutError(blocked.said) from failure
        if limit.passed:
            raise TimeoutError(self._not_ended(watch)) from failure
        if failure is not None:
            if self._is_alone and isinstance(failure, ConfigurationError):
                failure.add_note(WITHOUT_REGISTRY)
            raise failure
        run, tree = run_of(job, worker.said, log, watch.exception, self._waits_for), worker.memory.tree
        steps, enqueued = steps_of(tree), self._given.resources.enqueued
        return replace(run, steps=steps, children=children_of(tree), enqueued=enqueued.requests)

    def _prepared(self, settings: Mapping[str, Any], job_id: int) -> tuple[_Worker, MemoryJob, Watch]:
        self._settings = settings
        database, watch = MemoryDatabase(), Watch()
        database.ids = count(job_id)
        job = enqueue_in_memory(database, self._request, offset=self._time.of_tree.offset)
        # Due at once: this runs the attempt, whatever the job would have waited for.
        job.run_at, job.attempt, job.failures = trio.current_time(), self._attempt - 1, self._attempt - 1
        job.max_attempts = max(job.max_attempts, self._attempt)
        given: dict[str, Any] = {"cleanup": CLEANUP, "grace": 0.0, **self._cancellation.noticed_by, **settings}
        instruments = [watch, *given.pop("instruments", ())]
        store = OneClaim(database, self._play)
        store.epoch_offset = self._time.of_tree.offset
        self._time.tree, store.tree.level = store.tree, self._time.level
        store.tree.job, store.tree.events = job, encoded_events(self._given.events)
        self._worker = worker = _Worker(
            self._given.resources.around(self._handlers, job.kind),
            database,
            memory=store,
            instruments=instruments,
            log=False,
            **given,
        )
        return worker, job, watch

    async def _live(self, worker: _Worker, job: MemoryJob, watch: Watch) -> Exception | None:
        failure: Exception | None = None
        resuming = Resuming(worker.memory, job, self._time)
        self._begun = (watch, resuming)
        async with trio.open_nursery() as nursery:
            worker.memory.tree.nursery = nursery
            nursery.start_soon(self._end_when_it_has, worker, watch, resuming)
            nursery.start_soon(self._cancel, worker, watch, job, resuming)
            try:
                await worker.run()
            except (PulseTrioError, HandlerStuck) as error:
                failure = error  # raised as itself, outside of the nursery
            nursery.cancel_scope.cancel()
        return self._child_failed or failure

    async def _play(self, child: MemoryChild) -> None:
        """Runs a child to its end, in place: its retries are due at once."""
        time = JobsTime(self._time.of_tree, self._time)
        with time.in_play():
            await self._play_in(child, time)

    async def _play_in(self, child: MemoryChild, time: JobsTime) -> None:
        kind = child.request.kind
        first = child.request.max_attempts if kind in self._given.stubs else 1
        before: MemoryTree | None = None
        try:
            if kind not in self._handlers:
                raise InvalidArguments(
                    f"run_job({self._request.kind}): it starts a child of kind {kind!r}, which has no handler here. Pass the "
                    f"registry, handlers=..., or its result, children={{{kind}: ...}}."
                )
            for attempt in range(first, first + _ATTEMPTS):
                one = _OneAttempt(
                    (self._handlers, child.request),
                    attempt,
                    NOT_CANCELLED,
                    self._within,
                    Given(self._given.resources, self._given.stubs),
                    alone=self._is_alone,
                    time=time,
                )
                worker, job, watch = one._prepared(self._settings, child.id)
                if before is not None:
                    worker.memory.tree.goes_on_with(before)
                before = worker.memory.tree
                child.unwinds = one._unwinds
                if (failure := await one._live(worker, job, watch)) is not None:
                    raise failure
                child.unwinds = None
                if child.cut is not None and job.state not in FINISHED:
                    # In production it runs once more. Here its parent waits for its end, which this is.
                    child.end(State.CANCELLED, None, job.error, child.cut)
                    return
                if one._waits_for or job.state in FINISHED:
                    state = State.SUSPENDED if one._waits_for else job.state
                    child.end(state, job.result, job.error, job.cancel_reason)
                    return
            raise TimeoutError(f"The child {kind!r} came back {_ATTEMPTS} times and has not ended. Does it end?")
        except (PulseTrioError, HandlerStuck, TimeoutError) as error:
            # Raised by run_job, as itself: it is not the handler's.
            self._child_failed = error
            if self._worker is not None:
                self._worker.stop_now()

    @property
    def _waits_for(self) -> str:
        return "" if self._begun is None else self._begun[1].stuck

    def _unwinds(self, cause: CancelReason) -> bool:
        """Cancels the handler. Returns False if it has not begun."""
        if self._begun is None:
            return False
        watch, resuming = self._begun
        if watch.started.is_set():
            resuming.cancel(None, cause)
        return watch.started.is_set()

    def _not_ended(self, watch: Watch) -> str:
        what = "did not end" if watch.started.is_set() else "did not start"
        return (
            f"{self._request.kind} {what} within {self._within:g} s. Does that handler end? (run_job(..., within=...))"
        )

    async def _end_when_it_has(self, worker: MemoryWorker, watch: Watch, resuming: Resuming) -> None:
        await watch.ended.wait()
        while watch.suspended:
            watch.ended = trio.Event()
            if not await resuming.until_due():
                break
            await watch.ended.wait()
        worker.stop()

    async def _cancel(self, worker: _Worker, watch: Watch, job: MemoryJob, resuming: Resuming) -> None:
        how, memory = self._cancellation, worker.memory
        if how.after is None:
            return
        await watch.started.wait()
        await resuming.pass_after(how.after)
        if how.reason in ("shutdown", "fence-lost", "lease-unproven") and resuming.ends_suspended():
            worker.stop_now()
            return
        match how.reason:
            case "fence-lost":
                memory.database.steal(job.id)
            case "lease-unproven":
                memory.trouble["beat"] = unavailable
            case "shutdown":
                worker.stop_now()
            case _:
                resuming.cancel(how.message if how.reason == "user" else None, how.reason)


def _asked(
    handler: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    handlers: Handlers | None,
    children: Mapping[Handler[..., Any] | str, Any] | None,
    events: object,
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
    if handlers[request.kind].durability is None and (children is not None or events is not None):
        raise InvalidArguments(f"run_job: children and events are for durable handlers, {request.kind!r} is none.")
    ours = with_stubs(handlers, handlers[request.kind], children)
    # Nothing is stored, so nothing is encoded: a test reads the result, the steps and the children as they are.
    ours.codec = None
    return suspending_at_once(ours), request
