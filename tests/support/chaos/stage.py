"""What a chaos run plays on: a server that can be restarted, proxies, and processes; workers come back when they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import trio

from pulse_trio.grants import grant_sync
from pulse_trio.migrate import migrate_sync
from pulse_trio.testing.faults.processes import children_of, clean_environment, kill_group, send
from pulse_trio.testing.faults.proxy import open_proxy
from support.forked_children import IN_EARNEST
from support.forking import open_forker

from . import journal
from .handlers import KINDS
from .recorder import Recorder
from .schedule import CHILDREN, PRODUCER, STRANGER, groups, proxied

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pulse_trio.testing.faults.proxy import Proxy
    from pulse_trio.testing.faults.server import RestartableServer
    from support.forked_children import ForkedChild
    from support.forking import Forker

    from .history import Fault, Window

    Process = trio.Process | ForkedChild

TESTS = Path(__file__).parents[2]
SERVER_SETTINGS = {
    "max_connections": "160",
    "fsync": "on",
    "synchronous_commit": "on",
    "autovacuum": "off",
    # A statement that waits for a lock ends with its client.
    "client_connection_check_interval": "1s",
}
GRACE = 2.0


class ClaimCursor:
    """A place for a worker process: when one ends, the next is started."""

    def __init__(self, number: int, dsn: str, proxy: Proxy | None, skew: float, processes: int) -> None:
        self.number = number
        self.who = f"w{number}"
        self.dsn = dsn
        self.proxy = proxy
        self.skew = skew
        self.processes = processes
        self.process: Process | None = None
        self.stopped: int | None = None
        """The process of it that SIGSTOP has stopped."""


class Stage:
    """All that runs, and the record of what was done to it."""

    def __init__(
        self,
        folder: Path,
        server: RestartableServer,
        settings: dict[str, Any],
        seed: int,
        nursery: trio.Nursery,
        forker: Forker | None,
    ) -> None:
        self.folder = folder
        self.server = server
        self.slots: list[ClaimCursor] = []
        self.faults: list[Fault] = []
        self.hindrances: list[Window] = []
        self.pauses: list[Window] = []
        self.lives: list[tuple[str, int, float, float, int | None]] = []
        """Worker processes: slot, process number, begin, end, exit code."""
        self.closing = False
        self.recorder = Recorder(folder / "stage.jsonl", "stage")
        self._settings = settings
        self._seed = seed
        self._nursery = nursery
        self._forker = forker
        self._producers: list[Process] = []
        self._others: list[Process] = []
        self._deployed = 0

    async def start(self, module: str, *arguments: str, name: str) -> Process:
        """Starts a module of the harness in the run's folder; what it prints goes to a file there."""
        command = ["-m", f"support.chaos.{module}", *arguments]
        with (self.folder / f"{name}.log").open("ab") as log, open(os.devnull) as nothing:  # noqa: ASYNC230 -- does not block
            if self._forker is not None:
                streams = (nothing.fileno(), log.fileno(), log.fileno())
                return await self._forker.begin(command, {**environment(), **IN_EARNEST}, self.folder, streams)
            return await trio.lowlevel.open_process(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=environment(),
                start_new_session=True,
            )

    async def open(self, proxies: dict[int, Proxy], workers: int, producers: int, rate: float) -> None:
        """Starts the sink, the workers and the producers."""
        self._others.append(await self.start("effects", "effects.sock", "effects.jsonl", name="effects"))
        while not (self.folder / "effects.sock").exists():  # noqa: ASYNC110 -- another process makes it
            await trio.sleep(0.02)
        for number in range(workers):
            proxy = proxies.get(number)
            skew = {1: 86400.0, 2: -86400.0}.get(number, 0.0)
            children = CHILDREN if number in groups(workers) else 1
            slot = ClaimCursor(number, proxy.dsn if proxy else self.server.dsn, proxy, skew, children)
            self.slots.append(slot)
            self._nursery.start_soon(self._keep_running, slot)
        for number in range(producers):
            order = {"dsn": self.server.dsn, "who": f"p{number}", "seed": self._seed, "rate": rate, "tasks": 3}
            self._producers.append(await self.start("producer", json.dumps(order), name=f"producer-{number}"))

    async def _keep_running(self, slot: ClaimCursor) -> None:
        while not self.closing:
            settings = self._settings | {"processes": slot.processes}
            order = {"dsn": slot.dsn, "who": slot.who, "settings": settings, "skew": slot.skew}
            slot.process = await self.start("app", json.dumps(order), name=f"worker-{slot.number}")
            begin = time.monotonic()
            code = await slot.process.wait()
            self.lives.append((slot.who, slot.process.pid, begin, time.monotonic(), code))
            await trio.sleep(0.2)

    async def working(self) -> None:
        """Waits until every worker has claimed or tried to."""
        logs = [self.folder / f"worker-{slot.who}.jsonl" for slot in self.slots]
        with trio.fail_after(60):
            while not all(log.exists() and b'"operation"' in log.read_bytes() for log in logs):  # noqa: ASYNC110 -- as above
                await trio.sleep(0.05)

    async def deployed(self, seconds: float) -> str:
        """A worker of the next version, beside the others, for so long; returns how it ended."""
        self._deployed += 1
        who = f"next{self._deployed}"
        settings = {k: v for k, v in self._settings.items() if k != "process_slots"}
        settings |= {"processes": 1, "concurrency": 3, "queues": "default,mail"}
        order = {"dsn": self.server.dsn, "who": who, "settings": settings, "skew": 0.0, "target": "newer"}
        process = await self.start("app", json.dumps(order), name=f"worker-{who}")
        self._others.append(process)
        log = self.folder / f"worker-{who}.jsonl"
        with trio.move_on_after(20):
            while process.returncode is None and not (log.exists() and b'"operation"' in log.read_bytes()):  # noqa: ASYNC110
                await trio.sleep(0.05)
        with trio.move_on_after(seconds):
            return f"ended by itself with {await process.wait()}"
        process.send_signal(signal.SIGTERM)
        with trio.move_on_after(GRACE + 6):
            return f"ended with {await process.wait()}"
        process.kill()
        return "was killed"

    async def stop_producing(self) -> None:
        """Ends the producers: what they were doing they finish or report as unknown."""
        for process in self._producers:
            process.send_signal(signal.SIGTERM)
        with trio.move_on_after(15):
            for process in self._producers:
                await process.wait()

    async def heal(self) -> None:
        """Undoes every fault that could still last."""
        for slot in self.slots:
            if slot.proxy is not None:
                slot.proxy.forward()
            if slot.stopped is not None:
                send(slot.stopped, signal.SIGCONT)

    async def drained(self, within: float, *, scheduled: bool = False) -> int:
        """Waits until no job is left; returns how many are, in the end. `scheduled`: those aside that schedules bring."""
        left = -1
        query = "SELECT count(*) FROM pulse.job WHERE kind = ANY (%s) AND (%s OR kind NOT LIKE 'tick%%')"
        with trio.move_on_after(within):
            while left != 0:
                try:
                    ((left,),) = await self.ask(query, list(KINDS), not scheduled)
                except psycopg.OperationalError:
                    pass
                await trio.sleep(0.2)
        return left

    async def ask(self, query: LiteralString, *parameters: Any) -> list[tuple[Any, ...]]:
        """The rows of a query, on a connection of its own."""
        return await trio.to_thread.run_sync(ask, self.server.dsn, query, parameters)

    async def close(self) -> None:
        """Ends what still runs, in its order."""
        self.closing = True
        processes = [slot.process for slot in self.slots if slot.process is not None]
        children = [
            c for slot in self.slots if slot.processes > 1 and slot.process for c in children_of(slot.process.pid)
        ]
        for process in processes:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        with trio.move_on_after(GRACE + 6):
            for process in processes:
                await process.wait()
        with trio.CancelScope(shield=True):
            for process in [*processes, *self._producers, *self._others]:
                kill_group(process.pid)
                await process.wait()
            for child in children:
                kill_group(child)  # each leads a group of its own
        await trio.sleep(0.3)


def environment() -> dict[str, str]:
    """Of the harness's processes, and of what they start."""
    return {**clean_environment(), "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}


def ask(dsn: str, query: LiteralString, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The rows of a query; none for a command. Blocks."""
    with psycopg.connect(dsn, autocommit=True, application_name="chaos") as connection:
        cursor = connection.execute(query, parameters or None)
        return cursor.fetchall() if cursor.description else []


def let_strangers_in(dsn: str) -> None:
    """Two logins beside the owner's: one that was granted a producer's work, one that was granted nothing."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {PRODUCER} LOGIN; CREATE ROLE {STRANGER} LOGIN".encode())
    grant_sync(dsn, {"producer": PRODUCER})


@asynccontextmanager
async def open_stage(
    folder: Path,
    server: RestartableServer,
    settings: dict[str, Any],
    seed: int,
    *,
    workers: int,
    producers: int,
    rate: float,
    forks: bool,
) -> AsyncGenerator[Stage]:
    """A stage on a fresh, journaled schema; whatever runs at the end is killed. With `forks` its processes are forks of one
    that has imported pulse-trio; what they start for themselves is started as ever."""
    await trio.to_thread.run_sync(migrate_sync, server.dsn)
    await trio.to_thread.run_sync(journal.install, server.dsn)
    await trio.to_thread.run_sync(let_strangers_in, server.dsn)
    async with AsyncExitStack() as stack:
        proxies = {n: await stack.enter_async_context(open_proxy(server.dsn)) for n in proxied(workers)}
        forker = stack.enter_context(open_forker(environment())) if forks else None
        async with trio.open_nursery() as nursery:
            stage = Stage(folder, server, settings, seed, nursery, forker)
            try:
                await stage.open(proxies, workers, producers, rate)
                yield stage
            finally:
                with trio.CancelScope(shield=True):
                    await stage.close()
            nursery.cancel_scope.cancel()
