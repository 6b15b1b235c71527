"""A database whose roles were granted their work, each with a login of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pulse_trio.grants import grant_sync
from support.logins import Logins
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator

    from support.databases import Databases


@pytest.fixture
def logins(databases: Databases) -> Generator[Logins]:
    with databases.migrated() as dsn, Window(dsn) as window:
        logins = Logins(dsn)
        every = [*logins.names.values(), logins.stranger]
        for name in every:
            window.run(f"CREATE ROLE {name} LOGIN PASSWORD 'its own'")
        try:
            grant_sync(dsn, logins.names)
            yield logins
        finally:
            for name in every:
                window.run(f"DROP OWNED BY {name}; DROP ROLE {name}")
