"""A function of the database that is held up in the middle of a statement, after the moment as of which it reads."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
import trio

if TYPE_CHECKING:
    from collections.abc import Generator

_NUMBER = 4711
_WAITING = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted"


@contextmanager
def held_up(dsn: str, function: str, place: str, *, with_wait: str) -> Generator[psycopg.Connection]:
    """`with_wait` takes the place of the text `place` in the function, with `{wait}` for what waits. It does until the block is
    left, or the connection unlocks it (`let_go`)."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = connection.execute("SELECT pg_get_functiondef(%s::regproc)", [function]).fetchone()
        assert found is not None
        assert place in found[0]
        wait = f"pg_advisory_xact_lock({_NUMBER})"
        connection.execute(found[0].replace(place, with_wait.replace("{wait}", wait)).encode())
        connection.execute("SELECT pg_advisory_lock(%s)", [_NUMBER])
        yield connection


async def until_it_waits(connection: psycopg.Connection) -> None:
    """Returns when somebody waits there."""
    while connection.execute(_WAITING, [_NUMBER]).fetchone() is None:  # noqa: ASYNC110 -- a lock tells nobody
        await trio.sleep(0.01)


def let_go(connection: psycopg.Connection) -> None:
    """It goes on."""
    connection.execute("SELECT pg_advisory_unlock(%s)", [_NUMBER])
