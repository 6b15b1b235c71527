"""In the caller's transaction, whichever library it is of: the job appears if and only if that transaction commits."""

# Django has no types.
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import pytest
import sqlalchemy
import sqlalchemy.ext.asyncio
import sqlalchemy.orm
from psycopg.conninfo import conninfo_to_dict

from pulse_trio import ConfigurationError, Handlers, InvalidArguments, JobRequest, SyncClient, UsageError, open_client
from pulse_trio.sql import statement
from pulse_trio.store.foreign import numbered
from support.configured import LENT, set_on_database
from support.django_project import database
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from pulse_trio.records import JobRecord

handlers = Handlers()


@handlers.job
async def greet(name: str) -> str:
    return f"hello {name}"


LABELS: dict[str, Any] = {"tags": ["eu", "a/b"], "meta": {"order": 7}}


def labels(jobs: list[JobRecord]) -> list[dict[str, Any]]:
    return [{"tags": job.tags, "meta": job.meta} for job in jobs]


@pytest.fixture
def window(dsn: str) -> Generator[Window]:
    with Window(dsn) as window:
        window.run("CREATE TABLE public.account (name text)")
        yield window


def url(dsn: str, driver: str) -> str:
    known = conninfo_to_dict(dsn)
    made = sqlalchemy.URL.create(
        f"postgresql+{driver}",
        username=str(known["user"]),
        password=str(known["password"]) if known.get("password") else None,
        database=str(known["dbname"]),
        query={"host": str(known["host"]), **({"port": str(known["port"])} if known.get("port") else {})},
    )
    return made.render_as_string(hide_password=False)


class Begun:
    """A transaction of another library: the connection to enqueue on, and a way to write something else in it."""

    def __init__(self, connection: Any, execute: Any) -> None:
        self.connection = connection
        self.execute = execute


class RolledBackError(Exception):
    pass


@contextmanager
def rolled_back(begin: Any, dsn: str) -> Generator[Begun]:
    try:
        with begin(dsn) as begun:
            yield begun
            raise RolledBackError
    except RolledBackError:
        pass


@asynccontextmanager
async def rolled_back_async(begin: Any, dsn: str) -> AsyncGenerator[Begun]:
    try:
        async with begin(dsn) as begun:
            yield begun
            raise RolledBackError
    except RolledBackError:
        pass


# Blocking


@contextmanager
def psycopg_connection(dsn: str) -> Generator[Begun]:
    with psycopg.connect(dsn) as connection:
        yield Begun(connection, connection.execute)


@contextmanager
def sqlalchemy_connection(dsn: str) -> Generator[Begun]:
    engine = sqlalchemy.create_engine(url(dsn, "psycopg"))
    try:
        with engine.begin() as connection:
            yield Begun(connection, lambda text: connection.execute(sqlalchemy.text(text)))
    finally:
        engine.dispose()


@contextmanager
def sqlalchemy_session(dsn: str) -> Generator[Begun]:
    engine = sqlalchemy.create_engine(url(dsn, "psycopg"))
    try:
        with sqlalchemy.orm.Session(engine) as session, session.begin():
            yield Begun(session, lambda text: session.execute(sqlalchemy.text(text)))
    finally:
        engine.dispose()


@contextmanager
def django_connection(dsn: str) -> Generator[Begun]:
    from django.db import transaction

    with database(dsn, "jobs") as connection, transaction.atomic(using="jobs"), connection.cursor() as cursor:
        yield Begun(connection, cursor.execute)


BLOCKING = [psycopg_connection, sqlalchemy_connection, sqlalchemy_session, django_connection]


@pytest.mark.parametrize("begin", BLOCKING)
def test_a_job_appears_if_and_only_if_a_blocking_transaction_commits(begin: Any, dsn: str, window: Window) -> None:
    client = SyncClient(dsn, handlers=handlers)
    with rolled_back(begin, dsn) as begun:
        # The enqueue comes first: the library must begin its transaction for it.
        assert client.using(begun.connection).enqueue(greet, "nobody").added
        client.using(begun.connection).enqueue_many(greet.request(str(n)) for n in range(20))
        begun.execute("INSERT INTO public.account VALUES ('nobody')")
    assert what_is_there(window) == ([], [])

    with begin(dsn) as begun:
        using = SyncClient(begun.connection)
        one = using.enqueue(greet.options(unique_key="k", delay=60, deadline=90, **LABELS), "ada")
        assert using.enqueue("greet", {"name": "ada"}, unique_key="k") == (one.id, False, False)
        begun.execute("INSERT INTO public.account VALUES ('ada')")
        many = using.enqueue_many(greet.options(**LABELS).request(str(n)) for n in range(20))
        assert using.job(one.id).args == {"name": "ada"}
        assert labels(using.jobs(tag="eu", limit=50)) == [LABELS] * 21
        assert what_is_there(window) == ([], [])
    assert what_is_there(window) == ([one.id, *[done.id for done in many]], ["ada"])


@pytest.mark.parametrize("begin", BLOCKING)
def test_a_refused_batch_leaves_a_blocking_transaction_alive_and_an_aborted_one_is_named(
    begin: Any, dsn: str, window: Window
) -> None:
    with begin(dsn) as begun:
        using = SyncClient(begun.connection)
        with pytest.raises(InvalidArguments):
            using.enqueue_many([JobRequest(kind="greet", args="[]")])
        kept = using.enqueue(greet, "ada")
    assert what_is_there(window)[0] == [kept.id]
    with rolled_back(begin, dsn) as begun:
        with pytest.raises(Exception, match="division by zero"):
            begun.execute("SELECT 1/0")
        using = SyncClient(begun.connection)
        for call in (lambda: using.enqueue(greet, "nobody"), lambda: using.enqueue_many([greet.request("nobody")])):
            with pytest.raises(UsageError, match="aborted already"):
                call()
    assert what_is_there(window)[0] == [kept.id]


# Awaited


@asynccontextmanager
async def psycopg_async(dsn: str) -> AsyncGenerator[Begun]:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        yield Begun(connection, connection.execute)


@asynccontextmanager
async def asyncpg_connection(dsn: str) -> AsyncGenerator[Begun]:
    known = conninfo_to_dict(dsn)
    connection = await asyncpg.connect(
        host=str(known["host"]),
        port=known.get("port"),
        user=str(known["user"]),
        password=known.get("password"),
        database=str(known["dbname"]),
    )
    try:
        async with connection.transaction():
            yield Begun(connection, connection.execute)
    finally:
        await connection.close()  # noqa: ASYNC102 -- asyncio tells a task once


@asynccontextmanager
async def sqlalchemy_async(dsn: str, driver: str, *, session: bool) -> AsyncGenerator[Begun]:
    engine = sqlalchemy.ext.asyncio.create_async_engine(url(dsn, driver))
    try:
        if session:
            async with sqlalchemy.ext.asyncio.AsyncSession(engine) as opened, opened.begin():
                yield Begun(opened, lambda text: opened.execute(sqlalchemy.text(text)))
        else:
            async with engine.begin() as connection:
                yield Begun(connection, lambda text: connection.execute(sqlalchemy.text(text)))
    finally:
        await engine.dispose()  # noqa: ASYNC102 -- as above


AWAITED = {
    "psycopg": psycopg_async,
    "asyncpg": asyncpg_connection,
    "sqlalchemy connection, psycopg": lambda dsn: sqlalchemy_async(dsn, "psycopg", session=False),
    "sqlalchemy session, psycopg": lambda dsn: sqlalchemy_async(dsn, "psycopg", session=True),
    "sqlalchemy connection, asyncpg": lambda dsn: sqlalchemy_async(dsn, "asyncpg", session=False),
    "sqlalchemy session, asyncpg": lambda dsn: sqlalchemy_async(dsn, "asyncpg", session=True),
}
on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])


@pytest.mark.anyio
@on_asyncio
@pytest.mark.parametrize("way", AWAITED)
async def test_a_job_appears_if_and_only_if_an_awaited_transaction_commits(way: str, dsn: str, window: Window) -> None:
    begin: Any = AWAITED[way]
    async with open_client(dsn) as client:
        async with rolled_back_async(begin, dsn) as begun:
            assert (await client.using(begun.connection).enqueue(greet, "nobody")).added
            await client.using(begun.connection).enqueue_many(greet.request(str(n)) for n in range(20))
            await begun.execute("INSERT INTO public.account VALUES ('nobody')")
        assert what_is_there(window) == ([], [])

        async with begin(dsn) as begun:
            using = client.using(begun.connection)
            one = await using.enqueue(
                greet.options(unique_key="k", delay=60, priority=-3, deadline=90, **LABELS), "ada"
            )
            again = await using.enqueue("greet", {"name": "ada"}, unique_key="k", unique_for=5)
            assert (again.id, again.added) == (one.id, False)
            await begun.execute("INSERT INTO public.account VALUES ('ada')")
            many = await using.enqueue_many(greet.options(**LABELS).request(str(n)) for n in range(20))
            assert (await using.job(one.id)).args == {"name": "ada"}
            assert labels(await using.jobs(tag="eu", limit=50)) == [LABELS] * 21
            assert what_is_there(window) == ([], [])
    assert what_is_there(window) == ([one.id, *[ref.id for ref in many]], ["ada"])
    assert window.job(one.id)["priority"] == -3


@pytest.mark.anyio
@on_asyncio
@pytest.mark.parametrize("way", AWAITED)
async def test_a_refused_batch_leaves_an_awaited_transaction_alive_and_an_aborted_one_is_named(
    way: str, dsn: str, window: Window
) -> None:
    begin: Any = AWAITED[way]
    async with open_client(dsn) as client:
        async with begin(dsn) as begun:
            with pytest.raises(InvalidArguments):
                await client.using(begun.connection).enqueue_many([JobRequest(kind="greet", args="[]")])
            kept = await client.using(begun.connection).enqueue(greet, "ada")
        async with rolled_back_async(begin, dsn) as begun:
            with pytest.raises(Exception, match="division by zero"):
                await begun.execute("SELECT 1/0")
            using = client.using(begun.connection)
            for call in (using.enqueue(greet, "nobody"), using.enqueue_many([greet.request("nobody")])):
                with pytest.raises(UsageError, match="aborted already"):
                    await call
    assert what_is_there(window)[0] == [kept.id]


def what_is_there(window: Window) -> tuple[list[int], list[str]]:
    return (
        [row["id"] for row in window.run("SELECT id FROM job ORDER BY id")],
        [row["name"] for row in window.run("SELECT name FROM public.account")],
    )


# What the lender has set

PLAIN_DATES = {name: value for name, value in LENT.items() if name != "DateStyle"}


def settings_of(way: str) -> dict[str, str]:
    """What may be set: a library that reads rows for us, through psycopg, reads times in the ISO style alone."""
    return PLAIN_DATES if ("psycopg" in way and "sqlalchemy" in way) or "django" in way else LENT


@pytest.mark.parametrize("begin", BLOCKING)
def test_what_is_set_on_a_blocking_connection_bends_nothing(begin: Any, dsn: str, window: Window) -> None:
    set_on_database(dsn, settings_of(begin.__name__ + " psycopg"))
    with begin(dsn) as begun:
        using = SyncClient(begun.connection)
        one = using.enqueue(greet.options(unique_key="k", delay=5, deadline=600), "€ \\ '")
        many = using.enqueue_many(greet.request(f"{{NULL}} {n}") for n in range(20))
        job = using.job(one.id)
        assert (job.args, job.state) == ({"name": "€ \\ '"}, "scheduled")
        assert 4 < (job.run_at - job.created_at).total_seconds() < 6
        assert len(using.jobs(limit=100)) == 21
        assert using.cancel(many[0].id, reason="€").state == "cancelled"
        begun.execute("INSERT INTO public.account VALUES ('ada')")
    assert what_is_there(window) == ([one.id, *[done.id for done in many[1:]]], ["ada"])


@pytest.mark.parametrize("begin", [b for b in BLOCKING if b is not psycopg_connection])
def test_a_blocking_connection_with_another_style_of_dates_enqueues_and_is_told_why_it_reads_none(
    begin: Any, dsn: str, window: Window
) -> None:
    set_on_database(dsn, {"DateStyle": "SQL, DMY"})
    with begin(dsn) as begun:
        one = SyncClient(begun.connection).enqueue(greet, "ada")
        with pytest.raises(UsageError, match="SET DateStyle = 'ISO'"):
            SyncClient(begun.connection).job(one.id)
    assert what_is_there(window)[0] == [one.id]


@pytest.mark.anyio
@on_asyncio
@pytest.mark.parametrize("way", AWAITED)
async def test_what_is_set_on_an_awaited_connection_bends_nothing(way: str, dsn: str, window: Window) -> None:
    set_on_database(dsn, settings_of(way))
    begin: Any = AWAITED[way]
    async with open_client(dsn) as client, begin(dsn) as begun:
        using = client.using(begun.connection)
        one = await using.enqueue(greet.options(unique_key="k", delay=5, deadline=600), "€ \\ '")
        many = await using.enqueue_many(greet.request(f"{{NULL}} {n}") for n in range(20))
        job = await using.job(one.id)
        assert (job.args, job.state) == ({"name": "€ \\ '"}, "scheduled")
        assert 4 < (job.run_at - job.created_at).total_seconds() < 6
        assert len(await using.jobs(limit=100)) == 21
        assert (await using.cancel(many[0].id, reason="€")).state == "cancelled"
        await begun.execute("INSERT INTO public.account VALUES ('ada')")
    assert what_is_there(window) == ([one.id, *[ref.id for ref in many[1:]]], ["ada"])


# AUTOCOMMIT


def bad_last() -> Generator[JobRequest]:
    yield from (greet.request(str(n)) for n in range(20))
    raise RolledBackError


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_many_jobs_are_one_transaction_of_a_blocking_connection_that_commits_alone(
    dsn: str, window: Window, *, session: bool, begun: bool
) -> None:
    """SQLAlchemy's own error of a SAVEPOINT outside of a transaction was all that came."""
    engine = sqlalchemy.create_engine(url(dsn, "psycopg"), isolation_level="AUTOCOMMIT")
    with sqlalchemy.orm.Session(engine) if session else engine.connect() as connection:
        client = SyncClient(connection)
        if begun:
            connection.execute(sqlalchemy.text("BEGIN"))
        with pytest.raises(RolledBackError):
            client.enqueue_many(bad_last())
        refs = client.enqueue_many(greet.request(str(n)) for n in range(20))
        client.schedule("daily", greet, {"name": "ada"}, cron="0 3 * * *")
        assert client.run_schedule("daily").added
        seen = window.value("SELECT count(*) FROM job")
        if begun:
            connection.execute(sqlalchemy.text("COMMIT"))
    engine.dispose()
    assert len(refs) == 20
    assert (seen, window.value("SELECT count(*) FROM job")) == (0 if begun else 21, 21)


@pytest.mark.anyio
@on_asyncio
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_many_jobs_are_one_transaction_of_an_awaited_connection_that_commits_alone(
    dsn: str, window: Window, driver: str, *, session: bool, begun: bool
) -> None:
    engine = sqlalchemy.ext.asyncio.create_async_engine(url(dsn, driver), isolation_level="AUTOCOMMIT")
    opened: Any = sqlalchemy.ext.asyncio.AsyncSession(engine) if session else engine.connect()
    async with open_client(dsn) as opener, opened as connection:
        client = opener.using(connection)
        if begun:
            await connection.execute(sqlalchemy.text("BEGIN"))
        with pytest.raises(RolledBackError):
            await client.enqueue_many(bad_last())
        refs = await client.enqueue_many(greet.request(str(n)) for n in range(20))
        async with client.batch() as batch:
            await batch.enqueue(greet, "ada")
        await client.schedule("daily", greet, {"name": "ada"}, cron="0 3 * * *")
        assert (await client.run_schedule("daily")).added
        seen = window.value("SELECT count(*) FROM job")
        if begun:
            await connection.execute(sqlalchemy.text("COMMIT"))
    await engine.dispose()
    assert len(refs) == 20
    assert (seen, window.value("SELECT count(*) FROM job")) == (0 if begun else 22, 22)


# What cannot be used


@pytest.mark.anyio
@on_asyncio
@pytest.mark.parametrize("way", AWAITED)
async def test_a_batch_is_made_in_an_awaited_transaction(way: str, dsn: str, window: Window) -> None:
    begin: Any = AWAITED[way]
    async with open_client(dsn) as client:
        async with rolled_back_async(begin, dsn) as begun, client.using(begun.connection).batch() as batch:
            await batch.enqueue(greet, "nobody")
        assert window.value("SELECT count(*) FROM batch") == 0
        async with begin(dsn) as begun, client.using(begun.connection).batch(name="b") as batch:
            await batch.enqueue(greet, "ada")
            await batch.enqueue_many(greet.request(str(n)) for n in range(20))
        status = await (await client.open_batch(batch.id)).status()
        assert (status.total, status.waiting, status.closed_at is None) == (21, 21, False)
        async with begin(dsn) as begun:
            assert await (await client.using(begun.connection).open_batch(batch.id)).cancel() == 21
        assert (await (await client.open_batch(batch.id)).status()).cancelled == 21


def test_a_connection_that_cannot_be_used_is_refused_with_what_can(dsn: str) -> None:
    engine = sqlalchemy.create_engine(url(dsn, "psycopg"))
    for wrong in (None, 5, engine, object()):
        with pytest.raises(ConfigurationError, match=r"is no connection .* give a psycopg connection, an asyncpg"):
            SyncClient(wrong)
    engine.dispose()
    # Disposed of too: its pool keeps the connection, and from 3.13 on sqlite3 warns of one that nobody closes.
    other = sqlalchemy.create_engine("sqlite://")
    with other.connect() as lite, pytest.raises(ConfigurationError, match="sqlite, and jobs live in PostgreSQL"):
        SyncClient(lite).enqueue(greet, "ada")
    other.dispose()


@pytest.mark.anyio
@on_asyncio
async def test_a_connection_of_the_other_client_is_named(dsn: str) -> None:
    async with open_client(dsn) as client:
        with psycopg.connect(dsn) as blocking, pytest.raises(ConfigurationError, match="Connection is for the other"):
            client.using(blocking)
        async with psycopg_async(dsn) as begun:
            with pytest.raises(ConfigurationError, match="AsyncConnection is for the other client: use Client"):
                SyncClient(begun.connection)


def test_numbered_places_are_text_and_every_name_has_one() -> None:
    text, names = numbered("enqueue", "per%cent")
    assert "%(" not in text
    assert '"per%cent".add_job' in text
    assert all(f"${n}::text" in text for n in range(1, len(names) + 1))
    assert set(names) == {
        name.decode() for name in __import__("re").findall(rb"%\((\w+)\)s", statement("enqueue", "x"))
    }


@pytest.mark.anyio
@on_asyncio
async def test_a_pool_of_asyncpg_is_no_connection(dsn: str) -> None:
    """Each statement went to another connection of it, outside of the caller's transaction."""
    known = conninfo_to_dict(dsn)
    where = {"host": str(known["host"]), "port": known.get("port"), "user": str(known["user"])}
    secret = {"password": known.get("password"), "database": str(known["dbname"])}
    async with asyncpg.create_pool(**where, **secret, min_size=1) as pool, open_client(dsn) as client:
        with pytest.raises(ConfigurationError, match="is no connection that jobs can be enqueued on"):
            client.using(pool)
        async with pool.acquire() as connection:
            assert (await client.using(connection).enqueue(greet, "ada")).added


def test_a_blocking_connection_that_is_closed_is_the_callers_mistake(dsn: str) -> None:
    """Nothing was sent: it was said that the connection was lost, and what was asked for perhaps done."""
    engine = sqlalchemy.create_engine(url(dsn, "psycopg"))
    with engine.connect() as alchemy:
        pass
    engine.dispose()
    plain = psycopg.connect(dsn)
    plain.close()
    for connection in (alchemy, plain):
        with pytest.raises(ConfigurationError, match="The connection cannot be used"):
            SyncClient(connection).enqueue(greet, "ada")


@pytest.mark.anyio
@on_asyncio
async def test_an_awaited_connection_that_is_another_tasks_is_the_callers_mistake(dsn: str) -> None:
    known = conninfo_to_dict(dsn)
    where: dict[str, Any] = {"user": known["user"], "database": known["dbname"], "host": known["host"]}
    async with (
        open_client(dsn) as client,
        asyncpg.create_pool(**where, port=known.get("port", 5432), min_size=1) as pool,
    ):
        async with pool.acquire() as connection:
            both = [client.using(connection).enqueue(greet, "ada") for _ in range(2)]
            _, refused = await asyncio.gather(*both, return_exceptions=True)
        with pytest.raises(ConfigurationError, match="released back to the pool"):
            await client.using(connection).enqueue(greet, "ada")
    assert isinstance(refused, ConfigurationError)
    assert "another operation is in progress" in str(refused)


async def test_a_connection_that_needs_asyncio_is_refused_on_trio(dsn: str) -> None:
    async with open_client(dsn) as client:
        with pytest.raises(ConfigurationError, match="AsyncSession of sqlalchemy needs asyncio, and this is Trio"):
            client.using(sqlalchemy.ext.asyncio.AsyncSession())
