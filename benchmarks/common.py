"""What every benchmark needs: options, a PostgreSQL of its own, turns, statistics, and where results go.

The server is the embedded PostgreSQL with settings one would choose in production: fsync and synchronous_commit on,
512 MB of shared buffers, checkpoints every 4 GB of WAL. It lives in a temporary folder and goes with the benchmark; each
run has a database of its own in it.

Nothing here is quiet about noise: every result carries the load that other processes put on the machine (metering.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.sql import SQL, Identifier

from pulse_trio.embedded import embedded_server
from pulse_trio.migrate import migrate_sync

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

HERE = Path(__file__).parent
SERVER_SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "min_wal_size": "2GB",
    "max_connections": "200",
}
SEGMENTS = 96
"""Of 16 MB: what PostgreSQL writes into before it makes new ones. Two minutes of 12 MB a second, or a minute of 25."""
Row = dict[str, Any]


# Options


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="small workloads: does it work? The figures mean nothing")
    made.add_argument("--rounds", type=int, help="how many times the ways take turns")
    made.add_argument(
        "--minutes", type=float, help="begin no round that would end later than this; one is always measured"
    )
    made.add_argument("--out", type=Path, help="folder for results; default: results/DATE beside the scripts")
    made.add_argument("--no-plot", action="store_true", help="write no picture (matplotlib is not needed then)")
    return made


def rounds(options: argparse.Namespace, usual: int = 5) -> int:
    """How many rounds to run: as asked, else one when quick, else the usual number. `in_turn` runs fewer when `--minutes` would
    not suffice."""
    if options.minutes is not None:
        Clock.until = Clock.began + options.minutes * 60
    return options.rounds or (1 if options.quick else usual)


class Clock:
    """When this program began, and until when it may begin another round."""

    began = time.monotonic()
    until = math.inf


def beginning_with(ways: Mapping[str, Callable[[], Row]], only: str | None) -> dict[str, Callable[[], Row]]:
    """The ways whose names begin with one of `only`, separated by semicolons; all without it."""
    wanted = tuple(only.split(";")) if only else ("",)
    picked = {name: way for name, way in ways.items() if name.startswith(wanted)}
    if not picked:
        raise SystemExit(f"none of these begins with {only!r}: {'; '.join(ways)}")
    return picked


# The server


@dataclass(frozen=True)
class Server:
    """A running PostgreSQL of the benchmark's own. `admin` is the DSN of its database `postgres`."""

    admin: str
    folder: Path
    version: str

    @property
    def data_folder(self) -> Path:
        return Path(self.query("SHOW data_directory")[0][0])

    def query(self, text: str) -> list[tuple[Any, ...]]:
        """One statement on the database `postgres`."""
        with psycopg.connect(self.admin, autocommit=True) as connection:
            return connection.execute(text.encode()).fetchall()

    @contextmanager
    def database(self, name: str = "bench", *, migrated: bool = True) -> Generator[str]:
        """A fresh database, dropped at the end; yields its DSN. `migrated`: with pulse-trio's schema in it."""
        with psycopg.connect(self.admin, autocommit=True) as connection:
            connection.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name)))
            connection.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))
        dsn = self.admin.replace("/postgres?", f"/{name}?", 1)
        assert dsn != self.admin, "the embedded server's DSN has another form now"
        try:
            if migrated:
                migrate_sync(dsn)
            yield dsn
        finally:
            with psycopg.connect(self.admin, autocommit=True) as connection:
                connection.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(name)))


@contextmanager
def open_server(settings: Mapping[str, str] | None = None) -> Generator[Server]:
    """The benchmark's own PostgreSQL, for as long as the block runs."""
    with (
        tempfile.TemporaryDirectory(prefix="pulse-trio-bench-", ignore_cleanup_errors=True) as folder,
        embedded_server(Path(folder), settings=SERVER_SETTINGS | dict(settings or {})) as embedded,
    ):
        recycle_segments(embedded.dsn)
        yield Server(embedded.dsn, Path(folder), embedded.version)


def recycle_segments(dsn: str) -> None:
    """Gives a fresh server what one that has run for a day has: WAL segments to write over. Without them it makes a new one for
    each 16 MB and all sessions wait for that, 60 to 80 ms: each second at 30,000 jobs a second, whoever's jobs they are."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(SEGMENTS):
            connection.execute(
                "SELECT pg_logical_emit_message(false, 'benchmark', 'a segment'); SELECT pg_switch_wal()"
            )
        connection.execute("CHECKPOINT")


def settle_down(dsn: str) -> None:
    """What makes every measurement begin alike: statistics for the planner, nothing to vacuum, and a checkpoint behind it."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM (ANALYZE)")
        connection.execute("CHECKPOINT")


def fill(
    dsn: str,
    count: int,
    *,
    queues: int = 1,
    priorities: int = 1,
    kind: str = "noop",
    given: Mapping[str, str] | None = None,
) -> None:
    """`count` due jobs written in bulk by SQL, an hour old, spread over queues and priorities; then `settle_down`. `given`:
    other columns, or other values of these, each an SQL expression of the number `n` from 0."""
    columns = {
        "kind": f"'{kind}'",
        "args": "'{}'",
        "queue": "'default'" if queues == 1 else f"'queue-' || (n % {queues})",
        "priority": f"(n / {queues}) % {priorities}",
        "run_at": "now() - interval '1 hour' + n * interval '1 us'",
        **(given or {}),
    }
    statement = (
        f"INSERT INTO pulse.job ({', '.join(columns)}) "
        f"SELECT {', '.join(columns.values())} FROM generate_series(0, {count} - 1) AS n"
    )
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(statement.encode())
    settle_down(dsn)


# Turns and statistics


def in_turn(
    ways: Mapping[str, Callable[[], Row]], count: int, *, show: Callable[[Row], str] = str
) -> dict[str, list[Row]]:
    """Runs every way once a round, `count` rounds; each round begins one further. No machine is quiet: pairs are fair."""
    results: dict[str, list[Row]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(count):
        began = time.monotonic()
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].append(ways[name]())
            progress(f"round {turn + 1}/{count}  {name}: {show(results[name][-1])}")
        if turn + 1 < count and 2 * time.monotonic() - began > Clock.until:
            progress(f"no time for more than {turn + 1} of {count} rounds")
            break
    return results


def medians(results: Mapping[str, Sequence[Row]], keys: Iterable[str]) -> list[Row]:
    """One row a way: the median of each key, and all rounds of the first key."""
    keys = list(keys)
    rows: list[Row] = []
    for name, runs in results.items():
        row: Row = {"way": name}
        for key in keys:
            values = [run[key] for run in runs if run.get(key) is not None]
            row[key] = statistics.median(values) if values else None
        row["rounds"] = [round(run[keys[0]], 3) for run in runs]
        rows.append(row)
    return rows


def ratio(ours: Sequence[Row], theirs: Sequence[Row], key: str) -> float:
    """The median of the rounds' ratios: both of a pair ran within the same minutes."""
    return statistics.median(a[key] / b[key] for a, b in zip(ours, theirs, strict=True))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> Row:
    """p50, p95, p99 and the greatest, of values in the unit given."""
    return {
        "n": len(values),
        "p50": percentile(values, 0.5),
        "p95": percentile(values, 0.95),
        "p99": percentile(values, 0.99),
        "max": max(values),
    }


# Results


def progress(text: str) -> None:
    """Says where we are, on stderr."""
    print(text, file=sys.stderr, flush=True)


def table(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """A Markdown table of `rows`; `columns` maps keys to headings."""
    cells = [[_cell(row.get(key)) for key in columns] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns.values()), *cells]) for i in range(len(columns))]
    lines = [list(columns.values()), ["-" * width for width in widths], *cells]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        case int() if not isinstance(value, bool):
            return f"{value:,}"
        case list():
            return " ".join(_cell(item) for item in value)
        case _:
            return str(value)


@dataclass
class Report:
    """One benchmark's outcome: printed at once, written as JSON, and a plot if there is one."""

    name: str
    question: str
    workload: str
    options: argparse.Namespace
    server: Server

    def finish(self, results: Row, *, plot: Callable[[Path], None] | None = None) -> None:
        """Writes NAME.json and, with matplotlib installed, NAME.png."""
        folder = self.options.out or HERE / "results" / datetime.now(UTC).strftime("%Y-%m-%d")
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self.name}-quick" if self.options.quick else self.name
        content = {
            "benchmark": self.name,
            "question": self.question,
            "workload": self.workload,
            "quick": self.options.quick,
            "environment": environment(self.server),
            "results": results,
        }
        (folder / f"{stem}.json").write_text(json.dumps(content, indent=1, default=str) + "\n")
        progress(f"wrote {stem}.json")
        if plot is not None and not self.options.no_plot:
            self._draw(folder / f"{stem}.png", plot)

    def say(self, rows: Sequence[Row], columns: Mapping[str, str], *, title: str = "") -> None:
        """Prints a table, under what is asked the first time."""
        print(f"\n{title or self.question}\n\n{table(rows, columns)}\n", flush=True)

    def _draw(self, path: Path, plot: Callable[[Path], None]) -> None:
        try:
            plot(path)
        except ImportError:
            progress("no plot: matplotlib is not installed (pip install -r benchmarks/requirements.txt)")
        else:
            progress(f"wrote {path.name}")


# The environment


def environment(server: Server) -> Row:
    """What a reader needs to compare: machine, versions and settings; no names of hosts or folders."""
    shown = (
        "fsync",
        "synchronous_commit",
        "shared_buffers",
        "min_wal_size",
        "max_wal_size",
        "wal_level",
        "full_page_writes",
    )
    return {
        **machine(),
        "fsync_ms": fsync_cost(server.folder),
        "postgresql": server.version,
        "settings": {name: server.query(f"SHOW {name}")[0][0] for name in shown},
    }


def machine() -> Row:
    """The machine, this program and its packages."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": os.getloadavg(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: _version_of(name) for name in ("pulse-trio", "trio", "psycopg", "msgspec")},
    }


def fsync_cost(folder: Path, tries: int = 50) -> float:
    """Milliseconds (median) for a write of 8 kB and its fdatasync on the disk that holds the database."""
    taken: list[float] = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(tries):
            began = time.perf_counter()
            os.pwrite(file.fileno(), bytes(8192), 0)
            os.fdatasync(file.fileno())
            taken.append(time.perf_counter() - began)
    return round(statistics.median(taken) * 1000, 3)


def _commit() -> str:
    try:
        head = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=HERE, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
