"""Values of a job compared as JSON, and shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

_SHOWN = 400
"""Characters of a value in a message."""


def arguments_differ(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line for each argument that is wanted, and which a job has not."""
    lines: list[str] = []
    for name, value in wanted.items():
        if name not in found:
            lines.append(f"args: there is no {name!r}, only {', '.join(map(repr, found)) or 'none'}")
        elif not is_same(found[name], value):
            lines.append(f"args[{name!r}]: {short(found[name])}, not {short(value)}")
    return lines


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON: there `true` is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
        return both[0].keys() == both[1].keys() and all(is_same(value, both[1][key]) for key, value in both[0].items())
    if isinstance(one, list) and isinstance(other, list):
        pairs = cast("list[Any]", one), cast("list[Any]", other)
        return len(pairs[0]) == len(pairs[1]) and all(map(is_same, *pairs))
    return isinstance(one, bool) is isinstance(other, bool) and one == other


def short(value: object) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"
