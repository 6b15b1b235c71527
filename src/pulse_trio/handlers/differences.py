"""Finds where a value that was written as JSON is read back as another one, without an error.

A subclass is read as the class of the annotation, and its own fields are gone; a time of day in a time zone has no offset, and
is read without one; a model may write something else than it reads. What has another type afterwards because the annotation
says so is no difference: a text becomes a date, a list a tuple, an object in an `Any` a dictionary.
"""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import msgspec

from .models import is_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def difference(given: object, read: object, place: str = "") -> str | None:
    """The first position, as `order.lines[2].price`, at which `read` says something else than `given`; None if there is none.
    Values whose class does not compare them are not compared."""
    if given is read:
        return None
    if given is None or _hides(type(given)):
        # What was left out came back as the default; a secret hides itself, in an `Any` as a text.
        return None if given == read else place
    if (names := _fields_of(given)) is not None:
        return _of_fields(names, given, read, place)
    if isinstance(given, dict):
        return _of_items(cast("dict[Any, Any]", given), read, place)
    if isinstance(given, (list, tuple)) and isinstance(read, (list, tuple)):
        ones, others = cast("list[Any]", given), cast("list[Any]", read)
        if len(ones) != len(others):
            return place
        pairs = zip(ones, others, strict=True)
        found = (difference(one, other, f"{place}[{n}]") for n, (one, other) in enumerate(pairs))
        return next((where for where in found if where is not None), None)
    if isinstance(given, time) and given.tzinfo is not None and given.utcoffset() is None:
        return place  # It is equal to one that has no zone.
    return None if _is_same(cast("object", given), read) else place


def _is_same(given: object, read: object) -> bool:
    if isinstance(given, datetime) and isinstance(read, datetime) and given.tzinfo and read.tzinfo:
        # In the hour that comes twice a local time is equal to none in another zone, be it the same moment.
        return given.astimezone(UTC) == read.astimezone(UTC)
    return (
        type(read) is not type(given) or type(given).__eq__ is object.__eq__ or given == read or given != given  # a NaN
    )


def _of_fields(names: Sequence[str], given: Any, read: Any, place: str) -> str | None:
    others = _fields_of(read)
    if others is None or not isinstance(given, type(read)):
        return None
    for name in names:
        where = f"{place}.{name}" if place else name
        if name not in others:
            return where
        if (found := difference(getattr(given, name, None), getattr(read, name, None), where)) is not None:
            return found
    return None


def _of_items(given: dict[Any, Any], read: Any, place: str) -> str | None:
    if not isinstance(read, dict):
        return _of_names(given, read, place)
    others = cast("dict[Any, Any]", read)
    for key, value in given.items():
        name = key if key in others else str(key)
        if name not in others and isinstance(key, str):
            return f"{place}.{key}" if place else key
        if (
            name in others
            and (found := difference(value, others[name], f"{place}.{key}" if place else str(key))) is not None
        ):
            return found
    return None


def _of_names(given: dict[Any, Any], read: Any, place: str) -> str | None:
    """The same of an object that was given as a dictionary: a name that is none of its fields would be left out."""
    if (names := _names_in_json(cast("Any", type(read)))) is None:
        return None
    for key, value in given.items():
        where = f"{place}.{key}" if place else str(key)
        if key not in names:
            return where
        if (found := difference(value, getattr(read, names[key]), where)) is not None:
            return found
    return None


def _fields_of(value: Any) -> Sequence[str] | None:
    """The names of its fields; None if its class is none of those that have some."""
    names = _fields_of_class(cast("Any", type(value)))
    extra = getattr(value, "__pydantic_extra__", None) if names is not None else None
    return [*names, *extra] if names is not None and extra else names


@lru_cache(maxsize=1000)
def _hides(cls: type[object]) -> bool:
    """Whether its values are secrets of pydantic's."""
    return hasattr(cls, "get_secret_value")


@lru_cache(maxsize=1000)
def _names_in_json(cls: Any) -> Mapping[str, str] | None:
    """The fields of a class by their names in JSON; None of one whose names another library decides."""
    if issubclass(cls, msgspec.Struct):
        tag = {} if (tagged := cls.__struct_config__.tag_field) is None else {tagged: "__class__"}
        return dict(zip(cls.__struct_encode_fields__, cls.__struct_fields__, strict=True)) | tag
    if dataclasses.is_dataclass(cls) and not is_model(cls):
        return {field.name: field.name for field in dataclasses.fields(cls)}
    return None


@lru_cache(maxsize=1000)
def _fields_of_class(cls: Any) -> Sequence[str] | None:
    # Remembered: pydantic takes 10 µs to say them.
    if issubclass(cls, msgspec.Struct):
        return cls.__struct_fields__
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    if (attributes := getattr(cls, "__attrs_attrs__", None)) is not None:
        return [attribute.name for attribute in attributes]
    return list(cls.model_fields) if is_model(cls) else None
