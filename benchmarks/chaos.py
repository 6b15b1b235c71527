"""Workers, producers and PostgreSQL under a seeded schedule of faults; then the history is held against the invariants.

    python benchmarks/chaos.py --seed 7 --seconds 60 --workers 5
    make chaos SEED=7 SECONDS=60 WORKERS=5

The same seed strikes with the same faults at the same times (what they meet there is up to the machine). Exit code 1, with the
evidence, if an invariant is broken. docs/explanation/proof.md tells what is checked and how to read the page.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import trio

# The harness is the tests' own.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.chaos.page import page
from support.chaos.run import Result, play
from support.chaos.schedule import KINDS, plan


def options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, help="of the schedule; default: the time")
    made.add_argument("--seconds", type=float, default=60.0, help="how long faults strike (60)")
    made.add_argument("--workers", type=int, default=5, help="worker processes (5)")
    made.add_argument("--producers", type=int, default=2, help="producer processes, of three tasks each (2)")
    made.add_argument("--rate", type=float, default=6.0, help="operations a second of each producer task (6)")
    made.add_argument("--kinds", help=f"only these faults, with commas between: {', '.join(KINDS)}")
    made.add_argument("--slack", type=float, default=2.0, help="seconds that a loaded machine may take for nothing (2)")
    made.add_argument("--page", type=Path, help="where the report page goes (build/chaos/seed-N.html)")
    made.add_argument("--keep", type=Path, help="keep the run's files (logs, journals, the database) in this folder")
    made.add_argument("--json", action="store_true", help="print the figures as JSON")
    made.add_argument("--plan", action="store_true", help="only print the schedule")
    return made.parse_args()


def table(result: Result) -> str:
    """The figures for people."""
    lines: list[str] = []
    for name, value in result.counts.items():
        parts: dict[str, Any] = value if isinstance(value, dict) else {"": value}
        for number, (part, figure) in enumerate(parts.items()):
            lines.append(f"{name if number == 0 else '':45}{part:28}{figure:>10,}")
    return "\n".join(lines)


def main() -> int:
    given = options()
    seed = given.seed if given.seed is not None else int(time.time())
    kinds = [k.strip() for k in given.kinds.split(",")] if given.kinds else None
    if unknown := set(kinds or ()) - set(KINDS):
        print(f"no such fault: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    if given.plan:
        for fault in plan(seed, given.seconds, given.workers, kinds):
            print(f"{fault.at:7.2f} s  {fault.kind:28} worker {fault.worker}  {fault.seconds:5.2f} s  {fault.how}")
        return 0

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
    print(json.dumps(result.summary(), indent=2) if given.json else table(result))
    for violation in result.violations:
        print(violation, file=sys.stderr)
    verdict = f"{len(result.violations)} VIOLATIONS" if result.violations else "no invariant broken"
    say(f"{verdict}; report: {path}")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
