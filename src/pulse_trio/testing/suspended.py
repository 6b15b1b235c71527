"""Durable handlers in tests: suspended as soon as they only wait, and named in the report if they still are at its end."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import anyio.to_thread
from psycopg.sql import SQL, Identifier

from ..worker import WorkerReport
from .kept import connected

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from psycopg import Connection

    from ..handlers import Handler, Handlers

_SUSPENDED = """
SELECT s.id, s.kind, f.events, cardinality(f.blocks) > 0, nullif(s.run_at, {0}.far())
FROM {0}.jobs s JOIN {0}.durable_job f ON f.job_id = s.id
WHERE s.state = 'suspended' ORDER BY s.id
"""


@dataclass(frozen=True, slots=True)
class DrainReport(WorkerReport):
    """What became of the jobs that were due: how many ended how."""

    suspended: dict[int, str] = field(default_factory=dict[int, str])
    """What each durable job waits for that is suspended now, as in "order waits for the event 'approved'"."""


def grows_trees(handlers: Handlers) -> bool:
    """Whether one of these handlers is durable."""
    return any(handler.durability is not None for handler in handlers)


def suspending_at_once(handlers: Handlers) -> Handlers:
    """The same handlers; but the durable ones are suspended as soon as they only wait, and not after seconds of real time."""
    if not grows_trees(handlers):
        return handlers
    others = copy(handlers)
    # Not registered again: that would look for a handler's resources again, in the signature that both share.
    others._by_kind = {  # pyright: ignore[reportPrivateUsage] -- a copy of our own; there is no public way to replace a handler
        handler.kind: at_once(handler) for handler in handlers
    }
    return others


def at_once(handler: Handler[..., Any]) -> Handler[..., Any]:
    """The same handler, suspended as soon as it only waits."""
    if handler.durability is None:
        return handler
    return replace(handler, durability=replace(handler.durability, suspend_after=0.0))


async def drained(dsn: str, handlers: Handlers, report: WorkerReport, settings: Mapping[str, Any]) -> DrainReport:
    """A worker's report, with what is suspended now."""
    suspended: dict[int, str] = {}
    if grows_trees(handlers):
        suspended = await anyio.to_thread.run_sync(_suspended_jobs_of, dsn, settings.get("schema", "pulse"))
    return DrainReport(report.ended, report.released, suspended, unwritten=report.unwritten)


def _suspended_jobs_of(dsn: str, schema: str) -> dict[int, str]:
    with connected(dsn) as connection:
        return suspended_jobs(connection, schema)


def suspended_jobs(connection: Connection[Any], schema: str) -> dict[int, str]:
    """The suspended jobs of a database, and what each waits for."""
    rows = connection.execute(SQL(_SUSPENDED).format(Identifier(schema))).fetchall()
    return {job_id: f"{kind} waits for {_waits(*waits)}" for job_id, kind, *waits in rows}


def _waits(events: list[str], for_children: bool, until: datetime | None) -> str:
    waits = [f"the event {name!r}" for name in events]
    if for_children:
        waits.append("its children")
    if until is not None:
        waits.append(until.isoformat())
    return " or ".join(waits) or "the end of its children"
