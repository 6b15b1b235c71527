"""Schedules declared in code: what is taken, and what is refused before anything is written."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio import ConfigurationError, Handler, Handlers, InvalidName

if TYPE_CHECKING:
    from pulse_trio.handlers import Schedule


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


def only(handlers: Handlers) -> Schedule:
    (found,) = handlers.schedules
    return found


def test_cron_stands_above_job(handlers: Handlers) -> None:
    @handlers.cron("*/5 * * * *", timezone="Europe/Berlin")
    @handlers.job(queue="reports", priority=2, name="report.make")
    async def make() -> str:
        return "made"

    found = only(handlers)
    assert isinstance(make, Handler)
    assert (found.name, found.request.kind, found.request.queue, found.request.priority) == (
        "report.make", "report.make", "reports", 2,
    )  # fmt: skip
    assert (found.timing.cron, found.timing.timezone, found.catch_up) == ("*/5 * * * *", "Europe/Berlin", "last")


def test_cron_alone_registers_the_function(handlers: Handlers) -> None:
    @handlers.cron(every=timedelta(minutes=1), catch_up="all")
    async def tick() -> None: ...

    assert handlers["tick"] is tick
    assert (only(handlers).timing.every, only(handlers).catch_up) == (timedelta(minutes=1), "all")


def test_cron_below_job_is_told_where_it_belongs(handlers: Handlers) -> None:
    with pytest.raises(ConfigurationError, match=r"@handlers\.cron goes above"):

        @handlers.job(queue="q")
        @handlers.cron("@daily")
        async def tick() -> None: ...


def test_a_handler_may_have_many_schedules_by_different_names(handlers: Handlers) -> None:
    @handlers.cron("0 8 * * *", name="morning", args={"greeting": "good morning"})
    @handlers.cron("0 20 * * *", name="evening", args={"greeting": "good evening"})
    @handlers.job
    async def greet(greeting: str) -> None: ...

    assert [(s.name, s.request.args) for s in handlers.schedules] == [
        ("evening", '{"greeting":"good evening"}'),
        ("morning", '{"greeting":"good morning"}'),
    ]


def test_options_of_one_schedule_are_those_of_the_handler_it_is_declared_on(handlers: Handlers) -> None:
    @handlers.job
    async def greet() -> None: ...

    handlers.cron("@hourly")(greet.options(queue="slow", unique_key="greet"))
    assert (only(handlers).request.queue, only(handlers).request.unique_key) == ("slow", "greet")


def test_due_as_gives_the_occurrences_time_beside_the_other_arguments(handlers: Handlers) -> None:
    @handlers.cron("@daily", due_as="day", args={"size": 2**60})
    @handlers.job
    async def report(day: datetime, size: int) -> None: ...

    found = only(handlers)
    assert found.request.args == '{"size":1152921504606846976}'
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    assert report.signature.decode(found.request_at(moment).args) == ((moment, 2**60), {})


def test_an_included_registry_brings_its_schedules(handlers: Handlers) -> None:
    other = Handlers()

    @other.cron("@daily")
    @other.job
    async def report() -> None: ...

    handlers.include(other)
    assert only(handlers).name == "report"
    # And may be declared on again, now that it belongs here.
    handlers.cron("@hourly", name="more often")(report)
    assert len(handlers.schedules) == 2
    with pytest.raises(ConfigurationError, match="registered twice"):
        handlers.include(other)


async def function(n: int) -> None: ...


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"args": {"n": "one"}}, r"Schedule 'function': .*Expected `int`"),
        ({"args": {"m": 1}}, "Schedule 'function': Arguments do not fit"),
        ({}, "missing"),
        ({"args": {"n": 1}, "catch_up": "some"}, "catch_up must be one of skip, last, all, got 'some'"),
        ({"args": {"n": 1}, "due_as": "n"}, "'n' is both in args and due_as"),
        ({"args": {"n": 1}, "due_as": "when"}, "Arguments do not fit"),
        ({"due_as": "n"}, "Expected `int`"),
        ({"due_as": "not a name"}, "due_as must be the name of a parameter"),
        ({"args": {"n": 1}, "timezone": "Nowhere/Land"}, "no time zone"),
        ({"args": {"n": 1}, "every": 5}, "one of them"),
    ],
)
def test_what_does_not_fit_is_refused_at_registration(handlers: Handlers, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        handlers.cron("* * * * *", **given)(handlers.job(function))
    assert handlers.schedules == []


def test_an_unknown_option_is_told_with_those_that_there_are(handlers: Handlers) -> None:
    with pytest.raises(ConfigurationError) as refused:
        handlers.job(colour="red")(function)  # type: ignore[call-overload] # pyright: ignore
    told = str(refused.value)
    for name in (
        "name",
        "runs",
        "retry",
        "retry_on",
        "discard_on",
        "key",
        "crash_limit",
        "unique_key",
        "at",
        "timeout",
    ):
        assert f" {name}" in told
    with pytest.raises(ConfigurationError, match="Did you mean retry_on"):
        handlers.job(retry_om=ValueError)(function)  # type: ignore[call-overload] # pyright: ignore


def test_other_mistakes_are_refused_at_registration(handlers: Handlers) -> None:
    greet = handlers.job(name="greet")(lambda: None)
    handlers.cron("@daily")(greet)
    with pytest.raises(ConfigurationError, match=r"'greet' is declared twice\. Give one of them another name"):
        handlers.cron("@hourly")(greet)
    with pytest.raises(InvalidName, match="control"):
        handlers.cron("@hourly", name="a\nb")(greet)
    with pytest.raises(ConfigurationError, match=r"a moment \(at=\) is for a single job"):
        handlers.cron("@hourly", name="late")(greet.options(run_at=datetime(2030, 1, 1, tzinfo=UTC)))
    for option in ("deadline", "expires"):
        moment: Any = {option: datetime(2030, 1, 1, tzinfo=UTC)}
        with pytest.raises(ConfigurationError, match="a moment is for a single job"):
            handlers.cron("@hourly", name="late")(greet.options(**moment, tags=["deadline"]))
    with pytest.raises(ConfigurationError, match="no caller to raise to"):
        handlers.cron("@hourly", name="strict")(greet.options(unique_key="k", on_conflict="raise"))
    with pytest.raises(ConfigurationError, match="registered elsewhere"):
        Handlers().cron("@hourly")(greet)
    assert len(handlers.schedules) == 1
