"""What happens in one simulated run: the jobs, what their handlers do, and every fault, all drawn from a seed beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from pulse_trio.timing import CatchUp

LEASE, HEARTBEAT, WATCHDOG, POLL, CLEANUP = 6.0, 2.0, 1.0, 1.0, 0.5
"""Seconds. The margin is `CLEANUP` + 1; a silent connection is given up after `LEASE` / 6, as in the real store."""
PATIENCE = LEASE / 6
TIMEOUT = 1.5
"""Seconds for which a job with a timeout may run."""
CALLS = 120
"""Calls of one store in which faults are drawn; later ones are answered."""

What = Literal["refused", "lost", "slow", "slow answer", "late", "twice"]


class Fault(NamedTuple):
    """What becomes of one call of a store. `seconds`: how much later.

    *refused*: not done, and an error. *lost*: done, and an error. *slow*, *slow answer*: delayed before or after it is done.
    *late*: an error, and done after it. *twice*: done and answered, and done again later by the network.
    """

    what: What
    seconds: float = 0.0


class Act(NamedTuple):
    """What a handler does in one attempt; `seconds` of work, or until it is due again."""

    what: str
    seconds: float = 0.0


class JobPlan(NamedTuple):
    """One job. The last act is that of all later attempts."""

    at: float
    queue: str
    priority: int
    delay: float
    max_attempts: int
    timeout: bool
    acts: tuple[Act, ...]
    key: str | None = None


class Incident(NamedTuple):
    """Something that strikes at a time. `of` is a worker's or a job's number."""

    at: float
    what: str
    of: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Everything that a run depends on, beside the code."""

    seed: int
    concurrency: tuple[int, ...]
    """Of each worker."""
    jobs: tuple[JobPlan, ...]
    faults: tuple[dict[int, Fault], ...]
    """Of each worker's store, by the number of the call."""
    incidents: tuple[Incident, ...]
    grace: float = 1.0
    """Seconds for which a worker that was told to stop lets its jobs go on."""
    queues: tuple[tuple[str, ...] | None, ...] = (None, None)
    """What each worker claims from. The first takes everything."""
    limit: int = 1
    """Jobs of the queue "limited" that may run at once; of each key of the queue "keyed" one may."""
    every: float | None = None
    """Seconds between the occurrences of a schedule, if there is one."""
    catch_up: CatchUp = "all"
    batch: tuple[int, ...] = ()
    """Jobs that are waited for together, by number."""

    def __str__(self) -> str:
        lines = [f"seed {self.seed}; workers with room for {self.concurrency} on {self.queues}, grace {self.grace:g} s"]
        lines += [
            f"  a limit of {self.limit}; a schedule every {self.every} s, {self.catch_up}; a batch of {self.batch}"
        ]
        lines += [f"  job {n}: {job}" for n, job in enumerate(self.jobs)]
        lines += [
            f"  worker {n}, call {call}: {fault}" for n, some in enumerate(self.faults) for call, fault in some.items()
        ]
        return "\n".join(lines + [f"  {incident}" for incident in self.incidents])


ACTS = ("return", "return", "work", "work", "raise", "snooze", "retry after", "discard", "children", "failing child",
        "clean up", "long", "transaction", "transaction", "very long", "block")  # fmt: skip


INCIDENTS = ("crash", "cut off", "outage", "stop", "stop now", "cancel", "cancel", "cancel unheard", "deaf", "lock", "rescue",
             "freeze", "freeze", "retry", "retry", "pause")  # fmt: skip
OF_A_JOB = ("cancel", "cancel unheard", "lock", "retry")


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    r = Random(seed)
    workers = r.choice((1, 2, 2))
    density = r.choice((0.0, 0.03, 0.1, 0.3))
    jobs = tuple(_draw_job(r) for _ in range(r.randint(3, 6)))
    incidents = tuple(sorted(_draw_incident(r, workers, len(jobs)) for _ in range(r.choice((0, 1, 1, 2, 3)))))
    return Plan(
        seed,
        tuple(r.choice((1, 2, 4)) for _ in range(workers)),
        jobs,
        tuple({n: _draw_fault(r) for n in range(CALLS) if r.random() < density} for _ in range(workers)),
        incidents,
        grace=r.choice((0.0, 1.0, 1.0, 4.0)),
        queues=(None, r.choice((None, None, ("other", "limited"), ("default", "keyed", "other"))))[:workers],
        limit=r.choice((1, 1, 2)),
        every=r.choice((None, None, None, 2.0, 5.0)),
        catch_up=r.choice(("all", "last")),
        batch=tuple(n for n in range(len(jobs)) if r.random() < 0.6) if r.random() < 0.4 else (),
    )


def _draw_job(r: Random) -> JobPlan:
    acts = [Act(r.choice(ACTS), r.choice((0.0, 0.5, 1.0, 2.0))) for _ in range(r.choice((0, 1, 1, 2)))]
    queue = r.choice(("default", "default", "default", "other", "limited", "keyed"))
    return JobPlan(
        at=r.choice((0.0, 0.0, 0.0, 1.5)),
        queue=queue,
        priority=r.choice((0, 0, 1)),
        delay=r.choice((0.0, 0.0, 2.0)),
        max_attempts=r.choice((1, 2, 5, 20)),
        timeout=r.random() < 0.3,
        acts=(*acts, Act("work", r.choice((0.0, 0.0, 1.0)))),
        key=r.choice("ab") if queue == "keyed" else None,
    )


def _draw_fault(r: Random) -> Fault:
    what: What = r.choice(("refused", "lost", "lost", "slow", "slow answer", "late", "twice"))
    seconds = r.uniform(0.0, PATIENCE) if what in ("slow", "slow answer") else r.choice((0.1, 1.0, LEASE, 2 * LEASE))
    return Fault(what, round(seconds, 3))


def _draw_incident(r: Random, workers: int, jobs: int) -> Incident:
    what = r.choice(INCIDENTS)
    of = r.randrange(jobs if what in OF_A_JOB else workers)
    return Incident(round(r.uniform(0.0, 6.0), 3), what, of, r.choice((0.5, 2.0, LEASE, 1.5 * LEASE)))
