"""What a run costs, read from outside: CPU through /proc, WAL and fsyncs through PostgreSQL's own counters.

CPU of PostgreSQL is that of the postmaster and all its children, those that have ended included (a parent's account takes
over a child's when it is waited for). The machine's whole CPU is read too: what belongs neither to PostgreSQL nor to the
processes measured nor to us is `others`, and a result with much of it is noise.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

if TYPE_CHECKING:
    from collections.abc import Iterable

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_of(pid: int) -> float:
    """Seconds of CPU a process has used, its ended children included; 0 if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    # The name, in brackets, may contain anything; after it: state, ppid, ... with utime as the 12th field.
    fields = stat.rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / TICKS


def rss_of(pid: int) -> int:
    """Bytes of memory a process has resident."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def children_of(pid: int) -> list[int]:
    """Process ids of a process's living children."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def machine_cpu() -> float:
    """Seconds of CPU that all processes together have used since boot."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / TICKS


@dataclass(frozen=True)
class Reading:
    """The counters at one moment."""

    at: float
    postgres: float
    watched: float
    ourselves: float
    machine: float
    wal: int
    fsyncs: int


class Meter:
    """Reads the counters of a server, from a connection of its own, and of the processes in `pids`."""

    def __init__(self, dsn: str) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True)
        row = self._connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        status = Path(f"/proc/{row[0]}/status").read_text()
        self._postmaster = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def query(self, text: str) -> list[tuple[Any, ...]]:
        """One statement on the meter's connection."""
        return self._connection.execute(text.encode()).fetchall()

    def postgres_cpu(self) -> float:
        """Seconds of CPU that PostgreSQL has used, all processes together."""
        return cpu_of(self._postmaster) + sum(cpu_of(child) for child in children_of(self._postmaster))

    def read(self, pids: Iterable[int] = ()) -> Reading:
        """The counters now."""
        wal, fsyncs = self.query(
            "SELECT pg_current_wal_insert_lsn() - '0/0', "
            "(SELECT coalesce(sum(fsyncs), 0) FROM pg_stat_io WHERE object = 'wal')"
        )[0]
        used = os.times()
        return Reading(
            at=time.monotonic(),
            postgres=self.postgres_cpu(),
            watched=sum(cpu_of(pid) for pid in pids),
            ourselves=used.user + used.system + used.children_user + used.children_system,
            machine=machine_cpu(),
            wal=int(wal),
            fsyncs=int(fsyncs),
        )

    def wait_for_others(self, seconds: float = 10) -> None:
        """Waits until no other client is connected: a backend's counters are complete when it has ended."""
        end = time.monotonic() + seconds
        others = (
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        while self.query(others)[0][0] and time.monotonic() < end:
            time.sleep(0.02)


def costs(before: Reading, after: Reading, jobs: int) -> dict[str, float]:
    """The difference of two readings: CPU and WAL for each job, and what else went on."""
    seconds = after.at - before.at
    postgres, watched = after.postgres - before.postgres, after.watched - before.watched
    ours = after.ourselves - before.ourselves
    others = (after.machine - before.machine) - postgres - watched - ours
    return {
        "worker_us": watched / jobs * 1e6,
        "postgres_us": postgres / jobs * 1e6,
        "wal_bytes": (after.wal - before.wal) / jobs,
        "worker_cores": watched / seconds,
        "postgres_cores": postgres / seconds,
        "others_cores": max(0.0, others / seconds),
    }
