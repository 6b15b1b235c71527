"""The settings of a session on which the meaning of a statement depends, and what pulse-trio wants them to be.

A server, a database, a role, a DSN (`options=-c ...`) and an environment (PGDATESTYLE) may all set them, for their own reasons.
A session that pulse-trio makes for itself gets these at once; a handler's transaction gets them just before the job is
completed in it. A connection that a user lends keeps its own: what is executed there must not depend on them (cursors.py).

Left as they are, on purpose: `default_transaction_read_only` (managed servers set it when a disk is full, and people for
maintenance: that is said and waited for, not overridden), `role`, and what only a superuser may set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PINNED: dict[str, str] = {
    # What names mean. Everything of ours is qualified; this keeps operators and functions PostgreSQL's own.
    "search_path": "pg_catalog, pg_temp",
    # How text is read.
    "client_encoding": "UTF8",
    "standard_conforming_strings": "on",
    "backslash_quote": "safe_encoding",
    "escape_string_warning": "on",
    "array_nulls": "on",
    "transform_null_equals": "off",
    # How values are written and read.
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "quote_all_identifiers": "off",
    # What a transaction sees, and whether rows are left out without a word.
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "row_security": "on",
    "gin_fuzzy_search_limit": "0",
    # Whether views may be read at all (PostgreSQL 17, and later releases of those before).
    "restrict_nonsystem_relation_kind": "",
    # What becomes of an error.
    "exit_on_error": "off",
    "client_min_messages": "notice",
    "plpgsql.extra_errors": "none",
    "plpgsql.extra_warnings": "none",
}

UNBOUNDED: dict[str, str] = {
    "statement_timeout": "0",
    "lock_timeout": "0",
    "transaction_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
}
"""For sessions that keep time themselves: a limit that was meant for people's queries would end a worker's connections."""


def pins_query(settings: Mapping[str, str], *, local: bool = False, only_in: int | None = None) -> bytes:
    """A statement that makes these settings, for the session or the transaction; one that this server does not know is left
    out. `only_in`: nothing is done in any other server process than this. Names and values are the program's own."""
    if not settings:
        return b"SELECT"
    values = ", ".join(f"('{name}', '{value}')" for name, value in settings.items())
    condition = "" if only_in is None else f" AND pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) {only_in}"
    return (
        f"SELECT pg_catalog.set_config(pin.name, pin.value, {str(local).lower()}) "  # noqa: S608 -- our own, see above
        f"FROM (VALUES {values}) AS pin(name, value) "
        f"WHERE pg_catalog.current_setting(pin.name, true) IS NOT NULL{condition}"
    ).encode()


def durable_query(*, local: bool) -> bytes:
    """A statement after which what is committed, and what was not set aside for replication, is kept."""
    is_local = str(local).lower()
    # Claims must not be forgotten by a crash of the server: with this off, kill -9 of the server was seen to hand out one (job,
    # worker, attempt) twice. Stronger settings are the owner's to choose. Only a superuser can have changed the other one, and
    # so it can be changed back: without it the triggers of the schema would not fire.
    return (
        "SELECT CASE WHEN pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off' "
        f"THEN pg_catalog.set_config('synchronous_commit', 'on', {is_local}) END, "
        "CASE WHEN pg_catalog.current_setting('session_replication_role') OPERATOR(pg_catalog.<>) 'origin' "
        f"THEN pg_catalog.set_config('session_replication_role', 'origin', {is_local}) END"
    ).encode()


def pinned_for_transaction() -> bytes:
    """The pins for the rest of a transaction that is somebody's, before pulse-trio writes in it."""
    return pins_query(PINNED | {"lock_timeout": "0"}, local=True) + b"; " + durable_query(local=True)
