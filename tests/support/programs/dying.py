"""Drawn programs in a process that is killed or stopped at a drawn point: what its workers run, and how it tells of it.

The folder `PROGRAMS` of the environment has what all processes share. A process may die at any moment, so each note is one
write to the end of a file, which tells the test (killing.py) what happened, in that order.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from .playing import GIVES_UP, PLAYS, Attempt, Play

if TYPE_CHECKING:
    from pulse_trio import Job

    from .drawing import Node


class Folder:
    """What the processes and the test share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = os.open(path / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, *what: Any) -> None:
        """Something has happened."""
        os.write(self.journal, json.dumps(what).encode() + b"\n")

    def first(self, what: str) -> bool:
        """Whether no process came to it before."""
        return self.count(what) == 1

    def count(self, what: str) -> int:
        """How often processes came to it, this time included."""
        number = os.open(self.path / what, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(number, b".")
            return os.lseek(number, 0, os.SEEK_CUR)
        finally:
            os.close(number)


class ToldPlay(Play):
    """A play of which another process is told. `fault` strikes in whatever process comes to its point first."""

    def __init__(self, folder: Folder, number: int) -> None:
        plan = json.loads((folder.path / f"play-{number}").read_text())
        super().__init__(number, plan["handlers"], strike=self._strike, send=self._send)
        self.folder, self.fault, self.at, self.then = folder, plan["fault"], plan["at"], plan["then"]

    def came_to(self, point: str) -> None:
        self._tell("came_to", point)

    def first(self, what: str) -> bool:
        return self.folder.first(f"{self.number} first {what}")

    def remember(self, job: Attempt, labels: list[str]) -> None:
        self._tell("remember", attempt(job), labels)

    def decided(self, job: Attempt, tag: str, how: Any) -> None:
        self._tell("decided", attempt(job), tag, how)

    def decides(self, job: Attempt, name: str, tag: str, how: Any) -> None:
        self._tell("decides", attempt(job), name, tag, how)

    def saga(self, job: Attempt, charge: str, how: str) -> None:
        self._tell("saga", attempt(job), charge, how)

    def begins(self, job: Attempt, name: str) -> None:
        self._tell("begins", attempt(job), name)

    def ends(self, job: Attempt) -> None:
        self._tell("ends", attempt(job))

    def went(self, job: Attempt) -> None:
        self._tell("went", attempt(job))

    def effect(self, job: Attempt, name: str, node: Node, task: str) -> None:
        self._tell("effect", attempt(job), name, {"label": node["label"], "sure": node["sure"]}, task)

    def _tell(self, what: str, *arguments: Any) -> None:
        self.folder.note(self.number, os.getpid(), what, arguments)

    def _send(self, job_id: int, name: str, after: float) -> None:
        # By the test: an event that a process was about to send dies with it.
        self._tell("send", job_id, name, after)

    async def _strike(self, job: Job, _: str, point: str) -> None:
        if not self.fault:
            return
        if point != self.at or not self.folder.first(f"{self.number} struck"):
            if self.then and (self.folder.path / f"{self.number} struck").exists():
                in_time = "clean-up" not in self.fault or job.cancel_reason in GIVES_UP
                if in_time and self.folder.count(f"{self.number} later") == self.then:
                    self._die()
            return
        with trio.CancelScope(shield=True):
            if "cancelled" in self.fault:
                self._tell("asks", job.id, self.fault)
                # The test is another process.
                while not (self.folder.path / f"{self.number} cancelled").exists():  # noqa: ASYNC110
                    await trio.sleep(0.005)
        if self.fault.endswith("stopped"):
            self._tell("stops", self.fault)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif not self.then or "clean-up" not in self.fault:
            self._die()

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def attempt(job: Attempt) -> tuple[int, int, str | None]:
    """What a play must know of a job."""
    return job.id, job.attempt, job.cancel_reason


def open_plays(path: str) -> None:
    """In a process of workers: what programs do is told to the folder."""
    folder = Folder(Path(path))
    PLAYS.opens = lambda number: ToldPlay(folder, number)
