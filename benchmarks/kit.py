"""How long does the testing kit take: a test's own schema, virtual time, and crash_points?

    python benchmarks/kit.py [--quick] [--rounds N] [--json FILE]

On the server that users' tests have: the kit's embedded PostgreSQL (or that of PULSE_TRIO_TEST_DSN). Its start and the
template's migration come once a run, so they are not measured.

- `schema`: databases with the schema, made and given back one after the other; the p50. No test runs between two of them, in
  which the next copy could be made ahead, so this is the slowest case.
- `retry`: a drain of one job under pulse_clock that fails, waits an hour and completes.
- `nightly`, `hourly`: a month (31 days) of one schedule under pulse_clock.
- `crash_points`: every point of the README's handler, in memory.

The ways take turns. `ms` is the median of the rounds.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from common import Row, in_turn, machine, medians, parser, percentile, rounds, table
from pulse_trio import Handlers, Job, RetryAfter, open_client
from pulse_trio.testing import PulseClock, PulseWorker, crash_points, pulse_database

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

DAYS = 31
ASKED = {"schema": 50, "retry": 50, "nightly": 1000, "hourly": 1000, "crash_points": 5000}
"""Milliseconds."""
COLUMNS = {"way": "what", "ms": "ms", "asked": "asked, ms", "rounds": "rounds, ms"}


def schema(count: int) -> Row:
    """The p50 of `count` databases, made one after the other."""
    return {"ms": percentile([timed(own_schema)["ms"] for _ in range(count)], 0.5)}


def own_schema() -> None:
    """What a test with `pulse_dsn` has before and after it."""
    with pulse_database():
        pass


def timed(act: Callable[[], Any]) -> Row:
    """Milliseconds that `act` takes."""
    began = time.perf_counter()
    act()
    return {"ms": (time.perf_counter() - began) * 1000}


def retry() -> Row:
    """An hour between two attempts."""
    handlers = Handlers()

    @handlers.job
    async def flaky(job: Job) -> None:
        if job.attempt == 1:
            raise RetryAfter(3600)

    async def measure(dsn: str) -> Row:
        async with open_client(dsn, handlers=handlers) as client:
            await client.enqueue(flaky)
        worker = PulseWorker(dsn, handlers, clock=PulseClock(dsn, handlers))
        began = time.perf_counter()
        report = await worker.drain()
        taken = time.perf_counter() - began
        assert report.ended == {"failed": 1, "completed": 1}, report
        return {"ms": taken * 1000}

    return on_clock(measure)


def month(schedule: str, days: int, fires: int) -> Row:
    """So many days of one schedule."""
    handlers = Handlers()

    @handlers.cron(schedule)
    @handlers.job
    async def scheduled() -> None:
        pass

    async def measure(dsn: str) -> Row:
        clock = PulseClock(dsn, handlers)
        began = time.perf_counter()
        report = await clock.advance(days=days, timeout=120)
        taken = time.perf_counter() - began
        assert report.ended == {"completed": fires}, report
        return {"ms": taken * 1000}

    return on_clock(measure)


def on_clock(measure: Callable[[str], Coroutine[Any, Any, Row]]) -> Row:
    """What `measure` finds in a database whose clock it moves."""
    with pulse_database(clock=True) as dsn:
        return trio.run(measure, dsn)


def crashes() -> Row:
    """The README's handler, killed and robbed of its lease at every point."""

    handlers = Handlers()

    @handlers.job(queue="mail", max_attempts=5, timeout=60)
    async def send_welcome(job: Job, user_id: int, template: str = "default") -> str:
        if job.attempt == 1:
            raise RetryAfter(1)
        await trio.sleep(0.1)
        return f"welcomed {user_id} with {template}"

    async def play() -> int:
        return len([run async for run in crash_points(send_welcome, 42)])

    points = 0

    def act() -> None:
        nonlocal points
        points = trio.run(play)

    return {**timed(act), "points": points}


def main() -> None:
    own = parser(__doc__)
    own.add_argument("--json", type=Path, help="file for the results; default: kit.json in the folder of --out")
    options = own.parse_args()
    days = 2 if options.quick else DAYS
    ways: dict[str, Callable[[], Row]] = {
        "schema": partial(schema, 4 if options.quick else 20),
        "retry": retry,
        "nightly": partial(month, "30 2 * * *", days, days),
        "hourly": partial(month, "30 * * * *", days, days * 24),
        "crash_points": crashes,
    }
    for clock in (False, True):  # the server and both templates
        with pulse_database(clock=clock):
            pass
    results = in_turn(ways, rounds(options), show=lambda row: f"{row['ms']:.1f} ms")
    rows = [{**row, "asked": ASKED[row["way"]]} for row in medians(results, ["ms"])]
    print(table(rows, COLUMNS))
    found = {"benchmark": "kit", "quick": options.quick, "environment": machine(), "results": rows, "runs": results}
    stem = "kit-quick" if options.quick else "kit"
    file = options.json or (options.out / f"{stem}.json" if options.out else None)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
