"""The page that says what is proven has every row of the list of faults, names tests that are there, and every invariant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.chaos.checker import INVARIANTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/proof.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| (\d+) \| .* \| (.*) \|$", PAGE.partition("## Every fault")[2], re.MULTILINE))
"""By its number: what tries it."""


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", PAGE)
    assert len(named) > 50
    for path, name in named:
        assert re.search(rf"def {name}\(", (ROOT / path).read_text(encoding="utf-8")), f"{path}::{name}"


def test_every_fault_has_its_row_in_order() -> None:
    assert list(ROWS) == [str(number) for number in range(1, 36)]


@pytest.mark.parametrize("number", range(1, 36))
def test_every_fault_is_tried_by_a_test_and_not_by_chaos_alone(number: int) -> None:
    assert re.search(r"`tests/\S+\.py::test_\w+`", ROWS[str(number)])


def test_every_invariant_is_on_the_page() -> None:
    assert re.findall(r"^\| (I\d+) \|", PAGE, re.MULTILINE) == list(INVARIANTS)
