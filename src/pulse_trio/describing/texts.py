"""Texts that a user's object returns, and what PostgreSQL stores of them."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

LIMIT = 16_384
"""The longest stored text of an exception, in bytes."""
LONGEST = 4 * LIMIT
"""How many characters of a `str()` are used."""

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def ask(question: Callable[[], _T]) -> _T:
    """The answer of a user's object. An endless recursion in its code ends with a `RecursionError`.

    From CPython 3.13 on the interpreter misses its recursion limit in calls that it has specialised: of functions with `*args`,
    `**kwargs` or defaults in 3.13.0 to 3.13.7, with keywords or `*` in later ones (its issues 132744, 137883, 155151). Such
    a recursion takes all memory. Calls in profiled frames are not specialised, so they are checked.
    """
    if sys.version_info < (3, 13) or sys.getprofile() is not None:
        return question()
    sys.setprofile(_ignore)
    try:
        return question()
    finally:
        sys.setprofile(None)


def _ignore(*_: object) -> None: ...


def storable(text: str) -> str:
    """`text` without characters that PostgreSQL cannot store."""
    return _UNSTORABLE.sub("\ufffd", text)


def plain(text: str) -> str:
    """A plain `str`, not a subclass, of bounded length: both ends of a long one."""
    whole = str.__str__(text)
    return whole if len(whole) <= 2 * LONGEST else f"{whole[:LONGEST]}...{whole[-LONGEST:]}"


def cut(text: str, limit: int) -> str:
    """At most `limit` bytes of UTF-8. Keeps both ends: the first lines say where it began, the last what went wrong."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= limit:
        return text
    half = limit // 2 - 24
    # A character at a cut is dropped.
    begin, rest = (part.decode("utf-8", "ignore") for part in (data[:half], data[-half:]))
    return f"{begin}\n... {len(data) - 2 * half} bytes cut ...\n{rest}"
