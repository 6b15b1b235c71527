"""A worker that is cut off or stopped in the middle of a transaction: what that has locked is not lost with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from pulse_trio.store import transactions, worker
from pulse_trio.store.worker import statement
from support.stores import Window, claim_one, end, open_store

if TYPE_CHECKING:
    import pytest

    from support.proxy import Proxy

LEASE = 3.0


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
        monkeypatch.setattr(worker, "statement", cut_off)
        with trio.move_on_after(0.5):
            await doomed.rescue()
        monkeypatch.setattr(worker, "statement", statement)

        rescued = 0
        with trio.move_on_after(LEASE):
            while not rescued:
                rescued = (await other.rescue()).rescued
                await trio.sleep(0.1)

        assert rescued == 1


async def test_a_job_whose_worker_is_cut_off_between_completion_and_commit_is_rescued(
    dsn: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(name: str, schema: str) -> bytes:
        proxy.to_client.swallow()  # the row is deleted and locked, and nobody will commit
        return statement(name, schema)

    monkeypatch.setattr(transactions, "_COMMIT_WITHIN", 1.0)
    async with open_store(dsn, lease=LEASE) as other, open_store(proxy.dsn, lease=LEASE) as doomed:
        with Window(dsn) as window:
            job_id = window.enqueue()
            claim = await claim_one(doomed)
            window.expire(job_id)
        async with doomed.transactions.open():
            monkeypatch.setattr(transactions, "statement", cut_off)
            with trio.move_on_after(0.5):
                async with doomed.transactions.begin() as begun:
                    await begun.complete(end(claim))

            rescued = 0
            with trio.move_on_after(LEASE):
                while not rescued:
                    rescued = (await other.rescue()).rescued
                    await trio.sleep(0.1)

        assert rescued == 1
