"""What all running jobs of a worker share, and what a running job needs of other parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ...durable_calls import DurableCalls

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    import trio

    from ...jobs import CancelReason, Claim, JobTransaction, Outcome
    from ...observe import Observer
    from .cleanup import CleanUp
    from .own_run import OwnRun
    from .running_job import RunningJob


class OutcomeSink(Protocol):
    """Writes outcomes."""

    def add(self, outcome: Outcome) -> None: ...


class TransactionSource(Protocol):
    """Opens `job.transaction()`."""

    def open(self, job: RunningJob, result: Any) -> AbstractAsyncContextManager[JobTransaction]: ...


class ProgressSink(Protocol):
    """Takes the progress that a handler reports."""

    def say(self, claim: Claim, fraction: float, message: str | None) -> None: ...

    def forget(self, claim: Claim) -> None: ...


class ParentState(Protocol):
    @property
    def orphaned(self) -> bool:
        """Whether the program around the worker was cancelled."""
        ...

    @property
    def cleaning(self) -> set[CleanUp]:
        """The jobs that are in a `job.cleanup()`."""
        ...

    @property
    def because(self) -> str | None:
        """Why the worker stops, if nobody has told it to."""
        ...


class DatabaseClock(Protocol):
    @property
    def epoch_offset(self) -> float:
        """The database's clock (seconds since 1970) minus ours, or a little more."""
        ...


@dataclass(frozen=True, slots=True)
class Common:
    """What all jobs of a worker share: one reference for each job instead of eight. `cleanup` and `timeout` in seconds
    (infinity: no timeout)."""

    cleanup: float
    timeout: float
    stops: ParentState
    transactions: TransactionSource
    progress: ProgressSink
    clock: DatabaseClock
    observer: Observer
    run: OwnRun


class Cancellation(Protocol):
    """That of a durable handler's attempt."""

    @property
    def ends_job(self) -> bool:
        """Whether a failure of the handler ends the job, whose deadline has passed: no attempt has more to undo."""
        ...


class Remembers(Protocol):
    """The history of a durable handler's attempt."""

    @property
    def is_waited_for(self) -> bool:
        """Whether a task of the handler waits until a line is written: cancelled or not, as long as the lease is proven."""
        ...


class Attempt(DurableCalls, Protocol):
    """A durable handler's attempt."""

    fatal: Exception | None
    """What it ends with, whatever the handler does with it."""

    @property
    def cancelling(self) -> Cancellation: ...

    @property
    def history(self) -> Remembers: ...

    async def transaction_begins(self) -> None:
        """`job.transaction()` is about to begin. Returns when the history of the attempts before is used up; raises what a
        durable call raises that is refused."""
        ...

    def transaction_ends(self) -> None:
        """It is about to complete the job. Raises if the job must not be completed."""
        ...

    def task_failed(self, error: BaseException) -> None:
        """A task of `job.nursery` ends with an exception."""
        ...

    def cleans_up(self, scope: trio.CancelScope) -> None:
        """A `job.cleanup()` of the handler begins, with this scope."""
        ...

    def clean_up_failed(self, error: BaseException) -> None:
        """A `job.cleanup()` of the handler ends with one."""
        ...

    def suspended(self, *, returned: bool = False) -> Outcome:
        """The outcome of an attempt that was suspended. `returned`: its handler returned a value all the same."""
        ...

    def holds_back(self, reason: CancelReason) -> bool:
        """Whether a cancellation must wait until the handler stands where the attempt before did."""
        ...
