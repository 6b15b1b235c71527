"""The parts of the command line that need no process and no database."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import re
import subprocess
import sys
import typing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner

from pulse_trio import logs, observe
from pulse_trio.cli.application import pulse_trio
from pulse_trio.cli.bench.measures import _percentile  # pyright: ignore[reportPrivateUsage]
from pulse_trio.cli.database import choose_database
from pulse_trio.cli.enqueue import parse_arguments
from pulse_trio.cli.faults import describe, our_error
from pulse_trio.cli.fleet import environment_of
from pulse_trio.cli.output import print_json, print_table
from pulse_trio.cli.reference import outdated, reference
from pulse_trio.errors import ConfigurationError, DatabaseUnavailable, InvalidArguments, SchemaError, UnknownJob
from pulse_trio.plain import plain
from pulse_trio.settings import WorkerSettings, environment_settings
from pulse_trio.states import State
from pulse_trio.text import ago, duration, headline, one_line, shown

ROOT = Path(__file__).parents[2]


def test_a_worker_does_not_load_what_only_tables_and_measuring_need() -> None:
    program = (
        "import sys, pulse_trio.cli; print([name for name in ('rich.console', 'rich.progress') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# The reference


def test_the_reference_pages_are_current() -> None:
    assert outdated(ROOT / "docs" / "reference") == [], "run: python -m pulse_trio.cli.reference docs/reference"


def test_the_reference_script_writes_what_is_missing_and_checks_it(tmp_path: Path) -> None:
    runner = CliRunner()
    assert runner.invoke(reference, ["--check", str(tmp_path)]).exit_code == 1
    assert runner.invoke(reference, [str(tmp_path)]).exit_code == 0
    assert runner.invoke(reference, ["--check", str(tmp_path)]).exit_code == 0


@pytest.mark.parametrize("command", [[], ["run"], ["jobs"], ["jobs", "list"], ["migrate"], ["bench", "drain"]])
def test_every_command_explains_itself(command: list[str]) -> None:
    result = CliRunner().invoke(pulse_trio, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage: " in result.output


# Data on a terminal


def test_what_a_terminal_would_obey_is_shown_and_not_obeyed() -> None:
    assert shown("\x1b[31mred\x07\x7f\x9b\u202e\ud800") == "\\x1b[31mred\\x07\\x7f\\x9b\\u202e\\ud800"
    assert shown("a\r\nb\tc é 中") == "a\nb\tc é 中"
    assert one_line(" a\n\tb ") == "a b"
    assert headline("first\x1b\nsecond") == "first\\x1b"
    assert headline(None) == ""


def test_a_table_shows_markup_and_control_characters_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("id", "text"), [(1, "[bold]x[/bold]\x1b[0m"), (22, "two\nlines"), (3, None)], right=("id",))
    assert capsys.readouterr().out == "id  text\n 1  [bold]x[/bold]\\x1b[0m\n22  two lines\n 3\n"


def test_a_table_is_not_cut_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("text",), [("x" * 500,)])
    assert "x" * 500 in capsys.readouterr().out


def test_times_are_said_as_people_say_them() -> None:
    now = datetime(2025, 1, 1, tzinfo=UTC)
    assert ago(None, now) == ""
    assert ago(now - timedelta(seconds=5), now) == "5 s ago"
    assert ago(now + timedelta(minutes=5), now) == "in 5 min"
    assert ago(now - timedelta(days=3), now) == "3 d ago"
    assert [duration(s) for s in (0.01234, 59, 125, 3 * 3600 + 240, 50 * 3600)] == [
        "0.0123 s", "59 s", "2 min 5 s", "3 h 4 min", "2 d 2 h",
    ]  # fmt: skip


def test_json_has_times_in_utc_and_plain_values() -> None:
    noon = datetime(2025, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    value = plain({"at": noon, "state": State.DEAD, "list": (1, None), "settings": WorkerSettings()})
    document = json.loads(json.dumps(value))
    assert document["at"] == "2025-01-01T10:00:00+00:00"
    assert document["state"] == "dead"
    assert document["list"] == [1, None]
    assert document["settings"]["lease"] == 30


# Arguments


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{bad", r"not valid JSON: expecting property name .* at line 1, column 2, here: \{ >>>bad$"),
        ('{"a":\n 1,}', "at line 2"),
        ("", "not valid JSON: expecting value at line 1, column 1"),
        ("[1]", "must be a JSON object, as in .*, not an array"),
        ('"x"', "not a string"),
        ("true", "not a boolean"),
        ("null", "not null"),
        ("12", "not a number"),
        ('{"a": NaN}', "The arguments are not valid JSON, which has no NaN"),
        ("[" * 100_000, "nested too deeply"),
        ('{"b": [{"a": 1, "a": 2}]}', "ambiguous: an object has two keys 'a', and one would be lost"),
        ('{"n": 0.1234567890123456789}', "0.1234567890123456789 would be 0.12345678901234568. Give it as text"),
        ('{"n": 12345678901234567890.5}', "12345678901234567890.5 would be 1.2345678901234567e.19"),
        ('{"n": 1e400}', "1e400 would be inf"),
        ('{"n": -1e-99999999999999999999}', "would be -0.0"),
    ],
)
def test_bad_arguments_are_told_where_they_are_bad(text: str, what: str) -> None:
    with pytest.raises(InvalidArguments, match=what):
        parse_arguments(text)


def test_numbers_are_stored_as_they_are_given() -> None:
    text = '{"a": 12345678901234567890123, "b": 1.10, "c": 1e2, "d": -0.0, "e": 0.30000000000000004, "f": 5e-324}'
    assert json.loads(text) == parse_arguments(text)


# Which database


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A project's folder, and nothing in the environment."""
    for variable in ("PULSE_TRIO_DSN", "DATABASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_database_is_the_options_then_the_environments_then_the_files(
    clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_database(None).dsn is None
    (clean / "pulse-trio.toml").write_text('dsn = "dbname=file"')
    assert choose_database(None).dsn == "dbname=file"
    monkeypatch.setenv("DATABASE_URL", "postgres://u@h/generic")
    assert choose_database(None).dsn == "postgres://u@h/generic"
    monkeypatch.setenv("PULSE_TRIO_DSN", "dbname=ours")
    assert choose_database(None).dsn == "dbname=ours"
    assert choose_database("dbname=given").dsn == "dbname=given"
    monkeypatch.setenv("PULSE_TRIO_DSN", "")
    assert choose_database(None).source == "DATABASE_URL"


def test_the_choice_is_told_without_its_password(clean: Path) -> None:
    assert str(choose_database("postgresql://u:secret@h/d")) == "database postgresql://u:***@h/d (from --dsn)"
    assert str(choose_database("dbname=d password=secret")) == "database dbname=d password=*** (from --dsn)"


@pytest.mark.parametrize(
    ("dsn", "what"),
    [
        ("", "from --dsn is empty"),
        ("mysql://u:secret@h/d", "is for mysql, and pulse-trio needs PostgreSQL"),
        ("postgresql+asyncpg://u:secret@h/d", r"names the driver \+asyncpg: leave that out"),
        ("not a dsn password=secret", "cannot be read"),
        ("postgresql://u:secret@h/d?nonsense=1", "cannot be read"),
    ],
)
def test_an_address_that_cannot_work_is_refused_without_its_password(clean: Path, dsn: str, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what) as caught:
        choose_database(dsn)
    assert "secret" not in str(caught.value)


def test_a_file_whose_dsn_is_no_text_is_refused(clean: Path) -> None:
    (clean / "pulse-trio.toml").write_text("dsn = 5")
    with pytest.raises(ConfigurationError, match="dsn must be text"):
        choose_database(None)


# Errors


def test_an_expected_error_in_groups_is_unwrapped() -> None:
    error = UnknownJob("no job 1")
    assert our_error(error) is error
    assert our_error(ExceptionGroup("", [ExceptionGroup("", [error])])) is error


def test_an_unexpected_error_is_not_hidden_by_an_expected_one() -> None:
    assert our_error(ExceptionGroup("", [UnknownJob("x"), RuntimeError("ours")])) is None


def test_a_database_error_that_nobody_translated_is_translated() -> None:
    translated = our_error(psycopg.errors.InsufficientPrivilege("permission denied for schema x"))
    assert translated is not None
    assert translated.exit_code == 2


def test_a_statement_that_somebody_stopped_did_not_take_too_long() -> None:
    stopped = our_error(psycopg.errors.QueryCanceled("canceling statement due to user request"))
    assert "Somebody stopped that" in str(stopped)
    late = our_error(psycopg.errors.QueryCanceled("canceling statement due to statement timeout"))
    assert "took too long" in str(late)


def test_an_unreachable_database_is_told_on_one_line_with_what_to_do() -> None:
    refused = (
        'connection to server at "::1", port 1 failed: Connection refused\n\tIs the server running on that host and '
    )
    libpq = (
        f"{refused}accepting TCP/IP connections?\nMultiple connection attempts failed. All failures were:\n- host: x"
    )
    assert describe(DatabaseUnavailable(libpq)) == (
        'database error: connection to server at "::1", port 1 failed: Connection refused. '
        "Is PostgreSQL running there, and is the address right?"
    )
    assert "Check the user" in describe(DatabaseUnavailable('FATAL: role "x" does not exist'))
    assert "restarts or stops" in describe(DatabaseUnavailable("FATAL: the database system is shutting down"))
    read_only = describe(DatabaseUnavailable("cannot execute SELECT in a read-only transaction"))
    assert "It is a standby" in read_only
    assert "Is PostgreSQL running" not in read_only
    assert "pg_cancel_backend" in describe(DatabaseUnavailable("claims: canceling statement due to user request"))
    assert "statement_timeout" in describe(DatabaseUnavailable("claims: canceling statement due to statement timeout"))
    assert "max_connections" in describe(DatabaseUnavailable("FATAL: sorry, too many clients already"))
    assert describe(SchemaError("older. Do this")) == "database error: older. Do this"


# Logs


def test_every_event_has_a_sentence() -> None:
    for event in typing.get_args(observe.Event):
        example = event(**{name: _example(kind) for name, kind in typing.get_type_hints(event).items()})
        assert re.fullmatch(r"[a-zA-Z].+", logs.sentence(example), re.DOTALL)


def _example(kind: object) -> object:
    if typing.get_origin(kind) in (list, tuple):
        return ("text",)
    return {int: 1, float: 1.5, str: "text", datetime: datetime(2026, 1, 1, tzinfo=UTC)}.get(typing.cast("type", kind))


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("pulse_trio", logging.WARNING, "file", 1, message, (), None)
    vars(made).update(extra)
    return made


def test_a_line_of_the_log_cannot_be_forged_with_control_characters() -> None:
    assert logs.LineFormatter().format(record("x\x1b[2J")).endswith(" WARNING x\\x1b[2J")


def test_a_json_line_has_the_event_and_its_fields() -> None:
    line = logs.JsonFormatter().format(record("lost", pulse_trio_event=observe.DatabaseFound("claimer")))
    document = json.loads(line)
    assert document | {"event": "DatabaseFound", "loop": "claimer", "level": "warning"} == document
    assert "\n" not in line


@pytest.mark.parametrize("event", typing.get_args(observe.Event), ids=lambda event: event.__name__)
def test_no_event_says_otherwise_what_a_json_line_says_of_itself(event: typing.Any) -> None:
    """The line of a cancellation had what its person said, or null, for `message`; that of a dead process its pid."""
    made = event(**{name: _example(kind) for name, kind in typing.get_type_hints(event).items()})
    plain, told = record("said"), record("said", pulse_trio_event=made)
    told.created = plain.created
    line, without = (json.loads(logs.JsonFormatter().format(one)) for one in (told, plain))
    own = ("time", "pid", "level", "logger", "message")
    assert {name: line[name] for name in own} == {name: without[name] for name in own}
    assert line["event"] == event.__name__
    for field in dataclasses.fields(event):
        assert "object" in field.metadata or field.name in line
        assert field.name not in own or f"event_{field.name}" in line


def test_the_users_own_logging_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.getLogger(), "handlers", [theirs])
    logs.set_up(as_json=True, verbose=False)
    assert logging.getLogger().handlers == [theirs]


# Several processes


def test_a_childs_environment_is_the_parents_settings_wherever_they_came_from() -> None:
    settings = WorkerSettings(queues=("a", "b"), lease=60, processes=4, schema="mine")
    environment = environment_of("dbname=x", settings, {"burst": True, "verbose": False})
    assert environment["PULSE_TRIO_DSN"] == "dbname=x"
    assert environment["PULSE_TRIO_BURST"] == "1"
    assert environment["PULSE_TRIO_VERBOSE"] == "0"
    again = WorkerSettings(**environment_settings(environment))
    assert again == WorkerSettings(queues=("a", "b"), lease=60, processes=1, schema="mine")


def test_settings_that_were_not_given_are_not_passed_on() -> None:
    assert "PULSE_TRIO_QUEUES" not in environment_of("dbname=x", WorkerSettings(), {})


# The bench


def test_a_percentile_is_a_value_that_was_measured() -> None:
    assert [_percentile([1.0, 2.0, 3.0, 4.0], p) for p in (1, 50, 95, 100)] == [1.0, 2.0, 4.0, 4.0]
    assert _percentile([7.0], 50) == 7.0


def test_an_unknown_kind_is_said_once_a_minute_with_the_number_of_jobs(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    tell = logs.LogInstrument(every_job=False, clock=lambda: now).listeners()[observe.UnknownKindReleased]
    with caplog.at_level("INFO", logger="pulse_trio"):
        for job_id in range(100):
            tell(observe.UnknownKindReleased(job_id, "mail"))
        tell(observe.UnknownKindReleased(100, "other"))
        now = 60.0
        tell(observe.UnknownKindReleased(101, "mail"))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[1] for line in lines] == ["0", "100", "101"]
    assert lines[-1].endswith("(99 more since this was last logged)")


@pytest.mark.parametrize("levels", [500, 990, 1100, 1500])
def test_json_is_printed_as_deep_as_python_reads(levels: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A row that the schema's owner wrote ended each list with it: a bug in pulse-trio, the command said."""
    value: list[object] = []
    for _ in range(levels):
        value = [value]
    print_json({"result": value})
    assert capsys.readouterr().out.count("[") == levels + 1
    assert sys.getrecursionlimit() < 10_000
