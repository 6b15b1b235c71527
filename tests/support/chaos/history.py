"""A history: the journal, what the processes said, the effects and the faults; read, and put in order for the checker."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from .journal import Trees

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from .journal import Change

WAITING, RUNNING, RETRYABLE, COMPLETED, DEAD, CANCELLED = 1, 2, 3, 4, 5, 6
LIVE_WAITING = (WAITING, RETRYABLE)
FINISHED = (COMPLETED, DEAD, CANCELLED)
NO_ROW = 0
Fence = tuple[int, int, int]
WATCHES_AGAIN = 5.0
"""Seconds until the first watchdog is back, at most: the cap of the backoff between two tries to reconnect (4 s), and one
to connect."""
BUG = "is a bug in pulse-trio"
"""The command's message for an unexpected exception."""
COMMIT_WITHIN = 10.0
"""Seconds from a completion in `job.transaction()` to its COMMIT, after which the server rolls it back."""


@dataclass(frozen=True)
class Bounds:
    """What the workers were set to, in seconds. `slack`: what a loaded machine may take for a step that takes no time."""

    lease: float = 6.0
    watchdog: float = 0.5
    margin: float = 1.5
    poll: float = 0.2
    cleanup: float = 0.5
    slack: float = 2.0


class Window(NamedTuple):
    """A stretch of monotonic time; `who` is the worker it is about, None for everybody; `pid` one process of it."""

    begin: float
    end: float
    who: str | None = None
    pid: int | None = None


@dataclass(frozen=True)
class Fault:
    """One fault that was carried out, in monotonic time. `pid`: the process it struck, if it is about one."""

    kind: str
    begin: float
    end: float
    who: str | None = None
    pid: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class Effect:
    """One effect of a handler, at the moment it arrived (monotonic)."""

    job: int
    attempt: int
    n: int
    at: float
    pid: int = 0


class Limit(NamedTuple):
    """At most so many jobs of a queue run at once, or (with a key) of that key in it."""

    queue: str
    key: str | None
    most: int


@dataclass(frozen=True)
class Step:
    """All that one transaction did to one job: where it stood before and after."""

    job: int
    tx: int
    at: float
    changes: tuple[Change, ...]
    old: int
    new: int

    @property
    def statements(self) -> set[str | None]:
        return {c.statement for c in self.changes}

    @property
    def claim(self) -> Change | None:
        """The change by which the job began to run."""
        return next((c for c in self.changes if c.state == RUNNING and c.old_state in LIVE_WAITING), None)

    @property
    def release(self) -> Change | None:
        """The change by which the job ceased to run."""
        return next((c for c in self.changes if c.old_state == RUNNING and c.state != RUNNING), None)

    @property
    def outcome(self) -> str | None:
        """What the attempt that ended here came to."""
        if self.release is None:
            return None
        noted = next((c.outcome for c in self.changes if c.operation == "note"), None)
        return noted or ("completed" if self.reached == COMPLETED else None)

    @property
    def reached(self) -> int:
        """Where the job stood, but for its tree: an outcome that waits for descendants, and a cancelled job that runs once more
        for its compensation, were archived and taken back in the same transaction."""
        return next((c.state for c in self.changes if c.operation == "archive" and c.state), self.new)

    @property
    def renewals(self) -> list[Change]:
        return [c for c in self.changes if c.old_state == c.state == RUNNING and c.lease_until != c.old_lease_until]

    @property
    def raised(self) -> int:
        """By how much the budget grew."""
        return sum(
            c.max_attempts - c.old_max_attempts
            for c in self.changes
            if c.operation == "update" and c.max_attempts is not None and c.old_max_attempts is not None
        )


@dataclass
class History:
    """A run's record. `epoch` is the database's clock minus the monotonic one."""

    changes: Sequence[Change] = ()
    lines: Sequence[dict[str, Any]] = ()
    effects: Sequence[Effect] = ()
    faults: Sequence[Fault] = ()
    hindrances: Sequence[Window] = ()
    """When no worker could reach the server, or a row: recovery may be that much later."""
    pauses: Sequence[Window] = ()
    """When a process was stopped: it may act on an old lease until just after."""
    healed_at: float | None = None
    """Monotonic; None when the run was not drained (then I1's rest and I10 are not asked)."""
    epoch: float = 0.0
    bounds: Bounds = field(default_factory=Bounds)
    bookings: Sequence[tuple[int, int]] = ()
    """Job and attempt of each row that a handler wrote in the transaction that completed its job."""
    limits: Sequence[Limit] = ()
    probed_at: float | None = None
    """Monotonic: when, after healing, more jobs than each limit allows were enqueued at once."""
    schedules: Mapping[str, str] = field(default_factory=dict[str, str])
    """What each schedule promises of what was missed; it is named like the kind of its jobs."""
    every: float = 1.0
    """Seconds between two occurrences of each schedule."""
    fires: Sequence[tuple[str, float, int]] = ()
    """What pulse-trio says it fired: schedule, occurrence in seconds since 1970, job."""
    paused_at: Mapping[str, float] = field(default_factory=dict[str, float])
    """When each schedule was paused, in seconds since 1970: nothing is fired from then on."""
    strangers: int = 0
    """How many jobs strangers wrote. They are left out of everything else."""
    trees: Trees = field(default_factory=Trees)
    crashes: Sequence[str] = ()
    """What workers said of an error that was nobody's but pulse-trio's own, with which they ended."""

    @cached_property
    def excuses(self) -> list[Window]:
        """When nobody could rescue. What keeps everybody away does so until a watchdog has had an answer again, and for
        `WATCHES_AGAIN` at most; a completion whose COMMIT was never answered may keep its row locked for `COMMIT_WITHIN`."""
        ticks = [o.end for o in self.operations if o.name == "rescue" and o.phase == "ok" and o.end is not None]
        found: list[Window] = []
        for window in self.hindrances:
            end = window.end
            if window.who is None:
                end = min((t for t in ticks if t > end), default=end + WATCHES_AGAIN)
            found.append(Window(window.begin, min(end, window.end + WATCHES_AGAIN), window.who))
        found += [
            Window(o.begin, o.begin + COMMIT_WITHIN, f"job {fence[0]}")
            for o in self.operations
            if o.name == "transaction" and o.phase == "unknown"
            for fence in o.asked_fences("reports")
        ]
        return found

    @cached_property
    def witnessed(self) -> dict[Fence, bool]:
        """The attempts whose process another one saw die, and whether nothing else had run in it."""
        return {f: o.asked["alone"] for o in self.operations for f in o.asked_fences("crashed")}

    @cached_property
    def stops(self) -> list[Window]:
        """When a process stood still, or its loop did."""
        blocked = [
            Window(line["t"], line["t"] + line["seconds"], line["who"], line["pid"])
            for line in self.lines
            if line["event"] == "blocked"
        ]
        return [*self.pauses, *blocked]

    @cached_property
    def jobs(self) -> dict[int, list[Change]]:
        """The changes of each job in order."""
        jobs: dict[int, list[Change]] = defaultdict(list)
        for change in self.changes:
            jobs[change.job].append(change)
        for changes in jobs.values():
            changes.sort(key=lambda c: c.revision)
        return dict(jobs)

    @cached_property
    def steps(self) -> dict[int, list[Step]]:
        """The steps of each job in order."""
        return {job: steps_of(job, changes) for job, changes in self.jobs.items()}

    @cached_property
    def releases(self) -> dict[Fence, list[Step]]:
        """The steps that ended an attempt, by its fence."""
        found: dict[Fence, list[Step]] = defaultdict(list)
        for job, steps in self.steps.items():
            for step in steps:
                if (change := step.release) is not None:
                    found[job, change.old_attempt or 0, change.old_session or 0].append(step)
        return dict(found)

    @cached_property
    def operations(self) -> list[Operation]:
        """What the processes asked and heard, in the order of asking."""
        open_: dict[tuple[str, int, int], Operation] = {}
        done: list[Operation] = []
        for line in self.lines:
            if line["event"] != "operation":
                continue
            key = (line["who"], line["pid"], line["op"])
            if line["phase"] == "invoke":
                open_[key] = Operation(line["who"], line["pid"], line["name"], line["t"], line)
                done.append(open_[key])
            else:
                operation = open_[key]
                operation.phase, operation.end, operation.answer = line["phase"], line["t"], line
        return done


@dataclass
class Operation:
    """One operation of a process: `phase` is "unknown" until its answer was heard."""

    who: str
    pid: int
    name: str
    begin: float
    asked: dict[str, Any]
    phase: str = "unknown"
    end: float | None = None
    answer: dict[str, Any] = field(default_factory=dict)

    def fences(self, part: str) -> list[Fence]:
        """The fences in one part of the answer."""
        return [(f[0], f[1], f[2]) for f in self.answer.get(part, ())]

    def asked_fences(self, part: str) -> list[Fence]:
        """The fences in one part of the question."""
        return [(f[0], f[1], f[2]) for f in self.asked.get(part, ())]


def steps_of(job: int, changes: Sequence[Change]) -> list[Step]:
    """Groups a job's changes by transaction."""
    steps: list[Step] = []
    before = NO_ROW
    for tx, group in groupby(changes, key=lambda c: c.tx):
        together = tuple(group)
        after = before
        for change in together:
            match change.operation:
                case "insert" | "update" | "archive":
                    after = change.state or NO_ROW
                case "delete" if not any(c.operation == "archive" for c in together):
                    after = NO_ROW
                case "unarchive" if not any(c.operation == "insert" for c in together):
                    after = NO_ROW
                case _:
                    pass
        steps.append(Step(job, tx, together[-1].at, together, before, after))
        before = after
    return steps


def read_lines(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """Every line of the files that match, in the order of their clocks. A line that a kill cut short is left out."""
    lines: list[dict[str, Any]] = []
    for path in folder.glob(pattern):
        for line in path.read_bytes().split(b"\n"):
            if line:
                try:
                    lines.append(json.loads(line))
                except ValueError:
                    continue
    return sorted(lines, key=lambda line: line["t"])


_FENCED = ("reports", "beats", "crashed", "claims", "renewed", "lost", "accepted", "refused")


def strangers(changes: Sequence[Change], known: Iterable[str]) -> frozenset[int]:
    """The strangers' jobs: of no kind that the run's producers enqueue, from their first row on."""
    kinds = frozenset(known)
    return frozenset(change.job for change in changes if change.kind is not None and change.kind not in kinds)


def without(lines: Sequence[dict[str, Any]], jobs: frozenset[int]) -> list[dict[str, Any]]:
    """What the processes said, but for what they said of these jobs."""
    return [
        {k: [f for f in v if f[0] not in jobs] if k in _FENCED and isinstance(v, list) else v for k, v in line.items()}
        for line in lines
        if line.get("job") not in jobs
    ]


def read_crashes(folder: Path) -> list[str]:
    """The ends of workers by an unexpected error, each with the last lines before it."""
    crashes: list[str] = []
    for path in sorted(folder.glob("worker-*.log")):
        lines = path.read_text(errors="replace").splitlines()
        crashes += ["\n".join([path.name, *lines[max(0, n - 12) : n]]) for n, line in enumerate(lines) if BUG in line]
    return crashes


def read_effects(path: Path) -> list[Effect]:
    """What arrived at the sink."""
    effects: list[Effect] = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        if line.endswith(b"}"):
            said = json.loads(line)
            effects.append(Effect(said["job"], said["attempt"], said["n"], said["at"], said["pid"]))
    return sorted(effects, key=lambda e: e.at)
