"""What a deletion or a retry would do, found without doing it: which jobs, how many of their trees go along, which are refused,
and what becomes of clean-ups that did not end. The command line and the web page say it in their words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..records import State
from ..states import TRANSITIONS, Event
from ..text import count_of
from .family import compensated, owing_members
from .history import Retried, page
from .operations import below, missing, places_of, refused_for_keys, unfinished_clean_ups, unmoved
from .places import COUNTED, starts_again, undeleted, undeleted_in, unretried

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Sequence

    from .operations import Operation
    from .places import Place

_AT_ONCE = 1000
_JOBS = 100
"""How many jobs are read at once, with their arguments."""
_NAMED = 10
"""How many jobs a sentence names."""


@dataclass(slots=True)
class Rehearsed:
    """The jobs that would be deleted, how many members of their trees go along (`more`: at least), and why others would not.
    `owing`: those of all that go that owe their clean-up, which nobody can do any more then."""

    deleted: list[int] = field(default_factory=list[int])
    along: int = 0
    more: bool = False
    refused: dict[int, str] = field(default_factory=dict[int, str])
    owing: list[int] = field(default_factory=list[int])

    def __str__(self) -> str:
        text = f"{count_of(len(self.deleted), 'job')} would be deleted"
        if not self.along:
            return text
        more = "more than " if self.more else ""
        who = "it" if len(self.deleted) == 1 else "they"
        others = f"{more}{count_of(self.along, 'other')} that {who} started"
        return f"{text}, and {others}: {more}{len(self.deleted) + self.along:,} jobs in all"


def rehearse_deletion(ids: Sequence[int], state: State | None) -> Operation[Rehearsed]:
    """What a deletion of these jobs would do now. `state` is that of all of them where a filter has found them."""
    places = yield from _places_in(ids)
    states = yield from _states_of(ids, state)
    done = Rehearsed()
    roots = {one.id for one in places.values() if one.parent_id is None and not one.root_lives and one.id in states}
    for job_id in ids:
        place = places.get(job_id)
        reason = _refusal(job_id, states.get(job_id), None if place is None else undeleted(place, roots))
        if reason is not None:
            done.refused[job_id] = reason
            continue
        done.deleted.append(job_id)
        if place is not None and place.parent_id is not None and place.root_id in roots:
            done.along -= 1  # Counted among the members of its root.
        elif place is not None and place.parent_id is None:
            done.along += min(place.members, COUNTED)
            done.more = done.more or place.members > COUNTED
    owing = yield from unfinished(done.deleted)
    done.owing = yield from owing_below(_settled(places[each] for each in done.deleted if each in places), owing)
    return done


def rehearse_retry(
    ids: Sequence[int], state: State | None, owing: Container[int], *, afresh: bool = False
) -> Operation[Retried]:
    """What a retry of these jobs would do now. `state` as above; `owing`: those that owe their clean-up."""
    places = yield from _places_in(ids)
    states = yield from _states_of(ids, state)
    refused: dict[int, str] = {}
    for job_id in ids:
        if (found := states.get(job_id)) is None:
            refused[job_id] = missing(job_id)
        elif (place := places.get(job_id)) and (why := unretried(place, found, owes=job_id in owing)) is not None:
            refused[job_id] = why
        elif Event.RETRY not in TRANSITIONS[found]:
            refused[job_id] = unmoved(job_id, found, None)
    refused |= yield from refused_for_keys([one for one in ids if one not in refused], states)
    moved = [job_id for job_id in ids if job_id not in refused]
    failed = (
        job_id
        for job_id in refused
        if job_id in places and starts_again(states.get(job_id), afresh=afresh, owes=job_id in owing)
    )
    left = yield from below(failed, set(moved))
    refused = {job_id: why for job_id, why in refused.items() if job_id not in left}
    return Retried(moved, refused, sorted(left))


def _refusal(job_id: int, state: State | None, of_tree: str | None) -> str | None:
    if state is None:
        return missing(job_id)
    return of_tree or (undeleted_in(job_id, state) if state is State.RUNNING else None)


def _states_of(ids: Sequence[int], state: State | None) -> Operation[dict[int, State]]:
    """`state` is that of all of them, if it is known."""
    if state is not None:
        return dict.fromkeys(ids, state)
    found: dict[int, State] = {}
    for start in range(0, len(ids), _JOBS):
        found |= {job.id: job.state for job in (yield from page(ids[start : start + _JOBS]))}
    return found


# Trees and clean-ups


def settled_roots(ids: Sequence[int]) -> Operation[dict[int, int]]:
    """The settled roots of trees among these jobs, and how many members each has."""
    return _settled((yield from _places_in(ids)).values())


def _settled(places: Iterable[Place]) -> dict[int, int]:
    return {
        place.id: place.members
        for place in places
        if place.parent_id is None and place.members and not place.root_lives
    }


def _places_in(ids: Sequence[int]) -> Operation[dict[int, Place]]:
    """Where those of these jobs stand that belong to trees."""
    places: dict[int, Place] = {}
    for start in range(0, len(ids), _AT_ONCE):
        places |= yield from places_of(ids[start : start + _AT_ONCE])
    return places


def unfinished(ids: Sequence[int]) -> Operation[list[int]]:
    """Those of these jobs that were cut short and whose clean-up did not end: a retry does the rest of it."""
    return (yield from _those(unfinished_clean_ups, ids))


def anew(ids: Sequence[int]) -> Operation[list[int]]:
    """Those of these jobs that a retry begins anew, because they have compensated."""
    return (yield from _those(compensated, ids))


def _those(asked: Callable[[Sequence[int]], Operation[list[int]]], ids: Sequence[int]) -> Operation[list[int]]:
    found: list[int] = []
    for start in range(0, len(ids), _AT_ONCE):
        found += yield from asked(ids[start : start + _AT_ONCE])
    return found


def owing_below(roots: Collection[int], owing: Sequence[int]) -> Operation[list[int]]:
    """These jobs that owe their clean-up, and the members of these settled roots that do."""
    below_them = (yield from owing_members(list(roots))) if roots else ()
    return sorted({*owing, *below_them})


def left_owing(roots: Collection[int], ids: Collection[int]) -> Operation[list[int]]:
    """Which members of the trees of these settled roots owe a clean-up that nobody does when these jobs are retried."""
    return sorted(set((yield from owing_below(roots, ()))) - set(ids))


# In words, for both


def named(ids: Sequence[int]) -> str:
    """The ids of these jobs, or the first of them and how many more there are."""
    more = f" and {len(ids) - _NAMED:,} more" if len(ids) > _NAMED else ""
    return f"{', '.join(map(str, ids[:_NAMED]))}{more}"


def said_of_lost(owing: Sequence[int]) -> str:
    """That these jobs, which will be deleted, owe their clean-up."""
    who, it = (
        (f"job {owing[0]} owes its", "it is") if len(owing) == 1 else (f"jobs {named(owing)} owe their", "they are")
    )
    return f"{who} clean-up, which nobody can do any more when {it} deleted"


def said_of_left(owing: Sequence[int]) -> str:
    """That these members owe a clean-up which nobody does."""
    who, them = (f"job {owing[0]} owes its", "it") if len(owing) == 1 else (f"jobs {named(owing)} owe their", "them")
    return f"{who} clean-up, which a retry of the root does only if that starts {them} again: retry {them} too"
