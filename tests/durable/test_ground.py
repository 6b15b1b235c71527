"""What one test of this folder leaves to the next (tests/support/grounds.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.grounds import Ground

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.databases import Databases


@pytest.fixture
def own_ground(databases: Databases) -> Iterator[Ground]:
    ground = Ground(databases)
    yield ground
    ground.close()


def test_the_next_finds_no_rows_and_the_same_database(own_ground: Ground) -> None:
    with own_ground.taken() as first:
        first.enqueue()
        assert first.value("SELECT count(*) FROM job") == 1
    with own_ground.taken() as second:
        assert second is first
        assert second.value("SELECT count(*) FROM job") == 0


@pytest.mark.parametrize(
    "change",
    [
        "CREATE TABLE public.ledger (what text)",
        "CREATE OR REPLACE FUNCTION tell_end(finished bigint[]) RETURNS int LANGUAGE sql AS 'SELECT 0'",
        "ALTER TABLE job ADD COLUMN mine int",
        "CREATE TRIGGER mine BEFORE INSERT ON job FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    ],
)
def test_after_a_test_that_changes_the_schema_there_is_a_new_one(own_ground: Ground, change: str) -> None:
    with own_ground.taken() as first:
        first.run(change)
    with own_ground.taken() as second:
        assert second.dsn != first.dsn


def test_after_a_test_that_fails_there_is_a_new_one(own_ground: Ground) -> None:
    with pytest.raises(ValueError, match="it fails"), own_ground.taken() as first:
        raise ValueError("it fails")
    with own_ground.taken() as second:
        assert second.dsn != first.dsn
