"""A database whose roles were granted their work, each with a login of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args
from uuid import uuid4

import pytest
from psycopg.conninfo import make_conninfo

from pulse_trio.grants import RoleKind, grant_sync
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator

    from support.databases import Databases


class Logins:
    """`dsn` is the owner's; `as_(kind)` that of the login which was granted the work of `kind`."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        suffix = uuid4().hex[:8]
        self.names: dict[RoleKind, str] = {kind: f"pulse_trio_{kind}_{suffix}" for kind in get_args(RoleKind)}
        self.stranger = f"pulse_trio_stranger_{suffix}"

    def as_(self, kind: RoleKind) -> str:
        return make_conninfo(self.dsn, user=self.names[kind], password="its own")

    @property
    def as_stranger(self) -> str:
        """A login that may connect, and was granted nothing."""
        return make_conninfo(self.dsn, user=self.stranger, password="its own")

    def window(self, kind: RoleKind) -> Window:
        return Window(self.as_(kind))


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
