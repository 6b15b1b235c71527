"""Connections that one worker of a test leaves to the next: making them, and planning every statement anew, takes longer than a
test's jobs.

They belong to a test's database, and are closed when it is dropped. Each worker has a session of its own on them.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..postgres import Link

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable

    from ..postgres import TrioConnection
    from ..store.links import Links

_kept: dict[tuple[int, str], KeptConnections] = {}
"""By process id, because a forked child must not use its parent's connections, and by DSN."""


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


def _links(links: Links) -> list[Link]:
    return list({id(link): link for link in vars(links).values() if isinstance(link, Link)}.values())


@contextmanager
def keeping(dsn: str) -> Generator[None]:
    """While the block runs, connections of workers to this database are kept."""
    key = os.getpid(), dsn
    kept = _kept[key] = KeptConnections()
    try:
        yield
    finally:
        del _kept[key]
        kept.close()


def kept_for(dsn: str) -> KeptConnections | None:
    """Those of a database that a test has now; None for any other."""
    return _kept.get((os.getpid(), dsn))
