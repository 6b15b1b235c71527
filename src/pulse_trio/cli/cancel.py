"""`pulse-trio jobs cancel`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..states import FINISHED
from .database import open_store, outlast
from .jobs import JOB_ID
from .options import actor_option, dsn_option, json_option, schema_option
from .output import notice, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..store.cancelling import CancelResult

UNKNOWN = 2
"""The exit code when one of the jobs does not exist."""


@click.command("cancel")
@click.argument("job_ids", type=JOB_ID, metavar="ID...", nargs=-1, required=True)
@click.option("--reason", metavar="TEXT", help="The reason, for the handler, the job and the ledger.")
@click.option("--wait", is_flag=True, help="Return when the handlers of running jobs have ended.")
@click.option(
    "--now", is_flag=True, help="Durable jobs that do not run, and what they have started, end without their clean-up."
)
@actor_option
@schema_option
@dsn_option
@json_option
def cancel_jobs(
    job_ids: tuple[int, ...],
    reason: str | None,
    wait: bool,
    now: bool,
    schema: str | None,
    dsn: str | None,
    as_json: bool,
) -> int:
    """Cancel jobs: waiting jobs at once, running jobs by cancelling their handlers.

    A durable job that is suspended, or waits for a retry, runs once more, so that its clean-up runs, if its history has a
    line (a step, an event, an end of a sleep or of a block; children alone are none); --now ends it without, and with it
    what it has started.
    Prints each job's state: cancelled, or running while its handler has not ended. A finished job stays unchanged. If one
    of several jobs does not exist, the others are cancelled, and the exit code is 2.
    """
    with open_store(dsn, schema) as client:
        results = client.cancel_many(job_ids, reason=reason, now=now)
        _say(job_ids, results)
        if wait:
            requested = results
            results = outlast(client, dsn, schema, lambda each: each.ended(requested), "the cancellation is requested")
    if as_json:
        print_json(results)
    for result in [] if as_json else results:
        click.echo(f"{result.job_id} {result.state}")
    return UNKNOWN if len(results) < len(set(job_ids)) else 0


def _say(job_ids: Sequence[int], results: Sequence[CancelResult]) -> None:
    found = {result.job_id for result in results}
    for job_id in sorted(set(job_ids) - found):
        notice(f"There is no job {job_id} (it was deleted, or ended longer ago than its retention).")
    for result in results:
        if result.cancellation is None and result.state in FINISHED:
            notice(f"job {result.job_id} is {result.state} already; nothing was changed")
