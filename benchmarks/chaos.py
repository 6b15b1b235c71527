"""Workers, producers and PostgreSQL under a seeded schedule of faults; then the history is held against the invariants.

    python benchmarks/chaos.py --seed 7 --seconds 60 --workers 5
    make chaos SEED=7 SECONDS=60 WORKERS=5
    python benchmarks/chaos.py --seeds 1-20

The same seed strikes with the same faults at the same times (what they meet there is up to the machine). Exit code 1, with the
evidence, if an invariant is broken. `--seeds` plays one after the other, each in a process of its own, writes what was found to
results/DATE/chaos.json after each, and goes on when one fails. docs/explanation/proof.md tells what is checked and how to read
the page.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import trio

from common import machine
from common import table as markdown

# The harness is the tests' own.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.chaos.page import page
from support.chaos.run import Result, play
from support.chaos.schedule import KINDS, plan

OVERHEAD = 420.0
"""Seconds that a seed may take beside its faults: start, drain and probe (150 at most), and the checking."""
FAREWELL = 60.0
"""Seconds in which a seed that took longer may take down what it has started."""
COLUMNS = {
    "seed": "seed",
    "enqueued jobs": "enqueued",
    "jobs": "jobs",
    "attempts": "attempts",
    "number of faults": "faults",
    "rescues": "rescues",
    "refused reports": "reports refused",
    "lost beats": "beats refused",
    "reports without a reply": "no reply",
    "rows of job.transaction()": "transactions",
    "occurrences of schedules": "occurrences",
    "handlers that did not end": "stuck",
    "largest recovery after a kill, hindrances aside (s)": "kill to rescue (s)",
    "largest hand-back after a supervised kill, hindrances aside (s)": "child's kill to rescue (s)",
    "largest rescue after the lease, hindrances aside (s)": "lease to rescue (s)",
    "largest pause of claims after a restart (s)": "restart to claim (s)",
    "drained in": "drain (s)",
    "verdict": "invariants",
}


def options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, help="of the schedule; default: the time")
    made.add_argument("--seeds", type=seeds_of, help="several, one after the other: 1-20, or 3,7,10-12")
    made.add_argument("--seconds", type=float, default=60.0, help="how long faults strike (60)")
    made.add_argument("--workers", type=int, default=5, help="workers; of four or more one is a supervised group (5)")
    made.add_argument("--producers", type=int, default=2, help="producer processes, of three tasks each (2)")
    made.add_argument("--rate", type=float, default=6.0, help="operations a second of each producer task (6)")
    made.add_argument("--kinds", help=f"only these faults, with commas between: {', '.join(KINDS)}")
    made.add_argument("--slack", type=float, default=2.0, help="seconds that a loaded machine may take for nothing (2)")
    made.add_argument("--page", type=Path, help="where the report page goes (build/chaos/seed-N.html)")
    made.add_argument("--keep", type=Path, help="keep the run's files (logs, journals, the database) in this folder")
    made.add_argument("--out", type=Path, help="with --seeds: the folder of chaos.json (benchmarks/results/DATE)")
    made.add_argument("--json", action="store_true", help="print the figures as JSON")
    made.add_argument("--plan", action="store_true", help="only print the schedule")
    return made.parse_args()


def seeds_of(text: str) -> list[int]:
    """`1-3,7` as 1, 2, 3, 7."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def figures(result: Result) -> str:
    """The figures for people."""
    lines: list[str] = []
    for name, value in result.counts.items():
        parts: dict[str, Any] = value if isinstance(value, dict) else {"": value}
        for number, (part, figure) in enumerate(parts.items()):
            lines.append(f"{name if number == 0 else '':65}{part:28}{figure:>10,}")
    return "\n".join(lines)


def main() -> int:
    given = options()
    kinds = [k.strip() for k in given.kinds.split(",")] if given.kinds else None
    if unknown := set(kinds or ()) - set(KINDS):
        print(f"no such fault: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    if given.seeds:
        return play_all(given)
    seed = given.seed if given.seed is not None else int(time.time())
    if given.plan:
        for fault in plan(seed, given.seconds, given.workers, kinds):
            print(f"{fault.at:7.2f} s  {fault.kind:28} worker {fault.worker}  {fault.seconds:5.2f} s  {fault.how}")
        return 0
    return play_one(given, seed, kinds)


def play_one(given: argparse.Namespace, seed: int, kinds: list[str] | None) -> int:
    """One seed, here; returns the exit code."""

    def say(message: str) -> None:
        print(f"seed {seed}: {message}", file=sys.stderr, flush=True)

    async def run() -> Result:
        return await play(
            seed, given.seconds, workers=given.workers, producers=given.producers, rate=given.rate, kinds=kinds,
            slack=given.slack, keep=given.keep, say=say,
        )  # fmt: skip

    result = trio.run(run)
    path = given.page or Path("build", "chaos", f"seed-{seed}.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(result), encoding="utf-8")
    print(json.dumps(result.summary(), indent=2) if given.json else figures(result))
    for violation in result.violations:
        print(violation, file=sys.stderr)
    verdict = f"{len(result.violations)} VIOLATIONS" if result.violations else "no invariant broken"
    say(f"{verdict}; report: {path}")
    return 1 if result.violations else 0


# Several seeds


def play_all(given: argparse.Namespace) -> int:
    """Each seed in turn, in a process of its own; returns 1 if any has failed."""
    folder = given.out or Path(__file__).parent / "results" / datetime.now(UTC).strftime("%Y-%m-%d")
    folder.mkdir(parents=True, exist_ok=True)
    began = machine()
    found: list[dict[str, Any]] = []
    for place, seed in enumerate(given.seeds, 1):
        summary = play_apart(given, seed)
        found.append(summary)
        content = {
            "benchmark": "chaos",
            "question": "Workers, producers and PostgreSQL under a seeded schedule of faults: is any invariant broken?",
            "workload": f"{given.seconds:g} s of faults a seed, {given.workers} workers, {given.producers} producers",
            "slack": given.slack,
            "environment": began,
            "totals": totals(found),
            "seeds": found,
        }
        (folder / "chaos.json").write_text(json.dumps(content, indent=1) + "\n")
        print(f"--- {place} of {len(given.seeds)}: seed {seed}: {summary['verdict']}", file=sys.stderr, flush=True)
    print(f"\n{markdown(found, COLUMNS)}\n")
    for name, value in totals(found).items():
        print(f"{name}: {value}")
    return 0 if all(summary["verdict"] == "held" for summary in found) else 1


def play_apart(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The summary of a seed that was played in a process of its own; what it says goes on to our stderr."""
    command = [sys.executable, __file__, "--json", f"--seed={seed}"]
    passed_on = {name: getattr(given, name) for name in ("seconds", "workers", "producers", "rate", "slack", "kinds")}
    command += [f"--{name}={value}" for name, value in passed_on.items() if value is not None]
    if given.keep:
        command.append(f"--keep={given.keep / f'seed-{seed}'}")
    began = time.monotonic()
    last: deque[str] = deque(maxlen=60)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        ends = [
            threading.Timer(given.seconds + OVERHEAD, send, (process, signal.SIGINT)),
            threading.Timer(given.seconds + OVERHEAD + FAREWELL, send, (process, signal.SIGKILL)),
        ]
        for end in ends:
            end.daemon = True
            end.start()
        printed: list[str] = []
        reader = threading.Thread(target=lambda stream: printed.append(stream.read()), args=(process.stdout,))
        reader.start()
        try:
            for line in process.stderr:
                last.append(line.rstrip("\n"))
                print(line, end="", file=sys.stderr, flush=True)
            reader.join()
            code = process.wait()
        except BaseException:
            send(process, signal.SIGINT)
            raise
        finally:
            for end in ends:
                end.cancel()
    took = round(time.monotonic() - began, 1)
    try:
        summary: dict[str, Any] = json.loads(printed[0])
    except (ValueError, IndexError):
        return {"seed": seed, "verdict": "NOT PLAYED", "exit code": code, "took": took, "said": list(last)}
    broken = sorted({text.partition(":")[0] for text in summary["violations"]})
    verdict = f"BROKEN: {' '.join(broken)}" if broken else "held"
    return summary | {"number of faults": sum(summary["faults"].values()), "verdict": verdict, "took": took}


def send(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """To the process and all it has started in its session."""
    if process.poll() is None:
        os.killpg(process.pid, number)


def totals(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the seeds, the largest of what is named largest, and the faults of each kind."""
    played = [summary for summary in found if "faults" in summary]
    sums: dict[str, Any] = {"seeds": len(found), "held": sum(summary["verdict"] == "held" for summary in found)}
    for name in played[0] if played else ():
        values = [summary[name] for summary in played]
        if name.startswith("largest") or name == "drained in":
            sums[name] = max(values)
        elif isinstance(values[0], dict):
            sums[name] = dict(sum((Counter(value) for value in values), Counter()).most_common())
        elif isinstance(values[0], int) and name not in ("seed", "workers"):
            sums[name] = sum(values)
    return sums


if __name__ == "__main__":
    sys.exit(main())
