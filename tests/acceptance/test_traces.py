"""OpenTelemetry: what a request causes is one trace, as a receiver of its protocol gets it."""

from __future__ import annotations

import importlib
import json
import signal
import sys
import threading
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import httpx
import psycopg
import pytest
import trio
from fastapi import FastAPI, Request
from opentelemetry import context, trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

from pulse_trio import Client, Handlers, Job, RetryAfter, SyncClient, Worker, open_client
from pulse_trio.observe import JobEnded
from pulse_trio.otel import OpenTelemetry
from pulse_trio.postgres import TrioConnection
from support import traces_app
from support.embedded_workers import working
from support.otlp import CONSUMER, PRODUCER, Received, Receiver, open_provider, open_receiver
from support.workers import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from pulse_trio.testing.faults.processes import Processes


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Tracing:
    """A receiver, and an SDK that sends to it. `received` sends what is still to be sent, and gives all."""

    def __init__(self, receiver: Receiver, provider: TracerProvider) -> None:
        self._receiver = receiver
        self.endpoint = receiver.endpoint
        self.provider = provider
        self.tracer = provider.get_tracer("test")

    def instrument(self) -> OpenTelemetry:
        return OpenTelemetry(self.provider)

    async def received(self) -> Receiver:
        assert await anyio.to_thread.run_sync(self.provider.force_flush)
        return self._receiver


@pytest.fixture
def tracing() -> Generator[Tracing]:
    with open_receiver() as receiver, open_provider(receiver) as provider:
        yield Tracing(receiver, provider)


async def test_from_an_http_request_to_the_last_span_of_every_kind_of_handler_is_one_trace(
    dsn: str, tracing: Tracing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", tracing.endpoint)
    handlers = Handlers(instruments=[tracing.instrument()])
    handlers.include(traces_app.handlers)
    span = tracing.tracer.start_as_current_span

    @handlers.job(backoff_base=0.01, backoff_cap=0.01)
    async def ship(job: Job, order: int) -> int:
        if job.attempt == 1:
            raise ValueError("the first attempt")
        async with open_client(dsn, handlers=handlers) as client:
            await client.enqueue(in_thread)
            await client.enqueue(in_asyncio)
            await client.enqueue(traces_app.in_process)

        async def child() -> None:
            with span("in the nursery"):
                await trio.lowlevel.checkpoint()

        job.nursery.start_soon(child)
        async with job.transaction(result=order) as tx:
            with span("in the transaction"):
                await tx.execute("SELECT 1")
        return order

    @handlers.job(runs="thread")
    def in_thread() -> None:
        with span("in the thread"):
            SyncClient(dsn, handlers=handlers).enqueue("in_trio")

    @handlers.job(runs="asyncio")
    async def in_asyncio() -> None:
        with span("in asyncio"):
            pass

    @handlers.job
    async def in_trio() -> None:
        with span("the last"):
            pass

    async with open_client(dsn, handlers=handlers) as client:
        app = FastAPI()

        @app.post("/orders/{order}")
        async def take(order: int, request: Request) -> int:
            with span("POST /orders", kind=SpanKind.SERVER):
                return (await client.enqueue(ship, order)).id

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as browser:
            job_id = (await browser.post("/orders/7")).json()

        async with working(handlers, dsn) as heard:
            for kind in ("ship", "in_thread", "in_asyncio", "in_process", "in_trio"):
                await heard.until(JobEnded, kind=kind, outcome="completed")
        assert await client.job(job_id) is not None

    received = await tracing.received()
    request = received.one("POST /orders")
    assert {one.trace for one in received.spans} == {request.trace}

    def chain(*names: str) -> list[Received]:
        """These spans, each the parent of the next."""
        found = [request]
        for name in names:
            (child,) = [one for one in received.named(name) if one.parent == found[-1].id]
            found.append(child)
        return found

    enqueued = chain("enqueue ship")[-1]
    first, second = received.named("run ship")
    assert first.parent == second.parent == enqueued.id
    assert (enqueued.kind, first.kind) == (PRODUCER, CONSUMER)
    for attempt, (one, outcome) in enumerate([(first, "failed"), (second, "completed")], start=1):
        assert one.attributes == {
            "messaging.system": "pulse_trio",
            "messaging.operation.name": "run",
            "messaging.operation.type": "process",
            "messaging.destination.name": "default",
            "messaging.message.id": str(job_id),
            "messaging.pulse_trio.kind": "ship",
            "messaging.pulse_trio.attempt": attempt,
            "messaging.pulse_trio.outcome": outcome,
        } | ({"error.type": "ValueError"} if one.failed else {})
        assert one.failed == (outcome == "failed")
    ((name, said),) = first.events
    assert (name, said["exception.type"], said["exception.message"]) == ("exception", "ValueError", "the first attempt")
    assert "raise ValueError" in said["exception.stacktrace"]
    assert first.links == []
    assert second.links == [(first.id, {"messaging.pulse_trio.link": "previous attempt"})]

    def below(*names: str) -> None:
        at = second
        for name in names:
            (at,) = [one for one in received.named(name) if one.parent == at.id]

    below("in the nursery")
    below("transaction ship", "in the transaction")
    below("enqueue in_thread", "run in_thread", "in the thread", "enqueue in_trio", "run in_trio", "the last")
    below("enqueue in_asyncio", "run in_asyncio", "in asyncio")
    below("enqueue in_process", "run in_process", "in the process")
    assert received.schemas >= {"https://opentelemetry.io/schemas/1.44.0"}


async def test_every_client_passes_the_trace_on(dsn: str, tracing: Tracing) -> None:
    handlers = Handlers(instruments=[tracing.instrument()])

    @handlers.job
    async def add(n: int) -> int:
        return n

    @handlers.job
    async def after() -> None:
        pass

    def sync() -> None:
        client = SyncClient(dsn, handlers=handlers)
        client.enqueue(add, 1)
        client.enqueue_many([add.request(n) for n in range(2)])
        client.enqueue_many([add.request(n) for n in range(2)], chunk=1)
        with client.batch(on_complete=after.request()) as batch:
            batch.enqueue(add, 1)
            batch.enqueue_many(add.request(n) for n in range(2))

    with tracing.tracer.start_as_current_span("all of it") as root:
        async with open_client(dsn, handlers=handlers) as client:
            await client.enqueue(add, 1)
            await client.enqueue("add", {"n": 1})
            await client.enqueue(add.options(unique_key="one", deadline=60), 1)
            await client.enqueue_many(add.request(n) for n in range(20))
            await client.enqueue_many(add.options(unique_key=str(n)).request(n) for n in range(3))
            await client.enqueue_many((add.request(n) for n in range(4)), chunk=2)
            async with client.batch(on_complete=after.request()) as batch:
                await batch.enqueue(add, 1)
                await batch.enqueue_many(add.request(n) for n in range(2))
            async with await TrioConnection.connect(dsn) as connection, connection.transaction():
                await client.using(connection).enqueue(add, 1)
            await trio.to_thread.run_sync(sync)
        async with working(handlers, dsn) as heard:
            await heard.until(JobEnded, kind="after")
        await Worker(handlers, dsn, burst=True).run()
        trace_id = f"{root.get_span_context().trace_id:032x}"

    received = await tracing.received()
    assert {span.trace for span in received.spans} == {trace_id}
    enqueues = {span.id: span for span in received.named("enqueue add")}
    assert all(span.parent in enqueues for span in received.named("run add"))
    assert len(received.named("run add")) == 3 + 20 + 3 + 4 + 3 + 1 + 5 + 3
    counts = sorted(span.attributes.get("messaging.batch.message_count", 1) for span in enqueues.values())
    assert counts == [1] * 7 + [2] * 4 + [3, 4, 20]
    assert {span.trace for span in received.named("run after")} == {trace_id}


NO_PARENTS = [
    "garbage",
    "",
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
    "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
    PARENT + "-more",
    PARENT + "\n",
    "00-" + "0" * 10_000,
    "\u0660" * 55,
    '00-{"a":1}-[[[[[[[[[[-01',
]
IGNORED_PARENTS = ["00-" + "0" * 32 + "-b7ad6b7169203331-01", "ff" + PARENT[2:], PARENT[:36] + "0" * 16 + "-01"]
NO_OPTIONS_OF_OURS = [
    {"trace": 5},
    {"trace": None},
    {"trace": {"trace": PARENT}},
    {"trace": [PARENT]},
    {"trace": "x" * 3000},
    {"trace": PARENT, "tracestate": 7},
    {"trace": PARENT, "tracestate": "no state"},
    {"trace": PARENT, "tracestate": ",=,=" * 400},
    {"trace": PARENT, "tracestate": '\x7f\u00e9"[{'},
    {"tracestate": "a=1"},
]


async def test_a_traceparent_from_sql_is_the_jobs_parent_and_what_is_none_harms_no_job(
    dsn: str, tracing: Tracing
) -> None:
    handlers = Handlers(instruments=[tracing.instrument()])

    @handlers.job
    async def greet(name: str) -> str:
        return name

    with psycopg.connect(dsn, autocommit=True) as sql:

        def enqueue(*trace: str) -> int:
            names = "".join((", traceparent => %s", ", tracestate => %s")[: len(trace)])
            query = f"SELECT pulse.enqueue('greet', '{{\"name\": \"Ada\"}}'{names})"
            found = sql.execute(query.encode(), trace).fetchone()
            assert found is not None
            return found[0]

        good = enqueue(PARENT, "vendor=1,other=a b")
        long = enqueue(PARENT, "a=" + "b" * 511)
        unusual = enqueue(PARENT, 'a="[{\\u0000')
        refused = [enqueue(parent) for parent in NO_PARENTS]
        ignored = [enqueue(parent) for parent in IGNORED_PARENTS]
        stored = dict(sql.execute("SELECT id, options::text FROM pulse.job").fetchall())
        assert {stored[id_] for id_ in refused} == {None}
        assert PARENT in stored[good]
        assert "vendor=1" in stored[good]
        assert "tracestate" not in stored[long] + stored[unusual]
        # The owner of the tables may write any options.
        written = []
        for options in NO_OPTIONS_OF_OURS:
            written.append(enqueue())
            query = "UPDATE pulse.job SET options = %s::json WHERE id = %s"
            sql.execute(query, [json.dumps(options), written[-1]])
        with pytest.raises(psycopg.errors.UndefinedFunction):
            sql.execute("SELECT pulse.enqueue('greet', traceparent => 5)")

    await Worker(handlers, dsn, burst=True).run()

    with psycopg.connect(dsn) as sql:
        assert sql.execute("SELECT DISTINCT state FROM pulse.jobs").fetchall() == [("completed",)]
    received = await tracing.received()
    spans = {int(span.attributes["messaging.message.id"]): span for span in received.named("run greet")}
    assert len(spans) == len(received.spans)
    belong = {good, long, unusual, *written[5:9]}
    assert {id_ for id_, span in spans.items() if span.parent == PARENT[36:52] and span.trace == PARENT[3:35]} == belong
    roots = [span for id_, span in spans.items() if id_ not in belong]
    assert {span.parent for span in roots} == {""}
    assert len({span.trace for span in roots}) == len(roots) == len([*refused, *ignored, *written]) - 4


@pytest.mark.parametrize(
    "options",
    [
        {"trace": "garbage"},
        {"trace": 5},
        {"trace": PARENT.upper()},
        {"trace": PARENT, "tracestate": "a" * 513},
        {"trace": PARENT, "tracestate": 'a="'},
        {"trace": PARENT, "tracestate": None},
        {"trace": {"trace": PARENT}},
    ],
)
def test_a_client_that_writes_another_trace_than_w3cs_is_refused_and_told_which_option(
    dsn: str, options: dict[str, object]
) -> None:
    wrong = list(options)[-1]
    with (
        psycopg.connect(dsn) as sql,
        pytest.raises(psycopg.errors.InvalidParameterValue, match=f"the option {wrong} cannot"),
    ):
        sql.execute("SELECT pulse.check_options(%s::json)", [json.dumps(options)])


async def test_no_job_meets_the_span_of_another(dsn: str, tracing: Tracing) -> None:
    handlers = Handlers(instruments=[tracing.instrument()])
    current: list[tuple[int, int]] = []

    @handlers.job
    async def leaves_a_span_open(job: Job) -> None:
        current.append((job.id, trace.get_current_span().get_span_context().span_id))
        context.attach(trace.set_span_in_context(tracing.tracer.start_span("left open")))

    client = SyncClient(dsn)
    with tracing.tracer.start_as_current_span("around the worker"):
        client.enqueue_many(leaves_a_span_open.request() for _ in range(100))
        await Worker(handlers, dsn, burst=True).run()
    received = await tracing.received()
    spans = received.named("run leaves_a_span_open")
    assert len({span.trace for span in spans}) == 100
    assert {span.parent for span in spans} == {""}
    assert {(int(span.attributes["messaging.message.id"]), int(span.id, 16)) for span in spans} == set(current)


async def test_a_retry_links_to_the_attempt_before_whichever_worker_ran_it(dsn: str, tracing: Tracing) -> None:
    handlers = Handlers(instruments=[tracing.instrument()])

    @handlers.job(max_attempts=3)
    async def fails(job: Job) -> None:
        if job.attempt < 4:
            raise RetryAfter(1000)

    @handlers.job(durable=True)
    async def waits(job: Job) -> str:
        return await job.wait_for_event("go", type=str)

    client = SyncClient(dsn, handlers=handlers)
    retried, parked = client.enqueue(fails), client.enqueue(waits)
    with psycopg.connect(dsn, autocommit=True) as sql:
        untraced, odd = (SyncClient(dsn).enqueue(fails).id for _ in range(2))
        sql.execute("""UPDATE pulse.job SET options = '{"timeout": 60, "x": "\\u0000"}' WHERE id = %s""", [odd])
        for _ in range(3):  # each worker knows only what stands in the database
            await Worker(handlers, dsn, burst=True).run()
            sql.execute("UPDATE pulse.job SET run_at = now() WHERE kind = 'fails'")
        client.send_event(parked.id, "go", "gone")
        client.retry(retried.id)
        await Worker(handlers, dsn, burst=True).run()
        assert sql.execute("SELECT state FROM pulse.jobs WHERE id = %s", [retried.id]).fetchall() == [("completed",)]

    received = await tracing.received()
    attempts: dict[int, list[Received]] = {}
    for one in [*received.named("run fails"), *received.named("run waits")]:
        attempts.setdefault(int(one.attributes["messaging.message.id"]), []).append(one)
    assert {job: len(spans) for job, spans in attempts.items()} == {retried.id: 4, parked.id: 2, untraced: 3, odd: 3}
    for job, spans in attempts.items():
        before = ["", *(one.id for one in spans)]
        for span, earlier in zip(spans, before, strict=False):
            wanted = [] if not earlier or job == odd else [(earlier, {"messaging.pulse_trio.link": "previous attempt"})]
            assert span.links == wanted, (job, span)


async def test_the_children_of_a_durable_job_belong_to_the_span_that_started_them(dsn: str, tracing: Tracing) -> None:
    handlers = Handlers(instruments=[tracing.instrument()])

    @handlers.job
    async def child(n: int) -> int:
        return n

    @handlers.job(durable=True)
    async def parent(job: Job) -> int:
        async with job.durable_nursery() as nursery:
            with tracing.tracer.start_as_current_span("in the parent"):
                nursery.start_soon(child, 1)
        return 1

    SyncClient(dsn, handlers=handlers).enqueue(parent)
    for _ in range(4):
        await Worker(handlers, dsn, burst=True).run()
    received = await tracing.received()
    inner = received.named("in the parent")[0]
    assert received.one("run child").parent == inner.id
    assert {span.trace for span in received.spans} == {received.one("enqueue parent").trace}


async def test_a_deaths_hook_and_a_retry_by_hand_stay_in_the_trace(dsn: str, tracing: Tracing) -> None:
    handlers = Handlers(instruments=[tracing.instrument()])

    @handlers.job
    async def tell() -> None:
        pass

    @handlers.job(max_attempts=1, on_death=tell)
    async def fails(job: Job) -> None:
        if job.attempt == 1:
            raise ValueError("once")

    client = SyncClient(dsn, handlers=handlers)
    with tracing.tracer.start_as_current_span("the cause") as cause:
        job = client.enqueue(fails)
    await Worker(handlers, dsn, burst=True).run()
    client.retry(job.id)
    await Worker(handlers, dsn, burst=True).run()
    received = await tracing.received()
    enqueued = received.one("enqueue fails")
    assert [span.parent for span in [*received.named("run fails"), received.one("run tell")]] == [enqueued.id] * 3
    assert {span.trace for span in received.spans} == {f"{cause.get_span_context().trace_id:032x}"}


@pytest.mark.anyio
async def test_requests_at_once_keep_their_traces_apart_on_both_loops(
    dsn: str, tracing: Tracing, anyio_backend: str
) -> None:
    async def request(client: Client, n: int) -> None:
        with tracing.tracer.start_as_current_span(f"request {n}"):
            await client.enqueue("greet", {"n": n})

    async with open_client(dsn, instruments=[tracing.instrument()]) as client, anyio.create_task_group() as group:
        for n in range(20):
            group.start_soon(request, client, n)
    with psycopg.connect(dsn) as sql:
        stored = dict(sql.execute("SELECT args->>'n', options->>'trace' FROM pulse.job").fetchall())
    received = await tracing.received()
    enqueued = {span.parent: span for span in received.named("enqueue greet")}
    for n in range(20):
        span = enqueued[received.one(f"request {n}").id]
        assert stored[str(n)] == f"00-{span.trace}-{span.id}-01"
    assert len({span.trace for span in enqueued.values()}) == 20


async def test_a_middlewares_span_lies_between_that_of_the_attempt_and_those_of_the_handler(
    dsn: str, tracing: Tracing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", tracing.endpoint)
    handlers = Handlers(instruments=[tracing.instrument()])
    handlers.include(traces_app.handlers)

    @handlers.middleware
    async def timed(job: Job, call: Callable[[], Awaitable[object]]) -> object:
        with tracing.tracer.start_as_current_span(f"around {job.kind}"):
            return await call()

    @handlers.job(runs="thread")
    def in_thread() -> None:
        tracing.tracer.start_span("in in_thread").end()

    SyncClient(dsn).enqueue(in_thread)
    SyncClient(dsn).enqueue(traces_app.in_process)
    await Worker(handlers, dsn, burst=True).run()
    received = await tracing.received()
    for kind, inner in [("in_thread", "in in_thread"), ("in_process", "in the process")]:
        around = received.one(f"around {kind}")
        assert around.parent == received.one(f"run {kind}").id
        assert received.one(inner).parent == around.id


async def test_what_a_handler_enqueues_with_the_workers_client_belongs_to_its_trace(dsn: str, tracing: Tracing) -> None:
    handlers = Handlers()

    @handlers.job
    async def on_trio(client: Client) -> None:
        await client.enqueue("in_thread")

    @handlers.job(runs="thread")
    def in_thread(client: SyncClient) -> None:
        client.enqueue(last)

    @handlers.job
    async def last() -> None:
        pass

    with psycopg.connect(dsn, autocommit=True) as sql:
        sql.execute("SELECT pulse.enqueue('on_trio', traceparent => %s)", [PARENT])
    async with working(handlers, dsn, tracing.instrument()) as heard:
        await heard.until(JobEnded, kind="last")
    received = await tracing.received()
    names = ["run on_trio", "enqueue in_thread", "run in_thread", "enqueue last", "run last"]
    spans = [received.one(name) for name in names]
    assert [span.parent for span in spans] == [PARENT[36:52], *(span.id for span in spans[:-1])]
    assert {span.trace for span in spans} == {PARENT[3:35]}


async def test_a_schedules_job_is_the_root_of_its_trace(dsn: str, tracing: Tracing) -> None:
    handlers = Handlers(instruments=[tracing.instrument()])

    @handlers.job
    async def nightly() -> None:
        pass

    with tracing.tracer.start_as_current_span("who made the schedule"):
        async with open_client(dsn, handlers=handlers) as client:
            await client.schedule("night", nightly, every=1)
    async with working(handlers, dsn) as heard:
        await heard.until(JobEnded)
    received = await tracing.received()
    assert {span.parent for span in received.named("run nightly")} == {""}


class Failing(SpanProcessor):
    """Fails at each span that it is shown."""

    def on_start(self, span: object, parent_context: object = None) -> None:
        raise RuntimeError("no span begins")


class FailingAtTheEnd(SpanProcessor):
    def on_end(self, span: object) -> None:
        raise RuntimeError("no span ends")


@pytest.mark.parametrize("failing", [Failing, FailingAtTheEnd])
async def test_an_instrument_that_fails_is_reported_once_and_costs_no_job(
    dsn: str, failing: type[SpanProcessor], caplog: pytest.LogCaptureFixture
) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(failing())
    handlers = Handlers(instruments=[OpenTelemetry(provider)])

    @handlers.job(max_attempts=2, backoff_base=0.001, backoff_cap=0.001)
    async def transfer(job: Job) -> None:
        if job.attempt == 1:
            raise ValueError("the first attempt")
        async with job.transaction():
            pass

    client = SyncClient(dsn)
    client.enqueue_many(transfer.request() for _ in range(20))
    await Worker(handlers, dsn, burst=True).run()
    async with working(handlers, dsn) as heard:
        for _ in range(2):
            client.enqueue(transfer)
        await heard.until(JobEnded, job_id=client.enqueue(transfer).id, outcome="completed")
    with psycopg.connect(dsn) as sql:
        assert sql.execute("SELECT DISTINCT state FROM pulse.jobs WHERE id <= 20").fetchall() == [("completed",)]
    said = [record for record in caplog.records if "the instrument Spans failed" in record.getMessage()]
    assert len(said) == 2, "once for each worker"
    assert "RuntimeError: no span" in (said[0].exc_text or "")


class Blocked(SpanExporter):
    """Does not return until it is let go; raises then."""

    def __init__(self) -> None:
        self.called, self.go = threading.Event(), threading.Event()

    def export(self, spans: object) -> SpanExportResult:
        self.called.set()
        self.go.wait(40)
        raise RuntimeError("the receiver is away")


async def test_an_exporter_that_blocks_or_raises_keeps_no_job_waiting(dsn: str) -> None:
    exporter, provider = Blocked(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(exporter, schedule_delay_millis=1, max_queue_size=10, max_export_batch_size=5)
    )
    handlers = Handlers(instruments=[OpenTelemetry(provider)])

    @handlers.job
    async def greet() -> None:
        await trio.to_thread.run_sync(exporter.called.wait, 40) if first() else None

    ids = iter(range(1000))

    def first() -> bool:
        return next(ids) == 500

    SyncClient(dsn).enqueue_many(greet.request() for _ in range(1000))
    report = await Worker(handlers, dsn, burst=True).run()
    assert report.ended == {"completed": 1000}
    assert exporter.called.is_set()
    assert not exporter.go.is_set()
    exporter.go.set()
    await trio.to_thread.run_sync(provider.shutdown)


APP = """
import os

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from pulse_trio import Handlers

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
handlers = Handlers({instruments})


@handlers.job
async def greet() -> None:
    with trace.get_tracer("app").start_as_current_span("in the handler"):
        pass


@handlers.job(runs="process")
def compute() -> None:
    with trace.get_tracer("app").start_as_current_span("in the process"):
        pass
"""


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ("", ["--instrument=pulse_trio.otel:OpenTelemetry"]),
        ("instruments=[__import__('pulse_trio.otel').otel.OpenTelemetry()]", []),
        ("", ["--instrument=pulse_trio.otel:OpenTelemetry", "--processes=2"]),
    ],
    ids=["option", "handlers", "several processes"],
)
async def test_a_worker_of_the_command_line_sends_its_spans_and_those_of_its_child_processes(
    dsn: str, tracing: Tracing, processes: Processes, given: str, more: list[str]
) -> None:
    (processes.folder / "app.py").write_text(APP.replace("{instruments}", given))
    with psycopg.connect(dsn, autocommit=True) as sql:
        for kind in ("greet", "compute"):
            sql.execute("SELECT pulse.enqueue(%s, traceparent => %s)", [kind, PARENT])
    start = processes.pulse_trio if more else processes.command
    worker = await start(
        "run", "app:handlers", f"--dsn={dsn}", "--poll=1", *more,
        env={"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": tracing.endpoint},
    )  # fmt: skip
    await until(dsn, "SELECT FROM pulse.jobs WHERE finished_at IS NOT NULL HAVING count(*) = 2")
    worker.process.send_signal(signal.SIGTERM)
    assert await worker.ended() == 0, worker.report()
    received = await tracing.received()
    for kind, inner in [("greet", "in the handler"), ("compute", "in the process")]:
        run = received.one(f"run {kind}")
        assert (run.trace, run.parent) == (PARENT[3:35], PARENT[36:52])
        assert received.one(inner).parent == run.id
    assert len(received.spans) == 4


def test_without_the_package_the_import_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "pulse_trio.otel")
    with pytest.raises(ImportError, match=r"pip install 'pulse-trio\[otel\]'"):
        importlib.import_module("pulse_trio.otel")
