"""Fenced transactions on a real database: a handler's writes and the completion, or neither."""

# ruff: noqa: PT012 -- a block that is left by an error is what is tried

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio
import trio.testing

from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.store import CommitUnknown
from support.stores import LOCK_WAITED_FOR, Window, claim_one, complete_alone, end, forged, open_store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pulse_trio.jobs import Claim
    from pulse_trio.store import WorkerStore
    from pulse_trio.testing.faults.proxy import Proxy

INSERT = "INSERT INTO public.ledger VALUES (%s)"


@pytest.fixture(params=[True, False], ids=["kept", "not kept"])
async def store(request: pytest.FixtureRequest, dsn: str) -> AsyncGenerator[WorkerStore]:
    async with open_store(dsn, keep=request.param) as store, store.transactions.open():
        yield store


@pytest.fixture
def window(dsn: str) -> Any:
    with Window(dsn) as window:
        window.run("CREATE TABLE public.ledger (job bigint UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        yield window


def ledger(window: Window) -> list[int]:
    return [row["job"] for row in window.run("SELECT job FROM public.ledger")]


async def pay(store: WorkerStore, claim: Claim) -> bool | None:
    async with store.transactions.begin() as begun:
        await begun.connection.execute(INSERT, [claim.id])
        return await begun.complete(end(claim, result="7"))


@pytest.mark.parametrize("through_a_pooler", [False, True])
async def test_writes_and_completion_are_one_commit(through_a_pooler: bool, store: WorkerStore, window: Window) -> None:
    job_id = window.enqueue()
    claim = await claim_one(store)
    async with store.transactions.begin() as begun:
        await begun.connection.execute(INSERT, [claim.id])
        assert (ledger(window), window.state(job_id)) == ([], "running")
        if through_a_pooler:
            assert await complete_alone(begun, end(claim, result="7")) is True
            assert (ledger(window), window.state(job_id)) == ([], "running")
        else:
            assert await begun.complete(end(claim, result="7")) is True
    assert ledger(window) == [job_id]
    assert window.row(job_id) is None
    kept = window.run("SELECT state, attempt, result FROM jobs")
    assert kept in ([], [{"state": "completed", "attempt": 1, "result": 7}])


async def test_the_completion_finds_its_row_by_its_id_also_when_it_was_planned_for_a_small_table(
    store: WorkerStore, window: Window
) -> None:
    window.enqueue()
    assert await pay(store, await claim_one(store))
    window.run("VACUUM ANALYZE job")
    job_id = window.enqueue()
    window.run("INSERT INTO job (kind) SELECT 'noop' FROM generate_series(1, 5000)")
    claim = await claim_one(store)
    assert claim.id == job_id
    async with store.transactions.begin() as begun:
        assert await complete_alone(begun, end(claim))
        look = await begun.connection.execute("SELECT seq_scan FROM pg_stat_xact_user_tables WHERE relname = 'job'")
        assert await look.fetchone() == (0,)


async def test_an_exception_undoes_the_writes_and_the_completion(store: WorkerStore, window: Window) -> None:
    job_id = window.enqueue()
    claim = await claim_one(store)
    with pytest.raises(ZeroDivisionError):
        async with store.transactions.begin() as begun:
            await begun.connection.execute(INSERT, [claim.id])
            assert await complete_alone(begun, end(claim))
            raise ZeroDivisionError
    assert (ledger(window), window.state(job_id)) == ([], "running")
    assert (await store.settle([end(claim, "failed", error="x")])).accepted


@pytest.mark.parametrize("part", ["id", "attempt", "session"])
async def test_a_fence_that_does_not_match_is_told(part: str, store: WorkerStore, window: Window) -> None:
    window.enqueue()
    claim = await claim_one(store)
    async with store.transactions.begin() as begun:
        assert await begun.complete(end(forged(claim, **{part: getattr(claim, part) + 1}))) is False


async def test_a_locked_row_is_told_apart_and_can_be_tried_again(store: WorkerStore, window: Window, dsn: str) -> None:
    window.enqueue()
    claim = await claim_one(store)
    async with store.transactions.begin() as begun:
        with psycopg.connect(dsn) as other:
            other.execute("SELECT FROM pulse.job FOR UPDATE")
            assert await begun.complete(end(claim)) is None
        assert await begun.complete(end(claim)) is True


async def test_a_transaction_under_way_does_not_keep_beats_waiting(store: WorkerStore, window: Window) -> None:
    window.enqueue()
    claim = await claim_one(store)
    async with store.transactions.begin() as begun:
        await begun.connection.execute(INSERT, [claim.id])
        assert (await store.beat([claim])).renewed == {claim}
        assert await complete_alone(begun, end(claim))
        # Deleted, but not yet committed: still ours as far as anybody can see.
        assert (await store.beat([claim])).locked == {claim}
    beat = await store.beat([claim])
    assert (beat.renewed, beat.locked) == (frozenset(), frozenset())


async def test_a_deferred_constraint_that_fails_at_commit_undoes_all(store: WorkerStore, window: Window) -> None:
    job_id = window.enqueue()
    claim = await claim_one(store)
    window.run(INSERT, job_id)
    with pytest.raises(psycopg.errors.UniqueViolation):
        await pay(store, claim)
    assert window.state(job_id) == "running"


async def test_a_connection_that_became_read_only_is_not_lent_again(store: WorkerStore, window: Window) -> None:
    job_id = window.enqueue()
    claim = await claim_one(store)
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        async with store.transactions.begin() as begun:
            first = begun.connection.info.backend_pid
            # What a primary that becomes a standby is to a connection it keeps.
            await begun.connection.execute("SET TRANSACTION READ ONLY")
            await begun.complete(end(claim))
    async with store.transactions.begin() as begun:
        assert begun.connection.info.backend_pid != first
    assert await pay(store, claim)
    assert ledger(window) == [job_id]


async def test_a_transaction_ended_by_hand_is_refused(store: WorkerStore, window: Window) -> None:
    job_id = window.enqueue()
    claim = await claim_one(store)
    with pytest.raises(psycopg.ProgrammingError):
        async with store.transactions.begin() as begun:
            await begun.connection.commit()
    with pytest.raises(RuntimeError, match=r"job\.transaction\(\) was ended inside its block"):
        async with store.transactions.begin() as begun:
            await begun.connection.execute("COMMIT")
            await begun.complete(end(claim))
    assert window.state(job_id) == "running"


async def test_statements_have_a_time_limit_of_their_own_on_the_server(store: WorkerStore) -> None:
    async def limit(**how: float) -> str:
        async with store.transactions.begin(**how) as begun:
            return (await (await begun.connection.execute("SHOW statement_timeout")).fetchone() or ("",))[0]

    assert [await limit(seconds=4.0), await limit()] == ["5120ms", "0"]  # rounded up


async def test_transactions_that_take_every_connection_hold_up_nothing_of_the_workers(
    store: WorkerStore, window: Window
) -> None:
    window.enqueue()
    claim = await claim_one(store)
    begun = 0

    async def hold() -> None:
        nonlocal begun
        async with store.transactions.begin():
            begun += 1
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for _ in range(30):
            nursery.start_soon(hold)
        while begun < 10:  # noqa: ASYNC110 -- the eleventh must not come, and tells nobody
            await trio.sleep(0.01)
        assert (await store.beat([claim])).renewed == {claim}
        assert (await store.settle([end(claim)])).accepted
        window.enqueue()
        await claim_one(store)
        assert begun == 10
        nursery.cancel_scope.cancel()


# A commit without an answer


async def test_what_became_of_a_commit_is_known_when_the_transaction_has_ended(
    store: WorkerStore, window: Window
) -> None:
    job_id = window.enqueue()
    claim = await claim_one(store)
    answers: list[bool] = []

    async def ask() -> None:
        answers.append(await store.transactions.committed(claim))

    for done in (False, True):
        with trio.move_on_after(10):
            async with trio.open_nursery() as nursery, store.transactions.begin() as begun:
                assert await complete_alone(begun, end(claim))
                nursery.start_soon(ask)
                # It waits for the row, which this transaction holds.
                await somebody_waits(window)
                assert answers == []
                if not done:
                    await begun.connection.execute("ROLLBACK; BEGIN")
        assert answers.pop() is done
    assert window.row(job_id) is None


@pytest.mark.parametrize("ended", ["rescued", "failed", "dead", "released"])
async def test_an_attempt_that_ended_otherwise_was_not_committed(
    ended: str, store: WorkerStore, window: Window
) -> None:
    job_id = window.enqueue(max_attempts=1 if ended == "dead" else 20)
    claim = await claim_one(store)
    if ended in ("rescued", "dead"):
        window.expire(job_id)
        await store.rescue()
    else:
        await store.settle([end(claim, "failed" if ended == "failed" else "released", error="x")])
    assert await store.transactions.committed(claim) is False
    if ended != "dead":
        window.make_due(job_id)
        second = await claim_one(store)
        assert await pay(store, second)
        assert [await store.transactions.committed(c) for c in (claim, second)] == [False, True]


@pytest.mark.parametrize("alone", [True, False], ids=["the completion before", "the completion with it"])
@pytest.mark.parametrize("reached", [True, False], ids=["the reply is lost", "the COMMIT is lost"])
async def test_a_lost_commit_is_unknown_and_then_found_out(
    reached: bool, alone: bool, proxy: Proxy, window: Window
) -> None:
    job_id = window.enqueue()
    async with open_store(proxy.dsn) as store, store.transactions.open(), trio.open_nursery() as nursery:
        claim = await claim_one(store)
        with pytest.raises(CommitUnknown):
            async with store.transactions.begin() as begun:
                await begun.connection.execute(INSERT, [claim.id])
                if alone:
                    assert await complete_alone(begun, end(claim))
                if reached:
                    proxy.to_client.swallow()
                    nursery.start_soon(cut_at_the_reply, proxy)
                else:
                    proxy.cut()
                if not alone:
                    await begun.complete(end(claim))
        assert await store.transactions.committed(claim) is reached
    assert ledger(window) == ([job_id] if reached else [])
    assert (window.state(job_id) == "completed") is reached


@pytest.mark.parametrize("setting", ["idle_in_transaction_session_timeout", "transaction_timeout"])
async def test_a_transaction_that_stands_for_longer_than_its_role_may_is_said_to_be_ended_by_that_setting(
    setting: str, dsn: str, window: Window
) -> None:
    """It was a connection that was lost during COMMIT."""
    if setting == "transaction_timeout" and window.connection.info.server_version < 170_000:
        pytest.skip("PostgreSQL 17 has brought it")
    name = window.connection.info.dbname
    job_id = window.enqueue()
    window.run(f'ALTER DATABASE "{name}" SET {setting} = 200')
    async with open_store(dsn) as store, store.transactions.open():
        claim = await claim_one(store)
        with pytest.raises(
            CommitUnknown,
            match=f"^the server ended it, and its connection, before COMMIT, by the setting {setting}: it stood",
        ):
            async with store.transactions.begin() as begun:
                await begun.connection.execute(INSERT, [claim.id])
                # Readable: the server has said why it ends the session.
                await trio.lowlevel.wait_readable(begun.connection.fileno())
                await begun.complete(end(claim))
        window.run(f'ALTER DATABASE "{name}" RESET {setting}')
        assert await store.transactions.committed(claim) is False
    assert (ledger(window), window.state(job_id)) == ([], "running")


async def test_a_transaction_has_the_settings_of_its_role_and_database(dsn: str, window: Window) -> None:
    asked = {
        "lock_timeout": "7s",
        "search_path": "shop",
        "idle_in_transaction_session_timeout": "9min",
        "TimeZone": "Europe/Berlin",
    }
    for setting, value in asked.items():
        window.run(f"ALTER DATABASE \"{window.connection.info.dbname}\" SET {setting} = '{value}'")
    async with open_store(dsn) as store, store.transactions.open(), store.transactions.begin() as begun:
        for setting, value in asked.items():
            assert await begun.connection.value_of(b"SHOW " + setting.encode()) == value.encode()


async def cut_at_the_reply(proxy: Proxy) -> None:
    await proxy.to_client.arrival()
    proxy.cut()
    proxy.forward()


async def test_a_cancelled_commit_that_got_no_answer_is_unknown_too(proxy: Proxy, window: Window) -> None:
    job_id = window.enqueue()
    async with open_store(proxy.dsn) as store, store.transactions.open(), trio.open_nursery() as nursery:
        claim = await claim_one(store)
        with pytest.raises(CommitUnknown), trio.CancelScope() as scope:
            async with store.transactions.begin() as begun:
                begun._limits = begun._limits._replace(cleanup=0.2)
                proxy.to_client.swallow()
                nursery.start_soon(cancel_when_it_waits, scope)  # noqa: ASYNC111 -- it ends before
                await begun.complete(end(claim))
        proxy.cut()
        proxy.forward()
        assert await store.transactions.committed(claim) is True
    assert window.state(job_id) == "completed"


async def test_a_cancelled_commit_that_was_done_says_so(proxy: Proxy, window: Window) -> None:
    job_id = window.enqueue()
    async with open_store(proxy.dsn) as store, store.transactions.open(), trio.open_nursery() as nursery:
        claim = await claim_one(store)
        with trio.CancelScope() as scope:
            async with store.transactions.begin() as begun:
                proxy.to_client.hold()
                nursery.start_soon(cancel_when_it_waits, scope, proxy)  # noqa: ASYNC111 -- it ends before
                assert await begun.complete(end(claim))
        assert scope.cancelled_caught
        assert begun.committed
    assert window.state(job_id) == "completed"


async def cancel_when_it_waits(scope: trio.CancelScope, proxy: Proxy | None = None) -> None:
    await trio.testing.wait_all_tasks_blocked()
    scope.cancel()
    if proxy is not None:
        await trio.testing.wait_all_tasks_blocked()
        proxy.forward()


async def test_a_commit_that_is_still_on_its_way_when_it_was_said_to_be_undone_never_comes(
    proxy: Proxy, window: Window
) -> None:
    job_id = window.enqueue()
    async with open_store(window.dsn) as store, open_store(proxy.dsn) as doomed:
        claim = await claim_one(doomed)
        async with doomed.transactions.open(within=0.2), trio.open_nursery() as nursery:
            with pytest.raises(CommitUnknown), trio.CancelScope() as scope:
                async with doomed.transactions.begin() as begun:
                    pid = begun.connection.info.backend_pid
                    await begun.connection.execute(INSERT, [claim.id])
                    proxy.to_server.hold()
                    nursery.start_soon(cancel_when_it_waits, scope)  # noqa: ASYNC111 -- it ends before
                    await begun.complete(end(claim))
            # Nothing has reached the server, and the row is free.
            process = "SELECT state FROM pg_stat_activity WHERE pid = %s"
            assert window.value(process, pid) == "idle in transaction"
            assert (await store.beat([claim])).locked == frozenset()
            doomed.transactions._dsn = window.dsn
            async with doomed.transactions.open():
                assert await doomed.transactions.committed(claim) is False
            assert window.run(process, pid) == []
            proxy.forward()
        assert (ledger(window), window.state(job_id)) == ([], "running")
        assert (await doomed.settle([end(claim, "failed", error="x")])).accepted


async def test_a_question_that_got_no_answer_says_so(proxy: Proxy, window: Window) -> None:
    job_id = window.enqueue()
    async with open_store(proxy.dsn) as store, store.transactions.open(), trio.open_nursery() as nursery:
        claim = await claim_one(store)
        with psycopg.connect(window.dsn) as other:
            other.execute("SELECT FROM pulse.job WHERE id = %s FOR UPDATE", [job_id])
            nursery.start_soon(cut_when_it_waits, proxy, window)
            with pytest.raises(DatabaseUnavailable):
                await store.transactions.committed(claim)


async def cut_when_it_waits(proxy: Proxy, window: Window) -> None:
    await somebody_waits(window)
    proxy.cut()


async def somebody_waits(window: Window) -> None:
    while not window.value(LOCK_WAITED_FOR):  # noqa: ASYNC110 -- PostgreSQL tells nobody
        await trio.sleep(0.01)
