"""Checks the values of a history's lines as they come from the database: who reads one later relies on its shape.

Only the owner of the schema can have written another. Pure: no I/O, no Trio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ...lines import Kind, Line, unreadable
from .stood import Stood

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Failed(msgspec.Struct):
    """The value of a block's failure (opened.py). The schema adds the attempts with which these children have ended."""

    failed: list[int] = []
    body: Any = None
    attempts: dict[str, int] = {}


_SHAPES: dict[Kind, msgspec.json.Decoder[Any]] = {
    Kind.STEP_FAILED: msgspec.json.Decoder(str),
    Kind.BLOCK_FAILED: msgspec.json.Decoder(_Failed),
    Kind.SCOPE_CANCELLED: msgspec.json.Decoder(Stood),
    Kind.CANCELLED: msgspec.json.Decoder(Stood),
}


def check_legible(job_id: int, lines: Iterable[Line]) -> None:
    """Raises `ReplayMismatch` for the first line whose value is not what its kind has. Those of steps and events, which are the
    user's, are checked where they are decoded."""
    for line in lines:
        if not line.value:
            continue
        try:
            if line.kind is Kind.MOMENT:
                float(line.value)
            elif (decoder := _SHAPES.get(line.kind)) is not None:
                decoder.decode(line.value)
        except (ValueError, RecursionError) as error:
            raise unreadable(job_id, f"the value of line {line.line} (key {line.key}) is damaged ({error})") from error
