"""`pulse-trio jobs send-event`: an event for a job, from the shell."""

from __future__ import annotations

import sys

import click

from ..client.events import sending
from ..codec import in_schema
from ..store.audit import sent_by_hand
from .database import open_store
from .enqueue import parse_json
from .jobs import JOB_ID
from .loading import load_handlers
from .options import actor_option, dsn_option, json_option, schema_option
from .output import notice, print_json


@click.command("send-event")
@click.argument("job_id", type=JOB_ID, metavar="ID")
@click.argument("name", metavar="NAME")
@click.argument("payload", metavar="[JSON]", default="null")
@click.option("--event-key", metavar="KEY", help="Send nothing if the job has had an event NAME with this key.")
@click.option("--app", metavar="APP:HANDLERS", help="Encode the payload with the codec of these handlers.")
@actor_option
@schema_option
@dsn_option
@json_option
def send_event(
    job_id: int,
    name: str,
    payload: str,
    event_key: str | None,
    app: str | None,
    schema: str | None,
    dsn: str | None,
    as_json: bool,
) -> None:
    """Send an event to a durable job.

    The handler receives it with job.wait_for_event(NAME), now or when it comes there. JSON is the payload, as in
    '{"by": "Ada"}' (null by default); - reads it from the standard input. A job that has finished receives no events.
    """
    value = parse_json(sys.stdin.read() if payload == "-" else payload, "The payload is")
    codec = None if app is None else load_handlers(app).codec
    with open_store(dsn, schema) as client:
        operation = sending(in_schema(codec, client.schema), job_id, name, value, event_key)
        sent = client.run_together(sent_by_hand(operation, job_id, name, event_key))
    if as_json:
        print_json({"job_id": job_id, "sent": sent})
    elif sent:
        click.echo(f"{job_id} sent")
    else:
        notice(f"nothing was sent: job {job_id} has had an event {name!r} with this key")
