"""What stands in the files of sql/, and what becomes of it: names for states and for common parts, no comments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from psycopg._queries import MAX_CACHED_STATEMENT_LENGTH

from pulse_trio import sql
from pulse_trio.sql import bare, statement
from pulse_trio.states import STORED, State

if TYPE_CHECKING:
    from support.stores import Window

FOLDER = Path(sql.__file__).parent
FILES = {path.relative_to(FOLDER).as_posix().removesuffix(".sql"): path.read_text() for path in FOLDER.rglob("*.sql")}
STATEMENTS = [name for name in FILES if "/" not in name]
PARTS = {name.removeprefix("parts/"): text for name, text in FILES.items() if name.startswith("parts/")}

NUMBERED = [
    # A comparison or an assignment.
    r"\bstate\s*(?:=|<>|!=|[<>]=?|(?:NOT\s+)?IN\s*\(|IS\s+(?:NOT\s+)?DISTINCT\s+FROM)\s*\d",
    r"\b\d\s*(?:=|<>)\s*(?:\w+\.)?state\b",
    # A column of a list.
    r"\b\d(?:::\w+)?\s+AS\s+state\b",
    r",\s*[1-6]\s*,",
    # What a CASE compares the column with, or makes of it.
    r"\bCASE\s+(?:\w+\.)?state\s+WHEN\s+\d",
    r"\b(?:THEN|ELSE)\s+[1-6]\b",
]


def numbered(text: str) -> list[str]:
    """Where a number stands for a state. The arguments of option_number are none."""
    text = re.sub(r"option_number\([^()]*\)", "", bare(text, dict.fromkeys(PARTS, "")))
    return [found[0] for pattern in NUMBERED for found in re.finditer(pattern, text)]


@pytest.mark.parametrize("name", FILES)
def test_no_number_stands_for_a_state(name: str) -> None:
    # A name of a state is replaced by a letter here, so what is found was written as a number.
    assert numbered(re.sub(r":state\.\w+", "s", FILES[name])) == []


@pytest.mark.parametrize(
    "text",
    [
        "WHERE j.state = 2", "WHERE state<>2", "state IN (1, 3)", "SET state = 2, attempt = 1", "4::smallint AS state",
        "SELECT priority, 4, queue", "CASE j.state WHEN 2 THEN j.suspect END",
        "SET state = CASE h.next WHEN 'x' THEN 3 ELSE 1 END",
    ],
)  # fmt: skip
def test_a_number_that_stands_for_a_state_is_found(text: str) -> None:
    assert numbered(text)


def test_the_numbers_of_states_are_those_of_the_view_that_users_read(window: Window) -> None:
    shown = {}
    for state, number in STORED.items():
        job_id = window.enqueue(delay=3600.0)
        if number < STORED[State.COMPLETED]:
            held = ", attempt = 1, locked_by = 7, lease_until = now()" if state is State.RUNNING else ""
            window.run(f"UPDATE job SET state = %s{held} WHERE id = %s", number, job_id)
        else:
            window.run(
                "WITH gone AS (DELETE FROM job WHERE id = %s RETURNING *)"
                " INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures,"
                " max_attempts, priority, state, queue, kind, args)"
                " SELECT id, now(), now(), run_at, created_at, 0, 1, 0, 1, 0, %s, queue, kind, args FROM gone",
                job_id, number,
            )  # fmt: skip
        shown[state] = window.state(job_id)
    assert shown == {state: state for state in STORED}
    assert set(STORED) == set(State) - {State.AVAILABLE, State.SUSPENDED}


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_statement_says_its_name_and_has_no_comment_or_indentation(name: str) -> None:
    text = statement(name, "pulse").decode()
    assert text.startswith(f"/* pulse-trio {name} */ ")
    rest = re.sub(r"'(?:[^']|'')*'", "''", text.removeprefix(f"/* pulse-trio {name} */ "))
    assert not re.search(r"--|/\*|\n\s|  |:state|:part", rest)


def test_names_are_replaced_outside_of_literals_and_comments_only() -> None:
    text = """-- it's :state.nonsense
    SELECT ':state.running', "x:state.y", 'it''s -- no comment', E'it\\'s  --', $$ -- :state.dead  $$ -- one ' more
    /* and
    one */ , a[1:state.y], x::state.z, :part.two, :state.running::smallint"""
    assert bare(text, {"two": "1, -- it's\n  :part.one\n", "one": ":state.dead"}) == (
        """SELECT ':state.running', "x:state.y", 'it''s -- no comment', E'it\\'s  --', $$ -- :state.dead  $$
, a[1:state.y], x::state.z, 1,\n5, 2::smallint"""
    )


@pytest.mark.parametrize("text", [":state.asleep", ":part.lost"])
def test_an_unknown_name_is_an_error(text: str) -> None:
    with pytest.raises((KeyError, ValueError), match=r"asleep|lost"):
        bare(text, {})


def test_every_part_is_used() -> None:
    used = {name for text in FILES.values() for name in re.findall(r":part\.(\w+)", text)}
    assert used == set(PARTS)


def test_only_these_statements_are_too_long_for_psycopg_to_keep_their_conversion() -> None:
    long = {name for name in STATEMENTS if len(statement(name, "pulse")) > MAX_CACHED_STATEMENT_LENGTH}
    # The last two are read by people's pages, a few times a second at most.
    assert long == {"slots", "fail", "look_through_jobs", "metrics_queues"}


ARCHIVES = {"fail": {"result"}, "bury": {"result", "cancel_reason"}, "complete_unlocked": {"error", "cancel_reason"},
            "complete_and_claim": set[str]()}  # fmt: skip
"""Each statement that archives, and the columns that its jobs never have."""


def archived(name: str) -> list[str]:
    """The columns of job_archive that a statement fills, in its order."""
    text = statement(name, "pulse").decode()
    found = re.search(r'INSERT INTO "pulse".job_archive \(([^)]*)\)', text)
    return [] if found is None else re.split(r",\s*", found[1].strip())


def test_every_statement_that_archives_fills_every_column(window: Window) -> None:
    table = [
        row["attname"]
        for row in window.run(
            "SELECT attname FROM pg_attribute WHERE attrelid = 'job_archive'::regclass AND attnum > 0 AND NOT attisdropped"
            " ORDER BY attnum"
        )
    ]
    assert {name for name in STATEMENTS if archived(name)} == ARCHIVES.keys()
    for name, lacking in ARCHIVES.items():
        assert set(archived(name)) == set(table) - lacking, name
    # In the table's order: then INSERT takes the rows of `done` as they are.
    assert archived("complete_and_claim") == table
    done = re.search(
        r"RETURNING (j\.id, .*?)\n\), archived", statement("complete_and_claim", "pulse").decode(), re.DOTALL
    )
    assert done is not None
    columns = re.split(r",\s*(?![^(]*\))", re.sub(r"%\(\w+\)s", "?", done[1]))
    assert [re.sub(r"::\w+$", "", c.rpartition(" AS ")[2].removeprefix("j.")) for c in columns] == table
