"""What a worker does with the database: one method for each business operation.

Three reserved connections, so that none of these can hold up another: *claims* (and the completions that travel with
them), *settles*, and *beats*. The watchdog and the listener have their own where they run, and what handlers do in
`job.transaction()` has a pool (transactions.py). Every method raises
`DatabaseUnavailable` when its connection is lost or silent for too long; then what it sent may or may not have been done.

Sessions: a session id is 63 random bits, made at start and again whenever the claiming connection was lost, because a
server that failed over may hand out an attempt a second time. A claim keeps the session it was made under.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import psycopg
import trio

from ..errors import DatabaseUnavailable, SchemaError, StatementRefused, UsageError
from ..handlers import hooks_json
from ..jobs import Claim, Outcome, Progress
from ..migrate import check_versions
from ..observe import BadRow, JobDied, WorkerStale
from ..postgres import UNBOUNDED, Link, TrioConnection, configure_session, reconnect_delay
from ..sql import render, statement
from ..states import retry_delay, storable
from . import schedules
from .allowance import FIRST, LARGE, SMALL, Allowance
from .arrays import numbers, texts
from .disk_full import disk_full
from .finishing import finish_batches
from .health import LIFT, row_security
from .limits import Limited, limited_claims, limits_parameters
from .needed import missing_rights, refuse_missing
from .operations import run
from .rows import ROWS_FAULT, bury, each_alone, said_of
from .suspects import claim_suspect, due_suspects
from .sweeping import Found, Lap
from .transactions import FencedTransactions

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence

    from ..handlers import DeathHook, QueueLimits, Schedule

_ClaimedRow = tuple[int, int, int, int, int, str, str, str, str, str | None]

# One plan for each statement, whatever the table held when it was made: a generic plan from an empty table turned the claim
# into a seq scan (123 ms at 100k rows), a custom plan each time costs 0.5 ms of planning.
_WORKER_SETTINGS: dict[str, str] = UNBOUNDED | {
    "enable_indexscan": "on",
    "enable_indexonlyscan": "on",
    "enable_tidscan": "on",
    "enable_nestloop": "on",
    "enable_sort": "on",
    "enable_incremental_sort": "on",
    "enable_partition_pruning": "on",
    "from_collapse_limit": "8",
    "join_collapse_limit": "8",
    "geqo": "on",
    "geqo_threshold": "12",
    "max_parallel_workers_per_gather": "0",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "lock_timeout": "1s",
}
# The watchdog reads the BRIN index, which only a bitmap scan can.
_WATCHDOG_SETTINGS = _WORKER_SETTINGS | {"enable_bitmapscan": "on", "enable_indexscan": "off"}

_ANNOUNCED_SINGLY = 32
"""A worker of more queues says that it waits for all: each is a lock, and a connection's share of PostgreSQL's table of locks
is 64 by default."""

_ANNOUNCE_AGAIN = 1.0
"""Seconds until a worker that could not say that it waits, for a stranger held the lock, says it again."""

_START_TRIES = 5
"""Times that a statement of a worker's start is tried when deadlocks or serialization failures end it."""

_EXPIRED = "lease expired: the worker was gone or cut off"
_CAME_BACK = "lease expired: the worker was cut off or stopped, and came back"


class ClaimCursor(NamedTuple):
    """A place to claim from, and where to start in it: the greatest (run_at, id) it gave so far."""

    queue: str
    priority: int
    cursor_run_at: str = "-infinity"
    cursor_id: int = 0


class ClaimResult(NamedTuple):
    """What one exchange brought. `sent` is Trio's clock just before the statement went out: leases count from there."""

    claims: list[Claim]
    sent: float
    settlement: Settlement


class Settlement(NamedTuple):
    """Outcomes by what became of their report: written, refused (the lease was lost), or to be sent again (row locked)."""

    accepted: list[Outcome]
    refused: list[Outcome]
    again: list[Outcome]


class TooSlow(DatabaseUnavailable):
    """The database answers, but has not taken what was sent within `seconds`. `last`: it was given all the time there is."""

    def __init__(self, message: str, seconds: float, *, last: bool) -> None:
        super().__init__(message)
        self.seconds = seconds
        self.last = last


class Beat(NamedTuple):
    """One heartbeat's answer: renewed, or still ours but locked by another transaction. The rest is lost. Of those renewed,
    `cancelling` has the jobs whose cancellation was asked for, and the reason that was given."""

    sent: float
    renewed: frozenset[Claim]
    locked: frozenset[Claim]
    cancelling: Mapping[Claim, str | None] = MappingProxyType({})


class Rescue(NamedTuple):
    """Jobs put back on their queues, and jobs whose budget the lost attempt had used up."""

    rescued: int
    dead: int


class HandedBack(NamedTuple):
    """A rescue of what dead sessions held; `jobs` has the id and the kind of each."""

    rescued: int
    dead: int
    jobs: tuple[tuple[int, str], ...] = ()


_DECLARED = 10_000
"""Queues that a session names at most."""


def _row_caused(error: psycopg.Error) -> bool:
    # XX: what PostgreSQL calls internal, damaged data for one.
    return isinstance(error, ROWS_FAULT) or (error.sqlstate or "").startswith("XX")


@contextmanager
def _refusals(doing: str) -> Generator[None]:
    """Raises `StatementRefused` for what a row can cause, so that a claimer can go on with the others."""
    try:
        yield
    except psycopg.Error as error:
        if _row_caused(error):
            raise StatementRefused(f"{doing}: {str(error).strip()}") from error
        raise


_Write = Callable[[TrioConnection[Any], list[Outcome]], Awaitable[Settlement]]


class WorkerStore:
    """The store of one worker. `declared` are the queues of its handlers; `lease` in seconds, and in `leases` those of queues
    that have one of their own; after `stale` seconds without a sign of life it counts as stale, 0 for its lease; `keep` False
    deletes completed jobs instead of archiving them; `on_session` is told each new session before it claims, `on_bad_row`
    each row that cannot be worked with as it stands, `on_suspect` the id, kind and crashes of each job that a rescue of this
    store's put in quarantine. `session` is the first session's id, chosen by whoever claims for this worker."""

    def __init__(
        self,
        dsn: str,
        *,
        direct_dsn: str = "",
        schema: str = "pulse",
        lease: float = 30.0,
        leases: Mapping[str, float] = MappingProxyType({}),
        queues: Sequence[str] | None = None,
        declared: Sequence[str] = (),
        concurrency: int = 100,
        keep: bool = True,
        stale: float = 0.0,
        unfit_patience: float = 86400.0,
        on_session: Callable[[int], None] | None = None,
        on_bad_row: Callable[[BadRow], None] | None = None,
        on_suspect: Callable[[int, str, int], None] | None = None,
        on_death: Callable[[JobDied], None] | None = None,
        session: int | None = None,
    ) -> None:
        self._schema = schema
        self._unfit_patience = f"{unfit_patience} s"
        self._lease = f"{lease} s"
        self._lease_by_queue = {queue: f"{own} s" for queue, own in leases.items()}
        # None where no queue has a lease of its own: then a claim looks nothing up.
        self._leases = json.dumps(self._lease_by_queue) if leases else None
        # A silent connection is given up before it could cost a lease: two tries of a beat fit between its due time and
        # the lease's end.
        self._patience = lease / 6
        self._silence = lease / 2
        self._longest = lease * 2
        self._lone_patience = self._silence
        self._claim_allowance = Allowance(self._patience / 5)
        self._keep = keep
        self._on_session = on_session
        self._on_bad_row = on_bad_row
        self._on_suspect = on_suspect
        self._on_death = on_death
        self._first_session = session
        self._identity = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": version("pulse-trio"),
            "queues": list(queues) if queues is not None else None,
            "declared": list(declared)[:_DECLARED],
            "concurrency": concurrency,
            "lease": self._lease,
            "stale": f"{stale} s" if stale else None,
        }
        self._claims = self._link(dsn, "claims", _WORKER_SETTINGS)
        self._settles = self._link(dsn, "settles", _WORKER_SETTINGS)
        # Made with the first large result: what takes seconds to send holds up nothing else.
        self._results = self._link(dsn, "results", _WORKER_SETTINGS)
        # Two tries of a beat fit between its due time and the end of the shortest lease.
        self._beats = self._link(dsn, "beats", _WORKER_SETTINGS, patience=min([lease, *leases.values()]) / 6)
        # A rescue is a few statements in one transaction. A watchdog that is stopped or cut off between them would keep what it
        # was about to rescue locked until TCP gave up, two hours by default: the server ends its transaction instead.
        limit = f"{max(1000, round(self._patience * 1000))}ms"
        self._watch = self._link(dsn, "watchdog", _WATCHDOG_SETTINGS | {"idle_in_transaction_session_timeout": limit})
        # What needs a session of its own, where a pooler gives none: to listen, to say that one waits, to have a turn.
        self._listen = self._link(direct_dsn or dsn, "listener", UNBOUNDED)
        self._sessions_link = self._link(direct_dsn, "session", UNBOUNDED) if direct_dsn else self._claims
        self.transactions = FencedTransactions(dsn, schema=schema, concurrency=concurrency, keep=keep)
        self._progress = self._link(dsn, "progress", _WORKER_SETTINGS)
        self._generation = 0
        self._server = ""
        self._idle_generation = 0
        self._announce_again = math.inf
        self._announced = {"queues": None if queues is None or len(queues) > _ANNOUNCED_SINGLY else texts(queues)}
        self.session = 0
        self.epoch_offset = 0.0
        """By how much the database's clock (seconds since 1970) is ahead of Trio's, or a little more; from the session on."""
        self._sessions: list[int] = []
        self.bounded = False
        """Whether the last exchange brought fewer jobs than were asked for because these are large."""
        self.refused_slots: list[tuple[ClaimCursor, str]] = []
        """Slots that the last exchange could not claim from, for what a row of theirs holds, and what PostgreSQL said."""
        self.limited: list[str] = []
        """Queues to claim from with `claim_limited`, as the last sweep (`slots`) found them."""
        self.paused_kinds: list[str] = []
        """Kinds that are not claimed, as the last sweep found them."""
        self._paused_kinds = texts(())
        self.swept_at = "-infinity"
        """When the last sweep was, by the database's clock: as a cursor."""
        self.sweep = Lap()
        """How far the last sweep came."""
        self.keyed_due_in: float | None = None
        """Seconds until the next scheduled job with a key comes due, as the last sweep found it; None if there is none."""
        self.suspect_due_in: float | None = None
        """Seconds until a job that must run alone is due, as the last sweep found it; None if there is none."""

    def _lease_of(self, queue: str) -> str:
        return self._lease_by_queue.get(queue, self._lease)

    def _link(self, dsn: str, name: str, settings: dict[str, str], *, patience: float | None = None) -> Link:
        patience = self._patience if patience is None else patience

        async def configure(connection: TrioConnection[Any]) -> None:
            await configure_session(connection, settings)

        link = Link(
            dsn, name=name, configure=configure, statement_timeout=patience, application_name=f"pulse-trio {name}"
        )
        # With the patience less than a third of the lease, however short that is: a silent server must be noticed in time to
        # try again.
        link.cancel_timeout = min(Link.cancel_timeout, patience * 0.75)
        return link

    async def aclose(self) -> None:
        """Closes every connection."""
        for link in (
            self._claims,
            self._settles,
            self._results,
            self._beats,
            self._watch,
            self._listen,
            self._sessions_link,
            self._progress,
        ):
            await link.aclose()

    @asynccontextmanager
    async def _using(self, link: Link, *, patience: float | None = None) -> AsyncGenerator[TrioConnection[Any]]:
        """A link's connection, and the boundary: what PostgreSQL may say at any time leaves here as one of our errors."""
        try:
            async with link.use(timeout=patience) as connection:
                try:
                    yield connection
                except psycopg.errors.ReadOnlySqlTransaction:
                    # A primary that became a standby keeps its connections: ask again who the primary is.
                    connection.abort()
                    raise
        except (
            psycopg.errors.UndefinedTable,
            psycopg.errors.InvalidSchemaName,
            psycopg.errors.UndefinedFunction,
        ) as error:
            raise SchemaError(
                f"The schema {self._schema!r} is gone or was changed: {error}. See: pulse-trio migrate"
            ) from error
        except ROWS_FAULT as error:
            # What statements make of rows is meant to fail for none. Where it does all the same, the loop that asked tries
            # again, later: no row ends a worker.
            self._tell_bad_row(None, "", link.name, said_of(error))
            raise DatabaseUnavailable(f"{link.name}: a row stands in the way: {str(error).strip()}") from error
        except (psycopg.OperationalError, psycopg.InternalError) as error:
            # Full disk, deadlock, read-only after a failover, too many connections: try again, with backoff.
            raise DatabaseUnavailable(f"{link.name}: {disk_full(error) or str(error).strip()}") from error

    # Sessions

    async def check_schema(self) -> None:
        """Raises `SchemaError` unless the schema is exactly what this version needs, and this role may work with it."""
        async with self._using(self._claims) as connection:
            found = await (
                await connection.execute(
                    "SELECT to_regclass(format('%%I.migration', %s::text)) IS NOT NULL", [self._schema]
                )
            ).fetchone()
            if not found or not found[0]:
                check_versions({}, self._schema)
            rows = await (
                await connection.execute(
                    render('SELECT version, checksum FROM :"schema".migration', self._schema).encode()
                )
            ).fetchall()
            check_versions(dict(rows), self._schema)
            missing = await run(connection, self._schema, missing_rights())
            row = await (await connection.execute("SELECT current_user::text")).fetchone()
            hiding = [table for table in await run(connection, self._schema, row_security()) if table.hides]
        refuse_missing(missing, row[0] if row else "", self._schema)
        if hiding:
            # Hidden rows give no error: jobs would wait for ever, and finished ones be claimed again.
            raise SchemaError(
                f"Row-level security that is not pulse-trio's own may hide rows of {', '.join(map(str, hiding))} in the schema "
                f"{self._schema!r} from this worker. {LIFT}"
            )

    async def open_session(self) -> int:
        """Registers this worker under a new session id."""
        async with self._using(self._claims) as connection:
            await self._ensure_session(connection)
        # Now, and not with the first beat and report: a server that is full by then would cost the jobs that run their leases.
        for link in (self._beats, self._settles):
            async with self._using(link):
                pass
        return self.session

    async def _ensure_session(self, connection: TrioConnection[Any]) -> None:
        if connection.pooled:
            await self._notice_another_server(connection)
        if self._generation == self._claims.generation:
            return
        session, self._first_session = self._first_session or secrets.randbits(63) or 1, None
        if self._on_session is not None:
            # Before it can claim anything: a supervisor must know whose jobs to hand back.
            self._on_session(session)
        sent = trio.current_time()
        cursor = await _in_spite_of_others(
            connection, statement("open_session", self._schema), {"session": session, **self._identity}
        )
        self._set_clock(sent, await cursor.fetchall())
        self._generation = self._claims.generation
        self.session = session
        self._sessions.append(session)

    async def _notice_another_server(self, connection: TrioConnection[Any]) -> None:
        # A pooler keeps our connection when it goes on with another server.
        row = await (await connection.execute("SELECT pg_postmaster_start_time()::text")).fetchone()
        if row is not None and row[0] != self._server:
            self._server = row[0]
            self._generation = 0

    def _set_clock(self, sent: float, rows: Sequence[tuple[float]]) -> None:
        # As if the answer had been given when the question was sent: rather ahead than behind, by a round trip at most.
        if rows:
            self.epoch_offset = rows[-1][0] - sent

    async def touch(self, running: int, *, draining: bool) -> None:
        """Shows that this worker lives, and what it runs."""
        async with self._using(self._beats) as connection:
            sent = trio.current_time()
            cursor = await connection.execute(
                statement("touch_sessions", self._schema),
                {"session": self.session, "sessions": self._sessions, "running": running, "draining": draining},
                prepare=True,
            )
            self._set_clock(sent, await cursor.fetchall())

    async def end_sessions(self) -> None:
        """Says that this worker is gone, for good."""
        async with self._using(self._beats) as connection:
            await connection.execute(statement("end_sessions", self._schema), {"sessions": self._sessions})

    # Claiming and settling

    async def complete_and_claim(
        self, limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome] = ()
    ) -> ClaimResult:
        """Claims up to `limit` jobs from `slots` and archives completed ones, in one statement and one commit."""
        try:
            async with self._using(self._claims, patience=self._claim_patience) as connection:
                return await self._exchange_or_unlocked(connection, limit, slots, completed)
        except DatabaseUnavailable:
            self._claim_allowance.lost()
            raise

    @property
    def _claim_patience(self) -> float | None:
        # One job is what is left to ask for when the network is slow: it gets more time. Its lease counts from before.
        return self._silence if self._claim_allowance.halved else None

    async def _exchange_or_unlocked(
        self, connection: TrioConnection[Any], limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome]
    ) -> ClaimResult:
        await self._ensure_session(connection)
        self.refused_slots.clear()
        try:
            return await self._exchange(connection, limit, slots, completed)
        except psycopg.errors.LockNotAvailable:
            # One of the completed rows is locked by somebody: that job is late, the others and the claim are not.
            settlement = await self._singly_if_refused(connection, self._complete_unlocked, list(completed))
        except psycopg.Error as error:
            if not _row_caused(error):
                raise
            settlement = Settlement([], [], [])
            if completed:
                settlement = await self._singly_if_refused(connection, self._complete, list(completed))
        try:
            exchange = await self._exchange(connection, limit, slots, ())
        except psycopg.Error as error:
            if not _row_caused(error):
                raise
            exchange = await self._claim_slot_by_slot(connection, limit, slots)
        return exchange._replace(settlement=settlement)

    async def _claim_slot_by_slot(
        self, connection: TrioConnection[Any], limit: int, slots: Sequence[ClaimCursor]
    ) -> ClaimResult:
        """From the first slot that gives something: those that were refused before it are in `refused_slots`.

        No further, for what is claimed must be started before anything else is awaited."""
        for slot in slots:
            try:
                exchange = await self._exchange(connection, limit, [slot], ())
            except psycopg.Error as error:
                if not _row_caused(error):
                    raise
                self.refused_slots.append((slot, str(error).strip()))
            else:
                if exchange.claims:
                    return exchange
        return ClaimResult([], trio.current_time(), Settlement([], [], []))

    async def _exchange(
        self, connection: TrioConnection[Any], limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome]
    ) -> ClaimResult:
        # In id order: the order in which every settler takes its row locks.
        ordered = sorted(completed, key=_by_id) if len(completed) > 1 else completed
        session = self.session
        parameters = self._report(ordered) | {
            "results": texts([o.result for o in ordered]),
            "keep": self._keep,
            "session": session,
            "lease": self._lease,
            "leases": self._leases,
            "limit": limit,
            "size": self._claim_allowance.size,
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
        # A worker may hold 10,000 claims of few queues and kinds: one text for each of these.
        same = sys.intern
        claims = [
            Claim(id_, attempt, most, failures, priority, run_at, same(queue), same(kind), args, options, session)
            for id_, attempt, most, failures, priority, run_at, queue, kind, args, options in cast(
                "list[_ClaimedRow]", rows
            )
        ]
        settlement = Settlement(list(ordered), [], []) if tail[8] is None else _sort_out(ordered, tail[8])
        if limit:
            self.bounded = self._was_bounded(claims, limit, sent)
        return ClaimResult(claims, sent, settlement)

    def _was_bounded(self, claims: Sequence[Claim], limit: int, sent: float) -> bool:
        """Whether the allowance kept jobs from being claimed; learns from how long the answer took."""
        seconds = trio.current_time() - sent
        allowance = self._claim_allowance
        if (not claims or len(claims) == limit) and seconds < self._patience / 5 and allowance.size >= FIRST:
            return False
        size = _size_of(claims)
        # Characters here, bytes there, up to four for one: who asks again in vain has lost a round trip.
        bounded = len(claims) < limit and size >= allowance.size // 4
        allowance.took(size, seconds)
        return bounded

    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement:
        """Writes outcomes with their fence. `unsure`: an earlier try of these may have been done without our hearing of it;
        an attempt that ended under our own session then counts as accepted."""
        completed = [o for o in outcomes if o.kind == "completed" and not o.cancelling]
        cancelling = [o for o in outcomes if o.kind == "completed" and o.cancelling]
        others = [o for o in outcomes if o.kind != "completed"]
        if any(is_large(outcome) for outcome in outcomes):
            return await self._settle_large(outcomes, cancelling, completed, others, unsure=unsure)
        async with self._using(self._settles) as connection:
            return await self._settle(connection, cancelling, completed, others, unsure=unsure)

    async def _settle_large(
        self,
        outcomes: Sequence[Outcome],
        cancelling: list[Outcome],
        completed: list[Outcome],
        others: list[Outcome],
        *,
        unsure: bool,
    ) -> Settlement:
        """The same over a connection of its own. One alone is given ever more time: its lease is kept by beats meanwhile."""
        patience = self._lone_patience if len(outcomes) == 1 else self._patience
        writing = math.inf
        try:
            async with self._using(self._results, patience=patience) as connection:
                # The database answers: if what follows takes too long, that is because of its size.
                if unsure:
                    done = await self._settled(connection, outcomes)
                else:
                    await connection.ping()
                    done = set[int]()
                writing = trio.current_time()
                left = [[o for o in part if o.claim.id not in done] for part in (cancelling, completed, others)]
                settlement = await self._settle(connection, *left, unsure=unsure)
                return settlement._replace(accepted=settlement.accepted + [o for o in outcomes if o.claim.id in done])
        except DatabaseUnavailable as error:
            if trio.current_time() - writing < patience * 0.8:
                raise
            last = len(outcomes) == 1 and patience >= self._longest
            if len(outcomes) == 1:
                self._lone_patience = min(self._longest, patience * 2)
            raise TooSlow(str(error), patience, last=last) from error

    async def _settle(
        self,
        connection: TrioConnection[Any],
        cancelling: list[Outcome],
        completed: list[Outcome],
        others: list[Outcome],
        *,
        unsure: bool,
    ) -> Settlement:
        parts: list[Settlement] = []
        if cancelling:
            parts.append(await self._singly_if_refused(connection, self._complete_unlocked, cancelling))
        if completed:
            parts.append(await self._singly_if_refused(connection, self._complete, completed))
        if others:
            parts.append(await self._singly_if_refused(connection, self._fail, others))
        accepted, refused, again = ([o for part in parts for o in part[i]] for i in range(3))
        if unsure and refused:
            done = await self._settled(connection, refused)
            accepted += [o for o in refused if o.claim.id in done]
            refused = [o for o in refused if o.claim.id not in done]
        await self._absolve(connection, [o.claim for o in refused])
        return Settlement(accepted, refused, again)

    def _tell_bad_row(self, job_id: int | None, kind: str, during: str, error: str) -> None:
        if self._on_bad_row is not None:
            self._on_bad_row(BadRow(job_id, kind, during, error))

    async def _singly_if_refused(
        self, connection: TrioConnection[Any], write: _Write, outcomes: list[Outcome]
    ) -> Settlement:
        """One value that PostgreSQL will not store must not hold up its batch: find it, and write its failure instead."""

        async def of_all(some: Sequence[Outcome]) -> Settlement:
            return await write(connection, list(some))

        async def alone(outcome: Outcome, error: psycopg.Error) -> Settlement:
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
            self._tell_bad_row(claim.id, claim.kind, f"report of {outcome.kind}", said_of(error))
            fence = (claim.id, claim.attempt, claim.session)
            buried = await self._bury(connection, fence, _noted(outcome.kind), said)
            return Settlement([], [outcome], []) if buried is None else Settlement([outcome], [], [])

        parts = await each_alone(outcomes, of_all, alone)
        return Settlement(*([o for part in parts for o in part[i]] for i in range(3)))

    async def _complete(self, connection: TrioConnection[Any], completed: Sequence[Outcome]) -> Settlement:
        try:
            return (await self._exchange(connection, 0, (), completed)).settlement
        except psycopg.errors.LockNotAvailable:
            return await self._complete_unlocked(connection, completed)

    async def _complete_unlocked(self, connection: TrioConnection[Any], completed: Sequence[Outcome]) -> Settlement:
        cursor = await connection.execute(
            statement("complete_unlocked", self._schema),
            self._report(completed) | {"results": texts([o.result for o in completed]), "keep": self._keep},
            prepare=True,
        )
        return _three_ways(completed, await cursor.fetchall())

    async def _fail(self, connection: TrioConnection[Any], outcomes: Sequence[Outcome]) -> Settlement:
        cursor = await connection.execute(
            statement("fail", self._schema),
            self._report(outcomes)
            | {
                "outcomes": texts([o.kind for o in outcomes]),
                "delays": numbers([o.delay for o in outcomes]),
                "errors": texts([o.error for o in outcomes]),
                "patience": self._unfit_patience,
            },
            prepare=True,
        )
        rows = await cursor.fetchall()
        self._tell_deaths(rows)
        return _three_ways(outcomes, rows)

    async def _bury(
        self, connection: TrioConnection[Any], fence: tuple[int, int, int], outcome: str, error: str
    ) -> str | None:
        """Makes one running job dead whatever its row holds; returns its kind, None when that cannot be."""
        buried = await bury(connection, self._schema, fence, outcome, error)
        if buried is None:
            return None
        kind, queue = buried
        if self._on_death is not None:
            self._on_death(JobDied(fence[0], kind, queue, fence[1], outcome, error[:4000]))
        return kind

    def _tell_deaths(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Tells of the jobs that `fail.sql` made dead, from the rows that it gave back."""
        if self._on_death is None:
            return
        for job_id, end, _, _, queue, kind, error, attempt, cause in rows:
            if end == "dead":
                self._on_death(JobDied(job_id, kind, queue, attempt, cause, error))

    async def _settled(self, connection: TrioConnection[Any], outcomes: Sequence[Outcome]) -> set[int]:
        traceless = ["true" if not self._keep and o.kind == "completed" else "false" for o in outcomes]
        cursor = await connection.execute(
            statement("settled", self._schema), self._report(outcomes) | {"traceless": texts(traceless)}
        )
        return {row[0] for row in await cursor.fetchall()}

    async def _absolve(self, connection: TrioConnection[Any], lost: Sequence[Claim]) -> None:
        """This worker lives: what was rescued from it did not kill it."""
        if lost:
            marks = {"expired": _EXPIRED, "came_back": _CAME_BACK}
            # What the beat or the report said stands, whatever becomes of this: a lock on the ledger kept every beat back.
            with suppress(psycopg.OperationalError, *ROWS_FAULT):
                await connection.execute(statement("forgive_crash", self._schema), _fences(lost) | marks, prepare=True)

    def _report(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        return _fences([o.claim for o in outcomes])

    # Slots

    async def slots(self, queues: Sequence[str] | None, told: Sequence[str] = ()) -> list[Found]:
        """One sweep: (queue, priority) pairs that have live jobs, paused queues left out; of all queues when `queues` is None.

        All pairs up to 256, with more only those with a due job among the next 256, and those of the queues in `told`
        (`sweep.whole` and `sweep.ended` say which). Queues with limits, or with due jobs that have keys, are not among them,
        but in `limited` afterwards, and paused kinds in `paused_kinds`."""
        async with self._using(self._claims) as connection:
            with _refusals("looking for due jobs"):
                cursor = await connection.execute(
                    statement("slots", self._schema), self.sweep.parameters(queues, told), prepare=True
                )
            rows = await cursor.fetchall()
        *rows, (_, _, self.suspect_due_in, self.keyed_due_in, self.paused_kinds, self.swept_at, at) = rows
        self.sweep.swept(at)
        self._paused_kinds = texts(self.paused_kinds)
        self.limited = [queue for queue, priority, *_ in rows if priority is None]
        return [Found(*row[:3]) for row in rows if row[1] is not None and (self.sweep.whole or row[3] <= 0)]

    # Quarantine

    async def suspects_are_due(self, queues: Sequence[str] | None) -> bool:
        """Whether a job is due that has to run in quarantine."""
        async with self._using(self._claims) as connection:
            with _refusals("looking for jobs in quarantine"):
                return bool(await due_suspects(connection, self._schema, queues))

    async def claim_suspect(
        self, queues: Sequence[str] | None, *, session: int | None = None, fresh: bool = True
    ) -> ClaimResult:
        """Claims one job whose worker died with it too often, for the process that has (or will have) `session`; without one,
        for this worker itself. `fresh`: that process has not run any other job."""
        async with self._using(self._claims) as connection:
            await self._ensure_session(connection)
            with _refusals("claiming a job in quarantine"):
                claims, sent = await claim_suspect(
                    connection,
                    self._schema,
                    self.session if session is None else session,
                    self._lease_of,
                    queues,
                    self._paused_kinds,
                    fresh=fresh,
                )
        return ClaimResult(claims, sent, Settlement([], [], []))

    async def report_crash(self, claim: Claim, seen: str, *, alone: bool) -> bool | None:
        """The process that ran `claim` has died, and this worker saw how: `seen`. `alone`: nothing else had ever run in it, so
        that this counts towards the job's `crash_limit`. Returns whether it was written: False if another attempt owns the job,
        or it is settled; None if its row is locked, and the report is to be sent again."""
        async with self._using(self._settles) as connection:
            try:
                cursor = await connection.execute(
                    statement("fail", self._schema),
                    _fences([claim])
                    | {
                        "outcomes": texts(["crashed" if alone else "rescued"]),
                        "delays": numbers([0]),
                        "errors": texts([storable(seen)]),
                        "patience": self._unfit_patience,
                    },
                    prepare=True,
                )
                rows = await cursor.fetchall()
                self._tell_deaths(rows)
                written = None if rows and rows[0][1] is None else bool(rows)
            except ROWS_FAULT as refused:
                said = f"BadRow: this job could not be put back: {said_of(refused)}\n\n{seen}"
                fence = (claim.id, claim.attempt, claim.session)
                written = await self._bury(connection, fence, "rescued", storable(said)) is not None
                self._tell_bad_row(claim.id, claim.kind, "rescue", said_of(refused))
            await connection.execute(statement("end_sessions", self._schema), {"sessions": [claim.session]})
        return written

    async def claim_limited(self, queue: str, limit: int, turns: str = "{}") -> Limited:
        """Claims up to `limit` jobs of a queue that has limits or keys: no more than these allow, over all workers.

        `turns` is what the last call for this queue returned."""
        allowance = self._claim_allowance
        try:
            async with self._using(self._claims, patience=self._claim_patience) as connection:
                await self._ensure_session(connection)
                limited = await self._claim_limited(connection, queue, limit, turns)
        except DatabaseUnavailable:
            allowance.lost()
            raise
        if limited.claims:
            allowance.took(_size_of(limited.claims), trio.current_time() - limited.sent)
        return limited

    async def _claim_limited(self, connection: TrioConnection[Any], queue: str, limit: int, turns: str) -> Limited:
        session = self.session
        parameters = {
            "queue": queue,
            "session": session,
            "lease": self._lease_of(queue),
            "limit": limit,
            "paused_kinds": self._paused_kinds,
            "turns": turns,
            "size": self._claim_allowance.size,
        }
        sent = trio.current_time()
        with _refusals(f"claiming from the queue {queue!r}"):
            cursor = await connection.execute(statement("claim_limited", self._schema), parameters, prepare=True)
        return limited_claims(await cursor.fetchall(), session, sent)

    async def declare_limits(self, limits: Sequence[QueueLimits]) -> None:
        """Writes down what handlers say of their queues: the newest deploy wins."""
        async with self._using(self._claims) as connection:
            for one in limits:
                await _in_spite_of_others(connection, statement("limit_queue", self._schema), limits_parameters(one))

    async def declare_deaths(self, hooks: Sequence[DeathHook], others: Sequence[str]) -> None:
        """Writes down which job is enqueued when one of a kind dies; `others` are this worker's kinds without such a hook."""
        async with self._scheduling(patience=60) as connection:
            parameters = {"session": self.session, "hooks": hooks_json(list(hooks)), "others": texts(others)}
            await _in_spite_of_others(connection, statement("declare_death_hooks", self._schema), parameters)

    async def prune_permits(self) -> None:
        """Removes permits and buckets that count no more."""
        async with self._using(self._claims) as connection:
            await connection.execute(statement("prune_permits", self._schema), {}, prepare=True)

    # Leases

    async def beat(self, claims: Sequence[Claim]) -> Beat:
        """Renews the leases of running jobs, all in one statement."""
        async with self._using(self._beats) as connection:
            sent = trio.current_time()
            cursor = await connection.execute(
                statement("beat", self._schema),
                _fences(claims) | {"lease": self._lease, "leases": self._leases},
                prepare=True,
            )
            rows = cast("list[tuple[int, bool, str | None]]", await cursor.fetchall())
            if len(rows) < len(claims):
                ours = {place for place, *_ in rows}
                await self._absolve(connection, [claim for place, claim in enumerate(claims) if place not in ours])
        return Beat(
            sent,
            renewed=frozenset([claims[place] for place, renewed, _ in rows if renewed]),
            locked=frozenset([claims[place] for place, renewed, _ in rows if not renewed]),
            cancelling={claims[place]: reason or None for place, _, reason in rows if reason is not None},
        )

    async def rescue(self, limit: int = 1000) -> Rescue:
        """Sends expired leases through the retry-or-dead-letter path, due at once."""
        return (await self._rescue("expired", {"limit": limit}, _EXPIRED))[0]

    async def rescue_sessions(self, sessions: Sequence[int], limit: int = 1000) -> HandedBack:
        """The same for all that dead sessions hold, before their leases run out."""
        parameters = {"sessions": list(sessions), "limit": limit}
        (rescued, dead), found = await self._rescue("held_by", parameters, "the worker process died")
        if not found:
            # Nothing is left to hand back: it has gone, and is not to be shown as stale until its lease of life has run out.
            async with self._using(self._watch, patience=60) as connection:
                await connection.execute(statement("end_sessions", self._schema), {"sessions": list(sessions)})
        return HandedBack(rescued, dead, tuple((row[0], row[3]) for row in found))

    async def _rescue(
        self, source: str, parameters: dict[str, Any], error: str
    ) -> tuple[Rescue, list[tuple[Any, ...]]]:
        async with self._using(self._watch, patience=60) as connection, connection.transaction():
            found = await (
                await connection.execute(statement(source, self._schema), parameters, prepare=True)
            ).fetchall()
            if not found:
                return Rescue(0, 0), []
            parts = await each_alone(
                found,
                lambda rows: self._fail_rescued(connection, rows, error),
                lambda row, refused: self._bury_rescued(connection, row, error, refused),
            )
        ends = {job_id: end for part in parts for job_id, end in part.items()}
        ended = list(ends.values())
        moved = [row for row in found if row[0] in ends]
        return Rescue(rescued=ended.count("retryable"), dead=ended.count("dead")), moved

    async def _fail_rescued(
        self, connection: TrioConnection[Any], found: Sequence[tuple[Any, ...]], error: str
    ) -> dict[int, str | None]:
        """What became of each of these, by its id. In a savepoint: a row that makes it fail must not undo other rescues."""
        ids, attempts, sessions, *_ = zip(*found, strict=True)
        async with connection.transaction():
            await connection.execute(
                statement("refund", self._schema),
                {"ids": numbers(ids), "sessions": numbers(set(sessions))},
                prepare=True,
            )
            cursor = await connection.execute(
                statement("fail", self._schema),
                {
                    "ids": numbers(ids),
                    "attempts": numbers(attempts),
                    "sessions": numbers(sessions),
                    "outcomes": texts(["rescued"] * len(ids)),
                    "delays": numbers([0] * len(ids)),
                    "errors": texts([error] * len(ids)),
                    "patience": self._unfit_patience,
                },
                prepare=True,
            )
            rows = await cursor.fetchall()
        self._tell_deaths(rows)
        if self._on_suspect is not None:
            for job_id, _, kind, crashes, *_ in rows:
                if kind is not None:
                    self._on_suspect(job_id, kind, crashes)
        return {row[0]: row[1] for row in rows if row[1] is not None}

    async def _bury_rescued(
        self, connection: TrioConnection[Any], row: tuple[Any, ...], error: str, refused: psycopg.Error
    ) -> dict[int, str | None]:
        job_id, attempt, session, *_ = row
        said = f"BadRow: this job could not be put back: {said_of(refused)}\n\n{error}"
        kind = await self._bury(connection, (job_id, attempt, session), "rescued", said)
        self._tell_bad_row(job_id, kind or "", "rescue", said_of(refused))
        return {} if kind is None else {job_id: "dead"}

    async def stale_workers(self) -> list[WorkerStale]:
        """Workers that have become stale, and that no watchdog has told of since they were heard of last; not this one."""
        async with self._using(self._watch, patience=60) as connection:
            cursor = await connection.execute(
                statement("stale_sessions", self._schema), {"own": numbers(self._sessions)}, prepare=True
            )
            return [WorkerStale(*row) for row in await cursor.fetchall()]

    async def maintain(self, retention: float) -> bool:
        """Makes the archive's coming days and drops those older than `retention` seconds, unless another worker has just
        done so; deletes a bounded part of what single queues keep for a shorter time. Returns whether there is more."""
        async with self._using(self._watch, patience=60) as connection:
            try:
                cursor = await connection.execute(statement("maintain", self._schema), {"retention": f"{retention} s"})
                row = await cursor.fetchone()
                return row is not None and bool(row[0])
            except psycopg.errors.InsufficientPrivilege as error:
                # Not the end of a worker: its jobs need no maintenance. The watchdog says it, and tries again.
                raise DatabaseUnavailable(
                    f"this role may not maintain the schema ({error}); as its owner: "
                    f"GRANT EXECUTE ON FUNCTION {self._schema}.upkeep(interval) TO ..."
                ) from error

    # Progress

    async def write_progress(self, said: Sequence[Progress]) -> None:
        """Writes what handlers said last, of those attempts that still run."""
        # A connection of its own, made when a handler first says something: a lock on that table holds up nothing else.
        async with self._using(self._progress) as connection:
            await connection.execute(
                statement("progress", self._schema),
                _fences([s.claim for s in said])
                | {"fractions": numbers([s.fraction for s in said]), "messages": texts([s.message for s in said])},
                prepare=True,
            )

    # Batches

    async def finish_batches(self) -> list[int] | None:
        """Finishes batches whose jobs all have, and enqueues their callback jobs. Returns their ids; None when no batch is
        closed and unfinished."""
        async with self._using(self._watch, patience=60) as connection:
            return await finish_batches(connection, self._schema)

    async def prune_results(self, retention: float) -> None:
        """Forgets batches that finished more than `retention` seconds ago, and what was said of jobs as old."""
        async with self._using(self._watch, patience=60) as connection:
            for name in ("prune_batches", "prune_progress"):
                await connection.execute(statement(name, self._schema), {"retention": f"{retention} s"})

    # Cancelling

    async def requested(self, job_ids: Sequence[int]) -> dict[tuple[int, int, int], str | None]:
        """Of these jobs, the running attempts whose cancellation was asked for, each with the reason that was given."""
        async with self._using(self._settles) as connection:
            cursor = await connection.execute(
                statement("cancel_requested", self._schema), {"ids": numbers(job_ids)}, prepare=True
            )
            return {(row[0], row[1], row[2]): row[3] for row in await cursor.fetchall()}

    async def running_fences(self, job_ids: Sequence[int]) -> set[tuple[int, int, int]]:
        """The attempts of these jobs that run now, by id, attempt and session."""
        async with self._using(self._settles) as connection:
            cursor = await connection.execute(
                statement("running_fences", self._schema), {"ids": numbers(job_ids)}, prepare=True
            )
            return {(row[0], row[1], row[2]) for row in await cursor.fetchall()}

    async def record_delivered(self, claims: Sequence[Claim]) -> None:
        """Notes in the ledger that the cancellations of these jobs have reached their handlers."""
        async with self._using(self._settles) as connection:
            fences = _fences(claims)
            del fences["sessions"]
            await connection.execute(statement("cancel_delivered", self._schema), fences, prepare=True)

    async def stack_questions(self, sessions: Sequence[int]) -> list[tuple[int, int, int]]:
        """The open questions to these sessions where a job is: (request, session, job id)."""
        try:
            async with self._using(self._settles) as connection:
                cursor = await connection.execute(
                    statement("stack_questions", self._schema), {"sessions": numbers(sessions)}
                )
                return cast("list[tuple[int, int, int]]", await cursor.fetchall())
        except psycopg.errors.InsufficientPrivilege as error:
            # A role from before this function: not the end of a worker. See: pulse-trio grants
            raise DatabaseUnavailable(f"this worker cannot answer: {error}") from error

    async def answer_stack(self, request: int, session: int, answer: str) -> None:
        """Answers a request where a job is; `answer` in at most 64 KiB."""
        parameters = {"request": request, "session": session, "answer": answer}
        try:
            async with self._using(self._settles) as connection:
                await connection.execute(statement("stack_answer", self._schema), parameters)
        except psycopg.errors.InsufficientPrivilege as error:
            # A role from before this function: not the end of a worker. See: pulse-trio grants
            raise DatabaseUnavailable(f"this worker cannot answer: {error}") from error

    async def close_cancellations(self) -> None:
        """Ends the ledger rows of jobs that ended while their cancellation was under way."""
        async with self._using(self._watch, patience=60) as connection:
            await connection.execute(statement("cancel_close", self._schema), {}, prepare=True)

    # Schedules

    async def declare_schedules(self, declared: Sequence[Schedule]) -> None:
        """Writes what this worker's code declares; what is there and unchanged stays as it is."""
        async with self._scheduling() as connection, connection.transaction():
            await run(connection, self._schema, schedules.declare(declared, self.session))

    async def next_schedule(self) -> float | None:
        """Seconds until the first occurrence of any schedule (below 0: it has come); None if there is none."""
        async with self._scheduling() as connection:
            cursor = await connection.execute(statement("schedule_next", self._schema), {}, prepare=True)
            ((seconds,),) = await cursor.fetchall()
            return seconds

    async def fire_schedules(self) -> tuple[list[schedules.Fired], list[schedules.Broken]]:
        """Fires the occurrences that have come and that no other worker is firing, each with its job in one transaction."""
        async with self._scheduling(patience=60) as connection, connection.transaction():
            return await schedules.fire(connection, self._schema)

    async def prune_fires(self, retention: float) -> None:
        """Forgets the occurrences fired more than `retention` seconds ago (10,000 at a time)."""
        async with self._scheduling(patience=60) as connection:
            await connection.execute(statement("schedule_prune", self._schema), {"retention": f"{retention} s"})

    @asynccontextmanager
    async def _scheduling(self, *, patience: float | None = None) -> AsyncGenerator[TrioConnection[Any]]:
        try:
            async with self._using(self._watch, patience=patience) as connection:
                yield connection
        except OSError as error:
            # No file descriptor or no memory for a time zone's file: it may be there at the next try.
            raise DatabaseUnavailable(f"this worker cannot fire schedules now: {error}") from error
        except (psycopg.errors.InsufficientPrivilege, UsageError) as error:
            # Not the end of a worker: another may fire. The scheduler says it, and tries again.
            raise DatabaseUnavailable(f"this worker cannot fire schedules: {error}") from error

    # Waking

    async def announce_idle(self) -> None:
        """From now on producers of this worker's queues notify: see wake() in the schema. Ends with `withdraw_idle` or the
        connection."""
        link = self._sessions_link
        async with self._using(link) as connection:
            if self._idle_generation != link.generation:
                # Through a pooler nobody can be told: this worker waits for its poll.
                self._announce_again = math.inf
                if not connection.pooled:
                    try:
                        await connection.execute(
                            statement("announce_idle", self._schema), self._announced, prepare=True
                        )
                    except psycopg.errors.LockNotAvailable:
                        # A stranger holds that lock. Producers notify while it is held, whoever holds it; when it is let go
                        # they would not, so this is tried again.
                        self._announce_again = trio.current_time() + _ANNOUNCE_AGAIN
                self._idle_generation = link.generation

    async def withdraw_idle(self) -> None:
        """Producers need not notify any more: this worker asks for itself."""
        link = self._sessions_link
        async with self._using(link) as connection:
            if self._idle_generation == link.generation:
                self._idle_generation = 0
                if not connection.pooled:
                    await connection.execute(statement("withdraw_idle", self._schema), self._announced, prepare=True)

    @property
    def idle(self) -> bool:
        """Whether producers were told to notify, and still believe it."""
        if trio.current_time() >= self._announce_again:
            self._idle_generation = 0
        return self._idle_generation != 0 and self._idle_generation == self._sessions_link.generation

    async def listen(self, on_notify: Callable[[str], None]) -> None:
        """Calls `on_notify(queue)` for each wake-up, and once with "" when it begins to listen. Ends only by raising, when the
        connection is lost or answers nothing (asked every half of the lease)."""
        async with self._using(self._listen, patience=math.inf) as connection:
            if connection.pooled:
                raise DatabaseUnavailable(
                    "listener: this connection goes through a pooler, which hears no notifications: jobs start at the next "
                    "poll. Give the database's own address as direct_dsn (--direct-dsn) to have them start at once"
                )
            await connection.execute(render('LISTEN :"schema"', self._schema).encode())
            on_notify("")
            while True:
                async for notify in connection.notifies(timeout=self._silence):
                    on_notify(notify.payload)
                # Nobody may be there any more: a network that forgot this connection tells nobody, and keepalives are answered
                # by whatever stands between.
                with trio.move_on_after(self._patience) as asked:
                    await connection.ping()
                if asked.cancelled_caught:
                    connection.abort()
                    raise DatabaseUnavailable(f"listener: the database did not answer within {self._patience:g} s")


async def _in_spite_of_others(
    connection: TrioConnection[Any], query: bytes, parameters: Mapping[str, Any]
) -> psycopg.AsyncCursor[Any]:
    """One statement of a worker's start, begun anew when PostgreSQL ends it in favour of another transaction. Every loop of a
    worker tries again by itself; a start does not."""
    for failures in range(_START_TRIES - 1):
        try:
            return await connection.execute(query, parameters)
        except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
            await trio.sleep(reconnect_delay(failures))
    return await connection.execute(query, parameters)


def size_of(outcome: Outcome) -> int:
    """Characters of what is written of it."""
    return len(outcome.result or "") + len(outcome.error or "")


def _size_of(claims: Sequence[Claim]) -> int:
    """As complete_and_claim.sql counts it, but in characters."""
    return sum([max(SMALL, len(claim.args)) for claim in claims])


def is_large(outcome: Outcome) -> bool:
    """Whether its report goes apart from the others."""
    return outcome.result is not None and len(outcome.result) > LARGE


def _noted(kind: str) -> str:
    """How an attempt that is made dead is noted: a completion that could not be written has failed."""
    return "failed" if kind == "completed" else kind


def _by_id(outcome: Outcome) -> int:
    return outcome.claim.id


def _fences(claims: Iterable[Claim]) -> dict[str, Any]:
    claims = list(claims)
    return {
        "ids": numbers([c.id for c in claims]),
        "attempts": numbers([c.attempt for c in claims]),
        "sessions": numbers([c.session for c in claims]),
    }


def _sort_out(outcomes: Sequence[Outcome], accepted_ids: str) -> Settlement:
    accepted = {int(i) for i in accepted_ids.strip("{}").split(",") if i}
    return Settlement(
        [o for o in outcomes if o.claim.id in accepted], [o for o in outcomes if o.claim.id not in accepted], []
    )


def _three_ways(outcomes: Sequence[Outcome], rows: Sequence[tuple[Any, ...]]) -> Settlement:
    """Splits by the rows that came back: (id, truthy, ...) was written, (id, falsy) is ours but locked, the rest is refused."""
    written = {row[0] for row in rows if row[1]}
    locked = {row[0] for row in rows if not row[1]}
    return Settlement(
        [o for o in outcomes if o.claim.id in written],
        [o for o in outcomes if o.claim.id not in written and o.claim.id not in locked],
        [o for o in outcomes if o.claim.id in locked],
    )
