"""What a retry or a deletion of many jobs does to histories and trees, in sentences. (For the command line: cli/roots.py.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UsageError
from ...store import family, history, operations
from ...store.places import COUNTED
from ...text import count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...store.operations import Operation
    from ..database import Database

_AT_ONCE = history.BATCH * 2
_NAMED = 10
"""How many jobs a sentence names."""
_EVENTS = "received events are received again, before new ones"


async def foretell(database: Database, verb: str, ids: Sequence[int], *, afresh: bool) -> list[str]:
    """The sentences; none for an act that does nothing to histories and trees."""
    if verb == "cancel":
        return []
    rest = anew = list[int]()
    if verb == "retry" and not afresh:
        rest = await _those(database, family.unfinished_clean_ups, ids)
        anew = await _those(database, family.compensated, ids)
    told = list[str]()
    if rest:
        told.append(
            "1 job of them was cut short and its clean-up did not end: a retry does the rest of it, and no more."
            if len(rest) == 1
            else f"{len(rest):,} jobs of them were cut short and their clean-ups did not end: a retry does the rest of each, "
            "and no more."
        )
    if anew:
        begins = "has undone what it had done: a retry begins it"
        if len(anew) > 1:
            begins = "have undone what they had done: a retry begins them"
        told.append(f"{count_of(len(anew), 'job')} of them {begins} anew, and every step is done again; {_EVENTS}.")
    roots = await _roots(database, ids)
    if roots:
        more = "more than " if max(roots.values()) > COUNTED else ""
        members = sum(min(members, COUNTED) for members in roots.values())
        whose = f"{count_of(len(roots), 'job')} of them started {more}{count_of(members, 'other')}"
        told.append(whose + _becomes(verb, set(roots), set(rest), set(anew), afresh=afresh))
    if roots and verb == "retry":
        told += _left(sorted(set(await _those(database, family.owing_members, list(roots))) - set(ids)))
    return told


def _becomes(verb: str, roots: set[int], rest: set[int], anew: set[int], *, afresh: bool) -> str:
    """What becomes of the trees of these roots."""
    if verb == "delete":
        return ", which are deleted too, with their histories."
    if afresh:
        return f". A root forgets its history, does every step again and starts new children; {_EVENTS}."
    if roots <= rest:
        return ". A root that does the rest of its clean-up starts none of them."
    if roots <= anew:
        return ". A root that begins anew starts new children."
    which = "A root that does neither" if rest else "A root that does not begin anew" if anew else "A retried root"
    return f". {which} goes on after the last line of its history, and may start its failed children again."


def _left(owing: Sequence[int]) -> list[str]:
    """That these members owe a clean-up which nobody does."""
    if not owing:
        return []
    more = f" and {len(owing) - _NAMED:,} more" if len(owing) > _NAMED else ""
    named = f"{', '.join(map(str, owing[:_NAMED]))}{more}"
    who, them = (f"Job {named} owes its", "it") if len(owing) == 1 else (f"Jobs {named} owe their", "them")
    return [f"{who} clean-up, which a retry of the root does only if that starts {them} again: retry {them} too."]


async def _those(
    database: Database, asked: Callable[[Sequence[int]], Operation[list[int]]], ids: Sequence[int]
) -> list[int]:
    """Those of these jobs of which it is so; none where this role may not ask."""
    found = list[int]()
    for start in range(0, len(ids), _AT_ONCE):
        try:
            found += await database.read(asked(ids[start : start + _AT_ONCE]))
        except UsageError as error:
            if operations.is_refusal(error):
                return []
            raise
    return found


async def _roots(database: Database, ids: Sequence[int]) -> dict[int, int]:
    """The settled roots of trees among these jobs, and how many members each has."""
    found = dict[int, int]()
    for start in range(0, len(ids), _AT_ONCE):
        for place in (await database.read(operations.places_of(ids[start : start + _AT_ONCE]))).values():
            if place.parent_id is None and place.members and not place.root_lives:
                found[place.id] = place.members
    return found
