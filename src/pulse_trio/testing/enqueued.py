"""Which jobs were enqueued: assertions whose messages show the nearest job, and in what it differs.

Each takes a client. A `Client` gives something to await, a `SyncClient` the answer. Jobs that the test's own transaction has
enqueued are seen through `client.using(connection)`. The idea is Oban.Testing's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast, overload

import msgspec

from ..client import Client, SyncClient
from ..client.requests import decoded_record
from ..errors import UnknownKind, UsageError
from ..handlers import Handler, given_options
from ..handlers.models import from_builtins
from ..handlers.options import Defaults
from ..handlers.payloads import has_models
from ..labels import check_tags, pack_meta
from ..states import State
from .as_json import arguments_differ, is_same, short
from .forgotten import awaited

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Unpack

    from ..handlers import Handlers
    from ..store.operations import JobRecord

T = TypeVar("T")

_PAGE = 500
_WAITING = ("scheduled", "available", "retryable")
_MOST = 20
"""Jobs in a message."""


class Expected(TypedDict, total=False):
    """What a job must have. What is left out asks for nothing, but for `state`: then the job waits, now or for its time.

    `args` are arguments by name; the job may have others beside them. `tags` and `meta` are all that it has. `at` is when it is
    due, an aware datetime, to the second. `state` is one, or "any".
    """

    args: Mapping[str, Any]
    queue: str
    priority: int
    key: str | None
    unique_key: str | None
    max_attempts: int
    at: datetime
    state: State | str
    tags: Sequence[str] | None
    meta: Mapping[str, Any] | None


@dataclass(frozen=True)
class _Wanted:
    kind: str | None
    expected: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The arguments as JSON gives them back: a job has lists and text where its caller had tuples and datetimes."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the handler's parameters. A job is stored without the arguments that its caller left out."""
    unknown: UnknownKind | None = None
    """Raised where there is no job of that kind: the client's registry has no handler for it."""

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
                found += arguments_differ({**self.defaults, **job.args}, value)
            elif name == "at":
                if abs(job.run_at - value) > timedelta(seconds=1):
                    found.append(f"at: {job.run_at.isoformat()}, not {value.isoformat()}")
            elif name == "meta" and value is not None and job.meta is not None:
                if not is_same(job.meta, value):
                    found.append(f"meta: {short(job.meta)}, not {short(value)}")
            elif name != "state" and getattr(job, name) != value:
                found.append(f"{name}: {getattr(job, name)!r}, not {value!r}")
        return found

    def __str__(self) -> str:
        said = [f"of kind {self.kind!r}"] if self.kind is not None else []
        said += [f"{name}={value!r}" for name, value in self.expected.items()]
        return "a job " + ", ".join(said) if said else "a job"


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
    wanted = _wanted(client, handler, expected)
    if isinstance(client, SyncClient):
        return _matching(wanted, _all(client))

    async def find() -> list[JobRecord]:
        return _matching(wanted, await _all_of(client))

    return awaited("enqueued", find())


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
    if count is not None and (count < 1 or isinstance(count, bool)):
        raise TypeError("assert_enqueued(count=) is at least 1: that there is no such job, refute_enqueued says")
    wanted = _wanted(client, handler, expected)
    if isinstance(client, SyncClient):
        return _asserted(wanted, _all(client), count)

    async def check() -> JobRecord:
        return _asserted(wanted, await _all_of(client), count)

    return awaited("assert_enqueued", check())


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
    wanted = _wanted(client, handler, expected)
    if isinstance(client, SyncClient):
        return _refuted(wanted, _all(client))

    async def check() -> None:
        _refuted(wanted, await _all_of(client))

    return awaited("refute_enqueued", check())


_TYPES: Mapping[str, tuple[type[Any] | tuple[type[Any], ...], str]] = {
    "args": (Mapping, "a mapping of arguments by name"),
    "queue": (str, "text"),
    "priority": (int, "a whole number"),
    "key": ((str, type(None)), "text or None"),
    "unique_key": ((str, type(None)), "text or None"),
    "max_attempts": (int, "a whole number"),
    "at": (datetime, "an aware datetime"),
    "state": (str, "a state"),
    "tags": ((list, tuple, type(None)), "a list of text, or None"),
    "meta": ((Mapping, type(None)), "a mapping, or None"),
}


_OPTIONS = _TYPES.keys() - {"args", "state"}
"""Those of a job that are compared."""
_CHECKED = ("queue", "priority", "key", "unique_key", "max_attempts")
"""Those that a job has as they were given."""


def _wanted(client: Client | SyncClient, handler: object, expected: Mapping[str, Any]) -> _Wanted:
    """What is asked for, checked: what no job can have would be refuted whatever was enqueued."""
    if handler is not None and not isinstance(handler, (Handler, str)):
        raise TypeError(f"expected a handler (a function under @handlers.job) or its kind as text, got {handler!r}")
    known, no_kind = _known(client, cast("Handler[Any, Any] | str | None", handler))
    if known is not None:
        expected = _with_options(known, expected)
    unknown = expected.keys() - Expected.__annotations__.keys()
    if unknown:
        names = ", ".join(sorted(Expected.__annotations__))
        raise TypeError(f"a job has no {', '.join(sorted(unknown))} to expect: there are {names}")
    for name, value in expected.items():
        allowed, said = _TYPES[name]
        if not isinstance(value, allowed) or (name == "at" and value.tzinfo is None):
            raise TypeError(f"{name}= takes {said}, got {value!r}")
    if expected.get("state", "any") not in ("any", *State):
        raise TypeError(f'state= takes {", ".join(State)} or "any", got {expected["state"]!r}')
    args = cast("Mapping[Any, Any]", expected.get("args", {}))
    checked = dict(expected)
    if "args" in expected:
        checked["args"] = _through_json(args)
    options = {name: value for name, value in expected.items() if name in _CHECKED and value is not None}
    _as_enqueued(lambda given: Defaults(**cast("dict[str, Any]", given)), options)
    if expected.get("tags") is not None:
        checked["tags"] = list(_as_enqueued(check_tags, expected["tags"])) or None
    if expected.get("meta") is not None:
        _as_enqueued(pack_meta, expected["meta"])
        checked["meta"] = dict(expected["meta"]) or None
    if known is None:
        return _Wanted(cast("str | None", handler), checked, unknown=no_kind)
    defaults = _defaults_of(known, args)
    if not known.signature.upgrades:
        _refuse_misfits(known, checked.get("args", {}))
    return _Wanted(known.kind, checked, defaults)


def _known(
    client: Client | SyncClient, handler: Handler[Any, Any] | str | None
) -> tuple[Handler[Any, Any] | None, UnknownKind | None]:
    """The handler that is meant, if it is known; of a kind by name, why it is not."""
    registry: Handlers | None = client._handlers  # pyright: ignore[reportPrivateUsage] -- a program has no use for it
    if not isinstance(handler, str) or registry is None:
        return (handler if isinstance(handler, Handler) else None), None
    try:
        return registry[handler], None
    except UnknownKind as error:
        return None, error


def _with_options(handler: Handler[Any, Any], expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is expected, with the options that the handler was given. Raises `TypeError` for one that is not compared."""
    chosen = given_options(**handler.chosen)
    if "run_at" in chosen:
        chosen["at"] = chosen.pop("run_at")
    if "meta" in chosen:
        chosen["meta"] = handler.chosen["meta"]  # not as the row has it
    if others := sorted(chosen.keys() - _OPTIONS):
        raise TypeError(
            f"{handler.kind}.options({others[0]}=...): that option of a job is not compared here, only "
            f"{', '.join(sorted(_OPTIONS))} are. Leave it out, and look at the job that assert_enqueued returns; when a job is "
            "due, at= asks."
        )
    for name, value in chosen.items():
        if name in expected and expected[name] != value:
            raise TypeError(f"{name}={expected[name]!r} and {handler.kind}.options({name}={value!r}): no job has both")
    return {**chosen, **expected}


def _refuse_misfits(handler: Handler[Any, Any], args: Mapping[str, Any]) -> None:
    """Raises `TypeError` for an argument, as JSON, that the handler's parameter does not take."""
    for name, value in args.items():
        hint = handler.signature.hints.get(name, Any)
        try:
            # A number is the same with a fraction of zero.
            encoded = msgspec.json.encode(_whole(value))
            msgspec.json.decode(encoded, type=hint, dec_hook=from_builtins if has_models(hint) else None)
        except msgspec.ValidationError as error:
            raise TypeError(
                f"no job of {handler.kind!r} has args={{{name!r}: {short(value)}}}: {error} for {name!r}"
            ) from None


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(one) for one in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in cast("dict[str, Any]", value).items()}
    return value


def _defaults_of(handler: Handler[Any, Any], args: Mapping[Any, Any]) -> dict[str, Any]:
    """The defaults of these arguments. Raises `TypeError` for a name that the handler does not have."""
    parameters = {p.name: p for p in handler.signature.parameters}
    unknown = [name for name in args if name not in parameters]
    # A handler with an upgrade may have jobs of its earlier signatures.
    if unknown and not handler.signature.upgrades:
        names = ", ".join(map(repr, parameters)) or "none"
        raise TypeError(f"the handler {handler.kind!r} has no argument {unknown[0]!r}: there are {names}")
    found = {name: parameters[name].default for name in args if name in parameters}
    return _through_json({name: value for name, value in found.items() if value is not inspect.Parameter.empty})


def _as_enqueued(check: Callable[[object], T], given: object) -> T:
    """What an enqueue makes of it. Raises `TypeError` for what that refuses."""
    try:
        return check(given)
    except UsageError as error:
        raise TypeError(str(error)) from None


def _through_json(args: Mapping[Any, Any]) -> dict[str, Any]:
    try:
        return msgspec.json.decode(msgspec.json.encode(dict(args)))
    except Exception as error:  # msgspec's, or what a property of a value raises
        raise TypeError(f"args= cannot be written as JSON, so no job has them: {error}") from error


def _all(client: SyncClient) -> list[JobRecord]:
    jobs: list[JobRecord] = []
    while page := client.jobs(limit=_PAGE, before=jobs[-1].id if jobs else None):
        jobs += page
    return [_decoded(client, job) for job in jobs]


async def _all_of(client: Client) -> list[JobRecord]:
    jobs: list[JobRecord] = []
    while page := await client.jobs(limit=_PAGE, before=jobs[-1].id if jobs else None):
        jobs += page
    return [_decoded(client, job) for job in jobs]


def _decoded(client: Client | SyncClient, job: JobRecord) -> JobRecord:
    """As `client.job()` shows it: lists show the envelopes of a codec."""
    codec = client._codec  # pyright: ignore[reportPrivateUsage] -- a program has no use for it
    try:
        return decoded_record(codec, job)
    except Exception:  # a user's own codec may raise anything for a job of another program, which is compared as it is
        return job


def _matching(wanted: _Wanted, jobs: list[JobRecord]) -> list[JobRecord]:
    if wanted.unknown is not None and not any(job.kind == wanted.kind for job in jobs):
        raise wanted.unknown
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
    return f"job {job.id} ({job.kind}, {job.state}, queue {job.queue!r}) {short(job.args)}"
