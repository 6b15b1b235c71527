"""`pulse-trio jobs`: list, show, retry."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from ..states import State
from ..store import operations
from .database import open_store
from .faults import describe
from .options import dsn_option, json_option, schema_option
from .output import notice, plain, print_fields, print_json, print_table
from .text import ago, duration, headline, local_time, shown, utc_now

if TYPE_CHECKING:
    from datetime import datetime

    from ..client import SyncClient
    from ..store.operations import AttemptRecord, JobRecord

STATES = [str(state) for state in State]
JOB_ID = click.IntRange(1, 2**63 - 1)
COLUMNS = ("id", "state", "queue", "kind", "attempt", "when", "arguments", "error")
SHORT = 60
"""Characters of the arguments in a list."""


@click.group()
def jobs() -> None:
    """List, show and retry jobs."""


@jobs.command("list")
@click.option(
    "--state", type=click.Choice(STATES), metavar="STATE", help=f"Only jobs in this state: {', '.join(STATES)}."
)
@click.option("--queue", metavar="NAME", help="Only jobs of this queue.")
@click.option("--kind", metavar="NAME", help="Only jobs of this kind.")
@click.option("--before", type=JOB_ID, metavar="ID", help="Only jobs with a lower id: the next page.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, metavar="NUMBER", show_default=True, help="At most so many."
)
@schema_option
@dsn_option
@json_option
def list_jobs(limit: int, schema: str | None, dsn: str | None, as_json: bool, **filters: Any) -> None:
    """List jobs, newest first."""
    with open_store(dsn, schema) as client:
        found = client.run(operations.jobs(limit=limit, **filters))
    if as_json:
        print_json(found)
        return
    now = utc_now()
    print_table(COLUMNS, [_row(job, now) for job in found], right=("id",))
    if len(found) == limit:
        notice(f"there may be more: --before {found[-1].id}")
    elif not found:
        notice("no jobs" + (" like that" if any(filters.values()) else ""))


def _row(job: JobRecord, now: datetime) -> tuple[object, ...]:
    arguments = _compact(job.args)
    return (
        job.id,
        job.state,
        job.queue,
        job.kind,
        f"{job.attempt}/{job.max_attempts}",
        ago(_moment(job), now),
        arguments if len(arguments) <= SHORT else f"{arguments[:SHORT]}…",
        headline(job.error),
    )


def _moment(job: JobRecord) -> datetime:
    """The time that says most about a job in its state."""
    if job.state is State.RUNNING and job.started_at is not None:
        return job.started_at
    return job.finished_at or job.run_at


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


@jobs.command("show")
@click.argument("job_id", type=JOB_ID, metavar="ID")
@schema_option
@dsn_option
@json_option
def show_job(job_id: int, schema: str | None, dsn: str | None, as_json: bool) -> None:
    """Show one job and its attempts."""
    with open_store(dsn, schema) as client:
        job = client.job(job_id)
        attempts = client.run(operations.attempts(job_id))
    if as_json:
        print_json({**_as_dict(job), "attempts": attempts})
        return
    print_fields(_fields(job))
    _print_timeline(attempts)
    if job.error is not None and job.error not in [a.error for a in attempts]:
        _print_error(job.error)


def _as_dict(job: JobRecord) -> dict[str, Any]:
    fields: Any = plain(job)
    return fields


def _fields(job: JobRecord) -> dict[str, object]:
    times = {name: local_time(getattr(job, name)) for name in _TIMES}
    return {
        "id": job.id,
        "kind": job.kind,
        "state": job.state,
        "queue": job.queue,
        "priority": job.priority,
        "attempt": f"{job.attempt} of {job.max_attempts}",
        "unique key": job.unique_key,
        "worker": job.worker,
        "cancelled": job.cancel_reason,
        **{name.replace("_", " ").removesuffix(" at"): value for name, value in times.items()},
        "arguments": _compact(job.args),
        "result": _compact(job.result) if job.state is State.COMPLETED else None,
    }


_TIMES = ("created_at", "run_at", "started_at", "lease_until", "finished_at")


def _print_timeline(attempts: list[AttemptRecord]) -> None:
    for attempt in attempts:
        took = _took(attempt)
        click.echo(
            f"\nattempt {attempt.attempt}  {attempt.outcome}  {local_time(attempt.started_at)}{took}"
            f"  worker {attempt.worker}"
        )
        if attempt.error:
            _print_error(attempt.error)


def _took(attempt: AttemptRecord) -> str:
    if attempt.started_at is None or attempt.ended_at is None:
        return ""
    return f"  {duration((attempt.ended_at - attempt.started_at).total_seconds())}"


def _print_error(error: str) -> None:
    for line in shown(error).splitlines():
        click.echo(f"    {line}".rstrip())


@jobs.command("retry")
@click.argument("job_ids", type=JOB_ID, metavar="ID...", nargs=-1, required=True)
@schema_option
@dsn_option
@json_option
def retry_jobs(job_ids: tuple[int, ...], schema: str | None, dsn: str | None, as_json: bool) -> int:
    """Run finished jobs again, or waiting ones now.

    A retried job keeps its id and its attempts so far. If one of several cannot be retried, the others still are, and
    the exit code tells.
    """
    retried: list[int] = []
    code = 0
    with open_store(dsn, schema) as client:
        for job_id in job_ids:
            code = max(code, _retry(client, job_id, retried))
    if as_json:
        print_json({"retried": retried})
    for job_id in [] if as_json else retried:
        click.echo(f"{job_id} available")
    return code


def _retry(client: SyncClient, job_id: int, retried: list[int]) -> int:
    try:
        client.retry(job_id)
    except UsageError as error:
        notice(describe(error))
        return error.exit_code
    retried.append(job_id)
    return 0
