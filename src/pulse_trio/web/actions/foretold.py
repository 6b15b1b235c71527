"""What a retry or a deletion of many jobs would do, as the page before says it: `store/rehearsing.py` in sentences. (For the
command line: cli/acting.py.)"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...store import rehearsing
from ...store.places import COUNTED, left_to_parents
from ...text import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...states import State
    from ...store.operations import Operation

_EVENTS = "received events are received again, before new ones"


@dataclass(frozen=True)
class Foretold:
    """To which jobs the act would be done, why not to others, and what becomes of histories and trees, in sentences."""

    moved: list[int] = field(default_factory=list[int])
    refused: dict[int, str] = field(default_factory=dict[int, str])
    told: list[str] = field(default_factory=list[str])


def foretell(verb: str, ids: Sequence[int], state: State | None, *, afresh: bool) -> Operation[Foretold]:
    """What the act would do to these jobs now. `state` is that of all of them where a filter has found them."""
    if verb == "delete":
        return (yield from _of_deletion(ids, state))
    if verb == "retry":
        return (yield from _of_retry(ids, state, afresh=afresh))
    return Foretold(list(ids))


def said_of_lost(owing: Sequence[int]) -> str:
    """That these jobs, which will be deleted, owe their clean-up."""
    return f"{_sentence(rehearsing.said_of_lost(owing))} A retry does the rest of it."


def _of_deletion(ids: Sequence[int], state: State | None) -> Operation[Foretold]:
    done = yield from rehearsing.rehearse_deletion(ids, state)
    told = [said_of_lost(done.owing)] if done.owing else []
    if done.along:
        told.append(_sentence(str(done)))
    return Foretold(done.deleted, done.refused, told)


def _of_retry(ids: Sequence[int], state: State | None, *, afresh: bool) -> Operation[Foretold]:
    owing = yield from rehearsing.unfinished(ids)
    done = yield from rehearsing.rehearse_retry(ids, state, owing, afresh=afresh)
    rest = [] if afresh else owing
    anew = [] if afresh else (yield from rehearsing.anew(ids))
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
    roots = yield from rehearsing.settled_roots(ids)
    if roots:
        more = "more than " if max(roots.values()) > COUNTED else ""
        members = sum(min(members, COUNTED) for members in roots.values())
        whose = f"{count_of(len(roots), 'job')} of them started {more}{count_of(members, 'other')}"
        told.append(whose + _becomes(set(roots), set(rest), set(anew), afresh=afresh))
        if left := (yield from rehearsing.left_owing(roots, ids)):
            told.append(_sentence(rehearsing.said_of_left(left)))
    if done.left_to_parents:
        told.append(_sentence(left_to_parents(len(done.left_to_parents), afresh=afresh)))
    return Foretold(done.retried, done.refused, told)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _becomes(roots: set[int], rest: set[int], anew: set[int], *, afresh: bool) -> str:
    """What becomes of the trees of these roots."""
    if afresh:
        return f". A root forgets its history, does every step again and starts new children; {_EVENTS}."
    if roots <= rest:
        return ". A root that does the rest of its clean-up starts none of them."
    if roots <= anew:
        return ". A root that begins anew starts new children."
    which = "A root that does neither" if rest else "A root that does not begin anew" if anew else "A retried root"
    return f". {which} goes on after the last line of its history, and may start its failed children again."
