"""The client for programs without an event loop."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from ..postgres import connect_sync
from ..store import bulk, operations
from .requests import chunks_of, request_by_name

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    import psycopg

    from ..handlers import Handler
    from ..jobs import JobRequest
    from ..states import State

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


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
            for chunk in chunks_of(requests):
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
