"""A simulated world: real workers over one database in memory, on virtual time, with seeded scheduling, and a plan of faults.

The whole run is a function of its seed: Trio's order within a batch of runnable tasks is drawn from its own `Random`, which is
seeded here, with the switch that hypothesis-trio uses; so is `random`, for backoff and jitter. What happened is kept as a
log; the same seed gives the same log, word by word.

What is checked while it runs, and at the end (the names are those of the invariants in docs/explanation/proof.md):
no loss, attempts without a gap, the budget, one handler of a job at a time, every accepted report fenced, completed at the
worker if and only if completed in the database, what a transaction wrote there once, and recovery in time.

Not simulated: a process that is stopped and goes on (SIGSTOP), a blocked event loop, threads and other processes. Two
workers share one loop here; those need real processes (tests/acceptance).
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import trio
from trio.testing import MockClock

from pulse_trio import Discard, Handlers, Job, RetryAfter, Snooze, Worker, observe
from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.states import FINISHED
from pulse_trio.worker import claimer
from support.fake_store import FakeDatabase, FakeJob, FakeStore

from .plan import CLEANUP, GRACE, HEARTBEAT, LEASE, PATIENCE, POLL, TIMEOUT, WATCHDOG, Act, Fault, Incident, Plan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from pulse_trio.jobs import Claim, Outcome
    from pulse_trio.store import Beat, Exchange, Rescue, Settlement, Slot

OPTIONS = '{"backoff_base":0.1,"backoff_cap":1.0}'
WITH_TIMEOUT = f'{{"backoff_base":0.1,"backoff_cap":1.0,"timeout":{TIMEOUT}}}'
TICKS = 6
"""A watchdog whose last tick was slow waits so many."""
_AGAIN = frozenset({"exchange", "claim_suspect", "settle", "beat", "rescue"})
"""Calls that may be done later, or twice; of others only the way there and back can break."""


class Broken(AssertionError):
    """An invariant does not hold."""


class Store(FakeStore):
    """One worker's, over a network that follows the plan."""

    def __init__(self, world: World, worker: int, faults: Mapping[int, Fault]) -> None:
        super().__init__(world.database, lease=LEASE)
        self.world = world
        self.worker = worker
        self.dead = False
        self.cut_until = -1.0
        self._faults: Iterator[Fault | None] = (faults.get(call) for call in range(10**9))
        self._unanswered: dict[str, list[Fault]] = {}
        self._lost_claims = False
        self._listening = trio.CancelScope()

    # The network

    async def _done(self, operation: str) -> None:
        await self._reach()
        fault = None if operation in _AGAIN else self._next_fault(operation)
        if fault is not None:
            if fault.what in ("refused", "late"):
                self._lose()
            if fault.what == "slow":
                await trio.sleep(fault.seconds)
            if fault.what in ("lost", "slow answer"):
                self._unanswered.setdefault(operation, []).append(fault)
        await super()._done(operation)
        self.calls.clear()

    async def _answered(self, operation: str) -> None:
        if self._unanswered.get(operation):
            await self._answer(self._unanswered[operation].pop())

    async def _reach(self) -> None:
        if self.dead:
            await trio.sleep_forever()
        if trio.current_time() < self.cut_until:
            await trio.sleep(PATIENCE)
            self._lose()

    async def _answer(self, fault: Fault) -> None:
        if fault.what == "lost":
            self._lose()
        if fault.what == "slow answer":
            await trio.sleep(fault.seconds)

    def _next_fault(self, operation: str) -> Fault | None:
        fault = next(self._faults)
        if fault is None or self.world.healed_at is not None:
            return None
        self.world.say(f"worker {self.worker}: {operation} {fault.what} {fault.seconds:g}")
        return fault

    def _lose(self) -> None:
        """The connection is lost, and what hangs on it: whether it waits idle, its turn for a suspect."""
        self._withdraw()
        if self.database.suspects_turn is self:
            self.database.suspects_turn = None
        raise DatabaseUnavailable("lost by the plan")

    async def _through(self, operation: str, do: Callable[[FakeStore], Awaitable[Any]]) -> Any:
        """A call that the plan may delay, lose, or let be done later or twice."""
        sent = trio.current_time()
        fault = self._next_fault(operation)
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
            self._lost_claims |= operation in ("exchange", "claim_suspect")
            raise
        return answer._replace(sent=self.world.sent(sent)) if hasattr(answer, "sent") else answer

    def _network(self) -> Store:
        """Whoever does this store's statement later, in its session."""
        twin = type(self)(self.world, self.worker, {})
        twin.session = self.session
        return twin

    # Operations

    async def exchange(self, limit: int, slots: Sequence[Slot], completed: Sequence[Outcome] = ()) -> Exchange:
        self._renew_session()
        return await self._through("exchange", lambda store: FakeStore.exchange(store, limit, slots, completed))

    async def claim_suspect(self, queues: Sequence[str] | None) -> Exchange:
        self._renew_session()
        return await self._through("claim_suspect", lambda store: FakeStore.claim_suspect(store, queues))

    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement:
        return await self._through("settle", lambda store: FakeStore.settle(store, outcomes, unsure=unsure))

    async def beat(self, claims: Sequence[Claim]) -> Beat:
        return await self._through("beat", lambda store: FakeStore.beat(store, claims))

    async def rescue(self, limit: int = 1000) -> Rescue:
        return await self._through("rescue", lambda store: FakeStore.rescue(store, limit))

    async def listen(self, on_notify: Callable[[str], None]) -> None:
        with trio.CancelScope() as self._listening:
            await super().listen(on_notify)
        raise DatabaseUnavailable("deafened by the plan")

    def deafen(self) -> None:
        self._listening.cancel()

    def _renew_session(self) -> None:
        # As the real one: a server that failed over may hand out an attempt a second time.
        if self._lost_claims:
            self._lost_claims = False
            self.session = next(self.database.new_session)

    # The journal

    def _claim(self, job: FakeJob) -> Claim:
        if job.session or job.finished is not None:
            raise Broken(f"job {job.id} was claimed while it was {job.state}")
        claim = super()._claim(job)
        self.world.say(f"job {job.id}: claimed by worker {self.worker} as attempt {job.attempt} in {job.session}")
        if job.attempt > job.max_attempts:
            raise Broken(f"job {job.id} was claimed more often than its budget of {job.max_attempts}")
        return claim

    def _end(self, job: FakeJob, outcome: Outcome) -> None:
        fence = (job.attempt, job.session)
        if fence != (outcome.claim.attempt, outcome.claim.session) or not job.session:
            raise Broken(f"job {job.id}: a report of attempt {outcome.claim.attempt} ended attempt {job.attempt}")
        if outcome.kind == "rescued":
            self.world.check_rescue(job)
        super()._end(job, outcome)
        self.world.say(f"job {job.id}: attempt {fence[0]} {outcome.kind} -> {job.state}")


class World:
    """One run of a plan. `run()` raises `Broken` when an invariant does not hold."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.database = FakeDatabase()
        self.log: list[str] = []
        self.counts: Counter[str] = Counter()
        self.healed_at: float | None = None
        self._ids: list[int] = []
        self._running: dict[int, list[tuple[int, Store]]] = {}
        self._returned: set[tuple[int, int]] = set()
        self._stores: list[Store] = []
        self._workers: list[Worker | None] = []
        self._scopes: list[trio.CancelScope] = []
        self._refused: list[tuple[int, int]] = []
        self._unlocked: dict[int, float] = {}

    # What tests take away, to see it noticed

    def sent(self, before: float) -> float:
        """When the worker believes that a call was sent."""
        return before

    def make_store(self, worker: int, faults: Mapping[int, Fault]) -> Store:
        return Store(self, worker, faults)

    # The run

    def run(self) -> None:
        """Plays the plan to its end, and checks what came of it."""
        order, switch = trio._core._run._r.getstate(), trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING
        state, blind = random.getstate(), claimer._BLIND
        # A worker that finds work looks for more every 2 ms of virtual time: nine tenths of a run's cost.
        claimer._BLIND = 0.1
        trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True
        try:
            trio._core._run._r.seed(self.plan.seed)
            random.seed(self.plan.seed)
            trio.run(self._run, clock=MockClock(autojump_threshold=0))
        finally:
            trio._core._run._r.setstate(order)
            trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = switch
            random.setstate(state)
            claimer._BLIND = blind

    def say(self, what: str) -> None:
        self.log.append(f"{trio.current_time():8.3f} {what}")

    def later(self, seconds: float, do: Callable[[FakeStore], Awaitable[Any]], store: FakeStore) -> None:
        self._nursery.start_soon(self._do_later, seconds, do, store)

    async def _do_later(self, seconds: float, do: Callable[[FakeStore], Awaitable[Any]], store: FakeStore) -> None:
        await trio.sleep(seconds)
        await do(store)

    async def _run(self) -> None:
        async with trio.open_nursery() as self._nursery:
            for number, _ in enumerate(self.plan.concurrency):
                self._begin(number, self.plan.faults[number])
            for n, job in sorted(enumerate(self.plan.jobs), key=lambda pair: pair[1].at):
                await trio.sleep_until(job.at)
                self._enqueue(n)
            for incident in self.plan.incidents:
                await trio.sleep_until(incident.at)
                if self._all_finished():
                    break
                await self._strike(incident)
            await self._heal()
            await self._drain()
            self._nursery.cancel_scope.cancel()
        self._check()

    def _enqueue(self, n: int) -> None:
        job = self.plan.jobs[n]
        self._ids.append(
            self.database.enqueue(
                "play",
                f'{{"n":{n}}}',
                queue=job.queue,
                priority=job.priority,
                max_attempts=job.max_attempts,
                delay=job.delay,
                options=WITH_TIMEOUT if job.timeout else OPTIONS,
            )
        )

    def _begin(self, number: int, faults: Mapping[int, Fault]) -> None:
        """Starts a worker in the place of `number`."""
        store = self.make_store(number, faults)
        handlers = Handlers()

        @handlers.job
        async def play(job: Job, n: int) -> None:
            await self._play(store, job, n)

        worker = Worker(
            handlers, "", store=store, instruments=[self], lease=LEASE, heartbeat=HEARTBEAT, watchdog=WATCHDOG, poll=POLL,
            cleanup=CLEANUP, grace=GRACE, lag_warning=0, concurrency=self.plan.concurrency[number],
        )  # type: ignore[arg-type]  # fmt: skip
        for having, new in ((self._stores, store), (self._workers, worker), (self._scopes, trio.CancelScope())):
            having[number:] = [new, *having[number + 1 :]]  # type: ignore[list-item]
        self._nursery.start_soon(self._live, worker, self._scopes[number])

    async def _live(self, worker: Worker, scope: trio.CancelScope) -> None:
        with scope:
            while True:
                try:
                    await worker.run()
                    break
                except DatabaseUnavailable:
                    # Absent at the start: `pulse-trio run` waits, and so does this.
                    await trio.sleep(0.5)
        self.counts["workers"] += 1

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        return {observe.FenceLost: self._fence_lost}

    def _fence_lost(self, event: observe.FenceLost) -> None:
        self.counts["fences lost"] += 1
        if event.during == "report of completed":
            self._refused.append((event.job_id, event.attempt))

    # Incidents

    async def _strike(self, incident: Incident) -> None:
        self.say(f"{incident.what} {incident.of} {incident.seconds:g}")
        self.counts[incident.what] += 1
        until = trio.current_time() + incident.seconds
        match incident.what:
            case "crash":
                self._crash(incident.of)
            case "cut off":
                self._cut(self._stores[incident.of], until)
            case "outage":
                for store in self._stores:
                    self._cut(store, until)
            case "stop":
                worker = self._workers[incident.of]
                assert worker is not None
                worker.stop()
                self._begin(incident.of, {})
            case "cancel" | "cancel unheard":
                self.database.cancel(self._ids[incident.of], notify=incident.what == "cancel")
            case "deaf":
                self._stores[incident.of].deafen()
            case "lock":
                self._nursery.start_soon(self._lock, self._ids[incident.of], incident.seconds)
            case "rescue":
                # A watchdog that belongs to no worker.
                await FakeStore.rescue(self._stores[incident.of]._network())

    def _crash(self, number: int) -> None:
        """The process is gone, and another starts in its place. Its handlers stop at once; what is left of them here is a
        ghost, which runs to its end and can reach nobody."""
        self._stores[number].dead = True
        self._stores[number].database.idle.discard(self._stores[number])
        if self.database.suspects_turn is self._stores[number]:
            self.database.suspects_turn = None
        for held in self._running.values():
            held[:] = [(attempt, store) for attempt, store in held if store is not self._stores[number]]
        self._scopes[number].cancel()
        self._begin(number, {})

    def _cut(self, store: Store, until: float) -> None:
        store.cut_until = until
        store.deafen()

    async def _lock(self, job_id: int, seconds: float) -> None:
        with self.database.lock(job_id):
            await trio.sleep(seconds)
        self._unlocked[job_id] = trio.current_time()

    async def _heal(self) -> None:
        await trio.sleep_until(max((store.cut_until for store in self._stores), default=0.0))
        self.say("healed")
        self.healed_at = trio.current_time()

    def _all_finished(self) -> bool:
        return all(job.finished is not None for job in self.database.jobs.values())

    async def _drain(self) -> None:
        with trio.move_on_after(self._recovery_limit()):
            while not self._all_finished():  # noqa: ASYNC110 -- virtual time; nobody tells of all
                await trio.sleep(0.25)
        if not self._all_finished():
            left = [f"{job.id} is {job.state}" for job in self.database.jobs.values() if job.finished is None]
            raise Broken(f"not finished within {self._recovery_limit():g} s of healing: {', '.join(left)}")
        for worker in self._workers:
            assert worker is not None
            worker.stop()
        with trio.fail_after(LEASE + GRACE + CLEANUP):
            while self.counts["workers"] < len(self._workers) + self.counts["stop"] + self.counts["crash"]:  # noqa: ASYNC110
                await trio.sleep(0.25)

    def _recovery_limit(self) -> float:
        """Seconds: the lease, a tick, and the work itself, one job after the other. What comes again late, after the faults,
        may be another claim that nobody runs; a suspect waits until it is alone."""
        work = sum(act.seconds + LEASE for job in self.plan.jobs for act in job.acts)
        return 4 * LEASE + WATCHDOG + POLL + work + 60

    # Handlers

    async def _play(self, store: Store, job: Job, n: int) -> None:
        acts = self.plan.jobs[n].acts
        act = acts[min(job.attempt, len(acts)) - 1]
        mine = (job.attempt, store)
        if not store.dead:
            at_work = self._running.setdefault(job.id, [])
            if at_work:
                raise_in_world(self, f"two handlers of job {job.id} run: attempts {at_work[0][0]} and {job.attempt}")
            at_work.append(mine)
            self.say(f"job {job.id}: attempt {job.attempt} begins to {act.what} {act.seconds:g}")
            self.counts[act.what] += 1
        try:
            await self._perform(job, act)
            if act.what != "transaction":
                self._returned.add((job.id, job.attempt))
        finally:
            if not store.dead:
                self._running[job.id].remove(mine)
                self.say(f"job {job.id}: attempt {job.attempt} ended; {job.cancel_reason}")

    async def _perform(self, job: Job, act: Act) -> None:
        match act.what:
            case "return":
                await trio.lowlevel.checkpoint()
            case "work":
                await trio.sleep(act.seconds)
            case "long":
                await trio.sleep(LEASE * 1.5)
            case "raise":
                await trio.sleep(act.seconds)
                raise ValueError("planned")
            case "snooze":
                raise Snooze(act.seconds)
            case "retry after":
                raise RetryAfter(act.seconds)
            case "discard":
                raise Discard("planned")
            case "children":
                for _ in range(3):
                    job.nursery.start_soon(trio.sleep, act.seconds)
                await trio.sleep(act.seconds / 2)
            case "failing child":
                job.nursery.start_soon(_fail, act.seconds)
                await trio.sleep(LEASE)
            case "clean up":
                try:
                    await trio.sleep(LEASE * 1.5)
                finally:
                    with job.cleanup():
                        await trio.sleep(CLEANUP * 0.9)  # noqa: ASYNC102 -- job.cleanup() is the shield
            case "transaction":
                await trio.sleep(act.seconds)
                async with job.transaction() as tx:
                    await tx.execute(str(job.id))
            case _:
                raise AssertionError(act)

    # What must hold

    def check_rescue(self, job: FakeJob) -> None:
        now = trio.current_time()
        if now <= job.lease_until:
            raise Broken(f"job {job.id} was rescued before its lease ended")
        # A row that somebody had locked could not be rescued before.
        since = max(
            job.lease_until, self.healed_at if self.healed_at is not None else now, self._unlocked.get(job.id, 0)
        )
        if now - since > TICKS * WATCHDOG + PATIENCE:
            raise Broken(f"job {job.id} was rescued {now - since:g} s after its lease ended")
        self.counts["rescued"] += 1

    def _check(self) -> None:
        for job in self.database.jobs.values():
            self._check_job(job)
        for job_id, attempt in self._refused:
            if (attempt, "completed") in [(h[0], h[2]) for h in self.database.jobs[job_id].history]:
                raise Broken(f"job {job_id}: attempt {attempt} is completed, and its worker was told that it is not")
        if left := [job_id for job_id, held in self._running.items() if held]:
            raise Broken(f"handlers still run: {left}")
        twice = [job_id for job_id, times in Counter(self.database.ledger).items() if times > 1]
        if twice:
            raise Broken(f"what a transaction writes once was written twice: {twice}")
        if self.database.listeners or self.database.idle:
            raise Broken("a worker that has stopped still listens, or says that it waits")

    def _check_job(self, job: FakeJob) -> None:
        if job.finished not in FINISHED:
            raise Broken(f"job {job.id} is lost: {job.state}")
        attempts = [attempt for attempt, _, _ in job.history]
        if attempts != list(range(1, job.attempt + 1)):
            raise Broken(f"the attempts of job {job.id} that ended are {attempts}, of {job.attempt}")
        for attempt, _, kind in job.history:
            self.counts[kind] += 1
            done = (job.id, attempt) in self._returned or str(job.id) in self.database.ledger
            if kind == "completed" and not done:
                raise Broken(f"job {job.id}: attempt {attempt} is completed, and its handler never returned")
        if str(job.id) in self.database.ledger and job.history[-1][2] != "completed":
            raise Broken(f"job {job.id}: its transaction was committed, and it ended as {job.history[-1][2]}")


def raise_in_world(world: World, what: str) -> None:
    """Raised outside the handler, whose exceptions are the job's."""

    async def tell() -> None:
        raise Broken(what)

    world._nursery.start_soon(tell)


async def _fail(seconds: float) -> None:
    await trio.sleep(seconds)
    raise ValueError("planned")
