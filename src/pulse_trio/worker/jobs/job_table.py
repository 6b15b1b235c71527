"""The job table: every job that this worker holds, by its state.

The table owns a running job's life. Its states and moves are data, and an illegal move raises. The other parts ask it how many
jobs may start, which leases need renewal, and which job a claim belongs to; they wait for its signals.

| from | move | to | made by |
|---|---|---|---|
| | claim | CLAIMED | the claim loop, through the runner |
| CLAIMED | begin | RUNNING | the runner |
| CLAIMED, RUNNING | end, with an outcome | ENDED | the runner |
| CLAIMED, RUNNING, ENDED | lose: the fence is lost | LOST | heartbeats, transactions |
| RUNNING, LOST | commit: `job.transaction()` completed it | COMMITTED | transactions |
| ENDED | report: written, or refused by its fence | REPORTED | reports |
| any but ENDED | leave: the handler has returned, and there is nothing to report | LOST, COMMITTED | the runner |

A LOST job that nevertheless has an outcome (a thread returned a value) stays LOST until its report is refused. A LOST job may
become COMMITTED: a beat finds no row when the commit has just deleted it.

The key of a job is its `Claim`, which stands for the fence (job id, attempt, session): claims compare by identity, and each
attempt has one.

Cost for each job: a dictionary entry and four attribute writes; no event and no closure.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import trio

from ..signal import Signal
from .job_states import COMMITTED, LOST, MOVES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ...jobs import CancelReason, Claim, Outcome
    from .running_job import RunningJob

_BEGIN, _END, _REPORT = MOVES["begin"], MOVES["end"], MOVES["report"]


class IllegalMove(Exception):
    """A move that a job's state does not allow: a bug in the worker."""


class Follower(Protocol):
    """Is told when jobs end."""

    def ended(self, claims: Sequence[Claim]) -> None:
        """These attempts are over, and nothing more is reported of them."""
        ...

    def last_job_ended(self) -> None:
        """The last running job has ended."""
        ...


_WHOLE = 200
"""Slots that one claim may fill. With more of them the overlap of claims and handlers is worth more than fewer claims."""


class Tally:
    """What became of a worker's jobs: how many by outcome, and how many it released unfinished when it stopped."""

    __slots__ = ("ended", "released")

    def __init__(self) -> None:
        self.ended: dict[str, int] = {}
        self.released = 0

    def count(self, kind: str) -> None:
        """Counts one more job that ended so."""
        self.ended[kind] = self.ended.get(kind, 0) + 1

    def refused(self, kind: str) -> None:
        """The report of a job that ended so was refused: it was lost before."""
        if kind in self.ended:
            self.ended[kind] -= 1
            if not self.ended[kind]:
                del self.ended[kind]
            self.count("lost")


class Expected:
    """Ids of jobs that a notification named before the worker held them."""

    __slots__ = ("arrived", "ids", "news")

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.arrived: set[int] = set()
        """Expected ids whose jobs the worker now holds."""
        self.news = Signal()
        """Given when an expected job has arrived."""

    def arrive(self, ids: Iterable[int]) -> None:
        """The worker now holds these jobs, expected or not."""
        if expected := self.ids.intersection(ids):
            self.ids -= expected
            self.arrived |= expected
            self.news.give()


class Slots:
    """How many of a worker's jobs may run at once, and how many it may claim."""

    __slots__ = ("ahead", "beside", "claimed_ahead", "count", "lenders")

    def __init__(self, count: int) -> None:
        self.count = count
        """The most jobs that run at once."""
        self.ahead = 0
        """Jobs that may be claimed beyond those, because they will begin in a moment (claiming/ahead.py)."""
        self.beside = 0
        """How many jobs more than there are slots run, or are about to: those that were claimed to run beside the others.
        One less with each job that ends."""
        self.lenders: set[RunningJob] = set()
        """Running jobs that only wait for cancelled jobs, and lend these their slots (claiming/claim_loop.py)."""
        self.claimed_ahead = Signal()
        """Given when jobs may have been claimed beyond the slots."""

    @property
    def half(self) -> int:
        """The most jobs that one claim brings while another half of them runs."""
        return max(1, math.ceil((self.count + self.ahead) / 2))

    @property
    def whole(self) -> int:
        """The most jobs that one claim brings when the last ones have run: with few slots all of them, unless jobs are claimed
        ahead of the slots, which overlaps with handlers as many slots do."""
        return self.half if self.ahead else max(self.half, min(self.count, _WHOLE))


class JobTable:
    """The jobs of one worker, at most `slots.count` of which run at once."""

    __slots__ = (
        "_adrift",
        "_follower",
        "_held",
        "_next_beat",
        "beats",
        "crowded",
        "due",
        "expected",
        "freed",
        "running",
        "slots",
        "tally",
    )

    def __init__(self, concurrency: int, follower: Follower) -> None:
        self.slots = Slots(concurrency)
        self._follower = follower
        self._held: dict[Claim, RunningJob] = {}
        """CLAIMED, RUNNING and ENDED: their leases are renewed."""
        self._adrift: dict[Claim, RunningJob] = {}
        """LOST and COMMITTED: they have no lease to renew."""
        self._next_beat = math.inf
        self.due: deque[RunningJob] = deque()
        """CLAIMED: no task has taken them yet. The runner takes them from the left, while slots are free."""
        self.running = 0
        """The number of jobs that run or are due."""
        self.crowded = False
        """Whether so many large results wait to be written that no job may start."""
        self.freed = Signal()
        """Given when a slot is free again; the claim loop waits for it."""
        self.beats = Signal()
        """Given when a beat is due sooner than `next_beat` said; the heartbeats wait for it."""
        self.expected = Expected()
        self.tally = Tally()

    # Counts and look-ups

    @property
    def free(self) -> int:
        """The number of jobs that may be claimed now."""
        return 0 if self.crowded else self.slots.count + self.slots.ahead - self.running

    @property
    def startable(self) -> int:
        """The number of due jobs that have a slot: all of them, unless some were claimed ahead."""
        due, slots = len(self.due), self.slots
        if not due or self.running <= slots.count:
            return due
        return min(due, slots.count + slots.beside - self.running + due)

    @property
    def in_slots(self) -> int:
        """The number of jobs that run, or are about to: those claimed ahead do not count. More than there are slots while some
        of them are lent, and until enough jobs have ended after that."""
        return self.running - len(self.due) + max(0, self.startable)

    @property
    def lent(self) -> int:
        """The number of cancelled jobs that may be claimed now for lent slots: none while there is a free slot."""
        slots = self.slots
        return len(slots.lenders) - max(0, self.in_slots - slots.count) if slots.lenders and self.free <= 0 else 0

    @property
    def full(self) -> bool:
        """Whether every slot has a job."""
        return self.running >= self.slots.count

    @property
    def held(self) -> Collection[RunningJob]:
        """The jobs whose lease is to be renewed: CLAIMED, RUNNING and ENDED."""
        return self._held.values()

    def __iter__(self) -> Iterator[RunningJob]:
        """All jobs, including those that are LOST or COMMITTED."""
        return chain(self._held.values(), self._adrift.values())

    def holds(self, job: RunningJob) -> bool:
        """Whether the job's lease is to be renewed."""
        return job.claim in self._held

    def next_beat(self) -> float:
        """When the first beat is due, on Trio's clock; infinity if none is."""
        self._next_beat = min((job.beat_due for job in self._held.values()), default=math.inf)
        return self._next_beat

    # Waiting

    async def next_freed(self) -> None:
        """Waits until a job has ended."""
        await self.freed.wait()

    async def until_none_runs(self) -> None:
        """Waits until no job runs or is due."""
        while self.running:
            await self.freed.wait()

    def be_crowded(self, crowded: bool) -> None:
        """Sets `crowded`."""
        if self.crowded and not crowded:
            self.freed.give()
        self.crowded = crowded

    # The moves

    def add(self, jobs: Collection[RunningJob], *, beside: bool = False) -> None:
        """Adds claimed jobs: they are due, and from now on their leases are renewed. `beside`: they begin at once, before all
        other due jobs, whether or not a slot is free."""
        held, soonest = self._held, self._next_beat
        for job in jobs:
            held[job.claim] = job
            if job.beat_due < soonest:
                soonest = job.beat_due
        if beside:
            self.slots.beside = max(0, self.in_slots + len(jobs) - self.slots.count)
            self.due.extendleft(reversed([*jobs]))
        else:
            self.due.extend(jobs)
        self.running += len(jobs)
        if soonest < self._next_beat:
            self._next_beat = soonest
            self.beats.give()
        if self.expected.ids:
            self.expected.arrive([job.claim.id for job in jobs])

    def begin(self, job: RunningJob) -> None:
        """The job's handler begins."""
        try:
            job.state = _BEGIN[job.state]
        except KeyError:
            raise _illegal("begin", job) from None

    def end(self, job: RunningJob) -> bool:
        """The job's handler has returned. Returns whether `job.outcome` is to be reported."""
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
            if outcome.kind == "released" and job.cancel_reason == "shutdown":
                self.tally.released += 1
            reported = True
        self.running -= 1
        if self.slots.beside:
            self.slots.beside -= 1
        self.freed.give()
        if not self.running:
            self._follower.last_job_ended()
        return reported

    def _leave(self, job: RunningJob) -> None:
        self._move("leave", job)
        self._held.pop(job.claim, None)
        self._adrift.pop(job.claim, None)
        self.tally.count("completed" if job.state == COMMITTED else "lost")
        self._follower.ended([job.claim])

    def report(self, outcomes: Iterable[Outcome]) -> None:
        """These outcomes are settled. For a claim that was never added here, only the follower is told."""
        held, claims = self._held, [outcome.claim for outcome in outcomes]
        for claim in claims:
            job = held.pop(claim, None) or self._adrift.pop(claim, None)
            if job is not None:
                try:
                    job.state = _REPORT[job.state]
                except KeyError:
                    raise _illegal("report", job) from None
        self._follower.ended(claims)

    def refuse(self, outcomes: Sequence[Outcome]) -> None:
        """These outcomes were refused: the jobs were lost before."""
        self.report(outcomes)
        for outcome in outcomes:
            self.tally.refused(outcome.kind)

    def lose(self, job: RunningJob) -> None:
        """The fence is lost: beats for the job are over. The caller cancels its handler."""
        self._move("lose", job)
        self._set_adrift(job)

    def commit(self, job: RunningJob) -> None:
        """The job's own transaction has completed it."""
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

    def lend(self, job: RunningJob) -> None:
        """The running job does nothing but wait for cancelled jobs, which may have its slot meanwhile."""
        slots = self.slots
        if job not in slots.lenders:
            slots.lenders.add(job)
            slots.ahead = 0
            self.freed.give()

    def take_back(self, job: RunningJob) -> None:
        """The job goes on, if it has lent its slot. What was claimed for it begins all the same."""
        self.slots.lenders.discard(job)

    # All jobs together

    def hurry(self, job: RunningJob) -> None:
        """Makes the job's next beat due at once, because its lease may be lost."""
        job.beat_due = trio.current_time()
        self.beats.give()

    def cancel_all(self, reason: CancelReason) -> None:
        """Cancels every handler that runs or is about to."""
        for job in list(self):
            if job.state == COMMITTED or (job.outcome is None and job.state != LOST):
                job.cancel(reason)

    def shortest_lease(self, default: float) -> float:
        """Seconds of the shortest lease among the jobs whose leases are renewed; `default` if there are none."""
        return min((job.terms.lease for job in self._held.values()), default=default)

    def unended(self) -> Iterable[RunningJob]:
        """The jobs whose handler has not ended."""
        return [job for job in self if not job.ended]


def _illegal(move: str, job: RunningJob) -> IllegalMove:
    return IllegalMove(f"job {job.claim.id} (attempt {job.claim.attempt}) is {job.state}: it cannot {move}")
