"""The overview: what is stuck, what runs and waits, how fast, and what fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import PulseTrioError
from ...store import operations, queues, watching
from ...text import count_of

if TYPE_CHECKING:
    from ...store.operations import WorkerRecord
    from ...store.queues import PausedKind
    from ...store.watching import Depth, Depths, Failing, Figures
    from ..live import Live
    from ..site import Site

FIGURES_AGE = 10.0
"""Seconds for which one sample of the archive serves all pages."""
LATE = 60.0
"""Seconds after which a due job is late."""


@dataclass(frozen=True)
class Trouble:
    """Something that keeps jobs from running: what it is, what to do, and the page about it with its query."""

    level: str
    what: str
    do: str
    path: str
    query: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Rates:
    """What finished lately, and what fails: an estimate from a sample of the archive."""

    figures: Figures
    failing: list[Failing]


@dataclass(frozen=True)
class Overview:
    """The first page. `rates` is None when the sample could not be read, and `no_rates` says why."""

    depths: Depths
    workers: int
    slots: int
    running: int
    troubles: list[Trouble] = field(default_factory=list[Trouble])
    rates: Rates | None = None
    no_rates: str | None = None


async def read(site: Site) -> Overview:
    """Reads everything that the first page shows."""
    database = site.database
    async with database.reading() as connection:
        depths = await operations.run(connection, database.schema, watching.depths())
        workers = await operations.run(connection, database.schema, operations.workers())
        kinds = await operations.run(connection, database.schema, queues.paused_kinds())
    alive = [w for w in workers if w.is_live]
    rates, problem = None, None
    try:
        rates = await _rates(site.live, site)
    except PulseTrioError as error:
        problem = str(error)
    return Overview(
        depths,
        len(alive),
        sum(w.concurrency for w in alive),
        sum(q.running for q in depths.queues),
        troubles(depths, workers, kinds),
        rates,
        problem,
    )


async def _rates(live: Live, site: Site) -> Rates:
    async def look() -> Rates:
        database = site.database
        async with database.reading() as connection:
            figures = await operations.run(connection, database.schema, watching.figures())
            return Rates(figures, await operations.run(connection, database.schema, watching.failing()))

    return await live.recent("rates", FIGURES_AGE, look)


def troubles(depths: Depths, workers: list[WorkerRecord], kinds: list[PausedKind]) -> list[Trouble]:
    """What is stuck and why, the worst first."""
    found: list[Trouble] = []
    alive = [w for w in workers if w.state == "running"]
    waiting = [q for q in depths.queues if q.available]
    if waiting and not alive:
        found.append(Trouble("error", "No worker runs, and jobs are due.", "Start one: pulse-trio run", "/workers"))
    if silent := [f"{w.host}:{w.pid}" for w in workers if w.state == "stale"]:
        names = ", ".join(silent[:3]) + (f" and {len(silent) - 3:,} more" if len(silent) > 3 else "")
        many = f"{len(silent):,} workers show no sign of life: {names}."
        what = f"The worker {names} shows no sign of life." if len(silent) == 1 else many
        found.append(
            Trouble(
                "error", what, "What is still held is rescued when its lease runs out. Look at the logs.", "/workers"
            )
        )
    served = {queue for w in alive for queue in w.queues}
    for queue in waiting:
        found += _of_queue(queue, alive=bool(alive), served="*" in served or queue.name in served)
    if depths.quarantined:
        what = f"In quarantine, because their workers died with them: {count_of(depths.quarantined, 'job')}."
        found.append(Trouble("warning", what, "The doctor names them.", "/doctor"))
    if kinds:
        names = ", ".join(k.kind for k in kinds[:3]) + (" and more" if len(kinds) > 3 else "")
        found.append(Trouble("warning", f"Paused: the kind {names}.", "Its jobs wait until it is resumed.", "/queues"))
    return sorted(found, key=lambda t: t.level != "error")[:12]


def _of_queue(queue: Depth, *, alive: bool, served: bool) -> list[Trouble]:
    late = queue.oldest is not None and queue.oldest >= LATE
    if queue.paused:
        return [Trouble("warning", f"The queue {queue.name} is paused, and jobs are due.", "Resume it.", "/queues")]
    if alive and not served:
        return [
            Trouble("error", f"No worker serves the queue {queue.name}.", "Start one with --queues.", "/workers"),
        ]
    if late and queue.limit is not None and queue.running >= queue.limit:
        return [
            Trouble(
                "warning", f"The queue {queue.name} is late, and at its limit of {queue.limit}.", "Raise it.", "/queues"
            )
        ]
    if late and alive:
        return [
            Trouble(
                "warning",
                f"The queue {queue.name} is late: its first job has been due for {round(queue.oldest or 0):,} s.",
                "Add workers, or look at what runs.",
                "/jobs",
                {"state": "running", "queue": queue.name},
            )
        ]
    return []
