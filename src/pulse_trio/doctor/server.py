"""Judges the server: its version, its settings, its clock, and what this role may do there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import TookTooLong, UsageError
from ..postgres.dsn import insecure
from ..store.operations import is_refusal
from ..text import count_of, duration
from .findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..errors import PulseTrioError
    from ..store.health import Server

OLDEST, NEWEST = 14, 18
"""The oldest and the newest PostgreSQL version that is tested."""
CLOCK = 2.0
"""Seconds by which this machine's clock may differ from the server's without a warning."""


def judge_line(dsn: str | None) -> Iterator[Finding]:
    """Whether the server's certificate is checked, if it is on another machine."""
    if dsn is not None and (mode := insecure(dsn)) is not None:
        yield Finding(
            "warning",
            "network",
            f"the server is on another machine and sslmode is {mode}: an attacker on the network can pose as the server",
            "Add sslmode=verify-full to the address (and sslrootcert=system, or the file of the authority that signed its "
            "certificate).",
        )


def judge_failure(error: PulseTrioError, said: str, lockers: Sequence[str]) -> Finding:
    """The finding about an examination that ended with an error, which is `said` so. `lockers`: who has locked tables."""
    if lockers:
        do = f"{' '.join(lockers)} Wait for that, or end it as said."
    elif isinstance(error, TookTooLong):
        do = "The tables are large, or the server is busy (pg_stat_activity shows with what): run it again."
    elif isinstance(error, UsageError) and is_refusal(error):
        do = "Run it again as a role with more rights (pulse-trio grants)."
    elif isinstance(error, UsageError):
        do = "A row or a setting that this version does not expect is in the way, whatever rights the role has: report it."
    else:
        do = "Run it again."
    return Finding("error", "looking", said, do)


def judge_pooler(*, pooled: bool) -> Iterator[Finding]:
    """Findings about the connection to the server."""
    if pooled:
        yield Finding(
            "warning",
            "pooler",
            "this connection goes through a pooler (PgBouncer): workers receive no notifications through it, and poll, and "
            "their heartbeats wait in it while open transactions hold all of its connections",
            "Give workers the database's own address too: --direct-dsn. Everything else works in transaction mode.",
        )


def judge_server(server: Server, *, difference: float, unsure: float) -> Iterator[Finding]:
    """Findings about the server. `difference`: its clock minus ours in seconds, give or take `unsure`."""
    yield _version(server)
    if server.standby:
        yield Finding("error", "primary", "this is a standby, which takes no writes", "Give the primary's address.")
    if server.read_only:
        yield Finding(
            "error",
            "read-only",
            "default_transaction_read_only is on for this role or database: nothing can be enqueued or run",
            "Was it set for maintenance, or because a disk is full? Afterwards: ALTER DATABASE ... RESET "
            "default_transaction_read_only",
        )
    if server.fsync:
        yield Finding("ok", "durability", f"fsync on, synchronous_commit {server.synchronous_commit}")
    else:
        yield Finding("error", "durability", "fsync is off: a server crash may lose or corrupt jobs", "Set fsync = on.")
    if server.synchronous_commit == "off":
        yield Finding(
            "warning",
            "synchronous_commit",
            "it is off for this role: a confirmed enqueue may be lost when the server crashes",
            f"ALTER ROLE {server.role} SET synchronous_commit = on (workers set it for themselves).",
        )
    yield _clock(difference, unsure)
    yield from _rights(server)
    if not server.autovacuum or not server.autovacuum_of_jobs:
        where = "on the server" if not server.autovacuum else "for the table of live jobs"
        yield Finding(
            "error",
            "autovacuum",
            f"autovacuum is off {where}: claims become slower and slower",
            "Set autovacuum = on." if not server.autovacuum else "ALTER TABLE ... RESET (autovacuum_enabled).",
        )


def _version(server: Server) -> Finding:
    major = server.version // 10000
    name = f"PostgreSQL {server.version_name}"
    if major < OLDEST:
        return Finding("error", "version", f"{name} is too old", f"Use PostgreSQL {OLDEST} to {NEWEST}.")
    if major > NEWEST:
        what = f"{name} is newer than the newest version tested ({NEWEST})"
        return Finding("warning", "version", what, "Check for a newer pulse-trio.")
    return Finding("ok", "version", name)


def _clock(difference: float, unsure: float) -> Finding:
    off = abs(difference)
    if off - unsure <= CLOCK:
        return Finding("ok", "clock", f"this machine's differs from the server's by at most {duration(off + unsure)}")
    which = "behind" if difference > 0 else "ahead of"
    return Finding(
        "warning",
        "clock",
        f"this machine's clock is {duration(off)} {which} the server's: leases do not depend on it, but times that are "
        "computed here (run_at, ages in lists) are wrong",
        "Synchronise the clocks (chrony, systemd-timesyncd).",
    )


def _rights(server: Server) -> Iterator[Finding]:
    if server.open_functions:
        yield Finding(
            "error",
            "rights",
            f"every role that may use the schema may call {count_of(server.open_functions, 'function')} that it should not, to "
            "cancel and delete jobs, say: a restore without privileges leaves them so",
            "As the schema's owner, grant one of its roles its rights again: pulse-trio grants --worker ROLE",
        )
    if server.open_tables:
        yield Finding(
            "error",
            "rights",
            f"every role that may use the schema has rights on {count_of(server.open_tables, 'table')}, views and sequences "
            "counted, which nothing of pulse-trio gives it: default privileges of the owner's do, say",
            "As the schema's owner, grant one of its roles its rights again: pulse-trio grants --worker ROLE",
        )
    if server.missing and server.operates:
        yield Finding(
            "ok",
            "rights",
            f"the role {server.role} has an operator's rights; this login cannot see whether the workers' roles have theirs "
            f"(run doctor with a worker's login)",
        )
        return
    if server.missing:
        yield Finding(
            "error",
            "rights",
            f"the role {server.role} lacks {', '.join(server.missing[:4])}{' and more' if len(server.missing) > 4 else ''}",
            f"As the schema's owner: pulse-trio grants --worker {server.role} (for a role that does not run workers this is as "
            "it should be)",
        )
    if not server.may_maintain:
        yield Finding(
            "warning",
            "rights",
            f"the role {server.role} may not maintain the archive; at least one worker's role must",
            f"As the schema's owner: pulse-trio grants --worker {server.role}",
        )
    if not server.missing and server.may_maintain:
        yield Finding("ok", "rights", f"the role {server.role} has all rights of a worker")
