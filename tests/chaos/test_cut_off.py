"""A worker that is cut off or stopped while the server holds something for it: what that is, is not lost with it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.postgres import open_pool, reconnecting
from pulse_trio.sql import statement
from pulse_trio.store import CommitUnknown, transactions
from support.stores import Window, claim_one, complete_alone, end, open_store, replace_statements

if TYPE_CHECKING:
    from pulse_trio.jobs import Claim
    from pulse_trio.postgres import TrioConnection
    from pulse_trio.store import WorkerStore
    from pulse_trio.testing.faults.proxy import Proxy

LEASE = 3.0


async def laid_down(store: WorkerStore) -> None:
    """Waits until the connection of the last transaction is ready for the next: what it kept is discarded in the background."""
    pool = store.transactions._pool
    assert pool is not None
    with trio.fail_after(60):
        while not pool.statistics.idle:  # noqa: ASYNC110 -- the pool tells nobody
            await trio.sleep(0.01)


async def rescued_by(store: WorkerStore) -> int:
    """How many jobs a watchdog rescues as soon as it can. Long for a loaded machine, and short beside what TCP would take."""
    with trio.fail_after(30):
        while not (rescued := (await store.rescue()).rescued):  # noqa: ASYNC110 -- PostgreSQL tells nobody
            await trio.sleep(0.1)
    return rescued


async def test_what_a_watchdog_was_about_to_rescue_another_one_rescues_within_a_lease(
    dsn: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(name: str, schema: str) -> bytes:
        if name == "refund":  # the expired rows are found and locked, and nothing is written yet
            proxy.swallow()
        return statement(name, schema)

    async with open_store(dsn, lease=LEASE) as other, open_store(proxy.dsn, lease=LEASE) as doomed:
        with Window(dsn) as window:
            job_id = window.enqueue()
            await claim_one(other)
            window.expire(job_id)
        replace_statements(monkeypatch, cut_off)
        with trio.move_on_after(0.5):
            await doomed.rescue()
        replace_statements(monkeypatch, statement)

        assert await rescued_by(other) == 1


async def test_a_job_whose_worker_is_cut_off_between_completion_and_commit_through_a_pooler_is_rescued(
    dsn: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    completing = trio.Event()

    def tell(name: str, schema: str) -> bytes:
        completing.set()
        return statement(name, schema)

    async def complete(store: WorkerStore, claim: Claim) -> None:
        async with store.transactions.begin() as begun:
            await complete_alone(begun, end(claim))

    monkeypatch.setattr(transactions, "_COMMIT_WITHIN", 1.0)
    async with open_store(dsn, lease=LEASE) as other, open_store(proxy.dsn, lease=LEASE) as doomed:
        with Window(dsn) as window:
            job_id = window.enqueue()
            claim = await claim_one(doomed)
            window.expire(job_id)
        async with doomed.transactions.open(within=1), trio.open_nursery() as nursery:
            monkeypatch.setattr(transactions, "statement", tell)
            nursery.start_soon(complete, doomed, claim)
            await completing.wait()
            proxy.to_client.hold()
            await proxy.to_client.arrival()  # the row is deleted, and locked
            proxy.swallow()
            nursery.cancel_scope.cancel()

        # The server rolls back after a second; else not before TCP gave the connection up.
        assert await rescued_by(other) == 1


@pytest.mark.parametrize("where", ["BEGIN", "completion", "COMMIT", "both"])
async def test_a_fenced_transaction_whose_server_falls_silent_ends_although_the_lease_is_renewed(
    where: str, dsn: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by `make chaos SEED=1`: the answer was lost, and the worker renewed the lease of a job that waited for ever."""
    monkeypatch.setattr(transactions, "_ANSWER_WITHIN", 0.3)
    with Window(dsn) as window:
        window.enqueue()
    async with open_store(dsn, lease=LEASE) as store, open_store(proxy.dsn, lease=LEASE) as doomed:
        claim = await claim_one(store)
        async with doomed.transactions.open(within=1):
            async with doomed.transactions.begin():
                pass  # the connection is there
            await laid_down(doomed)
            if where == "BEGIN":
                proxy.to_client.swallow()
            with trio.fail_after(60), pytest.raises(DatabaseUnavailable) as failure:  # noqa: PT012 -- which step raises is the point
                async with doomed.transactions.begin() as begun:
                    if where in ("completion", "both"):
                        proxy.to_client.swallow()
                    if where == "both":
                        await begun.complete(end(claim))
                    else:
                        await complete_alone(begun, end(claim))  # as through a pooler
                        proxy.to_client.swallow()

    assert isinstance(failure.value, CommitUnknown) == (where in ("COMMIT", "both"))


async def test_a_pool_gives_up_a_new_connection_whose_server_falls_silent_before_it_is_configured(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    async def configure(connection: TrioConnection[Any]) -> None:
        nonlocal made
        made += 1
        if made == 1:
            proxy.to_client.swallow()
        try:
            await connection.execute("SELECT 1")
        finally:
            proxy.forward()

    monkeypatch.setattr(reconnecting, "_CONFIGURE_WITHIN", 0.3)
    async with open_pool(proxy.dsn, min_size=0, max_size=1, configure=configure) as pool:
        with trio.fail_after(60):
            async with pool.connection() as connection:
                await connection.execute("SELECT 1")

    assert made == 2


@pytest.mark.parametrize("where", ["statement", "COMMIT"])
async def test_a_handler_that_is_cancelled_in_a_fenced_transaction_ends_within_the_time_for_it(
    where: str, dsn: str, proxy: Proxy
) -> None:
    """Found by `make chaos SEED=5`: 5 s, whatever the margin, in which the lease ran out and somebody else began."""
    with Window(dsn) as window:
        window.enqueue()
    async with open_store(dsn, lease=LEASE) as store, open_store(proxy.dsn, lease=LEASE) as doomed:
        claim = await claim_one(store)
        async with doomed.transactions.open(within=0.3):
            with trio.fail_after(3), trio.CancelScope() as scope, suppress(CommitUnknown):
                async with doomed.transactions.begin() as begun:
                    if where == "COMMIT":
                        await complete_alone(begun, end(claim))
                    proxy.hold()
                    scope.deadline = trio.current_time() + 0.2
                    if where == "statement":
                        await begun.connection.execute("SELECT 1")
            proxy.forward()
