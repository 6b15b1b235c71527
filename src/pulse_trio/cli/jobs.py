"""`pulse-trio jobs`: list, show, retry, delete."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from ..errors import TookTooLong
from ..plain import plain
from ..states import FINISHED
from ..store import family, health, history, life, operations
from ..store.refusals import ASK_WHO
from ..text import ago, duration, headline, utc_now
from . import timeline
from .acting import Action
from .database import READING, open_store
from .filters import RATE, described, filter_of, filter_options, parsed_retention
from .options import Number, WholeNumber, actor_option, dsn_option, json_option, page_limit_option, schema_option
from .output import notice, print_fields, print_json, print_rich, print_table
from .roots import said_of_unfinished
from .showing import compact, fields_of, in_quarantine, owes_clean_up, print_error, reasons_of, unreceived_of, whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from ..client import SyncClient
    from ..records import JobRecord
    from ..store.history import Deleted, Retried

JOB_ID = WholeNumber(1, 2**63 - 1)
COLUMNS = ("id", "state", "queue", "kind", "attempt", "when", "arguments", "error")
SHORT = 60
"""Characters of the arguments in a list."""
VALUE = 5_000
"""Characters of a step's value or an event's payload that are read for a line of the timeline."""


@click.group()
def jobs() -> None:
    """List, show, retry and delete jobs."""


@jobs.command("list")
@filter_options
@click.option("--before", type=JOB_ID, metavar="ID", help="Only jobs with a lower id: the next page.")
@page_limit_option()
@click.option(
    "--timeout",
    type=Number(0.001, 86400),
    default=history.PATIENCE,
    metavar="SECONDS",
    show_default=True,
    help="The query's time limit in the database.",
)
@schema_option
@dsn_option
@json_option
def list_jobs(
    limit: int, before: int | None, timeout: float, schema: str | None, dsn: str | None, as_json: bool, **given: Any
) -> None:
    """List jobs, those that were enqueued last first."""
    chosen = filter_of(given)
    with open_store(dsn, schema, pins=READING) as client:
        try:
            if as_json:
                print_json(client.jobs(limit=limit, before=before, timeout=timeout, **chosen))
                return
            pages = client.run(history.pages_of(chosen, limit=limit, before=before, timeout=timeout))
            # A line shows little of a large argument: drop the rest before reading the next jobs.
            now, rows = utc_now(), list[tuple[object, ...]]()
            keys: list[str | None] = []
            while pages:
                for job in client.run(history.page(pages.take(), timeout=timeout)):
                    rows.append(_row(job, now))
                    keys.append(job.key)
        except TookTooLong:
            raise TookTooLong(
                f"The list took longer than {timeout:g} s and was stopped. Narrow it (--state dead, --since 1h, --queue), "
                f"page it (--before), or raise the limit (--timeout). {ASK_WHO}"
            ) from None
    columns = COLUMNS
    if any(key is not None for key in keys):
        at = COLUMNS.index("kind") + 1
        columns = (*COLUMNS[:at], "key", *COLUMNS[at:])
        rows = [(*row[:at], key, *row[at:]) for row, key in zip(rows, keys, strict=True)]
    print_table(columns, rows, right=("id",), whole=("id", "state", "attempt", "when"), styles=timeline.STYLES)
    if len(pages) == limit:
        notice(f"there may be more: --before {pages.last}")
    elif not rows:
        notice(f"no jobs like that: {described(chosen)}" if chosen else "no jobs")


def _row(job: JobRecord, now: datetime) -> tuple[object, ...]:
    arguments = compact(job.args)
    return (
        job.id,
        job.state,
        job.queue,
        job.kind,
        f"{job.attempt}/{job.max_attempts}",
        ago(life.moment_of(job), now),
        arguments if len(arguments) <= SHORT else f"{arguments[:SHORT]}…",
        headline(job.error),
    )


@jobs.command("show")
@click.argument("job_id", type=JOB_ID, metavar="ID")
@schema_option
@dsn_option
@json_option
def show_job(job_id: int, schema: str | None, dsn: str | None, as_json: bool) -> None:
    """Show the history of one job: every attempt, the last error, the arguments and the result.

    Of a durable job also its steps with their results, and its events with their payloads, those included that it was sent
    and has not received: shortened to a line each, and whole with --json.
    """
    with open_store(dsn, schema, pins=READING) as client:
        job = client.job(job_id)
        attempts = client.run(operations.attempts(job_id))
        cancellations = client.cancellations(job_id)
        quarantined = next(iter(client.run(health.quarantined(job_id))), None)
        longest = None if as_json else VALUE
        lines = [] if job.root_id is None else client.run(family.history(job_id, longest=longest))
        unreceived = unreceived_of(client, job_id, longest)
        reasons = [] if job.state in FINISHED else reasons_of(client, job_id)
        owes = owes_clean_up(client, job)
    entries = life.life_of(job, attempts, cancellations, lines, unreceived)
    if as_json:
        print_json(
            {
                **_as_dict(job),
                "quarantine": quarantined,
                "waits_for": reasons,
                "attempts": attempts,
                "cancellations": cancellations,
                "history": whole(lines),
                "unreceived_events": whole(unreceived),
                "owes_clean_up": owes,
                "timeline": entries,
            }
        )
        return
    print_fields(
        fields_of(job)
        | {
            "waits": "\n".join(reason.text for reason in reasons),
            "quarantine": None if quarantined is None else in_quarantine(quarantined),
        }
    )
    click.echo()
    print_rich(timeline.picture(job, entries, utc_now()))
    error, attempt = life.last_error(job, attempts)
    if error is not None:
        click.echo(f"\nlast error{f' (attempt {attempt})' if attempt is not None else ''}:")
        print_error(error)
    if owes:
        notice(said_of_unfinished([job_id]))


def _as_dict(job: JobRecord) -> dict[str, Any]:
    fields: Any = plain(job)
    return fields


# Acting on many

_IDS = click.argument("job_ids", type=JOB_ID, metavar="[ID]...", nargs=-1)
_LIMIT = click.option(
    "--limit", type=WholeNumber(1), metavar="NUMBER", help="At most this many, those with the lowest ids."
)
_YES = click.option(
    "--yes", is_flag=True, help="Do not ask before acting on the jobs that a filter finds, or on whole trees."
)
_DRY_RUN = click.option("--dry-run", is_flag=True, help="Change nothing; say which jobs would be affected.")


@jobs.command("retry")
@_IDS
@filter_options
@_LIMIT
@click.option(
    "--rate", type=RATE, metavar="RATE", help="Spread the jobs' due times at this rate, starting now: 100/s, 30/min."
)
@click.option(
    "--afresh",
    is_flag=True,
    help="Durable jobs forget their history and begin anew: every step is done again, and received events are received again, "
    "before new ones.",
)
@_YES
@_DRY_RUN
@actor_option
@schema_option
@dsn_option
@json_option
def retry_jobs(job_ids: tuple[int, ...], rate: float | None, afresh: bool, **given: Any) -> int:
    """Run finished jobs again, or waiting ones now.

    Give either IDs or a filter that has at least a state: --state dead --kind send_welcome.

    A retried job keeps its id and its attempts so far. If one of several jobs cannot be retried, the others are, and the exit
    code is 2. The failed children of a retried job are left to it: it starts them again itself.
    """
    spacing = history.spacing_of(rate)

    def retry(client: SyncClient, ids: Sequence[int], done: int, before: Sequence[int]) -> Retried:
        delay, chosen = done * spacing, filter_of(given)
        return client.run(
            history.retry_batch(ids, delay=delay, spacing=spacing, chosen=chosen, afresh=afresh, before=before)
        )

    action = Action("retry", "retried", retry, lambda done: done.retried, afresh=afresh)
    code, moved = action.run(job_ids, given)
    if rate is not None and len(moved) > 1:
        notice(f"they come due over {duration(spacing * (len(moved) - 1))}")
    if not given["as_json"] and job_ids:
        for job_id in moved:
            click.echo(f"{job_id} available")
    return code


@jobs.command("delete")
@_IDS
@filter_options
@_LIMIT
@_YES
@_DRY_RUN
@actor_option
@schema_option
@dsn_option
@json_option
def delete_jobs(job_ids: tuple[int, ...], **given: Any) -> int:
    """Delete finished or waiting jobs for good, with their attempts.

    Give either IDs or a filter that has at least a state. A running job is never deleted: cancel it first.
    """

    def delete(client: SyncClient, ids: Sequence[int], done: int, before: Sequence[int]) -> Deleted:
        return client.run(history.delete_batch(ids, chosen=filter_of(given)))

    action = Action("delete", "deleted", delete, lambda done: done.deleted)
    code, _ = action.run(job_ids, given)
    return code


@jobs.command("retention")
@click.argument("queue", metavar="[QUEUE]", required=False)
@click.argument("time", metavar="[TIME]", type=parsed_retention, required=False)
@actor_option
@schema_option
@dsn_option
@json_option
def retention(
    queue: str | None, time: timedelta | str | None, schema: str | None, dsn: str | None, as_json: bool
) -> None:
    """Show or set how long finished jobs of a queue are kept.

    TIME is a duration such as 12h, 3d or 4w, or "default" for the workers' setting --retention. Jobs are deleted in the
    background, within an hour after that; those of the longest retention go when all of their day has passed it.
    """
    with open_store(dsn, schema) as client:
        if queue is not None and time is not None:
            client.run(history.set_retention(queue, time if isinstance(time, timedelta) else None))
        found = client.run(history.retentions())
    if queue is not None:
        found = {name: kept for name, kept in found.items() if name == queue}
    if as_json:
        print_json([{"queue": name, "retention": kept.total_seconds()} for name, kept in found.items()])
        return
    print_table(("queue", "retention"), [(name, duration(kept.total_seconds())) for name, kept in found.items()])
    if not found:
        notice(f"{f'the queue {queue} has' if queue else 'queues have'} the workers' retention")
