"""Describes an exception that a handler raised, safely, whatever its class does.

An exception is a user's object. Any of its special methods may raise (also `SystemExit`), return a wrong type or a gigabyte
of text; its groups may be nested deeper than the interpreter's stack, and its causes may be circular. None of that may end a
worker. So this module, the only one that inspects such objects, takes three precautions:

- Attributes that Python itself keeps (the type's name, the traceback, the cause, a group's exceptions) are read through the
  descriptors of `type` and `BaseException`, which no user's class can override; types are compared by
  `issubclass(type(...))`, because `isinstance` asks the object for its `__class__`.
- Its `str()` and its notes, which only the object can provide, are read once, guarded, and turned into a plain bounded `str`.
- The traceback module gets a bounded number of stand-ins that carry these texts.

Trio, asyncio, threads and psycopg inspect exceptions less carefully. A handler's exception passes through them inside an
exception of ours (`carried`), if its class could do harm there. (We cannot protect a nursery that a handler opens itself.)

A `str()` that loops forever cannot be bounded: it blocks the event loop like any blocking code of the handler, and the
worker's log says where (`LoopBlocked`). Endless recursion ends with a `RecursionError` (`ask`).
"""

from __future__ import annotations

import asyncio
import re
import sys
import traceback
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, cast

import trio

from .trio_internals import CTRL_C

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_T = TypeVar("_T")

_LIMIT = 16_384
"""The longest stored text of an exception, in bytes."""
_LONGEST = 4 * _LIMIT
"""How many characters of a `str()` are used."""
_TOLD = 100
"""How many exceptions of one chain or group are described at most."""
_WIDE, _DEEP = 15, 10
"""Limits for a group, as in Python's own tracebacks."""
_FRAMES = 2000
_NOTES = 20
_GROUPS = 1000
"""How many nested groups are inspected before a group counts as harmful to Trio."""

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")

_read: Any = BaseException.__dict__
_cause_of = _read["__cause__"].__get__
_context_of = _read["__context__"].__get__
_suppresses_context = _read["__suppress_context__"].__get__
_arguments_of = _read["args"].__get__
_traceback_of = _read["__traceback__"].__get__
_namespace_of = _read["__dict__"].__get__
_message_of_group: Any = BaseExceptionGroup.__dict__["message"].__get__
_held_by_group: Any = BaseExceptionGroup.__dict__["exceptions"].__get__
_type: Any = type.__dict__
# Not the method of a dictionary subclass.
_get: Any = dict[Any, Any].get


def error_text(error: BaseException) -> str:
    """The error text stored on the job: `Type: message` on the first line, then the traceback, at most 16 KiB.

    Never raises, whatever the error does: a failure that cannot be recorded would keep its job from being dead-lettered. NUL
    and lone surrogates, which PostgreSQL's text cannot hold, become U+FFFD.
    """
    error = original(error)
    name, message = type_name(error), message_of(error)
    headline = f"{name}: {message}" if message else name
    # Made storable before it is cut: the replacement for a NUL is longer.
    return f"{cut(storable(headline), _LIMIT // 4)}\n\n{cut(storable(_trace_of(error)), _LIMIT * 3 // 4 - 2)}".rstrip()


def type_name(error: BaseException) -> str:
    """The name of its class."""
    return _plain(_type["__name__"].__get__(type(error)))[:200]


def message_of(error: BaseException) -> str:
    """Its `str()`, or why that failed. Bounded; may contain characters that PostgreSQL cannot store."""
    try:
        return _plain(ask(lambda: str(error)))
    except BaseException as broken:  # noqa: ASYNC103 -- str() waits for nothing: what it raises is never Trio's
        if raised_by_ctrl_c(broken):
            raise
        return f"(its message could not be rendered: str() raised {type_name(broken)})"  # noqa: ASYNC104


def ask(question: Callable[[], _T]) -> _T:
    """The answer of a user's object. An endless recursion in its code ends with a `RecursionError`.

    From CPython 3.13 on the interpreter misses its recursion limit in calls that it has specialised: of functions with `*args`,
    `**kwargs` or defaults in 3.13.0 to 3.13.7, with keywords or `*` in later ones (its issues 132744, 137883, 155151). Such
    a recursion takes all memory. Calls in profiled frames are not specialised, so they are checked.
    """
    if sys.version_info < (3, 13) or sys.getprofile() is not None:
        return question()
    sys.setprofile(_ignore)
    try:
        return question()
    finally:
        sys.setprofile(None)


def _ignore(*_: object) -> None: ...


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
            left.extend(reversed(_held_by_group(one)))
        else:
            found.append(one)
    return found


def is_group(error: BaseException) -> bool:
    """Whether it is an ExceptionGroup."""
    return issubclass(type(error), BaseExceptionGroup)


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
    arguments: tuple[Any, ...] = _arguments_of(error)
    return _is_harmless_class(type(error)) and all(type(a) in _PLAIN and not _is_long(a) for a in arguments)


def _is_long(argument: Any) -> bool:
    return type(argument) in (str, bytes) and len(argument) > _LONGEST


@lru_cache(maxsize=1024)
def _is_harmless_class(cls: type) -> bool:
    return not any(_BETWEEN & each.__dict__.keys() for each in type.mro(cls) if each.__module__ != "builtins")


def _is_harmless_group(error: BaseException) -> bool:
    level, depth, groups = [error], 0, 0
    while level:
        depth, groups = depth + 1, groups + len(level)
        if depth > _DEEP or groups > _GROUPS or any(type(g) not in (BaseExceptionGroup, ExceptionGroup) for g in level):
            return False
        if any(type(argument) not in (str, list, tuple) for group in level for argument in _arguments_of(group)):
            return False
        held: list[BaseException] = [one for group in level for one in _held_by_group(group)]
        if not all(_is_harmless(one) for one in held if not is_group(one)):
            return False
        level = [one for one in held if is_group(one)]
    return True


def parted(group: BaseException, leaves: list[BaseException]) -> BaseException:
    """A group like this one with only these leaves."""
    return BaseExceptionGroup(_plain(_message_of_group(group)), leaves).with_traceback(_traceback_of(group))


def raised_by_ctrl_c(error: BaseException) -> bool:
    """Whether it is a KeyboardInterrupt from a real Ctrl-C: then Trio's signal handler is where it was raised."""
    return issubclass(type(error), KeyboardInterrupt) and _raised_in(error) == CTRL_C


def _raised_in(error: BaseException) -> object:
    trace: TracebackType | None = _traceback_of(error)
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return _module_of(trace) if trace is not None else None


# The traceback


def _trace_of(error: BaseException) -> str:
    try:
        told = _Telling().stand_in(error, 1)
        return "".join(traceback.format_exception(type(told), told, told.__traceback__))
    except BaseException as broken:  # noqa: ASYNC103 -- as above
        if raised_by_ctrl_c(broken):
            raise
        # Out of memory, or a module's loader raised when asked for a source line.
        return _bare_trace(error)  # noqa: ASYNC104


def _bare_trace(error: BaseException) -> str:
    """The traceback without source lines, from the frames alone."""
    lines = ["Traceback (most recent call last; its source could not be read):"]
    trace = _without_our_frames(_traceback_of(error))
    while trace is not None and len(lines) < 100:
        code = trace.tb_frame.f_code
        lines.append(f'  File "{code.co_filename}", line {trace.tb_lineno}, in {code.co_name}')
        trace = trace.tb_next
    return "\n".join(lines)


class _Telling:
    """Creates stand-ins for one exception, its causes and its contexts."""

    def __init__(self) -> None:
        self._left = _TOLD
        self._seen: set[int] = set()

    def stand_in(self, error: BaseException, depth: int) -> BaseException:
        """A harmless exception with the same class name, traceback and text."""
        error = original(error)
        self._left -= 1
        self._seen.add(id(error))
        module, name = place_of(type(error))
        notes = _notes_of(error)
        if is_group(error):
            told = self._group(error, module, name, depth, notes)
        else:
            told = _stand_in_class(module, name, BaseException)()
        told.said = message_of(error)
        if notes:
            told.__notes__ = notes
        told.__cause__ = self._linked(_cause_of(error), depth)
        told.__suppress_context__ = _suppresses_context(error)
        if told.__cause__ is None and not told.__suppress_context__:
            told.__context__ = self._linked(_context_of(error), depth)
        trace = _traceback_of(error)
        return told.with_traceback(_last(_without_our_frames(trace) if depth == 1 else trace))

    def _group(self, group: BaseException, module: str, name: str, depth: int, notes: list[str]) -> Any:
        held: tuple[BaseException, ...] = _held_by_group(group)
        inside = (
            [told for one in held[:_WIDE] if (told := self._linked(one, depth)) is not None] if depth < _DEEP else []
        )
        if len(inside) < len(held):
            notes.append(
                f"({len(held) - len(inside)} more of what this group holds: too many or too deep to be told, or told above)"
            )
        # A group cannot be empty.
        inside = inside or [_stand_in_class("builtins", "...", BaseException)()]
        return _stand_in_class(module, name, BaseExceptionGroup)("", inside)

    def _linked(self, other: BaseException | None, depth: int) -> BaseException | None:
        if other is None or id(other) in self._seen or self._left <= 0:
            return None
        return self.stand_in(other, depth + 1)


def _said(told: Any) -> str:
    return getattr(told, "said", "")


@lru_cache(maxsize=256)
def _stand_in_class(module: str, name: str, base: type[BaseException]) -> Any:
    return type(name, (base,), {"__module__": module, "__qualname__": name, "__str__": _said})


def place_of(cls: type) -> tuple[str, str]:
    """The module and the qualified name of a class."""
    module = _type["__module__"].__get__(cls)
    name = storable(_plain(_type["__qualname__"].__get__(cls)))[:200]
    return (storable(_plain(module))[:200] if issubclass(type(module), str) else "?"), name


def _notes_of(error: BaseException) -> list[str]:
    notes: object = _get(_namespace_of(error), "__notes__")
    if type(notes) is not list:
        return []
    texts = [note for note in islice(cast("list[object]", notes), _NOTES) if issubclass(type(note), str)]
    return [cut(_plain(cast("str", note)), _LIMIT // 4) for note in texts]


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the handler on, without the worker's own frames."""
    inner = trace
    while inner is not None and _is_ours(inner):
        inner = inner.tb_next
    return inner or trace


def _is_ours(trace: TracebackType) -> bool:
    module = _module_of(trace)
    return module.startswith(("pulse_trio.worker.", "pulse_trio.handlers", "pulse_trio.codec", "trio.", "outcome."))


def _module_of(trace: TracebackType) -> str:
    name: object = _get(trace.tb_frame.f_globals, "__name__")
    return name if type(name) is str else ""


def _last(trace: TracebackType | None) -> TracebackType | None:
    """The traceback, or only the end of a very long one: a program may raise its recursion limit."""
    length, one = 0, trace
    while one is not None:
        length, one = length + 1, one.tb_next
    while length > _FRAMES and trace is not None:
        length, trace = length - 1, trace.tb_next
    return trace


# Texts


def storable(text: str) -> str:
    """`text` without characters that PostgreSQL cannot store."""
    return _UNSTORABLE.sub("\ufffd", text)


def _plain(text: str) -> str:
    """A plain `str`, not a subclass, of bounded length: both ends of a long one."""
    plain = str.__str__(text)
    return plain if len(plain) <= 2 * _LONGEST else f"{plain[:_LONGEST]}...{plain[-_LONGEST:]}"


def cut(text: str, limit: int) -> str:
    """At most `limit` bytes of UTF-8. Keeps both ends: the first lines say where it began, the last what went wrong."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= limit:
        return text
    half = limit // 2 - 24
    # A character at a cut is dropped.
    begin, rest = (part.decode("utf-8", "ignore") for part in (data[:half], data[-half:]))
    return f"{begin}\n... {len(data) - 2 * half} bytes cut ...\n{rest}"
