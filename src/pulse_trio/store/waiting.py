"""How a client learns of ends: through the one connection it listens on, or else by asking."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .arrays import numbers, texts
from .operations import Query

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .operations import Operation


class Place(NamedTuple):
    """The server process that answers, and the channel on which it would announce ends."""

    pid: int
    channel: str


def place() -> Operation[Place]:
    """Where this connection would receive ends."""
    rows = yield Query("waiting_place", {})
    return Place(*rows[0])


def hold(ids: Sequence[int], *, first: bool) -> Operation[None]:
    """Announces the ends of these ids from now on. `first`: the client held no lock so far."""
    yield Query("hold_waits", {"names": texts(_names(ids, whole=first))})


def drop(ids: Sequence[int], *, last: bool) -> Operation[None]:
    """Stops announcing the ends of these ids. `last`: the client holds no more locks."""
    yield Query("drop_waits", {"names": texts(_names(ids, whole=last))})


def ended(ids: Sequence[int]) -> Operation[list[int]]:
    """The ids whose jobs or batches have ended, or never existed."""
    rows = yield Query("ended", {"ids": numbers(ids)})
    return [row[0] for row in rows]


def _names(ids: Sequence[int], *, whole: bool) -> list[str]:
    # The lock for "a client waits" comes first: if a job ends in between, its id is asked for later.
    return [" waits"] * whole + [f" wait {i}" for i in ids]
