"""`job.transaction()`: the handler's own writes and the completion of its job in one commit.

When the block ends, the fenced completion is written as the last statement, and then COMMIT. So either both are there or
neither is, whichever process dies when. After the commit the job *is* completed: nothing more is reported for it, and later
actions of the handler can only be reported as an event.

If the fence is lost the writes are rolled back and the handler is cancelled, as by a beat that found no row. A beat that
finds no row *because* the commit has just deleted it must not do that: see `RunningJob.lose`.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import trio

from ...describing import Carried, CarriedBase, carried
from ...errors import DatabaseUnavailable
from ...store import CommitUnknown, ended_by_limit
from .completion import completed_in_transaction
from .given_transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from contextlib import AbstractAsyncContextManager

    from ...codec import Codec
    from ...jobs import Claim, Outcome
    from ..plan import Plan
    from .job_table import JobTable
    from .run_spans import RunSpans
    from .running_job import RunningJob

_LOCKED_PAUSE = 0.01
"""Seconds until a row that another transaction has locked (a beat, most often) is tried again; doubles up to half a second."""
_LONGEST_LOCKED_PAUSE = 0.5
_FIND_OUT = 5.0
"""Least seconds in which to find out about an unanswered COMMIT, also when the job is cancelled, while its lease lasts."""
_FIND_OUT_PAUSE = 0.25


class Begun(Protocol):
    @property
    def connection(self) -> Any: ...

    @property
    def committed(self) -> bool: ...

    @property
    def lost(self) -> bool: ...

    async def complete(self, outcome: Outcome) -> bool | None: ...


class TransactionStore(Protocol):
    def open(self, *, within: float) -> AbstractAsyncContextManager[None]: ...

    def begin(self, *, seconds: float) -> AbstractAsyncContextManager[Begun]: ...

    async def committed(self, claim: Claim) -> bool: ...


class _FenceLost(Exception):
    pass


class Transactions:
    """The fenced transactions of one worker's jobs.

    Its `margin` is the seconds from a lease's local deadline to its end, for the queue where that is least. Until then a
    handler that is cancelled has to have ended, and it cannot while its connection waits for an answer: a third of it for
    that, and a third to look into an unanswered COMMIT.
    """

    def __init__(self, store: TransactionStore, jobs: JobTable, codec: Codec | None, plan: Plan) -> None:
        self._store = store
        self._jobs = jobs
        self._codec = codec
        self._margin = plan.terms.least_margin
        self._spans = plan.spans

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keeps the connections, until cancelled."""
        async with self._store.open(within=self._margin / 3):
            task_status.started()
            await trio.sleep_forever()

    def open(self, job: RunningJob, result: Any) -> AbstractAsyncContextManager[Transaction]:
        """One job's transaction. Raises `RuntimeError` when the job has one open, or a transaction has completed it."""
        opened = self._open(job, result)
        return opened if self._spans is None else _traced(self._spans, job.claim, opened)

    @asynccontextmanager
    async def _open(self, job: RunningJob, result: Any) -> AsyncGenerator[Transaction]:
        attempt = job.begin_transaction()
        outcomes: list[Outcome] = []
        begun: Begun | None = None
        try:
            if attempt is not None:
                await attempt.transaction_begins()
            limit = min(job.timeout_deadline, job.job_deadline) - trio.current_time()
            async with self._store.begin(seconds=limit) as begun:
                transaction = Transaction(begun.connection, result)
                try:
                    yield transaction
                except BaseException as error:
                    # Code that ends a transaction reads the exception's class, and must roll back whatever that class does.
                    if (safe := carried(error)) is error:
                        raise
                    raise safe from None  # noqa: ASYNC104 -- it, inside of one of ours
                if job.ended:
                    # The job has been reported as failed: another attempt will do the work again.
                    raise RuntimeError(
                        f"the handler of job {job.claim.id} has returned, and its job.transaction() was still open: it is "
                        "rolled back. Leave the block before the handler returns."
                    )
                if attempt is not None:
                    attempt.transaction_ends()
                outcomes.append(completed_in_transaction(self._codec, job.claim, transaction.result))
                job.transaction = "settling"
                await self._complete(begun, outcomes[0])
        except (Carried, CarriedBase) as carrier:
            job.end_transaction()
            raise carrier.original from None
        except _FenceLost:
            job.end_transaction()
            if not job.ended:
                self._jobs.lose(job)
            job.cancel("fence-lost")
            await trio.lowlevel.checkpoint()  # noqa: ASYNC120 -- the cancellation says more
            raise RuntimeError(f"job {job.claim.id} lost its lease; its transaction was rolled back") from None
        except CommitUnknown as error:
            if not await self._find_out(job):  # noqa: ASYNC120 -- shielded inside
                job.end_transaction()
                raise DatabaseUnavailable(f"the transaction of job {job.claim.id} was rolled back: {error}") from error
        except BaseException as error:
            if begun is not None and begun.committed:
                # Cancelled while COMMIT was under way, but the server did it.
                self._note_commit(job, outcomes[0])
                raise
            job.end_transaction()
            if begun is not None and begun.lost and (how := ended_by_limit(error)) is not None:
                said = f"the transaction of job {job.claim.id} was rolled back: {how}"
                raise DatabaseUnavailable(said) from error  # noqa: ASYNC104 -- it is no cancellation
            raise
        self._note_commit(job, outcomes[0])

    def _note_commit(self, job: RunningJob, outcome: Outcome) -> None:
        job.transaction = "committed"
        if job.ended:
            # The handler returned during COMMIT: the report that it failed finds no row, and is refused.
            return
        job.plain = False
        job.outcome = job.committed = outcome
        self._jobs.commit(job)

    async def _complete(self, begun: Begun, outcome: Outcome) -> None:
        pause = _LOCKED_PAUSE
        while (written := await begun.complete(outcome)) is None:
            await trio.sleep(pause)
            pause = min(pause * 2, _LONGEST_LOCKED_PAUSE)
        if not written:
            raise _FenceLost

    async def _find_out(self, job: RunningJob) -> bool:
        """Returns whether the transaction was committed. If that cannot be known in time the job is cancelled like one whose
        lease cannot be proven: its release is fenced, so it finds a row only if the commit was not done."""
        # Never past the lease: by then another attempt may be doing what this handler does when it learns the result.
        last = job.lease_deadline + job.terms.margin * 2 / 3
        deadline = max(job.lease_deadline, min(trio.current_time() + _FIND_OUT, last))
        with trio.CancelScope(shield=True, deadline=deadline):
            while True:
                try:
                    return await self._store.committed(job.claim)
                except DatabaseUnavailable:
                    await trio.sleep(_FIND_OUT_PAUSE)
        job.end_transaction()
        job.cancel("lease-unproven")
        await trio.lowlevel.checkpoint()
        raise DatabaseUnavailable(f"it is not known whether the transaction of job {job.claim.id} was committed")


@asynccontextmanager
async def _traced(
    spans: RunSpans, claim: Claim, opened: AbstractAsyncContextManager[Transaction]
) -> AsyncGenerator[Transaction]:
    with spans.traces.transaction(claim):
        async with opened as transaction:
            yield transaction
