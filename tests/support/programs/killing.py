"""Plays programs in worker processes that are killed and stopped at drawn points, with all other attempts in them.

A fault is struck once, by the process that comes to its point first (dying.py):

- `killed`: SIGKILL. With ` +3` whatever process comes to the third point after that is killed too;
- `stopped`: SIGSTOP, until its jobs are others'; `long stopped`: until its leases have run out by themselves;
- `cancelled and killed`: a person cancels the root, and the process is killed before it is told;
- `cancelled and stopped`: the same, and it goes on when its jobs are others';
- `cancelled, clean-up killed +3`: the root is cancelled, and what comes to the third point of a clean-up is killed;
- `child cancelled, ...`: the same, with the job at whose point it strikes.

The leases of a dead process are over as soon as its death is noticed, and its crash costs its jobs no budget: they would run
out of it by the deaths of others.
"""

from __future__ import annotations

import json
import math
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from .ground import open_ground
from .playing import PLAYS
from .staging import KINDS, Ended, Stage, try_fault

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pulse_trio import Client
    from pulse_trio.store import WorkerStore
    from pulse_trio.testing.faults.processes import Processes
    from support.stores import Window

    from .drawing import Node

APP = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from support.programs.dying import open_plays
from support.programs.playing import HANDLERS
open_plays(os.environ["PROGRAMS"])
"""
LEASE = 3.0
RUN = ["run", "app:HANDLERS", f"--lease={LEASE}", "--heartbeat=1", "--watchdog=0.3", "--poll=0.1", "--cleanup=20",
       "--concurrency=24"]  # fmt: skip
FAULTS = ("killed", "killed", "killed", "killed +", "killed +", "stopped", "long stopped", "cancelled and killed",
          "cancelled and stopped", "cancelled, clean-up killed +", "cancelled, clean-up killed +",
          "child cancelled, clean-up killed +", "child cancelled and killed")  # fmt: skip
END_LEASES = """
UPDATE job SET lease_until = now() - interval '1 s', max_attempts = attempt + greatest(4 - failures, 1)
WHERE id IN
(SELECT id FROM job WHERE state = 2 AND lease_until > now()
 AND locked_by IN (SELECT id FROM session WHERE pid = %s) FOR UPDATE SKIP LOCKED)
"""
LOST = "SELECT 1 FROM attempts WHERE job_id = %s AND attempt = ANY(%s) AND outcome = 'rescued'"
HELD = "SELECT 1 FROM job WHERE state = 2 AND locked_by IN (SELECT id FROM session WHERE pid = %s)"
PATIENCE = LEASE + 4.0
"""Seconds for which a process is stopped at most: it may hold what others wait for."""


class Told(NamedTuple):
    """An attempt in another process."""

    id: int
    attempt: int
    cancel_reason: str | None


def draw_fault(random: Random) -> str:
    """One of those above."""
    fault = random.choice(FAULTS)
    return f"{fault}{random.choice((1, 1, 2, 3, 5, 8))}" if fault.endswith("+") else fault


class Journal:
    """What the processes have told."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "journal").open("ab+")
        self._rest = b""

    def read(self) -> list[Any]:
        """What is new: the play's number, the process, what happened and its arguments."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [json.loads(line) for line in lines]


class KilledStage(Stage):
    """One database, and processes that die."""

    longest = 180.0

    def __init__(
        self, window: Window, other: WorkerStore, client: Client, nursery: trio.Nursery, processes: Processes
    ) -> None:
        super().__init__(window.dsn, window, other, client, nursery)
        self.processes = processes
        self.journal = Journal(processes.folder)
        self.armed: dict[int, Ended] = {}
        self.pids: dict[tuple[int, int, int], int] = {}
        """Where each attempt is made, by the play's number, the job and the attempt."""

    async def run_processes(self, count: int) -> None:
        """So many at any moment. A dead one's place is taken by a new one."""
        (self.processes.folder / "app.py").write_text(APP)
        for _ in range(count):
            self.nursery.start_soon(self._keep_one)
        self.nursery.start_soon(self._listen)

    async def _keep_one(self) -> None:
        environment = {"PULSE_TRIO_DSN": self.dsn, "PROGRAMS": str(self.processes.folder)}
        while True:
            running = await self.processes.command(*RUN, env=environment)
            code = await running.ended(within=math.inf)
            assert code == -signal.SIGKILL, running.report()
            self._read()
            self._lose(running.pid)
            while self.window.run(HELD, running.pid):
                self.window.run(END_LEASES, running.pid)
                await self.other.rescue()

    async def _listen(self) -> None:
        while True:
            self._read()
            await trio.sleep(0.01)

    def _read(self) -> None:
        for number, pid, what, arguments in self.journal.read():
            match what:
                case "send":
                    self.send(*arguments)
                case "asks":
                    job_id, fault = arguments
                    self.nursery.start_soon(self._cancel, number, job_id, fault)
                case "stops":
                    self._lose(pid)
                    self.nursery.start_soon(self._go_on_later, pid, arguments[0] == "long stopped")
                case _:
                    if isinstance(arguments[0], list):
                        arguments[0] = Told(*arguments[0])
                    if what != "begins" or self._begins(number, arguments[0], pid):
                        getattr(PLAYS[number], what)(*arguments)

    def _begins(self, number: int, job: Told, pid: int) -> bool:
        """Whether an attempt that begins is the newest of its job: not what a stopped process had claimed before."""
        play = PLAYS[number]
        before = play.running.get(job.id)
        # On a machine with much to do a lease may end by itself.
        if before is not None and self.window.run(LOST, job.id, [before, job.attempt]):
            play.lost |= {(job.id, before), (job.id, job.attempt)} if before > job.attempt else {(job.id, before)}
        self.pids[number, job.id, job.attempt] = pid
        return before is None or before < job.attempt

    def _lose(self, pid: int) -> None:
        """All attempts in a process are lost."""
        for (number, job_id, attempt), its in self.pids.items():
            if its == pid and PLAYS[number].running.get(job_id) == attempt:
                PLAYS[number].lost.add((job_id, attempt))

    async def _cancel(self, number: int, job_id: int, fault: str) -> None:
        ended = self.armed[number]
        while not ended.root:
            await trio.lowlevel.checkpoint()
        await self.cancel(ended, job_id if fault.startswith("child") else ended.root)
        (self.processes.folder / f"{number} cancelled").touch()

    async def _go_on_later(self, pid: int, long: bool) -> None:
        with trio.move_on_after(PATIENCE):
            while self.window.run(HELD, pid):
                if not long:
                    self.window.run(END_LEASES, pid)
                await self.other.rescue()
                await trio.sleep(0.02)
        os.kill(pid, signal.SIGCONT)

    def arm(self, ended: Ended, fault: str, point: str) -> None:
        number = ended.play.number
        self.armed[number] = ended
        fault, _, then = fault.partition(" +")
        plan = {"handlers": dict(ended.play.handlers), "fault": fault, "at": point, "then": int(then or 0)}
        (self.processes.folder / f"play-{number}").write_text(json.dumps(plan))

    async def _look_at(self, ended: Ended) -> None:
        self._read()
        await super()._look_at(ended)


@asynccontextmanager
async def open_killed_stage(dsn: str, processes: Processes) -> AsyncGenerator[KilledStage]:
    """Processes on a database, and what becomes of them."""
    async with open_ground(dsn) as (_, window, other, client, nursery):
        stage = KilledStage(window, other, client, nursery, processes)
        await stage.run_processes(2)
        nursery.start_soon(stage.watch)
        yield stage


async def try_killed(stage: KilledStage, spec: Node, first: Ended, seed: int, faults: int) -> list[str]:
    """Plays one program with drawn faults; `first` is how it ends undisturbed. Returns what was wrong, a line each."""
    random = Random(f"{seed} killed")
    points = list(first.play.points)
    wrong: list[str] = []
    for _ in range(faults if points else 0):
        kinds, fault, point = random.choice(KINDS), draw_fault(random), random.choice(points)
        wrong += await try_fault(stage, spec, first, kinds, fault, point)
    return wrong
