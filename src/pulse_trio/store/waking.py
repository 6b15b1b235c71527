"""Wake-ups: this worker announces when it is idle, and receives the notifications of its queues' producers."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import trio

from ..errors import DatabaseUnavailable
from ..sql import render, statement
from .arrays import texts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ..postgres import TrioConnection
    from .leases import Leases
    from .links import Links

_ANNOUNCED_SINGLY = 32
"""A worker of more queues announces itself for all queues: each announced queue is a lock, and a connection's share of
PostgreSQL's lock table is 64 by default."""

_ANNOUNCE_AGAIN = 1.0
"""Seconds until a worker announces itself again whose announcement failed because another session held the lock."""


class Waking:
    """`queues` are the worker's, None for every queue."""

    def __init__(self, links: Links, schema: str, leases: Leases, queues: Sequence[str] | None) -> None:
        self._link = links.idle
        self._listener = links.listen
        self._schema = schema
        self._leases = leases
        self._announced = {"queues": None if queues is None or len(queues) > _ANNOUNCED_SINGLY else texts(queues)}
        self._generation = 0
        """The generation of the connection that holds the announcement; 0 while there is none."""
        self._announce_again = math.inf

    @property
    def idle(self) -> bool:
        """Whether producers have been asked to notify, and still are."""
        if trio.current_time() >= self._announce_again:
            self._generation = 0
        return self._generation != 0 and self._generation == self._link.generation

    async def announce_idle(self) -> None:
        """Asks the producers of this worker's queues to notify from now on: see wake() in the schema. Ends with `withdraw_idle`
        or the connection."""
        async with self._link.using() as connection:
            if self._generation == self._link.generation:
                return
            # Through a pooler no worker can be notified: this one waits for its next poll.
            self._announce_again = math.inf
            if not connection.pooled:
                try:
                    await connection.execute(statement("announce_idle", self._schema), self._announced, prepare=True)
                except psycopg.errors.LockNotAvailable:
                    # Another session holds that lock. Producers notify while any session holds it, but not when that session
                    # lets go, so this is tried again.
                    self._announce_again = trio.current_time() + _ANNOUNCE_AGAIN
            self._generation = self._link.generation

    async def withdraw_idle(self) -> None:
        """Ends the request to notify: this worker looks for itself."""
        async with self._link.using() as connection:
            if self._generation == self._link.generation:
                self._generation = 0
                if not connection.pooled:
                    await connection.execute(statement("withdraw_idle", self._schema), self._announced, prepare=True)

    async def listen(self, on_notify: Callable[[str], None]) -> None:
        """Calls `on_notify(queue)` for each wake-up, and once with "" when it begins to listen. Ends only by raising, when the
        connection is lost or answers nothing (it is asked every half of the lease)."""
        async with self._listener.using(patience=math.inf) as connection:
            if connection.pooled:
                raise DatabaseUnavailable(
                    "listener: this connection goes through a pooler, which hears no notifications: jobs start at the next "
                    "poll. Give the database's own address as direct_dsn (--direct-dsn) to have them start at once"
                )
            await self._answered(
                connection, partial(connection.execute, render('LISTEN :"schema"', self._schema).encode())
            )
            on_notify("")
            while True:
                async for notify in connection.notifies(timeout=self._leases.silence):
                    on_notify(notify.payload)
                # The server may be gone: a network that forgot this connection reports nothing, and a proxy in between answers
                # keepalives.
                await self._answered(connection, connection.ping)

    async def _answered(self, connection: TrioConnection[Any], ask: Callable[[], Awaitable[object]]) -> None:
        """Asks the server something. The link has no time limit for it, because notifications have none."""
        patience = self._leases.patience
        with trio.move_on_after(patience) as asked:
            await ask()
        if asked.cancelled_caught:
            connection.abort()
            raise DatabaseUnavailable(f"listener: the database did not answer within {patience:g} s")
