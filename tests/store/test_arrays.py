"""Array literals: what goes in comes out, by PostgreSQL's own reading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pulse_trio.states import storable
from pulse_trio.store.arrays import numbers, texts

if TYPE_CHECKING:
    from support.stores import Window

SYNTAX = st.sampled_from(
    ['"', "\\", "{", "}", ",", "NULL", "null", " ", "", "\n", "\t", "\x01", "\\n", '\\"', "%s", "\U0001f600"]
)
TEXT = st.one_of(st.text(), st.lists(SYNTAX).map("".join)).map(storable)
here = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@here
@given(values=st.lists(st.none() | TEXT))
def test_texts_round_trip(values: list[str | None], window: Window) -> None:
    assert window.value("SELECT %s::text[]", texts(values)) == values


@here
@given(values=st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_whole_numbers_round_trip(values: list[int], window: Window) -> None:
    assert window.value("SELECT %s::bigint[]", numbers(values)) == values


@here
@given(values=st.lists(st.floats(allow_nan=False)))
def test_numbers_round_trip(values: list[float], window: Window) -> None:
    assert window.value("SELECT %s::float8[]", numbers(values)) == values


def test_not_a_number_is_told(window: Window) -> None:
    assert [str(v) for v in window.value("SELECT %s::float8[]", numbers([float("nan")]))] == ["nan"]


@here
@given(values=st.lists(st.none() | TEXT, min_size=1))
def test_ordinals_keep_the_order(values: list[str | None], window: Window) -> None:
    rows = window.run("SELECT v, o FROM unnest(%s::text[]) WITH ORDINALITY AS r(v, o) ORDER BY o", texts(values))
    assert [(r["v"], r["o"]) for r in rows] == [(v, i) for i, v in enumerate(values, 1)]
