"""Which parameters are given resources, and what is refused when they are declared."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from pulse_trio import (  # the clients are read at run time
    INJECTED,
    Client,
    ConfigurationError,
    Handlers,
    InvalidArguments,
    Job,
    SyncClient,
)


class Http:
    """Some client."""


class Better(Http):
    """Another."""


@dataclass
class Options:
    """JSON can carry it."""

    size: int


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


def arguments(handlers: Handlers, kind: str) -> list[str]:
    return [p.name for p in handlers[kind].signature.parameters]


@pytest.mark.parametrize("first", ["resource", "handler"])
@pytest.mark.parametrize("annotation", ["type", "subclass", "none", "optional", "any"])
def test_a_parameter_with_the_resources_name_is_no_argument(first: str, annotation: str, handlers: Handlers) -> None:
    async def http() -> AsyncIterator[Better]:
        yield Better()

    async def typed(url: str, http: Better) -> None: ...
    async def base(url: str, http: Http) -> None: ...
    async def bare(url: str, http) -> None: ...  # type: ignore[no-untyped-def]
    async def optional(url: str, http: Better | None = None) -> None: ...
    async def anything(url: str, http: Any) -> None: ...

    by_name = {"type": typed, "subclass": base, "none": bare, "optional": optional, "any": anything}
    steps = [lambda: handlers.resource(http), lambda: handlers.job(name="fetch")(by_name[annotation])]
    for step in steps if first == "resource" else steps[::-1]:
        step()
    assert arguments(handlers, "fetch") == ["url"]
    assert handlers["fetch"].request("x").args == '{"url":"x"}'
    with pytest.raises(InvalidArguments):
        handlers["fetch"].request("x", http=Better())


@pytest.mark.parametrize("kind", ["async iterator", "async generator", "wrapped", "iterator", "generator"])
def test_a_parameter_with_the_yielded_type_is_no_argument_whatever_its_name(kind: str, handlers: Handlers) -> None:
    async def a() -> AsyncIterator[Http]:
        yield Http()

    async def b() -> AsyncGenerator[Http]:
        yield Http()

    def c() -> Iterator[Http]:
        yield Http()

    def d() -> Generator[Http]:
        yield Http()

    made = {"async iterator": a, "async generator": b, "wrapped": asynccontextmanager(a), "iterator": c, "generator": d}
    handlers.resource(made[kind])

    @handlers.job
    async def fetch(job: Job, other: Http, url: str) -> None: ...

    assert arguments(handlers, "fetch") == ["url"]


@pytest.mark.parametrize("first", ["resource", "handler"])
@pytest.mark.parametrize("annotation", [str, int, dict[str, int], Options])
@pytest.mark.parametrize("yields", [None, Http])
def test_a_name_that_is_an_argument_and_a_resource_is_refused(
    first: str, annotation: Any, yields: Any, handlers: Handlers
) -> None:
    async def http():  # type: ignore[no-untyped-def]
        yield 1

    async def fetch(http: Any) -> None: ...

    fetch.__annotations__["http"] = annotation
    if yields is not None:
        http.__annotations__["return"] = AsyncIterator[Http]
    steps = [lambda: handlers.resource(http), lambda: handlers.job(fetch)]
    for step in (steps if first == "resource" else steps[::-1])[:1]:
        step()
    with pytest.raises(ConfigurationError, match=r"'fetch'.* parameter 'http' .* argument of the job.* resource"):
        (steps if first == "resource" else steps[::-1])[1]()


def test_a_common_type_is_asked_for_by_name_only(handlers: Handlers) -> None:
    @handlers.resource
    async def token() -> AsyncIterator[str]:
        yield "t"

    @handlers.job
    async def fetch(url: str, token: str) -> None: ...

    assert arguments(handlers, "fetch") == ["url"]


def test_a_type_that_two_resources_yield_is_asked_for_by_name(handlers: Handlers) -> None:
    @handlers.resource
    async def one() -> AsyncIterator[Http]:
        yield Http()

    @handlers.resource
    async def two() -> AsyncIterator[Http]:
        yield Http()

    @handlers.job
    async def fetch(two: Http) -> None: ...

    assert arguments(handlers, "fetch") == []

    async def unclear(http: Http) -> None: ...

    with pytest.raises(ConfigurationError, match="any of the resources 'one' and 'two'"):
        handlers.job(unclear)


def test_injected_marks_a_resource_that_is_declared_later_or_elsewhere(handlers: Handlers) -> None:
    @handlers.job
    async def fetch(url: str, http: Http = INJECTED, *, count: int = 1) -> None: ...

    assert arguments(handlers, "fetch") == ["url", "count"]
    assert fetch.request("x").args == '{"url":"x"}'


def test_resources_come_along_with_an_included_registry(handlers: Handlers) -> None:
    other = Handlers()

    @other.resource
    async def http() -> AsyncIterator[Http]:
        yield Http()

    @other.job
    async def fetch(url: str, client: Http) -> None: ...

    handlers.include(other)
    handlers.include(other.__class__())
    assert [resource.name for resource in handlers.resources] == ["http"]
    assert arguments(handlers, "fetch") == ["url"]
    # A registry without the resource does not make it an argument again.
    third = Handlers()
    third._add(handlers["fetch"])
    assert arguments(handlers, "fetch") == ["url"]


def test_what_is_no_generator_function_is_refused(handlers: Handlers) -> None:
    async def http() -> Http:
        return Http()

    cases: list[Any] = [http, Http, 5, lambda: None]
    for wrong in cases:
        with pytest.raises(ConfigurationError, match="not a generator function"):
            handlers.resource(wrong)


def test_a_name_is_given_once(handlers: Handlers) -> None:
    async def http():  # type: ignore[no-untyped-def]
        yield 1

    handlers.resource(http)
    with pytest.raises(ConfigurationError, match="declared twice"):
        handlers.resource(http)
    handlers.resource(name="other")(http)
    assert [resource.name for resource in handlers.resources] == ["http", "other"]


def test_a_circle_is_refused_and_names_its_resources(handlers: Handlers) -> None:
    @handlers.resource
    async def one(two):  # type: ignore[no-untyped-def]
        yield 1

    @handlers.resource
    async def two(three):  # type: ignore[no-untyped-def]
        yield 1

    async def three(one):  # type: ignore[no-untyped-def]
        yield 1

    with pytest.raises(ConfigurationError, match="circle: three -> one -> two -> three"):
        handlers.resource(three)


@pytest.mark.parametrize(
    ("runs", "handler"),
    [("asyncio", "trio"), ("asyncio", "thread"), ("trio", "asyncio"), (None, "process"), ("trio", "process")],
)
def test_a_handler_that_cannot_use_a_resource_is_refused(runs: Any, handler: Any, handlers: Handlers) -> None:
    @handlers.resource(runs=runs)
    async def http() -> AsyncIterator[Http]:
        yield Http()

    with pytest.raises(ConfigurationError, match=r"'at_top' has runs='\w+'"):
        handlers.job(name="at_top", runs=handler)(at_top if handler in ("thread", "process") else at_top_async)


def at_top(http: Http) -> None: ...


async def at_top_async(http: Http) -> None: ...


@pytest.mark.parametrize(("runs", "plain"), [("thread", False), ("trio", True), ("asyncio", True), ("process", False)])
def test_a_resource_that_cannot_run_so_is_refused(runs: Any, plain: bool, handlers: Handlers) -> None:
    async def one():  # type: ignore[no-untyped-def]
        yield 1

    def two():  # type: ignore[no-untyped-def]
        yield 1

    with pytest.raises(ConfigurationError, match=f"runs={runs!r}"):
        handlers.resource(runs=runs)(two if plain else one)


def test_a_client_is_no_argument_and_fits_its_handler(handlers: Handlers) -> None:
    @handlers.job
    async def one(n: int, client: Client) -> None: ...

    @handlers.job
    def two(n: int, db: SyncClient) -> None: ...

    assert arguments(handlers, "one") == arguments(handlers, "two") == ["n"]
    with pytest.raises(ConfigurationError, match="annotate the parameter 'client' with SyncClient"):

        @handlers.job
        def three(client: Client) -> None: ...

    with pytest.raises(ConfigurationError, match="annotate the parameter 'client' with Client"):

        @handlers.job
        async def four(client: SyncClient) -> None: ...
