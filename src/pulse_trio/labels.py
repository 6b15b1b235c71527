"""Tags, by which people find jobs, and metadata: checked, and as a job's options keep them.

Both stand in the row's `options`, which every way of adding, retrying and archiving a job carries along, and which claims
return already. Each is one string without quotation marks, backslashes and brackets, because the database's readers of
options look for marks in the text and count brackets (migrations/0047_tags.sql): tags between spaces, metadata as JSON in
which those are percent-encoded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from .errors import ConfigurationError, InvalidName

MOST_TAGS = 10
LONGEST_TAG = 64
"""Bytes of one tag."""
MOST_META = 2000
"""Bytes of metadata as they are stored."""
_NOT_IN_TAGS = frozenset('"\\[]{},')
# `%` is the first to be encoded and the last to be decoded.
_CODES = (("%", "%25"), ('"', "%22"), ("\\", "%5C"), ("[", "%5B"), ("{", "%7B"))
Scalar = str | int | float | bool | None
"""A value of metadata."""


class _Labels(msgspec.Struct):
    tags: Any = None
    meta: Any = None


_decoder = msgspec.json.Decoder(_Labels)


def check_tags(tags: object) -> tuple[str, ...]:
    """Tags, each once. Raises `InvalidName`, or `ConfigurationError` for what is no list of them."""
    if isinstance(tags, (str, bytes, Mapping)) or not isinstance(tags, Iterable):
        raise ConfigurationError(f'tags must be a list of texts, as in tags=["eu"], got {tags!r:.200}.')
    checked = tuple(dict.fromkeys(map(check_tag, cast("Iterable[object]", tags))))
    if len(checked) > MOST_TAGS:
        raise ConfigurationError(f"A job has at most {MOST_TAGS} tags, these are {len(checked)}.")
    return checked


def check_tag(tag: object) -> str:
    """One tag. Raises `InvalidName`."""
    if not isinstance(tag, str):
        raise InvalidName(f"A tag must be text, got {tag!r:.200}.")
    plain = str.__str__(tag)
    if not plain or not plain.isprintable() or " " in plain or not _NOT_IN_TAGS.isdisjoint(plain):
        raise InvalidName(
            "A tag must have no spaces, commas, quotation marks, backslashes, brackets and control characters, and not be "
            f"empty, got {plain!r:.200}."
        )
    if len(plain.encode()) > LONGEST_TAG:
        raise InvalidName(f"A tag takes at most {LONGEST_TAG} bytes, got {len(plain.encode())}: {plain!r:.200}.")
    return plain


def pack_tags(tags: Iterable[str]) -> str:
    """Checked tags as options have them."""
    return f" {' '.join(tags)} "


def pack_meta(meta: object) -> str:
    """Metadata as options have it; an empty text for none. Raises `ConfigurationError`."""
    if not isinstance(meta, Mapping):
        raise ConfigurationError(f'meta must be a mapping, as in meta={{"order": 7}}, got {meta!r:.200}.')
    given = {_name(name): _scalar(name, value) for name, value in cast("Mapping[object, object]", meta).items()}
    if not given:
        return ""
    text = msgspec.json.encode(given).decode()
    for plain, code in _CODES:
        text = text.replace(plain, code)
    if (size := len(text.encode())) > MOST_META:
        raise ConfigurationError(
            f"meta takes {size:,} bytes as it is stored; the limit is {MOST_META:,} (a quotation mark, a backslash, an opening "
            "bracket and % take three). Give what is large as an argument."
        )
    return text


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise ConfigurationError(f"The names in meta must be text, got {name!r:.200}.")
    return _text(str.__str__(name))


def _text(text: str) -> str:
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigurationError(
            f"meta holds a NUL or half of a surrogate pair, which PostgreSQL cannot hold: {text!r:.200}."
        )
    return text


def _scalar(name: object, value: object) -> Scalar:
    kind = type(value)
    if kind is str:
        return _text(cast("str", value))
    if value is None or kind is bool:
        return cast("Scalar", value)
    if kind is int and -(2**63) <= cast("int", value) < 2**63:
        return cast("int", value)
    if kind is float and math.isfinite(cast("float", value)):
        return cast("float", value)
    # Python writes no int of more than 4,300 digits as text.
    got = f"an int of {cast('int', value).bit_length()} bits" if kind is int else f"{value!r:.200}"
    raise ConfigurationError(
        f"meta[{name!r:.100}] must be text, a finite number (an int of at most 64 bits), a boolean or None, got {got}. "
        "Give what is structured as an argument."
    )


def labels_of(options: str | None) -> tuple[tuple[str, ...], dict[str, Scalar]]:
    """The tags and the metadata in a row's options, whatever stands there: without what cannot be read."""
    if options is None or ('"tags"' not in options and '"meta"' not in options):
        return (), {}
    try:
        found = _decoder.decode(options)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return (), {}
    tags = tuple(found.tags.split(" ")[1:-1]) if isinstance(found.tags, str) else ()
    return tags, _unpacked(found.meta)


def _unpacked(text: object) -> dict[str, Scalar]:
    if not isinstance(text, str):
        return {}
    for plain, code in reversed(_CODES):
        text = text.replace(code, plain)
    try:
        return msgspec.json.decode(text, type=dict[str, Scalar])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {}


class Labelled:
    """The part of a handler's `Job` that its producer chose."""

    __slots__ = ()
    if TYPE_CHECKING:
        _claim: Any

    @property
    def kind(self) -> str:
        """The name of its handler."""
        return self._claim.kind

    @property
    def queue(self) -> str:
        """The queue that it was claimed from."""
        return self._claim.queue

    @property
    def priority(self) -> int:
        """Higher runs first."""
        return self._claim.priority

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags it was enqueued with."""
        return labels_of(self._claim.options)[0]

    @property
    def meta(self) -> dict[str, Scalar]:
        """The metadata it was enqueued with, a new dict at each access."""
        return labels_of(self._claim.options)[1]
