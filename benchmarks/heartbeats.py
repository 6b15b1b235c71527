"""What do heartbeats cost PostgreSQL, and what does a long transaction elsewhere do to them?

    python benchmarks/heartbeats.py [--quick]

10,000 jobs are claimed and then only beaten for, in batches, through the store. A beat is one interval's work for all of
them; with the default interval of 10 s, milliseconds of PostgreSQL's CPU per beat divided by 100 is percent of a core. The
same again while another session holds a snapshot: then no beat's dead row versions can be removed, updates leave their
page (they are no longer HOT), and the table grows with each beat until the snapshot goes.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import trio

from common import Report, Row, Server, fill, in_turn, medians, open_server, parser, rounds
from metering import Meter, costs
from plots import lines
from pulse_trio.store import ClaimCursor, WorkerStore

if TYPE_CHECKING:
    from pulse_trio.jobs import Claim

COLUMNS = {
    "way": "way",
    "beat_ms": "ms a beat (all jobs)",
    "last_ms": "ms, last tenth of the beats",
    "postgres_ms": "PostgreSQL CPU ms a beat",
    "wal_bytes": "WAL B/job and beat",
    "hot": "share HOT",
    "growth": "table size, last / first",
    "rounds": "rounds",
}


async def claim_all(store: WorkerStore, jobs: int) -> list[Claim]:
    """Claims `jobs` jobs of the default queue."""
    await store.open_session()
    claims: list[Claim] = []
    slot = ClaimCursor("default", 0)
    while len(claims) < jobs:
        new = (await store.complete_and_claim(1000, [slot])).claims
        claims += new
        slot = slot._replace(cursor_run_at=new[-1].run_at, cursor_id=new[-1].id)
    return claims


async def beat_often(dsn: str, jobs: int, batch: int, beats: int, meter: Meter, pinned: bool) -> Row:
    """Beats so many times for all jobs, with a pause for autovacuum's and pruning's sake that is not counted."""
    store = WorkerStore(dsn, lease=600)
    claims = await claim_all(store, jobs)
    size, taken = _size(meter), []
    before, hot_before = meter.read(), _updates(meter)
    with ExitStack() as stack:
        if pinned:
            _pin(stack.enter_context(psycopg.connect(dsn)))
        for _ in range(beats):
            began = time.monotonic()
            for start in range(0, jobs, batch):
                beat = await store.beat(claims[start : start + batch])
                assert len(beat.renewed) == len(claims[start : start + batch]), "a lease was lost"
            taken.append((time.monotonic() - began) * 1e3)
            await trio.sleep(0.05)
        after = meter.read()
        grown = _size(meter) / size
    await store.aclose()
    meter.wait_for_others()
    hot, updated = (b - a for a, b in zip(hot_before, _updates(meter), strict=True))
    used = costs(before, after, jobs * beats)
    tenth = max(1, beats // 10)
    return {
        "beat_ms": sum(taken) / beats,
        "last_ms": sum(taken[-tenth:]) / tenth,
        "postgres_ms": used["postgres_us"] * jobs / 1e3,
        "wal_bytes": used["wal_bytes"],
        "hot": hot / updated,
        "growth": grown,
        "taken": taken,
    }


def _pin(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    connection.execute("SELECT count(*) FROM pulse.queue")


def _size(meter: Meter) -> int:
    return meter.query("SELECT pg_relation_size('pulse.job')")[0][0]


def _updates(meter: Meter) -> tuple[int, int]:
    hot, updated = meter.query("SELECT n_tup_hot_upd, n_tup_upd FROM pg_stat_user_tables WHERE relname = 'job'")[0]
    return hot, updated


def run(server: Server, jobs: int, beats: int, *, batch: int, pinned: bool) -> Row:
    with server.database() as dsn, Meter(dsn) as meter:
        fill(dsn, jobs)
        return trio.run(beat_often, dsn, jobs, batch, beats, meter, pinned)


def main() -> None:
    options = parser(__doc__).parse_args()
    jobs, beats = (2_000, 10) if options.quick else (10_000, 60)
    with open_server() as server:
        ways = {
            f"{batch} a statement{', pinned snapshot' if pinned else ''}": partial(
                run, server, jobs, beats, batch=batch, pinned=pinned
            )
            for pinned in (False, True)
            for batch in (1_000, 10_000)
        }
        results = in_turn(ways, rounds(options, 3), show=lambda r: f"{r['beat_ms']:.1f} ms a beat, {r['hot']:.0%} HOT")
        rows = medians(results, ["beat_ms", "last_ms", "postgres_ms", "wal_bytes", "hot", "growth"])
        report = Report(
            "heartbeats",
            f"What does one beat for {jobs:,} running jobs cost?",
            f"{jobs} running jobs, {beats} beats for all of them",
            options,
            server,
        )
        report.say(rows, COLUMNS)
        series = {name: (list(range(1, beats + 1)), runs[0]["taken"]) for name, runs in results.items()}
        report.finish(
            {"medians": rows, "runs": results},
            plot=lambda path: lines(
                path, series, title=f"Beats for {jobs:,} running jobs, first round", x="beat", y="ms"
            ),
        )


if __name__ == "__main__":
    main()
