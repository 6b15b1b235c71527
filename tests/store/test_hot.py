"""Claims and beats must be HOT updates: the design's first figure rests on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from support.stores import Window, claim, end, open_store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pulse_trio.jobs import Claim
    from pulse_trio.store import WorkerStore


def updates(window: Window) -> tuple[int, int]:
    """(updates, HOT updates) of the live table so far, once every session has told its own."""
    counts = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = 'job'::regclass"
    (row,) = window.run(counts)
    return row["n_tup_upd"], row["n_tup_hot_upd"]


async def flush(store: WorkerStore) -> None:
    """Makes the store's sessions publish their statistics at once (they otherwise wait a second)."""
    for link in (store.links.claims, store.links.settles, store.links.beats, store.links.watch):
        async with link.use() as connection:
            await connection.execute("SELECT pg_stat_force_next_flush()")


async def test_claims_and_beats_are_hot_updates(alone: Window) -> None:
    alone.publish_statistics()
    alone.enqueue_many(1000, "hot")
    async with open_store(alone.dsn) as store:
        held: list[Claim] = []

        async def claim_all() -> None:
            held.extend([c for _ in range(10) for c in await claim(store, "hot", 100)])

        async def beat_all() -> None:
            assert len((await store.beat(held)).renewed) == 1000

        assert await hot_share(alone, store, claim_all) == 1
        assert len(held) == 1000
        # A beat needs the room of the row's version before last, and that is pruned only when no transaction on the whole
        # server is older: not even another test's, in another database.
        with trio.fail_after(60):
            while await hot_share(alone, store, beat_all) < 1:
                pass


async def hot_share(window: Window, store: WorkerStore, act: Callable[[], Awaitable[None]]) -> float:
    """The share of an act's updates that were HOT; it makes 1000."""
    await flush(store)
    before = updates(window)
    await act()
    await flush(store)
    total, hot = (after - then for after, then in zip(updates(window), before, strict=True))
    assert total == 1000
    return hot / total


async def test_no_index_of_the_live_table_mentions_what_a_claim_writes(alone: Window) -> None:
    # A summarising index is the exception, from PostgreSQL 16 on.
    written = ("lease_until", "started_at", "locked_by", "attempt", "state")
    indexes = alone.run(
        "SELECT pg_get_indexdef(indexrelid) AS definition FROM pg_index JOIN pg_class c ON c.oid = indexrelid"
        " JOIN pg_am a ON a.oid = c.relam WHERE indrelid = 'job'::regclass AND amname <> 'brin'"
    )
    assert indexes
    assert not [i["definition"] for i in indexes if any(column in i["definition"] for column in written)]
    assert alone.value("SELECT 'fillfactor=48' = ANY (reloptions) FROM pg_class WHERE oid = 'job'::regclass")


async def test_the_lease_index_exists_where_it_keeps_updates_hot(alone: Window) -> None:
    version = alone.value("SELECT current_setting('server_version_num')::int")
    assert (alone.value("SELECT to_regclass('job_lease')") is not None) == (version >= 160000)


async def test_a_completion_moves_the_row_and_nothing_stays(alone: Window) -> None:
    alone.enqueue_many(10, "hot")
    async with open_store(alone.dsn) as store:
        claims = await claim(store, "hot")
        await store.complete_and_claim(0, [], [end(c) for c in claims])
    assert alone.value("SELECT count(*) FROM job") == 0
    assert alone.value("SELECT count(*) FROM job_archive") == 10
