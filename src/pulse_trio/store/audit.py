"""The audit trail: who did what to jobs, queues, kinds and schedules; and the name under which a client acts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import InvalidArguments
from ..plain import json_value
from ..states import storable
from .arrays import numbers
from .filtering import moment
from .operations import Query

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from .new_jobs import Enqueued
    from .operations import Operation, Row

T = TypeVar("T")

ACTS = frozenset(
    {
        "cancel_jobs", "cancel_jobs_now", "complete_jobs", "delete_jobs", "limit_queue", "note_enqueue", "note_event",
        "pause_kind", "pause_queue", "release_jobs", "resume_kind", "resume_queue", "retry_job",
        "retry_job_afresh", "schedule_pause", "schedule_put", "schedule_remove", "set_retention",
    }
)  # fmt: skip
"""The statements of which the database writes a line."""
ACTOR_LIMIT = 200
"""Characters of a name."""


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """A line of the trail, as `pulse.audit` shows it. `role` is the database's login, `actor` the name that the client gave;
    `jobs` counts the jobs that the act affected, `job_ids` are the first 1,000 of them."""

    id: int
    at: datetime
    role: str
    actor: str
    act: str
    target: str | None
    jobs: int
    job_ids: list[int] | None
    details: dict[str, Any] | None


def audit(
    *,
    act: str | None = None,
    job: int | None = None,
    role: str | None = None,
    actor: str | None = None,
    target: str | None = None,
    since: datetime | timedelta | None = None,
    limit: int = 50,
) -> Operation[list[AuditRecord]]:
    """Lines of the trail, newest first. `since` is a moment with its offset, or how long ago."""
    asked = {"act": act, "job": job, "role": role, "actor": actor, "target": target, "limit": limit}
    rows = yield Query("audit", asked | moment("since", since))
    return [_record(row) for row in rows]


def _record(row: Row) -> AuditRecord:
    *fields, details = row
    return AuditRecord(*fields, details=None if details is None else json_value(details))


def check_actor(actor: object) -> str | None:
    """Returns the name as it is stored, None for an empty one. Raises `InvalidArguments`."""
    if actor is None or actor == "":
        return None
    if not isinstance(actor, str) or len(actor) > ACTOR_LIMIT or storable(actor) != actor:
        raise InvalidArguments(f"An actor is text of at most {ACTOR_LIMIT} characters, without NUL; got {actor!r:.80}.")
    return actor


def acting(operation: Operation[T], actor: str | None) -> Operation[T]:
    """Runs the operation with its acts under this name."""
    try:
        query = next(operation)
        while True:
            rows = yield query._replace(actor=actor) if query.name in ACTS else query
            query = operation.send(rows)
    except StopIteration as stop:
        return stop.value


def by_hand(operation: Operation[Enqueued], target: str) -> Operation[Enqueued]:
    """Runs an enqueue and writes its line in the trail, in one transaction."""
    done = yield from operation
    if done.added:
        yield Query("note_enqueue", {"ids": numbers([done.id]), "target": target})
    return done


def sent_by_hand(operation: Operation[bool], job_id: int, name: str, event_key: str | None) -> Operation[bool]:
    """Runs the sending of an event and, if it is new, writes its line in the trail, in one transaction."""
    sent = yield from operation
    if sent:
        yield Query("note_event", {"job_id": job_id, "name": name, "event_key": event_key})
    return sent
