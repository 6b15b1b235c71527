"""`run --instrument`, `Handlers(instruments=)`: events reach what the user names; what cannot be one is refused before work."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio import ConfigurationError, Handlers, SyncClient, Worker
from pulse_trio.cli.faults import describe
from pulse_trio.cli.loading import load_instruments
from pulse_trio.observe import JobEnded, JobStarted

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes

APP = """
from pulse_trio import Handlers
from monitoring import Counting

handlers = Handlers(instruments=[Counting("handlers")])


@handlers.job
async def greet(name: str) -> str:
    return name
"""
MONITORING = """
import os

from pulse_trio.observe import ChildStarted, JobEnded


class Counting:
    def __init__(self, where="option"):
        self.where = where

    def listeners(self):
        return {JobEnded: self.ended, ChildStarted: self.child}

    def ended(self, event):
        with open("told", "a") as file:
            file.write(f"{self.where} {event.outcome} {event.job_id}\\n")

    def child(self, event):
        with open("told", "a") as file:
            file.write(f"{self.where} child\\n")


ready = Counting("object")
number = 7


def broken():
    raise OSError("no socket for the metrics")


class Mute:
    def listeners(self):
        return ["nothing"]


class Twice:
    # Some libraries of metrics refuse a second registration.

    asked = 0

    def listeners(self):
        self.asked += 1
        if self.asked > 1:
            raise ValueError("registered already")
        return {}


Twice.made = Twice()
Twice.made.asked = 1
once = Twice()


class Awaited:
    def listeners(self):
        return {JobEnded: self.ended}

    async def ended(self, event): ...


class Spanless:
    def listeners(self):
        return {}

    def spans(self):
        raise OSError("no collector there")


class Failing:
    def listeners(self):
        return {JobEnded: self.ended}

    def ended(self, event):
        raise ValueError("this instrument is broken")
"""


class Counting:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        return {JobStarted: self.seen.append, JobEnded: self.seen.append}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "monitoring.py").write_text(MONITORING)
    (tmp_path / "app.py").write_text(APP)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


async def test_the_instruments_of_handlers_hear_every_worker_of_theirs(dsn: str) -> None:
    ours, workers = Counting(), Counting()
    handlers = Handlers(instruments=[ours])

    @handlers.job
    async def greet(name: str) -> str:
        return name

    job_id = SyncClient(dsn).enqueue("greet", {"name": "Ada"}).id
    await Worker(handlers, dsn, burst=True, instruments=[workers]).run()
    assert [type(event) for event in ours.seen] == [JobStarted, JobEnded]
    assert {event.job_id for event in ours.seen} == {job_id}
    assert workers.seen == ours.seen


def test_an_object_a_class_and_a_function_are_instruments(folder: Path) -> None:
    (folder / "made.py").write_text(
        "from monitoring import Counting\ndef instrument():\n    return Counting('function')\n"
    )
    loaded = load_instruments(["monitoring:ready", "monitoring:Counting", "made:instrument"])
    heard = [instrument.listeners()[JobEnded].__self__ for instrument in loaded]  # pyright: ignore[reportFunctionMemberAccess]
    assert [instrument.where for instrument in heard] == ["object", "option", "function"]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("monitoring", "'monitoring' is not a module and an object. An instrument looks like monitoring:instrument"),
        ("nowhere:Counting", "There is no module 'nowhere'"),
        ("monitoring:Countingg", "has no attribute 'Countingg'. Did you mean Counting?"),
        ("monitoring:number", "The instrument monitoring:number is an int without listeners()."),
        ("monitoring:broken", "could not be created: OSError: no socket for the metrics"),
        ("monitoring:Mute", "its listeners() must return {type of event: function}, not ['nothing']"),
        ("app:handlers", "The instrument app:handlers is a Handlers without listeners()."),
        ("monitoring:os.getcwd", "returned a str without listeners()"),
        ("monitoring:Awaited", "The instrument monitoring:Awaited: its listener for JobEnded is an async function."),
        ("monitoring:Spanless", "The instrument monitoring:Spanless failed: OSError: no collector there"),
        ("monitoring:Twice.made", "monitoring:Twice.made failed: ValueError: registered already"),
    ],
)
def test_what_is_no_instrument_is_refused_and_named(folder: Path, target: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_instruments([target])
    assert said in describe(caught.value)
    assert caught.value.exit_code == 2


async def test_run_reports_to_the_instruments_it_is_given_and_logs_all_the_same(
    folder: Path, dsn: str, processes: Processes
) -> None:
    jobs = [SyncClient(dsn).enqueue("greet", {"name": "Ada"}).id for _ in range(2)]
    given = [
        "--instrument",
        "monitoring:Counting",
        "--instrument",
        "monitoring:Failing",
        "--instrument",
        "monitoring:once",
    ]
    running = await processes.command("run", "app", "--burst", "--verbose", "--dsn", dsn, *given)
    assert await running.ended() == 0, running.report()
    told = sorted((folder / "told").read_text().splitlines())
    assert told == sorted(f"{where} completed {job_id}" for where in ("handlers", "option") for job_id in jobs)
    assert running.stderr.count("Failing.ended failed at JobEnded") == 1
    assert f"job {jobs[1]}" in running.stderr


async def test_every_process_and_the_supervisor_have_the_instruments_of_the_command_line(
    folder: Path, dsn: str, processes: Processes
) -> None:
    job_id = SyncClient(dsn).enqueue("greet", {"name": "Ada"}).id
    given = ["--processes", "2", "--instrument", "monitoring:Counting"]
    running = await processes.command("run", "app", "--burst", "--dsn", dsn, *given)
    assert await running.ended() == 0, running.report()
    told = sorted((folder / "told").read_text().splitlines())
    assert told == sorted(["option child"] * 2 + [f"{where} completed {job_id}" for where in ("handlers", "option")])


@pytest.mark.parametrize(
    ("file", "variable", "heard"),
    [
        ('instrument = ["monitoring:Counting", "monitoring:once"]', None, ["option"]),
        ('instrument = "monitoring:Counting monitoring:ready"', None, ["object", "option"]),
        ('instrument = "monitoring:Counting"', "monitoring:ready", ["object"]),
        ('instrument = "monitoring:Counting"', "", []),
        ("", "monitoring:Counting,monitoring:ready", ["object", "option"]),
        ("", "monitoring:Counting monitoring:ready", ["object", "option"]),
    ],
)
async def test_instruments_come_from_the_environment_and_the_file_too(
    file: str, variable: str | None, heard: list[str], folder: Path, dsn: str, processes: Processes
) -> None:
    """`instrument` in the file was an unknown setting, though it is a property of a deployment."""
    (folder / "pulse-trio.toml").write_text(f"{file}\n")
    job_id = SyncClient(dsn).enqueue("greet", {"name": "Ada"}).id
    env = {} if variable is None else {"PULSE_TRIO_INSTRUMENT": variable}
    running = await processes.command("run", "app", "--burst", "--dsn", dsn, env=env)
    assert await running.ended() == 0, running.report()
    told = sorted((folder / "told").read_text().splitlines())
    assert told == sorted(f"{where} completed {job_id}" for where in ("handlers", *heard))


@pytest.mark.parametrize("more", [[], ["--processes", "2"]])
async def test_a_bad_instrument_ends_run_before_it_begins(
    folder: Path, dsn: str, processes: Processes, more: list[str]
) -> None:
    running = await processes.command("run", "app", "--dsn", dsn, "--instrument", "monitoring:broken", *more)
    assert await running.ended() == 2
    assert "monitoring:broken could not be created: OSError: no socket for the metrics" in running.stderr
    assert 'monitoring.py", line' in running.stderr


async def test_python_m_pulse_trio_is_the_command(folder: Path, processes: Processes) -> None:
    running = await processes.python("-m", "pulse_trio", "--version")
    assert await running.ended() == 0
    assert running.stdout.startswith("pulse-trio ")
