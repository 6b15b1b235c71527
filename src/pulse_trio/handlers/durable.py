"""How a durable handler is declared: `handlers.job(durable=True, suspend_after=5, version=1)`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Durability:
    """`suspend_after`: seconds that a handler may only wait before it is suspended. `version`: of its code; each job keeps that
    of its first durable call."""

    suspend_after: float = 5.0
    version: int = 1


def take_durability(kind: str, runs: str, given: dict[str, Any]) -> Durability | None:
    """Takes the options of a durable handler out of the given ones. Raises `ConfigurationError`."""
    about = {name: given.pop(name) for name in ("suspend_after", "version") if name in given}
    durable: Any = given.pop("durable", False)
    if not isinstance(durable, bool):
        raise ConfigurationError(f"Handler {kind!r}: durable must be True or False, got {durable!r}.")
    if not durable:
        if about:
            are = "is" if len(about) == 1 else "are"
            raise ConfigurationError(f"Handler {kind!r}: {' and '.join(about)} {are} for handlers with durable=True.")
        return None
    if runs != "trio":
        raise ConfigurationError(f"Handler {kind!r}: durable=True is for Trio handlers; this one has runs={runs!r}.")
    after, version = about.get("suspend_after", 5.0), about.get("version", 1)
    if isinstance(after, timedelta):
        after = after.total_seconds()
    if isinstance(after, bool) or not isinstance(after, (int, float)) or not 0 <= after < math.inf:
        raise ConfigurationError(
            f"Handler {kind!r}: suspend_after must be a number of seconds from 0 on, got {after!r}."
        )
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version < 2**31:
        raise ConfigurationError(
            f"Handler {kind!r}: version must be a whole number from 1 to {2**31 - 1}, got {version!r}."
        )
    return Durability(float(after), version)
