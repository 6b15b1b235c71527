"""The workers of xdist are forks of one process that has imported the tests, and miss nothing of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from support.prepared import find_imported

if TYPE_CHECKING:
    import pytest

PLUGIN = f"""
import sys
from contextlib import ExitStack

sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.prepared import find_imported, workers_are_forks

opened = ExitStack()

def pytest_configure(config):
    find_imported()

def pytest_xdist_setupnodes(config, specs):
    opened.enter_context(workers_are_forks(config, specs))

def pytest_unconfigure(config):
    opened.close()
"""
TESTS = """
import os
import sys

IMPORTED_BY = os.getpid()
sys.path.insert(0, "/put/there/by/a/test")

def test_it_is_imported_by_another_process_and_python_looks_where_the_file_said():
    assert os.getpid() != IMPORTED_BY
    assert "/put/there/by/a/test" in sys.path
"""


def run(folder: Path, **files: str) -> str:
    for name, text in {"conftest": PLUGIN, **files}.items():
        (folder / f"{name}.py").write_text(text)
    command = "-m pytest -q -n 2 --import-mode=importlib -p no:cacheprovider -c /dev/null --rootdir ."
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=folder, capture_output=True, text=True, check=False, timeout=100
    )
    return done.stdout + done.stderr


def test_the_workers_are_forks(tmp_path: Path) -> None:
    assert "1 passed" in run(tmp_path, test_it=TESTS)


def test_a_file_that_cannot_be_imported_is_an_error(tmp_path: Path) -> None:
    said = run(tmp_path, test_it="def test_it(): ...", test_broken="def test_it(): ...\nimport no_such_module")
    assert "No module named 'no_such_module'" in said
    assert "1 error" in said


def test_what_python_looks_in_already_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.prepared._looked_in", ["/a", "/b"])
    monkeypatch.setattr(sys, "path", ["/b"])
    find_imported()
    assert sys.path == ["/a", "/b"]
