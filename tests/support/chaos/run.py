"""One chaos run: play, heal, drain, read the history, check it, count."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import trio

from pulse_trio import SyncClient
from pulse_trio.settings import WorkerSettings
from pulse_trio.testing.faults.server import RestartableServer

from . import handlers, journal
from .checker import check, hindered
from .handlers import CATCH_UP, EVERY, NARROW, TENANT, TENANTS
from .history import RUNNING, Bounds, History, Limit, read_crashes, read_effects, read_lines, strangers, without
from .schedule import LEASE, plan
from .stage import GRACE, SERVER_SETTINGS, open_stage
from .strikes import carry_out

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .history import Fault, Fence, Step
    from .schedule import Planned
    from .violations import Violation

SETTINGS: dict[str, Any] = {
    "lease": LEASE, "heartbeat": 2.0, "watchdog": 0.5, "cleanup": 0.5, "poll": 0.2, "grace": GRACE, "concurrency": 10,
    "process_slots": 1,
}  # fmt: skip
LIMITS = [Limit("narrow", None, NARROW), *(Limit("default", f"tenant:{who}", TENANT) for who in TENANTS)]
PROBES = 2
"""How many jobs for each place of a limit are enqueued at once to see that all its places are free."""
RESTARTS = ("server restart fast", "server restart immediate")


@dataclass
class Result:
    """What a run came to."""

    seed: int
    seconds: float
    workers: int
    planned: Sequence[Planned]
    history: History
    violations: list[Violation]
    counts: dict[str, Any]
    lives: list[tuple[str, int, float, float, int | None]]
    began: float
    ended: float
    sessions: dict[int, int] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seed": self.seed,
            "seconds": self.seconds,
            "workers": self.workers,
            **self.counts,
            "violations": [str(v) for v in self.violations],
        }


async def play(
    seed: int,
    seconds: float,
    *,
    workers: int = 5,
    producers: int = 2,
    rate: float = 6.0,
    kinds: list[str] | None = None,
    planned: Sequence[Planned] | None = None,
    slack: float = 2.0,
    keep: Path | None = None,
    forks: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """One run.

    Args:
        seed: of the faults' schedule, and of what producers choose.
        seconds: how long faults strike.
        workers, producers: processes. `rate`: operations a second of each of a producer's three tasks.
        kinds: only these faults. `planned`: these very ones instead of the seed's.
        slack: seconds a loaded machine may take for what should take none.
        keep: a folder for all files of the run; default: a temporary one that goes with it.
        forks: its processes are forks of one, which saves the tests the start of a Python each.
        say: gets a line of progress now and then.
    """
    folder = keep or Path(tempfile.mkdtemp(prefix="pt-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o711)  # root runs PostgreSQL as `nobody`, who has to come through
    server = await trio.to_thread.run_sync(RestartableServer, folder / "pg", SERVER_SETTINGS)
    planned = plan(seed, seconds, workers, kinds) if planned is None else planned
    orphans: set[int] = set()
    try:
        epoch = await trio.to_thread.run_sync(clock_offset, server.dsn)
        async with open_stage(
            folder, server, SETTINGS, seed, workers=workers, producers=producers, rate=rate, forks=forks
        ) as stage:
            await stage.working()
            began = time.monotonic()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(progress, say, began, seconds, stage.faults, stage.server.dsn)
                nursery.start_soon(look_for_orphans, stage.server.dsn, orphans)
                await carry_out(stage, planned, began)
                await trio.sleep(max(0.0, began + seconds - time.monotonic()))
                nursery.cancel_scope.cancel()
            await stage.heal()
            healed_at = time.monotonic()
            await stage.stop_producing()
            say("healed; draining")
            left = await stage.drained(90, scheduled=True)
            probed_at = time.monotonic()
            await trio.to_thread.run_sync(probe, server.dsn)
            left += await stage.drained(60)
            ended = time.monotonic()
            say(f"drained in {ended - healed_at:.1f} s, {left} left; reading the history")
        changes = await trio.to_thread.run_sync(journal.read, server.dsn)
        foreign = strangers(changes, handlers.KINDS)
        history = History(
            [change for change in changes if change.job not in foreign],
            without(read_lines(folder, "worker-*.jsonl") + read_lines(folder, "producer-*.jsonl"), foreign),
            read_effects(folder / "effects.jsonl"),
            stage.faults,
            stage.hindrances,
            stage.pauses,
            healed_at,
            epoch,
            bounds(slack),
            await trio.to_thread.run_sync(journal.read_bookings, server.dsn),
            LIMITS,
            probed_at,
            CATCH_UP,
            EVERY,
            await trio.to_thread.run_sync(journal.read_fires, server.dsn),
            await trio.to_thread.run_sync(journal.read_pauses, server.dsn),
            strangers=len(foreign),
            trees=await trio.to_thread.run_sync(journal.read_trees, server.dsn, sorted(orphans)),
            crashes=read_crashes(folder),
        )
        violations = await trio.to_thread.run_sync(check, history)
        counts = count(history) | {"drained in": round(ended - healed_at, 2)}
        return Result(seed, seconds, workers, planned, history, violations, counts, stage.lives, began, ended)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(server.close)
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def probe(dsn: str) -> None:
    """Pauses the schedules, and enqueues more jobs than the limits allow, all at once."""
    client = SyncClient(dsn)
    for name in CATCH_UP:
        client.pause_schedule(name)
    with psycopg.connect(dsn) as connection:
        requests = [handlers.narrow.request(token="", seconds=2.0) for _ in range(PROBES * NARROW)]
        requests += [
            handlers.tenant.request(token="", seconds=2.0, tenant=who)
            for who in TENANTS
            for _ in range(PROBES * TENANT)
        ]
        client.using(connection).enqueue_many(requests)


def bounds(slack: float) -> Bounds:
    """What the run's settings promise."""
    made = WorkerSettings(**SETTINGS)
    return Bounds(made.lease, made.watchdog, made.margin, made.poll, made.cleanup, slack)


def clock_offset(dsn: str) -> float:
    """The database's clock minus the machine's monotonic one: both belong to this machine."""
    with psycopg.connect(dsn) as connection:
        before = time.monotonic()
        row = connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
        after = time.monotonic()
    assert row is not None
    return row[0] - (before + after) / 2


async def progress(say: Callable[[str], None], began: float, seconds: float, faults: Sequence[Fault], dsn: str) -> None:
    """A line every few seconds."""
    while True:
        await trio.sleep(5)
        try:
            live, done = await trio.to_thread.run_sync(standing, dsn)
        except psycopg.OperationalError:
            continue
        last = faults[-1].kind if faults else "none yet"
        passed = f"{time.monotonic() - began:5.0f} of {seconds:.0f} s"
        say(f"{passed}: {len(faults)} faults (last: {last}), {done} jobs done, {live} live")


async def look_for_orphans(dsn: str, found: set[int]) -> None:
    """Looks in one snapshot after the other for live jobs whose parents are not."""

    def look() -> list[int]:
        with psycopg.connect(dsn, connect_timeout=2) as connection:
            connection.execute("SET lock_timeout = '500ms'")
            return journal.read_orphans(connection)

    while True:
        await trio.sleep(0.5)
        with suppress(psycopg.OperationalError, psycopg.errors.LockNotAvailable):
            found.update(await trio.to_thread.run_sync(look))


def standing(dsn: str) -> tuple[int, int]:
    """Live and finished jobs."""
    with psycopg.connect(dsn, connect_timeout=2) as connection:
        connection.execute("SET lock_timeout = '500ms'")
        try:
            row = connection.execute(
                "SELECT (SELECT count(*) FROM pulse.job), (SELECT count(*) FROM pulse.job_archive)"
            ).fetchone()
        except psycopg.errors.LockNotAvailable as error:
            raise psycopg.OperationalError("locked") from error
    assert row is not None
    return row[0], row[1]


# Counting


def count(history: History) -> dict[str, Any]:
    """The run's figures."""
    steps = [s for steps in history.steps.values() for s in steps]
    outcomes = Counter(s.outcome for s in steps if s.release is not None)
    operations = history.operations
    produced = [o for o in operations if "tokens" in o.asked]
    handed_back = sum(o.answer.get("rescued", 0) for o in operations if o.name == "rescue_sessions")
    return {
        "enqueue operations": dict(Counter(o.phase for o in produced)),
        "enqueued jobs": sum(c.operation == "insert" and c.token is not None for c in history.changes),
        "jobs": len(history.jobs),
        "jobs by kind": dict(Counter(str(changes[0].kind) for changes in history.jobs.values()).most_common()),
        "journal lines": len(history.changes),
        "attempts": sum(s.claim is not None for s in steps),
        "outcomes": {str(k): v for k, v in outcomes.most_common()},
        "beats renewed": sum(len(s.renewals) for s in steps),
        "effects": len(history.effects),
        "rows of job.transaction()": len(history.bookings),
        "children": sum(place.operation == "insert" for place in history.trees.places),
        "lines of histories": sum(line.operation == "insert" for line in history.trees.lines),
        "events received": sum(event.line is not None for event in history.trees.events),
        "occurrences of schedules": len(history.fires),
        "faults": dict(sorted(Counter(f.kind for f in history.faults).items())),
        "handlers that did not end": sum(line["event"] == "overran" for line in history.lines),
        "jobs of strangers": history.strangers,
        "rescues": outcomes["rescued"],
        "of these, by a supervisor": handed_back,
        "refused reports": sum(len(o.fences("refused")) for o in operations),
        "lost beats": sum(len(o.fences("lost")) for o in operations),
        "leases given up unproven": sum(line["event"] == "lease unproven" for line in history.lines),
        "reports without a reply": sum(len(o.asked_fences("reports")) for o in operations if o.phase == "unknown"),
        **{name: round(max(found, default=0.0), 2) for name, found in recoveries(history).items()},
    }


def recoveries(history: History) -> dict[str, list[float]]:
    """Seconds that each recovery took; "hindrances aside": without the time in which the server was unreachable."""
    rescued = [s for steps in history.steps.values() for s in steps if s.outcome == "rescued"]
    claimed = claims_by_process(history)
    return {
        "largest rescue after the lease, hindrances aside (s)": [lateness(history, s) for s in rescued],
        "largest recovery after a kill, hindrances aside (s)": [
            d for f in history.faults if f.kind == "kill" for d in recovery(history, claimed, f)
        ],
        "largest hand-back after a supervised kill, hindrances aside (s)": [
            d for f in history.faults if f.kind == "kill child" for d in recovery(history, claimed, f)
        ],
        "largest pause of claims after a restart (s)": [
            claims_again(history, f) for f in history.faults if f.kind in RESTARTS
        ],
    }


def claims_by_process(history: History) -> dict[int, set[Fence]]:
    """What each process has claimed."""
    claimed: dict[int, set[Fence]] = {}
    for operation in history.operations:
        claimed.setdefault(operation.pid, set()).update(operation.fences("claims"))
    return claimed


def lateness(history: History, step: Step) -> float:
    """Seconds from a lease's end to its rescue, in database time, without periods in which no rescue was possible."""
    assert step.release is not None
    expired = step.release.old_lease_until or 0.0
    return step.at - expired - hindered(history, step.job, expired - history.epoch, step.at - history.epoch)


def recovery(history: History, claimed: Mapping[int, set[Fence]], kill: Fault) -> list[float]:
    """For each job that a killed process held: seconds until it was put back, without periods in which that was
    impossible."""
    delays: list[float] = []
    for fence in claimed.get(kill.pid or 0, ()):
        for step in history.releases.get(fence, ()):
            back = step.at - history.epoch
            if back > kill.begin and step.outcome == "rescued":
                delays.append(back - kill.begin - hindered(history, step.job, kill.begin, back))
    return delays


def claims_again(history: History, restart: Fault) -> float:
    """Seconds from the moment the server accepts connections until a worker claims."""
    accepted = restart.end + history.epoch
    later = [
        c.at - accepted for c in history.changes if c.state == RUNNING and c.old_state != RUNNING and c.at > accepted
    ]
    return min(later, default=0.0)
