"""Limits in the user's notation: how many jobs run at once, how many start in a period, and whose they are (their key)."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ConfigurationError, InvalidArguments, InvalidName
from ..settings import check_lease
from .names import check_queue, check_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_RATE = re.compile(r"\s*(\d{1,9})\s*/\s*(\d{0,6})\s*(s|m|h|d|sec|min|second|minute|hour|day)\s*")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = timedelta(days=36_500)
KEY_SIZE = 512
"""The longest key in bytes; the database checks the same."""


class Rate(NamedTuple):
    """At most `starts` starts in `seconds` seconds; after a pause of that length, as many at once."""

    starts: int
    seconds: float


class QueueLimits(NamedTuple):
    """What a queue allows over all workers: jobs at once and starts in a time, for the whole queue and for each key; and how
    long its finished jobs are kept (None: unchanged)."""

    queue: str
    limit: int | None = None
    rate: Rate | None = None
    key_limit: int | None = None
    key_rate: Rate | None = None
    retention: timedelta | None = None


class QueueLease(NamedTuple):
    """How long a claim or heartbeat reserves a queue's jobs, and how often heartbeats are sent; in seconds."""

    lease: float
    heartbeat: float


def queue_lease(queue: str, lease: object, heartbeat: object = None) -> QueueLease:
    """A queue's lease from the user's values, in seconds or as a `timedelta`; the heartbeat is a third of it if not given.
    Raises `ConfigurationError`."""
    if lease is None:
        raise ConfigurationError(f"Queue {queue!r}: heartbeat needs a lease of the queue; give lease too.")
    seconds = _seconds(queue, "lease", lease)
    beat = seconds / 3 if heartbeat is None else _seconds(queue, "heartbeat", heartbeat)
    if (wrong := check_lease(seconds, beat)) is not None:
        raise ConfigurationError(f"Queue {queue!r}: {wrong}.")
    return QueueLease(seconds, beat)


def _seconds(queue: str, name: str, given: object) -> float:
    if isinstance(given, timedelta):
        return given.total_seconds()
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return float(given)
    raise ConfigurationError(f"Queue {queue!r}: {name} must be seconds or a timedelta, got {given!r}.")


def parse_rate(rate: object) -> Rate:
    """`"10/s"`, `"100/m"`, `"1000/h"`, `"5/d"`, or with a number before the unit, `"10/30s"`. Raises `ConfigurationError`."""
    found = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if found is None or int(found[1]) == 0 or found[2] == "0":
        raise ConfigurationError(f'rate must look like "10/s", "100/m", "1000/h" or "10/30s", got {rate!r}.')
    return Rate(int(found[1]), int(found[2] or 1) * _SECONDS[found[3][0]])


def check_limit(name: str, limit: object) -> None:
    """Raises `ConfigurationError` unless `limit` is a positive whole number."""
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit < 2**31:
        raise ConfigurationError(
            f"{name} must be a whole number from 1 to {2**31 - 1:,}, got {limit!r}. To run nothing, pause."
        )


def queue_limits(
    queue: str,
    limit: int | None = None,
    rate: str | None = None,
    key_limit: int | None = None,
    key_rate: str | None = None,
    retention: timedelta | None = None,
) -> QueueLimits:
    """A queue's limits from the user's values. Raises `InvalidName` or `ConfigurationError`."""
    for name, given in (("limit", limit), ("key_limit", key_limit)):
        if given is not None:
            check_limit(name, given)
    rates = [None if given is None else parse_rate(given) for given in (rate, key_rate)]
    if retention is not None and not timedelta(0) < retention <= _LONGEST:
        raise ConfigurationError(f"retention must be above 0 and at most a hundred years, got {retention}.")
    return QueueLimits(check_queue(queue), limit, rates[0], key_limit, rates[1], retention)


class KeyOf:
    """The key of a job from its arguments: the function's parameters are some of the handler's, by name.

    The kind precedes the function's value, so that equal values of two handlers are counted separately.
    """

    def __init__(self, kind: str, function: Callable[..., Any], parameters: list[str]) -> None:
        self._kind = kind
        self._function = function
        try:
            found = inspect.signature(function).parameters.values()
        except NameError as error:
            # From Python 3.14 on, annotations are evaluated when they are read.
            raise ConfigurationError(
                f"The annotations of the key of {kind!r} cannot be read: {error}. Import that name at the module's top level."
            ) from error
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"The key of {kind!r}: {function!r} has no readable signature; use a lambda or a def."
            ) from None
        self._names = [p.name for p in found]
        strange = [str(p) for p in found if p.name not in parameters or p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY)]
        if strange:
            raise ConfigurationError(
                f"The key of {kind!r} takes {', '.join(strange)}: its parameters must be some of the handler's own "
                f"({', '.join(parameters) or 'it has none'}), by name."
            )

    def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Raises `InvalidArguments` if the function fails or returns anything but text or a whole number."""
        try:
            key = self._function(**{name: arguments[name] for name in self._names})
        except Exception as error:
            raise InvalidArguments(f"The key of {self._kind!r} could not be computed: {error!r}.") from error
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise InvalidArguments(f"The key of {self._kind!r} must be text or a whole number, got {key!r}.")
        try:
            return check_text(f"The key of {self._kind!r}", f"{self._kind}:{key}", KEY_SIZE)
        except InvalidName as error:
            raise InvalidArguments(str(error)) from None
