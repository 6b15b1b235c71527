"""What pulse-trio reads and writes for itself, beside what a program has made of psycopg."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

import psycopg
import pytest
from psycopg import pq
from psycopg.adapt import Loader

from pulse_trio.postgres import DEFAULTS
from pulse_trio.store.foreign import numbered

VOID = 2278
"""The type of nothing, which nobody reads."""
STATEMENTS = sorted(
    path.name.removesuffix(".sql") for path in files("pulse_trio.sql").iterdir() if path.name.endswith(".sql")
)

SAME = """
import psycopg
fresh = psycopg.adapters
from pulse_trio.postgres import DEFAULTS
for theirs, ours in ((fresh._loaders, DEFAULTS._loaders), (fresh._dumpers_by_oid, DEFAULTS._dumpers_by_oid)):
    for a, b in zip(theirs, ours, strict=True):
        assert a.keys() == b.keys(), a.keys() ^ b.keys()
        for oid in a:
            assert a[oid].__qualname__ == b[oid].__qualname__, oid
assert {f: {k: d.__qualname__ for k, d in m.items()} for f, m in fresh._dumpers.items()} == {
    f: {k: d.__qualname__ for k, d in m.items()} for f, m in DEFAULTS._dumpers.items()
}
"""


def test_the_own_adapters_are_psycopgs_as_it_ships_them() -> None:
    subprocess.run([sys.executable, "-c", SAME], check=True)


def test_they_are_not_what_the_program_makes_of_psycopgs() -> None:
    before = psycopg.adapters.get_loader(20, pq.Format.BINARY)
    assert before is not None

    class Odd(Loader):
        format = pq.Format.BINARY

        def load(self, data: object) -> object:
            return data

    psycopg.adapters.register_loader("int8", Odd)
    try:
        assert DEFAULTS.get_loader(20, pq.Format.BINARY) is before
    finally:
        psycopg.adapters.register_loader("int8", before)


@pytest.mark.parametrize("name", STATEMENTS)
def test_every_column_of_a_statement_can_be_read_in_binary(name: str, room_dsn: str) -> None:
    text, places = numbered(name, "pulse")
    with psycopg.connect(room_dsn, autocommit=True) as connection:
        prepared = connection.pgconn.prepare(b"it", text.encode(), None)
        assert prepared.status == pq.ExecStatus.COMMAND_OK, (places, prepared.error_message)
        found = connection.pgconn.describe_prepared(b"it")
    types = [oid for column in range(found.nfields) if (oid := found.ftype(column)) != VOID]
    assert [oid for oid in types if DEFAULTS.get_loader(oid, pq.Format.BINARY) is None] == []
