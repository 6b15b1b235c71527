"""Whether a call of a function that a user gives is to be awaited."""

from __future__ import annotations

from inspect import iscoroutinefunction


def is_async(function: object) -> bool:
    """Whether a call gives something to await: of an async function, of a `functools.partial` of one, or of an object whose
    class has an async `__call__`."""
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(type(function), "__call__", None))  # noqa: B004 -- not whether it can be called
