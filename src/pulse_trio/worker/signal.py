"""A signal that one task waits for and any task may give; giving it twice equals giving it once."""

from __future__ import annotations

import trio


class Signal:
    """Level-triggered and self-resetting: a signal given while no task waits is not lost, and one wait consumes it."""

    __slots__ = ("_event", "_given")

    def __init__(self) -> None:
        self._given = False
        self._event: trio.Event | None = None

    def give(self) -> None:
        """Wakes the waiter, now or when it next waits."""
        self._given = True
        if self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        """Returns at once if the signal was given since the last wait, else when it is given."""
        if not self._given:
            self._event = trio.Event()
            try:
                await self._event.wait()
            finally:
                self._event = None
        else:
            await trio.lowlevel.checkpoint()
        self._given = False
