"""What a declaration of a handler says, checked: how it runs, and the options that are not its jobs' defaults."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

from ..errors import ConfigurationError
from .handler import Handler
from .retries import Exponential, retries_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .handler import Runs
    from .retries import Retries
    from .signature import Upgrade


def how_it_runs(kind: str, function: Callable[..., Any], runs: str | None) -> Runs:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"Handler {kind!r} is a generator: a job is called once, and its return value is its result."
        )
    is_async = inspect.iscoroutinefunction(function)
    match runs:
        case None:
            return "trio" if is_async else "thread"
        case "trio" | "asyncio" | "thread" | "process":
            pass
        case _:
            raise ConfigurationError(
                f"Handler {kind!r} has runs={runs!r}; this version knows 'trio', 'asyncio', 'thread' and 'process'."
            )
    if (runs in ("trio", "asyncio")) != is_async:
        wanted = "a plain function" if is_async else "an async function"
        raise ConfigurationError(f"Handler {kind!r} has runs={runs!r}, which needs {wanted}.")
    if runs == "process" and "<" in getattr(function, "__qualname__", "<"):
        raise ConfigurationError(
            f"Handler {kind!r} has runs='process', so another process must be able to import it, and {_name(function)} is "
            "not at the top level of its module. Move it there."
        )
    return runs


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{getattr(function, '__qualname__', repr(function))}"


def take_retries(kind: str, given: dict[str, Any]) -> Retries | None:
    """Takes the options about failures out of the given ones. The numbers of `Exponential` are stored on the row like the
    default's."""
    about = {name: given.pop(name) for name in ("retry", "retry_on", "discard_on") if name in given}
    if about.get("retry") is not None and not given.keys().isdisjoint(("backoff_base", "backoff_cap")):
        raise ConfigurationError(f"Handler {kind!r}: give retry, or backoff_base and backoff_cap, not both.")
    if isinstance(policy := about.get("retry"), Exponential):
        given |= {"backoff_base": policy.base, "backoff_cap": policy.cap}
    return retries_of(kind, **about)


def take_upgrade(kind: str, given: dict[str, Any]) -> Upgrade | None:
    upgrade: Any = given.pop("upgrade", None)
    called: object = upgrade
    if called is not None and (not callable(called) or inspect.iscoroutinefunction(called)):
        raise ConfigurationError(
            f"Handler {kind!r}: upgrade must be a plain function from a job's arguments by name to those that the "
            f"handler takes now, got {upgrade!r}."
        )
    return upgrade


def take_on_death(kind: str, given: dict[str, Any]) -> str | None:
    named: Any = given.pop("on_death", None)
    if named is None:
        return None
    if isinstance(named, Handler):
        return cast("Handler[..., Any]", named).kind
    if not isinstance(named, str):
        raise ConfigurationError(
            f"Handler {kind!r}: on_death must be a handler of this registry or its kind, got {named!r}."
        )
    return named
