"""Everything a user can get wrong: real processes, the message, the exit code, and never a traceback of ours."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio
from psycopg.conninfo import make_conninfo

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes, Running

    from .conftest import Command

LONG = "9" * 5000
NOWHERE = "host=127.0.0.1 port=1 user=somebody password=secret"


def assert_says(running: Running, what: str) -> None:
    """The complaint is one line that begins with our name; there is no traceback, and no password."""
    complaints = [line for line in running.stderr.splitlines() if line.startswith("pulse-trio: ")]
    assert re.search(what, complaints[-1]), running.report()
    assert "Traceback" not in running.stderr
    assert "secret" not in running.stderr


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["run", "ap:handlers"], r"There is no module 'ap' in .*Did you mean app\?"),
        (["run", "app:handler"], r"no attribute 'handler'. Its Handlers: app:handlers"),
        (["run", "app:trio"], r"app:trio is a module, not a pulse_trio.Handlers object"),
        (["run", "app.py"], r"Give the module, not the file: pulse-trio run app:handlers"),
        (["run", "twice"], r"The kind 'a' is registered twice: a \(.*twice.py:3\) and b"),
        (["run", "badly_named"], r"Queue name 'a b' is not valid: use 1 to 128"),
        (["run", "needy"], r"Importing 'needy' failed: ModuleNotFoundError: No module named 'no_such_library'"),
        (["run", "app", "--queues", "a b"], r"Queue name 'a b' is not valid: use 1 to 128"),
        (["run", "app", "--lease", "soon"], r"--lease must be a number of seconds, got 'soon'"),
        (["run", "app", "--lease", "6"], r"'heartbeat' must be at most half of the lease"),
        (["run", "app", "--processes", "0"], r"'processes' must be at least 1"),
        (["run"], r"Missing argument 'APP:HANDLERS'"),
        (["enqueue", "greet", "{bad"], r"not valid JSON: .* at line 1, column 2"),
        (["enqueue", "greet", "[1]"], r"must be a JSON object.*not an array"),
        (["enqueue", "greet", "{}", "--app", "app"], r"do not fit greet.*missing a required argument: 'name'"),
        (["enqueue", "greet", '{"name": 5}', "--app", "app"], r"do not fit greet.*[Ee]xpected `str`, got `int`"),
        (["enqueue", "great", "{}", "--app", "app"], r"No handler is registered as 'great'. Did you mean 'greet'\?"),
        (["enqueue", "greet", "--queue", "a b"], r"Queue name 'a b' is not valid"),
        (["enqueue", "greet", "--delay", "nan"], r"delay must be a number"),
        (["enqueue", ""], r"kind must have 1 to 256 bytes"),
        (["jobs", "show", "x"], r"Invalid value for 'ID': 'x' is not a valid whole number"),
        (["jobs", "list", "--timeout", "soon"], r"'soon' is not a valid number"),
        (["jobs", "list", "--timeout", "nan"], r"'nan' is not a number"),
        (["queues", "drain", "mail", "--timeout", "nan"], r"'nan' is not a number"),
        (["jobs", "list", "--state", "lost"], r"Invalid value for '--state'"),
        (["migrate", "--sql", "--check"], r"--sql or --check, not both"),
        (["migrate", "--sql", "--json"], r"--sql or --json, not both"),
        (["migrate", "--schema", "pg_mine"], r"'schema' must not begin with pg_, which PostgreSQL keeps"),
        (["run", "app", "--concurrency", "3000000000"], r"'concurrency' must be from 1 to 1,000,000"),
        (["bench", "latency", "--every", "nan"], r"'nan' is not a number"),
        (["queues", "limit", "mail", "--limit", "99999999999"], r"from 1 to 2,147,483,647, got 99999999999"),
        (["run2"], r"No such command 'run2'"),
        (["jobs", "list", "--dsn", "mysql://u:secret@h/d"], r"is for mysql, and pulse-trio needs PostgreSQL"),
        (["jobs", "list", "--dsn", "nonsense password=secret"], r"cannot be read"),
        (["jobs", "list", "--dsn", "host=x password=secret\udcff"], r"cannot be read: it has bytes that are not UTF-8"),
        (["jobs", "list", "--dsn", "postgresql://a:secret%ff@h/d"], r"cannot be read: it has bytes that are not UTF-8"),
        (["jobs", "list", "--schema", "p\udcff"], r"'schema' must have 1 to 63 bytes of UTF-8"),
        (["enqueue", "greet", f'{{"n": {LONG}}}'], r"has more digits than Python takes"),
        (["enqueue", "greet", "--meta", f'{{"n": {LONG}}}'], r"has more digits than Python takes"),
        (["jobs", "send-event", "1", "e", LONG], r"has more digits than Python takes"),
        (["jobs", "complete", "1", "--force", "--result", LONG], r"has more digits than Python takes"),
        (["jobs", "complete", "1", "--force", "--result", "[" * 100_000], r"nested too deeply"),
        (["jobs", "complete", "1", "--force", "--result", "NaN"], r"JSON, which has no NaN"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
async def test_wrong_usage_exits_2_before_a_database_is_asked(
    processes: Processes, arguments: list[str], what: str
) -> None:
    registry = "from pulse_trio import Handlers\nhandlers = Handlers()\n"
    (processes.folder / "twice.py").write_text(
        f"{registry}@handlers.job\nasync def a(): ...\n@handlers.job(name='a')\nasync def b(): ...\n"
    )
    (processes.folder / "badly_named.py").write_text(f"{registry}@handlers.job(queue='a b')\nasync def a(): ...\n")
    (processes.folder / "needy.py").write_text("import no_such_library\n")
    running = await processes.command(*arguments, env={"PULSE_TRIO_DSN": NOWHERE})
    assert await running.ended() == 2, running.report()
    assert_says(running, what)


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("arguments", [["run", "app"], ["jobs", "list"], ["migrate"]], ids=" ".join)
@pytest.mark.parametrize(
    ("variable", "value", "what"),
    [
        ("PULSE_TRIO_SCHEMA", "p\udcff", r"'schema' must have 1 to 63 bytes of UTF-8"),
        (
            "PULSE_TRIO_DSN",
            "postgresql://a:secret\udcff@127.0.0.1:1/x",
            r"from PULSE_TRIO_DSN cannot be read: .*not UTF-8",
        ),
        (
            "PULSE_TRIO_DSN",
            "host=127.0.0.1 port=1 password=secret\udcff",
            r"from PULSE_TRIO_DSN cannot be read: .*not UTF-8",
        ),
    ],
)
async def test_bytes_in_the_environment_that_are_not_utf8_are_wrong_usage(
    processes: Processes, arguments: list[str], variable: str, value: str, what: str
) -> None:
    """It was "a bug in pulse-trio", with a traceback."""
    running = await processes.command(*arguments, env={"PULSE_TRIO_DSN": NOWHERE, variable: value})
    assert await running.ended() == 2, running.report()
    assert_says(running, what)


async def test_a_job_that_is_not_there_is_told_so(command: Command) -> None:
    assert_says(await command("jobs", "show", "77", code=2), "There is no job 77")


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "app", "--connect-timeout", "0"],
        ["enqueue", "greet"],
        ["jobs", "list"],
        ["jobs", "show", "1"],
        ["jobs", "retry", "1"],
        ["workers"],
        ["migrate"],
        ["migrate", "--check"],
        ["bench", "drain"],
    ],
    ids=" ".join,
)
async def test_an_unreachable_database_exits_1(processes: Processes, arguments: list[str]) -> None:
    running = await processes.command(*arguments, "--dsn", NOWHERE)
    assert await running.ended() == 1, running.report()
    assert_says(running, r"database error: .*Connection refused\. Is PostgreSQL running there")


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("processes_wanted", ["1", "2"])
async def test_run_says_that_it_waits_for_the_database(processes: Processes, processes_wanted: str) -> None:
    running = await processes.command(
        "run", "app", "--dsn", NOWHERE, "--connect-timeout", "1", "--processes", processes_wanted
    )
    await running.line("waiting for the database, up to 1 s: .*Connection refused")
    assert await running.ended() == 1, running.report()
    assert_says(running, "database error: .*Connection refused")
    assert running.stderr.count("waiting for the database") == 1


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize(
    ("target", "what"),
    [("ap:handlers", "There is no module 'ap'.*Did you mean app"), ("app.py", "Give the module, not the file")],
)
async def test_a_supervisor_says_what_is_wrong_with_the_module_before_it_waits(
    processes: Processes, target: str, what: str
) -> None:
    running = await processes.command("run", target, "--processes", "2", "--dsn", NOWHERE)
    assert await running.ended() == 2, running.report()
    assert_says(running, what)
    assert "waiting for the database" not in running.stderr


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize(
    "arguments",
    [["run", "app"], ["run", "app", "--processes", "2"], ["jobs", "list"], ["enqueue", "greet"]],
    ids=" ".join,
)
async def test_a_missing_schema_exits_1_and_names_the_command(
    processes: Processes, empty_dsn: str, arguments: list[str]
) -> None:
    running = await processes.command(*arguments, "--dsn", empty_dsn)
    assert await running.ended() == 1, running.report()
    assert_says(running, r"no pulse-trio schema 'pulse'. Create it with: pulse-trio migrate$")


NEWER = "INSERT INTO pulse.migration (version, name, checksum) VALUES (9999, 'later', 'x')"
OLDER = "DELETE FROM pulse.migration WHERE version = (SELECT max(version) FROM pulse.migration)"
CHANGED = "UPDATE pulse.migration SET checksum = 'x'"


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("arguments", [["run", "app"], ["jobs", "list"], ["migrate", "--check"]], ids=" ".join)
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (NEWER, r"schema is newer than this version of pulse-trio.*Upgrade pulse-trio"),
        (OLDER, r"pulse-trio migrate$"),
        (CHANGED, r"was applied from a different text"),
    ],
    ids=["newer", "older", "changed"],
)
async def test_a_schema_of_another_version_exits_1(
    command: Command, dsn: str, arguments: list[str], change: str, what: str
) -> None:
    def alter() -> None:
        with psycopg.connect(dsn) as connection:
            connection.execute(change.encode())

    await trio.to_thread.run_sync(alter)
    assert_says(await command(*arguments, code=1), what)


async def test_a_role_without_rights_is_told_so(processes: Processes, empty_dsn: str) -> None:
    def make_role() -> None:
        with psycopg.connect(empty_dsn) as connection:
            connection.execute(
                "DO $$ BEGIN CREATE ROLE pulse_trio_nobody LOGIN; EXCEPTION WHEN duplicate_object THEN END $$"
            )
            connection.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")

    await trio.to_thread.run_sync(make_role)
    as_nobody = make_conninfo(empty_dsn, options="-crole=pulse_trio_nobody")
    running = await processes.command("migrate", "--dsn", as_nobody)
    assert await running.ended() == 2, running.report()
    assert_says(running, "permission denied.* GRANT CREATE ON DATABASE .* TO pulse_trio_nobody")


async def test_a_folder_that_is_gone_is_no_bug(processes: Processes) -> None:
    """A deploy removes the folder of a release while a supervisor, which was started in it, starts a process."""
    folder = processes.folder / "gone"
    folder.mkdir()
    command = str(Path(sysconfig.get_path("scripts")) / "pulse-trio")
    line = 'rmdir "$PWD" && exec "$0" run app:handlers --dsn=dbname=x'
    running = await processes.start("sh", "-c", line, command, cwd=folder)
    assert await running.ended() == 2, running.report()
    assert_says(running, "The folder in which this command was given does not exist any more")


async def test_a_broken_settings_file_is_named(processes: Processes, command: Command) -> None:
    (processes.folder / "pulse-trio.toml").write_text("leese = 5")
    assert_says(await command("jobs", "list", code=2), r"pulse-trio.toml has the unknown setting 'leese'; known: ")
    (processes.folder / "pulse-trio.toml").write_text("lease = [")
    assert_says(await command("workers", code=2), r"pulse-trio.toml is not valid TOML")
