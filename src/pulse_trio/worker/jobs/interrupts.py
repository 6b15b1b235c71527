"""Ctrl-C and a worker inside a Trio program: where KeyboardInterrupt is raised.

Trio raises it where the program happens to be, unless that code is protected; then the main task gets it at its next
checkpoint. In a task of the worker it would strike between any two bytecodes: between the answer to a claim and the job table,
for example. Then reports and heartbeats ended with that task, and jobs kept their leases (4 of 60 runs). So all of our code is
protected in a program with a worker. Handlers, which may compute for long, are not: there Ctrl-C strikes at once, goes through
the job's nursery, and ends the worker in good order, as a Ctrl-C in the main task does.

Trio marks code objects. A mark on code of `contextlib` or another library would affect the whole program, so only our own files
get one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, cast

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from ...handlers import Handlers

_ROOT = str(Path(__file__).parents[2])
"""All of pulse-trio."""
_PACKAGES = (
    "pulse_trio.worker",
    "pulse_trio.store",
    "pulse_trio.postgres",
    "pulse_trio.states",
    "pulse_trio.jobs",
    "pulse_trio.tracing",
    "pulse_trio.otel",
)
_marked: set[str] = set()


def protect(handlers: Handlers) -> None:
    """Marks our imported code and the handlers."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGES) and name not in _marked:
            _marked.add(name)
            for code in _codes(module):
                trio.lowlevel.enable_ki_protection(_Marked(code))
    trio.lowlevel.disable_ki_protection(as_users)
    for handler in handlers:
        code = getattr(handler.function, "__code__", None)
        if isinstance(code, CodeType) and not code.co_filename.startswith(_ROOT):
            trio.lowlevel.disable_ki_protection(_Marked(code))


async def as_users(async_fn: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
    """Calls a function that a handler gave us, without our protection."""
    return await async_fn(*args, **options)


class _Marked:
    """What Trio's decorators accept: an object with code."""

    def __init__(self, code: CodeType) -> None:
        self.__code__ = code


def _codes(module: ModuleType) -> Iterator[CodeType]:
    yield from _within(vars(module).values(), module.__name__)


def _within(members: Iterable[object], module: str) -> Iterator[CodeType]:
    for member in members:
        if isinstance(member, type):
            if member.__module__ == module:
                yield from _within(vars(member).values(), module)
        elif isinstance(member, property):
            yield from _within([cast("Any", member).fget], module)
        elif isinstance(member, (staticmethod, classmethod)):
            yield from _within([cast("Any", member).__func__], module)
        else:
            function: Any = member
            # The function that a decorator has wrapped: `asynccontextmanager`, `cache`.
            function = getattr(function, "__wrapped__", function)
            if isinstance(function, FunctionType):
                yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    if code.co_filename.startswith(_ROOT):
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _with_inner(constant)
