"""A connection to each of the tests' databases that what looks at it, or fills it, leaves to the next that does: a new one, and
what it must read of the catalogue first, costs the server 5 to 11 ms, fifty times what most of their statements do."""

from __future__ import annotations

import select
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.pq import TransactionStatus

from pulse_trio.postgres import Link

if TYPE_CHECKING:
    from collections.abc import Generator

    from pulse_trio.postgres import TrioConnection
    from pulse_trio.store import WorkerStore

_idle: dict[str, tuple[list[psycopg.Connection[Any]], list[psycopg.Connection[Any]]]] = {}
"""By the DSN of a database, since another DSN means another way there, or another session: those that plan each statement anew,
and those that plan it once."""


@contextmanager
def keeping(dsn: str) -> Generator[None]:
    """Connections to this database are kept while the block runs."""
    _idle[dsn] = [], []
    try:
        yield
    finally:
        for connection in chain(*_idle.pop(dsn)):
            connection.close()


@contextmanager
def lent(dsn: str, *, planned_once: bool = False) -> Generator[psycopg.Connection[Any]]:
    """A connection in autocommit mode, not necessarily new: whoever has it leaves its session as it was.

    A test may restart the server or end its sessions: a connection that has heard anything meanwhile is not lent again. To plan
    a query of `pulse.jobs` takes ten times as long as to answer it: who asks the same again and again has it `planned_once`.
    """
    kept = _idle.get(dsn)
    idle = None if kept is None else kept[planned_once]
    connection = None
    while idle and connection is None:
        if is_quiet(found := idle.pop()):
            connection = found
        else:
            found.close()
    if connection is None:
        # Else without prepared statements: a test may migrate the database between two of them.
        connection = psycopg.connect(dsn, autocommit=True, prepare_threshold=0 if planned_once else None)
        if planned_once:
            connection.execute("SET plan_cache_mode = force_generic_plan", prepare=False)
    try:
        yield connection
    except BaseException:
        connection.close()
        raise
    if idle is not None and kept is _idle.get(dsn) and is_quiet(connection):
        idle.append(connection)
    else:
        connection.close()


def is_quiet(connection: psycopg.Connection[Any] | TrioConnection[Any]) -> bool:
    """Whether a connection stands in no transaction and has heard nothing since: its end, above all."""
    return (
        not connection.closed
        and connection.info.transaction_status is TransactionStatus.IDLE
        and not select.select([connection], [], [], 0)[0]
    )


class KeptLinks:
    """The connections of a store, for the next store with the same arguments: its sessions in `pulse.workers` are its own, and
    the server has its statements' plans already."""

    def __init__(self) -> None:
        self._idle: dict[str, TrioConnection[Any]] = {}

    def lend(self, store: WorkerStore) -> None:
        """Lends what still stands to a store that has connected to nothing yet."""
        for link in _links(store):
            if (connection := self._idle.pop(link.name, None)) is not None:
                if connection.was_closed_by_server():
                    connection.pgconn.finish()
                else:
                    connection.forget_news()
                    link.adopt(connection)

    async def take(self, store: WorkerStore) -> None:
        """Takes the connections of a store that no task uses any more, without what it listened to and locked."""
        self.close()
        for link in _links(store):
            if (connection := link.release()) is None:
                continue
            if is_quiet(connection):
                try:
                    await connection.execute("UNLISTEN *; SELECT pg_advisory_unlock_all()")
                except psycopg.Error:
                    connection.pgconn.finish()
                else:
                    self._idle[link.name] = connection
            else:
                connection.pgconn.finish()

    def close(self) -> None:
        """Closes the idle ones, of whatever Trio run."""
        while self._idle:
            _, connection = self._idle.popitem()
            connection.pgconn.finish()


def _links(store: WorkerStore) -> list[Link]:
    return list({id(link): link for link in vars(store.links).values() if isinstance(link, Link)}.values())
