"""Claims jobs for one worker, and finds the queues that have some.

One statement archives the completions of the last batch and claims the next, so that both share one commit (one fsync). Queues
with limits, and jobs that killed their worker, have claiming statements of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import trio

from ..errors import DatabaseUnavailable
from ..sql import statement
from .allowance import FIRST, SMALL, Allowance
from .arrays import numbers, texts
from .claimed import ClaimCursor, ClaimResult, claims_of, cursors_after, in_slot_order
from .limits import limited_claims
from .links import refused_rows
from .outcomes import Settlement, accepted_of, completions, in_lock_order
from .rows import caused_by_a_row
from .suspects import claim_suspect, due_suspects
from .sweeping import Lap, Sweep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..jobs import Claim, Outcome
    from ..postgres import TrioConnection
    from .leases import Leases
    from .limits import Limited
    from .links import WorkerLink
    from .outcomes import OutcomeWriter
    from .sessions import Sessions


class Claims:
    """Sends one worker's claims, under its current session."""

    def __init__(
        self, link: WorkerLink, schema: str, leases: Leases, sessions: Sessions, writer: OutcomeWriter
    ) -> None:
        self._link = link
        self._schema = schema
        self._leases = leases
        self._sessions = sessions
        self._writer = writer
        self._allowance = Allowance(leases.patience / 5)
        self._lap = Lap()
        self._paused_kinds = texts(())
        """The paused kinds that the last sweep found: no claim takes their jobs."""

    async def complete_and_claim(
        self, limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome] = ()
    ) -> ClaimResult:
        """Claims up to `limit` jobs from `slots` and archives completed ones, in one statement and one commit.

        Raises `DatabaseUnavailable`: the completions may be written, and jobs may be claimed whose leases then run out.
        """
        try:
            async with self._link.using(patience=self._patience) as connection:
                await self._sessions.ensure(connection)
                try:
                    return await self._complete_and_claim(connection, limit, slots, completed)
                except psycopg.errors.LockNotAvailable:
                    # Another transaction holds one of the completed rows: that job's completion waits, the others and the claim
                    # do not.
                    settlement = await self._writer.complete_unlocked(connection, completed)
                except psycopg.Error as error:
                    if not caused_by_a_row(error):
                        raise
                    settlement = Settlement([], [], [])
                    if completed:
                        settlement = await self._writer.complete(connection, completed)
                claimed = await self._claim_in_spite_of_rows(connection, limit, slots)
                return claimed._replace(settlement=settlement)
        except DatabaseUnavailable:
            self._allowance.lost()
            raise

    @property
    def _patience(self) -> float | None:
        # On a slow network the allowance shrinks to one large job, which then gets more time. Its lease still starts when the
        # claim is sent.
        return self._leases.silence if self._allowance.halved else None

    async def _claim_in_spite_of_rows(
        self, connection: TrioConnection[Any], limit: int, slots: Sequence[ClaimCursor]
    ) -> ClaimResult:
        try:
            return await self._complete_and_claim(connection, limit, slots, ())
        except psycopg.Error as error:
            if not caused_by_a_row(error):
                raise
        # Slot by slot, up to the first that gives jobs: claimed jobs must be started before anything else is awaited.
        refused: list[tuple[ClaimCursor, str]] = []
        for slot in slots:
            try:
                claimed = await self._complete_and_claim(connection, limit, [slot], ())
            except psycopg.Error as error:
                if not caused_by_a_row(error):
                    raise
                refused.append((slot, str(error).strip()))
            else:
                if claimed.claims:
                    return claimed._replace(refused=refused)
        return ClaimResult([], trio.current_time(), Settlement([], [], []), refused=refused)

    async def _complete_and_claim(
        self, connection: TrioConnection[Any], limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome]
    ) -> ClaimResult:
        ordered = in_lock_order(completed)
        session = self._sessions.current
        parameters = completions(ordered, keep=self._writer.keep) | {
            "session": session,
            "lease": self._leases.default,
            "leases": self._leases.as_json,
            "limit": limit,
            "size": self._allowance.size,
            "queues": texts([s.queue for s in slots]),
            "priorities": numbers([s.priority for s in slots]),
            "cursor_run_ats": texts([s.cursor_run_at for s in slots]),
            "cursor_ids": numbers([s.cursor_id for s in slots]),
            "paused_kinds": self._paused_kinds,
        }
        sent = trio.current_time()
        cursor = await connection.execute(statement("complete_and_claim", self._schema), parameters, prepare=True)
        rows = await cursor.fetchall()
        tail = rows.pop()
        claims = in_slot_order(claims_of(rows, session), slots)
        bounded = self._was_bounded(claims, limit, sent) if limit else False
        return ClaimResult(claims, sent, accepted_of(ordered, tail), bounded, cursors_after(claims))

    def _was_bounded(self, claims: Sequence[Claim], limit: int, sent: float) -> bool:
        """Whether the allowance kept jobs from being claimed. Also learns from how long the answer took."""
        seconds = trio.current_time() - sent
        allowance = self._allowance
        if (not claims or len(claims) == limit) and seconds < self._leases.patience / 5 and allowance.size >= FIRST:
            return False
        size = _size_of(claims)
        # Here characters are counted, there bytes, up to four for one. Another claim in vain costs one round trip.
        bounded = len(claims) < limit and size >= allowance.size // 4
        allowance.took(size, seconds)
        return bounded

    async def claim_limited(self, queue: str, limit: int, turns: str = "{}", *, wait: float = 0.0) -> Limited:
        """Claims up to `limit` jobs of a queue that has limits or keys: no more than they allow, over all workers.

        `turns` is what the last call for this queue returned. One worker claims from a queue at a time: this call waits up to
        `wait` seconds for another's. Raises `StatementRefused` if a row of the queue makes PostgreSQL fail."""
        try:
            async with self._link.using(patience=self._patience) as connection:
                await self._sessions.ensure(connection)
                session = self._sessions.current
                parameters = {
                    "queue": queue,
                    "session": session,
                    "lease": self._leases.of(queue),
                    "limit": limit,
                    "paused_kinds": self._paused_kinds,
                    "turns": turns,
                    "size": self._allowance.size,
                    "wait": round(wait * 1000),
                }
                sent = trio.current_time()
                with refused_rows(f"claiming from the queue {queue!r}"):
                    cursor = await connection.execute(
                        statement("claim_limited", self._schema), parameters, prepare=True
                    )
                limited = limited_claims(await cursor.fetchall(), session, sent)
        except DatabaseUnavailable:
            self._allowance.lost()
            raise
        if limited.claims:
            self._allowance.took(_size_of(limited.claims), trio.current_time() - limited.sent)
        return limited

    async def claim_cleanups(self, queues: Sequence[str] | None, limit: int) -> ClaimResult:
        """Claims up to `limit` cancelled jobs that run once more to clean up, in `queues`, or in all if that is None. They wait
        for no limit. Jobs whose rows make PostgreSQL fail are left out: raises `StatementRefused` if there was no other."""
        try:
            async with self._link.using(patience=self._patience) as connection:
                await self._sessions.ensure(connection)
                session = self._sessions.current
                parameters = {
                    "queues": list(queues) if queues is not None else None,
                    "session": session,
                    "lease": self._leases.default,
                    # Never None: the function would not say what it has left out.
                    "leases": self._leases.as_json or "{}",
                    "limit": limit,
                    "size": self._allowance.size,
                }
                sent = trio.current_time()
                with refused_rows("claiming jobs that clean up"):
                    cursor = await connection.execute(statement("claim_cleanups", self._schema), parameters)
                claims = claims_of(await cursor.fetchall(), session)
        except DatabaseUnavailable:
            self._allowance.lost()
            raise
        if claims:
            self._allowance.took(_size_of(claims), trio.current_time() - sent)
        return ClaimResult(claims, sent, Settlement([], [], []))

    async def prune_permits(self) -> None:
        """Removes permits and buckets that no longer count towards a limit."""
        async with self._link.using() as connection:
            await connection.execute(statement("prune_permits", self._schema), {}, prepare=True)

    async def sweep(self, queues: Sequence[str] | None, notified: Sequence[str] = ()) -> Sweep:
        """Finds the slots that have jobs, in `queues`, or in all queues if that is None. Bounded; the next sweep goes on from
        where this one ended.

        `notified`: queues to look up wherever this sweep is. Raises `StatementRefused` if a row makes PostgreSQL fail."""
        async with self._link.using() as connection:
            with refused_rows("looking for due jobs"):
                cursor = await connection.execute(
                    statement("slots", self._schema), self._lap.parameters(queues, notified), prepare=True
                )
            sweep = self._lap.swept(await cursor.fetchall())
        self._paused_kinds = texts(sweep.paused_kinds)
        return sweep

    async def suspects_are_due(self, queues: Sequence[str] | None) -> bool:
        """Whether a job that has to run in quarantine is due."""
        async with self._link.using() as connection:
            with refused_rows("looking for jobs in quarantine"):
                return bool(await due_suspects(connection, self._schema, queues))

    async def claim_suspect(
        self, queues: Sequence[str] | None, *, session: int | None = None, fresh: bool = True
    ) -> ClaimResult:
        """Claims one job whose worker died with it too often, for the process that has (or will have) `session`; without
        `session`, for this worker itself. `fresh`: that process has not run any other job."""
        async with self._link.using() as connection:
            await self._sessions.ensure(connection)
            with refused_rows("claiming a job in quarantine"):
                claims, sent = await claim_suspect(
                    connection,
                    self._schema,
                    self._sessions.current if session is None else session,
                    self._leases.of,
                    queues,
                    self._paused_kinds,
                    fresh=fresh,
                )
        return ClaimResult(claims, sent, Settlement([], [], []))


def _size_of(claims: Sequence[Claim]) -> int:
    """The size that complete_and_claim.sql would count, but in characters."""
    return sum([max(SMALL, len(claim.args)) for claim in claims])
