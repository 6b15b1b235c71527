"""The values of a job's life: the request (`JobRequest`), the claim (`Claim`), the report (`Outcome`) and the handler's view
(`Job`).

All are frozen and free of I/O, so that the decisions in `states` are plain functions over them. A handler receives a `Job`, a
view of its claim and of the nursery it runs in.
"""

from __future__ import annotations

import asyncio
import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

import msgspec
import sniffio
import trio

from .durable_calls import seconds_of
from .labels import Labelled

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from datetime import datetime

    from .durable_calls import DurableCalls, DurableScope
    from .worker.durable.nursery import DurableNursery  # the one type that comes from above

CancelReason = Literal[
    "user", "timeout", "deadline", "parent", "sibling", "fence-lost", "lease-unproven", "shutdown", "suspended"
]
"""Why a handler was cancelled: a cancellation was requested, the attempt's time was up, the whole job's time was up, the job
that started it was cancelled or has ended, another child of the same durable nursery has failed, another attempt owns the job,
the lease could not be proven in time, the worker stops (perhaps because the program around it was cancelled), or a durable
handler only waits, and is suspended."""


class CancelRequest(NamedTuple):
    """A request to cancel a running job: why (`user`, `deadline`, `parent` or `sibling`), and what the asker said."""

    reason: CancelReason = "user"
    message: str | None = None


OutcomeKind = Literal["completed", "failed", "timeout", "discarded", "cancelled", "snoozed", "released", "rescued"]


class JobOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of the row's `options` that only the worker uses. Times are in seconds; `deadline` and `expires` are moments,
    in seconds since 1970 by the database's clock; `death_of` is the dead job's id, if this job is that job's `on_death`
    hook."""

    timeout: float | None = None
    backoff_base: float = 2.0
    backoff_cap: float = 3600.0
    crash_limit: int = 3
    deadline: float | None = None
    expires: float | None = None
    death_of: int | None = None


DEFAULT_OPTIONS = JobOptions()


class JobRequest(msgspec.Struct, frozen=True):
    """One validated job to enqueue: created by `Handler.request`, written by the store.

    `args` is a JSON object by parameter name; `delay` is seconds from the transaction's start; `run_at` an ISO time with
    its offset. `options` is JSON, or None when every option is the default; `deadline_in` and `expires_in` are seconds from
    the transaction's start too, and become moments when the job is written. `unique_for` and `unique_after` are seconds;
    `on_conflict` is skip, replace or raise.
    """

    kind: str
    args: str
    queue: str = "default"
    priority: int = 0
    max_attempts: int = 20
    delay: float | None = None
    run_at: str | None = None
    deadline_in: float | None = None
    expires_in: float | None = None
    unique_key: str | None = None
    key: str | None = None
    unique_for: float | None = None
    unique_after: float | None = None
    on_conflict: str = "skip"
    options: str | None = None


class Claim(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One attempt this worker holds: the row as the claim returned it. (id, attempt, session) is the fence.

    Compared and hashed by identity: a claim is a single event, and the path of every job looks it up."""

    id: int
    attempt: int
    max_attempts: int
    failures: int
    priority: int
    run_at: str
    queue: str
    kind: str
    args: str
    options: str | None
    session: int


class PermitClaim(Claim, frozen=True, gc=False, eq=False):
    """One that counts against a limit, of its queue or of its key, as long as it runs."""


class Outcome(msgspec.Struct, frozen=True, gc=False, eq=False):
    """How one attempt ended. `result` is JSON (None for null); `delay` seconds until it is due again; `cancelling`: it has
    completed though it was to cancel, or failed when its deadline had passed; `span`: its traceparent, for the next attempt."""

    claim: Claim
    kind: OutcomeKind | Literal["suspended"]
    result: str | None = None
    delay: float = 0.0
    error: str | None = None
    cancelling: bool = False
    span: str | None = None


class Suspended(Outcome, frozen=True, gc=False, eq=False):
    """The end of an attempt that only waits: for the children of `blocks` (and the first failure of one in `fail_blocks`), for
    `events` of these names, and until a moment, in seconds since 1970 by the database's clock."""

    blocks: tuple[int, ...] = ()
    fail_blocks: tuple[int, ...] = ()
    events: tuple[str, ...] = ()
    until: float | None = None


class Progress(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The last progress that a handler reported: `fraction` from 0 to 1."""

    claim: Claim
    fraction: float
    message: str | None = None


class Snooze(Exception):
    """Raised by a handler: postpone the job by `seconds` (or a `timedelta`); no attempt of its budget is used."""

    def __init__(self, seconds: float | timedelta) -> None:
        super().__init__(seconds)
        self.seconds = delay_of(seconds)


class RetryAfter(Exception):
    """Raised by a handler: this attempt failed; try again after `seconds` (or a `timedelta`) instead of the backoff. `afresh`:
    a durable handler has undone what it did, so the next attempt forgets its history and does every step again."""

    def __init__(self, seconds: float | timedelta, *, afresh: bool = False) -> None:
        super().__init__(seconds)
        self.seconds, self.afresh = delay_of(seconds), afresh


def delay_of(given: object) -> float:
    """Seconds, as a plain float. An invalid value raises in the handler; otherwise the database would refuse it with a whole
    batch."""
    # The methods of a subclass of a number or a duration are not called.
    if issubclass(type(given), timedelta):
        seconds = timedelta.total_seconds(cast("timedelta", given))
    else:
        seconds = float(cast("float", given))
    if not 0 <= seconds < math.inf:
        raise ValueError(f"must be a number of seconds from now on, got {seconds!r}")
    return seconds


class Discard(Exception):
    """Raised by a handler: the job can never succeed; it is dead at once, whatever its budget."""


class JobNursery(Protocol):
    """The children of a job: `trio.Nursery`'s interface for starting tasks."""

    @property
    def cancel_scope(self) -> trio.CancelScope: ...

    def start_soon(self, async_fn: Any, /, *args: Any, name: object = None) -> None: ...

    async def start(self, async_fn: Any, /, *args: Any, name: object = None) -> Any: ...


class JobRuntime(Protocol):
    """The implementation behind a `Job`: the runner's, or a test's."""

    @property
    def cancel_reason(self) -> CancelReason | None: ...

    @property
    def cancel_message(self) -> str | None: ...

    @property
    def deadline(self) -> float: ...

    @property
    def nursery(self) -> JobNursery: ...

    def cleanup(self) -> AbstractContextManager[object]: ...

    def progress(self, fraction: float, message: str | None) -> None: ...

    def open_transaction(self, result: Any) -> AbstractAsyncContextManager[JobTransaction]: ...

    def durable(self) -> DurableCalls:
        """Raises `UsageError` if the handler is not durable."""
        ...


class JobTransaction(Protocol):
    """A fenced transaction of a job."""

    result: Any
    """The job's result, if the transaction commits."""

    @property
    def connection(self) -> Any:
        """The `TrioConnection` the transaction is on, for the handler's own writes."""
        ...

    async def execute(self, query: Any, parameters: Any = None, **options: Any) -> Any: ...

    def cursor(self, *args: Any, **options: Any) -> Any: ...

    def transaction(self, *args: Any, **options: Any) -> Any: ...


class Job(Labelled):
    """A handler's view of its job. Deduplicate remote effects on `(job.id, job.attempt)`; in a durable job, which may undo them
    and begin anew, on a key that its first step draws."""

    __slots__ = ("_claim", "_runtime")
    _claim: Claim

    def __init__(self, claim: Claim, runtime: JobRuntime) -> None:
        self._claim = claim
        self._runtime = runtime

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.kind!r} attempt {self.attempt} of queue {self.queue!r}>"

    @property
    def id(self) -> int:
        """The job's id: the same in every attempt."""
        return self._claim.id

    @property
    def attempt(self) -> int:
        """1 at first; grows by one with each claim of the job, and never repeats."""
        return self._claim.attempt

    @property
    def session(self) -> int:
        """The session of the worker that runs this attempt: with `id` and `attempt` the whole fence, for a remote system that
        refuses older writers. 63 bits: more than a JSON number can hold."""
        return self._claim.session

    @property
    def max_attempts(self) -> int:
        """The attempt after which a failure is the last."""
        return self._claim.max_attempts

    @property
    def deadline(self) -> float:
        """When this attempt will be cancelled, on Trio's clock (`trio.current_time()`): the earliest of its timeout, the whole
        job's deadline and the lease's end. The last moves on with every heartbeat."""
        return self._runtime.deadline

    @property
    def cancel_reason(self) -> CancelReason | None:
        """Why the handler is being cancelled; None while it is not. Set before `trio.Cancelled` is raised."""
        return self._runtime.cancel_reason

    @property
    def cancel_message(self) -> str | None:
        """The `reason` given to `client.cancel`; None if none was given or no cancellation was requested."""
        return self._runtime.cancel_message

    @property
    def nursery(self) -> JobNursery:
        """The job's own nursery. Its tasks are part of the job: the job ends when they have ended, its cancellation
        reaches them, and their failure is its failure. Cancelling its `cancel_scope` cancels this attempt."""
        return self._runtime.nursery

    def cleanup(self) -> AbstractContextManager[object]:
        """`with job.cleanup():` shields the awaits inside it from cancellation, for at most the worker's `cleanup` seconds (5
        by default) in total, with the lease still held. Use it for clean-up after a `Cancelled`."""
        return self._runtime.cleanup()

    def transaction(self, *, result: Any = None) -> AbstractAsyncContextManager[JobTransaction]:
        """`async with job.transaction() as tx:` commits the block's writes through `tx.connection` (or `tx.execute`) together
        with the completion of this job, or neither: exactly once within the database.

        `result`, or the value of `tx.result`, becomes the job's result. An exception or a cancellation in the block rolls
        back and then has its usual effect. After the block the job is completed: return soon, and return nothing else. Works
        on Trio only, once for each attempt.

        Raises:
            RuntimeError: the handler runs in a thread or on asyncio, or the job has had its transaction.
            DatabaseUnavailable: the database was lost; nothing was committed.
        """
        return self._runtime.open_transaction(result)

    async def progress(self, fraction: float, message: str | None = None) -> None:
        """Reports the job's progress: a fraction from 0 to 1 and, optionally, a message (500 characters are kept).

        Call it as often as you like: the worker writes the newest value, at most once a second; the handler does not wait (it
        is a checkpoint). Shown in `pulse.jobs` and by `jobs show`. From a thread:
        `trio.from_thread.run(job.progress, 0.4, "…")`. Raises `ValueError` for anything but a fraction.
        """
        # Plain types: the methods of a caller's subclass would be called again when the value is written.
        plain = float(fraction)
        if not 0 <= plain <= 1:
            raise ValueError(f"Progress is a fraction from 0 to 1, got {plain!r}.")
        self._runtime.progress(plain, None if message is None else str.__str__(str(message))[:500])
        if sniffio.current_async_library() == "trio":
            await trio.lowlevel.checkpoint()
        else:
            await asyncio.sleep(0)

    # What a handler with durable=True may call

    # Not `async def`: a call that is not awaited would do nothing at all, and could not be told of.

    def step(self, function: Callable[..., Any], /, *args: Any, key: str | None = None) -> Coroutine[Any, Any, Any]:
        """Calls `function(*args)` once, however many attempts the job has: later attempts get the remembered result.

        An async function is awaited, a plain one runs in a thread. The result is written before this returns; all attempts get
        it as its return annotation decodes it, at most 1 MiB of JSON. `key` names the call where several tasks of the handler
        make durable calls.

        Raises:
            StepFailed: the function raised; its exception is the `__cause__`.
            ReplayMismatch: an earlier attempt did something else here.
            UsageError: the handler is not durable. A call that is never awaited fails the attempt with it, at its end.
        """
        return self._runtime.durable().step(function, args, key)

    def transaction_step(
        self, function: Callable[..., Any], /, *args: Any, key: str | None = None
    ) -> Coroutine[Any, Any, Any]:
        """Calls `function(tx, *args)`, and commits what it writes through `tx` together with its remembered result, or
        neither. Otherwise like `step`."""
        return self._runtime.durable().transaction_step(function, args, key)

    def durable_nursery(
        self, *, collect: bool = False, key: str | None = None
    ) -> AbstractAsyncContextManager[DurableNursery]:
        """`async with job.durable_nursery() as nursery:` starts children that are jobs, on any worker, and ends when they have
        ended. With `collect=True` their failures are kept in `child.outcome` instead of being raised."""
        return self._runtime.durable().nursery(collect=collect, key=key)

    def move_on_after(
        self, seconds: float | timedelta, *, key: str | None = None
    ) -> AbstractContextManager[DurableScope]:
        """`with job.move_on_after(3600) as scope:` cancels the block after that time, counted from when the first attempt
        entered it. Later attempts are cancelled at the same place."""
        return self._runtime.durable().scope(seconds_of("job.move_on_after", seconds), key, fail=False)

    def fail_after(self, seconds: float | timedelta, *, key: str | None = None) -> AbstractContextManager[DurableScope]:
        """The same, and raises `trio.TooSlowError` if the block was cut short."""
        return self._runtime.durable().scope(seconds_of("job.fail_after", seconds), key, fail=True)

    def sleep(self, seconds: float | timedelta, *, key: str | None = None) -> Coroutine[Any, Any, None]:
        """Sleeps until that time after the first attempt called it. A long sleep takes a row, and no slot."""
        return self._runtime.durable().sleep(seconds_of("job.sleep", seconds), key)

    def sleep_until(self, moment: datetime, *, key: str | None = None) -> Coroutine[Any, Any, None]:
        """Sleeps until a moment, an aware datetime."""
        return self._runtime.durable().sleep_until(moment, key)

    def wait_for_event(
        self,
        name: str,
        *,
        type: Any = Any,
        timeout: float | timedelta | None = None,
        key: str | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Waits for an event that `client.send_event` sends to this job. Returns its payload, decoded as `type`.

        Raises:
            TimeoutError: none came within `timeout` (seconds, or a `timedelta`) of the first attempt's call.
            InvalidEvent: the payload does not fit `type`.
        """
        durable = self._runtime.durable()
        limit = None if timeout is None else seconds_of("job.wait_for_event(timeout=)", timeout)
        return durable.wait_for_event(name, type, limit, key)

    @property
    def version(self) -> int:
        """The `version` of the handler when the job's first attempt made its first durable call; 1 by default. Code that has
        changed since can branch on it."""
        return self._runtime.durable().version
