"""Every exception that pulse-trio raises, grouped by whose fault it is.

Three families, so that a caller (and the command line's exit code) can tell them apart:

- `UsageError`: yours. Bad arguments, bad configuration, an unknown handler. Nothing was written. Exit code 2.
- `DatabaseError`: the database's. It is unreachable, or its schema is not the one this version needs. Exit code 1.
- `JobError`: the job's. Waiting for a job's result raises it when there is no result.

The split follows h11's `LocalProtocolError` / `RemoteProtocolError`, with a third party added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .records import JobRecord


class PulseTrioError(Exception):
    """The root: `except PulseTrioError` catches every exception of pulse-trio and no other."""

    exit_code: ClassVar[int] = 1

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException would call the class with the message alone, and an error that is more than that could not be read in
        # another process: a `multiprocessing.Pool` waits for ever then.
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[PulseTrioError], args: tuple[Any, ...], state: dict[str, Any]) -> PulseTrioError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class UsageError(PulseTrioError):
    """The caller's fault; the message says what to do. Nothing was written."""

    exit_code: ClassVar[int] = 2


class ConfigurationError(UsageError):
    """A setting, a module path or a registration that cannot work; an option or a filter that does not exist."""


class InvalidName(UsageError):
    """A queue, kind or unique key with characters or a length that are not allowed."""


class InvalidArguments(UsageError):
    """Arguments that do not fit the handler's signature, or that JSON cannot carry."""


class UnknownKind(UsageError):
    """No handler is registered under that name."""


class InvalidTransition(UsageError):
    """The job's state does not allow the operation (the state machine is `states.TRANSITIONS`)."""


class JobExists(UsageError):
    """Another job has the unique key, and the enqueue asked for `on_conflict="raise"`. That job's id is `job_id`."""

    def __init__(self, message: str, *, job_id: int) -> None:
        super().__init__(message)
        self.job_id = job_id


class PartlyEnqueued(PulseTrioError):
    """`enqueue_many(..., chunk=...)` failed after some chunks were committed; `enqueued` has their references, in order.

    `__cause__` is the error that stopped it. If that is `DatabaseUnavailable`, the next chunk may have been committed too.
    """

    def __init__(self, message: str, *, enqueued: list[Any]) -> None:
        super().__init__(message)
        self.enqueued = enqueued


class ResourceFailed(UsageError):
    """A resource (`@handlers.resource`) failed when a worker opened it, before it claimed any job. `detail` is the end of the
    traceback."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class ResourceLost(PulseTrioError):
    """A resource failed while a worker ran. The worker has stopped, as by `Worker.stop`; no job is lost."""


class NoCurrentJob(UsageError, LookupError):
    """`current_job()` was called outside of a job."""


class UnknownJob(UsageError):
    """No job has that id (it was deleted, or ended longer ago than its retention)."""


class NotDurable(UsageError):
    """A durable call, such as `job.step`, in a handler without `durable=True`. The job is dead at once: the same code fails in
    the same way in each attempt."""


class UnknownBatch(UsageError):
    """No batch has that id (or its retention has passed)."""


class UnknownSchedule(UsageError):
    """No schedule has that name."""


class DatabaseError(PulseTrioError):
    """The database's fault: the request itself was valid."""


class DatabaseUnavailable(DatabaseError):
    """No connection could be opened, or it was lost and could not be reopened in time."""


class StatementRefused(DatabaseError):
    """The database refused a statement although the connection works: a row holds a value that no version of pulse-trio
    writes."""


class SchemaError(DatabaseError):
    """The schema is missing, older or newer than this version of pulse-trio needs, or has an older version's rights."""


class TookTooLong(DatabaseError):
    """A statement reached its time limit: narrow the query (a state, a queue, a shorter period), or raise the limit."""


class JobError(PulseTrioError):
    """The job's fault. `job` is the job as it ended."""

    def __init__(self, message: str, job: JobRecord) -> None:
        super().__init__(message)
        self.job = job


class JobFailed(JobError):
    """The job is dead: its last attempt failed and its budget is used up. The message holds the last error."""


class JobCancelled(JobError):
    """The job was cancelled."""


class ChildFailed(JobError):
    """A child of a durable nursery is dead, or was cancelled by a person or its own deadline. The nursery raises these in one
    `ExceptionGroup`, and with `collect=True` keeps them in `child.outcome`. `job` is the child as it ended."""


class UnfitResult(JobError):
    """The job is completed, but the stored result does not have the handler's return type (often another version's)."""


class InvalidEvent(PulseTrioError):
    """The payload of an event does not fit the type that `job.wait_for_event` was given. The event stays received: a later
    attempt gets the same error."""


class StepFailed(PulseTrioError):
    """A step of a durable handler raised. In the attempt that ran it the `__cause__` is its exception; later attempts know its
    text alone, which is in the message. `step` is the function's name."""

    def __init__(self, message: str, *, step: str = "") -> None:
        super().__init__(message)
        self.step = step


class ReplayMismatch(PulseTrioError):
    """A durable handler did not do again what its job's history says: its code has changed, or it does something different in
    each attempt. The job is dead."""


class FailedBefore(PulseTrioError):
    """A durable call raises it in a later attempt. An earlier attempt failed of plain code at this place, and lost its worker
    while its handler undid its work in a `job.cleanup()`; no line says how far that came. Handle it as you handle that failure,
    whose headline is `failure`: undo the work again."""

    def __init__(self, message: str, failure: str) -> None:
        super().__init__(message)
        self.failure = failure


class ProcessDied(PulseTrioError):
    """The process of a handler with `runs="process"` ended before the handler returned; the message names the signal."""


class CodecError(PulseTrioError):
    """A payload cannot be decoded: this program does not have its key, or the payload was changed. The job fails and is tried
    again."""


class PayloadLost(PulseTrioError):
    """A stored payload is not in the store, or is not what was stored. In a handler it fails the attempt, which is tried
    again."""


class HandlerStuck(PulseTrioError):
    """A handler did not end when it was cancelled, so its worker has stopped and released its other jobs."""


class WorkerSilent(PulseTrioError):
    """The worker that runs a job did not answer a request for its stack: it is gone, blocked, or receives no notifications at
    the moment."""
