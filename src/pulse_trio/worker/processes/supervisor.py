"""Runs several worker processes as one: spawns, watches, replaces and drains them.

Each child is an ordinary worker in a process of its own, with a line to here (`channel.py`). The supervisor runs the watchdog,
and needs no handlers: it never imports the user's module. It does what no worker can do for itself:

- a child that died hands its jobs back at once, by its sessions, instead of after the lease;
- a child whose event loop has not turned for a lease (the shortest that it holds) is killed: its leases have run out or are
  about to, and whatever blocks it would hold its other jobs up for ever. Dying it says where it was, which a C function that
  keeps the interpreter's lock cannot prevent (`crash_dump.py`);
- a child that ends too early is started again with jittered backoff; one that ends with a usage error ends everything, and
  so do a few in a row of which none began.

Signals are passed on. When the supervisor itself dies its children notice the end of the line and stop; if a child cannot
notice because its loop does not turn, its own alarm clock ends it (`channel.py`).
"""

from __future__ import annotations

import json
import math
import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import trio

from ...errors import DatabaseUnavailable
from ...observe import ChildEnded, ChildNotStarted, ChildSilent, ChildStarted, JobsRescued, NoChildComesUp
from ...postgres import reconnect_delay
from ..upkeep.batches import Batches
from ..upkeep.watchdog import Watchdog
from .channel import SIGN_OF_LIFE
from .crash_dump import END, CrashDump, Words
from .handover import QUIET_VARIABLE, REPLACE_ME, decode_outcome
from .spawning import spawn

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from ...jobs import Outcome
    from ...observe import Observer, WorkerStale
    from ...settings import WorkerSettings
    from ...store import HandedBack, Rescue, Settlement

_LIVED = 60.0
"""A child that ends after this many seconds did not fail at its start: the backoff begins anew."""
_LATE_CLAIM = 1.0
"""Seconds after which a dead child's sessions are rescued once more: the server may still have been executing one of its
claims."""
_TRIES = 3
"""The supervisor gives up when this many children in a row die before they begin (a crash while importing), if none ever
began."""
_LAST_WORDS = 1.0
"""Seconds that a silent child has to write where it was, and to end."""
_SECOND_LOOK = 2 * SIGN_OF_LIFE
"""Seconds after which missing signs of life are believed: when a supervisor that was stopped itself wakes up, the time is over
and they wait in the line."""
_LOCKED_TRIES = 10
_LOCKED_PAUSE = 0.5
"""Seconds until a report for a row that another transaction has locked is sent again, and the number of tries."""
_LAST_REPORTS = 5.0
"""Seconds for what has to be written about a child after the supervisor was told to stop."""
_CHUNK = 65536
USAGE = 2
INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a Python process that SIGINT met before it had a handler for it."""


class SupervisorStore(Protocol):
    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement: ...

    async def rescue(self, limit: int = 1000) -> Rescue: ...

    async def rescue_sessions(self, sessions: Sequence[int], limit: int = 1000) -> HandedBack: ...

    async def close_cancellations(self) -> None: ...

    async def stale_workers(self) -> Sequence[WorkerStale]: ...

    async def maintain(self, retention: float) -> bool: ...

    async def finish_batches(self) -> Sequence[int] | None: ...

    async def prune_results(self, retention: float) -> None: ...


@dataclass(eq=False, slots=True)
class Child:
    """One worker process."""

    process: trio.Process
    line: trio.SocketStream
    words: CrashDump
    started: float
    heard: float
    sessions: list[int]
    lease: float
    """The shortest lease that it holds, in seconds."""
    longest: float
    """The longest lease that it may hold."""
    patience: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Ends when the child was silent for so long that its lease is nearly over."""
    quiet: bool = False
    """It has been told to claim nothing."""
    unread: bytes = b""
    """The start of an incomplete line."""
    stuck: list[Outcome] = field(default_factory=list["Outcome"])
    doomed: bool = False
    """The supervisor killed it, or is about to."""


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
        self._command = list(command)
        self._environment = environment
        self._store = store
        self._settings = settings
        self._observer = observer
        self._burst = burst
        self._children: set[Child] = set()
        self._stopping = False
        self._quiet = False
        self._asking: set[trio.CancelScope] = set()
        self._ended_by: signal.Signals | None = None
        self._stopped = trio.Event()
        self._first_is_up = trio.Event()
        self._codes: list[int] = []

    # What a caller may ask of it

    def stop(self) -> None:
        """Sends the children the signal to drain."""
        self._end(signal.SIGTERM)

    def stop_now(self) -> None:
        """Sends the children a second signal: they stop at once."""
        # Another signal than stop()'s: two of one kind that arrive before the child looks count as one.
        self._end(signal.SIGINT)

    def _end(self, number: signal.Signals) -> None:
        self._stopping = True
        self._stopped.set()
        self._first_is_up.set()
        self._ended_by = number
        for scope in self._asking:
            scope.deadline = min(scope.deadline, trio.current_time() + _LAST_REPORTS)
        self._signal(number)

    def quiet(self) -> None:
        """Stops claiming in every child, and in those that replace them."""
        self._quiet = True
        for child in self._children:
            self._hush(child)

    def _hush(self, child: Child) -> None:
        # Not before its first session: the signal kills a Python process that is still starting.
        if self._quiet and child.sessions and not child.quiet and child.process.returncode is None:
            child.quiet = True
            child.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Kills every child: the jobs that they hold are handed back."""
        self._stopping = True
        self._stopped.set()
        self._ended_by = signal.SIGKILL
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.process.returncode is None:
                child.process.send_signal(number)

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
        while not self._stopping:
            try:
                child = await self._spawn()
            except OSError as error:
                failures += 1
                await self._bear(error, failures)
                continue
            code, words = await self._watch(child)
            if code != REPLACE_ME:
                failures = 0 if child.heard - child.started > _LIVED else failures + 1
            final = self._is_final(child, code, failures)
            # The first such child is replaced at once: no other place may have room for its jobs.
            pause = 0.0 if code == REPLACE_ME or failures <= 1 else reconnect_delay(failures - 1, base=0.2, cap=30.0)
            self._tell_end(child, code, words, None if final else pause)
            await self._settle_up(child)
            if final:
                self._codes.append(0 if self._never_began(child, code) else code)
                if not self._stopping and not self._first_is_up.is_set():
                    self._give_up(code, failures)
                elif code == USAGE:
                    self.stop()
                return
            await self._pause(pause)

    async def _bear(self, error: OSError, failures: int) -> None:
        """A child could not be started: too many processes, no memory. The others go on, and the supervisor tries again."""
        hopeless = failures >= _TRIES and not self._first_is_up.is_set()
        pause = reconnect_delay(failures - 1, base=0.2, cap=30.0)
        if not self._stopping:
            self._observer.emit(ChildNotStarted(str(error), None if hopeless else pause))
        if hopeless:
            self._codes.append(1)
            self.stop()
        await self._pause(pause)

    async def _pause(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self._stopped.wait()

    def _give_up(self, code: int, tries: int) -> None:
        """No child has ever begun. The children that ended with an error have reported why."""
        if code not in (1, USAGE):
            self._observer.emit(NoChildComesUp(tries))
            self._codes.append(1)
        self.stop()

    def _tell_end(self, child: Child, code: int, words: Words, again_in: float | None) -> None:
        expected = child.doomed or self._stopping or code in (0, REPLACE_ME)
        stack, kinds = ("", ()) if expected else words
        self._observer.emit(ChildEnded(child.process.pid, code, expected, stack, kinds, again_in))

    def _never_began(self, child: Child, code: int) -> bool:
        """Whether our own signal met a child that could not yet handle it: that is no error."""
        return self._stopping and not child.sessions and code in (-signal.SIGTERM, -signal.SIGINT, INTERRUPTED)

    def _is_final(self, child: Child, code: int, failures: int) -> bool:
        never_up = not child.sessions and not self._first_is_up.is_set()
        hopeless = never_up and (code == 1 or failures >= _TRIES)
        return self._stopping or code == USAGE or (self._burst and code == 0) or hopeless

    # One child

    async def _spawn(self) -> Child:
        """Starts a child. Raises `OSError` if that is impossible; then no part of it is left."""
        quiet = self._quiet
        quieted = {QUIET_VARIABLE: "1"} if quiet else {}
        process, line, words = await spawn(self._command, self._environment | quieted)
        now = trio.current_time()
        lease = self._settings.lease
        child = Child(process, line, words, now, now, [], lease, lease, quiet=quiet)
        self._children.add(child)
        if self._ended_by is not None:
            # It was being started while the others were signalled.
            process.send_signal(self._ended_by)
        self._observer.emit(ChildStarted(process.pid))
        return child

    async def _watch(self, child: Child) -> tuple[int, Words]:
        """Waits for the child's end; returns its exit code and its last outcomes."""
        try:
            async with child.line:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._listen, child)
                    nursery.start_soon(self._kill_when_silent, child)
                    code = await child.process.wait()
                    nursery.cancel_scope.cancel()
                self._hear_the_rest(child)
        finally:
            self._children.discard(child)
            if child.process.returncode is None:
                child.process.kill()
            words = child.words.read()
            child.words.close()
        return code, words

    async def _listen(self, child: Child) -> None:
        try:
            async for chunk in child.line:
                self._take_in(child, bytes(chunk))
        except trio.BrokenResourceError:
            return  # its end; _watch sees it

    def _hear_the_rest(self, child: Child) -> None:
        """Reads the child's messages just before its end. Not up to the end of the line: processes that the child started may
        hold it open."""
        try:
            while chunk := os.read(child.line.socket.fileno(), _CHUNK):
                self._take_in(child, chunk)
        except OSError:
            return  # it would block

    def _take_in(self, child: Child, chunk: bytes) -> None:
        *lines, child.unread = (child.unread + chunk).split(b"\n")
        for line in lines:
            self._heard(child, json.loads(line))

    def _heard(self, child: Child, message: dict[str, Any]) -> None:
        child.heard = trio.current_time()
        if "leases" in message:
            shortest, child.longest = message["leases"]
            if shortest < self._settings.lease:
                self._watchdog.quicken(shortest)
        if "lease" in message:
            child.lease = message["lease"]
        child.patience.deadline = _patient_until(child)
        if "session" in message:
            child.sessions.append(message["session"])
            self._first_is_up.set()
            self._hush(child)
        if "stuck" in message:
            child.stuck.append(decode_outcome(message["stuck"]))

    async def _kill_when_silent(self, child: Child) -> None:
        while True:
            with trio.CancelScope(deadline=_patient_until(child)) as child.patience:
                await trio.sleep_forever()
            heard = child.heard
            await trio.sleep(_SECOND_LOOK)
            # Before its first session a child may be waiting for the database, or importing for long.
            if child.sessions and child.heard == heard:
                child.doomed = True
                # The caller waits for the child's end, which would cancel this task.
                with trio.CancelScope(shield=True):
                    await self._end_silent(child, child.lease)
                return

    async def _end_silent(self, child: Child, patience: float) -> None:
        """Kills a child whose loop does not turn, and reports where it was."""
        state = state_of(child.process.pid)
        if state != STOPPED:
            child.process.send_signal(END)
            with trio.move_on_after(_LAST_WORDS):
                await child.process.wait()
        child.process.kill()
        self._observer.emit(ChildSilent(child.process.pid, patience, state, *child.words.read()))

    # Cleaning up after a dead child

    async def _settle_up(self, child: Child) -> None:
        """Reports the outcomes that the child could not report, and hands the jobs that it held back to their queues now."""
        done = False
        with self._not_for_long():
            await self._report(child.stuck)
            done = await self._rescue(child)
        if child.sessions and (done or not self._stopping):
            self._nursery.start_soon(self._rescue_late, child)

    @contextmanager
    def _not_for_long(self) -> Generator[None]:
        """Once the supervisor is told to stop, ends the block after `_LAST_REPORTS` seconds: a silent server must not delay it.
        Any worker's watchdog then rescues the rest when the leases have run out."""
        with trio.move_on_after(_LAST_REPORTS if self._stopping else math.inf) as scope:
            self._asking.add(scope)
            try:
                yield
            finally:
                self._asking.discard(scope)

    async def _report(self, stuck: Sequence[Outcome]) -> None:
        """Reports the outcomes that a child could not report while its handlers still ran."""
        try:
            for _ in range(_LOCKED_TRIES):
                if not stuck:
                    return
                stuck = (await self._store.settle(stuck)).again
                if stuck:
                    await trio.sleep(_LOCKED_PAUSE)
        except DatabaseUnavailable:
            return  # then they are rescued

    async def _rescue_late(self, child: Child) -> None:
        """Rescues once more; and, until the server answers, for as long as the child's leases may last."""
        with trio.move_on_after(child.longest):
            while True:
                with trio.move_on_after(_LATE_CLAIM):
                    await self._stopped.wait()
                done = False
                with self._not_for_long():
                    done = await self._rescue(child)
                if done or self._stopped.is_set():
                    return

    async def _rescue(self, child: Child) -> bool:
        """Returns whether the server answered."""
        try:
            while child.sessions and any(found := await self._store.rescue_sessions(child.sessions)):
                self._observer.emit(JobsRescued(found.rescued, found.dead, child.process.pid, found.jobs))
        except DatabaseUnavailable:
            return False  # at the latest a watchdog does it, when the leases have run out
        return True


def _patient_until(child: Child) -> float:
    """When a silent child is to be killed: when its lease is over and not later, before other workers claim its jobs."""
    return child.heard + child.lease - _SECOND_LOOK


STOPPED = "it is stopped (SIGSTOP, a debugger)"
_STATES = {
    "T": STOPPED,
    "t": STOPPED,
    "R": "it computes",
    "S": "it waits in a system call",
    "D": "it waits for a disk, and nothing can wake it",
}


def state_of(pid: int) -> str:
    """The state that the kernel reports for a process's first thread; empty where it reports none (no Linux), or something
    else."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # After the name, which stands in parentheses and may contain some.
            return _STATES.get(file.read().rpartition(")")[2].split()[0], "")
    except (OSError, IndexError):
        return ""


def _severity(code: int) -> int:
    """The child's exit code that becomes the supervisor's: usage errors first, then errors and crashes, then released jobs,
    then none."""
    return {0: 0, 3: 1, 2: 3}.get(code, 2)


def exit_code(code: int) -> int:
    """A child's code as the supervisor's own: any code that is not ours (a signal, a crash) is an error."""
    return code if code in (0, 1, USAGE, 3) else 1
