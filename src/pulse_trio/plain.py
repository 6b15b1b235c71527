"""Records and the values of users as JSON: everything that shows them reads and writes them here.

A value is written by anyone who may enqueue. One that Python cannot read, or write again, must not make a list or a page
unreadable for all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

UNREADABLE = "$unreadable"
"""The name under which the beginning of a value stands that cannot be read. The views of the schema use it, too."""
_CALLS = 10_000
"""Python's calls in each other while JSON is written: each level of a value takes several."""
_OF_USERS = frozenset({"args", "result", "meta", "value", "payload"})
"""The names under which records have values of users."""
_LEVELS, _LONGEST = 24, 65_536
"""How many levels of a document are indented, and how many characters a user's value has that is. What is deeper, and a value
that is longer, stands on one line: indented by its depth, an event of 1 MiB took gigabytes."""


def json_value(text: str) -> Any:
    """Decodes JSON. A number that is none of Python's (more digits than it reads, above every float) is a `Decimal`. If Python
    cannot read the text at all (too many levels), returns its beginning, as the view does if jsonb cannot hold it."""
    try:
        return json.loads(text, parse_float=_float)
    except (ValueError, ArithmeticError, RecursionError):
        pass
    try:
        # An integer with more digits than Python reads.
        return json.loads(text, parse_int=Decimal, parse_float=_float)
    except (ValueError, ArithmeticError, RecursionError):
        return {UNREADABLE: text[:1000]}


def to_json(value: object, *, indented: bool = False, of_user: bool = False, ascii_only: bool = True) -> str:
    """One JSON document: records as objects, times as ISO 8601 in UTC. A number that Python or JSON cannot write is text, as
    few programs could read it. `of_user`: it is a user's value as a whole. Indented as far as that does not blow it up."""
    before = sys.getrecursionlimit()
    # A result that the schema's owner wrote is as deep as Python reads.
    sys.setrecursionlimit(max(before, _CALLS))
    try:
        write = json.JSONEncoder(ensure_ascii=ascii_only, allow_nan=False, default=str).encode
        document = plain(value)
        return _indented(document, write, of_user=of_user) if indented else write(document)
    finally:
        sys.setrecursionlimit(before)


def _indented(whole: object, write: Callable[[object], str], level: int = 0, *, of_user: bool = False) -> str:
    line, value = write(whole) if level == _LEVELS or of_user else None, whole
    if line is not None and (level == _LEVELS or len(line) > _LONGEST):
        return line
    if isinstance(value, dict) and value:
        fields = cast("dict[str, object]", value)
        items = [f"{write(k)}: {_indented(v, write, level + 1, of_user=k in _OF_USERS)}" for k, v in fields.items()]
        opening, closing = "{}"
    elif isinstance(value, list) and value:
        items = [_indented(item, write, level + 1) for item in cast("list[object]", value)]
        opening, closing = "[]"
    else:
        return write(whole) if line is None else line
    before = "\n" + "  " * level
    return f"{opening}{before}  {f',{before}  '.join(items)}{before}{closing}"


def plain(value: object) -> object:
    """`value` as JSON's own types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _field(f, getattr(value, f.name))
            for f in dataclasses.fields(value)
            if "object" not in f.metadata  # for example an exception, which is for programs
        }
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in cast("dict[Any, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in cast("Sequence[object]", value)]
    if isinstance(value, Decimal) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


def _float(text: str) -> float | Decimal:
    value = float(text)
    return value if math.isfinite(value) else Decimal(text)


def _field(field: dataclasses.Field[Any], value: object) -> object:
    if value is not None and value == field.metadata.get("never"):
        return None
    # A number, but as text: JavaScript and jq round numbers above 2^53, and the rounded session would match no worker.
    return str(value) if "session" in field.metadata and value is not None else plain(value)
