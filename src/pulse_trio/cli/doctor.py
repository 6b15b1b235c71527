"""`pulse-trio doctor`: checks everything that commonly goes wrong, and says what to do.

Collecting (store/health.py) and judging are separate: `diagnose` is a plain function over the collected facts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import click

from ..errors import PulseTrioError
from ..postgres.dsn import insecure
from ..store import health as looking
from ..text import count_of, duration, one_line
from .database import choose_database, open_store
from .faults import describe, our_error
from .options import dsn_option, json_option, schema_option
from .output import print_json, print_table
from .roots import advice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..store.health import Health, Quarantined, Server, Storage

OLDEST, NEWEST = 14, 18
"""The oldest and the newest PostgreSQL version that is tested."""
CLOCK = 2.0
"""Seconds by which this machine's clock may differ from the server's without a warning."""
BEHIND = 60.0
"""Seconds that a job may be due before the doctor reports it."""
RUNS_LONG = 3600.0
"""Seconds after which the doctor reports a running attempt."""
HOT_SHARE, ENOUGH = 0.9, 1000
"""The share of HOT updates below which something is wrong, and how many updates the share needs to be meaningful."""
MAINTAINED = 3 * 3600.0
"""Seconds after which a worker should have maintained the archive."""
STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. An error keeps jobs from running, or may lose them; a warning makes them slow or late."""

    level: Literal["ok", "warning", "error"]
    check: str
    what: str
    do: str | None = None


@click.command()
@schema_option
@dsn_option
@json_option
def doctor(schema: str | None, dsn: str | None, as_json: bool) -> int:
    """Check the database, its settings, the workers and the queues, and say what is wrong and what to do.

    Exit codes: 0 no errors (there may be warnings), 1 errors.
    """
    findings = examine(dsn, schema)
    wrong = any(finding.level == "error" for finding in findings)
    if as_json:
        print_json({"ok": not wrong, "findings": findings})
        return int(wrong)
    rows = [(f.level, f.check, f.what) for f in findings if f.do is None]
    print_table(("", "check", "finding"), rows, whole=("", "check"), styles=STYLES)
    for finding in findings:
        if finding.do is not None:
            click.echo(
                f"\n{click.style(finding.level, fg=STYLES[finding.level])}  {finding.check}: {one_line(finding.what)}"
            )
            click.echo(f"    {one_line(finding.do)}")
    return int(wrong)


def examine(dsn: str | None, schema: str | None) -> list[Finding]:
    """Every finding; only the first problem if it prevents further checks. Raises `ConfigurationError`, the caller's
    fault."""
    choice = choose_database(dsn)
    try:
        with open_store(dsn, schema) as client:
            asked = time.time()
            server = client.run(looking.server())
            took = time.time() - asked
            findings = [Finding("ok", "connection", f"{choice}, as {server.role}; the schema is current")]
            findings += judge_line(choice.dsn)
            findings += judge_pooler(pooled=client.pooled)
            findings += judge_server(server, difference=server.clock - asked - took / 2, unsure=took / 2)
            try:
                findings += diagnose(client.run(looking.health(server)))
            except PulseTrioError as error:
                findings.append(
                    Finding("error", "looking", describe(error), "Run it again as a role with more rights.")
                )
    except Exception as error:
        ours = our_error(error)
        if ours is None:
            raise
        return [Finding("error", "connection", describe(ours), "Nothing else can be checked before this works.")]
    return findings


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


def judge_pooler(*, pooled: bool) -> Iterator[Finding]:
    """Findings about the connection to the server."""
    if pooled:
        yield Finding(
            "warning",
            "pooler",
            "this connection goes through a pooler (PgBouncer): workers receive no notifications through it, and poll",
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


def diagnose(found: Health) -> Iterator[Finding]:
    """Findings about the workers, queues and tables."""
    yield from _storage(found.storage, found.server)
    if found.ids_behind:
        yield Finding(
            "error",
            "ids",
            f"the sequence of job ids is {found.ids_behind:,} behind the existing jobs (a restore without it?): new jobs get "
            f"the ids of finished ones, and enqueues fail where a live job has the id",
            "pulse-trio migrate moves it forward; or, as the schema's owner: SELECT pulse.mend_ids()",
        )
    for table in found.row_security:
        yield Finding(
            "error" if table.hides else "warning",
            "row-level security",
            f"row-level security other than pulse-trio's own may hide rows of {table}: jobs may wait forever, or run again",
            looking.LIFT,
        )
    yield from _holders(found)
    yield from _workers(found)
    yield from _queues(found)
    yield from (Finding("warning", "trees", *advice(stuck)) for stuck in found.stuck)
    for job in found.quarantined:
        since = f"for {duration(job.age)}" if job.since is not None else "since before this version"
        where = f"process {job.host}:{job.pid} runs it" if job.pid is not None else "it waits"
        yield Finding(
            "warning",
            "quarantine",
            f"job {job.id} ({job.kind}) of {job.queue} has been in quarantine {since}, after {crashes_of(job)}; {where}",
            f"To see why its workers died: pulse-trio jobs show {job.id}; to give it up: pulse-trio jobs cancel {job.id}",
        )
    if not found.quarantined:
        yield Finding("ok", "quarantine", "no job is in quarantine")
    for back in found.put_back:
        yield Finding(
            "warning",
            "unknown kind",
            f"{count_of(back.jobs, 'job')} of kind {back.kind!r} were released {back.times} times within the hour",
            f"Does a worker of its queue have that handler? See: pulse-trio jobs show {back.first}",
        )


def crashes_of(job: Quarantined) -> str:
    """The crash record of a job in quarantine."""
    crashes = "1 crash" if job.crashes == 1 else f"{job.crashes} crashes"
    return f"{crashes}, {job.deaths} of them seen to be its own"


def _storage(storage: Storage, server: Server) -> Iterator[Finding]:
    share = storage.hot_updates / storage.updates if storage.updates else 1.0
    if storage.cold:
        yield Finding(
            "error",
            "indexes",
            f"{', '.join(storage.cold)} cover columns that every claim and heartbeat writes: no such update can be HOT",
            "Drop these indexes; read pulse.jobs or pulse.workers instead.",
        )
    elif storage.updates >= ENOUGH and share < HOT_SHARE:
        yield Finding(
            "warning",
            "HOT updates",
            f"only {share:.0%} of {storage.updates:,} updates of live jobs were HOT",
            "Look for long transactions (below); was the table's fillfactor changed?",
        )
    else:
        yield Finding("ok", "HOT updates", f"{share:.0%} of {storage.updates:,} updates of live jobs")
    if server.version >= 160000 and not storage.lease_index:
        yield Finding(
            "warning",
            "lease index",
            "the watchdog has no index: the server was upgraded from a version in which it would have cost too much",
            "CREATE INDEX job_lease ON ...job USING brin (lease_until) WITH (pages_per_range = 16)",
        )
    late = storage.maintained_ago is None or storage.maintained_ago > MAINTAINED
    if storage.missing_days or storage.astray:
        what = f"{count_of(storage.missing_days, 'day')} of the next four have no partition"
        yield Finding(
            "warning",
            "archive",
            what if storage.missing_days else "finished jobs are in the default partition instead of their days'",
            "Run a worker whose role may maintain, or: SELECT pulse.maintain() (jobs in the default partition are deleted in "
            "time)",
        )
    elif late:
        ago = "never" if storage.maintained_ago is None else f"{duration(storage.maintained_ago)} ago"
        yield Finding(
            "warning",
            "archive",
            f"last maintained: {ago}",
            "A worker does it every hour; or: SELECT pulse.upkeep('7 days')",
        )
    else:
        yield Finding(
            "ok", "archive", f"maintained {duration(storage.maintained_ago or 0)} ago; the next days' partitions exist"
        )


def _holders(found: Health) -> Iterator[Finding]:
    for holder in found.holders:
        age = f"{duration(holder.age)} old" if holder.age is not None else "of unknown age"
        yield Finding(
            "warning",
            "old transaction",
            f"{holder.what} is {age}: the whole server keeps dead rows for it, and heartbeats of long jobs become more "
            f"expensive",
            "End it (pg_terminate_backend, ROLLBACK PREPARED, pg_drop_replication_slot).",
        )
    if not found.holders:
        unseen = (
            "" if found.server.sees_others else " that this role can see (GRANT pg_read_all_stats shows the others')"
        )
        yield Finding("ok", "old transactions", f"none older than {duration(looking.LONG)}{unseen}")


def _workers(found: Health) -> Iterator[Finding]:
    for worker in found.workers:
        if worker.state == "stale":
            yield Finding(
                "warning",
                "stale worker",
                f"{worker.host}:{worker.pid} shows no sign of life; its jobs are rescued when their leases run out",
                "Was it killed, stopped (SIGSTOP), or cut off? If its process still exists: pulse-trio stack, or kill it.",
            )
    live = [worker for worker in found.workers if worker.state in ("running", "draining")]
    waiting = sum(queue.available for queue in found.queues)
    if live:
        yield Finding(
            "ok", "workers", f"{count_of(len(live), 'worker')}, {sum(w.running for w in live):,} jobs running"
        )
    elif waiting:
        yield Finding(
            "error",
            "workers",
            f"no worker runs, and {count_of(waiting, 'job')} wait",
            "Start one: pulse-trio run app:handlers",
        )
    else:
        yield Finding("ok", "workers", "none runs, and no job waits")


def _queues(found: Health) -> Iterator[Finding]:
    late: list[str] = []
    for queue in found.queues:
        age = queue.oldest_available_age or 0.0
        if queue.paused:
            yield Finding(
                "warning",
                "paused queue",
                f"{queue.name} is paused; {count_of(queue.available, 'job')} wait, the oldest for {duration(age)}",
                f"pulse-trio queues resume {queue.name}",
            )
        elif age > BEHIND:
            late.append(queue.name)
            yield Finding(
                "warning",
                "backlog",
                f"the oldest job of {queue.name} has been due for {duration(age)}; {count_of(queue.available, 'job')} wait",
                _more(queue.name, found),
            )
        if queue.dead:
            yield Finding(
                "warning",
                "dead jobs",
                f"{count_of(queue.dead, 'job')} of {queue.name} died within the last 24 h",
                f"pulse-trio jobs list --state dead --queue {queue.name}, and jobs retry when the cause is fixed.",
            )
        if (queue.oldest_running_age or 0) > RUNS_LONG:
            yield Finding(
                "ok",
                "long attempt",
                f"the oldest attempt of {queue.name} has run for {duration(queue.oldest_running_age or 0)} (pulse-trio jobs "
                f"list --state running --queue {queue.name}; pulse-trio stack ID shows what it is doing)",
            )
    if not late:
        yield Finding("ok", "backlog", f"no job has been due for more than {duration(BEHIND)}")


def _more(queue: str, found: Health) -> str:
    if not any(queue in w.queues or w.queues == ["*"] for w in found.workers if w.state == "running"):
        return f"No running worker serves that queue: start one with --queues {queue}"
    return "Add workers or raise --concurrency, unless a limit holds the queue back (pulse-trio queues list)."
