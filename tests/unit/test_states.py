"""The state machine and its pure functions."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import trio

from pulse_trio import Discard, InvalidTransition, RetryAfter, Snooze
from pulse_trio.jobs import Claim
from pulse_trio.states import (
    FINISHED,
    OUTCOMES,
    RULES,
    STORED,
    TRANSITIONS,
    Event,
    Rule,
    State,
    decide,
    decision_of,
    error_text,
    is_suspect,
    leaves_of,
    next_state,
    options_of,
    outcome_of_cancel,
    outcome_of_error,
    retry_delay,
    storable,
    suspected,
)
from support.cases import every_case


def claim(**how: Any) -> Claim:
    given = {
        "id": 1, "attempt": 1, "max_attempts": 20, "failures": 0, "priority": 0, "run_at": "", "queue": "q", "kind": "k",
        "args": "{}", "options": None, "session": 7,
    }  # fmt: skip
    return Claim(**given | how)


# The table


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", State)
def test_every_move_is_in_the_table_or_raises(state: State, event: Event) -> None:
    if event in TRANSITIONS[state]:
        assert next_state(state, event) is TRANSITIONS[state][event]
    else:
        with pytest.raises(InvalidTransition, match=re.escape(f"A job that is {state} cannot {event}")):
            next_state(state, event)


def test_a_refused_move_names_the_possible_ones() -> None:
    with pytest.raises(InvalidTransition, match="possible: claim"):
        next_state(State.AVAILABLE, Event.COMPLETE)


def test_every_state_is_in_the_table_and_every_event_is_used() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {event for moves in TRANSITIONS.values() for event in moves} == set(Event)
    assert {state for moves in TRANSITIONS.values() for state in moves.values()} == set(State)


def test_finished_states_change_only_by_a_persons_command() -> None:
    assert {s for s in State if set(TRANSITIONS[s]) <= {Event.RETRY}} == FINISHED


def test_no_event_is_lost_on_the_way_from_running() -> None:
    # Whatever happens to an attempt, the job has somewhere to go.
    assert set(TRANSITIONS[State.RUNNING]) == set(Event) - {Event.DUE, Event.CLAIM, Event.RETRY}


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_every_outcome_is_an_event_of_a_running_job(outcome: str, attempt: int) -> None:
    event = decide(outcome, attempt, 2).event
    assert event in TRANSITIONS[State.RUNNING]
    last = attempt >= 2 and outcome in ("failed", "timeout", "rescued", "crashed")
    assert (event in (Event.FAIL_LAST, Event.RESCUE_LAST)) == last


def test_every_rule_decides_some_case_and_every_event_of_an_end_has_a_rule() -> None:
    deciding = set[Rule]()
    for case in every_case():
        deciding.add(
            next(r for r in RULES if case.outcome in r.outcomes and (not r.condition or getattr(case, r.condition)))
        )
    assert deciding == set(RULES)
    # What PostgreSQL refuses to do with a row is decided by nothing in the row, nor is that a handler waits.
    assert {rule.event for rule in RULES} == set(TRANSITIONS[State.RUNNING]) - {Event.BURY, Event.SUSPEND}


def test_a_job_goes_where_the_table_says_or_is_available_once_it_is_due() -> None:
    for case in every_case():
        decided = decision_of(case)
        shown = next_state(State.RUNNING, decided.event)
        assert decided.state is shown or (shown is State.AVAILABLE and Event.DUE in TRANSITIONS[decided.state])
        assert decided.state in STORED


@pytest.mark.parametrize(
    ("deaths", "event"), [(0, Event.RESCUE), (1, Event.RESCUE), (2, Event.CRASH_LAST), (9, Event.CRASH_LAST)]
)
def test_only_crashes_seen_alone_count_towards_the_limit(deaths: int, event: Event) -> None:
    assert decide("crashed", 1, 20, deaths=deaths).event is event
    assert decide("rescued", 1, 20, deaths=deaths).event is Event.RESCUE
    assert decide("crashed", 1, 20, deaths=deaths, crash_limit=deaths + 2).event is Event.RESCUE


def test_a_suspect_is_one_whose_next_crash_could_be_its_last() -> None:
    assert [is_suspect(crashes, 3) for crashes in range(4)] == [False, False, True, True]
    assert suspected(Event.RESCUE, False, 2, 3)
    assert not suspected(Event.RESCUE, False, 1, 3)
    assert suspected(Event.RESCUE, True, 1, 3)
    assert suspected(Event.RELEASE, True, 0, 3)
    assert not suspected(Event.RELEASE, False, 9, 3)
    assert not suspected(Event.FAIL, True, 9, 3)
    assert not suspected(Event.SNOOZE, True, 9, 3)


def test_an_unknown_outcome_is_a_program_error() -> None:
    with pytest.raises(ValueError, match="unknown outcome 'odd'"):
        decide("odd", 1, 1)


# Backoff


def bounds(monkeypatch: pytest.MonkeyPatch, **how: Any) -> tuple[float, float]:
    got: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        got.append((low, high))
        return high

    monkeypatch.setattr("pulse_trio.states.random.uniform", uniform)
    retry_delay(claim(**how))
    return got[0]


def test_backoff_doubles_with_each_failure_up_to_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    highs = [bounds(monkeypatch, failures=failures)[1] for failures in range(14)]
    assert highs == [4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3600, 3600, 3600, 3600]
    assert all(bounds(monkeypatch, failures=failures)[0] == 0 for failures in range(14))


@pytest.mark.parametrize("failures", [2_000, 10_000, 2**31 - 1])
def test_backoff_survives_any_number_of_failures(failures: int) -> None:
    assert 0 <= retry_delay(claim(failures=failures)) <= 3600


def test_backoff_counts_failures_and_not_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bounds(monkeypatch, attempt=500, failures=0) == (0, 4)


def test_the_second_retry_comes_within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bounds(monkeypatch, failures=0)[1] + bounds(monkeypatch, failures=1)[1] < 60


def test_backoff_follows_the_handlers_options(monkeypatch: pytest.MonkeyPatch) -> None:
    options = '{"backoff_base":10,"backoff_cap":35.5}'
    assert [bounds(monkeypatch, failures=n, options=options)[1] for n in range(3)] == [20, 35.5, 35.5]


def test_options_have_defaults_and_reject_nonsense() -> None:
    assert (options_of(claim()).timeout, options_of(claim(options="{}")).backoff_cap) == (None, 3600)
    assert options_of(claim(options='{"timeout":5,"from_the_future":1}')).timeout == 5
    with pytest.raises(msgspec.ValidationError):
        options_of(claim(options='{"timeout":"soon"}'))


# Outcomes


def test_an_exception_is_a_failure_with_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulse_trio.states.random.uniform", lambda _, high: high)
    ours = claim(failures=2)
    outcome = outcome_of_error(ours, ValueError("no"))
    assert (outcome.claim, outcome.kind, outcome.delay) == (ours, "failed", 16)
    assert outcome.error is not None
    assert outcome.error.startswith("ValueError: no")


@pytest.mark.parametrize(
    ("error", "kind", "delay"),
    [
        (Snooze(30), "snoozed", 30),
        (RetryAfter(5), "failed", 5),
        (RetryAfter(0), "failed", 0),
        (Discard("x"), "discarded", 0),
        (ExceptionGroup("", [Snooze(1), ExceptionGroup("", [Snooze(9)])]), "snoozed", 9),
        (ExceptionGroup("", [RetryAfter(1), RetryAfter(9)]), "failed", 9),
        (ExceptionGroup("", [Discard(), Discard()]), "discarded", 0),
        (ExceptionGroup("", [Discard(), Snooze(9)]), "failed", 4),
        (ExceptionGroup("", [RetryAfter(9), ValueError()]), "failed", 4),
        (BaseExceptionGroup("", [Snooze(9), SystemExit()]), "failed", 4),
        (SystemExit(1), "failed", 4),
    ],
    ids=repr,
)
def test_wishes_count_alone_and_in_groups_of_one_mind(
    error: BaseException, kind: str, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulse_trio.states.random.uniform", lambda _, high: high)
    outcome = outcome_of_error(claim(), error)
    assert (outcome.kind, outcome.delay) == (kind, delay)


@pytest.mark.parametrize("wish", [Snooze, RetryAfter])
def test_a_wish_takes_seconds_or_a_timedelta_and_nothing_else(wish: type[Snooze] | type[RetryAfter]) -> None:
    assert wish(1.5).seconds == 1.5
    assert wish(timedelta(minutes=2)).seconds == 120
    assert wish(0).seconds == 0
    for nonsense in (-1, math.inf, math.nan, timedelta(seconds=-1)):
        with pytest.raises(ValueError, match="number of seconds from now on"):
            wish(nonsense)
    for nonsense in (None, [], "soon"):
        with pytest.raises((TypeError, ValueError)):
            wish(nonsense)  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        wish(10**400)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("user", "cancelled"), ("timeout", "timeout"), ("deadline", "cancelled"), ("parent", "cancelled"),
        ("sibling", "cancelled"), ("shutdown", "released"), ("lease-unproven", "released"),
    ],
)  # fmt: skip
def test_a_cancellation_means_what_its_reason_says(reason: Any, kind: str) -> None:
    outcome = outcome_of_cancel(claim(options='{"timeout":2.5}'), reason)
    assert outcome is not None
    assert outcome.kind == kind
    assert (outcome.delay > 0) == (kind == "timeout")
    if kind == "timeout":
        assert outcome.error == "TimeoutError: ran longer than 2.5 s"


@pytest.mark.parametrize(
    ("reason", "message", "kept"),
    [
        ("user", "no longer wanted", "no longer wanted"),
        ("user", None, "user"),
        ("user", "half \ud800 a pair", "half \ufffd a pair"),
        ("deadline", None, "deadline"),
        # Somebody asked as well, but the deadline struck first.
        ("deadline", "no longer wanted", "deadline"),
    ],
)
def test_a_cancelled_job_keeps_what_the_person_said(reason: Any, message: str | None, kept: str) -> None:
    outcome = outcome_of_cancel(claim(), reason, None, message)
    assert outcome is not None
    assert (outcome.kind, outcome.error) == ("cancelled", kept)


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("kind", ["failed", "timeout", "rescued", "discarded", "snoozed", "released", "cancelled"])
def test_a_job_being_cancelled_has_no_other_end_but_completion(kind: str, attempt: int) -> None:
    assert decide(kind, attempt, 2, cancelling=True).event is Event.CANCEL
    assert decide("completed", attempt, 2, cancelling=True).event is Event.COMPLETE


def test_a_lost_fence_leaves_nothing_to_report() -> None:
    assert outcome_of_cancel(claim(), "fence-lost") is None


# The text of an error


class Broken(Exception):
    def __str__(self) -> str:
        raise RuntimeError("even str() fails")

    __repr__ = __str__


class Rude(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


class Endless(Exception):
    def __str__(self) -> str:
        return str(self)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: ASYNC103 -- what is raised instead is the test
        return caught  # noqa: ASYNC104 -- what is raised instead is the test


def test_an_error_is_its_headline_then_its_traceback() -> None:
    text = error_text(raised(ValueError("two\nlines")))
    assert text.startswith("ValueError: two\nlines\n\nTraceback (most recent call last):\n")
    assert "raise error" in text
    assert error_text(raised(KeyError())).startswith("KeyError\n\nTraceback")


@pytest.mark.parametrize(
    "error", [Broken(), Rude(), Endless(), ExceptionGroup("g", [Broken()])], ids=lambda e: type(e).__name__
)
def test_no_error_is_too_broken_to_be_told(error: Exception) -> None:
    for each in (error, raised(error)):
        text = error_text(each)
        assert text.startswith(type(error).__name__)


def test_causes_and_notes_are_told() -> None:
    error = ValueError("outer")
    error.__cause__ = raised(KeyError("inner"))
    error.add_note("and a note")
    text = error_text(raised(error))
    for part in ("KeyError: 'inner'", "direct cause", "ValueError: outer", "and a note"):
        assert part in text


def test_a_group_tells_every_leaf() -> None:
    text = error_text(raised(BaseExceptionGroup("both", [raised(ValueError("one")), raised(KeyError("two"))])))
    assert text.startswith("ExceptionGroup: both (2 sub-exceptions)")
    assert "ValueError: one" in text
    assert "KeyError: 'two'" in text


@pytest.mark.parametrize(
    ("group", "headline"),
    [
        (ExceptionGroup("g", [ValueError("in a child")]), "ExceptionGroup: g (1 sub-exception): ValueError: in a child"),
        (
            ExceptionGroup("g", [ExceptionGroup("", [OSError("one\n  line")]), KeyError()]),
            "ExceptionGroup: g (2 sub-exceptions): OSError: one line; KeyError",
        ),
        (
            ExceptionGroup("g", [ValueError(str(n)) for n in range(1_003)]),
            "ExceptionGroup: g (1003 sub-exceptions): ValueError: 0; ValueError: 1; ValueError: 2; 1,000 more",
        ),
        (ExceptionGroup("g", [ValueError("x" * 999)]), f"ExceptionGroup: g (1 sub-exception): ValueError: {'x' * 288}..."),
        (ExceptionGroup("g", [Broken()]), f"ExceptionGroup: g (1 sub-exception): {error_text(Broken()).splitlines()[0]}"),
    ],
    ids=["one", "nested", "many", "long", "broken"],
)  # fmt: skip
def test_the_first_line_of_a_group_names_what_is_in_it(group: Exception, headline: str) -> None:
    """A log and a list of jobs show that line alone, and Trio's nurseries raise nothing but groups."""
    assert error_text(raised(group)).splitlines()[0] == headline


@pytest.mark.parametrize("character", ["\xe9", "\u20ac", "\U0001f600", "\ud800", "\0"], ids=ascii)
def test_an_error_is_bounded_in_bytes_whatever_its_characters(character: str) -> None:
    for shift in range(4):
        text = error_text(raised(ValueError("x" * shift + character * 10**5)))
        assert len(text.encode()) <= 16_384
        assert "\ufffd" not in text or character in "\ud800\0"


def test_a_long_error_keeps_both_ends() -> None:
    text = error_text(raised(ValueError("begin" + "x" * 10**7 + "end")))
    assert len(text) <= 16_384
    headline = text.partition("\n\n")[0]
    assert headline.startswith("ValueError: begin")
    assert headline.endswith("end")
    assert "bytes cut" in headline
    assert text.rstrip().endswith("end")


def test_a_deep_recursion_is_told() -> None:
    def dig(depth: int) -> None:
        dig(depth + 1)

    with pytest.raises(RecursionError) as caught:
        dig(0)
    text = error_text(caught.value)
    assert text.startswith("RecursionError: maximum recursion depth exceeded")
    assert len(text) <= 16_384 + 200


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "\udfff\ud800", "\U0001f600\0"])
def test_what_postgresql_cannot_hold_is_replaced(text: str) -> None:
    stored = storable(text)
    assert len(stored) == len(text)
    stored.encode()
    assert "\0" not in stored
    assert "\ufffd" in stored
    error_text(ValueError(text)).encode()


def test_ordinary_text_is_left_alone() -> None:
    text = "ünï \U0001f600 \x01 \uffff \ufeff"
    assert storable(text) == text


def test_the_worker_is_not_in_its_jobs_traceback() -> None:
    assert "pulse_trio" not in error_text(raised(ValueError("x"))).replace(__file__, "")


def test_leaves_are_found_however_deep() -> None:
    one, two, three = ValueError(1), KeyError(2), SystemExit(3)
    group = BaseExceptionGroup("", [one, ExceptionGroup("", [ExceptionGroup("", [two])]), three])
    assert leaves_of(group) == [one, two, three]
    assert leaves_of(one) == [one]
    cancelled = trio.Cancelled._create(source="nursery") if hasattr(trio.Cancelled, "_create") else one  # type: ignore[attr-defined]
    assert leaves_of(BaseExceptionGroup("", [cancelled])) == [cancelled]
