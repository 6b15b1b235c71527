"""`pulse-trio jobs`, as real processes on a real database."""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.conninfo import make_conninfo

from pulse_trio import DatabaseUnavailable, SyncClient
from pulse_trio.cli import timeline
from pulse_trio.cli.application import status_of
from pulse_trio.jobs import Progress
from pulse_trio.lines import Kind
from pulse_trio.states import State
from pulse_trio.store import history
from pulse_trio.store.cancelling import CancellationRecord
from pulse_trio.store.family import HistoryLine
from pulse_trio.store.life import life_of
from pulse_trio.store.operations import AttemptRecord, JobRecord
from pulse_trio.text import parse_duration, parse_moment
from support.stores import Window, claim, end, open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .conftest import Command


@pytest.mark.usefixtures("app")
async def test_a_dead_job_is_listed_shown_with_its_traceback_and_retried(command: Command) -> None:
    job_id = (await command("enqueue", "broken", "--max-attempts", "1")).stdout.strip()
    await command("run", "app", "--burst")

    listed = (await command("jobs", "list", "--state", "dead")).stdout
    assert "ValueError: no \\x1b[31mluck" in listed
    assert "Traceback" not in listed

    shown = (await command("jobs", "show", job_id)).stdout
    assert "state        dead" in shown
    assert "attempt 1  failed" in shown
    assert "last error (attempt 1):" in shown
    assert "Traceback (most recent call last):" in shown
    assert "\x1b" not in shown

    assert (await command("jobs", "retry", job_id)).stdout == f"{job_id} available\n"
    refused = await command("jobs", "retry", job_id, code=2)
    assert f"Job {job_id} is available: a job can be retried when" in refused.stderr


async def test_tags_and_metadata_are_given_listed_by_and_shown(command: Command) -> None:
    one = (await command("enqueue", "greet", "--tag", "eu", "--tag", "a/b", "--meta", '{"order": 7}')).stdout.strip()
    listed = json.loads((await command("jobs", "list", "--tag", "a/b", "--json")).stdout)
    assert [(job["id"], job["tags"], job["meta"]) for job in listed] == [(int(one), ["eu", "a/b"], {"order": 7})]
    assert (await command("jobs", "list", "--tag", "a")).stdout.count(one) == 0
    refused = await command("enqueue", "greet", "--meta", "[1]", code=2)
    assert "The metadata must be a JSON object" in refused.stderr


async def test_retrying_several_retries_those_that_can_be(command: Command) -> None:
    job_id = int((await command("enqueue", "greet", "--delay", "600")).stdout)
    done = await command("jobs", "retry", "4711", str(job_id), "--json", code=2)
    answer = json.loads(done.stdout)
    assert answer["retried"] == [job_id]
    assert set(answer["refused"]) == {"4711"}
    assert "There is no job 4711" in done.stderr


async def test_lists_are_filtered_and_paged(command: Command) -> None:
    for kind in ("a", "b", "b"):
        await command("enqueue", kind)
    both = json.loads((await command("jobs", "list", "--kind", "b", "--json")).stdout)
    assert [job["kind"] for job in both] == ["b", "b"]
    first = await command("jobs", "list", "--limit", "2")
    assert f"--before {both[1]['id']}" in first.stderr
    rest = json.loads((await command("jobs", "list", "--before", str(both[1]["id"]), "--json")).stdout)
    assert [job["kind"] for job in rest] == ["a"]
    none = await command("jobs", "list", "--queue", "none", "--state", "dead")
    assert (none.stdout, "no jobs like that: state dead, queue none" in none.stderr) == ("", True)
    assert (await command("jobs", "list", "--queue", "none", "--json")).stdout == "[]\n"


async def test_a_key_is_shown_where_a_job_has_one(command: Command, dsn: str) -> None:
    with Window(dsn) as window:
        waiting, plain, done = window.enqueue("q", key="tenant 7"), window.enqueue("r"), window.enqueue("r")
        async with open_store(dsn) as store:
            await store.settle([end(c) for c in await claim(store, "r")])
        # The archive's column has no check of its own.
        window.run("UPDATE job_archive SET key = %s WHERE id = %s", "tenant \x1b[31m8", done)

    listed = (await command("jobs", "list")).stdout.splitlines()
    assert listed[0].split()[:6] == ["id", "state", "queue", "kind", "key", "attempt"]
    assert "tenant 7" in listed[3]
    assert "tenant \\x1b[31m8" in listed[1]
    # No column of its own where no job of the list has one.
    assert " key " not in (await command("jobs", "list", "--before", str(done), "--limit", "1")).stdout
    as_json = json.loads((await command("jobs", "list", "--json")).stdout)
    assert {j["id"]: j["key"] for j in as_json} == {waiting: "tenant 7", plain: None, done: "tenant \x1b[31m8"}

    for job_id, key in ((waiting, "tenant 7"), (done, "tenant \\x1b[31m8")):
        assert f"\nkey          {key}\n" in (await command("jobs", "show", str(job_id))).stdout
    assert "\nkey " not in (await command("jobs", "show", str(plain))).stdout
    assert json.loads((await command("jobs", "show", str(waiting), "--json")).stdout)["key"] == "tenant 7"


async def test_show_says_why_a_job_waits(command: Command, dsn: str) -> None:
    with Window(dsn) as window:
        job_id = window.enqueue("mail")
    await command("queues", "pause", "mail")
    shown = await command("jobs", "show", str(job_id))
    assert f"\nwaits        Its queue, mail, is paused.\n{'':13}No worker is live.\n" in shown.stdout
    as_json = json.loads((await command("jobs", "show", str(job_id), "--json")).stdout)
    assert [reason["code"] for reason in as_json["waits_for"]] == ["queue_paused", "no_worker"]


async def test_show_of_a_role_that_may_not_ask_why_leaves_it_out(
    command: Command, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Window(dsn) as window:
        job_id, role = window.enqueue("mail"), f"asks_{os.getpid()}_{time.monotonic_ns()}"
        readable = "jobs, pulse.attempts, pulse.session, pulse.cancellations, pulse.job, pulse.migration"
        window.run(f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA pulse TO {role}")
        window.run(f"GRANT SELECT ON pulse.{readable} TO {role}")
        try:
            limited = make_conninfo(dsn, options=f"-crole={role}")
            shown = await command("jobs", "show", str(job_id), "--dsn", limited)
            assert ("\nstate        available\n" in shown.stdout, "\nwaits" in shown.stdout) == (True, False)
        finally:
            window.run(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_a_mass_retry_is_rehearsed_asked_for_and_done(command: Command, dsn: str) -> None:
    with Window(dsn) as window:
        async with open_store(dsn) as store:
            ids = window.enqueue_many(3, "q")
            await store.settle([end(c, "discarded", error="x") for c in await claim(store, "q")])

        nothing = await command("jobs", "retry", code=2)
        assert "Say which jobs" in nothing.stderr
        assert "Say which state" in (await command("jobs", "retry", "--kind", "noop", code=2)).stderr
        assert "not both" in (await command("jobs", "retry", "1", "--state", "dead", code=2)).stderr
        dry = await command("jobs", "retry", "--state", "dead", "--dry-run", "--json")
        assert json.loads(dry.stdout) == {"would_be_retried": ids}
        # Nobody can be asked: nothing is done.
        unasked = await command("jobs", "retry", "--state", "dead", code=2)
        assert "3 jobs would be retried: give --yes" in unasked.stderr
        assert [window.state(i) for i in ids] == ["dead"] * 3

        done = await command("jobs", "retry", "--state", "dead", "--kind", "noop", "--rate", "1/h", "--yes")
        assert done.stdout == "3 jobs retried\n"
        assert "they come due over 2 h 0 min" in done.stderr
        assert [window.state(i) for i in ids] == ["available", "scheduled", "scheduled"]

        gone = await command("jobs", "delete", str(ids[0]), "4711", code=2)
        assert gone.stdout == "1 job deleted\n"
        assert "There is no job 4711" in gone.stderr
        rest = await command("jobs", "delete", "--state", "scheduled", "--limit", "1", "--yes", "--json")
        assert json.loads(rest.stdout) == {"deleted": [ids[1]], "refused": {}}
        assert [r["id"] for r in window.run("SELECT id FROM jobs")] == [ids[2]]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["list", "--since", "yesterday"], "a moment is 2h (ago), 2026-11-21"),
        (["list", "--worker", "web"], "host:pid"),
        (["retry", "--rate", "fast", "--state", "dead"], "100/s or 30/min"),
        (["retry", "--rate", "0/s", "--state", "dead"], "100/s or 30/min"),
        (["list", "--state", "gone"], "gone"),
    ],
    ids=str,
)
async def test_an_option_that_cannot_be_meant_is_said(command: Command, arguments: list[str], what: str) -> None:
    assert what in (await command("jobs", *arguments, code=2)).stderr


async def test_a_list_that_takes_too_long_says_how_to_narrow_it(command: Command, dsn: str) -> None:
    with Window(dsn) as window:
        window.run(
            "INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures,"
            " max_attempts, priority, state, queue, kind, args, error)"
            " SELECT n, now(), now(), now(), now(), 1, 1, 1, 20, 0, 5, 'q', 'k', '{}', repeat('x', 500)"
            " FROM generate_series(1, 20000) n"
        )
    done = await command("jobs", "list", "--error", "nowhere", "--timeout", "0.001", code=1)
    assert "took longer than 0.001 s and was stopped. Narrow it (--state dead, --since 1h" in done.stderr


def test_moments_and_lengths_of_time_are_read_as_people_write_them() -> None:
    assert parse_duration("90") == parse_duration("90s") == parse_duration("1.5min") == timedelta(seconds=90)
    assert parse_duration("2 h") == timedelta(hours=2)
    assert parse_duration("1w") == parse_duration("7d")
    assert parse_moment("2h") == timedelta(hours=2)
    assert parse_moment("2026-11-21T09:30+01:00") == datetime(2026, 11, 21, 8, 30, tzinfo=UTC)
    moment = parse_moment("2026-11-21")
    assert isinstance(moment, datetime)
    assert moment.tzinfo is not None
    for text in ("", "-1h", "1y", "h", "2026-13-01", "9" * 400 + "w"):
        with pytest.raises(ValueError, match="a moment is"):
            parse_moment(text)


async def test_a_queues_retention_is_set_shown_and_taken_back(command: Command) -> None:
    assert "queues have the workers' retention" in (await command("jobs", "retention")).stderr
    assert "mail   3 d 0 h" in (await command("jobs", "retention", "mail", "3d")).stdout
    listed = await command("jobs", "retention", "--json")
    assert json.loads(listed.stdout) == [{"queue": "mail", "retention": 259200.0}]
    assert "the queue mail has the workers' retention" in (await command("jobs", "retention", "mail", "default")).stderr
    assert "not 'soon'" in (await command("jobs", "retention", "mail", "soon", code=2)).stderr


async def test_a_cancellation_is_in_the_jobs_timeline(command: Command, dsn: str) -> None:
    with Window(dsn) as window:
        job_id = window.enqueue("q")
        async with open_store(dsn) as store:
            (claimed,) = await claim(store, "q")
            window.run("SELECT cancel(%s, 'not needed')", job_id)
            await store.settle([end(claimed, "cancelled", error="not needed")])
    shown = (await command("jobs", "show", str(job_id))).stdout
    assert ": not needed" in next(line for line in shown.splitlines() if "cancel asked" in line)
    answer = json.loads((await command("jobs", "show", str(job_id), "--json")).stdout)
    assert [entry["event"] for entry in answer["timeline"]] == [
        "enqueued", "attempt", "cancel asked", "cancel delivered", "cancelled",
    ]  # fmt: skip
    assert answer["timeline"][1]["host"]
    # As text: JavaScript and jq round numbers above 2^53.
    assert answer["timeline"][1]["worker"] == answer["attempts"][0]["worker"] == str(claimed.session)
    assert [c["reason"] for c in answer["cancellations"]] == ["not needed"]


async def test_the_last_progress_of_a_completed_job_is_no_longer_shown(command: Command, dsn: str) -> None:
    """It may be a second old."""
    with Window(dsn) as window:
        done, dead = window.enqueue("q"), window.enqueue("q")
        async with open_store(dsn) as store:
            claims = await claim(store, "q")
            await store.write_progress([Progress(claimed, 0.25, "a quarter") for claimed in claims])
            await store.settle([end(claimed, "completed" if claimed.id == done else "discarded") for claimed in claims])
    assert "25% a quarter" not in (await command("jobs", "show", str(done))).stdout
    assert "25% a quarter" in (await command("jobs", "show", str(dead))).stdout
    assert json.loads((await command("jobs", "show", str(done), "--json")).stdout)["progress"] == 0.25


# The picture

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def record(**changes: Any) -> JobRecord:
    fields: dict[str, Any] = dict.fromkeys(JobRecord.__slots__)
    fields |= {"id": 1, "state": State.DEAD, "run_at": at(0), "created_at": at(0), "args": {}, "kind": "k"}
    return JobRecord(**fields | changes)


def tried(number: int, start: float, stop: float | None, outcome: str, error: str | None = None) -> AttemptRecord:
    return AttemptRecord(1, number, 7, at(start), None if stop is None else at(stop), outcome, error, "web-1", 4711)


def drawn(job: JobRecord, attempts: list[AttemptRecord], now: datetime, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    return [line.plain for line in timeline.picture(job, life_of(job, attempts), now)]


def bars(lines: list[str]) -> list[str]:
    """The axis of each line, without what stands beside it."""
    where = lines[0].index("◆")
    return [line[where : where + 48].rstrip() for line in lines]


def test_each_attempt_is_a_bar_where_and_as_long_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    job = record(finished_at=at(48))
    lines = drawn(
        job, [tried(1, 12, 18, "failed", "ValueError: no\n\ntrace"), tried(2, 42, 48, "failed")], at(99), monkeypatch
    )
    assert bars(lines) == [
        "◆",
        "·" * 12 + "█" * 6,
        " " * 18 + "·" * 24 + "█" * 6,
        " " * 47 + "◆",
    ]
    assert "attempt 1  failed" in lines[1]
    assert "6 s  web-1:4711  ValueError: no" in lines[1]
    assert "trace" not in lines[1]
    assert lines[-1].endswith("after 2 attempts, 48 s after it was enqueued")


def test_what_runs_goes_on_to_the_edge_and_what_waits_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    running = record(state=State.RUNNING)
    lines = drawn(running, [tried(1, 24, None, "running")], at(48), monkeypatch)
    assert bars(lines)[1] == "·" * 24 + "█" * 24
    assert "24 s…" in lines[1]
    waiting = record(state=State.RETRYABLE, run_at=at(3648))
    lines = drawn(waiting, [tried(1, 0, 0.001, "failed")], at(48), monkeypatch)
    assert bars(lines)[1] == "█"
    assert "due" in lines[2]
    assert "in 60 min  " in lines[2]


def test_a_cancellation_is_told_in_the_order_in_which_it_happened() -> None:
    """The worker notes after the fact that the handler was cancelled: its clean-up has lines by then."""
    job = record(state=State.CANCELLED, finished_at=at(8), cancel_reason="user")
    asked = CancellationRecord(1, job.id, 1, "enough", "ada", at(4), at(6.5), at(8), State.CANCELLED)
    lines = [
        HistoryLine(1, Kind.STEP, "1:step", "charge", 1, at(1.5)),
        HistoryLine(2, Kind.CANCELLED, "", None, 1, at(5), '{"at": [], "reason": "user"}'),
        HistoryLine(3, Kind.STEP, "2:step", "refund", 1, at(6)),
    ]
    entries = life_of(job, [tried(1, 1, 8, "cancelled")], [asked], lines)
    assert [(entry.event, entry.detail) for entry in entries[:-1]] == [
        ("enqueued", None), ("attempt", None), ("step", "charge"), ("cancel asked", "by ada: enough"),
        ("cancel delivered", None), ("clean-up begins", "user"), ("step", "refund"),
    ]  # fmt: skip
    assert entries[-1].event == "cancelled"
    assert [entry.at for entry in entries] == sorted(entry.at for entry in entries)
    # Noted before a clean-up makes its first call: that is when it was.
    early = replace(asked, delivered_at=at(4.5))
    assert next(e.at for e in life_of(job, [], [early], lines) if e.event == "cancel delivered") == at(4.5)
    # An earlier clean-up, of a run before the retry, is not its own.
    late = replace(asked, requested_at=at(5.5))
    assert next(e.at for e in life_of(job, [], [late], lines) if e.event == "cancel delivered") == at(6.5)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("1:scope", '{"at": [], "count": 2}', "deadline struck"),
        ("1:scope", '{"at": [], "count": 2, "asked": true}', "scope cut short"),
        ("1:scope", '{"at": ["2:st', "scope cut short"),
        ("1:scope", None, "scope cut short"),  # the web page reads no values
        ("2:block body", '{"at": []}', "body cut short"),
    ],
)
def test_a_scope_that_the_handler_cut_short_is_called_no_deadline(key: str, value: str | None, said: str) -> None:
    entries = life_of(record(), [], [], [HistoryLine(1, Kind.SCOPE_CANCELLED, key, None, 1, at(1), value)])
    assert [entry.event for entry in entries[1:2]] == [said]


def test_a_job_of_a_thousand_attempts_stays_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = [tried(n, n, n + 0.5, "snoozed") for n in range(1, 1001)]
    job = record(state=State.COMPLETED, finished_at=at(2000))
    lines = drawn(job, attempts, at(2000), monkeypatch)
    assert len(lines) == 103
    assert "900 attempts more" in lines[11]
    assert "attempt 10 " in lines[10]
    assert "attempt 911 " in lines[12]


def test_a_moment_stranger_than_expected_still_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    # Clocks of two machines, a start before the enqueue, no length at all.
    job = record(finished_at=at(0))
    assert drawn(job, [], at(-5), monkeypatch)
    assert drawn(record(finished_at=at(1)), [tried(1, -3, -2, "failed"), tried(2, 5, 4, "failed")], at(0), monkeypatch)


async def test_a_rehearsed_retry_refuses_jobs_whose_unique_key_is_taken(command: Command, dsn: str) -> None:
    """The rehearsal counted them all; the retry then refused them."""
    client = SyncClient(dsn)
    taken, first, second = (client.enqueue("noop", unique_key=key).id for key in ("a", "b", "c"))
    client.cancel_many([taken, first, second])
    both = []
    for key in ("b", "b"):
        both.append(client.enqueue("noop", unique_key=key).id)
        client.cancel(both[-1])
    live = client.enqueue("noop", unique_key="a").id
    dry = await command("jobs", "retry", str(taken), "--dry-run", code=2)
    assert dry.stdout == "0 jobs would be retried\n"
    assert f"Job {taken} cannot be retried: the live job {live} on that queue has the same unique key." in dry.stderr
    chosen = ("jobs", "retry", "--state", "cancelled")
    told = json.loads((await command(*chosen, "--dry-run", "--json", code=2)).stdout)
    assert told["would_be_retried"] == [first, second]
    assert told["refused"][str(both[1])] == (
        f"Job {both[1]} cannot be retried: job {first} goes first, and has the same unique key."
    )
    done = json.loads((await command(*chosen, "--yes", "--json", code=2)).stdout)
    assert (done["retried"], done["refused"].keys()) == ([first, second], told["refused"].keys())


@pytest.mark.parametrize(
    ("stop", "code"), [(KeyboardInterrupt(), 130), (DatabaseUnavailable("gone"), 1)], ids=["Ctrl-C", "database"]
)
@pytest.mark.parametrize("more", [(), ("--json",), ("--limit", "900")], ids=["text", "json", "limited"])
def test_an_act_that_is_stopped_says_how_many_jobs_it_was_done_to(
    dsn: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    stop: BaseException,
    code: int,
    more: tuple[str, ...],
) -> None:
    """The batches before are committed. It ended without a word about them."""
    done = history.retry_batch

    def retry_batch(ids: Sequence[int], **given: Any) -> Any:
        if given["before"]:
            raise stop
        return done(ids, **given)

    monkeypatch.setattr(history, "retry_batch", retry_batch)
    with Window(dsn) as window:
        window.run(
            "INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures,"
            " max_attempts, priority, state, queue, kind, args)"
            " SELECT n, now(), now(), now(), now(), 1, 1, 1, 20, 0, 5, 'q', 'k', '{}' FROM generate_series(1, 1200) n"
        )
        assert status_of(["jobs", "retry", "--state", "dead", "--yes", "--dsn", dsn, *more]) == code
        assert window.value("SELECT count(*) FROM job") == 500
    said = capsys.readouterr()
    assert said.out == ""
    if "--limit" in more:
        assert "retried until then: 500 of 900 jobs, and perhaps some of the next 400\n" in said.err
    else:
        assert (
            "retried until then: 500 of 1,200 jobs, and perhaps some of the next 500; give the command again for the rest\n"
            in said.err
        )
