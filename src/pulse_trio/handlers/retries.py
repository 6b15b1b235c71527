"""Retry policies: how long a job waits after a failure, and which failures end it at once.

A policy is a function from a failure to seconds (None: dead at once); the built-in ones are such functions with parameters.
The worker that ran the handler calls it, because only that worker has the code: a rescued job is due at once, without a
policy.

**Groups.** An ExceptionGroup is judged leaf by leaf, and ends the job only if every leaf would; otherwise the job waits as
long as the longest delay among the leaves that want a retry.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from ..callables import is_async
from ..describing import judged_as
from ..errors import ConfigurationError
from ..states import exponential, leaves_of, retry_delay

if TYPE_CHECKING:
    from ..jobs import Claim


@dataclass(frozen=True, slots=True)
class RetryContext:
    """One failure, as a policy sees it: `failures` counts this one (1 at the first); `error` is what the handler raised (of
    a group, one leaf after the other), a `TimeoutError` for a timeout."""

    id: int
    kind: str
    queue: str
    attempt: int
    max_attempts: int
    failures: int
    error: BaseException


RetryPolicy = Callable[[RetryContext], float | timedelta | None]
"""Seconds (or a `timedelta`) until the next try; None: dead at once. Called on the event loop, so it must not block."""

Errors = type[BaseException] | tuple[type[BaseException], ...]
Retry = RetryPolicy | Mapping[Errors, RetryPolicy]


@dataclass(frozen=True, slots=True)
class Exponential:
    """`base * 2**failures` seconds, at most `cap`; with `jitter` a random time up to that ("full jitter"). The default."""

    base: float = 2.0
    cap: float = 3600.0
    jitter: bool = True

    def __post_init__(self) -> None:
        _positive("Exponential", base=self.base, cap=self.cap)

    def __call__(self, failure: RetryContext) -> float:
        ceiling = exponential(self.base, self.cap, failure.failures)
        # Only spreads load; needs no cryptographic randomness.
        return random.uniform(0, ceiling) if self.jitter else ceiling  # noqa: S311 -- spreads load, guards nothing


@dataclass(frozen=True, slots=True)
class Linear:
    """`step` seconds after the first failure, twice that after the second, and so on, at most `cap`."""

    step: float
    cap: float = 3600.0

    def __post_init__(self) -> None:
        _positive("Linear", step=self.step, cap=self.cap)

    def __call__(self, failure: RetryContext) -> float:
        return min(self.cap, self.step * failure.failures)


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same number of `seconds` after each failure."""

    seconds: float

    def __post_init__(self) -> None:
        if not (_is_number(self.seconds) and 0 <= self.seconds < math.inf):
            raise ConfigurationError(f"Fixed: seconds must be a number from 0 on, got {self.seconds!r}.")

    def __call__(self, failure: RetryContext) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Retries:
    """A handler's options about failures. `rules` are in the order in which they were given: the first that fits decides."""

    rules: tuple[tuple[Errors, RetryPolicy], ...]
    retry_on: tuple[type[BaseException], ...] | None
    discard_on: tuple[type[BaseException], ...]

    def delay(self, claim: Claim, error: BaseException) -> float | None:
        """Seconds until the next try, None when the job is dead at once. Raises what the user's policy raises."""
        delays = [self._delay(claim, leaf) for leaf in leaves_of(error)]
        return max((d for d in delays if d is not None), default=None)

    def _delay(self, claim: Claim, leaf: BaseException) -> float | None:
        # Not isinstance, which asks the exception for its class.
        raised = judged_as(leaf)
        if issubclass(raised, self.discard_on):
            return None
        if self.retry_on is not None and not issubclass(raised, self.retry_on):
            return None
        for errors, policy in self.rules:
            if issubclass(raised, errors):
                return _seconds(policy, policy(_context(claim, leaf)))
        return retry_delay(claim)


def retries_of(
    kind: str, *, retry: object = None, retry_on: object = None, discard_on: object = None
) -> Retries | None:
    """A handler's options about failures, checked; None when it has none. Raises `ConfigurationError`."""
    if retry is None and retry_on is None and discard_on is None:
        return None
    return Retries(
        _rules(kind, retry),
        None if retry_on is None else _errors(kind, "retry_on", retry_on),
        () if discard_on is None else _errors(kind, "discard_on", discard_on),
    )


def _rules(kind: str, retry: object) -> tuple[tuple[Errors, RetryPolicy], ...]:
    if retry is None:
        return ()
    if not isinstance(retry, Mapping):
        return ((BaseException, _policy(kind, retry)),)
    rules = cast("Mapping[object, object]", retry).items()
    return tuple((_errors(kind, "retry", errors), _policy(kind, policy)) for errors, policy in rules)


def _policy(kind: str, policy: object) -> RetryPolicy:
    if not callable(policy) or isinstance(policy, type) or is_async(policy):
        raise ConfigurationError(
            f"Handler {kind!r}: retry must be Exponential(...), Linear(...), Fixed(...), a plain function of a "
            f"RetryContext, or a dictionary from exception types to these; got {policy!r}."
        )
    return cast("RetryPolicy", policy)


def _errors(kind: str, option: str, given: object) -> tuple[type[BaseException], ...]:
    types: tuple[Any, ...] = cast("tuple[Any, ...]", given) if isinstance(given, tuple) else (given,)
    for each in types:
        if not (isinstance(each, type) and issubclass(each, BaseException)):
            raise ConfigurationError(f"Handler {kind!r}: {option} takes exception types, got {each!r}.")
        if issubclass(each, BaseExceptionGroup):
            raise ConfigurationError(
                f"Handler {kind!r}: {option} cannot list {each.__name__}, because groups are judged leaf by leaf; list the "
                f"types of the leaves."
            )
    return types


def _seconds(policy: RetryPolicy, given: object) -> float | None:
    if given is None:
        return None
    seconds: object = given.total_seconds() if isinstance(given, timedelta) else given
    if not (_is_number(seconds) and 0 <= seconds < math.inf):
        raise ValueError(f"{policy!r} returned {given!r}; it must return seconds from 0 on, a timedelta, or None")
    return float(seconds)


def _context(claim: Claim, error: BaseException) -> RetryContext:
    return RetryContext(claim.id, claim.kind, claim.queue, claim.attempt, claim.max_attempts, claim.failures + 1, error)


def _positive(name: str, **numbers: object) -> None:
    for what, number in numbers.items():
        if not (_is_number(number) and 0 < number < math.inf):
            raise ConfigurationError(f"{name}: {what} must be a positive number of seconds, got {number!r}.")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
