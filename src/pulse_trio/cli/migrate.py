"""`pulse-trio migrate`: creates the schema or brings it up to date."""

from __future__ import annotations

import click

from ..migrate import check_sync, migrate_sync, migration_sql
from ..settings import load_settings
from .database import choose_database, open_database
from .options import dsn_option, json_option, schema_option
from .output import print_json


@click.command()
@click.option("--sql", "as_sql", is_flag=True, help="Print the whole schema as SQL; no database is needed.")
@click.option("--check", "only_check", is_flag=True, help="Change nothing; exit with 1 if the schema needs migrating.")
@schema_option
@dsn_option
@json_option
def migrate(as_sql: bool, only_check: bool, schema: str | None, dsn: str | None, as_json: bool) -> None:
    """Create the schema in the database, or bring it up to date.

    Each migration is one transaction. Several processes may run this at once.
    """
    if as_sql and (only_check or as_json):
        raise click.UsageError(f"Give --sql or {'--check' if only_check else '--json'}, not both.")
    name = load_settings({"schema": schema}).schema
    if as_sql:
        click.echo(migration_sql(name), nl=False)
        return
    with open_database(choose_database(dsn), name, migrate=False) as address:
        if only_check:
            check_sync(address, name)
        applied = [] if only_check else migrate_sync(address, name)
    _say(name, applied, as_json=as_json)


def _say(schema: str, applied: list[str], *, as_json: bool) -> None:
    if as_json:
        print_json({"schema": schema, "applied": applied})
        return
    for migration in applied:
        click.echo(f"applied {migration}")
    click.echo(f"The schema {schema!r} is up to date.")
