"""Waiting for jobs and batches to end: one listening connection for a whole client, with polling as the fallback.

A waiter registers an id (a job's, or the negative of a batch's), and reads the state itself: once when notifications for the
id are set up, and again after each notification. Two tasks in the client's task group, started by the first wait, do the
rest:

- one listens. It holds an advisory lock for each id, which tells the statements that finish jobs whom to notify (tell_end()
in
  the schema). The waiter reads the state after the lock is held, so that it misses no end in between;
- one polls, all ids in one statement: 50 ms after a wait began, then less and less often, down to every 2 s, or every 0.5 s
for
  ids without notifications. It covers a lost notification, a lost connection, and an end that was under way when the wait
  began.

Trade-offs: a client holds at most 64 such locks, because the server's lock table is small and shared; the 65th wait polls.
Through a pooler the locks could stay on another client's connection, so the client detects a pooler (the server's process is
not the one the connection was made to) and only polls.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import psycopg
import sniffio
import trio
from psycopg.sql import SQL, Identifier

from ..errors import DatabaseUnavailable, InvalidArguments, PulseTrioError, UsageError
from ..postgres import reconnect_delay
from ..ration import Ration
from ..store import operations, waiting

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence

    from anyio.abc import TaskGroup

    from ..postgres import AsyncioPool, TrioPool

T = TypeVar("T")

LOCKS = 64
"""How many ids one client is notified of; further waits poll."""
NO_ANSWER = " The database had not answered by then."
"""What follows the message of a wait that was over while it read the state."""
_FIRST = 0.05
_TOLD = 2.0
_UNTOLD = 0.5
"""Seconds between two polls: the first pause, and the longest for a wait with and without notifications."""
_LINGER = 1.0
"""Seconds for which the locks of finished waits are kept; the next wait then releases them."""
_ARMING = 1.0
"""Seconds a waiter waits for its lock before it reads the state; polling covers the rest."""


class _Wait:
    """One id with waiting callers."""

    __slots__ = ("armed", "look_at", "news", "pause", "told", "users")

    def __init__(self) -> None:
        self.users = 0
        self.told = False
        self.armed = anyio.Event()
        self.news = anyio.Event()
        self.pause = _FIRST
        self.look_at = anyio.current_time() + _FIRST

    def tell(self) -> None:
        """Makes all of its waiters read the state."""
        self.news.set()
        self.news = anyio.Event()


class _Block:
    """The block of `open_client`: its tasks, and the run of the event loop that it is in."""

    __slots__ = ("_run", "_tasks")

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._run = _current_run()

    def start(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts a task that ends with the block."""
        self._tasks.start_soon(function)

    def end(self) -> None:
        """Ends the tasks, and all use of the client."""
        self._tasks.cancel_scope.cancel()

    def check_usable(self) -> None:
        """Raises `UsageError` once the client's block has ended, and in another run of the event loop than the client's: there
        a connection would make tasks of this one wait for what never comes."""
        if _current_run() is not self._run:
            raise UsageError(
                "This client belongs to another run of Trio or asyncio, which has called open_client(): open another client in "
                "this run."
            )
        if self._tasks.cancel_scope.cancel_called:
            raise UsageError("The client is closed: the block of its open_client() has ended.")


class Waits:
    """The waits of one client. `pool` is the client's pool, `connect` opens the listening connection, `tasks` runs its two
    tasks."""

    def __init__(
        self,
        schema: str,
        *,
        pool: TrioPool | AsyncioPool,
        connect: Callable[[], Awaitable[psycopg.AsyncConnection[Any]]],
        tasks: TaskGroup,
    ) -> None:
        self._schema = schema
        self._pool = pool
        self._connect = connect
        self._block = _Block(tasks)
        self._started = False
        self._waits: dict[int, _Wait] = {}
        self._held: set[int] = set()
        self._deaf = False
        self._away: Exception | None = None
        """Why the database could not be reached, the last time that it could not."""
        self._changed = anyio.Event()
        self._hearing: anyio.CancelScope | None = None
        self._dozing: anyio.CancelScope | None = None

    async def until(
        self, key: int, look: Callable[[], Awaitable[T | None]], limit: float | None, name: str, hint: str = ""
    ) -> T:
        """Returns the first result of `look` that is not None. Raises what `look` raises, `TimeoutError` after `limit` seconds,
        which ends with the `hint`, and `UsageError` where the client's block has ended, or ends meanwhile.

        If the database is unavailable, `look` is called again, at first after 0.1 s and later after up to 4 s. Only a limit
        of 0, which looks once, raises `DatabaseUnavailable`.
        """
        check_timeout(limit)
        self.check_usable()
        if limit == 0:
            found = await look()
            if found is not None:
                return found
        lost: Exception | None = None
        failures, looking = 0, False
        ration = Ration(0.004)
        with anyio.move_on_after(limit), self._waiting(key) as wait:
            with anyio.move_on_after(_ARMING):
                await wait.armed.wait()
            while True:
                news, looking = wait.news, True
                self.check_usable()
                try:
                    found = await look()
                except DatabaseUnavailable as error:
                    lost = error
                    await anyio.sleep(reconnect_delay(failures))
                    failures += 1
                    continue
                if found is not None:
                    return found
                lost, failures, looking, self._away = None, 0, False, None
                await news.wait()
                # Every role may notify. A forged notification costs a read that finds nothing, and each such read delays the
                # next.
                await anyio.sleep(ration.pause)
                ration.looked(found=False)
        lost = lost or self._away
        if lost is not None:
            hint = f" The database could not be reached: {lost}"
        elif looking:
            hint = NO_ANSWER
        raise TimeoutError(f"{name} did not finish within {limit:g} s.{hint}") from lost

    def check_usable(self) -> None:
        """Raises `UsageError` once the client's block has ended, and in another run of the event loop than the client's."""
        self._block.check_usable()

    def close(self) -> None:
        """The client's block ends: so do the waits that other tasks have begun."""
        self._block.end()
        for wait in self._waits.values():
            wait.armed.set()
            wait.tell()

    @contextmanager
    def _waiting(self, key: int) -> Generator[_Wait]:
        wait = self._waits.get(key)
        if wait is None:
            wait = self._waits[key] = _Wait()
            if key in self._held:
                wait.told = True
                wait.armed.set()
            elif self._deaf or len(self._waits) > LOCKS:
                wait.armed.set()
            self._began()
        wait.users += 1
        try:
            yield wait
        finally:
            wait.users -= 1
            if not wait.users:
                del self._waits[key]
                self._hear_until(anyio.current_time() + _LINGER)

    def _began(self) -> None:
        if not self._started:
            self._started = True
            self._block.start(self._listen)
            self._block.start(self._poll)
        self._changed.set()
        self._hear_until(-math.inf)
        if self._dozing is not None:
            self._dozing.deadline = min(self._dozing.deadline, anyio.current_time() + _FIRST)

    def _hear_until(self, deadline: float) -> None:
        """Interrupts the listener's wait, so that it can update its locks on the connection."""
        if self._hearing is not None:
            self._hearing.deadline = min(self._hearing.deadline, deadline)

    def _tell(self, keys: Sequence[int]) -> None:
        for key in keys:
            if (wait := self._waits.get(key)) is not None:
                wait.tell()

    # Listening

    async def _listen(self) -> None:
        failures = 0
        while True:
            await self._changed.wait()
            try:
                connection = await self._connect()
                try:
                    if not await self._hear(connection):
                        self._deafen()
                        return
                finally:
                    await connection.close()  # noqa: ASYNC102 -- never waits
            except (psycopg.OperationalError, psycopg.InterfaceError, PulseTrioError) as error:
                # No error needed: polling goes on, and a wait whose time is over says what the last one was.
                self._away = error if isinstance(error, (psycopg.OperationalError, DatabaseUnavailable)) else None
                failures = 0 if self._held else failures + 1
                self._deafen()
                self._changed = anyio.Event()
                if self._waits:
                    # Without this the remaining waits would poll until another wait began.
                    self._changed.set()
                await anyio.sleep(reconnect_delay(failures))

    def _deafen(self) -> None:
        """Notifications are lost for now: waits for a lock end, and all waiters read the state again soon."""
        self._deaf = True
        self._held.clear()
        soon = anyio.current_time() + _FIRST
        for wait in self._waits.values():
            wait.told = False
            wait.armed.set()
            wait.pause, wait.look_at = _FIRST, min(wait.look_at, soon)
        if self._dozing is not None:
            self._dozing.deadline = min(self._dozing.deadline, soon)

    async def _hear(self, connection: psycopg.AsyncConnection[Any]) -> bool:
        """Listens until the connection is lost, which raises; returns False at once if it is a pooler's."""
        pid, channel = await operations.run(connection, self._schema, waiting.place())
        if pid != connection.info.backend_pid:
            return False
        await connection.execute(SQL("LISTEN {}").format(Identifier(channel)))
        self._deaf, self._away = False, None
        while True:
            self._changed = anyio.Event()
            await self._hold(connection)
            with anyio.CancelScope(deadline=self._stale_until()) as self._hearing:
                if not self._changed.is_set():
                    async for note in connection.notifies():
                        self._tell(_ended(note.payload))
            self._hearing = None

    async def _hold(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Takes the locks of new waits, then releases those of finished waits."""
        wanted = list(self._waits)[:LOCKS]
        new = [key for key in wanted if key not in self._held]
        if new:
            await operations.run(connection, self._schema, waiting.hold(new, first=not self._held))
            self._held.update(new)
            for key in new:
                if (wait := self._waits.get(key)) is not None:
                    # A wait that polled so far reads once more: its end may have come just before the lock.
                    wait.told = True
                    wait.armed.set()
                    wait.tell()
        stale = [key for key in self._held if key not in self._waits]
        if stale:
            last = len(stale) == len(self._held)
            await operations.run(connection, self._schema, waiting.drop(stale, last=last))
            self._held.difference_update(stale)

    def _stale_until(self) -> float:
        stale = any(key not in self._waits for key in self._held)
        return anyio.current_time() + _LINGER if stale else math.inf

    # Polling

    async def _poll(self) -> None:
        while True:
            next_look = min((wait.look_at for wait in self._waits.values()), default=math.inf)
            with anyio.CancelScope(deadline=next_look) as self._dozing:
                await anyio.sleep_forever()
            self._dozing = None
            now = anyio.current_time()
            # Slightly early, so that waits that began together keep being polled together.
            due = [key for key, wait in self._waits.items() if wait.look_at <= now + _FIRST / 2]
            if due:
                await self._look_for(due, now)

    async def _look_for(self, due: Sequence[int], now: float) -> None:
        for key in due:
            wait = self._waits[key]
            wait.pause = min(wait.pause * 2, _TOLD if wait.told else _UNTOLD)
            wait.look_at = now + wait.pause
        try:
            async with self._pool.connection() as connection:
                ended = await operations.run(connection, self._schema, waiting.ended(due))
        except DatabaseUnavailable as error:
            # A wait survives an outage: it goes on when the database is back.
            self._away = error
            return
        except PulseTrioError:
            # This task survives the error; the waiters read the state and get the same error.
            ended = due
        self._tell(ended)


def _current_run() -> object:
    """The caller's loop of asyncio, or its run of Trio; None outside of both."""
    try:
        # As open_client chooses. In Trio's guest mode one thread has both.
        if sniffio.current_async_library() == "asyncio":
            return asyncio.get_running_loop()
        return trio.lowlevel.current_trio_token()
    except (sniffio.AsyncLibraryNotFoundError, RuntimeError):
        return None


def check_timeout(seconds: object) -> None:
    """Raises `InvalidArguments` for what is no time to wait."""
    if seconds is not None and (
        isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf
    ):
        raise InvalidArguments(f"timeout must be seconds from 0 on, or None to wait forever; got {seconds!r}.")


def _ended(payload: str) -> list[int]:
    """The job or batch that a notification names; None for a malformed one, which any role may send."""
    digits = payload.removeprefix("-")
    return [int(payload)] if digits.isascii() and digits.isdigit() and len(digits) < 20 else []


@asynccontextmanager
async def open_waits(
    schema: str,
    *,
    pool: TrioPool | AsyncioPool,
    connect: Callable[[], Awaitable[psycopg.AsyncConnection[Any]]],
) -> AsyncGenerator[Waits]:
    """The waits of a client; their tasks end with the block."""
    failure: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        waits = Waits(schema, pool=pool, connect=connect, tasks=tasks)
        try:
            yield waits
        except BaseException as error:  # noqa: ASYNC103 - raised below
            # Not through the group: the caller's exception must not come back as a group of one.
            failure = error
        finally:
            waits.close()
    if failure is not None:
        raise failure
