"""`pulse-trio jobs release` and `jobs complete`: an operator takes running jobs from their workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..client.cancelling import requester
from ..errors import UsageError
from ..store import history
from .database import open_store
from .enqueue import parse_json
from .jobs import JOB_ID
from .options import actor_option, dsn_option, json_option, schema_option
from .output import notice, print_json

if TYPE_CHECKING:
    from ..store.history import Forced

_IDS = click.argument("job_ids", type=JOB_ID, metavar="ID...", nargs=-1, required=True)


@click.command("release")
@_IDS
@click.option("--force", is_flag=True, help="Also take jobs from workers that show signs of life.")
@actor_option
@schema_option
@dsn_option
@json_option
def release_jobs(job_ids: tuple[int, ...], force: bool, schema: str | None, dsn: str | None, as_json: bool) -> int:
    """Take running jobs from their workers and release them; for stuck handlers.

    The attempt does not count as failed. The worker cancels the handler as soon as it is notified; until then the handler
    may run beside the next attempt. A job whose cancellation was requested is cancelled instead. If one of several jobs is
    refused, the others are released, and the exit code is 2.
    """
    with open_store(dsn, schema) as client:
        done = client.run(history.release_batch(list(dict.fromkeys(job_ids)), force=force, by=requester()))
    return _report("released", done, as_json=as_json)


@click.command("complete")
@_IDS
@click.option("--force", is_flag=True, help="Required: whatever the handler still does is lost.")
@click.option("--result", metavar="JSON", default="null", show_default=True, help="The result of each.")
@actor_option
@schema_option
@dsn_option
@json_option
def complete_jobs(
    job_ids: tuple[int, ...], force: bool, result: str, schema: str | None, dsn: str | None, as_json: bool
) -> int:
    """Take running jobs from their workers and complete them; for handlers that got stuck after doing their work.

    If one of several jobs is refused, the others are completed, and the exit code is 2.
    """
    if not force:
        raise UsageError(
            "The handlers of these jobs are running, and whatever they still do would be lost: give --force."
        )
    value = parse_json(result, "--result is")
    with open_store(dsn, schema) as client:
        done = client.run(history.complete_batch(list(dict.fromkeys(job_ids)), value, by=requester()))
    return _report("completed", done, as_json=as_json)


def _report(past: str, done: Forced, *, as_json: bool) -> int:
    if as_json:
        print_json({past: list(done.moved), "refused": done.refused})
    else:
        for job_id, state in done.moved.items():
            click.echo(f"{job_id} {state}")
    for reason in done.refused.values():
        notice(reason)
    return UsageError.exit_code if done.refused else 0
