"""The client on Trio and on asyncio.

Longer than 400 lines, because the public client has a method for each thing that a program may ask for; what they do is
elsewhere.
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import anyio
import psycopg
import sniffio

from ..codec import in_schema
from ..errors import DatabaseUnavailable, UnknownJob, UsageError
from ..handlers import queue_limits
from ..observe import checked
from ..postgres import (
    AsyncioPool,
    TrioPool,
    adapt_async,
    connect_on_asyncio,
    connect_or_unavailable,
    open_asyncio_pool,
    open_pool,
)
from ..states import FINISHED
from ..store import (
    audit,
    bulk,
    cancelling,
    family,
    foreign_block,
    history,
    new_jobs,
    operations,
    queues,
    refusals,
    run_foreign,
    schedules,
    stacks,
)
from ..store.audit import acting, check_actor
from ..tracing import enqueuing, traces_of
from .batches import Means, new_batch, open_batch
from .cancelling import as_ended, check_waiting, pauses, requester, still_running
from .events import sending
from .refs import JobRef, where_to_look
from .requests import checked_filter, decoded_record, request_and_type
from .schedules import schedule_of
from .streams import AsyncStream, check_chunk, open_stream, partly
from .waiting import open_waits
from .writing import Adding, write_stream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime, timedelta
    from typing import Unpack

    from ..codec import Codec
    from ..handlers import Handler, Handlers
    from ..jobs import JobRequest
    from ..observe import Instrument
    from ..states import State
    from ..store.audit import AuditRecord
    from ..store.filtering import JobFilter
    from ..store.queues import QueueRecord
    from ..store.schedules import FireRecord, ScheduleRecord
    from ..timing import CatchUp
    from .batches import Batch
    from .waiting import Waits

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Client:
    """Created by `open_client`, or by `using` for the caller's connection."""

    def __init__(
        self,
        source: TrioPool | AsyncioPool | psycopg.AsyncConnection[Any] | Any,
        *,
        schema: str = "pulse",
        waits: Waits | None = None,
        handlers: Handlers | None = None,
        codec: Codec | None = None,
        actor: str | None = None,
        instruments: Iterable[Instrument] = (),
    ) -> None:
        known = isinstance(source, (TrioPool, AsyncioPool, psycopg.AsyncConnection))
        self._source: TrioPool | AsyncioPool | psycopg.AsyncConnection[Any] = source
        self._foreign = None if known else adapt_async(source)
        self._handlers = handlers
        self._codec = in_schema(codec if codec is not None or handlers is None else handlers.codec, schema)
        self._schema = schema
        self._actor = check_actor(actor)
        self._waits = waits
        self._traces = traces_of(checked([*instruments, *(handlers.instruments if handlers is not None else ())]))
        self._home = self
        # Until the database refuses it to this login.
        self._sees_arguments = True

    def using(self, connection: psycopg.AsyncConnection[Any] | Any) -> Client:
        """The same client on the caller's connection and in its transaction: enqueued jobs commit or roll back with the
        caller's own writes. The caller still closes the connection.

        It may be a `TrioConnection`, psycopg's `AsyncConnection`, asyncpg's connection, or SQLAlchemy's `AsyncConnection` or
        `AsyncSession` (over psycopg or asyncpg). Raises `ConfigurationError` for anything else.
        """
        used = Client(connection, schema=self._schema, handlers=self._handlers, codec=self._codec, actor=self._actor)
        used._home, used._traces = self._home, self._traces
        return used

    # Enqueuing

    @overload
    async def enqueue(self, handler: Handler[P, R], /, *args: P.args, **kwargs: P.kwargs) -> JobRef[R]: ...
    @overload
    async def enqueue(self, handler: str, args: Mapping[str, Any] | None = None, /, **options: Any) -> JobRef[Any]: ...
    async def enqueue(self, handler: Handler[Any, Any] | str, /, *args: Any, **kwargs: Any) -> JobRef[Any]:
        """Enqueues one job: a handler with its arguments, or a kind with its arguments by name and options as keywords.

        Raises `InvalidArguments`, `InvalidName`, `ConfigurationError`, `UnknownKind` or `JobExists` (nothing was written),
        `UsageError` in a transaction that is aborted already, or `DatabaseUnavailable`.
        """
        request, result_type = request_and_type(handler, self._handlers, args, kwargs)
        with enqueuing(self._traces, request) as span:
            done = await self._run(new_jobs.enqueue(span.carried(request), self._codec))
            span.done([done.id])
        return JobRef(self, done.id, added=done.added, replaced=done.replaced, result_type=result_type)

    async def enqueue_many(
        self,
        requests: Iterable[JobRequest] | AsyncIterable[JobRequest],
        *,
        chunk: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> list[JobRef[Any]]:
        """Enqueues many jobs, in one transaction: all of them or none. References come back in the order of the requests.

        The requests may be any iterable or async iterable, and are never held all at once. With `chunk`, each chunk of that
        many is a separate transaction. `progress` is called with the number written so far, after each slice (each chunk).
        Raises what `enqueue` does, and what the iterable or `progress` raises; nothing was written then. If chunks were already
        committed, it raises `PartlyEnqueued` from that error instead.
        """
        check_chunk(chunk, in_callers_transaction=self._is_callers)
        with enqueuing(self._traces) as span:
            async with open_stream(requests, span.carried) as stream:
                if chunk is None:
                    refs = self._refs(await write_stream(stream, self._adding, self._codec, progress=progress))
                else:
                    refs = await self._enqueue_in_chunks(stream, chunk, progress)
                span.done([ref.id for ref in refs])
        return refs

    async def _enqueue_in_chunks(
        self, stream: AsyncStream, chunk: int, progress: Callable[[int], object] | None
    ) -> list[JobRef[Any]]:
        refs: list[JobRef[Any]] = []
        try:
            # The source is read outside any transaction: it may be slow.
            while requests := await stream.take(chunk, math.inf):
                refs += self._refs(await write_stream(AsyncStream(requests), self._adding, self._codec))
                if progress is not None:
                    progress(len(refs))
        except Exception as error:
            if not refs:
                raise
            raise partly(refs, chunk, error) from error
        return refs

    def _refs(self, done: Iterable[new_jobs.Enqueued]) -> list[JobRef[Any]]:
        return [JobRef(self, d.id, added=d.added, replaced=d.replaced) for d in done]

    # Batches

    def batch(
        self, *, on_complete: JobRequest | None = None, name: str | None = None
    ) -> AbstractAsyncContextManager[Batch]:
        """`async with client.batch() as batch:` groups the jobs that are enqueued with `batch.enqueue`; leaving the block
        closes it. When every job has finished, however it ended, `on_complete` (as `handler.request(...)` makes it) is
        enqueued, exactly once. `name` is for people."""
        return new_batch(self._means(), name, on_complete)

    async def open_batch(self, batch_id: int) -> Batch:
        """A batch that was created elsewhere: to inspect, wait for, add to, close or cancel. Raises `UnknownBatch`."""
        return await open_batch(self._means(), batch_id)

    def _means(self) -> Means:
        home = self._home
        return Means(self, self._handlers, self._codec, self._run, self._adding, home._run, home._waits, self._traces)

    @asynccontextmanager
    async def _adding(self) -> AsyncGenerator[Adding]:
        # In the caller's transaction this is a savepoint: a failed batch leaves the caller's own writes alone.
        schema = self._schema
        if self._foreign is not None:
            foreign = self._foreign
            async with foreign_block(foreign, schema):

                async def write(requests: Sequence[JobRequest]) -> list[new_jobs.Enqueued]:
                    return await run_foreign(foreign, schema, new_jobs.enqueue_many(requests, self._codec))

                yield Adding(partial(run_foreign, foreign, schema), write, foreign.transaction)
        else:
            async with self._connection() as connection, refusals.transaction(connection, schema):
                yield Adding(
                    partial(operations.run, connection, schema),
                    partial(bulk.enqueue_many, connection, schema, codec=self._codec),
                    connection.transaction,
                )

    # Inspecting and acting

    async def job(self, job_id: int) -> operations.JobRecord:
        """One job as it is now, decoded by the client's codec. Raises `UnknownJob`, or `CodecError`.

        Under a login that may only wait for jobs (a waiter's) `args` is empty."""
        if self._home._sees_arguments:
            try:
                return decoded_record(self._codec, await self._run(operations.job(job_id)))
            except UsageError as error:
                if self._is_callers or not operations.is_refusal(error):
                    raise
                refused = error
            try:
                found = await self._run(operations.outcome(job_id))
            except UsageError as error:
                raise (refused if operations.is_refusal(error) else error) from None
            self._home._sees_arguments = False
        else:
            found = await self._run(operations.outcome(job_id))
        return decoded_record(self._codec, found, only_result=True)

    async def wait(self, job_id: int, timeout: float | None = None) -> operations.JobRecord:  # noqa: ASYNC109 -- see JobRef
        """Waits until a job is finished, and returns it; see `JobRef.wait`. Never in the caller's transaction: a client made
        by `using` waits on the connections of the client it was made from."""
        home = self._home
        if home._waits is None:
            raise UsageError(
                "A client on your own connection cannot wait for jobs: use open_client(dsn), and its using()."
            )
        try:
            return await home._waits.until(
                job_id, partial(home._finished, job_id), timeout, f"Job {job_id}", where_to_look(job_id)
            )
        except UnknownJob as error:
            if home is self:
                raise
            raise UnknownJob(
                f"{error} You can wait for it once the transaction that enqueued it has committed."
            ) from None

    async def _finished(self, job_id: int) -> operations.JobRecord | None:
        found = await self.job(job_id)
        return found if found.state in FINISHED else None

    async def jobs(
        self,
        *,
        limit: int = 50,
        before: int | None = None,
        timeout: float | None = history.PATIENCE,  # noqa: ASYNC109 -- the server's to keep, not Trio's
        **chosen: Unpack[JobFilter],
    ) -> list[operations.JobRecord]:
        """Jobs, newest first, filtered as `JobFilter` says; the next page is the one `before` the last id of this.

        Raises `TookTooLong` when the query takes longer than `timeout` seconds, and `ConfigurationError` for a filter that does
        not exist.
        """
        chosen = checked_filter(chosen, "limit", "before", "timeout")
        return await self._run(history.jobs(chosen, limit=limit, before=before, timeout=timeout))

    async def attempts(self, job_id: int) -> list[operations.AttemptRecord]:
        """Every attempt of a job, in order."""
        return await self._run(operations.attempts(job_id))

    async def count_by_state(self, *, queue: str | None = None) -> dict[State, int]:
        """How many jobs are in each state, finished ones included."""
        return await self._run(operations.count_by_state(queue=queue))

    async def retry(self, job_id: int, *, afresh: bool = False) -> State:
        """Runs a finished job again, or a waiting one now. With `afresh` a finished durable job forgets its history and begins
        anew: every step is done again. A durable job that was cancelled, and whose clean-up did not end well, does the rest of
        that and ends as cancelled; one whose clean-up did begins anew. Raises `UnknownJob` or `InvalidTransition`."""
        return await self._run(operations.retry(job_id, afresh=afresh))

    async def cancel(
        self, job_id: int, *, reason: str | None = None, wait: bool = False, now: bool = False
    ) -> cancelling.CancelResult:
        """Cancels a job: a waiting job at once, a running job through its handler; `wait` waits until the handler has ended.

        A durable job that is suspended, or waits for a retry, runs once more, so that its clean-up runs, if its history has a
        line (children alone are none); with `now` it ends at once, without, and so do the jobs that it has started and
        that do not run.

        A finished job stays unchanged; the result has its state. `reason` is text of at most
        1,000 characters for the ledger, `job.cancel_message` and `cancel_reason`. Raises `UnknownJob`, `InvalidArguments`, or
        `UsageError` for a `wait` inside your own transaction.
        """
        check_waiting(wait, self._is_callers)
        result = await self._run(cancelling.cancel(job_id, reason=reason, by=requester(), now=now))
        return (await self._ended([result]))[0] if wait else result

    async def cancel_many(
        self, job_ids: Iterable[int], *, reason: str | None = None, wait: bool = False, now: bool = False
    ) -> list[cancelling.CancelResult]:
        """Cancels many jobs in one statement; the results are in the order of the ids, without jobs that do not exist. `now`:
        as for `cancel`."""
        check_waiting(wait, self._is_callers)
        results = await self._run(cancelling.cancel_many(job_ids, reason=reason, by=requester(), now=now))
        return await self._ended(results) if wait else results

    async def tree(self, job_id: int, *, limit: int = family.MOST) -> list[family.TreeJob]:
        """The tree that a job belongs to (see durable nurseries): its root, then the members by id, at most `limit`.

        A job without a tree is alone in the list. Raises `UnknownJob`.
        """
        return await self._run(family.tree(job_id, limit=limit))

    async def cancellations(self, job_id: int) -> list[cancelling.CancellationRecord]:
        """Every request to cancel a job, and its result; oldest first."""
        return await self._run(cancelling.cancellations(job_id))

    async def release(self, job_id: int, *, force: bool = False) -> State:
        """Takes a running job from its worker and releases it; the attempt is not counted. For a stuck handler.

        Without `force` only from a worker that shows no sign of life. The worker cancels the handler as soon as it is
        notified, and the database refuses the handler's report; until then the handler may run beside the next attempt.
        Returns the job's state: a job whose cancellation was requested is now `cancelled`. Needs an operator's rights, and
        leaves a line in the audit trail. Raises `UnknownJob` or `InvalidTransition`.
        """
        return await self._run(history.release(job_id, force=force, by=requester()))

    async def complete(self, job_id: int, result: object = None) -> State:
        """Takes a running job from its worker and completes it with this result. For a handler that got stuck after doing its
        work. Otherwise like `release`. Raises `UnknownJob`, `InvalidTransition`, or `InvalidArguments` for the result.
        """
        return await self._run(history.complete(job_id, result, self._codec, by=requester()))

    async def stack(self, job_id: int) -> stacks.JobStack:
        """What a running job is doing: its tasks with the frames they wait in, from the worker that runs it.

        Waits up to about 5 s for the answer. Raises `UnknownJob`, `InvalidTransition` if the job is not running,
        `WorkerSilent` if the worker does not answer, or `UsageError` inside your own transaction.
        """
        if self._is_callers:
            raise UsageError(stacks.NOT_IN_A_TRANSACTION)
        request = await self._run(stacks.ask(job_id))
        for _ in range(stacks.LOOKS):
            await anyio.sleep(stacks.POLL)
            if (answer := await self._run(stacks.take(request))) is not None:
                return answer
        return await self._run(stacks.give_up(request))

    async def send_event(self, job_id: int, name: str, payload: Any = None, event_key: str | None = None) -> bool:
        """Sends an event to a job, which receives it with `job.wait_for_event(name)`: the event is kept until then.

        Args:
            job_id: a job that is not finished; it need not have begun, nor wait for the event.
            name: 1 to 256 bytes.
            payload: anything that JSON can carry, at most 1 MiB.
            event_key: makes a repetition harmless: of two events with one key, job and name only the first is kept.

        Returns:
            Whether it is new: False for a repetition. That the event is kept says nothing of who reads it: a handler that is
            not durable never does, and only its workers know that.

        Raises `UnknownJob`, `InvalidTransition` for a job that is finished (or has 10,000 events that it has not received),
        `InvalidName` or `InvalidArguments`. In a transaction of yours the job gets it when you commit.
        """
        return await self._run(sending(self._codec, job_id, name, payload, event_key))

    async def _ended(self, results: list[cancelling.CancelResult]) -> list[cancelling.CancelResult]:
        for pause in pauses():
            if not still_running(results):
                break
            await anyio.sleep(pause)
            try:
                ends = await self._run(cancelling.ended(results))
            except DatabaseUnavailable:
                continue  # the request is in the ledger: the wait goes on when the database answers again
            results = as_ended(results, ends)
        return results

    async def retry_many(
        self, *, limit: int | None = None, rate: float | None = None, **chosen: Unpack[JobFilter]
    ) -> history.Retried:
        """Retries the jobs that match (see `JobFilter`; a `state` is required), oldest first, at most `limit`. With `rate`,
        that many come due each second, from now on. Jobs that cannot be retried are in `refused`, with the reason. Raises
        `UsageError` (`ConfigurationError` for a filter that does not exist); nothing was retried then."""
        chosen = checked_filter(chosen, "limit", "rate")
        return await self._run(history.retry_many(chosen, limit=limit, rate=rate))

    async def delete(self, job_id: int) -> None:
        """Deletes a job that is not running, for good, with its attempts. Raises `UnknownJob` or `InvalidTransition`."""
        await self._run(history.delete(job_id))

    async def delete_many(self, *, limit: int | None = None, **chosen: Unpack[JobFilter]) -> history.Deleted:
        """The same for the jobs that match (see `JobFilter`; a `state` is required), at most `limit`, in batches. Raises
        `UsageError` (`ConfigurationError` for a filter that does not exist); nothing was deleted then."""
        chosen = checked_filter(chosen, "limit")
        return await self._run(history.delete_many(chosen, limit=limit))

    async def workers(self, *, gone: bool = False) -> list[operations.WorkerRecord]:
        """Worker sessions, newest first."""
        return await self._run(operations.workers(gone=gone))

    async def audit(
        self,
        *,
        act: str | None = None,
        job: int | None = None,
        role: str | None = None,
        actor: str | None = None,
        target: str | None = None,
        since: datetime | timedelta | None = None,
        limit: int = 50,
    ) -> list[AuditRecord]:
        """Who did what, newest first. `since` is a moment with its offset, or how long ago; see `AuditRecord`."""
        return await self._run(
            audit.audit(act=act, job=job, role=role, actor=actor, target=target, since=since, limit=limit)
        )

    # Queues

    async def queues(self) -> list[QueueRecord]:
        """Every queue that has live jobs, or a pause or limit: its depth, its running jobs, and the age of its oldest due
        job."""
        return await self._run(queues.queues())

    async def queue_keys(self, queue: str | None = None, *, limit: int = 50) -> list[queues.KeyRecord]:
        """The keys (tenants) with the most jobs that are due, at most `limit`, of one queue or of all: how many are due and
        run, and the age of the oldest that is due. Raises `TookTooLong` after 10 s."""
        return await self._run(queues.keys(queue, limit=limit))

    async def pause(self, queue: str | None = None, *, kind: str | None = None) -> bool:
        """Stops all workers from claiming from that queue, or jobs of that kind, until `resume`; it takes effect within a
        second everywhere. Running jobs go on. True if it was not paused before. Raises `UsageError` or `InvalidName`."""
        return await self._run(queues.pause(queue, kind=kind))

    async def resume(self, queue: str | None = None, *, kind: str | None = None) -> bool:
        """Ends a pause. True if there was one. Raises `UsageError` or `InvalidName`."""
        return await self._run(queues.resume(queue, kind=kind))

    async def limit_queue(
        self,
        queue: str,
        *,
        limit: int | None = None,
        rate: str | None = None,
        key_limit: int | None = None,
        key_rate: str | None = None,
    ) -> None:
        """Sets all of a queue's limits: a limit that is not given is removed. A worker whose handlers declare that queue
        sets them again when it starts. Raises `InvalidName` or `ConfigurationError`."""
        await self._run(queues.limit(queue_limits(queue, limit, rate, key_limit, key_rate)))

    # Schedules

    async def schedule(
        self,
        name: str,
        handler: Handler[Any, Any] | str,
        args: Mapping[str, Any] | None = None,
        /,
        *,
        cron: str | None = None,
        every: float | timedelta | None = None,
        timezone: str | None = None,
        catch_up: CatchUp = "last",
        due_as: str | None = None,
        **options: Any,
    ) -> None:
        """Creates a schedule at run time, or changes the one of that name: a job of `handler` (or of a kind) with `args` by
        name at each occurrence of a cron expression in a time zone (UTC by default), or `every` that many seconds.

        `catch_up` and `due_as` are those of `handlers.cron`; `options` those of `Handler.options`. Raises
        `ConfigurationError`, `InvalidName`, or `UsageError` for a schedule that code declares; nothing was written then.
        """
        made = schedule_of(
            name, handler, args, cron, every=every, timezone=timezone, catch_up=catch_up, due_as=due_as, options=options
        )
        await self._together(schedules.put(made))

    async def schedules(self) -> list[ScheduleRecord]:
        """Every schedule, by name."""
        return await self._run(schedules.schedules())

    async def pause_schedule(self, name: str) -> None:
        """Stops a schedule until it is resumed; occurrences meanwhile are not caught up. Raises `UnknownSchedule`."""
        await self._run(schedules.pause(name))

    async def resume_schedule(self, name: str) -> datetime | None:
        """Resumes a paused or broken schedule; returns its next occurrence. Raises `UnknownSchedule`, or `ConfigurationError`
        if it cannot continue."""
        return await self._together(schedules.resume(name))

    async def remove_schedule(self, name: str) -> None:
        """Removes a schedule; a worker whose code declares it creates it again at its start. Raises `UnknownSchedule`."""
        await self._run(schedules.remove(name))

    async def run_schedule(self, name: str) -> JobRef[Any]:
        """Enqueues a schedule's job now, paused or not. Raises `UnknownSchedule`."""
        done = await self._together(schedules.run_now(name))
        return JobRef(self, done.id, added=done.added)

    async def fires(self, name: str, *, limit: int = 50) -> list[FireRecord]:
        """The latest occurrences of a schedule that were fired, with their jobs. Raises `UnknownSchedule`."""
        return await self._run(schedules.fires(name, limit=limit))

    async def _together(self, operation: operations.Operation[T]) -> T:
        operation = self._named(operation)
        if self._foreign is not None:
            async with foreign_block(self._foreign, self._schema):
                return await run_foreign(self._foreign, self._schema, operation)
        async with self._connection() as connection, refusals.transaction(connection, self._schema):
            return await operations.run(connection, self._schema, operation)

    # Connections

    @property
    def _is_callers(self) -> bool:
        """Whether this client works on the caller's connection."""
        return self._foreign is not None or isinstance(self._source, psycopg.AsyncConnection)

    def _named(self, operation: operations.Operation[T]) -> operations.Operation[T]:
        return operation if self._actor is None else acting(operation, self._actor)

    async def _run(self, operation: operations.Operation[T]) -> T:
        operation = self._named(operation)
        if self._foreign is not None:
            return await run_foreign(self._foreign, self._schema, operation)
        async with self._connection() as connection:
            return await operations.run(connection, self._schema, operation)

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[psycopg.AsyncConnection[Any]]:
        if isinstance(self._source, psycopg.AsyncConnection):
            yield self._source
        else:
            if self._waits is not None:
                self._waits.check_usable()
            async with self._source.connection() as connection:
                yield connection


@asynccontextmanager
async def open_client(
    dsn: str,
    *,
    schema: str = "pulse",
    max_connections: int = 10,
    handlers: Handlers | None = None,
    codec: Codec | None = None,
    actor: str | None = None,
    instruments: Iterable[Instrument] = (),
) -> AsyncGenerator[Client]:
    """A client with its own pool, for the duration of the block; under Trio and under asyncio. In another run or loop, as a
    thread may have, its calls raise `UsageError`.

    With `handlers`, jobs that are enqueued by name are checked like those enqueued by handler. `codec` encodes arguments and
    decodes results; by default it is the handlers'. `actor` is the name under which the audit trail records this client's
    actions, such as the person that a web application acts for. `instruments`, and those of `handlers`, may make a span of
    each enqueue (`pulse_trio.otel`). Raises `DatabaseUnavailable`, or `ConfigurationError` for a
    DSN that cannot be read.
    """
    if sniffio.current_async_library() == "asyncio":
        connect = partial(connect_on_asyncio, dsn, application_name="pulse-trio waits")
        async with (
            open_asyncio_pool(dsn, max_size=max_connections) as pool,
            open_waits(schema, pool=pool, connect=connect) as waits,
        ):
            yield Client(
                pool, schema=schema, waits=waits, handlers=handlers, codec=codec, actor=actor, instruments=instruments
            )
    else:
        # Autocommit: one statement is one round trip. Operations of several statements begin a transaction themselves.
        async with open_pool(dsn, min_size=1, max_size=max_connections, own=True, autocommit=True) as pool:
            listen = partial(
                connect_or_unavailable, dsn, own=True, autocommit=True, application_name="pulse-trio waits"
            )
            async with open_waits(schema, pool=pool, connect=listen) as waits:
                yield Client(
                    pool,
                    schema=schema,
                    waits=waits,
                    handlers=handlers,
                    codec=codec,
                    actor=actor,
                    instruments=instruments,
                )
