"""One typed event for each thing that happened; sinks are adapters (the idea is stamina's instrumentation).

An event is created only if an instrument listens for its type: the path of every job looks that up once, at start.

Longer than 400 lines, because it has a class for each event, and each field says what it means.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 -- instruments may read the annotations
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import trio

from .callables import is_async
from .errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """The worker is registered and about to claim."""

    session: int = field(metadata={"session": True})
    queues: tuple[str, ...] | None
    concurrency: int


@dataclass(frozen=True, slots=True)
class WorkerStopped:
    """The worker's nursery has closed; it released `released` unfinished jobs."""

    released: int


@dataclass(frozen=True, slots=True)
class JobStarted:
    """A handler is about to be called."""

    job_id: int
    kind: str
    queue: str
    attempt: int


@dataclass(frozen=True, slots=True)
class JobEnded:
    """An attempt ended at the worker, `seconds` after its claim arrived. The settlement decides whether its report counts."""

    job_id: int
    kind: str
    queue: str
    attempt: int
    outcome: str
    seconds: float
    error: str | None


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt ended at the worker by a failure, a timeout or a discard (`outcome`), after `seconds`. `exception` is what the
    handler raised, as the object with its traceback; of a handler in another process, one of the same class without it. None
    where there is none."""

    job_id: int
    kind: str
    queue: str
    attempt: int
    outcome: str
    seconds: float
    error: str | None
    exception: BaseException | None = field(default=None, compare=False, metadata={"object": True})


@dataclass(frozen=True, slots=True)
class JobDied:
    """A job is dead: only a person can retry it. `cause` is how its last attempt ended (failed, timeout, discarded, rescued:
    its worker vanished, crashed: its process died of it); `error` is the error text, at most 4,000 characters. The worker or
    supervisor that wrote the death emits it, once the database has it; at least once, if the database's answer is lost."""

    job_id: int
    kind: str
    queue: str
    attempt: int
    cause: str
    error: str | None


@dataclass(frozen=True, slots=True)
class DeathArgumentsLeftOut:
    """An `on_death` handler that takes the dead job's arguments is called without them (`args` has its default), because they
    cannot be read; `error` says why. `job_id`, `kind` and `attempt` are the hook's own, `dead_job_id` is the job that died."""

    job_id: int
    kind: str
    attempt: int
    dead_job_id: int
    error: str


@dataclass(frozen=True, slots=True)
class CancellationDelivered:
    """A request to cancel a job has reached its handler: `message` is what the person said who asked; `reason` is
    `user`, or `parent`, `sibling` or `deadline` for a member of a tree."""

    job_id: int
    kind: str
    attempt: int
    message: str | None
    reason: str = "user"
    queue: str | None = None


@dataclass(frozen=True, slots=True)
class FenceLost:
    """A heartbeat or a report matched no row: another attempt owns the job, or it is finished."""

    job_id: int
    kind: str
    attempt: int
    during: str


@dataclass(frozen=True, slots=True)
class EndedAfterCommit:
    """A handler failed or returned a value after its `job.transaction()` had committed: the job stays completed, and only
    this event has the `error`."""

    job_id: int
    kind: str
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class LeaseUnproven:
    """The lease could not be renewed in time, so the worker cancelled the handler before another worker may own the job."""

    job_id: int
    kind: str
    attempt: int


@dataclass(frozen=True, slots=True)
class TasksLeftBehind:
    """An asyncio handler ended while tasks it had created were still running; they were cancelled, and the job ended with the
    last."""

    job_id: int
    kind: str
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoopBlocked:
    """An event loop of the worker turns again after it was blocked for `seconds`. `stack` is where it was blocked; `job_id`
    and `kind` name the job whose handler was on the stack (None if there was none). The block is also logged the moment it is
    noticed."""

    job_id: int | None
    kind: str | None
    seconds: float
    stack: str


@dataclass(frozen=True, slots=True)
class HandlerOverran:
    """A handler still runs `seconds` after its cancellation: the worker releases its other jobs and is replaced."""

    job_id: int
    kind: str
    attempt: int
    reason: str
    seconds: float
    stack: str


@dataclass(frozen=True, slots=True)
class CleanupCut:
    """A `job.cleanup()` was cut short: its time, the worker's `cleanup` (`seconds`), was over. What it would still have done is
    not done."""

    job_id: int
    kind: str
    attempt: int
    seconds: float


@dataclass(frozen=True, slots=True)
class HistoryFilling:
    """The history of a durable job has `lines` of the `most` that it may have. With those it is dead."""

    job_id: int
    kind: str
    attempt: int
    lines: int
    most: int


@dataclass(frozen=True, slots=True)
class JobsRescued:
    """Expired leases were put back on their queues (or dead-lettered). If a supervisor saw the process `pid` die: the jobs it
    held; `jobs` has the id and the kind of each."""

    rescued: int
    dead: int
    pid: int | None = None
    jobs: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerStale:
    """A worker has shown no sign of life for `seconds`, longer than its setting `stale` allows (its lease, if that is 0). One
    watchdog of the fleet emits it, once, and again if the worker showed a sign of life in between. `running`: its jobs at its
    last sign."""

    session: int
    host: str
    pid: int
    seconds: float
    running: int


@dataclass(frozen=True, slots=True)
class SuspectAlone:
    """A job whose worker died with it too often is about to run in this worker's own process, because the worker does not
    know how another process finds its handlers (`app`). `beside`: how many other jobs had not ended in time and still run;
    with 0 the worker claims nothing else until the job has ended."""

    job_id: int
    kind: str
    attempt: int
    beside: int = 0


@dataclass(frozen=True, slots=True)
class JobQuarantined:
    """A rescue put a job in quarantine: after `crashes` crashes of its workers, it runs next in its own process."""

    job_id: int
    kind: str
    crashes: int


@dataclass(frozen=True, slots=True)
class QuarantineStarted:
    """A job in quarantine runs in the process `pid`, which runs nothing else meanwhile."""

    job_id: int
    kind: str
    attempt: int
    pid: int


@dataclass(frozen=True, slots=True)
class QuarantineNotStarted:
    """The process for a job in quarantine could not be started, or ended before the job began (`error`). The job is released,
    its budget untouched, and is due again in `again_in` seconds."""

    job_id: int
    kind: str
    error: str
    again_in: float


@dataclass(frozen=True, slots=True)
class QuarantineEnded:
    """An attempt in quarantine ended after `seconds`. `crash` says how its process died, None if it did not: then the job has
    left quarantine. `counts`: nothing else had run in that process, so this crash counts towards the job's `crash_limit`."""

    job_id: int
    kind: str
    attempt: int
    pid: int
    seconds: float
    crash: str | None = None
    counts: bool = False


@dataclass(frozen=True, slots=True)
class UnknownKindReleased:
    """The worker has no handler for the job's kind, and released the job, its budget untouched."""

    job_id: int
    kind: str


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row cannot be processed (`error` says why, `during` in which operation): its job is made dead, and the others go on.
    `job_id` is None, and `kind` empty, when no single row could be identified; then the operation is tried again."""

    job_id: int | None
    kind: str
    during: str
    error: str


@dataclass(frozen=True, slots=True)
class UnfitArgumentsReleased:
    """A job whose arguments do not fit this worker's handler, or that a newer version of a durable handler has begun, was
    released for a worker of another version, its budget untouched; `error` says what does not fit. The job is dead when
    nothing else happens to it for the setting `unfit_patience`."""

    job_id: int
    kind: str
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class ScheduleFired:
    """This worker fired an occurrence: `job_id` was enqueued, `late` seconds after `due_at`. `added` is False when a live job
    had the unique key: `job_id` is that one."""

    name: str
    due_at: datetime
    job_id: int
    late: float
    added: bool


@dataclass(frozen=True, slots=True)
class ScheduleLate:
    """The next occurrence of the schedule `name` has been due for `seconds`, a minute or more, and no worker has fired it. The
    process that counts for metrics emits it, once; again if the schedule was late for less than half a minute in between."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class QueueBacklog:
    """The oldest available job of a queue that is not paused has been due for `seconds`, a minute or more; `available` jobs are
    due (10,000: at least as many). The process that counts for metrics emits it, once; again if the queue was below half a
    minute in between."""

    queue: str
    available: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ScheduleBroken:
    """A schedule cannot continue (`error` says why): it has no next occurrence until it is changed or resumed."""

    name: str
    error: str


@dataclass(frozen=True, slots=True)
class EnqueueHeldUp:
    """The job of `what`, a schedule or a finished batch, cannot be enqueued now: a transaction of somebody else that is still
    open has enqueued a job with its `unique_key` on `queue`, or has locked the one that has it. It is enqueued within 5 s of
    that transaction's end; other schedules and batches go on. Emitted once, and again if it was enqueued in between."""

    what: str
    queue: str
    unique_key: str


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    """The database refuses to let this worker claim from `queue` (None: to look for due jobs at all), because of a value in a
    row. The worker goes on with the other queues, and tries this one again in `retry_in` seconds. Of a cancelled job that was
    to clean up in a lent slot (`queue` is None, `error` names the job) it is said again after `retry_in` seconds; the others
    are claimed."""

    queue: str | None
    error: str
    retry_in: float


@dataclass(frozen=True, slots=True)
class DatabaseLost:
    """A loop could not reach the database; it tries again in `retry_in` seconds."""

    loop: str
    error: str
    retry_in: float


@dataclass(frozen=True, slots=True)
class DatabaseFound:
    """The loop that lost the database has reached it again."""

    loop: str


@dataclass(frozen=True, slots=True)
class ChildStarted:
    """A supervisor started a worker process."""

    pid: int


@dataclass(frozen=True, slots=True)
class ChildNotStarted:
    """The system refused to start a worker process for a supervisor (`error`): too many processes or open files, no memory.
    The supervisor tries again in `again_in` seconds; None for never."""

    error: str
    again_in: float | None = None


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """A worker process ended with an exit code (-N: killed by signal N); its jobs are handed back. `expected`: the supervisor
    ended it on purpose. `stack` is where it crashed and `kinds` names the handlers on that stack, if the process could report
    them. Another process is started in `again_in` seconds; None for never."""

    pid: int
    code: int
    expected: bool = False
    stack: str = ""
    kinds: tuple[str, ...] = ()
    again_in: float | None = None


@dataclass(frozen=True, slots=True)
class ChildSilent:
    """A worker process showed no life for `seconds` and is killed. `state` is its state in the kernel's view (stopped,
    computing, waiting; empty if unknown), `stack` where it was, and `kinds` names the handlers on that stack."""

    pid: int
    seconds: float
    state: str = ""
    stack: str = ""
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NoChildComesUp:
    """Worker processes ended `times` times in a row before they had started, and none ever started: the supervisor ends."""

    times: int


Event = (
    WorkerStarted
    | WorkerStopped
    | JobStarted
    | JobEnded
    | AttemptFailed
    | JobDied
    | DeathArgumentsLeftOut
    | CancellationDelivered
    | FenceLost
    | EndedAfterCommit
    | LeaseUnproven
    | TasksLeftBehind
    | LoopBlocked
    | HandlerOverran
    | CleanupCut
    | HistoryFilling
    | JobsRescued
    | WorkerStale
    | SuspectAlone
    | JobQuarantined
    | QuarantineStarted
    | QuarantineNotStarted
    | QuarantineEnded
    | UnknownKindReleased
    | UnfitArgumentsReleased
    | BadRow
    | ScheduleFired
    | ScheduleLate
    | ScheduleBroken
    | EnqueueHeldUp
    | QueueBacklog
    | ClaimRefused
    | DatabaseLost
    | DatabaseFound
    | ChildStarted
    | ChildNotStarted
    | ChildEnded
    | ChildSilent
    | NoChildComesUp
)
E = TypeVar("E")


class Instrument(Protocol):
    """A sink: `listeners` gives, for each type of event it wants, the function to call with it. Must not block or raise."""

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        """The function to call for each type of event."""
        ...


def checked(instruments: Iterable[Instrument]) -> list[Instrument]:
    """These instruments. Raises `ConfigurationError` for what is none."""
    given = list(instruments)
    for one in given:
        if not callable(getattr(one, "listeners", None)) or isinstance(one, type):
            raise ConfigurationError(
                f"An instrument has a method `listeners`, as pulse_trio.observe.Instrument says; got {one!r:.200}."
            )
    return given


def check_plain(what: str, listeners: Mapping[type[Any], Callable[[Any], None]]) -> None:
    """Refuses async listeners, of which nothing would ever run. Raises `ConfigurationError`."""
    for event, listener in listeners.items():
        if is_async(listener):
            raise ConfigurationError(
                f"{what}: its listener for {event.__name__} is an async function. Listeners are plain functions, which the "
                "worker calls and does not await."
            )


class Observer:
    """Hands each event to the instruments that listen for its type. An instrument that raises harms no job: its first failure
    is logged, later ones are not."""

    def __init__(self, instruments: Iterable[Instrument] = ()) -> None:
        self._listeners: dict[type[Any], list[Callable[[Any], None]]] = defaultdict(list)
        self._failing: list[Callable[[Any], None]] = []
        self._wanted_by: dict[type[Any], list[Instrument]] = defaultdict(list)
        for instrument in checked(instruments):
            self.add(instrument)

    def add(self, instrument: Instrument) -> None:
        """Adds an instrument, before anything is told."""
        listeners = instrument.listeners()
        check_plain(f"The instrument {type(instrument).__qualname__}", listeners)
        for event_type, listener in listeners.items():
            self._listeners[event_type].append(listener)
            self._wanted_by[event_type].append(instrument)

    def emit(self, event: Event) -> None:
        """Calls every listener of the event's type."""
        for listener in self._listeners.get(type(event), ()):
            try:
                listener(event)
            except (KeyboardInterrupt, trio.Cancelled):
                raise
            except BaseException as error:  # a SystemExit too: it must not come between a job's end and its report
                self._report(listener, event, error)

    def _report(self, listener: Callable[[Any], None], event: Event, error: BaseException) -> None:
        if listener not in self._failing:
            self._failing.append(listener)
            logging.getLogger("pulse_trio").error(
                "the instrument's %s failed at %s; its next failures are not logged",
                getattr(listener, "__qualname__", type(listener).__name__),
                type(event).__name__,
                exc_info=error,
            )

    def wanted(self, event_type: type[E], *, besides: type[Any] | None = None) -> bool:
        """Whether an instrument listens for a type, one that is no `besides`: the path of every job checks this once, at
        start."""
        if besides is None:
            return event_type in self._listeners
        return not all(isinstance(instrument, besides) for instrument in self._wanted_by.get(event_type, ()))
