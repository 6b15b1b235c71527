"""The events of one job in order: enqueued, attempts, requests to cancel it, lines of a durable history, its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ..lines import Kind
from ..plain import UNREADABLE, json_value
from ..records import FAR, SESSION
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


@dataclass(frozen=True, slots=True)
class Entry:
    """One event of a job: at a moment, or from `at` to `until` (None: still going on). `seconds` is its duration."""

    at: datetime
    event: str
    until: datetime | None = None
    attempt: int | None = None
    outcome: str | None = None
    seconds: float | None = None
    worker: int | None = field(default=None, metadata=SESSION)
    host: str | None = None
    pid: int | None = None
    detail: str | None = None


_NO_FAILURES = frozenset({"suspended", "released", "snoozed", "cancelled", "completed"})
"""Outcomes of attempts that did not fail. What is noted of them, such as why, is no error of the job. The view `jobs` has the
same lists (migrations/0096_remarks_are_no_errors.sql)."""
_TO_MEND = ("UnfitArguments:", "HandlerStuck:", "released by force by ")
"""Beginnings of what is noted of such an attempt that a person may have to mend."""
_LINES = {
    Kind.STEP: "step",
    Kind.STEP_FAILED: "step failed",
    Kind.EVENT: "event",
    Kind.TIMED_OUT: "timed out",
    Kind.SLEPT: "slept",
    Kind.BLOCK: "children ended",
    Kind.BLOCK_FAILED: "children failed",
    Kind.SCOPE_CANCELLED: "deadline struck",
    Kind.CANCELLED: "clean-up begins",
}
"""What a line of a history says. A kind that is not here is no event of its own."""
_BODY = " body"
"""The end of the key of a block's body (worker/durable/unopened.py)."""


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
            entries.append(Entry(_delivered(asked.requested_at, asked.delivered_at, lines), "cancel delivered"))
    entries += [
        Entry(line.written_at, _what(kind, line), detail=_said(kind, line)) for line in lines for kind in _kinds(line)
    ]
    for sent in unreceived:
        by = f" (sent by {sent.sent_by}, not received)"
        entries.append(Entry(sent.sent_at, "event sent", detail=_with(sent.name, sent.payload) + by))
    entries.sort(key=lambda entry: entry.at)
    if job.finished_at is not None:
        took = (job.finished_at - job.created_at).total_seconds()
        entries.append(Entry(job.finished_at, str(job.state), detail=_end(job, len(attempts), took)))
    elif job.state is not State.RUNNING and (due := due_of(job)) is not None:
        entries.append(Entry(due, "due", detail=str(job.state)))
    return entries


def _delivered(asked: datetime, noted: datetime, lines: Sequence[HistoryLine]) -> datetime:
    """When a cancellation had reached the handler. The worker notes it a little later, and the handler's clean-up may have
    begun by then."""
    began = [one.written_at for one in lines if one.kind == Kind.CANCELLED and one.written_at >= asked]
    return min([noted, *began])


def _kinds(line: HistoryLine) -> list[Kind]:
    return [kind for kind in _LINES if kind == line.kind]


def _what(kind: Kind, line: HistoryLine) -> str:
    """What a line is. That of a scope says that its deadline struck only where its value is known, and that is so: the handler
    may have called `scope.cancel()`, and a child's failure cuts its block's body."""
    if kind is Kind.SCOPE_CANCELLED:
        if line.key.endswith(_BODY):
            return "body cut short"
        value = _decoded(line.value)
        if not isinstance(value, dict) or cast("dict[str, Any]", value).get("asked"):
            return "scope cut short"
    return _LINES[kind]


def _said(kind: Kind, line: HistoryLine) -> str | None:
    """What a line says, on one line."""
    match kind:
        case Kind.STEP | Kind.EVENT:
            return _with(line.name or "", line.value) or None
        case Kind.STEP_FAILED if (text := _decoded(line.value)) is not None:
            return _short(str(text))
        case Kind.BLOCK_FAILED if isinstance(value := _decoded(line.value), dict):
            failed: object = cast("dict[str, Any]", value).get("failed")
            failed = cast("list[object]", failed) if isinstance(failed, list) else []
            return f"job{'s' * (len(failed) > 1)} {', '.join(map(str, failed))}" if failed else "the body raised"
        case Kind.CANCELLED if isinstance(value := _decoded(line.value), dict):
            reason: object = cast("dict[str, Any]", value).get("reason")
            return None if reason is None else str(reason)
        case _:
            return line.name


def _with(name: str, value: str | None) -> str:
    return name if value is None or value == "null" else f"{name}: {_short(value)}"


def _short(text: str) -> str:
    text = " ".join(text[: 4 * SHORT].split())
    return text if len(text) <= SHORT else f"{text[:SHORT]}…"


def _decoded(value: str | None) -> object:
    """The value of a line; None if it was cut, cannot be read, or was not asked for."""
    decoded: Any = None if value is None else json_value(value)
    return None if isinstance(decoded, dict) and UNREADABLE in decoded else cast("object", decoded)


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


def last_error(job: JobRecord, attempts: Sequence[AttemptRecord]) -> tuple[str | None, int | None]:
    """The last error of a job, with its traceback, and the attempt that had it.

    Why an attempt that did not fail had ended is none: it stands in its line. But what a person may have to mend is one, as
    long as the job is not completed.
    """
    last = next((one for one in reversed(attempts) if one.error is not None and _is_failure(job, one)), None)
    if last is None:
        return job.error, None
    return job.error or last.error, last.attempt


def _is_failure(job: JobRecord, attempt: AttemptRecord) -> bool:
    if attempt.outcome not in _NO_FAILURES:
        return True
    return job.state is not State.COMPLETED and (attempt.error or "").startswith(_TO_MEND)


def due_of(job: JobRecord) -> datetime | None:
    """When a job is or was due; None for one that is suspended until what it waits for is there."""
    return None if job.run_at == FAR else job.run_at


def moment_of(job: JobRecord) -> datetime | None:
    """The most relevant time of a job in its state: when it ended, began, or is due."""
    if job.state is State.RUNNING and job.started_at is not None:
        return job.started_at
    return job.finished_at or due_of(job)
