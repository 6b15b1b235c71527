"""Streams of requests, taken in slices: what `enqueue_many` holds in memory of whatever it is given."""

from __future__ import annotations

import inspect
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from ..errors import ConfigurationError, InvalidArguments, PartlyEnqueued, UsageError
from ..jobs import JobRequest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence

SLICE = 5000
"""Requests that are written at once."""


class Stream:
    """Requests from an iterable."""

    def __init__(self, requests: Iterable[JobRequest]) -> None:
        if isinstance(requests, (JobRequest, str)) or not hasattr(requests, "__iter__"):
            raise InvalidArguments(f"enqueue_many takes an iterable of requests, got {requests!r:.200}.")
        self._requests: Iterator[object] = iter(requests)

    def take(self, count: int) -> list[JobRequest]:
        """The next `count` requests, fewer at the end. Raises `InvalidArguments` for what is no request."""
        taken: list[JobRequest] = []
        for request in self._requests:
            taken.append(checked(request))
            if len(taken) == count:
                break
        return taken


class AsyncStream:
    """Requests from an iterable or an async iterable."""

    def __init__(self, requests: Iterable[JobRequest] | AsyncIterable[JobRequest]) -> None:
        self._is_async = hasattr(requests, "__aiter__")
        if self._is_async:
            self._requests: AsyncIterator[object] = aiter(cast("AsyncIterable[JobRequest]", requests))
        else:
            self._stream = Stream(cast("Iterable[JobRequest]", requests))

    async def take(self, count: int) -> list[JobRequest]:
        """The next `count` requests, fewer at the end. Raises `InvalidArguments` for what is no request."""
        if not self._is_async:
            return self._stream.take(count)
        taken: list[JobRequest] = []
        while len(taken) < count:
            try:
                taken.append(checked(await anext(self._requests)))
            except StopAsyncIteration:
                break
        return taken


@asynccontextmanager
async def open_stream(requests: Iterable[JobRequest] | AsyncIterable[JobRequest]) -> AsyncGenerator[AsyncStream]:
    """The stream, and the end of an async generator that was not exhausted: it may hold something open."""
    try:
        yield AsyncStream(requests)
    finally:
        if inspect.isasyncgen(requests):
            await requests.aclose()  # noqa: ASYNC102 -- the caller's generator, and the caller's clean-up to shield


def checked(request: object) -> JobRequest:
    if not isinstance(request, JobRequest):
        raise InvalidArguments(
            f"enqueue_many takes requests, as handler.request(...) makes them, and was given {request!r:.200}."
        )
    return request


def slices(requests: Sequence[JobRequest]) -> Iterator[Sequence[JobRequest]]:
    """A chunk in the slices it is written in."""
    for start in range(0, len(requests), SLICE):
        yield requests[start : start + SLICE]


def check_chunk(chunk: int | None, *, in_callers_transaction: bool) -> None:
    """Raises `ConfigurationError`, or `UsageError` where chunks cannot be."""
    if chunk is None:
        return
    if not isinstance(cast("object", chunk), int) or isinstance(chunk, bool) or chunk < 1:
        raise ConfigurationError(f"chunk must be a whole number from 1, got {chunk!r}.")
    if in_callers_transaction:
        raise UsageError(
            "chunk= commits as it goes, which a connection of yours leaves to you: use the client without using(), or no chunk."
        )


def partly(enqueued: list[Any], chunk: int, cause: Exception) -> PartlyEnqueued:
    """What to raise when a chunk failed after others were committed."""
    return PartlyEnqueued(
        f"{len(enqueued):,} jobs are enqueued, in whole chunks of {chunk:,}; then: {type(cause).__name__}: {cause}",
        enqueued=enqueued,
    )
