"""Arguments of every type through a real row and back, results too; and what does not fit is refused before any I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import psycopg
import pytest

from pulse_trio import (
    Client,
    ConfigurationError,
    DatabaseUnavailable,
    Handlers,
    InvalidArguments,
    InvalidName,
    SyncClient,
    UnknownKind,
    UsageError,
    open_client,
)
from pulse_trio.handlers import MAX_ARGS
from pulse_trio.postgres import TrioConnection
from support.stores import Window, claim_one, end, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from pulse_trio import Handler


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclass(frozen=True)
class Point:
    x: int
    y: float = 0.5
    tags: list[str] = field(default_factory=list)


class Money(msgspec.Struct, frozen=True):
    amount: Decimal
    currency: str = "EUR"


class Circle(msgspec.Struct, frozen=True, tag=True):
    radius: float


class Square(msgspec.Struct, frozen=True, tag=True):
    side: float


class Pair(NamedTuple):
    left: int
    right: str


class Options(TypedDict):
    verbose: bool


MOMENT = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
VALUES: list[tuple[Any, Any]] = [
    (int, 2**63 - 1), (float, 0.1), (bool, True), (str, 'é \U0001f600 "\\\n'), (type(None), None),
    (bytes, b"\x00\xff\x01"), (Decimal, Decimal("12.340")), (UUID, UUID(int=7)),
    (datetime, MOMENT), (datetime, MOMENT.astimezone(timezone(timedelta(hours=-3, minutes=-30)))),
    (date, date(2030, 1, 2)), (time, time(3, 4, 5)), (timedelta, timedelta(days=1, microseconds=5)),
    (Colour, Colour.RED), (Level, Level.HIGH), (Literal["a", "b"], "b"),
    (Point, Point(1, 2.5, ["a"])), (Money, Money(Decimal("0.10"))), (Pair, Pair(1, "r")), (Options, {"verbose": True}),
    (Circle | Square, Square(2.0)), (int | None, None), (int | str, "7"), (int | str, 7), (datetime | None, MOMENT),
    (Point | None, Point(3)), (list[UUID], [UUID(int=1)]), (dict[str, Money], {"a": Money(Decimal(1))}),
    (tuple[int, Colour], (1, Colour.RED)), (set[int], {1, 2}), (list[Circle | Square], [Circle(1.0), Square(2.0)]),
    (Any, {"free": [1, None, "x"]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def window(databases: Any) -> Generator[Window]:
    with databases.migrated() as dsn, Window(dsn) as window:
        yield window


def handler_of(annotation: Any) -> Handler[Any, Any]:
    async def echo(value: Any, *, named: Any = None) -> Any: ...

    echo.__annotations__ = {"value": annotation, "named": annotation | None if annotation is not Any else Any}
    echo.__annotations__["return"] = annotation
    return Handlers().job(echo)


@pytest.mark.parametrize(("annotation", "value"), VALUES, ids=lambda v: str(v)[:40])
async def test_arguments_and_results_round_trip_through_a_real_row(annotation: Any, value: Any, window: Window) -> None:
    handler = handler_of(annotation)
    async with open_client(window.dsn) as client, open_store(window.dsn) as store:
        ref = await client.enqueue(handler, value, named=value)
        claimed = await claim_one(store)
        positional, keyword = handler.signature.decode(claimed.args)
        assert (positional, keyword) == ((value,), {"named": value})
        assert type(positional[0]) is type(value)
        await store.settle([end(claimed, result=msgspec.json.encode(value).decode())])
        returned = await ref.result()
    assert returned == value
    assert type(returned) is type(value)


# Refused before any I/O


@Handlers().job
async def send(user_id: int, template: str = "default", at: datetime | None = None) -> None: ...


@Handlers().job
async def anything(value: Any) -> None: ...


BAD: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a wrong type": (lambda c: c.enqueue(send, "42"), InvalidArguments, r"Expected `int`, got `str` - at `\$.user_id`"),
    "a wrong type within": (lambda c: c.enqueue(handler_of(Point), {"x": "1"}), InvalidArguments, r"at `\$.value.x`"),
    "a missing one": (lambda c: c.enqueue(send), InvalidArguments, "missing a required argument: 'user_id'"),
    "an unknown one": (lambda c: c.enqueue(send, 42, form="x"), InvalidArguments, "unexpected keyword argument 'form'"),
    "too many": (lambda c: c.enqueue(send, 1, "a", None, 4), InvalidArguments, "too many positional"),
    "what JSON cannot carry": (lambda c: c.enqueue(anything, object()), InvalidArguments, "cannot be written as JSON"),
    "a function by name": (lambda c: c.enqueue("k", {"f": open}), InvalidArguments, "cannot be written as JSON"),
    "a NUL": (lambda c: c.enqueue(anything, "a\0b"), InvalidArguments, "NUL character"),
    "a NUL by name": (lambda c: c.enqueue("k", {"v": "\0"}), InvalidArguments, "NUL character"),
    "a lone surrogate": (lambda c: c.enqueue(anything, "\ud800"), InvalidArguments, "surrogate"),
    "too large": (lambda c: c.enqueue(anything, "x" * MAX_ARGS), InvalidArguments, r"the limit is 1,048,576\. Store a ref"),
    "not by name": (lambda c: c.enqueue("k", 42), InvalidArguments, "given by name, in one dictionary"),
    "no handler": (lambda c: c.enqueue(7), InvalidArguments, "enqueue takes a handler"),
    "a plain function": (lambda c: c.enqueue(print, 7), InvalidArguments, "decorated with @handlers.job"),
    "a queue": (lambda c: c.enqueue("k", {}, queue="a b"), InvalidName, r"use 1 to 128 ASCII letters"),
    "a kind": (lambda c: c.enqueue("k\n"), InvalidName, "control characters"),
    "a unique key": (lambda c: c.enqueue("k", {}, unique_key="\ud800"), InvalidName, "lone surrogate"),
    "a priority": (lambda c: c.enqueue("k", {}, priority=2**31), ConfigurationError, "priority must be a whole number"),
    "a naive time": (lambda c: c.enqueue("k", {}, at=datetime(2030, 1, 1)), ConfigurationError, "must have a time zone"),
    "an option": (lambda c: c.enqueue("k", {}, prioritee=1), ConfigurationError, "Did you mean priority"),
    "an unknown kind": (lambda c: c.enqueue("sned", {"user_id": 1}), UnknownKind, "Did you mean 'send'"),
    "a known kind": (lambda c: c.enqueue("send", {"user_id": "1"}), InvalidArguments, r"Expected `int`, got `str`"),
}  # fmt: skip
BAD |= {
    f"the filter {given} of {method}": (
        lambda c, method=method, given=given: getattr(c, method)(state="dead", **{given: "x"}),
        ConfigurationError,
        f"There is no filter '{given}'. {hint}",
    )
    for method in ("jobs", "retry_many", "delete_many")
    for given, hint in {
        "quue": "Did you mean queue",
        "tags": "Did you mean tag",
        "limits": "Did you mean limit",
        "colour": "The filters are: .*error, key, kind, limit, owes_clean_up, queue",
    }.items()
}
BAD |= {
    f"{value!r} for the filter {given}": (
        lambda c, given=given, value=value: c.jobs(**{given: value}),
        ConfigurationError,
        f"The filter '{given}' takes {takes}, got ",
    )
    for given, value, takes in [
        ("queue", ["mail"], "one text"),
        ("state", 3, "one text"),
        ("tag", True, "one text"),
        ("worker", 1.5, "a session's id or host:pid"),
        ("worker", True, "a session's id or host:pid"),
        ("since", 5, "a datetime with its offset, or a timedelta before now"),
        ("until", "2026-01-01", "a datetime with its offset, or a timedelta before now"),
    ]
}
NEEDS_HANDLERS = {"an unknown kind", "a known kind"}


def registry() -> Handlers:
    handlers = Handlers()
    handlers.job(name="send", queue="mail", priority=7)(send.function)
    return handlers


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_is_refused_before_any_connection_is_made(what: str) -> None:
    call, error, message = BAD[what]
    client = SyncClient("host=127.0.0.1 port=1", handlers=registry() if what in NEEDS_HANDLERS else None)
    with pytest.raises(error, match=message) as caught:
        call(client)
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize("what", BAD)
async def test_what_cannot_be_is_refused_before_a_connection_is_used(what: str, window: Window) -> None:
    call, error, message = BAD[what]
    connection = await TrioConnection.connect(window.dsn)
    await connection.close()
    client = Client(connection, handlers=registry() if what in NEEDS_HANDLERS else None)
    with pytest.raises(error, match=message):
        await call(client)
    with pytest.raises(ConfigurationError, match="The connection cannot be used"):
        await client.enqueue(send, 42)


def test_a_good_call_does_reach_for_the_database() -> None:
    with pytest.raises(DatabaseUnavailable):
        SyncClient("host=127.0.0.1 port=1").enqueue(send, 42)


@pytest.mark.parametrize("method", ["retry_many", "delete_many"])
async def test_a_filter_that_does_not_exist_leaves_all_jobs_alone(method: str, window: Window) -> None:
    async with open_client(window.dsn) as client:
        ref = await client.enqueue(send.options(queue="billing"), 42)
        await client.cancel(ref.id)
        with pytest.raises(ConfigurationError, match="Did you mean queue"):
            await getattr(client, method)(state="cancelled", quue="mail")
        with pytest.raises(ConfigurationError, match="Did you mean queue"):
            getattr(SyncClient(window.dsn), method)(state="cancelled", quue="mail")
        assert (await ref.status()) == "cancelled"


@pytest.mark.parametrize("method", ["retry_many", "delete_many"])
@pytest.mark.parametrize("limit", [-1, True, "2", 1.5])
async def test_a_limit_that_is_no_number_of_jobs_leaves_all_jobs_alone(method: str, limit: Any, window: Window) -> None:
    """-1 meant all but one: 9 of 10 dead jobs were deleted for good."""
    async with open_client(window.dsn) as client:
        refs = [await client.enqueue(send, 42) for _ in range(3)]
        for ref in refs:
            await client.cancel(ref.id)
        with pytest.raises(InvalidArguments, match="A limit is a number of jobs, from 0 on"):
            await getattr(client, method)(state="cancelled", limit=limit)
        with pytest.raises(InvalidArguments, match="A limit is a number of jobs, from 0 on"):
            getattr(SyncClient(window.dsn), method)(state="cancelled", limit=limit)
        with pytest.raises(InvalidArguments, match="A limit is a number of jobs, from 0 on"):
            await client.jobs(limit=limit)
        assert [await ref.status() for ref in refs] == ["cancelled"] * 3


@pytest.mark.parametrize("job_id", ["5", 5.5, True, 0, 2**70, None])
async def test_what_is_no_id_of_a_job_is_said_to_be_none(job_id: Any, window: Window) -> None:
    """It was said that the job had been deleted, or that the database had refused the number."""
    async with open_client(window.dsn) as client:
        for call in (client.job(job_id), client.wait(job_id, timeout=0), client.cancel(job_id)):
            with pytest.raises(InvalidArguments, match="A job's id is a whole number above 0"):
                await call


async def test_a_kind_that_is_known_has_its_handlers_options(window: Window) -> None:
    async with open_client(window.dsn, handlers=registry()) as client:
        ref = await client.enqueue("send", {"user_id": 42}, priority=9)
        job = await client.job(ref.id)
    assert (job.queue, job.priority, job.args) == ("mail", 9, {"user_id": 42})
    with psycopg.connect(window.dsn) as connection:
        done = SyncClient(connection, handlers=registry()).using(connection).enqueue("send", {"user_id": 1})
    assert window.job(done.id)["queue"] == "mail"
    assert window.job(done.id)["args"] == {"user_id": 1}
