"""Every figure in the tables of the README and of the performance page stands in the result file that its row cites."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "| measured |", "docs/explanation/performance.md": "| measured |"}
"""The pages, and what the head of a table of figures has."""
CITED = re.compile(r"\((?:\.\./)*(benchmarks/results/[^)]+\.json)\)")
NUMBER = re.compile(r"(?<![\w.,-])(\d[\d,]*(?:\.\d+)?)(?!\w)(?! promised)")
NOT_READ = {"latencies", "progress", "taken", "ages", "runs", "drain_runs", "environment"}
"""Parts of a result in which almost any number is found."""
SCALES = (1, 100, 1000, 1e-3, 1e-6)
"""Shares are shown as percent, seconds as milliseconds, bytes as megabytes."""


def rows(page: str) -> list[tuple[str, list[str]]]:
    """The rows of the tables of figures: what is measured, and the files that the row cites."""
    found: list[tuple[str, list[str]]] = []
    lines = (ROOT / page).read_text().splitlines()
    place = 0
    while place < len(lines):
        if PAGES[page] in lines[place]:
            column = [cell.strip() for cell in lines[place].split("|")].index("measured")
            place += 2
            while place < len(lines) and lines[place].startswith("|"):
                found.append((lines[place].split("|")[column].strip(), CITED.findall(lines[place])))
                place += 1
        place += 1
    return found


def read(name: str) -> Any:
    """The results of a file; driver.py's is a list of them."""
    content = json.loads((ROOT / name).read_text())
    return content["results"] if isinstance(content, dict) else content


def numbers(value: Any) -> Iterator[float]:
    match value:
        case bool() | None | str():
            return
        case int() | float():
            yield float(value)
        case dict():
            for key, inner in value.items():
                if key not in NOT_READ:
                    yield from numbers(inner)
        case _:
            for inner in value:
                yield from numbers(inner)


def stands_in(shown: str, known: list[float]) -> bool:
    """Whether a number, rounded as it is shown, is one of these."""
    plain = shown.replace(",", "")
    decimals = len(plain.partition(".")[2])
    zeros = 0 if decimals else len(plain) - len(plain.rstrip("0"))
    precision = 10.0**zeros / 10**decimals
    return any(abs(x * scale - float(plain)) <= 0.501 * precision for x in known for scale in SCALES)


@pytest.mark.parametrize("page", PAGES)
def test_each_figure_stands_in_the_result_that_its_row_cites(page: str) -> None:
    missing: list[str] = []
    found = rows(page)
    assert found, "the table of figures has another head now"
    for measured, files in found:
        if not files:
            missing.append(f"cites no result: {measured}")
            continue
        known = [x for name in files for x in numbers(read(name))]
        missing += [
            f"{shown} is not in {', '.join(files)}: {measured}"
            for shown in NUMBER.findall(measured)
            if not stands_in(shown, known)
        ]
    assert missing == []


def test_a_wrong_figure_would_be_found() -> None:
    assert stands_in("82,900", [82_851.3])
    assert not stands_in("82,900", [83_051.3])
    assert stands_in("96", [0.9634])
    assert stands_in("1.8", [1.84, 7.0])
    assert not stands_in("1.8", [1.9])
