"""Judges whether jobs are claimed and do well: the rules that `pulse-trio top` applies, too, to what it reads."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from ..text import count_of, duration
from .findings import ENOUGH_ATTEMPTS, FAILING, FULL, RESCUED, UNSERVED, WAITED, Finding, at_least

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ..store.operations import WorkerRecord
    from ..store.watching import Failing


def judge_stopping(workers: Iterable[WorkerRecord], waiting: int, *, more: bool) -> Iterator[Finding]:
    """Every worker that lives is stopping while so many jobs (`more`: at least) are due."""
    live = [worker for worker in workers if worker.is_live]
    if live and waiting and all(worker.state == "draining" for worker in live):
        running = sum(worker.running for worker in live)
        yield Finding(
            "warning",
            "workers",
            f"every worker is stopping ({count_of(len(live), 'worker')}; {count_of(running, 'job')} ran at their last sign of "
            f"life), so none claims, and {at_least(waiting, more)} wait",
            "Start one: pulse-trio run app:handlers",
        )


def judge_slots(workers: Iterable[WorkerRecord], oldest: float) -> Iterator[Finding]:
    """Nearly all slots are taken, and a job has been due for `oldest` seconds."""
    live = [worker for worker in workers if worker.is_live]
    slots, running = sum(w.concurrency for w in live), sum(w.running for w in live)
    if slots and running / slots > FULL and oldest > WAITED:
        yield Finding(
            "warning",
            "slots",
            f"{running:,} of {slots:,} slots are taken, and the oldest job has waited for {duration(oldest)}",
            "Raise --concurrency where handlers wait for others, start more workers where they compute.",
            alert="PulseSlotsFull",
        )


def judge_unserved(
    workers: Sequence[WorkerRecord], queue: str, waiting: int, oldest: float, *, more: bool
) -> Iterator[Finding]:
    """Workers run, and none of them serves a queue whose first job has been due for `oldest` seconds."""
    runs = any(map(_claims, workers))
    if oldest > UNSERVED and runs and not is_served(queue, workers):
        yield Finding(
            "warning",
            "unserved queue",
            f"no running worker serves {queue}; {at_least(waiting, more)} wait, the oldest for {duration(oldest)}",
            no_one_serves(queue),
        )


def judge_attempts(failing: Iterable[Failing], rescued: int) -> Iterator[Finding]:
    """How attempts ended lately."""
    for kind in failing:
        if kind.ended > ENOUGH_ATTEMPTS and kind.failed / kind.ended > FAILING:
            yield Finding(
                "warning",
                "failing jobs",
                f"{kind.failed:,} of the last {kind.ended:,} attempts of {kind.kind} in {kind.queue} failed, within "
                f"{duration(kind.seconds)}",
                _failed(quote(kind.kind)),
                alert="PulseJobsFail",
            )
    if rescued > RESCUED:
        yield Finding(
            "warning",
            "rescued jobs",
            f"{rescued:,} attempts were left behind within 15 minutes by workers that died",
            "Was their memory used up, or were they killed before their --grace had passed? See the system's log.",
            alert="PulseJobsRescued",
        )


def is_served(queue: str, workers: Iterable[WorkerRecord]) -> bool:
    """Whether a running worker claims from a queue."""
    return any(queue in worker.queues or worker.queues == ["*"] for worker in workers if _claims(worker))


def _claims(worker: WorkerRecord) -> bool:
    """A quarantine process runs, too, and claims nothing."""
    return worker.is_live and worker.state == "running"


def no_one_serves(queue: str) -> str:
    """What to do about a queue that no worker serves."""
    return f"No running worker serves that queue: start one with --queues {queue}"


def _failed(kind: str) -> str:
    return (
        f"pulse-trio jobs list --kind {kind} --state retryable has those that are tried again, --state dead those that have "
        f"no attempt left; pulse-trio queues pause --kind {kind} keeps them from using up their attempts."
    )
