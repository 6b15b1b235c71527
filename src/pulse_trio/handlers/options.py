"""The options of a job: how a handler's jobs are enqueued, and what one call may change.

One list of names: `CallOptions` types the keyword arguments of `Handler.options`, `HandlerOptions` those of
`handlers.job`; `Defaults` checks and holds the values, and `encode_options` writes what only the worker needs into the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from ..errors import ConfigurationError
from ..jobs import DEFAULT_OPTIONS
from .names import check_queue, check_text

if TYPE_CHECKING:
    from .retries import Errors, Retry


class _Options(TypedDict, total=False):
    queue: str | None
    priority: int | None
    max_attempts: int | None
    timeout: float | None


class HandlerOptions(_Options, total=False):
    """What `handlers.job(...)` takes beside `name` and `runs`."""

    backoff_base: float
    backoff_cap: float
    retry: Retry
    retry_on: Errors
    discard_on: Errors


class CallOptions(_Options, total=False):
    """What `Handler.options(...)` takes."""

    delay: float | timedelta | None
    run_at: datetime | None
    unique_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """How a handler's jobs are enqueued, and what one call may change with `Handler.options`. Times are in seconds."""

    queue: str = "default"
    priority: int = 0
    max_attempts: int = 20
    timeout: float | None = None
    backoff_base: float = 2.0
    backoff_cap: float = 3600.0
    delay: float | None = None
    run_at: datetime | None = None
    unique_key: str | None = None

    def __post_init__(self) -> None:
        check_queue(self.queue)
        self._whole("max_attempts", 1)
        self._whole("priority", -(2**31))
        for name in ("timeout", "backoff_base", "backoff_cap"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < float("inf")):
                raise ConfigurationError(f"{name} must be a positive number of seconds, got {value!r}.")
        if self.delay is not None and self.run_at is not None:
            raise ConfigurationError("Give delay or run_at, not both.")
        if self.delay is not None and not (_is_number(self.delay) and 0 <= self.delay < float("inf")):
            raise ConfigurationError(f"delay must be a number of seconds from now on, got {self.delay!r}.")
        if self.run_at is not None:
            _check_moment(self.run_at)
        if self.unique_key is not None:
            check_text("unique_key", self.unique_key, 512)

    def _whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise ConfigurationError(f"{name} must be a whole number from {least} to {2**31 - 1}, got {value!r}.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_moment(run_at: object) -> None:
    if not isinstance(run_at, datetime):
        raise ConfigurationError(f"run_at must be a datetime, got {run_at!r}.")
    if run_at.utcoffset() is None:
        raise ConfigurationError(
            f"run_at must know its time zone, got the naive {run_at!r}; use datetime.now(UTC) and the like."
        )


def given_options(**options: Any) -> dict[str, Any]:
    """Options as `Defaults` takes them, from what a caller gave: None means not given, a delay may be a `timedelta`."""
    if isinstance(delay := options.get("delay"), timedelta):
        options["delay"] = delay.total_seconds()
    return {name: value for name, value in options.items() if value is not None}


def encode_options(defaults: Defaults) -> str | None:
    """The row's `options`: JSON of what is not the default, None when all of it is."""
    fields = ("timeout", "backoff_base", "backoff_cap")
    chosen = {f: getattr(defaults, f) for f in fields if getattr(defaults, f) != getattr(DEFAULT_OPTIONS, f)}
    return msgspec.json.encode(chosen).decode() if chosen else None
