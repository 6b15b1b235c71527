"""The worker's end of the line to its supervisor: sends sessions and signs of life, and notices the supervisor's death.

A quarantine process has such a line to the worker that started it, and receives its orders over it (`orders.py`).

The line is a socket pair. When the supervisor dies, in whatever way, the stream ends here. A loop that does not turn would not
notice; so each turn sets the kernel's alarm clock again, which ends a process that has outlived its leases. While the
supervisor lives it acts sooner, and reports more. Both go by the shortest lease that is held at the time. The worker sends that
before the first job with a shorter lease begins, because that very job may block the loop. A program that uses SIGALRM itself
has no such clock.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

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
"""Seconds that the supervisor has to make room for the last messages."""


class Channel:
    """One supervised worker's line."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
        self._unsent = b""
        self._lease = math.inf
        self._claims = False
        """Whether a session has been told, so that there may be jobs."""
        self._order, self.orders = trio.open_memory_channel[bytes](math.inf)
        """Lines that the other end sent."""

    def tell_session(self, session: int) -> None:
        """The worker has a new session: what to rescue when the worker dies. Sent before the session claims anything."""
        self.tell({"session": session})
        if not self._claims:
            self._claims = True
            if self._lease < math.inf:
                _set_alarm(2 * self._lease)

    def tell_leases(self, shortest: float, longest: float) -> None:
        """The shortest and the longest lease (seconds) that this worker may ever hold."""
        self.tell({"leases": [shortest, longest]})

    def tell_lease(self, seconds: float) -> None:
        """Jobs with a lease of `seconds` are about to begin."""
        if seconds < self._lease:
            self._hold(seconds)

    def _hold(self, lease: float) -> None:
        if lease != self._lease:
            self._lease = lease
            self.tell({"lease": lease})
        # Before its first session it holds no job, and what opens its resources may block for long.
        if self._claims:
            _set_alarm(2 * lease)

    def tell_stuck(self, outcomes: Sequence[Outcome]) -> None:
        """Sends the outcomes to report, after this process is gone, of jobs whose handlers do not end. Blocks the loop: the
        process does nothing more."""
        for outcome in outcomes:
            self._unsent += _encode({"stuck": encode_outcome(outcome)})
        until = time.monotonic() + _LAST_LINES
        room = select.poll()
        room.register(self._stream.socket.fileno(), select.POLLOUT)
        while self._send() and (left := until - time.monotonic()) > 0:
            room.poll(left * 1000)

    def tell_figures(self, figures: Mapping[str, Any]) -> None:
        """Sends what the supervisor serves at `http`; not while older messages wait for room, for newer figures will follow."""
        if not self._send():
            self.tell({"figures": figures})

    def tell(self, message: Mapping[str, object]) -> None:
        """Sends one message, at once if there is room."""
        # Written at once, not by a task: the supervisor must know it whatever happens next.
        self._unsent += _encode(message)
        self._send()

    def _send(self) -> bool:
        """Returns whether some bytes had no room; the next sign of life sends them."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._stream.socket.fileno(), self._unsent) :]
        except BlockingIOError:
            return True
        except OSError:
            self._unsent = b""  # the supervisor is gone; run() notices
        return False

    async def run(self, on_alone: Callable[[], object], *, lease: Callable[[], float]) -> None:
        """Sends signs of life until cancelled; calls `on_alone` when the supervisor is gone. `lease()` is the shortest that is
        held now, in seconds. The kernel ends the process when its loop has not turned for twice as long."""
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
        """Takes orders until the other end is closed."""
        unread = b""
        while chunk := bytes(await self._stream.receive_some(_CHUNK)):
            *lines, unread = (unread + chunk).split(b"\n")
            for line in lines:
                self._order.send_nowait(line)

    async def _show_life(self, lease: Callable[[], float]) -> None:
        while True:
            self._hold(lease())
            # At once or not at all: a supervisor that is stopped must not keep the alarm clock from being set again. Bytes that
            # wait for room are a sign of life too.
            if not self._send():
                self.tell({"alive": True})
            await trio.sleep(SIGN_OF_LIFE)


def _set_alarm(seconds: float) -> None:
    # Its default action ends the process without running any Python. Another action means that other code uses the alarm.
    if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _encode(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def is_supervised() -> bool:
    """Whether there is a line that no other code has taken over yet."""
    return LINE_VARIABLE in os.environ


def inherited_line() -> Channel | None:
    """The line to the supervisor that started this process; None when there is none."""
    number = os.environ.pop(LINE_VARIABLE, None)
    return Channel(socket.socket(fileno=int(number))) if number is not None else None
