"""Middleware: async functions around every attempt of a registry's jobs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True, eq=False)
class Middleware:
    """One middleware. `parameters` are those after `job` and `call`: resources."""

    name: str
    function: Callable[..., Any]
    parameters: tuple[inspect.Parameter, ...]
    hints: Mapping[str, Any]


def middleware_of(function: Any) -> Middleware:
    """The middleware that a function is. Raises `ConfigurationError`."""
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
    if not inspect.iscoroutinefunction(function):
        raise ConfigurationError(
            f"The middleware {name} is not an async function: `async def timed(job, call): return await call()`."
        )
    parameters = tuple(inspect.signature(function).parameters.values())
    first = parameters[:2]
    if len(first) < 2 or any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in first):
        raise ConfigurationError(f"The middleware {name} must take two arguments first: the job and `call`.")
    try:
        hints = get_type_hints(function)
    except NameError:
        hints = dict[str, Any]()  # its resources are found by their names
    return Middleware(name, function, parameters[2:], hints)
