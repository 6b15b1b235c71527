"""Small values, of which `is_readable` says at once whether jsonb can hold them, get the answer of the long way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

if TYPE_CHECKING:
    from support.stores import Window

VALUES = [
    "{}",
    "null",
    '{"a": [1, -2.5e3, true, "text"]}',
    '"1e99999 in a text"',
    "[" * 400 + "]" * 400,
    "1" * 990,
    "[1e999, 1E-999]",
    "1e1000",
    "[-1E+99999]",
    "1e-200000",
    r'"\u00e9"',
    r'"\ud83d\ude00"',
    r'"a\\u0000"',
    r'"\u0000"',
    r'"\ud83d"',
    r'{"\ude00": 1}',
]


@pytest.mark.parametrize("value", VALUES)
def test_a_small_value_is_readable_if_a_large_one_with_the_same_meaning_is(value: str, window: Window) -> None:
    say = "SELECT is_readable((%s || repeat(' ', %s))::json)"
    said = window.value(say, value, 0)
    assert said == window.value(say, value, 1000)  # 1,000 bytes are too many for the short way
    if said:
        window.value("SELECT %s::jsonb::text", value)
    else:
        assert value not in VALUES[:7]


@pytest.mark.parametrize("value", [r'"\u0000"', r'"\ud83d"', "1e200000"])
def test_what_jsonb_refuses_is_not_readable(value: str, window: Window) -> None:
    assert window.value("SELECT is_readable(%s::json)", value) is False
    with pytest.raises(psycopg.errors.DataError):
        window.value("SELECT %s::jsonb::text", value)
