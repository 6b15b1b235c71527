"""`--http`: /metrics, /healthz and /readyz of real workers, asked by scrapers, probes and hostile clients."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator  # noqa: TC003 -- read at run time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio
import trio.testing
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as prometheus_text

from pulse_trio import ConfigurationError, Handlers, Job, SyncClient, Worker
from pulse_trio.observe import JobEnded
from pulse_trio.worker.metrics.catalogue import METRICS
from pulse_trio.worker.metrics.figures import Figures
from pulse_trio.worker.metrics.server import beside, serving
from pulse_trio.worker.metrics.vital import Vital
from support.embedded_workers import working
from support.sink import open_sink
from support.stores import Window
from support.workers import enqueue, settled, until, worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pulse_trio.testing.faults.processes import Processes
    from pulse_trio.testing.faults.proxy import Proxy

WITHIN = 30.0
FAST: dict[str, Any] = {
    "lease": 6.0,
    "heartbeat": 2.0,
    "watchdog": 0.5,
    "cleanup": 0.2,
    "grace": 5.0,
    "poll": 1.0,
    "http": "127.0.0.1:0",
}
LISTED = [
    "pulse_jobs_started_total",
    "pulse_jobs_ended_total",
    "pulse_job_wait_seconds",
    "pulse_job_run_seconds",
    "pulse_jobs_running",
    "pulse_worker_slots",
    "pulse_queue_jobs",
    "pulse_queue_oldest_seconds",
    "pulse_claim_seconds",
    "pulse_settle_seconds",
    "pulse_beat_seconds",
    "pulse_reports_pending",
    "pulse_leases_lost_total",
    "pulse_rescued_total",
    "pulse_quarantined_jobs",
    "pulse_loop_lag_seconds",
    "pulse_database_up",
    "pulse_schedule_late_seconds",
]

Sample = tuple[str, frozenset[tuple[str, str]]]


def sample(name: str, **labels: str) -> Sample:
    return name, frozenset(labels.items())


def samples_of(text: str) -> dict[Sample, float]:
    """Every sample of Prometheus's text, as its own parser reads it."""
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in prometheus_text(text)
        for one in family.samples
    }


class Served:
    """The pages of one address."""

    def __init__(self, address: str, client: httpx.AsyncClient) -> None:
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self._client = client

    async def get(self, path: str, **more: Any) -> httpx.Response:
        return await self._client.get(path, **more)

    async def ask(self, method: str, path: str) -> httpx.Response:
        return await self._client.request(method, path)

    async def metrics(self) -> dict[Sample, float]:
        return samples_of((await self.get("/metrics")).text)

    async def until(self, path: str, status: int, said: str = "") -> None:
        """Waits until a page answers so, by asking again, as a probe does."""
        answer = None
        with trio.move_on_after(WITHIN):
            while True:
                answer = await self.get(path)
                if answer.status_code == status and said in answer.text:
                    return
                await trio.sleep(0.05)
        raise AssertionError(f"{path} says {answer and (answer.status_code, answer.text)}")

    async def until_counted(self, wanted: Sample, value: float) -> dict[Sample, float]:
        """Waits until a metric has a value."""
        found: dict[Sample, float] = {}
        with trio.move_on_after(WITHIN):
            while True:
                found = await self.metrics()
                if found.get(wanted) == value:
                    return found
                await trio.sleep(0.05)
        raise AssertionError(f"{wanted} is {found.get(wanted)}, not {value}: {found}")


@asynccontextmanager
async def served(address: str) -> AsyncGenerator[Served]:
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=WITHIN) as client:
        yield Served(address, client)


@pytest.fixture
def address(caplog: pytest.LogCaptureFixture) -> Address:
    return Address(caplog)


class Address:
    """Where a worker in this process serves: what its log says."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "pulse_trio")
        self._log = caplog

    @property
    def latest(self) -> str:
        said = [record.getMessage() for record in self._log.records if "serving /metrics" in record.getMessage()]
        return said[-1].rpartition("http://")[2]

    def __str__(self) -> str:
        return self.latest


@pytest.fixture
def handlers() -> Handlers:
    made = Handlers()

    @made.job(queue="mail")
    async def greet() -> None: ...

    @made.job(max_attempts=1)
    async def broken() -> None:
        raise ValueError("no luck")

    @made.job
    async def wait() -> None:
        await trio.sleep_forever()

    return made


async def test_every_metric_of_the_list_is_served_with_its_help_in_both_formats(
    dsn: str, handlers: Handlers, address: Address
) -> None:
    assert [metric.name for metric in METRICS] == LISTED
    async with working(handlers, dsn, **FAST), served(str(address)) as pages:
        answer = await pages.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        families = {family.name: family for family in prometheus_text(answer.text)}
        for metric in METRICS:
            family = families[metric.name.removesuffix("_total")]
            assert (family.type, family.documentation) == (metric.type, metric.help)
        asked = await pages.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert asked.headers["content-type"].startswith("application/openmetrics-text")
        assert {family.name for family in open_metrics(asked.text)} == set(families)


async def test_jobs_are_counted_by_queue_kind_and_outcome(dsn: str, handlers: Handlers, address: Address) -> None:
    client = SyncClient(dsn)
    async with working(handlers, dsn, **FAST), served(str(address)) as pages:
        for _ in range(3):
            client.enqueue("greet", queue="mail")
        client.enqueue("broken", max_attempts=1)
        client.enqueue("wait")
        client.enqueue("of_no_handler")
        await pages.until_counted(sample("pulse_jobs_running", queue="default"), 1)
        await pages.until_counted(
            sample("pulse_jobs_ended_total", queue="default", kind="other", outcome="released"), 1
        )
        await pages.until_counted(sample("pulse_jobs_ended_total", queue="default", kind="broken", outcome="failed"), 1)
        found = await pages.until_counted(
            sample("pulse_jobs_ended_total", queue="mail", kind="greet", outcome="completed"), 3
        )
        assert found[sample("pulse_jobs_started_total", queue="mail", kind="greet")] == 3
        assert found[sample("pulse_jobs_started_total", queue="default", kind="wait")] == 1
        assert found[sample("pulse_jobs_started_total", queue="default", kind="other")] == 0
        assert found[sample("pulse_job_run_seconds_count", queue="mail", kind="greet")] == 3
        assert found[sample("pulse_job_wait_seconds_count", queue="mail")] == 3
        assert 0 < found[sample("pulse_job_wait_seconds_sum", queue="mail")] < WITHIN
        assert found[sample("pulse_jobs_running", queue="mail")] == 0
        assert found[sample("pulse_claim_seconds_count")] >= 2
        assert found[sample("pulse_worker_slots")] == 100
        assert found[sample("pulse_database_up")] == 1


async def test_readyz_says_that_the_database_is_cut_off_and_healthz_stays_well(
    handlers: Handlers, address: Address, proxy: Proxy
) -> None:
    async with working(handlers, proxy.dsn, **FAST), served(str(address)) as pages:
        await pages.until("/readyz", 200, "ok")
        proxy.refuse()
        proxy.cut()
        await pages.until("/readyz", 503, "cut off")
        await pages.until_counted(sample("pulse_database_up"), 0)
        assert (await pages.get("/healthz")).status_code == 200
        proxy.forward()
        await pages.until("/readyz", 200)


async def test_a_silent_database_makes_a_worker_unready(handlers: Handlers, address: Address, proxy: Proxy) -> None:
    async with working(handlers, proxy.dsn, **FAST), served(str(address)) as pages:
        await pages.until("/readyz", 200)
        proxy.swallow()
        await pages.until("/readyz", 503, "cut off")
        proxy.forward()


async def test_a_draining_process_is_not_ready_until_it_ends(dsn: str, processes: Processes) -> None:
    async with open_sink(processes.folder) as sink:
        (job_id,) = enqueue(dsn)
        running = await worker(processes, dsn, "--http=127.0.0.1:0")
        at = (await running.line(r"serving /metrics.* at http://(\S+)"))[1]
        async with served(at) as pages:
            await sink.until("start", attempt=1)
            await pages.until("/readyz", 200)
            running.send(signal.SIGTERM)
            await pages.until("/readyz", 503, "draining")
            assert (await pages.get("/healthz")).status_code == 200
            sink.let_go()
            await settled(dsn, job_id)
        assert await running.ended() == 0


COMPLETED = sample("pulse_jobs_ended_total", queue="default", kind="held", outcome="completed")
STARTED = sample("pulse_jobs_started_total", queue="default", kind="held")


async def test_one_address_answers_for_all_processes_and_counters_survive_a_killed_one(
    dsn: str, processes: Processes
) -> None:
    async with open_sink(processes.folder) as sink:
        ids = enqueue(dsn, count=6)
        supervisor = await worker(processes, dsn, "--processes=2", "--concurrency=5", "--http=127.0.0.1:0")
        at = (await supervisor.line(r"serving /metrics.* at http://(\S+)"))[1]
        async with served(at) as pages:
            starts = await sink.until("start", attempt=1, count=6)
            await pages.until("/readyz", 200)
            found = await pages.until_counted(STARTED, 6)
            assert found[sample("pulse_worker_slots")] == 10
            assert found[sample("pulse_jobs_running", queue="default")] == 6
            sink.let_go()
            for job_id in ids:
                await settled(dsn, job_id)
            await pages.until_counted(COMPLETED, 6)
            os.kill(starts[0].pid, signal.SIGKILL)
            await supervisor.line(f"{starts[0].pid} .*signal|{starts[0].pid} ended")
            assert (await pages.metrics())[COMPLETED] == 6
            # The process that replaces it counts on top.
            (more,) = enqueue(dsn)
            await settled(dsn, more)
            await pages.until_counted(COMPLETED, 7)
            assert (await pages.metrics())[sample("pulse_job_run_seconds_count", queue="default", kind="held")] == 7
            await pages.until("/readyz", 200)
            assert (await pages.metrics())[sample("pulse_worker_slots")] == 10
            supervisor.send(signal.SIGTERM)
        assert await supervisor.ended() == 0


async def test_the_supervisor_says_which_process_is_blocked_or_drains(dsn: str, processes: Processes) -> None:
    async with open_sink(processes.folder) as sink:
        supervisor = await worker(processes, dsn, "--processes=2", "--http=127.0.0.1:0", "--lease=60", "--heartbeat=20")
        at = (await supervisor.line(r"serving /metrics.* at http://(\S+)"))[1]
        async with served(at) as pages:
            await pages.until("/readyz", 200)
            assert (await pages.get("/healthz")).status_code == 200
            enqueue(dsn, "blocking", folder=str(processes.folder))
            (start,) = await sink.until("start", attempt=1)
            said = f"1 of 2 worker processes are ready; worker process {start.pid}: nothing was heard of it"
            await pages.until("/readyz", 503, said)
            # The supervisor replaces it when its lease is over; all of them are not to be replaced before that.
            assert (await pages.get("/healthz")).status_code == 200
            os.kill(start.pid, signal.SIGKILL)
            (processes.folder / "go-2").touch()
            (processes.folder / "go-1").touch()
            await pages.until("/readyz", 200)
            supervisor.send(signal.SIGTERM)
        assert await supervisor.ended() == 0


STUBBORN = """
import pulse_trio, trio
handlers = pulse_trio.Handlers()

@handlers.job
async def stubborn(job: pulse_trio.Job) -> None:
    while job.attempt == 1:
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()
"""


async def test_a_worker_that_replaces_itself_serves_at_the_same_address(dsn: str, processes: Processes) -> None:
    (processes.folder / "app.py").write_text(STUBBORN)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
    job_id = SyncClient(dsn).enqueue("stubborn", max_attempts=5, timeout=0.2).id
    running = await processes.pulse_trio("run", "app:handlers", f"--dsn={dsn}", f"--http={at}", "--cleanup=0.2")
    assert (await settled(dsn, job_id))[:2] == ("completed", 2)
    async with served(at) as pages:
        await pages.until("/readyz", 200)
    running.send(signal.SIGTERM)
    assert await running.ended() == 0
    assert running.stderr.count("serving /metrics") == 2


async def test_a_worker_is_not_ready_while_its_resources_are_opened(dsn: str, address: Address) -> None:
    made, entered, go_on = Handlers(), trio.Event(), trio.Event()

    @made.resource
    @asynccontextmanager
    async def pool() -> AsyncIterator[int]:
        entered.set()
        await go_on.wait()
        yield 1

    @made.job
    async def work(pool: int) -> None: ...

    worker = Worker(made, dsn, **FAST)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        with trio.fail_after(WITHIN):
            await entered.wait()
        async with served(str(address)) as pages:
            # The database has answered, and still nothing is claimed.
            await pages.until_counted(sample("pulse_database_up"), 1)
            answer = await pages.get("/readyz")
            assert (answer.status_code, answer.text.split(":")[0]) == (503, "starting")
            go_on.set()
            await pages.until("/readyz", 200)
        worker.stop_now()


async def test_an_attempt_that_was_lost_does_not_count_as_completed(dsn: str, address: Address) -> None:
    made, begun = Handlers(), threading.Event()

    @made.job
    def slow(job: Job) -> int:
        begun.set()
        while job.cancel_reason is None:
            time.sleep(0.01)
        return 7

    async with working(made, dsn, **FAST) as heard, served(str(address)) as pages:
        SyncClient(dsn).enqueue("slow")
        await trio.to_thread.run_sync(begun.wait, WITHIN)
        with Window(dsn) as window:
            # Another attempt owns it.
            window.run("UPDATE job SET attempt = attempt + 1, locked_by = 99, lease_until = now() + interval '1 h'")
            lost = sample("pulse_jobs_ended_total", queue="default", kind="slow", outcome="lost")
            found = await pages.until_counted(lost, 1)
            assert (
                found.get(sample("pulse_jobs_ended_total", queue="default", kind="slow", outcome="completed"), 0) == 0
            )
            ended = await heard.until(JobEnded, kind="slow")
            assert ended.outcome == "lost"


async def test_a_blocked_loop_does_not_answer_and_its_lag_is_measured(dsn: str, processes: Processes) -> None:
    async with open_sink(processes.folder) as sink:
        running = await worker(processes, dsn, "--http=127.0.0.1:0", "--lease=60", "--heartbeat=20")
        at = (await running.line(r"serving /metrics.* at http://(\S+)"))[1]
        async with served(at) as pages:
            await pages.until("/readyz", 200)
            enqueue(dsn, "blocking", folder=str(processes.folder))
            await sink.until("start", attempt=1)
            with pytest.raises(httpx.TimeoutException):
                await pages.get("/healthz", timeout=2.0)
            (processes.folder / "go-1").touch()
            await pages.until("/healthz", 200)
            assert (await pages.metrics())[sample("pulse_loop_lag_seconds")] > 1
        running.send(signal.SIGTERM)
        assert await running.ended() == 0


async def test_the_queues_are_counted_by_one_worker_at_a_time(dsn: str, address: Address) -> None:
    made = Handlers()

    @made.job
    async def wait() -> None:
        await trio.sleep_forever()

    client = SyncClient(dsn)
    for _ in range(3):
        client.enqueue("wait", queue="mail", delay=3600)
    client.enqueue("wait")
    settings: dict[str, Any] = FAST | {"concurrency": 1}
    async with working(made, dsn, **settings), served(str(address)) as pages:
        found = await pages.until_counted(sample("pulse_queue_jobs", queue="mail", state="scheduled"), 3)
        assert found[sample("pulse_queue_oldest_seconds", queue="mail")] == 0
        assert found[sample("pulse_quarantined_jobs")] == 0
        other = Worker(made, dsn, **settings)
        async with trio.open_nursery() as nursery:
            await nursery.start(other.run)
            async with served(address.latest) as others:
                await others.until("/readyz", 200)
                assert sample("pulse_quarantined_jobs") not in await others.metrics()
            other.stop_now()


async def test_an_address_in_use_is_the_callers_fault(dsn: str, processes: Processes, handlers: Handlers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=f"{at}.*another process uses this port"):
            await Worker(handlers, dsn, http=at).run()
        (processes.folder / "app.py").write_text(
            "import pulse_trio\nhandlers = pulse_trio.Handlers()\n@handlers.job\ndef work(): ...\n"
        )
        for more in ([], ["--processes=2"]):
            running = await processes.command("run", "app:handlers", f"--dsn={dsn}", f"--http={at}", *more)
            assert await running.ended() == 2
            assert "another process uses this port" in running.stderr


async def test_without_the_extra_the_worker_says_how_to_install_it(dsn: str, processes: Processes) -> None:
    (processes.folder / "app.py").write_text(
        "import sys, pulse_trio\nsys.modules['hypercorn'] = None\n"
        "handlers = pulse_trio.Handlers()\n@handlers.job\ndef work(): ...\n"
    )
    running = await processes.command("run", "app:handlers", f"--dsn={dsn}", "--http=127.0.0.1:0")
    assert await running.ended() == 2
    assert "pip install 'pulse-trio[metrics]'" in running.stderr


@pytest.mark.parametrize("text", ["9464", "localhost:", ":9464", "localhost:70000", "::1:9464", "h:²", "h:-1"])
def test_what_is_no_address_is_refused(text: str, handlers: Handlers) -> None:
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        Worker(handlers, "", http=text)


async def raw(pages: Served, request: bytes) -> bytes:
    """What the server sends before it closes the connection."""
    with trio.fail_after(WITHIN):
        async with await trio.open_tcp_stream(pages.host, pages.port) as stream:
            try:
                await stream.send_all(request)
                return b"".join([chunk async for chunk in stream])
            except trio.BrokenResourceError:
                return b""


async def test_hostile_requests_are_refused_and_harm_nothing(dsn: str, handlers: Handlers, address: Address) -> None:
    async with working(handlers, dsn, **FAST) as heard, served(str(address)) as pages:
        assert (await pages.get("/")).status_code == 404
        assert (await pages.get("/metrics/")).status_code == 404
        assert (await pages.ask("POST", "/metrics")).status_code == 405
        assert (await pages.ask("DELETE", "/healthz")).headers["allow"] == "GET, HEAD"
        head = await pages.ask("HEAD", "/healthz")
        assert (head.status_code, head.content) == (200, b"")
        huge = await raw(pages, b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000 + b"\r\n\r\n")
        assert not huge.startswith(b"HTTP/1.1 200")
        assert not (await raw(pages, b"\x16\x03\x01\x00\xff" * 100)).startswith(b"HTTP/1.1 200")
        # One that never ends its request is cut off; others are answered meanwhile.
        slow = await raw(pages, b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
        assert not slow.startswith(b"HTTP/1.1 200")
        for accept in (b"\x80" * 1000, b"application/openmetrics-text; version=" + b"9" * 5000 + b".x", b";;=;,,q=z"):
            asked = await pages.get("/metrics", headers=[(b"accept", accept)])
            assert asked.status_code == 200, accept
        SyncClient(dsn).enqueue("greet", queue="mail")
        await until(dsn, "SELECT 1 FROM pulse.jobs WHERE state = 'completed'")
    assert heard is not None


async def test_a_client_that_does_not_read_does_not_keep_the_worker_from_ending(
    dsn: str, handlers: Handlers, address: Address
) -> None:
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with trio.fail_after(3 * WITHIN):
            async with working(handlers, dsn, **FAST), served(str(address)) as pages:
                deaf.connect((pages.host, pages.port))
                deaf.setblocking(False)
                # Until the server takes no more requests, because it waits to send an answer.
                with trio.move_on_after(1) as waited:
                    while not waited.cancelled_caught:
                        try:
                            deaf.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
                            waited.deadline = trio.current_time() + 1
                        except BlockingIOError:
                            pass
                        except (ConnectionResetError, BrokenPipeError):
                            break  # on a loaded machine the server has given this client up
                        await trio.sleep(0.01)
                assert (await pages.get("/healthz")).status_code == 200


async def test_metrics_are_served_while_jobs_have_taken_all_threads(
    dsn: str, handlers: Handlers, address: Address
) -> None:
    async with working(handlers, dsn, **FAST), served(str(address)) as pages:
        limiter = trio.to_thread.current_default_thread_limiter()
        # The one token that is left is this task's.
        limiter.total_tokens = 1
        async with limiter:
            assert (await pages.get("/metrics")).status_code == 200


class Away:
    """A database that answers when it may."""

    def __init__(self) -> None:
        self.back = trio.Event()

    async def answers(self, patience: float) -> None:
        await self.back.wait()


async def test_whether_the_database_is_up_is_not_said_before_its_first_answer() -> None:
    database, figures = Away(), Figures()
    vital = Vital(database)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(vital.run)
        await trio.testing.wait_all_tasks_blocked()
        vital.tell(figures)
        assert "pulse_database_up" not in figures.values
        database.back.set()
        await trio.testing.wait_all_tasks_blocked()
        vital.tell(figures)
        assert figures.values["pulse_database_up"] == {(): 1}
        nursery.cancel_scope.cancel()


class Unwell:
    """What is served, by a program with a fault."""

    def figures(self) -> Figures:
        raise RuntimeError("no figures")

    def unhealthy(self) -> str | None:
        return None

    def unready(self) -> str | None:
        return None


async def test_a_page_that_fails_is_a_500_and_is_logged_once(
    address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving("127.0.0.1:0", Unwell()), served(str(address)) as pages:
        for _ in range(2):
            assert (await pages.get("/metrics")).status_code == 500
        assert (await pages.get("/healthz")).status_code == 200
    assert [record.message for record in caplog.records if record.exc_info] == [
        "a page of the worker's HTTP server failed; later failures are not logged. No job is concerned"
    ]


async def test_what_the_block_raises_comes_before_what_its_helpers_raise_at_the_end() -> None:
    async def fails_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise OSError("at the end")

    async def block() -> None:
        async with beside() as nursery:
            nursery.start_soon(fails_when_cancelled)
            await trio.testing.wait_all_tasks_blocked()
            raise ConfigurationError("the block")

    with pytest.raises(ConfigurationError, match="the block"):
        await block()
