"""The list of jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...store import history

if TYPE_CHECKING:
    from ...records import JobRecord
    from ..database import Database

PAGE = 50


@dataclass(frozen=True)
class Jobs:
    """One page of jobs, newest first. `before`: the next page has the jobs before this id; None at the end."""

    jobs: list[JobRecord]
    before: int | None


async def read(database: Database, chosen: history.JobFilter, *, before: int | None) -> Jobs:
    """One page of the jobs that match."""
    found = await database.read(history.jobs(chosen, limit=PAGE + 1, before=before, timeout=None))
    return Jobs(found[:PAGE], found[PAGE - 1].id if len(found) > PAGE else None)
