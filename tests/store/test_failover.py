"""What the server may turn into while a worker runs: somebody's standby, or one that allows less."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.store import ClaimCursor, WorkerStore
from support.stores import Window, open_store

if TYPE_CHECKING:
    from collections.abc import Generator


async def test_a_primary_that_became_read_only_is_left_for_a_new_connection_and_session(
    window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    async with open_store(window.dsn) as store:
        before = store.session
        async with store.links.claims.use() as connection:
            await connection.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
        with pytest.raises(DatabaseUnavailable, match="read-only"):
            await store.complete_and_claim(1, [ClaimCursor(queue, 0)])
        (claimed,) = (await store.complete_and_claim(1, [ClaimCursor(queue, 0)])).claims
    assert claimed.id == job_id
    assert claimed.session != before


@pytest.fixture
def visitor(window: Window) -> Generator[str]:
    """A role that may connect, and nothing else."""
    role = f"pulse_trio_visitor_{secrets.token_hex(4)}"
    with psycopg.connect(window.dsn, autocommit=True) as owner:
        owner.execute(f"CREATE ROLE {role} LOGIN".encode())
        owner.execute(f"GRANT USAGE ON SCHEMA pulse TO {role}".encode())
        yield make_conninfo(window.dsn, user=role)
        owner.execute(f"DROP OWNED BY {role}".encode())
        owner.execute(f"DROP ROLE {role}".encode())


async def test_a_role_that_may_not_maintain_is_told_what_to_grant(visitor: str) -> None:
    store = WorkerStore(visitor)
    try:
        with pytest.raises(DatabaseUnavailable, match=r"GRANT EXECUTE ON FUNCTION pulse.upkeep"):
            await store.maintain(86400.0)
    finally:
        await store.aclose()
