"""How fast are the peers, and how fast are we, on one server in one run?

    python benchmarks/peers.py [--quick] [--only pgqueuer,graphile-worker] [--rounds 5]

Drain of 50,000 no-op jobs by one worker process each (and by two, for those that gain from it), every peer in the fast
settings that its documentation gives (told at the top of each program in peers/), in turn on one PostgreSQL. The clock runs
from the first handler's start until the database shows that nothing is left. Then, for those that are woken: the latency
from the return of a commit to the handler's start on an idle worker.

The first run installs each peer by name and version, with pip or npm, in a folder of its own under
~/.cache/pulse-trio-peers (or PULSE_TRIO_PEERS). Oban needs Python 3.12, the Node peers need Node 22 (taken from npm if the
machine's is older).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, LiteralString

import psycopg
from psycopg.conninfo import conninfo_to_dict

import latency
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
    progress,
    ratio,
    rounds,
    settle_down,
    spread,
)
from metering import Meter, costs
from plots import bars
from processes import WorkerProcess, drain, our_worker, wait_until, workers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CACHE = Path(os.environ.get("PULSE_TRIO_PEERS") or Path.home() / ".cache" / "pulse-trio-peers")
NODE = "node@22"
OURS = "pulse-trio"
COLUMNS = {
    "way": "way",
    "rate": "jobs/s",
    "ratio": "ours, 1 process, is faster by",
    "worker_us": "worker CPU us/job",
    "postgres_us": "PostgreSQL CPU us/job",
    "wal_bytes": "WAL B/job",
    "others_cores": "others' cores",
    "rounds": "rounds",
}
LATENCY_COLUMNS = {"way": "way", "p50": "p50 ms", "p95": "p95 ms", "p99": "p99 ms", "max": "max ms", "n": "jobs"}


@dataclass(frozen=True)
class Peer:
    """One peer: what to install, how to ask whether anything is left, and how much to give it."""

    name: str
    packages: tuple[str, ...]
    left: str
    node: bool = False
    python: tuple[int, int] = (3, 11)
    processes: tuple[int, ...] = (1,)
    share: float = 1.0
    """Of the jobs: a slow peer need not drain them all to show its rate."""
    latency: bool = True
    enqueue: LiteralString | None = None
    """A statement that adds one job, given its mark: then the pickup is also measured with our own producer's clock. What a
    peer's client does between the answer to its COMMIT and its return is time that the job has for free."""
    cut: float = 60.0
    """Seconds after which the rate is that of the jobs done by then."""


PEERS = (
    Peer(
        "graphile-worker",
        ("graphile-worker@0.18.0",),
        "SELECT count(*) FROM graphile_worker._private_jobs",
        node=True,
        processes=(1, 2),
        enqueue="SELECT graphile_worker.add_job('noop', json_build_object('mark', %s::float8))",
    ),
    Peer(
        "pg-boss",
        ("pg-boss@12.34.0",),
        "SELECT count(*) FROM pgboss.job WHERE state < 'completed'",
        node=True,
        processes=(1, 2),
    ),
    Peer("pgqueuer", ("pgqueuer==1.6.0", "asyncpg==0.32.0", "uvloop==0.23.0"), "SELECT count(*) FROM pgqueuer"),
    # Its clock stops with the last handler, in its favour: on 50,000 jobs its own view of them (awa.jobs) took ten minutes.
    Peer("awa", ("awa-pg==0.6.9",), "SELECT 0"),
    Peer("oban", ("oban==0.7.0",), "SELECT count(*) FROM oban_jobs WHERE state <> 'completed'", python=(3, 12)),
    Peer(
        "procrastinate",
        ("procrastinate==3.10.0", "psycopg[binary]==3.3.9"),
        "SELECT count(*) FROM procrastinate_jobs WHERE status <> 'succeeded'",
        share=0.1,
    ),
)


# Installing


def install(peer: Peer) -> None:
    """Installs a peer in its own folder, unless that was done."""
    folder, stamp = CACHE / peer.name, CACHE / peer.name / ".installed"
    wanted = " ".join(peer.packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    progress(f"installing {wanted} ...")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if peer.node:
        _npm_install(folder, peer.packages)
    else:
        subprocess.run([_find_python(peer.python), "-m", "venv", folder], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, *peer.packages], check=True)
    stamp.write_text(wanted)


def _npm_install(folder: Path, packages: tuple[str, ...]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text('{"private": true}')
    subprocess.run(["npm", "install", "--silent", "--no-fund", "--no-audit", *packages], cwd=folder, check=True)


def _find_python(least: tuple[int, int]) -> str:
    if sys.version_info >= least:
        return sys.executable
    named = [shutil.which(f"python3.{minor}") for minor in range(14, least[1] - 1, -1)]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    kept = [str(path) for path in sorted(pyenv.glob("3.*/bin/python3"), reverse=True)]
    for candidate in filter(None, [*named, *kept]):
        check = f"import sys, venv; sys.exit(sys.version_info < {least!r})"
        if subprocess.run([candidate, "-c", check], capture_output=True, check=False).returncode == 0:
            return candidate
    raise RuntimeError(f"no Python {least[0]}.{least[1]} or later was found")


def node_program() -> str:
    """A Node of version 22 or later: the machine's, or npm's package of it."""
    found = shutil.which("node")
    if found and int(subprocess.check_output([found, "--version"], text=True).lstrip("v").partition(".")[0]) >= 22:
        return found
    program = CACHE / "node" / "node_modules" / "node" / "bin" / "node"
    if not program.exists():
        progress(f"installing {NODE} ...")
        _npm_install(CACHE / "node", (NODE,))
    return str(program)


# Running


def command_of(peer: Peer, what: str, dsn: str, count: int = 0) -> list[str]:
    """The command line of a peer's program."""
    if peer.node:
        program = [node_program(), str(HERE / "peers" / f"{peer.name}.mjs")]
    else:
        # -P: the program has the name of the package it imports.
        program = [str(CACHE / peer.name / "bin" / "python"), "-P", str(HERE / "peers" / f"{peer.name}.py")]
    return [*program, what, dsn, str(count)]


def environment_of(peer: Peer, dsn: str, shape: str = "") -> dict[str, str]:
    """The database for drivers that read it from the environment, the jobs' shape, and where shared code is."""
    parts = conninfo_to_dict(dsn)
    return {
        "PGHOST": str(parts["host"]),
        "PGUSER": str(parts["user"]),
        "PGDATABASE": str(parts["dbname"]),
        "PYTHONPATH": str(HERE / "peers" / "shared"),
        "NO_LOG_SUCCESS": "1",  # graphile-worker's, as in its own benchmark
        "PEER_FOLDER": str(CACHE / peer.name),
        "SHAPE": shape,
    }


def url_of(dsn: str) -> str:
    """The DSN in the form that every driver reads: the socket's folder as a parameter."""
    parts = conninfo_to_dict(dsn)
    return f"postgresql://{parts['user']}@localhost/{parts['dbname']}?host={parts['host']}"


def tell(peer: Peer, what: str, dsn: str, count: int = 0, shape: str = "") -> str:
    """Runs one command of a peer to its end; what it has printed."""
    command = command_of(peer, what, url_of(dsn), count)
    environment = os.environ | environment_of(peer, dsn, shape)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{peer.name} {what} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def drain_peer(server: Server, jobs: int, peer: Peer, processes: int, shape: str = "") -> Row:
    """One drain by a peer, of no-ops or of another shape of jobs."""
    jobs = max(1, round(jobs * peer.share))
    with server.database(migrated=False) as dsn:
        tell(peer, "setup", dsn)
        tell(peer, "fill", dsn, jobs, shape)
        settle_down(dsn)
        result = drain(
            dsn,
            command_of(peer, "work", url_of(dsn)),
            jobs,
            processes=processes,
            left=peer.left,
            environment=environment_of(peer, dsn, shape),
            cut=peer.cut,
        )
    del result["progress"]
    return {"jobs": jobs, **result}


def drain_ours(server: Server, jobs: int, processes: int, concurrency: int, keep: bool = True) -> Row:
    """One drain by us; finished jobs are kept, which is the default, unless told otherwise."""
    with server.database() as dsn:
        fill(dsn, jobs)
        result = drain(dsn, our_worker(dsn, concurrency=concurrency, keep=keep), jobs, processes=processes)
    del result["progress"]
    return {"jobs": jobs, **result}


def produced_by(peer: Peer, dsn: str, count: int, environment: Mapping[str, str]) -> dict[float, float]:
    """When each mark's commit returned in a peer's own producer."""
    producer = WorkerProcess(command_of(peer, "produce", url_of(dsn), count), environment)
    wait_until(lambda: producer.ended, count * 0.05 + 60, "the producer")
    producer.stop()
    return dict(next(m["committed"] for m in producer.said if "committed" in m))


def produced_by_us(dsn: str, count: int, enqueue: LiteralString) -> dict[float, float]:
    """When each mark's commit returned in a producer like latency.py's."""
    committed: dict[float, float] = {}
    with psycopg.connect(dsn, autocommit=True) as connection:
        due = time.monotonic()
        for mark in map(float, range(count)):
            due += latency.EVERY
            time.sleep(max(0.0, due - time.monotonic()))
            connection.execute(enqueue, [mark])
            committed[mark] = time.monotonic()
    return committed


def pickup_peer(server: Server, count: int, peer: Peer, enqueue: LiteralString | None = None) -> Row:
    """The pickup latency of a peer's idle worker."""
    with server.database(migrated=False) as dsn:
        tell(peer, "setup", dsn)
        environment = environment_of(peer, dsn)
        with workers(command_of(peer, "work", url_of(dsn)), 1, environment) as (worker,):
            worker.wait_for("ready")
            committed = produced_by_us(dsn, count, enqueue) if enqueue else produced_by(peer, dsn, count, environment)
            wait_until(lambda: worker.ran >= count, 60, "the last handlers")
            wait_until(lambda: len(latency.starts(worker)) >= count, 5, "the last starts")
        late = [(began - committed[mark]) * 1e3 for mark, began in latency.starts(worker)]
    return {**spread(late[5:]), "latencies": late[5:]}


# Other shapes than the no-op (shapes.py)


def enqueue_peer(server: Server, count: int, peer: Peer, shape: str = "") -> Row:
    """Single enqueues by eight producers of a peer."""
    with server.database(migrated=False) as dsn, Meter(server.admin) as meter:
        tell(peer, "setup", dsn)
        settle_down(dsn)
        before = meter.read()
        said = tell(peer, "enqueue", dsn, count, shape)
        used = costs(before, meter.read(), count)
    rate = next(json.loads(line)["rate"] for line in said.splitlines() if line.startswith('{"rate"'))
    return {"rate": rate, "postgres_us": used["postgres_us"], "others_cores": used["others_cores"], "workers": 0}


def shaped(server: Server, jobs: int) -> dict[str, tuple[Callable[[], Row], str | None]]:
    """The peers' ways for shapes.py, and of which other way each is a share. A thousand keys and a limit are ours as well;
    unique jobs stand beside the peer's own plain ones. Oban's unique jobs (Elixir) and River (Go) cannot run here: the free
    Oban for Python has none."""
    by_name = {peer.name: peer for peer in PEERS}
    graphile, pgqueuer = by_name["graphile-worker"], by_name["pgqueuer"]
    for peer in (graphile, pgqueuer):
        install(peer)

    def drained(peer: Peer, part: float, shape: str = "") -> Callable[[], Row]:
        return lambda: {**drain_peer(server, round(jobs * part), peer, 1, shape), "workers": 1}

    ways: dict[str, tuple[Callable[[], Row], str | None]] = {
        "graphile-worker": (drained(graphile, 0.5), None),
        "graphile-worker, 1,000 queues": (drained(graphile, 0.25, "keys"), "graphile-worker"),
        "pgqueuer": (drained(pgqueuer, 0.25), None),
        "pgqueuer, limit 200": (drained(pgqueuer, 0.25, "limit"), "pgqueuer"),
    }
    for peer in (graphile, pgqueuer):
        plain = f"{peer.name}, enqueue"
        ways[plain] = (partial(enqueue_peer, server, jobs // 10, peer), None)
        ways[f"{plain} unique"] = (partial(enqueue_peer, server, jobs // 10, peer, "unique"), plain)
    return ways


# Putting it together


def drains(server: Server, jobs: int, chosen: list[Peer], concurrency: int) -> dict[str, Callable[[], Row]]:
    """Every way of the drain, ours first."""
    ways: dict[str, Callable[[], Row]] = {
        f"{OURS}, 1 process": partial(drain_ours, server, jobs, 1, concurrency),
        f"{OURS}, 2 processes": partial(drain_ours, server, jobs, 2, concurrency),
        f"{OURS}, 1 process, deleted": partial(drain_ours, server, jobs, 1, concurrency, keep=False),
        f"{OURS}, 2 processes, deleted": partial(drain_ours, server, jobs, 2, concurrency, keep=False),
    }
    for peer in chosen:
        for count in peer.processes:
            name = f"{peer.name}, {count} process{'es' * (count > 1)}"
            ways[name] = partial(drain_peer, server, jobs, peer, count)
    return ways


def pickups(server: Server, count: int, chosen: list[Peer]) -> dict[str, Callable[[], Row]]:
    """Every way of the pickup latency, ours first."""
    ways: dict[str, Callable[[], Row]] = {OURS: partial(latency.run, server, count, latency.by_client)}
    for peer in chosen:
        if peer.latency:
            ways[peer.name] = partial(pickup_peer, server, count, peer)
        if peer.enqueue:
            ways[f"{peer.name}, enqueued by psycopg"] = partial(pickup_peer, server, count, peer, peer.enqueue)
    return ways


def with_ratios(results: Mapping[str, list[Row]], rows: list[Row]) -> list[Row]:
    """Adds how many times as fast our one process was, median of the rounds' ratios."""
    ours = results[f"{OURS}, 1 process"]
    for row in rows:
        row["ratio"] = round(ratio(ours, results[row["way"]], "rate"), 2)
    return rows


def best_to_best(rows: list[Row]) -> list[Row]:
    """Our best number of processes (kept) against each peer's best."""
    best: dict[str, float] = {}
    for row in rows:
        if "deleted" not in row["way"]:
            name = row["way"].partition(",")[0]
            best[name] = max(best.get(name, 0.0), row["rate"])
    return [{"way": n, "rate": rate, "ratio": round(best[OURS] / rate, 2)} for n, rate in best.items()]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", help="peers, separated by commas")
    made.add_argument("--concurrency", type=int, default=1000, help="of our worker: batches of half of it")
    made.add_argument("--no-latency", action="store_true", help="the drain only")
    options = made.parse_args()
    jobs, count = (10_000, 20) if options.quick else (50_000, 200)
    chosen = [peer for peer in PEERS if not options.only or peer.name in options.only.split(",")]
    installed: list[Peer] = []
    for peer in chosen:
        try:
            install(peer)
            installed.append(peer)
        except (RuntimeError, subprocess.CalledProcessError, OSError) as error:
            progress(f"WITHOUT {peer.name}: {error}")
    with open_server() as server:
        results = in_turn(
            drains(server, jobs, installed, options.concurrency), rounds(options), show=lambda r: f"{r['rate']:,.0f}/s"
        )
        rows = with_ratios(results, medians(results, ["rate", "worker_us", "postgres_us", "wal_bytes", "others_cores"]))
        best = best_to_best(rows)
        report = Report(
            "peers",
            "How fast do we and our peers drain no-op jobs?",
            f"{jobs} no-op jobs (see `share` for slow peers), one queue; our worker at concurrency {options.concurrency}",
            options,
            server,
        )
        report.say(rows, COLUMNS)
        report.say(
            best, {"way": "way", "rate": "jobs/s", "ratio": "ours is faster by"}, title="Best number of processes"
        )
        late, late_rows = {}, []
        if not options.no_latency:
            late = in_turn(
                pickups(server, count, installed), rounds(options, 3), show=lambda r: f"p50 {r['p50']:.2f} ms"
            )
            late_rows = [{"way": n, **spread([v for r in runs for v in r["latencies"]])} for n, runs in late.items()]
            report.say(late_rows, LATENCY_COLUMNS, title="Commit returned to handler started, idle worker")
        report.finish(
            {
                "drain": rows,
                "best": best,
                "latency": late_rows,
                "versions": {peer.name: " ".join(peer.packages) for peer in installed},
                "drain_runs": results,
                "latency_medians": {n: statistics.median(r["p50"] for r in runs) for n, runs in late.items()},
            },
            plot=lambda path: bars(path, rows, "rate", title=f"Drain of {jobs:,} no-op jobs", x="jobs/s"),
        )


if __name__ == "__main__":
    main()
