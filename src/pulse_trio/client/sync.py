"""The client for programs without an event loop.

Longer than 400 lines, because it has the same methods as `client.py`; what they do is elsewhere.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import psycopg

from ..codec import in_schema
from ..errors import DatabaseUnavailable, TookTooLong, UsageError
from ..handlers import queue_limits
from ..observe import checked
from ..postgres import QueryTimeout, adapt, connect_sync
from ..states import FINISHED
from ..store import (
    audit,
    bulk,
    cancelling,
    family,
    foreign_block_sync,
    history,
    new_jobs,
    operations,
    queues,
    refusals,
    run_foreign_sync,
    schedules,
    stacks,
)
from ..store.audit import acting, check_actor
from ..store.bounded import ending_by
from ..tracing import enqueuing, traces_of
from .cancelling import as_ended, check_waiting, pauses, requester, still_running
from .events import sending
from .refs import result_of, where_to_look
from .requests import checked_filter, decoded_record, request_and_type
from .schedules import schedule_of
from .streams import Stream, check_chunk, partly
from .sync_batches import MeansSync, new_batch_sync, open_batch_sync
from .waiting import NO_ANSWER, check_timeout
from .writing import AddingSync, write_stream_sync

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
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
    from .sync_batches import SyncBatch

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_LEAST = 2.0
"""Seconds that each look of a wait has at least, to connect and to read: with a timeout of 0 the wait is one look."""


class SyncClient:
    """The client for scripts, Django and Flask: blocking, with a DSN or the caller's connection.

    That may be psycopg's `Connection`, SQLAlchemy's `Connection` or `Session`, or `django.db.connection`; anything else raises
    `ConfigurationError`. With `handlers`, jobs that are enqueued by name are checked like those enqueued by handler.
    `instruments`, and those of `handlers`, may make a span of each enqueue (`pulse_trio.otel`).
    """

    def __init__(
        self,
        dsn_or_connection: str | psycopg.Connection[Any] | Any,
        *,
        schema: str = "pulse",
        handlers: Handlers | None = None,
        codec: Codec | None = None,
        actor: str | None = None,
        instruments: Iterable[Instrument] = (),
    ) -> None:
        known = isinstance(dsn_or_connection, (str, psycopg.Connection))
        self._source: str | psycopg.Connection[Any] = dsn_or_connection
        self._foreign = None if known else adapt(dsn_or_connection)
        self._schema = schema
        self._sees_arguments = True
        self._actor = check_actor(actor)
        self._handlers = handlers
        self._traces = traces_of(checked([*instruments, *(handlers.instruments if handlers is not None else ())]))
        self._codec = in_schema(codec if codec is not None or handlers is None else handlers.codec, schema)

    def using(self, connection: psycopg.Connection[Any] | Any) -> SyncClient:
        """The same client on the caller's connection and in its transaction; see `Client.using`."""
        used = SyncClient(
            connection, schema=self._schema, handlers=self._handlers, codec=self._codec, actor=self._actor
        )
        used._traces = self._traces
        return used

    @overload
    def enqueue(self, handler: Handler[P, R], /, *args: P.args, **kwargs: P.kwargs) -> new_jobs.Enqueued: ...
    @overload
    def enqueue(self, handler: str, args: Mapping[str, Any] | None = None, /, **options: Any) -> new_jobs.Enqueued: ...
    def enqueue(self, handler: Handler[Any, Any] | str, /, *args: Any, **kwargs: Any) -> new_jobs.Enqueued:
        """Enqueues one job; see `Client.enqueue`."""
        request, _ = request_and_type(handler, self._handlers, args, kwargs)
        with enqueuing(self._traces, request) as span:
            done = self.run(new_jobs.enqueue(span.carried(request), self._codec))
            span.done([done.id])
        return done

    def enqueue_many(
        self,
        requests: Iterable[JobRequest],
        *,
        chunk: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> list[new_jobs.Enqueued]:
        """Enqueues many jobs, in one transaction or, with `chunk`, in chunks; see `Client.enqueue_many`."""
        check_chunk(chunk, in_callers_transaction=not isinstance(self._source, str))
        with enqueuing(self._traces) as span:
            stream = Stream(requests, span.carried)
            if chunk is None:
                done = write_stream_sync(stream, self._adding, self._codec, progress=progress)
            else:
                done = self._enqueue_in_chunks(stream, chunk, progress)
            span.done([one.id for one in done])
        return done

    def _enqueue_in_chunks(
        self, stream: Stream, chunk: int, progress: Callable[[int], object] | None
    ) -> list[new_jobs.Enqueued]:
        done: list[new_jobs.Enqueued] = []
        try:
            while taken := stream.take(chunk, math.inf):
                done += write_stream_sync(Stream(taken), self._adding, self._codec)
                if progress is not None:
                    progress(len(done))
        except Exception as error:
            if not done:
                raise
            raise partly(done, chunk, error) from error
        return done

    @contextmanager
    def _adding(self) -> Generator[AddingSync]:
        schema = self._schema
        if self._foreign is not None:
            foreign = self._foreign

            def write(requests: Sequence[JobRequest]) -> list[new_jobs.Enqueued]:
                return run_foreign_sync(foreign, schema, new_jobs.enqueue_many(requests, self._codec))

            with foreign_block_sync(foreign, schema):
                yield AddingSync(partial(run_foreign_sync, foreign, schema), write, foreign.transaction)
        else:
            with self._connection() as connection, refusals.transaction_sync(connection, schema):
                yield AddingSync(
                    partial(operations.run_sync, connection, schema),
                    partial(bulk.enqueue_many_sync, connection, schema, codec=self._codec),
                    connection.transaction,
                )

    def job(self, job_id: int) -> operations.JobRecord:
        """One job as it is now; see `Client.job`. Raises `UnknownJob`."""
        return self._job(job_id, None)

    def _job(self, job_id: int, until: float | None) -> operations.JobRecord:
        if self._sees_arguments:
            try:
                return decoded_record(self._codec, self.run(operations.job(job_id), until=until))
            except UsageError as error:
                if self._in_transaction() or not operations.is_refusal(error):
                    raise
                refused = error
            try:
                found = self.run(operations.outcome(job_id), until=until)
            except UsageError as error:
                raise (refused if operations.is_refusal(error) else error) from None
            self._sees_arguments = False
        else:
            found = self.run(operations.outcome(job_id), until=until)
        return decoded_record(self._codec, found, only_result=True)

    def wait(self, job_id: int, timeout: float | None = None) -> operations.JobRecord:
        """Waits until a job is finished, by polling: after 10 ms, then less and less often, down to every half second.
        Returns the job.

        If the database becomes unavailable meanwhile, the client waits for it to return, except on the caller's connection,
        which it cannot reopen. Raises `DatabaseUnavailable` if the first query fails, `UnknownJob`, `TimeoutError` after
        `timeout` seconds, and `UsageError` on the caller's connection if that is not in autocommit mode or is in a
        transaction: the wait would be inside it.

        A look that has no answer by the end of the `timeout` is given up, and its connection closed; the last look, which
        begins at that end, has two seconds. On the caller's connection the server stops it: if no server can be reached, that
        connection's own settings end the wait.
        """

        def finished(until: float | None) -> operations.JobRecord | None:
            found = self._job(job_id, until)
            return found if found.state in FINISHED else None

        return self._wait_until(finished, timeout, f"Job {job_id}", where_to_look(job_id))

    def _wait_until(
        self, look: Callable[[float | None], T | None], timeout: float | None, name: str, hint: str = ""
    ) -> T:
        """Returns the first result of `look` that is not None; it is given the moment by which it needs an answer."""
        check_timeout(timeout)
        give_up = None if timeout is None else time.monotonic() + timeout
        pause = 0.01
        asked, lost = False, None
        while True:
            self._refuse_to_wait_in_a_transaction()
            until = None if give_up is None else max(give_up, time.monotonic() + _LEAST)
            unanswered = False
            try:
                found = look(until)
            except (DatabaseUnavailable, TookTooLong) as error:
                unanswered = until is not None and _is_late(error, until)
                if not unanswered:
                    if isinstance(error, TookTooLong) or not asked or not isinstance(self._source, str):
                        raise
                    lost = error
            else:
                if found is not None:
                    return found
                lost = None
            asked = True
            if give_up is not None:
                left = give_up - time.monotonic()
                if left <= 0 or unanswered:
                    hint = NO_ANSWER if unanswered else hint
                    if lost is not None:
                        hint = f" The database could not be reached: {lost}"
                    raise TimeoutError(f"{name} did not finish within {timeout:g} s.{hint}") from lost
                pause = min(pause, left)
            time.sleep(pause)
            pause = min(pause * 2, 0.5)

    def result(self, job_id: int, timeout: float | None = None) -> Any:
        """Waits for the handler's return value, as decoded JSON. Raises what `wait` does, and `JobFailed` or
        `JobCancelled`."""
        return result_of(self.wait(job_id, timeout))

    def _refuse_to_wait_in_a_transaction(self) -> None:
        if self._in_transaction():
            where = "with SyncClient(dsn)"
            if self._foreign is not None:
                raise UsageError(
                    f"A client on a connection of SQLAlchemy's or Django's cannot wait for a job: wait {where}."
                )
            raise UsageError(
                "You cannot wait for a job inside a transaction: commit first, and wait on a connection in autocommit mode "
                f"or {where}."
            )

    def retry(self, job_id: int, *, afresh: bool = False) -> State:
        """Runs a finished job again, or a waiting one now; see `Client.retry`."""
        return self.run(operations.retry(job_id, afresh=afresh))

    def cancel(
        self, job_id: int, *, reason: str | None = None, wait: bool = False, now: bool = False
    ) -> cancelling.CancelResult:
        """Cancels a job; see `Client.cancel`."""
        check_waiting(wait, self._in_transaction())
        result = self.run(cancelling.cancel(job_id, reason=reason, by=requester(), now=now))
        return self.ended([result])[0] if wait else result

    def cancel_many(
        self, job_ids: Iterable[int], *, reason: str | None = None, wait: bool = False, now: bool = False
    ) -> list[cancelling.CancelResult]:
        """Cancels many jobs; see `Client.cancel_many`. `now`: durable jobs that do not run end without their clean-up."""
        check_waiting(wait, self._in_transaction())
        results = self.run(cancelling.cancel_many(job_ids, reason=reason, by=requester(), now=now))
        return self.ended(results) if wait else results

    def attempts(self, job_id: int) -> list[operations.AttemptRecord]:
        """Every attempt of a job, in order."""
        return self.run(operations.attempts(job_id))

    def count_by_state(self, *, queue: str | None = None) -> dict[State, int]:
        """How many jobs are in each state, finished ones included."""
        return self.run(operations.count_by_state(queue=queue))

    def workers(self, *, gone: bool = False) -> list[operations.WorkerRecord]:
        """Worker sessions, newest first."""
        return self.run(operations.workers(gone=gone))

    def tree(self, job_id: int, *, limit: int = family.MOST) -> list[family.TreeJob]:
        """The tree that a job belongs to; see `Client.tree`."""
        return self.run(family.tree(job_id, limit=limit))

    def cancellations(self, job_id: int) -> list[cancelling.CancellationRecord]:
        """Every request to cancel a job, and its result; oldest first."""
        return self.run(cancelling.cancellations(job_id))

    def release(self, job_id: int, *, force: bool = False) -> State:
        """Takes a running job from its worker and releases it; the attempt is not counted. For a stuck handler.

        Without `force` only from a worker that shows no sign of life. The worker cancels the handler as soon as it is
        notified, and the database refuses the handler's report; until then the handler may run beside the next attempt.
        Returns the job's state: a job whose cancellation was requested is now `cancelled`. Needs an operator's rights, and
        leaves a line in the audit trail. Raises `UnknownJob` or `InvalidTransition`.
        """
        return self.run(history.release(job_id, force=force, by=requester()))

    def complete(self, job_id: int, result: object = None) -> State:
        """Takes a running job from its worker and completes it with this result. For a handler that got stuck after doing its
        work. Otherwise like `release`. Raises `UnknownJob`, `InvalidTransition`, or `InvalidArguments` for the result.
        """
        return self.run(history.complete(job_id, result, self._codec, by=requester()))

    def stack(self, job_id: int) -> stacks.JobStack:
        """What a running job is doing; see `Client.stack`."""
        if self._in_transaction():
            raise UsageError(stacks.NOT_IN_A_TRANSACTION)
        request = self.run(stacks.ask(job_id))
        for _ in range(stacks.LOOKS):
            time.sleep(stacks.POLL)
            if (answer := self.run(stacks.take(request))) is not None:
                return answer
        return self.run(stacks.give_up(request))

    def send_event(self, job_id: int, name: str, payload: Any = None, event_key: str | None = None) -> bool:
        """Sends an event to a job; see `Client.send_event`."""
        return self.run(sending(self._codec, job_id, name, payload, event_key))

    def ended(self, results: list[cancelling.CancelResult]) -> list[cancelling.CancelResult]:
        """Waits until the handlers of cancelled jobs have ended; the results with the states they ended in."""
        for pause in pauses():
            if not still_running(results):
                break
            time.sleep(pause)
            try:
                ends = self.run(cancelling.ended(results))
            except DatabaseUnavailable:
                if not isinstance(self._source, str):
                    raise
                continue  # the request is in the ledger: the wait goes on when the database answers again
            results = as_ended(results, ends)
        return results

    def _in_transaction(self) -> bool:
        # In the caller's transaction, or about to begin one with the next statement.
        if self._foreign is not None:
            return True
        return not isinstance(self._source, str) and not (
            self._source.autocommit and self._source.info.transaction_status == 0
        )

    def jobs(
        self,
        *,
        limit: int = 50,
        before: int | None = None,
        timeout: float | None = history.PATIENCE,
        **chosen: Unpack[JobFilter],
    ) -> list[operations.JobRecord]:
        """Jobs, newest first; see `Client.jobs`."""
        chosen = checked_filter(chosen, "limit", "before", "timeout")
        return self.run(history.jobs(chosen, limit=limit, before=before, timeout=timeout))

    def retry_many(
        self, *, limit: int | None = None, rate: float | None = None, **chosen: Unpack[JobFilter]
    ) -> history.Retried:
        """Retries the jobs that match; see `Client.retry_many`."""
        chosen = checked_filter(chosen, "limit", "rate")
        return self.run(history.retry_many(chosen, limit=limit, rate=rate))

    def delete(self, job_id: int) -> None:
        """Deletes a job that is not running. Raises `UnknownJob` or `InvalidTransition`."""
        self.run(history.delete(job_id))

    def delete_many(self, *, limit: int | None = None, **chosen: Unpack[JobFilter]) -> history.Deleted:
        """Deletes the jobs that match; see `Client.delete_many`."""
        chosen = checked_filter(chosen, "limit")
        return self.run(history.delete_many(chosen, limit=limit))

    def schedule(
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
        """Creates a schedule at run time, or changes it; see `Client.schedule`."""
        made = schedule_of(
            name, handler, args, cron, every=every, timezone=timezone, catch_up=catch_up, due_as=due_as, options=options
        )
        self.run_together(schedules.put(made))

    def schedules(self) -> list[ScheduleRecord]:
        """Every schedule, by name."""
        return self.run(schedules.schedules())

    def pause_schedule(self, name: str) -> None:
        """Stops a schedule until it is resumed. Raises `UnknownSchedule`."""
        self.run(schedules.pause(name))

    def resume_schedule(self, name: str) -> datetime | None:
        """Resumes a schedule; returns its next occurrence. Raises `UnknownSchedule`."""
        return self.run_together(schedules.resume(name))

    def remove_schedule(self, name: str) -> None:
        """Removes a schedule; see `Client.remove_schedule`. Raises `UnknownSchedule`."""
        self.run(schedules.remove(name))

    def run_schedule(self, name: str) -> new_jobs.Enqueued:
        """Enqueues a schedule's job now, paused or not. Raises `UnknownSchedule`."""
        return self.run_together(schedules.run_now(name))

    def fires(self, name: str, *, limit: int = 50) -> list[FireRecord]:
        """The latest occurrences of a schedule that were fired, with their jobs. Raises `UnknownSchedule`."""
        return self.run(schedules.fires(name, limit=limit))

    def run_together(self, operation: operations.Operation[T]) -> T:
        """Runs one of the store's operations whose statements belong in one transaction."""
        operation = self._named(operation)
        if self._foreign is not None:
            with foreign_block_sync(self._foreign, self._schema):
                return run_foreign_sync(self._foreign, self._schema, operation)
        with self._connection() as connection, refusals.transaction_sync(connection, self._schema):
            return operations.run_sync(connection, self._schema, operation)

    def audit(
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
        """Who did what, newest first; see `Client.audit`."""
        return self.run(audit.audit(act=act, job=job, role=role, actor=actor, target=target, since=since, limit=limit))

    # Batches

    def batch(
        self, *, on_complete: JobRequest | None = None, name: str | None = None
    ) -> AbstractContextManager[SyncBatch]:
        """`with client.batch() as batch:` groups the jobs that are enqueued with `batch.enqueue`; see `Client.batch`."""
        return new_batch_sync(self._means(), name, on_complete)

    def open_batch(self, batch_id: int) -> SyncBatch:
        """A batch that was created elsewhere; see `Client.open_batch`. Raises `UnknownBatch`."""
        return open_batch_sync(self._means(), batch_id)

    def _means(self) -> MeansSync:
        return MeansSync(self, self._handlers, self._codec, self._adding, self._wait_until, self._traces)

    # Queues

    def queues(self) -> list[QueueRecord]:
        """Every queue that has live jobs, or a pause or limit: its depth, its running jobs, and the age of its oldest due
        job."""
        return self.run(queues.queues())

    def queue_keys(self, queue: str | None = None, *, limit: int = 50) -> list[queues.KeyRecord]:
        """The keys (tenants) with the most jobs that are due, at most `limit`, of one queue or of all: how many are due and
        run, and the age of the oldest that is due. Raises `TookTooLong` after 10 s."""
        return self.run(queues.keys(queue, limit=limit))

    def pause(self, queue: str | None = None, *, kind: str | None = None) -> bool:
        """Stops all workers from claiming from that queue, or jobs of that kind, until `resume`; it takes effect within a
        second everywhere. Running jobs go on. True if it was not paused before. Raises `UsageError` or `InvalidName`."""
        return self.run(queues.pause(queue, kind=kind))

    def resume(self, queue: str | None = None, *, kind: str | None = None) -> bool:
        """Ends a pause. True if there was one. Raises `UsageError` or `InvalidName`."""
        return self.run(queues.resume(queue, kind=kind))

    def limit_queue(
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
        self.run(queues.limit(queue_limits(queue, limit, rate, key_limit, key_rate)))

    # Operations

    @property
    def schema(self) -> str:
        """The client's schema."""
        return self._schema

    @property
    def pooled(self) -> bool:
        """Whether its connection goes through a pooler and was opened by our `connect_sync`."""
        return isinstance(self._source, psycopg.Connection) and self._source.prepare_threshold is None

    def run(self, operation: operations.Operation[T], *, until: float | None = None) -> T:
        """Runs one of the store's operations, which has its answers by `until`, a moment of `time.monotonic()`, or fails."""
        operation = self._named(operation)
        if self._foreign is not None:
            return run_foreign_sync(self._foreign, self._schema, operation)
        if until is not None and not isinstance(self._source, str):
            operation = ending_by(operation, until)
        with self._connection(until) as connection:
            return operations.run_sync(connection, self._schema, operation)

    def _named(self, operation: operations.Operation[T]) -> operations.Operation[T]:
        return operation if self._actor is None else acting(operation, self._actor)

    @contextmanager
    def _connection(self, until: float | None = None) -> Generator[psycopg.Connection[Any]]:
        if not isinstance(self._source, str):
            yield self._source
            return
        with connect_sync(self._source, until=until) as connection:
            yield connection


def _is_late(error: DatabaseUnavailable | TookTooLong, until: float) -> bool:
    """Whether a look failed of its own end, and not of an outage or of a time limit of the caller's."""
    if isinstance(error, TookTooLong):
        return time.monotonic() >= until
    return isinstance(error.__cause__, QueryTimeout)
