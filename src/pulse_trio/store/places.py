"""Where jobs stand in their trees, and the sentences of refusals that name it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..states import FINISHED, State
from ..text import count_of

if TYPE_CHECKING:
    from collections.abc import Container

COUNTED = 100_000
"""Up to how many members of a root are counted."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job stands in its tree: what a refusal names.

    `parent_open`: its parent may have children. `ends_as`: the state of a job whose outcome waits for its descendants. `below`:
    how many of those live. `members`: how many a root has, live and finished. `root_is_there`: its row was not deleted.
    `parent_lives`: it has not ended, or its outcome waits. `tree_is_doomed`: the root was deleted on demand, and its tree goes
    with it; where its row only went with its day, a member may still do the rest of its clean-up.
    """

    id: int
    root_id: int
    parent_id: int | None
    root_lives: bool
    parent_open: bool
    ends_as: str | None
    below: int
    members: int
    root_is_there: bool = True
    parent_lives: bool = False
    tree_is_doomed: bool = False


def unretried(place: Place, state: str, *, owes: bool = False) -> str | None:
    """Why a job of a tree was not retried; None for another reason than its tree. `owes`: it has not ended its clean-up."""
    if place.ends_as is not None:
        what = f"Job {place.id} has ended as {place.ends_as} and waits for {place.below:,} of its descendants"
        return f"{what}; cancel them or wait."
    if state == "suspended":
        return f"Job {place.id} is suspended: it goes on by itself when what it waits for is there."
    if place.parent_id is not None and place.root_lives and state == "completed":
        return (
            f"Job {place.id} is completed, and its result belongs to its parent, job {place.parent_id}; when its tree is "
            f"settled, run that again from the beginning: pulse-trio jobs retry {place.root_id} --afresh"
        )
    if place.parent_id is None or place.parent_open or state not in FINISHED:
        return None
    if not place.root_is_there and (place.tree_is_doomed or not owes):
        return (
            f"Job {place.id} belongs to the tree of job {place.root_id}, which was deleted; it will be deleted too, within the "
            "hour. Enqueue it anew."
        )
    if owes and not place.parent_lives:
        return None
    if owes:
        return (
            f"Job {place.id} owes its clean-up, and does the rest of it alone when its parent has ended: retry it when job "
            f"{place.parent_id} is settled."
        )
    if not place.root_lives:
        return (
            f"Job {place.id} belongs to the tree of job {place.root_id}, which is settled; retry job {place.root_id}."
        )
    return (
        f"Job {place.id} belongs to the tree of job {place.root_id}: its parent, job {place.parent_id}, has ended, is being "
        f"cancelled, or has gone on after the block that started this job, or after it has read how this one ended; retry job "
        f"{place.root_id} when its tree is settled."
    )


def starts_again(state: str | None, *, afresh: bool, owes: bool) -> bool:
    """Whether a job in this state, which was not retried, is left to a retried job above it in its tree. One that `owes` its
    clean-up is not: a job that does not start it again leaves that undone."""
    return not owes and (state in {State.DEAD, State.CANCELLED} or (afresh and state == State.COMPLETED))


def left_to_parents(count: int, *, afresh: bool) -> str:
    """That so many jobs are left to retried jobs above them, in words."""
    who, them = ("is", "it") if count == 1 else ("are", "them")
    what = "start failed children again themselves, unless they have gone on after them"
    if afresh:
        what = "begin anew and start new children"
    return f"{count_of(count, 'job')} {who} left to the retried jobs above {them} in the same trees, which {what}"


def undeleted(place: Place, deleted: Container[int] = ()) -> str | None:
    """Why a job of a tree was not deleted; None for another reason than its tree. `deleted`: roots that go with it."""
    if not place.root_lives:
        if place.parent_id is None and place.below:
            do = "does" if place.below == 1 else "do"
            return (
                f"{count_of(place.below, 'job')} in the tree of job {place.id} still {do} the rest of a clean-up "
                f"(pulse-trio jobs tree {place.id}): wait, then delete it."
            )
        if place.parent_id is None or place.root_id in deleted or not place.root_is_there:
            return None
        return (
            f"Job {place.id} belongs to the tree of job {place.root_id}, which may be retried, and then asks for its result: "
            f"delete job {place.root_id}, which takes all of its tree along (pulse-trio jobs delete {place.root_id})."
        )
    whose = "the root of a live tree" if place.root_id == place.id else f"part of the live tree of job {place.root_id}"
    return (
        f"Job {place.id} is {whose}: cancel job {place.root_id} first (pulse-trio jobs cancel {place.root_id}), and delete it "
        "when its tree is settled."
    )


def undeleted_in(job_id: int, state: State) -> str:
    """Why a job in this state was not deleted, where its tree has nothing against it."""
    if state is State.RUNNING:
        return f"Job {job_id} is running: cancel it first (pulse-trio jobs cancel {job_id}), then delete it."
    what = "is being retried" if state in FINISHED else "is being claimed"
    return f"Job {job_id} {what} at this moment: look again."
