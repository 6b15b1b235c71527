"""The events of one job in order: enqueued, attempts, requests to cancel it, lines of a durable history, its end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ..lines import Kind
from ..states import State
from ..text import count_of, duration

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from ..records import JobRecord
    from .cancelling import CancellationRecord
    from .family import HistoryLine, SentEvent
    from .operations import AttemptRecord

SHORT = 100
"""Characters of a step's value, or of a payload, in a line of the timeline."""
NEVER = 9999
"""The year until which a job is suspended that waits for no moment."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One event of a job: at a moment, or from `at` to `until` (None: still going on). `seconds` is its duration."""

    at: datetime
    event: str
    until: datetime | None = None
    attempt: int | None = None
    outcome: str | None = None
    seconds: float | None = None
    worker: int | None = None
    host: str | None = None
    pid: int | None = None
    detail: str | None = None


_TO_MEND = ("UnfitArguments", "released by force")
_LINES = {
    Kind.STEP: "step",
    Kind.STEP_FAILED: "step failed",
    Kind.EVENT: "event",
    Kind.TIMED_OUT: "timed out",
    Kind.SLEPT: "slept",
    Kind.BLOCK: "children ended",
    Kind.BLOCK_FAILED: "children failed",
    Kind.SCOPE_CANCELLED: "deadline struck",
    Kind.CANCELLED: "cancelled",
}
"""What a line of a history says. A kind that is not here is no event of its own."""


def life_of(
    job: JobRecord,
    attempts: Sequence[AttemptRecord],
    cancellations: Sequence[CancellationRecord] = (),
    lines: Sequence[HistoryLine] = (),
    unreceived: Sequence[SentEvent] = (),
) -> list[Entry]:
    """The events of a job, in order."""
    entries = [Entry(job.created_at, "enqueued")]
    for attempt in attempts:
        at = attempt.started_at or attempt.ended_at
        if at is not None:
            entries.append(_attempt(attempt, at))
    for asked in cancellations:
        said = asked.reason or asked.cause
        why = f"by {asked.requested_by}" + (f": {said}" if said else "")
        entries.append(Entry(asked.requested_at, "cancel asked", detail=why))
        if asked.delivered_at is not None:
            entries.append(Entry(asked.delivered_at, "cancel delivered"))
    entries += [
        Entry(line.written_at, _LINES[kind], detail=_said(kind, line)) for line in lines for kind in _kinds(line)
    ]
    for sent in unreceived:
        by = f" (sent by {sent.sent_by}, not received)"
        entries.append(Entry(sent.sent_at, "event sent", detail=_with(sent.name, sent.payload) + by))
    entries.sort(key=lambda entry: entry.at)
    if job.finished_at is not None:
        took = (job.finished_at - job.created_at).total_seconds()
        entries.append(Entry(job.finished_at, str(job.state), detail=_end(job, len(attempts), took)))
    elif job.state is not State.RUNNING and not (job.state is State.SUSPENDED and job.run_at.year == NEVER):
        entries.append(Entry(job.run_at, "due", detail=str(job.state)))
    return entries


def _kinds(line: HistoryLine) -> list[Kind]:
    return [kind for kind in _LINES if kind == line.kind]


def _said(kind: Kind, line: HistoryLine) -> str | None:
    """What a line says, on one line."""
    match kind:
        case Kind.STEP | Kind.EVENT:
            return _with(line.name or "", line.value) or None
        case Kind.STEP_FAILED if (text := _decoded(line.value)) is not None:
            return _short(str(text))
        case Kind.BLOCK_FAILED if isinstance(value := _decoded(line.value), dict):
            failed: list[int] = cast("dict[str, Any]", value).get("failed", [])
            return f"job{'s' * (len(failed) > 1)} {', '.join(map(str, failed))}" if failed else "the body raised"
        case Kind.CANCELLED if isinstance(value := _decoded(line.value), dict):
            return cast("dict[str, Any]", value).get("reason")
        case _:
            return line.name


def _with(name: str, value: str | None) -> str:
    return name if value is None or value == "null" else f"{name}: {_short(value)}"


def _short(text: str) -> str:
    text = " ".join(text[: 4 * SHORT].split())
    return text if len(text) <= SHORT else f"{text[:SHORT]}…"


def _decoded(value: str | None) -> object:
    """The value of a line; None if it was cut, or not asked for."""
    try:
        return None if value is None else json.loads(value)
    except ValueError:
        return None


def _attempt(attempt: AttemptRecord, at: datetime) -> Entry:
    start, end = attempt.started_at, attempt.ended_at
    return Entry(
        at=at,
        event="attempt",
        until=end,
        attempt=attempt.attempt,
        outcome=attempt.outcome,
        seconds=(end - start).total_seconds() if start is not None and end is not None else None,
        worker=attempt.worker,
        host=attempt.host,
        pid=attempt.pid,
        detail=(attempt.error or "").partition("\n")[0] or None,
    )


def _end(job: JobRecord, attempts: int, took: float) -> str:
    text = f"after {count_of(attempts, 'attempt')}, {duration(took)} after it was enqueued"
    return f"{text}: {job.cancel_reason}" if job.cancel_reason else text


def last_failure(attempts: Sequence[AttemptRecord]) -> AttemptRecord | None:
    """The last attempt that has an error. Why a worker gave a job back is none, but for what a person may have to mend."""
    found = (
        a
        for a in reversed(attempts)
        if a.error is not None and (a.outcome != "released" or a.error.startswith(_TO_MEND))
    )
    return next(found, None)


def moment_of(job: JobRecord) -> datetime:
    """The most relevant time of a job in its state: when it ended, began, or is due."""
    if job.state is State.RUNNING and job.started_at is not None:
        return job.started_at
    return job.finished_at or job.run_at
