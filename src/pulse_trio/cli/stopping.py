"""What the signals ask of `run`: the first SIGTERM or SIGINT drains, the second stops now, SIGUSR1 only ends claiming.

A service manager may send its signal to every process of the service, and the supervisor passes its own on: a worker under
one gets two that mean one. So there SIGTERM drains however often it comes, and SIGINT, which the supervisor sends, stops now.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

import trio

from .. import logs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator
    from typing import NoReturn, TextIO

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
    """Passes the signals on to whatever works; before there is anything, they cancel `starting`, or are remembered.

    `supervised`: another process of ours passes signals on to this one. `quiet`: SIGUSR1 came to a process before this one.

    Python cannot end a thread, nor can a handler that shields itself from cancellation be made to leave: the process
    then goes without them, and their leases run out.
    """

    def __init__(self, settings: WorkerSettings, *, supervised: bool = False, quiet: bool = False) -> None:
        self.starting = trio.CancelScope()
        self.signals = 0
        """0: none. 1: it drains. More: it stops now."""
        self.quiet = quiet
        self.code = 0
        """The exit code, once all that works has ended."""
        self._supervised = supervised
        self._settings = settings
        self._workforce: Workforce | None = None
        self._hurry = trio.Event()
        self._early: list[int] = []

    def of(self, workforce: Workforce) -> None:
        """From now on there is something to stop."""
        self._workforce = workforce
        if self.quiet:
            workforce.quiet()

    # When a signal has not its own meaning, which is the process's end

    def expect(self) -> None:
        """Before the user's module is imported, which may take long: SIGUSR1 is remembered from now on."""
        signal.signal(signal.SIGUSR1, self._remember)
        # Python gives signals their own meaning back before it takes the modules apart. Registered before the module's own
        # functions, this is called after them.
        atexit.register(_ignore_signals)

    @contextmanager
    def open_signals(self) -> Generator[AsyncIterator[int]]:
        """The signals, for `obey`. After a block that has ended well and set `code`, another one ends the process with that
        code: at once if it means to stop now, in good time if it does not."""
        # On both sides of Trio's handlers: without them a signal would find its own meaning there for a moment.
        before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        try:
            with trio.open_signal_receiver(*SIGNALS) as signals:
                while self._early:
                    signal.raise_signal(self._early.pop(0))
                yield signals
        except BaseException:
            for number, handler in before.items():
                signal.signal(number, handler)
            raise
        for number in SIGNALS:
            signal.signal(number, self._leave)

    def _remember(self, number: int, _: object) -> None:
        self._early.append(number)

    def _leave(self, number: int, _: object) -> None:
        if number != signal.SIGUSR1 and self._is_news(number) and self.signals > 1:
            leave_at_once(self.code)

    def _is_news(self, number: int) -> bool:
        """Counts a SIGTERM or SIGINT; whether it asks for more than was asked before."""
        if not self._supervised:
            self.signals += 1
            return True
        before = self.signals
        self.signals = max(before, 1) if number == signal.SIGTERM else 2
        return self.signals > before or number == signal.SIGINT

    # Meanwhile

    async def obey(self, signals: AsyncIterator[int]) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            async for number in signals:
                if number == signal.SIGUSR1:
                    self._be_quiet()
                    continue
                first = not self.signals
                if self._is_news(number):
                    self._stop(signal.Signals(number).name)
                if first:
                    nursery.start_soon(self._leave_what_does_not_end)

    def _be_quiet(self) -> None:
        logs.logger.info("SIGUSR1: no more claims; what runs goes on")
        self.quiet = True
        if self._workforce is not None:
            self._workforce.quiet()

    def _stop(self, name: str) -> None:
        self.starting.cancel()
        if self.signals > 1:
            self._hurry.set()
        if self._workforce is None:
            return
        if self.signals == 1:
            once_more = "" if self._supervised else "; once more to stop now"
            logs.logger.info("%s: draining within %g s%s", name, self._settings.grace, once_more)
            self._workforce.stop()
        else:
            logs.logger.warning("%s%s: stopping now", name, "" if self._supervised else " again")
            self._workforce.stop_now()

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


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def leave_at_once(code: int) -> NoReturn:
    """Ends the process without waiting for its threads."""
    try:
        flush()
    finally:
        os._exit(code)


def flush() -> None:
    """What was said is written before the process goes, if anybody reads it."""
    logging.shutdown()
    # A closed pipe, a full disk; a write that a signal has interrupted.
    stdout: TextIO | None = sys.stdout
    with suppress(OSError, ValueError, RuntimeError):
        if stdout is not None:
            stdout.flush()
