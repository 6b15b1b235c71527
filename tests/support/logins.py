"""A login for each role that `pulse-trio grant` knows, and one that was granted nothing."""

from __future__ import annotations

from typing import get_args
from uuid import uuid4

from psycopg.conninfo import make_conninfo

from pulse_trio.grants import RoleKind
from support.stores import Window


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
