"""The state machine as one table, and the pure functions that decide what an attempt's end means.

`TRANSITIONS` is complete, end states included: a move that it lacks is illegal, and its look-up raises. `RULES` say which event
the end of an attempt is. PostgreSQL decides by the same rules, in sql/fail.sql, where the row is locked: a worker's row could
have changed since it was read. tests/store/test_states.py tries every state with every event, and every case of the rules,
against the real statements; tests/model/test_decisions.py compares the rules with the text of fail.sql. The idea of the table
comes from h11; the idea to decide here and wait elsewhere, from psycopg.
"""

from __future__ import annotations

import random
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, get_args

import msgspec

from .describing import ask, cut, error_text, leaves_of, raised_by_ctrl_c, storable
from .errors import InvalidTransition
from .jobs import DEFAULT_OPTIONS, Claim, Discard, JobOptions, Outcome, OutcomeKind, RetryAfter, Snooze, delay_of
from .records import State

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .jobs import CancelReason


class Event(StrEnum):
    """What can happen to a job."""

    DUE = "due"
    CLAIM = "claim"
    COMPLETE = "complete"
    FAIL = "fail"
    FAIL_LAST = "fail, budget used up"
    DISCARD = "discard"
    SNOOZE = "snooze"
    SUSPEND = "suspend"
    RELEASE = "release"
    RESCUE = "rescue"
    RESCUE_LAST = "rescue, budget used up"
    CRASH_LAST = "crash, limit reached"
    BURY = "refused by PostgreSQL"
    CANCEL = "cancel"
    RETRY = "retry"


TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    State.SCHEDULED: {
        Event.DUE: State.AVAILABLE,
        Event.RETRY: State.AVAILABLE,
        Event.CANCEL: State.CANCELLED,
    },
    State.AVAILABLE: {
        Event.CLAIM: State.RUNNING,
        Event.CANCEL: State.CANCELLED,
    },
    State.RUNNING: {
        Event.COMPLETE: State.COMPLETED,
        Event.FAIL: State.RETRYABLE,
        Event.FAIL_LAST: State.DEAD,
        Event.DISCARD: State.DEAD,
        Event.SNOOZE: State.SCHEDULED,
        Event.SUSPEND: State.SUSPENDED,
        Event.RELEASE: State.AVAILABLE,
        Event.RESCUE: State.AVAILABLE,
        Event.RESCUE_LAST: State.DEAD,
        Event.CRASH_LAST: State.DEAD,
        Event.BURY: State.DEAD,
        Event.CANCEL: State.CANCELLED,
    },
    State.RETRYABLE: {
        Event.DUE: State.AVAILABLE,
        Event.RETRY: State.AVAILABLE,
        Event.CANCEL: State.CANCELLED,
    },
    State.SUSPENDED: {
        Event.DUE: State.AVAILABLE,
        Event.CANCEL: State.CANCELLED,
    },
    State.COMPLETED: {Event.RETRY: State.AVAILABLE},
    State.DEAD: {Event.RETRY: State.AVAILABLE},
    State.CANCELLED: {Event.RETRY: State.AVAILABLE},
}

FINISHED = frozenset({State.COMPLETED, State.DEAD, State.CANCELLED})

STORED: Mapping[State, int] = {
    State.SCHEDULED: 1,
    State.RUNNING: 2,
    State.RETRYABLE: 3,
    State.COMPLETED: 4,
    State.DEAD: 5,
    State.CANCELLED: 6,
}
"""The number in the column `state`. An available job is stored as scheduled or retryable, and its `run_at` has come. A
suspended job is stored as scheduled, and its row in `durable_job` names its last attempt."""


def next_state(state: State, event: Event) -> State:
    """The state to which `event` leads from `state`. Raises `InvalidTransition` if the table has no such move."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        possible = ", ".join(TRANSITIONS[state]) or "nothing"
        raise InvalidTransition(f"A job that is {state} cannot {event}; possible: {possible}.") from None


class Case(NamedTuple):
    """All the facts that decide what becomes of a running job whose attempt has ended.

    `outcome` is an `OutcomeKind`, "crashed" (the job ran alone in a process of its own, and a witness saw that process die) or
    "overdue" (the handler has failed, and the job's deadline had passed).
    """

    outcome: str
    cancelling: bool = False
    """Its cancellation was requested."""
    last_attempt: bool = False
    """Its budget is used up."""
    last_crash: bool = False
    """With this crash it has died alone as often as its `crash_limit` allows."""
    given_up: bool = False
    """Its arguments have fitted no worker for as long as the setting `unfit_patience`. Of one that is being cancelled that
    decides nothing: its history may say what is to be undone."""


class Rule(NamedTuple):
    """Under a condition (a field of `Case`; "" is none) these outcomes mean this event."""

    outcomes: Sequence[str]
    condition: str
    event: Event


OUTCOMES: Sequence[str] = (*get_args(OutcomeKind), "crashed", "overdue")
FAILURES = ("failed", "timeout", "discarded")
"""Outcomes that count as a failure of the handler."""
_LISTED_AS = {"crashed": "rescued", "overdue": "failed"}
"""How the list of attempts shows the outcomes that it has no word for."""

RULES: Sequence[Rule] = (
    Rule(("completed",), "", Event.COMPLETE),
    Rule(OUTCOMES, "cancelling", Event.CANCEL),
    Rule(("cancelled", "overdue"), "", Event.CANCEL),
    Rule(("discarded",), "", Event.DISCARD),
    Rule(("snoozed",), "", Event.SNOOZE),
    Rule(("released",), "given_up", Event.DISCARD),
    Rule(("released",), "", Event.RELEASE),
    Rule(("crashed",), "last_crash", Event.CRASH_LAST),
    Rule(("failed", "timeout"), "last_attempt", Event.FAIL_LAST),
    Rule(("failed", "timeout"), "", Event.FAIL),
    Rule(("rescued", "crashed"), "last_attempt", Event.RESCUE_LAST),
    Rule(("rescued", "crashed"), "", Event.RESCUE),
)
"""The first rule that fits decides."""


class Decision(NamedTuple):
    """What becomes of a job, and what its row counts. Counters other than `failures` matter only to a job that goes back."""

    event: Event
    state: State
    """As the row stores it: a job that goes back is `SCHEDULED` or `RETRYABLE`, and shown as `AVAILABLE` once it is due."""
    outcome: str
    """As the list of attempts shows it."""
    failures: int
    crashes: int
    deaths: int
    refunds: int
    """1 for an attempt that used no budget. `attempt` never goes back, so `max_attempts` grows instead."""


def decide(
    outcome: str,
    attempt: int,
    max_attempts: int,
    *,
    cancelling: bool = False,
    deaths: int = 0,
    crash_limit: int = DEFAULT_OPTIONS.crash_limit,
    given_up: bool = False,
) -> Decision:
    """What becomes of a running job whose attempt ended with `outcome`. `deaths`: how often it has died alone before."""
    last_crash = outcome == "crashed" and deaths + 1 >= crash_limit
    return decision_of(Case(outcome, cancelling, attempt >= max_attempts, last_crash, given_up))


def decision_of(case: Case) -> Decision:
    """The one decision between retry, dead letter and the other ends. Raises `ValueError` for an outcome that no rule knows."""
    for rule in RULES:
        if case.outcome in rule.outcomes and (not rule.condition or getattr(case, rule.condition)):
            break
    else:
        raise ValueError(f"unknown outcome {case.outcome!r}")
    given_up = case.given_up and case.outcome == "released" and not case.cancelling
    outcome = "discarded" if given_up else _LISTED_AS.get(case.outcome, case.outcome)
    return Decision(
        rule.event,
        _STORED_AS.get(rule.event) or next_state(State.RUNNING, rule.event),
        outcome,
        failures=outcome in FAILURES,
        crashes=rule.event is Event.RESCUE,
        deaths=rule.event is Event.RESCUE and case.outcome == "crashed",
        refunds=rule.event in (Event.SNOOZE, Event.RELEASE),
    )


_STORED_AS = {Event.RELEASE: State.SCHEDULED, Event.RESCUE: State.RETRYABLE}


def reported(outcome: Outcome) -> str:
    """The outcome of an attempt, as it decides what becomes of the job."""
    return "overdue" if outcome.cancelling and outcome.kind in FAILURES else outcome.kind


def suspected(event: Event, suspect: bool, crashes: int, crash_limit: int) -> bool:
    """Whether a job that goes back is now a suspect, to run in quarantine next; `crashes` includes the one that `event` may
    be."""
    if event is Event.RESCUE:
        return suspect or is_suspect(crashes, crash_limit)
    # A job that ended without a crash is no longer a suspect; a release proves nothing.
    return suspect and event is Event.RELEASE


def is_suspect(crashes: int, crash_limit: int) -> bool:
    """Whether that many crashes make a suspect: the next one could be the last that its limit allows."""
    return crashes >= crash_limit - 1


def excused(crowded: bool, suspect: bool) -> bool:
    """Whether a rescue uses no budget (sql/refund.sql): the session died with several jobs, and at most one is to blame.
    A suspect ran alone, whatever ran beside it."""
    return crowded and not suspect


WISHES = (Snooze, RetryAfter, Discard)
"""What a handler raises as its word on its job."""


class Retries(Protocol):
    """A handler's answer to its failures: seconds until the next try, None for a job that is dead at once."""

    def delay(self, claim: Claim, error: BaseException) -> float | None: ...


def outcome_of_error(
    claim: Claim, error: BaseException, retries: Retries | None = None, text: str | None = None
) -> Outcome:
    """The outcome that an exception of the handler means. Groups count as Snooze, RetryAfter or Discard when every leaf is one.

    `text` is its stored text, if that is known already. Never raises, whatever the exception does.
    """
    text = error_text(error) if text is None else text
    leaves = leaves_of(error)
    for wish in WISHES:
        # Not isinstance, which calls the exception's own `__class__`.
        if all(issubclass(type(leaf), wish) for leaf in leaves):
            return _wished(claim, wish, leaves, error, text, retries)
    return _failure(claim, "failed", error, text, retries)


def _wished(
    claim: Claim, wish: type, leaves: Sequence[Any], error: BaseException, text: str, retries: Retries | None
) -> Outcome:
    if wish is Discard:
        return Outcome(claim, "discarded", error=text)
    try:
        delay = ask(lambda: max(delay_of(leaf.seconds) for leaf in leaves))
    except BaseException as broken:  # noqa: ASYNC103 -- an attribute of the user's: it waits for nothing
        if raised_by_ctrl_c(broken):
            raise
        text += f"\n\nThe seconds of this {wish.__name__} cannot be read: {_short(broken)}"
        return _failure(claim, "failed", error, text, retries)  # noqa: ASYNC104 -- as above
    return (
        Outcome(claim, "snoozed", delay=delay) if wish is Snooze else Outcome(claim, "failed", delay=delay, error=text)
    )


def _failure(claim: Claim, kind: OutcomeKind, error: BaseException, text: str, retries: Retries | None) -> Outcome:
    """A failure, as the handler's policy decides; an exception of the policy itself must not hide the handler's."""
    if retries is None:
        return Outcome(claim, kind, delay=retry_delay(claim), error=text)
    try:
        delay = ask(lambda: retries.delay(claim, error))
    except BaseException as broken:  # noqa: ASYNC103 -- a policy of the user's: it waits for nothing
        if raised_by_ctrl_c(broken):
            raise
        delay = retry_delay(claim)
        text += f"\n\nThe retry policy failed as well, so the default backoff applies:\n{_short(broken)}"
    if delay is None:
        return Outcome(claim, "discarded", error=text)  # noqa: ASYNC104 -- as above
    return Outcome(claim, kind, delay=delay, error=text)


def _short(error: BaseException) -> str:
    return cut(error_text(error), 4096)


STOPPED = "the worker stopped before the job had ended"
UNPROVEN = "the worker could not prove its lease in time"
GIVEN_BACK = "claimed before a slot was free, and given back"
"""Why an attempt was released. A release that says nothing is that of a worker which does not know the kind."""


def outcome_of_cancel(
    claim: Claim, reason: CancelReason, retries: Retries | None = None, message: str | None = None
) -> Outcome | None:
    """The outcome of a cancelled handler that has ended; None when there is nothing left to report (the job is no longer ours,
    or cannot be proven to be). `message` is the reason that the person gave who asked for it; or why the worker stops."""
    match reason:
        case "timeout":
            limit = options_of(claim).timeout
            error = TimeoutError("ran longer than " + (f"{limit:g} s" if limit else "the worker's setting `timeout`"))
            return _failure(claim, "timeout", error, f"TimeoutError: {error}", retries)
        case "user":
            return Outcome(claim, "cancelled", error=storable(message or "user"))
        case "deadline" | "parent" | "sibling":
            return Outcome(claim, "cancelled", error=reason)
        case "suspended" | "shutdown" | "lease-unproven":
            # An unproven lease may still be ours: the fenced release then gives the job back sooner than the watchdog.
            return Outcome(claim, "released", error=UNPROVEN if reason == "lease-unproven" else message or STOPPED)
        case "fence-lost":
            return None


def retry_delay(claim: Claim) -> float:
    """Seconds until the next try: exponential with full jitter, over failures (not attempts: a snooze is no failure).

    With the defaults the first retry comes within 4 s and the second within 8 s. The exponent is bounded: 2**attempt
    overflows at attempt 2,000. Full jitter is AWS's "Exponential Backoff And Jitter".
    """
    try:
        options = options_of(claim)
    except UnreadableOptions:
        options = DEFAULT_OPTIONS
    ceiling = exponential(options.backoff_base, options.backoff_cap, claim.failures + 1)
    return random.uniform(0, ceiling)  # noqa: S311 -- spreads load, guards nothing


def exponential(base: float, cap: float, failures: int) -> float:
    """`base * 2**failures`, at most `cap`, whatever `failures` is."""
    return min(cap, base * 2.0 ** min(failures, 64))


class UnreadableOptions(msgspec.ValidationError):
    """A row's options differ from what any version writes: too large, too deep, no JSON object, or of other types."""


def options_of(claim: Claim) -> JobOptions:
    """Decodes the claim's own options. Raises `UnreadableOptions`."""
    if claim.options is None:
        return DEFAULT_OPTIONS
    if len(claim.options) > LONGEST_OPTIONS:
        raise UnreadableOptions(f"they take more than {LONGEST_OPTIONS:,} bytes")
    try:
        return msgspec.json.decode(claim.options, type=JobOptions)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableOptions(str(error)) from None


LONGEST_OPTIONS = 4096
"""Bytes. A claim brings one more at most (complete_and_claim.sql), so that longer options are recognised."""
