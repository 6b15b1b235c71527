"""`pulse-trio jobs send-event`, as a real process on a real database."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import psycopg
import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes

    from .conftest import Command

DURABLE = """
from typing import Any

from pulse_trio import Handlers, Job

handlers = Handlers()


@handlers.job(durable=True, suspend_after=0)
async def order(job: Job) -> Any:
    return await job.wait_for_event("approved")
"""
CODED = DURABLE.replace("Handlers()", 'Handlers(codec=AeadCodec({"k": bytes(32)}, "k"))')
CODED = CODED.replace("import Handlers", "import AeadCodec, Handlers")


async def test_a_job_receives_an_event_that_is_sent_by_hand_and_the_trail_says_who_sent_it(
    command: Command, processes: Processes, tmp_path: Path, dsn: str
) -> None:
    (tmp_path / "app.py").write_text(DURABLE)
    job_id = (await command("enqueue", "order")).stdout.strip()
    sent = await command(
        "jobs", "send-event", job_id, "approved", '{"by": "Ada"}', "--event-key", "form 17", "--as", "Bob"
    )
    assert sent.stdout == f"{job_id} sent\n"
    again = await command("jobs", "send-event", job_id, "approved", "2", "--event-key", "form 17")
    assert again.stdout == ""
    assert f"nothing was sent: job {job_id} has had an event 'approved' with this key" in again.stderr
    worker = await processes.command("run", "app", "--burst", env={"PULSE_TRIO_DSN": dsn})
    assert await worker.ended() == 0
    shown = json.loads((await command("jobs", "show", job_id, "--json")).stdout)
    assert (shown["state"], shown["result"]) == ("completed", {"by": "Ada"})
    trail = json.loads((await command("audit", "--act", "event", "--json")).stdout)
    assert [(a["actor"], a["target"], a["job_ids"], a["details"]) for a in trail] == [
        ("Bob", "event approved", [int(job_id)], {"event_key": "form 17"})
    ]


async def test_as_json_it_says_whether_the_event_is_new(command: Command) -> None:
    job_id = (await command("enqueue", "order")).stdout.strip()
    one, two = [
        json.loads((await command("jobs", "send-event", job_id, "go", "--event-key", "1", "--json")).stdout)
        for _ in range(2)
    ]
    assert (one, two) == ({"job_id": int(job_id), "sent": True}, {"job_id": int(job_id), "sent": False})
    assert (await command("jobs", "send-event", job_id, "go", "-", code=2)).stdout == "", "the standard input is empty"


@pytest.mark.parametrize(
    ("name", "payload", "said"),
    [
        ("go", "{by: Ada}", "The payload is not valid JSON: expecting property name"),
        ("go", "NaN", "The payload is not valid JSON, which has no NaN."),
        ("go", '"\\u0000"', "The payload of the event 'go'"),
        ("", "1", "The name of an event"),
    ],
)
async def test_what_cannot_be_an_event_is_the_callers_fault(
    command: Command, name: str, payload: str, said: str
) -> None:
    refused = await command("jobs", "send-event", "1", name, payload, code=2)
    assert said in refused.stderr


async def test_a_job_that_is_unknown_or_has_finished_receives_no_event_and_the_trail_has_no_line(
    command: Command,
) -> None:
    unknown = await command("jobs", "send-event", "4711", "go", code=2)
    assert "There is no job 4711" in unknown.stderr
    job_id = (await command("enqueue", "order")).stdout.strip()
    await command("jobs", "cancel", job_id)
    finished = await command("jobs", "send-event", job_id, "go", code=2)
    assert f"Job {job_id} is cancelled: it receives no more events." in finished.stderr
    assert json.loads((await command("audit", "--act", "event", "--json")).stdout) == []


async def test_with_an_app_the_payload_is_encoded_by_its_codec(command: Command, tmp_path: Path, dsn: str) -> None:
    (tmp_path / "app.py").write_text(CODED)
    job_id = (await command("enqueue", "order", "--app", "app")).stdout.strip()
    await command("jobs", "send-event", job_id, "approved", '"a secret"', "--app", "app")
    with psycopg.connect(dsn) as connection:
        ((payload,),) = connection.execute("SELECT payload::text FROM pulse.event")
    assert "$codec" in payload
    assert "a secret" not in payload
