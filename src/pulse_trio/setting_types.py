"""What type each setting has: read off its default, and checked, wherever the value comes from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

from .errors import ConfigurationError

if TYPE_CHECKING:
    from dataclasses import Field


def check_types(settings: Any) -> None:
    """Raises `ConfigurationError`, naming the first setting whose value is of another type than its own."""
    for setting in fields(settings):
        value = getattr(settings, setting.name)
        if not _fits(value, setting):
            # Of one that is not shown (an address with a password) the type says enough.
            got = repr(value) if setting.repr else type(value).__name__
            what = kind_of(setting) + (", not a single text" if is_list(setting) and isinstance(value, str) else "")
            raise ConfigurationError(f"The setting {setting.name!r} must be {what}, got {got}.")


def _fits(value: Any, setting: Field[Any]) -> bool:
    if not is_list(setting):
        return is_of_type(value, setting.default)
    if value is None:
        return setting.default is None
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection):
        return False
    return all(isinstance(one, str) for one in cast("Collection[object]", value))


def is_of_type(value: Any, default: Any) -> bool:
    """Whether a value may stand for a setting with this default: a boolean is no number, and 1.5 is no whole number."""
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float)) if isinstance(default, float) else isinstance(value, type(default))


def is_list(setting: Field[Any]) -> bool:
    """Whether a setting is a list of names: `tuple[str, ...]`, perhaps None."""
    return str(setting.type).startswith("tuple[str, ...]")


def kind_of(setting: Field[Any]) -> str:
    """What a setting must be, for people."""
    if is_list(setting):
        return f"a list of {setting.name}"
    match setting.default:
        case int():
            return "a whole number"
        case float():
            return "a number of seconds"
        case _:
            return "text"


def parse_list(text: str) -> tuple[str, ...]:
    """`default,mail` as a tuple."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
