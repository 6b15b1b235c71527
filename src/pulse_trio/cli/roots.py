"""What a retry or a deletion of a tree's root does to the tree, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..store import family, operations
from ..store.places import COUNTED
from ..text import count_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ..client import SyncClient
    from ..store.places import Place

_AT_ONCE = 1000
_EVENTS = "; received events are received again, before new ones"
_NAMED = 10
"""How many jobs a message names."""


def places_in(client: SyncClient, ids: Sequence[int]) -> dict[int, Place]:
    """Where those of these jobs stand that belong to trees."""
    places: dict[int, Place] = {}
    for start in range(0, len(ids), _AT_ONCE):
        places |= client.run(operations.places_of(ids[start : start + _AT_ONCE]))
    return places


def settled_roots(client: SyncClient, ids: Sequence[int]) -> dict[int, int]:
    """The settled roots of trees among these jobs, and how many members each has."""
    return {
        place.id: place.members
        for place in places_in(client, ids).values()
        if place.parent_id is None and place.members and not place.root_lives
    }


def unfinished(client: SyncClient, ids: Sequence[int]) -> list[int]:
    """Those of these jobs that were cut short and whose clean-up did not end: a retry does the rest of it."""
    found: list[int] = []
    for start in range(0, len(ids), _AT_ONCE):
        found += client.run(family.unfinished_clean_ups(ids[start : start + _AT_ONCE]))
    return found


def said_of_unfinished(ids: Sequence[int]) -> str:
    """The same in words."""
    if len(ids) == 1:
        return f"job {ids[0]} was cut short and its clean-up did not end: a retry does the rest of it, and no more"
    return (
        f"{len(ids):,} jobs ({_named(ids)}) were cut short and their clean-ups did not end: a retry does the rest of each, "
        "and no more"
    )


def _named(ids: Sequence[int]) -> str:
    more = f" and {len(ids) - _NAMED:,} more" if len(ids) > _NAMED else ""
    return f"{', '.join(map(str, ids[:_NAMED]))}{more}"


def anew(client: SyncClient, ids: Sequence[int]) -> list[int]:
    """Those of these jobs that a retry begins anew, because they have compensated."""
    found: list[int] = []
    for start in range(0, len(ids), _AT_ONCE):
        found += client.run(family.compensated(ids[start : start + _AT_ONCE]))
    return found


def said_of_anew(ids: Sequence[int]) -> str:
    """The same in words."""
    named = _named(ids)
    if len(ids) == 1:
        return f"job {named} has undone what it had done: a retry begins it anew, and every step is done again{_EVENTS}"
    return (
        f"{len(ids):,} jobs ({named}) have undone what they had done: a retry begins them anew, and every step is done "
        f"again{_EVENTS}"
    )


def owing_below(client: SyncClient, roots: Collection[int], owing: Sequence[int]) -> list[int]:
    """These jobs that owe their clean-up, and the members of these settled roots that do."""
    return sorted({*owing, *(client.run(family.owing_members(list(roots))) if roots else ())})


def said_of_lost(owing: Sequence[int]) -> str:
    """That these jobs, which will be deleted, owe their clean-up, in words."""
    who, it = (
        (f"job {owing[0]} owes its", "it is") if len(owing) == 1 else (f"jobs {_named(owing)} owe their", "they are")
    )
    return f"{who} clean-up, which nobody can do any more when {it} deleted: see pulse-trio jobs retry"


def said_of_members(client: SyncClient, roots: Collection[int], ids: Sequence[int]) -> str | None:
    """Which members of the trees of these settled roots owe a clean-up that nobody does when these jobs are retried, in words;
    None if there are none."""
    left = sorted(set(owing_below(client, roots, ())) - set(ids))
    if not left:
        return None
    who, them = (f"job {left[0]} owes its", "it") if len(left) == 1 else (f"jobs {_named(left)} owe their", "them")
    return f"{who} clean-up, which a retry of the root does only if that starts {them} again: retry {them} too"


def on_trees(
    roots: Mapping[int, int],
    verb: str,
    *,
    afresh: bool = False,
    begin_anew: Sequence[int] = (),
    unfinished: Sequence[int] = (),
) -> str | None:
    """What the act does to the trees of these settled roots, each with how many members it has; None if there are none.
    `begin_anew`: the jobs whose history a retry forgets; `unfinished`: those of which it does the rest of a clean-up."""
    if not roots:
        return None
    more = max(roots.values()) > COUNTED
    members = sum(min(each, COUNTED) for each in roots.values())
    whose = f"{count_of(len(roots), 'job')} started {'more than ' if more else ''}{count_of(members, 'other')}"
    if verb == "delete":
        return f"{whose}, which will be deleted too, with their histories"
    if afresh:
        return (
            f"{whose}: with --afresh a root forgets its history, does every step again and starts new children{_EVENTS}"
        )
    if set(roots) <= set(unfinished):
        return f"{whose}: a root that does the rest of its clean-up starts none of them"
    if set(roots) <= set(begin_anew):
        return f"{whose}: a root that begins anew starts new children"
    which = (
        "a root that does neither"
        if unfinished
        else "a root that does not begin anew"
        if begin_anew
        else "a retried root"
    )
    return f"{whose}: {which} goes on after the last line of its history, and may start its failed children again"
