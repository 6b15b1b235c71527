"""What a retry or a deletion of a tree's root does to the tree, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..store import operations
from ..text import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..client import SyncClient

_COUNTED = 100_000
_AT_ONCE = 1000


def on_trees(client: SyncClient, ids: Sequence[int], verb: str) -> str | None:
    """What the act does to the trees whose settled roots are among these jobs; None if there are none."""
    roots = members = 0
    more = False
    for start in range(0, len(ids), _AT_ONCE):
        for place in client.run(operations.places_of(ids[start : start + _AT_ONCE])).values():
            if place.parent_id is None and place.members and not place.root_lives:
                roots += 1
                members += min(place.members, _COUNTED)
                more = more or place.members > _COUNTED
    if not roots:
        return None
    whose = f"{count_of(roots, 'job')} started {'more than ' if more else ''}{count_of(members, 'other')}"
    if verb == "delete":
        return f"{whose}, which will be deleted too, with their histories"
    return (
        f"{whose}: a retried root goes on after the last line of its history, and may start its failed children again"
    )
