"""Handlers that nobody can end, and child processes, under real workers."""

from __future__ import annotations

import json
import os
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.sql import SQL, Identifier

from pulse_trio import SyncClient
from pulse_trio.testing.faults.processes import is_running
from support.workers import RUN, enqueue, rows, settled, until

if TYPE_CHECKING:
    from collections.abc import Generator

    from pulse_trio.testing.faults.processes import Processes

APP = """
import os
import subprocess
from pathlib import Path

import trio

from pulse_trio import Handlers

handlers = Handlers()


@handlers.job
async def swallows(folder: str) -> str:
    Path(folder, "began").touch()
    while True:
        try:
            await trio.sleep(3600)
        except trio.Cancelled:
            pass


@handlers.job
async def who() -> int:
    return os.getpid()


@handlers.job(runs="process")
def busy(folder: str, n: int) -> None:
    its = subprocess.Popen(["sleep", "3600"])
    Path(folder, f"{n}.new").write_text(f"{os.getpid()} {its.pid}")
    Path(folder, f"{n}.new").rename(Path(folder, f"pids {n}"))
    # One C function that keeps the interpreter's lock for hours.
    sum(range(10**13))


@handlers.job(runs="process")
def short() -> None: ...


@handlers.job(runs="process")
def waits(folder: str) -> None:
    os.mkfifo(Path(folder, "go"))
    Path(folder, "waiting.new").write_text(str(os.getpid()))
    Path(folder, "waiting.new").rename(Path(folder, "waiting"))
    Path(folder, "go").read_text()
"""
STOPS_ITSELF = """
import logging
import signal
import threading


class Stops(logging.Handler):
    # Flushed as the process is about to execute another program.
    def flush(self) -> None:
        if in_thread:
            thread = threading.Thread(target=stop)
            thread.start()
            thread.join()
        else:
            stop()


def stop() -> None:
    if in_thread:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)


in_thread = False
stops = Stops()
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


async def there(path: Path) -> None:
    with trio.fail_after(20):
        while not path.exists():  # noqa: ASYNC110, ASYNC240 -- a file tells nobody
            await trio.sleep(0.01)


async def holds_up(pid: int, number: signal.Signals) -> None:
    """The process has blocked the signal."""
    with trio.fail_after(20):
        while True:
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")  # noqa: ASYNC240 -- the kernel writes it: no disk is read
            if int(status.partition("SigBlk:")[2].split()[0], 16) >> (number - 1) & 1:
                return
            await trio.sleep(0.01)


@pytest.mark.parametrize("count", [1, 2])
async def test_the_process_of_a_handler_that_swallows_its_cancellation_is_replaced(
    count: int, dsn: str, processes: Processes, app: Path
) -> None:
    (stuck,) = enqueue(dsn, "swallows", folder=str(app))
    worker = await processes.command(*RUN, f"--dsn={dsn}", f"--processes={count}")
    await there(app / "began")
    rows(dsn, "SELECT pulse.cancel(%(id)s)", {"id": stuck})
    await worker.line(rf"job {stuck} \(swallows\) has not ended .* replacing the process")
    # With one process the very same process begins anew; with two the supervisor starts another at once.
    assert (await settled(dsn, stuck))[0] == "cancelled"
    assert rows(dsn, "SELECT attempt, outcome FROM pulse.attempts WHERE job_id = %(id)s", {"id": stuck}) == [
        (1, "cancelled")
    ]
    (after,) = enqueue(dsn, "who")
    state, attempt, pid = await settled(dsn, after)
    assert (state, attempt) == ("completed", 1)
    if count == 1:
        assert pid == worker.pid
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0


@contextmanager
def out_of_reach(dsn: str) -> Generator[None]:
    """The database of the test takes no connections while the block is open, and those that it had are gone."""
    name, allow = str(conninfo_to_dict(dsn)["dbname"]), SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
    with psycopg.connect(make_conninfo(dsn, dbname="postgres"), autocommit=True) as server:
        server.execute(allow.format(Identifier(name), SQL("false")))
        server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        yield
        server.execute(allow.format(Identifier(name), SQL("true")))


async def test_a_worker_that_stops_in_an_outage_says_what_it_could_not_write(
    dsn: str, processes: Processes, app: Path
) -> None:
    """It said that the job was completed, and that all was well."""
    enqueue(dsn, "waits", folder=str(app))
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--lease=6", "--heartbeat=2")
    await there(app / "waiting")
    with out_of_reach(dsn):
        (app / "go").write_text("go")
        await worker.line(r"database lost \(settler\)")
        worker.send(signal.SIGTERM)
        assert await worker.ended() == 1, worker.report()
    assert "has not heard how 1 job of these ended" in worker.stderr


async def test_a_process_that_replaces_its_own_in_an_outage_waits_for_the_database(
    dsn: str, processes: Processes, app: Path
) -> None:
    """It ended after `connect_timeout`, as one that starts, and nobody started it again."""
    enqueue(dsn, "swallows", folder=str(app))
    times = ("--lease=3", "--heartbeat=1", "--cleanup=0.5", "--connect-timeout=1")
    worker = await processes.command(*RUN, f"--dsn={dsn}", *times)
    await there(app / "began")
    with out_of_reach(dsn):
        await worker.line(r"waiting for the database: ")
        with trio.move_on_after(2.5):
            raise AssertionError(f"it has ended with {await worker.ended()}: {worker.report()}")
    (after,) = enqueue(dsn, "who")
    assert (await settled(dsn, after))[0] == "completed"


async def test_a_stuck_job_is_reported_though_the_process_that_replaces_its_own_cannot_import_the_handlers(
    dsn: str, processes: Processes, app: Path
) -> None:
    """A deploy has put other files in their place: it was rescued when its lease ran out, as that of a crash."""
    (stuck,) = enqueue(dsn, "swallows", folder=str(app))
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--lease=600")
    await there(app / "began")
    (app / "app.py").write_text("1 / 0\n")
    rows(dsn, "SELECT pulse.cancel(%(id)s)", {"id": stuck})
    assert await worker.ended() == 2, worker.report()
    assert "ZeroDivisionError" in worker.stderr
    assert rows(dsn, "SELECT attempt, outcome FROM pulse.attempts WHERE job_id = %(id)s", {"id": stuck}) == [
        (1, "cancelled")
    ]


async def test_a_stop_while_a_process_replaces_its_own_comes_when_the_stuck_job_is_reported(
    dsn: str, processes: Processes, app: Path
) -> None:
    """The signal ended the process that was about to report it. And the command names its files from where it was given."""
    (app / "app.py").write_text(f"{APP}\nimport os\nos.chdir('/')\n")
    (stuck,) = enqueue(dsn, "swallows", folder=str(app))
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--lease=600")
    await there(app / "began")
    rows(dsn, "SELECT pulse.cancel(%(id)s)", {"id": stuck})
    with psycopg.connect(dsn) as connection:
        # Its report is sent again and again until the row is free.
        connection.execute("SELECT FROM pulse.job WHERE id = %s FOR UPDATE", [stuck])
        await worker.line(rf"job {stuck} \(swallows\) has not ended .* replacing the process")
        await holds_up(worker.pid, signal.SIGTERM)
        worker.send(signal.SIGTERM)
        connection.rollback()
    assert await worker.ended() == 3, worker.report()
    assert rows(dsn, "SELECT attempt, outcome FROM pulse.attempts WHERE job_id = %(id)s", {"id": stuck}) == [
        (1, "cancelled")
    ]


@pytest.mark.parametrize("thread", ["main", "another"])
async def test_a_stop_in_the_moment_in_which_a_process_replaces_its_own_is_heard(
    thread: str, dsn: str, processes: Processes, app: Path
) -> None:
    """The process had caught the signal, and told nobody of it: the one in its place went on claiming."""
    (app / "app.py").write_text(f"{APP}\n{STOPS_ITSELF}\nin_thread = {thread != 'main'}\n")
    (stuck,) = enqueue(dsn, "swallows", folder=str(app))
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--lease=600")
    await there(app / "began")
    rows(dsn, "SELECT pulse.cancel(%(id)s)", {"id": stuck})
    assert await worker.ended() == 3, worker.report()
    assert "told to stop: this process ends" in worker.stderr
    assert rows(dsn, "SELECT attempt, outcome FROM pulse.attempts WHERE job_id = %(id)s", {"id": stuck}) == [
        (1, "cancelled")
    ]


BROKEN = {
    "written": "import not_installed\n",
    "without": "from pulse_trio import Handlers\nhandlers = Handlers()\n",
    "removed": None,
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_process_that_cannot_import_code_that_a_deploy_has_replaced_costs_its_job_nothing(
    how: str, dsn: str, processes: Processes, app: Path
) -> None:
    """The handler had not begun, and the job was dead, if that was its last attempt."""
    worker = await processes.command(*RUN, f"--dsn={dsn}")
    await worker.line("started: all queues")
    if (code := BROKEN[how]) is None:
        (app / "app.py").unlink()
    else:
        (app / "app.py").write_text(code)
    job_id = SyncClient(dsn).enqueue("short", max_attempts=1).id
    await worker.line(rf"job {job_id} \(short\).*The code on disk has changed since this worker began")
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0, worker.report()
    assert rows(dsn, "SELECT outcome FROM pulse.attempts WHERE job_id = %(id)s", {"id": job_id}) == [("released",)]
    (app / "app.py").write_text(APP)
    again = await processes.command(*RUN, f"--dsn={dsn}", cwd=app)
    rows(dsn, "UPDATE pulse.job SET run_at = now() WHERE id = %(id)s RETURNING id", {"id": job_id})
    assert (await settled(dsn, job_id))[0] == "completed"
    again.send(signal.SIGTERM)
    assert await again.ended() == 0


async def test_a_process_handler_goes_on_when_its_service_is_told_to_be_quiet(
    dsn: str, processes: Processes, app: Path
) -> None:
    """`systemctl kill -s USR1` signals every process of a service."""
    worker = await processes.command(*RUN, f"--dsn={dsn}")
    job_id = SyncClient(dsn).enqueue("waits", {"folder": str(app)}, max_attempts=1).id
    await there(app / "waiting")
    for pid in (int((app / "waiting").read_text(encoding="ascii")), worker.pid):
        os.kill(pid, signal.SIGUSR1)
    await worker.line("SIGUSR1: no more claims")
    await trio.Path(app / "go").write_text("now")
    assert (await settled(dsn, job_id))[0] == "completed"
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0


async def test_each_child_process_dies_with_its_worker_even_in_a_c_function_and_what_it_has_started(
    dsn: str, processes: Processes, app: Path
) -> None:
    for n in range(2):
        enqueue(dsn, "busy", folder=str(app), n=n)
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--process-slots=2")
    pids: list[int] = []
    for n in range(2):
        await there(app / f"pids {n}")
        pids += map(int, (app / f"pids {n}").read_text().split())
    # They take the cores, and the worker's beats go on.
    await until(dsn, "SELECT 1 FROM pulse.jobs WHERE lease_until > started_at + interval '7 s'")
    worker.kill()
    with trio.fail_after(20):
        while any(map(is_running, pids)):  # noqa: ASYNC110 -- other processes' ends
            await trio.sleep(0.05)


LOGGING = """
import logging
import threading
import warnings

from pulse_trio import Handlers

handlers = Handlers()
log = logging.getLogger("app.steps")


@handlers.job(runs="process")
def talks() -> int:
    log.debug("not asked for")
    log.info("on its way to %s", "town")
    try:
        1 / 0
    except ZeroDivisionError:
        log.exception("a try failed")
    thread = threading.Thread(target=log.warning, args=("from a thread",))
    thread.start()
    thread.join()
    warnings.warn("and a warning")
    for n in range(300):
        log.info("many %d", n)
    return 1
"""


@pytest.mark.parametrize("as_json", [True, False])
async def test_what_a_process_handler_logs_comes_in_the_workers_log_and_form(
    as_json: bool, dsn: str, processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(LOGGING)
    job = enqueue(dsn, "talks")[0]
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--burst", *(["--json"] if as_json else []))
    assert await worker.ended() == 0, worker.report()
    assert await settled(dsn, job) == ("completed", 1, 1)
    said = worker.stderr.splitlines()
    if not as_json:
        (told,) = [line for line in said if "on its way" in line]
        assert "INFO    app.steps: on its way to town" in told
        assert f"[{worker.pid}]" not in told
        assert "ZeroDivisionError: division by zero" in worker.stderr
        return
    entries = [json.loads(line) for line in said]
    child = [entry for entry in entries if entry["pid"] != worker.pid]
    assert [(e["level"], e["logger"], e["message"]) for e in child[:3]] == [
        ("info", "app.steps", "on its way to town"),
        ("error", "app.steps", "a try failed"),
        ("warning", "app.steps", "from a thread"),
    ]
    assert "ZeroDivisionError" in child[1]["traceback"]
    assert "UserWarning: and a warning" in child[3]["message"]
    assert [e["message"] for e in child[4:]] == [f"many {n}" for n in range(300)]
