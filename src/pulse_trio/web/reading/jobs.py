"""The list of jobs: what a person filters by, and one bounded page of what matches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import TookTooLong, UsageError
from ...states import State
from ...store import history, searching
from ...store.filtering import FILTERS
from ...store.operations import Query
from ..filters import check_names, chosen_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...records import JobRecord
    from ...store.operations import Operation, Row
    from ..database import Database

PAGE = 50
"""Jobs on one page."""
STATES = tuple(str(state) for state in State)
_NAMES = ("id", *FILTERS, "before")
_AS_THEY_ARE = frozenset(("kind", "key", "unique_key", "tag"))
"""Texts that may begin or end with blanks."""


@dataclass(frozen=True)
class Jobs:
    """One page of jobs, newest first.

    `given` are the filters as they were typed, `problem` what is wrong with them. `before`: the next page has the jobs below
    this id; None at the end. `looked_to`: the search came to this id, and older jobs were not looked at.
    """

    jobs: list[JobRecord]
    before: int | None = None
    looked_to: int | None = None
    given: dict[str, str] = field(default_factory=dict[str, str])
    problem: str | None = None
    queues: list[str] = field(default_factory=list[str])

    @property
    def form(self) -> dict[str, str]:
        """Every filter, empty where none was given."""
        return dict.fromkeys(("id", *FILTERS), "") | self.given


async def read(database: Database, given: Mapping[str, str]) -> Jobs:
    """One page of the jobs that match the filters of a query string; a filter that cannot be read is its `problem`."""
    try:
        return await find(database, given)
    except TookTooLong:
        problem = "This search took longer than 2 s and was stopped. Add a state, a queue or an id."
    except UsageError as error:
        problem = str(error)
    return Jobs([], given=_said(given), problem=problem, queues=await _queues_of(database))


async def find(database: Database, given: Mapping[str, str]) -> Jobs:
    """The same. Raises `UsageError` for a filter that cannot be read, `TookTooLong`."""
    said = _said(given)
    before = said.pop("before", "")
    queues = await _queues_of(database)
    start = _id(before) if before else None
    if "id" in said:
        return Jobs(await database.read(history.page([_id(said["id"])])), given=said, queues=queues)
    found = await database.read(searching.search(chosen_of(said), limit=PAGE, before=start))
    return Jobs(found.jobs, found.before, found.looked_to, said, None, queues)


def check_filters(given: Sequence[tuple[str, str]]) -> None:
    """A program's filters. Raises `UsageError` for one that does not exist, is given twice or holds what no text of a job can
    hold: it would find other jobs than it asks for, and take them for its answer."""
    check_names(given, _NAMES)
    for name, text in given:
        meant = text if name in _AS_THEY_ARE else text.strip()
        if text and (not meant or _clean(name, text) != meant[:1000]):
            raise UsageError(f"The filter {name} is {text[:40]!r}, which no job has.")


def _said(given: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name in _NAMES if (text := _clean(name, given.get(name)))}


def _clean(name: str, text: str | None) -> str:
    # PostgreSQL has no NUL in texts, and UTF-8 no lone surrogate.
    clean = (text or "").replace("\0", "").encode("utf-8", "ignore").decode()[:1000]
    return clean if name in _AS_THEY_ARE else clean.strip()


def _id(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 19 or not 0 < int(text) < 2**63:
        raise UsageError(f"A job's id is a whole number above 0, not {text[:40]!r}.")
    return int(text)


async def _queues_of(database: Database) -> list[str]:
    return [row[0] for row in await database.read(_queues())]


def _queues() -> Operation[Sequence[Row]]:
    return (yield Query("live_queues", {}))
