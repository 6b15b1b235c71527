"""Connections that one worker of a test leaves to the next: making them, and planning every statement anew, takes longer than a
test's jobs.

They belong to a test's database, and are closed when it is dropped. Each worker has a session of its own on them. Blocking ones
are for what looks at the database between the workers.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from psycopg.pq import TransactionStatus
from psycopg.waiting import Wait

from ..postgres import Link, connect_sync
from ..postgres.contract import ready_now

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable
    from contextlib import AbstractContextManager

    from psycopg import Connection

    from ..postgres import TrioConnection
    from ..store.links import Links

_kept: dict[tuple[int, str], _Kept] = {}
"""By process id, because a forked child must not use its parent's connections, and by DSN."""


class _Kept:
    """Those of one database: of workers by what they are for, because two of them may run at once; and blocking ones."""

    def __init__(self) -> None:
        self.of_workers: dict[str, KeptConnections] = {}
        self.blocking: list[Connection[Any]] = []

    def close(self) -> None:
        for kept in self.of_workers.values():
            kept.close()
        while self.blocking:
            self.blocking.pop().close()


class KeptConnections:
    """The idle connections to one database, by what they are for. Not tied to a Trio run."""

    def __init__(self) -> None:
        self._idle: dict[str, TrioConnection[Any]] = {}
        self._terms: Hashable = None

    def lend(self, links: Links, terms: Hashable) -> bool:
        """Lends the connections to a worker. Returns False if there are none, or if they were made with other settings."""
        if terms != self._terms:
            self.close()
        lent, self._idle = self._idle, {}
        for link in _links(links):
            if (connection := lent.pop(link.name, None)) is not None and not connection.was_closed_by_server():
                connection.forget_news()
                link.adopt(connection)
        return links.claims.generation > 0

    def take(self, links: Links, terms: Hashable) -> None:
        """Takes them from a worker that has ended."""
        self.close()
        self._terms = terms
        for link in _links(links):
            if (connection := link.release()) is not None:
                self._idle[link.name] = connection

    def close(self) -> None:
        """Closes the idle ones."""
        while self._idle:
            _, connection = self._idle.popitem()
            # Not its close(): that tells Trio, and this may be called when the Trio run has ended. Nothing waits for it.
            connection.pgconn.finish()


def hang_up(links: Links) -> None:
    """Closes the connections of a worker that did not end by itself."""
    for link in _links(links):
        link.hang_up()


def _links(links: Links) -> list[Link]:
    return list({id(link): link for link in vars(links).values() if isinstance(link, Link)}.values())


@contextmanager
def keeping(dsn: str) -> Generator[None]:
    """While the block runs, connections to this database are kept."""
    key = os.getpid(), dsn
    kept = _kept[key] = _Kept()
    try:
        yield
    finally:
        del _kept[key]
        kept.close()


def keeping_if_none_does(dsn: str) -> AbstractContextManager[None]:
    """The same, unless they are kept for longer."""
    return nullcontext() if (os.getpid(), dsn) in _kept else keeping(dsn)


def kept_for(dsn: str, use: str = "") -> KeptConnections | None:
    """Those of workers to a database that a test has now; None for any other."""
    kept = _kept.get((os.getpid(), dsn))
    return None if kept is None else kept.of_workers.setdefault(use, KeptConnections())


@contextmanager
def connected(dsn: str, *, until: float | None = None) -> Generator[Connection[Any]]:
    """A blocking connection in autocommit mode; of a database that a test has now not necessarily a new one. One that gives up
    at a moment (see `connect_sync`) is for one use."""
    if until is not None:
        with connect_sync(dsn, until=until) as connection:
            yield connection
        return
    kept = _kept.get((os.getpid(), dsn))
    connection = None
    while kept is not None and kept.blocking and connection is None:
        if _is_quiet(found := kept.blocking.pop()):
            connection = found
        else:
            found.close()
    if connection is None:
        connection = connect_sync(dsn)
    ended_well = False
    try:
        yield connection
        ended_well = True
    finally:
        is_kept = kept is not None and kept is _kept.get((os.getpid(), dsn))
        if ended_well and kept is not None and is_kept and _is_quiet(connection):
            kept.blocking.append(connection)
        else:
            connection.close()


def _is_quiet(connection: Connection[Any]) -> bool:
    """Whether it stands in no transaction and has heard nothing since: its end, above all."""
    return (
        not connection.closed
        and connection.info.transaction_status is TransactionStatus.IDLE
        and not ready_now(connection.pgconn.socket, Wait.R)
    )
