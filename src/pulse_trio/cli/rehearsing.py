"""What a deletion or a retry would do, found without doing it: which jobs, how many of their trees go along, and which are
refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..records import State
from ..states import TRANSITIONS, Event
from ..store import history, operations
from ..store.places import COUNTED, starts_again, undeleted, undeleted_in, unretried
from ..text import count_of
from .roots import places_in

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from ..client import SyncClient

_JOBS = 100
"""How many jobs are read at once, with their arguments."""


@dataclass(slots=True)
class Rehearsed:
    """The jobs that would be deleted, how many members of their trees go along (`more`: at least), and why others would not."""

    deleted: list[int] = field(default_factory=list[int])
    along: int = 0
    more: bool = False
    refused: dict[int, str] = field(default_factory=dict[int, str])

    def __str__(self) -> str:
        text = f"{count_of(len(self.deleted), 'job')} would be deleted"
        if not self.along:
            return text
        more = "more than " if self.more else ""
        who = "it" if len(self.deleted) == 1 else "they"
        others = f"{more}{count_of(self.along, 'other')} that {who} started"
        return f"{text}, and {others}: {more}{len(self.deleted) + self.along:,} jobs in all"


def rehearse_deletion(client: SyncClient, ids: Sequence[int], state: State | None) -> Rehearsed:
    """What a deletion of these jobs would do now. `state` is that of all of them where a filter has found them."""
    places, states = places_in(client, ids), _states_of(client, ids, state)
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
    return done


def rehearse_retry(
    client: SyncClient, ids: Sequence[int], state: State | None, owing: Container[int], *, afresh: bool = False
) -> history.Retried:
    """What a retry of these jobs would do now. `state` as above; `owing`: those that owe their clean-up."""
    places, states = places_in(client, ids), _states_of(client, ids, state)
    refused: dict[int, str] = {}
    for job_id in ids:
        if (found := states.get(job_id)) is None:
            refused[job_id] = operations.missing(job_id)
        elif (place := places.get(job_id)) and (why := unretried(place, found, owes=job_id in owing)) is not None:
            refused[job_id] = why
        elif Event.RETRY not in TRANSITIONS[found]:
            refused[job_id] = operations.unmoved(job_id, found, None)
    refused |= client.run(operations.refused_for_keys([one for one in ids if one not in refused], states))
    moved = [job_id for job_id in ids if job_id not in refused]
    failed = (
        job_id
        for job_id in refused
        if job_id in places and starts_again(states.get(job_id), afresh=afresh, owes=job_id in owing)
    )
    left = client.run(operations.below(failed, set(moved)))
    refused = {job_id: why for job_id, why in refused.items() if job_id not in left}
    return history.Retried(moved, refused, sorted(left))


def _refusal(job_id: int, state: State | None, of_tree: str | None) -> str | None:
    if state is None:
        return operations.missing(job_id)
    return of_tree or (undeleted_in(job_id, state) if state is State.RUNNING else None)


def _states_of(client: SyncClient, ids: Sequence[int], state: State | None) -> dict[int, State]:
    """`state` is that of all of them, if it is known."""
    if state is not None:
        return dict.fromkeys(ids, state)
    found: dict[int, State] = {}
    for start in range(0, len(ids), _JOBS):
        found |= {job.id: job.state for job in client.run(history.page(ids[start : start + _JOBS]))}
    return found
