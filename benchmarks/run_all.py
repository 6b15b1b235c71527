"""Runs every benchmark in turn, shows where it is, and goes on when one fails.

    python benchmarks/run_all.py [--quick] [--only drain,claim] [--skip soak] [--out FOLDER]

Run it alone on the machine: the figures of a busy one are noise (each result says how busy it was). `--quick` takes a few
minutes and only shows that everything works. The exit code is the number of benchmarks that failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from common import HERE, open_server, progress

ORDER = (
    "drain",
    "shapes",
    "claim",
    "pgbench_limit",
    "latency",
    "results_round_trip",
    "cancel",
    "enqueue",
    "heartbeats",
    "queues",
    "backlog",
    "pinned_snapshot",
    "memory",
    "kit",
    "peers",
    "driver",
    "recovery",
    "soak",
)
WITH_A_DSN = {"driver"}
"""Scripts that measure a server which they do not start themselves."""


def arguments(name: str, options: argparse.Namespace, dsn: str | None, out: Path) -> list[str]:
    """The command line of one benchmark."""
    command = [sys.executable, str(HERE / f"{name}.py")]
    if dsn is not None:
        quick = ["--seconds", "0.3", "--rounds", "1"] if options.quick else []
        stem = f"{name}-quick" if options.quick else name
        return [*command, dsn, *quick, "--json", str(out / f"{stem}.json")]
    return [*command, "--out", str(out), *(["--quick"] if options.quick else [])]


def run(name: str, options: argparse.Namespace, out: Path) -> bool:
    """Runs one benchmark to its end; whether it succeeded. Its tables are kept beside its results."""
    if name in WITH_A_DSN:
        with open_server() as server, server.database(migrated=False) as dsn:
            command = arguments(name, options, dsn, out)
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    else:
        done = subprocess.run(arguments(name, options, None, out), stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    stem = f"{name}-quick" if options.quick else name
    (out / f"{stem}.txt").write_text(done.stdout.strip() + "\n")
    return done.returncode == 0


def chosen(options: argparse.Namespace) -> list[str]:
    """What to run, in order."""
    only = options.only.split(",") if options.only else list(ORDER)
    skipped = options.skip.split(",") if options.skip else []
    unknown = sorted({*only, *skipped} - set(ORDER))
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; known: {', '.join(ORDER)}")
    return [name for name in ORDER if name in only and name not in skipped]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="small workloads: does everything work?")
    made.add_argument("--only", help="benchmarks, separated by commas")
    made.add_argument("--skip", help="benchmarks, separated by commas")
    made.add_argument("--out", type=Path, help="folder for results; default: results/DATE beside the scripts")
    options = made.parse_args()
    out = (options.out or HERE / "results" / datetime.now(UTC).strftime("%Y-%m-%d")).absolute()
    out.mkdir(parents=True, exist_ok=True)
    names, failed = chosen(options), []
    for place, name in enumerate(names, 1):
        progress(f"\n=== {place}/{len(names)} {name}")
        began = time.monotonic()
        good = run(name, options, out)
        progress(f"=== {name} {'done' if good else 'FAILED'} in {time.monotonic() - began:.0f} s")
        if not good:
            failed.append(name)
    progress(f"\n{len(names) - len(failed)} of {len(names)} done{'; failed: ' + ', '.join(failed) if failed else ''}")
    sys.exit(len(failed))


if __name__ == "__main__":
    main()
