"""What signals do to `run`: the first SIGTERM or SIGINT drains, the second stops at once, SIGUSR1 only ends claiming.

A service manager may send its signal to every process of the service, and the supervisor forwards its own: a worker under a
supervisor then receives one request twice. So there SIGTERM drains however often it comes, and SIGINT, which the supervisor
sends, stops at once.

SIGHUP, which a terminal sends as it closes, counts as the first SIGTERM; shells send it once more. Under `nohup` it is ignored.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

import trio

from .. import logs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator
    from types import FrameType
    from typing import NoReturn, TextIO

    from ..settings import WorkerSettings

RELEASED = 3
"""The exit code when jobs were released unfinished."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
HELD_UP = (signal.SIGTERM, signal.SIGINT)
"""Signals that wait while a process replaces itself: by default they end it, and its successor does not listen to them yet."""
_LAST_REPORTS = 4.0
"""Seconds for the reports of jobs that were cancelled, after their clean-up time, and to find handlers that do not end."""


class Workforce(Protocol):
    """A worker, or a supervisor of several."""

    @property
    def running(self) -> int: ...

    def quiet(self) -> None: ...

    def stop(self) -> None: ...

    def stop_now(self) -> None: ...


class Stopping:
    """Forwards signals to the worker or supervisor; before one exists, they cancel `starting`, or are remembered.

    `supervised`: a supervisor forwards signals to this process. `quiet`: an earlier process received SIGUSR1.

    Python cannot end a thread, and a handler that shields itself from cancellation cannot be stopped: the process then exits
    without them. Their jobs are released when it has gone, or rescued when their leases run out.
    """

    def __init__(self, settings: WorkerSettings, *, supervised: bool = False, quiet: bool = False) -> None:
        self.starting = trio.CancelScope()
        self.signals = 0
        """0: none. 1: drain. More: stop at once."""
        self.quiet = quiet
        self.code = 0
        """The exit code, once everything has ended."""
        self._supervised = supervised
        self._settings = settings
        self._workforce: Workforce | None = None
        self._hurry = trio.Event()
        self._early: list[int] = []
        self._come = 0
        """How many SIGTERM and SIGINT have come, heard or not."""

    def of(self, workforce: Workforce) -> None:
        """Registers the worker or supervisor to stop."""
        self._workforce = workforce
        if self.quiet:
            workforce.quiet()

    # While signals do not have their default action, which ends the process

    def expect(self) -> None:
        """Before the user's module is imported, which may take long: SIGUSR1 is remembered from now on."""
        signal.signal(signal.SIGUSR1, self._remember)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._hang_up)
        # Python restores the default actions before it tears down the modules. Registered before the module's own functions,
        # this is called after them.
        atexit.register(_ignore_signals)

    @contextmanager
    def open_signals(self) -> Generator[AsyncIterator[int]]:
        """The signals, for `obey`. After the block has ended normally and set `code`, a further signal ends the process with
        that code: at once if it means to stop at once, otherwise orderly."""
        # Installed before and after Trio's handlers: without them a signal could hit its default action in between.
        before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        try:
            with trio.open_signal_receiver(*SIGNALS) as signals:
                for number in SIGNALS:
                    heard = signal.getsignal(number)
                    assert callable(heard)  # noqa: S101 -- Trio has just set it
                    signal.signal(number, partial(self._count, heard))
                while self._early:
                    signal.raise_signal(self._early.pop(0))
                yield signals
        except BaseException:
            for number, handler in before.items():
                signal.signal(number, handler)
            raise
        for number in SIGNALS:
            signal.signal(number, self._leave)

    @property
    def told(self) -> bool:
        """Whether a SIGTERM or SIGINT has come, one that `obey` has not heard yet, too: the loop may have no turn for it."""
        return self._come > 0 or self.signals > 0

    def _hang_up(self, _: int, __: object) -> None:
        if not self.told:
            signal.raise_signal(signal.SIGTERM)

    def _remember(self, number: int, _: object) -> None:
        self._early.append(number)

    def _count(self, then: Callable[[int, FrameType | None], object], number: int, frame: FrameType | None) -> None:
        self._come += number != signal.SIGUSR1
        then(number, frame)

    def _leave(self, number: int, _: object) -> None:
        if number != signal.SIGUSR1 and self._is_news(number) and self.signals > 1:
            leave_at_once(self.code)

    def _is_news(self, number: int) -> bool:
        """Counts a SIGTERM or SIGINT; returns whether it asks for more than the signals before."""
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
        logs.logger.info("SIGUSR1: no more claims; running jobs go on")
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
            once_more = "" if self._supervised else "; repeat to stop at once"
            logs.logger.info("%s: draining within %g s%s", name, self._settings.grace, once_more)
            self._workforce.stop()
        else:
            logs.logger.warning("%s%s: stopping at once", name, "" if self._supervised else " again")
            self._workforce.stop_now()

    async def _leave_what_does_not_end(self) -> None:
        with trio.move_on_after(self._settings.grace):
            await self._hurry.wait()
        await trio.sleep(self._settings.cleanup + _LAST_REPORTS)
        if self._workforce is not None and self._workforce.running:
            logs.logger.error(
                "%d job(s) did not end when cancelled (a thread, or a shield); exiting without them: they are rescued when "
                "their leases run out",
                self._workforce.running,
            )
            leave_at_once(RELEASED)


def keep_signals() -> int:
    """From now on no signal is lost when this process executes another program in its place: SIGTERM and SIGINT wait, blocked,
    and what another thread catches meanwhile, or this one has just caught, is written to a pipe. Returns its reading end."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_UP)
    return reading


def _ignore_signals() -> None:
    for number in (*SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def leave_at_once(code: int) -> NoReturn:
    """Ends the process without waiting for its threads."""
    try:
        flush()
    finally:
        os._exit(code)


def flush() -> None:
    """Flushes the output before the process exits, if it has a reader."""
    logging.shutdown()
    # A closed pipe, a full disk, or a write that a signal interrupted.
    stdout: TextIO | None = sys.stdout
    with suppress(OSError, ValueError, RuntimeError):
        if stdout is not None:
            stdout.flush()
