"""The job table: every job that this worker holds, by its state.

The table owns a running job's life. Its states and moves are data, and an illegal move raises. The other parts ask it how many
jobs may start, which leases are to be renewed, and which job a claim is; they wait for its signals.

| from | move | to | made by |
|---|---|---|---|
| | claim | CLAIMED | the claim loop, through the runner |
| CLAIMED | begin | RUNNING | the runner |
| CLAIMED, RUNNING | end, with an outcome | ENDED | the runner |
| CLAIMED, RUNNING, ENDED | lose: the fence is lost | LOST | heartbeats, transactions |
| RUNNING, LOST | commit: `job.transaction()` completed it | COMMITTED | transactions |
| ENDED | report: written, or refused by its fence | REPORTED | reports |
| any but ENDED | leave: the handler has returned, and there is nothing to report | LOST, COMMITTED | the runner |

A job that is LOST and has an outcome all the same (a thread that returned a value) stays LOST until its report is refused. A
job that is LOST may be COMMITTED afterwards: a beat finds no row when the commit has just deleted it.

Jobs are found by their `Claim`, which stands for the fence (job id, attempt, session): a claim is compared by identity, and
there is one for each attempt.

Cost for each job: a dictionary entry and four attribute writes; no event and no closure.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, Final, Literal, Protocol

import trio

from ..signal import Signal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ...jobs import CancelReason, Claim, Outcome
    from .running_job import RunningJob

JobState = Literal["claimed", "running", "ended", "reported", "lost", "committed"]
CLAIMED: Final = "claimed"
"""Its handler has not begun."""
RUNNING: Final = "running"
ENDED: Final = "ended"
"""It has an outcome that is not written yet."""
REPORTED: Final = "reported"
LOST: Final = "lost"
"""It is not this worker's any more; its handler may still run."""
COMMITTED: Final = "committed"
"""Its own transaction has completed it; its handler may still run."""

MOVES: Final[dict[str, dict[JobState, JobState]]] = {
    "begin": {CLAIMED: RUNNING},
    "end": {CLAIMED: ENDED, RUNNING: ENDED, LOST: LOST},
    "lose": {CLAIMED: LOST, RUNNING: LOST, ENDED: LOST, LOST: LOST},
    "commit": {RUNNING: COMMITTED, LOST: COMMITTED},
    "report": {ENDED: REPORTED, LOST: LOST},
    "leave": {CLAIMED: LOST, RUNNING: LOST, LOST: LOST, COMMITTED: COMMITTED},
}
_BEGIN, _END, _REPORT = MOVES["begin"], MOVES["end"], MOVES["report"]


class IllegalMove(Exception):
    """A job was moved in a way that its state does not allow: a mistake in the worker."""


class Follower(Protocol):
    """What has to know of each job's end."""

    def ended(self, claims: Sequence[Claim]) -> None:
        """These attempts are over, and there is nothing to report of them any more."""
        ...

    def none_runs(self) -> None:
        """The last job that ran has ended."""
        ...


class Tally:
    """What became of a worker's jobs: how many by outcome, and how many were given back unfinished when it stopped."""

    __slots__ = ("ended", "released")

    def __init__(self) -> None:
        self.ended: dict[str, int] = {}
        self.released = 0

    def count(self, kind: str) -> None:
        """One more that ended so."""
        self.ended[kind] = self.ended.get(kind, 0) + 1


class Expected:
    """Ids of jobs that something was heard of before they were here."""

    __slots__ = ("arrived", "ids", "news")

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.arrived: set[int] = set()
        """Those that are here now."""
        self.news = Signal()
        """Given when one has arrived."""

    def arrive(self, ids: Iterable[int]) -> None:
        """These are here now, expected or not."""
        if expected := self.ids.intersection(ids):
            self.ids -= expected
            self.arrived |= expected
            self.news.give()


class JobTable:
    """The jobs of one worker, at most `concurrency` of them running at once."""

    __slots__ = (
        "_adrift",
        "_concurrency",
        "_follower",
        "_held",
        "_next_beat",
        "batch",
        "beats",
        "crowded",
        "expected",
        "freed",
        "running",
        "tally",
    )

    def __init__(self, concurrency: int, follower: Follower) -> None:
        self._concurrency = concurrency
        self._follower = follower
        self._held: dict[Claim, RunningJob] = {}
        """CLAIMED, RUNNING and ENDED: their leases are renewed."""
        self._adrift: dict[Claim, RunningJob] = {}
        """LOST and COMMITTED: there is no lease to renew."""
        self._next_beat = math.inf
        self.batch = max(1, math.ceil(concurrency / 2))
        """Jobs that one claim may bring at most."""
        self.running = 0
        """Jobs whose handler runs, or is about to."""
        self.crowded = False
        """Whether so many large results wait to be written that no job may start."""
        self.freed = Signal()
        """Given when a slot is free again: for the claim loop."""
        self.beats = Signal()
        """Given when a beat is due sooner than `next_beat` said: for the heartbeats."""
        self.expected = Expected()
        self.tally = Tally()

    # What is counted and found

    @property
    def free(self) -> int:
        """Jobs that may start now."""
        return 0 if self.crowded else self._concurrency - self.running

    @property
    def held(self) -> Collection[RunningJob]:
        """Those whose lease is to be renewed: CLAIMED, RUNNING and ENDED."""
        return self._held.values()

    def __iter__(self) -> Iterator[RunningJob]:
        """All, those that are LOST or COMMITTED included."""
        return chain(self._held.values(), self._adrift.values())

    def holds(self, job: RunningJob) -> bool:
        """Whether its lease is to be renewed."""
        return job.claim in self._held

    def next_beat(self) -> float:
        """When the first beat is due, on Trio's clock; infinity if none is."""
        self._next_beat = min((job.beat_due for job in self._held.values()), default=math.inf)
        return self._next_beat

    # Waiting

    async def next_freed(self) -> None:
        """Waits until a job has ended."""
        await self.freed.wait()

    async def none_runs(self) -> None:
        """Waits until no job runs."""
        while self.running:
            await self.freed.wait()

    def be_crowded(self, crowded: bool) -> None:
        """Sets `crowded`."""
        if self.crowded and not crowded:
            self.freed.give()
        self.crowded = crowded

    # The moves

    def add(self, jobs: Collection[RunningJob]) -> None:
        """These were claimed: from now on their leases are kept."""
        held, soonest = self._held, self._next_beat
        for job in jobs:
            held[job.claim] = job
            if job.beat_due < soonest:
                soonest = job.beat_due
        self.running += len(jobs)
        if soonest < self._next_beat:
            self._next_beat = soonest
            self.beats.give()
        if self.expected.ids:
            self.expected.arrive([job.claim.id for job in jobs])

    def begin(self, job: RunningJob) -> None:
        """Its handler begins."""
        try:
            job.state = _BEGIN[job.state]
        except KeyError:
            raise _illegal("begin", job) from None

    def end(self, job: RunningJob) -> bool:
        """Its handler has returned; whether `job.outcome` is to be reported."""
        outcome = job.outcome
        if outcome is None or job.state is COMMITTED:
            self._leave(job)
            reported = False
        else:
            try:
                job.state = _END[job.state]
            except KeyError:
                raise _illegal("end", job) from None
            # Not by `count`: this is the path of every job.
            ended = self.tally.ended
            ended[outcome.kind] = ended.get(outcome.kind, 0) + 1
            if outcome.kind == "released" and job.cancel_reason in ("shutdown", "parent"):
                self.tally.released += 1
            reported = True
        self.running -= 1
        self.freed.give()
        if not self.running:
            self._follower.none_runs()
        return reported

    def _leave(self, job: RunningJob) -> None:
        self._move("leave", job)
        self._held.pop(job.claim, None)
        self._adrift.pop(job.claim, None)
        self.tally.count("completed" if job.state == COMMITTED else "lost")
        self._follower.ended([job.claim])

    def report(self, outcomes: Iterable[Outcome]) -> None:
        """These are written, or were refused. Of a claim that was never added here, only the follower is told."""
        held, claims = self._held, [outcome.claim for outcome in outcomes]
        for claim in claims:
            job = held.pop(claim, None) or self._adrift.pop(claim, None)
            if job is not None:
                try:
                    job.state = _REPORT[job.state]
                except KeyError:
                    raise _illegal("report", job) from None
        self._follower.ended(claims)

    def lose(self, job: RunningJob) -> None:
        """The fence is lost: beats for it are over. Whoever found out cancels its handler."""
        self._move("lose", job)
        self._set_adrift(job)

    def commit(self, job: RunningJob) -> None:
        """Its own transaction has completed it."""
        self._move("commit", job)
        self._set_adrift(job)

    def _set_adrift(self, job: RunningJob) -> None:
        if self._held.pop(job.claim, None) is not None:
            self._adrift[job.claim] = job

    def _move(self, move: str, job: RunningJob) -> None:
        try:
            job.state = MOVES[move][job.state]
        except KeyError:
            raise _illegal(move, job) from None

    # What concerns all

    def hurry(self, job: RunningJob) -> None:
        """Beats for this lease at once: it may be lost."""
        job.beat_due = trio.current_time()
        self.beats.give()

    def cancel_all(self, reason: CancelReason) -> None:
        """Cancels every handler that runs or is about to."""
        for job in list(self):
            if job.state == COMMITTED or (job.outcome is None and job.state != LOST):
                job.cancel(reason)

    def shortest_lease(self, default: float) -> float:
        """Seconds of the shortest lease among those that are renewed; `default` if there are none."""
        return min((job.terms.lease for job in self._held.values()), default=default)

    def unended(self) -> Iterable[RunningJob]:
        """Those whose handler has not ended."""
        return [job for job in self if not job.ended]


def _illegal(move: str, job: RunningJob) -> IllegalMove:
    return IllegalMove(f"job {job.claim.id} (attempt {job.claim.attempt}) is {job.state}: it cannot {move}")
