"""`pulse-trio workers`: the workers of a database."""

from __future__ import annotations

import click

from ..store import operations
from ..text import ago, duration, utc_now
from .database import READING, open_store
from .options import dsn_option, json_option, schema_option
from .output import notice, print_json, print_table

COLUMNS = ("id", "host", "pid", "state", "running", "concurrency", "queues", "started", "last beat", "version")

STYLES = {"running": "green", "draining": "blue", "stale": "red", "gone": "dim"}


@click.command()
@click.option("--all", "gone", is_flag=True, help="Also those that have gone.")
@schema_option
@dsn_option
@json_option
def workers(gone: bool, schema: str | None, dsn: str | None, as_json: bool) -> None:
    """List workers, newest first."""
    with open_store(dsn, schema, pins=READING) as client:
        found = client.run(operations.workers(gone=gone))
    if as_json:
        print_json(found)
        return
    now = utc_now()
    rows = [
        (w.id, w.host, w.pid, w.state, w.running, w.concurrency, ",".join(w.queues), ago(w.started_at, now),
         _beat(w.beat_age), w.version)
        for w in found
    ]  # fmt: skip
    whole = ("id", "host", "pid", "state", "last beat")
    print_table(COLUMNS, rows, right=("id", "pid", "running", "concurrency"), whole=whole, styles=STYLES)
    if not found:
        notice("no workers" if gone else "no workers; --all shows those that have gone")


def _beat(age: float) -> str:
    """When a worker last gave a sign of life; in the future where the server's clock was ahead."""
    if age < -1:
        return f"in {duration(-age)}"
    return f"{duration(max(0.0, round(age, 1)))} ago"
