"""A function of the schema means the same whatever the session that calls it has set."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator

BACKSLASH = re.compile(r"(\w?)'([^']*\\[^']*)'")
TIMES_AND_TEXT = re.compile(
    r"to_date\(|to_timestamp\(|::text::(?:timestamptz|timestamp|date|interval)\b|EXECUTE[^;]*%L[^;]*::(?:timestamptz|timestamp|date)",
    re.IGNORECASE,
)
FUNCTIONS = "SELECT proname, prosecdef, prosrc, proconfig FROM pg_proc WHERE pronamespace = 'pulse'::regnamespace"

CALLS = [
    ("json_number", "'12.5'::json, 0, 100"),
    ("json_number", "'\"12.5\"'::json, 0, 100"),
    ("own_number", "'1.5e2'::json, 0, 1000"),
    ("option_number", "'{\"timeout\": 3.5}'::json, 'timeout', 0, 1000"),
    ("own_limits", '\'{"limit": 3, "rate": [1, 2.5]}\'::json'),
    ("check_options", '\'{"timeout": 3.5, "rate": [1, 2.5]}\'::json'),
    ("is_readable", "('{\"a\": \"' || chr(92) || 'u0000\"}')::json"),
    ("is_readable", "('{\"a\": \"' || chr(92) || chr(92) || 'u0000\"}')::json"),
    ("is_readable", "('{\"a\": \"' || chr(92) || 'ud83d' || chr(92) || 'ude00\"}')::json"),
    ("is_readable", "('{\"a\": \"' || chr(92) || 'ud83d\"}')::json"),
    ("readable", "'{\"a\": 1e99999}'::json"),
]


@pytest.fixture
def window(dsn: str) -> Generator[Window]:
    with Window(dsn) as window:
        yield window


def lacking(function: dict[str, Any]) -> list[str]:
    """What a function of the schema should set for itself, and does not."""
    settings = {setting.partition("=")[0].lower() for setting in function["proconfig"] or []}
    needed: set[str] = {"search_path"} if function["prosecdef"] else set()
    if any(prefix not in ("E", "e") for prefix, _ in BACKSLASH.findall(function["prosrc"])):
        needed.add("standard_conforming_strings")
    if TIMES_AND_TEXT.search(function["prosrc"]):
        needed |= {"datestyle", "intervalstyle", "timezone"}
    return sorted(needed - settings)


def test_each_function_sets_for_itself_what_its_text_depends_on(window: Window) -> None:
    functions = window.run(FUNCTIONS)
    assert len(functions) > 40
    assert {f["proname"]: lacking(f) for f in functions if lacking(f)} == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"x ~ '\d'", ["search_path", "standard_conforming_strings"]),
        (r"x ~ E'\\d'", ["search_path"]),
        ("EXECUTE format('... FROM (%L)', day::timestamp)", ["datestyle", "intervalstyle", "search_path", "timezone"]),
        ("SELECT x::text::interval", ["datestyle", "intervalstyle", "search_path", "timezone"]),
    ],
)
def test_a_function_that_lacks_a_setting_is_found(text: str, expected: list[str]) -> None:
    assert lacking({"prosecdef": True, "prosrc": text, "proconfig": None}) == expected


@pytest.mark.parametrize(("function", "arguments"), CALLS)
def test_a_function_answers_the_same_where_backslashes_escape(function: str, arguments: str, window: Window) -> None:
    call = f"SELECT to_json({function}({arguments}))::text AS said"
    expected = window.value(call)
    window.connection.close()
    with Window(window.dsn) as other:  # a session that has not planned it yet
        other.run("SET standard_conforming_strings = off; SET escape_string_warning = on")
        assert other.value(call) == expected


def test_an_archive_is_maintained_for_a_caller_with_other_settings(window: Window) -> None:
    bounds = (
        "SELECT c.relname, pg_get_expr(c.relpartbound, c.oid) AS bound FROM pg_class c "
        "WHERE c.relname ~ '^(job_archive|attempt)_[0-9]{8}$' AND c.relispartition ORDER BY 1"
    )
    window.run("SET TimeZone = 'UTC'")
    window.run("SELECT maintain('7 days')")
    expected = window.run(bounds)
    for row in expected:
        window.run(f"DROP TABLE {row['relname']}")
    window.run("UPDATE maintenance SET maintained_at = '-infinity'")
    with Window(window.dsn) as other:
        other.run(
            "SET standard_conforming_strings = off; SET DateStyle = 'SQL, DMY'; SET IntervalStyle = 'sql_standard'; "
            "SET TimeZone = 'Asia/Kolkata'"
        )
        other.run("SELECT upkeep('7 days')")
        assert other.run("SHOW DateStyle") == [{"DateStyle": "SQL, DMY"}]
    assert window.run(bounds) == expected
