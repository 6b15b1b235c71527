"""One quarantine process as the worker sees it: its job, its messages, and its end."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from .channel import SIGN_OF_LIFE
from .handover import decode_outcome

if TYPE_CHECKING:
    from ...jobs import Claim, Outcome
    from ..jobs.kept import Kept
    from .spawning import Spawned

_CHUNK = 65536


@dataclass(eq=False)
class Patient:
    """One job in quarantine, as it was given to a process."""

    kept: Kept
    since: float
    taken: trio.Event = field(default_factory=trio.Event)
    done: trio.Event = field(default_factory=trio.Event)

    @property
    def claim(self) -> Claim:
        return self.kept.claim


@dataclass(eq=False)
class Ward:
    """One process, and the job it has."""

    spawned: Spawned
    patient: Patient
    heard: float
    up: trio.Event = field(default_factory=trio.Event)
    first: bool = True
    """Whether no other job has ever run in it."""
    ended_by_us: str | None = None
    """Why this worker killed it."""
    told_to_stop: bool = False
    unread: bytes = b""
    stuck: list[Outcome] = field(default_factory=list["Outcome"])

    @property
    def pid(self) -> int:
        return self.spawned.process.pid

    @property
    def lease(self) -> float:
        """Seconds of its job's lease."""
        return self.patient.kept.terms.lease

    def signal(self, number: signal.Signals) -> None:
        if self.spawned.process.returncode is None:
            self.spawned.process.send_signal(number)

    def kill(self, why: str) -> None:
        self.ended_by_us = self.ended_by_us or why
        self.signal(signal.SIGKILL)


async def kill_when_silent(ward: Ward) -> None:
    """Kills a process that gave no sign of life for its job's lease and a second. Its own alarm clock would do so after two
    leases, and reports less."""
    await ward.up.wait()
    while True:
        heard, lease = ward.heard, ward.lease
        await trio.sleep_until(heard + lease)
        if ward.heard != heard:
            continue  # the lease counts from the last sign
        # This worker may have been stopped itself: then the signs of life wait in the line.
        await trio.sleep(2 * SIGN_OF_LIFE)
        if ward.heard == heard:
            ward.kill(f"its event loop did not turn for {lease:g} s")
            return


def take_in(ward: Ward, chunk: bytes) -> None:
    """Reads the process's messages."""
    *lines, ward.unread = (ward.unread + chunk).split(b"\n")
    for line in lines:
        ward.heard = trio.current_time()
        message = json.loads(line)
        if "session" in message:
            ward.up.set()
        if message.get("taken") == ward.patient.claim.id:
            ward.patient.taken.set()
        if message.get("done") == ward.patient.claim.id:
            ward.patient.done.set()
        if "stuck" in message:
            ward.stuck.append(decode_outcome(message["stuck"]))


def hear_the_rest(ward: Ward) -> None:
    """Reads its messages just before its end. Not up to the end of the line: processes that it started may hold it open."""
    with suppress(OSError):  # it would block
        while chunk := os.read(ward.spawned.line.socket.fileno(), _CHUNK):
            take_in(ward, chunk)


def how_it_ended(code: int) -> str:
    """How a process ended, from its exit code."""
    if code >= 0:
        return f"ended with exit code {code} before the job had ended"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown to this system"
    return f"killed by signal {-code} ({name})"
