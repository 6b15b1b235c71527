"""One child of a supervisor: its process, what it has said over its line, and its death when it falls silent.

A child whose event loop has not turned for a lease (the shortest that it holds) is killed: its leases have run out or are about
to, and whatever blocks it would hold its other jobs up for ever. One that has not begun may take as long as it needs, until it
is told to end: it holds no job. Dying it says where it was, which a C function that keeps the
interpreter's lock cannot prevent (`crash_dump.py`).
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from ...observe import ChildSilent
from .channel import SIGN_OF_LIFE
from .crash_dump import END
from .handover import decode_outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...jobs import Outcome
    from ...observe import Observer
    from .spawning import Spawned

_LAST_WORDS = 1.0
"""Seconds that a silent child has to write where it was, and to end."""
_BEFORE_IT_BEGINS = 5.0
"""Seconds that a child has to end which has not begun, and is told to stop at once."""
_SECOND_LOOK = 2 * SIGN_OF_LIFE
"""Seconds after which missing signs of life are believed: when a supervisor that was stopped itself wakes up, the time is over
and they wait in the line."""


@dataclass(eq=False, slots=True)
class Child:
    """One worker process."""

    spawned: Spawned
    started: float
    heard: float
    lease: float
    """The shortest lease that it holds, in seconds."""
    longest: float
    """The longest lease that it may hold."""
    sessions: list[int] = field(default_factory=list[int])
    patience: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Ends when the child was silent for so long that its lease is nearly over."""
    quiet: bool = False
    """It has been told to claim nothing."""
    unread: bytes = b""
    """The start of an incomplete line."""
    stuck: list[Outcome] = field(default_factory=list["Outcome"])
    doomed: bool = False
    """The supervisor killed it, or is about to."""

    @property
    def process(self) -> trio.Process:
        return self.spawned.process

    # What it is told

    def signal(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)
            if not self.sessions:
                # Nothing may answer that: a stopped process, or an import in C code. From now on it has a lease.
                self.heard = trio.current_time()
                self.lease = self.lease if number == signal.SIGTERM else min(self.lease, _BEFORE_IT_BEGINS)
                self.patience.deadline = self._patient_until()

    def hush(self) -> None:
        """Tells it to claim nothing, once it has begun."""
        # Not before its first session: the signal kills a Python process that is still starting.
        if self.sessions and not self.quiet and self.process.returncode is None:
            self.quiet = True
            self.process.send_signal(signal.SIGUSR1)

    # What it says

    def messages(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """Its messages in what was read from its line, each noted here first."""
        *lines, self.unread = (self.unread + chunk).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self._note(message)
            yield message

    def _note(self, message: dict[str, Any]) -> None:
        self.heard = trio.current_time()
        if "leases" in message:
            self.longest = message["leases"][1]
        if "lease" in message:
            self.lease = message["lease"]
        self.patience.deadline = self._patient_until()
        if "session" in message:
            self.sessions.append(message["session"])
        if "stuck" in message:
            self.stuck.append(decode_outcome(message["stuck"]))

    # When it says nothing

    async def kill_when_silent(self, observer: Observer, stopping: trio.Event) -> None:
        """`stopping`: all children are told to end."""
        while True:
            with trio.CancelScope(deadline=self._patient_until()) as self.patience:
                await trio.sleep_forever()
            heard = self.heard
            await trio.sleep(_SECOND_LOOK)
            # Before its first session a child may be importing for long, waiting for the database, or opening its resources.
            if (self.sessions or stopping.is_set()) and self.heard == heard:
                self.doomed = True
                # The caller waits for the child's end, which would cancel this task.
                with trio.CancelScope(shield=True):
                    await self._end_silent(observer, self.lease)
                return

    def _patient_until(self) -> float:
        """When it is to be killed if it stays silent: when its lease is over and not later, before other workers claim its
        jobs."""
        return self.heard + self.lease - _SECOND_LOOK

    async def _end_silent(self, observer: Observer, patience: float) -> None:
        """Kills it, and reports where it was."""
        state = state_of(self.process.pid)
        if state != STOPPED:
            self.process.send_signal(END)
            with trio.move_on_after(_LAST_WORDS):
                await self.process.wait()
        self.process.kill()
        observer.emit(ChildSilent(self.process.pid, patience, state, *self.spawned.words.read()))


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
