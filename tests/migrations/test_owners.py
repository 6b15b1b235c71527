"""What stands in the schema before a migration runs with the migrator's rights."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pulse_trio.errors import UsageError
from pulse_trio.migrate import check_sync, migrate_sync
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator

    from support.databases import Databases


class Place:
    """A database, and two roles with a login: `thief` may create schemas there, and so may `migrator`, no superuser."""

    def __init__(self, dsn: str) -> None:
        suffix = uuid4().hex[:8]
        self.dsn = dsn
        self.thief, self.migrator, self.group = f"thief_{suffix}", f"migrator_{suffix}", f"group_{suffix}"

    def as_(self, role: str) -> str:
        return make_conninfo(self.dsn, user=role, password="its own")

    def run_as(self, role: str, query: str) -> None:
        with psycopg.connect(self.as_(role), autocommit=True) as connection:
            connection.execute(query.encode())


@pytest.fixture
def place(databases: Databases) -> Generator[Place]:
    with databases.empty() as dsn, psycopg.connect(dsn, autocommit=True) as admin:
        place = Place(dsn)
        for role in (place.thief, place.migrator, place.group):
            admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'its own'".encode())
            admin.execute(f"GRANT CREATE ON DATABASE {admin.info.dbname} TO {role}".encode())
        try:
            yield place
        finally:
            for role in (place.thief, place.migrator, place.group):
                admin.execute(f"DROP OWNED BY {role} CASCADE".encode())
                admin.execute(f"DROP ROLE {role}".encode())


PLANTED = """
CREATE FUNCTION pulse.planted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN EXECUTE format('ALTER ROLE %I SUPERUSER', '{thief}'); RETURN NEW; END $$;
CREATE TABLE pulse.migration (version int PRIMARY KEY, name text, checksum text, applied_at timestamptz DEFAULT now());
CREATE TRIGGER planted BEFORE INSERT ON pulse.migration FOR EACH ROW EXECUTE FUNCTION pulse.planted()
"""


@pytest.mark.parametrize("migrator", ["superuser", "migrator"])
def test_a_schema_that_another_role_made_first_is_refused_and_nothing_of_it_is_run(place: Place, migrator: str) -> None:
    place.run_as(place.thief, "CREATE SCHEMA pulse")
    place.run_as(place.thief, PLANTED.replace("{thief}", place.thief))
    # Every role may read and write it, so that only the refusal stands in the way.
    place.run_as(place.thief, "GRANT ALL ON SCHEMA pulse TO PUBLIC; GRANT ALL ON ALL TABLES IN SCHEMA pulse TO PUBLIC")
    dsn = place.dsn if migrator == "superuser" else place.as_(place.migrator)
    with pytest.raises(UsageError, match=f"The schema pulse belongs to {place.thief}, .* connect as {place.thief}"):
        migrate_sync(dsn)
    with Window(place.dsn) as window:
        assert not window.value("SELECT rolsuper FROM pg_roles WHERE rolname = %s", place.thief)
        assert window.value("SELECT to_regclass('pulse.job') IS NULL")


def test_a_membership_that_the_role_itself_gave_is_no_reason_to_trust_it(place: Place) -> None:
    place.run_as(place.thief, "CREATE SCHEMA pulse")
    try:
        place.run_as(place.thief, f"GRANT {place.thief} TO {place.migrator}")
    except psycopg.errors.InsufficientPrivilege:
        pass  # from PostgreSQL 16 on
    with pytest.raises(UsageError, match=f"belongs to {place.thief}"):
        migrate_sync(place.as_(place.migrator))


@pytest.mark.parametrize(
    ("planting", "named"),
    [
        ("CREATE FUNCTION pulse.add_job() RETURNS int LANGUAGE sql AS 'SELECT 1'", "The function add_job"),
        ("CREATE TABLE pulse.mine (n int)", "The table mine"),
        ("CREATE VIEW pulse.mine AS SELECT 1 AS n", "The view mine"),
        ("CREATE TYPE pulse.mine AS ENUM ('a')", "The type mine"),
        (
            "CREATE FUNCTION public.own() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';"
            "CREATE TRIGGER planted BEFORE INSERT ON pulse.migration FOR EACH ROW EXECUTE FUNCTION public.own()",
            "The function of the trigger planted on migration",
        ),
    ],
)
def test_a_thing_of_another_role_in_our_schema_is_refused_until_it_is_gone(
    place: Place, planting: str, named: str
) -> None:
    migrate_sync(place.dsn)
    with Window(place.dsn) as owner:
        owner.run(f"GRANT CREATE, USAGE ON SCHEMA pulse, public TO {place.thief}")
        owner.run(f"GRANT TRIGGER ON migration TO {place.thief}")
    place.run_as(place.thief, planting)
    with pytest.raises(UsageError, match=f"{named} in the schema pulse belongs to {place.thief}"):
        migrate_sync(place.dsn)
    with Window(place.dsn) as owner:
        owner.run(f"DROP OWNED BY {place.thief} CASCADE")
        assert migrate_sync(place.dsn) == []


def test_the_schema_may_be_of_a_group_of_the_database_owner_or_of_a_superuser(place: Place) -> None:
    with Window(place.dsn, schema="public") as admin:
        admin.run(f"GRANT {place.group} TO {place.migrator}")
        admin.run(f"CREATE SCHEMA of_group AUTHORIZATION {place.group}")
        admin.run(f"CREATE SCHEMA of_super; GRANT ALL ON SCHEMA of_super TO {place.migrator}")
        admin.run(f"CREATE SCHEMA of_owner AUTHORIZATION {place.group}")
        admin.run(f"GRANT ALL ON SCHEMA of_owner TO {place.migrator}")
        for schema in ("of_group", "of_super"):
            migrate_sync(place.as_(place.migrator), schema)
            check_sync(place.as_(place.migrator), schema)
        admin.run(f"REVOKE {place.group} FROM {place.migrator}")
        with pytest.raises(UsageError, match=f"of_owner belongs to {place.group}"):
            migrate_sync(place.as_(place.migrator), "of_owner")
        database = admin.value("SELECT current_database()")
        admin.run(f"ALTER DATABASE {database} OWNER TO {place.group}")
        try:
            migrate_sync(place.as_(place.migrator), "of_owner")
        finally:
            admin.run(f"ALTER DATABASE {database} OWNER TO CURRENT_USER")


def test_a_hostile_schema_name_is_only_a_name(place: Place) -> None:
    name = "pu\"lse %s'; --"
    migrate_sync(place.dsn, name)
    assert migrate_sync(place.dsn, name) == []
