"""`pulse-trio run`: a worker from the user's module, or a supervisor of several, until a signal stops it."""

from __future__ import annotations

import math
import os
import signal
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import trio

from .. import logs
from ..handlers import check_queue
from ..postgres import wait_for_database
from ..settings import file_instruments, load_settings, names_in
from ..text import count_of, headline
from ..worker import Worker, inherit_crash_dump, inherited_line, is_supervised
from ..worker.processes.handover import REPLACE_ME, Address, inherited_quiet, leave_to_successor
from ..worker.processes.launch import INSTRUMENT_VARIABLE, KEEP_VARIABLE, quarantine_environment
from ..worker.processes.orders import Orders, inherited_session
from ..worker.processes.spawning import Launch
from .collector import settle_collector
from .database import choose_database, open_database_async
from .faults import describe, exit_code_of
from .fleet import Fleet
from .loading import ask_instruments, check_target, load_handlers, load_instruments
from .options import dsn_option, setting_options
from .output import complain
from .predecessor import Reported, report_for_predecessor
from .reload import RELOAD_VARIABLE, check_reload, run_reloading
from .stopping import RELEASED, SIGNALS, Stopping, flush, keep_signals, leave_at_once
from .streams import accept_lost_output

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

    from ..errors import DatabaseUnavailable
    from ..handlers import Handlers
    from ..jobs import Outcome
    from ..observe import Instrument
    from ..settings import WorkerSettings
    from ..worker import WorkerReport
    from ..worker.processes.channel import Channel
    from .database import Choice


@click.command()
@click.argument("target", metavar="APP:HANDLERS")
@setting_options()
@click.option("--burst", is_flag=True, envvar="PULSE_TRIO_BURST", help="Stop when nothing is due and nothing runs.")
@dsn_option
@click.option("--verbose", is_flag=True, envvar="PULSE_TRIO_VERBOSE", help="Log every job's start and end too.")
@click.option("--json", "as_json", is_flag=True, envvar="PULSE_TRIO_JSON", help="Log one JSON object a line.")
@click.option(
    "--instrument",
    "instruments",
    metavar="MODULE:OBJECT",
    multiple=True,
    envvar=INSTRUMENT_VARIABLE,
    help="Also send the events to this instrument (or to what this class or function returns). May be repeated.",
)
@click.option(
    "--reload",
    is_flag=True,
    envvar=RELOAD_VARIABLE,
    help="For development: start the worker anew when a .py file changes.",
)
def run(
    target: str,
    dsn: str | None,
    burst: bool,
    verbose: bool,
    as_json: bool,
    instruments: tuple[str, ...],
    reload: bool,
    **given: Any,
) -> int:
    """Run a worker for the handlers of a module.

    APP:HANDLERS is a module in the current folder and the name of its Handlers object, as in app:handlers.

    The first SIGTERM or SIGINT (Ctrl-C) stops claiming and lets running jobs end within --grace; the second stops at once.
    SIGUSR1 stops claiming and lets running jobs go on. SIGHUP (the terminal closes) counts as the first SIGTERM.

    With --processes 1 this process is the worker. With more it supervises that many workers: it replaces one that dies, and
    hands its jobs back at once.

    Every setting can also be given in the environment, and in pulse-trio.toml or [tool.pulse-trio] of pyproject.toml. The
    command line takes precedence, then the environment, then the file.

    Exit codes: 0 drained, 1 an error (the database's fault, which may not have heard how jobs ended), 2 wrong usage, 3 the
    grace period passed and jobs were released.
    """
    accept_lost_output()
    reported = report_for_predecessor()
    if reported.ends:
        logs.set_up(as_json=as_json, verbose=verbose)
        return _ended_for_predecessor(reported)
    settings = load_settings(given)
    if reported.succeeds:
        # It is no start: as the worker that it replaces, it waits until the database is back. Nobody would start it again.
        settings = replace(settings, connect_timeout=math.inf)
    for queue in settings.queues or ():
        check_queue(queue)  # before the database is waited for
    instruments = tuple(name for given in instruments for name in names_in(given))
    if INSTRUMENT_VARIABLE not in os.environ:
        instruments = instruments or file_instruments(Path.cwd())
    choice = choose_database(dsn)
    if reload:
        check_target(target)
        check_reload()
        logs.set_up(as_json=as_json, verbose=verbose)
        return run_reloading()
    stopping = Stopping(settings, supervised=is_supervised(), quiet=inherited_quiet() or reported.quiet)
    stopping.expect()
    flags: dict[str, bool | str] = {"burst": burst, "verbose": verbose, "json": as_json}
    if instruments:
        flags["instrument"] = " ".join(instruments)
    if settings.processes > 1:
        check_target(target)  # before the database is waited for
        loaded = load_instruments(instruments)
        logs.set_up(as_json=as_json, verbose=verbose)
        return trio.run(Supervision(target, settings, flags, stopping, loaded).run, choice)
    folder = Path.cwd()
    handlers = load_handlers(target)
    ask_instruments(handlers, target)
    loaded = load_instruments(instruments)
    logs.set_up(as_json=as_json, verbose=verbose)
    settle_collector()
    return trio.run(
        Deployment(App(target, handlers, folder), settings, flags, stopping, loaded, reported.left).run, choice
    )


def _ended_for_predecessor(reported: Reported) -> int:
    """The exit code of a process that was told to stop, and that has replaced itself because handlers did not end."""
    if not reported.left:
        logs.logger.info("told to stop: this process ends. The jobs that did not end are reported")
        return RELEASED
    logs.logger.error(
        "%s that did not end could not be released: a worker's watchdog rescues them when their leases run out",
        count_of(len(reported.left), "job"),
    )
    return 1


class Run(ABC):
    """One life of this process, from the first connection to the exit code."""

    def __init__(
        self,
        settings: WorkerSettings,
        flags: Mapping[str, bool | str],
        stopping: Stopping,
        instruments: Sequence[Instrument],
    ) -> None:
        self.settings = settings
        self.flags = flags
        self.instruments = [logs.LogInstrument(every_job=bool(flags["verbose"])), *instruments]
        self.stopping = stopping
        self.embedded = False
        """Whether the database is this folder's own."""
        self._said: str | None = None

    async def run(self, choice: Choice) -> int:
        """Waits for the database, runs, and returns the exit code."""
        self.embedded = choice.dsn is None
        with self.stopping.open_signals() as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.stopping.obey, signals)
                if self.embedded and not sys.stderr.isatty():
                    # Without a terminal a forgotten setting is more likely than intent, and the jobs would wait in another
                    # database.
                    logs.logger.warning(
                        "no database is configured (--dsn, PULSE_TRIO_DSN, DATABASE_URL): using this folder's embedded one, "
                        "which is for development"
                    )
                async with open_database_async(choice, self.settings.schema, self.say) as dsn:
                    code = await self._begin(dsn)
                nursery.cancel_scope.cancel()
            self.stopping.code = code
        return code

    async def _begin(self, dsn: str) -> int:
        with self.stopping.starting:
            await wait_for_database(dsn, self.settings.connect_timeout, self._say_waiting)
        if self.stopping.signals:
            self.say("stopped before any job was claimed")
            return 0
        return await self.work(dsn)

    @abstractmethod
    async def work(self, dsn: str) -> int:
        """The rest, once the database is reachable."""

    def say(self, message: str) -> None:
        """Logs a message for the operator."""
        logs.logger.info("%s", message)

    def _say_waiting(self, error: DatabaseUnavailable) -> None:
        reason = headline(str(error))
        if reason != self._said:
            patience = self.settings.connect_timeout
            how_long = f", up to {patience:g} s" if patience < math.inf else ""
            logs.logger.warning("waiting for the database%s: %s", how_long, reason)
        self._said = reason


class App(NamedTuple):
    """The user's handlers, and what names them on the command line."""

    target: str
    handlers: Handlers
    folder: Path
    """Where the command was given."""


class Deployment(Run):
    """This process is the worker, perhaps one of several under a supervisor."""

    def __init__(
        self,
        app: App,
        settings: WorkerSettings,
        flags: Mapping[str, bool | str],
        stopping: Stopping,
        instruments: Sequence[Instrument],
        left: Sequence[Outcome],
    ) -> None:
        super().__init__(settings, flags, stopping, instruments)
        self._app = app
        self._left = left
        self._line = inherited_line()
        session = inherited_session()
        self._orders = Orders(self._line, session) if self._line is not None and session is not None else None
        self._keep = os.environ.pop(KEEP_VARIABLE, "1") != "0"
        inherit_crash_dump(app.handlers)
        self._worker: Worker | None = None
        """Made when the database is reachable."""

    def say(self, message: str) -> None:
        """Says nothing: the supervisor has said it."""
        if self._line is None:
            super().say(message)

    async def work(self, dsn: str) -> int:
        """Runs the worker until it ends."""
        worker = Worker(
            self._app.handlers,
            dsn,
            settings=self.settings,
            burst=bool(self.flags["burst"]),
            keep=self._keep,
            watch=self._line is None,
            on_session=self._line.tell_session if self._line is not None else None,
            on_lease=self._line.tell_lease if self._line is not None else None,
            on_stuck=partial(self._be_replaced, dsn),
            stuck=self._left,
            launch=self._launch(dsn) if self._orders is None else None,
            orders=self._orders,
            figures_to=self._line,
            instruments=self.instruments,
            log=False,
        )
        self._worker = worker
        self.stopping.of(worker)
        self.say(f"handlers: {', '.join(sorted(h.kind for h in self._app.handlers))}")
        report = await _run_beside(self._line, worker)
        if self._orders is None:
            logs.logger.info("%s", summary(report))
        if report.unwritten:
            logs.logger.error(
                "the database is away, and has not heard how %s of these ended: other workers rescue them when their leases "
                "run out, and run them again",
                count_of(report.unwritten, "job"),
            )
            return 1
        return RELEASED if report.released else 0

    def _launch(self, dsn: str) -> Launch:
        """How to start a process for a job in quarantine."""
        environment = quarantine_environment(dsn, self.settings, self.flags)
        return Launch([sys.executable, "-m", "pulse_trio.cli", "run", self._app.target], environment)

    def _be_replaced(self, dsn: str, stuck: list[Outcome]) -> NoReturn:
        """Replaces the process to end stuck handlers; the new process reports their jobs. A resource that does not end, ends
        the process."""
        signals = 0
        if self._line is None:
            signals = keep_signals()
        else:
            self._line.tell_stuck(stuck)
        worker = self._worker
        held = worker is not None and worker.is_held_by_a_resource
        if held and worker is not None and (error := worker.ended_by) is not None:
            complain(describe(error))
            leave_at_once(exit_code_of(error))
        leaving = self.stopping.told
        if leaving or held:
            logs.logger.error("this process ends without waiting for what does not end when it is cancelled")
            if self._line is not None or held or not stuck:
                leave_at_once(RELEASED)
        if self._line is not None:
            leave_at_once(REPLACE_ME)
        try:
            address = Address(dsn, self.settings.schema, leaving, self.embedded)
            leave_to_successor(stuck, address, quiet=self.stopping.quiet, signals=signals)
            flush()
            # Ignored signals are inherited, and those that are kept, until the successor listens: the default action would end
            # it.
            for number in SIGNALS if leaving else (signal.SIGUSR1,):
                signal.signal(number, signal.SIG_IGN)
            # Its command line may name a file from here; the user's module may have gone elsewhere.
            with suppress(OSError):
                os.chdir(self._app.folder)
            # In place: the process keeps its id, so a service manager notices nothing.
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 -- our own command line
        except Exception as error:
            # An exception would reach no one: the stuck handlers keep the event loop from ending.
            logs.logger.error(
                "this process cannot be replaced (%s), so it ends. Its stuck jobs are rescued when their leases run out",
                error,
            )
            leave_at_once(1)


class Supervision(Run):
    """This process supervises the workers."""

    def __init__(
        self,
        target: str,
        settings: WorkerSettings,
        flags: Mapping[str, bool | str],
        stopping: Stopping,
        instruments: Sequence[Instrument],
    ) -> None:
        super().__init__(settings, flags, stopping, instruments)
        self._target = target

    async def work(self, dsn: str) -> int:
        """Runs the workers until they end."""
        fleet = Fleet(self._target, dsn, self.settings, flags=self.flags, instruments=self.instruments)
        self.stopping.of(fleet)
        return await fleet.run()


async def _run_beside(line: Channel | None, worker: Worker) -> WorkerReport:
    """Runs the worker and, under a supervisor, the channel to it."""
    if line is None:
        return await worker.run()
    line.tell_leases(*worker.leases)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(line.run, _drain_alone, lease=lambda: worker.shortest_held))
        report = await worker.run()
        nursery.cancel_scope.cancel()
    return report


def _drain_alone() -> None:
    """A worker whose supervisor has gone drains as after a SIGTERM, and leaves stuck handlers behind."""
    logs.logger.warning("the supervisor has gone")
    signal.raise_signal(signal.SIGTERM)


def summary(report: WorkerReport) -> str:
    """Counts what a worker has done."""
    ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.ended.items()))
    return f"jobs: {ended or 'none'}"
