"""The page that says what is proven names tests that are there, and every kind of fault and invariant that the harness has."""

from __future__ import annotations

import re
from pathlib import Path

from support.chaos.checker import INVARIANTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/proof.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", PAGE)
    assert len(named) > 20
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"


def test_every_invariant_is_on_the_page() -> None:
    assert re.findall(r"^\| (I\d+) \|", PAGE, re.MULTILINE) == list(INVARIANTS)
