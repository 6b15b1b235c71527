"""`pulse-trio grants`: grants roles the rights that their work needs, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..grants import grant_sync, grants_sql
from ..migrate import check_sync
from ..settings import load_settings
from .database import choose_database, open_database
from .options import dsn_option, schema_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..grants import RoleKind


@click.command()
@click.option("--producer", metavar="ROLE", multiple=True, help="A role that may enqueue, and nothing else.")
@click.option(
    "--waiter", metavar="ROLE", multiple=True, help="A role that may enqueue, and wait for jobs and their results."
)
@click.option(
    "--worker", metavar="ROLE", multiple=True, help="A role that may run workers; it can change no table's definition."
)
@click.option(
    "--operator",
    metavar="ROLE",
    multiple=True,
    help="A role that may inspect jobs, cancel, retry, delete, pause and limit.",
)
@click.option("--sql", "as_sql", is_flag=True, help="Print the statements; no database is needed.")
@schema_option
@dsn_option
def grants(
    producer: tuple[str, ...],
    waiter: tuple[str, ...],
    worker: tuple[str, ...],
    operator: tuple[str, ...],
    as_sql: bool,
    schema: str | None,
    dsn: str | None,
) -> None:
    """Grant database roles the rights that their work needs, and no others.

    Connect as the owner of the schema. The command first revokes the roles' existing rights on the schema, so running it
    again after an upgrade brings them up to date. Each option may be given several times.
    """
    given: dict[RoleKind, tuple[str, ...]] = {
        "producer": producer,
        "waiter": waiter,
        "worker": worker,
        "operator": operator,
    }
    roles: dict[RoleKind, str | Sequence[str]] = {kind: names for kind, names in given.items() if names}
    if not roles:
        raise click.UsageError("Name at least one role: --producer, --waiter, --worker or --operator.")
    name = load_settings({"schema": schema}).schema
    if as_sql:
        click.echo("\n".join(grants_sql(roles, name)))
        return
    with open_database(choose_database(dsn), name) as address:
        check_sync(address, name)
        grant_sync(address, roles, name)
    for kind, names in given.items():
        for role in names:
            click.echo(f"{role} may work as {kind}")
