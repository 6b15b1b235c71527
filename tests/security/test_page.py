"""The page about security names a test for each promise, and files for each threat (test_promises.py: each test exists)."""

from __future__ import annotations

import re
from pathlib import Path

from support.pages import named_tests, page

HERE = Path(__file__).parent
PAGE = page("docs/explanation/security.md")


def test_every_promise_of_the_page_has_a_test() -> None:
    rows = re.findall(r"^\| (?!promise |---)(.+) \| (.+) \|$", PAGE.partition("## What is tested")[2], re.MULTILINE)
    assert len(rows) >= 16
    assert [promise for promise, tried in rows if not named_tests(tried)] == []


def test_every_threat_is_tried_by_files_that_are_there() -> None:
    threats = PAGE.partition("## Threats")[2].partition("## ")[0]
    named = re.findall(r"`(?:tests/)?(test_\w+\.py)`", threats)
    assert len(named) >= 16
    assert [file for file in named if not any((folder / file).exists() for folder in (HERE, HERE.parent))] == []
