"""`job.transaction()`: the handler's own writes and the completion of its job in one commit.

When the block ends, the fenced completion is written as the last statement, and then COMMIT. So either both are there or
neither is, whatever dies when. After the commit the job *is* completed: nothing is reported for it any more, and what the
handler does afterwards can only be told as an event.

If the fence is lost the writes are rolled back and the handler is cancelled, as by a beat that found no row. A beat that
finds no row *because* the commit has just deleted it must not do that: see `RunningJob.lose`.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import trio

from ...describing import Carried, CarriedBase, carried
from ...errors import DatabaseUnavailable
from ...store import CommitUnknown

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractAsyncContextManager

    from ...jobs import Claim, Outcome
    from .running_job import RunningJob

_LOCKED_PAUSE = 0.01
"""Seconds until a row that somebody has locked (a beat, most often) is tried again; doubles up to half a second."""
_LONGEST_LOCKED_PAUSE = 0.5
_FIND_OUT = 5.0
"""Seconds at least in which an unanswered COMMIT is looked into, also when the job is cancelled, while its lease lasts."""
_FIND_OUT_PAUSE = 0.25


class Begun(Protocol):
    @property
    def connection(self) -> Any: ...

    @property
    def committed(self) -> bool: ...

    async def complete(self, outcome: Outcome) -> bool | None: ...


class TransactionStore(Protocol):
    def open(self, *, within: float) -> AbstractAsyncContextManager[None]: ...

    def begin(self, *, seconds: float) -> AbstractAsyncContextManager[Begun]: ...

    async def committed(self, claim: Claim) -> bool: ...


class Transaction:
    """What `async with job.transaction() as tx` gives. `tx.connection` is a `TrioConnection` inside the transaction;
    `tx.result` becomes the job's result."""

    __slots__ = ("connection", "result")

    def __init__(self, connection: Any, result: Any) -> None:
        self.connection = connection
        self.result = result

    async def execute(self, query: Any, parameters: Any = None, **options: Any) -> Any:
        """`tx.connection.execute`: runs one statement in the transaction; returns a cursor."""
        return await self.connection.execute(query, parameters, **options)

    def cursor(self, *args: Any, **options: Any) -> Any:
        """`tx.connection.cursor`."""
        return self.connection.cursor(*args, **options)

    def transaction(self, *args: Any, **options: Any) -> Any:
        """`tx.connection.transaction`: a savepoint."""
        return self.connection.transaction(*args, **options)


class _FenceLost(Exception):
    pass


class Transactions:
    """`completed(claim, value)` makes the outcome; `on_commit(held)` is called when a job has become completed here.

    `margin`: seconds from a lease's local deadline to its end, for the queue where that is least. Until then a handler that is
    cancelled has to have ended, and it cannot while its connection waits for an answer: a third of it for that, and a third to
    look into an unanswered COMMIT.
    """

    def __init__(
        self,
        store: TransactionStore,
        *,
        completed: Callable[[Claim, Any], Outcome],
        on_commit: Callable[[RunningJob], None],
        on_lost: Callable[[RunningJob], None],
        margin: float,
    ) -> None:
        self._store = store
        self._completed = completed
        self._on_commit = on_commit
        self._on_lost = on_lost
        self._margin = margin

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keeps the connections, until cancelled."""
        async with self._store.open(within=self._margin / 3):
            task_status.started()
            await trio.sleep_forever()

    @asynccontextmanager
    async def open(self, held: RunningJob, result: Any) -> AsyncGenerator[Transaction]:
        """One job's transaction. Raises `RuntimeError` when the job has one open, or is completed by one."""
        held.begin_transaction()
        outcomes: list[Outcome] = []
        begun: Begun | None = None
        try:
            limit = min(held.timeout_deadline, held.job_deadline) - trio.current_time()
            async with self._store.begin(seconds=limit) as begun:
                transaction = Transaction(begun.connection, result)
                try:
                    yield transaction
                except BaseException as error:
                    # What ends a transaction asks the exception for its class, and is to roll back whatever it answers.
                    if (safe := carried(error)) is error:
                        raise
                    raise safe from None  # noqa: ASYNC104 -- it, inside of one of ours
                outcomes.append(self._completed(held.claim, transaction.result))
                held.transaction = "settling"
                await self._complete(begun, outcomes[0])
        except (Carried, CarriedBase) as carrier:
            held.end_transaction()
            raise carrier.original from None
        except _FenceLost:
            held.end_transaction()
            self._on_lost(held)
            held.cancel("fence-lost")
            await trio.lowlevel.checkpoint()  # noqa: ASYNC120 -- the cancellation says more
            raise RuntimeError(f"job {held.claim.id} lost its lease; its transaction was rolled back") from None
        except CommitUnknown as error:
            if not await self._find_out(held):  # noqa: ASYNC120 -- shielded inside
                held.end_transaction()
                raise DatabaseUnavailable(f"the transaction of job {held.claim.id} was rolled back: {error}") from error
        except BaseException:
            if begun is not None and begun.committed:
                # Cancelled while COMMIT was under way, which was done all the same.
                self._note_commit(held, outcomes[0])
            else:
                held.end_transaction()
            raise
        self._note_commit(held, outcomes[0])

    def _note_commit(self, held: RunningJob, outcome: Outcome) -> None:
        held.transaction = "committed"
        held.plain = False
        held.outcome = held.committed = outcome
        self._on_commit(held)

    async def _complete(self, begun: Begun, outcome: Outcome) -> None:
        pause = _LOCKED_PAUSE
        while (written := await begun.complete(outcome)) is None:
            await trio.sleep(pause)
            pause = min(pause * 2, _LONGEST_LOCKED_PAUSE)
        if not written:
            raise _FenceLost

    async def _find_out(self, held: RunningJob) -> bool:
        """Whether the commit was done. If that cannot be known in time the job is cancelled like one whose lease cannot be
        proven: its release is fenced, so it finds a row only if the commit was not done."""
        # Never past the lease: what the handler does when it hears of it, somebody else's attempt may be doing by then.
        last = held.lease_deadline + held.terms.margin * 2 / 3
        deadline = max(held.lease_deadline, min(trio.current_time() + _FIND_OUT, last))
        with trio.CancelScope(shield=True, deadline=deadline):
            while True:
                try:
                    return await self._store.committed(held.claim)
                except DatabaseUnavailable:
                    await trio.sleep(_FIND_OUT_PAUSE)
        held.end_transaction()
        held.cancel("lease-unproven")
        await trio.lowlevel.checkpoint()
        raise DatabaseUnavailable(f"whether the transaction of job {held.claim.id} was committed is not known")
