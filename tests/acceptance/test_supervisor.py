"""`run --processes N`: worker processes killed, blocked and orphaned."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import SyncClient
from pulse_trio.testing.faults.processes import is_running
from support.sink import Sink, open_sink
from support.workers import enqueue, rows, settled, until, worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes, Running

AT_ONCE = (
    20.0  # seconds a loaded machine may take for what needs no lease to run out: three times that where it is asked
)


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncGenerator[Sink]:
    async with open_sink(tmp_path) as sink:
        yield sink


async def test_a_killed_childs_jobs_are_handed_back_at_once_and_it_is_replaced(
    dsn: str, processes: Processes, sink: Sink
) -> None:
    ids = enqueue(dsn, count=20)
    supervisor = await worker(processes, dsn, "--processes=2", "--concurrency=30", f"--lease={3 * AT_ONCE}")
    starts = await sink.until("start", attempt=1, count=20)
    victim = starts[0].pid
    held = [start.job for start in starts if start.pid == victim]
    os.kill(victim, signal.SIGKILL)
    ((killed_at,),) = rows(dsn, "SELECT clock_timestamp()")
    await supervisor.line(rf"{victim} .*signal|{victim} ended")
    await sink.until("start", attempt=2, count=len(held))
    rescued = rows(dsn, "SELECT job_id, ended_at FROM pulse.attempts WHERE outcome = 'rescued'")
    assert sorted(job for job, _ in rescued) == sorted(held)
    assert max((ended - killed_at).total_seconds() for _, ended in rescued) < AT_ONCE
    await supervisor.line("worker process .* started")
    sink.let_go()
    for job_id in ids:
        assert (await settled(dsn, job_id))[:2] == ("completed", 2 if job_id in held else 1)
    supervisor.send(signal.SIGTERM)
    assert await supervisor.ended() == 0


async def test_a_child_whose_loop_is_blocked_is_replaced(
    dsn: str, processes: Processes, sink: Sink, tmp_path: Path
) -> None:
    (job_id,) = enqueue(dsn, "blocking", folder=str(tmp_path))
    supervisor = await worker(processes, dsn, "--processes=2")
    (start,) = await sink.until("start", attempt=1)
    await supervisor.line(f"{start.pid} .*no life")
    (tmp_path / "go-2").touch()
    assert await settled(dsn, job_id) == ("completed", 2, "attempt 2")
    supervisor.send(signal.SIGTERM)
    assert await supervisor.ended() == 0


async def test_the_children_of_a_killed_supervisor_stop_and_give_their_jobs_back(
    dsn: str, processes: Processes, sink: Sink
) -> None:
    (job_id,) = enqueue(dsn)
    supervisor = await worker(processes, dsn, "--processes=2")
    (start,) = await sink.until("start", attempt=1)
    supervisor.kill()
    (cancelled,) = await sink.until("cancelled", attempt=1)
    assert (cancelled.pid, cancelled.reason) == (start.pid, "shutdown")
    await until(dsn, "SELECT 1 FROM pulse.workers HAVING count(*) FILTER (WHERE state <> 'gone') = 0")
    assert rows(dsn, "SELECT state, attempt, max_attempts FROM pulse.jobs") == [("available", 1, 6)]
    assert job_id == start.job


# Who is blamed, and how


APP = """
import ctypes
import os
import re
import resource
import signal
import time
from pathlib import Path

import trio

from pulse_trio import Handlers, Job

handlers = Handlers()
library = ctypes.PyDLL(None)


def tell(folder, job, name="began"):
    Path(folder, "new").write_text(str(os.getpid()))
    Path(folder, "new").rename(Path(folder, f"{name}-{job.attempt}"))


@handlers.job
async def holds_the_lock(job: Job, folder: str) -> int:
    tell(folder, job)
    if job.attempt == 1:
        library.sleep(3600)  # with the interpreter's lock: no thread of this process runs
    return os.getpid()


@handlers.job(runs="thread")
def holds_the_lock_in_a_thread(job: Job, folder: str) -> int:
    tell(folder, job)
    if job.attempt == 1:
        library.sleep(3600)
    return os.getpid()


@handlers.job
async def matches_for_ever(job: Job, folder: str) -> int:
    tell(folder, job)
    if job.attempt == 1:
        re.match("(a+)+b", "a" * 60)
    return os.getpid()


@handlers.job
async def crashes(job: Job, folder: str) -> int:
    tell(folder, job)
    if job.attempt == 1:
        ctypes.string_at(0)
    return os.getpid()


@handlers.job(max_attempts=1)
async def eats(folder: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20), hard))
    try:
        bytearray(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@handlers.job
async def hogs(job: Job, folder: str) -> int:
    tell(folder, job)
    end = time.monotonic() + 7
    while time.monotonic() < end:
        step = time.monotonic() + 0.15
        while time.monotonic() < step:
            pass
        await trio.lowlevel.checkpoint()
    return os.getpid()


@handlers.job
async def waits(job: Job, folder: str) -> int:
    tell(folder, job, "waits")
    while not Path(folder, "go").exists():
        await trio.sleep(0.02)
    return os.getpid()


@handlers.job
async def swallows(job: Job, folder: str, text: str = "") -> int:
    tell(folder, job, "swallows")
    if job.attempt == 1:
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()
    return os.getpid()
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


async def told(folder: Path, name: str) -> int:
    """The process that a handler told of."""
    with trio.fail_after(30):
        while not (folder / name).exists():  # noqa: ASYNC110 -- a file tells nobody
            await trio.sleep(0.01)
    return int((folder / name).read_text())


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("holds_the_lock", "waits in a system call"),
        ("holds_the_lock_in_a_thread", ""),
        ("matches_for_ever", "computes"),
    ],
)
async def test_a_child_that_keeps_the_interpreters_lock_is_replaced_and_the_handler_is_named(
    kind: str, state: str, dsn: str, processes: Processes, app: Path
) -> None:
    (job_id,) = enqueue(dsn, kind, folder=str(app))
    supervisor = await worker(processes, dsn, "--processes=2")
    pid = await told(app, "began-1")
    await supervisor.line(rf"{pid} showed no life for 6 s .*{state}.*killed it. It was in the handler of {kind}:")
    await supervisor.line(rf"app.py\", line \d+, in {kind}$")
    await supervisor.line(rf"{pid} ended \(killed by signal 14, SIGALRM\)$")
    await supervisor.line(rf"rescued 1 job\(s\) whose worker had vanished \(process {pid}\): {job_id} \({kind}\)")
    state_after, attempt, other = await settled(dsn, job_id)
    assert (state_after, attempt) == ("completed", 2)
    assert other != pid
    supervisor.send(signal.SIGTERM)
    assert await supervisor.ended() == 0


async def test_a_stopped_child_is_replaced_and_said_to_be_stopped(dsn: str, processes: Processes, app: Path) -> None:
    (job_id,) = enqueue(dsn, "waits", folder=str(app))
    supervisor = await worker(processes, dsn, "--processes=2")
    pid = await told(app, "waits-1")
    os.kill(pid, signal.SIGSTOP)
    await supervisor.line(rf"{pid} showed no life for 6 s \(it is stopped .*\): killed it$")
    await told(app, "waits-2")
    (app / "go").touch()
    assert (await settled(dsn, job_id))[:2] == ("completed", 2)
    supervisor.send(signal.SIGTERM)
    assert await supervisor.ended() == 0


async def importing(app: Path) -> None:
    """Until a process imports the handlers."""
    with trio.fail_after(30):
        while not (app / "importing").exists():  # noqa: ASYNC110 -- a file tells nobody
            await trio.sleep(0.01)


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_child_that_is_stopped_before_it_has_begun_does_not_hold_up_the_end(
    signals: int, dsn: str, processes: Processes, app: Path
) -> None:
    """The supervisor waited for it without limit."""
    stops = "import os, signal\nPath('importing').touch()\nos.kill(os.getpid(), signal.SIGSTOP)"
    (app / "app.py").write_text(f"{APP}\n{stops}\n")
    supervisor = await worker(processes, dsn, "--processes=2")
    await importing(app)
    for _ in range(signals):
        supervisor.send(signal.SIGTERM)
        await supervisor.line("SIGTERM")
    await supervisor.line(r"showed no life for .* s \(it is stopped .*\): killed it")
    assert await supervisor.ended(within=20) == 0


async def test_a_child_that_gets_little_of_the_processor_is_not_replaced(
    dsn: str, processes: Processes, app: Path
) -> None:
    (job_id,) = enqueue(dsn, "waits", folder=str(app))
    supervisor = await worker(processes, dsn, "--processes=2")
    pid = await told(app, "waits-1")
    # Two leases long it runs a tenth of the time, and never for two seconds at a stretch does it not run.
    for _ in range(7):
        os.kill(pid, signal.SIGSTOP)
        await trio.sleep(1.6)
        os.kill(pid, signal.SIGCONT)
        await trio.sleep(0.18)
    (app / "go").touch()
    assert await settled(dsn, job_id) == ("completed", 1, pid)
    supervisor.send(signal.SIGTERM)
    assert await supervisor.ended() == 0
    assert "no life" not in supervisor.stderr


async def test_a_loop_that_a_handler_starves_is_noticed_the_handler_named_and_nobody_rescued(
    dsn: str, processes: Processes, app: Path
) -> None:
    ids = [enqueue(dsn, "hogs", folder=str(app))[0] for _ in range(4)]
    supervisor = await worker(processes, dsn, "--processes=2", "--lag-warning=0.1", "--lease=18")
    await supervisor.line(r"job \d+ \(hogs\) has blocked the event loop for")
    for job_id in ids:
        assert (await settled(dsn, job_id))[:2] == ("completed", 1)
    supervisor.send(signal.SIGTERM)
    assert await supervisor.ended() == 0


async def test_a_child_killed_from_outside_is_said_to_be_out_of_memory_and_its_jobs_are_named(
    dsn: str, processes: Processes, app: Path
) -> None:
    ids = [enqueue(dsn, "waits", folder=str(app))[0] for _ in range(2)]
    supervisor = await worker(processes, dsn, "--processes=2", "--lease=600")
    pid = await told(app, "waits-1")
    await until(dsn, "SELECT 1 FROM pulse.jobs WHERE state = 'running' HAVING count(*) = 2")
    held = {row[0] for row in rows(dsn, HELD_BY, {"pid": pid})}
    os.kill(pid, signal.SIGKILL)
    await supervisor.line(
        rf"{pid} ended \(killed by signal 9, SIGKILL, which the supervisor did not send: "
        r"probably the kernel's out-of-memory killer\); starting another$"
    )
    line = await supervisor.line(rf"rescued {len(held)} job\(s\) .*\(process {pid}\): (.*)")
    assert {int(named.split()[0]) for named in line[1].split(", ")} == held
    (app / "go").touch()
    for job_id in ids:
        assert (await settled(dsn, job_id))[0] == "completed"
    supervisor.send(signal.SIGTERM)
    assert await supervisor.ended() == 0


HELD_BY = "SELECT j.id FROM pulse.jobs j JOIN pulse.workers w ON w.id = j.worker WHERE w.pid = %(pid)s AND j.state = 'running'"


async def test_a_handler_that_finds_no_memory_fails_and_its_neighbours_go_on(
    dsn: str, processes: Processes, app: Path
) -> None:
    (neighbour,) = enqueue(dsn, "waits", folder=str(app))
    supervisor = await worker(processes, dsn, "--processes=2")
    pid = await told(app, "waits-1")
    client = SyncClient(dsn)
    hungry = [client.enqueue("eats", {"folder": str(app)}, max_attempts=1).id for _ in range(10)]
    for job_id in hungry:
        assert (await settled(dsn, job_id))[:2] == ("dead", 1)
    assert {row[0][:11] for row in rows(dsn, "SELECT error FROM pulse.jobs WHERE kind = 'eats'")} == {"MemoryError"}
    (app / "go").touch()
    assert await settled(dsn, neighbour) == ("completed", 1, pid)
    supervisor.send(signal.SIGTERM)
    assert await supervisor.ended() == 0
    assert f"{pid} ended (exit code 0)" in supervisor.stderr


async def test_a_child_that_crashes_says_in_which_handler(dsn: str, processes: Processes, app: Path) -> None:
    (job_id,) = enqueue(dsn, "crashes", folder=str(app))
    supervisor = await worker(processes, dsn, "--processes=2")
    pid = await told(app, "began-1")
    await supervisor.line(rf"{pid} ended \(killed by signal 11, SIGSEGV\); .* It was in the handler of crashes:")
    await supervisor.line(r"app.py\", line \d+, in crashes$")
    assert (await settled(dsn, job_id))[:2] == ("completed", 2)
    supervisor.send(signal.SIGTERM)
    assert await supervisor.ended() == 0


async def test_a_child_that_cannot_notice_its_supervisors_death_is_ended_by_its_alarm_clock(
    dsn: str, processes: Processes, app: Path
) -> None:
    (job_id,) = enqueue(dsn, "holds_the_lock", folder=str(app))
    supervisor = await worker(processes, dsn, "--processes=2", "--lease=1.5", "--heartbeat=0.5", "--cleanup=0.1")
    pid = await told(app, "began-1")
    supervisor.kill()
    # The streams are the children's too: they end with the last of them, a moment before the process does.
    assert await supervisor.ended() == -signal.SIGKILL
    with trio.fail_after(20):
        while is_running(pid):  # noqa: ASYNC110 -- another process's end
            await trio.sleep(0.01)
    assert rows(dsn, "SELECT state FROM pulse.jobs WHERE id = %(id)s", {"id": job_id}) == [("running",)]


@pytest.mark.parametrize(
    ("line", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11, SIGSEGV"),
        ("os._exit(0)", "exit code 0"),
        ("os._exit(70)", "exit code 70"),
    ],
)
async def test_children_that_never_begin_are_given_up_after_a_few_tries(
    line: str, how: str, dsn: str, processes: Processes, app: Path
) -> None:
    (app / "app.py").write_text(f"{APP}\n{line}\n")
    supervisor = await worker(processes, dsn, "--processes=3")
    assert await supervisor.ended() == 1, supervisor.report()
    assert supervisor.stderr.count(f"({how})") == 3
    assert "giving up: 3 worker processes in a row ended before they had started" in supervisor.stderr


def enqueue_swallowing(dsn: str, **args: str) -> int:
    """One whose handler takes no notice of its timeout."""
    return SyncClient(dsn).enqueue("swallows", args, max_attempts=3, timeout=0.5, backoff_base=0.01).id


ENDS = "SELECT outcome FROM pulse.attempts WHERE job_id = %(id)s ORDER BY attempt"


@pytest.mark.parametrize("count", [1, 2])
async def test_a_handler_that_does_not_end_is_settled_however_large_its_arguments(
    count: int, dsn: str, processes: Processes, app: Path
) -> None:
    """They went to whoever reports it: past the limits of one variable, and of a socket's buffer."""
    job_id = enqueue_swallowing(dsn, folder=str(app), text="x" * 900_000)
    running = await worker(processes, dsn, f"--processes={count}", "--lease=600")
    await running.line("replacing the process")
    assert (await settled(dsn, job_id))[:2] == ("completed", 2)
    assert rows(dsn, ENDS, {"id": job_id}) == [("timeout",), ("completed",)]
    running.send(signal.SIGTERM)
    assert await running.ended() == 0, running.report()


async def test_a_process_that_cannot_be_replaced_in_place_ends_and_says_so(
    dsn: str, processes: Processes, app: Path
) -> None:
    (app / "app.py").write_text(f"{APP}\nimport sys\nsys.executable = '/nowhere/python'\n")
    enqueue_swallowing(dsn, folder=str(app))
    running = await worker(processes, dsn)
    await running.line(r"this process cannot be replaced \(.*No such file.*\), so it ends\.")
    assert await running.ended() == 1


# Signals


async def signalled(process: Running, pid: int, number: signal.Signals) -> None:
    """The worker process `pid` has looked at this signal."""
    os.kill(pid, number)
    # Signals of one moment come in the order of their numbers; after the second of these it has seen all.
    for _ in range(2):
        os.kill(pid, signal.SIGUSR1)
        await process.line(rf"\[{pid}\].*SIGUSR1: no more claims")


async def test_a_manager_that_signals_every_process_leaves_running_jobs_their_grace(
    dsn: str, processes: Processes, app: Path
) -> None:
    """systemd's KillMode=control-group: each worker gets the manager's SIGTERM and the supervisor's."""
    (job_id,) = enqueue(dsn, "waits", folder=str(app))
    supervisor = await worker(processes, dsn, "--processes=2", "--grace=60")
    pid = await told(app, "waits-1")
    supervisor.send(signal.SIGTERM)
    await supervisor.line(rf"\[{pid}\].*SIGTERM: draining within")
    await signalled(supervisor, pid, signal.SIGTERM)
    (app / "go").touch()
    assert await supervisor.ended() == 0, supervisor.report()
    assert await settled(dsn, job_id) == ("completed", 1, pid)


async def draining(dsn: str, process: Running) -> None:
    """The worker that starts next says of itself that it claims nothing."""
    found = await process.line(r"worker (\d+) started")
    told = "SELECT 1 FROM pulse.workers WHERE id = %(id)s AND state = 'draining'"
    await until(dsn, told, {"id": int(found[1])})


async def test_a_worker_that_is_told_to_be_quiet_while_it_imports_its_handlers_claims_nothing(
    dsn: str, processes: Processes, app: Path
) -> None:
    """It died of the signal."""
    wait = "Path('importing').touch()\nwhile not Path('import-on').exists(): time.sleep(0.01)"
    (app / "app.py").write_text(f"{APP}\n{wait}\n")
    (job_id,) = enqueue(dsn, "waits", folder=str(app))
    running = await worker(processes, dsn)
    await importing(app)
    running.send(signal.SIGUSR1)
    (app / "import-on").touch()
    await draining(dsn, running)
    assert rows(dsn, "SELECT state, attempt FROM pulse.jobs WHERE id = %(id)s", {"id": job_id}) == [("available", 0)]
    running.send(signal.SIGTERM)
    assert await running.ended() == 0


async def test_a_process_that_replaces_itself_remembers_that_it_is_to_claim_nothing(
    dsn: str, processes: Processes, app: Path
) -> None:
    enqueue_swallowing(dsn, folder=str(app))
    running = await worker(processes, dsn)
    await running.line("started")
    await told(app, "swallows-1")
    running.send(signal.SIGUSR1)
    await running.line("no more claims")
    await running.line("replacing the process")
    await draining(dsn, running)
    assert not (app / "swallows-2").exists()
    running.send(signal.SIGTERM)
    assert await running.ended() == 0


LAST_WILL = """
import atexit

@atexit.register
def last_will():
    os.write(1, b"the last will of %d\\n" % os.getpid())
    while not Path("go").exists():
        time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("count", [1, 2])
async def test_a_signal_in_a_processs_last_moments_is_no_error(
    count: int, number: signal.Signals, dsn: str, processes: Processes, app: Path
) -> None:
    (app / "app.py").write_text(f"{APP}\n{LAST_WILL}\n")
    running = await worker(processes, dsn, f"--processes={count}")
    for _ in range(count):
        await running.line("worker .* started: all queues")
    running.send(signal.SIGTERM)
    for _ in range(count):
        pid = int((await running.line(r"the last will of (\d+)"))[1])
        os.kill(pid, number)
    (app / "go").touch()
    assert await running.ended() == 0, running.report()
