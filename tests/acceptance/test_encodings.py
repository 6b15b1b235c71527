"""A database that is not UTF8 cannot hold every text: all say so, in the same words, before anything is made or run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psycopg
import pytest

from pulse_trio import Handlers, SyncClient, Worker, open_client
from pulse_trio.errors import SchemaError
from pulse_trio.migrate import migrate_sync, migration_sql

if TYPE_CHECKING:
    from collections.abc import Generator

    from pulse_trio.testing.faults.processes import Processes
    from support.databases import Databases

SAID = r"encoding {encoding}.*needs UTF8.*CREATE DATABASE .* ENCODING 'UTF8'"


@pytest.fixture(params=["LATIN1", "SQL_ASCII", "WIN1252"])
def encoding(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def dsn(encoding: str, databases: Databases) -> Generator[str]:
    with databases.encoded(encoding) as dsn:
        yield dsn


async def test_migrate_refuses_it_and_makes_nothing(dsn: str, encoding: str, processes: Processes) -> None:
    with pytest.raises(SchemaError, match=SAID.format(encoding=encoding)):
        migrate_sync(dsn)
    refused = await processes.command("migrate", f"--dsn={dsn}")
    assert await refused.ended() == 1
    assert "ENCODING 'UTF8'" in refused.stderr
    assert "Traceback" not in refused.stderr
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT FROM pg_namespace WHERE nspname = 'pulse'").fetchall() == []


async def test_workers_clients_and_commands_refuse_one_that_has_the_schema(
    dsn: str, encoding: str, processes: Processes
) -> None:
    with psycopg.connect(dsn, autocommit=True, client_encoding="UTF8") as connection:
        # By hand, or by a version that did not look.
        connection.execute(migration_sql().encode())
    said = SAID.format(encoding=encoding)
    with pytest.raises(SchemaError, match=said):
        await Worker(Handlers(), dsn).run()
    with pytest.raises(SchemaError, match=said):
        async with open_client(dsn):
            pass
    with pytest.raises(SchemaError, match=said):
        SyncClient(dsn).enqueue("echo")
    (processes.folder / "app.py").write_text(
        "from pulse_trio import Handlers\nhandlers = Handlers()\n@handlers.job\nasync def echo(): ...\n"
    )
    for command in (["run", "app:handlers"], ["jobs", "list"], ["enqueue", "echo"], ["doctor"]):
        refused = await processes.command(*command, f"--dsn={dsn}")
        assert await refused.ended() == 1, refused.report()
        assert f"encoding {encoding}" in refused.report()
        assert "Traceback" not in refused.report()


def test_a_client_on_asyncio_refuses_it_too(dsn: str, encoding: str) -> None:
    async def main() -> None:
        async with open_client(dsn):
            pass

    with pytest.raises(SchemaError, match=SAID.format(encoding=encoding)):
        asyncio.run(main())
