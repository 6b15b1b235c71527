"""pydantic's models as arguments and results. msgspec calls these hooks for classes that it does not know, so that plain
arguments pay nothing; pydantic is looked at only if the user's program has imported it."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from functools import cache
from typing import Any, cast

import msgspec

from ..describing import type_name


def is_model(cls: object) -> bool:
    """Whether a class is a pydantic model."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(cls, type) and issubclass(cls, pydantic.BaseModel)


def to_builtins(value: Any) -> Any:
    """A model as JSON's own types, so that it reads them as it is. Raises `ValueError` for one that does not, `TypeError` for
    what is no model, as msgspec does."""
    if is_model(cast("object", type(value))):
        return _dumped(value)
    raise TypeError(f"Encoding objects of type {type(value).__qualname__} is unsupported")


_WAYS: tuple[dict[str, bool], ...] = (
    {"by_alias": True},
    {"by_alias": True, "round_trip": True},
    {"by_alias": False},
    {"by_alias": False, "round_trip": True},
)
"""How a model may be written. An alias may be for one direction alone; without `round_trip` it writes computed fields, too,
which it may refuse to read."""


def _dumped(model: Any) -> Any:
    # Imported here: it asks this module what a model is.
    from .differences import difference

    cls, problem = cast("Any", type(model)), ""
    for way in _WAYS:
        plain = model.model_dump(mode="json", **way)
        try:
            where = difference(model, from_builtins(cls, plain))
        except ValueError as error:
            problem = problem or f"the pydantic model {cls.__qualname__} cannot read what it writes: {error}"
            continue
        if where is None:
            return plain
        problem = problem or (
            f"the pydantic model {cls.__qualname__} reads its field {where} otherwise than it writes it (a secret that is "
            "hidden, exclude=True, a subclass in a field of its base, a validator that changes what was validated, an offset "
            "from UTC with seconds)"
        )
    raise ValueError(problem)


def fields_of(value: Any) -> Any:
    """A model's fields as they are, for comparing: sets stay sets, which msgspec's `order="sorted"` sorts. `to_builtins` writes
    a set in its order of iteration, which differs from process to process."""
    if is_model(cast("object", type(value))):
        model = cast("Any", type(value))
        names = cast("dict[str, Any]", model.model_fields)
        return {name: getattr(value, name) for name in names} | cast("dict[str, Any]", value.model_extra or {})
    if "pydantic_core" in sys.modules:  # what only a field of a model can hold, as an address
        return sys.modules["pydantic_core"].to_jsonable_python(value)
    raise TypeError(f"Encoding objects of type {type(value).__qualname__} is unsupported")


def from_builtins(cls: Any, value: Any) -> Any:
    """A value of a class that msgspec does not know: a model is validated; anything else is left to msgspec's own check.

    Raises `ValueError` that names the field, without its value."""
    if not is_model(cls):
        return value
    names = _both_names(sys.modules["pydantic"].VERSION)
    try:
        try:
            return cls.model_validate(value, **names)
        except sys.modules["pydantic"].ValidationError:
            # A strict model takes the text of a time, and a list for a tuple, from JSON alone.
            return cls.model_validate_json(json.dumps(value), **names)
    except sys.modules["pydantic"].ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise ValueError("; ".join(f"{_place(one['loc'])}{one['msg']}" for one in found[:5])) from None
    except Exception as error:  # a validator of the user's may raise anything, and say a value in it
        raise ValueError(f"{type_name(error)} in {cls.__qualname__}'s validation") from None


@cache
def _both_names(version: str) -> dict[str, bool]:
    """A field is read by its alias or its name, where pydantic can do so (2.11): it is written by its name where it has an
    alias for validation alone."""
    major, minor, *_ = version.split(".")
    return {"by_alias": True, "by_name": True} if (int(major), int(minor)) >= (2, 11) else {}


def result_from(encoded: bytes | str, result_type: Any) -> Any:
    """A result as its annotated type. Some handlers declare `int` and return "5": such a text is accepted. Raises msgspec's
    errors, and what a class of the type raises."""
    try:
        return msgspec.json.decode(encoded, type=result_type, dec_hook=from_builtins)
    except Exception:  # told by the caller, who is told of this one if the text will not do either
        with suppress(Exception):
            return msgspec.convert(msgspec.json.decode(encoded), result_type, strict=False, dec_hook=from_builtins)
        raise


def _place(path: tuple[int | str, ...]) -> str:
    said = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    return f"{said}: " if said else ""
