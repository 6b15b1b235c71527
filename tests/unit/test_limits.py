"""Limits and keys as users write them: what they become on the row, and what is refused before anything is written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio import ConfigurationError, Handlers, InvalidArguments, InvalidName
from pulse_trio.client import request_by_name
from pulse_trio.handlers import QueueLimits, Rate, parse_rate

if TYPE_CHECKING:
    import inspect


@pytest.mark.parametrize(
    ("text", "rate"),
    [("10/s", (10, 1)), ("100/m", (100, 60)), ("1000/h", (1000, 3600)), ("5/d", (5, 86400)), (" 2 / 30s ", (2, 30)),
     ("1/minute", (1, 60)), ("3/2hour", (3, 7200))],
)  # fmt: skip
def test_a_rate_is_a_count_and_a_time(text: str, rate: tuple[int, float]) -> None:
    assert parse_rate(text) == Rate(*rate)


@pytest.mark.parametrize(
    "text", ["", "10", "0/s", "10/0s", "-1/s", "1.5/s", "10/w", "10 per s", None, 10, "9999999999/s"]
)
def test_what_is_no_rate_is_refused(text: Any) -> None:
    with pytest.raises(ConfigurationError, match="rate must look like"):
        parse_rate(text)


def test_a_handlers_limit_counts_its_kind_and_stands_on_the_row() -> None:
    handlers = Handlers()

    @handlers.job(limit=3, rate="10/m", timeout=5)
    async def send() -> None: ...

    request = send.request()
    assert request.key == "send"
    assert json.loads(request.options or "") == {"timeout": 5, "limit": 3, "rate": [10, 60.0]}


def test_a_key_is_made_of_some_arguments_defaults_included_with_the_kind_before_it() -> None:
    handlers = Handlers()

    @handlers.job(key=lambda tenant, region: f"{tenant}/{region}", limit=1)
    async def send(text: str, tenant: int, *, region: str = "eu") -> None: ...

    assert send.request("hi", 7).key == "send:7/eu"
    assert send.request("hi", tenant=7, region="us").key == "send:7/us"
    assert send.request_by_name({"text": "hi", "tenant": 8}).key == "send:8/eu"


def test_a_key_that_is_text_is_shared_as_it_is() -> None:
    handlers = Handlers()

    @handlers.job(key="github", rate="10/s")
    async def fetch() -> None: ...

    @handlers.job(key=lambda user: user)
    async def push(user: int) -> None: ...

    assert fetch.request().key == "github"
    assert push.options(key="github", limit=2).request(1).key == "github"
    assert request_by_name("other", key="github").key == "github"


def test_a_job_without_limits_has_no_key() -> None:
    assert request_by_name("noop").key is None


@pytest.mark.parametrize("key", [None, True, 1.5, "", "x" * 600, "a\nb"])
def test_a_key_that_cannot_be_one_is_refused_before_anything_is_written(key: Any) -> None:
    handlers = Handlers()

    @handlers.job(key=lambda: key)
    async def send() -> None: ...

    if key == "":
        assert send.request().key == "send:"
        return
    with pytest.raises(InvalidArguments, match="The key of 'send'"):
        send.request()


def test_a_key_that_fails_says_why() -> None:
    handlers = Handlers()

    @handlers.job(key=lambda user: 1 // user)
    async def send(user: int) -> None: ...

    with pytest.raises(InvalidArguments, match="could not be computed: ZeroDivisionError"):
        send.request(0)


def test_a_key_of_strange_parameters_is_refused_at_registration() -> None:
    handlers = Handlers()
    keys: list[Any] = [lambda who: who, lambda *user: user, lambda user, **more: user]
    for key in keys:
        with pytest.raises(ConfigurationError, match=r"must be some of the handler's own \(user\)"):
            handlers.job(name="send", key=key)(_send)


class _KeyOfLater:
    """As a function on Python 3.14 whose annotation is imported for type checkers only: its signature raises."""

    def __call__(self, user: int) -> int:
        return user

    @property
    def __signature__(self) -> inspect.Signature:
        raise NameError("name 'Tenant' is not defined")


def test_a_key_whose_annotations_cannot_be_read_is_refused_at_registration() -> None:
    with pytest.raises(ConfigurationError, match="annotations of the key of 'send' cannot be read: name 'Tenant'"):
        Handlers().job(name="send", key=_KeyOfLater())(_send)


async def _send(user: int) -> None: ...


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "3", 2**31])
def test_a_limit_is_a_positive_whole_number(limit: Any) -> None:
    handlers = Handlers()
    with pytest.raises(ConfigurationError, match="limit must be a whole number from 1 to 2,147,483,647"):
        handlers.job(limit=limit)(_send)
    with pytest.raises(ConfigurationError, match="limit must be a whole number from 1 to 2,147,483,647"):
        handlers.queue("mail", limit=limit)


def test_a_registry_holds_the_limits_of_its_queues_and_takes_in_anothers() -> None:
    first, second = Handlers(), Handlers()
    first.queue("mail", limit=3, key_rate="10/s")
    second.queue("mail", limit=3, key_rate="10/s")
    second.queue("slow", rate="1/m")
    first.include(second)
    assert first.queue_limits == [
        QueueLimits("mail", 3, None, None, Rate(10, 1.0)),
        QueueLimits("slow", rate=Rate(1, 60.0)),
    ]
    with pytest.raises(ConfigurationError, match="two different limits"):
        first.queue("mail", limit=4)
    with pytest.raises(ConfigurationError, match="give limit, rate, key_limit, key_rate, retention or lease"):
        first.queue("empty")
    with pytest.raises(InvalidName):
        first.queue("no spaces", limit=1)
