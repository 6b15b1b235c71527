"""A producer's login calls every function that it may with whatever it can think of, and the owner plants rows of any columns:
no worker ends, every healthy job completes, and every list can be read.

`PULSE_TRIO_FUZZ_ROWS` says how many rows the producer tries (20,000 if not said; a million takes some minutes), and
`PULSE_TRIO_FUZZ_SEED` which rows the owner plants.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
import psycopg
import pytest
import trio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from psycopg.conninfo import make_conninfo
from psycopg.sql import Literal

from pulse_trio import Handlers, Worker, open_client
from pulse_trio.grants import grant_sync
from pulse_trio.observe import BadRow, DatabaseLost
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Mapping

logger = logging.getLogger(__name__)

ROWS = int(os.environ.get("PULSE_TRIO_FUZZ_ROWS", "20000"))
SEED = int(os.environ.get("PULSE_TRIO_FUZZ_SEED", "12"))
AT_ONCE = 250
"""Rows in one of hypothesis's examples: one round trip tries each of them in a savepoint of its own."""

# Ingredients. Hypothesis makes some for each batch, and these are always among them.
JSON = (
    "{}", "null", "[]", "1", '"x"', "{", '{"n":1}', '{"n":"x"}', '{"n":null}', '{"a":"\\u0000"}',
    '{"\\u0000":1}', '{"a":"\\ud83d"}',
    '{"a":1e200000}', '{"a":1e-20000}', '{"a":1e999}', '{"n":' + "9" * 5000 + "}", '{"n":' + "[" * 70 + "]" * 70 + "}",
    '{"n":' * 64 + "1" + "}" * 64, '{"n":' * 3000 + "1" + "}" * 3000, '{"a":"' + "x" * 5000 + '"}', '{"$codec":"x"}',
)  # fmt: skip
OPTIONS = (
    '{"crash_limit":1e999}', '{"crash_limit":1}', '{"crash_limit":32767}', '{"crash_limit":-1}',
    '{"limit":1e999}', '{"limit":1}',
    '{"rate":["x",1]}', '{"rate":[0,1]}', '{"rate":[1,1]}', '{"rate":[2147483647,1e-300]}',
    '{"rate":[1,1e11]}', '{"timeout":1e-300}',
    '{"timeout":0.1}', '{"timeout":1e10}', '{"deadline":"x"}', '{"deadline":1}', '{"deadline":2e11}', '{"expires":-6e10}',
    '{"backoff_base":1e-9,"backoff_cap":3e10}', '{"timeout":1,"timeout":"x"}', '{"nobody":1}', '{"timeout": 5 ,\n"limit":3}',
)  # fmt: skip
WORDS = (
    "default", "noop", "count", "", " ", "a b", "q'", '"', "\\", "%s", "{}", "x" * 128, "x" * 129, "k" * 512, "k" * 513,
    "\u00fc", "\u2028", "\x07",
)  # fmt: skip
NUMBERS = ("0", "1", "-1", "20", "2147483647", "-2147483648", "2147483648", "9223372036854775807", "1.5", "x")
SECONDS = ("0", "1", "-1", "0.001", "1e9", "3e10", "4e10", "1e300", "NaN", "Infinity", "-Infinity", "x")
MOMENTS = (
    "now", "infinity", "-infinity", "epoch", "0001-01-01", "4713-01-01 BC", "9999-12-31", "294276-12-31", "2000-01-01", "x",
)  # fmt: skip
INTERVALS = ("0", "1 s", "-1 s", "1000 years", "1001 years", "178000000 years", "1 month", "x")

# What add_job and add_jobs take first; JSON is text there.
_TYPES = {
    "kind": "text", "args": "text", "queue": "text", "priority": "int", "run_at": "timestamptz", "delay": "float8",
    "deadline": "float8", "expires": "float8", "max_attempts": "int", "options": "text",
}  # fmt: skip

json_texts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


class Producer:
    """A login that may enqueue, and tries."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.tried = 0
        self.taken = 0
        self.refused: Counter[str] = Counter()
        self.connection.execute(
            "CREATE FUNCTION pg_temp.try_each(statements text[], OUT state text, OUT times bigint) RETURNS SETOF record"
            " LANGUAGE plpgsql AS $$ DECLARE one text; states text[]; BEGIN"
            " FOREACH one IN ARRAY statements LOOP"
            "   BEGIN EXECUTE one; states := states || 'taken'::text;"
            "   EXCEPTION WHEN OTHERS THEN states := states || SQLSTATE; END;"
            " END LOOP;"
            " RETURN QUERY SELECT s, count(*) FROM unnest(states) s GROUP BY 1; END $$"
        )

    def try_each(self, statements: list[str], rows: int) -> None:
        self.tried += rows
        for state, times in self.connection.execute("SELECT * FROM pg_temp.try_each(%s)", [statements]).fetchall():
            if state == "taken":
                self.taken += times
            else:
                self.refused[state] += times


class Batch:
    """Statements of one example, from its ingredients."""

    def __init__(self, chance: random.Random, texts: list[str], words: list[str], numbers: list[int]) -> None:
        self._chance = chance
        self._rarer = 1.0
        self._json = [*JSON, *texts]
        self._words = [*WORDS, *words]
        self._numbers = [*NUMBERS, *map(str, numbers)]

    def _value(self, usual: str, kind: str, strange: tuple[str, ...] | list[str], *, often: float = 0.15) -> str:
        """A literal: the usual one, mostly; so that one strange value meets others that are accepted."""
        if self._chance.random() >= often * self._rarer:
            return usual
        if self._chance.random() < 0.1:
            return f"NULL::{kind}"
        return f"{Literal(self._chance.choice(strange)).as_string()}::{kind}"

    def columns(self) -> dict[str, str]:
        value = self._value
        return {
            "kind": value("'count'", "text", self._words),
            "args": value("""'{"n":1}'::json""", "json", self._json, often=0.4),
            "queue": value("'fuzzed'", "text", self._words),
            "priority": value("0", "int", self._numbers),
            "run_at": value("NULL::timestamptz", "timestamptz", MOMENTS),
            "delay": value("NULL::float8", "float8", SECONDS),
            "deadline": value("NULL::float8", "float8", SECONDS),
            "expires": value("NULL::float8", "float8", SECONDS),
            "max_attempts": value("1", "int", self._numbers),
            "options": value("NULL::json", "json", [*OPTIONS, *self._json], often=0.4),
            "unique_key": value("NULL::text", "text", self._words),
            "key": value("NULL::text", "text", self._words),
            "reserved": value("NULL::bigint", "bigint", self._numbers, often=0.05),
            "for": value("NULL::float8", "float8", SECONDS),
            "after": value("NULL::float8", "float8", SECONDS),
            "replacing": self._chance.choice(("true", "false", "NULL::boolean")),
        }

    def statement(self) -> tuple[str, int]:
        """One call of one function, and of how many rows it is."""
        c = self.columns()
        match self._chance.randrange(11):
            case 0 | 1 | 2 | 3:
                values = ", ".join(c[name] for name in (*_TYPES, "key", "reserved"))
                return f"SELECT pulse.add_job({values})", 1
            case 4 | 5:
                run_at = "now()" if c["run_at"].startswith("NULL") else c["run_at"]
                return (
                    f"SELECT pulse.enqueue_unique({c['kind']}, {c['args']}, {c['queue']}, {c['priority']}, {run_at},"
                    f" {c['max_attempts']}, {c['options']}, {c['key']}, {c['unique_key']}, {c['for']}, {c['after']},"
                    f" {c['replacing']})"
                ), 1
            case 6:
                periods = [self._value("NULL::interval", "interval", INTERVALS) for _ in range(3)]
                deadlines = [self._value("NULL::timestamptz", "timestamptz", MOMENTS) for _ in range(2)]
                conflict = self._value("'skip'", "text", ("skip", "replace", "raise", "x"))
                return (
                    f"SELECT pulse.enqueue({c['kind']}, ({c['args']})::jsonb, {c['queue']}, {c['priority']}, {c['run_at']},"
                    f" {c['max_attempts']}, {periods[0]}, {c['unique_key']}, {periods[1]}, {periods[2]}, {conflict},"
                    f" {deadlines[0]}, {deadlines[1]}, {c['key']})"
                ), 1
            case 7:
                args = [self.columns()["args"] for _ in range(self._chance.choice((0, 1, 3)))]
                keys = self._value("NULL::text[]", "text[]", ("{}", "{a}", "{a,a,b}", "{NULL,a,NULL}"))
                return (
                    f"SELECT count(*) FROM pulse.enqueue_many({c['kind']},"
                    f" ARRAY[{', '.join(f'({a})::jsonb' for a in args)}]::jsonb[], {c['queue']}, {c['priority']},"
                    f" {c['run_at']},"
                    f" {c['max_attempts']}, {self._value('NULL::interval', 'interval', INTERVALS)}, {keys}, {c['key']})"
                ), max(1, len(args))
            case 8:
                return f"SELECT count(*) FROM pulse.reserve({self._value('2', 'int', NUMBERS)} % 1000)", 1
            case _:
                return self._add_jobs()

    def _add_jobs(self) -> tuple[str, int]:
        # In a large batch a strange value is rare: one that is refused is the whole batch's end.
        count = self._chance.choice((1, 2, 5, 200))
        self._rarer = 1.0 if count < 200 else 0.001
        rows = [self.columns() for _ in range(count)]
        self._rarer = 1.0
        arrays: list[str] = []
        for name, kind in (*_TYPES.items(), ("unique_key", "text"), ("key", "text"), ("reserved", "bigint")):
            # Of another length, now and then.
            cells = [row[name] for row in rows][: 1 if self._chance.random() < 0.01 else None]
            arrays.append(f"ARRAY[{', '.join(f'({cell})::{kind}' for cell in cells)}]::{kind}[]")
        return f"SELECT count(*) FROM pulse.add_jobs({', '.join(arrays)})", len(rows)


class Fleet:
    """Workers in this process: an exception of any of them ends the test."""

    def __init__(self) -> None:
        self.counted: set[int] = set()
        self.bad: list[BadRow] = []
        self.lost: list[DatabaseLost] = []
        self.handlers = Handlers()

        @self.handlers.job(queue="healthy")
        async def healthy(n: int) -> None:
            self.counted.add(n)

        @self.handlers.job(max_attempts=1)
        async def count(n: int) -> None: ...

        self.healthy = healthy

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        return {BadRow: self.bad.append, DatabaseLost: self.lost.append}


@asynccontextmanager
async def at_work(dsn: str, fleet: Fleet, workers: int = 2) -> AsyncGenerator[None]:
    async with trio.open_nursery() as nursery:
        started = [
            Worker(
                fleet.handlers,
                dsn,
                concurrency=50,
                lease=6,
                heartbeat=1,
                watchdog=0.5,
                poll=0.2,
                grace=2,
                instruments=[fleet],
            )
            for _ in range(workers)
        ]
        for worker in started:
            nursery.start_soon(worker.run)
        yield
        for worker in started:
            worker.stop()


async def enqueue_healthy(dsn: str, fleet: Fleet, *, until: trio.Event) -> int:
    """Healthy jobs, all the time; returns how many."""
    n = 0
    async with open_client(dsn) as client:
        while not until.is_set():
            await client.enqueue_many([fleet.healthy.request(n + i) for i in range(20)])
            n += 20
            with trio.move_on_after(0.2):
                await until.wait()
    return n


async def completed(fleet: Fleet, n: int) -> None:
    with trio.fail_after(240):
        while len(fleet.counted) < n:  # noqa: ASYNC110 -- it ends in a worker's own time
            await trio.sleep(0.05)


def read_all(dsn: str) -> None:
    """What SQL and maintenance do with all rows. Blocks."""
    with Window(dsn) as window:
        window.run("SELECT count(args), count(result) FROM jobs")
        window.run("SELECT maintain()")
        window.run("SELECT prune_unique_holds()")


async def read_everything(dsn: str) -> None:
    """What clients do with them, too."""
    await trio.to_thread.run_sync(read_all, dsn)
    async with open_client(dsn) as client:
        before: int | None = None
        while page := await client.jobs(limit=2000, before=before, timeout=60):
            before = page[-1].id
        await client.count_by_state()
        await client.queues()
        dead = await client.jobs(state="dead", limit=200)
        for job in dead[:20]:
            await client.attempts(job.id)
        await client.retry_many(state="dead", limit=500)
        await client.retry_many(state="cancelled", limit=500)
        await client.delete_many(state="dead", limit=200)


@pytest.fixture
def producer_dsn(dsn: str) -> Generator[str]:
    login = f"pulse_trio_fuzz_{uuid4().hex[:8]}"
    with Window(dsn) as window:
        window.run(f"CREATE ROLE {login} LOGIN PASSWORD 'fuzz'")
        grant_sync(dsn, {"producer": login})
        try:
            yield make_conninfo(dsn, user=login, password="fuzz")
        finally:
            window.run(f"DROP OWNED BY {login}")
            window.run(f"DROP ROLE {login}")


def fuzz(dsn: str) -> Producer:
    """Blocks until `ROWS` rows were tried."""
    producer = Producer(dsn)

    @settings(
        max_examples=max(1, ROWS // AT_ONCE),
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        chance=st.integers(0, 2**64),
        texts=st.lists(json_texts, min_size=3, max_size=6),
        words=st.lists(
            st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20), max_size=4
        ),
        numbers=st.lists(st.integers(-(2**70), 2**70), max_size=4),
    )
    def example(chance: int, texts: list[Any], words: list[str], numbers: list[int]) -> None:
        if producer.tried >= ROWS:
            return
        encoded = [msgspec.json.encode(text).decode("utf-8", "replace") for text in texts if _encodable(text)]
        batch = Batch(random.Random(chance), encoded, words, numbers)
        statements = [batch.statement() for _ in range(AT_ONCE)]
        producer.try_each([text for text, _ in statements], sum(rows for _, rows in statements))

    example()
    producer.connection.close()
    return producer


def _encodable(value: Any) -> bool:
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return not _huge(value)


def _huge(value: Any) -> bool:
    if isinstance(value, int):
        return not -(2**63) <= value < 2**63
    if isinstance(value, dict):
        return any(map(_huge, value.values()))
    return isinstance(value, list) and any(map(_huge, value))


@pytest.mark.timeout(max(180, ROWS / 200))
# The workers' own, in another thread than hypothesis's.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
async def test_whatever_a_producer_calls_no_worker_ends_and_healthy_jobs_complete(dsn: str, producer_dsn: str) -> None:
    fleet = Fleet()
    over = trio.Event()
    tried: list[Producer] = []
    counts: list[int] = []

    async def healthy() -> None:
        counts.append(await enqueue_healthy(dsn, fleet, until=over))

    async with at_work(dsn, fleet):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(healthy)
            tried.append(await trio.to_thread.run_sync(fuzz, producer_dsn))
            over.set()
        await completed(fleet, counts[0])
        await read_everything(dsn)
    (producer,) = tried
    logger.info("%d rows tried, %d calls taken, refused: %s", producer.tried, producer.taken, dict(producer.refused))
    assert producer.tried >= ROWS
    assert producer.taken > producer.refused.total() / 10
    # Whose fault it is: data (22), integrity (23), too large or too deep (54). Nothing internal, no lock, no crash.
    assert {state[:2] for state in producer.refused} <= {"22", "23", "54"}, producer.refused
    # What a producer's functions took was right: no row of theirs had to be called bad.
    assert fleet.bad == []


def unmet(dsn: str) -> int:
    with Window(dsn) as window:
        return window.value(
            "SELECT count(*) FROM job WHERE queue = 'planted' AND kind = 'count' AND state = 1 AND attempt = 0"
            " AND run_at <= now() AND key IS NULL AND NOT suspect"
        )


async def met(dsn: str) -> None:
    """Waits until what was planted has been claimed, as far as it can be."""
    with trio.fail_after(240):
        while await trio.to_thread.run_sync(unmet, dsn):  # noqa: ASYNC110 -- as above
            await trio.sleep(0.1)


# Generous: a loaded machine has been seen to take more than a minute for what takes ten seconds.
@pytest.mark.timeout(600)
class TestPlanted:
    """Rows that the owner writes past every function, domain and constraint."""

    COLUMNS: Mapping[str, tuple[str, ...]] = {
        "id": ("-9223372036854775808", "-1", "0", "9223372036854775807", "4611686018427387905"),
        "lease_until": ("infinity", "-infinity", "now", "294276-01-01", "4713-01-01 BC"),
        "started_at": ("infinity", "-infinity", "now"),
        "locked_by": ("0", "-1", "1", "9223372036854775807"),
        "attempt": ("0", "-1", "1", "2147483646", "2147483647", "-2147483648"),
        "state": ("0", "1", "2", "3", "4", "7", "-1"),
        "cancelling": ("true", "false"),
        "crashes": ("0", "-1", "2", "32767", "-32768"),
        "failures": ("0", "-1", "2147483647", "-2147483648"),
        "max_attempts": ("0", "-1", "1", "2147483647", "-2147483648"),
        "run_at": ("infinity", "-infinity", "now", "294276-01-01", "4713-01-01 BC", "2000-01-01"),
        "created_at": ("infinity", "-infinity", "now"),
        "priority": ("0", "1", "2147483647", "-2147483648"),
        "queue": ("default", "", " ", "x" * 9000, "q'\\\"", "\u2028", "cancel 1 2 3"),
        "kind": ("count", "healthy", "", "x" * 9000, "\u2028", "\x07"),
        "args": JSON,
        "options": (*OPTIONS, *JSON, '{"x":"' + "y" * 100_000 + '"}'),
        "unique_key": ("x" * 600, "", "u"),
        "key": ("x" * 600, "", "k"),
        "suspect": ("true", "false"),
    }
    USUAL: Mapping[str, str] = {
        "kind": "count",
        "args": '{"n":1}',
        "max_attempts": "2",
        "state": "1",
        "queue": "planted",
    }
    PLANTED = 1500

    async def test_whatever_is_planted_no_worker_ends_and_healthy_jobs_complete(self, dsn: str) -> None:
        fleet = Fleet()
        over = trio.Event()
        counts: list[int] = []

        async def healthy() -> None:
            counts.append(await enqueue_healthy(dsn, fleet, until=over))

        def plant() -> None:
            with Window(dsn) as window:
                self._free(window)
                self._plant(window)

        async with at_work(dsn, fleet):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(healthy)
                await trio.to_thread.run_sync(plant)
                await met(dsn)
                over.set()
            await completed(fleet, counts[0])
            async with open_client(dsn) as client:
                await client.jobs(limit=2000, timeout=60)
                await client.retry_many(state="dead", limit=100)
            await trio.to_thread.run_sync(read_all, dsn)

    def _free(self, window: Window) -> None:
        for row in window.run(
            "SELECT conrelid::regclass::text AS place, contypid::regtype::text AS type, conname FROM pg_constraint"
            " WHERE connamespace = 'pulse'::regnamespace AND contype = 'c' AND (contypid <> 0 OR conrelid = 'job'::regclass)"
        ):
            place = f"DOMAIN {row['type']}" if row["type"] != "-" else f"TABLE {row['place']}"
            window.run(f'ALTER {place} DROP CONSTRAINT "{row["conname"]}"')

    def _plant(self, window: Window) -> None:
        chance = random.Random(SEED)
        planted = 0
        for _ in range(self.PLANTED):
            row = dict(self.USUAL)
            for name in chance.sample(list(self.COLUMNS), chance.choice((1, 1, 2, 5, 12))):
                row[name] = chance.choice(self.COLUMNS[name])
            names = ", ".join(row)
            values = ", ".join(Literal(value).as_string() for value in row.values())
            try:
                window.run(f"INSERT INTO job ({names}) VALUES ({values})")
                planted += 1
            except (psycopg.DataError, psycopg.IntegrityError, psycopg.errors.ProgramLimitExceeded):
                # No row at all: no JSON, an id or a unique key that is there, a name that no index takes.
                continue
        assert planted > self.PLANTED / 2
