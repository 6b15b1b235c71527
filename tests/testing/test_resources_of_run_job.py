"""Resources and the worker's client in `run_job`: what is opened, what a test may give, what is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable  # noqa: TC003 -- the registry reads the annotations
from typing import Any

import pytest

from pulse_trio import INJECTED, Client, ConfigurationError, Handlers, Job, SyncClient
from pulse_trio.errors import ResourceFailed
from pulse_trio.testing import run_job, run_job_sync

handlers = Handlers()
opened: list[str] = []


class Mailer:
    """What a resource yields."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture(autouse=True)
def _nothing_is_open() -> None:
    opened.clear()


@handlers.resource
async def database() -> AsyncIterator[str]:
    opened.append("database")
    raise OSError("no database here")
    yield ""


@handlers.resource
async def clock() -> AsyncIterator[str]:
    opened.append("clock")
    yield "noon"


@handlers.resource
async def settings() -> AsyncIterator[str]:
    opened.append("settings")
    yield "what is set up for all, and nobody asks for"


@handlers.resource
async def mailer(database: str) -> AsyncIterator[Mailer]:
    opened.append("mailer")
    yield Mailer(database)


@handlers.middleware
async def timed(job: Job, call: Callable[[], Awaitable[Any]], clock: str) -> Any:
    value = await call()
    return f"{value} at {clock}" if job.kind == "told" else value


@handlers.job
async def told() -> str:
    return "told"


@handlers.job
async def mail(to: str, mailer: Mailer = INJECTED) -> str:
    return f"{to} by {mailer.name}"


@handlers.job
async def invoice(n: int) -> int:
    return n


@handlers.job
async def order(n: int, client: Client = INJECTED) -> int:
    first = await client.enqueue(invoice, n)
    rest = await client.using(object()).enqueue_many(invoice.request(n + i) for i in (1, 2))
    await client.enqueue("invoice", {"n": 0}, delay=60)
    return len({first.id, *(ref.id for ref in rest)})


@handlers.job(runs="asyncio")
async def order_on_asyncio(n: int, client: Client = INJECTED) -> int:
    return await order.function(n, client)


@handlers.job
def order_in_a_thread(n: int, client: SyncClient = INJECTED) -> int:
    first = client.enqueue(invoice, n)
    rest = client.using(object()).enqueue_many(invoice.request(n + i) for i in (1, 2))
    client.enqueue("invoice", {"n": 0}, delay=60)
    return len({first.id, *(one.id for one in rest)})


ENQUEUED = [*(invoice.request(n) for n in (3, 4, 5)), invoice.options(delay=60).request(0)]


@pytest.mark.trio
async def test_a_resource_that_cannot_be_opened_is_told_with_its_error() -> None:
    with pytest.raises(ResourceFailed, match=r"'database'.*no database here") as caught:
        await run_job(mail, "ada", handlers=handlers)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.trio
async def test_what_only_other_handlers_ask_for_is_not_opened() -> None:
    assert (await run_job(told, handlers=handlers)).result == "told at noon"
    assert sorted(opened) == ["clock", "settings"]


@pytest.mark.trio
async def test_a_test_gives_what_it_likes_in_the_place_of_a_resource() -> None:
    fakes: list[dict[Any, Any]] = [{"mailer": Mailer("a fake")}, {Mailer: Mailer("a fake")}]
    for fake in fakes:
        run = await run_job(mail, "ada", handlers=handlers, resources=fake)
        assert run.result == "ada by a fake"
        # Without its registry too.
        assert (await run_job(mail, "ada", resources=fake)).result == "ada by a fake"
    assert set(opened) == {"clock", "settings"}
    # What a resource needs may be given too, and what a middleware asks for.
    run = await run_job(mail, "ada", handlers=handlers, resources={"database": "a fake one"})
    assert run.result == "ada by a fake one"
    assert (await run_job(told, handlers=handlers, resources={"clock": "dawn"})).result == "told at dawn"


@pytest.mark.trio
async def test_a_value_that_nothing_asks_for_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"There is no resource 'mailr'\. Did you mean mailer"):
        await run_job(mail, "ada", handlers=handlers, resources={"mailr": Mailer("a fake")})


@pytest.mark.trio
@pytest.mark.parametrize("registry", [None, handlers])
@pytest.mark.parametrize("handler", [order, order_on_asyncio, order_in_a_thread])
async def test_what_is_enqueued_with_the_workers_client_is_told(handler: Any, registry: Handlers | None) -> None:
    known = registry or Handlers()
    run = await run_job(handler, 3, handlers=registry)
    if registry is None:
        # Enqueuing by name needs the registry, as in production.
        assert run.outcome == "failed"
        assert "No handler is registered as 'invoice'" in (run.error or "")
        assert run.enqueued == ENQUEUED[:3]
        return
    assert len(known) > 1
    assert (run.result, run.enqueued) == (3, ENQUEUED)


def test_it_is_told_without_a_loop_too() -> None:
    assert run_job_sync(order, 3, handlers=handlers).enqueued == ENQUEUED


@pytest.mark.trio
async def test_a_test_gives_a_client_of_its_own() -> None:
    class Failing(Client):
        def __init__(self) -> None: ...

        async def enqueue(self, handler: Any, /, *args: Any, **kwargs: Any) -> Any:
            raise ConnectionError("the database is away")

    run = await run_job(order, 3, handlers=handlers, resources={Client: Failing()})
    assert (run.outcome, run.enqueued) == ("failed", [])
    assert isinstance(run.exception, ConnectionError)


@pytest.mark.trio
async def test_what_needs_a_database_says_so() -> None:
    async def looks(client: Client = INJECTED) -> None:
        await (await client.enqueue(invoice, 1)).wait()

    async def lists(client: Client = INJECTED) -> None:
        await client.jobs()

    def counts(client: SyncClient = INJECTED) -> None:
        client.jobs()

    for handler in (looks, lists, counts):
        run = await run_job(handler)
        assert run.outcome == "failed"
        assert "There is no database here" in (run.error or "")


@pytest.mark.trio
async def test_a_childs_jobs_are_told_too() -> None:
    async def parent(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(order, 3)

    registry = Handlers()
    registry.include(handlers)
    durable = registry.job(durable=True)(parent)
    assert (await run_job(durable, handlers=registry)).enqueued == ENQUEUED
