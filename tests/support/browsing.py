"""A real browser on a real `pulse-trio web`, for tests without an event loop."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
"""The shell is the same engine without a window of tabs: a new context costs a quarter of the CPU."""
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TESTS = Path(__file__).parents[1]


@contextmanager
def program(*arguments: str, says: str, env: Mapping[str, str] | None = None) -> Generator[re.Match[str]]:
    """Runs a command while the block runs; yields where its output first matched `says`, and ends it with a SIGTERM."""
    surrounding = {name: value for name, value in os.environ.items() if not name.startswith("PULSE_TRIO")}
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=TESTS,
        env=surrounding | {"PYTHONPATH": str(TESTS), "NO_COLOR": "1"} | dict(env or {}),
    )  # fmt: skip
    said: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if found := re.search(says, line):
                break
        else:
            raise AssertionError("".join(said))
        yield found
    finally:
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextmanager
def served(dsn: str, *options: str, env: Mapping[str, str] | None = None) -> Generator[str]:
    """The address of `pulse-trio web` on a port of its own."""
    with program(
        "-m", "pulse_trio", "web", "--port", "0", "--dsn", dsn, *options, says=r"at (http://\S+?)/ ", env=env
    ) as found:
        yield found[1]


@contextmanager
def working(dsn: str, *options: str) -> Generator[None]:
    """A worker of support/browser_app.py."""
    with program("-m", "pulse_trio", "run", "support.browser_app:handlers", "--dsn", dsn, *options, says="worker"):
        yield
