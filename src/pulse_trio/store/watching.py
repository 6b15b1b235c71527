"""What an operator's page reads again and again: bounded, however many jobs there are.

The views count every live job; at millions of jobs that takes seconds. Here each count ends at a bound, and above it the
planner's statistics say about how many there are.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ..handlers import check_queue
from ..states import State
from .batches import BatchFailure, BatchStatus, status
from .figures import QueueFigure
from .operations import Query
from .queues import QueueRecord, queues

if TYPE_CHECKING:
    from .operations import Operation, Row

MOST = 200
"""Due jobs of a queue and priority that are counted, and later ones."""
LISTED, ALL = 10_000, 100_000
"""The same for a list that is made once, where few queues have jobs; and of all queues together."""
QUEUES = 1_000
"""Queues that are listed."""
WALKED = 256
"""Queues with jobs that one walk reads."""
ANY = 2**31 - 1
DEAD, ALL_DEAD = 10_000, 100_000
"""Jobs that did not complete, among which dead ones are counted; and those for a list that is made once."""
MINUTES = 60
PROBES = 120
"""Pages of the archive in one sample: about 20 jobs each."""
FEW_MEMBERS, MOST_MEMBERS = 1_000, 100_000


@dataclass(frozen=True, slots=True)
class Depth:
    """A queue with its live jobs, and what is set for it.

    `oldest` in seconds: for how long the first due job has been due. `longest`: for how long the oldest attempt has run.
    `more_due`, `more_later`: the count of the due jobs (with the running ones) or of the later ones has reached its bound, so
    there may be more. `capped`: one of the two; then `about` is about how many live jobs the queue has in all, by the
    planner's statistics. `more_dead`: the count of the dead jobs of all queues has reached its bound, so there may be more.
    """

    name: str
    available: int
    scheduled: int
    running: int
    oldest: float | None
    dead: int
    paused_at: datetime | None = None
    limit: int | None = None
    rate: str | None = None
    key_limit: int | None = None
    key_rate: str | None = None
    paused: bool = False
    capped: bool = False
    about: int | None = None
    suspended: int = 0
    longest: float | None = None
    more_due: bool = False
    more_later: bool = False
    more_dead: bool = False

    @property
    def record(self) -> QueueRecord:
        """The same as `pulse.queues` shows it."""
        return QueueRecord(
            self.name, self.paused, self.available, self.scheduled, self.running, self.oldest, self.limit, self.rate,
            self.key_limit, self.key_rate, self.longest, self.dead, self.suspended, self.capped, self.more_dead,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Depths:
    """All queues, by name. `cut_short`: there are more than are listed. `dead_capped`: more jobs died than were counted."""

    queues: list[Depth]
    quarantined: int
    cut_short: bool
    dead_capped: bool


def unknown(queue: str) -> Operation[str | None]:
    """What is said of a queue that is paused although no live or recently dead job, worker, pause or limit names it; None for
    a known one, and where so many queues have jobs that not all of them are read."""
    live = [row[0] for row in (yield Query("live_queues", {}))]
    known = {*live, *(row[0] for row in (yield Query("queue_settings", {"most": ANY})))}
    known |= (yield from _dead(DEAD))[0].keys()
    if queue in known or len(live) >= WALKED:
        return None
    near = difflib.get_close_matches(queue, known, n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"no job, worker or limit names a queue {queue}: the pause waits for its first job.{hint}"


def listed(most: int = LISTED) -> Operation[Depths]:
    """As `depths`, for a list that is made once: the fewer queues have jobs, the higher is the bound, but at most `most`. For a
    role that may only read the tables, every job is counted."""
    ((*_, may_bound),) = yield Query("doctor_may_ids", {})
    if not may_bound:
        return Depths([_whole(record) for record in (yield from queues())], 0, cut_short=False, dead_capped=False)
    found = yield Query("live_queues", {})
    return (yield from depths(min(most, max(MOST, ALL // max(1, len(found)))), most_dead=ALL_DEAD))


def _whole(found: QueueRecord) -> Depth:
    return Depth(
        found.name, found.available, found.scheduled, found.running, found.oldest_available_age, found.dead, None, found.limit,
        found.rate, found.key_limit, found.key_rate, found.paused, suspended=found.suspended, longest=found.oldest_running_age,
    )  # fmt: skip


def depths(most: int | None = None, *, most_dead: int | None = None) -> Operation[Depths]:
    """The live jobs of each queue, and what is set for it; at most so many due jobs of a queue and priority are counted, and as
    many later ones (None: `MOST`), and as many dead ones of all queues (`DEAD`)."""
    most = MOST if most is None else most
    rows = yield Query("metrics_queues", {"most": most})
    *counted, (_, quarantined, _, _, _, cut_short, *_) = rows
    figures = {row[0]: QueueFigure(*row) for row in counted}
    settings = {row[0]: row[1:] for row in (yield Query("queue_settings", {"most": QUEUES}))}
    dead, dead_capped = yield from _dead(DEAD if most_dead is None else most_dead)
    # Jobs that run are counted among the due ones, suspended ones among the later ones.
    due = {name for name, f in figures.items() if f.available + f.running >= most}
    later = {name for name, f in figures.items() if f.scheduled + f.suspended >= most}
    capped = due | later
    estimates = {row[0]: row[1] for row in (yield Query("queue_estimates", {}))} if capped else {}
    names = sorted(figures.keys() | settings.keys() | dead.keys())

    def depth(name: str) -> Depth:
        f = figures.get(name, QueueFigure(name, 0, 0, 0, 0.0, paused=False))
        paused_at, *limits = settings.get(name, (None,) * 5)
        counted = f.available + f.scheduled + f.running + f.suspended
        about = max(counted, estimates.get(name, 0)) if name in capped else None
        return Depth(
            name, f.available, f.scheduled, f.running, f.oldest if f.available else None, dead.get(name, 0), paused_at, *limits,
            paused=f.paused or paused_at is not None, capped=name in capped, about=about, suspended=f.suspended,
            longest=None if f.longest is None else max(0.0, f.longest), more_due=name in due, more_later=name in later,
            more_dead=dead_capped,
        )  # fmt: skip

    return Depths(
        [depth(name) for name in names[:QUEUES]],
        quarantined,
        bool(cut_short) or len(names) > QUEUES,
        dead_capped,
    )


def _dead(most: int) -> Operation[tuple[dict[str, int], bool]]:
    """How many jobs of each queue died within a day, and whether the count ended before all were counted."""
    counted = {row[0]: row[1] for row in (yield Query("recently_dead", {"most": most}))}
    read = counted.pop(None)
    return counted, read >= most


def settings_of(name: str) -> Operation[Depth]:
    """What is set for one queue; its jobs are not counted. Raises `InvalidName`."""
    check_queue(name)
    for found, paused_at, *limits in (yield Query("queue_settings", {"most": ANY})):
        if found == name:
            return Depth(name, 0, 0, 0, None, 0, paused_at, *limits, paused=paused_at is not None)
    return Depth(name, 0, 0, 0, None, 0)


@dataclass(frozen=True, slots=True)
class Minute:
    """About how many jobs finished in a minute, how many of them died, and of the sampled ones how long they waited and ran:
    the median and the 95th percentile, in seconds. `ago`: how many whole minutes ago it ended. `dead` is None where jobs
    finished and none is in the sample. `sampled` alone counts the sample. Cancelled jobs are in none of them."""

    ago: int
    jobs: float
    sampled: int
    dead: float | None
    wait: float | None
    wait_p95: float | None
    run: float | None
    run_p95: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """What finished within the last hour: an estimate from a sample, exact while little finished (`exact`). `since` in seconds:
    how far it looks back, from `at`. `total` is all of it as one minute is told; `minutes` from the oldest to this one."""

    since: float
    at: datetime
    total: Minute
    minutes: list[Minute] = field(default_factory=list[Minute])
    exact: bool = True


def figures(at: datetime | None = None) -> Operation[Figures]:
    """What finished within the last hour, or within the hour before `at`, when nothing has finished since."""
    rows = yield Query("recent_figures", {"minutes": MINUTES, "probes": PROBES, "at": at})
    pages = [(row[1], row[2] * row[3]) for row in rows if row[0] == 0]
    exact = all(row[3] <= 1 for row in rows if row[0] == 0)
    since, at = next((row[1], datetime.fromtimestamp(row[3], UTC)) for row in rows if row[0] == 2)
    told = {row[1]: row for row in rows if row[0] == 1}
    jobs = _by_minute(pages) if not exact else {int(m): float(row[2]) for m, row in told.items() if m is not None}

    def minute(ago: int, row: tuple[float | int | None, ...] | None, count: float) -> Minute:
        if row is None:
            return Minute(ago, count, 0, None if count else 0.0, None, None, None, None)
        _, _, sampled, wait, dead, wait_p95, run, run_p95 = row
        # As many of all as of the sample. Of all that is read they are counted, as the jobs are.
        share = 1.0 if exact else count / (sampled or 1)
        return Minute(ago, count, int(sampled or 0), (dead or 0) * share, wait, wait_p95, run, run_p95)

    oldest = min(MINUTES, int(since // 60) + 1) - 1
    minutes = [minute(ago, _row(told.get(float(ago))), jobs.get(ago, 0.0)) for ago in range(oldest, -1, -1)]
    total = minute(0, _row(told.get(None)), sum(count for _, count in pages) if not exact else sum(jobs.values()))
    return Figures(since, at, total, minutes, exact)


def _row(row: Row | None) -> tuple[float | int | None, ...] | None:
    return None if row is None else tuple(row)


def _by_minute(pages: list[tuple[float, float]]) -> dict[int, float]:
    """Jobs by minute: those of each page are spread evenly over the time until the next page begins."""
    jobs: dict[int, float] = {}
    for place, (begin, count) in enumerate(pages):
        end = min(begin, pages[place + 1][0] if place + 1 < len(pages) else 0.0)
        first, last = int(end // 60), int(begin // 60)
        for ago in range(first, last + 1):
            overlap = min(begin, (ago + 1) * 60.0) - max(end, ago * 60.0)
            share = overlap / (begin - end) if begin > end else 1.0
            jobs[ago] = jobs.get(ago, 0.0) + count * share
    return jobs


@dataclass(frozen=True, slots=True)
class Failing:
    """A kind of which attempts failed: how many, of how many that ended, in how many seconds until now."""

    queue: str
    kind: str
    failed: int
    ended: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Recent:
    """How attempts ended lately: the kinds of the last ten minutes, those with the most failures first, and how many attempts
    (at least) were rescued from workers that died, within a quarter of an hour."""

    failing: list[Failing]
    rescued: int


def recent(timeout: float | None = None) -> Operation[Recent]:
    """How attempts ended lately. Raises `TookTooLong` after `timeout` seconds."""
    *kinds, (_, _, rescued, _, _) = yield Query("doctor_recent", {}, timeout)
    return Recent([Failing(*row) for row in kinds], rescued)


def failing() -> Operation[list[Failing]]:
    """The kinds with failed attempts within the last ten minutes, the most first."""
    return [kind for kind in (yield from recent()).failing if kind.failed]


def batches(*, limit: int, before: int | None = None) -> Operation[list[BatchStatus]]:
    """Batches, newest first. Of large ones that have not finished only the size is known, at most `MOST_MEMBERS`: the other
    counts are None."""
    rows = yield Query(
        "batches",
        {"limit": limit, "before": before or 2**63 - 1, "few": FEW_MEMBERS, "most": MOST_MEMBERS},
    )
    return [BatchStatus(*row) for row in rows]


def batch(batch_id: int, *, most: int = 100) -> Operation[tuple[BatchStatus, list[BatchFailure]]]:
    """One batch, and at most so many of its jobs that did not complete. Raises `UnknownBatch`."""
    found = yield from status(batch_id)
    rows = yield Query("batch_failures", {"id": batch_id, "limit": most})
    return found, [BatchFailure(row[0], row[1], State(row[2]), row[3]) for row in rows]
