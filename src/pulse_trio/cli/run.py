"""`pulse-trio run`: a worker from the user's module, stopped by signals.

The first SIGTERM or SIGINT drains within the grace, the second stops at once, SIGUSR1 only ends claiming. Python cannot
end a thread, nor can a handler that shields itself from cancellation be made to leave: the process then goes without
them, and their leases run out.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import click
import trio

from ..postgres import wait_for_database
from ..settings import load_settings
from ..worker import Worker
from . import logs
from .database import choose_database, open_database_async
from .loading import load_handlers
from .options import dsn_option, setting_options
from .text import headline

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ..errors import DatabaseUnavailable
    from ..handlers import Handlers
    from ..settings import WorkerSettings
    from ..worker import WorkerReport
    from .database import Choice

RELEASED = 3
"""The exit code when jobs were released unfinished."""
_LAST_REPORTS = 2.0
"""Seconds for the reports of jobs that were cancelled, after their clean-up time."""


@click.command()
@click.argument("target", metavar="APP:HANDLERS")
@setting_options()
@click.option("--burst", is_flag=True, envvar="PULSE_TRIO_BURST", help="Stop when nothing is due and nothing runs.")
@dsn_option
@click.option("--verbose", is_flag=True, envvar="PULSE_TRIO_VERBOSE", help="Log every job's start and end too.")
@click.option("--json", "as_json", is_flag=True, envvar="PULSE_TRIO_JSON", help="Log one JSON object a line.")
def run(target: str, dsn: str | None, burst: bool, verbose: bool, as_json: bool, **given: Any) -> int:
    """Run a worker for the handlers of a module.

    APP:HANDLERS is a module in the current folder and the name of its Handlers object, as in app:handlers.

    The first SIGTERM or SIGINT (Ctrl-C) stops claiming and lets running jobs end within --grace; the second stops now.
    SIGUSR1 stops claiming and keeps running what runs.

    Every setting can also stand in the environment, and in pulse-trio.toml or [tool.pulse-trio] of pyproject.toml. The
    command line comes first, then the environment, then the file.

    Exit codes: 0 drained, 1 an error (the database's fault), 2 wrong usage, 3 the grace passed and jobs were released.
    """
    settings = load_settings(given)
    choice = choose_database(dsn)
    handlers = load_handlers(target)
    logs.set_up(as_json=as_json, verbose=verbose)
    return trio.run(Deployment(handlers, settings, burst=burst, every_job=verbose).run, choice)


class Deployment:
    """One run of a worker in this process, from the first connection to the exit code."""

    def __init__(self, handlers: Handlers, settings: WorkerSettings, *, burst: bool, every_job: bool) -> None:
        self._handlers = handlers
        self._settings = settings
        self._burst = burst
        self._instrument = logs.LogInstrument(every_job=every_job)
        self._starting = trio.CancelScope()
        self._worker: Worker | None = None
        self._signals = 0
        self._hurry = trio.Event()
        self._said: str | None = None

    async def run(self, choice: Choice) -> int:
        """Waits for the database, works, and returns the exit code."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._obey, signals, nursery)
                async with open_database_async(choice, self._settings.schema, logs.logger.info) as dsn:
                    code = await self._work(dsn)
                nursery.cancel_scope.cancel()
        return code

    async def _work(self, dsn: str) -> int:
        with self._starting:
            await wait_for_database(dsn, self._settings.connect_timeout, self._say_waiting)
        if self._signals:
            logs.logger.info("stopped before the worker had started")
            return 0
        self._worker = Worker(
            self._handlers, dsn, settings=self._settings, burst=self._burst, instruments=[self._instrument]
        )
        report = await self._worker.run()
        logs.logger.info("%s", summary(report))
        return RELEASED if report.released or self._signals > 1 else 0

    def _say_waiting(self, error: DatabaseUnavailable) -> None:
        reason = headline(str(error))
        if reason != self._said:
            logs.logger.warning("waiting for the database, up to %g s: %s", self._settings.connect_timeout, reason)
        self._said = reason

    # Signals

    async def _obey(self, signals: AsyncIterator[int], nursery: trio.Nursery) -> None:
        async for number in signals:
            if number == signal.SIGUSR1:
                self._be_quiet()
                continue
            self._signals += 1
            if self._signals == 1:
                nursery.start_soon(self._leave_what_does_not_end)
            self._stop(signal.Signals(number).name)

    def _be_quiet(self) -> None:
        if self._worker is not None:
            logs.logger.info("SIGUSR1: no more claims; %d job(s) running go on", self._worker.running)
            self._worker.quiet()

    def _stop(self, name: str) -> None:
        self._starting.cancel()
        if self._worker is None:
            return
        if self._signals == 1:
            logs.logger.info(
                "%s: draining %d job(s) within %g s; once more to stop now",
                name,
                self._worker.running,
                self._settings.grace,
            )
            self._worker.stop()
        else:
            logs.logger.warning("%s again: stopping now", name)
            self._worker.stop_now()
            self._hurry.set()

    async def _leave_what_does_not_end(self) -> None:
        with trio.move_on_after(self._settings.grace):
            await self._hurry.wait()
        await trio.sleep(self._settings.cleanup + _LAST_REPORTS)
        if self._worker is not None and self._worker.running:
            logs.logger.error(
                "%d job(s) did not end when cancelled (a thread, or a shield); leaving without them: "
                "they are rescued when their leases run out",
                self._worker.running,
            )
            leave_at_once()


def leave_at_once() -> None:
    """Ends the process without waiting for its threads."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(RELEASED)


def summary(report: WorkerReport) -> str:
    """What a worker did in its life."""
    ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.ended.items()))
    return f"jobs: {ended or 'none'}"
