"""The client that a handler gets from `run_job`, and from `crash_points` without a database: what it enqueues is noted."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

import anyio.lowlevel

from ..client import Client, JobRef, SyncClient
from ..client.requests import request_and_type
from ..client.streams import SLICE, SLICE_SIZE, Stream, check_chunk, open_stream, partly
from ..errors import UsageError
from ..postgres import AsyncioPool
from ..store.new_jobs import Enqueued

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable

    from ..handlers import Handler, Handlers
    from ..jobs import JobRequest
    from ..records import JobRecord

T = TypeVar("T")

_NO_DATABASE = (
    "There is no database here: run_job, and crash_points without dsn=, give a handler a client that notes what is enqueued "
    "(JobRun.enqueued), and can do nothing else. Give run_job your own with resources={Client: ...}, or test the handler with "
    "pulse_worker or crash_points(dsn=...)."
)
_FIRST = 1001
"""The id of the first job that is enqueued: none that a test would expect of another."""


class Enqueuings:
    """What was enqueued, in order, by all clients of one run. Unique keys are not looked at."""

    def __init__(self) -> None:
        self.requests: list[JobRequest] = []

    def add(self, requests: list[JobRequest]) -> list[int]:
        """Notes them; returns their ids."""
        first = _FIRST + len(self.requests)
        self.requests += requests
        return list(range(first, first + len(requests)))


class _Notes(Generic[T]):
    """Notes the jobs of one `enqueue_many`: all of them at the end of the block and none after an error, or each chunk by
    itself, as `Client` writes them."""

    def __init__(
        self,
        enqueued: Enqueuings,
        chunk: int | None,
        progress: Callable[[int], object] | None,
        done: Callable[[int], T],
    ) -> None:
        self._enqueued, self._chunk, self._progress, self._done = enqueued, chunk, progress, done
        self.size = chunk or SLICE
        self.most = SLICE_SIZE if chunk is None else math.inf
        """Bytes of arguments to take at once."""
        self._taken: list[JobRequest] = []
        self.done: list[T] = []

    def take(self, requests: list[JobRequest]) -> None:
        self._taken += requests
        if self._chunk is not None and requests:
            self._note()
            self._tell(len(self.done))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._chunk is None and error is None:
            # Before they are noted, as `Client` does before its COMMIT: if it raises, nothing is.
            self._tell(len(self._taken))
            self._note()
        elif self._chunk is not None and self.done and isinstance(error, Exception):
            raise partly(self.done, self._chunk, error) from error

    def _tell(self, count: int) -> None:
        if self._progress is not None:
            self._progress(count)

    def _note(self) -> None:
        self.done += map(self._done, self._enqueued.add(self._taken))
        self._taken = []


class NotingClient(Client):
    """A `Client` that notes what is enqueued with it, under Trio and asyncio. Anything else raises `UsageError`."""

    def __init__(self, handlers: Handlers, enqueued: Enqueuings) -> None:
        super().__init__(_NoPool(), handlers=handlers)
        self._enqueued = enqueued

    def using(self, connection: Any) -> Client:
        """Itself: a transaction has no database here either."""
        return self

    async def enqueue(self, handler: Handler[Any, Any] | str, /, *args: Any, **kwargs: Any) -> JobRef[Any]:
        request, result_type = request_and_type(handler, self._handlers, args, kwargs)
        await anyio.lowlevel.checkpoint()
        (job_id,) = self._enqueued.add([request])
        return JobRef(self, job_id, result_type=result_type)

    async def enqueue_many(
        self,
        requests: Iterable[JobRequest] | AsyncIterable[JobRequest],
        *,
        chunk: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> list[JobRef[Any]]:
        check_chunk(chunk, in_callers_transaction=False)
        await anyio.lowlevel.checkpoint()
        notes = _Notes(self._enqueued, chunk, progress, self._ref)
        async with open_stream(requests) as stream:
            with notes:
                while not stream.ended:
                    notes.take(await stream.take(notes.size, notes.most))
        return notes.done

    def _ref(self, job_id: int) -> JobRef[Any]:
        return JobRef(self, job_id)

    async def wait(self, job_id: int, timeout: float | None = None) -> JobRecord:  # noqa: ASYNC109 -- as Client's
        _refuse()


class NotingSyncClient(SyncClient):
    """The same, blocking."""

    def __init__(self, handlers: Handlers, enqueued: Enqueuings) -> None:
        super().__init__("", handlers=handlers)
        self._enqueued = enqueued

    def using(self, connection: Any) -> SyncClient:
        """Itself: a transaction has no database here either."""
        return self

    def enqueue(self, handler: Handler[Any, Any] | str, /, *args: Any, **kwargs: Any) -> Enqueued:
        request, _ = request_and_type(handler, self._handlers, args, kwargs)
        (job_id,) = self._enqueued.add([request])
        return Enqueued(job_id, added=True)

    def enqueue_many(
        self,
        requests: Iterable[JobRequest],
        *,
        chunk: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> list[Enqueued]:
        check_chunk(chunk, in_callers_transaction=False)
        notes = _Notes(self._enqueued, chunk, progress, partial(Enqueued, added=True))
        stream = Stream(requests)
        with notes:
            while not stream.ended:
                notes.take(stream.take(notes.size, notes.most))
        return notes.done

    @contextmanager
    def _connection(self, until: float | None = None) -> Generator[Any]:
        _refuse()
        yield


class _NoPool(AsyncioPool):
    def __init__(self) -> None:
        super().__init__("", 1)

    @asynccontextmanager
    async def connection(self) -> AsyncGenerator[Any]:
        _refuse()
        yield


def _refuse() -> NoReturn:
    raise UsageError(_NO_DATABASE)
