"""pydantic's models, attrs classes and dataclasses as arguments and results; an error names the field, and no value."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any, TypedDict
from uuid import UUID

import attrs
import msgspec
import pydantic
import pytest

from pulse_trio import ConfigurationError, Handlers, InvalidArguments, Job
from pulse_trio.client.refs import result_of
from pulse_trio.handlers.models import fields_of
from pulse_trio.handlers.signature import UnfitArguments, UnfitValue, encode_result
from pulse_trio.records import JobRecord, State
from pulse_trio.testing import run_job_sync
from pulse_trio.worker.durable.steps import decoded

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
ONE = UUID(int=1)


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


class Extra(TypedDict, total=False):
    note: str


class PydanticLine(pydantic.BaseModel):
    price: Decimal
    size: Size = Size.SMALL


class PydanticOrder(pydantic.BaseModel):
    id: UUID
    at: datetime
    lines: list[PydanticLine]
    extra: dict[str, str] | None = None


@dataclass
class PlainLine:
    price: Decimal
    size: Size = Size.SMALL


@dataclass
class PlainOrder:
    id: UUID
    at: datetime
    lines: list[PlainLine]
    extra: Extra | None = None


@attrs.define
class AttrsLine:
    price: Decimal
    size: Size = Size.SMALL


@attrs.define
class AttrsOrder:
    id: UUID
    at: datetime
    lines: list[AttrsLine]
    extra: Extra | None = None


class StructLine(msgspec.Struct):
    price: Decimal
    size: Size = Size.SMALL


class StructOrder(msgspec.Struct):
    id: UUID
    at: datetime
    lines: list[StructLine]
    extra: Extra | None = None


KINDS: list[tuple[Any, Any]] = [
    (PydanticOrder, PydanticLine),
    (PlainOrder, PlainLine),
    (AttrsOrder, AttrsLine),
    (StructOrder, StructLine),
]


def registered(order: Any) -> tuple[Handlers, Any]:
    handlers = Handlers()

    def first(order: Any, others: Any = None) -> Any:
        return order

    first.__annotations__ = {"order": order, "others": dict[str, list[order]] | None, "return": order}
    return handlers, handlers.job(first)


def made(order: Any, line: Any, price: Any = Decimal("1.10")) -> Any:
    return order(
        id=ONE, at=NOON, lines=[line(price=Decimal(1)), line(price=price, size=Size.LARGE)], extra={"note": "x"}
    )


@pytest.mark.parametrize(("order", "line"), KINDS)
def test_an_order_of_each_kind_is_an_argument_and_a_result(order: Any, line: Any) -> None:
    handlers, first = registered(order)
    given = made(order, line)
    request = first.request(given, others={"a": [given]})

    args, kwargs = first.signature.decode(request.args)
    assert (args, kwargs) == ((given, {"a": [given]}), {})
    run = run_job_sync("first", msgspec.json.decode(request.args), handlers=handlers)
    assert msgspec.json.decode(encode_result("first", given)) == msgspec.json.decode(request.args)["order"]
    assert msgspec.json.decode(encode_result("first", run.result)) == msgspec.json.decode(request.args)["order"]
    assert first.result_type is order
    assert decoded(first.function, encode_result("first", given)) == given


@pytest.mark.parametrize(("order", "line"), KINDS)
def test_a_field_that_does_not_fit_is_named_at_enqueue_and_in_the_worker_without_its_value(
    order: Any, line: Any
) -> None:
    _, first = registered(order)
    bad = {"id": str(ONE), "at": NOON.isoformat(), "lines": [{"price": "1"}, {"price": "secret"}]}
    with pytest.raises(InvalidArguments, match=r"lines\[(1|\.\.\.)\]\.price") as at_enqueue:
        first.request(bad)
    with pytest.raises(UnfitArguments, match=r"lines\[(1|\.\.\.)\]\.price") as in_worker:
        first.signature.decode(msgspec.json.encode({"order": bad}).decode())
    assert "order" in str(at_enqueue.value)
    assert "secret" not in str(at_enqueue.value) + str(in_worker.value)


def test_a_validator_that_says_a_value_says_it_to_no_one() -> None:
    class Card(pydantic.BaseModel):
        number: str

        @pydantic.model_validator(mode="before")
        @classmethod
        def refuse(cls, value: Any) -> Any:
            raise RuntimeError(value["number"])

    _, first = registered(Card)
    with pytest.raises(InvalidArguments, match="RuntimeError in ") as refused:
        first.request({"number": "4111"})
    assert "4111" not in str(refused.value)


def test_two_models_with_one_set_in_another_order_compare_as_equal() -> None:
    class Chosen(pydantic.BaseModel, extra="allow"):
        numbers: set[int]
        page: pydantic.HttpUrl

    one, other = (Chosen.model_validate({"numbers": n, "page": "http://a", "more": 1}) for n in ({0, 8}, {8, 0}))
    assert list(one.numbers) != list(other.numbers)
    first, second = (msgspec.json.encode(value, enc_hook=fields_of, order="sorted") for value in (one, other))
    assert first == second == b'{"more":1,"numbers":[0,8],"page":"http://a/"}'


def test_a_union_of_two_models_is_refused_at_registration_and_stands_in_a_model() -> None:
    with pytest.raises(ConfigurationError, match="unions may not contain more than one custom type"):
        registered(PydanticOrder | PydanticLine)
    either = pydantic.RootModel[PydanticOrder | PydanticLine]
    _, first = registered(either)
    for given in (made(PydanticOrder, PydanticLine), PydanticLine(price=Decimal(2))):
        args, _ = first.signature.decode(first.request(either(given)).args)
        assert args == (either(given), None)


def test_a_class_that_json_cannot_carry_is_refused_at_registration() -> None:
    class Unknown:
        pass

    for annotation in (object(), Unknown, list[Unknown]):

        def first(job: Job) -> Any:
            return None

        first.__annotations__["return"] = annotation
        with pytest.raises(ConfigurationError, match=r"Return a dict.*pydantic"):
            Handlers().job(first)


def test_pydantic_and_attrs_are_not_imported_by_the_package() -> None:
    code = "import sys, pulse_trio, pulse_trio.testing; print(sorted({'pydantic', 'attrs'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() in ("[]", "['attrs']")  # Trio imports attrs


@pytest.mark.parametrize(("order", "line"), KINDS)
def test_a_client_gets_the_result_as_the_handler_returned_it(order: Any, line: Any) -> None:
    given = made(order, line)
    stored = msgspec.json.decode(encode_result("first", given))
    record = JobRecord(
        1, "q", "first", State.COMPLETED, 0, 1, 20, NOON, NOON, NOON, NOON, None, None, {}, stored, None, None, None, None, None
    )  # fmt: skip
    assert result_of(record, order) == given


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    at: datetime
    pair: tuple[int, int]


class Anything(pydantic.BaseModel):
    value: Any = None
    moment: datetime | None = None


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Anything(value=math.nan), r"a NaN or an infinity at (order|the value itself|value)?\.?value"),
        (Anything(value=[1, {"a": -math.inf}]), r"a NaN or an infinity at (order\.)?value\[1\]\.a"),
        (
            Anything(moment=datetime(1930, 5, 1, tzinfo=timezone(timedelta(minutes=19, seconds=32)))),
            r"the pydantic model Anything reads its field moment otherwise than it writes .*an offset from UTC with",
        ),
    ],
)
def test_what_pydantic_itself_would_change_is_refused(model: Anything, said: str) -> None:
    """It makes None of a NaN in an `Any`, and cuts the seconds of an offset off."""

    async def take(order: Anything) -> None: ...

    with pytest.raises(InvalidArguments, match=said):
        Handlers().job(take).request(model)
    with pytest.raises(UnfitValue, match=said):
        encode_result("give", model)


def test_a_strict_model_takes_what_json_has_for_its_types() -> None:
    async def take(order: Strict) -> Strict:
        return order

    order = Strict(at=datetime(2026, 1, 1, tzinfo=UTC), pair=(1, 2))
    handler = Handlers().job(take)
    (found,), _ = handler.signature.decode(handler.request(order).args)
    assert found == order
    with pytest.raises(InvalidArguments, match="pair"):
        handler.request(Strict.model_construct(at=order.at, pair=(1, "2")))  # type: ignore[arg-type]
