"""The page about security names a test for each promise, and each is there."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs/explanation/security.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)
    assert len(named) >= 16
    for file, test in named:
        assert f"def {test}(" in (HERE / file).read_text(encoding="utf-8"), f"{file}::{test}"
