"""JSON as it comes out of the database: `pulse.jobs` shows arguments and results as PostgreSQL's jsonb."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any


def from_jsonb(text: str) -> Any:
    """What a client reads where this JSON was stored. jsonb keeps the digits of a number, and not how they are written: a
    float from 1e16 on, which has no fraction, is a whole number then, and -0.0 is 0.0. An object's names have their own
    order."""
    return json.loads(text, parse_float=_number, object_pairs_hook=_object)


def _number(text: str) -> float | int:
    number = Decimal(text)
    _, _, exponent = number.as_tuple()
    if isinstance(exponent, int) and exponent >= 0:
        return int(number)
    return float(text) or 0.0


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(sorted(pairs, key=lambda pair: _place(pair[0])))


def _place(name: str) -> tuple[int, bytes]:
    encoded = name.encode()
    return len(encoded), encoded
