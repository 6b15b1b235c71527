"""One simulated worker's way to the database: the store in memory, over a network that follows the plan, and a journal."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import trio

from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.store import CommitUnknown
from pulse_trio.testing.memory import MemoryJob, MemoryStore
from pulse_trio.testing.memory.transactions import MemoryTransactions

from .plan import LEASE, PATIENCE, Fault

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from pulse_trio.jobs import Claim, Outcome
    from pulse_trio.store import Beat, ClaimCursor, ClaimResult, Fired, Limited, Rescue, Settlement
    from pulse_trio.testing.memory.transactions import MemoryBegun

    from .world import World

_AGAIN = frozenset(
    {
        "complete_and_claim",
        "claim_suspect",
        "claim_limited",
        "claim_cleanups",
        "settle",
        "beat",
        "rescue",
        "fire_schedules",
        "finish_batches",
    }
)
"""Calls that may be done later, or twice; of others only the way there and back can break."""

PROCESS: ContextVar[Store | None] = ContextVar("PROCESS", default=None)
"""Whose process a task belongs to."""


class Broken(AssertionError):
    """An invariant does not hold."""


class Store(MemoryStore):
    """One worker's, over a network that follows the plan."""

    def __init__(self, world: World, worker: int, faults: Mapping[int, Fault]) -> None:
        super().__init__(world.database, lease=LEASE)
        self.world = world
        self.worker = worker
        self.dead = False
        self.cut_until = -1.0
        self._faults: Iterator[Fault | None] = (faults.get(call) for call in range(10**9))
        self._unanswered: dict[str, list[Fault]] = {}
        self.stop_asked: float | None = None
        self.was_stopped = False
        self.disturbed_at = -1.0
        """When the plan last struck a call of it."""
        self.own_sessions: set[int] = set()
        self.heard: set[tuple[int, int]] = set()
        """(job, attempt) of every claim whose answer arrived."""
        self.transactions = Transactions(self)
        self._lost_claims = False
        self._listening = trio.CancelScope()

    # The network

    async def trip(self, operation: str) -> None:
        await self._reach()
        fault = None if operation in _AGAIN else self.next_fault(operation)
        if fault is not None:
            if fault.what in ("refused", "late"):
                self._lose()
            if fault.what == "slow":
                await trio.sleep(fault.seconds)
            if fault.what in ("lost", "slow answer"):
                self._unanswered.setdefault(operation, []).append(fault)
        await super().trip(operation)
        self.calls.clear()

    async def answered(self, operation: str) -> None:
        if self._unanswered.get(operation):
            await self._answer(self._unanswered[operation].pop())

    async def _reach(self) -> None:
        if self.dead:
            await trio.sleep_forever()
        if trio.current_time() < self.cut_until:
            await trio.sleep(PATIENCE)
            self.disturbed_at = trio.current_time()
            self._lose()

    async def _answer(self, fault: Fault) -> None:
        if fault.what == "lost":
            self._lose()
        if fault.what == "slow answer":
            await trio.sleep(fault.seconds)

    def next_fault(self, operation: str) -> Fault | None:
        fault = next(self._faults)
        if fault is None or self.world.healed_at is not None:
            return None
        self.world.say(f"worker {self.worker}: {operation} {fault.what} {fault.seconds:g}")
        self.world.counts[f"{operation} {fault.what}"] += 1
        self.disturbed_at = trio.current_time()
        return fault

    def _lose(self) -> None:
        """The connection is lost, and what hangs on it: whether it waits idle."""
        self._withdraw()
        raise DatabaseUnavailable("lost by the plan")

    async def _through(self, operation: str, do: Callable[[MemoryStore], Awaitable[Any]]) -> Any:
        """A call that the plan may delay, lose, or let be done later or twice."""
        sent = trio.current_time()
        fault = self.next_fault(operation)
        try:
            await self._reach()
            if fault is not None and fault.what == "refused":
                self._lose()
            if fault is not None and fault.what == "late":
                self.world.later(fault.seconds, do, self._network())
                await trio.sleep(PATIENCE)
                self._lose()
            if fault is not None and fault.what == "slow":
                await trio.sleep(fault.seconds)
            answer = await do(self)
            if fault is not None and fault.what == "twice":
                self.world.later(fault.seconds, do, self._network())
            if fault is not None:
                await self._answer(fault)
        except DatabaseUnavailable:
            self._lost_claims |= operation in (
                "complete_and_claim", "claim_suspect", "claim_limited", "claim_cleanups",
            )  # fmt: skip
            raise
        self.heard |= {(claim.id, claim.attempt) for claim in getattr(answer, "claims", ())}
        return answer._replace(sent=self.world.sent(sent)) if hasattr(answer, "sent") else answer

    def _network(self) -> Store:
        """Whoever does this store's statement later, in its session."""
        twin = type(self)(self.world, self.worker, {})
        twin.session = self.session
        return twin

    # Operations

    async def complete_and_claim(
        self, limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome] = ()
    ) -> ClaimResult:
        self._renew_session()
        return await self._through(
            "complete_and_claim", lambda store: MemoryStore.complete_and_claim(store, limit, slots, completed)
        )

    async def claim_suspect(
        self, queues: Sequence[str] | None, *, session: int | None = None, fresh: bool = True
    ) -> ClaimResult:
        self._renew_session()
        return await self._through(
            "claim_suspect", lambda store: MemoryStore.claim_suspect(store, queues, session=session, fresh=fresh)
        )

    async def claim_limited(self, queue: str, limit: int, turns: str = "{}", *, wait: float = 0.0) -> Limited:
        self._renew_session()
        return await self._through("claim_limited", lambda store: MemoryStore.claim_limited(store, queue, limit, turns))

    async def claim_cleanups(self, queues: Sequence[str] | None, limit: int) -> ClaimResult:
        self._renew_session()
        return await self._through("claim_cleanups", lambda store: MemoryStore.claim_cleanups(store, queues, limit))

    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement:
        return await self._through("settle", lambda store: MemoryStore.settle(store, outcomes, unsure=unsure))

    async def beat(self, claims: Sequence[Claim]) -> Beat:
        return await self._through("beat", lambda store: MemoryStore.beat(store, claims))

    async def rescue(self, limit: int = 1000) -> Rescue:
        return await self._through("rescue", lambda store: MemoryStore.rescue(store, limit))

    async def fire_schedules(self) -> tuple[list[Fired], list[Any]]:
        return await self._through("fire_schedules", MemoryStore.fire_schedules)

    async def finish_batches(self) -> list[int] | None:
        return await self._through("finish_batches", MemoryStore.finish_batches)

    async def listen(self, on_notify: Callable[[str], None]) -> None:
        with trio.CancelScope() as self._listening:
            await super().listen(on_notify)
        raise DatabaseUnavailable("deafened by the plan")

    def deafen(self) -> None:
        self._listening.cancel()

    async def open_session(self) -> int:
        session = await super().open_session()
        self.own_sessions.add(session)
        return session

    def _renew_session(self) -> None:
        # As the real one: a server that failed over may hand out an attempt a second time.
        if self._lost_claims:
            self._lost_claims = False
            self.session = next(self.database.new_session)
            self.own_sessions.add(self.session)

    # The journal

    def _claim(self, job: MemoryJob, session: int = 0) -> Claim:
        if job.session or job.finished is not None:
            raise Broken(f"job {job.id} was claimed while it was {job.state}")
        if job.cancelling:
            raise Broken(f"job {job.id} was claimed again though its cancellation was asked for while it ran")
        if job.queue in self.database.paused:
            raise Broken(f"job {job.id} was claimed though its queue is paused")
        claim = super()._claim(job, session)
        self.world.check_limits(job)
        self.world.say(f"job {job.id}: claimed by worker {self.worker} as attempt {job.attempt} in {job.session}")
        if job.attempt > job.max_attempts:
            raise Broken(f"job {job.id} was claimed more often than its budget of {job.max_attempts}")
        return claim

    def _end(self, job: MemoryJob, outcome: Outcome, *, alone: bool = False) -> None:
        fence = (job.attempt, job.session)
        if fence != (outcome.claim.attempt, outcome.claim.session) or not job.session:
            raise Broken(f"job {job.id}: a report of attempt {outcome.claim.attempt} ended attempt {job.attempt}")
        if outcome.kind == "rescued":
            self.world.check_rescue(job)
        super()._end(job, outcome, alone=alone)
        self.world.say(f"job {job.id}: attempt {fence[0]} {outcome.kind} -> {job.state}")


class Transactions(MemoryTransactions):
    """A COMMIT may also be done after its client has given up; until then the job's row stays locked."""

    async def _commit(self, begun: MemoryBegun, outcome: Outcome) -> None:
        store = self._store
        assert isinstance(store, Store)
        fault = store.next_fault("late commit")
        if fault is None or fault.what != "late":
            await super()._commit(begun, outcome)
            return
        # The lock is the server's from here on.
        begun.outcome = None
        store.world.later(fault.seconds, lambda _: self._arrives(begun, outcome), store)
        await trio.sleep(PATIENCE)
        raise CommitUnknown("lost by the plan")

    async def _arrives(self, begun: MemoryBegun, outcome: Outcome) -> None:
        await trio.lowlevel.checkpoint()
        self._do(begun, outcome)

    async def committed(self, claim: Claim) -> bool:
        while claim.id in self._store.database.locked:  # noqa: ASYNC110 -- the server tells nobody
            await trio.sleep(0.1)
        return await super().committed(claim)
