"""`pulse.enqueue` gets two more arguments, and for that is made anew."""

from __future__ import annotations

from uuid import uuid4

import psycopg
import pytest

from pulse_trio import migrate
from pulse_trio.migrate import known_migrations, migrate_sync

WITH_TRACES = next(m.version for m in known_migrations() if m.name == "traces")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_who_could_enqueue_in_sql_before_still_can_and_no_one_else(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [m for m in known_migrations() if m.version < WITH_TRACES]
    with monkeypatch.context() as older:
        older.setattr(migrate, "known_migrations", lambda: before)
        migrate_sync(empty_dsn)
    suffix = uuid4().hex[:8]
    producer, passing_on, other = (f"{name}_{suffix}" for name in ('Pro"ducer', "passing on", "other"))
    names = {name: '"' + name.replace('"', '""') + '"' for name in (producer, passing_on, other)}
    with psycopg.connect(empty_dsn, autocommit=True) as admin:

        def run(query: str) -> None:
            admin.execute(query.encode())

        for name in names.values():
            run(f"CREATE ROLE {name}")
            run(f"GRANT USAGE ON SCHEMA pulse TO {name}")
        try:
            run(f"GRANT EXECUTE ON FUNCTION pulse.enqueue TO {names[producer]}")
            run(f"GRANT EXECUTE ON FUNCTION pulse.enqueue TO {names[passing_on]} WITH GRANT OPTION")
            migrate_sync(empty_dsn)
            found = admin.execute(
                "SELECT rolname, has_function_privilege(rolname, f, 'EXECUTE'),"
                " has_function_privilege(rolname, f, 'EXECUTE WITH GRANT OPTION')"
                " FROM pg_roles, CAST('pulse.enqueue' AS regproc) f WHERE rolname = ANY (%s)",
                [list(names)],
            ).fetchall()
            assert {name: rights for name, *rights in found} == {
                producer: [True, False],
                passing_on: [True, True],
                other: [False, False],
            }
            run(f"SET ROLE {names[producer]}")
            admin.execute("SELECT pulse.enqueue('greet', '{}', traceparent => %s)", [PARENT])
            run("SELECT pulse.enqueue('greet')")
            run(f"SET ROLE {names[other]}")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                run("SELECT pulse.enqueue('greet')")
        finally:
            run("RESET ROLE")
            for name in names.values():
                run(f"DROP OWNED BY {name}")
                run(f"DROP ROLE {name}")


def test_the_error_of_what_depends_on_the_function_before_names_it(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [m for m in known_migrations() if m.version < WITH_TRACES]
    with monkeypatch.context() as older:
        older.setattr(migrate, "known_migrations", lambda: before)
        migrate_sync(empty_dsn)
    with psycopg.connect(empty_dsn, autocommit=True) as admin:
        admin.execute("CREATE VIEW public.enqueuing AS SELECT pulse.enqueue('greet')")
        admin.execute("CREATE TABLE public.orders (id int, job bigint DEFAULT pulse.enqueue('greet'))")
        with pytest.raises(psycopg.errors.DependentObjectsStillExist) as refused:
            migrate_sync(empty_dsn)
        # In the first line, which is what the command line shows.
        said = str(refused.value).splitlines()[0]
        assert "these use it: default value for column job of table public.orders, view public.enqueuing;" in said
        assert "drop them, migrate, and create them again" in said
        admin.execute("DROP TABLE public.orders")
        admin.execute("DROP VIEW public.enqueuing")
    migrate_sync(empty_dsn)
