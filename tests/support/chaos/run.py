"""One chaos run: play, heal, drain, read the history, check it, count."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import trio

from pulse_trio.settings import WorkerSettings

from . import journal
from .checker import Violation, check, hindered
from .history import RUNNING, Bounds, History, read_effects, read_lines
from .schedule import LEASE, plan
from .stage import GRACE, Server, open_stage
from .strikes import carry_out

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .history import Fault, Operation, Step
    from .schedule import Planned

SETTINGS: dict[str, Any] = {
    "lease": LEASE, "heartbeat": 2.0, "watchdog": 0.5, "cleanup": 0.5, "poll": 0.2, "grace": GRACE, "concurrency": 10,
}  # fmt: skip
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
        say: gets a line of progress now and then.
    """
    folder = keep or Path(tempfile.mkdtemp(prefix="pt-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o711)  # root runs PostgreSQL as `nobody`, who has to come through
    server = await trio.to_thread.run_sync(Server, folder / "pg")
    planned = plan(seed, seconds, workers, kinds) if planned is None else planned
    try:
        epoch = await trio.to_thread.run_sync(clock_offset, server.dsn)
        async with open_stage(folder, server, SETTINGS, seed, workers=workers, producers=producers, rate=rate) as stage:
            await stage.working()
            began = time.monotonic()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(progress, say, began, seconds, stage.faults, stage.server.dsn)
                await carry_out(stage, planned, began)
                await trio.sleep(max(0.0, began + seconds - time.monotonic()))
                nursery.cancel_scope.cancel()
            await stage.heal()
            healed_at = time.monotonic()
            await stage.stop_producing()
            say("healed; draining")
            left = await stage.drained(90)
            ended = time.monotonic()
            say(f"drained in {ended - healed_at:.1f} s, {left} left; reading the history")
        changes = await trio.to_thread.run_sync(journal.read, server.dsn)
        history = History(
            changes,
            read_lines(folder, "worker-*.jsonl") + read_lines(folder, "producer-*.jsonl"),
            read_effects(folder / "effects.jsonl"),
            stage.faults,
            stage.hindrances,
            stage.pauses,
            healed_at,
            epoch,
            bounds(slack),
        )
        violations = await trio.to_thread.run_sync(check, history)
        counts = count(history) | {"drained in": round(ended - healed_at, 2)}
        return Result(seed, seconds, workers, planned, history, violations, counts, stage.lives, began, ended)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(server.close)
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


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
    kills = [f for f in history.faults if f.kind == "kill" and f.pid is not None]
    return {
        "enqueue operations": dict(Counter(o.phase for o in produced)),
        "enqueued jobs": sum(c.operation == "insert" and c.token is not None for c in history.changes),
        "jobs": len(history.jobs),
        "journal lines": len(history.changes),
        "attempts": sum(s.claim is not None for s in steps),
        "outcomes": {str(k): v for k, v in outcomes.most_common()},
        "beats renewed": sum(len(s.renewals) for s in steps),
        "effects": len(history.effects),
        "faults": dict(sorted(Counter(f.kind for f in history.faults).items())),
        "rescues": outcomes["rescued"],
        "refused reports": sum(len(o.fences("refused")) for o in operations),
        "lost beats": sum(len(o.fences("lost")) for o in operations),
        "reports without a reply": sum(len(o.asked_fences("reports")) for o in operations if o.phase == "unknown"),
        "largest rescue after the lease, hindrances aside (s)": round(
            max((lateness(history, s) for s in steps if s.outcome == "rescued"), default=0.0), 2
        ),
        "largest recovery after a kill, hindrances aside (s)": round(
            max((d for k in kills for d in recovery(history, operations, k)), default=0.0), 2
        ),
        "largest pause of claims after a restart (s)": round(
            max((claims_again(history, f) for f in history.faults if f.kind in RESTARTS), default=0.0), 2
        ),
    }


def lateness(history: History, step: Step) -> float:
    """Seconds from a lease's end to its rescue, in database time, those aside in which nobody could."""
    assert step.release is not None
    expired = step.release.old_lease_until or 0.0
    return step.at - expired - hindered(history, step.job, expired - history.epoch, step.at - history.epoch)


def recovery(history: History, operations: Sequence[Operation], kill: Fault) -> list[float]:
    """For each job that a killed process held: seconds until it was put back, those aside in which nobody could do so."""
    delays: list[float] = []
    for fence in {f for o in operations if o.pid == kill.pid for f in o.fences("claims")}:
        for step in history.releases.get(fence, ()):
            back = step.at - history.epoch
            if back > kill.begin:
                delays.append(back - kill.begin - hindered(history, step.job, kill.begin, back))
    return delays


def claims_again(history: History, restart: Fault) -> float:
    """Seconds from the server's accepting connections until somebody claimed."""
    accepted = restart.end + history.epoch
    later = [
        c.at - accepted for c in history.changes if c.state == RUNNING and c.old_state != RUNNING and c.at > accepted
    ]
    return min(later, default=0.0)
