"""What the tests of the store and of the worker share: a store with a session, and a window on its database."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import psycopg
import pytest
from psycopg.rows import DictRow, dict_row
from psycopg.sql import SQL, Identifier

from pulse_trio.client import request_by_name
from pulse_trio.jobs import Claim, Outcome
from pulse_trio.postgres.pins import pins_query
from pulse_trio.store import ClaimCursor, WorkerStore, new_jobs, operations
from support.connections import KeptLinks, lent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from typing import LiteralString, Self

    from pulse_trio.jobs import OutcomeKind
    from pulse_trio.testing.memory import MemoryStore


@asynccontextmanager
async def open_store(dsn: str, **options: Any) -> AsyncGenerator[WorkerStore]:
    """A worker's store with a session of its own."""
    store = WorkerStore(dsn, **options)
    try:
        await store.open_session()
        yield store
    finally:
        await store.aclose()


@asynccontextmanager
async def open_kept_store(dsn: str, kept: list[KeptLinks], **options: Any) -> AsyncGenerator[WorkerStore]:
    """The same with the connections of one that has ended, if there are any, and leaves its own."""
    links = kept.pop() if kept else KeptLinks()
    store = WorkerStore(dsn, **options)
    links.lend(store)
    try:
        await store.open_session()
        yield store
        await links.take(store)
        kept.append(links)
    finally:
        await store.aclose()


# Of this database alone: the other tests of the run share the server, and `pg_locks` shows their locks too.
LOCK_WAITED_FOR = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)
ENDS_WAITED_FOR = """
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


class Window:
    """A blocking connection that looks at one database, and tampers with it where a test must."""

    def __init__(self, dsn: str, *, schema: str = "pulse") -> None:
        self.dsn = dsn
        self.schema = schema
        self.connection = psycopg.Connection[DictRow].connect(dsn, autocommit=True, row_factory=dict_row)
        # An unquoted name in what tests send means the schema's.
        self.connection.execute(SQL("SET search_path = {}, public").format(Identifier(schema)))

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, query: str, *parameters: Any) -> list[dict[str, Any]]:
        """The rows of a query as dictionaries; none for a command."""
        cursor = self.connection.execute(cast("LiteralString", query), parameters or None)
        # Not `description`, which is None for rows without columns too: SELECT FROM must tell none from some.
        has_rows = cursor.pgresult is not None and cursor.pgresult.status == psycopg.pq.ExecStatus.TUPLES_OK
        return cursor.fetchall() if has_rows else []

    def value(self, query: str, *parameters: Any) -> Any:
        """The one value of a query."""
        (row,) = self.run(query, *parameters)
        (value,) = row.values()
        return value

    def pages(self, query: str | bytes, parameters: Sequence[Any] | Mapping[str, Any] | None = None) -> int:
        """The pages that a statement touches, those of the functions it calls included; what it writes is taken back.

        The least of a few times: a session that reads the catalogue first (its plan is new, or it missed messages while others
        changed tables) touches two to three thousand pages more, which are not the statement's.
        """
        explain = b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + (query.encode() if isinstance(query, str) else query)
        counts: list[int] = []
        for _ in range(3):
            with self.connection.transaction(force_rollback=True):
                (row,) = self.connection.execute(explain, parameters).fetchall()
            top = row["QUERY PLAN"][0]["Plan"]
            counts.append(top["Shared Hit Blocks"] + top["Shared Read Blocks"])
        return min(counts)

    def use_settings(self, settings: Mapping[str, str], *, local: bool = False) -> None:
        """Makes settings for the session, or the transaction, as a worker's session does: those that this server knows."""
        self.connection.execute(pins_query(settings, local=local))

    def publish_statistics(self) -> None:
        """Makes this session's statistics visible at once (else after a second). Skips the test where that cannot be."""
        if self.connection.info.server_version < 150000:
            pytest.skip("PostgreSQL 14 cannot publish its statistics at once")
        self.run("SELECT pg_stat_force_next_flush()")

    def enqueue(self, queue: str = "default", *, kind: str = "noop", args: Any = None, **options: Any) -> int:
        """Enqueues one job as a client would, on another connection than this; returns its id."""
        request = request_by_name(kind, args, queue=queue, **options)
        with lent(self.dsn) as connection:
            return operations.run_sync(connection, self.schema, new_jobs.enqueue(request)).id

    def enqueue_many(self, count: int, queue: str = "default", **options: Any) -> list[int]:
        """Enqueues `count` jobs in one batch; returns their ids."""
        requests = [request_by_name("noop", queue=queue, **options) for _ in range(count)]
        with lent(self.dsn) as connection:
            return [e.id for e in operations.run_sync(connection, self.schema, new_jobs.enqueue_many(requests))]

    def do(self, operation: operations.Operation[Any]) -> Any:
        """Runs one of the store's operations."""
        with lent(self.dsn) as connection:
            return operations.run_sync(connection, self.schema, operation)

    def job(self, job_id: int) -> dict[str, Any]:
        """The job as `pulse.jobs` shows it."""
        (row,) = self.run("SELECT * FROM jobs WHERE id = %s", job_id)
        return row

    def row(self, job_id: int) -> dict[str, Any] | None:
        """The row of the live table (times as text), with where it stands; None when the job is finished."""
        # As JSON, for Python's dates know no infinity.
        found = self.run("SELECT ctid, xmin::text, to_jsonb(job) AS row FROM job WHERE id = %s", job_id)
        return {"ctid": found[0]["ctid"], "xmin": found[0]["xmin"]} | found[0]["row"] if found else None

    def state(self, job_id: int) -> str:
        return self.job(job_id)["state"]

    def attempts(self, job_id: int) -> list[dict[str, Any]]:
        """The job's attempts as `pulse.attempts` shows them."""
        return self.run("SELECT * FROM attempts WHERE job_id = %s ORDER BY attempt, ended_at", job_id)

    def expire(self, *job_ids: int) -> None:
        """Lets the leases of these jobs run out, as if time had passed."""
        self.run("UPDATE job SET lease_until = now() - interval '1 s' WHERE id = ANY (%s) AND state = 2", list(job_ids))

    def make_due(self, *job_ids: int) -> None:
        """Lets the moment come at which these jobs are due."""
        self.run("UPDATE job SET run_at = now() - interval '1 ms' WHERE id = ANY (%s)", list(job_ids))


def replace_statements(monkeypatch: pytest.MonkeyPatch, replacement: Callable[[str, str], bytes]) -> None:
    """Lets every part of the store send what `replacement(name, schema)` gives."""
    for name, module in list(sys.modules.items()):
        if name.startswith("pulse_trio.store.") and hasattr(module, "statement"):
            monkeypatch.setattr(module, "statement", replacement)


async def claim(
    store: WorkerStore | MemoryStore, queue: str = "default", limit: int = 100, *, priority: int = 0
) -> list[Claim]:
    """What the store claims from one queue, without a cursor."""
    return (await store.complete_and_claim(limit, [ClaimCursor(queue, priority)])).claims


async def claim_one(store: WorkerStore | MemoryStore, queue: str = "default", *, priority: int = 0) -> Claim:
    """The one job of a queue."""
    (claimed,) = await claim(store, queue, 1, priority=priority)
    return claimed


async def sweep(store: WorkerStore, queues: Sequence[str] | None = None) -> list[ClaimCursor]:
    """The slots a worker would claim from, in its order."""
    found = (await store.sweep(queues)).found
    return [ClaimCursor(f.queue, f.priority) for f in sorted(found, key=lambda f: (-f.priority, f.queue))]


def end(claim: Claim, kind: OutcomeKind = "completed", **details: Any) -> Outcome:
    """An outcome of a claim."""
    return Outcome(claim, kind, **details)


async def complete_alone(begun: Any, outcome: Outcome) -> bool | None:
    """Writes the completion of a transaction without its COMMIT, as through a pooler; the block commits."""
    begun.connection.pooled = True
    return await begun.complete(outcome)


def forged(claim: Claim, **changes: Any) -> Claim:
    """The claim with one part changed."""
    return Claim(**{name: getattr(claim, name) for name in Claim.__struct_fields__} | changes)
