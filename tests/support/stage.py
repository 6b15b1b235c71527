"""What the worker's tests share: a stage with handlers, a database in memory, and a worker that plays on it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import trio

from pulse_trio import Handlers, Worker, observe
from pulse_trio.testing.memory import MemoryDatabase, MemoryJob, MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from pulse_trio import WorkerReport
    from pulse_trio.worker.building import Parts

E = TypeVar("E")
TOLD = [type_ for type_ in observe.Event.__args__ if type_ not in (observe.QueueBacklog, observe.ScheduleLate)]
"""The events that tests listen to."""


class Recorder:
    """An instrument that keeps every event, with the time it came.

    Not what falls behind: a worker that is asked for it counts the queues, on a connection of its own. That is a fifth of
    what a short test costs PostgreSQL.
    """

    def __init__(self) -> None:
        self.all: list[tuple[float, Any]] = []
        self._more = trio.Event()

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        return dict.fromkeys(TOLD, self._keep)

    def _keep(self, event: Any) -> None:
        self.all.append((trio.current_time(), event))
        self._more.set()

    async def first(self, kind: type[E]) -> E:
        """Waits until an event of this kind has come."""
        while not (found := self.of(kind)):
            self._more = trio.Event()
            await self._more.wait()
        return found[0]

    def of(self, kind: type[E]) -> list[E]:
        return [event for _, event in self.all if isinstance(event, kind)]

    def when(self, kind: type[Any]) -> list[float]:
        return [time for time, event in self.all if isinstance(event, kind)]


def parts(worker: Worker) -> Parts:
    """The parts of a worker that runs."""
    assert worker._parts is not None
    return worker._parts


class Stage:
    """Handlers, a database in memory and one worker's store on it."""

    def __init__(self) -> None:
        self.database = MemoryDatabase()
        self.handlers = Handlers()
        self.store = MemoryStore(self.database)
        self.events = Recorder()

    def worker(self, store: MemoryStore | None = None, **settings: Any) -> Worker:
        """A worker over `store`, or over the stage's own."""
        store = store or self.store
        worker = Worker(self.handlers, "", store=store, instruments=[self.events], **settings)  # type: ignore[arg-type]
        store.lease, store.queues = worker.settings.lease, worker.settings.queues
        store.stale = worker.settings.stale
        store.leases = {queue: its.lease for queue, its in self.handlers.queue_leases.items()}
        return worker

    @asynccontextmanager
    async def working(self, store: MemoryStore | None = None, **settings: Any) -> AsyncGenerator[Worker]:
        """A worker that runs while the block does, and is stopped at its end."""
        async with trio.open_nursery() as nursery:
            worker = await nursery.start(self.worker(store, **settings).run)
            yield worker
            worker.stop()

    async def burst(self, **settings: Any) -> WorkerReport:
        """Runs what is due."""
        return await self.worker(burst=True, **settings).run()

    def enqueue(self, kind: str, /, *, timeout: float | None = None, queue: str = "default", **how: Any) -> int:
        """Enqueues a job; keywords that are not options are its arguments."""
        options = {
            name: how.pop(name) for name in ("priority", "max_attempts", "delay", "options", "key") if name in how
        }
        if timeout is not None:
            options["options"] = msgspec.json.encode({"timeout": timeout}).decode()
        return self.database.enqueue(kind, msgspec.json.encode(how).decode(), queue=queue, **options)

    async def ended(self, kind: str, /, **how: Any) -> MemoryJob:
        """Runs one job in a burst, and returns what became of it."""
        job = self.database.jobs[self.enqueue(kind, **how)]
        await self.burst()
        return job

    def outcomes(self) -> list[str]:
        """How attempts ended, in the order in which they were settled."""
        return [outcome.kind for outcome in self.store.settled]
