"""Every state x every event of the table, tried against the real statements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from pulse_trio.errors import InvalidTransition
from pulse_trio.jobs import Claim
from pulse_trio.states import TRANSITIONS, Event, State, event_of, next_state
from pulse_trio.store import cancelling, operations
from support.stores import Window, claim, claim_one, end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pulse_trio.jobs import OutcomeKind
    from pulse_trio.store import WorkerStore

LAST = {Event.FAIL_LAST, Event.RESCUE_LAST}
HOUR = 3600.0


@dataclass
class Case:
    """A job in some state, and the last claim of it; one that was never claimed has a claim that nobody made."""

    store: WorkerStore
    window: Window
    queue: str
    id: int
    claim: Claim

    async def settle(self, kind: OutcomeKind, delay: float = 0.0) -> bool:
        """Whether the report was accepted."""
        outcome = end(self.claim, kind, delay=delay, error=None if kind == "completed" else "an error")
        settlement = await self.store.settle([outcome])
        assert not settlement.again
        return bool(settlement.accepted)


# Into each state, by what a worker or client does


async def scheduled(case: Case) -> None:
    assert await case.settle("snoozed", HOUR)


async def available(case: Case) -> None:
    assert await case.settle("released")


async def running(case: Case) -> None:
    pass


async def retryable(case: Case) -> None:
    assert await case.settle("failed", HOUR)


async def completed(case: Case) -> None:
    assert await case.settle("completed")


async def dead(case: Case) -> None:
    assert await case.settle("discarded")


async def cancelled(case: Case) -> None:
    assert await case.settle("cancelled")


FROM_RUNNING: dict[State, Callable[[Case], Awaitable[None]]] = {
    State.SCHEDULED: scheduled,
    State.AVAILABLE: available,
    State.RUNNING: running,
    State.RETRYABLE: retryable,
    State.COMPLETED: completed,
    State.DEAD: dead,
    State.CANCELLED: cancelled,
}


# Each event, applied: whether it did anything


async def due(case: Case) -> bool:
    before = case.window.state(case.id)
    case.window.make_due(case.id)
    return case.window.state(case.id) != before


async def claimed(case: Case) -> bool:
    return case.id in [c.id for c in await claim(case.store, case.queue)]


async def rescue(case: Case) -> bool:
    case.window.expire(case.id)
    rescued, dead = await case.store.rescue()
    return bool(rescued or dead)


async def retry(case: Case) -> bool:
    try:
        return case.window.do(operations.retry(case.id)) is State.AVAILABLE
    except InvalidTransition:
        return False


def report(kind: OutcomeKind, delay: float = 0.0) -> Callable[[Case], Awaitable[bool]]:
    async def apply(case: Case) -> bool:
        return await case.settle(kind, delay)

    return apply


async def cancel(case: Case) -> bool:
    """A running job is cancelled by its worker, which was asked; any other by the request itself."""
    if case.window.state(case.id) == State.RUNNING:
        return await case.settle("cancelled")
    return case.window.do(cancelling.cancel(case.id)).cancellation is not None


APPLY: dict[Event, Callable[[Case], Awaitable[bool]]] = {
    Event.DUE: due,
    Event.CLAIM: claimed,
    Event.COMPLETE: report("completed"),
    Event.FAIL: report("failed", HOUR),
    Event.FAIL_LAST: report("failed", HOUR),
    Event.DISCARD: report("discarded"),
    Event.SNOOZE: report("snoozed", HOUR),
    Event.RELEASE: report("released"),
    Event.RESCUE: rescue,
    Event.RESCUE_LAST: rescue,
    Event.CANCEL: cancel,
    Event.RETRY: retry,
}


@pytest.mark.parametrize("event", Event, ids=lambda event: event.name.lower())
@pytest.mark.parametrize("state", State)
async def test_statements_move_a_job_exactly_as_the_table_says(
    state: State, event: Event, store: WorkerStore, window: Window, queue: str
) -> None:
    last = state is State.RUNNING and event in LAST
    job_id = window.enqueue(queue, max_attempts=1 if last else 2)
    case = Case(store, window, queue, job_id, await claim_one(store, queue))
    await FROM_RUNNING[state](case)
    assert window.state(job_id) == state

    moved = await APPLY[event](case)

    expected = TRANSITIONS[state].get(event)
    assert moved == (expected is not None)
    assert window.state(job_id) == (expected or state)


@pytest.mark.parametrize("event", Event, ids=lambda event: event.name.lower())
@pytest.mark.parametrize("delay", [None, HOUR], ids=["available", "scheduled"])
async def test_a_job_that_was_never_claimed_moves_as_the_table_says(
    delay: float | None, event: Event, store: WorkerStore, window: Window, queue: str
) -> None:
    state = State.SCHEDULED if delay else State.AVAILABLE
    job_id = window.enqueue(queue, delay=delay)
    nobodys = Claim(job_id, 0, 20, 0, 0, "", queue, "noop", "{}", None, 0)
    case = Case(store, window, queue, job_id, nobodys)

    moved = await APPLY[event](case)

    expected = TRANSITIONS[state].get(event)
    assert moved == (expected is not None)
    assert window.state(job_id) == (expected or state)


OUTCOMES: list[OutcomeKind] = [
    "completed", "failed", "timeout", "discarded", "cancelled", "snoozed", "released", "rescued",
]  # fmt: skip


@pytest.mark.parametrize("asked", [False, True], ids=["", "being cancelled"])
@pytest.mark.parametrize("max_attempts", [1, 2, 3], ids=["last", "one left", "two left"])
@pytest.mark.parametrize("kind", OUTCOMES)
async def test_python_and_sql_decide_alike_what_an_outcome_means(
    kind: OutcomeKind, max_attempts: int, asked: bool, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue, max_attempts=max_attempts)
    case = Case(store, window, queue, job_id, await claim_one(store, queue))
    if asked:
        window.do(cancelling.cancel(job_id))
    delay = HOUR if kind in ("failed", "timeout", "snoozed") else 0.0

    assert await case.settle(kind, delay)

    event = event_of(kind, case.claim.attempt, case.claim.max_attempts, cancelling=asked)
    assert window.state(job_id) == next_state(State.RUNNING, event)


async def test_retry_of_a_running_job_says_what_is_possible(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    with pytest.raises(InvalidTransition, match=r"is running: a job can be retried when"):
        window.do(operations.retry(job_id))
