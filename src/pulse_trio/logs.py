"""The log of `run` on stderr: a sentence for each event, or with --json one JSON object a line."""

from __future__ import annotations

import logging
import math
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from .job_log import JobLogFilter, mistaken
from .log_formats import JsonFormatter, LineFormatter
from .log_writer import LogWriter
from .observe import (
    AttemptFailed,
    BadRow,
    CancellationDelivered,
    ChildEnded,
    ChildNotStarted,
    ChildSilent,
    ChildStarted,
    ClaimRefused,
    CleanupCut,
    DatabaseFound,
    DatabaseLost,
    DeathArgumentsLeftOut,
    EndedAfterCommit,
    EnqueueHeldUp,
    FenceLost,
    HandlerOverran,
    HistoryFilling,
    JobDied,
    JobEnded,
    JobQuarantined,
    JobsRescued,
    JobStarted,
    LeaseUnproven,
    LoopBlocked,
    NoChildComesUp,
    QuarantineEnded,
    QuarantineNotStarted,
    QuarantineStarted,
    QueueBacklog,
    ScheduleBroken,
    ScheduleFired,
    ScheduleLate,
    SuspectAlone,
    TasksLeftBehind,
    UnfitArgumentsReleased,
    UnknownKindReleased,
    WorkerStale,
    WorkerStarted,
    WorkerStopped,
)
from .text import duration, headline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .observe import Event

logger = logging.getLogger("pulse_trio")

_ONCE_IN = 60.0
"""Seconds in which the same unknown kind is logged once."""
_FAILURES = ("failed", "timeout", "discarded")
_WARNINGS = (
    AttemptFailed,
    FenceLost,
    EndedAfterCommit,
    LeaseUnproven,
    TasksLeftBehind,
    LoopBlocked,
    CleanupCut,
    HistoryFilling,
    HandlerOverran,
    JobsRescued,
    WorkerStale,
    SuspectAlone,
    JobQuarantined,
    QuarantineNotStarted,
    UnfitArgumentsReleased,
    UnknownKindReleased,
    DeathArgumentsLeftOut,
    DatabaseLost,
    ChildNotStarted,
    ChildSilent,
    NoChildComesUp,
    ScheduleBroken,
    EnqueueHeldUp,
    ScheduleLate,
    QueueBacklog,
)
_ERRORS = (JobDied, BadRow, ClaimRefused)


class ToStderr(logging.StreamHandler[TextIO]):
    """The handler that `set_up` adds to the root logger: a stderr that is not read does not block the event loop."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._encoding = stream.encoding or "utf-8"
        # A stream without a descriptor is a test's, not a process's stderr.
        with suppress(OSError, ValueError):
            self._writer: LogWriter | None = LogWriter(stream.fileno(), self._notice)
            return
        self._writer = None

    def emit(self, record: logging.LogRecord) -> None:
        if self._writer is None:
            super().emit(record)
            return
        try:
            self._writer.write(self._encoded(record))
        except Exception:  # whatever an argument's own `__str__` raises: reported there, and no line ends a worker
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Reports a record that cannot be formatted; logging's own report would write to stderr and might block."""
        if self._writer is None:
            super().handleError(record)
        elif logging.raiseExceptions:
            self._writer.write(self._encoded(mistaken(record)))

    def flush(self) -> None:
        if self._writer is None:
            super().flush()
        else:
            self._writer.flush()

    def _encoded(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(self._encoding, "backslashreplace")

    def _notice(self, count: int) -> bytes:
        message = f"{count} lines of the log were dropped here, because stderr was not read in time"
        return self._encoded(logger.makeRecord(logger.name, logging.WARNING, "", 0, message, (), None))


def set_up(*, as_json: bool, verbose: bool) -> None:
    """Logs to stderr, unless the user's own module has configured logging."""
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    root = logging.getLogger()
    if root.handlers:
        return
    handler = ToStderr(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter())
    handler.addFilter(JobLogFilter())
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)


def forwarding_level() -> int | None:
    """The level from which child processes forward their handlers' log records to this process. None if `set_up` has not
    configured the log: then the program's own modules do so in each process."""
    root = logging.getLogger()
    return root.level if any(isinstance(handler, ToStderr) for handler in root.handlers) else None


class LogInstrument:
    """Logs each event as a sentence; successful jobs only if `every_job`. Arguments are never logged."""

    def __init__(self, *, every_job: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_job = every_job
        self._clock = clock
        self._unknown: dict[str, tuple[float, int]] = {}
        """By kind: when it was last logged as unknown, and how many released jobs were not logged since."""

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        wanted: list[type[Any]] = [
            WorkerStarted,
            WorkerStopped,
            CancellationDelivered,
            DatabaseFound,
            ChildStarted,
            ChildEnded,
            QuarantineStarted,
            QuarantineEnded,
            *_WARNINGS,
            *_ERRORS,
        ]
        if self._every_job:
            wanted += [JobStarted, ScheduleFired]
        chosen: dict[type[Any], Callable[[Any], None]] = dict.fromkeys(wanted, self._log)
        if self._every_job:
            chosen[JobEnded] = self._log_end
        return chosen | {UnknownKindReleased: self._log_unknown, UnfitArgumentsReleased: self._log_unknown}

    def _log(self, event: Event) -> None:
        level = logging.WARNING if isinstance(event, _WARNINGS) else logging.INFO
        if (isinstance(event, ChildEnded) and not event.expected) or (
            isinstance(event, QuarantineEnded) and event.crash is not None
        ):
            level = logging.WARNING
        if isinstance(event, _ERRORS):
            level = logging.ERROR
        logger.log(level, "%s", sentence(event), extra={"pulse_trio_event": event})

    def _log_unknown(self, event: UnknownKindReleased | UnfitArgumentsReleased) -> None:
        # Once a minute for each kind: a backlog of a kind that this deployment lacks wrote 60,000 lines in five seconds.
        now = self._clock()
        about = f"{type(event).__name__} {event.kind}"
        said, unsaid = self._unknown.get(about, (-math.inf, 0))
        if now < said + _ONCE_IN:
            self._unknown[about] = (said, unsaid + 1)
            return
        self._unknown[about] = (now, 0)
        more = f" ({unsaid} more since this was last logged)" if unsaid else ""
        logger.warning("%s%s", sentence(event), more, extra={"pulse_trio_event": event})

    def _log_end(self, event: JobEnded) -> None:
        if event.outcome not in _FAILURES:  # those are logged as AttemptFailed
            logger.info("%s", sentence(event), extra={"pulse_trio_event": event})


def sentence(event: Event) -> str:
    """The event as a sentence for people."""
    match event:
        case WorkerStarted():
            queues = "all queues" if event.queues is None else f"queue {', '.join(event.queues)}"
            return f"worker {event.session} started: {queues}, up to {event.concurrency} jobs at once"
        case WorkerStopped():
            return "worker stopped" + (f"; {event.released} job(s) released unfinished" if event.released else "")
        case JobStarted():
            return f"job {event.job_id} ({event.kind}) started, attempt {event.attempt}"
        case JobEnded() | AttemptFailed():
            return _end_of(event)
        case JobDied():
            why = f": {headline(event.error)}" if event.error else ""
            return (
                f"job {event.job_id} ({event.kind}) of queue {event.queue} is dead after attempt {event.attempt} "
                f"({event.cause}){why}"
            )
        case DeathArgumentsLeftOut():
            return (
                f"job {event.job_id} ({event.kind}) hears of the death of job {event.dead_job_id} without its arguments, which "
                f"cannot be read: {headline(event.error)}"
            )
        case CancellationDelivered():
            why = f": {headline(event.message)}" if event.message else ""
            why = why if event.reason == "user" else f" ({event.reason})"
            return f"job {event.job_id} ({event.kind}) is being cancelled{why}"
        case FenceLost():
            why = "another attempt owns it now, or it has ended"
            return f"job {event.job_id} ({event.kind}) lost its fence at its {event.during}: {why}"
        case EndedAfterCommit():
            return f"job {event.job_id} ({event.kind}) is completed, but its handler went on: {headline(event.error)}"
        case LeaseUnproven():
            return f"job {event.job_id} ({event.kind}) was cancelled: its lease could not be renewed in time"
        case TasksLeftBehind():
            return (
                f"job {event.job_id} ({event.kind}) left asyncio tasks behind, now cancelled: {', '.join(event.tasks)}"
            )
        case LoopBlocked():
            who = f"job {event.job_id} ({event.kind})" if event.job_id is not None else "code outside any job"
            return f"{who} blocked the event loop for {duration(event.seconds)}; it turns again"
        case HandlerOverran():
            does = "the process ends without it" if event.reason == "shutdown" else "replacing the process"
            return (
                f"job {event.job_id} ({event.kind}) has not ended {duration(event.seconds)} after its cancellation "
                f"({event.reason}): {does}. It is in:\n{event.stack}"
            )
        case CleanupCut():
            return (
                f"job {event.job_id} ({event.kind}) did not finish its clean-up: job.cleanup() was cut short after "
                f"{duration(event.seconds)}, and the rest of it is not done; the setting `cleanup` gives it more time"
            )
        case HistoryFilling():
            return (
                f"job {event.job_id} ({event.kind}) has {event.lines:,} lines of history, and is dead when it has "
                f"{event.most:,}: put its loop into children"
            )
        case JobsRescued():
            dead = f", {event.dead} of them dead (no attempts left)" if event.dead else ""
            whose = f" (process {event.pid}){_list_of(event.jobs)}" if event.pid is not None else ""
            return f"rescued {event.rescued + event.dead} job(s) whose worker had vanished{dead}{whose}"
        case WorkerStale():
            return (
                f"worker {event.host}:{event.pid} has shown no sign of life for {duration(event.seconds)}: it is stale, and "
                f"its jobs ({event.running} at its last sign) are rescued as their leases run out"
            )
        case SuspectAlone():
            how = f"beside {event.beside} other job(s)" if event.beside else "alone"
            return (
                f"job {event.job_id} ({event.kind}) has crashed its worker before: attempt {event.attempt} runs {how}"
            )
        case JobQuarantined():
            crashes = "crash of its worker" if event.crashes == 1 else "crashes of its workers"
            return (
                f"job {event.job_id} ({event.kind}) is in quarantine after {event.crashes} {crashes}: "
                "it runs next in its own process"
            )
        case QuarantineStarted():
            return (
                f"job {event.job_id} ({event.kind}) attempt {event.attempt} runs in quarantine, in process {event.pid}"
            )
        case QuarantineNotStarted():
            return (
                f"job {event.job_id} ({event.kind}) could not start in quarantine: {headline(event.error)}; "
                f"due again in {duration(event.again_in)}"
            )
        case QuarantineEnded():
            return _end_in_quarantine(event)
        case UnfitArgumentsReleased():
            return f"job {event.job_id} ({event.kind}) was released for a worker of another version: {headline(event.error)}"
        case UnknownKindReleased():
            return f"job {event.job_id} was released: this worker has no handler for the kind {event.kind!r}"
        case BadRow():
            if event.job_id is None:
                return f"a row blocks {event.during}: {headline(event.error)}; trying again"
            kind = f" ({event.kind})" if event.kind else ""
            return f"the row of job {event.job_id}{kind} cannot be processed ({event.during}): {headline(event.error)}"
        case ScheduleFired():
            did = "fired" if event.added else "found its earlier job unfinished:"
            return f"schedule {event.name!r} {did} job {event.job_id}, {duration(event.late)} late"
        case ScheduleLate():
            return f"schedule {event.name!r} is {duration(event.seconds)} late: no worker has fired it"
        case QueueBacklog():
            return (
                f"the queue {event.queue!r} falls behind: its oldest job has been due for {duration(event.seconds)}, "
                f"{event.available} are due"
            )
        case ScheduleBroken():
            return f"schedule {event.name!r} cannot continue: {headline(event.error)}"
        case EnqueueHeldUp():
            key = f"the unique key {event.unique_key!r} of the queue {event.queue!r}"
            return f"the job of {event.what} waits: an open transaction holds {key}, or its table (pulse-trio doctor)"
        case ClaimRefused():
            what = "look for due jobs" if event.queue is None else f"claim from the queue {event.queue!r}"
            return (
                f"the database refuses to {what}: {headline(event.error)}; a row holds a value that no version of pulse-trio "
                f"writes. Trying again in {duration(event.retry_in)}"
            )
        case DatabaseLost():
            return f"database lost ({event.loop}): {headline(event.error)}; trying again in {duration(event.retry_in)}"
        case DatabaseFound():
            return f"database found again ({event.loop})"
        case ChildStarted():
            return f"worker process {event.pid} started"
        case ChildNotStarted():
            again = f"trying again in {duration(event.again_in)}" if event.again_in is not None else "giving up"
            return f"the system refuses another worker process: {headline(event.error)}; {again}"
        case ChildEnded():
            return _end_of_child(event)
        case ChildSilent():
            state = f" ({event.state})" if event.state else ""
            where = _where(event.stack, event.kinds)
            return f"worker process {event.pid} showed no life for {duration(event.seconds)}{state}: killed it{where}"
        case NoChildComesUp():
            why = "Their output above, or importing the module by hand (python -c 'import ...'), shows why"
            return f"giving up: {event.times} worker processes in a row ended before they had started. {why}"


def _end_in_quarantine(event: QuarantineEnded) -> str:
    what = f"job {event.job_id} ({event.kind}) attempt {event.attempt}"
    if event.crash is None:
        return f"{what} ended in quarantine without a crash, after {duration(event.seconds)}"
    counts = "" if event.counts else "; this does not count towards its crash_limit"
    return f"{what} crashed in quarantine after {duration(event.seconds)}: process {event.pid} {event.crash}{counts}"


def _end_of(event: JobEnded | AttemptFailed) -> str:
    what = f"job {event.job_id} ({event.kind}) attempt {event.attempt} {event.outcome} after {duration(event.seconds)}"
    return f"{what}: {headline(event.error)}" if event.error else what


_LISTED = 20
"""How many jobs a sentence names."""


def _list_of(jobs: Sequence[tuple[int, str]]) -> str:
    named = ", ".join(f"{job_id} ({kind})" for job_id, kind in jobs[:_LISTED])
    more = f" and {len(jobs) - _LISTED} more" if len(jobs) > _LISTED else ""
    return f": {named}{more}" if jobs else ""


def _where(stack: str, kinds: Sequence[str]) -> str:
    handlers = f" in the handler of {', '.join(kinds)}" if kinds else ""
    return f". It was{handlers or ' somewhere'}:\n{stack}" if stack else ""


def _end_of_child(event: ChildEnded) -> str:
    how = f"exit code {event.code}" if event.code >= 0 else f"killed by {_name_of_signal(-event.code)}"
    if event.code == -signal.SIGKILL and not event.expected:
        how += ", which the supervisor did not send: probably the kernel's out-of-memory killer"
    elif event.code == -signal.SIGALRM and not event.expected:
        how += ", its own alarm timer: its loop did not turn for two leases"
    again = ""
    if event.again_in is not None and not event.expected:
        again = f"; starting another{f' in {duration(event.again_in)}' if event.again_in else ''}"
    return f"worker process {event.pid} ended ({how}){again}{_where(event.stack, event.kinds)}"


def _name_of_signal(number: int) -> str:
    try:
        return f"signal {number}, {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"
