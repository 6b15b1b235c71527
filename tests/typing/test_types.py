"""What users write is checked by pyright, as in an editor: good calls pass its strict mode, each mistake is reported where it
is made, and so the examples of the documentation are accepted.

One run of pyright reads all of it: half of what a run costs is reading pulse-trio and the standard library.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from test_docs import PAGES_THAT_RUN, blocks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
UNTYPED = (
    "docs/how-to/django.md",
    "docs/how-to/django-tasks.md",
    "docs/how-to/fastapi-sqlalchemy.md",
    "docs/how-to/test-a-web-app.md",
)
"""Django has no types of its own; the other pages drive ASGI by hand, as no server has to."""
GOOD, MISTAKES = "good.py", "mistakes.py"
"""Read with strict settings; the pages with standard ones."""

Reported = dict[str, list[tuple[int, str]]]


def write_examples(folder: Path) -> list[str]:
    """Writes the modules of each page into a folder of their own, and returns the folders."""
    folders: list[str] = []
    for number, page in enumerate(PAGES_THAT_RUN):
        if page in UNTYPED:
            continue
        files = {
            (block["note"] or "").removeprefix("file: ").strip(): block["body"]
            for block in blocks(page)
            if (block["note"] or "").startswith("file: ") and block["info"].startswith("python")
        }
        if files:
            folders.append(f"page{number}")
            (folder / folders[-1]).mkdir()
            for name, body in files.items():
                (folder / folders[-1] / name).write_text(body)
    return folders


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    """(line, message) of each error that pyright finds, by file; for the pages of each warning too."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / GOOD).write_text((HERE / "enqueue_good.py").read_text())
    (folder / MISTAKES).write_text((HERE / "mistakes.txt").read_text())
    pages = write_examples(folder)
    assert len(pages) > 10
    extra = [str(ROOT / "src")]
    settings = {
        "typeCheckingMode": "standard",
        "strict": [GOOD, MISTAKES],
        "extraPaths": extra,
        "executionEnvironments": [{"root": name, "extraPaths": extra} for name in pages],
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    output = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    report: dict[str, Any] = json.loads(output)
    assert report["summary"]["filesAnalyzed"] == len(list(folder.rglob("*.py")))
    found: Reported = {}
    for error in report["generalDiagnostics"]:
        name = Path(error["file"]).relative_to(folder).as_posix()
        if error["severity"] == "error" or name not in (GOOD, MISTAKES):
            found.setdefault(name, []).append((error["range"]["start"]["line"] + 1, error["message"]))
    return found


def test_what_the_documentation_teaches_passes(reported: Reported) -> None:
    assert reported.get(GOOD, []) == []


def test_every_mistake_is_reported_on_its_line_and_nothing_else_is(reported: Reported) -> None:
    text = (HERE / "mistakes.txt").read_text()
    expected = {
        n for n, line in enumerate(text.splitlines(), 1) if re.search(r"# error", line) and not line.startswith("#")
    }
    assert {line for line, _ in reported[MISTAKES]} == expected, reported[MISTAKES]


def test_the_examples_of_the_pages_type_check(reported: Reported) -> None:
    assert {name: found for name, found in reported.items() if name not in (GOOD, MISTAKES)} == {}
