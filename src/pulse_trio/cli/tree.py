"""`pulse-trio jobs tree`: the tree that a job belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..store import family
from ..store.branches import branches, standing
from ..text import ago, headline, shown, utc_now
from .database import READING, open_store
from .jobs import JOB_ID
from .options import WholeNumber, dsn_option, json_option, schema_option
from .output import notice, print_json
from .timeline import STYLES

if TYPE_CHECKING:
    from datetime import datetime

    from ..store.family import TreeJob


@click.command("tree")
@click.argument("job_id", type=JOB_ID, metavar="ID")
@click.option(
    "--limit",
    type=WholeNumber(1, 100_000),
    default=family.MOST,
    show_default=True,
    help="At most this many members.",
)
@schema_option
@dsn_option
@json_option
def show_tree(job_id: int, limit: int, schema: str | None, dsn: str | None, as_json: bool) -> None:
    """Show the tree that a job belongs to: who started whom, and where each job stands.

    ID is any job of the tree. Of many siblings that have ended, 20 are shown, dead and cancelled ones first, and the others
    counted.
    """
    with open_store(dsn, schema, pins=READING) as client:
        found = client.tree(job_id, limit=limit)
    if as_json:
        print_json(found)
        return
    now = utc_now()
    for branch in branches(found, job_id):
        text = f"... and {branch.left}" if branch.job is None else _line(branch.job, now, asked=job_id)
        click.echo(f"{branch.indent}{text}")
    if len(found) > limit:
        notice(f"there may be more: --limit {limit * 2}")


def _line(job: TreeJob, now: datetime, *, asked: int) -> str:
    parts = [
        click.style(f"{job.id}", bold=job.id == asked),
        click.style(job.state, fg=STYLES.get(job.state)),
        shown(job.kind or ""),
        shown(job.child_key or ""),
        f"on {job.queue}" if job.queue is not None else "",
    ]
    return "  ".join(part for part in [*parts, _what(job, now)] if part)


def _what(job: TreeJob, now: datetime) -> str:
    if job.state == "suspended" and job.ends_as is None and job.waits_until is not None:
        until = f"until {job.waits_until.astimezone():%Y-%m-%d %H:%M:%S}"
        return f"{standing(job)} or {until}" if job.events else f"waits {until}"
    if job.ends_as is not None or job.state == "suspended":
        return standing(job)
    if job.finished_at is not None:
        return " ".join(part for part in (ago(job.finished_at, now), headline(job.error or job.cancel_reason)) if part)
    return ""
