"""The session settings that change what a statement means or costs, with the values that pulse-trio needs.

A server, a database, a role, a DSN (`options=-c ...`) and an environment (PGDATESTYLE) may all change them. A session that
pulse-trio opens for itself gets these values at once; a handler's transaction gets them just before the job is completed in
it. A user's own connection keeps its settings: pulse-trio's statements there must not depend on them (cursors.py).

Not changed, on purpose: `default_transaction_read_only` (managed servers set it when a disk is full, and people for
maintenance: pulse-trio reports it and waits), `role`, and settings that only a superuser may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PINNED: dict[str, str] = {
    # How names are resolved. All names of ours are qualified; this keeps operators and functions PostgreSQL's own.
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
    # What a transaction sees, and whether rows are hidden silently.
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "row_security": "on",
    "gin_fuzzy_search_limit": "0",
    # Whether views may be read at all (PostgreSQL 17, and later releases of those before).
    "restrict_nonsystem_relation_kind": "",
    # How errors are handled.
    "exit_on_error": "off",
    "client_min_messages": "notice",
    "plpgsql.extra_errors": "none",
    "plpgsql.extra_warnings": "none",
    # What a statement costs. PostgreSQL compiles statements that it thinks long, where it is built with LLVM (14 to 18: on by
    # default): `delete_jobs` of 10,000 jobs took 5.9 s on 15, 0.5 s without.
    "jit": "off",
}

UNBOUNDED: dict[str, str] = {
    "statement_timeout": "0",
    "lock_timeout": "0",
    "transaction_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
}
"""For sessions that enforce their own time limits: a limit meant for people's queries would end a worker's connections."""


def pins_query(settings: Mapping[str, str], *, local: bool = False, only_in: int | None = None) -> bytes:
    """A statement that applies these settings to the session or the transaction, without those that this server does not
    know. `only_in`: it does nothing in any other server process. Names and values come from the program."""
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
    """A statement that ensures durable commits, and that triggers fire as outside replication."""
    is_local = str(local).lower()
    # A server crash must not lose claims: with this off, kill -9 of the server was seen to hand out one (job, worker,
    # attempt) twice. The owner may choose stronger settings. Only a superuser can have changed the other setting, so it can
    # be changed back: otherwise the schema's triggers would not fire.
    return (
        "SELECT CASE WHEN pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off' "
        f"THEN pg_catalog.set_config('synchronous_commit', 'on', {is_local}) END, "
        "CASE WHEN pg_catalog.current_setting('session_replication_role') OPERATOR(pg_catalog.<>) 'origin' "
        f"THEN pg_catalog.set_config('session_replication_role', 'origin', {is_local}) END"
    ).encode()


def pinned_for_transaction() -> bytes:
    """The settings for the rest of a user's transaction, before pulse-trio writes in it."""
    return pins_query(PINNED | {"lock_timeout": "0"}, local=True) + b"; " + durable_query(local=True)
