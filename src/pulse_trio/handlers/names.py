"""Checks names as the database does, so that a bad name is refused before anything is written."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, cast

from ..errors import ConfigurationError, InvalidName

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

# PostgreSQL's [[:cntrl:]], so that a kind is refused here and not there: C0, DEL, C1, line and paragraph separators.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_QUEUE = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def check_queue(queue: str) -> str:
    """Returns the queue's name. Raises `InvalidName` if it is not 1 to 128 letters, digits or any of `_ . : / -`."""
    if not isinstance(cast("object", queue), str) or not _QUEUE.fullmatch(queue):
        raise InvalidName(f"Queue name {queue!r} is not valid: use 1 to 128 ASCII letters, digits or any of _ . : / -")
    return queue


def check_text(what: str, text: str, limit: int) -> str:
    """Returns `text`. Raises `InvalidName` if it is empty, over `limit` bytes of UTF-8, or has control characters."""
    if not isinstance(cast("object", text), str):
        raise InvalidName(f"{what} must be text, got {text!r}.")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidName(f"{what} {text!r} has a lone surrogate, which is not a character.") from None
    if not 1 <= size <= limit:
        raise InvalidName(f"{what} must have 1 to {limit} bytes, got {size}.")
    if _CONTROL.search(text):
        raise InvalidName(f"{what} {text!r} has control characters.")
    return text


def refuse_unknown(what: str, unknown: Iterable[str], known: Collection[str]) -> None:
    """Raises `ConfigurationError` if there are unknown names, which names the near one, or all that are known. `what` they are:
    "option", say."""
    for name in sorted(unknown):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else f" The {what}s are: {', '.join(sorted(known))}."
        raise ConfigurationError(f"There is no {what} {name!r}.{hint}")
