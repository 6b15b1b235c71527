"""What PostgreSQL's catalogue says that a role may do with each thing of our schema, as data that can be compared."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .stores import Window

TABLE_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")
COLUMN_RIGHTS = ("SELECT", "INSERT", "UPDATE", "REFERENCES")
SEQUENCE_RIGHTS = ("USAGE", "SELECT", "UPDATE")
_DAY = re.compile(r"_\d{8}$")


def rights(owner: Window, roles: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """By thing ("table job", "function wake(text)"): by role, what it may; a role that may nothing is left out.

    The partitions of single days are one thing. A right on columns is written with them: `UPDATE (error)`."""
    found: dict[str, dict[str, str]] = {}
    for thing, name in things(owner):
        for role, login in roles.items():
            may = _rights_on(owner, thing.partition(" ")[0], name, login)
            if may:
                found.setdefault(thing, {})[role] = may
            else:
                found.setdefault(thing, {})
    return found


def things(owner: Window) -> list[tuple[str, str]]:
    """Each thing of the schema, and of the database around it: what it is, and the name by which PostgreSQL is asked."""
    listed = owner.run(
        "SELECT CASE relkind WHEN 'S' THEN 'sequence' WHEN 'v' THEN 'view' ELSE 'table' END AS sort, relname::text AS name,"
        " oid::regclass::text AS place FROM pg_class WHERE relnamespace = 'pulse'::regnamespace"
        " AND relkind IN ('r', 'p', 'v', 'm', 'f', 'S')"
        " UNION ALL SELECT 'function',"
        " CASE count(*) OVER (PARTITION BY proname) WHEN 1 THEN proname::text ELSE oid::regprocedure::text END,"
        " oid::regprocedure::text FROM pg_proc WHERE pronamespace = 'pulse'::regnamespace"
        " UNION ALL SELECT 'type', typname::text, oid::regtype::text FROM pg_type"
        " WHERE typnamespace = 'pulse'::regnamespace AND typtype IN ('d', 'e', 'r')"
        " UNION ALL SELECT 'schema', nspname::text, nspname::text FROM pg_namespace WHERE nspname = 'pulse'"
        " UNION ALL SELECT 'database', '', current_database() ORDER BY 1, 2"
    )
    return [(f"{row['sort']} {_DAY.sub('_DAY', row['name'])}".strip(), row["place"]) for row in listed]


def _rights_on(owner: Window, sort: str, name: str, login: str) -> str:
    match sort:
        case "table" | "view":
            newer = ("MAINTAIN",) if owner.connection.info.server_version >= 170000 else ()
            asked = (*TABLE_RIGHTS, *newer)
            return ", ".join(filter(None, (_on_table(owner, name, login, right) for right in asked)))
        case "sequence":
            asked = SEQUENCE_RIGHTS
        case "function":
            asked = ("EXECUTE",)
        case "type":
            asked = ("USAGE",)
        case "schema":
            asked = ("USAGE", "CREATE")
        case _:
            asked = ("CREATE", "TEMPORARY")
    return ", ".join(r for r in asked if owner.value(f"SELECT has_{sort}_privilege(%s, %s, %s)", login, name, r))


def _on_table(owner: Window, name: str, login: str, right: str) -> str | None:
    if owner.value("SELECT has_table_privilege(%s, %s, %s)", login, name, right):
        return right
    if right not in COLUMN_RIGHTS:
        return None
    columns = owner.run(
        "SELECT attname AS name FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped"
        " AND has_column_privilege(%s, attrelid, attnum, %s) ORDER BY attnum",
        name,
        login,
        right,
    )
    return f"{right} ({', '.join(row['name'] for row in columns)})" if columns else None
