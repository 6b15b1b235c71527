"""Batches: groups of jobs that finish together.

    async with client.batch(on_complete=report.request("today")) as batch:
        await batch.enqueue(resize, 1)
        await batch.enqueue_many(resize.request(i) for i in range(2, 1000))
    result = await batch.wait(timeout=600)

Leaving the block closes the batch: it takes no more jobs (whoever adds one gets `InvalidTransition`), and finishes with its
last job. An exception in the block leaves it open: the enqueued jobs stay and run, but the callback does not. Then `close` or
`cancel` the batch, as any program can; or create it with `client.using(connection)`, where your transaction can roll everything
back.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, overload

from ..errors import InvalidArguments, UnknownBatch, UsageError
from ..handlers import check_text
from ..jobs import JobRequest
from ..store import batches, new_jobs, operations
from ..tracing import carrying, enqueuing
from .refs import JobRef, Jobs
from .requests import request_and_type
from .streams import AsyncStream, open_stream
from .writing import write_stream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Mapping
    from contextlib import AbstractAsyncContextManager

    from ..codec import Codec
    from ..handlers import Handler, Handlers
    from ..store.batches import BatchFailure, BatchStatus
    from ..store.cancelling import CancelResult
    from ..tracing import Traces
    from .waiting import Waits
    from .writing import Adding

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M")

CANCELLED_AT_ONCE = 1000


class Ground(Jobs, Protocol):
    """What a batch needs: the client that created it."""

    async def cancel_many(self, job_ids: Iterable[int], *, reason: str | None = None) -> list[CancelResult]: ...


class Means(NamedTuple):
    """How a batch reaches the database: through its client."""

    client: Ground
    handlers: Handlers | None
    codec: Codec | None
    run: Callable[[operations.Operation[Any]], Awaitable[Any]]
    adding: Callable[[], AbstractAsyncContextManager[Adding]]
    run_elsewhere: Callable[[operations.Operation[Any]], Awaitable[Any]]
    """On the client's own connections, never in the caller's transaction."""
    waits: Waits | None
    traces: Traces | None


@dataclass(frozen=True, slots=True)
class BatchResult:
    """How a batch ended: its counts, and the jobs that did not complete (the first 1,000)."""

    status: BatchStatus
    failures: list[BatchFailure]

    @property
    def succeeded(self) -> bool:
        """Whether no job is dead or cancelled."""
        return not self.status.dead and not self.status.cancelled


class BatchOf(Generic[M]):
    """A batch, and the means by which its client reaches the database."""

    def __init__(self, means: M, batch_id: int, *, name: str | None, kept: JobRequest | None = None) -> None:
        self._means = means
        self.id = batch_id
        self.name = name
        self._on_complete = kept
        self._is_to_keep = False
        """Whether that is to be written. What is written stays: another program may have set another since."""

    @property
    def on_complete(self) -> JobRequest | None:
        """The request that is enqueued when every job has finished; may be set until the batch is closed (it can then carry
        `batch.id`). It is kept with the next jobs, so another program can close the batch if this one is lost."""
        return self._on_complete

    @on_complete.setter
    def on_complete(self, request: JobRequest | None) -> None:
        self._on_complete, self._is_to_keep = request, True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}{'' if self.name is None else f' {self.name!r}'}>"

    def _keep(self, traces: Traces | None) -> operations.Operation[None]:
        request = self._on_complete
        yield from batches.keep(self.id, kept_callback(request, traces))
        self._is_to_keep = self._on_complete is not request

    def _close(self, traces: Traces | None) -> operations.Operation[None]:
        """With the callback that the row has, where this object has set none since: another program may have."""
        if self._is_to_keep:
            yield from self._keep(traces)
        yield from batches.close(self.id)


class Batch(BatchOf[Means]):
    """Made by `client.batch()`, or by `client.open_batch(id)`."""

    @overload
    async def enqueue(self, handler: Handler[P, R], /, *args: P.args, **kwargs: P.kwargs) -> JobRef[R]: ...
    @overload
    async def enqueue(self, handler: str, args: Mapping[str, Any] | None = None, /, **options: Any) -> JobRef[Any]: ...
    async def enqueue(self, handler: Handler[Any, Any] | str, /, *args: Any, **kwargs: Any) -> JobRef[Any]:
        """Enqueues one job as a member; see `Client.enqueue`. If a live job has its unique key, that job becomes a member.

        Raises what `Client.enqueue` does, and `InvalidTransition` when the batch is closed.
        """
        request, result_type = request_and_type(handler, self._means.handlers, args, kwargs)
        await self._keep_callback()
        with enqueuing(self._means.traces, request) as span:
            stream = AsyncStream([request], span.carried)
            (done,) = await write_stream(stream, self._means.adding, self._means.codec, batch=self.id)
            span.done([done.id])
        return self._ref(done, result_type)

    async def enqueue_many(
        self,
        requests: Iterable[JobRequest] | AsyncIterable[JobRequest],
        *,
        progress: Callable[[int], object] | None = None,
    ) -> list[JobRef[Any]]:
        """Enqueues many jobs as members, in one transaction: all of them or none; see `Client.enqueue_many`."""
        await self._keep_callback()
        with enqueuing(self._means.traces) as span:
            async with open_stream(requests, span.carried) as stream:
                done = await write_stream(
                    stream, self._means.adding, self._means.codec, progress=progress, batch=self.id
                )
            span.done([one.id for one in done])
        return [self._ref(one, Any) for one in done]

    async def _keep_callback(self) -> None:
        if self._is_to_keep:
            await self._means.run(self._keep(self._means.traces))

    def _ref(self, done: new_jobs.Enqueued, result_type: Any) -> JobRef[Any]:
        return JobRef(self._means.client, done.id, added=done.added, replaced=done.replaced, result_type=result_type)

    async def close(self) -> None:
        """Closes the batch: it finishes with its last job, or when a worker next looks if it has none. Closing it again changes
        nothing. Raises `InvalidTransition` if another program has closed it without the callback that was set here."""
        await self._means.run(self._close(self._means.traces))

    async def status(self) -> BatchStatus:
        """The counts now. Raises `UnknownBatch`."""
        return await self._means.run(batches.status(self.id))

    async def wait(self, timeout: float | None = None) -> BatchResult:  # noqa: ASYNC109 -- as JobRef.wait
        """Waits until the batch has finished, which it does within about a second of its last job; a batch that is not closed
        never does. Raises `TimeoutError` after `timeout` seconds (0: looks once) and `UnknownBatch`, as for one that your own
        transaction has made and not committed."""
        if self._means.waits is None:
            raise UsageError(
                "A client on your own connection cannot wait for batches: use open_client(dsn), and its using()."
            )
        return await self._means.waits.until(-self.id, self._finished, timeout, f"Batch {self.id}")

    async def _finished(self) -> BatchResult | None:
        run = self._means.run_elsewhere
        if not await run(batches.finished(self.id)):
            return None
        return BatchResult(await run(batches.status(self.id)), await run(batches.failures(self.id)))

    async def cancel(self, *, reason: str | None = None) -> int:
        """Cancels the batch's unfinished jobs: waiting ones at once, running ones through their handlers. Returns how many of
        both. A batch that is open is closed then. It finishes when its last job has ended, and its callback is enqueued."""
        if (await self.status()).closed_at is None:
            # First: what is added in this moment would run.
            await self.close()
        left = await self._means.run(batches.live(self.id))
        count = 0
        for start in range(0, len(left), CANCELLED_AT_ONCE):
            results = await self._means.client.cancel_many(left[start : start + CANCELLED_AT_ONCE], reason=reason)
            count += sum(r.cancellation is not None for r in results)
        return count


@asynccontextmanager
async def new_batch(means: Means, name: str | None, on_complete: JobRequest | None) -> AsyncGenerator[Batch]:
    """A new batch, closed when the block is left without an exception."""
    batch_id = await means.run(opening(name, on_complete, means.traces))
    batch = Batch(means, batch_id, name=name, kept=on_complete)
    yield batch
    await batch.close()


def opening(name: str | None, on_complete: JobRequest | None, traces: Traces | None) -> operations.Operation[int]:
    """A new batch's id. Raises `InvalidName` and `InvalidArguments` before anything is written."""
    if name is not None:
        check_text("batch", name, 256)
    return batches.open_batch(name, kept_callback(on_complete, traces))


def kept_callback(on_complete: object, traces: Traces | None) -> JobRequest | None:
    """As it is written: with the trace of the span that sets it. Raises `InvalidArguments` for what is no request."""
    if on_complete is None:
        return None
    if not isinstance(on_complete, JobRequest):
        raise InvalidArguments(f"on_complete must be a request, as handler.request(...) returns; got {on_complete!r}.")
    return on_complete if traces is None else carrying(on_complete, traces.current())


async def open_batch(means: Means, batch_id: object) -> Batch:
    """An existing batch. Raises `UnknownBatch`, and `InvalidArguments` for what is no whole number."""
    status: BatchStatus = await means.run(batches.status(id_of(batch_id)))
    return Batch(means, status.id, name=status.name)


def id_of(batch_id: object) -> int:
    """A batch's id. Raises as `open_batch` does."""
    if not isinstance(batch_id, int) or isinstance(batch_id, bool):
        raise InvalidArguments(f"A batch's id is a whole number above 0, got {batch_id!r:.200}.")
    if not 0 < batch_id < 2**63:
        raise UnknownBatch(f"A batch's id is a whole number above 0, got {batch_id!r:.200}.")
    return batch_id
