"""Lists of many jobs with filters, and retries and deletions of many.

A filter selects jobs once: the action then goes to their ids, batch by batch, whichever jobs begin to match meanwhile. So a job
that dies again during a mass retry is not retried for ever, and a deletion deletes the jobs that were counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from ..codec import coded_result
from ..errors import InvalidArguments, InvalidTransition, UnknownJob, UsageError
from ..handlers import check_queue, encode_result
from ..states import State, storable
from ..text import duration
from .arrays import numbers, texts
from .filtering import parameters_of
from .operations import Query, below, missing, places_of, record_of, retry_statement, unfinished_clean_ups, unmoved
from .places import starts_again, undeleted, undeleted_in, unretried

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..codec import Codec
    from ..records import JobRecord
    from .filtering import JobFilter
    from .operations import Operation, Row

BATCH = 500
"""Jobs in one statement of a mass retry or deletion: its locks are short, and other transactions come in between."""
PAGE = 4 * 1024 * 1024
"""Bytes of arguments and results in one answer, unless it is a single job."""
PATIENCE = 10.0
"""Seconds that a list may take. A condition that no index supports is checked job by job."""
_AGES = timedelta(days=36525)


@dataclass(frozen=True, slots=True)
class Retried:
    """The result of a retry of many jobs: the ids in order, and for refused ones the reason. `left_to_parents`: jobs of trees
    that were not put back themselves, because a retried job above them starts its failed children again."""

    retried: list[int] = field(default_factory=list[int])
    refused: dict[int, str] = field(default_factory=dict[int, str])
    left_to_parents: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class Deleted:
    """The result of a deletion: the ids, and for refused ones the reason."""

    deleted: list[int] = field(default_factory=list[int])
    refused: dict[int, str] = field(default_factory=dict[int, str])


@dataclass(frozen=True, slots=True)
class Forced:
    """The result of an operator's release or completion of running jobs: by id the state that each job has now, and for refused
    ones the reason."""

    moved: dict[int, State] = field(default_factory=dict[int, State])
    refused: dict[int, str] = field(default_factory=dict[int, str])


# Lists


def jobs(
    chosen: JobFilter, *, limit: int, before: int | None = None, timeout: float | None = PATIENCE
) -> Operation[list[JobRecord]]:
    """Lists jobs, newest first; for the next page pass the last id of this one as `before`. `timeout` in seconds.

    Raises `TookTooLong`, `UsageError` for an unknown worker.
    """
    pages = yield from pages_of(chosen, limit=limit, before=before, timeout=timeout)
    found: list[JobRecord] = []
    while pages:
        found += yield from page(pages.take(), timeout=timeout)
    return found


class Pages:
    """Jobs by (id, bytes), handed out in pages as large as one answer may be."""

    def __init__(self, found: Sequence[tuple[int, int]]) -> None:
        self._found = found
        self._next = 0

    def __bool__(self) -> bool:
        return self._next < len(self._found)

    def __len__(self) -> int:
        return len(self._found)

    @property
    def last(self) -> int:
        """The last id."""
        return self._found[-1][0]

    def take(self) -> list[int]:
        """Returns the next ids: at least one, and no more than have `PAGE` bytes."""
        begin, size = self._next, 0
        for _, each in self._found[begin : begin + BATCH]:
            size += each
            if size > PAGE and self._next > begin:
                break
            self._next += 1
        return [job_id for job_id, _ in self._found[begin : self._next]]


def pages_of(
    chosen: JobFilter, *, limit: int, before: int | None = None, timeout: float | None = PATIENCE
) -> Operation[Pages]:
    """The matching jobs, newest first, to be read page by page."""
    rows = yield from _matching(chosen, limit=limit, before=before, timeout=timeout, sizes=True)
    return Pages([(row[0], row[1]) for row in rows])


def page(ids: Sequence[int], *, timeout: float | None = PATIENCE) -> Operation[list[JobRecord]]:
    """Jobs by their ids, newest first."""
    rows = yield Query("jobs", {"ids": numbers(ids)}, timeout)
    return [record_of(row) for row in rows]


def matching(
    chosen: JobFilter, *, limit: int | None = None, before: int | None = None, timeout: float | None = PATIENCE
) -> Operation[list[int]]:
    """The ids of the matching jobs, newest first."""
    rows = yield from _matching(chosen, limit=limit, before=before, timeout=timeout, sizes=False)
    return [row[0] for row in rows]


def _matching(
    chosen: JobFilter, *, limit: int | None, before: int | None, timeout: float | None, sizes: bool
) -> Operation[Sequence[Row]]:
    _check_limit(limit)
    parameters = (yield from parameters_of(chosen)) | {"before": before or 2**63 - 1, "limit": limit, "sizes": sizes}
    return (yield Query("matching_jobs", parameters, timeout))


def _check_limit(limit: object) -> None:
    if limit is not None and (type(limit) is not int or not 0 <= limit < 2**63):
        # -1 would be all but one.
        raise InvalidArguments(f"A limit is a number of jobs, from 0 on, or None for all of them; got {limit!r:.200}.")


# Retention


def set_retention(queue: str, retention: timedelta | None) -> Operation[None]:
    """Sets how long finished jobs of a queue are kept; None: as the workers' settings say. Raises `InvalidName`,
    `InvalidArguments`, and `UsageError` where the caller's role may not shorten it."""
    check_queue(queue)
    if retention is not None and not timedelta(0) < retention <= _AGES:
        raise InvalidArguments(f"A retention is above 0 and at most a hundred years, got {retention}.")
    rows = yield Query("set_retention", {"queue": queue, "retention": retention})
    # The trigger has set another where a colleague changed it meanwhile.
    if not rows[0][1] or rows[0][0] != retention:
        kept = duration(rows[0][0].total_seconds())
        raise UsageError(
            f"The finished jobs of queue {queue!r} are kept for {kept}: a worker's role may only lengthen "
            "that. An operator's role, or the schema's owner, may shorten it."
        )


def retentions() -> Operation[dict[str, timedelta]]:
    """The queues that have a retention of their own."""
    rows = yield Query("retentions", {})
    return {row[0]: row[1] for row in rows}


# Retries, deletions, releases and completions


def chosen_for_action(
    chosen: JobFilter, *, limit: int | None = None, timeout: float | None = None
) -> Operation[list[int]]:
    """The ids that a retry or deletion by filter acts on: the oldest first, at most `limit`.

    Raises `UsageError` for a filter without a state: the caller rarely means every job of a kind, completed ones included.
    Raises `InvalidArguments` for a limit that is no number of jobs.
    """
    _check_limit(limit)
    if chosen.get("state") is None:
        raise UsageError("Say which state of jobs is meant, as in state='dead'.")
    ids = yield from matching(chosen, timeout=timeout)
    return ids[::-1][:limit]


def retry_batch(
    ids: Sequence[int],
    *,
    delay: float = 0.0,
    spacing: float = 0.0,
    chosen: JobFilter | None = None,
    afresh: bool = False,
    before: Sequence[int] = (),
) -> Operation[Retried]:
    """Retries these jobs in one statement: the first is due after `delay` seconds, each next one `spacing` after the last.

    `chosen` is the filter that found them, for the audit trail: jobs that have left its state are left alone. With `afresh`
    durable jobs forget first what they have done. `before`: the jobs that earlier batches of the same act have retried."""
    done = Retried()
    named = retry_statement(afresh=afresh)
    if chosen is not None and chosen.get("owes_clean_up"):
        # One that a colleague has retried may have done the rest by now: it would begin anew.
        owe = set((yield from unfinished_clean_ups(ids)))
        done.refused.update({job_id: f"Job {job_id} owes no clean-up any more." for job_id in ids if job_id not in owe})
        ids = [job_id for job_id in ids if job_id in owe]
    known = _state_of(chosen)
    asked = {"ids": numbers(ids), "delay": delay, "spacing": spacing, "filter": _said(chosen), "state": known}
    rows = yield Query(named, asked)
    done.refused.update(_moved_on(ids, rows, known))
    left = [row[0] for row in rows if not row[1] and row[2] is None and row[3] is not None]
    places = (yield from places_of(left)) if left else {}
    owing = (yield from unfinished_clean_ups(list(places))) if places else []
    done.retried.extend(row[0] for row in rows if row[1])
    failed = (row[0] for row in rows if row[0] in places and starts_again(row[3], afresh=afresh, owes=row[0] in owing))
    left_to_parents = yield from below(failed, {*before, *done.retried})
    for job_id, moved, blocked_by, state, *_ in rows:
        why = unretried(places[job_id], state, owes=job_id in owing) if job_id in places else None
        if moved:
            continue
        if job_id in left_to_parents:
            done.left_to_parents.append(job_id)
        elif why is not None:
            done.refused[job_id] = why
        elif state is None:
            done.refused[job_id] = missing(job_id)
        else:
            done.refused[job_id] = unmoved(job_id, State(state), blocked_by, afresh=afresh)
    return done


def retry_many(chosen: JobFilter, *, limit: int | None = None, rate: float | None = None) -> Operation[Retried]:
    """Retries the matching jobs, oldest first, at most `limit`. With `rate` that many come due a second, from now on."""
    spacing = spacing_of(rate)
    ids = yield from chosen_for_action(chosen, limit=limit)
    done = Retried()
    for start in range(0, len(ids), BATCH):
        asked, before = ids[start : start + BATCH], done.retried
        part = yield from retry_batch(asked, delay=start * spacing, spacing=spacing, chosen=chosen, before=before)
        done.retried.extend(part.retried)
        done.refused.update(part.refused)
        done.left_to_parents.extend(part.left_to_parents)
    return done


def _state_of(chosen: JobFilter | None) -> str | None:
    """The state in which jobs that a filter has found are to be still, as the act is done. A running one says for itself why
    nothing is done to it."""
    state = (chosen or {}).get("state")
    return None if state is None or state == State.RUNNING else str(State(state))


def _moved_on(ids: Sequence[int], rows: Sequence[Row], state: str | None) -> dict[int, str]:
    """Why nothing was done to the others of these jobs, which have left the `state` of the filter, or are locked."""
    if state is None:
        return {}
    done = {row[0] for row in rows}
    return {
        job_id: f"Job {job_id} is not {state} any more, or somebody acts on it at this moment: look again."
        for job_id in ids
        if job_id not in done
    }


def _said(chosen: JobFilter | None) -> str | None:
    if not chosen:
        return None
    return storable(", ".join(f"{name} {value}" for name, value in chosen.items() if value is not None))


def spacing_of(rate: float | None) -> float:
    """Seconds between two jobs at `rate` jobs a second. Raises `InvalidArguments`."""
    if rate is None:
        return 0.0
    if not 1e-6 <= rate < float("inf"):
        raise InvalidArguments(f"A rate is a number of jobs a second above 0, got {rate!r}.")
    return 1 / rate


def delete(job_id: int) -> Operation[None]:
    """Deletes one job that is not running, with its attempts. Raises `UnknownJob` or `InvalidTransition`."""
    done = yield from delete_batch([job_id])
    if (reason := done.refused.get(job_id)) is not None:
        raise (UnknownJob if reason == missing(job_id) else InvalidTransition)(reason)


def delete_batch(ids: Sequence[int], *, chosen: JobFilter | None = None) -> Operation[Deleted]:
    """Deletes these jobs in one statement, except those that run, or have left the state of the filter that found them."""
    done = Deleted()
    known = _state_of(chosen)
    rows = yield Query("delete_jobs", {"ids": numbers(ids), "filter": _said(chosen), "state": known})
    done.refused.update(_moved_on(ids, rows, known))
    left = [row[0] for row in rows if not row[1] and row[2] is not None]
    places = (yield from places_of(left)) if left else {}
    for job_id, deleted, state in rows:
        why = undeleted(places[job_id]) if job_id in places else None
        if why is not None:
            done.refused[job_id] = why
        elif deleted:
            done.deleted.append(job_id)
        else:
            done.refused[job_id] = missing(job_id) if state is None else undeleted_in(job_id, State(state))
    return done


def delete_many(chosen: JobFilter, *, limit: int | None = None) -> Operation[Deleted]:
    """Deletes the matching jobs, oldest first, at most `limit`."""
    ids = yield from chosen_for_action(chosen, limit=limit)
    done = Deleted()
    for start in range(0, len(ids), BATCH):
        part = yield from delete_batch(ids[start : start + BATCH], chosen=chosen)
        done.deleted.extend(part.deleted)
        done.refused.update(part.refused)
    return done


def release(job_id: int, *, force: bool = False, by: str | None = None) -> Operation[State]:
    """Releases one running job. Raises `UnknownJob` or `InvalidTransition`."""
    done = yield from release_batch([job_id], force=force, by=by)
    return _only(job_id, done)


def release_batch(ids: Sequence[int], *, force: bool = False, by: str | None = None) -> Operation[Forced]:
    """Takes running jobs from their workers and puts them back, their attempt unused. Without `force` only from workers without
    a recent sign of life."""
    rows = yield Query("release_jobs", {"ids": numbers(ids), "force": force, "by": by})
    return _forced("released", rows)


def complete(
    job_id: int, result: object = None, codec: Codec | None = None, *, by: str | None = None
) -> Operation[State]:
    """Completes one running job. Raises `UnknownJob`, `InvalidTransition`, `InvalidArguments` for the result."""
    done = yield from complete_batch([job_id], result, codec, by=by)
    return _only(job_id, done)


def complete_batch(
    ids: Sequence[int], result: object = None, codec: Codec | None = None, *, by: str | None = None
) -> Operation[Forced]:
    """Takes running jobs from their workers and archives them as completed, all with this result."""
    results = [encode_result("", result)] * len(ids)
    if codec is not None and result is not None:
        found = yield Query("jobs", {"ids": numbers(ids)})
        kinds = {record.id: record.kind for record in map(record_of, found)}
        results = [
            bytes(coded_result(codec, kinds[job_id], job_id, result)).decode() if job_id in kinds else "null"
            for job_id in ids
        ]
    rows = yield Query("complete_jobs", {"ids": numbers(ids), "results": texts(results), "by": by})
    return _forced("completed", rows)


def _forced(past: str, rows: Sequence[Row]) -> Forced:
    done = Forced()
    for job_id, moved, state, obstacle in rows:
        if moved:
            done.moved[job_id] = State(state)
        elif state is None:
            done.refused[job_id] = missing(job_id)
        elif obstacle == "held":
            done.refused[job_id] = (
                f"Job {job_id} is held by a worker that shows signs of life: released now, it may run twice at the same time. "
                "Cancel it, or say force (--force)."
            )
        elif obstacle == "locked":
            done.refused[job_id] = (
                f"Job {job_id}: another transaction holds its row, most likely its handler's own (job.transaction()). "
                "End that one first: pg_locks and pg_blocking_pids say which it is."
            )
        else:
            done.refused[job_id] = f"Job {job_id} is {state}: only a running job can be {past} by force."
    return done


def _only(job_id: int, done: Forced) -> State:
    if (reason := done.refused.get(job_id)) is not None:
        raise (UnknownJob if reason == missing(job_id) else InvalidTransition)(reason)
    return done.moved[job_id]
