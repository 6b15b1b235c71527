"""The public benchmark's cells, shortened, one after the other: our row beside the published ones.

    python benchmarks/public/cells.py --harness FOLDER [--only throughput,idle-in-tx] [--seconds 60] [--json FILE]

Each cell is one run of `run.py` with the published options; only the phases are shorter: `--seconds` is what a phase of load
lasts (60 to 240 s in the published runs, their warm-up 30 s). PUBLISHED are the figures of its sweep of 2026-05-09, PostgreSQL
18 with four cores and 8 GB: the rates are another machine's, the shares of a system's own undisturbed rate are not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "build" / "public" / "harness" / "results"
WARM = "warmup=warmup:{warm}s"


@dataclass(frozen=True)
class Cell:
    """Options, phases ({s}: seconds of a phase, {warm}: of the warm-up), and which phase is a share of which. The published
    rows: jobs a second, or the share."""

    options: str
    phases: tuple[str, ...]
    published: Mapping[str, float | None]
    stress: str | None = None
    clean: str = "clean"
    systems: tuple[str, ...] = ("pulse-trio",)


DEPTH = "--producer-mode depth-target --producer-rate 50000 --target-depth 4000"
THREE = ("pulse-trio", "pgboss", "procrastinate")
KILLED = ("baseline=clean:{s}s", "kill=kill-worker(instance=0):{s}s", "restart=start-worker(instance=0):{s}s")
CELLS = {
    "throughput, 64 workers": Cell(
        f"{DEPTH} --worker-count 64",
        ("clean=clean:{s}s",),
        {"awa": 5369, "pgboss": 2387, "river": 501, "absurd": 398, "oban": 284, "procrastinate": 269}
        | {"pgque, an event bus": 27719, "pgmq": 10243},
        systems=THREE,
    ),
    "throughput, 256 workers": Cell(
        f"{DEPTH} --worker-count 256",
        ("clean=clean:{s}s",),
        {"awa": 14158, "pgboss": 2356, "pgque, an event bus": 39898, "pgmq": 3252},
    ),
    "idle-in-tx": Cell(
        "--producer-rate 800 --worker-count 32",
        ("clean=clean:{s}s", "idle=idle-in-tx:{s}s", "after=clean:{s}s"),
        {"awa": 0.75, "oban": 0.96, "pgque": 1.0, "pgboss": None, "procrastinate": None, "river": None},
        stress="idle",
    ),
    "pressure": Cell(
        "--producer-rate 800 --worker-count 32",
        ("clean=clean:{s}s", "pressure=high-load:{s}s", "after=clean:{s}s"),
        {"awa": 0.73, "absurd": 0.71, "oban": 1.02, "pgboss": 1.36, "procrastinate": 0.94, "river": 1.4, "pgque": 1.0},
        stress="pressure",
    ),
    "active-readers": Cell(
        "--producer-rate 800 --worker-count 32",
        ("clean=clean:{s}s", "readers=active-readers:{s}s", "after=clean:{s}s"),
        {"awa": 0.71, "absurd": 0.74, "oban": 0.98, "pgboss": 1.01, "procrastinate": 0.63, "river": 1.0, "pgque": 1.0},
        stress="readers",
    ),
    "crash": Cell(
        "--producer-rate 300 --replicas 2",
        (*KILLED, "recovery=clean:{s}s"),
        {
            "awa": 0.98,
            "absurd": 1.03,
            "oban": 0.98,
            "pgboss": 1.17,
            "procrastinate": 0.73,
            "river": 1.21,
            "pgque": 0.98,
        },
        stress="recovery",
        clean="baseline",
    ),
    "postgres-restart": Cell(
        "--producer-rate 600",
        ("baseline=clean:{s}s", "restart=postgres-restart:{s}s", "recovery=clean:{s}s"),
        {"awa": 1.0, "absurd": 0.0, "oban": 0.0, "pgboss": None, "procrastinate": 0.0, "river": 1.01, "pgque": 1.0},
        stress="recovery",
        clean="baseline",
    ),
    "backend-kill": Cell(
        "--producer-rate 600",
        ("baseline=clean:{s}s", "kills=pg-backend-kill(rate=2):{s}s", "recovery=clean:{s}s"),
        {"awa": 1.0, "absurd": 0.0, "oban": 1.0, "pgboss": None, "procrastinate": 0.0, "river": 1.01, "pgque": 1.0},
        stress="recovery",
        clean="baseline",
    ),
}
"""A published None: that cell did not come to its end, or gave no sample."""


def measured(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """One run of the harness: each system's phases."""
    lengths = {"s": options.seconds, "warm": options.warm}
    phases = [part for phase in (WARM, *cell.phases) for part in ("--phase", phase.format(**lengths))]
    command = [sys.executable, str(HERE / "run.py"), "--harness", str(options.harness), "--python", options.python]
    command += ["run", "--systems", ",".join(cell.systems), *cell.options.split(), *phases]
    before = set(RESULTS.glob("*"))
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    (folder,) = set(RESULTS.glob("*")) - before
    if not (folder / "summary.json").exists():  # it did not come to its end
        return {"exit": done.returncode or 1, "systems": {}}
    summary = json.loads((folder / "summary.json").read_text())
    manifest = json.loads((folder / "manifest.json").read_text())
    found: dict[str, Any] = {"exit": done.returncode, "postgres": manifest["postgres"], "systems": {}}
    for system, said in summary["systems"].items():
        rows = {label: row_of(phase) for label, phase in said["phases"].items()}
        found["systems"][system] = {"phases": rows}
        if cell.stress and cell.stress in rows and rows.get(cell.clean, {}).get("rate"):
            found["systems"][system]["share"] = rows[cell.stress]["rate"] / rows[cell.clean]["rate"]
    return found


def row_of(phase: dict[str, Any]) -> dict[str, Any]:
    """What a phase's summary says of one system."""
    return {
        "rate": phase.get("median_throughput_per_s"),
        "enqueued": phase.get("median_enqueue_rate_per_s"),
        "p50": phase["metrics"].get("claim_p50_ms", {}).get("median"),
        "p99": phase.get("median_claim_p99_ms"),
        "depth": phase.get("median_queue_depth"),
        "dead_rows": phase.get("peak_dead_tup"),
    }


def say(name: str, cell: Cell, found: dict[str, Any]) -> None:
    """Our rows and the published ones of a cell, as tables."""
    print(f"\n## {name}\n\n| system | phase | jobs/s | enqueued/s | claim p50, p99 ms | dead rows at most |")
    print("|---|---|---|---|---|---|")
    for system, said in found["systems"].items():
        for label, row in said["phases"].items():
            figures = [f"{row[key]:,.0f}" if row[key] is not None else "-" for key in ("rate", "enqueued", "dead_rows")]
            waits = ", ".join(f"{row[key]:,.1f}" if row[key] is not None else "-" for key in ("p50", "p99"))
            print(f"| {system} | {label} | {figures[0]} | {figures[1]} | {waits} | {figures[2]} |")
    if cell.stress:
        ours = {system: said.get("share") for system, said in found["systems"].items()}
        shown = {f"{system} (here)": share for system, share in ours.items()} | dict(cell.published)
        said = [f"{n} {'-' if share is None else f'{share:.0%}'}" for n, share in shown.items()]
        print(f"\n{cell.stress} against {cell.clean}: {', '.join(said)}")
    else:
        print(
            "\npublished, jobs/s: " + ", ".join(f"{name} {rate:,.0f}" for name, rate in cell.published.items() if rate)
        )
    sys.stdout.flush()


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--harness", type=Path, required=True, help="a clone of the benchmark's repository")
    made.add_argument("--python", default="python3.12", help="a Python from 3.12 on")
    made.add_argument("--only", help="cells, separated by semicolons")
    made.add_argument("--seconds", type=int, default=60, help="of a phase of load")
    made.add_argument("--warm", type=int, default=10, help="seconds of warm-up")
    made.add_argument("--json", type=Path, help="where to write what was found; what it has of other cells is kept")
    options = made.parse_args()
    names = options.only.split(";") if options.only else list(CELLS)
    if unknown := set(names) - set(CELLS):
        made.error(f"unknown: {', '.join(unknown)}; known: {'; '.join(CELLS)}")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from common import machine

    kept: dict[str, Any] = (
        json.loads(options.json.read_text()) if options.json and options.json.exists() else {"cells": {}}
    )
    failed = 0
    for name in names:
        found = measured(CELLS[name], options)
        failed += found["exit"] != 0
        found |= {
            "seconds": options.seconds,
            "published": CELLS[name].published,
            "at": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        }
        kept["cells"][name] = found
        kept |= {"benchmark": "public", "environment": machine()}
        say(name, CELLS[name], found)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(kept, indent=1) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
