"""Every state x every event of the table, tried against the real statements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pytest

from pulse_trio.errors import InvalidTransition
from pulse_trio.jobs import Claim
from pulse_trio.postgres import TrioConnection
from pulse_trio.states import FINISHED, STORED, TRANSITIONS, Event, State, decision_of, suspected
from pulse_trio.states import Case as DecidedBy
from pulse_trio.store import cancelling, operations, rows
from support.cases import CONDITIONS, every_case
from support.stores import Window, claim, claim_one, end, open_store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pulse_trio.jobs import Outcome, OutcomeKind
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


async def suspend(case: Case) -> bool:
    fence = (case.id, case.claim.attempt, case.claim.session)
    return bool(case.window.value("SELECT suspend(%s, %s, %s, '{}', '{}', '{approved}', NULL)", *fence))


async def suspended(case: Case) -> None:
    assert await suspend(case)


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
    State.SUSPENDED: suspended,
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
    """Others' jobs may be rescued as well: this module's tests leave some running, and a machine may be slow."""
    before = case.window.state(case.id)
    case.window.expire(case.id)
    await case.store.rescue()
    return case.window.state(case.id) != before


async def crash(case: Case) -> bool:
    """Its witness says so of a job that ran alone; once more than its crash limit allows."""
    case.window.run("UPDATE job SET deaths = 2 WHERE id = %s", case.id)
    return bool(await case.store.report_crash(case.claim, "killed by signal 9", alone=True))


async def bury(case: Case) -> bool:
    async with await TrioConnection.connect(case.window.dsn, autocommit=True) as connection:
        fence = (case.id, case.claim.attempt, case.claim.session)
        return await rows.bury(connection, case.window.schema, fence, "failed", "refused") is not None


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
    Event.SUSPEND: suspend,
    Event.RELEASE: report("released"),
    Event.RESCUE: rescue,
    Event.RESCUE_LAST: rescue,
    Event.CRASH_LAST: crash,
    Event.BURY: bury,
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


# Each case of the rules. A condition that is added to `Case` asks for its arrangement here.


def ask_for_cancellation(window: Window, job_ids: list[int]) -> None:
    window.do(cancelling.cancel_many(job_ids))


def use_up_the_budget(window: Window, job_ids: list[int]) -> None:
    window.run("UPDATE job SET max_attempts = attempt WHERE id = ANY (%s)", job_ids)


def let_die_alone(window: Window, job_ids: list[int]) -> None:
    window.run("UPDATE job SET deaths = %s WHERE id = ANY (%s)", CRASH_LIMIT - 1, job_ids)


def note_unfit_arguments(window: Window, job_ids: list[int]) -> None:
    """An earlier attempt ended so. The store's patience with that is 0 s."""
    window.run(
        "INSERT INTO attempt (job_id, attempt, session, started_at, ended_at, outcome, error)"
        " SELECT i, 1, 7, now(), now(), 'released', %s FROM unnest(%s::bigint[]) i",
        UNFIT, job_ids,
    )  # fmt: skip


ARRANGE: dict[str, Callable[[Window, list[int]], None]] = {
    "cancelling": ask_for_cancellation,
    "last_attempt": use_up_the_budget,
    "last_crash": let_die_alone,
    "given_up": note_unfit_arguments,
}
CRASH_LIMIT = 3
UNFIT = "UnfitArguments: no"


class Before(NamedTuple):
    """A job's row before its attempt ends: what decides, and what else is counted."""

    case: DecidedBy
    crashes: int
    suspect: bool


class After(NamedTuple):
    """And afterwards. What only a live row has is None for a job that has finished."""

    state: State
    outcomes: list[str]
    failures: int
    refunds: int
    crashes: int | None
    deaths: int | None
    suspect: bool | None


def expected(before: Before) -> After:
    decided = decision_of(before.case)
    noted = [] if decided.event is Event.COMPLETE else [decided.outcome]
    if decided.state in FINISHED:
        return After(decided.state, noted, decided.failures, 0, None, None, None)
    deaths = (CRASH_LIMIT - 1) * before.case.last_crash + decided.deaths
    crashes = before.crashes + decided.crashes
    suspect = suspected(decided.event, before.suspect, crashes, CRASH_LIMIT)
    return After(decided.state, noted, decided.failures, decided.refunds, crashes, deaths, suspect)


async def test_python_and_sql_decide_every_case_alike(window: Window, queue: str) -> None:
    all_before = [
        Before(case, crashes, suspect) for case in every_case() for crashes in (0, 1) for suspect in (False, True)
    ]
    ids = window.enqueue_many(len(all_before), queue)
    rows_of = dict(zip(ids, all_before, strict=True))
    window.run("UPDATE job SET attempt = 1 WHERE id = ANY (%s)", ids)
    async with open_store(window.dsn, unfit_patience=0) as store:
        claims = {claim.id: claim for claim in await claim(store, queue, len(all_before))}
        for condition in CONDITIONS:
            ARRANGE[condition](window, [i for i, before in rows_of.items() if getattr(before.case, condition)])
        window.run(
            "UPDATE job j SET crashes = c, suspect = s"
            " FROM unnest(%s::bigint[], %s::int[], %s::bool[]) AS b(i, c, s) WHERE j.id = b.i",
            ids, [b.crashes for b in all_before], [b.suspect for b in all_before],
        )  # fmt: skip
        budgets = {row["id"]: row["max_attempts"] for row in window.run("SELECT id, max_attempts FROM job")}

        outcomes: list[Outcome] = []
        for i, before in rows_of.items():
            # A witness reports one job at a time.
            if (kind := before.case.outcome) == "crashed":
                assert await store.report_crash(claims[i], "killed by signal 9", alone=True)
            else:
                outcomes.append(end(claims[i], kind, delay=HOUR, error=None if kind == "completed" else UNFIT))  # type: ignore[arg-type]
        settlement = await store.settle(outcomes)
    assert (len(settlement.accepted), settlement.refused, settlement.again) == (len(outcomes), [], [])

    names = {number: state for state, number in STORED.items()}
    found = window.run(
        "SELECT id, state, failures, max_attempts, crashes, deaths, suspect,"
        " ARRAY(SELECT a.outcome FROM attempt a WHERE a.job_id = s.id AND a.attempt = 2) AS outcomes"
        " FROM (SELECT id, state, failures, max_attempts, crashes, deaths, suspect FROM job"
        "       UNION ALL SELECT id, state, failures, max_attempts, NULL, NULL, NULL FROM job_archive) s"
        " WHERE id = ANY (%s)",
        ids,
    )
    actual = {
        row["id"]: After(
            names[row["state"]], row["outcomes"], row["failures"], row["max_attempts"] - budgets[row["id"]],
            row["crashes"], row["deaths"], row["suspect"],
        )
        for row in found
    }  # fmt: skip
    assert {before: actual[i] for i, before in rows_of.items()} == {before: expected(before) for before in all_before}


async def test_retry_of_a_running_job_says_what_is_possible(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    with pytest.raises(InvalidTransition, match=r"is running: a job can be retried when"):
        window.do(operations.retry(job_id))
