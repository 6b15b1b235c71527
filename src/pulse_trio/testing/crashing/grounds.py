"""What the runs of `crash_points` stand on: a database in memory, or a PostgreSQL with pulse-trio's schema."""

from __future__ import annotations

from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import anyio.to_thread
import msgspec
import trio

from ...client import open_client
from ...errors import InvalidTransition
from ...states import FINISHED
from ...store import WorkerStore
from ...store.why import why
from ..faults.proxy import open_proxy
from ..given_resources import GivenResources
from ..jsonb import from_jsonb
from ..kept import KeptConnections, connected, hang_up, keeping_if_none_does, kept_for
from ..kept_worker import KeepingWorker
from ..memory import MemoryDatabase, MemoryStore
from ..memory.worker import MemoryWorker
from .others import QUEUE, Others, forget_rates

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from ...client import Client
    from ...handlers import Handlers
    from ...jobs import JobRequest
    from ...store.links import Links
    from ...worker import Worker
    from ..faults.proxy import Proxy

SETTINGS: dict[str, Any] = {"concurrency": 1, "lag_warning": 0.0, "cleanup": 5.0, "grace": 3600.0}
"""A worker for one job. It is stopped only when its job is lost, and that job ends by itself."""
_RESCUE_WITHIN = 10.0
_RESCUE_PAUSE = 0.01
_LOCKED_AFTER = 0.5
"""Seconds until a row counts as locked by the handler's own transaction. A heartbeat's statement holds it for less."""


_OF_WORKERS = ("no_worker", "workers_draining", "workers_busy", "unknown_kind", "next")
"""Why a job waits that has no worker: between two attempts it never has one."""


@dataclass(frozen=True, slots=True)
class Look:
    """A job as the database has it now."""

    state: str
    attempt: int
    result: Any
    error: str | None

    @property
    def finished(self) -> bool:
        return self.state in FINISHED

    @property
    def suspended(self) -> bool:
        return self.state == "suspended"

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def waits(self) -> bool:
        """Whether it waits for a worker."""
        return self.state in ("available", "retryable", "scheduled")


@dataclass(frozen=True, slots=True)
class Durably:
    """What a durable handler has around it: `handlers` run its children, `events` are sent to each of its jobs."""

    handlers: Handlers
    events: Sequence[tuple[str, Any]] = ()


class Ground(Protocol):
    """Where jobs are enqueued, run and looked at. One worker at a time."""

    @property
    def written(self) -> list[str]:
        """What transactions have committed, where that is kept as text."""
        ...

    @property
    def has_sockets(self) -> bool:
        """Whether a statement waits at a socket: how often, differs from run to run."""
        ...

    async def enqueue(self, request: JobRequest) -> int: ...

    def worker(self, handlers: Handlers, instrument: Any, *, may_die: bool) -> AbstractAsyncContextManager[Worker]:
        """A worker that is not yet run. `may_die` says that it may be killed as by a signal."""
        ...

    def beside(self, keeps_slot: Callable[[], bool]) -> AbstractAsyncContextManager[None]:
        """In the block its children run too, if `keeps_slot` says that the handler waits for them and is not suspended."""
        ...

    async def rescue(self, job_id: int, *, dead: bool) -> bool:
        """The worker's jobs go back, as by a supervisor that saw it die; if it is `dead`, its connections are gone. Returns
        whether the job went back: a living worker's transaction may hold its lock."""
        ...

    async def look(self, job_id: int) -> Look: ...

    async def waits_for(self, job_id: int) -> list[str]:
        """What keeps a waiting job from being claimed, as sentences."""
        ...

    async def cancel(self, job_id: int) -> None:
        """A person cancels the job."""
        ...

    async def hasten(self, job_id: int) -> None:
        """The job is due now."""
        ...

    async def until_due(self, job_id: int) -> int:
        """Waits until what a suspended job waits for is there. Returns how many lines its history has. Raises
        `ConfigurationError` if it never comes."""
        ...


class MemoryGround:
    """Without a database. What a transaction's `execute` wrote is in `written`, as text."""

    has_sockets = False

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database
        self._store: MemoryStore | None = None
        self._ledger = len(database.ledger)

    @property
    def written(self) -> list[str]:
        return self._database.ledger[self._ledger :]

    async def enqueue(self, request: JobRequest) -> int:
        return self._database.enqueue(
            request.kind,
            request.args,
            queue=request.queue,
            priority=request.priority,
            max_attempts=request.max_attempts,
            options=request.options,
        )

    @asynccontextmanager
    async def worker(self, handlers: Handlers, instrument: Any, *, may_die: bool) -> AsyncGenerator[Worker]:
        store = self._store = MemoryStore(self._database)
        # A client of the worker's own would connect to the database that the environment names, and enqueue there.
        handlers.resources = GivenResources(handlers, None)
        # The server has committed, and its answer is on its way: a crash point of its own.
        store.silence["commit"] = trio.lowlevel.cancel_shielded_checkpoint
        yield MemoryWorker(
            handlers, self._database, memory=store, burst=True, instruments=[instrument], log=False, **SETTINGS
        )

    def beside(self, keeps_slot: Callable[[], bool]) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def rescue(self, job_id: int, *, dead: bool) -> bool:
        if self._store is None:
            return True
        if dead:
            # A dead session's locks are gone, and so are its ears.
            self._database.locked.clear()
            self._database.listeners.clear()
            self._database.idle.clear()
        await MemoryStore(self._database).rescue_sessions([self._store.session])
        return True

    async def look(self, job_id: int) -> Look:
        job = self._database.jobs[job_id]
        result = None if job.result is None else from_jsonb(job.result)
        return Look(str(job.state.value), job.attempt, result, job.error)

    async def waits_for(self, job_id: int) -> list[str]:
        return []

    async def cancel(self, job_id: int) -> None:
        self._database.cancel(job_id, notify=False)

    async def hasten(self, job_id: int) -> None:
        self._database.retry(job_id)

    async def until_due(self, job_id: int) -> int:
        raise AssertionError("no job in memory is suspended")


class DatabaseGround:
    """On a PostgreSQL. A worker that may be killed reaches it through a proxy, which then resets its connections. The others
    have those that workers before them have left, in runs before this one too: a worker's first connections, and the plans of
    its statements, take longer than most handlers."""

    has_sockets = True

    def __init__(self, dsn: str, client: Client, proxy: Proxy, durable: Durably | None) -> None:
        self._dsn = dsn
        self._client = client
        self._proxy = proxy
        self._sessions: list[int] = []
        self._mortal = KeptConnections()
        """Those through the proxy."""
        self._links: Links | None = None
        """Of its last worker."""
        self._events = () if durable is None else durable.events
        self._others = None if durable is None else Others(dsn, durable.handlers)

    def close(self) -> None:
        """Closes the connections through the proxy, and those of a worker that did not end by itself."""
        self._mortal.close()
        if self._links is not None:
            hang_up(self._links)

    @property
    def written(self) -> list[str]:
        return []

    async def enqueue(self, request: JobRequest) -> int:
        if self._others is not None:
            request = msgspec.structs.replace(request, queue=QUEUE)
        (ref,) = await self._client.enqueue_many([request])
        for name, payload in self._events:
            await self._client.send_event(ref.id, name, payload)
        return ref.id

    @asynccontextmanager
    async def worker(self, handlers: Handlers, instrument: Any, *, may_die: bool) -> AsyncGenerator[Worker]:
        self._sessions.clear()
        # A retry is due at once, whatever rate its queue or its key has, and so is the job of the next run.
        await anyio.to_thread.run_sync(forget_rates, self._dsn)
        worker = KeepingWorker(
            handlers,
            self._proxy.dsn if may_die else self._dsn,
            kept=self._mortal if may_die else kept_for(self._dsn, QUEUE),
            burst=True,
            watch=False,
            on_session=self._sessions.append,
            instruments=[instrument],
            log=False,
            queues=None if self._others is None else [QUEUE],
            **SETTINGS,
        )
        self._links = worker.links
        yield worker

    def beside(self, keeps_slot: Callable[[], bool]) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._others is None else self._others.beside(keeps_slot)

    async def rescue(self, job_id: int, *, dead: bool) -> bool:
        if dead:
            self._mortal.close()
            self._proxy.cut()
        store = WorkerStore(self._dsn)
        kept = kept_for(self._dsn, "rescue")
        assert kept is not None  # noqa: S101 -- as long as the ground is open
        kept.lend(store.links, None)
        try:
            with trio.fail_after(_RESCUE_WITHIN):
                locked_at = trio.current_time() + _LOCKED_AFTER
                # A row that the dead worker's transaction has locked is free as soon as the server has noticed.
                while (await self.look(job_id)).running:
                    if not dead and trio.current_time() >= locked_at:
                        return False
                    await store.rescue_sessions(self._sessions)
                    await trio.sleep(_RESCUE_PAUSE)
            kept.take(store.links, None)
            return True
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await store.aclose()

    async def look(self, job_id: int) -> Look:
        job = await self._client.job(job_id)
        return Look(str(job.state), job.attempt, job.result, job.error)

    async def waits_for(self, job_id: int) -> list[str]:
        # The client's own operations do not say it: only `pulse-trio jobs show` does.
        reasons = await self._client._run(why(job_id))  # pyright: ignore[reportPrivateUsage] -- as said
        return [reason.text for reason in reasons if reason.code not in _OF_WORKERS]

    async def cancel(self, job_id: int) -> None:
        await self._client.cancel(job_id)

    async def hasten(self, job_id: int) -> None:
        # Its time may come in between.
        with suppress(InvalidTransition):
            await self._client.retry(job_id)

    async def until_due(self, job_id: int) -> int:
        assert self._others is not None  # noqa: S101 -- only durable jobs are suspended
        return await self._others.until_due(job_id)


@asynccontextmanager
async def open_database(dsn: str, durable: Durably | None = None) -> AsyncGenerator[DatabaseGround]:
    """A ground on a PostgreSQL that has the schema."""
    with keeping_if_none_does(dsn):
        # Before the first nursery, which would put the error into a group.
        await anyio.to_thread.run_sync(_reach, dsn)
        async with open_proxy(dsn) as proxy, open_client(dsn) as client:
            ground = DatabaseGround(dsn, client, proxy, durable)
            try:
                yield ground
            finally:
                ground.close()


def _reach(dsn: str) -> None:
    with connected(dsn):
        pass
