"""Whatever the pages promise is tried: each sentence that promises is on the page of promises, with a test that is there."""

from __future__ import annotations

import re

import pytest

from support.pages import ROOT, is_there, named_tests, page, plain, promises

LIST = "docs/explanation/promises.md"
PAGES = {
    "docs/explanation/guarantees.md",
    "docs/how-to/limits.md",
    "docs/how-to/results.md",
    "docs/explanation/security.md",
    "docs/explanation/how-it-works.md",
}


def listed() -> dict[str, dict[str, str]]:
    """By page: each sentence of the list, with its tests or, if it promises nothing, the reason."""
    found: dict[str, dict[str, str]] = {}
    for section in re.split(r"^## ", page(LIST), flags=re.MULTILINE)[1:]:
        (target,) = re.findall(r"\]\(([^)]*)\)$", section.partition("\n")[0])
        path = (ROOT / LIST).parent.joinpath(target).resolve().relative_to(ROOT).as_posix()
        rows = re.findall(r"^\| (.+?) \| (.+?) \|(?:.*\|)?$", section, re.MULTILINE)
        found[path] = {
            sentence: tried for sentence, tried in rows if sentence not in ("the sentence", "promises nothing")
        }
    return found


LISTED = listed()


def test_the_list_has_the_five_pages() -> None:
    assert LISTED.keys() == PAGES


@pytest.mark.parametrize("path", sorted(PAGES))
def test_every_sentence_that_promises_is_on_the_list_and_no_other(path: str) -> None:
    said = set(promises(page(path)))
    assert said - LISTED[path].keys() == set(), "a new promise: name the test that tries to break it"
    assert LISTED[path].keys() - said == set(), "no page says this any more"


@pytest.mark.parametrize("path", sorted(PAGES))
def test_every_sentence_of_the_list_has_a_test_or_a_reason(path: str) -> None:
    section = page(LIST).partition(f"({_from_the_list(path)})\n")[2].partition("\n## ")[0]
    tried, _, excused = section.partition("| promises nothing |")
    for sentence, tests in LISTED[path].items():
        assert f"| {sentence} |" in (tried if named_tests(tests) else excused), sentence


def _from_the_list(path: str) -> str:
    return path.removeprefix("docs/explanation/") if path.startswith("docs/explanation/") else f"../{path[5:]}"


@pytest.mark.parametrize("path", sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md")))
def test_every_test_that_a_page_names_is_there(path: str) -> None:
    assert [named for named in named_tests(page(path)) if not is_there(*named)] == []


def test_a_promise_is_found_wherever_it_stands_and_code_promises_nothing() -> None:
    text = """# Nothing of a heading

A line that says little. It **never**
fails (see [all](x.md)). `None` is code. No row can
do it.

1. It is done at once.
- It is not.

| who | does *exactly* this |
|---|---|
| it never falls | `tests/test_promises.py::test_the_list_has_the_five_pages` |

```python
always = None
```
"""
    assert list(promises(text)) == [
        "It never fails (see all).",
        "No row can do it.",
        "It is done at once.",
        "does *exactly* this",
    ]
    assert plain("**a**\n  b") == "a b"
    assert not is_there("tests/test_promises.py", "test_that_nobody_wrote")
    assert not is_there("tests/test_nothing.py", "test_x")
