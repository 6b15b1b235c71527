"""What a callable is that a user gives: a function, and one whose call is to be awaited."""

from __future__ import annotations

from functools import partial
from inspect import iscoroutinefunction, isroutine


def is_async(function: object) -> bool:
    """Whether a call gives something to await: of an async function, of a `functools.partial` of one, or of an object whose
    class has an async `__call__`."""
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(type(function), "__call__", None))  # noqa: B004 -- not whether it can be called


def is_function(thing: object) -> bool:
    """Whether it is a function or a method, of Python's or of C's, or what wraps one as `functools.cache` does. Not a
    `functools.partial`, which has neither a name nor annotations; Python 3.14 takes it for a method's descriptor."""
    return not isinstance(thing, partial) and isroutine(thing)
