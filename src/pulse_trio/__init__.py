"""Background jobs for Trio on PostgreSQL: every job in a nursery, every write fenced, no job lost.

What declares handlers is imported at once; clients and workers, which bring the database's driver, when they are first asked
for. A module of handlers needs neither, and a process of `runs="process"` starts in half of the time without them.
"""

from typing import TYPE_CHECKING

from .codec import AeadCodec, Codec
from .current import current_job
from .errors import (
    ChildFailed,
    CodecError,
    ConfigurationError,
    DatabaseError,
    DatabaseUnavailable,
    FailedBefore,
    HandlerStuck,
    InvalidArguments,
    InvalidEvent,
    InvalidName,
    InvalidTransition,
    JobCancelled,
    JobError,
    JobExists,
    JobFailed,
    NoCurrentJob,
    PartlyEnqueued,
    PayloadLost,
    ProcessDied,
    PulseTrioError,
    ReplayMismatch,
    ResourceFailed,
    ResourceLost,
    SchemaError,
    StepFailed,
    TookTooLong,
    UnfitResult,
    UnknownBatch,
    UnknownJob,
    UnknownKind,
    UnknownSchedule,
    UsageError,
    WorkerSilent,
)
from .handlers import INJECTED, Exponential, Fixed, Handler, Handlers, Linear, RetryContext
from .job_log import JobLogFilter
from .jobs import Discard, Job, JobRequest, RetryAfter, Snooze
from .later import later
from .settings import WorkerSettings
from .states import State

if TYPE_CHECKING:
    from .client import Batch, BatchResult, Client, JobRef, SyncBatch, SyncClient, open_client
    from .store.batches import BatchFailure, BatchStatus
    from .store.cancelling import CancellationRecord, CancelResult
    from .store.stacks import JobStack
    from .worker import Worker, WorkerReport
    from .worker.durable.children import Child
else:
    __getattr__, __dir__ = later(
        __name__,
        {
            "client": ("Batch", "BatchResult", "Client", "JobRef", "SyncBatch", "SyncClient", "open_client"),
            "store.batches": ("BatchFailure", "BatchStatus"),
            "store.cancelling": ("CancelResult", "CancellationRecord"),
            "store.stacks": ("JobStack",),
            "worker": ("Worker", "WorkerReport"),
            "worker.durable.children": ("Child",),
        },
        modules=("client", "grants", "migrate", "observe", "postgres", "store", "tracing", "worker"),
    )

__all__ = [
    "INJECTED",
    "AeadCodec",
    "Batch",
    "BatchFailure",
    "BatchResult",
    "BatchStatus",
    "CancelResult",
    "CancellationRecord",
    "Child",
    "ChildFailed",
    "Client",
    "Codec",
    "CodecError",
    "ConfigurationError",
    "DatabaseError",
    "DatabaseUnavailable",
    "Discard",
    "Exponential",
    "FailedBefore",
    "Fixed",
    "Handler",
    "HandlerStuck",
    "Handlers",
    "InvalidArguments",
    "InvalidEvent",
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
    "PayloadLost",
    "ProcessDied",
    "PulseTrioError",
    "ReplayMismatch",
    "ResourceFailed",
    "ResourceLost",
    "RetryAfter",
    "RetryContext",
    "SchemaError",
    "Snooze",
    "State",
    "StepFailed",
    "SyncBatch",
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
