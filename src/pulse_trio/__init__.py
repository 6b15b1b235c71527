"""Background jobs for Trio on PostgreSQL: every job in a nursery, every write fenced, no job lost."""

from .client import Batch, BatchResult, Client, JobRef, SyncClient, open_client
from .codec import AeadCodec, Codec
from .current import current_job
from .errors import (
    CodecError,
    ConfigurationError,
    DatabaseError,
    DatabaseUnavailable,
    HandlerStuck,
    InvalidArguments,
    InvalidName,
    InvalidTransition,
    JobCancelled,
    JobError,
    JobExists,
    JobFailed,
    NoCurrentJob,
    PartlyEnqueued,
    ProcessDied,
    PulseTrioError,
    SchemaError,
    TookTooLong,
    UnfitResult,
    UnknownBatch,
    UnknownJob,
    UnknownKind,
    UnknownSchedule,
    UsageError,
    WorkerSilent,
)
from .handlers import Exponential, Fixed, Handler, Handlers, Linear, RetryContext
from .job_log import JobLogFilter
from .jobs import Discard, Job, JobRequest, RetryAfter, Snooze
from .settings import WorkerSettings
from .states import State
from .store.batches import BatchFailure, BatchStatus
from .store.cancelling import CancellationRecord, CancelResult
from .store.stacks import JobStack
from .worker import Worker, WorkerReport

__all__ = [
    "AeadCodec",
    "Batch",
    "BatchFailure",
    "BatchResult",
    "BatchStatus",
    "CancelResult",
    "CancellationRecord",
    "Client",
    "Codec",
    "CodecError",
    "ConfigurationError",
    "DatabaseError",
    "DatabaseUnavailable",
    "Discard",
    "Exponential",
    "Fixed",
    "Handler",
    "HandlerStuck",
    "Handlers",
    "InvalidArguments",
    "InvalidName",
    "InvalidTransition",
    "Job",
    "JobCancelled",
    "JobError",
    "JobExists",
    "JobFailed",
    "JobLogFilter",
    "JobRef",
    "JobRequest",
    "JobStack",
    "Linear",
    "NoCurrentJob",
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
    "UnfitResult",
    "UnknownBatch",
    "UnknownJob",
    "UnknownKind",
    "UnknownSchedule",
    "UsageError",
    "Worker",
    "WorkerReport",
    "WorkerSettings",
    "WorkerSilent",
    "current_job",
    "open_client",
]
