"""A claim takes jobs in their order until their arguments have `size` bytes together, and at least one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pulse_trio.sql import statement

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST = 250
"""Bytes that the arguments of a job count at least."""
NOBODY: dict[str, Any] = {"ids": "{}", "attempts": "{}", "sessions": "{}", "results": "{}", "keep": True}
SMALL, PLAIN, PACKED, COMPRESSED = 20, 1500, 15_000, 40_000
"""Lengths of arguments; long ones of one letter are compressed where they are stored: the third to less than LEAST,
whichever the compression."""


def expected(sizes: Sequence[int], size: int, limit: int) -> int:
    """How many jobs a claim takes."""
    taken = together = 0
    for one in sizes[:limit]:
        if together >= size:
            break
        taken += 1
        # What is stored uncompressed has a head of one byte or four.
        together += one
    return taken


def exchange(connection: psycopg.Connection[Any], size: int, limit: int = 50) -> list[int]:
    """The ids that one exchange claims from two queues."""
    asked = {
        "session": 7, "lease": "30 s", "leases": None, "limit": limit, "size": size, "queues": "{a,b}", "priorities": "{0,0}",
        "cursor_run_ats": "{-infinity,-infinity}", "cursor_ids": "{0,0}", "paused_kinds": "{}",
    }  # fmt: skip
    *rows, _ = connection.execute(statement("complete_and_claim", "pulse"), NOBODY | asked).fetchall()
    return [row[0] for row in rows]


@pytest.mark.parametrize("seed", range(12))
def test_a_claim_takes_jobs_until_they_have_the_size(seed: int, dsn: str) -> None:
    chance = random.Random(seed)
    lengths = [chance.choice((SMALL, PLAIN, PACKED, COMPRESSED)) for _ in range(30)]
    with psycopg.connect(dsn, autocommit=True) as connection:
        rows = connection.execute(
            "INSERT INTO pulse.job (kind, queue, args, run_at)"
            " SELECT 'noop', CASE WHEN n <= 15 THEN 'a' ELSE 'b' END, json_build_object('x', repeat('x', length)),"
            "   now() - interval '1 h' + n * interval '1 s'"
            " FROM unnest(%s::int[]) WITH ORDINALITY u(length, n) RETURNING id,"
            "   (SELECT CASE WHEN octet_length(args::text) > 2000 THEN octet_length(args::text) ELSE pg_column_size(args) END)",
            [lengths],
        ).fetchall()
        compressed = connection.execute(
            "SELECT count(*) FROM pulse.job WHERE pg_column_compression(args) IS NOT NULL"
        ).fetchone()
        sizes = [max(LEAST, size) for _, size in rows]
        size = chance.choice(
            (1, LEAST, 251, 2 * LEAST, 3 * LEAST + 1, 5000, 45_000, 200_000, sum(sizes) - 1, sum(sizes))
        )
        limit = chance.choice((1, 10, 30, 50))
        claimed = exchange(connection, size, limit)
    assert compressed == (lengths.count(PACKED) + lengths.count(COMPRESSED),)
    # Each queue's in their order, the first queue's first.
    assert claimed == [id_ for id_, _ in rows][: expected(sizes, size, limit)]


def test_a_claim_of_nothing_is_no_error(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        assert exchange(connection, 1) == []


def test_of_equal_sizes_the_first_stand_in_their_order(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        tids = ["(0,3)", "(9,1)", "(0,2)", "(5,5)"]
        found = connection.execute(
            "SELECT pulse.first_of_size(%s::tid[], '{250,250,250,250}', 501)::text[]", [tids]
        ).fetchone()
    assert found == (tids[:3],)
