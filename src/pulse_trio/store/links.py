"""The reserved connections of one worker, and the place where PostgreSQL's errors become ours.

There are several, so that no loop of the worker can delay another: a heartbeat must not wait for a claim, nor a small report
for the megabytes of another job's result. Statements of handlers in `job.transaction()` use a pool (transactions.py).
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg

from ..errors import DatabaseUnavailable, SchemaError, StatementRefused, UsageError
from ..postgres import UNBOUNDED, Link, TrioConnection, configure_session
from .disk_full import disk_full
from .lineage import Lineage
from .rows import ROWS_FAULT, caused_by_a_row, said_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from .callbacks import Callbacks
    from .leases import Leases

# One plan for each statement, whatever the table held when the plan was made: a generic plan made on an empty table turned
# the claim into a sequential scan (123 ms at 100k rows), and a custom plan costs 0.5 ms of planning each time.
WORKER_SETTINGS: dict[str, str] = UNBOUNDED | {
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
# The watchdog reads the BRIN index, which needs a bitmap scan.
WATCHDOG_SETTINGS = WORKER_SETTINGS | {"enable_bitmapscan": "on", "enable_indexscan": "off"}

START_PATIENCE = 10.0
"""Seconds that each step of a worker's start may take at least, however short its leases are: it holds none yet."""
UPKEEP_PATIENCE = 60.0
"""Seconds that a statement of the watchdog may take: nothing waits for it."""


class WorkerLink(Link):
    """One connection of a worker. `settings` are those of its session; a server that is silent for `patience` seconds is given
    up."""

    def __init__(
        self, dsn: str, name: str, settings: dict[str, str], lineage: Lineage, patience: float, callbacks: Callbacks
    ) -> None:
        async def configure(connection: TrioConnection[Any]) -> None:
            await lineage.check(connection, partial(configure_session, connection, settings))

        super().__init__(
            dsn, name=name, configure=configure, statement_timeout=patience, application_name=f"pulse-trio {name}"
        )
        # Together with the patience this is less than a third of the lease, however short that is: the worker notices a silent
        # server in time for another try.
        self.cancel_timeout = min(Link.cancel_timeout, patience * 0.75)
        self._schema = lineage.schema
        self._callbacks = callbacks

    @asynccontextmanager
    async def using(
        self, *, patience: float | None = None, job_id: int | None = None
    ) -> AsyncGenerator[TrioConnection[Any]]:
        """The connection, for this task alone. PostgreSQL errors that can occur at any time are raised as our own exceptions.
        `job_id`: the job of which a row is told that makes the statement fail.

        Raises:
            DatabaseUnavailable: the server is away, or refused for a reason that may pass; try again.
            SchemaError: the schema is gone or was changed.
        """
        try:
            async with self.use(timeout=patience) as connection:
                try:
                    yield connection
                except psycopg.errors.ReadOnlySqlTransaction:
                    # A primary that became a standby keeps its connections: the next connection looks for the primary again.
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
            # Statements are written so that no row makes them fail. If one does, the loop that sent the statement tries again
            # later: a row never ends a worker.
            of = "" if job_id is None else f"job {job_id}: "
            self._callbacks.bad_row(None, "", self.name, f"{of}{said_of(error)}")
            raise DatabaseUnavailable(f"{self.name}: {of}a row made a statement fail: {str(error).strip()}") from error
        except (psycopg.OperationalError, psycopg.InternalError) as error:
            # Full disk, deadlock, read-only after a failover, too many connections: try again, with backoff.
            raise DatabaseUnavailable(f"{self.name}: {disk_full(error) or str(error).strip()}") from error


class Links:
    """The reserved connections of one worker, each made when it is first used."""

    def __init__(self, dsn: str, direct_dsn: str, schema: str, leases: Leases, callbacks: Callbacks) -> None:
        def link(
            name: str, settings: dict[str, str], *, to: str = dsn, patience: float = leases.patience
        ) -> WorkerLink:
            return WorkerLink(to, name, settings, self.lineage, patience, callbacks)

        self.lineage = Lineage(schema)
        self.claims = link("claims", WORKER_SETTINGS)
        self.settles = link("settles", WORKER_SETTINGS)
        # For large results: one that takes seconds to send delays no other statement.
        self.results = link("results", WORKER_SETTINGS)
        # Through a pooler a statement waits while the transactions of handlers hold all of its connections to the server, and a
        # lease must not end meanwhile: heartbeats go around it where they can.
        self.beats = link("beats", WORKER_SETTINGS, to=direct_dsn or dsn, patience=leases.beat_patience)
        # A rescue is a few statements in one transaction. A watchdog that is stopped or cut off between them would keep the
        # rows of its rescue locked until TCP gave up, two hours by default: the server ends its transaction instead.
        limit = f"{max(1000, round(leases.patience * 1000))}ms"
        self.watch = link("watchdog", WATCHDOG_SETTINGS | {"idle_in_transaction_session_timeout": limit})
        # Listening, and the lock that announces an idle worker, need a session of their own, which a pooler does not give.
        self.listen = link("listener", UNBOUNDED, to=direct_dsn or dsn)
        self.idle = link("session", UNBOUNDED, to=direct_dsn) if direct_dsn else self.claims
        self.progress = link("progress", WORKER_SETTINGS)
        # Used by workers with durable handlers.
        self.history = link("history", WORKER_SETTINGS)
        # Used by workers that have metrics, so that asking for figures delays nothing else.
        self.figures = link("metrics", WORKER_SETTINGS)
        # For running parents: a large fan-out may not delay an outcome or a line of a history.
        self.trees = link("trees", WORKER_SETTINGS)

    @property
    def schema(self) -> str:
        """Where pulse-trio's tables are."""
        return self.lineage.schema

    @property
    def start_patience(self) -> float:
        """Seconds that a statement may take while the worker starts."""
        return max(START_PATIENCE, self.claims.statement_timeout)

    async def aclose(self) -> None:
        """Closes every connection."""
        for link in (
            self.claims,
            self.settles,
            self.results,
            self.beats,
            self.watch,
            self.listen,
            self.idle,
            self.progress,
            self.history,
            self.figures,
            self.trees,
        ):
            await link.aclose()


@contextmanager
def refused_rows(doing: str) -> Generator[None]:
    """Raises `StatementRefused` for errors that a row can cause, so that a claim loop can go on with the other rows."""
    try:
        yield
    except psycopg.Error as error:
        if caused_by_a_row(error):
            raise StatementRefused(f"{doing}: {str(error).strip()}") from error
        raise


@contextmanager
def missing_privileges(what: str) -> Generator[None]:
    """Raises `DatabaseUnavailable` where this role may not do `what`: another worker may be allowed to, so this one goes on."""
    try:
        yield
    except (psycopg.errors.InsufficientPrivilege, UsageError) as error:
        raise DatabaseUnavailable(f"this worker cannot {what}: {error}") from error
