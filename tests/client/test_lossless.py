"""A value arrives as it was given, or is refused where it was given: as an argument, and as a result."""

# A first parameter of any type at all could be the Job, for a type checker: it then counts no argument.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import pathlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any, Literal, NoReturn
from uuid import UUID

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_trio import ConfigurationError, Handlers, InvalidArguments, SyncClient, Worker, open_client
from pulse_trio.errors import UnfitResult
from pulse_trio.handlers import UnfitValue, encode_result

handlers = Handlers()


@dataclasses.dataclass
class Point:
    x: float
    y: float | None = None


class Size(msgspec.Struct):
    width: float


class Colour(enum.Enum):
    RED = "red"


@handlers.job
async def take(value: Any, other: float | None = None) -> None: ...


@handlers.job(max_attempts=5)
async def give(what: str) -> Any:
    made.append(what)
    return RESULTS[what]


made: list[str] = []
TWINS: dict[Any, int] = {1: 1, "1": 2}
LOST: dict[str, tuple[Any, str]] = {
    "NaN": (math.nan, "value"),
    "infinity": (-math.inf, "value"),
    "in a list": ([1, [2, math.nan]], r"value\[1\]\[1\]"),
    "in a dictionary": ({"a": {"b": math.inf}}, r"value\.a\.b"),
    "in a dataclass": (Point(1, math.nan), r"value\.y"),
    "in a Struct": ([Size(math.nan)], r"value\[0\]\.width"),
}
RESULTS: dict[str, Any] = {name: value for name, (value, _) in LOST.items()}
RESULTS |= {
    "twins": TWINS,
    "twins in a list": [TWINS],
    "an object": object(),
    "a Path": pathlib.Path("x"),
    "a generator": (n for n in ()),
    "NUL": "\0",
}


class Exits(tzinfo):
    """Its offset is asked for when the time is written."""

    def utcoffset(self, at: datetime | None, /) -> timedelta:
        raise SystemExit("mine")


RESULTS["a time that exits"] = datetime(2020, 1, 1, tzinfo=Exits())


@pytest.mark.parametrize("name", LOST)
def test_a_float_that_json_has_not_is_refused_and_its_place_named(name: str) -> None:
    value, place = LOST[name]
    with pytest.raises(
        InvalidArguments, match=rf"Arguments of 'take' hold a NaN or an infinity at {place}, which JSON"
    ):
        take.request(value)
    with pytest.raises(InvalidArguments, match="hold a NaN or an infinity at other"):
        take.request(1, other=math.nan)
    with pytest.raises(InvalidArguments, match="hold a NaN or an infinity at"):
        SyncClient("host=nowhere").enqueue("elsewhere", {"value": value})


AMSTERDAM = timezone(timedelta(minutes=19, seconds=32))
"""Until 1937."""


@dataclasses.dataclass
class Person:
    born: datetime


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (datetime(1930, 5, 1, 12, tzinfo=AMSTERDAM), "value"),
        ({"a": [time(12, tzinfo=AMSTERDAM)]}, r"value\.a\[0\]"),
        ([Person(datetime(1930, 5, 1, tzinfo=timezone(-timedelta(seconds=52))))], r"value\[0\]\.born"),
        (datetime(1960, 1, 1, tzinfo=timezone(-timedelta(minutes=44, seconds=30))), "value"),
        ({datetime(1930, 5, 1, tzinfo=AMSTERDAM): 1}, "a key of value"),
        ([{"a": {time(12, tzinfo=AMSTERDAM): 1}}], r"a key of value\[0\]\.a"),
    ],
)
def test_a_time_whose_offset_json_has_not_is_refused(value: Any, place: str) -> None:
    """It arrived as another moment: the offset has minutes alone."""
    with pytest.raises(InvalidArguments, match=rf"hold a time at {place} whose offset from UTC has seconds"):
        take.request(value)
    with pytest.raises(UnfitValue, match="whose offset from UTC has seconds"):
        encode_result("k", value)


@attrs.define
class Account:
    name: str
    _balance: int = 0


def test_an_attrs_class_with_private_attributes_is_refused() -> None:
    """They are left out of the JSON: the handler got an account without its balance."""
    for annotation in (Account, list[Account], dict[str, Account | None]):

        async def takes(value: Any) -> None: ...

        async def gives() -> Any: ...

        takes.__annotations__["value"] = gives.__annotations__["return"] = annotation
        for function in (takes, gives):
            with pytest.raises(ConfigurationError, match=r"attributes of the attrs class Account .*\(_balance\)"):
                Handlers().job(function)
    with pytest.raises(InvalidArguments, match=r"private attributes of the attrs class Account would be left out"):
        take.request(Account("ada", 3))
    with pytest.raises(UnfitValue, match="private attributes of the attrs class Account would be left out"):
        encode_result("give", Account("ada", 3))


@pytest.mark.parametrize("levels", [500, 501, 1101, 2000, 20_000])
@pytest.mark.parametrize("shape", ["lists", "dictionaries"])
def test_a_result_is_as_deep_as_python_reads_everywhere(levels: int, shape: str) -> None:
    """One of 1,101 levels completed its job, and its reader got something else."""
    value: Any = 1
    for _ in range(levels):
        value = [value, "]["] if shape == "lists" else {"a": value, "b": []} if levels > 500 else {"a": value}
    if levels == 500:
        assert json.loads(encode_result("give", value)) == value
        return
    with pytest.raises(UnfitValue, match=r"is nested deeper than 500 levels|recursion|cannot be written"):
        encode_result("give", value)


def test_other_times_are_taken() -> None:
    written = encode_result("k", [datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=45))), '-10:32"'])
    assert written == '["2026-01-01T00:00:00+05:45","-10:32\\""]'


def test_the_payload_of_an_event_is_one_thing_and_arguments_are_many() -> None:
    client = SyncClient("host=nowhere")
    with pytest.raises(InvalidArguments, match="The payload of the event 'arguments' holds a NaN"):
        client.send_event(1, "arguments", [math.nan])
    with pytest.raises(InvalidArguments, match="The payload of the event 'a' holds a NUL"):
        client.send_event(1, "a", "\0")
    with pytest.raises(InvalidArguments, match="The payload of the event 'a' takes 2,000,002 bytes"):
        client.send_event(1, "a", "a" * 2_000_000)
    with pytest.raises(InvalidArguments, match="Arguments of 'take' hold a NUL"):
        take.request("\0")


def test_two_keys_that_json_takes_for_one_are_refused() -> None:
    with pytest.raises(InvalidArguments, match="two keys that are both '1' in JSON"):
        take.request({"deep": [TWINS]})
    with pytest.raises(InvalidArguments, match="two keys that are both '1' in JSON"):
        SyncClient("host=nowhere").send_event(1, "told", TWINS)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_characters="\0")),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3) | st.integers(0, 3), inner),
    )
)
def test_what_is_written_reads_back_the_same_or_is_refused(value: Any) -> None:
    try:
        written = encode_result("k", value)
    except UnfitValue:
        return
    assert msgspec.json.decode(written) == as_json(value)


def as_json(value: Any) -> Any:
    """What JSON makes of a value: keys are texts, and nothing else changes."""
    if isinstance(value, dict):
        assert len({str(key) for key in value}) == len(value)
        return {str(key): as_json(inner) for key, inner in value.items()}
    return [as_json(inner) for inner in value] if isinstance(value, list) else value


TYPED: list[tuple[Any, Any]] = [
    (int, 2**64),
    (int, -(2**200)),
    (Decimal, Decimal("1.10")),
    (datetime, datetime(2020, 1, 1)),
    (datetime, datetime(2020, 1, 1, tzinfo=UTC)),
    (timedelta, timedelta(days=-1, microseconds=1)),
    (bytes, b"\0\xff"),
    (set[int], {1, 2}),
    (dict[int, str], {1: "a", -2: "b"}),
    (UUID, UUID(int=7)),
    (Colour, Colour.RED),
    (Point, Point(0.1, None)),
    (list[Size], [Size(1e308)]),
    (tuple[int, str], (1, "a")),
    (Literal["a"], "a"),
    (str, "\U0001f600\u20ac\\u0000\x7f"),
    (float, 5e-324),
    (float, -0.0),
]


@pytest.mark.parametrize(("annotation", "value"), TYPED, ids=repr)
async def test_a_typed_value_comes_back_from_the_database_as_it_was(annotation: Any, value: Any, dsn: str) -> None:
    echoing = Handlers()

    async def echo(value: Any) -> Any:
        assert repr(value) == repr(expected)
        return value

    expected = value
    echo.__annotations__ = {"value": annotation, "return": annotation}
    handler: Any = echoing.job(max_attempts=1)(echo)
    async with open_client(dsn) as client:
        ref = await client.enqueue(handler, value)
        await Worker(echoing, dsn, burst=True).run()
        result = await ref.result()
    assert type(result) is type(value)
    # PostgreSQL's numbers know one zero.
    assert result == value


async def test_a_result_that_cannot_be_stored_fails_once_and_for_all(dsn: str) -> None:
    made.clear()
    async with open_client(dsn) as client:
        refs = {what: await client.enqueue(give, what) for what in RESULTS}
        await Worker(handlers, dsn, burst=True).run()
        for what, ref in refs.items():
            job = await client.job(ref.id)
            assert (job.state, job.attempt) == ("dead", 1), what
            assert job.error is not None
            assert job.error.startswith("UnfitValue: The result of 'give' "), job.error
    # No handler ran twice.
    assert sorted(made) == sorted(RESULTS)


async def test_a_result_that_is_not_what_the_handler_says_is_said_to_be(dsn: str) -> None:
    old, new = Handlers(), Handlers()

    @old.job(name="size")
    async def size() -> list[int]:
        return [1, 2]

    @new.job(name="size")
    async def size_now() -> dict[str, int]:
        return {"width": 1}

    async with open_client(dsn) as client:
        ref = await client.enqueue(size_now)
        await Worker(old, dsn, burst=True).run()
        with pytest.raises(
            UnfitResult,
            match=r"is completed, but its result is not the dict\[str, int\].*The stored result is \[1, 2\]",
        ) as caught:
            await ref.result()
    assert caught.value.job.result == [1, 2]


class Custom: ...


REFUSED: list[Any] = [
    Custom, list[Custom], dict[str, Custom | None], int | Custom, pathlib.Path, complex, range, collections.deque, Exception,
]  # fmt: skip
TAKEN: list[Any] = [
    None, object, Any, NoReturn, int, Point, list[Size], dict[int, Point], collections.Counter, collections.OrderedDict,
    Iterable, Sequence, Literal[1], msgspec.Raw, Decimal | None,
]  # fmt: skip


@pytest.mark.parametrize("annotation", REFUSED, ids=repr)
def test_a_return_type_that_json_cannot_carry_is_refused_at_registration(annotation: Any) -> None:
    async def f() -> Any: ...

    f.__annotations__ = {"return": annotation}
    with pytest.raises(ConfigurationError, match=r"Handler 'f' returns .*, which JSON cannot carry"):
        Handlers().job(f)


@pytest.mark.parametrize("annotation", TAKEN, ids=repr)
def test_a_return_type_that_json_may_carry_is_taken(annotation: Any) -> None:
    async def f() -> Any: ...

    f.__annotations__ = {"return": annotation}
    Handlers().job(f)
