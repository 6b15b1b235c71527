"""How long until the jobs of whoever died run again?

    python benchmarks/recovery.py [--quick] [--only child,worker,server]

Real `pulse-trio run` processes, with handlers that say when they begin; CLOCK_MONOTONIC on both sides. Three accidents:

- *child*: kill -9 of one of the processes of a supervisor. From the kill to the start of the last of its 10 jobs elsewhere;
  with room in the other process, and with none, when they wait for its successor. At most 1 s is promised where there is room.
- *worker*: kill -9 of a lone worker, another one alive. At most lease + tick. With the default lease (30 s, tick 5 s), and
  with a short one (6 s, tick 1 s) for more samples. The kill comes at any moment of a heartbeat interval.
- *server*: an immediate shutdown of PostgreSQL, and its start at once, or after it was away for 15 s, when every worker's
  backoff has grown. From the moment it accepts a connection until a job starts (in any of two workers), and until every worker
  has started one. At most 5 s.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg

from common import HERE, SERVER_SETTINGS, Report, Row, Server, open_server, parser, progress, spread
from plots import distribution
from processes import wait_until
from pulse_trio import SyncClient
from pulse_trio.embedded.membership import Membership
from pulse_trio.migrate import migrate_sync

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Generator

JOBS = 10
COLUMNS = {
    "way": "accident",
    "n": "n",
    "p50": "median s",
    "max": "max s",
    "limit": "promised s",
}


class Settings(NamedTuple):
    """What decides how long a rescue takes, in seconds."""

    lease: float = 30.0
    heartbeat: float = 10.0
    watchdog: float = 5.0


DEFAULT, SHORT = Settings(), Settings(6.0, 2.0, 1.0)


class Start(NamedTuple):
    job: int
    attempt: int
    pid: int
    at: float


class Run:
    """One `pulse-trio run`, and what its handlers say."""

    def __init__(self, dsn: str, settings: Settings, log: Path, *, processes: int = 1, concurrency: int = 100) -> None:
        command = [sys.executable, "-m", "pulse_trio.cli", "run", "recovery_app:handlers", "--grace", "0"]
        chosen = settings._asdict() | {"processes": processes, "concurrency": concurrency}
        command += [f"--{name}={value:g}" for name, value in chosen.items()]
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                command,
                cwd=HERE,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | {"PULSE_TRIO_DSN": dsn},
            )
        self.pid = self._process.pid
        self.starts: list[Start] = []
        self.up: list[int] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said: dict[str, Any] = json.loads(line)
            if "up" in said:
                self.up.append(said["pid"])
            else:
                self.starts.append(Start(**said))

    def kill(self) -> None:
        """Without a word, and without its children's knowing."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Jobs are released."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
        self._listener.join(5)


@contextmanager
def fleet(*start: Callable[[], Run]) -> Generator[list[Run]]:
    """Runs that are up; whatever the list holds at the end is stopped."""
    runs = [one() for one in start]
    try:
        for run in runs:
            wait_until(lambda run=run: bool(run.up), 60, "a worker")
        time.sleep(SETTLED)
        yield runs
    finally:
        for run in runs:
            run.stop()


SETTLED = 1.5
"""Seconds from a worker's import of its handlers until it waits for jobs, amply."""


def enqueue(dsn: str, kind: str, count: int) -> set[int]:
    """The ids of so many new jobs."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        client = SyncClient(connection)
        return {client.enqueue(kind, max_attempts=100).id for _ in range(count)}


def holders(runs: list[Run], jobs: set[int]) -> dict[int, set[int]]:
    """Waits until all of `jobs` have started; which process has which."""
    wait_until(lambda: jobs <= {s.job for run in runs for s in list(run.starts)}, 30, "the jobs")
    held: dict[int, set[int]] = {}
    for start in (s for run in runs for s in list(run.starts) if s.job in jobs):
        held.setdefault(start.pid, set()).add(start.job)
    return held


def until_all_run_again(runs: list[Run], jobs: set[int], killed: float, limit: float) -> float:
    """Seconds from `killed` to the start of the last of `jobs`."""

    def again() -> list[float]:
        return [s.at for run in runs for s in list(run.starts) if s.job in jobs and s.attempt > 1]

    wait_until(lambda: len(again()) >= len(jobs), 4 * limit + 20, "the jobs to start again")
    return max(again()) - killed


def child_killed(server: Server, log: Path, samples: int, *, room: bool) -> list[float]:
    """Of two processes under a supervisor, the one that holds more."""
    taken: list[float] = []
    missing = JOBS if room else 2 * JOBS
    held: dict[int, set[int]] = {}
    with (
        server.database() as dsn,
        fleet(partial(Run, dsn, DEFAULT, log, processes=2, concurrency=100 if room else JOBS)) as runs,
    ):
        (run,) = runs
        wait_until(lambda: len(run.up) == 2, 60, "two processes")
        time.sleep(SETTLED)
        for _ in range(samples):
            for pid, jobs in holders(runs, enqueue(dsn, "held", missing)).items():
                held.setdefault(pid, set()).update(jobs)
            victim = max(held, key=lambda pid: len(held[pid]))
            jobs = held.pop(victim)
            missing, known = len(jobs), len(run.up)
            time.sleep(random.uniform(0.3, 0.8))
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            taken.append(until_all_run_again(runs, jobs, killed, 1))
            progress(f"  {len(jobs)} jobs of a child: {taken[-1]:.3f} s")
            wait_until(lambda known=known: len(run.up) > known, 60, "the successor")
            time.sleep(SETTLED)
    return taken


def worker_killed(server: Server, log: Path, samples: int, settings: Settings) -> list[float]:
    """Of two lone workers, the one that holds more."""
    taken: list[float] = []
    with server.database() as dsn, fleet(*[partial(Run, dsn, settings, log)] * 2) as runs:
        for _ in range(samples):
            held = holders(runs, enqueue(dsn, "held", JOBS))
            victim = max(runs, key=lambda run: len(held.get(run.pid, ())))
            runs.remove(victim)
            # At any moment between two beats.
            time.sleep(random.uniform(0.3, settings.heartbeat))
            killed = time.monotonic()
            victim.kill()
            taken.append(until_all_run_again(runs, held[victim.pid], killed, settings.lease + settings.watchdog))
            progress(f"  {len(held[victim.pid])} jobs of a worker, lease {settings.lease:g} s: {taken[-1]:.3f} s")
            runs.append(Run(dsn, settings, log))
            wait_until(lambda: bool(runs[-1].up), 60, "its successor")
            time.sleep(SETTLED)
    return taken


# A server that goes and comes


class Restartable:
    """A PostgreSQL of our own that can be shut down and started; the DSN stays."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._membership = Membership.join(folder, SERVER_SETTINGS)
        self.dsn = self._membership.server.dsn

    def shut_down(self) -> None:
        """At once, without a checkpoint, as `pg_ctl -m immediate stop`. Returns when it has gone."""
        os.kill(int((self._folder / "data" / "postmaster.pid").read_text().split("\n")[0]), signal.SIGQUIT)
        self._membership.leave()

    def start(self) -> None:
        self._membership = Membership.join(self._folder, SERVER_SETTINGS)

    def close(self) -> None:
        self._membership.leave()


class Watch(threading.Thread):
    """Notes when a server accepts a connection again."""

    def __init__(self, dsn: str) -> None:
        super().__init__(daemon=True)
        self._dsn = dsn
        self.accepted = 0.0
        self.start()

    def run(self) -> None:
        while not self.accepted:
            try:
                with psycopg.connect(self._dsn, connect_timeout=2):
                    self.accepted = time.monotonic()
            except psycopg.OperationalError:
                time.sleep(0.002)


def server_restarted(log: Path, samples: int, away: float) -> tuple[list[float], list[float]]:
    """Seconds from accepting connections to the first start of a job, and to one in every worker."""
    first: list[float] = []
    every: list[float] = []
    with tempfile.TemporaryDirectory(prefix="pulse-trio-bench-", ignore_cleanup_errors=True) as folder:
        server = Restartable(Path(folder))
        try:
            migrate_sync(server.dsn)
            # So few at a time that a worker never stops claiming, and so many that they do not run out: 200 a second.
            with fleet(*[partial(Run, server.dsn, DEFAULT, log, concurrency=2)] * 2) as runs:
                for _ in range(samples):
                    enqueue_many(server.dsn, 4000)
                    time.sleep(1)
                    server.shut_down()
                    gone = time.monotonic()
                    time.sleep(away)
                    watch = Watch(server.dsn)
                    server.start()
                    # B023: it is called in this turn of the loop only.
                    wait_until(lambda: all(since(run, gone) for run in runs), 60, "both workers' claims")  # noqa: B023
                    begun = sorted(since(run, gone)[0] - watch.accepted for run in runs)
                    first.append(max(0.0, begun[0]))
                    every.append(max(0.0, begun[-1]))
                    progress(f"  server away for {away:g} s: first {first[-1]:.3f} s, every worker {every[-1]:.3f} s")
        finally:
            server.close()
    return first, every


def enqueue_many(dsn: str, count: int) -> None:
    """As many again as ran out."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pulse.enqueue('short') FROM generate_series(1, %s)", [count])


def since(run: Run, gone: float) -> list[float]:
    """Starts of claims that were made after the server had gone: what had been claimed before started before long."""
    return [start.at for start in list(run.starts) if start.at > gone + 0.2]


# All of it


def measure(options: argparse.Namespace, server: Server, log: Path) -> dict[str, tuple[float, list[float]]]:
    """By accident: the limit, and the seconds it took."""
    only = options.only.split(",") if options.only else ["child", "worker", "server"]
    few, many = (2, 3) if options.quick else (4, 12)
    found: dict[str, tuple[float, list[float]]] = {}
    if "child" in only:
        found["child of a supervisor, room elsewhere"] = (1.0, child_killed(server, log, many, room=True))
        found["child of a supervisor, no room elsewhere"] = (math.nan, child_killed(server, log, many, room=False))
    if "worker" in only:
        for settings, count in ((SHORT, many), *(() if options.quick else ((DEFAULT, few),))):
            name = f"lone worker, lease {settings.lease:g} s, tick {settings.watchdog:g} s"
            found[name] = (settings.lease + settings.watchdog, worker_killed(server, log, count, settings))
    if "server" in only:
        for away, count in ((0.0, many), *(() if options.quick else ((15.0, 2 * few),))):
            first, every = server_restarted(log, count, away)
            when = f", away for {away:g} s" if away else ""
            found[f"server restarted{when}: first claim"] = (5.0, first)
            found[f"server restarted{when}: every worker claims"] = (5.0, every)
    return found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", help="accidents, separated by commas: child, worker, server")
    options = made.parse_args()
    with open_server() as server, tempfile.TemporaryDirectory(prefix="pulse-trio-bench-log-") as folder:
        log = Path(folder) / "workers.log"
        try:
            found = measure(options, server, log)
        except TimeoutError:
            progress(log.read_text()[-4000:])
            raise
        rows: list[Row] = [
            {"way": way, **spread(taken), "limit": limit if not math.isnan(limit) else None}
            for way, (limit, taken) in found.items()
        ]
        report = Report(
            "recovery",
            "How long until the jobs of whoever died run again?",
            f"{JOBS} jobs or more held by the one that is killed; two workers always; seconds from the accident on",
            options,
            server,
        )
        report.say(rows, COLUMNS)
        report.finish(
            {"accidents": rows, "samples": {way: taken for way, (_, taken) in found.items()}},
            plot=lambda path: distribution(
                path, {way: taken for way, (_, taken) in found.items()}, title="Accident to jobs running again", x="s"
            ),
        )
    kept = all(max(taken) <= limit for limit, taken in found.values() if not math.isnan(limit))
    progress("every promise was kept" if kept else "NOT every promise was kept")


if __name__ == "__main__":
    main()
