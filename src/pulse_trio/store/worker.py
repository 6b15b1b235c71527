"""A worker's operations on the database: one part for each reason to change. The parts share no connection.

Every operation raises `DatabaseUnavailable` when its connection is lost or silent for too long; then the server may or may not
have done it.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..errors import DatabaseUnavailable
from .beats import Beats
from .callbacks import Callbacks
from .claims import Claims
from .figures import QueueFigures
from .firing import Firing
from .histories import Histories
from .leases import Leases, interval
from .links import Links
from .outcomes import OutcomeWriter
from .progress import ProgressWriter
from .reports import Reports
from .requests import Requests
from .sessions import Sessions
from .startup import Startup
from .transactions import FencedTransactions
from .trees import Trees
from .upkeep import Upkeep
from .waits import Waits
from .waking import Waking

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from ..handlers import DeathHook, QueueLimits, Schedule
    from ..jobs import CancelRequest, Claim, Outcome, Progress
    from ..observe import BadRow, EnqueueHeldUp, JobDied, WorkerStale
    from .beats import Beat
    from .claimed import ClaimCursor, ClaimResult
    from .limits import Limited
    from .lineage import Lineage
    from .outcomes import Settlement
    from .schedules import Broken, Fired
    from .sweeping import Sweep
    from .upkeep import HandedBack, Rescue

_DECLARED = 10_000
"""The most queues that a session names."""
_version = cache(partial(version, "pulse-trio"))
"""Read from a file, so once."""


class WorkerStore:
    """The store of one worker.

    Args:
        dsn: the database, perhaps through a pooler.
        direct_dsn: the database itself, for what needs a session of its own, and for heartbeats.
        schema: where pulse-trio's tables are.
        lease: seconds; `leases` has those of queues with a lease of their own.
        queues: those this worker serves, None for every queue.
        declared: the queues of its handlers.
        concurrency: jobs at a time.
        keep: False deletes completed jobs instead of archiving them.
        stale: seconds without a sign of life after which this worker counts as stale; 0 for its lease.
        unfit_patience: seconds that a job waits for a worker that its arguments fit.
        on_session: is told each new session before it claims.
        on_suspect: is told the id, kind and crashes of each job that a rescue of this store's put in quarantine.
        on_event: is told each row that cannot be processed as it stands, each job that a statement of this store's made dead,
            and each enqueue of its own that somebody else's transaction holds up.
        session: the first session's id, where another process claims for this worker and has chosen it.
    """

    def __init__(
        self,
        dsn: str,
        *,
        direct_dsn: str = "",
        schema: str = "pulse",
        lease: float = 30.0,
        leases: Mapping[str, float] = MappingProxyType({}),
        queues: Sequence[str] | None = None,
        declared: Sequence[str] = (),
        concurrency: int = 100,
        keep: bool = True,
        stale: float = 0.0,
        unfit_patience: float = 86400.0,
        on_session: Callable[[int], None] | None = None,
        on_suspect: Callable[[int, str, int], None] | None = None,
        on_event: Callable[[BadRow | JobDied | EnqueueHeldUp], None] | None = None,
        session: int | None = None,
    ) -> None:
        held = Leases(lease, leases)
        callbacks = Callbacks(on_session, on_suspect, on_event)
        identity = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": _version(),
            "queues": list(queues) if queues is not None else None,
            "declared": list(declared)[:_DECLARED],
            # A quarantine process, whose session another worker has chosen, runs what it is given, and has no slots.
            "concurrency": concurrency if session is None else 0,
            "lease": held.default,
            "longest": held.most,
            "stale": interval(stale) if stale else None,
        }
        writer = OutcomeWriter(schema, callbacks, keep=keep, patience=interval(unfit_patience))
        self.links = Links(dsn, direct_dsn, schema, held, callbacks)
        self.sessions = Sessions(self.links, schema, identity, callbacks, session)
        self.startup = Startup(self.links, schema, self.sessions)
        self.claims = Claims(self.links.claims, schema, held, self.sessions, writer)
        self.reports = Reports(self.links, schema, held, writer)
        self.beats = Beats(self.links.beats, schema, held)
        self.progress = ProgressWriter(self.links.progress, schema)
        self.requests = Requests(self.links, schema)
        self.waking = Waking(self.links, schema, held, queues)
        self.upkeep = Upkeep(self.links.watch, schema, self.sessions, writer, callbacks)
        self.firing = Firing(self.links.watch, schema, self.sessions, callbacks)
        self.transactions = FencedTransactions(dsn, self.links.lineage, concurrency=concurrency, keep=keep)

    async def aclose(self, *, started: bool = True) -> None:
        """Closes every connection. A worker whose start has failed ends its session first: nothing else would, and other
        workers would warn of a stale one."""
        if not started:
            with suppress(DatabaseUnavailable):
                await self.sessions.end_unstarted()
        await self.links.aclose()

    @property
    def figures(self) -> QueueFigures:
        """What metrics need to know."""
        return QueueFigures(self.links.figures, self.links.schema)

    @property
    def lineage(self) -> Lineage:
        """Whether the database is what it was."""
        return self.links.lineage

    @property
    def trees(self) -> Trees:
        """What jobs with children need."""
        return Trees(self.links, self.links.schema)

    @property
    def receipts(self) -> Waits:
        """What durable handlers wait for."""
        return Waits(self.links.history, self.links.schema)

    @property
    def histories(self) -> Histories:
        """What durable handlers need to remember."""
        return Histories(self.links.history, self.links.schema)

    # Every operation under its own name, for callers that use several parts

    @property
    def session(self) -> int:
        """The current session; 0 before the first."""
        return self.sessions.current

    @property
    def epoch_offset(self) -> float:
        """By how many seconds the database's clock (since 1970) is ahead of Trio's, or a little more."""
        return self.sessions.epoch_offset

    @property
    def idle(self) -> bool:
        """Whether producers were asked to notify, and still are."""
        return self.waking.idle

    async def check_schema(self) -> None:
        """See Startup."""
        await self.startup.check_schema()

    async def open_session(self) -> int:
        """See Sessions."""
        return await self.sessions.open_session()

    async def touch(self, running: int, held: AbstractSet[int], *, draining: bool) -> None:
        """See Sessions."""
        await self.sessions.touch(running, held, draining=draining)

    async def end_sessions(self) -> None:
        """See Sessions."""
        await self.sessions.end_sessions()

    async def complete_and_claim(
        self, limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome] = ()
    ) -> ClaimResult:
        """See Claims."""
        return await self.claims.complete_and_claim(limit, slots, completed)

    async def claim_limited(self, queue: str, limit: int, turns: str = "{}", *, wait: float = 0.0) -> Limited:
        """See Claims."""
        return await self.claims.claim_limited(queue, limit, turns, wait=wait)

    async def claim_cleanups(self, queues: Sequence[str] | None, limit: int) -> ClaimResult:
        """See Claims."""
        return await self.claims.claim_cleanups(queues, limit)

    async def prune_permits(self) -> None:
        """See Claims."""
        await self.claims.prune_permits()

    async def sweep(self, queues: Sequence[str] | None, notified: Sequence[str] = ()) -> Sweep:
        """See Claims."""
        return await self.claims.sweep(queues, notified)

    async def suspects_are_due(self, queues: Sequence[str] | None) -> bool:
        """See Claims."""
        return await self.claims.suspects_are_due(queues)

    async def claim_suspect(
        self, queues: Sequence[str] | None, *, session: int | None = None, fresh: bool = True
    ) -> ClaimResult:
        """See Claims."""
        return await self.claims.claim_suspect(queues, session=session, fresh=fresh)

    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement:
        """See Reports."""
        return await self.reports.settle(outcomes, unsure=unsure)

    async def report_crash(self, claim: Claim, seen: str, *, alone: bool) -> bool | None:
        """See Reports."""
        return await self.reports.report_crash(claim, seen, alone=alone)

    async def declare_limits(self, limits: Sequence[QueueLimits]) -> None:
        """See Startup."""
        await self.startup.declare_limits(limits)

    async def declare_deaths(self, hooks: Sequence[DeathHook], others: Sequence[str]) -> None:
        """See Startup."""
        await self.startup.declare_deaths(hooks, others)

    async def beat(self, claims: Sequence[Claim]) -> Beat:
        """See Beats."""
        return await self.beats.beat(claims)

    async def rescue(self, limit: int = 1000) -> Rescue:
        """See Upkeep."""
        return await self.upkeep.rescue(limit)

    async def rescue_sessions(self, sessions: Sequence[int], limit: int = 1000) -> HandedBack:
        """See Upkeep."""
        return await self.upkeep.rescue_sessions(sessions, limit)

    async def stale_workers(self) -> list[WorkerStale]:
        """See Upkeep."""
        return await self.upkeep.stale_workers()

    async def maintain(self, retention: float) -> bool:
        """See Upkeep."""
        return await self.upkeep.maintain(retention)

    async def write_progress(self, said: Sequence[Progress]) -> None:
        """See ProgressWriter."""
        await self.progress.write_progress(said)

    async def finish_batches(self) -> list[int] | None:
        """See Upkeep."""
        return await self.upkeep.finish_batches()

    async def prune_results(self, retention: float) -> None:
        """See Upkeep."""
        await self.upkeep.prune_results(retention)

    async def requested(self, job_ids: Sequence[int]) -> dict[tuple[int, int, int], CancelRequest]:
        """See Requests."""
        return await self.requests.requested(job_ids)

    async def running_fences(self, job_ids: Sequence[int]) -> set[tuple[int, int, int]]:
        """See Requests."""
        return await self.requests.running_fences(job_ids)

    async def record_delivered(self, claims: Sequence[Claim]) -> None:
        """See Requests."""
        await self.requests.record_delivered(claims)

    async def stack_questions(self, sessions: Sequence[int]) -> list[tuple[int, int, int]]:
        """See Requests."""
        return await self.requests.stack_questions(sessions)

    async def answer_stack(self, request: int, session: int, answer: str) -> None:
        """See Requests."""
        await self.requests.answer_stack(request, session, answer)

    async def close_cancellations(self) -> None:
        """See Upkeep."""
        await self.upkeep.close_cancellations()

    async def tend_trees(self) -> bool:
        """See Upkeep."""
        return await self.upkeep.tend_trees()

    async def declare_schedules(self, declared: Sequence[Schedule]) -> None:
        """See Firing."""
        await self.firing.declare_schedules(declared)

    async def next_schedule(self) -> float | None:
        """See Firing."""
        return await self.firing.next_schedule()

    async def fire_schedules(self) -> tuple[list[Fired], list[Broken]]:
        """See Firing."""
        return await self.firing.fire_schedules()

    async def prune_fires(self, retention: float) -> None:
        """See Firing."""
        await self.firing.prune_fires(retention)

    async def announce_idle(self) -> None:
        """See Waking."""
        await self.waking.announce_idle()

    async def withdraw_idle(self) -> None:
        """See Waking."""
        await self.waking.withdraw_idle()

    async def listen(self, on_notify: Callable[[str], None]) -> None:
        """See Waking."""
        await self.waking.listen(on_notify)
