"""What the signals ask of `run`: the first SIGTERM or SIGINT drains, the second stops now, SIGUSR1 only ends claiming."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Protocol

import trio

from . import logs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import NoReturn

    from ..settings import WorkerSettings

RELEASED = 3
"""The exit code when jobs were released unfinished."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_LAST_REPORTS = 2.0
"""Seconds for the reports of jobs that were cancelled, after their clean-up time."""


class Workforce(Protocol):
    """A worker, or a supervisor of several."""

    @property
    def running(self) -> int: ...

    def quiet(self) -> None: ...

    def stop(self) -> None: ...

    def stop_now(self) -> None: ...


class Stopping:
    """Passes the signals on to whatever works; before there is anything, they cancel `starting`.

    Python cannot end a thread, nor can a handler that shields itself from cancellation be made to leave: the process
    then goes without them, and their leases run out.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.starting = trio.CancelScope()
        self.signals = 0
        self._settings = settings
        self._workforce: Workforce | None = None
        self._hurry = trio.Event()

    def of(self, workforce: Workforce) -> None:
        """From now on there is something to stop."""
        self._workforce = workforce

    async def obey(self, signals: AsyncIterator[int]) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            async for number in signals:
                if number == signal.SIGUSR1:
                    self._be_quiet()
                    continue
                self.signals += 1
                if self.signals == 1:
                    nursery.start_soon(self._leave_what_does_not_end)
                self._stop(signal.Signals(number).name)

    def _be_quiet(self) -> None:
        if self._workforce is not None:
            logs.logger.info("SIGUSR1: no more claims; what runs goes on")
            self._workforce.quiet()

    def _stop(self, name: str) -> None:
        self.starting.cancel()
        if self._workforce is None:
            return
        if self.signals == 1:
            logs.logger.info("%s: draining within %g s; once more to stop now", name, self._settings.grace)
            self._workforce.stop()
        else:
            logs.logger.warning("%s again: stopping now", name)
            self._workforce.stop_now()
            self._hurry.set()

    async def _leave_what_does_not_end(self) -> None:
        with trio.move_on_after(self._settings.grace):
            await self._hurry.wait()
        await trio.sleep(self._settings.cleanup + _LAST_REPORTS)
        if self._workforce is not None and self._workforce.running:
            logs.logger.error(
                "%d job(s) did not end when cancelled (a thread, or a shield); leaving without them: "
                "they are rescued when their leases run out",
                self._workforce.running,
            )
            leave_at_once(RELEASED)


def leave_at_once(code: int) -> NoReturn:
    """Ends the process without waiting for its threads."""
    flush()
    os._exit(code)


def flush() -> None:
    """What was said is written before the process goes."""
    logging.shutdown()
    sys.stdout.flush()
