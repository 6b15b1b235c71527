"""The examples of the documentation are accepted by pyright, which is what an editor shows a reader who goes on from them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from test_docs import PAGES_THAT_RUN, blocks

ROOT = Path(__file__).parents[2]
UNTYPED = (
    "docs/how-to/django.md",
    "docs/how-to/django-tasks.md",
    "docs/how-to/fastapi-sqlalchemy.md",
    "docs/how-to/test-a-web-app.md",
)
"""Django has no types of its own; the other pages drive ASGI by hand, as no server has to."""


def test_the_examples_of_the_pages_type_check(tmp_path: Path) -> None:
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
            folder = tmp_path / f"page{number}"
            folders.append(folder.name)
            folder.mkdir()
            for name, body in files.items():
                (folder / name).write_text(body)
    assert len(folders) > 10
    settings = {
        "typeCheckingMode": "standard",
        "executionEnvironments": [{"root": name, "extraPaths": [str(ROOT / "src")]} for name in folders],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    report: dict[str, Any] = json.loads(output)
    assert report["summary"]["filesAnalyzed"] > 10
    assert [(found["file"], found["message"]) for found in report["generalDiagnostics"]] == []
