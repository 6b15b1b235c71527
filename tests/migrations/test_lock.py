"""A stranger's lock does not keep a migration waiting without an end."""

from __future__ import annotations

import psycopg
import pytest

from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.migrate import migrate_sync


def test_a_stranger_that_holds_the_lock_of_migrations_is_named(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True, application_name="stranger") as stranger:
        stranger.execute("SELECT pg_advisory_lock(hashtextextended('pulse migrate', 0))")
        with pytest.raises(DatabaseUnavailable, match=f"pid {stranger.info.backend_pid}, user .*, stranger"):
            migrate_sync(empty_dsn, wait=0.1)
    assert migrate_sync(empty_dsn)
