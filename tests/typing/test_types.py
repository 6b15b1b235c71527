"""What users write is checked: good calls pass pyright strict, and each mistake is reported where it is made."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def reported(path: Path) -> list[tuple[int, str]]:
    """(line, message) of each error that pyright finds in a file, with strict settings."""
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(path.parent)]
    (path.parent / "pyrightconfig.json").write_text(
        json.dumps({"include": [path.name], "typeCheckingMode": "strict", "extraPaths": [str(ROOT / "src")]})
    )
    output = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False).stdout
    report: dict[str, Any] = json.loads(output)
    assert report["summary"]["filesAnalyzed"] == 1
    return [
        (d["range"]["start"]["line"] + 1, d["message"])
        for d in report["generalDiagnostics"]
        if d["severity"] == "error"
    ]


def test_what_the_documentation_teaches_passes(tmp_path: Path) -> None:
    path = tmp_path / "good.py"
    shutil.copy(HERE / "enqueue_good.py", path)
    assert reported(path) == []


def test_every_mistake_is_reported_on_its_line_and_nothing_else_is(tmp_path: Path) -> None:
    text = (HERE / "mistakes.txt").read_text()
    path = tmp_path / "mistakes.py"
    path.write_text(text)
    expected = {
        n for n, line in enumerate(text.splitlines(), 1) if re.search(r"# error", line) and not line.startswith("#")
    }
    found = reported(path)
    assert {line for line, _ in found} == expected, found
