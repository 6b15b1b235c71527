"""What workers of 1.0.0rc1, and those of a checkout before 0095, have written of a cancellation, in the words of this version.

Such a line says which calls stood, and nothing of a task that stood in a plain await: not for how long, and not how many calls
the main task had begun. It would come again at once, before the code is where its clean-up is. The clean-up's own lines say how
many calls came before it. Pure: no I/O, no Trio.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from ...lines import CALL_OF, Kind, Line

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERED = re.compile(r"([1-9][0-9]*):(?:step|event|sleep|block|scope)(?: body)?")
_LONG = 1e9
"""Seconds, of which an attempt waits for a part alone (cancelling.py)."""
_UNKNOWN = 2**30
"""More calls than a task makes: the cancellation comes when all tasks stand, or when it has waited for as long as it may."""


def completed(lines: Sequence[Line]) -> list[Line]:
    """The lines of a history in order, with what those of older workers do not say of a cancellation in a plain await."""
    ordered = sorted(lines, key=lambda line: line.line)
    return [
        _completed(line, ordered[index + 1 :]) if line.kind is Kind.CANCELLED else line
        for index, line in enumerate(ordered)
    ]


def _completed(line: Line, later: Sequence[Line]) -> Line:
    said: dict[str, Any] = msgspec.json.decode(line.value or "{}")
    if "after" in said or any(_NUMBERED.fullmatch(key) for key in said.get("at", ())):
        return line
    value = {**said, "after": _LONG, "begun": _begun(later)}
    return msgspec.structs.replace(line, value=msgspec.json.encode(value).decode())


def _begun(later: Sequence[Line]) -> int:
    """How many calls the main task had begun before its clean-up, which wrote these lines."""
    with_a_key = 0
    for line in later:
        if (numbered := _NUMBERED.fullmatch(line.key)) is not None:
            return max(int(numbered[1]) - 1 - with_a_key, 0)
        with_a_key += line.kind in CALL_OF
    return _UNKNOWN
