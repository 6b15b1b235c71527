"""The page that says what is proven has every row of the list of faults, and every invariant (test_promises.py: the tests)."""

from __future__ import annotations

import re

import pytest

from support.chaos.checker import INVARIANTS
from support.pages import named_tests, page

PAGE = page("docs/explanation/proof.md")
ROWS = dict(re.findall(r"^\| (\d+) \| .* \| (.*) \|$", PAGE.partition("## Every fault")[2], re.MULTILINE))
"""By its number: what tries it."""


def test_every_fault_has_its_row_in_order() -> None:
    assert list(ROWS) == [str(number) for number in range(1, 36)]


@pytest.mark.parametrize("number", range(1, 36))
def test_every_fault_is_tried_by_a_test_and_not_by_chaos_alone(number: int) -> None:
    assert named_tests(ROWS[str(number)])


def test_every_invariant_is_on_the_page() -> None:
    assert re.findall(r"^\| (I\d+) \|", PAGE, re.MULTILINE) == list(INVARIANTS)
