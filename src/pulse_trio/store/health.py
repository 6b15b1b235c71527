"""Reads the health of a database in a few statements. doctor/ decides what the readings mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..grants import HELPERS
from .arrays import numbers, texts
from .family import StuckTrees, stuck
from .needed import missing_rights
from .operations import Query, workers
from .queues import PausedKind, paused_kinds
from .watching import MOST, Failing, listed, recent

if TYPE_CHECKING:
    from datetime import datetime

    from .operations import Operation, WorkerRecord
    from .queues import QueueRecord

LONG = 300.0
"""An open transaction is reported after this many seconds."""
PATIENCE = 10.0
"""Seconds that each look may take."""
SCHEDULES = 100
"""How many schedules are looked at, as by the metrics."""
MOST_LEFT = 10_000
"""How many jobs of stale workers are counted."""
MOST_AHEAD = 1_000
"""How many moments of each kind that cannot be are counted."""
MOST_FAILED = 2_000
"""How many of the newest jobs that did not complete are asked whether they owe a clean-up."""
LIFT = (
    "Take it back (DROP POLICY ... ON ...; ALTER TABLE ... NO FORCE ROW LEVEL SECURITY; on tables but job_archive, attempt"
    " and cancellation also DISABLE ROW LEVEL SECURITY), or let the workers' roles and the schema's owner pass: ALTER ROLE ..."
    " BYPASSRLS"
)
"""The advice about row-level security that is not ours."""


@dataclass(frozen=True, slots=True)
class Server:
    """The server, and this role's rights there. `clock` is its time in seconds since 1970; `missing` has the rights that a
    worker's role needs and this one lacks; `operates` says whether it may do what an operator does."""

    version: int
    version_name: str
    clock: float
    standby: bool
    fsync: bool
    synchronous_commit: str
    autovacuum: bool
    autovacuum_of_jobs: bool
    role: str
    sees_others: bool
    missing: list[str]
    may_maintain: bool
    read_only: bool = False
    """Whether `default_transaction_read_only` is on for this role."""
    operates: bool = False
    open_functions: int = 0
    """How many functions every role may call that should be for those alone to which they are granted."""
    open_tables: int = 0
    """On how many tables, views and sequences every role has a right."""


@dataclass(frozen=True, slots=True)
class Storage:
    """The live table and the archive. `cold` are indexes that keep claims and beats from being HOT updates; `maintained_ago` in
    seconds, None if the archive was never maintained."""

    updates: int
    hot_updates: int
    cold: list[str]
    lease_index: bool
    missing_days: int
    astray: bool
    maintained_ago: float | None


@dataclass(frozen=True, slots=True)
class Holder:
    """Something that keeps dead rows from being cleaned up; `age` in seconds, None if it is not known."""

    what: str
    age: float | None


@dataclass(frozen=True, slots=True)
class PutBack:
    """A kind that workers claim and release again: how often within the hour, how many jobs, and the first of them. `why`: the
    beginning of what the last worker said; None where it does not know the kind."""

    kind: str
    times: int
    jobs: int
    first: int
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A job whose worker died with it too often: `since` when (None: not known), and `age` in seconds. `deaths` of its
    `crashes` were seen in a process of its own. `host` and `pid` are those of the process that runs it; None while it waits."""

    id: int
    queue: str
    kind: str
    since: datetime | None
    age: float
    crashes: int
    deaths: int
    host: str | None
    pid: int | None


@dataclass(frozen=True, slots=True)
class Left:
    """How many jobs stale workers still hold (at most `MOST_LEFT` are counted), and in how many seconds the last
    of their leases runs out; None for no job."""

    jobs: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Owing:
    """How many of the newest `MOST_FAILED` jobs that did not complete owe their clean-up, and the newest of these."""

    jobs: int
    newest: int | None


@dataclass(frozen=True, slots=True)
class Ahead:
    """Moments of one kind that cannot be, because the server's clock was ahead when they were written: of a `rate`, a
    `worker`'s sign of life, a `lease` or a `schedule`. How many there are (at most `MOST_AHEAD` are counted), the names of
    five, and in how many seconds the last comes."""

    what: str
    count: int
    names: list[str]
    seconds: float


@dataclass(frozen=True, slots=True)
class RowSecurity:
    """A table with row-level security that is not pulse-trio's own: `policies` are those that pulse-trio does not know.
    `hides`: rows may be hidden from this role, or (`forced`) from the schema's functions."""

    table: str
    policies: list[str]
    forced: bool
    hides: bool

    def __str__(self) -> str:
        how = "forced on its owner" if self.forced else "enabled"
        return f"{self.table} ({', '.join(f'policy {name}' for name in self.policies) or how})"


@dataclass(frozen=True, slots=True)
class Health:
    """All readings."""

    server: Server
    storage: Storage
    holders: list[Holder] = field(default_factory=list[Holder])
    put_back: list[PutBack] = field(default_factory=list[PutBack])
    workers: list[WorkerRecord] = field(default_factory=list["WorkerRecord"])
    queues: list[QueueRecord] = field(default_factory=list["QueueRecord"])
    quarantined: list[Quarantined] = field(default_factory=list[Quarantined])
    ids_behind: int | None = 0
    """How many ids the sequence is behind the highest job; None if this role may not ask."""
    row_security: list[RowSecurity] = field(default_factory=list[RowSecurity])
    stuck: StuckTrees = field(default_factory=StuckTrees)
    """Trees that do not go on by themselves."""
    failing: list[Failing] = field(default_factory=list[Failing])
    rescued: int = 0
    """Attempts of workers that died, within the last quarter of an hour; at least so many."""
    late: dict[str, float] = field(default_factory=dict[str, float])
    """For how many seconds each schedule is late; the first hundred by name."""
    left: Left | None = None
    """What stale workers still hold; None if there is no such worker."""
    owing: Owing | None = None
    """Finished jobs that owe a clean-up; None if this role may not ask."""
    paused_kinds: list[PausedKind] = field(default_factory=list[PausedKind])
    ahead: list[Ahead] = field(default_factory=list[Ahead])


def server() -> Operation[Server]:
    """The server and its settings: one row, read quickly."""
    rows = yield Query("doctor_server", {"helpers": texts(HELPERS)}, PATIENCE)
    row = list(rows[0])
    row.insert(10, (yield from missing_rights()))
    return Server(*row)


def lockers() -> Operation[list[str]]:
    """Who has locked whole tables of the schema, in words."""
    rows = yield Query("doctor_lockers", {}, PATIENCE)
    return [row[0] for row in rows]


def health(known: Server) -> Operation[Health]:
    """The other readings; the queues are counted with the bounds of a page, if this role may. Raises `TookTooLong`."""
    rows = yield Query("doctor_storage", {}, PATIENCE)
    storage = Storage(*rows[0])
    rows = yield Query("doctor_holders", {"older": f"{LONG} s"}, PATIENCE)
    holders = [Holder(*row) for row in rows]
    rows = yield Query("doctor_put_back", {}, PATIENCE)
    put_back = [PutBack(*row) for row in rows]
    found = yield from workers()
    found_queues = [each.record for each in (yield from listed(MOST)).queues]
    behind: int | None = None
    ((may_count, may_ask, may_look, _),) = yield Query("doctor_may_ids", {}, PATIENCE)
    if may_count:
        behind = (yield Query("doctor_ids", {}, PATIENCE))[0][0]
    suspects = yield from quarantined()
    owing: Owing | None = None
    if may_ask:
        owing = Owing(*(yield Query("doctor_owing", {"most": MOST_FAILED}, PATIENCE))[0])
    hidden = yield from row_security()
    still = (yield from stuck()) if may_look else StuckTrees()
    lately = yield from recent(PATIENCE)
    rows = yield Query("metrics_schedules", {"most": SCHEDULES}, PATIENCE)
    late = {name: max(0.0, seconds) for name, seconds in rows}
    left: Left | None = None
    if stale := [worker.id for worker in found if worker.state == "stale"]:
        rows = yield Query("doctor_left", {"sessions": numbers(stale), "most": MOST_LEFT}, PATIENCE)
        left = Left(*rows[0])
    return Health(
        known,
        storage,
        holders,
        put_back,
        found,
        found_queues,
        suspects,
        behind,
        hidden,
        still,
        lately.failing,
        lately.rescued,
        late,
        left,
        owing,
        (yield from paused_kinds()),
        [Ahead(*row) for row in (yield Query("doctor_ahead", {"most": MOST_AHEAD}, PATIENCE))],
    )


def row_security() -> Operation[list[RowSecurity]]:
    """Tables whose rows a foreign policy may hide."""
    rows = yield Query("row_security", {}, PATIENCE)
    return [RowSecurity(*row) for row in rows]


def quarantined(job_id: int | None = None) -> Operation[list[Quarantined]]:
    """The first 20 jobs that are in quarantine, or only the given job if it is."""
    rows = yield Query("quarantined", {"id": job_id}, PATIENCE)
    return [Quarantined(*row) for row in rows]
