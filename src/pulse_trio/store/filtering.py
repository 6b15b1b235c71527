"""Which jobs a person means: the fields of a filter, checked, and as the parameters of the statements that search by it."""

from __future__ import annotations

from datetime import datetime, timedelta
from types import NoneType
from typing import TYPE_CHECKING, Any, TypedDict, cast

from ..errors import InvalidArguments, UsageError
from ..states import State
from .arrays import numbers
from .operations import Query

if TYPE_CHECKING:
    from .operations import Operation


class JobFilter(TypedDict, total=False):
    """Selects jobs. A field that is left out, or None, restricts nothing.

    `worker` is a session's id, or `host:pid`; `error` a part of the last error's text, in any case. `since` and `until` are
    moments with their offset, or a `timedelta` before now; a job counts by when it finished, or, until then, by when it was
    enqueued. `key` is the key under which limits and turns count the job (a tenant).
    `tag` is one of the job's tags. With `owes_clean_up` only durable jobs that were cancelled, or should have been, and
    whose clean-up (`job.cleanup()`) did not end well; what a retry of such a job does is said in docs/how-to/trees.md.
    """

    state: State | str | None
    queue: str | None
    kind: str | None
    worker: int | str | None
    since: datetime | timedelta | None
    until: datetime | timedelta | None
    error: str | None
    unique_key: str | None
    key: str | None
    tag: str | None
    owes_clean_up: bool | None


FILTERS = tuple(JobFilter.__annotations__)
"""The names of a filter's fields."""


def parameters_of(chosen: JobFilter) -> Operation[dict[str, Any]]:
    """The parameters of the conditions in sql/parts/filter_live.sql and filter_finished.sql. Raises `InvalidArguments`, and
    `UsageError` for an unknown worker."""
    workers = yield from sessions_named(chosen.get("worker"))
    return {
        "state": state_named(chosen.get("state")),
        "workers": workers,
        **{name: chosen.get(name) for name in ("queue", "kind", "error", "unique_key", "key", "tag")},
        "owes": chosen.get("owes_clean_up") or None,
        **moment("since", chosen.get("since")),
        **moment("until", chosen.get("until")),
    }


def state_named(given: State | str | None) -> str | None:
    """A state's name. Raises `InvalidArguments`."""
    if given is None:
        return None
    try:
        return str(State(given))
    except ValueError:
        raise InvalidArguments(f"There is no state {given!r}; there are: {', '.join(State)}.") from None


def moment(name: str, given: datetime | timedelta | None) -> dict[str, Any]:
    """A moment, or a time span before now by the database's clock."""
    if not isinstance(cast("object", given), (datetime, timedelta, NoneType)):
        raise InvalidArguments(f"{name} is a datetime with its offset, or a timedelta before now, got {given!r:.200}.")
    if isinstance(given, datetime) and given.tzinfo is None:
        raise InvalidArguments(f"{name} needs its offset (a timezone), got {given!r}.")
    ago = given if isinstance(given, timedelta) else None
    return {name: None if isinstance(given, timedelta) else given, f"{name}_ago": ago}


def sessions_named(worker: int | str | None) -> Operation[str | None]:
    """A worker's sessions, by its id or host:pid, as an array. Raises `InvalidArguments`, `UsageError` for an unknown one."""
    if worker is None:
        return None
    if isinstance(worker, int) or worker.isdecimal():
        return numbers([int(worker)])
    host, _, pid = worker.rpartition(":")
    if not host or not pid.isdecimal() or int(pid) >= 2**31:
        raise InvalidArguments(f"A worker is its id or host:pid, as `pulse-trio workers` shows them, not {worker!r}.")
    rows = yield Query("sessions_of", {"host": host, "pid": int(pid)})
    if not rows:
        raise UsageError(f"No worker {worker} is known. See: pulse-trio workers --all")
    return numbers([row[0] for row in rows])
