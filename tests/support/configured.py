"""Settings that a server, a database or a role may have for its own reasons, and that pulse-trio must not mind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
from psycopg.sql import SQL, Identifier, Literal

from pulse_trio.postgres import PINNED

if TYPE_CHECKING:
    from collections.abc import Mapping

HOSTILE: dict[str, str] = {
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "<+0545>-05:45",
    "client_encoding": "LATIN1",
    "standard_conforming_strings": "off",
    "backslash_quote": "off",
    "escape_string_warning": "off",
    "array_nulls": "off",
    "transform_null_equals": "on",
    "bytea_output": "escape",
    "extra_float_digits": "-15",
    "quote_all_identifiers": "on",
    "search_path": "evil, pg_catalog",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "row_security": "off",
    "gin_fuzzy_search_limit": "1",
    "restrict_nonsystem_relation_kind": "view, foreign-table",
    "exit_on_error": "on",
    "client_min_messages": "debug1",
    "session_replication_role": "replica",
    "synchronous_commit": "off",
    "enable_indexscan": "off",
    "enable_nestloop": "off",
    "enable_seqscan": "off",
    "plan_cache_mode": "force_custom_plan",
    "geqo_threshold": "2",
    "from_collapse_limit": "1",
    "join_collapse_limit": "1",
    "jit_above_cost": "0",
    "debug_parallel_query": "on",
    "work_mem": "64kB",
    "constraint_exclusion": "on",
    "xmloption": "document",
    "check_function_bodies": "off",
    "default_toast_compression": "pglz",
    "plpgsql.variable_conflict": "use_variable",
    "plpgsql.extra_errors": "all",
    "application_name": "<b>mine</b>",
    "lock_timeout": "5s",
}

NEEDED = ("client_encoding", "array_nulls", "row_security", "exit_on_error", "session_replication_role", "search_path",
          "restrict_nonsystem_relation_kind")  # fmt: skip
"""What must be as PostgreSQL has it, or harms the lender alone: see the settings' reference."""

LENT = {name: value for name, value in HOSTILE.items() if name in PINNED and name not in NEEDED} | {
    "default_transaction_isolation": "repeatable read"
}

KNOWN = "SELECT current_setting(%s, true) IS NOT NULL"


def set_on_database(dsn: str, settings: Mapping[str, str]) -> None:
    """For every session that begins from now on; lists are lists, as in ALTER DATABASE."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("LOAD 'plpgsql'")
        connection.execute("SET search_path = pg_catalog")
        for name, value in settings.items():
            (known,) = connection.execute(KNOWN, [name]).fetchone() or (False,)
            if known:
                values = value.split(", ") if name == "search_path" else [value]
                connection.execute(
                    SQL("ALTER DATABASE {} SET {} = {}").format(
                        Identifier(connection.info.dbname),
                        SQL(".").join(map(Identifier, name.split("."))),
                        SQL(", ").join(map(Literal, values)),
                    )
                )
