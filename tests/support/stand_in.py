"""Stands on PATH in the place of a program, and has a fork (forking.py) do the program's work: with this process's arguments,
folder, environment and streams. It passes signals on and ends as the fork does; when it is killed, the fork is too.

It starts in ten milliseconds, because it imports next to nothing, and of `socket` and `signal` only the parts in C: the rest of
these two costs as much as all else. Where a variable means something to Python's own start, or no forks can be had, it becomes
the program.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")
OF_START = ("PYTHON", "LD_", "LC_", "LANG", "TZ")
"""How the names of variables begin that mean something to Python's own start, or to the C library's: a fork has had them
already."""


def open_streams() -> list[int]:
    """Those of the three that are not closed."""
    found: list[int] = []
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            continue
        found.append(number)
    return found


def main(real: str, start: dict[str, str], address: str | None, program: str) -> None:
    """Ends as the program does.

    Args:
        real: the program itself.
        start: the variables `OF_START` with which the forks' Python has started.
        address: the socket of what forks; None: there are no forks for these arguments.
        program: which of its programs that is to run.
    """
    streams = open_streams()
    if address is not None and start == {n: v for n, v in os.environ.items() if n.startswith(OF_START)}:
        try:
            code = stand_in(address, program, streams)
        except (ImportError, AttributeError, OSError):
            pass  # Nothing was begun.
        else:
            end(code)
    os.execv(real, [real, *sys.argv[1:]])  # noqa: S606 -- the program itself


def stand_in(address: str, program: str, streams: list[int]) -> int:
    """Returns the exit code (-N: killed by signal N)."""
    import _signal  # pyright: ignore[reportMissingImports] -- no stubs
    import _socket

    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    line.connect(address)
    asked = request([program, *sys.argv[1:]], os.environ, os.getcwd(), streams, bound=True)
    send_descriptors(line, len(asked), streams)
    for number in (getattr(_signal, name) for name in PASSED_ON):
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, lambda number, _: tell(line, number))
    line.sendall(asked)
    if len(line.recv(4)) == 4 and len(told := line.recv(4)) == 4:
        return int.from_bytes(told, "big", signed=True)
    os._exit(70)  # what forks has gone


def request(
    command: Sequence[str], environment: Mapping[str, str], folder: str, numbers: list[int], *, bound: bool
) -> bytes:
    """What is asked of the process that forks. `numbers`: of the descriptors that the fork is to have. `bound`: whether the
    fork ends with who asks. The answers are the fork's process number and how it ended, of 4 bytes each."""
    import _signal  # pyright: ignore[reportMissingImports] -- as above

    signals = [getattr(_signal, name) for name in PASSED_ON]
    ignored = [number for number in signals if _signal.getsignal(number) == _signal.SIG_IGN]
    umask = os.umask(0)
    os.umask(umask)
    words = [
        int(bound), folder, umask, ",".join(map(str, ignored)), ",".join(map(str, numbers)), len(command), *command,
        *(f"{name}={value}" for name, value in environment.items()),
    ]  # fmt: skip
    return b"\0".join(os.fsencode(str(word)) for word in words)


def send_descriptors(line: Any, length: int, descriptors: list[int]) -> None:
    """Begins a request of so many bytes."""
    import _socket

    packed = b"".join(number.to_bytes(4, sys.byteorder) for number in descriptors)
    with_them = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)] if descriptors else []
    line.sendmsg([length.to_bytes(4, "big")], with_them)


def tell(line: Any, number: int) -> None:
    try:
        line.send(bytes([number]))
    except OSError:
        pass  # It has just ended.


def end(code: int) -> None:
    if code >= 0:
        os._exit(code)
    import _signal  # pyright: ignore[reportMissingImports] -- as above

    if -code not in (_signal.SIGKILL, _signal.SIGSTOP):
        _signal.signal(-code, _signal.SIG_DFL)
    os.kill(os.getpid(), -code)
