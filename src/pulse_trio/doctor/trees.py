"""Judges trees of jobs that do not go on by themselves: one finding for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..text import count_of
from .findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..store.family import StuckJobs, StuckTree, StuckTrees


def judge_trees(stuck: StuckTrees) -> Iterator[Finding]:
    """What each of the first trees waits for, and how many more there are."""
    for tree in stuck.first:
        yield Finding("warning", "trees", _waits(tree), _advice(tree))
    more = stuck.trees - len(stuck.first)
    if more > 0:
        least = "at least " if stuck.at_least else ""
        rest = f"{least}{count_of(more, 'more tree')} {'waits' if more == 1 else 'wait'} like that"
    elif stuck.at_least:
        rest = "not all trees were looked at: more may wait like that"
    else:
        return
    yield Finding("warning", "trees", rest, "The next ones are named when these go on.")


def _waits(tree: StuckTree) -> str:
    """The root, and for how many of its jobs it waits, and why."""
    reasons = [_reason(jobs, at_least=tree.at_least) for jobs in tree.waits]
    if tree.others:
        reasons.append(f"and for {count_of(tree.others, 'more reason')}")
    return f"the tree of job {tree.root_id} {'; '.join(reasons)}"


def _reason(jobs: StuckJobs, *, at_least: bool) -> str:
    if at_least:
        some = f"at least {count_of(jobs.jobs, 'job')} (one is {jobs.first})"
    else:
        some = f"job {jobs.first}" if jobs.jobs == 1 else f"{count_of(jobs.jobs, 'job')} (the first is {jobs.first})"
    match jobs.why:
        case "paused queue":
            return f"waits for {some} of the queue {jobs.queue}, which is paused"
        case "paused kind":
            return f"waits for {some} of the kind {jobs.kind}, which is paused"
        case "unserved queue":
            return f"waits for {some} of the queue {jobs.queue}, which no live worker serves"
        case _:
            them = "it that it" if jobs.jobs == 1 else "them that they"
            return f"waits for {some}, and nothing would tell {them} may go on (rows deleted by hand?)"


def _advice(tree: StuckTree) -> str:
    """What to do about each reason; or to give the tree up."""
    ended = f"{tree.waits[0].first} --now" if tree.settled else tree.root_id
    return f"{'; '.join(map(_remedy, tree.waits))}; or: pulse-trio jobs cancel {ended}"


def _remedy(jobs: StuckJobs) -> str:
    match jobs.why:
        case "paused queue":
            return f"pulse-trio queues resume {jobs.queue}"
        case "paused kind":
            return f"pulse-trio queues resume --kind {jobs.kind}"
        case "unserved queue":
            return f"Start a worker that serves {jobs.queue}"
        case _:
            return f"Any worker's watchdog looks at job {jobs.first} within minutes (see: pulse-trio jobs tree {jobs.first})"
