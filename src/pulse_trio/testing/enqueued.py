"""Which jobs were enqueued: assertions whose messages show the nearest job, and in what it differs.

Each takes a client. A `Client` gives something to await, a `SyncClient` the answer. Jobs that the test's own transaction has
enqueued are seen through `client.using(connection)`. The idea is Oban.Testing's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypedDict, overload

import msgspec

from ..client import Client, SyncClient
from ..handlers import Handler

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping
    from typing import Unpack

    from ..states import State
    from ..store.operations import JobRecord

_PAGE = 500
_WAITING = ("scheduled", "available", "retryable")
_MOST = 20
"""Jobs in a message."""
_SHOWN = 400
"""Characters of a job's arguments in a message."""


class Expected(TypedDict, total=False):
    """What a job must have. What is left out asks for nothing, but for `state`: then the job waits, now or for its time.

    `args` are arguments by name; the job may have others beside them. `at` is when it is due, an aware datetime, to the second.
    `state` is one, or "any".
    """

    args: Mapping[str, Any]
    queue: str
    priority: int
    key: str | None
    unique_key: str | None
    max_attempts: int
    at: datetime
    state: State | str


@dataclass(frozen=True)
class _Wanted:
    kind: str | None
    expected: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def differences(self, job: JobRecord) -> list[str]:
        """One line for each thing in which a job is not what is wanted."""
        found: list[str] = []
        if self.kind is not None and job.kind != self.kind:
            found.append(f"kind: {job.kind!r}, not {self.kind!r}")
        state = self.expected.get("state")
        if state is None:
            if job.state not in _WAITING:
                found.append(f"state: {str(job.state)!r}: it waits no more")
        elif state not in ("any", job.state):
            found.append(f"state: {str(job.state)!r}, not {str(state)!r}")
        for name, value in self.expected.items():
            if name == "args":
                found += _arguments_differ(job.args, msgspec.to_builtins(value))
            elif name == "at":
                if abs(job.run_at - value) > timedelta(seconds=1):
                    found.append(f"at: {job.run_at.isoformat()}, not {value.isoformat()}")
            elif name != "state" and getattr(job, name) != value:
                found.append(f"{name}: {getattr(job, name)!r}, not {value!r}")
        return found

    def __str__(self) -> str:
        said = [f"of kind {self.kind!r}"] if self.kind is not None else []
        said += [f"{name}={value!r}" for name, value in self.expected.items()]
        return "a job " + ", ".join(said) if said else "a job"


def _arguments_differ(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for name, value in wanted.items():
        if name not in found:
            lines.append(f"args: there is no {name!r}, only {', '.join(map(repr, found)) or 'none'}")
        elif found[name] != value:
            lines.append(f"args[{name!r}]: {_short(found[name])}, not {_short(value)}")
    return lines


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"


@overload
def enqueued(
    client: Client, handler: Handler[Any, Any] | str | None = None, /, **expected: Unpack[Expected]
) -> Coroutine[Any, Any, list[JobRecord]]: ...
@overload
def enqueued(
    client: SyncClient, handler: Handler[Any, Any] | str | None = None, /, **expected: Unpack[Expected]
) -> list[JobRecord]: ...
def enqueued(
    client: Client | SyncClient, handler: Handler[Any, Any] | str | None = None, /, **expected: Unpack[Expected]
) -> Coroutine[Any, Any, list[JobRecord]] | list[JobRecord]:
    """The jobs of a handler (or kind, or all) that wait, in the order in which they were enqueued; see `Expected`."""
    wanted = _wanted(handler, expected)
    if isinstance(client, SyncClient):
        return _matching(wanted, _all(client))

    async def find() -> list[JobRecord]:
        return _matching(wanted, await _all_of(client))

    return find()


@overload
def assert_enqueued(
    client: Client,
    handler: Handler[Any, Any] | str | None = None,
    /,
    *,
    count: int | None = None,
    **expected: Unpack[Expected],
) -> Coroutine[Any, Any, JobRecord]: ...
@overload
def assert_enqueued(
    client: SyncClient,
    handler: Handler[Any, Any] | str | None = None,
    /,
    *,
    count: int | None = None,
    **expected: Unpack[Expected],
) -> JobRecord: ...
def assert_enqueued(
    client: Client | SyncClient,
    handler: Handler[Any, Any] | str | None = None,
    /,
    *,
    count: int | None = None,
    **expected: Unpack[Expected],
) -> Coroutine[Any, Any, JobRecord] | JobRecord:
    """Returns the job that is what is expected (the last enqueued of several). Raises `AssertionError` if there is none, or not
    as many as `count`, which is at least 1."""
    if count is not None and count < 1:
        raise TypeError("assert_enqueued(count=) is at least 1: that there is no such job, refute_enqueued says")
    wanted = _wanted(handler, expected)
    if isinstance(client, SyncClient):
        return _asserted(wanted, _all(client), count)

    async def check() -> JobRecord:
        return _asserted(wanted, await _all_of(client), count)

    return check()


@overload
def refute_enqueued(
    client: Client, handler: Handler[Any, Any] | str | None = None, /, **expected: Unpack[Expected]
) -> Coroutine[Any, Any, None]: ...
@overload
def refute_enqueued(
    client: SyncClient, handler: Handler[Any, Any] | str | None = None, /, **expected: Unpack[Expected]
) -> None: ...
def refute_enqueued(
    client: Client | SyncClient, handler: Handler[Any, Any] | str | None = None, /, **expected: Unpack[Expected]
) -> Coroutine[Any, Any, None] | None:
    """Raises `AssertionError` if there is such a job, and shows it."""
    wanted = _wanted(handler, expected)
    if isinstance(client, SyncClient):
        return _refuted(wanted, _all(client))

    async def check() -> None:
        _refuted(wanted, await _all_of(client))

    return check()


def _wanted(handler: Handler[Any, Any] | str | None, expected: Mapping[str, Any]) -> _Wanted:
    unknown = expected.keys() - Expected.__annotations__.keys()
    if unknown:
        names = ", ".join(sorted(Expected.__annotations__))
        raise TypeError(f"a job has no {', '.join(sorted(unknown))} to expect: there are {names}")
    return _Wanted(handler.kind if isinstance(handler, Handler) else handler, expected)


def _all(client: SyncClient) -> list[JobRecord]:
    jobs: list[JobRecord] = []
    while page := client.jobs(limit=_PAGE, before=jobs[-1].id if jobs else None):
        jobs += page
    return jobs


async def _all_of(client: Client) -> list[JobRecord]:
    jobs: list[JobRecord] = []
    while page := await client.jobs(limit=_PAGE, before=jobs[-1].id if jobs else None):
        jobs += page
    return jobs


def _matching(wanted: _Wanted, jobs: list[JobRecord]) -> list[JobRecord]:
    return [job for job in reversed(jobs) if not wanted.differences(job)]


def _asserted(wanted: _Wanted, jobs: list[JobRecord], count: int | None) -> JobRecord:
    found = _matching(wanted, jobs)
    if count is not None and len(found) != count:
        seen = _lines(found) if found else _nearest(wanted, jobs)
        raise AssertionError(f"expected {count} times {wanted}; found {len(found)}{seen}")
    if not found:
        raise AssertionError(f"expected {wanted}; there is none{_nearest(wanted, jobs)}")
    return found[-1]


def _refuted(wanted: _Wanted, jobs: list[JobRecord]) -> None:
    found = _matching(wanted, jobs)
    if found:
        raise AssertionError(f"expected no {str(wanted)[2:]}; found {len(found)}{_lines(found)}")


def _lines(jobs: list[JobRecord]) -> str:
    shown = "".join(f"\n  {_line(job)}" for job in jobs[:_MOST])
    return f":{shown}" + (f"\n  and {len(jobs) - _MOST:,} more" if len(jobs) > _MOST else "")


def _nearest(wanted: _Wanted, jobs: list[JobRecord]) -> str:
    if not jobs:
        return ": nothing was enqueued"
    nearest = min(jobs, key=lambda job: (len(wanted.differences(job)), wanted.kind != job.kind, -job.id))
    differences = "".join(f"\n    {line}" for line in wanted.differences(nearest))
    return f" among {len(jobs):,}. The nearest:\n  {_line(nearest)}\n  differs in{differences}"


def _line(job: JobRecord) -> str:
    return f"job {job.id} ({job.kind}, {job.state}, queue {job.queue!r}) {_short(job.args)}"
