"""A handler that blocks the event loop ends the test that runs it, with its line."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import trio
import trio.lowlevel

from pulse_trio import Handlers, Job, SyncClient
from pulse_trio.testing import NeverEnds, PulseClock, PulseWorker, crash_points, run_job, run_job_sync

handlers = Handlers()
WORDS = r"a handler blocks the event loop, for 1 s now, at .*test_blocked\.py:\d+, in {}: {}"
SLEEPS, SPINS, DEEP = (
    WORDS.format("sleeps", r"time\.sleep\(3600\)"),
    WORDS.format("spins", ""),
    WORDS.format("wait_for_a_program", r"subprocess\.run"),
)


@handlers.job
async def sleeps() -> None:
    time.sleep(3600)  # noqa: ASYNC251 -- what is wrong here


@handlers.job
async def spins() -> None:
    while True:
        try:
            sum(range(100))
        except Exception:  # noqa: S110 -- it goes on whatever is raised
            pass


@handlers.job
async def has_a_child(job: Job) -> None:
    job.nursery.start_soon(wait_for_a_program)


async def wait_for_a_program() -> None:
    await trio.lowlevel.checkpoint()
    subprocess.run([sys.executable, "-c", "import time; time.sleep(3600)"], check=False)  # noqa: ASYNC221


@handlers.job
async def blocks_a_little() -> str:
    time.sleep(0.3)  # noqa: ASYNC251
    return "done"


@pytest.fixture
def pulse_handlers() -> Handlers:
    return handlers


@pytest.mark.trio
@pytest.mark.parametrize(("handler", "said"), [(sleeps, SLEEPS), (spins, SPINS), (has_a_child, DEEP)])
async def test_run_job_names_the_line_that_blocks(
    handler: object, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGRTMAX)
    with pytest.raises(TimeoutError, match=said):
        await run_job(handler, within=1)  # type: ignore[call-overload]
    # It is said at once, too: what blocks in C may not end.
    assert "a handler blocks the event loop" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGRTMAX) is before


@pytest.mark.trio
async def test_crash_points_names_the_line_that_blocks() -> None:
    with pytest.raises(NeverEnds, match=SLEEPS):
        async for _ in crash_points(sleeps, timeout=1):
            pass


@pytest.mark.trio
async def test_drain_names_the_line_that_blocks(
    pulse_sync_client: SyncClient, pulse_worker: PulseWorker, pulse_clock: PulseClock
) -> None:
    # Once: its second attempt would be due before the clock stands, on a loaded machine.
    pulse_sync_client.enqueue(sleeps.options(max_attempts=1))
    with pytest.raises(TimeoutError, match=SLEEPS):
        await pulse_worker.drain(timeout=1)
    # The clock's next worker goes on.
    pulse_sync_client.enqueue(blocks_a_little)
    assert (await pulse_clock.advance()).ended["completed"] == 1


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_under_asyncio_a_handler_that_computes_for_ever_is_named(
    pulse_sync_client: SyncClient, pulse_worker: PulseWorker
) -> None:
    pulse_sync_client.enqueue(spins)
    with pytest.raises(TimeoutError, match=SPINS):
        await pulse_worker.drain(timeout=1)


def test_a_handler_that_blocks_for_a_moment_is_left_alone() -> None:
    assert run_job_sync(blocks_a_little, within=1).result == "done"
