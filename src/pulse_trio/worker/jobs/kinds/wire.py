"""The messages between a worker and its child processes: one JSON object a line, both ways. Never pickle.

The child reads a line of an order only when it has taken the line's ticket (line.py)."""

from __future__ import annotations

import sys
from math import isfinite
from typing import Any, cast

import msgspec

from ....describing import (
    STANDS_FOR,
    ask,
    bases_of,
    cut,
    error_text,
    is_group,
    leaves_of,
    message_of,
    place_of,
    storable,
)
from ....job_log import JobFields
from ....jobs import CancelReason, Claim, Discard, RetryAfter, Snooze, delay_of
from ....states import WISHES

NUMBERS = 256
"""Of tickets, each one byte: more than lines can be on their way."""
_LEAVES = 1000
"""Exceptions of a group that cross; a retry policy is asked about no more of them."""
_LIMIT = 65_536
"""Bytes of an exception's message that cross."""
_BASES = 50
_SHORT, _ATTRIBUTES = 1000, 50
"""Characters of a text among an exception's arguments and attributes that cross, and how many attributes."""

_ARGS, _DICT = vars(BaseException)["args"], vars(BaseException)["__dict__"]
"""Python's own: those of an exception's class may do anything."""


class Importable(msgspec.Struct, frozen=True):
    """A handler or an exception's class, by where it is found: `module` to import, `name` in it."""

    module: str
    name: str


class Call(msgspec.Struct, frozen=True, tag="call"):
    """To the child: run the handler at `place` for this claim, within the span that `trace` names. Not from `begin_by` on, by
    `time.perf_counter()`: then the job may be another worker's."""

    place: Importable
    claim: Claim
    trace: tuple[str, str | None] | None = None
    begin_by: float | None = None


class Load(Call, frozen=True, tag="load"):
    """To the child, before its first `Call` of that handler: import its module. The answer is `Returned`, or `Raised`."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """To the child, before its signal: why. `reason` is None if the job is not cancelled, only the call of its handler."""

    reason: CancelReason | None
    message: str | None = None


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """From the child: the handler's value, after `took` seconds. `leaves`: processes that it has started still run; the child
    takes no other order."""

    value: msgspec.Raw
    took: float | None = None
    leaves: bool = False


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """From the child: the exception that the handler raised. `record` is the part that is kept on the job; `seconds` is the
    delay that it asked for; `inner` has the exceptions in an ExceptionGroup, however deep (without records of their own).
    `took` and `leaves` as of `Returned`. `bases`: the classes from which its own is derived, nearest first, of which the worker
    may know one where it does not know that: a class in a function has no place. `args` and `attributes`: what of its own JSON
    carries."""

    place: Importable
    text: str
    record: str
    seconds: float | None = None
    inner: list[Raised] | None = None
    took: float | None = None
    leaves: bool = False
    bases: list[Importable] = []
    args: list[Any] = []
    attributes: dict[str, Any] = {}


class Late(msgspec.Struct, frozen=True, tag="late"):
    """From the child: it has not begun, because `begin_by` was over."""


class Left(msgspec.Struct, frozen=True, tag="left"):
    """From the child: it left the handler, as ordered."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From the child, once: it has started."""


class Said(msgspec.Struct, frozen=True, tag="said"):
    """From the child, while the handler runs: its progress."""

    fraction: float
    message: str | None


class Logged(msgspec.Struct, frozen=True, tag="logged"):
    """From the child, at any time: a log record, for the worker's own log. `created` in seconds since 1970; `job` is the one
    that it belongs to, `extra` what was given as `extra=`."""

    name: str
    level: int
    message: str
    created: float
    traceback: str | None = None
    job: JobFields = JobFields()
    extra: dict[str, Any] = {}


Answer = Returned | Raised | Late | Left | Ready | Said | Logged
encode = msgspec.json.Encoder().encode
_orders: msgspec.json.Decoder[Call | Load | Cancel] = msgspec.json.Decoder(Call | Load | Cancel)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
decode_order = _orders.decode
decode_answer = _answers.decode


def describe(error: BaseException) -> Raised:
    """An exception as it crosses; of a group only its leaves. Never raises, whatever the exception does."""
    leaves = leaves_of(error) if is_group(error) else None
    inner = None if leaves is None else [_described(leaf, "") for leaf in leaves[:_LEAVES]]
    return msgspec.structs.replace(_described(error, error_text(error)), inner=inner)


def _described(error: BaseException, record: str) -> Raised:
    # A request such as RetryAfter is recognised by its class, and the worker may not know a class derived from it.
    wish = next((w for w in WISHES if issubclass(type(error), w)), type(error))
    module, name = place_of(wish)
    text = cut(storable(message_of(error)), _LIMIT)
    bases = [Importable(*place_of(base)) for base in bases_of(error)[:_BASES]]
    args, attributes = _own_of(error)
    place = Importable(module, name)
    return Raised(place, text, record, seconds=_seconds_of(error), bases=bases, args=args, attributes=attributes)


def _own_of(error: BaseException) -> tuple[list[Any], dict[str, Any]]:
    """Its arguments, and its attributes, as far as they are JSON's own values and small: a retry policy asks for a status, a
    number of seconds, an errno. Its arguments cross all or not at all."""
    args: tuple[object, ...] = _ARGS.__get__(error)
    attributes: dict[Any, object] = _DICT.__get__(error)
    plain = {name: value for name, value in [*attributes.items()] if type(name) is str and _is_plain(value)}
    return [*args] if all(map(_is_plain, args)) else [], plain if len(plain) <= _ATTRIBUTES else {}


def _is_plain(value: object) -> bool:
    # By its very type: a subclass, or an object that only says that it is one, may do anything.
    kind = type(value)
    if kind is str:
        text = cast("str", value)
        return len(text) <= _SHORT and storable(text) == text
    if kind is int or kind is bool:
        return abs(cast("int", value)) < 2**63
    return value is None or (kind is float and isfinite(cast("float", value)))


def _seconds_of(error: BaseException) -> float | None:
    if not issubclass(type(error), (Snooze, RetryAfter)):
        return None
    try:
        return ask(lambda: delay_of(cast("Any", error).seconds))
    except BaseException:  # noqa: ASYNC103 -- an attribute of the user's; the code that reads the seconds reports it
        return None  # noqa: ASYNC104 -- as above


def rebuild(raised: Raised) -> Exception:
    """The exception again, as far as a retry policy needs it: of the same class if this process knows it, else of the nearest
    that it knows, with the same text. One that is no `Exception`, a SystemExit, would end the worker where it is raised: it is
    an `Exception` that stands for that class. Never raises, whatever that class does."""
    known = next((found for place in (raised.place, *raised.bases) if (found := _find(place)) is not None), Exception)
    cls: type[Exception] = known if issubclass(known, Exception) else Exception
    if raised.seconds is not None and cls in (Snooze, RetryAfter):
        return cls(raised.seconds)
    if cls is Discard:
        return Discard(raised.text)
    if raised.inner:
        return ExceptionGroup(raised.text, [rebuild(one) for one in raised.inner])

    def said(_: object) -> str:
        return raised.text

    name = raised.place.name.rpartition(".")[2]
    for base in (cls, Exception):
        try:
            kept = {"__module__": raised.place.module, "__str__": said, STANDS_FOR: known}
            named: Any = type(name, (base,), kept)
            error = _made(base, named, raised.args)
            error.__dict__.update(raised.attributes)
            if raised.seconds is not None:
                error.seconds = raised.seconds
        except Exception:  # noqa: S112 -- whatever the class does when another is derived from it
            continue
        if issubclass(type(error), base):
            return error
    return Exception(raised.text)


def _made(base: type[Exception], named: Any, args: list[Any]) -> Any:
    """Not through __init__, which may require any arguments. An OSError reads its errno in __new__."""
    try:
        return base.__new__(named, *args)
    except Exception:  # a __new__ of its own, which takes other ones
        error: Any = base.__new__(named)
        error.args = tuple(args)
        return error


def _find(place: Importable) -> type[BaseException] | None:
    """The class, if this process has it; no module is imported for it."""
    found: Any = sys.modules.get(place.module)
    for name in place.name.split("."):
        try:
            found = getattr(found, name, None)
        except Exception:  # a module's own __getattr__
            return None
    return found if issubclass(type(found), type) and issubclass(found, BaseException) else None
