"""The options of a job: how a handler's jobs are enqueued, and what one call may change.

One list of names: `CallOptions` types the keyword arguments of `Handler.options`, `HandlerOptions` those of
`handlers.job`; `Defaults` checks and holds the values, `encode_options` writes what only the worker needs into the row, and
`request_of` makes the request of a call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, get_args

import msgspec

from ..errors import ConfigurationError, InvalidName
from ..jobs import DEFAULT_OPTIONS, JobRequest
from ..labels import Scalar, check_tags, pack_meta, pack_tags
from .limits import KEY_SIZE, check_limit, parse_rate
from .names import check_queue, check_text, refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from .retries import Errors, Retry

Duration = float | timedelta
"""Seconds, or a `timedelta`."""

OnConflict = Literal["skip", "replace", "raise"]
"""What an enqueue does if its unique key is taken."""

LONGEST = 1000 * 365.25 * 86400
"""The longest accepted duration, in seconds: a thousand years."""

# The range of the database's moments (the domain due_time).
_MICROSECOND = 1e-6
"""The shortest interval of PostgreSQL's: it rounds less to none."""
_EARLIEST, _LATEST = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


class HasKind(Protocol):
    """A registered handler."""

    @property
    def kind(self) -> str: ...


class _Options(TypedDict, total=False):
    queue: str | None
    priority: int | None
    max_attempts: int | None
    timeout: Duration | None
    delay: Duration | None
    deadline: Duration | datetime | None
    expires: Duration | datetime | None
    limit: int | None
    rate: str | None
    unique_key: str | None
    unique_for: Duration | None
    unique_after: Duration | None
    on_conflict: OnConflict | None
    tags: Iterable[str] | None
    meta: Mapping[str, Scalar] | None


class HandlerOptions(_Options, total=False):
    """What `handlers.job(...)` takes besides `name` and `runs`."""

    backoff_base: float
    backoff_cap: float
    crash_limit: int
    key: str | Callable[..., str | int]
    retry: Retry
    retry_on: Errors
    discard_on: Errors
    upgrade: Callable[[dict[str, Any]], Mapping[str, Any]]
    on_death: str | HasKind
    durable: bool
    suspend_after: Duration
    version: int


class CallOptions(_Options, total=False):
    """What `Handler.options(...)` takes."""

    at: datetime | None
    run_at: datetime | None
    key: str | None
    child_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """How a handler's jobs are enqueued, and what one call may change with `Handler.options`. Times are in seconds;
    `deadline` and `expires` are seconds from the enqueue on, or moments."""

    queue: str = "default"
    priority: int = 0
    max_attempts: int = 20
    timeout: float | None = None
    backoff_base: float = 2.0
    backoff_cap: float = 3600.0
    crash_limit: int = 3
    delay: float | None = None
    run_at: datetime | None = None
    deadline: float | datetime | None = None
    expires: float | datetime | None = None
    unique_key: str | None = None
    key: str | None = None
    limit: int | None = None
    rate: str | None = None
    unique_for: float | None = None
    unique_after: float | None = None
    on_conflict: OnConflict = "skip"
    child_key: str | None = None
    tags: tuple[str, ...] = ()
    meta: str = ""
    """As the row's options have it."""

    def __post_init__(self) -> None:
        check_queue(self.queue)
        self._whole("max_attempts", 1)
        self._whole("priority", -(2**31))
        self._whole("crash_limit", 1)
        if self.crash_limit > 32767:
            raise ConfigurationError(f"crash_limit must be at most 32767, got {self.crash_limit}.")
        for name in ("timeout", "backoff_base", "backoff_cap", "unique_for", "unique_after"):
            _check_positive(name, getattr(self, name))
        for name in ("unique_for", "unique_after"):
            if (getattr(self, name) or 1) < _MICROSECOND:
                raise ConfigurationError(f"{name} must be a microsecond at least, got {getattr(self, name)!r} s.")
        if self.delay is not None and self.run_at is not None:
            raise ConfigurationError("Give delay or at, not both.")
        if self.delay is not None and not (_is_number(self.delay) and 0 <= self.delay <= LONGEST):
            raise ConfigurationError(
                f"delay must be a number of seconds from now on, at most a thousand years, got {self.delay!r}."
            )
        if self.run_at is not None:
            _check_moment("at", self.run_at)
        for name in ("deadline", "expires"):
            value = getattr(self, name)
            if isinstance(value, datetime):
                _check_moment(name, value)
            else:
                _check_positive(name, value, or_else=", or an aware datetime")
        if self.unique_key is not None:
            check_text("unique_key", self.unique_key, 512)
        if self.key is not None:
            check_text("key", self.key, KEY_SIZE)
        if self.child_key is not None:
            check_child_key(self.child_key)
        if self.limit is not None:
            check_limit("limit", self.limit)
        if self.rate is not None:
            parse_rate(self.rate)
        if self.on_conflict not in get_args(OnConflict):
            raise ConfigurationError(f"on_conflict must be skip, replace or raise, got {self.on_conflict!r}.")

    def _whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise ConfigurationError(f"{name} must be a whole number from {least} to {2**31 - 1}, got {value!r}.")

    def changed(self, **given: Any) -> Defaults:
        """These defaults, changed by the options of one call. A moment from the call replaces a delay, and the other way
        round.

        Raises `ConfigurationError` or `InvalidName`."""
        changes = given_options(**given)
        if "run_at" in changes:
            changes.setdefault("delay", None)
        elif "delay" in changes:
            changes["run_at"] = None
        return replace(self, **changes)


_DURATIONS = ("delay", "timeout", "deadline", "expires", "unique_for", "unique_after")
OPTION_NAMES = {field.name for field in fields(Defaults)} | {"at"}


_NUMBERED = re.compile(r"#[0-9]+")
"""The keys of children that were given none."""


def check_child_key(key: str) -> str:
    """The key of a child of a durable nursery, checked. Raises `InvalidName`."""
    checked = check_text("child_key", key, 256)
    if _NUMBERED.fullmatch(checked):
        raise InvalidName(f"A child_key must not look like the key of a child without one (#3), got {checked!r}.")
    return checked


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_positive(name: str, value: Any, or_else: str = "") -> None:
    if value is not None and not (_is_number(value) and 0 < value <= LONGEST):
        raise ConfigurationError(
            f"{name} must be a positive number of seconds (at most a thousand years){or_else}, got {value!r}."
        )


def _check_moment(name: str, moment: object) -> None:
    if not isinstance(moment, datetime):
        raise ConfigurationError(f"{name} must be a datetime, got {moment!r}.")
    if moment.utcoffset() is None:
        raise ConfigurationError(
            f"{name} must have a time zone, got the naive {moment!r}; use for example datetime.now(UTC)."
        )
    if not _EARLIEST <= moment < _LATEST:
        raise ConfigurationError(f"{name} must lie between 0001-01-02 and 9999-12-30 (UTC), got {moment!r}.")


def given_options(also: Iterable[str] = (), /, **options: Any) -> dict[str, Any]:
    """Options for `Defaults`, from the caller's: None means not given, a duration may be a `timedelta`, and `run_at` may be
    called `at`. Raises `ConfigurationError` for an unknown option; `also` has further names that the caller accepts."""
    refuse_unknown("option", options.keys() - OPTION_NAMES, OPTION_NAMES.union(also))
    given = {name: value for name, value in options.items() if value is not None}
    if also and "child_key" in given:
        raise ConfigurationError("child_key names one child: give it to Handler.options, where the child is started.")
    for name in _DURATIONS:
        if isinstance(duration := given.get(name), timedelta):
            given[name] = duration.total_seconds()
    if "tags" in given:
        given["tags"] = check_tags(given["tags"])
    if "meta" in given:
        given["meta"] = pack_meta(given["meta"])
    if (moment := given.pop("at", None)) is not None:
        if "run_at" in given:
            raise ConfigurationError("Give at or run_at, not both: they are the same option.")
        given["run_at"] = moment
    return given


_OF_ROW = ("timeout", "backoff_base", "backoff_cap", "crash_limit")
"""Options that the row has if they are not the usual ones."""
_of_row = attrgetter(*_OF_ROW)
_USUAL = _of_row(DEFAULT_OPTIONS)


def encode_options(defaults: Defaults) -> str | None:
    """The row's `options`: JSON of the options that differ from the defaults, None if none does. Moments are seconds since
    1970; the database adds those that count from the enqueue, by its own clock."""
    chosen: dict[str, Any] = {}
    if _of_row(defaults) != _USUAL:
        chosen = {
            name: value for name, value, usual in zip(_OF_ROW, _of_row(defaults), _USUAL, strict=True) if value != usual
        }
    if isinstance(defaults.deadline, datetime):
        chosen["deadline"] = defaults.deadline.timestamp()
    if isinstance(defaults.expires, datetime):
        chosen["expires"] = defaults.expires.timestamp()
    if defaults.limit is not None:
        chosen["limit"] = defaults.limit
    if defaults.rate is not None:
        chosen["rate"] = parse_rate(defaults.rate)
    if defaults.tags:
        chosen["tags"] = pack_tags(defaults.tags)
    if defaults.meta:
        chosen["meta"] = defaults.meta
    return msgspec.json.encode(chosen).decode() if chosen else None


def request_of(kind: str, args: str, defaults: Defaults, key: str | None = None) -> JobRequest:
    """The request of one call: `args` is checked JSON, `key` the key that the handler computes from them. A limit or a rate
    without a key counts all jobs of the kind. Raises `ConfigurationError` for options that need a unique key if there is
    none, and for a `child_key`, which only a durable nursery can use."""
    d = defaults
    if d.child_key is not None:
        raise ConfigurationError(
            f"child_key={d.child_key!r} is for children: start this {kind!r} with start_soon of a job.durable_nursery()."
        )
    if d.key is not None:
        key = d.key
    elif key is None and (d.limit is not None or d.rate is not None):
        key = kind
    if d.unique_key is None and (d.unique_for is not None or d.unique_after is not None or d.on_conflict != "skip"):
        raise ConfigurationError(
            f"unique_for, unique_after and on_conflict need a unique_key, and this job of kind {kind!r} has none."
        )
    return JobRequest(
        kind=kind,
        args=args,
        queue=d.queue,
        priority=d.priority,
        max_attempts=d.max_attempts,
        delay=d.delay,
        run_at=d.run_at.isoformat() if d.run_at else None,
        deadline_in=None if isinstance(d.deadline, datetime) else d.deadline,
        expires_in=None if isinstance(d.expires, datetime) else d.expires,
        unique_key=d.unique_key,
        key=key,
        unique_for=d.unique_for,
        unique_after=d.unique_after,
        on_conflict=d.on_conflict,
        options=encode_options(d),
    )
