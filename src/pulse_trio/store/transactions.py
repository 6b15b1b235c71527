"""Fenced transactions: a handler's own writes and the completion of its job in one commit.

The connections are a small pool of their own, made when first needed, so that no handler can delay a claim, a report or a beat.
The fenced completion is the last statement before COMMIT: it locks the job's row, and a row locked from the start would keep
the worker's own beats waiting. Both go in one message, and so does the session's reset: the completion raises an error if the
lease was lost or the row is locked, and PostgreSQL does nothing of a message after its first error. If another job waits for
the connection, its BEGIN comes last in that message (`TrioPool.begins_next`).

**A COMMIT without an answer** may be done, undone, or still under way on the server. Silence proves nothing: `committed` waits
for the row, which a completion keeps locked until its transaction has ended, and then looks. If the job still runs by then, the
message may not have come yet: so the transaction's server process is ended first. Through a pooler nobody knows which process
that is, and the completion goes ahead of COMMIT in a message of its own. No other report of ours can do harm meanwhile: each is
fenced by the same (id, attempt, session), and a committed transaction has deleted the row that they would match.
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
    from collections.abc import AsyncGenerator, Generator, Sequence

    from ..jobs import Claim, Outcome
    from ..lines import Lines
    from ..postgres import TrioConnection, TrioPool
    from ..postgres.pool_slots import Slot
    from .lineage import Lineage

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


_END_WITHIN = 2.0
"""Seconds that a server process has to end, once it was told to."""


_ANSWERING = f"SET LOCAL statement_timeout = '{_ANSWER_WITHIN:g}s'".encode()
_COMMITTING = f"SET LOCAL idle_in_transaction_session_timeout = '{_COMMIT_WITHIN:g}s'".encode()
# Deferred constraints are checked before the completion, under the handler's role.
_AS_OURSELVES = b"SET CONSTRAINTS ALL IMMEDIATE; RESET SESSION AUTHORIZATION; RESET ROLE"
_SAVEPOINT = b"pulse_trio_completion"
"""Where a completion that found its row locked goes back to: its error would end the transaction otherwise."""
_BEFORE_COMMIT = [_ANSWERING, *_AS_OURSELVES.split(b"; ")]
_BEFORE_COMPLETION = b"; ".join([_ANSWERING, _AS_OURSELVES, _COMMITTING])
"""Undoes what the handler's transaction may have set; the function that completes brings the other settings that it needs."""
_BEFORE_LINES = b"; ".join([_BEFORE_COMPLETION, pinned_for_transaction()])
"""The same for a statement, which has no settings of its own: the meaning of names, NULL in arrays, a time limit."""


_TIME_LIMITS = {
    "25P03": "idle_in_transaction_session_timeout",
    "25P04": "transaction_timeout",
    "57P05": "idle_session_timeout",
}
"""The settings by which a server ends a session, by the error of which it does: the transaction is rolled back."""


_LOST = "PT001"
_LOCKED = "PT002"
"""What the completion raises; see migrations/0054_completion_with_commit.sql."""


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
    """A transaction that has begun; the block around it commits, if the completion has not."""

    def __init__(self, slot: Slot, pool: TrioPool, schema: str, answering: trio.CancelScope, *, keep: bool) -> None:
        self.connection = connection = slot.connection
        self._pool = pool
        self.completed = False
        self.committed = False
        """Whether the completion is committed, whatever is raised afterwards."""
        self.claim: Claim | None = None
        """Whose completion is in one message with COMMIT."""
        self.committing = False
        self.lost = False
        """Whether the connection was lost before it was known to be committed."""
        self._schema = schema
        self._keep = keep
        self._limits = TimeLimits.of(connection)
        self.backend = connection.pgconn.backend_pid
        self._answering = answering
        """Ends our own statements if no answer comes."""

    async def complete(self, outcome: Outcome) -> bool | None:
        """Writes the fenced completion, and commits unless there is a pooler in between. Returns True if it is written, False
        if the lease was lost, None if another transaction has locked the row.

        Raises `RuntimeError` if the transaction was ended by hand meanwhile.
        """
        self._check_open("job.transaction()", "its block")
        self._limits.apply(self.connection)
        if self.connection.pooled:
            with _answering("the completion"):
                done = await self.connection.value_of(
                    _BEFORE_COMPLETION + b"; " + self._completion("complete_in_transaction", outcome)
                )
            if done is None:
                return False
            self.completed = done == b"t"
            return True if self.completed else None
        await trio.lowlevel.checkpoint_if_cancelled()
        begin = b"SAVEPOINT " if self.claim is None else b"ROLLBACK TO SAVEPOINT "
        self.claim = outcome.claim
        try:
            await self.commit([begin + _SAVEPOINT, *_BEFORE_COMMIT, self._completion("complete_or_raise", outcome)])
        except psycopg.Error as error:
            if error.sqlstate not in (_LOST, _LOCKED):
                raise
            self.committing, self._answering.deadline = False, math.inf
            return False if error.sqlstate == _LOST else None
        self.completed = True
        return True

    async def commit(self, commands: Sequence[bytes] = ()) -> None:
        """Commits, with the job's completion or a line of its history: with these commands or with what is written already."""
        self._answering.deadline = trio.current_time() + _ANSWER_WITHIN
        self.committing = True
        # The transaction of who waits for this connection begins in the same message: one of three less for each job.
        await self.connection.finish(commands, self._pool.begins_next)
        self.committed = True

    async def remember(self, lines: Lines) -> bool | None:
        """Writes lines of the job's history instead, fenced too. Returns and raises the same."""
        self._check_open("job.transaction_step()", "its function")
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

    def _check_open(self, call: str, part: str) -> None:
        if self.connection.closed:
            raise psycopg.OperationalError("the connection is closed")
        if self.connection.pgconn.transaction_status == pq.TransactionStatus.IDLE:
            raise RuntimeError(
                f"the transaction of {call} was ended inside {part}, and what a COMMIT there has written stays: leave COMMIT "
                f"and ROLLBACK to {call}"
            )
        if self.connection.pgconn.pipeline_status != pq.PipelineStatus.OFF:
            raise RuntimeError(f"a pipeline of {call} is still open: leave its block first")

    def _completion(self, name: str, outcome: Outcome) -> bytes:
        claim = outcome.claim
        # Digits in any encoding, and whatever the handler has set for how strings are read.
        result = b"NULL" if outcome.result is None else b"'%s'" % outcome.result.encode().hex().encode()
        return statement(name, self._schema) % {
            b"id": b"%d" % claim.id,
            b"attempt": b"%d" % claim.attempt,
            b"session": b"%d" % claim.session,
            b"result": result,
            b"keep": b"true" if self._keep else b"false",
        }


class FencedTransactions:
    """The fenced transactions of one worker."""

    def __init__(self, dsn: str, lineage: Lineage, *, concurrency: int, keep: bool) -> None:
        self._dsn = dsn
        self._lineage = lineage
        self._schema = lineage.schema
        self._size = min(concurrency, _SIZE)
        self._keep = keep
        self._pool: TrioPool | None = None
        self._unknown: dict[tuple[int, int], tuple[int, float]] = {}
        """By job and attempt: the server process that did not answer a completion with COMMIT, and when it was there."""

    @asynccontextmanager
    async def open(self, *, within: float = 5.0) -> AsyncGenerator[None]:
        """The life of the pool; no connection is made before one is needed. `within`: seconds within which the server must have
        answered a statement, COMMIT or ROLLBACK that a cancelled handler ends; otherwise the connection is closed."""

        async def configure(connection: TrioConnection[Any]) -> None:
            connection.cancel_timeout = connection.cleanup_timeout = within
            await self._check(connection)
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

    async def _check(self, connection: TrioConnection[Any]) -> None:
        # A step must not be committed in an older copy of the database, if this connection is the first that reaches it.
        try:
            async with connection.transaction():
                await connection.command(pinned_for_transaction())
                await self._lineage.check(connection)
        except psycopg.Error as error:
            raise DatabaseUnavailable(f"the transactions of handlers: {str(error).strip()}") from error

    @asynccontextmanager
    async def begin(self, *, seconds: float = math.inf) -> AsyncGenerator[Begun]:
        """A transaction for the block: committed at its end, rolled back when it raises. Each of its statements may take
        `seconds`. Waits for a free connection until the caller is cancelled.

        Raises:
            CommitUnknown: whether it was committed is not known.
        """
        pool, begins = self._opened(), _begin(seconds)
        slot = await pool.take(begins=begins)
        try:
            begun_at = trio.current_time()
            # One scope for BEGIN and COMMIT: each costs 10 µs.
            answering = trio.CancelScope(deadline=begun_at + _ANSWER_WITHIN)
            begun, entered = Begun(slot, pool, self._schema, answering, keep=self._keep), False
            begun_by, slot.begun = slot.begun, b""
            with answering:
                try:
                    await slot.connection.begin(_rest(begins, begun_by))
                    if answering.cancel_called:  # the answer came too late, and is no longer waited for
                        raise _unanswered("BEGIN")
                    answering.deadline = math.inf
                    entered = True
                    yield begun
                    if not begun.committed:
                        await begun.commit()
                except BaseException as error:  # noqa: ASYNC103 -- a cancelled COMMIT without an answer is the caller's to look into
                    begun.lost = begun.connection.broken
                    is_unknown = begun.committing and not begun.committed and begun.connection.closed
                    self._close_if_unfit(begun.connection, error)
                    if is_unknown:
                        if (claim := begun.claim) is not None:
                            self._unknown[claim.id, claim.attempt] = begun.backend, begun_at
                        raise CommitUnknown(_how_it_was_lost(error)) from error  # noqa: ASYNC104 -- it says more than a `Cancelled`
                    raise
            if answering.cancelled_caught and not begun.committed:
                raise _unanswered("the completion" if entered else "BEGIN")
            await trio.lowlevel.checkpoint_if_cancelled()
        finally:
            await pool.take_back(slot)  # noqa: ASYNC102 -- bounded by its mode

    async def committed(self, claim: Claim) -> bool:
        """Waits until a transaction whose COMMIT got no answer has ended. Returns whether it was committed.

        Raises `DatabaseUnavailable` if that cannot be found out.
        """
        key = claim.id, claim.attempt
        try:
            done = await self._is_done(claim)
            if not done and key in self._unknown:
                # The row may be free because the message is still on its way.
                await self._end_process(*self._unknown[key])
                done = await self._is_done(claim)
        except psycopg.Error as error:
            raise DatabaseUnavailable(f"transactions: {str(error).strip()}") from error
        self._unknown.pop(key, None)
        return done

    async def _is_done(self, claim: Claim) -> bool:
        fence = {"id": claim.id, "attempt": claim.attempt, "session": claim.session, "keep": self._keep}
        async with self._lend() as connection:
            # The second statement must see the result that the first waited for, whatever the role's default is.
            await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
            async with connection.transaction(), OwnAsyncCursor(connection) as cursor:
                await connection.command(pinned_for_transaction())
                await cursor.execute(statement("await_transaction", self._schema), fence)
                await cursor.execute(statement("transaction_done", self._schema), fence, binary=True)
                row = await cursor.fetchone()
        return row is not None and row[0]

    async def _end_process(self, process: int, since: float) -> None:
        async with self._lend() as connection, connection.transaction(), OwnAsyncCursor(connection) as cursor:
            await connection.command(pinned_for_transaction())
            about = {"process": process, "seconds": trio.current_time() - since, "within": _END_WITHIN * 1000}
            await cursor.execute(statement("end_transaction", self._schema), about)
            if any(not ended for (ended,) in await cursor.fetchall()):
                raise DatabaseUnavailable("transactions: the server process of a lost connection has not ended yet")

    @asynccontextmanager
    async def _lend(self) -> AsyncGenerator[TrioConnection[Any]]:
        async with self._opened().connection(timeout=math.inf) as connection:
            try:
                yield connection
            except BaseException as error:
                self._close_if_unfit(connection, error)
                raise

    def _opened(self) -> TrioPool:
        if self._pool is None:
            raise RuntimeError("the pool of transactions is not open")
        return self._pool

    def _close_if_unfit(self, connection: TrioConnection[Any], error: BaseException) -> None:
        # A primary that became a standby keeps its connections: the next transaction looks for the primary again.
        if (
            isinstance(error, psycopg.errors.ReadOnlySqlTransaction)
            or connection.pgconn.pipeline_status != pq.PipelineStatus.OFF
        ):
            connection.abort()


def ended_by_limit(error: BaseException) -> str | None:
    """What to say of a transaction that the server ended because it stood for too long: its last word is found in front of the
    answer to the next statement, or to COMMIT. None for any other error."""
    if (setting := _TIME_LIMITS.get(getattr(error, "sqlstate", None) or "")) is None:
        return None
    return f"the server ended it, and its connection, before COMMIT, by the setting {setting}: it stood for too long"


def _how_it_was_lost(error: BaseException) -> str:
    return ended_by_limit(error) or f"the connection was lost during COMMIT: {error}"


@contextmanager
def _answering(what: str) -> Generator[None]:
    with trio.move_on_after(_ANSWER_WITHIN) as deadline:
        yield
    if deadline.cancelled_caught:
        raise _unanswered(what)


def _unanswered(what: str) -> DatabaseUnavailable:
    return DatabaseUnavailable(f"transactions: the database did not answer {what} within {_ANSWER_WITHIN:g} s")


def _begin(seconds: float) -> bytes:
    """The time limit is a command that begins no query, so that the handler may still say SET TRANSACTION."""
    if seconds == math.inf:
        return b"BEGIN"
    # One second more: while this side lives, its own deadline strikes first, with the better reason. And rounded up by a
    # sixteenth at most: so jobs that wait for one connection after the other have the same limit, most often.
    milliseconds = math.ceil(max(seconds + 1, 0.001) * 1000)
    part = 1 << max(0, milliseconds.bit_length() - 5)
    return b"BEGIN; " + _time_limit(b"%d" % min(-(-milliseconds // part) * part, _LONGEST))


def _rest(begins: bytes, begun: bytes) -> bytes:
    """What is left to be sent where these commands have begun the transaction: its limit, if theirs is another one."""
    if not begun:
        return begins
    if begun == begins:
        return b""
    return begins.partition(b"; ")[2] or _time_limit(b"DEFAULT")


def _time_limit(value: bytes) -> bytes:
    return b"SET LOCAL statement_timeout = " + value
