"""The worker's end of the line to its supervisor: tells sessions and signs of life, and notices that it is alone.

A quarantine process has such a line to the worker that started it, and is told down it what to run (`orders.py`).

The line is a socket pair. The supervisor's death, however it comes, is the end of the stream here. A loop that does not turn
would not notice; so the kernel's alarm clock is wound up again with each turn, and ends a process that has outlived its
leases. While the supervisor lives it is sooner, and says more. Both go by the shortest lease that is held at the time, which
is told before the first job with a shorter one begins: what blocks the loop may be that very job. Whoever uses SIGALRM for
himself has no such clock.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import time
from typing import TYPE_CHECKING

import trio

from .handover import encode_outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ...jobs import Outcome

LINE_VARIABLE = "PULSE_TRIO_SUPERVISOR_LINE"
"""Holds the number of the inherited descriptor, in the environment of a supervised worker."""
SIGN_OF_LIFE = 0.5
"""Seconds between signs of life: each shows that the event loop turns."""
_CHUNK = 65536
_LAST_LINES = 2.0
"""Seconds in which the supervisor must make room for what is said last."""


class Channel:
    """One supervised worker's line."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
        self._unsent = b""
        self._lease = math.inf
        self._order, self.orders = trio.open_memory_channel[bytes](math.inf)
        """Lines that came from the other end."""

    def tell_session(self, session: int) -> None:
        """The worker has a new session: what to rescue when it dies. Sent before the session claims anything."""
        self.tell({"session": session})

    def tell_leases(self, shortest: float, longest: float) -> None:
        """The shortest and the longest lease (seconds) that this worker may ever hold."""
        self.tell({"leases": [shortest, longest]})

    def tell_lease(self, seconds: float) -> None:
        """Jobs with a lease of so many seconds are about to begin."""
        if seconds < self._lease:
            self._hold(seconds)

    def _hold(self, lease: float) -> None:
        if lease != self._lease:
            self._lease = lease
            self.tell({"lease": lease})
        _set_alarm(2 * lease)

    def tell_stuck(self, outcomes: Sequence[Outcome]) -> None:
        """What to report of jobs whose handlers do not end, when this process is gone. Blocks the loop: nothing follows."""
        for outcome in outcomes:
            self._unsent += _encode({"stuck": encode_outcome(outcome)})
        until = time.monotonic() + _LAST_LINES
        room = select.poll()
        room.register(self._stream.socket.fileno(), select.POLLOUT)
        while self._send() and (left := until - time.monotonic()) > 0:
            room.poll(left * 1000)

    def tell(self, message: Mapping[str, object]) -> None:
        """Says one thing, at once if there is room."""
        # Written at once, not by a task: the supervisor must know it whatever happens next.
        self._unsent += _encode(message)
        self._send()

    def _send(self) -> bool:
        """Whether something is left to send, for want of room; the next sign of life tries again."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._stream.socket.fileno(), self._unsent) :]
        except BlockingIOError:
            return True
        except OSError:
            self._unsent = b""  # the supervisor is gone; run() notices
        return False

    async def run(self, on_alone: Callable[[], object], *, lease: Callable[[], float]) -> None:
        """Tells that the loop turns until cancelled; calls `on_alone` when the supervisor is gone. `lease()` is the shortest
        that is held now, in seconds. The process is ended by the kernel when its loop has not turned for twice as long."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._show_life, lease)
                try:
                    await self._take_orders()
                except trio.BrokenResourceError:
                    pass
                on_alone()
        finally:
            _set_alarm(0)

    async def _take_orders(self) -> None:
        """Until the other end is closed."""
        unread = b""
        while chunk := bytes(await self._stream.receive_some(_CHUNK)):
            *lines, unread = (unread + chunk).split(b"\n")
            for line in lines:
                self._order.send_nowait(line)

    async def _show_life(self, lease: Callable[[], float]) -> None:
        while True:
            self._hold(lease())
            # At once or not at all: a supervisor that is stopped must not stop the clock's being wound up. What waits for
            # room is a sign of life as good.
            if not self._send():
                self.tell({"alive": True})
            await trio.sleep(SIGN_OF_LIFE)


def _set_alarm(seconds: float) -> None:
    # Its default action ends the process without a word of Python. Another action is somebody else's alarm.
    if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _encode(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def is_supervised() -> bool:
    """Whether there is a line that nobody has inherited yet."""
    return LINE_VARIABLE in os.environ


def inherited_line() -> Channel | None:
    """The line to the supervisor that started this process; None when there is none."""
    number = os.environ.pop(LINE_VARIABLE, None)
    return Channel(socket.socket(fileno=int(number))) if number is not None else None
