"""Queues from the command line, as real processes; the worker beside them is real too."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pulse_trio import SyncClient
from support.stores import Window, claim, open_store
from support.workers import rows

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes

    from .conftest import Command


async def test_queues_are_listed_with_depth_and_age(command: Command, dsn: str) -> None:
    client = SyncClient(dsn)
    for _ in range(3):
        client.enqueue("noop", queue="mail")
    client.enqueue("noop", queue="mail", delay=60)
    client.limit_queue("slow", rate="100/m", key_limit=2)
    mail, slow = json.loads((await command("queues", "list", "--json")).stdout)
    age = mail.pop("oldest_available_age")
    assert 0 < age < 60
    none = {
        "limit": None,
        "rate": None,
        "key_limit": None,
        "key_rate": None,
        "oldest_running_age": None,
        "dead": 0,
        "at_least": False,
        "dead_at_least": False,
    }
    assert (
        mail == {"name": "mail", "paused": False, "available": 3, "scheduled": 1, "running": 0, "suspended": 0} | none
    )
    assert slow["rate"] == "100/m"
    assert slow["key_limit"] == 2
    table = (await command("queues", "list")).stdout
    assert "mail" in table
    assert "100/m" in table


async def test_a_count_that_ended_at_its_bound_has_a_plus(command: Command, dsn: str) -> None:
    with Window(dsn) as window:
        window.enqueue_many(10_050, "mail")
        window.enqueue("small")
    listed = await command("queues", "list")
    lines = {line.split()[0]: line.split()[1] for line in listed.stdout.splitlines()}
    assert (lines["mail"], lines["small"]) == ("10,000+", "1")
    assert "ended at its bound has a +" in listed.stderr
    as_json = {q["name"]: q for q in json.loads((await command("queues", "list", "--json")).stdout)}
    assert {name: (q["available"], q["at_least"]) for name, q in as_json.items()} == {
        "mail": (10_000, True),
        "small": (1, False),
    }
    assert "no worker runs, and at least 201 jobs wait" in (await command("doctor", code=1)).stdout


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("what", [("mail",), ("--kind", "greet")], ids=["queue", "kind"])
async def test_a_pause_stops_a_running_worker_soon_and_resume_starts_it_at_once(
    what: tuple[str, ...], processes: Processes, command: Command, dsn: str
) -> None:
    worker = await processes.command("run", "app", "--poll", "30", env={"PULSE_TRIO_DSN": dsn})
    await worker.line("started")
    client = SyncClient(dsn)
    client.wait(client.enqueue("greet", {"name": "a"}, queue="mail").id, timeout=10)
    assert "is paused" in (await command("queues", "pause", *what)).stderr
    assert "was paused already" in (await command("queues", "pause", *what)).stderr
    # It may take a second until a worker knows of it, and longer on a loaded machine: jobs run until it does.
    until, runs = time.monotonic() + 20, True
    while runs and time.monotonic() < until:
        stopped = client.enqueue("greet", {"name": "b"}, queue="mail").id
        try:
            client.wait(stopped, timeout=1)
        except TimeoutError:
            runs = False
    going = client.enqueue("greet", {"name": "c"} if len(what) == 1 else {}, queue="other").id
    if len(what) == 1:
        client.wait(going, timeout=10)
    assert client.job(stopped).state == "available"
    if len(what) == 2:
        assert "greet" in (await command("queues", "list", "--kinds")).stdout
    assert "is resumed" in (await command("queues", "resume", *what)).stderr
    # Well before the worker's poll: it was told.
    client.wait(stopped, timeout=10)
    assert "was not paused" in (await command("queues", "resume", *what)).stderr


@pytest.mark.usefixtures("app")
async def test_a_queue_that_a_worker_serves_is_listed_while_it_is_empty(
    processes: Processes, command: Command, dsn: str
) -> None:
    async def listed() -> dict[str, Any]:
        return {q["name"]: q for q in json.loads((await command("queues", "list", "--json")).stdout)}

    assert await listed() == {}
    worker = await processes.command("run", "app", env={"PULSE_TRIO_DSN": dsn})
    await worker.line("started")
    assert set(await listed()) == {"default", "mail"}
    client = SyncClient(dsn)
    client.wait(client.enqueue("greet", {"name": "a"}, queue="mail").id, timeout=20)
    client.wait(client.enqueue("broken", max_attempts=1).id, timeout=20)
    client.enqueue("wait")
    await worker.line("waiting")
    found = await listed()
    assert (found["mail"]["dead"], found["default"]["dead"]) == (0, 1)
    assert found["mail"]["oldest_running_age"] is None
    assert 0 < found["default"]["oldest_running_age"] < 60
    assert "1 job of default died within the last 24 h" in (await command("doctor", code=1)).stdout


async def test_a_queue_that_was_paused_by_mistake_is_said_to_be_unknown_and_forgotten_when_it_is_resumed(
    command: Command, dsn: str
) -> None:
    SyncClient(dsn).enqueue("noop", queue="mail")
    said = (await command("queues", "pause", "maill")).stderr
    assert "no job, worker or limit names a queue maill" in said
    assert "Did you mean mail?" in said
    await command("queues", "resume", "maill")
    assert [q["name"] for q in json.loads((await command("queues", "list", "--json")).stdout)] == ["mail"]
    assert "names a queue" not in (await command("queues", "pause", "mail")).stderr


async def test_every_queue_is_paused_and_resumed_at_once(command: Command, dsn: str) -> None:
    for queue in ("a", "b", "c"):
        SyncClient(dsn).enqueue("noop", queue=queue)
    await command("queues", "pause", "b")
    assert "3 queues paused, 1 of them before" in (await command("queues", "pause", "--all")).stderr
    assert all(q["paused"] for q in json.loads((await command("queues", "list", "--json")).stdout))
    assert "3 queues resumed" in (await command("queues", "resume", "--all")).stderr
    assert not any(q["paused"] for q in json.loads((await command("queues", "list", "--json")).stdout))
    assert "Give --all, or one queue" in (await command("queues", "pause", "b", "--all", code=2)).stderr


@pytest.mark.usefixtures("app")
async def test_a_drain_waits_until_nothing_runs_and_says_what_does(
    processes: Processes, command: Command, dsn: str
) -> None:
    worker = await processes.command("run", "app", env={"PULSE_TRIO_DSN": dsn})
    client = SyncClient(dsn)
    running = client.enqueue("wait", queue="slow").id
    await worker.line("waiting")
    gave_up = await command("queues", "drain", "slow", "--timeout", "0.6", code=1)
    assert f"after 0.6 s 1 job of queue slow still ran: {running} (wait); it stays paused" in gave_up.stderr
    assert "database error" not in gave_up.stderr
    drain = await processes.command("queues", "drain", "slow", env={"PULSE_TRIO_DSN": dsn})
    await drain.line(rf"queue slow: 1 job running: {running} \(wait\)")
    assert client.cancel(running).state == "running"
    assert await drain.ended() == 0
    assert "none of its jobs is running" in drain.stderr
    assert rows(dsn, "SELECT paused, running FROM pulse.queues WHERE name = 'slow'") == [(True, 0)]


@pytest.mark.parametrize("what", [("slow",), ("--kind", "greet")], ids=["queue", "kind"])
async def test_a_drain_names_the_newest_of_many_running_jobs(what: tuple[str, ...], command: Command, dsn: str) -> None:
    with Window(dsn) as window:
        ids = [window.enqueue("slow", kind="greet") for _ in range(7)]
        window.enqueue("other", kind="pay")
        async with open_store(dsn) as store:
            await claim(store, "slow", 7)
            gave_up = await command("queues", "drain", *what, "--timeout", "0.1", code=1)
    names = ", ".join(f"{job_id} (greet)" for job_id in ids[:1:-1])
    name = "queue slow" if len(what) == 1 else "kind greet"
    assert f"7 jobs of {name} still ran: {names} and 2 more; it stays paused" in gave_up.stderr


async def test_a_drain_that_ends_before_every_worker_knows_of_the_pause_says_so(command: Command) -> None:
    gave_up = await command("queues", "drain", "slow", "--timeout", "0", code=1)
    assert "no job of queue slow ran, but a worker may not know of the pause yet; it stays paused" in gave_up.stderr


async def test_a_drain_keeps_its_timeout_while_its_look_waits_for_a_lock(command: Command, dsn: str) -> None:
    """It waited as long as the lock was held."""
    with psycopg.connect(dsn) as connection:
        connection.execute("SET LOCAL idle_in_transaction_session_timeout = '15s'")
        connection.execute("LOCK TABLE pulse.job IN ACCESS EXCLUSIVE MODE")
        gave_up = await command("queues", "drain", "slow", "--timeout", "0.6", code=1)
        connection.rollback()
    assert "had not answered how many jobs of queue slow run; it stays paused" in gave_up.stderr


async def test_limits_are_changed_one_by_one_and_taken_away(command: Command, dsn: str) -> None:
    await command("queues", "limit", "mail", "--limit", "3", "--rate", "100/m")
    said = await command("queues", "limit", "mail", "--key-limit", "2")
    assert "at most 3 at once; 100 in 1 min 0 s; at most 2 at once for each key" in said.stderr
    changed = await command("queues", "limit", "mail", "--rate", "none", "--json")
    assert json.loads(changed.stdout)["limit"] == 3
    (mail,) = SyncClient(dsn).queues()
    assert (mail.limit, mail.rate, mail.key_limit, mail.key_rate) == (3, None, 2, None)


async def test_the_audit_trail_shows_limits_and_retentions_that_were_taken_away(command: Command) -> None:
    """The limit that was removed was only in --json."""
    await command("queues", "limit", "imports", "--limit", "3", "--rate", "2000/m")
    await command("queues", "limit", "imports", "--limit", "none")
    await command("jobs", "retention", "imports", "3d")
    await command("jobs", "retention", "imports", "default")
    back, kept, removed, limited = (await command("audit")).stdout.splitlines()[1:]
    assert "rate 2000/m, limit 3, key_rate none, key_limit none" in re.sub(" +", " ", limited)
    assert "rate 2000/m, limit none, key_rate none, key_limit none" in re.sub(" +", " ", removed)
    assert "before default" in kept
    assert "retention default" in back


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pause",), "Say what to pause: a queue, or one kind (kind=..., --kind)."),
        (("pause", "mail", "--kind", "greet"), "Say what to pause"),
        (("resume", "no spaces"), "not valid"),
        (("limit", "mail"), "Say what to limit"),
        (("limit", "mail", "--limit", "0"), "from 1 to 2,147,483,647, got 0. To run nothing, pause."),
        (("limit", "mail", "--limit", "many"), "--limit is a whole number, or none"),
        (("limit", "mail", "--rate", "fast"), 'must look like "10/s"'),
    ],
)
async def test_bad_input_is_refused_with_what_to_do(arguments: tuple[str, ...], message: str, command: Command) -> None:
    assert message in (await command("queues", *arguments, code=2)).stderr
