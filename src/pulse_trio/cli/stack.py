"""`pulse-trio stack`: what a running job is doing."""

from __future__ import annotations

import click

from ..text import local_time, shown
from .database import open_store
from .jobs import JOB_ID
from .options import dsn_option, json_option, schema_option
from .output import print_json


@click.command()
@click.argument("job_id", type=JOB_ID, metavar="JOB")
@schema_option
@dsn_option
@json_option
def stack(job_id: int, schema: str | None, dsn: str | None, as_json: bool) -> None:
    """Print the task tree of a running job: every task of its nursery, with the Python lines it waits in.

    The command asks the job's worker through the database, so the worker may be on any host. If it does not answer within
    five seconds (its event loop may be blocked), the exit code is 1. For a handler with runs="process" the output names the
    process.
    """
    with open_store(dsn, schema) as client:
        found = client.stack(job_id)
    if as_json:
        print_json(found)
        return
    worker = f"on {found.host}:{found.pid} " if found.host is not None else ""
    click.echo(
        shown(f"job {found.job_id} ({found.kind}), attempt {found.attempt}, {worker}at {local_time(found.taken_at)}")
    )
    for line in found.stack.splitlines():
        click.echo(shown(line))
