"""Background jobs for Trio on PostgreSQL: every job in a nursery, every write fenced, no job lost."""

from .client import Client, JobRef, SyncClient, open_client
from .errors import (
    ConfigurationError,
    DatabaseError,
    DatabaseUnavailable,
    InvalidArguments,
    InvalidName,
    InvalidTransition,
    JobCancelled,
    JobError,
    JobExists,
    JobFailed,
    PartlyEnqueued,
    ProcessDied,
    PulseTrioError,
    SchemaError,
    TookTooLong,
    UnknownJob,
    UnknownKind,
    UnknownSchedule,
    UsageError,
)
from .handlers import Exponential, Fixed, Handler, Handlers, Linear, RetryContext
from .jobs import Discard, Job, JobRequest, RetryAfter, Snooze
from .settings import WorkerSettings
from .states import State
from .store.cancelling import CancellationRecord, CancelResult
from .worker import Worker, WorkerReport

__all__ = [
    "CancelResult",
    "CancellationRecord",
    "Client",
    "ConfigurationError",
    "DatabaseError",
    "DatabaseUnavailable",
    "Discard",
    "Exponential",
    "Fixed",
    "Handler",
    "Handlers",
    "InvalidArguments",
    "InvalidName",
    "InvalidTransition",
    "Job",
    "JobCancelled",
    "JobError",
    "JobExists",
    "JobFailed",
    "JobRef",
    "JobRequest",
    "Linear",
    "PartlyEnqueued",
    "ProcessDied",
    "PulseTrioError",
    "RetryAfter",
    "RetryContext",
    "SchemaError",
    "Snooze",
    "State",
    "SyncClient",
    "TookTooLong",
    "UnknownJob",
    "UnknownKind",
    "UnknownSchedule",
    "UsageError",
    "Worker",
    "WorkerReport",
    "WorkerSettings",
    "open_client",
]
