"""A tree of jobs as lines to draw: each job stands above those it started; of many quiet siblings only the number is shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from ..text import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .family import TreeJob

_ENDED = ("dead", "cancelled", "gone", "completed")
SIBLINGS = 20
"""How many finished siblings are shown one by one."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One line of a drawn tree: a job behind its lines, or what is left out (`left`): the number of siblings, or a job that
    has a line already."""

    indent: str
    depth: int
    job: TreeJob | None
    left: str | None = None


def branches(found: Sequence[TreeJob], asked: int) -> Iterator[Branch]:
    """The lines of a tree, from its root down; `asked` is shown in any case. Where the root's row is gone, those that it
    started stand at the left.

    Each job has one line. Parents in a circle, which only the owner of the schema can write, are cut where it closes; those
    that nothing leads to stand at the left."""
    ids = {job.id for job in found}
    below: dict[int, list[TreeJob]] = {}
    seen: set[int] = set()
    tops: list[TreeJob] = []
    for job in found:
        if job.parent_id in ids:
            below.setdefault(job.parent_id or 0, []).append(job)
        else:
            tops.append(job)
    kept, left = _chosen(tops, below, asked)
    first = [Branch("", 0, job) for job in kept] + ([Branch("", 0, None, _counted(left))] if left else [])
    seen.update(job.id for job in left)
    rest = (job for job in found if job.id not in seen)
    # A stack and no recursion: a tree may be deeper than Python's.
    waiting = [(branch, "") for branch in reversed(first)]
    while waiting or (waiting := [(Branch("", 0, job), "") for job in islice(rest, 1)]):
        branch, indent = waiting.pop()
        if branch.job is not None and branch.job.id in seen:
            yield replace(branch, job=None, left=f"job {branch.job.id} again, which has a line above")
            continue
        yield branch
        if branch.job is None:
            continue
        seen.add(branch.job.id)
        kept, left = _chosen(below.get(branch.job.id, []), below, asked)
        seen.update(job.id for job in left)
        rows: list[tuple[Branch, str]] = []
        for place, child in enumerate(kept):
            last = place == len(kept) - 1 and not left
            line = Branch(f"{indent}{'└─ ' if last else '├─ '}", branch.depth + 1, child)
            rows.append((line, indent + ("   " if last else "│  ")))
        if left:
            rows.append((Branch(f"{indent}└─ ", branch.depth + 1, None, _counted(left)), indent))
        waiting += reversed(rows)


def _chosen(
    children: Sequence[TreeJob], below: dict[int, list[TreeJob]], asked: int
) -> tuple[list[TreeJob], list[TreeJob]]:
    """The siblings to show, and those to count: leaves that have ended, once there are many. Those that died are shown first,
    then those that were cancelled."""
    if len(children) <= SIBLINGS:
        return list(children), []
    quiet = [c for c in children if c.state in _ENDED and c.id not in below and c.id != asked]
    quiet.sort(key=lambda c: _ENDED.index(c.state))
    kept = len(children) - len(quiet)
    left = quiet[max(0, SIBLINGS - kept) :]
    ids = {c.id for c in left}
    return [c for c in children if c.id not in ids], left


def _counted(jobs: Sequence[TreeJob]) -> str:
    counts = Counter(f"{job.state} {job.kind}" if job.kind else job.state for job in jobs)
    return ", ".join(f"{count:,} {what}" for what, count in counts.most_common())


def standing(job: TreeJob) -> str:
    """What a job that has not ended waits for, as words; empty for nothing, and for a moment (`waits_until`)."""
    if job.ends_as is not None:
        return f"ends as {job.ends_as} when what it started has ended"
    if job.state != "suspended":
        return ""
    waits = [f"for {shown(name)}" for name in job.events or ()]
    if not waits and job.waits_until is None and job.children:
        waits.append("for its child" if job.children == 1 else f"for {job.children:,} children")
    return f"waits {' or '.join(waits)}" if waits else ""
