# ruff: noqa: PT012 - that a block raises at its end is what is tested
"""What psycopg's AsyncConnection does under asyncio, TrioConnection does under Trio: each test runs on both."""

from __future__ import annotations

import gc
import logging
import socket
import weakref
from typing import TYPE_CHECKING, Any, LiteralString

import anyio
import anyio.lowlevel
import psycopg
import pytest
from psycopg import errors as e
from psycopg import pq
from psycopg.adapt import Dumper
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import args_row, dict_row, namedtuple_row, tuple_row
from psycopg.types import TypeInfo
from psycopg.types.json import Jsonb

from pulse_trio.postgres import TrioConnection
from support.streams import closing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

pytestmark = pytest.mark.anyio  # On Trio and on asyncio.
IDLE, INTRANS, INERROR = (
    pq.TransactionStatus.IDLE,
    pq.TransactionStatus.INTRANS,
    pq.TransactionStatus.INERROR,
)
Connection = psycopg.AsyncConnection[Any]


@pytest.fixture(scope="module", params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def connection_class(anyio_backend: str) -> type[Connection]:
    return TrioConnection if anyio_backend == "trio" else psycopg.AsyncConnection


@pytest.fixture
async def connection(connection_class: type[Connection], dsn: str) -> AsyncGenerator[Connection]:
    connection = await connection_class.connect(dsn)
    yield connection
    await connection.close()


@pytest.fixture
async def auto(connection: Connection) -> Connection:
    await connection.set_autocommit(True)
    return connection


async def value(connection: Connection, query: LiteralString, *args: Any) -> Any:
    row = await (await connection.execute(query, args or None)).fetchone()
    return row and row[0]


# Queries, rows and cursors


async def test_a_query_gives_its_rows(auto: Connection) -> None:
    cursor = await auto.execute("SELECT %s::int, %s::text", [1, "one"])
    assert await cursor.fetchall() == [(1, "one")]
    assert cursor.rowcount == 1
    assert cursor.description is not None
    assert [column.name for column in cursor.description] == ["int4", "text"]


async def test_rows_come_one_by_one_in_parts_and_by_iteration(auto: Connection) -> None:
    cursor = await auto.execute("SELECT generate_series(1, 6)")
    assert await cursor.fetchone() == (1,)
    assert await cursor.fetchmany(2) == [(2,), (3,)]
    assert [row[0] async for row in cursor] == [4, 5, 6]
    await cursor.scroll(-1)
    assert await cursor.fetchone() == (6,)


@pytest.mark.parametrize(
    ("factory", "expected"),
    [(tuple_row, (1, 2)), (dict_row, {"a": 1, "b": 2}), (args_row(lambda a, b: a + b), 3)],
)
async def test_row_factories_shape_the_rows(auto: Connection, factory: Any, expected: Any) -> None:
    cursor = auto.cursor(row_factory=factory)
    await cursor.execute("SELECT 1 AS a, 2 AS b")
    assert await cursor.fetchone() == expected


async def test_a_row_factory_can_belong_to_the_connection(connection_class: type[Connection], dsn: str) -> None:
    async with await connection_class.connect(dsn, row_factory=namedtuple_row) as connection:
        row = await (await connection.execute("SELECT 1 AS a")).fetchone()
    assert row is not None
    assert row.a == 1


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("prepare", [False, True])
async def test_values_survive_text_binary_and_prepared(auto: Connection, binary: bool, prepare: bool) -> None:
    values = [1, 2.5, "ünï", b"\0\xff", None, [1, 2], True]
    query = "SELECT %s::int, %s::float8, %s::text, %s::bytea, %s::text, %s::int[], %s::bool"
    for _ in range(2):
        cursor = await auto.execute(query, values, binary=binary, prepare=prepare)
        assert [*await cursor.fetchall()] == [tuple(values)]
    assert await value(auto, "SELECT %s::jsonb", Jsonb({"a": [1]})) == {"a": [1]}


async def test_a_repeated_query_is_prepared_and_can_be_forbidden_to(auto: Connection) -> None:
    for _ in range(6):
        await auto.execute("SELECT %s::int", [1])
    assert await value(auto, "SELECT count(*) FROM pg_prepared_statements") == 1
    auto.prepare_threshold = None
    for _ in range(6):
        await auto.execute("SELECT %s::int + 1", [1])
    assert await value(auto, "SELECT count(*) FROM pg_prepared_statements") == 1


@pytest.mark.parametrize(
    ("factory", "query"),
    [
        (psycopg.AsyncCursor, "SELECT %s::int"),
        (psycopg.AsyncClientCursor, "SELECT %s::int"),
        (psycopg.AsyncRawCursor, "SELECT $1::int"),
    ],
)
async def test_every_kind_of_client_cursor_works(
    connection_class: type[Connection], dsn: str, factory: Any, query: LiteralString
) -> None:
    async with await connection_class.connect(dsn, cursor_factory=factory) as connection:
        cursor = await connection.execute(query, [7])
        assert type(cursor) is factory
        assert await cursor.fetchone() == (7,)


async def test_several_results_of_one_query_can_be_visited(auto: Connection) -> None:
    cursor = await auto.execute("SELECT 1; SELECT 2")
    assert [await result.fetchone() async for result in cursor.results()] == [(1,), (2,)]
    await cursor.set_result(0)
    assert await cursor.fetchone() == (1,)


async def test_executemany_returns_each_result(auto: Connection) -> None:
    await auto.execute("CREATE TEMP TABLE t (n int)")
    cursor = auto.cursor()
    await cursor.executemany("INSERT INTO t VALUES (%s) RETURNING n", [(1,), (2,)], returning=True)
    assert [await result.fetchone() async for result in cursor.results()] == [(1,), (2,)]
    await cursor.executemany("INSERT INTO t VALUES (%s)", [(n,) for n in range(1000)])
    assert cursor.rowcount == 1000


async def test_a_failed_executemany_leaves_the_connection_usable(auto: Connection) -> None:
    with pytest.raises(e.InvalidTextRepresentation):
        await auto.cursor().executemany("SELECT %s::text::int", [("1",), ("x",), ("2",)])
    assert auto.info.transaction_status == IDLE
    assert await value(auto, "SELECT 1") == 1


@pytest.mark.parametrize("size", [1, 7])
async def test_stream_yields_row_by_row(auto: Connection, size: int) -> None:
    cursor = auto.cursor()
    rows = [row[0] async for row in cursor.stream("SELECT generate_series(1, 20)", size=size)]
    assert rows == list(range(1, 21))


async def test_a_stream_that_is_left_early_frees_the_connection(auto: Connection) -> None:
    async with closing(auto.cursor().stream("SELECT generate_series(1, 1000000)")) as rows:
        async for row in rows:
            assert row == (1,)
            break
    assert auto.info.transaction_status == IDLE
    assert await value(auto, "SELECT 2") == 2


async def test_an_error_in_a_stream_frees_the_connection(auto: Connection) -> None:
    with pytest.raises(e.DivisionByZero):
        [row async for row in auto.cursor().stream("SELECT 1 / (3 - generate_series(1, 5))")]
    assert await value(auto, "SELECT 2") == 2


async def test_a_server_side_cursor_fetches_in_parts_and_scrolls(connection: Connection) -> None:
    async with connection.cursor("portal", scrollable=True) as cursor:
        cursor.itersize = 3
        await cursor.execute("SELECT generate_series(1, 10)")
        assert await cursor.fetchone() == (1,)
        assert await cursor.fetchmany(2) == [(2,), (3,)]
        assert [row[0] async for row in cursor] == list(range(4, 11))
        await cursor.scroll(0, "absolute")
        assert len(await cursor.fetchall()) == 10
    assert await value(connection, "SELECT count(*) FROM pg_cursors") == 0


async def test_a_server_side_cursor_can_outlive_its_transaction(auto: Connection) -> None:
    async with auto.cursor("held", withhold=True) as cursor:
        await cursor.execute("SELECT 1")
        assert await cursor.fetchall() == [(1,)]
        assert await value(auto, "SELECT count(*) FROM pg_cursors") == 1
    assert await value(auto, "SELECT count(*) FROM pg_cursors") == 0


# Transactions


async def test_the_first_query_opens_a_transaction(connection: Connection) -> None:
    await connection.execute("SELECT 1")
    assert connection.info.transaction_status == INTRANS
    await connection.commit()
    assert connection.info.transaction_status == IDLE
    with pytest.raises(e.SyntaxError):
        await connection.execute("nonsense")
    assert connection.info.transaction_status == INERROR
    await connection.rollback()
    assert connection.info.transaction_status == IDLE


async def test_a_connection_block_commits_or_rolls_back_and_closes(connection_class: Any, dsn: str) -> None:
    async with await connection_class.connect(dsn) as connection:
        await connection.execute("CREATE TABLE block (n int)")
        await connection.commit()
        await connection.execute("INSERT INTO block VALUES (1)")
    assert connection.closed
    assert not connection.broken
    with pytest.raises(ZeroDivisionError):
        async with await connection_class.connect(dsn) as connection:
            await connection.execute("INSERT INTO block VALUES (2)")
            raise ZeroDivisionError
    async with await connection_class.connect(dsn) as connection:
        assert await value(connection, "SELECT array_agg(n) FROM block") == [1]
        await connection.execute("DROP TABLE block")


async def test_transaction_blocks_nest_as_savepoints(auto: Connection) -> None:
    await auto.execute("CREATE TEMP TABLE t (n int)")
    async with auto.transaction() as outer:
        await auto.execute("INSERT INTO t VALUES (1)")
        with pytest.raises(e.DivisionByZero):
            async with auto.transaction():
                await auto.execute("INSERT INTO t VALUES (2)")
                await auto.execute("SELECT 1 / 0")
        async with auto.transaction("named"):
            await auto.execute("INSERT INTO t VALUES (3)")
        async with auto.transaction(force_rollback=True):
            await auto.execute("INSERT INTO t VALUES (4)")
    assert outer.status is outer.Status.COMMITTED
    assert await value(auto, "SELECT array_agg(n ORDER BY n) FROM t") == [1, 3]


async def test_rollback_leaves_the_named_block_and_no_more(auto: Connection) -> None:
    await auto.execute("CREATE TEMP TABLE t (n int)")
    async with auto.transaction():
        await auto.execute("INSERT INTO t VALUES (1)")
        async with auto.transaction() as middle, auto.transaction():
            await auto.execute("INSERT INTO t VALUES (2)")
            raise psycopg.Rollback(middle)
        await auto.execute("INSERT INTO t VALUES (3)")
    assert await value(auto, "SELECT array_agg(n ORDER BY n) FROM t") == [1, 3]


async def test_a_transaction_block_refuses_commit_and_reuse(auto: Connection) -> None:
    async with auto.transaction() as block:
        with pytest.raises(psycopg.ProgrammingError):
            await auto.commit()
    with pytest.raises(TypeError):
        async with block:
            pass


async def test_interleaved_blocks_of_two_tasks_are_found_out(auto: Connection) -> None:
    first_entered, second_entered, go_on = anyio.Event(), anyio.Event(), anyio.Event()

    async def block(entered: anyio.Event, wait_for: anyio.Event) -> None:
        with pytest.raises(psycopg.ProgrammingError, match="transaction commit"):
            async with auto.transaction():
                entered.set()
                await wait_for.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block, first_entered, second_entered)
        await first_entered.wait()
        async with anyio.create_task_group() as inner:
            inner.start_soon(block, second_entered, go_on)
            await second_entered.wait()
            go_on.set()


@pytest.mark.parametrize("level", list(psycopg.IsolationLevel))
async def test_transaction_properties_reach_the_server(connection: Connection, level: psycopg.IsolationLevel) -> None:
    await connection.set_isolation_level(level)
    await connection.set_read_only(True)
    await connection.set_deferrable(True)
    name = level.name.lower().replace("_", " ")
    assert await value(connection, "SELECT current_setting('transaction_isolation')") == name
    assert await value(connection, "SELECT current_setting('transaction_read_only')") == "on"
    assert await value(connection, "SELECT current_setting('transaction_deferrable')") == "on"
    with pytest.raises(psycopg.ProgrammingError, match="INTRANS"):
        await connection.set_autocommit(True)
    with pytest.raises(AttributeError):
        connection.autocommit = True


async def test_a_deferred_constraint_fails_the_commit_and_frees_the_connection(connection: Connection) -> None:
    await connection.execute(
        "CREATE TEMP TABLE self (x int PRIMARY KEY, y int REFERENCES self (x) DEFERRABLE INITIALLY DEFERRED)"
    )
    await connection.commit()
    await connection.execute("INSERT INTO self VALUES (1, 2)")
    with pytest.raises(e.ForeignKeyViolation):
        await connection.commit()
    assert connection.info.transaction_status == IDLE


async def test_two_phase_commit_prepares_and_commits_elsewhere(connection_class: Any, dsn: str) -> None:
    async with await connection_class.connect(dsn) as first, await connection_class.connect(dsn) as second:
        await first.execute("CREATE TABLE two_phase (n int)")
        await first.commit()
        possible = int(await value(second, "SHOW max_prepared_transactions")) > 0
        await second.rollback()
        xid = first.xid(1, "gtrid", "bqual")
        await first.tpc_begin(xid)
        await first.execute("INSERT INTO two_phase VALUES (1)")
        if possible:
            await first.tpc_prepare()
            assert [str(found) for found in await second.tpc_recover()] == [str(xid)]
            await second.tpc_commit(xid)
        else:
            with pytest.raises(psycopg.NotSupportedError):
                await first.tpc_prepare()
        first._tpc = None
        await first.rollback()
        assert await value(second, "SELECT count(*) FROM two_phase") == possible
        await second.execute("DROP TABLE two_phase")


async def test_two_phase_work_can_be_rolled_back_before_it_is_prepared(connection: Connection) -> None:
    await connection.tpc_begin("plain")
    with pytest.raises(psycopg.ProgrammingError):
        await connection.commit()
    await connection.tpc_rollback()
    assert connection.info.transaction_status == IDLE


# Pipelines


async def test_a_pipeline_collects_results_when_asked_and_at_its_end(auto: Connection) -> None:
    async with auto.pipeline() as pipeline:
        first, second = await auto.execute("SELECT 1"), await auto.execute("SELECT 2")
        assert pipeline.status == pq.PipelineStatus.ON
        assert await first.fetchone() == (1,)
        await pipeline.sync()
    assert await second.fetchone() == (2,)
    assert pipeline.status == pq.PipelineStatus.OFF


async def test_nested_pipelines_are_one(auto: Connection) -> None:
    async with auto.pipeline() as outer, auto.pipeline() as inner:
        assert inner is outer
    assert auto.pgconn.pipeline_status == pq.PipelineStatus.OFF


async def test_an_error_in_a_pipeline_aborts_the_rest_up_to_the_sync(auto: Connection) -> None:
    async with auto.pipeline() as pipeline:
        with pytest.raises(e.UndefinedTable):
            await (await auto.execute("SELECT * FROM no_such_table")).fetchone()
        with pytest.raises(e.PipelineAborted):
            await (await auto.execute("SELECT 1")).fetchone()
        await pipeline.sync()
        good = await auto.execute("SELECT 2")
    assert await good.fetchone() == (2,)


async def test_an_error_can_surface_at_the_end_of_the_pipeline(auto: Connection) -> None:
    with pytest.raises(e.UndefinedTable):
        async with auto.pipeline():
            await auto.execute("SELECT * FROM no_such_table")
    assert await value(auto, "SELECT 1") == 1


async def test_transactions_work_inside_and_around_a_pipeline(connection: Connection) -> None:
    async with connection.pipeline():
        async with connection.transaction():
            cursor = await connection.execute("SELECT 'inside'")
        assert await cursor.fetchone() == ("inside",)
    async with connection.transaction(), connection.pipeline():
        cursor = await connection.execute("SELECT 'around'")
    assert await cursor.fetchone() == ("around",)
    assert connection.info.transaction_status == IDLE


async def test_tasks_share_a_pipeline(auto: Connection) -> None:
    seen = []

    async def ask(n: int) -> None:
        seen.append(await value(auto, "SELECT %s::int", n))

    async with auto.pipeline(), anyio.create_task_group() as tasks:
        for n in range(20):
            tasks.start_soon(ask, n)
    assert sorted(seen) == list(range(20))


async def test_a_connection_closed_in_a_pipeline_says_so(auto: Connection) -> None:
    with pytest.raises(psycopg.OperationalError):
        async with auto.pipeline():
            await auto.execute("SELECT 1")
            await auto.close()


async def test_the_blocks_own_error_wins_over_the_pipelines(auto: Connection, caplog: Any) -> None:
    caplog.set_level(logging.WARNING, logger="psycopg")
    with pytest.raises(ZeroDivisionError):
        async with auto.pipeline():
            await auto.close()
            raise ZeroDivisionError
    assert len(caplog.records) == 1


# COPY


@pytest.mark.parametrize("format", ["text", "binary"])
async def test_rows_can_be_copied_in_and_out(auto: Connection, format: LiteralString) -> None:
    await auto.execute("CREATE TEMP TABLE t (n int, s text)")
    cursor = auto.cursor()
    async with cursor.copy(f"COPY t FROM STDIN (FORMAT {format})") as copy:
        copy.set_types(["int4", "text"])
        for n in range(100):
            await copy.write_row((n, f"row {n}"))
    assert cursor.rowcount == 100
    async with cursor.copy(f"COPY (SELECT * FROM t ORDER BY n) TO STDOUT (FORMAT {format})") as copy:
        copy.set_types(["int4", "text"])
        rows = [row async for row in copy.rows()]
    assert rows == [(n, f"row {n}") for n in range(100)]


async def test_megabytes_pass_through_copy_in_blocks(auto: Connection) -> None:
    await auto.execute("CREATE TEMP TABLE t (s text)")
    line = b"x" * 9999 + b"\n"
    async with auto.cursor().copy("COPY t FROM STDIN") as copy:
        for _ in range(100):
            await copy.write(line * 10)
    async with auto.cursor().copy("COPY t TO STDOUT") as copy:
        assert sum([len(block) async for block in copy]) == 10_000_000


async def test_an_exception_in_a_copy_in_undoes_it(auto: Connection) -> None:
    await auto.execute("CREATE TEMP TABLE t (n int)")
    with pytest.raises(ZeroDivisionError):
        async with auto.cursor().copy("COPY t FROM STDIN") as copy:
            await copy.write_row((1,))
            raise ZeroDivisionError
    assert await value(auto, "SELECT count(*) FROM t") == 0


async def test_a_copy_out_that_is_left_early_frees_the_connection(auto: Connection) -> None:
    with pytest.raises(ZeroDivisionError):
        async with auto.cursor().copy("COPY (SELECT generate_series(1, 1000000)) TO STDOUT") as copy:
            assert await copy.read()
            raise ZeroDivisionError
    assert auto.info.transaction_status == IDLE
    assert await value(auto, "SELECT 1") == 1


async def test_bad_data_in_a_copy_is_the_servers_error(auto: Connection) -> None:
    await auto.execute("CREATE TEMP TABLE t (n int)")
    with pytest.raises(e.InvalidTextRepresentation):
        async with auto.cursor().copy("COPY t FROM STDIN") as copy:
            await copy.write("not a number\n")
    assert auto.info.transaction_status == IDLE


# Notifications, notices, cancel


async def test_notifications_arrive_and_stop_after_a_number(auto: Connection, connection_class: Any, dsn: str) -> None:
    await auto.execute("LISTEN channel")
    async with await connection_class.connect(dsn, autocommit=True) as sender:
        for n in range(3):
            await sender.execute("SELECT pg_notify('channel', %s)", [str(n)])
        seen = [note async for note in auto.notifies(stop_after=3)]
    assert [(note.channel, note.payload, note.pid) for note in seen] == [
        ("channel", str(n), sender.info.backend_pid if not sender.closed else note.pid) for n, note in enumerate(seen)
    ]
    assert len(seen) == 3


async def test_notifies_ends_at_its_timeout(auto: Connection) -> None:
    assert [note async for note in auto.notifies(timeout=0.01)] == []
    assert await value(auto, "SELECT 1") == 1


async def test_a_timeout_of_zero_takes_what_is_there(auto: Connection) -> None:
    await auto.execute("LISTEN channel")
    await auto.execute("NOTIFY channel, 'mine'")
    assert [note.payload async for note in auto.notifies(timeout=0)] == ["mine"]


async def test_handlers_get_notices_and_notifications(auto: Connection) -> None:
    notices, notes = [], []
    auto.add_notice_handler(lambda diagnostic: notices.append(diagnostic.message_primary))
    auto.add_notify_handler(notes.append)
    await auto.execute("LISTEN channel")
    await auto.execute("NOTIFY channel, 'hello'")
    await auto.execute("DO $$BEGIN RAISE NOTICE 'careful'; END$$")
    assert notices == ["careful"]
    assert [note.payload for note in notes] == ["hello"]


async def test_cancel_safe_ends_another_tasks_query(auto: Connection, connection_class: Any, dsn: str) -> None:
    async def sleeper() -> None:
        with pytest.raises(e.QueryCanceled):
            await auto.execute("SELECT pg_sleep(60)")

    query = "SELECT state = 'active' FROM pg_stat_activity WHERE pid = %s"
    pid = auto.info.backend_pid
    async with await connection_class.connect(dsn, autocommit=True) as witness, anyio.create_task_group() as tasks:
        tasks.start_soon(sleeper)
        while not await value(witness, query, pid):
            pass
        await auto.cancel_safe()
    assert await value(auto, "SELECT 1") == 1


# Connecting and closing


async def test_a_closed_connection_refuses(connection: Connection) -> None:
    cursor = connection.cursor()
    await connection.close()
    await connection.close()
    assert connection.closed
    assert not connection.broken
    await connection.cancel_safe()
    for refused in (cursor.execute("SELECT 1"), connection.commit(), connection.rollback()):
        with pytest.raises(psycopg.OperationalError):
            await refused
    with pytest.raises(psycopg.OperationalError):
        connection.cursor()


async def test_a_terminated_backend_breaks_the_connection(auto: Connection) -> None:
    with pytest.raises(e.AdminShutdown):
        await auto.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    assert auto.closed
    assert auto.broken


async def test_an_unreachable_server_is_an_operational_error(connection_class: Any) -> None:
    with pytest.raises(psycopg.OperationalError, match="refused"):
        await connection_class.connect("host=127.0.0.1 port=1")


async def test_the_next_host_is_tried_and_all_failures_are_told(connection_class: Any, dsn: str) -> None:
    parts = conninfo_to_dict(dsn)
    host, port = parts.get("host", "localhost"), parts.get("port", "5432")
    async with await connection_class.connect(dsn, host=f"127.0.0.1,{host}", port=f"1,{port}") as connection:
        assert str(connection.info.port) == str(port)
    with pytest.raises(psycopg.OperationalError, match=r"(?s)All failures.*port: '1'.*port: '2'"):
        await connection_class.connect(dsn, host="127.0.0.1,127.0.0.1", port="1,2")


@pytest.mark.parametrize(("wanted", "possible"), [("read-write", True), ("prefer-standby", True), ("standby", False)])
async def test_target_session_attrs_is_respected(connection_class: Any, dsn: str, wanted: str, possible: bool) -> None:
    if possible:
        async with await connection_class.connect(dsn, target_session_attrs=wanted) as connection:
            assert await value(connection, "SELECT 1") == 1
    else:
        with pytest.raises(psycopg.OperationalError, match="standby"):
            await connection_class.connect(dsn, target_session_attrs=wanted)


async def test_names_are_resolved(connection_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(psycopg.OperationalError, match="nosuchhost"):
        await connection_class.connect("host=nosuchhost.invalid")


async def test_adapters_are_copied_from_a_context(connection: Connection, connection_class: Any, dsn: str) -> None:
    class Shout(Dumper):
        oid = 25

        def dump(self, obj: str) -> bytes:
            return obj.upper().encode()

    connection.adapters.register_dumper(str, Shout)
    async with await connection_class.connect(dsn, context=connection) as other:
        assert await value(other, "SELECT %s", "quiet") == "QUIET"


async def test_many_tasks_share_a_connection(auto: Connection) -> None:
    seen = []

    async def ask(n: int) -> None:
        seen.append(await value(auto, "SELECT %s::int", n))

    async with anyio.create_task_group() as tasks:
        for n in range(50):
            tasks.start_soon(ask, n)
    assert sorted(seen) == list(range(50))


async def test_a_connection_block_keeps_its_own_error_when_the_rollback_fails(
    connection_class: Any, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with pytest.raises(ZeroDivisionError):
        async with await connection_class.connect(dsn) as connection:
            connection.pgconn.exec_(b"COPY (SELECT 1) TO STDOUT")
            raise ZeroDivisionError
    assert ["in rollback" in record.message for record in caplog.records] == [True]
    assert connection.closed


async def test_a_forgotten_connection_warns(connection_class: Any, dsn: str) -> None:
    connection = await connection_class.connect(dsn)
    with pytest.warns(ResourceWarning, match=connection_class.__name__):
        connection.__del__()
    await connection.close()


async def test_a_closed_connection_is_collected(connection_class: Any, dsn: str) -> None:
    connection = await connection_class.connect(dsn)
    async with connection.pipeline(), connection.transaction():
        await connection.execute("SELECT 1")
    reference = weakref.ref(connection)
    await connection.close()
    del connection
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [(("host=a", "host=b"), TypeError), (("nosuchparameter=1",), psycopg.ProgrammingError)],
)
async def test_wrong_arguments_are_refused(connection_class: Any, arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        await connection_class.connect(*arguments)


async def test_each_address_of_a_name_is_an_attempt(connection_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def two_addresses(host: str, port: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", port)) for n in (2, 3)]

    attempts = []

    def attempt(conninfo: str) -> Any:
        attempts.append(conninfo_to_dict(conninfo)["hostaddr"])
        raise psycopg.OperationalError("not here")
        yield

    monkeypatch.setattr(socket, "getaddrinfo", two_addresses)
    monkeypatch.setattr(connection_class, "_connect_gen", attempt)
    with pytest.raises(psycopg.OperationalError):
        await connection_class.connect("host=db.example.org")
    assert attempts == ["127.0.0.2", "127.0.0.3"]


async def test_a_silent_server_is_given_connect_timeout_seconds(connection_class: Any) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as deaf,
        pytest.raises(psycopg.errors.ConnectionTimeout, match="timeout expired"),
    ):
        await connection_class.connect(f"host=127.0.0.1 port={deaf.getsockname()[1]} connect_timeout=2")


async def test_notifications_of_one_transaction_come_together(
    auto: Connection, connection_class: Any, dsn: str
) -> None:
    await auto.execute("LISTEN channel")
    async with await connection_class.connect(dsn) as sender:
        await sender.execute("NOTIFY channel, '1'")
        await sender.execute("NOTIFY channel, '2'")
    seen = [note.payload async for note in auto.notifies(timeout=5, stop_after=1)]
    assert seen in (["1", "2"], ["1"])
    if seen == ["1"]:
        assert [note.payload async for note in auto.notifies(timeout=5, stop_after=1)] == ["2"]


async def test_notifications_that_came_with_a_query_are_kept(auto: Connection) -> None:
    await auto.execute("LISTEN channel")
    for n in range(3):
        await auto.execute("SELECT pg_notify('channel', %s)", [str(n)])
    assert [note.payload async for note in auto.notifies(stop_after=3)] == ["0", "1", "2"]


async def test_a_query_waits_while_notifies_listens(auto: Connection) -> None:
    order = []

    async def listen() -> None:
        async for _ in auto.notifies(timeout=0.1):
            pass
        order.append("listened")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        await anyio.wait_all_tasks_blocked()
        assert auto.lock.locked()
        await auto.execute("SELECT 1")
        order.append("queried")
    assert order == ["listened", "queried"]


async def test_notifies_beside_a_handler_warns_and_serves_both(auto: Connection) -> None:
    handled = []
    auto.add_notify_handler(handled.append)
    await auto.execute("LISTEN channel")
    with pytest.warns(RuntimeWarning, match="not reliable"):
        assert [note async for note in auto.notifies(timeout=0)] == []
    await auto.execute("NOTIFY channel")
    assert len(handled) == 1


@pytest.mark.parametrize("query", ["CREATE TEMP TABLE no_rows ()", "COPY (SELECT 1) TO STDOUT", "nonsense"])
async def test_what_yields_no_rows_cannot_be_streamed(connection: Connection, query: LiteralString) -> None:
    with pytest.raises(psycopg.ProgrammingError):
        [row async for row in connection.cursor().stream(query)]


async def test_a_connection_closed_under_a_stream_says_so(auto: Connection) -> None:
    with pytest.raises(psycopg.OperationalError):
        async for _ in auto.cursor().stream("SELECT generate_series(1, 3)"):
            await auto.close()


async def test_cancel_safe_ends_a_stream(auto: Connection, connection_class: Any, dsn: str) -> None:
    async def stream() -> None:
        with pytest.raises(e.QueryCanceled):
            [row async for row in auto.cursor().stream("SELECT pg_sleep(60)")]

    query = "SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = %s"
    pid = auto.info.backend_pid
    async with await connection_class.connect(dsn, autocommit=True) as witness, anyio.create_task_group() as tasks:
        tasks.start_soon(stream)
        while not await value(witness, query, pid):
            pass
        await auto.cancel_safe()
    assert auto.info.transaction_status == IDLE


async def test_executemany_rides_on_an_open_pipeline(auto: Connection) -> None:
    await auto.execute("CREATE TEMP TABLE t (n int)")
    async with auto.pipeline():
        cursor = auto.cursor()
        await cursor.executemany("INSERT INTO t VALUES (%s) RETURNING n", [(1,), (2,)], returning=True)
        assert [await result.fetchone() async for result in cursor.results()] == [(1,), (2,)]


async def test_copy_in_a_pipeline_is_refused(auto: Connection) -> None:
    async with auto.pipeline():
        with pytest.raises(psycopg.NotSupportedError):
            async with auto.cursor().copy("COPY (SELECT 1) TO STDOUT"):
                pass


async def test_a_failed_commit_in_a_pipeline_is_told(connection: Connection) -> None:
    with pytest.raises((e.UndefinedColumn, psycopg.OperationalError)):
        async with connection.pipeline():
            await connection.execute("SELECT no_such_column")
            await connection.commit()


async def test_type_information_can_be_fetched(connection: Connection) -> None:
    info = await TypeInfo.fetch(connection, "jsonb")
    assert info is not None
    assert info.name == "jsonb"


async def test_a_session_ended_while_idle_is_told_with_its_reason(auto: Connection) -> None:
    await auto.execute("SET idle_session_timeout = 20")
    await anyio.wait_readable(auto.fileno())
    with pytest.raises(psycopg.OperationalError, match="idle-session timeout"):
        await auto.execute("SELECT 1")
    assert auto.broken


async def test_nothing_is_leaked(connection_class: Any, dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    # psycopg warns of each interrupted query on asyncio, and pytest would keep the records.
    caplog.set_level(logging.ERROR, "psycopg")

    async def everything() -> None:
        async with await connection_class.connect(dsn) as connection:
            cursor = connection.cursor()
            await cursor.execute("CREATE TEMP TABLE t (n int)")
            await cursor.executemany("INSERT INTO t VALUES (%s)", [(n,) for n in range(5)])
            async with closing(cursor.stream("SELECT * FROM t")) as rows:
                assert len([row async for row in rows]) == 5
            async with cursor.copy("COPY t FROM STDIN") as copy:
                await copy.write_row((1,))
            async with cursor.copy("COPY t TO STDOUT") as copy:
                assert [block async for block in copy]
            async with connection.transaction(), connection.pipeline():
                await connection.execute("SELECT 1")
            async with connection.cursor("portal") as portal:
                await portal.execute("SELECT 1")
            with anyio.move_on_after(0.01):
                await connection.execute("SELECT pg_sleep(60)")

    sizes = []
    for _ in range(8):
        await everything()
        gc.collect()
        sizes.append(len(gc.get_objects()))
    assert sizes[-1] - sizes[-5] <= 4, sizes
