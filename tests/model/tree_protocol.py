"""The protocol of trees as a small transition system, for exhaustive exploration (rules 11 to 15 of durable nurseries).

A parent starts two children in one block, and the first child starts a grandchild. Two workers claim, run, crash and are
rescued; a person cancels and retries; handlers raise. What leases and fences guarantee of one job is explored in
lease_protocol.py, so it is taken for granted here: a report counts only while its attempt holds the job.

Transactions that hold locks take two steps (begin, commit), because the protocol is about what others may do between them:
starting children holds the parent's row, an end holds the job's own. What is new skips locked rows and leaves a recheck.

`Guards` are the rules that make it safe. Take one away, and the explorer must find a history that breaks an invariant.
"""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple

from .reaching import first_stuck

if TYPE_CHECKING:
    from collections.abc import Iterator

PARENT, FIRST, SECOND, GRANDCHILD = range(4)
NAMES = ("parent", "first child", "second child", "grandchild")
CHILDREN: tuple[tuple[int, ...], ...] = ((FIRST, SECOND), (GRANDCHILD,), (), ())
PARENT_OF = (None, PARENT, PARENT, FIRST)

LIVE = ("waiting", "running", "suspended", "parked")
ENDED = ("completed", "dead", "cancelled")
DEAD_WORKER = 2
NOBODY = -1


@dataclass(frozen=True)
class Guards:
    """Each rule of the protocol; False takes it away."""

    outcome_waits_for_descendants: bool = True
    one_place_for_each_key: bool = True
    start_checks_the_parent: bool = True
    start_holds_the_parent: bool = True
    cancel_reaches_the_tree: bool = True
    sweep_remembers_what_it_skipped: bool = True
    retry_checks_the_parent: bool = True
    failure_is_the_blocks: bool = True
    block_waits_for_its_children: bool = True
    crash_spares_the_children: bool = True
    parking_leaves_a_recheck: bool = True
    suspension_looks_again: bool = True
    watched_end_tells: bool = True
    failure_tells: bool = True
    watching_locks_the_child: bool = True

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]


class Budget(NamedTuple):
    """How often each fault may still strike, and how often a person or a handler may still interfere."""

    crashes: int = 0
    cancels: int = 0
    failures: int = 0
    """Handlers that raise, of their own accord."""
    retries: int = 0
    suspends: bool = False
    """Whether a parent that waits may be suspended."""
    attempts: int = 1
    """Of the parent; its descendants have one."""


class Row(NamedTuple):
    """One job as the database has it, and what its handler is about to do."""

    state: str = ""
    """Empty: not started yet."""
    by: int = NOBODY
    attempt: int = 0
    cancelling: bool = False
    cause: str = ""
    sweep: bool = False
    """Its children are to be cancelled, and not all of them are known to be."""
    outcome: str = ""
    """Of a parked job: how it ends once its descendants have."""
    watched: bool = False
    started: int = 0
    """How often it was started by its parent."""
    again: bool = False
    """An attempt of its parent failed of it, or cancelled it: the next one starts it again."""
    phase: str = ""
    """The handler's: body (nothing started yet), block (waits for its children), closing (has cancelled them, and waits)."""
    transaction: str = ""
    """Holds the row's lock: start, suspend, or the outcome of an end."""
    will_tell: bool = False
    """What the transaction that ends it has read of `watched`."""
    will_park: bool = False
    """What it has read of its children."""


class World(NamedTuple):
    rows: tuple[Row, ...]
    up: tuple[bool, bool]
    rechecks: frozenset[int]
    budget: Budget
    broken: str | None = None
    """The invariant that this step broke."""


def start(budget: Budget) -> World:
    """Two workers, and a parent that is due."""
    return World((Row("waiting"), Row(), Row(), Row()), (True, True), frozenset(), budget)


@dataclass
class Protocol:
    """The successors of a world under given guards."""

    guards: Guards = field(default_factory=Guards)

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        """Every (what happens, world afterwards)."""
        for job, row in enumerate(world.rows):
            for name, after in self._steps_of(world, job, row):
                yield f"{NAMES[job]}: {name}", after
        for job in world.rechecks:
            yield f"{NAMES[job]}: a worker looks", self._look(world, job)
        for worker in (0, 1):
            yield from self._worker(world, worker)

    def _worker(self, world: World, worker: int) -> Iterator[tuple[str, World]]:
        budget = world.budget
        if not world.up[worker]:
            yield f"worker {worker} starts", world._replace(up=_with(world.up, worker, True))
        elif budget.crashes and any(row.by == worker for row in world.rows):
            rows = tuple(
                # A transaction that was open is rolled back; one that was committed came before the crash.
                row._replace(by=DEAD_WORKER, phase="", transaction="", will_tell=False, will_park=False)
                if row.by == worker
                else row
                for row in world.rows
            )
            spent = budget._replace(crashes=budget.crashes - 1)
            yield f"worker {worker} crashes", world._replace(rows=rows, up=_with(world.up, worker, False), budget=spent)

    def _steps_of(self, world: World, job: int, row: Row) -> Iterator[tuple[str, World]]:
        if row.state == "waiting":
            for worker in (0, 1):
                # The first claim is worker 0's: the other worker's would be the same history with the names exchanged.
                if world.up[worker] and (worker == 0 or job != PARENT or row.attempt):
                    claimed = row._replace(state="running", by=worker, attempt=row.attempt + 1, phase="body")
                    yield f"is claimed by worker {worker}", _put(world, job, claimed)
        elif row.state == "running" and row.by == DEAD_WORKER:
            if not row.transaction:
                yield "is rescued", self._rescued(world, job, row)
        elif row.transaction:
            yield f"commits ({row.transaction})", self._commit(world, job, row)
        elif row.state == "running":
            yield from self._handler(world, job, row)
        yield from self._people(world, job, row)

    # The handler

    def _handler(self, world: World, job: int, row: Row) -> Iterator[tuple[str, World]]:
        budget = world.budget
        children = [world.rows[child] for child in CHILDREN[job]]
        live = any(child.state in LIVE for child in children)
        failed = any(child.state in ("dead", "cancelled") for child in children)
        if row.cancelling and row.phase != "closing":
            # It sees Cancelled. Its outcome waits for its children in the database, not here.
            yield "ends, cancelled", self._ending(world, job, "cancelled")
        if not children:
            yield "returns", self._ending(world, job, "completed")
            if budget.failures:
                yield "raises", self._ending(_spent(world, failures=1), job, "failed")
            return
        if row.phase == "body":
            if not row.cancelling or not self.guards.start_checks_the_parent:
                if self.guards.start_holds_the_parent:
                    yield "starts its children", _put(world, job, row._replace(transaction="start"))
                else:
                    yield "starts its children", _put(world, job, row._replace(phase="starting"))
        elif row.phase == "starting":
            yield "commits its children without its lock", self._started(world, job, row)
        elif row.phase == "block":
            if not live and (not failed or not self.guards.failure_is_the_blocks):
                after = self._ending(world, job, "completed")
                yield "returns", after._replace(broken="a failure was swallowed") if failed else after
            if failed:
                yield "cancels the siblings of a failed child", self._closing(world, job, "sibling")
            if budget.failures:
                yield "raises in its block", self._closing(_spent(world, failures=1), job, "parent")
            if budget.suspends and live and not row.cancelling:
                yield "is suspended", _put(world, job, row._replace(transaction="suspend"))
        elif row.phase == "closing" and (not live or not self.guards.block_waits_for_its_children):
            after = self._ending(world, job, "failed")
            yield (
                "raises after its block",
                after._replace(broken="a block ended before its children") if live else after,
            )

    def _closing(self, world: World, job: int, cause: str) -> World:
        closing = world.rows[job]._replace(phase="closing", sweep=True)
        return self._sweep(_put(world, job, closing), job, cause)

    def _ending(self, world: World, job: int, outcome: str) -> World:
        """Begins the transaction that ends the job: it locks the row, and its trigger reads."""
        row = world.rows[job]
        live = any(world.rows[child].state in LIVE for child in CHILDREN[job])
        return _put(world, job, row._replace(transaction=outcome, will_tell=row.watched, will_park=live))

    # Transactions

    def _commit(self, world: World, job: int, row: Row) -> World:
        if row.transaction == "start":
            return self._started(world, job, row)
        if row.transaction == "suspend":
            return self._suspended(world, job, row)
        return self._ended(world, job, row, row.transaction)

    def _started(self, world: World, job: int, row: Row) -> World:
        after, broken = _put(world, job, row._replace(transaction="", phase="block")), None
        for child in CHILDREN[job]:
            old = after.rows[child]
            if old.state and self.guards.one_place_for_each_key:
                if old.state in ("dead", "cancelled") and old.again:
                    after = _put(after, child, Row("waiting", started=old.started))
                continue  # adopted: it runs, or has ended
            after = _put(after, child, Row("waiting", started=old.started + 1))
            if row.cause and self.guards.start_checks_the_parent is False:
                broken = "a child was started below a cancelled parent"
        return after._replace(broken=broken or after.broken)

    def _suspended(self, world: World, job: int, row: Row) -> World:
        # Its attempt used no budget; the next claim counts it again.
        row = row._replace(state="suspended", by=NOBODY, phase="", transaction="", attempt=row.attempt - 1)
        after = _put(world, job, row)
        if self.guards.suspension_looks_again:
            return self._look_at(after, job)
        return self._watch(after, job)

    def _rescued(self, world: World, job: int, row: Row) -> World:
        after = world
        if not self.guards.crash_spares_the_children:
            after = self._sweep(_put(world, job, row._replace(sweep=True)), job, "crash")
            row = after.rows[job]
        live = any(after.rows[child].state in LIVE for child in CHILDREN[job])
        return self._ended(after, job, row._replace(will_tell=row.watched, will_park=live), "failed")

    def _ended(self, world: World, job: int, row: Row, outcome: str) -> World:
        """What the statement of an end and the trigger of its archive row do. The row is locked."""
        free = row._replace(by=NOBODY, phase="", transaction="", will_tell=False, will_park=False)
        if outcome == "failed":
            world = self._failed_of(world, job)
            budget = world.budget.attempts if job == PARENT else 1
            if not row.cancelling and row.attempt < budget:
                return _put(world, job, free._replace(state="waiting", sweep=False))
            outcome = "cancelled" if row.cancelling else "dead"
        return self._settled(world, job, free, outcome, parks=row.will_park, tells=row.will_tell)

    def _settled(self, world: World, job: int, row: Row, outcome: str, *, parks: bool, tells: bool) -> World:
        if parks and self.guards.outcome_waits_for_descendants:
            parked = row._replace(state="parked", outcome=outcome, cancelling=True, sweep=True, watched=tells)
            # What is below is left to the look, whose transaction is its own.
            after = _put(world, job, parked)
            return _asked(after, job) if self.guards.parking_leaves_a_recheck else after
        ended = row._replace(state=outcome, by=NOBODY, cancelling=False, sweep=False, outcome="", watched=False)
        after = _put(world, job, ended)
        parent = PARENT_OF[job]
        if parent is not None and (
            (tells and self.guards.watched_end_tells) or (outcome != "completed" and self.guards.failure_tells)
        ):
            after = _asked(after, parent)
        return after

    def _failed_of(self, world: World, job: int) -> World:
        """The attempt fails: what failed below it is started again by the next one, and what its block cancelled."""
        for child in CHILDREN[job]:
            row = world.rows[child]
            if row.state in ("dead", "cancelled"):
                world = _put(world, child, row._replace(again=True))
        return world

    # Cancellation

    def _sweep(self, world: World, job: int, cause: str) -> World:
        """Cancels the children of a job whose row is held, and theirs. What is locked is skipped."""
        if not self.guards.cancel_reaches_the_tree:
            return _put(world, job, world.rows[job]._replace(sweep=False))
        missed = False
        for child in CHILDREN[job]:
            row = world.rows[child]
            if row.state not in LIVE or row.cancelling:
                continue
            if row.transaction:
                missed = True
                continue
            world = self._cancelled(world, child, cause)
        world = _put(world, job, world.rows[job]._replace(sweep=missed))
        return _asked(world, job) if missed and self.guards.sweep_remembers_what_it_skipped else world

    def _cancelled(self, world: World, job: int, cause: str) -> World:
        """One live job that is not locked."""
        row = world.rows[job]._replace(cause=cause, again=cause in ("parent", "sibling"))
        if row.state == "running":
            return self._sweep(_put(world, job, row._replace(cancelling=True, sweep=True)), job, "parent")
        live = any(world.rows[child].state in LIVE for child in CHILDREN[job])
        return self._settled(world, job, row, "cancelled", parks=live, tells=row.watched)

    # Looks

    def _look(self, world: World, job: int) -> World:
        row = world.rows[job]
        if row.transaction:
            return world  # locked: it is due again later
        return self._look_at(world._replace(rechecks=world.rechecks - {job}), job)

    def _look_at(self, world: World, job: int) -> World:
        row = world.rows[job]
        if row.state not in LIVE:
            return world
        if row.sweep:
            world = self._sweep(world, job, "parent")
            row = world.rows[job]
        children = [world.rows[child] for child in CHILDREN[job]]
        live = any(child.state in LIVE for child in children)
        if row.state == "parked":
            if live:
                return self._watch(world, job)
            return self._settled(world, job, row, row.outcome, parks=False, tells=row.watched)
        if row.state == "suspended":
            if row.cancelling or not live or any(child.state in ("dead", "cancelled") for child in children):
                return _put(world, job, row._replace(state="waiting"))
            return self._watch(world, job)
        return world  # a running one is told by a notification, and looks each second besides

    def _watch(self, world: World, job: int) -> World:
        """Marks one live child, whose end then tells. Without one that is not locked: look again."""
        children = [child for child in CHILDREN[job] if world.rows[child].state in LIVE]
        if any(world.rows[child].watched for child in children):
            return world
        for child in children:
            row = world.rows[child]
            if not row.transaction or not self.guards.watching_locks_the_child:
                return _put(world, child, row._replace(watched=True))
        return _asked(world, job)

    # People

    def _people(self, world: World, job: int, row: Row) -> Iterator[tuple[str, World]]:
        budget = world.budget
        if row.transaction:
            return  # they wait for the row
        if budget.cancels and row.state in LIVE and not row.cancelling:
            yield "a person cancels it", self._cancelled(_spent(world, cancels=1), job, "user")
        if budget.retries and row.state in ("dead", "cancelled"):
            parent = PARENT_OF[job]
            above = None if parent is None else world.rows[parent]
            # A member that owes its clean-up goes back alone, too, and does nothing else: it is not in this model, which has no
            # histories (tests/durable/test_members_that_owe.py).
            allowed = above is None or (
                above.state in ("waiting", "running", "suspended") and not above.cancelling and not above.transaction
            )
            if allowed or not self.guards.retry_checks_the_parent:
                spent = _spent(world, retries=1)
                # An attempt more than its budget: the model's row keeps `attempt` below it.
                again = Row("waiting", started=row.started, attempt=0)
                yield "a person retries it", _put(spent, job, again)


def _with(up: tuple[bool, bool], worker: int, value: bool) -> tuple[bool, bool]:
    return (value, up[1]) if worker == 0 else (up[0], value)


def _put(world: World, job: int, row: Row) -> World:
    rows = world.rows
    return world._replace(rows=(*rows[:job], row, *rows[job + 1 :]))


def _asked(world: World, job: int) -> World:
    return world._replace(rechecks=world.rechecks | {job})


def _spent(world: World, **what: int) -> World:
    budget = world.budget
    return world._replace(budget=budget._replace(**{name: getattr(budget, name) - by for name, by in what.items()}))


def broken_invariant(world: World) -> str | None:
    """The invariant that this world breaks, or None."""
    if world.broken:
        return world.broken
    for job, row in enumerate(world.rows):
        children = [world.rows[child] for child in CHILDREN[job]]
        live = [child for child in children if child.state in LIVE]
        if row.state in ENDED and live:
            return "a job is settled before a descendant"
        if row.started > 1:
            return "a second child has one key"
        if row.cause == "crash":
            return "a crash of the parent's worker cancelled a child"
        if row.state in ("suspended", "parked") and job not in world.rechecks:
            # What an open transaction below will tell has not been told yet.
            if not any(child.watched for child in live) and not any(child.will_tell for child in live):
                return "a job waits, and nothing will tell it"
            pending = any(child.transaction for child in live)
            failed = any(child.state in ("dead", "cancelled") for child in children)
            if row.state == "suspended" and failed and not pending:
                return "a suspended parent was not told of a failure"
        sweeping = job in world.rechecks or bool(row.transaction)
        if (row.cancelling or row.state == "parked") and not sweeping and not all(child.cancelling for child in live):
            return "a descendant escaped the cancellation"
    return None


class Found(NamedTuple):
    """What an exploration saw."""

    states: int
    counterexample: list[str] | None
    """The steps to a broken invariant, and its name as the last entry."""
    stuck: list[str] | None
    """The steps to a world from which the tree can never settle."""


def explore(guards: Guards, budget: Budget, *, limit: int = 1_000_000) -> Found:
    """Every world that can be reached, breadth first, so that a counterexample is as short as can be. Beside the invariants it
    asks of every world that the whole tree can still settle.

    Without the garbage collector: nothing is in a circle.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return _explore(guards, budget, limit)
    finally:
        if enabled:
            gc.enable()


def _explore(guards: Guards, budget: Budget, limit: int) -> Found:
    protocol = Protocol(guards)
    first = start(budget)
    numbers: dict[World, int] = {first: 0}
    came: list[tuple[int, str]] = [(-1, "start")]
    before: list[list[int]] = [[]]
    settled: list[int] = []
    queue: deque[tuple[int, World]] = deque([(0, first)])
    while queue:
        number, world = queue.popleft()
        if (broken := broken_invariant(world)) is not None:
            return Found(len(numbers), [*_path(came, number), broken], None)
        if not any(row.state in LIVE for row in world.rows):
            settled.append(number)
        for name, after in protocol.steps(world):
            known = numbers.get(after)
            if known is None:
                known = numbers[after] = len(came)
                came.append((number, name))
                before.append([])
                queue.append((known, after))
                if known > limit:
                    raise RuntimeError(f"more than {limit:,} worlds: make the budget smaller")
            before[known].append(number)
    stuck = first_stuck(settled, before)
    return Found(len(numbers), None, _path(came, stuck) if stuck is not None else None)


def _path(came: list[tuple[int, str]], number: int) -> list[str]:
    steps: list[str] = []
    while number > 0:
        number, name = came[number]
        steps.append(name)
    return steps[::-1]
