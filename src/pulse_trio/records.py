"""A job as `pulse.jobs` shows it. Errors carry it, so it is below them in the layers, and imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

FAR: Final = datetime(9999, 12, 30, tzinfo=UTC)
"""When a suspended job is due that waits for no moment: `far()` in the database. Nobody is told of that day."""

DUE: Mapping[str, datetime] = {"never": FAR}
"""A field that is null in JSON where it has this value."""

SESSION: Mapping[str, bool] = {"session": True}
"""A field that holds a worker's session: 63 bits, more than many JSON readers keep of a number (JavaScript and jq keep 53)."""

PAYLOAD: Mapping[str, bool] = {"payload": True}
"""A field that only those see who may read payloads."""


class State(StrEnum):
    """The states that `pulse.jobs.state` shows."""

    SCHEDULED = "scheduled"
    AVAILABLE = "available"
    RUNNING = "running"
    RETRYABLE = "retryable"
    SUSPENDED = "suspended"
    COMPLETED = "completed"
    DEAD = "dead"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as `pulse.jobs` shows it."""

    id: int
    queue: str
    kind: str
    state: State
    priority: int
    attempt: int
    max_attempts: int
    run_at: datetime = field(metadata=DUE)
    """When it is or was due. The year 9999 (null in JSON) for a job that is suspended and waits for no moment."""
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    worker: int | None = field(metadata=SESSION)
    lease_until: datetime | None
    args: dict[str, Any]
    result: Any
    error: str | None
    cancel_reason: str | None
    unique_key: str | None
    progress: float | None
    progress_message: str | None
    key: str | None = None
    """The key by which limits and turns count (a tenant); None also if the role may not see it (a waiter)."""
    parent_id: int | None = None
    """The job that started it, in a durable nursery."""
    root_id: int | None = None
    """The job at the top of its tree; its own id for a root, None for a job without a tree."""
    child_key: str | None = None
    """What names it among its siblings."""
    tags: list[str] | None = None
    """The tags it was enqueued with; None for none."""
    meta: dict[str, Any] | None = field(default=None, metadata=PAYLOAD)
    """The metadata it was enqueued with; None for none."""
