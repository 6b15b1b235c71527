"""What has become of a remembered scope in an attempt (scopes.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Sequence

    import trio

    from .stood import Stood


@dataclass(slots=True)
class SoFar:
    """Of one scope."""

    calls: int = 0
    """How many calls its task has begun in it."""
    read: bool = False
    """Whether its task has found that it had struck."""
    place: tuple[str, ...] | None = None
    """Where the plain await was that it has cut short, if that is known; None if that does not clean up in it."""
    before: bool = False
    """Whether it had struck before its task began a call that it cut short."""
    busy: Sequence[trio.lowlevel.Task] | None = None
    """The tasks that were busy when it struck, if that is known."""
    opened: bool = False
    """Whether it struck as it was opened."""
    cuts_again: bool = False
    """Whether it has struck again, and had cut something short in an attempt before."""
    in_time: bool = False
    """Whether its block has ended in time all the same."""
    late: bool | None = None
    """Whether it struck too late to cut anything short; known when it has cut something, or its block has ended."""
    outer: bool = False
    """Whether that was because something around it had struck."""
    still_at: int | None = None
    """At which line the replay stood when the scope was last found to wait for its own (swallowed.py)."""
    cut_at: float = math.inf
    """When the body of a block is cut short, on Trio's clock, at the latest: a child has failed, and blocks in the body that
    earlier attempts had open are not open again."""


def told_in(said: Stood, known: SoFar) -> Stood:
    """The same with what is known now."""
    late = known.late is True
    return replace(said, late=late, opened=known.opened, outer=late and known.outer, before=known.before)
