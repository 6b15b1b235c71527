"""`pulse-trio audit`: who did what to jobs, queues, kinds and schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..text import local_time
from .database import READING, open_store
from .filters import MOMENT
from .jobs import JOB_ID
from .options import dsn_option, json_option, page_limit_option, schema_option
from .output import notice, print_json, print_table

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from ..store.audit import AuditRecord

COLUMNS = ("when", "role", "actor", "act", "what", "details")
SHOWN_IDS = 5
"""How many of a line's ids the table shows."""
UNSET = {"limit": "none", "retention": "default"}
"""What no value means in the details of an act: the command's own word. Of other acts it is not shown."""


@click.command()
@click.option(
    "--act", metavar="ACT", help="Only this action: cancel, retry, delete, event, pause, resume, limit, retention, ..."
)
@click.option("--job", type=JOB_ID, metavar="ID", help="Only actions on this job.")
@click.option("--role", metavar="ROLE", help="Only actions of this database login.")
@click.option("--actor", metavar="NAME", help="Only actions of this actor.")
@click.option(
    "--target", metavar="WHAT", help="Only actions on this target: 'queue NAME', 'kind NAME', 'schedule NAME'."
)
@click.option(
    "--since", type=MOMENT, metavar="WHEN", help="Only actions since then: 2h (ago), 3d, or a time with its offset."
)
@page_limit_option()
@schema_option
@dsn_option
@json_option
def audit(
    act: str | None,
    job: int | None,
    role: str | None,
    actor: str | None,
    target: str | None,
    since: datetime | timedelta | None,
    limit: int,
    schema: str | None,
    dsn: str | None,
    as_json: bool,
) -> None:
    """List who cancelled, retried, deleted, paused, resumed, limited, scheduled or enqueued by hand, newest first.

    The role is the database's login; the actor is the name that its program gave (--as, or `open_client(actor=...)`).
    The lines outlast the jobs.
    """
    with open_store(dsn, schema, pins=READING) as client:
        found = client.audit(act=act, job=job, role=role, actor=actor, target=target, since=since, limit=limit)
    if as_json:
        print_json(found)
        return
    print_table(COLUMNS, [_row(line) for line in found], whole=("when", "act"))
    if len(found) == limit:
        notice(f"there may be more: --limit {limit * 2}")
    if not found:
        notice("no lines")


def _row(line: AuditRecord) -> tuple[object, ...]:
    unset = UNSET.get(line.act)
    said = {name: unset if value is None else value for name, value in (line.details or {}).items()}
    details = ", ".join(f"{name} {value}" for name, value in said.items() if value is not None)
    return (local_time(line.at), line.role, line.actor, line.act, _what(line), details)


def _what(line: AuditRecord) -> str:
    ids = line.job_ids or []
    parts = [line.target] if line.target is not None else []
    if ids:
        more = f" and {line.jobs - SHOWN_IDS:,} more" if line.jobs > SHOWN_IDS else ""
        parts.append(f"job{'s' if line.jobs > 1 else ''} {', '.join(map(str, ids[:SHOWN_IDS]))}{more}")
    return ": ".join(parts)
