"""What do durable jobs cost, beside plain ones, DBOS and Absurd?

    python benchmarks/durable.py [--quick] [--rounds 5] [--only steps,children,cancel,event,suspended]

Everything in turn on one PostgreSQL, one process each unless said otherwise, 100 jobs at a time:

- steps: jobs that record ten no-op steps one after the other; steps a second;
- children: one parent starts and joins no-op children, beside as many plain jobs (drained alone, and while a job
  enqueues them), and DBOS's child workflows;
- cancel: a parent is cancelled, whose children two other processes run; from the call's return to each handler's end;
- event: an event is sent to a suspended handler; from the call of send to the handler's next line;
- suspended: plain jobs are drained beside 100,000 suspended parents, and without them.

The peers are installed as in peers.py. What each is set to stands at the top of its program in peers/.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg

import peers
from common import (
    HERE,
    Report,
    Row,
    Server,
    fill,
    in_turn,
    medians,
    open_server,
    parser,
    ratio,
    rounds,
    settle_down,
    spread,
)
from processes import WorkerProcess, drain, wait_until, workers
from pulse_trio import SyncClient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DBOS = peers.Peer("dbos", ("dbos==3.4.0",), "")
ABSURD = peers.Peer("absurd", ("absurd-sdk==0.5.1", "absurdctl==0.5.1", "psycopg[binary]==3.3.9"), "")
STEPS = 10
COLUMNS = {"way": "way", "rate": "a second", "ours_is": "ours is faster by", "rounds": "rounds"}
TIMES = {"way": "way", "p50": "p50 ms", "p95": "p95 ms", "p99": "p99 ms", "max": "max ms", "n": "times"}
Ways = dict[str, "Callable[[], Row]"]


def our_worker(dsn: str, **settings: Any) -> list[str]:
    """The command of durable_worker.py."""
    return [sys.executable, str(HERE / "durable_worker.py"), json.dumps({"dsn": dsn, **settings})]


def enqueue(dsn: str, kind: str, args: Row, count: int = 1, queue: str = "default") -> list[int]:
    """So many jobs of one kind, which wait for a worker."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        rows = connection.execute(
            "INSERT INTO pulse.job (kind, args, queue) SELECT %s, %s, %s FROM generate_series(1, %s) RETURNING id",
            [kind, json.dumps(args), queue, count],
        ).fetchall()
    settle_down(dsn)
    return [job_id for (job_id,) in rows]


def tell(peer: peers.Peer, what: str, dsn: str, *given: object) -> Row:
    """What a peer's program says of one run."""
    program = [str(peers.CACHE / peer.name / "bin" / "python"), "-P", str(HERE / "peers" / f"{peer.name}.py")]
    done = subprocess.run(
        [*program, what, peers.url_of(dsn), *map(str, given)],
        env=os.environ | peers.environment_of(peer, dsn),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{peer.name} {what} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# Steps


def our_steps(server: Server, jobs: int) -> Row:
    with server.database() as dsn:
        enqueue(dsn, "steps", {"count": STEPS}, jobs)
        result = drain(dsn, our_worker(dsn, concurrency=100), jobs)
    del result["progress"]
    return {**result, "rate": result["rate"] * STEPS}


def dbos_steps(server: Server, jobs: int) -> Row:
    with server.database(migrated=False) as dsn:
        said = tell(DBOS, "steps", dsn, jobs, STEPS)
    return {"rate": said["steps"] / said["seconds"], **said}


def absurd_steps(server: Server, jobs: int, kind: str) -> Row:
    with server.database(migrated=False) as dsn:
        tell(ABSURD, "setup", dsn)
        said = tell(ABSURD, "steps", dsn, jobs, STEPS, kind)
    return {"rate": said["steps"] / said["seconds"], **said}


# Children


def our_children(server: Server, count: int) -> Row:
    with server.database() as dsn:
        enqueue(dsn, "parent", {"count": count})
        return _without_progress(drain(dsn, our_worker(dsn, concurrency=100), count + 1))


def plain_jobs(server: Server, count: int) -> Row:
    with server.database() as dsn:
        fill(dsn, count)
        return _without_progress(drain(dsn, our_worker(dsn, concurrency=100), count))


def spread_jobs(server: Server, count: int) -> Row:
    """As many plain jobs that a job enqueues while they run, as a parent starts its children."""
    with server.database() as dsn:
        enqueue(dsn, "spread", {"count": count})
        return _without_progress(drain(dsn, our_worker(dsn, concurrency=100), count + 1))


def dbos_children(server: Server, count: int) -> Row:
    with server.database(migrated=False) as dsn:
        said = tell(DBOS, "children", dsn, count)
    return {"rate": said["children"] / said["seconds"], **said}


def _without_progress(result: Row) -> Row:
    del result["progress"]
    return result


# Cancellation


def cancel(server: Server, running: int) -> Row:
    """One parent, `running` children in two processes of their own."""
    with server.database() as dsn:
        (parent,) = enqueue(dsn, "holder", {"count": running}, queue="parents")
        children = our_worker(dsn, concurrency=running, queues=["held"])
        with workers(children, 2) as both, workers(our_worker(dsn, queues=["parents"])):
            wait_until(lambda: sum(worker.ran for worker in both) >= running, 120, "the children")
            with psycopg.connect(dsn, autocommit=True) as connection:
                began = time.monotonic()
                SyncClient(connection).cancel(parent)
                returned = time.monotonic()
            wait_until(lambda: len(_ends(both)) >= running, 60, "the children's ends")
            late = [(ended - returned) * 1e3 for ended in _ends(both)]
    return {**spread(late), "call_ms": (returned - began) * 1e3, "latencies": late}


def _ends(processes: list[WorkerProcess]) -> list[float]:
    return [ended for worker in processes for said in worker.said for _, ended in said.get("ends", ())]


# Events


def our_events(server: Server, count: int) -> Row:
    with server.database() as dsn, workers(our_worker(dsn)) as (worker,):
        worker.wait_for("ready")
        late: list[float] = []
        with psycopg.connect(dsn, autocommit=True) as connection:
            client = SyncClient(connection)
            for number in range(count):
                job_id = client.enqueue("waiter", {"number": float(number)}).id
                wait_until(lambda job_id=job_id: _state(connection, job_id) == "suspended", 20, "its suspension")
                sent = time.monotonic()
                client.send_event(job_id, "approved", "yes")
                wait_until(lambda number=number: len(_starts(worker)) > number, 20, "its next line")
                late.append((_starts(worker)[-1] - sent) * 1e3)
    return {**spread(late), "latencies": late}


def _state(connection: psycopg.Connection[Any], job_id: int) -> str:
    row = connection.execute("SELECT state::text FROM pulse.jobs WHERE id = %s", [job_id]).fetchone()
    return row[0] if row else ""


def _starts(worker: WorkerProcess) -> list[float]:
    return [began for said in worker.said for _, began in said.get("starts", ())]


def their_events(server: Server, count: int, peer: peers.Peer) -> Row:
    with server.database(migrated=False) as dsn:
        if peer is ABSURD:
            tell(peer, "setup", dsn)
        said = tell(peer, "event", dsn, count)
    return {**spread(said["latencies"]), **said}


# Suspended parents


def beside_suspended(server: Server, jobs: int, suspended: int) -> Row:
    """A drain of plain jobs beside so many parents that wait for an event."""
    with server.database() as dsn:
        with psycopg.connect(dsn) as connection:
            connection.execute(
                """
                WITH waiting AS (
                  INSERT INTO pulse.job (kind, args, attempt, max_attempts, run_at, options)
                  SELECT 'waiter', '{"number": 0}', 1, 21, '9999-12-30 00:00Z', '{"tree": 1}'
                  FROM generate_series(1, %s) RETURNING id
                )
                INSERT INTO pulse.durable_job (job_id, root_id, depth, suspended, events)
                SELECT id, id, 0, 1, '{approved}' FROM waiting
                """,
                [suspended],
            )
        fill(dsn, jobs)
        return _without_progress(
            drain(
                dsn,
                our_worker(dsn, concurrency=100),
                jobs,
                # By the claims' index: a look at all rows of the table took 17 ms of a core where 100,000 wait.
                left="SELECT count(*) FROM (SELECT FROM pulse.job WHERE queue = 'default' AND priority = 0 AND key IS NULL "
                "AND run_at <= now() ORDER BY run_at LIMIT 1) j",
            )
        )


# Putting it together


def with_ratios(results: Mapping[str, list[Row]], ours: str) -> list[Row]:
    """Medians, and by how many times ours was faster in the same round."""
    rows = medians(results, ["rate"])
    for row in rows:
        row["ours_is"] = round(ratio(results[ours], results[row["way"]], "rate"), 2)
    return rows


def times(results: Mapping[str, list[Row]]) -> list[Row]:
    """All rounds together."""
    return [{"way": name, **spread([v for run in runs for v in run["latencies"]])} for name, runs in results.items()]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", help="parts, separated by commas")
    options = made.parse_args()
    quick = options.quick
    wanted = set((options.only or "steps,children,cancel,event,suspended").split(","))
    if wanted & {"steps", "children", "event"}:
        for peer in (DBOS, ABSURD):
            peers.install(peer)
    found: dict[str, Any] = {}
    with open_server() as server:
        report = Report("durable", (__doc__ or "").splitlines()[0], "see the program", options, server)
        for part, (ways, show) in parts(server, quick).items():
            if part in wanted:
                results = in_turn(ways, rounds(options), show=lambda r: f"{r.get('rate') or r['p50']:.1f}")
                rows = with_ratios(results, next(iter(ways))) if show is COLUMNS else times(results)
                report.say(rows, show, title=part)
                found[part] = {"rows": rows, "runs": results}
        report.finish(found)


def parts(server: Server, quick: bool) -> dict[str, tuple[Ways, dict[str, str]]]:
    """Every part: its ways, ours first, and what is shown of it."""
    steps, children, running, events, suspended = (
        (50, 500, 100, 5, 2000) if quick else (2000, 10_000, 1000, 30, 100_000)
    )
    return {
        "steps": (
            {
                "pulse-trio": partial(our_steps, server, steps),
                "dbos": partial(dbos_steps, server, steps // 5),
                "absurd, threads": partial(absurd_steps, server, steps // 10, "threads"),
                "absurd, asyncio": partial(absurd_steps, server, steps // 10, "async"),
            },
            COLUMNS,
        ),
        "children": (
            {
                "pulse-trio, children": partial(our_children, server, children),
                "pulse-trio, plain jobs": partial(plain_jobs, server, children),
                "pulse-trio, plain jobs that a job enqueues": partial(spread_jobs, server, children),
                "dbos": partial(dbos_children, server, children // 20),
            },
            COLUMNS,
        ),
        "cancel": ({"pulse-trio": partial(cancel, server, running)}, TIMES),
        "event": (
            {
                "pulse-trio": partial(our_events, server, events),
                "dbos": partial(their_events, server, events, DBOS),
                "absurd": partial(their_events, server, events, ABSURD),
            },
            TIMES,
        ),
        "suspended": (
            {
                "beside suspended parents": partial(beside_suspended, server, 15 * children, suspended),
                "alone": partial(beside_suspended, server, 15 * children, 0),
            },
            COLUMNS,
        ),
    }


if __name__ == "__main__":
    main()
