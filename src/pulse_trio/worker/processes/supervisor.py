"""Runs several worker processes as one: starts, watches, replaces and drains them.

Each child is an ordinary worker in a process of its own, with a line to here (`channel.py`). The supervisor runs the watchdog,
and needs no handlers: it never imports the user's module. It does what no worker can do for itself:

- a child that died hands its jobs back at once (`handing_back.py`);
- a child whose event loop does not turn is killed (`child_process.py`);
- a child that ends too early is started again with jittered backoff. As long as none has begun, one that ends with a usage
  error ends everything, as does one that cannot open a resource, and so do a few in a row. What has begun once may begin
  again: a deploy that is half done, or a restart of what a resource connects to, must not end the others.

Signals are passed on (`children.py`). When the supervisor itself dies its children notice the end of the line and stop; if a
child cannot notice because its loop does not turn, its own alarm clock ends it (`channel.py`).
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Protocol

import trio

from ...observe import ChildEnded, ChildNotStarted, NoChildComesUp
from ...postgres import reconnect_delay
from ..upkeep.batches import Batches, BatchStore
from ..upkeep.watchdog import Watchdog, WatchStore
from .children import Children
from .handing_back import HandingBack, HandingBackStore
from .handover import REPLACE_ME
from .spawning import Launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...observe import Observer
    from ...settings import WorkerSettings
    from .child_process import Child
    from .children import FiguresSink
    from .crash_dump import Words

_LIVED = 60.0
"""A child that ends after this many seconds did not fail at its start: the backoff begins anew."""
_TRIES = 3
"""The supervisor gives up when this many children in a row die before they begin (a crash while importing), if none ever
began."""
USAGE = 2
RELEASED = 3
"""A child's exit code when jobs were released unfinished."""
INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a Python process that SIGINT met before it had a handler for it."""


class SupervisorStore(HandingBackStore, WatchStore, BatchStore, Protocol):
    """What a supervisor asks of the database."""


class Supervisor:
    """Runs `command` in `settings.processes` children. `environment` is their environment apart from the line."""

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        store: SupervisorStore,
        *,
        settings: WorkerSettings,
        observer: Observer,
        burst: bool = False,
    ) -> None:
        self._store = store
        self._settings = settings
        self._observer = observer
        self._burst = burst
        self._children = Children(Launch(list(command), environment), settings.lease, observer)
        self._stopping = self._children.stopping
        self._first_is_up = self._children.first_is_up
        self._handing_back = HandingBack(store, observer, self._stopping)
        self._codes: list[int] = []

    def pass_figures_to(self, sink: FiguresSink) -> None:
        """From now on `sink` receives the figures that the children send."""
        self._children.figures = sink

    # What a caller may ask of it

    def stop(self) -> None:
        """Sends the children the signal to drain."""
        self._end(signal.SIGTERM)

    def stop_now(self) -> None:
        """Sends the children a second signal: they stop at once."""
        # Another signal than stop()'s: two of one kind that arrive before the child looks count as one.
        self._end(signal.SIGINT)

    def _end(self, number: signal.Signals) -> None:
        self._first_is_up.set()
        self._handing_back.hurry()
        self._children.end(number)

    def quiet(self) -> None:
        """Stops claiming in every child, and in those that replace them."""
        self._children.quiet()

    def kill(self) -> None:
        """Kills every child: the jobs that they hold are handed back."""
        self._children.end(signal.SIGKILL)

    # Life

    async def run(self) -> int:
        """Supervises until stopped (or, with `burst`, until every child has found nothing due); returns the exit code."""
        async with trio.open_nursery() as services:
            self._watchdog = Watchdog(self._store, self._settings, self._observer)
            services.start_soon(self._watchdog.run)
            batches = Batches(self._store, retention=self._settings.retention, observer=self._observer)
            services.start_soon(batches.run)
            try:
                async with trio.open_nursery() as self._nursery:
                    for _ in range(self._settings.processes):
                        self._nursery.start_soon(self._keep)
                        # Report a start-up failure that all children share once.
                        await self._first_is_up.wait()
            finally:
                self.kill()
            services.cancel_scope.cancel()
        return exit_code(max(self._codes, default=0, key=_severity))

    async def _keep(self) -> None:
        """One place for a child: fills it again and again."""
        failures = 0
        while not self._stopping.is_set():
            try:
                child = await self._children.start()
            except OSError as error:
                failures += 1
                await self._bear(error, failures)
                continue
            code, words = await self._children.watch(child, self._watchdog)
            if code != REPLACE_ME:
                failures = 0 if child.heard - child.started > _LIVED else failures + 1
            final = self._is_final(child, code, failures)
            # The first such child is replaced at once: no other place may have room for its jobs.
            pause = 0.0 if code == REPLACE_ME or failures <= 1 else reconnect_delay(failures - 1, base=0.2, cap=30.0)
            self._tell_end(child, code, words, None if final else pause)
            await self._handing_back.hand_back(child, self._nursery)
            if final:
                # One that handlers keep from ending leaves their jobs to be handed back.
                self._codes.append(0 if self._never_began(child, code) else RELEASED if code == REPLACE_ME else code)
                if not self._stopping.is_set() and not self._first_is_up.is_set():
                    self._give_up(code, failures)
                return
            await self._pause(pause)

    async def _bear(self, error: OSError, failures: int) -> None:
        """A child could not be started: too many processes, no memory. The others go on, and the supervisor tries again."""
        hopeless = failures >= _TRIES and not self._first_is_up.is_set()
        pause = reconnect_delay(failures - 1, base=0.2, cap=30.0)
        if not self._stopping.is_set():
            self._observer.emit(ChildNotStarted(str(error), None if hopeless else pause))
        if hopeless:
            self._codes.append(1)
            self.stop()
        await self._pause(pause)

    async def _pause(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self._stopping.wait()

    def _is_final(self, child: Child, code: int, failures: int) -> bool:
        never_up = not child.sessions and not self._first_is_up.is_set()
        hopeless = never_up and (code == 1 or failures >= _TRIES)
        wrong = code == USAGE and not self._first_is_up.is_set()
        return self._stopping.is_set() or wrong or (self._burst and code == 0) or hopeless

    def _tell_end(self, child: Child, code: int, words: Words, again_in: float | None) -> None:
        expected = child.doomed or self._stopping.is_set() or code in (0, REPLACE_ME)
        stack, kinds = ("", ()) if expected else words
        self._observer.emit(ChildEnded(child.process.pid, code, expected, stack, kinds, again_in))

    def _never_began(self, child: Child, code: int) -> bool:
        """Whether our own signal met a child that could not yet handle it, or that did nothing at all: that is no error."""
        ours = child.doomed or code in (-signal.SIGTERM, -signal.SIGINT, INTERRUPTED)
        return self._stopping.is_set() and not child.sessions and ours

    def _give_up(self, code: int, tries: int) -> None:
        """No child has ever begun. The children that ended with an error have reported why."""
        if code not in (1, USAGE):
            self._observer.emit(NoChildComesUp(tries))
            self._codes.append(1)
        self.stop()


def _severity(code: int) -> int:
    """The child's exit code that becomes the supervisor's: usage errors first, then errors and crashes, then released jobs,
    then none."""
    return {0: 0, 3: 1, 2: 3}.get(code, 2)


def exit_code(code: int) -> int:
    """A child's code as the supervisor's own: any code that is not ours (a signal, a crash) is an error."""
    return code if code in (0, 1, USAGE, 3) else 1
