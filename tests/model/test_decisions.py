"""The rules of `states.RULES` beside the text of sql/fail.sql, and every statement and function that moves a job.

That both decide alike on a real PostgreSQL is tested in tests/store/test_states.py. A rule that only the SQL has could hide
there, under a condition that no case arranges. Here every condition that the SQL asks for has to be known.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from pulse_trio import sql, states
from pulse_trio.sql import statement
from pulse_trio.states import OUTCOMES, RULES, TRANSITIONS, Case, Event, State, decision_of
from support.cases import every_case
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from support.databases import Databases

CONDITIONS: dict[str, Callable[[Case], bool]] = {
    "j.cancelling": lambda case: case.cancelling,
    # Computed for releases only, and not of jobs that are being cancelled.
    "u.given_up": lambda case: case.given_up and case.outcome == "released" and not case.cancelling,
    "j.deaths + 1 >= c.crash_limit": lambda case: case.last_crash,
    "j.attempt < j.max_attempts": lambda case: not case.last_attempt,
}
"""What fail.sql asks of the row, as a condition of `Case`."""


class When(NamedTuple):
    """One branch of the SQL's decision: all terms hold, then the job becomes this."""

    terms: list[str]
    state: State

    def holds(self, case: Case) -> bool:
        return all(holds(term, case) for term in self.terms)


def holds(term: str, case: Case) -> bool:
    if (named := re.fullmatch(r"r\.outcome (?:= ('\w+')|IN \(('\w+'(?:, '\w+')*)\))", term)) is not None:
        outcomes = re.findall(r"\w+", named[1] or named[2])
        assert set(outcomes) <= set(OUTCOMES), f"fail.sql knows an outcome that `states` lacks: {term}"
        return case.outcome in outcomes
    assert term in CONDITIONS, f"fail.sql asks for a condition that `states.Case` lacks: {term}"
    return CONDITIONS[term](case)


def decision_in(text: str) -> list[When]:
    """The branches of `CASE ... END AS next`, in their order."""
    (body,) = re.findall(r"\bCASE ((?:(?!\bCASE\b|\bEND\b).)*?) END AS next\b", text, re.DOTALL)
    branches = re.findall(r"(?:WHEN ((?:(?!WHEN|THEN).)*) THEN|ELSE) '(\w+)'", body, re.DOTALL)
    assert re.sub(r"\s+", " ", body).count("THEN ") + 1 == len(branches)
    return [When(condition.split(" AND ") if condition else [], State(state)) for condition, state in branches]


def differences(text: str) -> list[tuple[Case, State]]:
    """The cases that the SQL decides otherwise than the rules do. Completions have statements of their own."""
    whens = decision_in(text)
    found: list[tuple[Case, State]] = []
    for case in every_case():
        state = next(when.state for when in whens if when.holds(case))
        if case.outcome != "completed" and state is not decision_of(case).state:
            found.append((case, state))
    return found


FAIL = statement("fail", "pulse").decode()


def test_the_text_of_fail_sql_decides_every_case_as_the_rules_do() -> None:
    assert differences(FAIL) == []


def test_no_branch_of_fail_sql_is_without_a_case() -> None:
    whens = decision_in(FAIL)
    deciding = {next(i for i, when in enumerate(whens) if when.holds(case)) for case in every_case()}
    assert deciding == set(range(len(whens)))


@pytest.mark.parametrize(
    ("found", "instead"),
    [
        ("WHEN j.cancelling THEN 'cancelled'", ""),
        ("WHEN r.outcome IN ('cancelled', 'overdue') THEN 'cancelled'", ""),
        ("WHEN r.outcome IN ('cancelled', 'overdue') THEN", "WHEN r.outcome IN ('cancelled') THEN"),
        ("WHEN r.outcome = 'discarded' THEN 'dead'", ""),
        ("WHEN u.given_up THEN 'dead'", ""),
        ("WHEN j.attempt < j.max_attempts THEN 'retryable'", ""),
        ("r.outcome IN ('snoozed', 'released') THEN", "r.outcome IN ('snoozed') THEN"),
        ("j.deaths + 1 >= c.crash_limit THEN 'dead'", "j.deaths + 1 >= c.crash_limit THEN 'retryable'"),
        ("WHEN r.outcome = 'crashed' AND j.deaths", "WHEN r.outcome = 'rescued' AND j.deaths"),
    ],
)
def test_a_rule_that_fail_sql_lacks_is_found(found: str, instead: str) -> None:
    assert found in FAIL
    assert differences(FAIL.replace(found, instead))


@pytest.mark.parametrize("added", ["WHEN j.failures > 9 THEN 'dead' ", "WHEN r.outcome = 'bored' THEN 'dead' "])
def test_a_rule_that_only_fail_sql_knows_is_found(added: str) -> None:
    with pytest.raises(AssertionError, match="lacks"):
        differences(FAIL.replace("WHEN j.attempt < j.max_attempts", f"{added}WHEN j.attempt < j.max_attempts"))


FAILS_RULES = [rule for rule in RULES if rule.outcomes != ("completed",)]


@pytest.mark.parametrize("rule", FAILS_RULES, ids=lambda rule: f"{','.join(rule.outcomes)} {rule.condition}")
def test_a_rule_that_only_the_table_knows_is_found(rule: states.Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Event.FAIL if rule.event is Event.CANCEL else Event.CANCEL
    changed = [rule._replace(event=other) if r is rule else r for r in RULES]
    monkeypatch.setattr(states, "RULES", changed)
    assert differences(FAIL)


# What moves a job

MOVES: dict[str, set[Event]] = {
    "complete_and_claim": {Event.COMPLETE, Event.CLAIM},
    "complete_unlocked": {Event.COMPLETE},
    "complete_in_transaction()": {Event.COMPLETE},
    "claim_suspect": {Event.CLAIM},
    "claim_limited()": {Event.CLAIM},
    "claim_cleanups()": {Event.CLAIM},
    "fail": {rule.event for rule in RULES} - {Event.COMPLETE},
    "bury": {Event.BURY},
    "cancel_row()": {Event.CANCEL},
    "cancel_rows()": {Event.CANCEL},
    "sweep_children()": {Event.CANCEL},
    "suspend()": {Event.SUSPEND},
    "restart_children()": {Event.RETRY},
    # A parked job's first outcome, once its last descendant has ended.
    "look_at()": {Event.COMPLETE, Event.DISCARD, Event.CANCEL},
    # Takes the outcome back until then, and parks the job.
    "lives_on()": {Event.SUSPEND},
    "do_retry_jobs()": {Event.RETRY},
    "complete_jobs()": {Event.COMPLETE},
    "release_jobs()": {Event.RELEASE, Event.CANCEL},
}
"""Every statement and function (with parentheses) that moves a job from one state to another, and by which events."""
BIRTH_AND_DEATH = {
    "enqueue()", "enqueue_many()", "enqueue_unique()", "add_job()", "add_jobs()", "call_death_hook()", "take_back_held()",
    "do_delete_jobs()", "start_children()",
}  # fmt: skip
"""Those that make a job, make a waiting one anew (`on_conflict="replace"`), or forget it altogether."""

WRITES = re.compile(
    r'INSERT INTO (?:\S*\.)?"?job_archive"?\b|INSERT INTO (?:\S*\.)?"?job"? |DELETE FROM (?:\S*\.)?"?job"? |\bSET state = '
)


@pytest.fixture(scope="module")
def schema(databases: Databases) -> Generator[Window]:
    with databases.migrated() as dsn, Window(dsn) as window:
        yield window


def test_every_statement_that_moves_a_job_is_known(schema: Window) -> None:
    folder = Path(sql.__file__).parent
    texts = {path.stem: statement(path.stem, "pulse").decode() for path in folder.glob("*.sql")}
    for row in schema.run(
        "SELECT proname, string_agg(pg_get_functiondef(oid), ' ') AS text FROM pg_proc"
        " WHERE pronamespace = 'pulse'::regnamespace AND prokind = 'f' GROUP BY proname"
    ):
        texts[f"{row['proname']}()"] = re.sub(r"--.*", "", row["text"])
    moving = {name for name, text in texts.items() if WRITES.search(text)}
    assert moving == MOVES.keys() | BIRTH_AND_DEATH


def test_every_event_but_the_passing_of_time_has_a_statement() -> None:
    assert set().union(*MOVES.values()) == set(Event) - {Event.DUE}


@pytest.mark.parametrize("name", [name for name in MOVES if not name.endswith("()")])
def test_a_statement_names_no_state_that_its_events_do_not_touch(name: str) -> None:
    text = (Path(sql.__file__).parent / f"{name}.sql").read_text(encoding="utf-8")
    named = {State(state) for state in re.findall(r"^(?!\s*--).*?:state\.(\w+)", text, re.MULTILINE)}
    touched = {
        state for event in MOVES[name] for moves in TRANSITIONS.values() if event in moves for state in (moves[event],)
    }
    touched |= {decision_of(case).state for case in every_case() if decision_of(case).event in MOVES[name]}
    assert named <= touched | {State.RUNNING}
