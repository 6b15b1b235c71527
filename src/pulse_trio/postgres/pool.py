"""A structured pool of connections.

The pool lives as long as the block `async with open_pool(dsn) as pool:`. The tasks that open, check and retire connections
run in a nursery of that block; at its end every connection is closed and no task remains.

How it works: a free connection is handed out at once, the most recently used first (its caches are warm, and the others may
become idle and be retired). Without a free one the caller queues, first come, first served, and if the pool may grow, a task
opens a connection *for the queue*, not for the caller: a caller that gives up wastes no connection, and a caller that gets a
returned connection does not wait for the new one. A returned connection is made idle or closed before another caller gets it;
a connection lost while in use is counted, dropped and replaced.

Trade-offs: a connection is checked without a round trip before it is handed out (the socket of an idle connection becomes
readable for a notification or when the server closes it) unless it was idle for `check_after` seconds. Known flaw: the pool
cannot take a connection back from a caller that keeps it.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

import trio
from psycopg import errors as e

from pulse_trio.errors import DatabaseUnavailable, UsageError
from pulse_trio.postgres.dsn import redact, shown_dsn
from pulse_trio.postgres.pool_queue import PoolQueue
from pulse_trio.postgres.pool_slots import Opening, Slot
from pulse_trio.postgres.pool_statistics import PoolStatistics
from pulse_trio.postgres.reconnecting import reconnect_delay

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pulse_trio.postgres.pool_slots import Connection
    from pulse_trio.postgres.reconnecting import Configure

logger = logging.getLogger("pulse_trio.postgres")

_CHECK_SECONDS = 5.0


class PoolTimeout(DatabaseUnavailable):
    """No connection became free, or could be opened, in time."""


@dataclass(frozen=True)
class _Limits:
    min_size: int
    max_size: int
    timeout: float
    max_idle: float
    check_after: float

    def __post_init__(self) -> None:
        if not (0 <= self.min_size <= self.max_size and self.max_size > 0):
            raise UsageError(f"a pool needs 0 <= min_size <= max_size and max_size > 0, not {self}")


class TrioPool:
    """A pool of connections; created by `open_pool`."""

    def __init__(
        self,
        opening: Opening,
        limits: _Limits,
        reset: Configure | None,
        nursery: trio.Nursery,
    ) -> None:
        self._opening = opening
        self._limits = limits
        self._reset = reset
        self._nursery = nursery
        self._idle: list[Slot] = []
        self._lent: set[Slot] = set()
        self._queue = PoolQueue()
        self._being_made = 0
        self._closed = False
        self._counters = PoolStatistics()
        self._last_failure: Exception | None = None
        self._nap = trio.CancelScope()

    def __repr__(self) -> str:
        return f"<TrioPool {self._size()}/{self._limits.max_size} {shown_dsn(self._opening.dsn)!r}>"

    @property
    def statistics(self) -> PoolStatistics:
        """The counters and the current state."""
        return replace(self._counters, size=self._size(), idle=len(self._idle), waiting=len(self._queue))

    def _size(self) -> int:
        return len(self._idle) + len(self._lent)

    # Handing out

    @asynccontextmanager
    async def connection(self, *, timeout: float | None = None) -> AsyncGenerator[Connection]:  # noqa: ASYNC109 - as psycopg's
        """A connection for the block: committed at its end, rolled back when it raises, as in psycopg's pool.

        Args:
            timeout: seconds to wait for one; default the pool's. The block itself has no limit.

        Raises:
            PoolTimeout: none in time.
            trio.ClosedResourceError: the pool was closed.
        """
        slot = await self.take(self._limits.timeout if timeout is None else timeout)
        connection = slot.connection
        try:
            yield connection
            if connection.is_over:
                await trio.lowlevel.checkpoint_if_cancelled()
            elif connection.broken or not connection.closed:
                await connection.commit()
        finally:
            await self.take_back(slot)  # noqa: ASYNC102 - bounded by its mode

    async def take(self, seconds: float = inf, *, begins: bytes = b"") -> Slot:
        """A connection without a block, which costs 5 µs: `take_back` must follow, whatever happens.

        Args:
            seconds: to wait for one.
            begins: the commands that begin the caller's transaction. If it has to wait, the user before may send them with
                its own COMMIT (`TrioConnection.finish`), or those of another caller; then the slot is `begun`.

        Raises:
            PoolTimeout: none in time.
            trio.ClosedResourceError: the pool was closed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._closed:
            raise trio.ClosedResourceError("the pool is closed: the block that opened it has ended")
        self._counters.requests += 1
        while self._idle:
            slot = self._idle.pop()
            self._lent.add(slot)
            if await self._is_alive(slot):
                return slot
            await self.take_back(slot)
        self._counters.queued += 1
        if seconds == inf:  # a scope costs 10 µs
            return await self._next_offered(begins)
        with trio.move_on_after(seconds):
            return await self._next_offered(begins)
        self._counters.timeouts += 1
        raise PoolTimeout(f"no connection became free within {seconds:g} s{self._reason()}")

    async def _next_offered(self, begins: bytes) -> Slot:
        started = trio.current_time()
        waiter = self._queue.join(begins)
        self._grow()
        slot = await self._queue.turn_of(waiter)
        self._counters.wait_seconds += trio.current_time() - started
        return slot

    @property
    def begins_next(self) -> bytes:
        """What the caller that has waited longest has said to `take`."""
        return self._queue.begins

    def _reason(self) -> str:
        if self._last_failure is None:
            return f" ({len(self._lent)} lent of at most {self._limits.max_size})"
        return f"; the last attempt to connect failed: {redact(str(self._last_failure), self._opening.dsn)}"

    async def _is_alive(self, slot: Slot) -> bool:
        """Whether an idle connection still works; asks the server only if it was idle for long."""
        if slot.connection.was_closed_by_server():
            return False
        if trio.current_time() - slot.idle_since < self._limits.check_after:
            return True
        try:
            with trio.move_on_after(_CHECK_SECONDS):
                await slot.connection.ping()
                return True
        except e.Error as ex:
            self._last_failure = ex
        except BaseException:
            await self.take_back(slot)  # noqa: ASYNC102 - bounded by its mode
            raise
        slot.connection.abort()
        return False

    async def take_back(self, slot: Slot) -> None:
        """Rolls back what is open, and makes the connection another caller's, or closes it.

        Args:
            slot: as `take` gave it; nothing of it may be used any more.
        """
        is_reset = slot.connection.is_reset
        if (begun := slot.connection.begun) and not slot.connection.closed:
            slot.connection = slot.connection.renewed(slot.made)
            if self._queue.begins and trio.current_time() < slot.expires_at:
                slot.begun = begun
                self._queue.hand(slot)
                return
        try:
            await slot.connection.make_idle()
        except BaseException:
            # Cancelled, and the server did not answer the rollback in time either.
            slot.connection.abort()
            self._give_up(slot)
            raise
        if slot.connection.closed:
            self._give_up(slot)
            return
        if self._reset is None:
            await self._lay_down(slot)
            return
        # Done at once: nothing that the caller kept may be used any more. The rest happens while the caller goes on.
        slot.connection = slot.connection.renewed(slot.made)
        if self._closed or is_reset:
            await self._lay_down(slot)
        else:
            self._nursery.start_soon(self._restore, slot, self._reset, name="pool: reset")

    async def _restore(self, slot: Slot, reset: Configure) -> None:
        try:
            with trio.fail_after(_CHECK_SECONDS):
                await reset(slot.connection)
                await slot.connection.make_idle()
        except (e.Error, trio.TooSlowError) as ex:
            logger.debug("closing %r, which could not be reset: %s", slot.connection, ex)
            slot.connection.abort()
        except BaseException:
            slot.connection.abort()
            self._give_up(slot)
            raise
        if slot.connection.closed:
            self._give_up(slot)
        else:
            await self._lay_down(slot)

    async def _lay_down(self, slot: Slot) -> None:
        self._lent.discard(slot)
        if self._closed or trio.current_time() >= slot.expires_at:
            await self._retire(slot)
        else:
            self._offer(slot)

    def _give_up(self, slot: Slot) -> None:
        self._lent.discard(slot)
        self._counters.lost += slot.connection.broken
        self._refill()

    def _offer(self, slot: Slot) -> None:
        """Give a usable connection to the longest waiter, or make it idle."""
        if self._queue:
            self._lent.add(slot)
            self._queue.hand(slot)
        else:
            slot.idle_since = trio.current_time()
            self._idle.append(slot)
            self._nap.deadline = min(self._nap.deadline, slot.expires_at, slot.idle_since + self._limits.max_idle)

    # Opening

    def _grow(self) -> None:
        """Open one more connection if a caller waits for it and the pool may grow."""
        if self._being_made < len(self._queue) and self._size() + self._being_made < self._limits.max_size:
            self._start_making()

    def _refill(self) -> None:
        """Replace lost or retired connections, as far as they are needed."""
        while not self._closed and self._size() + self._being_made < self._limits.min_size:
            self._start_making()
        if not self._closed:
            self._grow()

    def _start_making(self) -> None:
        self._being_made += 1
        self._nursery.start_soon(self._make, name="pool: connect")

    async def _make(self) -> None:
        try:
            slot = await self._make_when_possible()
        finally:
            self._being_made -= 1
        if slot is not None and self._closed:
            # Its last answer came in the very turn in which the pool was closed: no other code knows of it.
            await slot.connection.close()
        elif slot is not None:
            self._offer(slot)

    async def _make_when_possible(self) -> Slot | None:
        """Try with growing pauses until there is a connection, or none is needed any more."""
        attempt = 0
        while self._queue or self._size() < self._limits.min_size:
            try:
                return await self.make_slot()
            except (DatabaseUnavailable, e.Error) as ex:
                self._last_failure = ex
                self._counters.connect_failures += 1
            await trio.sleep(reconnect_delay(attempt))
            attempt += 1
        return None

    async def make_slot(self) -> Slot:
        """Connect once."""
        slot = await self._opening.open()
        self._counters.connections += 1
        self._last_failure = None
        return slot

    # Retiring

    async def run(self) -> None:
        """Open the pool's further connections, then retire connections that are too old or idle for too long, forever."""
        self._refill()
        while True:
            with trio.CancelScope(deadline=self._next_retirement()) as self._nap:
                await trio.sleep_forever()
            for slot in [slot for slot in self._idle if self._retires_at(slot) <= trio.current_time()]:
                if self._retires_at(slot) <= trio.current_time():  # each retired connection may spare the next
                    self._idle.remove(slot)
                    await self._retire(slot)

    def _next_retirement(self) -> float:
        return min(map(self._retires_at, self._idle), default=float("inf"))

    def _retires_at(self, slot: Slot) -> float:
        if self._size() <= self._limits.min_size:
            return slot.expires_at
        return min(slot.expires_at, slot.idle_since + self._limits.max_idle)

    async def _retire(self, slot: Slot) -> None:
        self._counters.retired += 1
        await slot.connection.close()
        self._refill()

    async def open(self) -> None:
        """Open the first connection immediately, so that a wrong DSN is raised to the opener."""
        if self._limits.min_size:
            self._offer(await self.make_slot())

    async def close(self) -> None:
        """Refuse further requests and close idle connections; a connection in use is closed when it comes back."""
        self._closed = True
        self._queue.close("the pool was closed")
        while self._idle:
            await self._idle.pop().connection.close()


@asynccontextmanager
async def open_pool(
    dsn: str = "",
    *,
    min_size: int = 1,
    max_size: int = 10,
    timeout: float = 30.0,  # noqa: ASYNC109 - the default of every request, not of this function
    max_lifetime: float = 3600.0,
    max_idle: float = 600.0,
    check_after: float = 30.0,
    configure: Configure | None = None,
    reset: Configure | None = None,
    **options: Any,
) -> AsyncGenerator[TrioPool]:
    """A pool of connections that lives as long as the block.

    With `min_size` above 0 the first connection is made before the block starts, and a database that cannot be
    reached is an error at once; afterwards the pool reconnects with growing, jittered pauses.

    Args:
        dsn: connection string; keepalives, `tcp_user_timeout` and `connect_timeout` are added unless it has them.
        min_size: connections kept even when idle.
        max_size: connections at most.
        timeout: seconds a request waits for a connection.
        max_lifetime: seconds after which a connection is replaced, less up to a tenth.
        max_idle: seconds after which an idle connection above `min_size` is closed.
        check_after: seconds of idleness after which a connection is checked with a round trip before it is handed out.
        configure: called with each new connection.
        reset: called with each connection that comes back, before it is reused; if it raises, the connection is closed. With
            it every caller gets its own object, as `configure` left it, which is closed when it comes back. `discard_all` is
            such a function.
        options: further arguments of `TrioConnection.connect`: `autocommit`, `row_factory`, `prepare_threshold`...

    Raises:
        DatabaseUnavailable: the first connection could not be made.
        ConfigurationError: not a connection string.
        UsageError: impossible sizes.
    """
    limits = _Limits(min_size, max_size, timeout, max_idle, check_after)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        pool = TrioPool(Opening(dsn, configure, options, max_lifetime), limits, reset, nursery)
        try:
            await pool.open()
            nursery.start_soon(pool.run, name="pool: retire")
            yield pool
        except BaseException as ex:  # noqa: ASYNC103 - raised below
            failure = ex
        finally:
            await pool.close()  # noqa: ASYNC102 - never waits
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
