"""The code of the recipes, and of the pages for people who come from another library, passes the tests that stand beside it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    path for folder in ("recipes", "coming-from") for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    if path.stem != "index"
]  # fmt: skip
FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_tests_on_the_pages_pass(tmp_path: Path) -> None:
    """One run for all: a database server is started once."""
    tests = 0
    for page in PAGES:
        files = FILE.findall(page.read_text(encoding="utf-8"))
        assert any(name.startswith("test_") for name, _ in files), f"{page.name} has no test"
        for name, body in files:
            assert not (tmp_path / name).exists(), f"{page.name}: {name} is on another page too"
            (tmp_path / name).write_text(body, encoding="utf-8")
            tests += len(re.findall(r"^(?:async )?def test_", body, re.MULTILINE)) if name.startswith("test_") else 0
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run([*command, "."], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^(\d+) passed in ", done.stdout, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) >= tests >= len(PAGES)
