"""Objects whose special methods raise, lie, or give far too much; and a handler of each kind that meets them."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import trio

from pulse_trio import Discard, Handlers, Job, RetryAfter, Snooze

if TYPE_CHECKING:
    from collections.abc import Iterator

handlers = Handlers()


class Text(str):
    """A text that is none."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        raise LookupError(name)

    def __len__(self) -> int:
        raise SystemExit("len")

    def __str__(self) -> str:
        return self

    def __format__(self, spec: str) -> str:
        raise SystemExit("format")


class Number(float):
    """A number that says what it likes."""

    def __float__(self) -> float:
        raise SystemExit("float")

    def __le__(self, other: object) -> bool:
        return True

    __ge__ = __lt__ = __gt__ = __le__


def _raises(make: Any) -> Any:
    def behave(self: Any, *args: Any, **given: Any) -> Any:
        raise make()

    return behave


def _gives(make: Any) -> Any:
    def behave(self: Any, *args: Any, **given: Any) -> Any:
        return make()

    return behave


def _returns_itself(self: Any, *args: Any, **given: Any) -> Any:
    return self


def _raises_itself(self: Any, *args: Any, **given: Any) -> Any:
    raise self


def _never_ends(self: Any, *args: Any, **given: Any) -> Any:
    return _never_ends(self)


BEHAVIOURS: dict[str, Any] = {
    "raises ValueError": _raises(lambda: ValueError("mine")),
    "raises KeyError": _raises(lambda: KeyError("mine")),
    "raises AttributeError": _raises(lambda: AttributeError("mine")),
    "raises StopIteration": _raises(StopIteration),
    "raises MemoryError": _raises(MemoryError),
    "raises SystemExit": _raises(SystemExit),
    "raises KeyboardInterrupt": _raises(KeyboardInterrupt),
    "raises GeneratorExit": _raises(GeneratorExit),
    "raises Cancelled": _raises(lambda: trio.Cancelled._create(source="unknown")),
    "raises a group": _raises(lambda: BaseExceptionGroup("", [SystemExit()])),
    "raises itself": _raises_itself,
    "gives a number": _gives(lambda: 7),
    "gives None": _gives(lambda: None),
    "gives NaN": _gives(lambda: float("nan")),
    "gives a list": _gives(lambda: [object()]),
    "gives far too much": _gives(lambda: "x" * 10**6),
    "gives surrogates": _gives(lambda: "\ud800\0"),
    "gives a text that is none": _gives(lambda: Text("text")),
    "gives a number that lies": _gives(lambda: Number(3)),
    "gives itself": _returns_itself,
    "never ends": _never_ends,
}
METHODS = [
    "__str__", "__repr__", "__getattr__", "__getattribute__", "__setattr__", "__delattr__", "__eq__", "__hash__", "__bool__",
    "__len__", "__iter__", "__getitem__", "__contains__", "__format__", "__reduce__", "__reduce_ex__", "__sizeof__", "__dir__",
    "__init_subclass__", "__call__", "__float__", "__index__", "__lt__", "__le__", "__del__", "add_note", "with_traceback",
    "derive", "split", "subgroup",
]  # fmt: skip
ATTRIBUTES = [
    "__class__", "__dict__", "__traceback__", "__cause__", "__context__", "__suppress_context__", "__notes__", "args",
    "seconds", "delay", "recorded_as", "text", "said", "message", "exceptions", "__module__",
]  # fmt: skip
BASES: dict[str, tuple[type[BaseException], tuple[Any, ...]]] = {
    "Exception": (Exception, ("mine",)),
    "BaseException": (BaseException, ("mine",)),
    "KeyError": (KeyError, ("mine",)),
    "OSError": (OSError, (2, "mine")),
    "Snooze": (Snooze, (300,)),
    "RetryAfter": (RetryAfter, (300,)),
    "Discard": (Discard, ("mine",)),
    "SystemExit": (SystemExit, (1,)),
    "ExceptionGroup": (ExceptionGroup, ("several", [ValueError("one"), KeyError("two")])),
    "BaseExceptionGroup": (BaseExceptionGroup, ("several", [SystemExit("one"), KeyError("two")])),
}


def cases() -> Iterator[tuple[str, str, str]]:
    """(base, name, behaviour), each combination that there can be."""
    for base, name, behaviour in itertools.product(BASES, [*METHODS, *ATTRIBUTES], BEHAVIOURS):
        # What a finaliser raises is Python's to tell.
        if not (name == "__del__" and behaviour.startswith(("raises", "never"))):
            yield base, name, behaviour


def hostile(base: str, name: str, behaviour: str) -> BaseException:
    """An exception of a class derived from `base` that has `name` behave so."""
    cls, args = BASES[base]
    behave = BEHAVIOURS[behaviour]
    value = behave if name in METHODS else property(behave)
    late = name not in ("__class__", "__dict__")
    made: type[Any] = type("Hostile", (cls,), {} if late else {name: value})
    error = made(*args)
    if late:
        # Now, and not when it was made: the constructors are to do their work.
        setattr(made, name, value)
    return error


def deep_group(depth: int) -> BaseException:
    """A group in a group in a group."""
    error: Exception = ValueError("the innermost")
    for _ in range(depth):
        within: list[Exception] = [error]
        error = ExceptionGroup("level", within)
    return error


def chain(length: int) -> BaseException:
    """An exception with so many causes."""
    error = ValueError("the first")
    for n in range(length):
        after = ValueError(f"number {n}")
        after.__cause__ = error
        error = after
    return error


def circle() -> BaseException:
    """Two exceptions, each the other's cause, in a group that is in its own leaf's context."""
    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    group = ExceptionGroup("both", [one, other])
    one.__context__ = group
    return group


def nested_in_itself() -> BaseException:
    """A group of two that are the same group, sixty levels deep: 2 ** 60 leaves, if they were taken one by one."""
    error: Exception = ValueError("the leaf")
    for _ in range(60):
        within: list[Exception] = [error, error]
        error = ExceptionGroup("level", within)
    return error


def wide_group(width: int) -> BaseException:
    return ExceptionGroup("wide", [ValueError(str(n)) for n in range(width)])


SHAPES: dict[str, Any] = {
    "a group 900 deep": lambda: deep_group(900),
    "a group 3,000 deep": lambda: deep_group(3000),
    "a group 100,000 wide": lambda: wide_group(100_000),
    "10,000 causes": lambda: chain(10_000),
    "a circle": circle,
    "2 ** 60 leaves": nested_in_itself,
    "a name of a megabyte": lambda: type("x" * 10**6, (Exception,), {})("mine"),
    "notes that are none": lambda: _with_notes([7, Text("note"), "x" * 10**6, None] * 1000),
}


def _with_notes(notes: Any) -> BaseException:
    error = ValueError("mine")
    error.__notes__ = notes
    return error


def meet(what: list[str]) -> None:
    """Raises the exception that a job asks for."""
    if what != ["none"]:
        raise SHAPES[what[0]]() if len(what) == 1 else hostile(*what)


@handlers.job(name="trio")
async def on_trio(what: list[str]) -> None:
    meet(what)


@handlers.job(name="child")
async def in_a_child(job: Job, what: list[str]) -> None:
    async def child() -> None:
        meet(what)

    job.nursery.start_soon(child)


@handlers.job(name="cancelled")
async def while_cancelled(job: Job, what: list[str]) -> None:
    async def child(*, task_status: trio.TaskStatus[None]) -> None:
        try:
            with trio.CancelScope(shield=what == ["none"]):
                task_status.started()
                await trio.lowlevel.checkpoint()
                await trio.sleep(0 if what == ["none"] else math.inf)
        finally:
            meet(what)

    await job.nursery.start(child)
    if what != ["none"]:
        job.nursery.cancel_scope.cancel()


@handlers.job(name="thread")
def in_a_thread(what: list[str]) -> None:
    meet(what)


@handlers.job(name="asyncio", runs="asyncio")
async def on_asyncio(what: list[str]) -> None:
    meet(what)


@handlers.job(name="process", runs="process")
def in_a_process(what: list[str]) -> None:
    meet(what)
