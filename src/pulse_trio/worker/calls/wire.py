"""What a worker and its child processes tell each other: one JSON object a line, both ways. Never pickle."""

from __future__ import annotations

import sys
from typing import Any, cast

import msgspec

from ...jobs import CancelReason, Claim, Discard, RetryAfter, Snooze
from ...states import error_text


class Place(msgspec.Struct, frozen=True):
    """Where a handler is found: `module` to import, `name` in it."""

    module: str
    name: str


class Call(msgspec.Struct, frozen=True, tag="call"):
    """To the child: run the handler at `place` for this claim."""

    place: Place
    claim: Claim


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """To the child, before SIGTERM: why."""

    reason: CancelReason
    message: str | None = None


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """From the child: the handler's value."""

    value: msgspec.Raw


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """From the child: what the handler raised. `record` is what is kept of it on the job; `seconds` is a wish's;
    `inner` what an ExceptionGroup holds."""

    place: Place
    text: str
    record: str
    seconds: float | None = None
    inner: list[Raised] | None = None


class Left(msgspec.Struct, frozen=True, tag="left"):
    """From the child: it left the handler, as it was told."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From the child, once: it has started."""


class Said(msgspec.Struct, frozen=True, tag="said"):
    """From the child, while the handler runs: how far it has come."""

    fraction: float
    message: str | None


Answer = Returned | Raised | Left | Ready | Said
encode = msgspec.json.Encoder().encode
_orders: msgspec.json.Decoder[Call | Cancel] = msgspec.json.Decoder(Call | Cancel)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
decode_order = _orders.decode
decode_answer = _answers.decode


def describe(error: BaseException) -> Raised:
    """An exception as it crosses."""
    record = error_text(error)
    place, text = Place(type(error).__module__, type(error).__qualname__), _text(error)
    if isinstance(error, (Snooze, RetryAfter)):
        return Raised(place, text, record, seconds=error.seconds)
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return Raised(place, group.message, record, inner=[describe(one) for one in group.exceptions])
    return Raised(place, text, record)


def rebuild(raised: Raised) -> Exception:
    """The exception again, as far as a retry policy and the job's record need it: of the same class if that is known here,
    with the same text, and the child's own record of it with its traceback."""
    error = _rebuilt(raised)
    error.recorded_as = raised.record  # type: ignore[attr-defined]
    return error


def _rebuilt(raised: Raised) -> Exception:
    cls = _find(raised.place)
    if raised.seconds is not None and cls in (Snooze, RetryAfter):
        return cls(raised.seconds)
    if cls is Discard:
        return Discard(raised.text)
    if raised.inner:
        return ExceptionGroup(raised.text, [rebuild(one) for one in raised.inner])
    name = raised.place.name.rpartition(".")[2]
    for base in (cls, Exception):
        try:
            named: Any = type(name, (base,), {"__module__": raised.place.module, "__str__": _said})
            # Not through __init__, which may want anything.
            error: Any = base.__new__(named)
        except TypeError:
            continue
        error.text = raised.text
        return error
    return Exception(raised.text)


def _said(error: Any) -> str:
    return error.text


def _find(place: Place) -> type[Exception]:
    """The class, if this process has it; nothing is imported for it."""
    found: Any = sys.modules.get(place.module)
    for name in place.name.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else Exception


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message could not be rendered)"
