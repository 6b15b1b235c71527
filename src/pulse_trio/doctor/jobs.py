"""Judges what is read of workers, queues, schedules and jobs."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from ..store import health as looking
from ..store import watching
from ..text import count_of, duration
from .claiming import is_served, judge_attempts, judge_slots, judge_stopping, judge_unserved, no_one_serves
from .findings import BACKLOG, LATE, Finding, at_least
from .moments import judge_moments
from .tables import holders, storage_of
from .trees import judge_trees

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..store.health import Health, Left, Owing, PutBack, Quarantined
    from ..store.operations import WorkerRecord

_ENDED = "did not end when it was cancelled"
"""In what is said of a job that was released because its worker was replaced."""
_UNFIT = "UnfitArguments: "
"""What the error of a job begins with that its worker's handler cannot take."""
RUNS_LONG = 3600.0
"""Seconds after which the doctor reports a running attempt."""
NAMED = 5
"""How many stale workers are named."""


def diagnose(found: Health) -> Iterator[Finding]:
    """Findings about the workers, queues and tables."""
    yield from storage_of(found.storage, found.server)
    if found.ids_behind:
        yield Finding(
            "error",
            "ids",
            f"the sequence of job ids is {found.ids_behind:,} behind the existing jobs (a restore without it?): new jobs get "
            f"the ids of finished ones, and enqueues fail where a live job has the id",
            "pulse-trio migrate moves it forward; or, as the schema's owner: SELECT pulse.mend_ids()",
        )
    for table in found.row_security:
        yield Finding(
            "error" if table.hides else "warning",
            "row-level security",
            f"row-level security other than pulse-trio's own may hide rows of {table}: jobs may wait forever, or run again",
            looking.LIFT,
        )
    yield from holders(found)
    yield from judge_moments(found.ahead)
    yield from _workers(found)
    yield from _queues(found)
    yield from _kinds(found)
    yield from judge_slots(
        found.workers, max((queue.oldest_available_age or 0.0 for queue in found.queues), default=0.0)
    )
    yield from judge_attempts(found.failing, found.rescued)
    yield from _schedules(found)
    yield from judge_trees(found.stuck)
    for job in found.quarantined:
        since = f"for {duration(job.age)}" if job.since is not None else "since before this version"
        where = f"process {job.host}:{job.pid} runs it" if job.pid is not None else "it waits"
        yield Finding(
            "warning",
            "quarantine",
            f"job {job.id} ({job.kind}) of {job.queue} has been in quarantine {since}, after {crashes_of(job)}; {where}",
            f"To see why its workers died: pulse-trio jobs show {job.id}; to give it up: pulse-trio jobs cancel {job.id}",
            alert="PulseQuarantine",
        )
    if not found.quarantined:
        yield Finding("ok", "quarantine", "no job is in quarantine")
    if found.owing is not None and found.owing.jobs:
        yield _owing(found.owing)
    yield from map(_released, found.put_back)


def crashes_of(job: Quarantined) -> str:
    """The crash record of a job in quarantine."""
    crashes = "1 crash" if job.crashes == 1 else f"{job.crashes} crashes"
    return f"{crashes}, {job.deaths} of them seen to be its own"


def _owing(found: Owing) -> Finding:
    """Finished jobs whose `job.cleanup()` did not end well: what they did is done, and not undone."""
    one = found.jobs == 1
    whose = f"job {found.newest} owes its" if one else f"{found.jobs:,} jobs (the newest is {found.newest}) owe their"
    return Finding(
        "warning",
        "clean-ups",
        f"{whose} clean-up: it began, or was due, and did not end well",
        f"Mend what failed (pulse-trio jobs show {found.newest}), then pulse-trio jobs retry {found.newest}: it does the "
        "rest of the clean-up. All of them: pulse-trio jobs list --owes-clean-up",
    )


def _released(back: PutBack) -> Finding:
    """A kind whose jobs workers release again and again."""
    times = (
        f"{count_of(back.jobs, 'job')} of kind {back.kind!r} {'was' if back.jobs == 1 else 'were'} released "
        f"{count_of(back.times, 'time')} within the hour"
    )
    see = f"See: pulse-trio jobs show {back.first}"
    if back.why is None:
        return Finding("warning", "unknown kind", times, f"Does a worker of its queue have that handler? {see}")
    if not back.why.startswith(_UNFIT):
        stuck = "Mend that handler: one that is cancelled has to end. " if _ENDED in back.why else ""
        return Finding("warning", "released jobs", f"{times}: {back.why.splitlines()[0]}", f"{stuck}{see}")
    return Finding(
        "warning",
        "other version",
        f"{times}. {back.why.removeprefix(_UNFIT).splitlines()[0]}",
        "Start a worker with the code that they are for. After a rollback for good: pulse-trio jobs cancel (with --now those "
        f"that are being cancelled: what they would undo is not undone), and enqueue them anew. {see}",
    )


def _workers(found: Health) -> Iterator[Finding]:
    yield from _stale([worker for worker in found.workers if worker.state == "stale"], found.left)
    live = [worker for worker in found.workers if worker.is_live]
    waiting = sum(queue.available for queue in found.queues)
    more = any(queue.at_least for queue in found.queues)
    stopping = list(judge_stopping(found.workers, waiting, more=more))
    if stopping:
        yield from stopping
    elif live:
        yield Finding(
            "ok",
            "workers",
            f"{count_of(len(live), 'worker')}; {count_of(sum(w.running for w in live), 'job')} ran at their last sign of life",
        )
    elif waiting:
        yield Finding(
            "error",
            "workers",
            f"no worker runs, and {at_least(waiting, more)} wait",
            "Start one: pulse-trio run app:handlers",
            alert="PulseNoWorkers",
        )
    elif found.left is not None and found.left.jobs:
        verb = "waits" if found.left.jobs == 1 else "wait"
        yield Finding(
            "error",
            "workers",
            f"no worker runs, and {_left_jobs(found.left)} of workers that are gone {verb} to be rescued",
            "Start one: pulse-trio run app:handlers",
            alert="PulseNoWorkers",
        )
    else:
        yield Finding(
            "warning",
            "workers",
            "no worker runs; no job waits now",
            "Start one: pulse-trio run app:handlers",
            alert="PulseNoWorkers",
        )


def _stale(workers: list[WorkerRecord], left: Left | None) -> Iterator[Finding]:
    """The workers that are silent, and what they hold now."""
    if not workers:
        return
    names = ", ".join(f"{worker.host}:{worker.pid}" for worker in workers[:NAMED])
    if len(workers) > NAMED:
        names += f" and {len(workers) - NAMED:,} more"
    one = len(workers) == 1
    silent = "1 worker shows" if one else f"{len(workers):,} workers show"
    yield Finding(
        "warning",
        "stale worker",
        f"{silent} no sign of life ({names}); {_held(left, 'it' if one else 'them')}",
        "Were they killed, stopped (SIGSTOP), or cut off? If a process still exists: pulse-trio stack, or kill it.",
    )


def _left_jobs(left: Left) -> str:
    return at_least(left.jobs, left.jobs >= looking.MOST_LEFT)


def _held(left: Left | None, whom: str) -> str:
    if left is None or not left.jobs or left.seconds is None:
        return f"nothing is held by {whom} any more"
    jobs = _left_jobs(left)
    verb = "is" if left.jobs == 1 else "are"
    if left.seconds > 0:
        return f"{jobs} {verb} held by {whom} until the last lease runs out, in {duration(left.seconds)}"
    return f"{jobs} {verb} still held by {whom}, with leases that have run out: a live worker's watchdog rescues them"


def _queues(found: Health) -> Iterator[Finding]:
    late: list[str] = []
    for queue in found.queues:
        age = queue.oldest_available_age or 0.0
        wait = at_least(queue.available, queue.at_least)
        if queue.paused:
            yield Finding(
                "warning",
                "paused queue",
                f"{queue.name} is paused; {wait} wait, the oldest for {duration(age)}",
                f"pulse-trio queues resume {queue.name}",
                alert="PulseQueueBacklog" if age > BACKLOG else None,
            )
        elif age > BACKLOG:
            late.append(queue.name)
            yield Finding(
                "warning",
                "backlog",
                f"the oldest job of {queue.name} has been due for {duration(age)}; {wait} wait",
                _more(queue.name, found),
                alert="PulseQueueBacklog",
            )
        else:
            yield from judge_unserved(found.workers, queue.name, queue.available, age, more=queue.at_least)
        if queue.dead:
            yield Finding(
                "warning",
                "dead jobs",
                f"{at_least(queue.dead, queue.dead_at_least)} of {queue.name} died within the last 24 h",
                f"pulse-trio jobs list --state dead --queue {queue.name}, and jobs retry when the cause is fixed.",
            )
        if (queue.oldest_running_age or 0) > RUNS_LONG:
            yield Finding(
                "ok",
                "long attempt",
                f"the oldest attempt of {queue.name} has run for {duration(queue.oldest_running_age or 0)} (pulse-trio jobs "
                f"list --state running --queue {queue.name}; pulse-trio stack ID shows what it is doing)",
            )
    if any(queue.dead_at_least for queue in found.queues):
        yield Finding(
            "warning",
            "dead jobs",
            f"{watching.ALL_DEAD:,} jobs that did not complete were looked at, and more ended within the last 24 h: a queue "
            "may have dead jobs that are named here with fewer, or not at all",
            "pulse-trio jobs list --state dead --queue QUEUE names those of one queue.",
        )
    if not late:
        yield Finding("ok", "backlog", f"no job has been due for more than {duration(BACKLOG)}")


def _kinds(found: Health) -> Iterator[Finding]:
    for kind in found.paused_kinds:
        yield Finding(
            "warning",
            "paused kind",
            f"jobs of kind {kind.kind!r} are not claimed: it has been paused since {kind.paused_at:%Y-%m-%d %H:%M %Z}",
            f"pulse-trio queues resume --kind {quote(kind.kind)}",
        )


def _schedules(found: Health) -> Iterator[Finding]:
    for name, late in found.late.items():
        if late > LATE:
            yield Finding(
                "warning",
                "schedule",
                f"the schedule {name} is late by {duration(late)}",
                "Does a worker run that declares it? See: pulse-trio cron list",
                alert="PulseScheduleLate",
            )


def _more(queue: str, found: Health) -> str:
    if not is_served(queue, found.workers):
        return no_one_serves(queue)
    return "Add workers or raise --concurrency, unless a limit holds the queue back (pulse-trio queues list)."
