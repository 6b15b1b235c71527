"""Being told of ends: what a client does with the one connection it listens on, and the question it asks otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .arrays import numbers, texts
from .operations import Query

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .operations import Operation


class Place(NamedTuple):
    """The server process that answers, and the channel on which it would tell ends."""

    pid: int
    channel: str


def place() -> Operation[Place]:
    """Where this connection would be told of ends."""
    rows = yield Query("waiting_place", {})
    return Place(*rows[0])


def hold(ids: Sequence[int], *, first: bool) -> Operation[None]:
    """From now on the ends of these are told. `first`: nothing was held so far."""
    yield Query("hold_waits", {"names": texts(_names(ids, whole=first))})


def drop(ids: Sequence[int], *, last: bool) -> Operation[None]:
    """The ends of these are told no more. `last`: nothing is held any more."""
    yield Query("drop_waits", {"names": texts(_names(ids, whole=last))})


def ended(ids: Sequence[int]) -> Operation[list[int]]:
    """Those of the ids that have come to their end, or never were."""
    rows = yield Query("ended", {"ids": numbers(ids)})
    return [row[0] for row in rows]


def _names(ids: Sequence[int], *, whole: bool) -> list[str]:
    # What is held first is "somebody waits": a job that ends in between is then asked for by its id.
    return [" waits"] * whole + [f" wait {i}" for i in ids]
