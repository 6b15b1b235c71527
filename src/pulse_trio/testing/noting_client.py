"""The client that a handler gets from `run_job`, and from `crash_points` without a database: what it enqueues is noted."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import anyio.lowlevel

from ..client import Client, JobRef, SyncClient
from ..client.requests import request_and_type
from ..client.streams import SLICE, Stream, check_chunk, open_stream
from ..errors import UsageError
from ..postgres import AsyncioPool
from ..store.new_jobs import Enqueued

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable

    from ..handlers import Handler, Handlers
    from ..jobs import JobRequest
    from ..records import JobRecord

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
        taken: list[JobRequest] = []
        async with open_stream(requests) as stream:
            while not stream.ended:
                taken += await stream.take(SLICE)
        await anyio.lowlevel.checkpoint()
        ids = self._enqueued.add(taken)
        if progress is not None:
            progress(len(ids))
        return [JobRef(self, job_id) for job_id in ids]

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
        taken: list[JobRequest] = []
        stream = Stream(requests)
        while not stream.ended:
            taken += stream.take(SLICE)
        ids = self._enqueued.add(taken)
        if progress is not None:
            progress(len(ids))
        return [Enqueued(job_id, added=True) for job_id in ids]

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
