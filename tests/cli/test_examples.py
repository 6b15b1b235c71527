"""The examples run, on input that a demonstration may meet."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes

    from .conftest import Command

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = 400_000


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A directory of files with everything wrong with them that a file can have."""
    folder = tmp_path / "odd"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "hidden").write_text("no")
    (folder / "plain.txt").write_text("one two\nthree\n")
    (folder / "empty").touch()
    (folder / "words").write_bytes(b"ab cdefg\n" * (WORDS // 2))  # more than a chunk, and words across its edge
    (folder / "zeros").write_bytes(bytes(3_000_000))
    (folder / "esc\x1b[31m[bold]\n").write_text("x")
    (folder / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe")
    with open(os.fsencode(folder) + b"/not\xfftext", "wb") as file:
        file.write(b"raw")
    return folder


async def test_the_demo_does_its_work_on_an_odd_directory(
    processes: Processes, tmp_path_short: Path, odd: Path
) -> None:
    demo = await processes.python(str(EXAMPLES / "demo.py"), str(odd), cwd=tmp_path_short, env={"COLUMNS": "120"})
    assert await demo.ended(within=60) == 0, demo.report()
    assert re.search(r"measure +completed +6 +6 +0", demo.stdout), demo.report()
    assert re.search(r"announce +completed +5 +10 +5", demo.stdout)
    assert re.search(r"doomed +dead +1 +3 +2", demo.stdout)
    assert re.search(rf"words +1.8 MB +{WORDS // 2:,} +{WORDS:,}", demo.stdout)
    assert "RuntimeError: this job fails every time (on purpose)" in demo.stdout
    assert "Left out: 2 links and other things that are not files" in demo.stdout
    assert "\x1b[31m" not in demo.stdout
    assert "hidden" not in demo.stdout
    assert re.search(r"jobs show \d+", demo.stdout)
    # The last line says how to open the page on these jobs, and that works.
    told, address, last = (
        demo.stdout.rstrip().rpartition("\n")[0],
        "http://127.0.0.1:8080/",
        demo.stdout.splitlines()[-1],
    )
    assert told.endswith(address)
    assert last.split()[-1] == "web"
    web = await processes.start(*shlex.split(last), "--port", "0", cwd=tmp_path_short)
    found = await web.line(r"the web page is at (http://\S+)")
    async with httpx.AsyncClient() as client:
        page = await client.get(f"{found[1]}jobs?state=dead")
        twin = await client.get(f"{found[1]}api/jobs?state=dead")
    assert page.status_code == 200
    assert "doomed" in page.text
    assert "doomed" in twin.text
    # It is the last user of the server in that folder, and waits for the server's end: neither writes there any more.
    web.terminate()
    assert await web.ended(within=60) == 0, web.report()


async def test_the_demo_refuses_what_is_no_directory(processes: Processes) -> None:
    demo = await processes.python(str(EXAMPLES / "demo.py"), "nowhere")
    assert await demo.ended() == 2
    assert demo.stderr == "demo: nowhere is not a directory\n"


async def test_the_example_app_runs(processes: Processes, command: Command) -> None:
    (processes.folder / "app.py").write_text((EXAMPLES / "app.py").read_text())
    await command("enqueue", "send_welcome", '{"user_id": 42}', "--app", "app:handlers")
    await command("enqueue", "thumbnail", '{"path": "cat.jpg", "sizes": [1, 2]}', "--app", "app:handlers")
    await command("enqueue", "thumbnail", '{"path": "cat.jpg", "sizes": []}', "--app", "app:handlers")
    await command("enqueue", "checksum", '{"path": "app.py"}', "--app", "app:handlers")
    done = await command("run", "app:handlers", "--burst")
    assert "cat.jpg at 2 pixels" in done.stdout
    dead = (await command("jobs", "list", "--state", "dead")).stdout
    assert "no sizes: trying again would not help" in dead
