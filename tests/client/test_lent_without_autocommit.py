"""On the caller's psycopg connection: what he wrote himself and what a client wrote for him are both there, or both not."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio
from psycopg.pq import TransactionStatus

from pulse_trio import Client, Handlers, InvalidArguments, JobRequest, SyncClient, open_client
from pulse_trio.client import writing
from pulse_trio.postgres import TrioConnection
from pulse_trio.store import batches
from support.stores import Window, claim, open_store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

pytestmark = pytest.mark.anyio
handlers = Handlers()


@handlers.job
async def greet(name: str) -> None: ...


KINDS: dict[str, Any] = {
    "blocking": psycopg.Connection,
    "asyncio": psycopg.AsyncConnection,
    "trio": TrioConnection,
}
each_kind = pytest.mark.parametrize(
    ("anyio_backend", "kind"),
    [("trio", "blocking"), ("asyncio", "asyncio"), ("trio", "trio")],
    ids=list(KINDS),
)


async def settled(given: Any) -> Any:
    """What a call of either client or connection gives."""
    return await given if inspect.isawaitable(given) else given


@asynccontextmanager
async def inside(block: Any) -> AsyncGenerator[Any]:
    if isinstance(block, AbstractContextManager):
        with block as entered:
            yield entered
    else:
        async with block as entered:
            yield entered


@asynccontextmanager
async def lent(kind: str, dsn: str, **options: Any) -> AsyncGenerator[tuple[Any, Any]]:
    """A connection of the caller's, and a client on it."""
    connection = await settled(KINDS[kind].connect(dsn, **options))
    async with inside(connection), open_client(dsn) as client:
        blocking = isinstance(connection, psycopg.Connection)
        yield connection, SyncClient(dsn).using(connection) if blocking else client.using(connection)


# What a client can write


class Things:
    """What is there for the methods to change. It is made anew for each."""

    def __init__(self, client: SyncClient, batch: int, running: int) -> None:
        self.queue = "things"
        self.waiting = client.enqueue("noop", {}, queue=self.queue, delay=60).id
        self.cancelled = client.enqueue("noop", {}, queue=self.queue).id
        client.cancel(self.cancelled)
        client.schedule("every hour", greet, {"name": "ada"}, every=3600)
        client.schedule("paused", greet, {"name": "ada"}, every=3600)
        client.pause_schedule("paused")
        client.pause("stands")
        self.batch = batch
        self.running = running


def requests(count: int, keys: str | None = None) -> list[JobRequest]:
    return [greet.options(unique_key=keys and f"{keys} {n}").request(str(n)) for n in range(count)]


def new_batch(client: Any, _: Things) -> Awaitable[None] | None:
    async def does() -> None:
        async with client.batch(on_complete=greet.request("all")) as batch:
            await batch.enqueue(greet, "ada")

    if not isinstance(client, SyncClient):
        return does()
    with client.batch(on_complete=greet.request("all")) as batch:
        batch.enqueue(greet, "ada")
    return None


def in_batch(act: Callable[[Any], Any]) -> Callable[[Any, Things], Any]:
    async def does(client: Any, things: Things) -> None:
        await act(await client.open_batch(things.batch))

    def acts(client: Any, things: Things) -> Any:
        return act(client.open_batch(things.batch)) if isinstance(client, SyncClient) else does(client, things)

    return acts


WRITES: dict[str, Callable[[Any, Things], Any]] = {
    "enqueue": lambda c, _: c.enqueue(greet, "ada"),
    "enqueue, unique": lambda c, _: c.enqueue(greet.options(unique_key="one"), "ada"),
    "enqueue_many": lambda c, _: c.enqueue_many(requests(3)),
    "enqueue_many, by COPY": lambda c, _: c.enqueue_many(requests(20)),
    "enqueue_many, unique": lambda c, _: c.enqueue_many(requests(3, "few")),
    "enqueue_many, in slices": lambda c, _: c.enqueue_many(requests(60) + requests(60, "many")),
    "retry": lambda c, t: c.retry(t.cancelled),
    "retry, afresh": lambda c, t: c.retry(t.cancelled, afresh=True),
    "retry_many": lambda c, t: c.retry_many(state="cancelled", queue=t.queue),
    "cancel": lambda c, t: c.cancel(t.waiting),
    "cancel_many": lambda c, t: c.cancel_many([t.waiting]),
    "delete": lambda c, t: c.delete(t.cancelled),
    "delete_many": lambda c, t: c.delete_many(state="cancelled", queue=t.queue),
    "release": lambda c, t: c.release(t.running, force=True),
    "complete": lambda c, t: c.complete(t.running, "done"),
    "send_event": lambda c, t: c.send_event(t.waiting, "approved", 1),
    "pause": lambda c, _: c.pause("mail"),
    "resume": lambda c, _: c.resume("stands"),
    "limit_queue": lambda c, _: c.limit_queue("mail", limit=3),
    "schedule": lambda c, _: c.schedule("nightly", greet, {"name": "ada"}, cron="0 3 * * *"),
    "pause_schedule": lambda c, _: c.pause_schedule("every hour"),
    "resume_schedule": lambda c, _: c.resume_schedule("paused"),
    "remove_schedule": lambda c, _: c.remove_schedule("every hour"),
    "run_schedule": lambda c, _: c.run_schedule("every hour"),
    "batch": new_batch,
    "open_batch, enqueue": in_batch(lambda b: b.enqueue(greet, "ada")),
    "open_batch, enqueue_many": in_batch(lambda b: b.enqueue_many(requests(20))),
    "open_batch, close": in_batch(lambda b: b.close()),
    "open_batch, cancel": in_batch(lambda b: b.cancel()),
}
READS = {
    "attempts", "audit", "cancellations", "count_by_state", "ended", "fires", "job", "jobs", "pooled", "queue_keys", "queues",
    "result", "run", "run_together", "schedules", "schema", "stack", "tree", "using", "wait", "workers",
}  # fmt: skip
"""What writes nothing, or what the methods above use."""


@pytest.mark.parametrize("client", [SyncClient, Client])
async def test_every_method_that_writes_is_tried_here(client: type) -> None:
    public = {name for name in vars(client) if not name.startswith("_")}
    assert public - READS == {name.partition(",")[0] for name in WRITES}


# Whose transaction it is in


def look_of(window: Window) -> str:
    """A query for what stands in all tables of the schema, as one text for each."""
    # PostgreSQL would start processes for so many tables.
    window.run("SET max_parallel_workers_per_gather = 0")
    tables = window.run(
        "SELECT oid::regclass::text AS name FROM pg_class WHERE relnamespace = 'pulse'::regnamespace AND relkind = 'r' "
        "AND relname <> 'migration'"
    )
    looks = " UNION ALL ".join(
        f"SELECT '{t['name']}' AS name, md5(string_agg(t::text, ' ' ORDER BY t::text)) AS rows FROM {t['name']} t"
        for t in tables
    )
    return f"{looks} ORDER BY name"


INSERT = "INSERT INTO public.account VALUES ('the caller')"
MODES = ["autocommit", "autocommit, in a block", "idle", "begun", "in a block"]


@pytest.fixture
def running(dsn: str) -> list[int]:
    """Jobs that a worker runs, one for each method."""

    async def begin() -> list[int]:
        count = len(WRITES)
        ids = [done.id for done in SyncClient(dsn).enqueue_many(requests(count))]
        async with open_store(dsn) as store:
            assert len(await claim(store, limit=count)) == count
        return ids

    return trio.run(begin)


class TakenBackError(Exception):
    pass


@each_kind
@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("mode", MODES)
async def test_the_callers_row_and_what_the_client_wrote_are_both_there_or_both_not(
    mode: str, ending: str, kind: str, dsn: str, running: list[int], window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SLICE", 25)
    window.run("CREATE TABLE public.account (name text)")
    kept = mode == "autocommit" or ending == "commit"
    wrong: list[str] = []
    everything = look_of(window)
    async with (
        open_client(dsn) as other,
        lent(kind, dsn, autocommit=mode.startswith("autocommit")) as (connection, client),
    ):
        for name, write in WRITES.items():
            batch = await other.open_batch(window.do(batches.open_batch(None)))
            await batch.enqueue(greet, "member")
            things = Things(SyncClient(window.connection), batch.id, running.pop())
            before = window.run(everything)
            window.run("TRUNCATE public.account")

            if mode == "begun":
                await settled(connection.execute(INSERT))
            if mode.endswith("in a block"):
                try:
                    async with inside(connection.transaction()):
                        await settled(write(client, things))
                        await settled(connection.execute(INSERT))
                        early = window.run(everything) != before
                        if ending == "rollback":
                            raise TakenBackError
                except TakenBackError:
                    pass
            else:
                await settled(write(client, things))
                early = mode != "autocommit" and window.run(everything) != before
                if mode != "begun":
                    await settled(connection.execute(INSERT))
            await settled(getattr(connection, ending)())

            found = (window.run(everything) != before, window.value("SELECT count(*) FROM public.account") == 1)
            if early or found != (kept, kept) or connection.info.transaction_status != TransactionStatus.IDLE:
                wrong.append(f"{name}: (client's, caller's) are there: {found}, before the end: {early}")
    assert wrong == []


@each_kind
async def test_a_refused_first_statement_is_undone_alone_and_the_callers_transaction_goes_on(
    kind: str, dsn: str, window: Window
) -> None:
    window.run("ALTER TABLE schedule ADD CHECK (name <> 'refused')")
    async with lent(kind, dsn) as (connection, client):
        with pytest.raises(InvalidArguments):
            await settled(client.enqueue_many([*requests(3), JobRequest(kind="greet", args="[]")]))
        with pytest.raises(InvalidArguments):
            await settled(client.schedule("refused", greet, {"name": "ada"}, every=60))
        await settled(client.enqueue_many(requests(2)))
        assert window.value("SELECT count(*) FROM job") == 0
        await settled(connection.commit())
    assert window.value("SELECT count(*) FROM job") == 2


@each_kind
async def test_a_first_statement_that_only_reads_begins_the_callers_transaction_too(kind: str, dsn: str) -> None:
    async with lent(kind, dsn) as (connection, client):
        await settled(connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ))
        for look in (lambda: client.jobs(), lambda: client.queue_keys(), lambda: client.queues()):
            await settled(look())
            assert connection.info.transaction_status == TransactionStatus.INTRANS
            cursor = await settled(
                connection.execute(
                    "SELECT current_setting('transaction_isolation'), current_setting('statement_timeout')"
                )
            )
            assert await settled(cursor.fetchone()) == ("repeatable read", "0")
            await settled(connection.rollback())


FEW = ("enqueue", "enqueue_many", "enqueue_many, by COPY", "enqueue_many, unique", "batch", "schedule")


@each_kind
@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_in_a_pipeline_it_is_no_different(ending: str, kind: str, dsn: str, window: Window) -> None:
    window.run("CREATE TABLE public.account (name text)")
    things: Any = None
    everything = look_of(window)
    async with lent(kind, dsn) as (connection, client):
        for name in FEW:
            write = WRITES[name]
            before = window.run(everything)
            window.run("TRUNCATE public.account")
            async with inside(connection.pipeline()):
                await settled(write(client, things))
                await settled(connection.execute(INSERT))
            assert window.run(everything) == before, name
            await settled(getattr(connection, ending)())
            kept = ending == "commit"
            assert (window.run(everything) != before) is kept, name
            assert (window.value("SELECT count(*) FROM public.account") == 1) is kept, name


@each_kind
@pytest.mark.parametrize("ending", ["tpc_commit", "tpc_rollback"])
async def test_in_a_two_phase_transaction_it_is_no_different(ending: str, kind: str, dsn: str, window: Window) -> None:
    window.run("CREATE TABLE public.account (name text)")
    things: Any = None
    everything = look_of(window)
    async with lent(kind, dsn) as (connection, client):
        for name in FEW:
            write = WRITES[name]
            before = window.run(everything)
            window.run("TRUNCATE public.account")
            await settled(connection.tpc_begin(connection.xid(1, name, "here")))
            await settled(write(client, things))
            await settled(connection.execute(INSERT))
            assert window.run(everything) == before, name
            # Without its first phase, for which a server needs a setting.
            await settled(getattr(connection, ending)())
            kept = ending == "tpc_commit"
            assert (window.run(everything) != before) is kept, name
            assert (window.value("SELECT count(*) FROM public.account") == 1) is kept, name
