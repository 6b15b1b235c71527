"""A psycopg connection for Trio.

psycopg has two layers: generators that speak PostgreSQL's protocol and say what they wait for, and a thin layer that waits.
`TrioConnection` is psycopg's own `AsyncConnection` with the waiting replaced, and everything that depends on how cancellation
arrives: the lock, connecting, closing and the clean-up paths. Rows, types, cursors, prepared statements, COPY and the rest
are psycopg's, and so is their documentation.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import trio
from psycopg import AsyncCursor, pq
from psycopg import errors as e
from psycopg.adapt import AdaptersMap
from psycopg.rows import Row
from psycopg.waiting import Wait

from pulse_trio.postgres.cancelling import CancellableConnection
from pulse_trio.postgres.connecting import connect_to_first, warn_of_gssapi
from pulse_trio.postgres.contract import AsyncPipeline, adopt_adapters, answers, failure_of, ready_now, several
from pulse_trio.postgres.shield import Mode, current_mode, running_in
from pulse_trio.postgres.transaction import TrioPipeline, TrioTransaction

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from types import TracebackType
    from typing import Self

    from psycopg import Xid
    from psycopg.abc import AdaptContext, ConnParam, Params, PQGen, QueryNoTemplate
    from psycopg.pq.abc import PGresult
    from psycopg.rows import AsyncRowFactory

logger = logging.getLogger("pulse_trio.postgres")


def _is_begin(command: object) -> TypeGuard[bytes]:
    return isinstance(command, bytes) and command.startswith(b"BEGIN")


class Made:
    """How a connection was created: the attributes of the Python object that a user of it can change, with their original
    values."""

    def __init__(self, connection: TrioConnection[Any]) -> None:
        made = {name: getattr(connection, name) for name in STATE}
        # Setting an attribute by its name costs 0.5 µs, and there are fifteen for each lending.
        self._set = {
            name: value for name, value in made.items() if isinstance(getattr(type(connection), name, None), property)
        }
        self._plain = {name: value for name, value in made.items() if name not in self._set}
        # A copy: a user may register loaders and dumpers.
        self._adapters = AdaptersMap(connection.adapters)

    def apply(self, connection: TrioConnection[Any]) -> None:
        """Create a new object with these attributes."""
        for name, value in self._set.items():
            setattr(connection, name, value)
        connection.__dict__.update(self._plain)
        adopt_adapters(connection, self._adapters)


STATE = (
    "row_factory",
    "cursor_factory",
    "server_cursor_factory",
    "prepare_threshold",
    "prepared_max",
    "cancel_timeout",
    "cleanup_timeout",
    "query_timeout",
    "pooled",
    "prologue",
    "epilogue",
    "_autocommit",
    "_isolation_level",
    "_read_only",
    "_deferrable",
)


class TrioConnection(CancellableConnection[Row]):
    """A connection to PostgreSQL for Trio programs; the interface is that of `psycopg.AsyncConnection`.

    Every method that talks to the server is a checkpoint. A cancelled query is cancelled on the server (see `cancelling`);
    COMMIT, ROLLBACK and the ends of blocks are never interrupted halfway, but bounded in time.

    Several tasks may use one connection: they take turns, first come, first served.
    """

    __module__ = "pulse_trio.postgres"

    _pipeline: AsyncPipeline | None  # always a TrioPipeline here

    pooled: bool = False
    """Whether the connection goes through a pooler, if its creator has checked (see `pooler`)."""
    prologue: bytes | None = None
    """Commands that are sent with each BEGIN, in the same message; with them, a statement outside a transaction becomes a
    transaction of its own.
    """
    epilogue: bytes | None = None
    """Commands that reset the session, sent with each COMMIT, in the same message: one round trip less for a connection that is
    lent. After that this object refuses everything: what its user does late would undo them.
    """
    is_over: bool = False
    """Whether the COMMIT with the epilogue is done."""
    is_reset: bool = False
    """Whether the epilogue is done, too."""
    begun: bytes = b""
    """The commands after it that have begun a transaction for the session's next user; empty if none has."""

    @property
    def due_prologue(self) -> bytes | None:
        """The prologue that a statement needs now: outside of a transaction, which had it with its BEGIN."""
        if self.prologue is None or self.pgconn.transaction_status != pq.TransactionStatus.IDLE:
            return None
        return self.prologue

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
            row_factory: the type of rows.
            cursor_factory: the class of `cursor()` without a name.

        Raises:
            psycopg.OperationalError: no server could be reached.
        """
        params = await cls._get_connection_params(conninfo, **kwargs)
        connection = await connect_to_first(cls._connect_gen, params)
        warn_of_gssapi(connection.pgconn, params)
        connection._autocommit = bool(autocommit)
        connection.prepare_threshold = prepare_threshold
        if row_factory:
            connection.row_factory = row_factory
        if cursor_factory:
            connection.cursor_factory = cursor_factory
        if context:
            adopt_adapters(connection, context.adapters)
        return connection

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        try:
            with running_in(Mode.FINISH):
                await super().__aexit__(exc_type, exc_val, exc_tb)  # noqa: ASYNC102 - bounded by its mode
        finally:
            await self.close()  # noqa: ASYNC102 - never waits

    async def ping(self) -> None:
        """One round trip that starts no transaction.

        Raises:
            psycopg.OperationalError: the connection is lost.
        """
        await self.command(b"SELECT")

    async def command(self, commands: bytes) -> None:
        """One round trip for commands whose answers do not matter; begins no transaction, and takes no separate snapshot.

        Raises:
            psycopg.Error: one of them failed, and those after it were not done.
        """
        async with self.lock:
            self._check_connection_ok()
            await self.wait(several(self.pgconn, commands))

    async def value_of(self, commands: bytes) -> bytes | None:
        """One round trip for commands of which the last gives one row with one column: its text, or None for NULL. With the
        prologue first if there is one.

        Raises:
            psycopg.Error: one of them failed, and those after it were not done.
        """
        async with self.lock:
            self._check_connection_ok()
            # One message is one transaction.
            before = b"" if self.due_prologue is None else self.due_prologue + b"; "
            answer = await self.wait(several(self.pgconn, before + commands))
        return answer.get_value(0, 0)

    def was_closed_by_server(self) -> bool:
        """Whether an idle connection is closed, as far as this side knows; costs no round trip.

        The socket of an idle connection becomes readable for notifications (kept for `notifies()`) or when the server closes
        it.
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
        """Leave the connection outside any transaction, or closed, whatever its state.

        Works in a cancelled scope.
        """
        self._num_transactions = 0
        status = self.pgconn.transaction_status
        if status in (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR):
            try:
                await self.rollback()
            except e.Error as ex:  # the caller needs only that this connection is not used again
                logger.warning("error ignored in rollback: %s", ex)
                self.abort()
        elif status != pq.TransactionStatus.IDLE:
            self.abort()

    # Lending

    def renewed(self, made: Made) -> Self:
        """Move the session to a new object as described by `made`. This object and its cursors are closed: code that still
        holds them cannot interfere with the session's next user.
        """
        fresh = type(self)(self.pgconn)
        made.apply(fresh)
        self.revoke()
        return fresh

    def forget_news(self) -> None:
        """Drop the notifications that have not been read yet."""
        if self._notifies_backlog:
            self._notifies_backlog.clear()

    # Transactions

    def _exec_command(
        self, command: QueryNoTemplate, result_format: pq.Format = pq.Format.TEXT
    ) -> PQGen[PGresult | None]:
        # In a pipeline each command is a message of its own: there are no prologues and epilogues.
        if self._pipeline is None:
            if self.prologue is not None and _is_begin(command):
                self._check_connection_ok()
                return (yield from several(self.pgconn, command + b"; " + self.prologue))
            if self.epilogue is not None and command == b"COMMIT":
                self._check_connection_ok()
                return (yield from self._commit_and_reset(self.epilogue))
        return (yield from super()._exec_command(command, result_format))

    def _commit_and_reset(
        self, epilogue: bytes | None, before: Sequence[bytes] = (), then: bytes = b""
    ) -> PQGen[PGresult]:
        after = [] if epilogue is None else [epilogue]
        if after and then:
            # In a block of its own: otherwise it would be part of the next transaction, and undone with that.
            after = [b"BEGIN", *after, b"COMMIT", then]
        commands = [*before, b"COMMIT", *after]
        results = yield from answers(self.pgconn, b"; ".join(commands))
        # After the first error there is no other result.
        for result in results[: len(before) + 1]:
            if (failure := failure_of(self.pgconn, result)) is not None:
                raise failure
        commit, *others = results[len(before) :]
        if epilogue is not None:
            # If the rest failed, the commit is done all the same, and the pool resets the session in its own way, or closes it.
            self.is_over = self._revoked = True
            self.is_reset = not any(failure_of(self.pgconn, answer) for answer in others)
            self.begun = then if self.is_reset else b""
        return commit

    async def begin(self, commands: bytes = b"BEGIN") -> None:
        """Begin a transaction without a block, by commands of which the first is BEGIN, unless the user before has begun it:
        then they may be empty. `finish` commits it, `make_idle` rolls it back; until then psycopg's `commit`, `rollback` and
        `transaction` act as inside a block."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if commands:
            with running_in(Mode.FINISH):
                await self.command(commands)
        self._num_transactions = 1

    async def finish(self, commands: Sequence[bytes] = (), then: bytes = b"") -> None:
        """Commands, COMMIT and the epilogue in one message. Each command gives one result. If one fails, nothing is committed,
        and the transaction is left as the error left it. `then`: commands that begin the transaction of the session's next
        user; they go along where there is an epilogue. Its `now()` is when this message came, up to a COMMIT's time earlier.

        Never interrupted halfway, like the end of a block.
        """
        with running_in(Mode.FINISH):
            async with self.lock:
                self._check_connection_ok()
                await self.wait(self._commit_and_reset(self.epilogue, commands, then))
        self._num_transactions = 0

    @asynccontextmanager
    async def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> AsyncGenerator[TrioTransaction]:
        """A transaction, or a savepoint inside one, committed at the end of the block and rolled back on any exception.

        Cancellation never interrupts COMMIT or ROLLBACK halfway; see `TrioTransaction`.
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
        """Roll back. Works in a cancelled scope, where it is needed most."""
        with running_in(Mode.FINISH):
            await super().rollback()

    async def tpc_prepare(self) -> None:
        """The first phase of a two-phase commit; cancellation does not interrupt it halfway."""
        await self._checkpoint_unless_cleaning()
        with running_in(Mode.FINISH):
            await super().tpc_prepare()

    async def tpc_commit(self, xid: Xid | str | None = None) -> None:
        """The second phase of a two-phase commit; cancellation does not interrupt it halfway."""
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

    async def execute(  # pyright: ignore[reportIncompatibleMethodOverride] -- psycopg has overloads by Python version
        self, query: QueryNoTemplate, params: Params | None = None, *, prepare: bool | None = None, binary: bool = False
    ) -> AsyncCursor[Row]:
        """Like psycopg's, with the prologue first if there is one."""
        if self.due_prologue is None:
            return await super().execute(query, params, prepare=prepare, binary=binary)
        async with self.transaction():
            return await super().execute(query, params, prepare=prepare, binary=binary)

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
