"""Whose the schema is: a role that migrates refuses one that another role may have made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import UsageError

if TYPE_CHECKING:
    import psycopg


def refuse_foreign(connection: psycopg.Connection[Any], schema: str) -> None:
    """Raises `UsageError` if an untrusted role owns the schema or anything in it.

    A role that may create schemas can make this one first, with functions and triggers that then run with the rights of
    the role that migrates."""
    found = connection.execute(_FOREIGN.encode(), [schema]).fetchone()
    if found is None:
        return
    what, owner, role, name = found
    if what is None:
        raise UsageError(
            f"The schema {name} belongs to {owner}, and {role} migrates: functions that {owner} may have created there would "
            f"run with the rights of {role}. If {owner} is the owner of your jobs, connect as {owner}. If not, inspect the "
            f"schema, then remove it (DROP SCHEMA {name} CASCADE) or name another one (--schema)."
        )
    raise UsageError(
        f"{what} in the schema {name} belongs to {owner}, and {role} migrates: it could run with the rights of {role}. "
        f"Inspect it, then remove it, or give it to the schema's owner (ALTER ... OWNER TO), or connect as {owner}."
    )


# Trusted are: this role, superusers, the database's owner, and roles of which one of these made this role a member. Before
# PostgreSQL 16 each role can make any other a member of itself, so who granted a membership counts. Superusers are members
# of nothing by this reckoning: pg_has_role() would say that they are of everything.
_FOREIGN = """
WITH RECURSIVE mine AS (
  SELECT r.oid FROM pg_roles r WHERE r.rolname = current_user
  UNION
  SELECT m.roleid FROM mine JOIN pg_auth_members m ON m.member = mine.oid
  JOIN pg_roles g ON g.oid = m.grantor
  WHERE m.grantor <> m.roleid AND (g.rolsuper OR g.rolcreaterole)
), place AS (
  SELECT n.oid, quote_ident(n.nspname) AS name FROM pg_namespace n WHERE n.nspname = %s::text
), trusted AS (
  SELECT oid FROM mine
  UNION SELECT oid FROM pg_roles WHERE rolsuper OR rolname = 'pg_database_owner'
  UNION SELECT datdba FROM pg_database WHERE datname = current_database()
), found (rank, what, owner) AS (
  SELECT 0, NULL, n.nspowner FROM pg_namespace n, place WHERE n.oid = place.oid
  UNION ALL
  SELECT 1, format('The function %%I', p.proname), p.proowner FROM pg_proc p, place WHERE p.pronamespace = place.oid
  UNION ALL
  SELECT 2, format('The %%s %%I', CASE c.relkind WHEN 'v' THEN 'view' WHEN 'S' THEN 'sequence' ELSE 'table' END, c.relname),
         c.relowner FROM pg_class c, place WHERE c.relnamespace = place.oid AND c.relkind NOT IN ('i', 'I', 'c')
  UNION ALL
  -- By the right to make triggers on a table one gives it a function of one's own.
  SELECT 3, format('The function of the trigger %%I on %%I', t.tgname, c.relname), p.proowner
  FROM pg_class c, place, pg_trigger t, pg_proc p
  WHERE c.relnamespace = place.oid AND t.tgrelid = c.oid AND NOT t.tgisinternal AND p.oid = t.tgfoid
  UNION ALL
  SELECT 4, format('The type %%I', t.typname), t.typowner FROM pg_type t, place
  WHERE t.typnamespace = place.oid AND t.typcategory <> 'A'
  UNION ALL
  SELECT 5, format('The operator %%s', o.oprname), o.oprowner FROM pg_operator o, place WHERE o.oprnamespace = place.oid
)
SELECT f.what, pg_get_userbyid(f.owner), current_user::text, place.name FROM found f, place
WHERE f.owner NOT IN (SELECT oid FROM trusted) ORDER BY f.rank, f.what LIMIT 1
"""
