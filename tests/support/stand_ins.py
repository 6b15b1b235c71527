"""The other side of the programs that stand on PATH in the place of others (stand_in.py): they are written into a folder, and
the process that forks takes their requests."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping

SCRIPT = """#!{python} -IS
import sys

sys.path.insert(0, {support!r})
from stand_in import main

program, address = "pulse-trio", {address!r}
if {name!r} == "python":
    if sys.argv[1:] and sys.argv[1].endswith(".py"):
        program = "python"
    else:
        address = None
main({real!r}, {start!r}, address, program)
"""
STREAMS = range(3)
MOST = 16
"""Descriptors that go with a request."""


def write_programs(folder: Path, address: Path, start: Mapping[str, str]) -> None:
    """Writes `pulse-trio` and `python` into a folder. The latter has forks run a script; with other arguments it is Python."""
    for name in ("pulse-trio", "python"):
        real = sys.executable if name == "python" else shutil.which(name, path=str(Path(sys.executable).parent))
        script = SCRIPT.format(
            python=sys.executable, support=str(Path(__file__).parent), name=name, address=str(address),
            real=real, start=dict(start),
        )  # fmt: skip
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)


# In the process that forks, and in its forks


class Asked(NamedTuple):
    """What a stand-in asks for."""

    bound: bool
    """Whether the fork ends with who asks."""
    folder: str
    umask: int
    ignored: list[int]
    """Signals."""
    descriptors: dict[int, int]
    """Those of the fork, and what each is here."""
    command: list[str]
    environment: dict[str, str]


def take(line: socket.socket) -> Asked:
    """Reads a request. Raises `OSError` or `ValueError` where it has gone."""
    length, ends, _, _ = socket.recv_fds(line, 4, MOST)
    if len(length) < 4:
        raise ConnectionResetError
    data = bytearray()
    while missing := int.from_bytes(length, "big") - len(data):
        if not (chunk := line.recv(missing)):
            raise ConnectionResetError
        data += chunk
    bound, folder, umask, ignored, numbers, count, *words = (os.fsdecode(word) for word in bytes(data).split(b"\0"))
    command, variables = words[: int(count)], words[int(count) :]
    return Asked(
        bound == "1",
        folder,
        int(umask),
        [int(number) for number in ignored.split(",") if number],
        dict(zip([int(number) for number in numbers.split(",") if number], ends, strict=True)),
        command,
        dict(variable.split("=", 1) for variable in variables),
    )


def stand_behind(pid: int, line: socket.socket, *, bound: bool) -> NoReturn:
    """Passes signals on to a fork, and tells who has asked of its number and its end."""

    def hear() -> None:
        try:
            while told := line.recv(1):
                os.kill(pid, told[0])
        except ConnectionResetError:
            pass  # what it was told in its last moment it has not read
        if bound:
            os.kill(pid, signal.SIGKILL)

    tell(line, pid)
    threading.Thread(target=hear, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    tell(line, code)
    os._exit(0)


def tell(line: socket.socket, number: int) -> None:
    try:
        line.sendall(number.to_bytes(4, "big", signed=True))
    except OSError:
        pass  # Who has asked is gone.


def become_asked(asked: Asked) -> None:
    """What a process has that is started by who asks, this process has from now on."""
    os.setsid()
    for number in asked.ignored:
        signal.signal(number, signal.SIG_IGN)
    os.umask(asked.umask)
    os.chdir(asked.folder)
    # Out of the way: the number of one may be what another is to have.
    free = max([*asked.descriptors, MOST]) + 1
    moved = {number: fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, free) for number, end in asked.descriptors.items()}
    for end in asked.descriptors.values():
        os.close(end)
    for number in STREAMS:
        os.close(number)
    for number, end in moved.items():
        os.dup2(end, number)
        os.close(end)
    sys.stdin = sys.__stdin__ = opened(0, sys.stdin)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = opened(1, sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = opened(2, sys.stderr)  # type: ignore[misc]


def opened(number: int, like: object) -> io.TextIOWrapper | None:
    """A standard stream as Python makes it at its start, which looks at what it is: None where it is closed."""
    try:
        os.fstat(number)
    except OSError:
        return None
    assert isinstance(like, io.TextIOWrapper)
    written, unbuffered = number > 0, bool(os.environ.get("PYTHONUNBUFFERED"))
    raw = open(number, "wb" if written else "rb", 0 if written and unbuffered else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        raw,
        like.encoding,
        like.errors,
        newline="\n",
        line_buffering=not unbuffered and (number == 2 or os.isatty(number)),
        write_through=unbuffered,
    )
