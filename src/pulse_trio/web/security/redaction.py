"""What of a payload a person is shown.

The values of fields that the setting `redact` names are shown to no one. Users who may not read payloads see that there is one,
and nothing of it.
"""

from __future__ import annotations

import dataclasses
import re
from fnmatch import translate
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from ...plain import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .users import User

HIDDEN = "••••••"
"""Stands in place of a redacted value. Its length says nothing about the value's."""
PAYLOAD: Mapping[str, bool] = {"payload": True}
"""A dataclass's field that holds a payload: `field(metadata=PAYLOAD)`. Those of these names are known without it."""
_NAMES = frozenset({"args", "arguments", "result", "payload"})
_DEEPEST = 100


def redacted(value: Any, user: User | None) -> Any:
    """The value as this user may see it: HIDDEN for one who may not read payloads, but None and an empty object stay."""
    if user is None or not user.may_read_payloads:
        return value if value is None or value == {} else HIDDEN
    return _shown(value, _named(user.redact), 0) if user.redact else value


@lru_cache(maxsize=64)
def _named(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(translate(each.lower()) for each in patterns))


def _shown(value: Any, named: re.Pattern[str], depth: int) -> Any:
    if depth > _DEEPEST:
        return HIDDEN
    if isinstance(value, dict):
        return {
            name: HIDDEN if name == UNREADABLE or named.match(str(name).lower()) else _shown(its, named, depth + 1)
            for name, its in cast("dict[Any, Any]", value).items()
        }
    if isinstance(value, (list, tuple)):
        return [_shown(each, named, depth + 1) for each in cast("list[Any]", value)]
    return value


def without_payloads(record: Any, user: User | None) -> Any:
    """A record, or a structure of records, whose payloads are as this user may see them.

    Where it is shown, never where it is read: what is read is shared by all who look at a page."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        changed = {f.name: _field(f, getattr(record, f.name), user) for f in dataclasses.fields(record) if f.init}
        return dataclasses.replace(record, **changed)
    if isinstance(record, dict):
        return {name: without_payloads(its, user) for name, its in cast("dict[Any, Any]", record).items()}
    if isinstance(record, (list, tuple)):
        return [without_payloads(each, user) for each in cast("list[Any]", record)]
    return record


def _field(field: dataclasses.Field[Any], value: Any, user: User | None) -> Any:
    is_payload = field.name in _NAMES or "payload" in field.metadata
    return redacted(value, user) if is_payload else without_payloads(value, user)
