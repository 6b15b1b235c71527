"""What Python itself keeps of an exception, read past its class: no code of the user's runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..trio_internals import CTRL_C
from .texts import plain, storable

if TYPE_CHECKING:
    from types import TracebackType

_read: Any = BaseException.__dict__
cause_of = _read["__cause__"].__get__
context_of = _read["__context__"].__get__
suppresses_context = _read["__suppress_context__"].__get__
arguments_of = _read["args"].__get__
traceback_of = _read["__traceback__"].__get__
namespace_of = _read["__dict__"].__get__
message_of_group: Any = BaseExceptionGroup.__dict__["message"].__get__
held_by_group: Any = BaseExceptionGroup.__dict__["exceptions"].__get__
_type: Any = type.__dict__
# Not the method of a dictionary subclass.
get_of: Any = dict[Any, Any].get


def type_name(error: BaseException) -> str:
    """The name of its class."""
    return plain(_type["__name__"].__get__(type(error)))[:200]


STANDS_FOR = "_pulse_trio_stands_for"
"""In the namespace of an exception's class: the class for which it stands, because that must not be raised."""


def judged_as(error: BaseException) -> type[BaseException]:
    """The class by which retry policies judge it."""
    return _type["__dict__"].__get__(type(error)).get(STANDS_FOR, type(error))


def bases_of(error: BaseException) -> list[type[BaseException]]:
    """The exceptions' classes from which its own is derived, nearest first."""
    return [base for base in _type["__mro__"].__get__(type(error))[1:] if issubclass(base, BaseException)]


def is_group(error: BaseException) -> bool:
    """Whether it is an ExceptionGroup."""
    return issubclass(type(error), BaseExceptionGroup)


def place_of(cls: type) -> tuple[str, str]:
    """The module and the qualified name of a class."""
    module = _type["__module__"].__get__(cls)
    name = storable(plain(_type["__qualname__"].__get__(cls)))[:200]
    return (storable(plain(module))[:200] if issubclass(type(module), str) else "?"), name


def raised_by_ctrl_c(error: BaseException) -> bool:
    """Whether it is a KeyboardInterrupt from a real Ctrl-C: then Trio's signal handler is where it was raised."""
    return issubclass(type(error), KeyboardInterrupt) and _raised_in(error) == CTRL_C


def _raised_in(error: BaseException) -> object:
    trace: TracebackType | None = traceback_of(error)
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return module_of(trace) if trace is not None else None


def module_of(trace: TracebackType) -> str:
    name: object = get_of(trace.tb_frame.f_globals, "__name__")
    return name if type(name) is str else ""
