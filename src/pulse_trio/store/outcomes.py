"""Writes outcomes of attempts on a given connection: every statement that ends an attempt is sent from here.

An outcome that PostgreSQL refuses because of its value must not keep the others of its batch from being written: see rows.py.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg

from ..jobs import Outcome
from ..observe import JobDied
from ..sql import statement
from ..states import reported, retry_delay, storable
from .arrays import fences, numbers, optional_numbers, texts
from .rows import ROWS_FAULT, bury, each_alone, said_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from ..jobs import Claim, Suspended
    from ..postgres import TrioConnection
    from .callbacks import Callbacks

    Write = Callable[[TrioConnection[Any], Sequence[Outcome]], Awaitable["Settlement"]]
    Fence = tuple[int, int, int]

EXPIRED = "lease expired: the worker was gone or cut off"
_SUSPENDED = 20
"""Jobs that one statement suspends."""
_CAME_BACK = "lease expired: the worker was cut off or stopped, and came back"

_NO_CLAIMS: Mapping[str, Any] = {
    "session": 0,
    "lease": "0 s",
    "leases": None,
    "limit": 0,
    "size": 0,
    "queues": "{}",
    "priorities": "{}",
    "cursor_run_ats": "{}",
    "cursor_ids": "{}",
    "paused_kinds": "{}",
}
"""The claiming half of complete_and_claim.sql, left empty."""


class Settlement(NamedTuple):
    """The results of reports: outcomes written, refused (the lease was lost), or to be sent again (row locked)."""

    accepted: list[Outcome]
    refused: list[Outcome]
    again: list[Outcome]

    @classmethod
    def joined(cls, parts: Iterable[Settlement]) -> Settlement:
        """The settlement of several batches."""
        whole = cls([], [], [])
        for part in parts:
            whole.accepted.extend(part.accepted)
            whole.refused.extend(part.refused)
            whole.again.extend(part.again)
        return whole


class Moved(NamedTuple):
    """A row of fail.sql: `state` is the job's new state, None for a job that is still ours but locked. `suspect` is the kind of
    a job that this moved into quarantine. The fields after `crashes` are set for a job that is now dead."""

    job_id: int
    state: str | None
    suspect: str | None
    crashes: int
    queue: str
    kind: str
    error: str
    attempt: int
    cause: str


class OutcomeWriter:
    """`keep` False deletes completed jobs instead of archiving them; `patience`, as SQL reads it, is how long a job waits for a
    worker that its arguments fit."""

    def __init__(self, schema: str, callbacks: Callbacks, *, keep: bool, patience: str) -> None:
        self._schema = schema
        self._callbacks = callbacks
        self.keep = keep
        self._patience = patience

    async def complete(self, connection: TrioConnection[Any], completed: Sequence[Outcome]) -> Settlement:
        """Completes jobs; waits a moment for rows that are locked, then takes the others."""
        return await self._each_if_refused(connection, self._complete, completed)

    async def complete_unlocked(self, connection: TrioConnection[Any], completed: Sequence[Outcome]) -> Settlement:
        """Completes those jobs whose rows are not locked. A job whose cancellation was requested ends as cancelled."""
        return await self._each_if_refused(connection, self._complete_unlocked, completed)

    async def fail(self, connection: TrioConnection[Any], outcomes: Sequence[Outcome]) -> Settlement:
        """Writes every outcome that is not a completion."""
        await self._note_spans(connection, outcomes)
        return await self._each_if_refused(connection, self._fail, outcomes)

    async def suspend(self, connection: TrioConnection[Any], outcomes: Sequence[Suspended]) -> Settlement:
        """Suspends durable jobs, a few in a statement: what is woken at once must not be committed long after its moment."""
        await self._note_spans(connection, outcomes)
        some = [outcomes[i : i + _SUSPENDED] for i in range(0, len(outcomes), _SUSPENDED)]
        return Settlement.joined([await self._each_if_refused(connection, self._suspend, part) for part in some])

    async def _note_spans(self, connection: TrioConnection[Any], outcomes: Sequence[Outcome]) -> None:
        """Leaves the spans of these attempts with their jobs, for the next attempts to link to."""
        if traced := [o for o in outcomes if o.span is not None]:
            spans = {**fences([o.claim for o in traced]), "spans": texts([o.span for o in traced])}
            # The outcomes are written whatever becomes of this.
            with suppress(psycopg.errors.LockNotAvailable, psycopg.errors.InsufficientPrivilege, *ROWS_FAULT):
                await connection.execute(statement("note_spans", self._schema), spans, prepare=True)

    async def _each_if_refused(
        self, connection: TrioConnection[Any], write: Write, outcomes: Sequence[Outcome]
    ) -> Settlement:
        """Writes a batch. If PostgreSQL refuses a value, finds the outcome that holds it and writes its failure instead."""

        async def of_all(some: Sequence[Outcome]) -> Settlement:
            return await write(connection, some)

        async def alone(outcome: Outcome, error: psycopg.Error) -> Settlement:
            return await self._write_refused(connection, outcome, error)

        return Settlement.joined(await each_alone(outcomes, of_all, alone))

    async def _write_refused(
        self, connection: TrioConnection[Any], outcome: Outcome, error: psycopg.Error
    ) -> Settlement:
        claim = outcome.claim
        if outcome.kind == "completed":
            text = storable(f"The result could not be stored: {error}")
            failed = Outcome(claim, "failed", delay=retry_delay(claim), error=text)
            try:
                return await self._fail(connection, [failed])
            except ROWS_FAULT as again:
                error = again
        said = f"BadRow: the report of this attempt ({outcome.kind}) could not be written: {said_of(error)}"
        if outcome.error:
            said += f"\n\nIt said:\n{outcome.error}"
        # A completion that could not be written is noted as a failure.
        noted = "failed" if outcome.kind == "completed" else outcome.kind
        try:
            buried = await self.bury(connection, (claim.id, claim.attempt, claim.session), noted, said)
        except psycopg.errors.LockNotAvailable:
            return Settlement([], [], [outcome])
        self._callbacks.bad_row(claim.id, claim.kind, f"report of {outcome.kind}", said_of(error))
        return (
            Settlement([], [outcome], []) if buried is None else Settlement([Outcome(claim, noted, error=said)], [], [])
        )

    async def _complete(self, connection: TrioConnection[Any], completed: Sequence[Outcome]) -> Settlement:
        ordered = in_lock_order(completed)
        parameters = {**_NO_CLAIMS, **completions(ordered, keep=self.keep)}
        try:
            cursor = await connection.execute(statement("complete_and_claim", self._schema), parameters, prepare=True)
            (tail,) = await cursor.fetchall()
        except psycopg.errors.LockNotAvailable:
            return await self._complete_unlocked(connection, ordered)
        return accepted_of(ordered, tail)

    async def _complete_unlocked(self, connection: TrioConnection[Any], completed: Sequence[Outcome]) -> Settlement:
        cursor = await connection.execute(
            statement("complete_unlocked", self._schema), completions(completed, keep=self.keep), prepare=True
        )
        return _three_ways(completed, dict(await cursor.fetchall()))

    async def _fail(self, connection: TrioConnection[Any], outcomes: Sequence[Outcome]) -> Settlement:
        moved = await self.end_attempts(
            connection,
            fences([o.claim for o in outcomes]),
            kinds=[reported(o) for o in outcomes],
            delays=[o.delay for o in outcomes],
            errors=[o.error for o in outcomes],
        )
        return _three_ways(outcomes, {row.job_id: row.state is not None for row in moved})

    async def _suspend(self, connection: TrioConnection[Any], outcomes: Sequence[Any]) -> Settlement:
        ordered: Sequence[Suspended] = in_lock_order(outcomes)  # type: ignore[assignment]
        cursor = await connection.execute(
            statement("suspend_jobs", self._schema),
            {
                **fences([o.claim for o in ordered]),
                "blocks": texts([numbers(o.blocks) for o in ordered]),
                "fail_blocks": texts([numbers(o.fail_blocks) for o in ordered]),
                "events": texts([texts(o.events) for o in ordered]),
                "moments": optional_numbers([o.until for o in ordered]),
                "said": texts([o.error for o in ordered]),
            },
            prepare=True,
        )
        return _three_ways(ordered, dict(await cursor.fetchall()))

    async def end_attempts(
        self,
        connection: TrioConnection[Any],
        fences: Mapping[str, Any],
        *,
        kinds: Sequence[str],
        delays: Sequence[float],
        errors: Sequence[str | None],
    ) -> list[Moved]:
        """Ends attempts that did not complete (fail.sql), and reports the jobs that are now dead."""
        cursor = await connection.execute(
            statement("fail", self._schema),
            {
                **fences,
                "outcomes": texts(kinds),
                "delays": numbers(delays),
                "errors": texts(errors),
                "patience": self._patience,
            },
            prepare=True,
        )
        moved = [Moved._make(row) for row in await cursor.fetchall()]
        for job in moved:
            if job.state == "dead":
                self._callbacks.event(JobDied(job.job_id, job.kind, job.queue, job.attempt, job.cause, job.error))
        return moved

    async def bury(self, connection: TrioConnection[Any], fence: Fence, outcome: str, error: str) -> str | None:
        """Makes one running job dead, whatever its row holds; returns its kind, None if that is impossible."""
        buried = await bury(connection, self._schema, fence, outcome, error)
        if buried is None:
            return None
        kind, queue = buried
        job_id, attempt, _ = fence
        self._callbacks.event(JobDied(job_id, kind, queue, attempt, outcome, error[:4000]))
        return kind

    async def bury_rescued(
        self, connection: TrioConnection[Any], fence: Fence, kind: str, error: str, refused: psycopg.Error
    ) -> bool:
        """Makes a job dead that PostgreSQL refuses to put back. `kind` is "" if unknown."""
        said = f"BadRow: this job could not be put back: {said_of(refused)}\n\n{error}"
        try:
            buried = await self.bury(connection, fence, "rescued", storable(said))
        except psycopg.errors.LockNotAvailable:
            return False  # the next look finds it again
        self._callbacks.bad_row(fence[0], kind or buried or "", "rescue", said_of(refused))
        return buried is not None

    async def ended_before(self, connection: TrioConnection[Any], outcomes: Sequence[Outcome]) -> set[int]:
        """The ids of those whose attempt has ended under its own session: an earlier report of it was written."""
        # Without the archive a completed job leaves no trace: its absence has to be enough.
        traceless = ["true" if not self.keep and o.kind == "completed" else "false" for o in outcomes]
        cursor = await connection.execute(
            statement("settled", self._schema), {**fences([o.claim for o in outcomes]), "traceless": texts(traceless)}
        )
        return {job_id for (job_id,) in await cursor.fetchall()}


def completions(completed: Sequence[Outcome], *, keep: bool) -> dict[str, Any]:
    """The completing half of complete_and_claim.sql."""
    return {
        **fences([o.claim for o in completed]),
        "results": texts([o.result for o in completed]),
        "keep": keep,
    }


def in_lock_order(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    """By id and attempt: the order in which every report locks its rows, so that no two can deadlock."""
    return sorted(outcomes, key=_place_of) if len(outcomes) > 1 else outcomes


def _place_of(outcome: Outcome) -> tuple[int, int]:
    return outcome.claim.id, outcome.claim.attempt


def accepted_of(completed: Sequence[Outcome], tail: Sequence[Any]) -> Settlement:
    """The settlement of completions, from the last row of complete_and_claim.sql: its `args` has the ids of the accepted ones,
    or NULL if all were."""
    *_, accepted_ids, _ = tail
    if accepted_ids is None:
        return Settlement(list(completed), [], [])
    accepted = {int(i) for i in accepted_ids.strip("{}").split(",") if i}
    return Settlement(
        [o for o in completed if o.claim.id in accepted], [o for o in completed if o.claim.id not in accepted], []
    )


def _three_ways(outcomes: Sequence[Outcome], written: Mapping[int, bool]) -> Settlement:
    """`written` has the returned ids: True is written, False is ours but locked. The others are refused."""
    settlement = Settlement([], [], [])
    for outcome in outcomes:
        match written.get(outcome.claim.id):
            case None:
                settlement.refused.append(outcome)
            case True:
                settlement.accepted.append(outcome)
            case False:
                settlement.again.append(outcome)
    return settlement


async def forgive_crash(connection: TrioConnection[Any], schema: str, lost: Sequence[Claim]) -> None:
    """Takes back the crash that a rescue counted against jobs of this worker: it lives, so they did not kill it."""
    if lost:
        marks = {"expired": EXPIRED, "came_back": _CAME_BACK}
        # The answer to the beat or report is valid whatever becomes of this: a lock on the ledger once kept every beat back.
        with suppress(psycopg.OperationalError, *ROWS_FAULT):
            await connection.execute(statement("forgive_crash", schema), {**fences(lost), **marks}, prepare=True)
