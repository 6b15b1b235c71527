"""What the pages of the documentation say of themselves: the tests that they name, and the sentences that promise something."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
_WORDS = re.compile(
    r"\b(?:never|always|exact|exactly|at once|nothing|nobody|none|every)\b|\bno\b[^.;:|]*\bcan\b", re.IGNORECASE
)
_NOT_PROSE = re.compile(r"<!--.*?-->|^```.*?^```$", re.DOTALL | re.MULTILINE)
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])\)?\s+(?=[A-Z`(])")


def page(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def named_tests(text: str) -> list[tuple[str, str]]:
    """The tests that a text names as `path::name`, each with its file."""
    return _NAMED.findall(text)


def is_there(path: str, name: str) -> bool:
    """Whether that file has a test of that name."""
    return name in _functions(path)


@cache
def _functions(path: str) -> frozenset[str]:
    if not (ROOT / path).is_file():
        return frozenset()
    tree = ast.parse(page(path))
    return frozenset(n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))


def plain(text: str) -> str:
    """A text without what is only its looks in Markdown: bold, the targets of links, the ends of lines."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text.replace("**", ""))
    return " ".join(text.split())


def promises(text: str) -> Iterator[str]:
    """The sentences of a page, cells of tables included, in which one of the words of a promise stands (outside code)."""
    for block in _blocks(_NOT_PROSE.sub("\n", text)):
        for sentence in _END_OF_SENTENCE.split(plain(block)):
            if _WORDS.search(re.sub(r"`[^`]*`", "", sentence)):
                yield sentence


def _blocks(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in [*map(str.strip, text.splitlines()), ""]:
        if not line or line[0] in "#|" or _ITEM.match(line):
            yield " ".join(lines)
            lines = []
        if named_tests(line):
            continue  # A row or a line that names the tests itself.
        if line.startswith("|"):
            yield from line.strip("|").split("|")
        elif line and not line.startswith("#"):
            lines.append(_ITEM.sub("", line, count=1) if _ITEM.match(line) else line)
