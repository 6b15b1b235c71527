"""The children of a supervisor: starts them, passes signals on to all of them, and hears each until it ends."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import trio

from ...observe import ChildStarted
from .child_process import Child
from .handover import QUIET_VARIABLE
from .spawning import spawn

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping

    from ...observe import Observer
    from ..upkeep.watchdog import Watchdog
    from .crash_dump import Words
    from .spawning import Launch

_CHUNK = 65536


class FiguresSink(Protocol):
    def heard(self, pid: int, told: Mapping[str, Any]) -> None:
        """A child has sent its figures."""
        ...


class Children:
    """The children that live. `lease` is the shortest that one is taken to hold until it says otherwise, in seconds."""

    def __init__(self, launch: Launch, lease: float, observer: Observer) -> None:
        self._launch = launch
        self._lease = lease
        self._observer = observer
        self._living: set[Child] = set()
        self._quiet = False
        self._ended_by: signal.Signals | None = None
        self.stopping = trio.Event()
        """Set when they have been told to end: no further child is needed."""
        self.first_is_up = trio.Event()
        """Set when a child has begun, or when none needs to any more."""
        self.figures: FiguresSink | None = None
        """Takes the figures that they send, where there are metrics."""

    # What all are told, and those that are started later

    def end(self, number: signal.Signals) -> None:
        """Sends them the signal, which ends them sooner or later."""
        self.stopping.set()
        self._ended_by = number
        for child in self._living:
            child.signal(number)

    def quiet(self) -> None:
        """Stops claiming in each."""
        self._quiet = True
        for child in self._living:
            child.hush()

    # One child, from its start to its end

    async def start(self) -> Child:
        """Starts a child. Raises `OSError` if that is impossible; then no part of it is left."""
        quiet = self._quiet
        quieted = {QUIET_VARIABLE: "1"} if quiet else {}
        spawned = await spawn(self._launch.command, {**self._launch.environment, **quieted})
        now = trio.current_time()
        child = Child(spawned, started=now, heard=now, lease=self._lease, longest=self._lease, quiet=quiet)
        self._living.add(child)
        if self._ended_by is not None:
            # It was being started while the others were signalled.
            child.signal(self._ended_by)
        self._observer.emit(ChildStarted(child.process.pid))
        return child

    async def watch(self, child: Child, watchdog: Watchdog) -> tuple[int, Words]:
        """Hears the child until its end; returns its exit code and where it was. `watchdog` looks often enough for its
        leases."""
        process, line, dump = child.spawned
        try:
            async with line:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._listen, child, watchdog)
                    nursery.start_soon(child.kill_when_silent, self._observer, self.stopping)
                    code = await process.wait()
                    nursery.cancel_scope.cancel()
                self._hear_the_rest(child, watchdog)
        finally:
            self._living.discard(child)
            if process.returncode is None:
                process.kill()
            words = dump.read()
            dump.close()
        return code, words

    async def _listen(self, child: Child, watchdog: Watchdog) -> None:
        try:
            async for chunk in child.spawned.line:
                self._take_in(child, bytes(chunk), watchdog)
        except trio.BrokenResourceError:
            return  # its end; watch() sees it

    def _hear_the_rest(self, child: Child, watchdog: Watchdog) -> None:
        """Reads the child's messages just before its end. Not up to the end of the line: processes that the child started may
        hold it open."""
        with suppress(OSError):  # it would block
            while chunk := os.read(child.spawned.line.socket.fileno(), _CHUNK):
                self._take_in(child, chunk, watchdog)

    def _take_in(self, child: Child, chunk: bytes, watchdog: Watchdog) -> None:
        """Does what a child's messages ask of the supervisor."""
        for message in child.messages(chunk):
            if "leases" in message and (shortest := message["leases"][0]) < self._lease:
                watchdog.quicken(shortest)
            if "session" in message:
                self.first_is_up.set()
                if self._quiet:
                    child.hush()
            if "figures" in message and self.figures is not None:
                self.figures.heard(child.process.pid, message["figures"])
