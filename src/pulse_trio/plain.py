"""Records as JSON's own types, for `--json` and the log."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    return value


def _field(field: dataclasses.Field[Any], value: object) -> object:
    if value is not None and value == field.metadata.get("never"):
        return None
    # A number, but as text: JavaScript and jq round numbers above 2^53, and the rounded session would match no worker.
    return str(value) if "session" in field.metadata and value is not None else plain(value)
