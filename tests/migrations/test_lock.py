"""Other sessions' locks do not keep a migration waiting without an end, nor it them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from pulse_trio import migrate
from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.migrate import Migration, known_migrations, migrate_sync
from support.stores import LOCK_WAITED_FOR

LATEST = max(m.version for m in known_migrations())


def test_a_stranger_that_holds_the_lock_of_migrations_is_named(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True, application_name="stranger") as stranger:
        stranger.execute("SELECT pg_advisory_lock(hashtextextended('pulse migrate', 0))")
        with pytest.raises(DatabaseUnavailable, match=f"pid {stranger.info.backend_pid}, user .*, stranger"):
            migrate_sync(empty_dsn, wait=0.1)
    assert migrate_sync(empty_dsn)


def test_a_migration_waits_for_a_locked_table_in_short_attempts_and_names_the_session_that_holds_it(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = Migration(LATEST + 1, "later", 'ALTER TABLE :"schema".job ADD COLUMN later int;')
    monkeypatch.setattr(migrate, "known_migrations", lambda: [*known_migrations(), more])
    monkeypatch.setattr(migrate, "_PATIENCE", 0.05)
    monkeypatch.setattr(migrate, "_LET_THROUGH", 0.01)
    with psycopg.connect(dsn, application_name="reporting") as stranger:
        stranger.execute("SELECT FROM pulse.job")
        said = (
            f"later changes tables .* 0.3 s: pid {stranger.info.backend_pid}, user .*, reporting, in a transaction for"
        )
        with pytest.raises(DatabaseUnavailable, match=said):
            migrate_sync(dsn, wait=0.3)
        with ThreadPoolExecutor() as threads:
            migrating = threads.submit(migrate_sync, dsn)
            with psycopg.connect(dsn, autocommit=True) as client:
                until(client, f"{LOCK_WAITED_FOR} HAVING count(*) > 0")
                # It is served while the migration waits for its turn.
                client.execute("SELECT FROM pulse.job")
            assert not migrating.done()
            stranger.rollback()
            assert migrating.result() == [f"{LATEST + 1:04}_later"]


def until(client: psycopg.Connection[Any], query: str) -> None:
    """Asks until there is a row."""
    while client.execute(query.encode()).fetchone() is None:
        pass
