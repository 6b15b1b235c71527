"""Batches for programs without an event loop; what a batch is: batches.py.

    with client.batch(name="album 7") as batch:
        batch.on_complete = report.request(batch.id)
        batch.enqueue_many(resize.request(i) for i in range(1000))
    result = batch.wait(timeout=600)

On a client of your own connection the batch is a part of its transaction.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeVar, overload

from ..store import batches
from ..tracing import enqueuing
from .batches import CANCELLED_AT_ONCE, BatchOf, BatchResult, id_of, opening
from .requests import request_and_type
from .streams import Stream
from .writing import write_stream_sync

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping
    from contextlib import AbstractContextManager

    from ..codec import Codec
    from ..handlers import Handler, Handlers
    from ..jobs import JobRequest
    from ..store import operations
    from ..store.batches import BatchStatus
    from ..store.cancelling import CancelResult
    from ..store.new_jobs import Enqueued
    from ..tracing import Traces
    from .writing import AddingSync

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class GroundSync(Protocol):
    """What a batch needs: the client that created it."""

    def run(self, operation: operations.Operation[T], *, until: float | None = None) -> T: ...

    def cancel_many(self, job_ids: Iterable[int], *, reason: str | None = None) -> list[CancelResult]: ...


class Look(Protocol):
    """Waits: calls `look` with the moment by which it needs an answer, until that is not None."""

    def __call__(self, look: Callable[[float | None], T | None], timeout: float | None, name: str) -> T: ...


class MeansSync(NamedTuple):
    """How a batch reaches the database: through its client."""

    client: GroundSync
    handlers: Handlers | None
    codec: Codec | None
    adding: Callable[[], AbstractContextManager[AddingSync]]
    wait: Look
    traces: Traces | None


class SyncBatch(BatchOf[MeansSync]):
    """Made by `SyncClient.batch()`, or by `SyncClient.open_batch(id)`."""

    @overload
    def enqueue(self, handler: Handler[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Enqueued: ...
    @overload
    def enqueue(self, handler: str, args: Mapping[str, Any] | None = None, /, **options: Any) -> Enqueued: ...
    def enqueue(self, handler: Handler[Any, Any] | str, /, *args: Any, **kwargs: Any) -> Enqueued:
        """Enqueues one job as a member; see `Batch.enqueue`."""
        means = self._means
        request, _ = request_and_type(handler, means.handlers, args, kwargs)
        self._keep_callback()
        with enqueuing(means.traces, request) as span:
            stream = Stream([request], span.carried)
            (done,) = write_stream_sync(stream, means.adding, means.codec, batch=self.id)
            span.done([done.id])
        return done

    def enqueue_many(
        self, requests: Iterable[JobRequest], *, progress: Callable[[int], object] | None = None
    ) -> list[Enqueued]:
        """Enqueues many jobs as members, in one transaction: all of them or none; see `Batch.enqueue_many`."""
        means = self._means
        self._keep_callback()
        with enqueuing(means.traces) as span:
            stream = Stream(requests, span.carried)
            done = write_stream_sync(stream, means.adding, means.codec, progress=progress, batch=self.id)
            span.done([one.id for one in done])
        return done

    def _keep_callback(self) -> None:
        if self._is_to_keep:
            self._means.client.run(self._keep(self._means.traces))

    def close(self) -> None:
        """Closes the batch; see `Batch.close`."""
        self._means.client.run(self._close(self._means.traces))

    def status(self) -> BatchStatus:
        """The counts now. Raises `UnknownBatch`."""
        return self._means.client.run(batches.status(self.id))

    def wait(self, timeout: float | None = None) -> BatchResult:
        """Waits until the batch has finished, by polling, as `SyncClient.wait` does; a batch that is not closed never does.
        Raises what that raises, and `UnknownBatch`."""
        return self._means.wait(self._finished, timeout, f"Batch {self.id}")

    def _finished(self, until: float | None) -> BatchResult | None:
        run = self._means.client.run
        if not run(batches.finished(self.id), until=until):
            return None
        return BatchResult(run(batches.status(self.id), until=until), run(batches.failures(self.id), until=until))

    def cancel(self, *, reason: str | None = None) -> int:
        """Cancels the batch's unfinished jobs; see `Batch.cancel`. Returns how many."""
        if self.status().closed_at is None:
            self.close()  # first: what is added in this moment would run
        left = self._means.client.run(batches.live(self.id))
        count = 0
        for start in range(0, len(left), CANCELLED_AT_ONCE):
            results = self._means.client.cancel_many(left[start : start + CANCELLED_AT_ONCE], reason=reason)
            count += sum(result.cancellation is not None for result in results)
        return count


@contextmanager
def new_batch_sync(means: MeansSync, name: str | None, on_complete: JobRequest | None) -> Generator[SyncBatch]:
    """A new batch, closed when the block is left without an exception."""
    batch_id = means.client.run(opening(name, on_complete, means.traces))
    batch = SyncBatch(means, batch_id, name=name, kept=on_complete)
    yield batch
    batch.close()


def open_batch_sync(means: MeansSync, batch_id: object) -> SyncBatch:
    """An existing batch. Raises `UnknownBatch`, and `InvalidArguments` for what is no whole number."""
    status = means.client.run(batches.status(id_of(batch_id)))
    return SyncBatch(means, status.id, name=status.name)
