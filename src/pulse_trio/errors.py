"""Every exception pulse-trio raises, split by whose fault it is.

Three families, so that a caller (and the command line's exit code) can tell them apart:

- `UsageError`: yours. Bad arguments, bad configuration, an unknown handler. Nothing was written. Exit code 2.
- `DatabaseError`: the database's. Unreachable, or its schema is not the one this version needs. Exit code 1.
- `JobError`: the job's. What waiting for a job's result raises when there is no result.

The split is h11's `LocalProtocolError` / `RemoteProtocolError`, with a third party added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .store.operations import JobRecord


class PulseTrioError(Exception):
    """The root: `except PulseTrioError` catches everything that is ours and nothing that is not."""

    exit_code: ClassVar[int] = 1


class UsageError(PulseTrioError):
    """The caller's fault; the message says what to do. Nothing was written."""

    exit_code: ClassVar[int] = 2


class ConfigurationError(UsageError):
    """A setting, a module path or a registration that cannot work."""


class InvalidName(UsageError):
    """A queue, kind or unique key with characters or a length that are not allowed."""


class InvalidArguments(UsageError):
    """Arguments that do not fit the handler's signature, or that JSON cannot carry."""


class UnknownKind(UsageError):
    """No handler is registered under that name."""


class InvalidTransition(UsageError):
    """The job is in a state in which that cannot be done to it (the state machine is `states.TRANSITIONS`)."""


class JobExists(UsageError):
    """Another job has the unique key, and the enqueue said `on_conflict="raise"`. Its id is `job_id`."""

    def __init__(self, message: str, *, job_id: int) -> None:
        super().__init__(message)
        self.job_id = job_id


class PartlyEnqueued(PulseTrioError):
    """`enqueue_many(..., chunk=...)` failed after some chunks were committed; `enqueued` has what they gave back, in order.

    The cause (`__cause__`) is what stopped it. If that is `DatabaseUnavailable`, the next chunk may have been committed too.
    """

    def __init__(self, message: str, *, enqueued: list[Any]) -> None:
        super().__init__(message)
        self.enqueued = enqueued


class UnknownJob(UsageError):
    """No job has that id (or its retention has passed)."""


class UnknownBatch(UsageError):
    """No batch has that id (or its retention has passed)."""


class UnknownSchedule(UsageError):
    """No schedule has that name."""


class DatabaseError(PulseTrioError):
    """The database's fault: what was asked for was right."""


class DatabaseUnavailable(DatabaseError):
    """No connection could be made, or it was lost and could not be made again in time."""


class StatementRefused(DatabaseError):
    """The database refused a statement, and the connection is well: a row holds what no version of pulse-trio writes."""


class SchemaError(DatabaseError):
    """The schema is missing, older or newer than this version of pulse-trio needs, or its rights are those of an older one."""


class TookTooLong(DatabaseError):
    """A statement was stopped at its time limit: ask for less (a state, a queue, a shorter time), or give it longer."""


class JobError(PulseTrioError):
    """The job's fault. `job` is the job as it ended."""

    def __init__(self, message: str, job: JobRecord) -> None:
        super().__init__(message)
        self.job = job

    def __reduce__(self) -> tuple[type[JobError], tuple[str, JobRecord]]:
        # BaseException would make it anew from the message alone (in another process, say).
        return type(self), (str(self), self.job)


class JobFailed(JobError):
    """The job is dead: its last attempt failed and its budget is used up. The message holds the last error."""


class JobCancelled(JobError):
    """The job was cancelled."""


class UnfitResult(JobError):
    """The job is completed, and what is stored is not of the type that its handler says (another version's, most often)."""


class ProcessDied(PulseTrioError):
    """The process in which a handler with `runs="process"` ran ended before the handler did; the message names the signal."""


class CodecError(PulseTrioError):
    """A payload cannot be decoded: its key is not known here, or it was changed. The job fails and is tried again."""


class HandlerStuck(PulseTrioError):
    """A handler did not end when it was cancelled, so the worker that ran it has stopped; what else it held was handed back."""


class WorkerSilent(PulseTrioError):
    """The worker that runs a job did not answer where the job is: it is gone, blocked, or hears no notifications just now."""
