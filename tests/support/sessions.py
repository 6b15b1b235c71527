"""What a handler may do to its session, and what a session is found to be."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, LiteralString

from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator

    from pulse_trio.store.transactions import Begun

SESSION = """
SELECT json_build_object(
  'settings', (SELECT json_object_agg(name, setting ORDER BY name) FROM pg_settings
               WHERE name NOT IN ('transaction_isolation', 'transaction_read_only', 'transaction_deferrable')),
  'role', current_user, 'login', session_user, 'path', current_schemas(false),
  'locks', (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'),
  'channels', (SELECT json_agg(c) FROM pg_listening_channels() c),
  'prepared', (SELECT json_agg(name) FROM pg_prepared_statements),
  'cursors', (SELECT json_agg(name) FROM pg_cursors),
  'temporary', (SELECT json_agg(relname) FROM pg_class WHERE relpersistence = 't' AND relnamespace = pg_my_temp_schema()),
  'sequence', (SELECT last_value FROM pg_sequences WHERE sequencename = 'numbers'))::text
"""

CHANGES: list[LiteralString] = [
    "SET search_path = elsewhere",
    "SET datestyle = 'SQL, DMY'",
    "SET client_encoding = 'LATIN1'",
    "SET standard_conforming_strings = off",
    "SET default_transaction_isolation = 'serializable'",
    "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
    "SET application_name = 'mine'",
    "SET my.variable = '7'",
    "SET statement_timeout = '1 h'",
    "SET synchronous_commit = off",
    "SELECT set_config('jit', 'off', false)",
    "SET ROLE tenant",
    "SET SESSION AUTHORIZATION tenant",
    "SELECT pg_advisory_lock(7)",
    "SELECT pg_advisory_lock_shared(1, 2)",
    "LISTEN news",
    "CREATE TEMP TABLE scratch (n int)",
    "PREPARE plan AS SELECT 1",
    "DECLARE rest CURSOR WITH HOLD FOR SELECT generate_series(1, 9)",
    "DECLARE rest CURSOR FOR SELECT generate_series(1, 9)",
]


async def session(begun: Begun) -> tuple[int, dict[str, Any]]:
    await begun.connection.execute("LOAD 'plpgsql'")  # whose settings are there from then on
    row: Any = await (await begun.connection.execute(SESSION)).fetchone()
    found = json.loads(row[0])
    return begun.connection.info.backend_pid, found.pop("settings") | found


@contextmanager
def window_with_a_tenant(dsn: str) -> Generator[Window]:
    """A window on a database in which the `CHANGES` can be made, and with a table `public.ledger`."""
    with Window(dsn) as window:
        window.run("DO $$ BEGIN CREATE ROLE tenant; EXCEPTION WHEN duplicate_object THEN END $$")
        window.run("CREATE SCHEMA elsewhere")
        window.run("CREATE TABLE public.ledger (job bigint)")
        yield window
