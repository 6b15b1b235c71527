"""What a retry or a deletion of a tree's root does to the tree, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..store.places import COUNTED
from ..store.rehearsing import named
from ..text import count_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_EVENTS = "; received events are received again, before new ones"


def said_of_unfinished(ids: Sequence[int]) -> str:
    """That these jobs were cut short and their clean-ups did not end."""
    if len(ids) == 1:
        return f"job {ids[0]} was cut short and its clean-up did not end: a retry does the rest of it, and no more"
    return (
        f"{len(ids):,} jobs ({named(ids)}) were cut short and their clean-ups did not end: a retry does the rest of each, "
        "and no more"
    )


def said_of_anew(ids: Sequence[int]) -> str:
    """That a retry begins these jobs anew, because they have compensated."""
    them = named(ids)
    if len(ids) == 1:
        return f"job {them} has undone what it had done: a retry begins it anew, and every step is done again{_EVENTS}"
    return (
        f"{len(ids):,} jobs ({them}) have undone what they had done: a retry begins them anew, and every step is done "
        f"again{_EVENTS}"
    )


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
