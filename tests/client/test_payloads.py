"""Payloads: what is large is written in slices by size, and raw JSON is checked before it can harm anyone else's."""

# A first parameter of any type at all could be the Job, for a type checker: it then counts no argument.
# pyright: reportCallIssue=false

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
import pytest
from click.testing import CliRunner

from pulse_trio import Handlers, InvalidArguments, SyncClient, open_client
from pulse_trio.cli.application import pulse_trio
from pulse_trio.sql import statement
from pulse_trio.store import history

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from pulse_trio import JobRequest
    from support.stores import Window

pytestmark = pytest.mark.anyio  # On Trio and on asyncio.
handlers = Handlers()
SIZE = 900_000
COUNT = 48
MOST = 40_000_000
"""Bytes of Python objects that `enqueue_many` may hold: less than COUNT payloads of SIZE."""


@handlers.job
async def take(value: Any) -> None: ...


def large(*, keyed: bool, count: int = COUNT) -> Generator[JobRequest]:
    for n in range(count):
        handler = take.options(unique_key=f"k{n}") if keyed else take
        yield handler.request("x" * SIZE)


async def large_async(*, keyed: bool) -> AsyncGenerator[JobRequest]:
    for request in large(keyed=keyed):
        yield request


@pytest.fixture
def traced() -> Generator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("keyed", [False, True], ids=["copied", "keyed"])
@pytest.mark.parametrize("source", [large, large_async])
@pytest.mark.usefixtures("traced")
async def test_enqueue_many_holds_a_few_megabytes_whatever_it_is_given(
    source: Any, keyed: bool, dsn: str, window: Window
) -> None:
    async with open_client(dsn) as client:
        refs = await client.enqueue_many(source(keyed=keyed))
    assert tracemalloc.get_traced_memory()[1] < MOST
    assert len(refs) == COUNT
    assert window.value("SELECT count(*) FROM job WHERE octet_length(args::text) > 900000") == COUNT


@pytest.mark.parametrize("keyed", [False, True], ids=["copied", "keyed"])
@pytest.mark.usefixtures("traced")
def test_the_blocking_client_holds_a_few_megabytes_too(keyed: bool, dsn: str, window: Window) -> None:
    done = SyncClient(dsn).enqueue_many(large(keyed=keyed))
    assert tracemalloc.get_traced_memory()[1] < MOST
    assert len(done) == COUNT
    assert window.value("SELECT count(*) FROM job") == COUNT


# Raw JSON

RAW = {
    "line ends and tabs": b'{\n\t"a":\r\n\t[1,\t2]\n}',
    "escapes": b'"\\n\\t\\\\n\\u0041"',
    "a large number": b"1e20",
    "a small number": b"1e-5",
}
BAD_RAW = {
    "a number beyond jsonb's": b"1e200000",
    "a number beyond Python's": b"1" * 5000,
    "a fraction finer than jsonb's": b"1e-20000",
    "digits without end": b"0." + b"1" * 20_000,
    "no JSON": b"}{",
    "a line end in a string": b'"a\nb"',
    "a lone surrogate": b'"\\ud800"',
    "a NUL": b'"\\u0000"',
    "bytes that are no text": b'"\xff"',
    "depth": b"[" * 5000 + b"]" * 5000,
}


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
async def test_raw_json_arrives_as_it_is_meant_alone_and_among_many(raw: bytes, dsn: str, window: Window) -> None:
    meant = msgspec.json.decode(raw)
    async with open_client(dsn) as client:
        await client.enqueue(take, msgspec.Raw(raw))
        await client.enqueue_many(take.request(msgspec.Raw(raw)) for _ in range(20))
        found = await client.jobs(limit=100)
    assert [job.args for job in found] == [{"value": meant}] * 21


@pytest.mark.parametrize("raw", BAD_RAW.values(), ids=BAD_RAW)
def test_raw_json_that_the_database_could_not_show_is_refused_where_it_is_given(raw: bytes) -> None:
    client = SyncClient("host=127.0.0.1 port=1")
    for given in (msgspec.Raw(raw), {"deep": [msgspec.Raw(raw)]}):
        with pytest.raises(InvalidArguments):
            take.request(given)
        with pytest.raises(InvalidArguments):
            client.enqueue("take", {"value": given})


async def test_text_that_looks_like_a_fine_number_is_taken(dsn: str, window: Window) -> None:
    text = "1e-20000 0." + "1" * 20_000
    async with open_client(dsn) as client:
        await client.enqueue(take, text)
        (job,) = await client.jobs()
    assert job.args == {"value": text}


async def test_an_integer_that_sql_wrote_and_python_does_not_read_leaves_the_list_readable(
    dsn: str, window: Window
) -> None:
    window.run("SELECT enqueue('take', ('{\"value\": 1' || repeat('0', 5000) || '}')::jsonb)")
    async with open_client(dsn) as client:
        (job,) = await client.jobs()
    assert job.args["value"] == 10**5000


def test_a_list_of_large_jobs_is_read_in_answers_of_a_few_megabytes(dsn: str, window: Window) -> None:
    SyncClient(dsn).enqueue_many(large(keyed=False))
    window.enqueue_many(100)
    operation = history.jobs({}, limit=COUNT + 100)
    sizes: list[int] = []
    rows: Any = None
    with psycopg.connect(dsn, autocommit=True) as connection:
        while True:
            try:
                query = operation.send(rows)
            except StopIteration as stop:
                found = stop.value
                break
            rows = connection.execute(statement(query.name, "pulse"), query.parameters).fetchall()
            sizes.append(sum(len(value) for row in rows for value in row if isinstance(value, str)))
    assert [job.id for job in found] == sorted((job.id for job in found), reverse=True)
    assert len(found) == COUNT + 100
    assert max(sizes) < 5_000_000


@pytest.mark.usefixtures("traced")
def test_jobs_list_lets_each_page_go_before_the_next(dsn: str) -> None:
    count = 64
    SyncClient(dsn).enqueue_many(large(keyed=False, count=count))
    tracemalloc.reset_peak()
    said = CliRunner().invoke(pulse_trio, ["jobs", "list", "--dsn", dsn, "--limit", str(count)])
    assert said.exit_code == 0
    assert said.stdout.count("take") == count
    assert tracemalloc.get_traced_memory()[1] < 2 * MOST
