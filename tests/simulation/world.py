"""A simulated world: real workers over one database in memory, on virtual time, with seeded scheduling, and a plan of faults.

The whole run is a function of its seed: Trio's order within a batch of runnable tasks is drawn from its own `Random`, which is
seeded here, with the switch that hypothesis-trio uses; so is `random`, for backoff and jitter. What happened is kept as a
log; the same seed gives the same log, word by word.

What is checked while it runs, and at the end (the names are those of the invariants in docs/explanation/proof.md):
no loss, attempts without a gap, the budget, one handler of a job at a time, no handler that begins without its lease, limits
of queues and keys, every accepted report fenced, completed at the worker if and only if completed in the database, what a
transaction wrote there once, an occurrence of a schedule and a batch's last job once, cancellations that reach their handler,
nothing held after a drain, recovery in time, and no due job that waits beside a free slot.

Not simulated: threads and other processes; a loop that is blocked is its process stopped by a handler. Two workers share one
loop here; the real thing needs real processes (tests/acceptance).
"""

from __future__ import annotations

import json
import random
from collections import Counter
from contextvars import copy_context
from dataclasses import dataclass
from datetime import datetime  # noqa: TC003 -- a handler's annotation
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import trio
import trio.lowlevel
from trio.testing import MockClock

from pulse_trio import Discard, Handlers, Job, RetryAfter, Snooze, Worker, observe
from pulse_trio.errors import DatabaseUnavailable, HandlerStuck
from pulse_trio.handlers import QueueLimits
from pulse_trio.states import FINISHED, State
from pulse_trio.testing.memory import MemoryBatch, MemoryDatabase, MemoryJob, MemoryStore
from pulse_trio.worker.claiming import idle

from .network import PROCESS, Broken, Store
from .plan import CLEANUP, HEARTBEAT, LEASE, PATIENCE, POLL, TIMEOUT, WATCHDOG, Act, Fault, Incident, Plan
from .stopped import Stopped

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from pulse_trio.store import WorkerStore

OPTIONS = '{"backoff_base":0.1,"backoff_cap":1.0}'
WITH_TIMEOUT = f'{{"backoff_base":0.1,"backoff_cap":1.0,"timeout":{TIMEOUT}}}'
TICKS = 6
"""A watchdog whose last tick was slow waits so many."""
PROMPT = LEASE + WATCHDOG + POLL
"""Seconds for which a due job may wait beside a free slot, once everything is healed."""
FAREWELL = 5.0
"""Seconds in which a worker that stops gives up its last reports; and some to say so."""


class Locks(set[int]):
    """The rows that are locked; `on_free(job_id)` is told."""

    def __init__(self, on_free: Callable[[int], None]) -> None:
        super().__init__()
        self._on_free = on_free

    def discard(self, element: object) -> None:
        if isinstance(element, int) and element in self:
            self._on_free(element)
        super().discard(element)


@dataclass(eq=False)
class AtWork:
    """A handler that runs."""

    job: MemoryJob
    attempt: int
    store: Store
    stopped: bool = False
    """Its process was stopped meanwhile: then, and only then, it may run beside another attempt."""
    asked_at: float | None = None
    """When its cancellation was asked for."""

    @property
    def job_ends(self) -> list[tuple[int, str]]:
        """The job's attempts that ended, and how."""
        return [(attempt, kind) for attempt, _, kind in self.job.history]

    @property
    def counts(self) -> bool:
        """Whether nobody else may run: not once the process was stopped, or its own transaction has completed the job."""
        return not self.stopped and (self.attempt, "completed") not in self.job_ends


class World:
    """One run of a plan. `run()` raises `Broken` when an invariant does not hold."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.database = MemoryDatabase()
        self.database.locked = Locks(self._row_freed)
        self.database.limits.by_queue = {
            "limited": QueueLimits("limited", limit=plan.limit),
            "keyed": QueueLimits("keyed", key_limit=1),
        }
        self.log: list[str] = []
        self.counts: Counter[str] = Counter()
        self.healed_at: float | None = None
        self._ids: list[int] = []
        self._running: list[AtWork] = []
        self._returned: set[tuple[int, int]] = set()
        self._stores: list[Store] = []
        self._workers: list[Worker | None] = []
        self._scopes: list[trio.CancelScope] = []
        self._refused: list[tuple[int, int]] = []
        self._unlocked: dict[int, float] = {}
        self._stopped = Stopped()
        self._begun = 0
        self._is_over = False
        self._last_continued = 0.0
        self._waits_since: dict[int | str, float] = {}

    # What tests take away, to see it noticed

    def sent(self, before: float) -> float:
        """When the worker believes that a call was sent."""
        return before

    def make_store(self, worker: int, faults: Mapping[int, Fault]) -> Store:
        return Store(self, worker, faults)

    # The run

    def run(self) -> None:
        """Plays the plan to its end, and checks what came of it."""
        drawn, switch = trio._core._run._r, trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING
        state, blind = random.getstate(), idle._BLIND
        # A worker that finds work looks for more every 2 ms of virtual time: nine tenths of a run's cost.
        idle._BLIND = 0.25
        trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True
        try:
            # Another one: a worker with durable handlers keeps Trio's own from shuffling (`keep_order`).
            trio._core._run._r = random.Random(self.plan.seed)
            random.seed(self.plan.seed)
            trio.run(self._run, clock=MockClock(autojump_threshold=0))
        finally:
            trio._core._run._r = drawn
            trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = switch
            random.setstate(state)
            idle._BLIND = blind

    def say(self, what: str) -> None:
        self.log.append(f"{trio.current_time():8.3f} {what}")

    def later(self, seconds: float, do: Callable[[MemoryStore], Awaitable[Any]], store: MemoryStore) -> None:
        self._start(self._do_later, seconds, do, store)

    def _start(self, async_fn: Callable[..., Awaitable[None]], *args: Any) -> None:
        """A task that is no process's: none stops it."""
        context = copy_context()
        context.run(PROCESS.set, None)
        context.run(self._nursery.start_soon, async_fn, *args)

    async def _do_later(self, seconds: float, do: Callable[[MemoryStore], Awaitable[Any]], store: MemoryStore) -> None:
        await trio.sleep(seconds)
        await do(store)

    async def _run(self) -> None:
        async with trio.open_nursery() as self._nursery:
            for number, _ in enumerate(self.plan.concurrency):
                self._begin(number, self.plan.faults[number])
            for n, job in sorted(enumerate(self.plan.jobs), key=lambda pair: pair[1].at):
                await trio.sleep_until(job.at)
                self._enqueue(n)
            if self.plan.batch:
                self.database.batches[1] = MemoryBatch([self._ids[n] for n in self.plan.batch], ("finished", "default"))
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
                key=job.key,
            )
        )

    def _begin(self, number: int, faults: Mapping[int, Fault]) -> None:
        """Starts a worker in the place of `number`."""
        store = self.make_store(number, faults)
        handlers = Handlers()

        @handlers.job
        async def play(job: Job, n: int) -> None:
            acts = self.plan.jobs[n].acts
            await self._play(store, job, acts[min(job.attempt, len(acts)) - 1])

        @handlers.job
        async def finished(job: Job) -> None:
            await self._play(store, job, Act("return"))

        async def tick(job: Job, due: datetime) -> None:
            await self._play(store, job, Act("return"))

        if self.plan.every is not None:
            handlers.cron(every=self.plan.every, catch_up=self.plan.catch_up, due_as="due")(tick)

        worker = Worker(
            handlers, "", store=cast("WorkerStore", store), instruments=[self], log=False, lease=LEASE,
            heartbeat=HEARTBEAT, watchdog=WATCHDOG,
            poll=POLL, cleanup=CLEANUP, grace=self.plan.grace, lag_warning=0, concurrency=self.plan.concurrency[number],
            queues=self.plan.queues[number],
        )  # fmt: skip
        for having, new in ((self._stores, store), (self._workers, worker), (self._scopes, trio.CancelScope())):
            having[number:] = [new, *having[number + 1 :]]  # type: ignore[list-item]
        self._begun += 1
        self._nursery.start_soon(self._live, worker, store, self._scopes[number])

    async def _live(self, worker: Worker, store: Store, scope: trio.CancelScope) -> None:
        PROCESS.set(store)
        with scope:
            while True:
                try:
                    await worker.run()
                    break
                except DatabaseUnavailable:
                    # Absent at the start: `pulse-trio run` waits, and so does this.
                    await trio.sleep(0.5)
                except HandlerStuck:
                    # Stopped while a handler was being cancelled: as it goes on, that is overdue, and it asks to be replaced.
                    if not store.was_stopped:
                        raise
                    self.counts["replaced"] += 1
                    store.stop_asked = store.disturbed_at = trio.current_time()
                    # Once all were told to stop nobody would tell its successor.
                    if self._stores[store.worker] is store and not self._is_over:
                        self._begin(store.worker, {})
                    break
            self._check_farewell(store)
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
            case "stop" | "stop now":
                self._stop(incident.of, now=incident.what == "stop now")
                self._begin(incident.of, {})
            case "cancel" | "cancel unheard":
                job_id = self._ids[incident.of]
                for at_work in self._running:
                    if at_work.job.id == job_id and at_work.job.session and at_work.asked_at is None:
                        at_work.asked_at = trio.current_time()
                self.database.cancel(job_id, notify=incident.what == "cancel")
            case "freeze":
                self._freeze(self._stores[incident.of], incident.seconds)
            case "retry":
                self.counts["retried"] += self.database.retry(self._ids[incident.of])
            case "pause":
                self._pause(("default", "limited")[incident.of], incident.seconds)
            case "deaf":
                self._stores[incident.of].deafen()
            case "lock":
                self._nursery.start_soon(self._lock, self._ids[incident.of], incident.seconds)
            case "rescue":
                # A watchdog that belongs to no worker.
                await MemoryStore.rescue(self._stores[incident.of]._network())

    def _crash(self, number: int) -> None:
        """The process is gone, and another starts in its place. Its handlers stop at once; what is left of them here is a
        ghost, which runs to its end and can reach nobody."""
        self._stores[number].dead = True
        self._stores[number].database.idle.discard(self._stores[number])
        self._running[:] = [at_work for at_work in self._running if at_work.store is not self._stores[number]]
        self._scopes[number].cancel()
        self._begin(number, {})

    def _stop(self, number: int, *, now: bool = False) -> None:
        worker = self._workers[number]
        assert worker is not None
        self._stores[number].stop_asked = trio.current_time()
        worker.stop_now() if now else worker.stop()

    def _freeze(self, store: Store, seconds: float) -> None:
        """The process is stopped, and goes on later: it knows what it knew, and the time has passed."""
        if store in self._stopped:
            return
        for at_work in self._running:
            at_work.stopped |= at_work.store is store
        store.was_stopped = True
        self._stopped.stop(store)
        self._start(self._go_on, store, seconds)

    async def _go_on(self, store: Store, seconds: float) -> None:
        try:
            await trio.sleep(seconds)
        finally:
            # Also when the run ends here, broken: what is stopped would never end.
            self._stopped.go_on(store)
        self.say(f"worker {store.worker} goes on")
        store.disturbed_at = self._last_continued = trio.current_time()

    def _pause(self, queue: str, seconds: float) -> None:
        self.database.paused.add(queue)
        self._start(self._resume, queue, seconds)

    async def _resume(self, queue: str, seconds: float) -> None:
        await trio.sleep(seconds)
        self.database.paused.discard(queue)

    def _cut(self, store: Store, until: float) -> None:
        store.cut_until = until
        store.deafen()

    async def _lock(self, job_id: int, seconds: float) -> None:
        with self.database.lock(job_id):
            await trio.sleep(seconds)

    def _row_freed(self, job_id: int) -> None:
        self._unlocked[job_id] = trio.current_time()

    async def _heal(self) -> None:
        await trio.sleep_until(max((store.cut_until for store in self._stores), default=0.0))
        while self._stopped or self.database.paused:  # noqa: ASYNC110 -- virtual time
            await trio.sleep(0.25)
        self.say("healed")
        self.healed_at = trio.current_time()

    def _all_finished(self) -> bool:
        batches = self.database.batches.values()
        return all(job.finished is not None for job in self.database.jobs.values()) and all(b.finished for b in batches)

    async def _drain(self) -> None:
        with trio.move_on_after(self._recovery_limit()):
            while self.database.schedules and self._overdue():
                await self._look_on()
            for schedule in self.database.schedules.values():
                schedule.paused = True
            while not self._all_finished():
                await self._look_on()
        if not self._all_finished():
            left = [f"{job.id} is {job.state}" for job in self.database.jobs.values() if job.finished is None]
            raise Broken(f"not finished within {self._recovery_limit():g} s of healing: {', '.join(left)}")
        self._is_over = True
        for number, _ in enumerate(self._workers):
            self._stop(number)
        with trio.fail_after(self.plan.grace + 2 * LEASE + CLEANUP):
            while self.counts["workers"] < self._begun:  # noqa: ASYNC110 -- virtual time
                await trio.sleep(0.25)

    async def _look_on(self) -> None:
        """Half a second in which no due job may be forgotten."""
        await trio.sleep(0.5)
        now = trio.current_time()
        waiting: set[int | str] = {f"schedule {name}" for name in self._overdue()}
        suspects = any(job.suspect and job.finished is None for job in self.database.jobs.values())
        for job in self.database.jobs.values():
            if job.state is State.AVAILABLE and not suspects and self._could_start(job):
                waiting.add(job.id)
        self._waits_since = {what: self._waits_since.get(what, now) for what in waiting}
        for what, since in self._waits_since.items():
            if now - since > PROMPT:
                raise Broken(f"{what} is due, has waited for {now - since:g} s, and there is room for it")

    def _overdue(self) -> list[str]:
        now = self.database.clock()
        return [name for name, s in self.database.schedules.items() if not s.paused and s.next_due <= now]

    def _could_start(self, job: MemoryJob) -> bool:
        if job.id in self.database.locked or self._are_taken(job, 0):
            return False
        plan = self.plan
        return any(
            worker is not None and store not in self._stopped and worker.running < room
            and (queues is None or job.queue in queues)
            for worker, store, room, queues in zip(self._workers, self._stores, plan.concurrency, plan.queues, strict=True)
        )  # fmt: skip

    def _are_taken(self, job: MemoryJob, beyond: int) -> bool:
        """Whether the places of a job's queue or key are taken, and `beyond` more."""
        limits = self.database.limits.of(job.queue)
        running = [other for other in self.database.jobs.values() if other.session and other.queue == job.queue]
        keys = [other for other in running if other.key == job.key]
        full = limits.limit is not None and len(running) >= limits.limit + beyond
        return full or (limits.key_limit is not None and len(keys) >= limits.key_limit + beyond)

    def _recovery_limit(self) -> float:
        """Seconds: the lease, a tick, and the work itself, one job after the other. What comes again late, after the faults,
        may be another claim that nobody runs; a suspect waits until it is alone."""
        work = sum(act.seconds + LEASE for job in self.plan.jobs for act in job.acts)
        return 4 * LEASE + WATCHDOG + POLL + work + 100

    # Handlers

    async def _play(self, store: Store, job: Job, act: Act) -> None:
        # Begun in the one step that a task has after its process was stopped.
        at_work = AtWork(self.database.jobs[job.id], job.attempt, store, stopped=store in self._stopped)
        if not store.dead:
            self._check_beginning(at_work)
            self._running.append(at_work)
            self.say(f"job {job.id}: attempt {job.attempt} begins to {act.what} {act.seconds:g}")
            self.counts[act.what] += 1
        try:
            await self._perform(job, act, store)
            if act.what != "transaction":
                self._returned.add((job.id, job.attempt))
        finally:
            if not store.dead:
                self._running.remove(at_work)
                self.say(f"job {job.id}: attempt {job.attempt} ended; {job.cancel_reason}")
                self._check_end(at_work)

    async def _perform(self, job: Job, act: Act, store: Store) -> None:
        match act.what:
            case "return":
                await trio.lowlevel.checkpoint()
            case "work":
                await trio.sleep(act.seconds)
            case "long":
                await trio.sleep(LEASE * 1.5)
            case "very long":
                await trio.sleep(LEASE * 2)
            case "block":
                # It holds the loop; nothing else of its process runs.
                self._freeze(store, LEASE * 1.25 if act.seconds > 1 else 1.0)
                await trio.lowlevel.checkpoint()
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
                    await tx.execute(f"{job.id} {job.attempt}")
            case _:
                raise AssertionError(act)

    # What must hold

    def _check_beginning(self, new: AtWork) -> None:
        job, others = new.job, [other for other in self._running if other.counts]
        if (job.attempt, job.session != 0, job.session in new.store.own_sessions) != (new.attempt, True, True):
            raise_in_world(self, f"attempt {new.attempt} of job {job.id} begins, and its lease is over")
        if same := [other for other in others if other.job is job]:
            raise_in_world(self, f"two handlers of job {job.id} run: attempts {same[0].attempt} and {new.attempt}")
        beside = [other for other in others if other.job.queue == job.queue]
        limits = self.database.limits.of(job.queue)
        if limits.limit is not None and len(beside) >= limits.limit:
            raise_in_world(self, f"more handlers of queue {job.queue} run than its limit of {limits.limit}")
        if limits.key_limit is not None and any(other.job.key == job.key for other in beside):
            raise_in_world(self, f"two handlers of the key {job.key} run, and its limit is {limits.key_limit}")

    def _check_end(self, ended: AtWork) -> None:
        now = trio.current_time()
        if ended.asked_at is not None and not ended.stopped and now - ended.asked_at > LEASE + CLEANUP:
            late = f"{now - ended.asked_at:g} s after its cancellation was asked for"
            raise_in_world(self, f"attempt {ended.attempt} of job {ended.job.id} ended {late}")
        if ended.stopped and ended.store not in self._stopped and now - self._last_continued > CLEANUP + 0.1:
            lease = (ended.job.attempt, ended.job.session in ended.store.own_sessions)
            if lease != (ended.attempt, True) and (ended.attempt, "rescued") in ended.job_ends:
                raise_in_world(self, f"a stopped attempt of job {ended.job.id} went on after it was rescued")

    def _check_farewell(self, store: Store) -> None:
        """A worker that has stopped holds nothing that it had heard of, if it could say so."""
        if store.stop_asked is None:
            raise Broken("a worker stopped that nobody had asked to")
        undisturbed = store.disturbed_at < store.stop_asked
        held = [job for job in self.database.jobs.values() if job.session in store.own_sessions]
        for job in held:
            locked = job.id in self.database.locked or self._unlocked.get(job.id, -1.0) >= store.stop_asked
            if undisturbed and not locked and (job.id, job.attempt) in store.heard:
                raise Broken(f"worker {store.worker} has drained, and still holds job {job.id}")
        took = trio.current_time() - store.stop_asked
        if undisturbed and took > self.plan.grace + CLEANUP + FAREWELL + 2.0:
            raise Broken(f"worker {store.worker} took {took:g} s to stop")
        self.counts["drained"] += undisturbed

    def check_limits(self, job: MemoryJob) -> None:
        """Just after a claim."""
        if self._are_taken(job, 1):
            raise Broken(f"job {job.id} was claimed beyond the limits of its queue {job.queue}")

    def check_rescue(self, job: MemoryJob) -> None:
        now = trio.current_time()
        if now <= job.lease_until:
            raise Broken(f"job {job.id} was rescued before its lease ended")
        # A row that somebody had locked could not be rescued before, and a process that was stopped rescued nothing.
        healed = self.healed_at if self.healed_at is not None else now
        since = max(job.lease_until, healed, self._unlocked.get(job.id, 0.0), self._last_continued)
        if now - since > TICKS * WATCHDOG + PATIENCE:
            raise Broken(f"job {job.id} was rescued {now - since:g} s after its lease ended")
        self.counts["rescued"] += 1

    def _check(self) -> None:
        for job in self.database.jobs.values():
            self._check_job(job)
        for job_id, attempt in self._refused:
            if (attempt, "completed") in [(h[0], h[2]) for h in self.database.jobs[job_id].history]:
                raise Broken(f"job {job_id}: attempt {attempt} is completed, and its worker was told that it is not")
        if self._running:
            raise Broken(f"handlers still run: {self._running}")
        self._check_added()
        twice = [line for line, times in Counter(self.database.ledger).items() if times > 1]
        if twice:
            raise Broken(f"what a transaction writes once was written twice: {twice}")
        if self.database.listeners or self.database.idle:
            raise Broken("a worker that has stopped still listens, or says that it waits")

    def _check_added(self) -> None:
        """What the workers enqueued: a job for each occurrence, and one for the batch."""
        jobs = self.database.jobs.values()
        calls = [job for job in jobs if job.kind == "finished"]
        if len(calls) != bool(self.plan.batch):
            raise Broken(f"the batch's last job was enqueued {len(calls)} times")
        ticks = [json.loads(job.args)["due"] for job in jobs if job.kind == "tick"]
        if len(ticks) > len(set(ticks)):
            raise Broken(f"an occurrence was fired twice: {ticks}")
        for schedule in self.database.schedules.values():
            every = schedule.schedule.timing.every
            assert every is not None
            fired = sorted(schedule.fired)
            gaps = [b - a for a, b in pairwise(fired) if b - a != every]
            if self.plan.catch_up == "all" and gaps:
                raise Broken(f"occurrences were left out: {fired}")
            self.counts["occurrences"] += len(fired)

    def _check_job(self, job: MemoryJob) -> None:
        if job.finished not in FINISHED:
            raise Broken(f"job {job.id} is lost: {job.state}")
        attempts = [attempt for attempt, _, _ in job.history]
        if attempts != list(range(1, job.attempt + 1)):
            raise Broken(f"the attempts of job {job.id} that ended are {attempts}, of {job.attempt}")
        for attempt, _, kind in job.history:
            self.counts[kind] += 1
            done = (job.id, attempt) in self._returned or f"{job.id} {attempt}" in self.database.ledger
            if kind == "completed" and not done:
                raise Broken(f"job {job.id}: attempt {attempt} is completed, and its handler never returned")
            if kind != "completed" and f"{job.id} {attempt}" in self.database.ledger:
                raise Broken(
                    f"job {job.id}: the transaction of attempt {attempt} was committed, and it ended as {kind}"
                )


def raise_in_world(world: World, what: str) -> None:
    """Raised outside the handler, whose exceptions are the job's."""

    async def tell() -> None:
        raise Broken(what)

    world._start(tell)


async def _fail(seconds: float) -> None:
    await trio.sleep(seconds)
    raise ValueError("planned")
