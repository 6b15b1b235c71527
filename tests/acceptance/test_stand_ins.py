"""What stands on PATH for `pulse-trio` and `python` in the tests, and what is forked where a worker starts a process, is as
these are: what a test claims of it, it claims of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio.testing.faults.processes import Processes, is_running
from support.forking import search_path

if TYPE_CHECKING:
    from support.forking import Forker

SAYS_WHAT_IT_IS = """
import os, signal, sys

told = [sys.argv, __name__, os.path.basename(__file__), os.getcwd(), os.environ["WORD"], sys.flags, os.umask(0)]
for stream in (sys.stdin, sys.stdout, sys.stderr):
    told.append(stream and (stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.isatty()))
told.append([signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)])
if sys.stdin:
    told.append(sys.stdin.read())
with open("told", "w") as file:
    file.write(repr(told))
print("said")
print("complained", file=sys.stderr)
if sys.argv[1:]:
    os.kill(os.getpid(), int(sys.argv[1]))
sys.exit(3)
"""


@pytest.mark.parametrize(
    "script",
    [
        "echo typed | python says.py",
        "python says.py >said 2>&1 </dev/null; echo $?; cat said",
        "python says.py >&-",
        "python says.py 2>&- <&-",
        "trap '' INT HUP; umask 027; python says.py <says.py | cat",
        "exec python says.py 15",
        "exec python says.py 9",
        "LC_ALL=C python says.py",
        "pulse-trio --version",
        "pulse-trio --version >&-",
        "pulse-trio no-such-command",
        "echo '1 + 1' | python -",
    ],
)
async def test_it_is_as_the_program_is(script: str, processes: Processes, forker: Forker) -> None:
    (processes.folder / "says.py").write_text(SAYS_WHAT_IT_IS)
    found: list[tuple[object, ...]] = []
    for path in (search_path(), search_path(forker)):
        running = await processes.start("bash", "-c", script, env={"PATH": path, "WORD": "a=b\nc"})
        code = await running.ended()
        told = processes.folder / "told"
        found.append((code, running.stdout, running.stderr, told.read_text() if told.exists() else None))
        told.unlink(missing_ok=True)
    assert found[0] == found[1]


CHILD = """
import os, signal, sys

told = [sys.argv, sys.path[0], os.getcwd(), os.environ["WORD"], os.getpid() == os.getsid(0), os.readlink("/proc/self/fd/0")]
os.write(int(sys.argv[1]), repr(told).encode())
while sys.argv[2:]:
    signal.pause()
sys.exit(3)
"""


@pytest.mark.parametrize("how", [[], ["waits"]])
async def test_a_process_that_is_forked_is_as_one_that_is_started(how: list[str], forker: Forker) -> None:
    found: list[tuple[object, ...]] = []
    for open_process in (trio.lowlevel.open_process, forker.opens_children()):
        reads, writes = os.pipe()
        process = await open_process(
            [sys.executable, "-c", CHILD, str(writes), *how],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "WORD": "a=b"},
            pass_fds=[writes],
            start_new_session=True,
        )
        os.close(writes)
        with trio.fail_after(20):
            async with trio.lowlevel.FdStream(reads) as stream:
                told = (await stream.receive_some()).decode()
                if how:
                    assert (process.returncode, process.poll()) == (None, None)
                    assert is_running(process.pid)
                    process.kill()
                # Its end of the pipe is closed with it.
                assert await stream.receive_some() == b""
            ended = await process.wait()
        assert process.returncode == process.poll() == ended
        process.send_signal(signal.SIGTERM)
        found.append((told.replace(str(writes), "N"), ended))
    assert found[0] == found[1]
    assert found[0][1] == (-signal.SIGKILL if how else 3)


WAITS = """
import os, signal

signal.signal(signal.SIGUSR1, lambda *_: print("heard", flush=True))
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


async def test_a_signal_goes_to_the_fork_and_how_that_ends_is_how_it_ends(processes: Processes, forker: Forker) -> None:
    (processes.folder / "waits.py").write_text(WAITS)
    running = await processes.start("bash", "-c", "exec python waits.py", env={"PATH": search_path(forker)})
    fork = int((await running.line(r"\d+")).group())
    assert fork != running.pid
    running.send(signal.SIGUSR1)
    await running.line("heard")
    running.terminate()
    assert await running.ended() == -signal.SIGTERM
    assert not is_running(fork)


async def test_when_it_is_killed_the_fork_ends(processes: Processes, forker: Forker) -> None:
    (processes.folder / "waits.py").write_text(WAITS)
    running = await processes.start("bash", "-c", "exec python waits.py", env={"PATH": search_path(forker)})
    fork = int((await running.line(r"\d+")).group())
    running.kill()
    with trio.fail_after(20):
        while is_running(fork):  # noqa: ASYNC110 -- another process's end
            await trio.sleep(0.01)
    # Its streams are the fork's too.
    assert await running.ended() == -signal.SIGKILL
