"""What workers of 1.0.0rc1, and those of a checkout before 0095, have written of a cancellation, in the words of this version.

Such a line says which calls stood, and nothing of a task that stood in a plain await: not for how long, and not how many calls
the main task had begun. It would come again at once, before the code is where its clean-up is. The clean-up's own lines say how
many calls came before it. Pure: no I/O, no Trio.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import msgspec

from ...lines import CALL_OF, Kind, Line
from .unopened import body_key, is_body

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NUMBERED = re.compile(r"([1-9][0-9]*):(?:step|event|sleep|block|scope)(?: body)?")
_LONG = 1e9
"""Seconds, of which an attempt waits for a part alone (cancelling.py)."""
_UNKNOWN = 2**30
"""More calls than a task makes: the cancellation comes when all tasks stand, or when it has waited for as long as it may."""


def completed(lines: Sequence[Line]) -> list[Line]:
    """The lines of a history in order, with what those of older workers do not say of a cancellation in a plain await."""
    ordered = sorted(lines, key=lambda line: line.line)
    return [_completed(line, ordered, index + 1) for index, line in enumerate(ordered)]


def _completed(line: Line, ordered: Sequence[Line], following: int) -> Line:
    if line.kind is Kind.CANCELLED:
        begun = _begun(ordered[following:])
    elif line.kind is Kind.SCOPE_CANCELLED and is_body(line.key) and not _is_of_a_scope(line, ordered):
        # Where no clean-up is in the body, it is cut short at once again.
        begun = _begun(takewhile(lambda later: body_key(later.key) != line.key, ordered[following:]))
        if begun == _UNKNOWN:
            return line
    else:
        return line
    said: dict[str, Any] = msgspec.json.decode(line.value or "{}")
    if "after" in said or any(_NUMBERED.fullmatch(key) for key in said.get("at", ())):
        return line
    value = {**said, "after": _LONG, "begun": begun}
    return msgspec.structs.replace(line, value=msgspec.json.encode(value).decode())


def _is_of_a_scope(line: Line, ordered: Sequence[Line]) -> bool:
    """Whether a handler has given its scope such a key: it has a deadline."""
    return any(one.kind is Kind.MOMENT and one.key == line.key and float(one.value or 0) > 0.0 for one in ordered)


def _begun(later: Iterable[Line]) -> int:
    """How many calls the main task had begun before its clean-up, which wrote these lines."""
    with_a_key = 0
    for line in later:
        if (numbered := _NUMBERED.fullmatch(line.key)) is not None:
            return max(int(numbered[1]) - 1 - with_a_key, 0)
        with_a_key += line.kind in CALL_OF
    return _UNKNOWN
