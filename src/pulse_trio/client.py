"""Enqueue, wait and inspect: what an application does with jobs.

    async with open_client(dsn) as client:
        ref = await client.enqueue(send_welcome, 42, template="vip")
        value = await ref.result()

The same under Trio and under asyncio. A client has a small pool of its own, or works inside a transaction of the caller's
(`using`): the job then appears if and only if that transaction commits. Everything is checked before anything is written.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast, overload

import anyio
import msgspec
import psycopg
import sniffio

from .errors import InvalidArguments, JobCancelled, JobFailed
from .handlers import Defaults, Handler, check_json, check_text, encode_options, given_options
from .jobs import JobRequest
from .postgres import AsyncioPool, TrioPool, connect_sync, open_asyncio_pool, open_pool
from .states import FINISHED, State
from .store import bulk, operations

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_CHUNK = 5000
"""Requests written at once by `enqueue_many`: what is held in memory of a stream of them."""
_POLL = 0.25


def request_by_name(kind: str, args: Mapping[str, Any] | None = None, **options: Any) -> JobRequest:
    """A job of a kind whose handler lives elsewhere: nothing is known of its parameters, so only the JSON is checked.

    `options` are those of `Handler.options` (queue, priority, max_attempts, timeout, delay, run_at, unique_key).
    Raises `InvalidName` or `InvalidArguments`.
    """
    check_text("kind", kind, 256)
    try:
        encoded = msgspec.json.encode(dict(args or {}))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidArguments(f"Arguments of {kind!r} cannot be written as JSON: {error}.") from None
    d = Defaults(**given_options(**options))
    return JobRequest(
        kind=kind,
        args=check_json(encoded, f"Arguments of {kind!r}"),
        queue=d.queue,
        priority=d.priority,
        max_attempts=d.max_attempts,
        delay=d.delay,
        run_at=d.run_at.isoformat() if d.run_at else None,
        unique_key=d.unique_key,
        options=encode_options(d),
    )


class JobRef(Generic[R]):
    """A job that was enqueued. `added` is False when a live job had the same unique key: this is that job."""

    __slots__ = ("_client", "_type", "added", "id")

    def __init__(self, client: Client, job_id: int, *, added: bool = True, result_type: Any = Any) -> None:
        self._client = client
        self._type = result_type
        self.id = job_id
        self.added = added

    def __repr__(self) -> str:
        return f"<JobRef {self.id}>"

    async def status(self) -> State:
        """The job's state now. Raises `UnknownJob`."""
        return (await self._client.job(self.id)).state

    async def wait(self) -> operations.JobRecord:
        """Waits until the job is finished, and returns it. Bound it with a deadline of yours (`trio.fail_after`)."""
        while True:
            found = await self._client.job(self.id)
            if found.state in FINISHED:
                return found
            await anyio.sleep(_POLL)

    async def result(self) -> R:
        """Waits for the handler's return value. Raises `JobFailed` or `JobCancelled` if there will be none."""
        found = await self.wait()
        if found.state is State.DEAD:
            raise JobFailed(f"Job {self.id} ({found.kind}) is dead after {found.attempt} attempt(s): {found.error}")
        if found.state is State.CANCELLED:
            raise JobCancelled(f"Job {self.id} ({found.kind}) was cancelled: {found.cancel_reason}")
        return cast("R", msgspec.convert(found.result, self._type, strict=False))


class Client:
    """Made by `open_client`, or by `using` for a connection of the caller's."""

    def __init__(self, source: TrioPool | AsyncioPool | psycopg.AsyncConnection[Any], *, schema: str = "pulse") -> None:
        self._source = source
        self._schema = schema

    def using(self, connection: psycopg.AsyncConnection[Any]) -> Client:
        """The same client on the caller's own psycopg connection and in its transaction: what is enqueued commits or rolls
        back with the caller's own writes. The connection stays the caller's to close."""
        return Client(connection, schema=self._schema)

    # Enqueuing

    @overload
    async def enqueue(self, handler: Handler[P, R], /, *args: P.args, **kwargs: P.kwargs) -> JobRef[R]: ...
    @overload
    async def enqueue(self, handler: str, args: Mapping[str, Any] | None = None, /, **options: Any) -> JobRef[Any]: ...
    async def enqueue(self, handler: Handler[Any, Any] | str, /, *args: Any, **kwargs: Any) -> JobRef[Any]:
        """Enqueues one job: a handler with its arguments, or a kind with its arguments by name and options as keywords.

        Raises `InvalidArguments`, `InvalidName` (nothing was written) or `DatabaseUnavailable`.
        """
        if isinstance(handler, str):
            request, result_type = request_by_name(handler, *args, **kwargs), Any
        else:
            request, result_type = handler.request(*args, **kwargs), handler.result_type
        done = await self._run(operations.enqueue(request))
        return JobRef(self, done.id, added=done.added, result_type=result_type)

    async def enqueue_many(self, requests: Iterable[JobRequest]) -> list[JobRef[Any]]:
        """Enqueues many jobs in one transaction: all of them or none. References come back in the order of the requests."""
        refs: list[JobRef[Any]] = []
        async with self._transaction() as connection:
            for chunk in _chunks(requests):
                done = await bulk.enqueue_many(connection, self._schema, chunk)
                refs += [JobRef(self, d.id, added=d.added) for d in done]
        return refs

    # Looking and acting

    async def job(self, job_id: int) -> operations.JobRecord:
        """One job as it is now. Raises `UnknownJob`."""
        return await self._run(operations.job(job_id))

    async def jobs(
        self,
        *,
        state: str | None = None,
        queue: str | None = None,
        kind: str | None = None,
        before: int | None = None,
        limit: int = 50,
    ) -> list[operations.JobRecord]:
        """Jobs, newest first; the next page is the one `before` the last id of this."""
        return await self._run(operations.jobs(state=state, queue=queue, kind=kind, before=before, limit=limit))

    async def attempts(self, job_id: int) -> list[operations.AttemptRecord]:
        """Every attempt of a job, in order."""
        return await self._run(operations.attempts(job_id))

    async def count_by_state(self, *, queue: str | None = None) -> dict[State, int]:
        """How many jobs are in each state, finished ones included."""
        return await self._run(operations.count_by_state(queue=queue))

    async def retry(self, job_id: int) -> State:
        """Runs a finished job again, or a waiting one now. Raises `UnknownJob` or `InvalidTransition`."""
        return await self._run(operations.retry(job_id))

    async def workers(self, *, gone: bool = False) -> list[operations.WorkerRecord]:
        """Worker sessions, newest first."""
        return await self._run(operations.workers(gone=gone))

    # Connections

    async def _run(self, operation: operations.Operation[T]) -> T:
        async with self._connection() as connection:
            return await operations.run(connection, self._schema, operation)

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[psycopg.AsyncConnection[Any]]:
        if isinstance(self._source, psycopg.AsyncConnection):
            yield self._source
        else:
            async with self._source.connection() as connection:
                yield connection

    @asynccontextmanager
    async def _transaction(self) -> AsyncGenerator[psycopg.AsyncConnection[Any]]:
        # In the caller's transaction this is a savepoint: a failed batch leaves the caller's own writes alone.
        async with self._connection() as connection, connection.transaction():
            yield connection


def _chunks(requests: Iterable[JobRequest]) -> Iterator[list[JobRequest]]:
    chunk: list[JobRequest] = []
    for request in requests:
        chunk.append(request)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


@asynccontextmanager
async def open_client(dsn: str, *, schema: str = "pulse", max_connections: int = 10) -> AsyncGenerator[Client]:
    """A client with a pool of its own, for as long as the block runs; under Trio and under asyncio.

    Raises `DatabaseUnavailable`, or `ConfigurationError` for a DSN that cannot be read.
    """
    if sniffio.current_async_library() == "asyncio":
        async with open_asyncio_pool(dsn, max_size=max_connections) as pool:
            yield Client(pool, schema=schema)
    else:
        # Autocommit: one statement is one round trip. What belongs together asks for a transaction itself.
        async with open_pool(dsn, min_size=1, max_size=max_connections, autocommit=True) as pool:
            yield Client(pool, schema=schema)


class SyncClient:
    """The client for scripts, Django and Flask: blocking, over a DSN or over a psycopg connection of the caller's."""

    def __init__(self, dsn_or_connection: str | psycopg.Connection[Any], *, schema: str = "pulse") -> None:
        self._source = dsn_or_connection
        self._schema = schema

    def using(self, connection: psycopg.Connection[Any]) -> SyncClient:
        """The same client in the caller's transaction; see `Client.using`."""
        return SyncClient(connection, schema=self._schema)

    @overload
    def enqueue(self, handler: Handler[P, R], /, *args: P.args, **kwargs: P.kwargs) -> operations.Enqueued: ...
    @overload
    def enqueue(
        self, handler: str, args: Mapping[str, Any] | None = None, /, **options: Any
    ) -> operations.Enqueued: ...
    def enqueue(self, handler: Handler[Any, Any] | str, /, *args: Any, **kwargs: Any) -> operations.Enqueued:
        """Enqueues one job; see `Client.enqueue`."""
        request = (
            request_by_name(handler, *args, **kwargs) if isinstance(handler, str) else handler.request(*args, **kwargs)
        )
        return self.run(operations.enqueue(request))

    def enqueue_many(self, requests: Iterable[JobRequest]) -> list[operations.Enqueued]:
        """Enqueues many jobs in one transaction: all of them or none."""
        done: list[operations.Enqueued] = []
        with self._connection() as connection, connection.transaction():
            for chunk in _chunks(requests):
                done += bulk.enqueue_many_sync(connection, self._schema, chunk)
        return done

    def job(self, job_id: int) -> operations.JobRecord:
        """One job as it is now. Raises `UnknownJob`."""
        return self.run(operations.job(job_id))

    def retry(self, job_id: int) -> State:
        """Runs a finished job again, or a waiting one now. Raises `UnknownJob` or `InvalidTransition`."""
        return self.run(operations.retry(job_id))

    def run(self, operation: operations.Operation[T]) -> T:
        """Runs one of the store's operations."""
        with self._connection() as connection:
            return operations.run_sync(connection, self._schema, operation)

    @contextmanager
    def _connection(self) -> Generator[psycopg.Connection[Any]]:
        if not isinstance(self._source, str):
            yield self._source
            return
        with connect_sync(self._source) as connection:
            yield connection
