# ruff: noqa: ASYNC109 - `timeout` parameters are psycopg's interface
"""A psycopg connection for Trio.

psycopg is built in two layers: generators that speak PostgreSQL and say what they wait for, and a thin layer that
waits. `TrioConnection` is psycopg's own `AsyncConnection` with the waiting replaced, and with it everything that
depends on how cancellation arrives: the lock, connecting, closing and the clean-up paths. Rows, types, cursors,
prepared statements, COPY and the rest are psycopg's, and so is their documentation.

**Complete or cancel.** When `Cancelled` strikes while a query runs, the connection asks the server to cancel it and,
shielded and for at most `cancel_timeout` seconds, goes on driving *the same generator*. Three things can happen:

- the server says "cancelled": `Cancelled` goes on, the connection is usable;
- the answer was already on its way: it is *returned*, and the cancellation strikes at the next checkpoint. Stock
  `AsyncConnection` drops it: over 600 cancelled claims it lost 5,980 of 8,900 claimed rows. This way none is lost;
- nothing is heard in time: the connection is closed.

So after a cancellation a connection is usable or closed, never in between, and nothing of it is left running on the
server.

Known flaws: an operation that needs several answers (`stream`, `copy`, a pipeline) is interrupted between them like any
other code, and then what was under way is cancelled whole. The queued COPY writer of psycopg makes asyncio tasks and
does not work here; it is not the default.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import trio
from psycopg import AsyncConnection, AsyncCursor, pq
from psycopg import errors as e
from psycopg.adapt import AdaptersMap
from psycopg.rows import Row, tuple_row
from psycopg.waiting import Wait

from pulse_trio.postgres.connecting import connect_to_first
from pulse_trio.postgres.contract import AsyncPipeline, WaitTimeout, closes_a_cursor, ready_now, waits_for_news
from pulse_trio.postgres.lock import HandoverLock
from pulse_trio.postgres.shield import CLEANUP_SECONDS, Mode, bounded_shield, current_mode, running_in
from pulse_trio.postgres.transaction import TrioPipeline, TrioTransaction
from pulse_trio.postgres.waiting import drain, drive, drive_connecting

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from types import TracebackType
    from typing import Self

    from psycopg import Xid
    from psycopg.abc import AdaptContext, ConnParam, PQGen
    from psycopg.pq.abc import PGconn
    from psycopg.rows import AsyncRowFactory

T = TypeVar("T")

_TUPLES = cast("AsyncRowFactory[Any]", tuple_row)
_ACTIVE = pq.TransactionStatus.ACTIVE

logger = logging.getLogger("pulse_trio.postgres")


class QueryTimeout(e.OperationalError):
    """A query ran longer than the connection's `query_timeout`; it was cancelled, or the connection closed."""

    __module__ = "pulse_trio.postgres"


class TrioConnection(AsyncConnection[Row]):
    """A connection to PostgreSQL for Trio programs; the interface is that of `psycopg.AsyncConnection`.

    Every method that talks to the server is a checkpoint. A cancelled query is cancelled on the server (see the
    module's introduction); COMMIT, ROLLBACK and the ends of blocks are never torn apart, and bounded instead.

    Several tasks may use one connection: they take turns, first come first served.
    """

    __module__ = "pulse_trio.postgres"

    cancel_timeout: float = 5.0
    """Seconds the server has to answer a cancel request before the connection is closed."""
    cleanup_timeout: float = CLEANUP_SECONDS
    """Seconds a COMMIT, ROLLBACK or CLOSE under way may take after its scope was cancelled."""
    query_timeout: float | None = None
    """Seconds one operation may wait for the server before it is cancelled and `QueryTimeout` raised; None: no
    limit.
    """

    _pipeline: AsyncPipeline | None  # always a TrioPipeline here

    def __init__(self, pgconn: PGconn, row_factory: AsyncRowFactory[Row] = _TUPLES) -> None:
        super().__init__(pgconn, row_factory)
        self.lock = cast("Any", HandoverLock())

    # Connecting and closing

    @classmethod
    async def connect(
        cls,
        conninfo: str = "",
        *,
        autocommit: bool = False,
        prepare_threshold: int | None = 5,
        context: AdaptContext | None = None,
        row_factory: AsyncRowFactory[Row] | None = None,
        cursor_factory: type[AsyncCursor[Row]] | None = None,
        **kwargs: ConnParam,
    ) -> Self:
        """Connect to the first server that answers.

        Host names are resolved in a thread; several hosts and addresses are tried in turn, `connect_timeout` seconds
        each, and `target_session_attrs` is respected. Cancellation gives up the attempt and closes its socket.

        Args:
            conninfo: a connection string or URL; more parameters as keywords.
            autocommit: no implicit transactions.
            prepare_threshold: executions before a query is prepared; None turns prepared statements off (PgBouncer).
            context: where the type adapters are copied from.
            row_factory: what rows become.
            cursor_factory: the class of `cursor()` without a name.

        Raises:
            psycopg.OperationalError: no server could be reached.
        """
        params = await cls._get_connection_params(conninfo, **kwargs)
        connection = await connect_to_first(cls._connect_gen, params)
        connection._autocommit = bool(autocommit)
        connection.prepare_threshold = prepare_threshold
        if row_factory:
            connection.row_factory = row_factory
        if cursor_factory:
            connection.cursor_factory = cursor_factory
        if context:
            connection._adapters = AdaptersMap(context.adapters)
        return connection

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        try:
            with running_in(Mode.FINISH):
                await super().__aexit__(exc_type, exc_val, exc_tb)
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connection. Never waits; a task using the connection gets `psycopg.OperationalError`."""
        if not self.closed:
            self._closed = True
            self._drop_socket()

    def abort(self) -> None:
        """Close the connection because its state is unknown; `broken` is true afterwards. Never waits."""
        if not self.closed:
            self._drop_socket()

    def _drop_socket(self) -> None:
        # Whoever waits for this descriptor must wake before its number belongs to something else.
        trio.lowlevel.notify_closing(self.pgconn.socket)
        self.pgconn.finish()

    async def ping(self) -> None:
        """One round trip that starts no transaction.

        Raises:
            psycopg.OperationalError: the connection is lost.
        """
        async with self.lock:
            await self.wait(self._exec_command(b"SELECT"))

    def was_closed_by_server(self) -> bool:
        """Whether an idle connection is gone, as far as this side was told; costs no round trip.

        The socket of an idle connection turns readable for news (kept for `notifies()`) or for a farewell.
        """
        try:
            while not self.closed and ready_now(self.pgconn.socket, Wait.R):
                self.pgconn.consume_input()
        except e.OperationalError:
            self.abort()
        else:
            self._keep_news()
        return self.closed

    def _keep_news(self) -> None:
        # libpq has read them, so the socket will not turn readable for them again.
        while note := self.pgconn.notifies():
            if self.pgconn.notify_handler:
                self.pgconn.notify_handler(note)

    async def make_idle(self) -> None:
        """Whatever was done with it: leave the connection outside any transaction, or closed.

        Works in a cancelled scope.
        """
        status = self.pgconn.transaction_status
        if status in (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR):
            try:
                await self.rollback()
            except e.Error as ex:  # the caller is past caring for this connection, except that it must not be used
                logger.warning("error ignored in rollback: %s", ex)
                self.abort()
        elif status != pq.TransactionStatus.IDLE:
            self.abort()

    # Waiting

    async def wait(self, gen: PQGen[T], interval: float = 0.0, timeout: float | None = None) -> T:
        """Run one of psycopg's generators on this connection. The one place where the connection waits.

        Args:
            gen: the generator; the caller holds the lock.
            interval: not used, there is no polling.
            timeout: seconds, for `notifies()`; the generator is left as it is when they have passed.
        """
        if timeout is not None:
            return await self._wait_at_most(gen, timeout)
        if self.query_timeout is None or waits_for_news(gen):
            return await self._wait(gen)
        with trio.move_on_after(self.query_timeout):
            return await self._wait(gen)
        raise QueryTimeout(f"no answer within {self.query_timeout:g} s")

    async def _wait(self, gen: PQGen[T]) -> T:
        mode = current_mode()
        if mode is Mode.QUERY:
            await self._refuse_if_cancelled(gen)
        try:
            return await drive(gen, self.pgconn)
        except trio.Cancelled:
            if mode is Mode.FINISH or closes_a_cursor(gen):
                ended = await self._let_end(gen)
            else:
                ended = await self._complete_or_cancel(gen)
            if ended is None:
                raise
            return ended[0]
        except KeyboardInterrupt:
            # Not a level: if it were not raised now it would be lost, so the answer is.
            await self._complete_or_cancel(gen)
            raise

    async def _wait_at_most(self, gen: PQGen[T], timeout: float) -> T:
        with trio.move_on_after(timeout):
            return await drive(gen, self.pgconn)
        # A timeout of 0 means "what is there already".
        try:
            if ready := ready_now(self.pgconn.socket, Wait.R):
                gen.send(ready)
        except StopIteration as stop:
            return stop.value
        raise WaitTimeout("nothing arrived in time")

    async def _refuse_if_cancelled(self, gen: PQGen[Any]) -> None:
        """A checkpoint before anything is sent. If a `stream` or `copy` is under way, this is where it ends."""
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:
            if closes_a_cursor(gen):
                return
            if self._is_active() and self._pipeline is None:
                await self._cancel_then(drain(self.pgconn))
            raise

    def _is_active(self) -> bool:
        return self.pgconn.transaction_status == _ACTIVE

    async def _complete_or_cancel(self, gen: PQGen[T]) -> tuple[T] | None:
        """Cancel the query on the server and drive its generator on: its value if it had one, None if there is none."""
        if not self._is_active():
            return None
        try:
            ended = await self._cancel_then(gen)
        except e.Error as ex:
            logger.debug("a cancelled query ended with: %s", ex)
            ended = None
        if ended is None and self._is_active() and self._pipeline is None:
            await self._cancel_then(drain(self.pgconn))  # a query of several answers: the rest of them
        return ended

    async def _cancel_then(self, gen: PQGen[T]) -> tuple[T] | None:
        with bounded_shield(self.cancel_timeout):
            await self._ask_to_cancel()
            return (await drive(gen, self.pgconn),)
        logger.warning("the server did not answer a cancel request in %g s: closing %r", self.cancel_timeout, self)
        self.abort()
        return None

    async def _ask_to_cancel(self) -> None:
        try:
            await self.cancel_safe(timeout=self.cancel_timeout)
        except e.Error as ex:  # the query may still end by itself, and the caller's deadline stands
            logger.warning("cancel request failed: %s", ex)

    async def _let_end(self, gen: PQGen[T]) -> tuple[T] | None:
        with bounded_shield(self.cleanup_timeout):
            return (await drive(gen, self.pgconn),)
        logger.warning("clean-up did not end in time: closing %r", self)
        self.abort()
        return None

    async def cancel_safe(self, *, timeout: float = 30.0) -> None:
        """Ask the server to cancel what this connection is doing; may be called from any task.

        Returns when the server has passed the request on, so that it cannot hit a later query. Works inside a
        cancelled scope when called by clean-up.

        Args:
            timeout: seconds; 0 for no limit.

        Raises:
            psycopg.errors.CancellationTimeout: the server did not take the request in time.
        """
        if not self._should_cancel():
            return
        deadline = trio.current_time() + (timeout or float("inf"))
        with trio.CancelScope(deadline=deadline, shield=current_mode() is not Mode.QUERY):
            await drive_connecting(self._cancel_gen())
            return
        raise e.CancellationTimeout("cancellation timeout expired")

    async def _try_cancel(self, *, timeout: float = 5.0) -> None:
        with running_in(Mode.SETTLE):
            await super()._try_cancel(timeout=timeout)

    # Transactions

    @asynccontextmanager
    async def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> AsyncGenerator[TrioTransaction]:
        """A transaction, or a savepoint inside one, committed at the end of the block and rolled back on any exception.

        Neither COMMIT nor ROLLBACK is torn apart by cancellation; see `TrioTransaction`.
        """
        transaction = TrioTransaction(self, savepoint_name, force_rollback)
        if self._pipeline is None:
            async with transaction:
                yield transaction
        else:
            async with self.pipeline(), transaction, self.pipeline():
                yield transaction

    async def commit(self) -> None:
        """Commit. Cancellation is noticed before anything is sent, and bounded after."""
        await self._checkpoint_unless_cleaning()
        with running_in(Mode.FINISH):
            await super().commit()

    async def rollback(self) -> None:
        """Roll back. Works in a cancelled scope, since that is where it is needed."""
        with running_in(Mode.FINISH):
            await super().rollback()

    async def tpc_prepare(self) -> None:
        """The first phase of a two-phase commit; not torn apart by cancellation."""
        await self._checkpoint_unless_cleaning()
        with running_in(Mode.FINISH):
            await super().tpc_prepare()

    async def tpc_commit(self, xid: Xid | str | None = None) -> None:
        """The second phase of a two-phase commit; not torn apart by cancellation."""
        await self._checkpoint_unless_cleaning()
        with running_in(Mode.FINISH):
            await super().tpc_commit(xid)

    async def tpc_rollback(self, xid: Xid | str | None = None) -> None:
        """Roll a two-phase transaction back. Works in a cancelled scope."""
        with running_in(Mode.FINISH):
            await super().tpc_rollback(xid)

    async def _checkpoint_unless_cleaning(self) -> None:
        if current_mode() is Mode.QUERY:
            await trio.lowlevel.checkpoint_if_cancelled()

    # Pipelines

    @asynccontextmanager
    async def pipeline(self) -> AsyncGenerator[TrioPipeline]:
        """Send commands without waiting for each answer; they are collected at the end of the block at the latest."""
        async with self.lock:
            self._check_connection_ok()
            pipeline = self._pipeline = cast("TrioPipeline | None", self._pipeline) or TrioPipeline(self)
        async with self._entered(pipeline):
            yield pipeline

    @asynccontextmanager
    async def _pipeline_nolock(self) -> AsyncGenerator[TrioPipeline]:
        pipeline = self._pipeline = TrioPipeline(self, _no_lock=True)
        async with self._entered(pipeline):
            yield pipeline

    @asynccontextmanager
    async def _entered(self, pipeline: TrioPipeline) -> AsyncGenerator[None]:
        try:
            async with pipeline:
                yield
        finally:
            if pipeline.level == 0:
                self._pipeline = None
