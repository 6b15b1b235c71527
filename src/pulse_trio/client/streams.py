"""Streams of requests, taken in slices: the part of its source that `enqueue_many` holds in memory."""

from __future__ import annotations

import inspect
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from ..errors import ConfigurationError, InvalidArguments, PartlyEnqueued, UsageError
from ..jobs import JobRequest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator

SLICE = 5000
"""Requests that are written at once."""
SLICE_SIZE = 4 * 1024 * 1024
"""Characters of arguments that are written at once, or one request. Client and server hold a slice several times over, as
objects, as text and as rows: 2,500 requests of 900 kB in one COPY took 6.7 GB."""


def _same(request: JobRequest) -> JobRequest:
    return request


class Stream:
    """Requests from an iterable, each as `changed` returns it."""

    def __init__(self, requests: Iterable[JobRequest], changed: Callable[[JobRequest], JobRequest] = _same) -> None:
        if isinstance(requests, (JobRequest, str)) or not hasattr(requests, "__iter__"):
            raise InvalidArguments(f"enqueue_many takes an iterable of requests, got {requests!r:.200}.")
        self._requests: Iterator[object] = iter(requests)
        self._changed = changed
        self.ended = False
        """Whether the last request was taken, as far as is known."""

    def take(self, count: int, size: float = SLICE_SIZE) -> list[JobRequest]:
        """The next `count` requests, or fewer: as many as have `size` characters of arguments together, or the rest of the
        stream. Raises `InvalidArguments` for an item that is not a request."""
        taken: list[JobRequest] = []
        for request in self._requests:
            taken.append(self._changed(checked(request)))
            size -= len(taken[-1].args)
            if len(taken) == count or size <= 0:
                return taken
        self.ended = True
        return taken


class AsyncStream:
    """Requests from an iterable or an async iterable, each as `changed` returns it."""

    def __init__(
        self,
        requests: Iterable[JobRequest] | AsyncIterable[JobRequest],
        changed: Callable[[JobRequest], JobRequest] = _same,
    ) -> None:
        self._is_async = hasattr(requests, "__aiter__")
        self._ended = False
        self._changed = changed
        if self._is_async:
            self._requests: AsyncIterator[object] = aiter(cast("AsyncIterable[JobRequest]", requests))
        else:
            self._stream = Stream(cast("Iterable[JobRequest]", requests), changed)

    @property
    def ended(self) -> bool:
        """As `Stream.ended`."""
        return self._ended if self._is_async else self._stream.ended

    async def take(self, count: int, size: float = SLICE_SIZE) -> list[JobRequest]:
        """As `Stream.take`."""
        if not self._is_async:
            return self._stream.take(count, size)
        taken: list[JobRequest] = []
        while len(taken) < count and size > 0:
            try:
                taken.append(self._changed(checked(await anext(self._requests))))
            except StopAsyncIteration:
                self._ended = True
                break
            size -= len(taken[-1].args)
        return taken


@asynccontextmanager
async def open_stream(
    requests: Iterable[JobRequest] | AsyncIterable[JobRequest],
    changed: Callable[[JobRequest], JobRequest] = _same,
) -> AsyncGenerator[AsyncStream]:
    """The stream; closes an async generator that was not exhausted, because it may hold resources."""
    try:
        yield AsyncStream(requests, changed)
    finally:
        if inspect.isasyncgen(requests):
            await requests.aclose()  # noqa: ASYNC102 -- the caller's generator, and the caller's clean-up to shield


def checked(request: object) -> JobRequest:
    if not isinstance(request, JobRequest):
        raise InvalidArguments(f"enqueue_many takes requests, as handler.request(...) returns, got {request!r:.200}.")
    return request


def check_chunk(chunk: int | None, *, in_callers_transaction: bool) -> None:
    """Raises `ConfigurationError`, or `UsageError` where chunks are impossible."""
    if chunk is None:
        return
    if not isinstance(cast("object", chunk), int) or isinstance(chunk, bool) or chunk < 1:
        raise ConfigurationError(f"chunk must be a whole number from 1, got {chunk!r}.")
    if in_callers_transaction:
        raise UsageError(
            "chunk= commits each chunk, but on your own connection you commit: use the client without using(), or no chunk."
        )


def partly(enqueued: list[Any], chunk: int, cause: Exception) -> PartlyEnqueued:
    """The error to raise when a chunk failed after others were committed."""
    return PartlyEnqueued(
        f"{len(enqueued):,} jobs were enqueued, in whole chunks of {chunk:,}, before {type(cause).__name__}: {cause}",
        enqueued=enqueued,
    )
