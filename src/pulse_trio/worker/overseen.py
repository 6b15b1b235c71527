"""The worker's end of the line to its supervisor: tells sessions and signs of life, and notices that it is alone.

The line is a socket pair. The supervisor's death, however it comes, is the end of the stream here.
"""

from __future__ import annotations

import json
import os
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

    async def run(self, on_alone: Callable[[], object]) -> None:
        """Tells that the loop turns until cancelled; calls `on_alone` when the supervisor is gone."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._show_life)
            try:
                while await self._stream.receive_some(1024):
                    pass
            except trio.BrokenResourceError:
                pass
            nursery.cancel_scope.cancel()
        on_alone()

    async def _show_life(self) -> None:
        while True:
            try:
                await self._stream.send_all(_encode({"alive": True}))
            except trio.BrokenResourceError:
                return  # run() notices
            await trio.sleep(SIGN_OF_LIFE)


def _encode(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def inherited_line() -> Line | None:
    """The line to the supervisor that started this process; None when there is none."""
    number = os.environ.pop(LINE_VARIABLE, None)
    return Line(socket.socket(fileno=int(number))) if number is not None else None
