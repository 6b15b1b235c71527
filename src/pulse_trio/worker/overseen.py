"""The worker's end of the line to its supervisor: tells sessions and signs of life, and notices that it is alone.

The line is a socket pair. The supervisor's death, however it comes, is the end of the stream here. A loop that does not turn
would not notice; so the kernel's alarm clock is wound up again with each turn, and ends a process that has outlived its
leases. While the supervisor lives it is sooner, and says more. Whoever uses SIGALRM for himself has no such clock.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from typing import TYPE_CHECKING

import trio

from .replacing import encode_outcomes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..jobs import Outcome

LINE_VARIABLE = "PULSE_TRIO_SUPERVISOR_LINE"
"""Holds the number of the inherited descriptor, in the environment of a supervised worker."""
SIGN_OF_LIFE = 0.5
"""Seconds between signs of life: each shows that the event loop turns."""


class Line:
    """One supervised worker's line."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))

    def tell_session(self, session: int) -> None:
        """The worker has a new session: what to rescue when it dies. Sent before the session claims anything."""
        self._tell({"session": session})

    def tell_stuck(self, outcomes: list[Outcome]) -> None:
        """What to report of jobs whose handlers do not end, when this process is gone."""
        self._tell({"stuck": encode_outcomes(outcomes)})

    def _tell(self, message: Mapping[str, object]) -> None:
        # Written at once, not by a task: the supervisor must know it whatever happens next. A line this short fits.
        try:
            os.write(self._stream.socket.fileno(), _encode(message))
        except OSError:
            return  # the supervisor is gone; run() notices

    async def run(self, on_alone: Callable[[], object], *, limit: float) -> None:
        """Tells that the loop turns until cancelled; calls `on_alone` when the supervisor is gone. The process is ended by
        the kernel when its loop has not turned for `limit` seconds."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._show_life, limit)
                try:
                    while await self._stream.receive_some(1024):
                        pass
                except trio.BrokenResourceError:
                    pass
                on_alone()
        finally:
            _set_alarm(0)

    async def _show_life(self, limit: float) -> None:
        while True:
            _set_alarm(limit)
            # At once or not at all: a supervisor that is stopped must not stop the clock's being wound up.
            self._tell({"alive": True})
            await trio.sleep(SIGN_OF_LIFE)


def _set_alarm(seconds: float) -> None:
    # Its default action ends the process without a word of Python. Another action is somebody else's alarm.
    if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _encode(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def inherited_line() -> Line | None:
    """The line to the supervisor that started this process; None when there is none."""
    number = os.environ.pop(LINE_VARIABLE, None)
    return Line(socket.socket(fileno=int(number))) if number is not None else None
