"""`pulse-trio jobs tree`: the tree that a job belongs to."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from ..store import family
from ..text import ago, headline, shown, utc_now
from .database import open_store
from .jobs import JOB_ID
from .options import dsn_option, json_option, schema_option
from .output import notice, print_json
from .timeline import STYLES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from ..store.family import TreeJob

_SIBLINGS = 20
"""How many finished siblings are shown one by one."""


@click.command("tree")
@click.argument("job_id", type=JOB_ID, metavar="ID")
@click.option(
    "--limit",
    type=click.IntRange(1, 100_000),
    default=family.MOST,
    show_default=True,
    help="At most this many members.",
)
@schema_option
@dsn_option
@json_option
def show_tree(job_id: int, limit: int, schema: str | None, dsn: str | None, as_json: bool) -> None:
    """Show the tree that a job belongs to: who started whom, and where each job stands.

    ID is any job of the tree. Of many completed siblings only their number is shown.
    """
    with open_store(dsn, schema) as client:
        found = client.tree(job_id, limit=limit)
    if as_json:
        print_json(found)
        return
    now = utc_now()
    below: dict[int, list[TreeJob]] = {}
    for job in found[1:]:
        below.setdefault(job.parent_id or 0, []).append(job)
    root = found[0]
    click.echo(_line(root, now, asked=job_id))
    for line in _below(root, below, now, job_id, "") if below.get(root.id) else ():
        click.echo(line)
    if len(found) > limit:
        notice(f"there may be more: --limit {limit * 2}")


def _below(job: TreeJob, below: dict[int, list[TreeJob]], now: datetime, asked: int, indent: str) -> Iterator[str]:
    children = below.get(job.id, [])
    shown_ones, left = _chosen(children, below, asked)
    for place, child in enumerate(shown_ones):
        last = place == len(shown_ones) - 1 and not left
        yield f"{indent}{'└─ ' if last else '├─ '}{_line(child, now, asked=asked)}"
        yield from _below(child, below, now, asked, indent + ("   " if last else "│  "))
    if left:
        yield f"{indent}└─ ... and {_counted(left)}"


def _chosen(
    children: Sequence[TreeJob], below: dict[int, list[TreeJob]], asked: int
) -> tuple[list[TreeJob], list[TreeJob]]:
    """The siblings to show, and those to count: completed leaves, once there are many."""
    if len(children) <= _SIBLINGS:
        return list(children), []
    quiet = [c for c in children if c.state == "completed" and c.id not in below and c.id != asked]
    kept = len(children) - len(quiet)
    left = quiet[max(0, _SIBLINGS - kept) :]
    ids = {c.id for c in left}
    return [c for c in children if c.id not in ids], left


def _counted(jobs: Sequence[TreeJob]) -> str:
    counts = Counter(f"{job.state} {job.kind}" for job in jobs)
    return ", ".join(f"{count:,} {what}" for what, count in counts.most_common())


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
    if job.ends_as is not None:
        return f"ends as {job.ends_as} when what it started has ended"
    if job.state == "suspended":
        waits = [f"for {shown(name)}" for name in job.events or ()]
        waits += [f"until {job.waits_until.astimezone():%Y-%m-%d %H:%M:%S}"] if job.waits_until is not None else []
        waits += (
            ["for its child" if job.children == 1 else f"for {job.children:,} children"]
            if not waits and job.children
            else []
        )
        return f"waits {' or '.join(waits)}" if waits else ""
    if job.finished_at is not None:
        return " ".join(part for part in (ago(job.finished_at, now), headline(job.error or job.cancel_reason)) if part)
    return ""
