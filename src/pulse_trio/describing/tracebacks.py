"""The error text of a job: what an exception says of itself, and its traceback."""

from __future__ import annotations

import re
import traceback
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from ..jobs import RetryAfter
from .attributes import (
    cause_of,
    context_of,
    get_of,
    held_by_group,
    is_group,
    module_of,
    namespace_of,
    place_of,
    raised_by_ctrl_c,
    suppresses_context,
    traceback_of,
    type_name,
)
from .carrying import leaves_of, original
from .texts import LIMIT, ask, cut, plain, storable

if TYPE_CHECKING:
    from types import TracebackType

_TOLD = 100
"""How many exceptions of one chain or group are described at most."""
_WIDE, _DEEP = 15, 10
"""Limits for a group, as in Python's own tracebacks."""
_NAMED = 3
"""How many of a group's exceptions its first line names; the rest are counted."""
_NAMED_LENGTH = 300
_CAUSE_LENGTH = 200
"""Of that, what went wrong at the end of a chain of children."""
_DEAD = " is dead: "
"""What stands between the name of a child and the cause (worker/durable/children.py)."""
_LEFT_OUT = "... "
_TRACE = re.compile(r"\n\n[ +|]*(?:Exception Group )?Traceback \(most")
_FRAMES = 2000
_NOTES = 20
_OURS = (
    "pulse_trio.worker.",
    "pulse_trio.handlers",
    "pulse_trio.codec",
    "pulse_trio.django.",
    "trio.",
    "outcome.",
    "asgiref.",  # below the calls of Django's tasks
)


def error_text(error: BaseException) -> str:
    """The error text stored on the job: `Type: message` on the first line, then the traceback, at most 16 KiB.

    The first line of a group goes on with what is in it, because a list of jobs and a log show that line alone.

    Never raises, whatever the error does: a failure that cannot be recorded would keep its job from being dead-lettered. NUL
    and lone surrogates, which PostgreSQL's text cannot hold, become U+FFFD.
    """
    error = original(error)
    headline = headline_of(error)
    # Made storable before it is cut: the replacement for a NUL is longer.
    return f"{cut(storable(headline), LIMIT // 4)}\n\n{cut(storable(_trace_of(error)), LIMIT * 3 // 4 - 2)}".rstrip()


def headline_of(error: BaseException) -> str:
    """`Type: message`, and of a group what is in it. A `RetryAfter` has no message of its own: its cause is named. May contain
    characters that PostgreSQL cannot store."""
    name, message = type_name(error), message_of(error)
    said = f"{name}: {message}" if message else name
    if issubclass(type(error), RetryAfter) and (cause := cause_of(error)) is not None:
        return f"{said}, because of {_named(cause)}"
    return f"{said}: {_named(error)}" if is_group(error) else said


def _named(group: BaseException) -> str:
    """The first exceptions in a group, each on one line."""
    leaves = leaves_of(group)
    named = [_on_one_line(leaf) for leaf in leaves[:_NAMED]]
    if len(leaves) > _NAMED:
        named.append(f"{len(leaves) - _NAMED:,} more")
    return "; ".join(named)


def _on_one_line(error: BaseException) -> str:
    # The message of a child's failure goes on with the child's traceback.
    message = " ".join(_TRACE.split(message_of(error), maxsplit=1)[0].split())
    said = f"{type_name(error)}: {message}" if message else type_name(error)
    return said if len(said) <= _NAMED_LENGTH else _shortened(said)


def _shortened(said: str) -> str:
    """A long line. Of a child that is dead of a child of its own, and so on, it keeps the first names, and the cause at the
    end."""
    names, dead, cause = said.rpartition(_DEAD)
    if not dead:
        return f"{said[:_NAMED_LENGTH]}..."
    # Its own line, which was shortened before, has the mark already.
    left_out = cause.startswith(_LEFT_OUT)
    cause = cause.removeprefix(_LEFT_OUT)
    if len(cause) > _CAUSE_LENGTH:
        cause = f"{cause[:_CAUSE_LENGTH]}..."
    room = _NAMED_LENGTH - len(cause)
    if len(names) > room:
        left_out = True
        names = names[:room].rpartition(_DEAD)[0] or names[:room]
    return f"{names}{_DEAD}{_LEFT_OUT if left_out else ''}{cause}"


def message_of(error: BaseException) -> str:
    """Its `str()`, or why that failed. Bounded; may contain characters that PostgreSQL cannot store."""
    try:
        return plain(ask(lambda: str(error)))
    except BaseException as broken:  # noqa: ASYNC103 -- str() waits for nothing: what it raises is never Trio's
        if raised_by_ctrl_c(broken):
            raise
        return f"(its message could not be rendered: str() raised {type_name(broken)})"  # noqa: ASYNC104 -- as above


# The traceback


def _trace_of(error: BaseException) -> str:
    try:
        told = _Telling().stand_in(error, 1)
        return "".join(traceback.format_exception(type(told), told, told.__traceback__))
    except BaseException as broken:  # noqa: ASYNC103 -- nothing in here waits, as in message_of
        if raised_by_ctrl_c(broken):
            raise
        # Out of memory, or a module's loader raised when asked for a source line.
        return _bare_trace(error)  # noqa: ASYNC104 -- as above


def _bare_trace(error: BaseException) -> str:
    """The traceback without source lines, from the frames alone."""
    lines = ["Traceback (most recent call last; its source could not be read):"]
    trace = _without_our_frames(traceback_of(error))
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
        told.__cause__ = self._linked(cause_of(error), depth)
        told.__suppress_context__ = suppresses_context(error)
        if told.__cause__ is None and not told.__suppress_context__:
            told.__context__ = self._linked(context_of(error), depth)
        trace = traceback_of(error)
        return told.with_traceback(_last(_without_our_frames(trace) if depth == 1 else trace))

    def _group(self, group: BaseException, module: str, name: str, depth: int, notes: list[str]) -> Any:
        held: tuple[BaseException, ...] = held_by_group(group)
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


def _notes_of(error: BaseException) -> list[str]:
    notes: object = get_of(namespace_of(error), "__notes__")
    if type(notes) is not list:
        return []
    texts = [note for note in islice(cast("list[object]", notes), _NOTES) if issubclass(type(note), str)]
    return [cut(plain(cast("str", note)), LIMIT // 4) for note in texts]


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the handler on, without the worker's own frames."""
    inner = trace
    while inner is not None and _is_ours(inner):
        inner = inner.tb_next
    return inner or trace


def _is_ours(trace: TracebackType) -> bool:
    module = module_of(trace)
    return module.startswith(_OURS)


def _last(trace: TracebackType | None) -> TracebackType | None:
    """The traceback, or only the end of a very long one: a program may raise its recursion limit."""
    length, one = 0, trace
    while one is not None:
        length, one = length + 1, one.tb_next
    while length > _FRAMES and trace is not None:
        length, trace = length - 1, trace.tb_next
    return trace
