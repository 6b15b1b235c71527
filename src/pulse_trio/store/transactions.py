"""Fenced transactions: a handler's own writes and the completion of its job in one commit.

The connections are a small pool of their own, made when first needed, so that no handler can delay a claim, a report or a beat.
The fenced completion is the last statement before COMMIT: it locks the job's row, and a row locked from the start would keep
the worker's own beats waiting.

**A COMMIT without an answer** may be done, undone, or still under way on the server. Silence proves nothing: `committed` waits
for the row, which the transaction holds until it has ended, and then looks. Until then no other report of ours can do harm:
each is fenced by the same (id, attempt, session), and a committed transaction has deleted the row that they would match.
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
import trio
from psycopg import pq

from ..errors import DatabaseUnavailable
from ..postgres import RESET_SESSION, OwnAsyncCursor, discard_all, open_pool, pinned_for_transaction
from ..sql import statement
from .histories import parameters

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from ..jobs import Claim, Outcome
    from ..lines import Lines
    from ..postgres import TrioConnection, TrioPool

_SIZE = 10
"""Connections of one worker for fenced transactions, at most: a database has 100 for all."""


_COMMIT_WITHIN = 10.0
"""Seconds from the completion to its COMMIT, which follows at once. If a worker was stopped or cut off between the two, its
job's row would stay locked, and so not be rescued, until TCP gave up: the server rolls back instead."""


_LONGEST = 2**31 - 1
"""The greatest statement_timeout, in milliseconds."""

_ANSWER_WITHIN = 10.0
"""Seconds within which the server must answer our own statements, which are quick. A peer that vanished without a word answers
nothing, while the worker's other connections go on renewing the lease: the handler would wait for ever. The user's own
statements have as long as the job's timeout."""


_ANSWERING = f"SET LOCAL statement_timeout = '{_ANSWER_WITHIN:g}s'".encode()
_COMMITTING = f"SET LOCAL idle_in_transaction_session_timeout = '{_COMMIT_WITHIN:g}s'".encode()
# Deferred constraints are checked before the completion, under the handler's role.
_AS_OURSELVES = b"SET CONSTRAINTS ALL IMMEDIATE; RESET SESSION AUTHORIZATION; RESET ROLE"
_BEFORE_COMPLETION = b"; ".join([_ANSWERING, _AS_OURSELVES, _COMMITTING])
"""Undoes what the handler's transaction may have set; the function that completes brings the other settings that it needs."""
_BEFORE_LINES = b"; ".join([_BEFORE_COMPLETION, pinned_for_transaction()])
"""The same for a statement, which has no settings of its own: the meaning of names, NULL in arrays, a time limit."""


class CommitUnknown(DatabaseUnavailable):
    """The connection was lost while COMMIT was under way: it may be done or not."""


class TimeLimits(NamedTuple):
    """How long a connection waits for its server. A handler may want other limits for its own statements than ours."""

    query: float | None
    cancel: float
    cleanup: float

    @classmethod
    def of(cls, connection: TrioConnection[Any]) -> TimeLimits:
        return cls(connection.query_timeout, connection.cancel_timeout, connection.cleanup_timeout)

    def apply(self, connection: TrioConnection[Any]) -> None:
        connection.query_timeout, connection.cancel_timeout, connection.cleanup_timeout = self


class Begun:
    """A transaction that has begun; the block around it commits."""

    def __init__(self, connection: TrioConnection[Any], schema: str, *, keep: bool) -> None:
        self.connection = connection
        self.completed = False
        self.committed = False
        """Whether the completion is committed, whatever is raised afterwards."""
        self._schema = schema
        self._keep = keep
        self._limits = TimeLimits.of(connection)

    async def complete(self, outcome: Outcome) -> bool | None:
        """Writes the fenced completion. Returns True if it is written, False if the lease was lost, None if another transaction
        has locked the row.

        Raises `RuntimeError` if the transaction was ended by hand meanwhile.
        """
        self._check_open()
        with _answering("the completion"):
            self._limits.apply(self.connection)
            done = await self.connection.value_of(_BEFORE_COMPLETION + b"; " + self._completion(outcome))
        if done is None:
            return False
        self.completed = done == b"t"
        return True if self.completed else None

    async def remember(self, lines: Lines) -> bool | None:
        """Writes lines of the job's history instead, fenced too. Returns and raises the same."""
        self._check_open()
        with _answering("the line"):
            self._limits.apply(self.connection)
            await self.connection.command(_BEFORE_LINES)
            async with OwnAsyncCursor(self.connection) as cursor:
                await cursor.execute(statement("write_lines", self._schema), parameters([lines]), prepare=False)
                rows = [row[1:] for row in await cursor.fetchall()]
        if not rows:
            return False
        self.completed = bool(rows[0][1])
        return True if self.completed else None

    def _check_open(self) -> None:
        if self.connection.pgconn.transaction_status == pq.TransactionStatus.IDLE:
            raise RuntimeError(
                "the transaction of job.transaction() was ended inside its block; leave that to the block"
            )
        if self.connection.pgconn.pipeline_status != pq.PipelineStatus.OFF:
            raise RuntimeError("a pipeline of job.transaction() is still open: leave its block first")

    def _completion(self, outcome: Outcome) -> bytes:
        claim = outcome.claim
        # Digits in any encoding, and whatever the handler has set for how strings are read.
        result = b"NULL" if outcome.result is None else b"'%s'" % outcome.result.encode().hex().encode()
        return statement("complete_in_transaction", self._schema) % {
            b"id": b"%d" % claim.id,
            b"attempt": b"%d" % claim.attempt,
            b"session": b"%d" % claim.session,
            b"result": result,
            b"keep": b"true" if self._keep else b"false",
        }


class FencedTransactions:
    """The fenced transactions of one worker."""

    def __init__(self, dsn: str, *, schema: str, concurrency: int, keep: bool) -> None:
        self._dsn = dsn
        self._schema = schema
        self._size = min(concurrency, _SIZE)
        self._keep = keep
        self._pool: TrioPool | None = None

    @asynccontextmanager
    async def open(self, *, within: float = 5.0) -> AsyncGenerator[None]:
        """The life of the pool; no connection is made before one is needed. `within`: seconds within which the server must have
        answered a statement, COMMIT or ROLLBACK that a cancelled handler ends; otherwise the connection is closed."""

        async def configure(connection: TrioConnection[Any]) -> None:
            connection.cancel_timeout = connection.cleanup_timeout = within
            connection.epilogue = None if connection.pooled else RESET_SESSION

        async with open_pool(
            self._dsn,
            min_size=0,
            max_size=self._size,
            configure=configure,
            reset=discard_all,
            autocommit=True,
            application_name="pulse-trio transactions",
        ) as self._pool:
            yield

    @asynccontextmanager
    async def begin(self, *, seconds: float = math.inf) -> AsyncGenerator[Begun]:
        """A transaction for the block: committed at its end, rolled back when it raises. Each of its statements may take
        `seconds`. Waits for a free connection until the caller is cancelled.

        Raises:
            CommitUnknown: whether it was committed is not known.
        """
        async with self._lend() as connection:
            begun = Begun(connection, self._schema, keep=self._keep)
            entered = committing = False
            # One scope for BEGIN and COMMIT: each costs 10 µs of 420 for a whole job.
            with trio.CancelScope(deadline=trio.current_time() + _ANSWER_WITHIN) as answering:
                try:
                    if seconds < math.inf:
                        connection.prologue = _time_limit(seconds)
                    async with connection.transaction():
                        if answering.cancel_called:  # the answer came too late, and is no longer waited for
                            raise _unanswered("BEGIN")
                        answering.deadline = math.inf
                        entered = True
                        yield begun
                        committing = begun.completed
                        if committing:
                            answering.deadline = trio.current_time() + _ANSWER_WITHIN
                    begun.committed = committing
                except BaseException as error:  # noqa: ASYNC103 -- a cancelled COMMIT without an answer is the caller's to look into
                    if committing and connection.closed:
                        raise CommitUnknown(f"the connection was lost during COMMIT: {error}") from error  # noqa: ASYNC104
                    raise
            if answering.cancelled_caught:
                if not entered:
                    raise _unanswered("BEGIN")
                raise CommitUnknown(f"the database did not answer COMMIT within {_ANSWER_WITHIN:g} s")

    async def committed(self, claim: Claim) -> bool:
        """Waits until a transaction whose COMMIT got no answer has ended. Returns whether it was committed.

        Raises `DatabaseUnavailable` if that cannot be found out.
        """
        fence = {"id": claim.id, "attempt": claim.attempt, "session": claim.session, "keep": self._keep}
        try:
            async with self._lend() as connection:
                # The second statement must see the result that the first waited for, whatever the role's default is.
                await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
                async with connection.transaction(), OwnAsyncCursor(connection) as cursor:
                    await connection.command(pinned_for_transaction())
                    await cursor.execute(statement("await_transaction", self._schema), fence)
                    await cursor.execute(statement("transaction_done", self._schema), fence, binary=True)
                    row = await cursor.fetchone()
        except psycopg.Error as error:
            raise DatabaseUnavailable(f"transactions: {str(error).strip()}") from error
        return row is not None and row[0]

    @asynccontextmanager
    async def _lend(self) -> AsyncGenerator[TrioConnection[Any]]:
        if self._pool is None:
            raise RuntimeError("the pool of transactions is not open")
        async with self._pool.connection(timeout=math.inf) as connection:
            try:
                yield connection
            except psycopg.errors.ReadOnlySqlTransaction:
                # A primary that became a standby keeps its connections: the next transaction looks for the primary again.
                connection.abort()
                raise


@contextmanager
def _answering(what: str) -> Generator[None]:
    with trio.move_on_after(_ANSWER_WITHIN) as deadline:
        yield
    if deadline.cancelled_caught:
        raise _unanswered(what)


def _unanswered(what: str) -> DatabaseUnavailable:
    return DatabaseUnavailable(f"transactions: the database did not answer {what} within {_ANSWER_WITHIN:g} s")


def _time_limit(seconds: float) -> bytes:
    """Sent as a command that begins no query, so that the handler may still say SET TRANSACTION."""
    # One second more: while this side lives, its own deadline strikes first, with the better reason.
    milliseconds = min(math.ceil((seconds + 1) * 1000), _LONGEST)
    return f"SET LOCAL statement_timeout = {max(1, milliseconds)}".encode()
