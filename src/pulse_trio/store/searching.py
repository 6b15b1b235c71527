"""Pages of jobs for a person who searches: each look is bounded, whatever the filter and however many jobs there are.

Theory. A filter that an index supports (an id's range, a state that few jobs have, a unique key, the live jobs of a queue or of
a key) finds its jobs by that index. For all others the newest jobs are walked in the order of their ids, at most `WINDOW` live
and `WINDOW` finished ones at a time; a page that they do not fill says how far the walk came, and the next page goes on there.
So no filter is refused for its breadth, none reads a table from end to end, and what was not looked at is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..states import FINISHED, State
from .arrays import numbers, texts
from .filtering import parameters_of
from .history import page
from .operations import Query

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..records import JobRecord
    from .filtering import JobFilter
    from .operations import Operation, Row

WINDOW = 10_000
"""Jobs of each table that one page looks at."""
SMALL = 2_000
"""A queue, a key or all that run are looked at whole where they have at most so many live jobs."""
PATIENCE = 2.0
"""Seconds that each statement may take."""
BYTES = 1024 * 1024
"""Bytes of arguments and results in one page, unless it is a single job."""
_TOP = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Found:
    """One page of jobs, newest first.

    `before` is what to pass for the next page; None at the end. `looked_to`: no more jobs matched among those that were looked
    at, down to this id, and older ones were not looked at; None for a page that is full, or the last.
    """

    jobs: list[JobRecord]
    before: int | None
    looked_to: int | None = None


def search(chosen: JobFilter, *, limit: int, before: int | None = None, window: int = WINDOW) -> Operation[Found]:
    """One page of the jobs that match, newest first. Raises `TookTooLong`, `UsageError` for an unknown worker or state."""
    parameters = yield from _parameters(chosen)
    state = parameters["state"]
    small = (yield from _few(chosen, state)) if parameters["live"] else None
    start = before if before is not None else _TOP
    parameters |= {"ids": None, "before": start, "limit": limit + 1, "window": window}
    rows = list(
        (yield Query("look_through_jobs", parameters | {"live": parameters["live"] and small is None}, PATIENCE))
    )
    if small:
        rows += yield Query("look_through_jobs", parameters | {"ids": numbers(small), "finished": False}, PATIENCE)
    matches, floor = _sorted(rows)
    matches = matches[: limit + 1]
    full = len(matches) > limit
    chosen_ids, cut = _fitting(matches[:limit])
    jobs = (yield from page(chosen_ids, timeout=PATIENCE)) if chosen_ids else []
    if full or cut:
        return Found(jobs, chosen_ids[-1])
    return Found(jobs, floor, floor)


def _parameters(chosen: JobFilter) -> Operation[dict[str, Any]]:
    parameters = yield from parameters_of(chosen)
    state, owes = parameters["state"], parameters["owes"]
    ends = state is not None and State(state) in FINISHED
    unique = chosen.get("unique_key")
    queue = chosen.get("queue")
    queues: Sequence[str] = [queue] if queue is not None else []
    if unique is not None and queue is None:
        queues = [row[0] for row in (yield Query("live_queues", {}, PATIENCE))]
    return parameters | {
        "live": not ends and not owes,
        "finished": state is None or ends,
        "failed": (ends and state != State.COMPLETED) or chosen.get("error") is not None or owes is not None,
        "queues": texts(queues),
    }


def _few(chosen: JobFilter, state: str | None) -> Operation[list[int] | None]:
    """The ids of the live jobs that an index finds, if they are few; None: walk."""
    if chosen.get("unique_key") is not None:
        return None
    running = state == State.RUNNING or chosen.get("worker") is not None
    if not running and chosen.get("queue") is None and chosen.get("key") is None:
        return None
    asked = {"running": running, "queue": chosen.get("queue"), "key": chosen.get("key"), "most": SMALL}
    rows = yield Query("live_ids", asked, PATIENCE)
    ids = [row[0] for row in rows]
    return None if len(ids) > SMALL or None in ids else ids


def _sorted(rows: Sequence[Row]) -> tuple[list[tuple[int, int]], int | None]:
    """The matches with their bytes, newest first, and the id down to which every job was looked at (None: all)."""
    floor = max((row[1] for row in rows if row[0] != 0), default=None)
    # A job that ended between the two halves' looks is in both.
    matches = {row[1]: row[2] for row in rows if row[0] == 0 and (floor is None or row[1] >= floor)}
    return sorted(matches.items(), reverse=True), floor


def _fitting(matches: Sequence[tuple[int, int]]) -> tuple[list[int], bool]:
    """As many of the first ids as one answer may hold, and whether some were left out."""
    ids, size = list[int](), 0
    for job_id, each in matches:
        size += each
        if size > BYTES and ids:
            return ids, True
        ids.append(job_id)
    return ids, False
