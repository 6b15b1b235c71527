"""The how-to page is one program, and it runs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import trio

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "postgresql-from-trio.md"


async def test_the_pages_blocks_run_as_one_program(dsn: str, tmp_path: Path) -> None:
    program = tmp_path / "page.py"
    program.write_text("".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)))
    with trio.fail_after(30):
        await trio.run_process([sys.executable, "-W", "error", program], env={**os.environ, "DATABASE_URL": dsn})
