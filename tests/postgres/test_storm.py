"""The cancellation storm, five seconds of it; `benchmarks/cancellation_storm.py` is the long one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import trio

STORM = Path(__file__).parents[2] / "benchmarks" / "cancellation_storm.py"


async def test_a_storm_of_cancellations_leaves_every_connection_usable_and_loses_no_row(dsn: str) -> None:
    command = [sys.executable, "-W", "error", str(STORM), dsn, "--seconds", "5", "--seed", "42", "--json"]
    with trio.fail_after(60):
        process = await trio.run_process(command, capture_stdout=True, check=False)
    report = json.loads(process.stdout)
    assert process.returncode == 0, report
    assert report["rows_lost"] == 0
    assert min(report["cancelled"].values()) > 0
