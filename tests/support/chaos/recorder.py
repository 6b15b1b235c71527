"""What a process says it did: JSON lines in a file of its own, with the machine's monotonic clock.

A line is written before the statement is sent (invoke) and when its answer is known (ok), or known not to come (unknown). Each
is one write to the file, so that a killed process has said everything it began.
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import trio

from pulse_trio.observe import FenceLost, HandlerOverran, JobEnded, JobStarted, LeaseUnproven
from pulse_trio.store import WorkerStore
from pulse_trio.store.transactions import FencedTransactions

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
    from pathlib import Path

    from pulse_trio.jobs import Claim, Outcome
    from pulse_trio.store import Beat, ClaimCursor, ClaimResult, HandedBack, Limited, Rescue, Settlement
    from pulse_trio.store.beats import Beats
    from pulse_trio.store.claims import Claims
    from pulse_trio.store.lineage import Lineage
    from pulse_trio.store.reports import Reports
    from pulse_trio.store.transactions import Begun
    from pulse_trio.store.upkeep import Upkeep


class Recorder:
    """Appends lines to `path`; `who` names the process in each of them."""

    def __init__(self, path: Path, who: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._who = who
        self._operations = 0

    def line(self, event: str, **more: Any) -> None:
        """Writes one line."""
        said = {"who": self._who, "pid": os.getpid(), "t": time.monotonic(), "event": event, **more}
        os.write(self._file, json.dumps(said).encode() + b"\n")

    @contextmanager
    def operation(self, name: str, **more: Any) -> Generator[dict[str, Any]]:
        """Frames one operation; what the block puts into the dictionary is said with `ok`.

        Whatever the block raises makes the operation unknown, unless the block says itself that it failed ("phase").
        """
        self._operations += 1
        about = {"op": self._operations, "name": name}
        self.line("operation", phase="invoke", **about, **more)
        answer: dict[str, Any] = {}
        try:
            yield answer
        except BaseException as error:
            phase = answer.pop("phase", "unknown")
            self.line("operation", phase=phase, **about, **answer, error=f"{type(error).__name__}: {error}"[:200])
            raise
        self.line("operation", phase=answer.pop("phase", "ok"), **about, **answer)

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        """As an instrument of a worker: what its handlers went through."""
        return {
            JobStarted: lambda e: self.line("started", job=e.job_id, attempt=e.attempt, kind=e.kind),
            JobEnded: lambda e: self.line("ended", job=e.job_id, attempt=e.attempt, outcome=e.outcome),
            FenceLost: lambda e: self.line("fence lost", job=e.job_id, attempt=e.attempt, during=e.during),
            LeaseUnproven: lambda e: self.line("lease unproven", job=e.job_id, attempt=e.attempt),
            HandlerOverran: lambda e: self.line("overran", job=e.job_id, attempt=e.attempt),
        }


class RecordedTransactions(FencedTransactions):
    """The fenced transactions of a worker, which say what their completions asked, and which were committed."""

    def __init__(self, dsn: str, lineage: Lineage, *, recorder: Recorder, **options: Any) -> None:
        super().__init__(dsn, lineage, **options)
        self._recorder = recorder

    @asynccontextmanager
    async def begin(self, *, seconds: float = math.inf) -> AsyncGenerator[Begun]:
        with ExitStack() as stack:
            answer: dict[str, Any] = {}
            reports: list[tuple[int, int, int, str]] = []
            async with super().begin(seconds=seconds) as begun:
                complete = begun.complete

                async def recorded(outcome: Outcome) -> bool | None:
                    nonlocal answer
                    if not reports:
                        reports.extend(_reports([outcome]))
                        answer = stack.enter_context(self._recorder.operation("transaction", reports=reports))
                    written = await complete(outcome)
                    if written is False:
                        answer |= {"phase": "ok", "refused": reports}
                    return written

                begun.complete = recorded
                yield begun
            if reports:
                answer["accepted"] = reports


class RecordedStore(WorkerStore):
    """A worker's store that says what it asks and what it hears."""

    def __init__(self, dsn: str, *, recorder: Recorder, **options: Any) -> None:
        super().__init__(dsn, **options)
        self.claims = cast("Claims", RecordedClaims(self.claims, recorder))
        self.reports = cast("Reports", RecordedReports(self.reports, recorder))
        self.beats = cast("Beats", RecordedBeats(self.beats, recorder))
        self.upkeep = cast("Upkeep", RecordedUpkeep(self.upkeep, recorder))
        about = {"concurrency": options.get("concurrency", 100), "keep": True}
        self.transactions = RecordedTransactions(dsn, self.lineage, recorder=recorder, **about)


class _Recorded:
    """A part of a worker's store; operations that a subclass does not have are the part's own."""

    def __init__(self, part: Any, recorder: Recorder) -> None:
        self._part = part
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class RecordedClaims(_Recorded):
    """Says what was claimed and completed."""

    async def complete_and_claim(
        self, limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome] = ()
    ) -> ClaimResult:
        if not completed and not slots:
            return await self._part.complete_and_claim(limit, slots, completed)
        with self._recorder.operation("complete_and_claim", reports=_reports(completed)) as answer:
            exchange = await self._part.complete_and_claim(limit, slots, completed)
            answer |= _claimed(exchange.claims, exchange.sent) | _settled(exchange.settlement)
        return exchange

    async def claim_suspect(
        self, queues: Sequence[str] | None, *, session: int | None = None, fresh: bool = True
    ) -> ClaimResult:
        with self._recorder.operation("claim_suspect", reports=[]) as answer:
            exchange = await self._part.claim_suspect(queues, session=session, fresh=fresh)
            answer |= _claimed(exchange.claims, exchange.sent)
        return exchange

    async def claim_limited(self, queue: str, limit: int, turns: str = "{}", *, wait: float = 0.0) -> Limited:
        with self._recorder.operation("claim_limited", reports=[]) as answer:
            limited = await self._part.claim_limited(queue, limit, turns, wait=wait)
            answer |= _claimed(limited.claims, limited.sent)
        return limited

    async def claim_cleanups(self, queues: Sequence[str] | None, limit: int) -> ClaimResult:
        with self._recorder.operation("claim_cleanups", reports=[]) as answer:
            exchange = await self._part.claim_cleanups(queues, limit)
            answer |= _claimed(exchange.claims, exchange.sent)
        return exchange


class RecordedReports(_Recorded):
    """Says which outcomes were sent, and which were accepted."""

    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement:
        with self._recorder.operation("settle", reports=_reports(outcomes), unsure=unsure) as answer:
            settlement = await self._part.settle(outcomes, unsure=unsure)
            answer |= _settled(settlement)
        return settlement

    async def report_crash(self, claim: Claim, seen: str, *, alone: bool) -> bool | None:
        # The process was seen to die: nothing waits for its lease.
        with self._recorder.operation("report_crash", crashed=_fences([claim]), alone=alone) as answer:
            written = await self._part.report_crash(claim, seen, alone=alone)
            answer["written"] = written
        return written


class RecordedBeats(_Recorded):
    """Says which leases were renewed."""

    async def beat(self, claims: Sequence[Claim]) -> Beat:
        with self._recorder.operation("beat", beats=_fences(claims)) as answer:
            beat = await self._part.beat(claims)
            lost = [c for c in claims if c not in beat.renewed and c not in beat.locked]
            answer |= {"sent": _monotonic(beat.sent), "renewed": _fences(beat.renewed), "lost": _fences(lost)}
        return beat


class RecordedUpkeep(_Recorded):
    """Says which jobs were put back."""

    async def rescue(self, limit: int = 1000) -> Rescue:
        with self._recorder.operation("rescue") as answer:
            rescue = await self._part.rescue(limit)
            answer["rescued"] = rescue.rescued + rescue.dead
        return rescue

    async def rescue_sessions(self, sessions: Sequence[int], limit: int = 1000) -> HandedBack:
        # What dead processes held is handed back before its leases have run out.
        with self._recorder.operation("rescue_sessions", sessions=list(sessions)) as answer:
            rescue = await self._part.rescue_sessions(sessions, limit)
            answer["rescued"] = rescue.rescued + rescue.dead
        return rescue


def _monotonic(trios: float) -> float:
    # Trio's clock begins anywhere.
    return time.monotonic() - (trio.current_time() - trios)


def _fences(claims: Any) -> list[tuple[int, int, int]]:
    return [(c.id, c.attempt, c.session) for c in claims]


def _reports(outcomes: Sequence[Outcome]) -> list[tuple[int, int, int, str]]:
    return [(o.claim.id, o.claim.attempt, o.claim.session, o.kind) for o in outcomes]


def _claimed(claims: Sequence[Claim], sent: float) -> dict[str, Any]:
    return {"claims": _fences(claims), "sent": _monotonic(sent)}


def _settled(settlement: Settlement) -> dict[str, Any]:
    return {"accepted": _reports(settlement.accepted), "refused": _reports(settlement.refused)}
