"""Refuses values that JSON would change. msgspec silently writes NaN as null, two keys as one, and the offset of a time
in minutes; of an attrs class it leaves out the private attributes.

The check of a good value costs two searches in the encoded text, for `null` and for such an offset, and a second encoding where
objects are nested.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from datetime import datetime, time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Never, NoReturn, cast

import msgspec

from ..errors import ConfigurationError, InvalidArguments
from .models import is_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_OFFSET = re.compile(rb':\d\d(?:\.\d+)?[+-]\d\d:\d\d"')
"""The end of a time that is not UTC's. It begins with a character that `re` skips to: the search takes 0.3 µs in 80 bytes, and
0.1 ms in 60 kB; beginning with the sign, 0.6 ms."""
_LONGEST_NUMBER = 10_000
_TOO_FINE = re.compile(rf"[eE]-[0-9]{{5}}|\.[0-9]{{{_LONGEST_NUMBER}}}")
_NEAR_ZERO = re.compile(r"-[0-9]{5}")
_LONG_FRACTION = re.compile(rf"\.[0-9]{{{_LONGEST_NUMBER}}}")
"""These two begin with one character, to which `re` skips: in 200 kB both together take 0.1 ms, and `_TOO_FINE` 2 ms."""
_SMALL = 4096
"""Characters of JSON whose numbers cannot take a whole MiB, however PostgreSQL writes them."""
_MOST_WRITTEN_OUT = 2 * 1024**2
_WITH_EXPONENT = re.compile(r"e[+-]?[0-9]{2}"), re.compile(r"E[+-]?[0-9]{2}")
"""Each begins with one character, to which `re` skips."""
_EXPONENTS = re.compile(r"[0-9][eE][+-]?([0-9]{2,})")
_JSON_CLASSES = (dict, list, tuple, set, frozenset)
"""Subclasses of these are encoded like them."""
_ANYTHING: tuple[Any, ...] = (Any, object, Never, NoReturn)


def verb(what: str, plural: str) -> str:
    """The verb of a message about `what`, in its number: "arguments hold", "the payload holds"."""
    if "rguments" in what.partition(" of ")[0]:
        return plural
    return "is" if plural == "are" else f"{plural}s"


def refuse_losses(value: object, encoded: bytes, what: str) -> None:
    """Raises `InvalidArguments`, naming the position, if `encoded` loses part of `value`."""
    # `find` instead of `in`: with bytes on its left, `in` first tries to read them as a number, and takes three times as long.
    if encoded.find(b"null") >= 0 and (place := _place_of_no_number(value)) is not None:
        raise InvalidArguments(
            f"{what} {verb(what, 'hold')} a NaN or an infinity at {place}, which JSON does not have: it would become null."
        )
    if _OFFSET.search(encoded) is not None and (place := _place_of_odd_offset(value)) is not None:
        raise InvalidArguments(
            f"{what} {verb(what, 'hold')} a time at {place} whose offset from UTC has seconds, which JSON's times do not "
            "have: it would become another moment. Convert it: moment.astimezone(UTC)."
        )
    if (encoded.rfind(b"{") > 0 or _has_other_keys(value)) and len(_encode(_decode(encoded))) != len(encoded):
        # It may be shorter for another reason: a `msgspec.Raw` with spaces.
        json.loads(encoded, object_pairs_hook=lambda pairs: _refuse_twins(pairs, what))


def refuse_numbers(text: str, what: str) -> None:
    """Raises `InvalidArguments` for numbers that jsonb cannot hold, or that take too much where it writes them out.

    Python reads fractions of any length; jsonb's have at most 16,383 digits. Only a `msgspec.Raw` has more than 17.
    """
    if ("-" in text and _NEAR_ZERO.search(text)) or (len(text) > _LONGEST_NUMBER and _LONG_FRACTION.search(text)):
        _refuse_fine(text, what)
    if len(text) > _SMALL and _has_exponent(text) and _is_too_long(_outside_strings(text)):
        raise InvalidArguments(
            f"{what} {verb(what, 'hold')} numbers such as 1e300, which PostgreSQL's JSON writes out: they would take more "
            f"than {_MOST_WRITTEN_OUT // 1024**2} MiB there. Give them as text, or store a reference."
        )


def _refuse_fine(text: str, what: str) -> None:
    if not _TOO_FINE.search(text):
        return

    def check(number: str) -> float:
        if _TOO_FINE.search(number):
            raise InvalidArguments(
                f"{what} {verb(what, 'hold')} a number with more digits than PostgreSQL's JSON can hold."
            )
        return 0.0

    # Integers are not looked at: Python reads none of more than 4,300 digits.
    json.loads(text, parse_float=check, parse_int=str)


def _has_exponent(text: str) -> bool:
    return any(one.search(text) for one in _WITH_EXPONENT)


def _outside_strings(text: str) -> str:
    """What stands in JSON outside of its strings, where hashes and base64 look like numbers. An expression that matches
    strings takes twenty times as long in a large one."""
    if "\\" in text:
        text = text.replace("\\\\", "").replace('\\"', "")
    return "".join(text.split('"')[::2])


def _is_too_long(numbers: str) -> bool:
    # The function `numbers_fit` of the schema counts the same.
    return _has_exponent(numbers) and _written_out(numbers) > _MOST_WRITTEN_OUT


def _written_out(text: str) -> int:
    """The digits that the exponents in a text stand for."""
    return sum(int(digits) if len(digits) <= 6 else 9_999_999 for digits in _EXPONENTS.findall(text))


def refuse_hidden(value: object, what: str) -> None:
    """Raises `InvalidArguments` if `value`, whose type nobody declared, is of an attrs class with private attributes."""
    if (hidden := _hidden_of(type(value))) is not None:
        raise InvalidArguments(f"{what} {verb(what, 'hold')} an object that JSON would change: {hidden}.")


@lru_cache(maxsize=1000)
def _hidden_of(cls: Any) -> str | None:
    """What is said of an attrs class whose private attributes msgspec leaves out; None for any other class."""
    names = [one.name for one in getattr(cls, "__attrs_attrs__", ()) if str(one.name).startswith("_")]
    if not names:
        return None
    return (
        f"the private attributes of the attrs class {cls.__qualname__} would be left out ({', '.join(names[:5])}). Give them "
        "names without an underscore, or make it a dataclass"
    )


def hidden_in(annotation: Any) -> str | None:
    """The same of an attrs class in a type; None if there is none."""
    if "attr" not in sys.modules:
        return None
    classes = (getattr(info, "cls", None) for info in _infos(msgspec.inspect.type_info(annotation), []))
    return next((said for cls in classes if cls is not None and (said := _hidden_of(cls)) is not None), None)


def _has_other_keys(value: object) -> bool:
    # A dictionary of texts alone has no two keys that are one in JSON.
    return isinstance(value, dict) and any(type(key) is not str for key in cast("dict[Any, Any]", value))


def _refuse_twins(pairs: list[tuple[str, object]], what: str) -> None:
    if (twice := twin_in(pairs)) is not None:
        raise InvalidArguments(
            f"{what} {verb(what, 'hold')} a dictionary with two keys that are both {twice!r} in JSON: one would be lost."
        )


def twin_in(pairs: list[tuple[str, Any]]) -> str | None:
    """A key that an object has twice; None if it has none."""
    names = [name for name, _ in pairs]
    return next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None


def _place_of_no_number(value: object) -> str | None:
    # The only type it does not know is msgspec.Raw, which has no Python floats.
    return _place_of(msgspec.to_builtins(value, enc_hook=_of_unknown), _is_no_number)


def _is_no_number(one: object) -> bool:
    return isinstance(one, float) and not math.isfinite(one)


def _place_of_odd_offset(value: object) -> str | None:
    return _place_of(msgspec.to_builtins(value, builtin_types=(datetime, time), enc_hook=_of_unknown), _has_odd_offset)


def _has_odd_offset(one: object) -> bool:
    # Amsterdam's was 19 min 32 s until 1937, Monrovia's 44 min 30 s until 1972.
    offset = one.utcoffset() if isinstance(one, (datetime, time)) else None
    return offset is not None and offset.total_seconds() % 60 != 0


def _place_of(value: object, is_it: Callable[[object], bool]) -> str | None:
    """The first position, as `orders[3].price`, of what is sought among JSON's own types; None if there is none."""
    left: list[tuple[str, Any]] = [("", value)]
    while left:
        place, one = left.pop()
        if is_it(one):
            return place or "the value itself"
        if isinstance(one, dict):
            items = cast("dict[Any, Any]", one).items()
            if any(is_it(key) for key, _ in items):
                return f"a key of {place}" if place else "a key"
            left += [(f"{place}.{key}" if place else str(key), inner) for key, inner in items]
        elif isinstance(one, (list, tuple)):
            left += [(f"{place}[{n}]", inner) for n, inner in enumerate(cast("list[Any]", one))]
    return None


def _of_unknown(value: Any) -> object:
    # Not as it is encoded: pydantic itself makes None of a NaN in an `Any`, and a text of a time.
    return value.model_dump(by_alias=True) if is_model(cast("object", type(value))) else 0


def has_models(annotation: Any) -> bool:
    """Whether a type has a pydantic model in it."""
    return "pydantic" in sys.modules and any(map(is_model, _custom_in(msgspec.inspect.type_info(annotation))))


_MAY_LOSE = (
    msgspec.inspect.TimeType,
    msgspec.inspect.StructType,
    msgspec.inspect.DataclassType,
    msgspec.inspect.TypedDictType,
    msgspec.inspect.CustomType,
)


def may_lose(annotation: Any) -> bool:
    """Whether a type has something in it of which JSON may carry less than a value has: classes, which have subclasses and may
    be given as dictionaries with other names, and times of day."""
    return any(issubclass(type(info), _MAY_LOSE) for info in _infos(msgspec.inspect.type_info(annotation), []))


def has_times(annotation: Any) -> bool:
    """Whether a type has times of day in it. Those of pydantic models are looked at where these are written."""
    infos = _infos(msgspec.inspect.type_info(annotation), [])
    return any(issubclass(type(info), msgspec.inspect.TimeType) for info in infos)


def readable_result(what: str, annotation: Any) -> Any:
    """The type for decoding the result of `what`, a handler or a step: `Any` if only JSON's own types can be promised.

    Raises `ConfigurationError` for a type that cannot be written as JSON: the handler would do its work, and then fail."""
    if any(annotation is anything for anything in _ANYTHING):
        return Any
    try:
        info = msgspec.inspect.type_info(annotation)
    except (TypeError, NotImplementedError, NameError) as error:
        raise _refusal(what, annotation, str(error)) from None
    except RecursionError:
        raise _refusal(what, annotation, "it is made of itself") from None
    if (hidden := hidden_in(annotation)) is not None:
        raise _refusal(what, annotation, hidden)
    custom = [cls for cls in _custom_in(info) if not is_model(cls)]
    for cls in custom:
        if cls is not object and not issubclass(cls, _JSON_CLASSES) and not _is_abstract(cls):
            raise _refusal(
                what, annotation, f"{cls.__module__}.{cls.__qualname__} is a class that msgspec does not know"
            )
    return Any if custom else annotation


def _refusal(what: str, annotation: Any, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} returns {annotation!r}, which JSON cannot carry: {why}. Return a dict, a dataclass, a "
        f"msgspec.Struct or another type that JSON can carry (dataclasses, attrs classes and pydantic models too), or None."
    )


def _is_abstract(cls: type[Any]) -> bool:
    # The values behind an Iterable or a Protocol are checked when there are any.
    return inspect.isabstract(cls) or getattr(cls, "_is_protocol", False)


def _custom_in(info: Any) -> list[type[Any]]:
    """The classes in a type that msgspec does not know."""
    return [one.cls for one in _infos(info, []) if issubclass(type(one), msgspec.inspect.CustomType)]


def _infos(info: Any, seen: list[Any]) -> Iterator[Any]:
    """What msgspec says of a type, and of each type in it."""
    if any(info is one for one in seen):
        return
    seen.append(info)
    if issubclass(type(info), msgspec.Struct):
        yield info
        for name in info.__struct_fields__:
            if name not in ("default", "default_factory", "cls"):
                yield from _infos(getattr(info, name), seen)
    elif issubclass(type(info), tuple):
        for one in cast("tuple[Any, ...]", info):
            yield from _infos(one, seen)
