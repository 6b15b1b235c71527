"""Carries a user's exception through code that would call the methods of its class."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Any

import trio

from .attributes import arguments_of, held_by_group, is_group, message_of_group, traceback_of
from .texts import LONGEST, plain

_DEEP, _GROUPS = 10, 1000
"""How deep a group may be nested, and how many groups it may hold, before it counts as harmful to Trio."""


class Carried(Exception):
    """Carries a user's exception through code that would call the methods of its class. Described as the exception it
    carries."""

    def __init__(self, original: BaseException) -> None:
        super().__init__()
        self.original = original


class CarriedBase(BaseException):
    """The same, for an exception that is not an `Exception`."""

    def __init__(self, original: BaseException) -> None:
        super().__init__()
        self.original = original


def carried(error: BaseException) -> BaseException:
    """The exception itself if it is safe for Trio; else one that carries it.

    Trio, asyncio and the threads' results call `with_traceback` on a task's exception, read its `repr()` and its `__class__`,
    and set its context. They split a group that contains a cancellation, which calls `derive` of the group's own class, and
    recurses for each level of nesting. An exception from one of these calls would strike inside Trio's own code and end the
    worker.
    """
    if not is_group(error):
        return error if _is_harmless(error) else _carrier(error)
    if _is_harmless_group(error):
        return error
    leaves = leaves_of(error)
    if not any(issubclass(type(leaf), trio.Cancelled) for leaf in leaves):
        return _carrier(error)
    # Trio must find its own exceptions.
    return parted(error, [leaf if _is_harmless(leaf) else _carrier(leaf) for leaf in leaves])


def leaves_of(error: BaseException) -> list[BaseException]:
    """The exceptions inside an ExceptionGroup, however deep, each once; the exception itself if it is not a group."""
    found: list[BaseException] = []
    seen: set[int] = set()
    left = [error]
    while left:
        one = original(left.pop())
        if id(one) in seen:
            # The same group may be in many others: without this check a few dozen groups could take forever.
            continue
        seen.add(id(one))
        if is_group(one):
            left.extend(reversed(held_by_group(one)))
        else:
            found.append(one)
    return found


def original(error: BaseException) -> BaseException:
    """The carried exception, or the exception itself."""
    return error.original if type(error) is Carried or type(error) is CarriedBase else error


def _carrier(error: BaseException) -> BaseException:
    return Carried(error) if issubclass(type(error), Exception) else CarriedBase(error)


_BETWEEN = frozenset(
    [
        *("__class__", "__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__dict__", "__traceback__"),
        *("__cause__", "__context__", "__suppress_context__", "__notes__", "with_traceback", "add_note"),
        *(
            "__repr__",
            "__eq__",
            "__hash__",
            "__bool__",
            "__len__",
            "derive",
            "split",
            "subgroup",
            "message",
            "exceptions",
        ),
    ]
)
"""The methods of an exception's class that Trio, asyncio and threads may call."""
_CANCELLED = (trio.Cancelled, asyncio.CancelledError)
"""Trio and asyncio must find their own exceptions."""
_PLAIN = (str, bytes, int, float, bool, type(None))


def _is_harmless(error: BaseException) -> bool:
    if type(error) in _CANCELLED:
        return True
    # repr() calls the arguments' repr().
    arguments: tuple[Any, ...] = arguments_of(error)
    return _is_harmless_class(type(error)) and all(type(a) in _PLAIN and not _is_long(a) for a in arguments)


def _is_long(argument: Any) -> bool:
    return type(argument) in (str, bytes) and len(argument) > LONGEST


@lru_cache(maxsize=1024)
def _is_harmless_class(cls: type) -> bool:
    return not any(_BETWEEN & each.__dict__.keys() for each in type.mro(cls) if each.__module__ != "builtins")


def _is_harmless_group(error: BaseException) -> bool:
    level, depth, groups = [error], 0, 0
    while level:
        depth, groups = depth + 1, groups + len(level)
        if depth > _DEEP or groups > _GROUPS or any(type(g) not in (BaseExceptionGroup, ExceptionGroup) for g in level):
            return False
        if any(type(argument) not in (str, list, tuple) for group in level for argument in arguments_of(group)):
            return False
        held: list[BaseException] = [one for group in level for one in held_by_group(group)]
        if not all(_is_harmless(one) for one in held if not is_group(one)):
            return False
        level = [one for one in held if is_group(one)]
    return True


def parted(group: BaseException, leaves: list[BaseException]) -> BaseException:
    """A group like this one with only these leaves."""
    return BaseExceptionGroup(plain(message_of_group(group)), leaves).with_traceback(traceback_of(group))
