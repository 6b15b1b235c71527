"""The commands that look and act once, as real processes on a real database."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio

from pulse_trio.testing.faults.processes import clean_environment
from support.forking import search_path
from support.stores import Window

if TYPE_CHECKING:
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes
    from support.forking import Forker

    from .conftest import Command


async def test_enqueue_prints_the_id_and_the_row_is_as_asked(command: Command) -> None:
    done = await command(
        "enqueue", "greet", '{"name": "Zoë"}', "--queue", "mail", "--priority", "3", "--delay", "60",
        "--max-attempts", "7", "--unique-key", "k",
    )  # fmt: skip
    job = json.loads((await command("jobs", "show", done.stdout.strip(), "--json")).stdout)
    expected = {
        "kind": "greet",
        "queue": "mail",
        "priority": 3,
        "max_attempts": 7,
        "unique_key": "k",
        "state": "scheduled",
    }
    assert job | expected == job
    assert job["args"] == {"name": "Zoë"}
    assert job["attempts"] == []
    assert job["run_at"].endswith("+00:00")


async def test_a_duplicate_prints_the_live_jobs_id_and_says_so(command: Command) -> None:
    first = await command("enqueue", "greet", "--unique-key", "k")
    second = await command("enqueue", "greet", "--unique-key", "k")
    assert second.stdout == first.stdout
    assert "nothing was added" in second.stderr
    third = await command("enqueue", "greet", "--unique-key", "k", "--json")
    assert json.loads(third.stdout) == {"id": int(first.stdout), "added": False}


@pytest.mark.usefixtures("app")
async def test_enqueue_with_an_app_uses_the_handlers_options(command: Command) -> None:
    await command("enqueue", "greet", '{"name": "a"}', "--app", "app:handlers")
    await command("enqueue", "greet", '{"name": "a"}', "--app", "app:handlers", "--queue", "other")
    listed = json.loads((await command("jobs", "list", "--json")).stdout)
    assert [job["queue"] for job in listed] == ["other", "mail"]


@pytest.mark.usefixtures("app")
async def test_a_workers_session_is_listed_until_it_has_gone(processes: Processes, command: Command, dsn: str) -> None:
    worker = await processes.command("run", "app", "--queues", "mail,default", env={"PULSE_TRIO_DSN": dsn})
    await worker.line("started: queue mail, default")
    (listed,) = json.loads((await command("workers", "--json")).stdout)
    assert listed["pid"] == worker.pid
    # 63 bits, which most readers of JSON cannot keep as a number.
    with Window(dsn) as window:
        assert listed["id"] == str(window.value("SELECT id FROM session"))
    assert listed["queues"] == ["mail", "default"]
    assert str(worker.pid) in (await command("workers")).stdout
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0
    assert "no workers; --all shows those that have gone" in (await command("workers")).stderr
    assert "gone" in (await command("workers", "--all")).stdout


async def test_migrate_creates_the_schema_once(processes: Processes, empty_dsn: str) -> None:
    assert await processes.run("migrate", "--check", env={"PULSE_TRIO_DSN": empty_dsn}, code=1) == ""
    first = await processes.run("migrate", env={"PULSE_TRIO_DSN": empty_dsn})
    assert first.startswith("applied 0001_")
    assert await processes.run("migrate", env={"PULSE_TRIO_DSN": empty_dsn}) == "The schema 'pulse' is up to date.\n"
    again = await processes.run("migrate", "--json", env={"PULSE_TRIO_DSN": empty_dsn})
    assert json.loads(again) == {"schema": "pulse", "applied": []}
    await processes.run("migrate", "--check", env={"PULSE_TRIO_DSN": empty_dsn})


async def test_the_printed_sql_is_the_schema(processes: Processes, empty_dsn: str) -> None:
    # Where nothing is reachable: it must need no database.
    sql = await processes.run("migrate", "--sql", "--schema", "mine", env={"PULSE_TRIO_DSN": "host=127.0.0.1 port=1"})

    def apply() -> None:
        with psycopg.connect(empty_dsn, autocommit=True) as connection:
            connection.execute(sql.encode())

    await trio.to_thread.run_sync(apply)
    await processes.run("migrate", "--check", "--schema", "mine", env={"PULSE_TRIO_DSN": empty_dsn})
    assert await processes.run("enqueue", "x", "--schema", "mine", env={"PULSE_TRIO_DSN": empty_dsn}) == "1\n"


async def test_arguments_are_read_from_the_standard_input(processes: Processes, dsn: str, command: Command) -> None:
    script = 'echo \'{"name": "piped"}\' | pulse-trio enqueue greet -'
    running = await processes.start("bash", "-c", script, env={"PULSE_TRIO_DSN": dsn, "PATH": search_path()})
    assert await running.ended() == 0, running.report()
    (job,) = json.loads((await command("jobs", "list", "--json")).stdout)
    assert job["args"] == {"name": "piped"}


async def test_output_without_a_reader_ends_quietly(processes: Processes, forker: Forker, dsn: str) -> None:
    fork = forker.stand_ins() / "pulse-trio"
    script = (
        f"{{ pulse-trio jobs list; echo code $? >&2; }} | true; {{ {fork} migrate --sql; echo code $? >&2; }} | true"
    )
    running = await processes.start("bash", "-c", script, env={"PULSE_TRIO_DSN": dsn, "PATH": search_path()})
    assert await running.ended() == 0
    assert "Traceback" not in running.stderr
    assert "Exception ignored" not in running.stderr
    assert {line for line in running.stderr.splitlines() if line.startswith("code")} <= {"code 141", "code 0"}


@pytest.mark.parametrize("what", ["jobs list", "workers --json", "migrate --sql", "doctor", "--help"])
async def test_output_that_cannot_be_written_is_said_to_be(
    what: str, processes: Processes, forker: Forker, dsn: str
) -> None:
    script = f"pulse-trio enqueue x >/dev/null; pulse-trio {what} >/dev/full; echo code $? >&2"
    # The installed program, and forks for the other commands.
    path = search_path() if what == "jobs list" else search_path(forker)
    running = await processes.start("bash", "-c", script, env={"PULSE_TRIO_DSN": dsn, "PATH": path})
    assert await running.ended() == 0
    said = [line for line in running.stderr.splitlines() if "(from PULSE_TRIO_DSN)" not in line]
    assert said[-2:] == [
        "pulse-trio: the output could not be written to stdout: No space left on device",
        "code 1",
    ]
    assert "Traceback" not in running.stderr
    assert "bug" not in running.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
async def test_output_of_which_a_part_alone_is_taken_is_said_to_be(unbuffered: str, processes: Processes) -> None:
    """With PYTHONUNBUFFERED the rest was lost, and the exit code was 0: a disk that fills up, a limit, a pipe that does not
    block, a reader that goes."""
    environment = {"PATH": search_path(), "PYTHONUNBUFFERED": unbuffered}
    full = "(ulimit -f 64; pulse-trio migrate --sql >part; echo code $? >&2)"
    gone = "{ pulse-trio migrate --sql; echo code $? >&2; } | head -c 1"
    limited = await processes.start("bash", "-c", full, env=environment)
    left = await processes.start("bash", "-c", gone, env=environment)
    assert await limited.ended() == 0
    assert limited.stderr.splitlines() == [
        "pulse-trio: the output could not be written to stdout: File too large",
        "code 1",
    ]
    assert await left.ended() == 0
    assert left.stderr == "code 141\n"


async def test_without_a_dsn_the_embedded_database_is_used_said_and_migrated(
    tmp_path_short: Path, forker: Forker
) -> None:
    def run(*arguments: str, by: Forker | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["pulse-trio", *arguments], cwd=tmp_path_short, env={**clean_environment(), "PATH": search_path(by)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip

    def all_of_it() -> None:
        (tmp_path_short / "app.py").write_text("from pulse_trio import Handlers\nhandlers = Handlers()\n"
                                               "@handlers.job\nasync def one() -> int: return 1\n")  # fmt: skip
        done = run("enqueue", "one")
        assert "embedded PostgreSQL" in done.stderr
        assert ".pulse-trio/postgres" in done.stderr
        told = run("run", "app", "--burst").stderr
        assert "embedded PostgreSQL" in told
        # Nobody looks on here, so a forgotten setting is likely.
        assert "WARNING no database is configured" in told
        assert json.loads(run("jobs", "show", done.stdout.strip(), "--json", by=forker).stdout)["result"] == 1
        drained = json.loads(run("bench", "drain", "--jobs", "100", "--runs", "1", "--json", by=forker).stdout)
        assert drained["median"]["jobs_per_second"] > 0

    await trio.to_thread.run_sync(all_of_it)


@pytest.mark.parametrize(
    ("bench", "figures"),
    [
        (["drain", "--jobs", "300", "--runs", "2"], {"jobs_per_second", "worker_cpu_us_per_job", "seconds"}),
        (["claim", "--jobs", "300", "--batch", "50", "--runs", "1"], {"pairs_per_second", "ms_per_statement"}),
        (["enqueue", "--jobs", "100", "--runs", "1"], {"one_by_one_per_second", "enqueue_many_per_second"}),
        (["latency", "--jobs", "5", "--every", "0.01"], {"p50_ms", "p95_ms", "p99_ms", "max_ms"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
async def test_a_bench_measures_and_leaves_nothing_behind(
    command: Command, dsn: str, bench: list[str], figures: set[str]
) -> None:
    report = json.loads((await command("bench", *bench, "--json")).stdout)
    assert set(report["median"]) == figures
    assert all(value > 0 for value in report["median"].values())
    assert await schemas(dsn) == ["pulse"]
    assert "in 1 runs" not in (await command("bench", *bench)).stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_bench_that_is_told_to_end_drops_its_schema(
    processes: Processes, dsn: str, number: signal.Signals
) -> None:
    start = processes.pulse_trio if number == signal.SIGINT else processes.command
    running = await start("bench", "latency", "--jobs", "100000", env={"PULSE_TRIO_DSN": dsn})
    await running.line("measuring in the schema pulse_bench_")
    running.send(number)
    assert await running.ended() == 130, running.report()
    assert "Traceback" not in running.stderr
    assert await schemas(dsn) == ["pulse"]


IN_THE_BACKGROUND = """
import signal
import sys
import threading

import trio

from pulse_trio.cli import main
from pulse_trio.cli.bench import ground, measures

signal.signal(signal.SIGINT, signal.SIG_IGN)


def prepares(dsn, schema):
    print("prepares", flush=True)
    threading.Event().wait()


async def measures_for_ever(*args, **options):
    print("measures", flush=True)
    await trio.sleep_forever()


if sys.argv.pop() == "prepares":
    ground.migrate_sync = prepares
measures.latency = measures_for_ever
main(["bench", "latency"])
"""


@pytest.mark.parametrize("while_it", ["prepares", "measures"])
async def test_a_bench_in_the_background_whose_sigint_is_ignored_ends_on_sigterm(
    scripts: Processes, dsn: str, while_it: str
) -> None:
    # As a shell without job control starts it: nohup pulse-trio bench latency &
    (scripts.folder / "background.py").write_text(IN_THE_BACKGROUND)
    running = await scripts.command("background.py", while_it, env={"PULSE_TRIO_DSN": dsn})
    await running.line(f"^{while_it}$")
    running.send(signal.SIGTERM)
    assert await running.ended() == 130, running.report()
    assert "Traceback" not in running.stderr
    assert await schemas(dsn) == ["pulse"]


async def schemas(dsn: str) -> list[str]:
    def ask() -> list[str]:
        with psycopg.connect(dsn) as connection:
            rows = connection.execute(
                "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'pulse%' ORDER BY 1"
            ).fetchall()
            return [row[0] for row in rows]

    return await trio.to_thread.run_sync(ask)
