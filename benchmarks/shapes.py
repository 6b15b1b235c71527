"""How fast is each shape of a job, as a share of the no-op's rate?

    python benchmarks/shapes.py [--quick] [--rounds 5] [--only noop,keys] [--jobs 20000] [--json FILE] [--list] [--no-peers]

Every shape in turn in one run on one PostgreSQL, most with one worker and with four:

- drains of due jobs: no-ops, waits, children, keys, limits, failures, `job.transaction()`, threads, processes.
  `share` is the rate as a share of that of `noop` (concurrency 500) in the same round, or of one worker's where four ran;
- `pgbench`: pgbench with the statements of `job.transaction()` over as many connections, if it is found;
- enqueues by eight producers at once: unique keys, `unique_for`, and plain ones beside a client that waits for results, each
  as a share of the plain one;
- arguments and results of 10 kB and 200 kB: bytes a second, as a share of a SELECT and a COPY of the same;
- retry, cancel and delete by filter, and what becomes of the latency of live jobs meanwhile;
- the peers that have a shape, beside their own no-op: graphile-worker's named queues and PgQueuer's limit, and the unique
  enqueues of both (peers.py installs them on first use).

Beside each rate stand the CPU of worker and PostgreSQL a job: on a machine that is not quiet they are truer than rates. An
hour with five rounds; `--rounds 1 --jobs 4000` takes five minutes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

import enqueue
import latency
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
    percentile,
    ratio,
    rounds,
)
from metering import Meter, costs
from pgbench_limit import pgbench
from plots import bars
from processes import drain, our_worker, wait_until, workers
from pulse_trio import SyncClient
from pulse_trio.postgres.pool_slots import RESET_SESSION
from pulse_trio.sql import statement
from pulse_trio.store import history
from pulse_trio.store.transactions import _BEFORE_COMMIT as BEFORE_COMMIT
from pulse_trio.store.transactions import _SIZE as CONNECTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

FOUR = 4
COLUMNS = {
    "way": "shape",
    "workers": "workers",
    "rate": "a second",
    "share": "share",
    "of": "of",
    "asked": "asked",
    "worker_us": "worker us",
    "postgres_us": "PG us",
    "transactions": "commits",
    "rolled_back": "rollbacks",
    "others_cores": "others' cores",
    "rounds": "rounds",
}
KEYS = ("rate", "worker_us", "postgres_us", "transactions", "rolled_back", "wal_bytes", "others_cores")


@dataclass(frozen=True)
class Shape:
    """Due jobs that workers drain. `part`: of the number of no-ops, how many; `asked`: of the no-op's rate with one worker,
    and of one worker's with four. `handlers`: handlers that a job calls."""

    kind: str = "noop"
    given: Mapping[str, str] = field(default_factory=dict[str, str])
    part: float = 1
    asked: float | None = None
    asked_of_four: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    handlers: int = 1


KEYED = {"key": "'key-' || (n % 1000)"}
RETRIED = {"options": """'{"backoff_base": 0.001, "backoff_cap": 0.001}'"""}
SHAPES: dict[str, Shape] = {
    "noop": Shape(),
    "noop-default": Shape(asked=0.75, asked_of_four=1.3, settings={"concurrency": 100}),
    "full": Shape("full", {"args": "'{\"number\": 1}'"}, 0.5, 0.85),
    "waits": Shape("waits", part=0.5, asked=0.4),
    "children": Shape("children", part=0.5, asked=0.3),
    "fan-out": Shape("fans_out", {"args": "'{\"count\": 10}'"}, 1 / 40, handlers=11),
    "keys": Shape(given=KEYED, part=0.5, asked=0.5, asked_of_four=1.0),
    "limit-200": Shape(given={"queue": "'limit-200'"}, part=0.25, asked=0.35, asked_of_four=0.9),
    "rate": Shape(given={"queue": "'rate'"}, part=0.25, asked=0.35, asked_of_four=0.9),
    "key-limit-1": Shape(given={"queue": "'key-limit-1'", **KEYED}, part=0.25, asked=0.35, asked_of_four=0.9),
    "fails-once": Shape("fails_once", RETRIED, 0.5, 0.5, settings={"log": False}),
    "transaction": Shape("writes", part=0.1, asked_of_four=1.2),
    "asyncio": Shape("asyncio", part=0.25),
    "thread": Shape("thread", part=0.15, settings={"counts": True}),
    "process": Shape("process", part=0.1, settings={"counts": True}),
}


# Drains


def run(server: Server, shape: Shape, count: int, processes: int) -> Row:
    """One drain by so many workers."""
    jobs = max(50, round(count * shape.part))
    settings = {"concurrency": 500, **shape.settings}
    with server.database() as dsn, Meter(dsn) as meter:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE public.written (id bigint, text text)")
        fill(dsn, jobs, kind=shape.kind, given=shape.given)
        queue = shape.given.get("queue", "'default'").strip("'")
        with psycopg.connect(dsn, autocommit=True) as connection:
            client = SyncClient(connection)
            client.pause(queue)
            before = _transactions(meter)
            row = drain(
                dsn,
                [*OUR, json.dumps({"dsn": dsn, **settings})],
                jobs * shape.handlers,
                processes=processes,
                gate=partial(client.resume, queue),
            )
        after = _transactions(meter)
    del row["progress"]
    per = row["ran"]
    committed, rolled_back, deadlocks = (b - a for a, b in zip(before, after, strict=True))
    counted = {"transactions": committed / per, "rolled_back": rolled_back / per, "deadlocks": deadlocks}
    return {**row, **counted, "workers": processes}


OUR = [sys.executable, str(HERE / "shapes_worker.py")]


def _transactions(meter: Meter) -> tuple[int, ...]:
    """Commits, rollbacks and deadlocks of this database so far, those of ended sessions included."""
    meter.query("SELECT pg_stat_clear_snapshot()")
    counters = "xact_commit, xact_rollback, deadlocks"
    return meter.query(f"SELECT {counters} FROM pg_stat_database WHERE datname = current_database()")[0]


def run_pgbench(server: Server, count: int) -> Row:
    """pgbench with the statements that a worker sends for `job.transaction()` with one INSERT, in as many messages."""
    # Each of its transactions does the work of so many jobs: it ends none that leaves one of PostgreSQL's open.
    at_once = 25
    runs = max(2, count // CONNECTIONS // at_once)
    each = runs * at_once
    completion = statement("complete_or_raise", "pulse") % {
        b"id": b":id",
        b"attempt": b"1",
        b"session": b"1",
        b"result": b"NULL",
        b"keep": b"true",
    }
    begin = b"BEGIN; SET LOCAL statement_timeout = 100000"
    ending = [b"SAVEPOINT c", *BEFORE_COMMIT, b"\n".join(_code(completion)), b"COMMIT"]
    lines = [_message(begin)]
    for left in reversed(range(at_once)):
        # The next transaction begins with the end of this one.
        reset = [b"BEGIN", RESET_SESSION, b"COMMIT", begin] if left else [RESET_SESSION]
        lines += ["\\set id :lowest + :client_id * :part + :done", "\\set done :done + 1"]
        lines += [_message(b"INSERT INTO public.written VALUES (:id, 'x')"), _message(b"; ".join([*ending, *reset]))]
    with server.database() as dsn, Meter(server.admin) as meter:
        fill(dsn, each * CONNECTIONS, kind="writes")
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE public.written (id bigint, text text)")
            connection.execute(
                "UPDATE pulse.job SET state = 2, attempt = 1, locked_by = 1, started_at = now(), lease_until = now() + '1 h'"
            )
            connection.execute("VACUUM (ANALYZE) pulse.job")
            (lowest,) = connection.execute("SELECT min(id) FROM pulse.job").fetchone() or (0,)
        before = meter.read()
        rate = at_once * pgbench(
            dsn, "\n".join(lines), runs, clients=CONNECTIONS, mode="simple", lowest=lowest, part=each, done=0
        )
        after = meter.read()
        with psycopg.connect(dsn) as connection:
            (left,) = connection.execute("SELECT count(*) FROM pulse.job").fetchone() or (None,)
    assert left == 0, f"{left} jobs left: pgbench did not do what it was to do"
    return {"rate": rate, **costs(before, after, each * CONNECTIONS), "workers": 0}


def _message(commands: bytes) -> str:
    return commands.decode().replace("; ", " \\; ") + ";"


def _code(text: bytes) -> list[bytes]:
    return [line for line in text.splitlines() if not line.startswith(b"--")]


# Enqueues


def plain(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    SyncClient(connection).enqueue("noop", {})


def unique(connection: psycopg.Connection[tuple[object, ...]], **options: Any) -> None:
    SyncClient(connection).enqueue("noop", {}, unique_key=f"{time.monotonic_ns()}-{id(connection)}", **options)


@contextmanager
def a_client_waits(dsn: str) -> Generator[None]:
    """A client in a thread that waits for the result of a job that does not end."""
    import threading

    from pulse_trio.errors import PulseTrioError

    stop = threading.Event()

    def wait() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            client = SyncClient(connection)
            parked = client.enqueue("noop", {}, delay=3600)
            while not stop.is_set():
                try:
                    client.wait(parked.id, timeout=0.5)
                except (TimeoutError, PulseTrioError):
                    continue

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def enqueues(server: Server, count: int) -> dict[str, Callable[[], Row]]:
    """Single enqueues by eight producers, in autocommit."""
    ways = {
        "enqueue": enqueue.singly,
        "enqueue, a client waits": partial(enqueue.singly, beside=a_client_waits),
    }
    made: dict[str, Callable[[], Row]] = {name: partial(way, server, count, plain) for name, way in ways.items()}
    made["enqueue, unique_key"] = partial(enqueue.singly, server, count, unique)
    made["enqueue, unique_for"] = partial(enqueue.singly, server, count, partial(unique, unique_for=3600))
    return made


# Payloads


def payload(server: Server, size: int, total: int) -> Row:
    """Jobs with `size` bytes of arguments, and as large a result; bytes of both a second."""
    jobs = max(20, total // size)
    text = f"(SELECT string_agg(md5((n * 1000 + i)::text), '') FROM generate_series(1, {size // 32}) AS i)"
    with server.database() as dsn:
        fill(dsn, jobs, kind="echo", given={"args": f"json_build_object('text', {text})"})
        row = drain(dsn, [*OUR, json.dumps({"dsn": dsn, "concurrency": 100})], jobs)
    del row["progress"]
    return {**row, "rate": row["rate"] * size * 2, "workers": 1}


def copied(server: Server, size: int, total: int) -> Row:
    """The same bytes by SELECT and COPY, over one connection."""
    jobs = max(20, total // size)
    text = f"(SELECT string_agg(md5((n * 1000 + i)::text), '') FROM generate_series(1, {size // 32}) AS i)"
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as connection, Meter(dsn) as meter:
        fill(dsn, jobs, kind="echo", given={"args": f"json_build_object('text', {text})"})
        connection.execute("CREATE TABLE public.copied (id bigint, result json)")
        before, began = meter.read(), time.monotonic()
        rows = connection.execute("SELECT id, args::text FROM pulse.job").fetchall()
        with connection.cursor().copy("COPY public.copied FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
        seconds = time.monotonic() - began
        after = meter.read()
    return {"rate": 2 * jobs * size / seconds, **costs(before, after, jobs), "workers": 0}


# Many jobs by filter

DEAD = """
WITH gone AS (DELETE FROM pulse.job RETURNING *)
INSERT INTO pulse.job_archive
       (id, finished_at, started_at, locked_by, run_at, created_at, attempt, failures, max_attempts,
        priority, state, queue, kind, args)
SELECT id, now(), now(), 1, run_at, created_at, 1, 1, max_attempts, priority, 5, queue, kind, args FROM gone
"""


def in_bulk(server: Server, act: str, count: int) -> Row:
    """`count` jobs retried, cancelled or deleted by filter while a worker runs live jobs of another queue; the rate, and p99 of
    the live jobs' pickup before and meanwhile."""
    state = {"queue": "'bulk'"}
    with server.database() as dsn:
        fill(dsn, count, given=state)
        with (
            psycopg.connect(dsn, autocommit=True) as connection,
            workers(our_worker(dsn, queues=["default"])) as (worker,),
        ):
            if act == "retry":
                connection.execute(DEAD)
            worker.wait_for("ready")
            with _live_jobs(dsn) as committed:
                time.sleep(2)
                began = time.monotonic()
                done = BULK[act](SyncClient(connection), count)
                ended = time.monotonic()
            assert done == count, f"{done} of {count} jobs: {act}"
            wait_until(lambda: worker.ran >= len(committed), 60, "the live jobs")
            time.sleep(0.1)
            starts = latency.starts(worker)
    late = [(committed[mark], (at - committed[mark]) * 1e3) for mark, at in starts]
    calm = [ms for at, ms in late if began - 1.5 < at < began - 0.1]  # the first jobs prepare statements
    meanwhile = [ms for at, ms in late if began <= at <= ended] or calm
    p99, p99_meanwhile = percentile(calm, 0.99), percentile(meanwhile, 0.99)
    return {"rate": count / (ended - began), "p99": p99, "p99_meanwhile": p99_meanwhile, "workers": 1}


def _retry(client: SyncClient, count: int) -> int:
    return len(client.retry_many(queue="bulk", state="dead").retried)


def _cancel(client: SyncClient, count: int) -> int:
    ids = client.run(history.chosen_for_action({"queue": "bulk", "state": "available"}, limit=count))
    return sum(len(client.cancel_many(ids[i : i + history.BATCH])) for i in range(0, count, history.BATCH))


def _delete(client: SyncClient, count: int) -> int:
    return len(client.delete_many(queue="bulk", state="available").deleted)


BULK: dict[str, Callable[[SyncClient, int], int]] = {"retry": _retry, "cancel": _cancel, "delete": _delete}


@contextmanager
def _live_jobs(dsn: str, every: float = 0.005) -> Generator[dict[float, float]]:
    """A producer in a thread, with a job each `every` seconds: the moment of each commit by its mark."""
    import threading

    committed: dict[float, float] = {}
    stop = threading.Event()

    def produce() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            mark = 0.0
            while not stop.wait(every):
                mark += 1
                latency.by_client(connection, mark)
                committed[mark] = time.monotonic()

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield committed
    finally:
        stop.set()
        thread.join()


# Putting it together


@dataclass(frozen=True)
class Way:
    """One measurement, and the one whose rate it is a share of."""

    name: str
    measure: Callable[[], Row]
    of: str | None = None
    asked: float | None = None


def all_ways(server: Server, jobs: int, *, with_peers: bool = False) -> list[Way]:
    """Everything, in the order of the table."""
    ways: list[Way] = []
    for name, shape in SHAPES.items():
        of = None if name == "noop" else "pgbench" if name == "transaction" else "noop"
        asked = 0.7 if name == "transaction" else shape.asked
        ways.append(Way(name, partial(run, server, shape, jobs, 1), of, asked))
        ways.append(Way(f"{name}, four", partial(run, server, shape, jobs, FOUR), name, shape.asked_of_four))
    ways.append(Way("pgbench", partial(run_pgbench, server, jobs // 5)))
    for name, measure in enqueues(server, max(400, jobs // 10)).items():
        ways.append(Way(name, measure, None if name == "enqueue" else "enqueue", 0.6))
    for size in (10_000, 200_000):
        total = jobs * 2500
        ways.append(
            Way(f"payload {size // 1000} kB", partial(payload, server, size, total), f"copied {size // 1000} kB", 0.7)
        )
        ways.append(Way(f"copied {size // 1000} kB", partial(copied, server, size, total)))
    ways += [Way(f"{act} by filter", partial(in_bulk, server, act, jobs)) for act in BULK]
    if with_peers:
        ways += [Way(name, measure, of) for name, (measure, of) in peers.shaped(server, jobs).items()]
    return ways


def chosen(ways: Sequence[Way], only: str | None) -> list[Way]:
    """Those whose name, or whose name before a comma, is listed, and what they are a share of."""
    if only is None:
        return list(ways)
    wanted = set(only.split(","))
    known = {part for way in ways for part in (way.name, way.name.partition(",")[0])}
    if wanted - known:
        raise SystemExit(f"unknown: {', '.join(sorted(wanted - known))}; known: {', '.join(sorted(known))}")
    picked = {way.name for way in ways if way.name in wanted or way.name.partition(",")[0] in wanted}
    by_name = {way.name: way for way in ways}
    for name in list(picked):
        while (of := by_name[name].of) is not None:
            picked.add(name := of)
    return [way for way in ways if way.name in picked]


def judged(ways: Sequence[Way], results: Mapping[str, list[Row]]) -> list[Row]:
    """The medians, with each rate as a share of another's in the same round."""
    rows = medians(results, KEYS)
    for way, row in zip(ways, rows, strict=True):
        row["workers"] = results[way.name][0].get("workers", 0)
        row |= {"of": way.of, "asked": way.asked}
        row["share"] = None if way.of is None else ratio(results[way.name], results[way.of], "rate")
        for key in ("p99", "p99_meanwhile"):
            if key in results[way.name][0]:
                row[key] = statistics.median(result[key] for result in results[way.name])
    return rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", help="shapes, separated by commas; what they are a share of is measured too")
    made.add_argument("--jobs", type=int, help="no-ops in a drain; other shapes have a part of them")
    made.add_argument("--json", type=Path, help="write the result to this file as well")
    made.add_argument("--no-peers", action="store_true", help="without the peers that have a shape")
    made.add_argument("--list", action="store_true", help="print the shapes")
    options = made.parse_args()
    jobs = options.jobs or (1_000 if options.quick else 40_000)
    with open_server() as server:
        ways = chosen(all_ways(server, jobs, with_peers=not options.no_peers), options.only)
        if options.list:
            print("\n".join(way.name for way in ways))
            return
        results = in_turn(
            {way.name: way.measure for way in ways}, rounds(options), show=lambda row: f"{row['rate']:,.0f} a second"
        )
        rows = judged(ways, results)
        report = Report("shapes", (__doc__ or "").splitlines()[0], f"{jobs} no-ops, fewer of others", options, server)
        report.say(rows, COLUMNS)
        if any("p99" in row for row in rows):
            bulk = [row for row in rows if "p99" in row]
            report.say(bulk, {"way": "way", "p99": "live p99 ms", "p99_meanwhile": "meanwhile"}, title="By filter")
        found = {"medians": rows, "runs": results}
        report.finish(found, plot=partial(plot, [row for row in rows if row["workers"] and row["rate"] < 1e6]))
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


def plot(rows: list[Row], path: Path) -> None:
    bars(path, rows, "rate", title="Jobs a second by shape", x="jobs/s")


if __name__ == "__main__":
    main()
