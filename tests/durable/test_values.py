"""Models, classes of attrs and dataclasses in every place where a durable handler takes or returns a value, encrypted; and tags
of parents, children and scheduled jobs."""

from __future__ import annotations

import enum
import uuid
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

import attrs
import msgspec
import psycopg
import pydantic
import pytest
import trio

from pulse_trio import AeadCodec, Handlers, Job, SyncClient, Worker
from pulse_trio.client.refs import result_of

if TYPE_CHECKING:
    from support.trees import Trees

pytestmark = pytest.mark.real_clock


class ModelLine(pydantic.BaseModel):
    price: int


class Model(pydantic.BaseModel):
    lines: list[ModelLine]


@attrs.define
class AttrsLine:
    price: int


@attrs.define
class Attrs:
    lines: list[AttrsLine]


@dataclass
class PlainLine:
    price: int


@dataclass
class Plain:
    lines: list[PlainLine]


@pytest.mark.parametrize(("order", "line"), [(Model, ModelLine), (Attrs, AttrsLine), (Plain, PlainLine)])
async def test_a_class_of_the_users_goes_through_every_call_of_a_durable_handler(
    trees: Trees, order: Any, line: Any
) -> None:
    handlers = Handlers(codec=AeadCodec({"k": bytes(32)}, "k"))
    given = order(lines=[line(price=1), line(price=7)])
    seen: list[Any] = []

    def child(order: Any) -> Any:
        return order

    child.__annotations__ = {"order": order, "return": order}
    started: Any = handlers.job(child)

    async def parent(job: Job, order: Any) -> Any:
        seen.append(await job.step(child, order))
        seen.append(await job.wait_for_event("order", type=order_type))
        async with job.durable_nursery() as nursery:
            one = nursery.start_soon(started, order=order)
        seen.append(one.result)
        await job.wait_for_event("wrong", type=order_type)

    order_type = order
    parent.__annotations__ = {"job": Job, "order": order, "return": order}
    registered: Any = handlers.job(durable=True, max_attempts=1)(parent)
    handlers.cron(every=3600, name="hourly", args={"order": given})(started)

    client = SyncClient(trees.dsn, handlers=handlers)
    job_id = client.enqueue(registered, given).id
    client.send_event(job_id, "order", given)
    client.send_event(job_id, "wrong", {"lines": [{"price": 1}, {"price": "secret"}]})
    await Worker(handlers, trees.dsn, burst=True, poll=0.05).run()
    assert seen == [given] * 3
    assert "$codec" in trees.job(job_id)["args"]
    error = trees.job(job_id)["error"]
    assert "InvalidEvent" in error
    assert "price" in error
    assert "secret" not in error

    done = client.enqueue(started, given).id
    fired = client.run_schedule("hourly").id
    await Worker(handlers, trees.dsn, burst=True, poll=0.05).run()
    assert client.result(done) == client.result(fired)


async def test_parents_children_and_scheduled_jobs_have_their_tags_and_metadata(trees: Trees) -> None:
    told: dict[str, Any] = {}
    given: dict[str, Any] = {"tags": ["eu"], "meta": {"n": 1}}

    def tell(name: str, job: Job) -> None:
        told[name] = (job.tags, job.meta)

    @trees.handlers.job
    async def plain(job: Job) -> None:
        tell("plain", job)

    @trees.handlers.job(durable=True)
    async def durable(job: Job) -> None:
        tell("durable", job)

    @trees.handlers.cron(every=3600, name="hourly")
    @trees.handlers.job(**given)
    async def scheduled(job: Job) -> None:
        tell("scheduled", job)

    @trees.handlers.job(durable=True, **given)
    async def parent(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(plain.options(**given))
            nursery.start_soon(durable.options(**given))
        tell("parent", job)
        if job.attempt == 1:
            raise ValueError

    job_id = trees.enqueue("parent")
    await trees.burst()
    assert told.pop("parent") == (("eu",), {"n": 1})
    SyncClient(trees.dsn).run_schedule("hourly")
    trees.again()
    await trees.burst()
    assert told == dict.fromkeys(("plain", "durable", "scheduled", "parent"), (("eu",), {"n": 1}))
    assert (trees.job(job_id)["state"], trees.job(job_id)["tags"]) == ("completed", ["eu"])


ADA = uuid.UUID(int=7)


class Row(enum.Enum):
    FIRST = 1


@pytest.mark.parametrize(
    ("type_", "seats"),
    [
        (dict[int, str], {2: "aisle", 1: "window"}),
        (dict[uuid.UUID, list[int]], {ADA: [1, 2]}),
        (dict[str, dict[date, int]], {"may": {date(2026, 5, 1): 3}}),
        (dict[Row, set[str]], {Row.FIRST: {"a", "b", "c"}}),
    ],
)
async def test_a_child_takes_dictionaries_whose_keys_are_no_texts_and_is_found_again(
    trees: Trees, type_: Any, seats: Any
) -> None:
    taken: list[Any] = []

    async def child(seats: Any) -> None:
        taken.append(seats)

    child.__annotations__["seats"] = type_
    started: Any = trees.handlers.job(child)

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> None:
        # In another order in each attempt.
        given = dict(reversed(seats.items())) if job.attempt > 1 else seats
        async with job.durable_nursery() as nursery:
            nursery.start_soon(started, given)
            await nursery.flush()
            if job.attempt == 1:
                await trees.lose(job.id)
                await trio.sleep_forever()

    job_id = trees.enqueue("parent")
    await trees.burst()
    assert trees.job(job_id)["state"] == "completed"
    assert taken == [seats]


class One(enum.StrEnum):
    ONE = "1"


RESULTS: list[tuple[Any, Any]] = [
    (int | Decimal, Decimal(2)),
    (dict[str, float | Decimal], {"eur": Decimal("19.90")}),
    (bool | One, One.ONE),
    (Literal["null"] | None, "null"),
    (msgspec.Raw, msgspec.Raw(b'{"a":1}')),
    # Some handlers declare `int` and return a text.
    (int, "5"),
]


@pytest.mark.parametrize(("of", "value"), RESULTS, ids=lambda one: str(one)[:20])
async def test_a_childs_result_is_what_a_client_reads(of: Any, value: Any, trees: Trees) -> None:
    """It was converted as from a text: `Decimal('2')` of `int | Decimal` was 2, and "null" of an optional one None."""
    seen: list[Any] = []

    async def gives() -> Any:
        return value

    gives.__annotations__["return"] = of
    child = trees.handlers.job(gives)

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            started = nursery.start_soon(child)
        seen.append(started.result)

    assert (await trees.ended(trees.enqueue("order")))["state"] == "completed"
    with psycopg.connect(trees.dsn) as connection:
        ref = SyncClient(connection, handlers=trees.handlers).enqueue(child)
    await trees.burst()
    with psycopg.connect(trees.dsn, autocommit=True) as connection:
        read = result_of(SyncClient(connection).job(ref.id), of)
    assert (type(seen[0]), seen[0]) == (type(read), read)
    assert seen[0] == (5 if value == "5" else value)
