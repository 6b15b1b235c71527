"""The registry: signatures, typed arguments, options."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, cast
from uuid import UUID

import msgspec
import pytest

from pulse_trio import ConfigurationError, Handlers, InvalidArguments, InvalidName, Job, UnknownKind, UsageError
from pulse_trio.client import request_by_name
from pulse_trio.client.requests import request_and_type
from pulse_trio.handlers import MAX_ARGS, Defaults, UnfitArguments, check_json


class Colour(Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: int = 0


class Money(msgspec.Struct):
    amount: Decimal
    currency: str = "EUR"


class Opaque:
    """Not a type that JSON has anything to say about."""


THE_JOB: Any = object()


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


def called(handlers: Handlers, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the function returns when it is called from the JSON its arguments were stored as."""
    handler = handlers.job(function)
    return handler.signature.bind(function)(THE_JOB, handler.request(*args, **kwargs).args)


# Signatures of every shape


def plain(a: int, b: str = "x") -> Any:
    return a, b


def nothing() -> Any:
    return ()


def job_only(job: Job) -> Any:
    return (job,)


def job_first(job: Job, a: int) -> Any:
    return job, a


def job_last(a: int, job: Job) -> Any:
    return job, a


def job_between(a: int, job: Job, b: int = 7) -> Any:
    return job, a, b


def job_keyword_only(*, job: Job) -> Any:
    return (job,)


def job_keyword_only_with_arguments(a: int, *, job: Job, b: int = 2) -> Any:
    return job, a, b


def keyword_only(*, a: int, b: int = 2) -> Any:
    return a, b


def mixed(a: int, /, b: int, *, c: int, d: int = 4) -> Any:
    return a, b, c, d


def job_positional_only(job: Job, a: int, /, b: int = 3) -> Any:
    return job, a, b


def job_with_default(a: int, job: Job = THE_JOB) -> Any:
    return job, a


def job_called_otherwise(this: Job, job: int) -> Any:
    return this, job


def unannotated(a, b=None):  # type: ignore[no-untyped-def]
    return a, b


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (plain, (1,), {}, (1, "x")),
        (plain, (1, "y"), {}, (1, "y")),
        (plain, (), {"b": "z", "a": 3}, (3, "z")),
        (nothing, (), {}, ()),
        (job_only, (), {}, (THE_JOB,)),
        (job_first, (1,), {}, (THE_JOB, 1)),
        (job_last, (1,), {}, (THE_JOB, 1)),
        (job_between, (1,), {}, (THE_JOB, 1, 7)),
        (job_between, (1, 2), {}, (THE_JOB, 1, 2)),
        (job_between, (), {"b": 3, "a": 4}, (THE_JOB, 4, 3)),
        (job_keyword_only, (), {}, (THE_JOB,)),
        (job_keyword_only_with_arguments, (1,), {}, (THE_JOB, 1, 2)),
        (job_keyword_only_with_arguments, (1,), {"b": 5}, (THE_JOB, 1, 5)),
        (keyword_only, (), {"a": 1}, (1, 2)),
        (mixed, (1, 2), {"c": 3}, (1, 2, 3, 4)),
        (mixed, (1,), {"d": 9, "c": 3, "b": 2}, (1, 2, 3, 9)),
        (job_positional_only, (1,), {}, (THE_JOB, 1, 3)),
        (job_with_default, (1,), {}, (THE_JOB, 1)),
        (job_called_otherwise, (5,), {}, (THE_JOB, 5)),
        (unannotated, ({"any": [1, None]},), {}, ({"any": [1, None]}, None)),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_every_shape_of_signature_is_called_as_it_was_enqueued(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], expected: Any, handlers: Handlers
) -> None:
    assert called(handlers, function, *args, **kwargs) == expected


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, 2**62), (float, 1.5), (float, 1), (str, "ü\U0001f600"), (bool, True), (bytes, b"\0\xff"), (None, None),
        (int | None, None), (list[int], [1, 2]), (tuple[int, str], (1, "a")), (dict[str, list[int]], {"a": [1]}),
        (set[int], {1, 2}), (frozenset[str], frozenset({"a"})), (datetime, datetime(2020, 1, 1, tzinfo=UTC)),
        (date, date(2020, 1, 1)), (timedelta, timedelta(seconds=1.5)), (UUID, UUID(int=5)), (Decimal, Decimal("0.10")),
        (Colour, Colour.RED), (Literal["a", "b"], "b"), (Point, Point(1, 2)), (Money, Money(Decimal("1.10"))),
        (Annotated[int, msgspec.Meta(ge=0)], 0), (list[Point], [Point(1), Point(2, 3)]), (Any, {"x": [None]}),
    ],
    ids=str,
)  # fmt: skip
def test_every_type_that_json_can_carry_arrives_as_itself(annotation: Any, value: Any, handlers: Handlers) -> None:
    def take(a: Any) -> Any:
        return a

    take.__annotations__ = {"a": annotation}
    arrived = called(handlers, take, value)
    assert arrived == value
    assert type(arrived) is type(value) or isinstance(value, int)


def test_default_arguments_are_not_stored_so_a_new_default_counts_for_old_jobs(handlers: Handlers) -> None:
    request = handlers.job(plain).request(1)
    assert json.loads(request.args) == {"a": 1}
    newer = Handlers()

    @newer.job(name="plain")
    def other(a: int, b: str = "the new default", c: bool = True) -> Any:
        return a, b, c

    assert other.signature.bind(other.function)(THE_JOB, request.args) == (1, "the new default", True)


def test_a_given_default_is_stored(handlers: Handlers) -> None:
    assert json.loads(handlers.job(plain).request(1, "x").args) == {"a": 1, "b": "x"}


def test_a_default_may_be_of_any_type(handlers: Handlers) -> None:
    marker = Opaque()

    def odd(a: int, b: Any = marker, c: list[int] = [1]) -> Any:  # noqa: B006 -- whatever people write
        return a, b, c

    assert called(handlers, odd, 1) == (1, marker, [1])


# Arguments that do not fit


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}), (("1",), {}), ((1.5,), {}), ((None,), {}), ((1, 2), {}), ((1, "b", 3), {}), ((1,), {"c": 1}),
        ((1,), {"a": 2}), (({1: Opaque},), {}), ((float("nan"),), {}), ((True,), {}),
    ],
    ids=repr,
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused_before_anything_is_written(
    args: tuple[Any, ...], kwargs: dict[str, Any], handlers: Handlers
) -> None:
    handler = handlers.job(plain)
    with pytest.raises(InvalidArguments, match="plain"):
        handler.request(*args, **kwargs)


@pytest.mark.parametrize("future", ["from __future__ import annotations", ""], ids=["text", "as the Python has them"])
def test_annotations_are_read_from_any_module_however_python_keeps_them(future: str, handlers: Handlers) -> None:
    # From Python 3.14 on a module without the import has annotations that are evaluated when they are looked at.
    module: dict[str, Any] = {}
    source = (
        f"{future}\nfrom pulse_trio import Job\nimport uuid\n"
        "async def send(job: Job, to: list[uuid.UUID], *, kind: str | None = None) -> dict[str, int]: ...\n"
    )
    exec(compile(source, "a module", "exec", dont_inherit=True), module)  # noqa: S102 -- a module is what is tried
    handler = handlers.job(module["send"])
    assert json.loads(handler.request([UUID(int=1)]).args) == {"to": [str(UUID(int=1))]}
    with pytest.raises(InvalidArguments, match="Expected `array`"):
        handler.request(1)


@pytest.mark.parametrize("name", ["job", "to", "return"])
def test_a_name_that_annotations_lack_is_said_at_registration(name: str, handlers: Handlers) -> None:
    async def send(job: Job, to: int) -> None: ...

    send.__annotations__ = send.__annotations__ | {name: "Tenant"}
    with pytest.raises(ConfigurationError, match=r"cannot be read: name 'Tenant' is not defined\. Import that name"):
        handlers.job(send)


def test_the_refusal_shows_the_signature_and_the_reason(handlers: Handlers) -> None:
    with pytest.raises(
        InvalidArguments, match=r"do not fit plain\(a: .*int.*, b: .*str.* = 'x'\): Expected `int`, got `str`"
    ):
        handlers.job(plain).request("one")  # type: ignore[arg-type]
    with pytest.raises(InvalidArguments, match="missing a required argument: 'a'"):
        handlers["plain"].request()


def test_arguments_that_contain_themselves_are_refused(handlers: Handlers) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidArguments):
        handlers.job(unannotated).request(loop)


@pytest.mark.parametrize("text", ["a\0b", "\ud800"], ids=["nul", "surrogate"])
def test_text_that_postgresql_cannot_hold_is_refused(text: str, handlers: Handlers) -> None:
    with pytest.raises(InvalidArguments):
        handlers.job(unannotated).request({"deep": [text]})
    with pytest.raises(InvalidArguments):
        request_by_name("k", {"a": text})


@pytest.mark.parametrize("text", ["\\u0000", "\\\\u0000", "\\", "\\ud800", 'a"b', "\x01\x1f"])
def test_text_that_only_looks_like_it_is_taken(text: str, handlers: Handlers) -> None:
    assert called(handlers, unannotated, text) == (text, None)
    assert json.loads(request_by_name("k", {"a": text}).args) == {"a": text}


def test_arguments_over_the_limit_are_refused_and_up_to_it_taken(handlers: Handlers) -> None:
    handler = handlers.job(unannotated)
    fits = "x" * (MAX_ARGS - len('{"a":""}'))
    assert len(handler.request(fits).args) == MAX_ARGS
    with pytest.raises(InvalidArguments, match="1,048,577 bytes of JSON; the limit is 1,048,576"):
        handler.request(fits + "x")


@pytest.mark.parametrize(
    ("args", "kwargs", "hint"),
    [
        ((1,), {"delay": 5}, "An option of the job goes into options(): plain.options(delay=...)."),
        (({"a": 1},), {}, "Arguments are given as in a call of the handler, not in a dictionary: a=..."),
        (({"a": 1, "other": 2},), {}, ""),
        (("x",), {}, ""),
        ((), {"other": 5}, ""),
    ],
)
def test_a_refusal_says_what_was_probably_meant(
    args: tuple[Any, ...], kwargs: dict[str, Any], hint: str, handlers: Handlers
) -> None:
    with pytest.raises(InvalidArguments) as refused:
        handlers.job(plain).request(*args, **kwargs)
    first, _, meant = str(refused.value).partition(f". {hint[:3]}" if hint else "\0")
    assert first.startswith("Arguments do not fit plain(")
    assert hint[3:] == meant


def test_a_parameter_called_job_without_its_annotation_is_pointed_out(handlers: Handlers) -> None:
    async def send(job, to: int) -> None: ...  # type: ignore[no-untyped-def]  # pyright: ignore

    with pytest.raises(InvalidArguments, match=r"missing a required argument: 'to'\. The job itself is .*: job: Job"):
        handlers.job(cast("Any", send)).request(7)


@pytest.mark.parametrize("registry", [None, Handlers()])
def test_arguments_of_a_job_by_name_that_are_given_as_keywords_are_told_where_they_go(
    registry: Handlers | None,
) -> None:
    said = re.escape("There is no option 'user_id'. The arguments of a job by name are given in one dictionary: ")
    with pytest.raises(ConfigurationError, match=said + re.escape("enqueue('greet', {'user_id': ...}).")):
        request_and_type("greet", registry, (), {"user_id": 7, "delay": 3})


def test_raw_json_that_is_not_json_is_refused(handlers: Handlers) -> None:
    with pytest.raises(InvalidArguments):
        handlers.job(unannotated).request(msgspec.Raw(b"{"))
    with pytest.raises(InvalidArguments):
        check_json(b'{"a":"\\udc00"}', "That")
    assert check_json(b'"\\ud83d\\ude00"', "That") == '"\\ud83d\\ude00"'


@pytest.mark.parametrize("args", ["{}", '{"a":"x"}', '{"a":1,"z":1}', "[]", "{", "null", ""])
def test_a_row_whose_arguments_do_not_fit_says_so(args: str, handlers: Handlers) -> None:
    handler = handlers.job(plain)
    with pytest.raises(UnfitArguments, match="do not fit plain"):
        handler.signature.bind(plain)(THE_JOB, args)


# Registration


@pytest.mark.parametrize("function", [lambda *args: None, lambda **kwargs: None])
def test_open_ended_parameters_are_refused(function: Callable[..., Any], handlers: Handlers) -> None:
    with pytest.raises(ConfigurationError, match="each needs its own parameter"):
        handlers.job(name="open")(function)


def test_two_job_parameters_are_refused(handlers: Handlers) -> None:
    def two(a: Job, b: Job) -> None: ...

    with pytest.raises(ConfigurationError, match="2 parameters annotated Job"):
        handlers.job(two)


def test_an_annotation_that_cannot_be_read_is_named(handlers: Handlers) -> None:
    def lost(a: NoSuchName) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigurationError, match="NoSuchName"):
        handlers.job(lost)


@pytest.mark.parametrize("annotation", [dict[Point, int], int | Point | Money, Callable[[], None]], ids=str)
def test_a_type_that_json_cannot_carry_is_refused_at_registration_or_at_the_call(
    annotation: Any, handlers: Handlers
) -> None:
    def odd(a: Any) -> None: ...

    odd.__annotations__ = {"a": annotation}
    with pytest.raises((ConfigurationError, InvalidArguments), match="JSON"):
        handlers.job(odd).request(lambda: None)  # pyright: ignore[reportCallIssue] -- annotated above


def test_a_kind_is_registered_once(handlers: Handlers) -> None:
    handlers.job(plain)
    with pytest.raises(ConfigurationError, match=r"'plain' is registered twice: plain \(.*test_handlers.py:\d+\) and"):
        handlers.job(plain)
    handlers.job(name="other")(plain)
    assert [h.kind for h in handlers] == ["plain", "other"]


def test_a_handler_is_not_decorated_twice(handlers: Handlers) -> None:
    handler = handlers.job(plain)
    with pytest.raises(ConfigurationError, match="registered already"):
        handlers.job(handler)  # type: ignore[call-overload]


def test_registries_can_be_joined_unless_they_disagree(handlers: Handlers) -> None:
    handlers.job(plain)
    other = Handlers()
    other.job(nothing)
    handlers.include(other)
    assert {h.kind for h in handlers} == {"plain", "nothing"}
    assert len(handlers) == 2
    with pytest.raises(ConfigurationError, match="registered twice"):
        handlers.include(other)


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "a\0", "\ud800"])
def test_a_kind_has_a_name_that_can_be_written(name: str, handlers: Handlers) -> None:
    with pytest.raises(InvalidName):
        handlers.job(name=name)(plain)


def test_a_handler_is_found_by_kind_and_near_names_are_offered(handlers: Handlers) -> None:
    for name in ("send_welcome", "send_goodbye", "resize"):
        handlers.job(name=name)(plain)
    assert handlers["resize"].kind == "resize"
    assert "resize" in handlers
    assert handlers.get("nope") is None
    with pytest.raises(UnknownKind, match=r"No handler is registered as 'send_welcom'. Did you mean 'send_welcome'"):
        handlers["send_welcom"]
    with pytest.raises(UnknownKind, match=r"'zzzzz'\.$"):
        handlers["zzzzz"]


def test_a_handler_is_still_its_function(handlers: Handlers) -> None:
    assert handlers.job(plain)(1, b="direct") == (1, "direct")
    assert repr(handlers["plain"]) == "<Handler 'plain' on queue 'default'>"


async def test_an_async_handler_is_still_its_function(handlers: Handlers) -> None:
    @handlers.job
    async def double(n: int) -> int:
        return 2 * n

    assert await double(4) == 8


def test_how_a_handler_runs_follows_from_what_it_is(handlers: Handlers) -> None:
    async def waits() -> None: ...

    assert handlers.job(plain).runs == "thread"
    assert handlers.job(waits).runs == "trio"
    assert handlers.job(runs="trio", name="a")(waits).runs == "trio"
    assert handlers.job(runs="thread", name="b")(plain).runs == "thread"


@pytest.mark.parametrize("runs", ["trio", "asyncio", "nonsense", ""])
def test_a_way_of_running_that_does_not_fit_is_refused(runs: Any, handlers: Handlers) -> None:
    with pytest.raises(ConfigurationError, match="runs="):
        handlers.job(runs=runs)(plain)


def test_a_generator_is_not_a_handler(handlers: Handlers) -> None:
    async def agen() -> Any:
        yield 1

    def gen() -> Any:
        yield 1

    for function in (agen, gen):
        with pytest.raises(ConfigurationError, match="generator"):
            handlers.job(function)


@pytest.mark.parametrize(
    "thing", [functools.partial(plain, 1), Opaque, Opaque(), "plain", 5], ids=lambda t: type(t).__name__
)
def test_what_is_not_a_function_is_refused(thing: Any, handlers: Handlers) -> None:
    with pytest.raises(ConfigurationError, match="is not a function"):
        handlers.job(name="thing")(thing)


# Options


def test_requests_carry_the_handlers_options(handlers: Handlers) -> None:
    handler = handlers.job(queue="mail", priority=-3, max_attempts=5, timeout=60, backoff_base=1, backoff_cap=9)(plain)
    request = handler.request(1)
    assert (request.kind, request.queue, request.priority, request.max_attempts) == ("plain", "mail", -3, 5)
    assert json.loads(request.options or "") == {"timeout": 60, "backoff_base": 1, "backoff_cap": 9}
    assert (request.delay, request.run_at, request.unique_key) == (None, None, None)


def test_default_options_are_not_stored(handlers: Handlers) -> None:
    assert handlers.job(plain).request(1).options is None


def test_options_change_one_call_and_not_the_handler(handlers: Handlers) -> None:
    handler = handlers.job(queue="mail", timeout=60)(plain)
    changed = handler.options(queue="slow", delay=60, priority=5, unique_key="u42", max_attempts=1, timeout=5)
    request = changed.request(1)
    assert (request.queue, request.delay, request.priority, request.unique_key) == ("slow", 60, 5, "u42")
    assert (request.max_attempts, request.options) == (1, '{"timeout":5}')
    assert handler.request(1).queue == "mail"
    assert handlers["plain"] is handler
    assert changed.options(queue="slower").request(1).priority == 5


def test_a_delay_may_be_a_timedelta_and_a_moment_must_know_its_zone(handlers: Handlers) -> None:
    handler = handlers.job(plain)
    assert handler.options(delay=timedelta(minutes=1.5)).request(1).delay == 90
    tokyo = datetime(2030, 1, 1, 9, tzinfo=timezone(timedelta(hours=9)))
    assert handler.options(run_at=tokyo).request(1).run_at == "2030-01-01T09:00:00+09:00"
    with pytest.raises(ConfigurationError, match="naive"):
        handler.options(run_at=datetime(2030, 1, 1))
    assert request_by_name("k", delay=timedelta(minutes=1)).delay == 60


def test_a_moment_is_called_at_and_takes_the_place_of_a_delay(handlers: Handlers) -> None:
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    handler = handlers.job(delay=timedelta(hours=1))(plain)
    assert handler.request(1).delay == 3600
    at_noon = handler.options(at=noon)
    assert (at_noon.request(1).delay, at_noon.request(1).run_at) == (None, noon.isoformat())
    assert at_noon.request(1) == handler.options(run_at=noon).request(1)
    assert (at_noon.options(delay=5).request(1).delay, at_noon.options(delay=5).request(1).run_at) == (5, None)
    with pytest.raises(ConfigurationError, match="at or run_at"):
        handler.options(at=noon, run_at=noon)


def test_a_deadline_counts_from_the_enqueue_or_is_a_moment(handlers: Handlers) -> None:
    handler = handlers.job(deadline=timedelta(minutes=5), expires=60)(plain)
    request = handler.request(1)
    assert (request.deadline_in, request.expires_in, request.options) == (300, 60, None)
    moment = datetime(2030, 1, 1, tzinfo=timezone(timedelta(hours=9)))
    request = handler.options(deadline=moment, expires=moment, timeout=timedelta(seconds=5)).request(1)
    assert (request.deadline_in, request.expires_in) == (None, None)
    assert json.loads(request.options or "") == {
        "timeout": 5, "deadline": moment.timestamp(), "expires": moment.timestamp()
    }  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"max_attempts": 0}, {"max_attempts": -1}, {"max_attempts": 2**31}, {"max_attempts": 1.5}, {"max_attempts": "3"},
        {"max_attempts": True},
        {"timeout": 0}, {"timeout": -1}, {"timeout": float("inf")}, {"timeout": float("nan")}, {"timeout": "60"},
        {"delay": -1}, {"delay": float("inf")}, {"delay": float("nan")}, {"delay": timedelta(seconds=-1)}, {"delay": "60"},
        {"priority": 2**31}, {"priority": -(2**31) - 1}, {"priority": 1.5}, {"priority": "high"},
        {"delay": 1, "run_at": datetime(2030, 1, 1, tzinfo=UTC)}, {"run_at": "2030-01-01"}, {"run_at": 5},
        {"at": datetime(2030, 1, 1)}, {"at": datetime.max.replace(tzinfo=UTC)},
        {"delay": 1, "at": datetime(2030, 1, 1, tzinfo=UTC)},
        {"delay": 1e12}, {"timeout": 1e12}, {"timeout": timedelta(0)},
        {"deadline": 0}, {"deadline": -1}, {"deadline": datetime(2030, 1, 1)}, {"deadline": "soon"}, {"deadline": float("nan")},
        {"expires": timedelta(0)}, {"expires": True}, {"expires": datetime.min.replace(tzinfo=UTC)}, {"expires": 1e12},
    ],
    ids=repr,
)  # fmt: skip
def test_options_that_cannot_work_are_refused_before_anything_is_written(
    options: dict[str, Any], handlers: Handlers
) -> None:
    with pytest.raises(ConfigurationError):
        request_by_name("k", **options)
    if not {"run_at", "at"} & set(options):
        with pytest.raises(ConfigurationError):
            handlers.job(**options)(plain)
    with pytest.raises(ConfigurationError):
        handlers.job(name="fine")(plain).options(**options)


@pytest.mark.parametrize("name", ["backoff_base", "backoff_cap"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), "1"])
def test_a_backoff_is_a_positive_number(name: str, value: Any, handlers: Handlers) -> None:
    with pytest.raises(ConfigurationError, match=name):
        handlers.job(**{name: value})(plain)


@pytest.mark.parametrize("queue", ["", " ", "a b", "é", "x" * 129, "a\n", "a,b", 'a"', None, 5])
def test_a_queue_has_a_name_of_ascii_letters_digits_and_a_few_signs(queue: Any, handlers: Handlers) -> None:
    with pytest.raises((InvalidName, ConfigurationError)):
        Defaults(queue=queue)
    for good in ("a", "A-Z.a_z:0/9", "x" * 128):
        assert Defaults(queue=good).queue == good


@pytest.mark.parametrize("key", ["", "x" * 513, "é" * 257, "a\0", "\ud800", 5])
def test_a_unique_key_is_text_of_a_reasonable_size(key: Any) -> None:
    with pytest.raises((InvalidName, ConfigurationError)):
        Defaults(unique_key=key)
    assert Defaults(unique_key="é" * 256).unique_key == "é" * 256


def test_an_option_that_does_not_exist_is_a_usage_error() -> None:
    with pytest.raises(ConfigurationError, match="no option 'colour'"):
        request_by_name("k", colour="red")
    with pytest.raises(ConfigurationError, match="Did you mean priority"):
        request_by_name("k", prioritee=1)


@pytest.mark.parametrize("key", ["", "x" * 257, "a\0", "\ud800", 5, "#3"])
def test_a_child_key_is_text_of_a_reasonable_size_that_no_number_of_a_child_equals(
    key: Any, handlers: Handlers
) -> None:
    with pytest.raises((InvalidName, ConfigurationError)):
        handlers.job(name="fine")(plain).options(child_key=key)
    assert handlers.job(name="good")(plain).options(child_key="parcel-#3").defaults.child_key == "parcel-#3"


def test_a_child_key_is_for_children_alone_and_a_unique_key_is_not_for_them(handlers: Handlers) -> None:
    with pytest.raises(ConfigurationError, match="names one child"):
        cast("Any", handlers).job(child_key="k")(plain)
    handler = handlers.job(name="k")(plain)
    with pytest.raises(ConfigurationError, match="start_soon"):
        handler.options(child_key="k").request(1)
    with pytest.raises(ConfigurationError, match="start_soon"):
        request_by_name("k", child_key="k")
    with pytest.raises(UsageError, match="its child_key is its identity"):
        handler.options(unique_key="u").child_request((1,), {})
    assert handler.options(child_key="k", queue="q").child_request((1,), {}).queue == "q"
