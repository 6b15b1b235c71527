"""Waiting for ends: one listening connection for a whole client, and polling behind it.

A waiter says what it waits for (a job by its id, a batch by the negative of its), and looks for itself: once when its end
would be told, again whenever something was. Two tasks in the client's task group, started by the first wait, do the rest:

- one listens. It holds an advisory lock for each id that is waited for, by which the statements that finish jobs know whom to
  tell (tell_end() in the schema); the waiter looks after the lock is held, so nothing ends unnoticed in between;
- one polls, every id in one statement: 50 ms after a wait began, then ever more seldom, to every 2 s, or every 0.5 s for
  what nobody will tell. It covers a lost notification, a lost connection, and an end that was under way when the wait began.

Trade-offs: a client holds at most 64 such locks (the server's lock table is small, and everybody's); the 65th wait polls. A
connection through a pooler could leave its locks on somebody else's, so it is noticed (the server's process is not the one
the connection was made to), and such a client only polls.
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import psycopg
from psycopg.sql import SQL, Identifier

from ..errors import DatabaseUnavailable, InvalidArguments, PulseTrioError
from ..postgres import reconnect_delay
from ..ration import Ration
from ..store import operations, waiting

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence

    from anyio.abc import TaskGroup

    from ..postgres import AsyncioPool, TrioPool

T = TypeVar("T")

LOCKS = 64
"""Ends one client may be told of; more waits than these poll."""
_FIRST = 0.05
_TOLD = 2.0
_UNTOLD = 0.5
"""Seconds between two questions: the first, and the longest for a wait that will be told and for one that will not."""
_LINGER = 1.0
"""Seconds for which locks of waits that are over are kept: the next wait then drops them in passing."""
_ARMING = 1.0
"""Seconds a waiter waits for its lock before it looks; polling is behind it anyway."""


class _Wait:
    """One id that somebody waits for."""

    __slots__ = ("armed", "look_at", "news", "pause", "told", "users")

    def __init__(self) -> None:
        self.users = 0
        self.told = False
        self.armed = anyio.Event()
        self.news = anyio.Event()
        self.pause = _FIRST
        self.look_at = anyio.current_time() + _FIRST

    def tell(self) -> None:
        """Everybody who waits for it looks."""
        self.news.set()
        self.news = anyio.Event()


class Waits:
    """A client's. `pool` is its pool, `connect` makes the listening connection, `tasks` is where its own tasks live."""

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
        self._tasks = tasks
        self._started = False
        self._waits: dict[int, _Wait] = {}
        self._held: set[int] = set()
        self._deaf = False
        self._changed = anyio.Event()
        self._hearing: anyio.CancelScope | None = None
        self._dozing: anyio.CancelScope | None = None

    async def until(self, key: int, look: Callable[[], Awaitable[T | None]], limit: float | None, name: str) -> T:
        """What `look` finds, as soon as it finds anything. Raises what it raises, and `TimeoutError` after `limit` seconds.

        A database that is unavailable is waited for as the job is: `look` is asked again, at first after 0.1 s and later after
        up to 4 s. Only a limit of 0, which looks once, raises `DatabaseUnavailable`.
        """
        if limit is not None and not 0 <= limit < math.inf:
            raise InvalidArguments(f"timeout must be seconds from 0 on, or None to wait for ever; got {limit!r}.")
        if limit == 0:
            found = await look()
            if found is not None:
                return found
        lost: DatabaseUnavailable | None = None
        failures = 0
        ration = Ration(0.004)
        with anyio.move_on_after(limit), self._waiting(key) as wait:
            with anyio.move_on_after(_ARMING):
                await wait.armed.wait()
            while True:
                news = wait.news
                try:
                    found = await look()
                except DatabaseUnavailable as error:
                    lost = error
                    await anyio.sleep(reconnect_delay(failures))
                    failures += 1
                    continue
                if found is not None:
                    return found
                lost, failures = None, 0
                await news.wait()
                # Every role may notify. Forged ends cost reads that find nothing, and each such read delays the next.
                await anyio.sleep(ration.pause)
                ration.looked(found=False)
        said = f"{name} did not finish within {limit:g} s."
        raise TimeoutError(said if lost is None else f"{said} The database could not be asked: {lost}") from lost

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
            self._tasks.start_soon(self._listen)
            self._tasks.start_soon(self._poll)
        self._changed.set()
        self._hear_until(-math.inf)
        if self._dozing is not None:
            self._dozing.deadline = min(self._dozing.deadline, anyio.current_time() + _FIRST)

    def _hear_until(self, deadline: float) -> None:
        """The listener lets go of its connection by then, to say what it waits for."""
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
            except (psycopg.OperationalError, psycopg.InterfaceError, PulseTrioError):
                # Nobody needs to know: polling goes on meanwhile, and says what is wrong with the database if anything is.
                failures = 0 if self._held else failures + 1
                self._deafen()
                self._changed = anyio.Event()
                if self._waits:
                    # Without this the waits that go on would poll until another wait began.
                    self._changed.set()
                await anyio.sleep(reconnect_delay(failures))

    def _deafen(self) -> None:
        """No end will be told for now: who waits for a lock waits no longer, and all look again soon."""
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
        """Hears until the connection is lost, by raising; False at once if it is a pooler's."""
        pid, channel = await operations.run(connection, self._schema, waiting.place())
        if pid != connection.info.backend_pid:
            return False
        await connection.execute(SQL("LISTEN {}").format(Identifier(channel)))
        self._deaf = False
        while True:
            self._changed = anyio.Event()
            await self._hold(connection)
            with anyio.CancelScope(deadline=self._stale_until()) as self._hearing:
                if not self._changed.is_set():
                    async for note in connection.notifies():
                        self._tell(_ended(note.payload))
            self._hearing = None

    async def _hold(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Takes the locks of new waits, then drops those of waits that are over."""
        wanted = list(self._waits)[:LOCKS]
        new = [key for key in wanted if key not in self._held]
        if new:
            await operations.run(connection, self._schema, waiting.hold(new, first=not self._held))
            self._held.update(new)
            for key in new:
                if (wait := self._waits.get(key)) is not None:
                    # Whoever polled so far looks once more: its end may have come just before the lock.
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
            # A little ahead, so that waits that began together go on being asked about together.
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
        except DatabaseUnavailable:
            # A wait outlasts that: the database comes back, and so does the job's end.
            return
        except PulseTrioError:
            # Ours to survive, and the waiters' to hear: they look, and get the same.
            ended = due
        self._tell(ended)


def _ended(payload: str) -> list[int]:
    """The job or batch that a notification names; none if it names nothing, as one that a stranger sent may."""
    digits = payload.removeprefix("-")
    return [int(payload)] if digits.isascii() and digits.isdigit() and len(digits) < 20 else []


@asynccontextmanager
async def open_waits(
    schema: str,
    *,
    pool: TrioPool | AsyncioPool,
    connect: Callable[[], Awaitable[psycopg.AsyncConnection[Any]]],
) -> AsyncGenerator[Waits]:
    """A client's waits; their tasks end with the block."""
    failure: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield Waits(schema, pool=pool, connect=connect, tasks=tasks)
        except BaseException as error:  # noqa: ASYNC103 - raised below
            # Not through the group: the caller's exception must not come back as a group of one.
            failure = error
        finally:
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
