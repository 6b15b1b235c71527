"""Which database a command works on, and the connection to it."""

from __future__ import annotations

import os
import re
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psycopg
import trio

from ..client import SyncClient
from ..embedded import embedded_server, open_embedded
from ..errors import ConfigurationError, DatabaseUnavailable, SchemaError
from ..migrate import check_sync, migrate_sync
from ..postgres import PINNED, connect_sync, reconnect_delay
from ..postgres.dsn import parameters_of, redact, shown_dsn
from ..settings import file_dsn, load_settings
from .options import chosen_actor
from .output import notice

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Mapping

    from ..embedded import EmbeddedServer

T = TypeVar("T")

EXAMPLE = "postgresql://user@host:5432/database"

READING = PINNED | {"statement_timeout": "30s"}
"""The settings of a command that only reads: where somebody has locked a table, it ends with an error that says so."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The configured database, and where it was configured; `dsn` is None for the embedded PostgreSQL."""

    dsn: str | None
    source: str

    def __str__(self) -> str:
        return f"database {shown_dsn(self.dsn)} (from {self.source})" if self.dsn is not None else "embedded PostgreSQL"


def choose_database(given: str | None) -> Choice:
    """`--dsn`, else PULSE_TRIO_DSN, else DATABASE_URL, else the project's file, else the embedded PostgreSQL.

    Raises `ConfigurationError` for a DSN that libpq would not take; the message shows no password.
    """
    choice = _choose(given)
    if choice.dsn is not None:
        _check(choice.dsn, choice.source)
    return choice


def _choose(given: str | None) -> Choice:
    if given is not None:
        return Choice(given, "--dsn")
    for variable in ("PULSE_TRIO_DSN", "DATABASE_URL"):
        # Compose files and CI systems set an empty variable for "not set".
        if dsn := os.environ.get(variable):
            return Choice(dsn, variable)
    if (found := file_dsn(Path.cwd())) is not None:
        return Choice(found[0], str(found[1]))
    return Choice(None, "default")


def _check(dsn: str, source: str) -> None:
    if not dsn.strip():
        raise ConfigurationError(f"The database address from {source} is empty. It looks like {EXAMPLE}")
    scheme = re.match(r"([A-Za-z][\w+.-]*)://", dsn)
    if scheme and scheme[1] not in ("postgresql", "postgres"):
        raise ConfigurationError(_wrong_scheme(scheme[1], source))
    try:
        parameters_of(dsn)
    except psycopg.ProgrammingError as error:
        reason = redact(str(error), dsn).strip()
        raise ConfigurationError(
            f"The database address from {source} cannot be read: {reason}. It looks like {EXAMPLE}"
        ) from None


def _wrong_scheme(scheme: str, source: str) -> str:
    if scheme.startswith(("postgresql+", "postgres+")):
        driver = scheme.partition("+")[2]
        return f"The database address from {source} names the driver +{driver}: leave that out, as in {EXAMPLE}"
    return (
        f"The database address from {source} is for {scheme}, and pulse-trio needs PostgreSQL: "
        f"give --dsn or PULSE_TRIO_DSN, as in {EXAMPLE}"
    )


@contextmanager
def open_database(choice: Choice, schema: str, *, migrate: bool = True) -> Generator[str]:
    """The DSN to connect to; the embedded PostgreSQL runs, and has its schema, for as long as the block does."""
    if choice.dsn is not None:
        _announce(choice)
        yield choice.dsn
        return
    with embedded_server() as server:
        notice(describe_embedded(server))
        if migrate:
            migrate_embedded(server, schema)
        yield server.dsn


@asynccontextmanager
async def open_database_async(choice: Choice, schema: str, say: Callable[[str], object]) -> AsyncGenerator[str]:
    """The same for Trio; `say` is called with a notice of which database it is."""
    if choice.dsn is not None:
        say(str(choice))
        yield choice.dsn
        return
    async with open_embedded() as server:
        say(describe_embedded(server))
        await trio.to_thread.run_sync(migrate_embedded, server, schema)
        yield server.dsn


def migrate_embedded(server: EmbeddedServer, schema: str) -> None:
    """Migrates the embedded database; a real database is never migrated without being asked. The `SchemaError` says that this
    database may be deleted."""
    try:
        migrate_sync(server.dsn, schema)
    except SchemaError as error:
        raise SchemaError(f"{error} Or start again without its jobs: rm -r {server.folder}") from None


def describe_embedded(server: EmbeddedServer) -> str:
    """A notice of which PostgreSQL runs where, and how to use another."""
    note = f" ({server.note})" if server.note else ""
    return (
        f"embedded PostgreSQL {server.version} in {_relative(server.folder)}{note}; --dsn or PULSE_TRIO_DSN for another"
    )


def _relative(folder: Path) -> str:
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def _announce(choice: Choice) -> None:
    # No notice for an address that was given on the command line.
    if choice.source != "--dsn":
        notice(str(choice))


@contextmanager
def open_store(
    dsn: str | None, schema: str | None, *, pins: Mapping[str, str] = PINNED, check: bool = True
) -> Generator[SyncClient]:
    """The client of a command that reads or acts once, with these settings of its session. Choosing, checking or connecting may
    fail immediately."""
    name = load_settings({"schema": schema}).schema
    choice = choose_database(dsn)
    with open_database(choice, name) as address:
        if check:
            check_sync(address, name, pins)
        with connect_sync(address, pins) as connection:
            yield SyncClient(connection, schema=name, actor=chosen_actor())


def outlast(client: SyncClient, dsn: str | None, schema: str | None, wait: Callable[[SyncClient], T], begun: str) -> T:
    """What `wait` returns. It is called again, with another client, after the database could not be reached: `begun` is what
    was done before, for the notice."""
    failures = 0
    in_outage = False
    while True:
        try:
            if not in_outage:
                return wait(client)
            # As if it was given on the command line: which database it is was said.
            with open_store(choose_database(dsn).dsn, schema) as another:
                failures = 0
                return wait(another)
        except DatabaseUnavailable as error:
            if not failures:
                notice(f"{begun}; waiting for the database: {error}")
        in_outage = True
        time.sleep(reconnect_delay(failures))
        failures += 1
