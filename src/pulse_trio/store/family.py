"""What people read of trees of jobs: who started whom, what a job has done, and what does not go on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..errors import UnknownJob
from ..records import State
from .arrays import numbers
from .operations import Query, check_id, missing
from .operations import unfinished_clean_ups as unfinished_clean_ups

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from .operations import Operation

MOST = 10_000
"""How many members of a tree are listed."""
MOST_STUCK = 100_000
"""How many jobs that hold up their trees are read: less than a second's work for PostgreSQL. Of one tree as many as let the
trees that are named have their share."""
_STATES = frozenset(map(str, State))
PATIENCE = 10.0
"""Seconds that looking for them may take."""


@dataclass(frozen=True, slots=True)
class TreeJob:
    """A job of a tree: what started it and where it stands.

    `state` is a `State`, or `gone` for a member whose row was deleted; then most other fields are None. `ends_as` is
    the state in which a suspended job ends as soon as its descendants have. A suspended job that waits for a moment has
    `waits_until`; for events, their names in `events`. `children` counts those that it started.
    """

    id: int
    parent_id: int | None
    root_id: int
    block: int | None
    child_key: str | None
    queue: str | None
    kind: str | None
    state: State | str
    attempt: int | None
    created_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    error: str | None
    cancel_reason: str | None
    ends_as: str | None
    waits_until: datetime | None
    events: list[str] | None
    children: int


@dataclass(frozen=True, slots=True)
class HistoryLine:
    """One line of a job's history: what the job did (a step, an event, a sleep, a block). `value` is JSON text, perhaps cut;
    None where it was not asked for."""

    line: int
    kind: int
    key: str
    name: str | None
    attempt: int
    written_at: datetime
    value: str | None = None


@dataclass(frozen=True, slots=True)
class SentEvent:
    """An event that a job was sent and has not received. `payload` is JSON text, perhaps cut."""

    id: int
    name: str
    event_key: str | None
    sent_at: datetime
    sent_by: str | None
    payload: str | None


@dataclass(frozen=True, slots=True)
class StuckJobs:
    """Jobs of one tree that wait for the same: how many, and the first of them.

    `why` is `paused queue` or `unserved queue` (of `queue`), `paused kind` (of `kind`), or `unwatched`: nothing would tell them
    that they may go on.
    """

    why: str
    queue: str | None
    kind: str | None
    jobs: int
    first: int


@dataclass(frozen=True, slots=True)
class StuckTree:
    """A tree that does not go on by itself: what most of its jobs wait for, and how many `others` they wait for.

    `at_least`: not all of its jobs that wait were read, so there may be more of them, and more reasons. `settled`: its root is,
    and a person has retried members that owe their clean-up.
    """

    root_id: int
    waits: list[StuckJobs]
    others: int = 0
    at_least: bool = False
    settled: bool = False


@dataclass(frozen=True, slots=True)
class StuckTrees:
    """The oldest trees that do not go on by themselves, and how many there are in all. `at_least`: not all trees were
    looked at, so there may be more that wait."""

    first: list[StuckTree] = field(default_factory=list[StuckTree])
    trees: int = 0
    at_least: bool = False


def tree(job_id: int, *, limit: int = MOST) -> Operation[list[TreeJob]]:
    """The tree that a job belongs to: the root, then its members by id, at most `limit`. Raises `UnknownJob`."""
    rows = yield Query("tree", {"id": check_id(job_id), "limit": limit})
    if not rows:
        raise UnknownJob(missing(job_id))
    return [
        replace(
            job,
            state=State(job.state) if job.state in _STATES else job.state,
            # Only the owner of the schema can have written one without a name.
            events=None if job.events is None else [name for name in job.events if name],
        )
        for job in (TreeJob(*row) for row in rows)
    ]


def lines(job_id: int, *, limit: int = MOST) -> Operation[list[HistoryLine]]:
    """The history of a job, in order, without values."""
    rows = yield Query("lines_of", {"id": check_id(job_id), "limit": limit})
    return [HistoryLine(*row) for row in rows]


def history(job_id: int, *, longest: int | None, limit: int = MOST) -> Operation[list[HistoryLine]]:
    """The same with values, each cut after `longest` characters (None: whole)."""
    rows = yield Query("history_of", {"id": check_id(job_id), "limit": limit, "longest": longest})
    return [HistoryLine(*row) for row in rows]


def unreceived(job_id: int, *, longest: int | None, limit: int = MOST) -> Operation[list[SentEvent]]:
    """The events that a job was sent and has not received, the first that was sent first."""
    rows = yield Query("unreceived_of", {"id": check_id(job_id), "limit": limit, "longest": longest})
    return [SentEvent(*row) for row in rows]


def compensated(job_ids: Sequence[int]) -> Operation[list[int]]:
    """Those of these jobs that have undone what they did, so that a retry begins them anew."""
    rows = yield Query("compensated", {"ids": numbers(job_ids)})
    return [row[0] for row in rows]


def owing_members(root_ids: Sequence[int]) -> Operation[list[int]]:
    """The members of these roots, which are settled, that were cancelled and have not undone all that they did. A retry of the
    root leaves that to theirs, unless it starts them again."""
    rows = yield Query("owing_members", {"ids": numbers(root_ids)})
    return [row[0] for row in rows]


def stuck(*, trees: int = 20, most: int = MOST_STUCK) -> Operation[StuckTrees]:
    """Trees that do not go on by themselves: the first `trees` of them.

    At most `most` jobs that wait are read, and of each tree an equal share of that: these trees are found however many jobs of
    each wait.
    """
    rows = yield Query("stuck_trees", {"trees": trees, "most": most, "each": max(1, most // trees)}, PATIENCE)
    found: dict[int, StuckTree] = {}
    for root_id, why, queue, kind, jobs, first, others, cut, _, _, settled in rows:
        tree = found.setdefault(root_id, StuckTree(root_id, [], others, cut, settled))
        tree.waits.append(StuckJobs(why, queue, kind, jobs, first))
    return StuckTrees(list(found.values()), rows[0][8], rows[0][9]) if rows else StuckTrees()
