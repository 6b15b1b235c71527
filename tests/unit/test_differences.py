"""What JSON would change without a word is refused: a value arrives as it was given, or is no argument and no result."""

from __future__ import annotations

import sys
from collections.abc import Callable  # noqa: TC003 -- in an annotation that is read
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Annotated, Any, TypedDict, Union
from zoneinfo import ZoneInfo

import attrs
import msgspec
import pydantic
import pytest

from pulse_trio import ConfigurationError, Handlers, InvalidArguments, Job
from pulse_trio.handlers.differences import difference
from pulse_trio.handlers.signature import UnfitValue, encode_result
from pulse_trio.testing import run_job_sync
from pulse_trio.worker.durable.steps import decoded

BERLIN = ZoneInfo("Europe/Berlin")


class Secret(pydantic.BaseModel):
    password: pydantic.SecretStr


class ReadAs(pydantic.BaseModel):
    limit: int = pydantic.Field(default=1, validation_alias="maxLimit")


class WrittenAs(pydantic.BaseModel):
    limit: int = pydantic.Field(default=1, serialization_alias="maxLimit")


class Named(pydantic.BaseModel):
    limit: int = pydantic.Field(alias="maxLimit")


class Left(pydantic.BaseModel):
    kept: int = 0
    left: int = pydantic.Field(default=0, exclude=True)


class Doubled(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    one: int

    @pydantic.computed_field
    @property
    def two(self) -> int:
        return 2 * self.one


class Nicked(msgspec.Struct, tag=True, rename={"name": "nick"}):
    name: str


class Sizes(TypedDict):
    wide: int


class Shouted(pydantic.BaseModel):
    text: str

    @pydantic.field_validator("text")
    @classmethod
    def shout(cls, text: str) -> str:
        return f"{text}!"


class Pet(pydantic.BaseModel):
    name: str = "x"


class Cat(Pet):
    lives: int = 9


class Home(pydantic.BaseModel):
    pets: list[Pet]


class Sparse(pydantic.BaseModel):
    note: str | None = "none given"
    numbers: list[int] = [1]

    @pydantic.model_serializer(mode="wrap")
    def sparse(self, written: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in written(self).items() if value}


class When(pydantic.BaseModel):
    at: datetime


class Loose(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", arbitrary_types_allowed=True)
    anything: Any = None


@dataclass
class Animal:
    name: str = "x"


@dataclass
class Dog(Animal):
    bark: int = 2


@dataclass
class Renamed(Animal):
    """A subclass without fields of its own."""


@dataclass
class Tree:
    value: int
    below: list[Tree] = field(default_factory=lambda: list[Tree]())


class Opens(msgspec.Struct):
    at: time


@attrs.define
class Shop:
    name: str


@attrs.define
class Bakery(Shop):
    breads: int = 3


def named(given: object) -> str:
    return str(given) if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)


def handler(of: Any) -> Any:
    async def takes(value: Any, other: Any = None) -> Any:
        return value

    takes.__annotations__ = {"value": of, "return": of}
    return Handlers().job(takes)


KEPT: list[tuple[Any, Any]] = [
    (ReadAs, ReadAs(maxLimit=50)),  # pyright: ignore[reportCallIssue] -- its alias is for reading
    (WrittenAs, WrittenAs(limit=50)),
    (Named, Named(maxLimit=50)),
    (Left, Left(kept=4)),
    (Doubled, Doubled(one=4)),
    (Home, Home(pets=[Pet(name="y")])),
    (Sparse, Sparse(note="n")),
    (When, When(at=datetime(2026, 11, 29, tzinfo=UTC))),
    (Loose, Loose(anything={"at": 1}, more="m")),  # pyright: ignore[reportCallIssue] -- an extra field
    (Animal, Animal("y")),
    (Tree, Tree(1, [Tree(2), Tree(3, [Tree(4)])])),
    (Shop, Shop("y")),
    (time, time(8, tzinfo=UTC)),
    (list[Opens], [Opens(time(8))]),
    (dict[str, Animal], {"one": Animal("y")}),
]
CHANGED: list[tuple[Any, Any, str]] = [
    (Secret, Secret(password=pydantic.SecretStr("hunter2")), "password"),
    (Left, Left(left=5), "left"),
    (Shouted, Shouted(text="a"), "text"),
    (Sparse, Sparse(note=None), "note"),
    (Sparse, Sparse(numbers=[]), "numbers"),
    (Loose, Loose(anything=pydantic.SecretStr("hunter2")), "anything"),
    (Loose, Loose(more=[pydantic.SecretStr("hunter2")]), r"more\[0\]"),  # pyright: ignore[reportCallIssue] -- an extra field, too
    (Home, Home(pets=[Pet(), Cat(lives=7)]), r"pets\[1\].lives"),
]
LOST: list[tuple[Any, Any, str]] = [
    (Pet, Cat(lives=7), r"value\.lives"),
    (Animal, Dog(bark=7), r"value\.bark"),
    (list[Animal], [Animal(), Dog()], r"value\[1\]\.bark"),
    (dict[str, Animal], {"one": Dog()}, r"value\.one\.bark"),
    (Shop, Bakery("y"), r"value\.breads"),
    (time, time(8, tzinfo=BERLIN), "value"),
    (list[Opens], [Opens(time(8)), Opens(time(9, tzinfo=BERLIN))], r"value\[1\]\.at"),
    (Animal | None, Dog(), r"value\.bark"),
    # A dictionary in the place of an object, with a name that is none of its fields.
    (Animal, {"name": "y", "n_me": "z"}, r"value\.n_me"),
    (list[Tree], [{"value": 1, "below": [{"value": 2, "belov": []}]}], r"value\[0\]\.below\[0\]\.belov"),
    (Nicked, {"nick": "y", "name": "y"}, r"value\.name"),
    (Sizes, {"wide": 1, "wjde": 2}, r"value\.wjde"),
]
CONVERTED: list[tuple[Any, Any]] = [
    (datetime, "2026-01-01T00:00:00Z"),
    (Animal, {"name": "y"}),
    (Nicked, {"type": "Nicked", "nick": "y"}),
    (Nicked | None, {"nick": "y"}),
    (Sizes, {"wide": 1}),
    (Animal, Renamed("y")),
    (tuple[int, ...], [1, 2]),
    (list[date], [date(2026, 1, 1)]),
    (Decimal, "1.10"),
    (dict[str, Any], {"at": datetime(2026, 1, 1, tzinfo=UTC), "who": Animal(), "set": {1}}),
    (Loose, Loose(anything={1: datetime(2026, 1, 1, tzinfo=UTC)})),
    (Any, Dog()),
    # In the hour that comes twice, and in the one that is left out, a local time is equal to none in another zone.
    *((When, When(at=datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=fold))) for fold in (0, 1)),
    (When, When(at=datetime(2026, 3, 29, 2, 30, tzinfo=BERLIN))),
    (list[datetime], [datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN)]),
]


@pytest.mark.parametrize(("of", "value"), KEPT, ids=named)
def test_what_arrives_as_it_was_is_taken_as_an_argument_and_as_a_result(of: Any, value: Any) -> None:
    takes = handler(of)
    args = takes.request(value).args
    (arrived, _), _ = takes.signature.decode(args)
    assert (arrived, type(arrived)) == (value, type(value))
    assert difference(value, arrived) is None
    result = encode_result("k", value)
    assert msgspec.json.decode(args)["value"] == msgspec.json.decode(result)
    assert decoded(takes.function, result) == value


@pytest.mark.parametrize(("of", "value", "where"), CHANGED, ids=named)
def test_a_model_that_reads_something_else_than_it_writes_is_refused(of: Any, value: Any, where: str) -> None:
    with pytest.raises(InvalidArguments, match=f"reads its field {where} otherwise than it writes it") as refused:
        handler(of).request(value)
    with pytest.raises(UnfitValue, match=where):
        encode_result("k", value)
    with pytest.raises(InvalidArguments, match=where):
        handler(Any).request(value)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(("of", "value", "where"), LOST, ids=named)
def test_an_argument_of_which_its_annotation_carries_less_is_refused(of: Any, value: Any, where: str) -> None:
    with pytest.raises(InvalidArguments, match=rf"would arrive as another one: {where},"):
        handler(of).request(value)


@pytest.mark.parametrize(("of", "value"), CONVERTED, ids=named)
def test_what_its_annotation_makes_another_type_of_is_no_difference(of: Any, value: Any) -> None:
    handler(of).request(value)
    encode_result("k", value)


def test_what_no_class_compares_is_not_compared() -> None:
    class Opaque:
        pass

    assert difference([Opaque()], [Opaque()]) is None
    assert difference({"a": float("nan")}, {"a": float("nan")}) is None
    assert difference({"a": 1, "b": 2}, {"a": 1, "b": 3}) == "b"
    assert difference({"a": 1, "b": 2}, {"b": 2}) == "a"
    assert difference(Secret(password=pydantic.SecretStr("a")), Secret(password=pydantic.SecretStr("b"))) == "password"


def test_an_older_pydantic_that_cannot_read_by_name_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["pydantic"], "VERSION", "2.9.0")
    with pytest.raises(InvalidArguments, match="the pydantic model ReadAs reads its field limit otherwise"):
        handler(ReadAs).request(KEPT[0][1])


Rec = Union[int, "list[Rec]"]


# `type` is of Python 3.12.
@pytest.mark.parametrize(
    "how", ["a union that names itself", *(["a type alias"] if sys.version_info >= (3, 12) else [])]
)
def test_a_type_that_is_made_of_itself_is_refused_when_it_is_registered(how: str) -> None:
    of: Any = list[Rec]
    if how == "a type alias":
        scope: dict[str, Any] = {}
        exec("type Data = int | list[Data]", scope)  # noqa: S102 -- a syntax error before 3.12
        of = scope["Data"]
    with pytest.raises(ConfigurationError, match="Handler 'takes' has a parameter whose type is made of itself"):
        handler(of)


async def of_either(job: Job | None = None) -> str:
    return type(job).__name__


async def of_noted(job: Annotated[Job, "the job"]) -> str:
    return type(job).__name__


async def of_both(job: Annotated[Job | None, "the job"]) -> str:
    return type(job).__name__


@pytest.mark.parametrize("function", [of_either, of_noted, of_both])
def test_the_job_is_given_however_its_parameter_is_annotated(function: Callable[..., Any]) -> None:
    assert run_job_sync(function).result == "Job"
