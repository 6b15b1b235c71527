"""A worker with little memory to spare: large jobs that are due first take it, and the small ones behind them go on."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pulse_trio import SyncClient
from pulse_trio.client import request_by_name
from support.workers import RUN, settled, until

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes

APP = """
from pulse_trio import Handlers

handlers = Handlers()


@handlers.job
async def first() -> None: ...


@handlers.job
async def large(text: str) -> int:
    return len(text)


@handlers.job
async def small(n: int) -> int:
    return n
"""
MB = 1024 * 1024
LARGE, SMALL, SPARE = 40, 200, 16 * MB


def limit_memory(pid: int, spare: int) -> None:
    """The process gets no more address space than it has, and `spare` bytes."""
    in_use = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (in_use + spare, hard))


async def test_small_jobs_go_on_behind_large_ones_that_memory_cannot_take_and_nothing_is_lost(
    dsn: str, processes: Processes
) -> None:
    (processes.folder / "app.py").write_text(APP)
    client = SyncClient(dsn)
    worker = await processes.pulse_trio(*RUN, f"--dsn={dsn}")
    await settled(dsn, client.enqueue("first").id)
    limit_memory(worker.pid, SPARE)
    # What is lost of an answer is rescued again and again: no job is to run out of attempts for that.
    client.enqueue_many(
        [request_by_name("large", {"text": "x" * (MB - 100)}, max_attempts=1000) for _ in range(LARGE)]
        + [request_by_name("small", {"n": n}, max_attempts=1000) for n in range(SMALL)]
    )
    # Within 40 s, of which a rescue's lease has 6.
    await until(dsn, f"SELECT FROM pulse.jobs WHERE kind = 'small' AND state = 'completed' HAVING count(*) = {SMALL}")
    assert worker.process.returncode is None, worker.report()
    _, hard = resource.prlimit(worker.pid, resource.RLIMIT_AS)
    resource.prlimit(worker.pid, resource.RLIMIT_AS, (hard, hard))
    await until(dsn, f"SELECT FROM pulse.jobs WHERE state = 'completed' HAVING count(*) = {1 + LARGE + SMALL}")
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0, worker.report()


DECODES = """
import resource
from pathlib import Path

from pulse_trio import Handlers

handlers = Handlers()


@handlers.job
async def large(text: str) -> None: ...


args = '{"text": "' + "x" * (64 << 20) + '"}'
in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (32 << 20), resource.RLIM_INFINITY))
try:
    handlers["large"].signature.decode(args)
except MemoryError:
    print("MemoryError")
"""


def test_arguments_that_memory_cannot_take_are_an_error_of_their_job_and_not_the_process_s_end() -> None:
    done = subprocess.run([sys.executable, "-c", DECODES], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "MemoryError\n"), done.stderr


READS = """
import resource
import sys
from pathlib import Path

import trio

from pulse_trio import DatabaseUnavailable
from pulse_trio.postgres import Link

async def main() -> None:
    link = Link(sys.argv[1], name="claims", statement_timeout=60)
    async with link.use() as connection:
        await connection.execute("SELECT 1")
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (32 << 20), resource.RLIM_INFINITY))
    try:
        async with link.use() as connection:
            await connection.execute("SELECT repeat('x', 1000000) FROM generate_series(1, 100)")
    except DatabaseUnavailable as error:
        print(error)
    async with link.use() as connection:
        print(*await (await connection.execute("SELECT 'goes on'")).fetchone())
    await link.aclose()

trio.run(main)
"""


def test_an_answer_that_memory_cannot_take_is_lost_like_a_connection_and_the_next_is_had(dsn: str) -> None:
    done = subprocess.run([sys.executable, "-c", READS, dsn], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lost, then = done.stdout.splitlines()
    assert lost.startswith("claims: ")
    assert "memory" in lost
    assert then == "goes on"
