"""One typed event for each thing that happened; sinks are adapters (the idea is stamina's instrumentation).

Events are made only when somebody listens for that very type: the path of every job asks a dictionary once, at start.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 -- instruments may read the annotations
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

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
    """The worker's nursery has closed; `released` jobs were given back unfinished."""

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
    """An attempt ended at the worker; `seconds` since its claim arrived. Whether its report counts, the settle says."""

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
    handler raised, as the object with its traceback; None where there is none, or it came from another process."""

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
    """A job is dead: nothing tries it again but a person. `cause` is how its last attempt ended (failed, timeout, discarded,
    rescued: its worker vanished, crashed: its process died of it); `error` is what was said of it, at most 4,000 characters.
    Told by the worker or supervisor that wrote it, once the database has it; at least once, should the answer be lost."""

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
    """Somebody's request for a job's cancellation has reached its handler; `message` is the reason that was given."""

    job_id: int
    kind: str
    attempt: int
    message: str | None


@dataclass(frozen=True, slots=True)
class FenceLost:
    """A beat or a report matched no row: another attempt owns the job, or it is finished."""

    job_id: int
    kind: str
    attempt: int
    during: str


@dataclass(frozen=True, slots=True)
class EndedAfterCommit:
    """A handler failed or returned a value after its `job.transaction()` had committed: the job is completed all the same,
    and `error` is known only here."""

    job_id: int
    kind: str
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class LeaseUnproven:
    """The lease could not be renewed in time, so the handler was cancelled before anyone else may own the job."""

    job_id: int
    kind: str
    attempt: int


@dataclass(frozen=True, slots=True)
class TasksLeftBehind:
    """An asyncio handler ended while tasks it had made still ran; they were cancelled, and the job ended with the last."""

    job_id: int
    kind: str
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoopBlocked:
    """An event loop of the worker turns again after `seconds` in which it did not; `stack` is where it was, and the job whose
    handler was in it (None for none). Logged the moment it was noticed too."""

    job_id: int | None
    kind: str | None
    seconds: float
    stack: str


@dataclass(frozen=True, slots=True)
class HandlerOverran:
    """A handler still runs `seconds` after its cancellation: the worker hands back everything else and is replaced."""

    job_id: int
    kind: str
    attempt: int
    reason: str
    seconds: float
    stack: str


@dataclass(frozen=True, slots=True)
class JobsRescued:
    """Expired leases were put back on their queues (or dead-lettered). When a supervisor saw the process `pid` die: what that
    held, and `jobs` has the id and the kind of each."""

    rescued: int
    dead: int
    pid: int | None = None
    jobs: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerStale:
    """A worker has shown no sign of life for `seconds`, longer than its setting `stale` allows (its lease, if that is 0). One
    watchdog of the fleet tells it, once, and again when it was heard of meanwhile. `running`: its jobs at its last sign."""

    session: int
    host: str
    pid: int
    seconds: float
    running: int


@dataclass(frozen=True, slots=True)
class SuspectAlone:
    """A job whose worker died with it too often is about to run in this worker's own process, because the worker was not told
    how another process finds its handlers. `beside`: so many other jobs still run, and had not ended in time; with 0 the worker
    claims nothing else until the job has ended."""

    job_id: int
    kind: str
    attempt: int
    beside: int = 0


@dataclass(frozen=True, slots=True)
class JobQuarantined:
    """A rescue put a job in quarantine: so many `crashes` of its worker are on its record that it runs next in a process of its
    own."""

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
    """The process for a job in quarantine could not be started, or ended before the job began (`error`). The job is put back,
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
    """A job of a kind this worker has no handler for was put back, its budget untouched."""

    job_id: int
    kind: str


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row cannot be worked with as it stands (`error` says why, `during` what was being done): its job is made dead, and the
    others go on. `job_id` is None, and `kind` empty, when no single row could be named; then it is tried again."""

    job_id: int | None
    kind: str
    during: str
    error: str


@dataclass(frozen=True, slots=True)
class UnfitArgumentsReleased:
    """A job whose arguments do not fit this worker's handler was put back for a worker of another version, its budget
    untouched; `error` says what does not fit. It is dead when nothing else happened to it for the setting `unfit_patience`."""

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
class ScheduleBroken:
    """A schedule cannot go on (`error` says why): it has no next occurrence until it is changed or resumed."""

    name: str
    error: str


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    """The database refuses to let this worker claim from `queue` (None: to look for due jobs at all), for what a row there
    holds. The worker goes on with the other queues, and tries this one again in `retry_in` seconds."""

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
    """The loop that lost the database has it again."""

    loop: str


@dataclass(frozen=True, slots=True)
class ChildStarted:
    """A supervisor started a worker process."""

    pid: int


@dataclass(frozen=True, slots=True)
class ChildNotStarted:
    """The system refused a supervisor a worker process (`error`): too many processes or open files, no memory. It is tried
    again in `again_in` seconds; None for never."""

    error: str
    again_in: float | None = None


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """A worker process ended with an exit code (-N: killed by signal N); what it held is handed back. `expected`: the
    supervisor wanted its end. `stack` is where it was when it crashed and `kinds` whose handlers are on it, if it could say.
    Another is started in `again_in` seconds; None for never."""

    pid: int
    code: int
    expected: bool = False
    stack: str = ""
    kinds: tuple[str, ...] = ()
    again_in: float | None = None


@dataclass(frozen=True, slots=True)
class ChildSilent:
    """A worker process showed no life for so many `seconds`: it is killed. `state` says what the kernel makes of it
    (stopped, computing, waiting; empty if that is unknown), `stack` where it was and `kinds` whose handlers are on that."""

    pid: int
    seconds: float
    state: str = ""
    stack: str = ""
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NoChildComesUp:
    """Worker processes ended so many `times` in a row before they had begun, and none ever began: the supervisor ends."""

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
    | ScheduleBroken
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

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]: ...


class Observer:
    """Hands each event to the instruments that listen for its type. One that raises costs no job: its first failure is
    logged, and the others are not."""

    def __init__(self, instruments: Iterable[Instrument] = ()) -> None:
        self._listeners: dict[type[Any], list[Callable[[Any], None]]] = defaultdict(list)
        self._failing: list[Callable[[Any], None]] = []
        for instrument in instruments:
            for event_type, listener in instrument.listeners().items():
                self._listeners[event_type].append(listener)

    def emit(self, event: Event) -> None:
        """Calls every listener of the event's type."""
        for listener in self._listeners.get(type(event), ()):
            try:
                listener(event)
            except Exception as error:
                self._report(listener, event, error)

    def _report(self, listener: Callable[[Any], None], event: Event, error: Exception) -> None:
        if listener not in self._failing:
            self._failing.append(listener)
            logging.getLogger("pulse_trio").error(
                "the instrument's %s failed at %s; its next failures are not logged",
                getattr(listener, "__qualname__", type(listener).__name__),
                type(event).__name__,
                exc_info=error,
            )

    def wanted(self, event_type: type[E]) -> bool:
        """Whether anybody listens for a type: asked once at start by the path of every job."""
        return event_type in self._listeners
