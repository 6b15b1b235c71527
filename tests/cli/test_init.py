"""`pulse-trio init`: what it writes works as it is, and nothing of the user's is touched."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

from pulse_trio.testing.faults.processes import clean_environment
from support.forking import search_path

if TYPE_CHECKING:
    from pathlib import Path

    from support.forking import Forker

WRITTEN = {"app.py", "pulse-trio.toml", "pytest.ini", "test_app.py"}
INSTALL = 1
"""`pip install` itself."""


def run(folder: Path, *command: str, by: Forker | None = None) -> subprocess.CompletedProcess[str]:
    left_out = ("PYTEST", "COV_")
    own = {key: value for key, value in clean_environment().items() if not key.startswith(left_out)}
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        env=own | {"PATH": search_path(by)},
        check=False,
        timeout=120,
    )


def init(folder: Path, forker: Forker, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "pulse-trio", "init", *arguments, by=forker)


def test_the_commands_it_names_lead_to_a_completed_job_and_a_test_that_passes(tmp_path: Path, forker: Forker) -> None:
    tmp_path.chmod(0o711)
    done = run(tmp_path, sys.executable, "-m", "pulse_trio", "init")
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == WRITTEN == {path.name for path in tmp_path.iterdir()}
    named = re.findall(r"^  (.+)$", done.stderr, re.MULTILINE)
    assert INSTALL + 1 + len(named[:-1]) <= 5
    *commands, tests = (shlex.split(line) for line in named)
    for command in commands:
        done = run(tmp_path, *command)
        assert done.returncode == 0, (command, done.stderr)
    done = run(tmp_path, "pulse-trio", "jobs", "show", "1", "--json", by=forker)
    job = json.loads(done.stdout)
    assert (job["state"], job["result"]) == ("completed", "Hello, Ada"), done.stdout
    done = run(tmp_path, sys.executable, "-m", *tests, "-p", "no:cacheprovider")
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_another_folder_is_created_and_told(tmp_path: Path, forker: Forker) -> None:
    done = init(tmp_path, forker, "a/shop")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "a/shop").iterdir()} == WRITTEN
    assert "  cd a/shop\n" in done.stderr


def test_nothing_is_written_where_one_of_its_files_exists(tmp_path: Path, forker: Forker) -> None:
    (tmp_path / "pytest.ini").symlink_to("nowhere")
    done = init(tmp_path, forker)
    assert done.returncode == 2
    assert "Nothing was written: . already has pytest.ini. Choose another folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["pytest.ini"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, forker: Forker) -> None:
    (tmp_path / "file").write_text("mine")
    done = init(tmp_path, forker, "file/shop")
    assert done.returncode == 2
    assert "file/shop cannot be written: Not a directory" in done.stderr
    assert "Traceback" not in done.stderr
