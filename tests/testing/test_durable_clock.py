"""Durable handlers under the kit: virtual time passes through their sleeps, waits, deadlines and children."""

from __future__ import annotations

from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Handlers, Job, SyncClient, open_client

if TYPE_CHECKING:
    from pulse_trio import Client
    from pulse_trio.testing import PulseClock, PulseWorker

LOG: list[str] = []
DSN: ContextVar[str] = ContextVar("DSN")


async def note(what: str) -> str:
    LOG.append(what)
    return what


@pytest.fixture
def pulse_handlers() -> Handlers:
    LOG.clear()
    handlers = Handlers()

    @handlers.job(max_attempts=3)
    async def child(job: Job, n: int) -> int:
        if n == 13 and job.attempt == 1:
            raise ValueError("once")
        return n * n

    @handlers.job
    async def never(job: Job) -> None:
        raise ValueError("no")

    @handlers.job(durable=True)
    async def month(job: Job) -> int:
        await job.step(note, "begun")
        await job.sleep(timedelta(days=30))
        async with job.durable_nursery() as nursery:
            children = [nursery.start_soon(child, n) for n in (2, 13)]
        await job.sleep_until(datetime(2040, 1, 1, tzinfo=UTC))
        await job.step(note, "over")
        return sum(one.result for one in children)

    @handlers.job(durable=True)
    async def approval(job: Job) -> str:
        try:
            return await job.wait_for_event("approved", type=str, timeout=timedelta(days=3))
        except TimeoutError:
            return "nobody"

    @handlers.job(durable=True)
    async def patient(job: Job) -> str:
        return await job.wait_for_event("approved", type=str)

    @handlers.job(durable=True)
    async def limited(job: Job) -> str:
        with job.move_on_after(3600) as patience:
            await job.sleep(timedelta(days=1))
        return "late" if patience.cancelled_caught else "slept"

    @handlers.job(durable=True)
    async def busy(job: Job) -> int:
        async with job.durable_nursery() as nursery:
            children = [nursery.start_soon(child, n) for n in (1, 2)]
            # Not a durable call: it is not suspended meanwhile.
            job.nursery.start_soon(trio.sleep, 0.3)
        return sum(one.result for one in children)

    @handlers.job(durable=True)
    async def nested(job: Job) -> int:
        async with job.durable_nursery() as nursery:
            inner = nursery.start_soon(month)
        return inner.result

    @handlers.job(durable=True)
    async def packed_in_time(job: Job) -> list[str]:
        with job.move_on_after(3600) as patience:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(child.options(delay=86400), 1)
        assert patience.cancelled_caught
        return await job.step(states_of_children, job.id)

    return handlers


async def states_of_children(job_id: int) -> list[str]:
    async with open_client(DSN.get()) as client:
        return [str(member.state) for member in await client.tree(job_id) if member.id != job_id]


@pytest.mark.trio
async def test_a_deadline_that_strikes_while_the_job_is_suspended_ends_the_children_before_the_handler_goes_on(
    pulse_clock: PulseClock, pulse_client: Client, pulse_worker: PulseWorker, pulse_dsn: str
) -> None:
    DSN.set(pulse_dsn)
    job = await pulse_client.enqueue("packed_in_time")
    await pulse_worker.drain()
    assert await job.result() == ["cancelled"]


@pytest.mark.trio
async def test_a_drain_takes_a_durable_handler_through_months_to_its_end_at_once(
    pulse_clock: PulseClock, pulse_client: Client, pulse_worker: PulseWorker
) -> None:
    job = await pulse_client.enqueue("nested")
    report = await pulse_worker.drain()
    assert await job.result() == 173
    assert LOG == ["begun", "over"]
    assert report.suspended == {}
    assert pulse_clock.now() - datetime(2040, 1, 1, tzinfo=UTC) < timedelta(minutes=1)


@pytest.mark.trio
async def test_a_sleep_ends_at_its_time_and_not_before(pulse_clock: PulseClock, pulse_client: Client) -> None:
    job = await pulse_client.enqueue("month")
    began = pulse_clock.now()
    await pulse_clock.advance(days=29)
    record = await pulse_client.job(job.id)
    assert record.state == "suspended"
    await pulse_clock.advance(days=2)
    assert len(await pulse_client.tree(job.id)) == 3
    assert pulse_clock.now() - began < timedelta(days=31, minutes=1)


@pytest.mark.trio
async def test_a_wait_without_an_event_times_out_after_its_days(
    pulse_clock: PulseClock, pulse_client: Client, pulse_worker: PulseWorker
) -> None:
    job = await pulse_client.enqueue("approval")
    began = pulse_clock.now()
    await pulse_worker.drain()
    assert await job.result() == "nobody"
    assert timedelta(days=3) <= pulse_clock.now() - began < timedelta(days=3, minutes=1)


@pytest.mark.trio
async def test_an_event_that_comes_on_the_second_day_is_received_then(
    pulse_clock: PulseClock, pulse_client: Client
) -> None:
    job = await pulse_client.enqueue("approval")
    await pulse_clock.advance(days=2)
    await pulse_client.send_event(job.id, "approved", "Ada")
    await pulse_clock.advance()
    assert await job.result() == "Ada"


@pytest.mark.trio
async def test_a_remembered_deadline_strikes_in_virtual_time(
    pulse_clock: PulseClock, pulse_client: Client, pulse_worker: PulseWorker
) -> None:
    job = await pulse_client.enqueue("limited")
    began = pulse_clock.now()
    await pulse_worker.drain()
    assert await job.result() == "late"
    assert timedelta(hours=1) <= pulse_clock.now() - began < timedelta(hours=1, minutes=1)


@pytest.mark.trio
async def test_the_deadline_of_a_suspended_parent_ends_it(
    pulse_clock: PulseClock, pulse_client: Client, pulse_worker: PulseWorker, pulse_handlers: Handlers
) -> None:
    job = await pulse_client.enqueue(pulse_handlers["patient"].options(deadline=timedelta(days=1)))
    began = pulse_clock.now()
    report = await pulse_worker.drain()
    record = await pulse_client.job(job.id)
    assert record.state in ("cancelled", "dead")
    assert report.suspended == {}
    assert pulse_clock.now() - began < timedelta(days=1, hours=1)


@pytest.mark.trio
async def test_children_run_while_their_parent_keeps_its_slot(
    pulse_clock: PulseClock, pulse_client: Client, pulse_worker: PulseWorker
) -> None:
    job = await pulse_client.enqueue("busy")
    await pulse_worker.drain()
    assert await job.result() == 5


@pytest.mark.trio
async def test_a_drain_that_leaves_a_job_without_its_event_says_so(
    pulse_clock: PulseClock, pulse_client: Client, pulse_worker: PulseWorker
) -> None:
    job = await pulse_client.enqueue("patient")
    began = pulse_clock.now()
    report = await pulse_worker.drain()
    assert report.suspended == {job.id: "patient waits for the event 'approved'"}
    assert pulse_clock.now() - began < timedelta(minutes=1)
    await pulse_client.send_event(job.id, "approved", "Ada")
    report = await pulse_worker.drain()
    assert (report.ended, report.suspended) == ({"completed": 1}, {})


@pytest.mark.trio
async def test_a_drain_without_a_clock_leaves_suspended_jobs_and_names_them(
    pulse_client: Client, pulse_worker: PulseWorker
) -> None:
    patient, month = await pulse_client.enqueue("patient"), await pulse_client.enqueue("month")
    report = await pulse_worker.drain()
    assert set(report.suspended) == {patient.id, month.id}
    assert report.suspended[patient.id] == "patient waits for the event 'approved'"
    assert report.suspended[month.id].startswith("month waits for 20")
    await pulse_client.send_event(patient.id, "approved", "Ada")
    report = await pulse_worker.drain()
    assert await patient.result() == "Ada"
    assert set(report.suspended) == {month.id}


def test_the_same_without_an_event_loop(
    pulse_clock: PulseClock, pulse_sync_client: SyncClient, pulse_worker: PulseWorker
) -> None:
    job = pulse_sync_client.enqueue("approval")
    assert (
        pulse_clock.advance_sync(days=1).suspended[job.id].startswith("approval waits for the event 'approved' or 20")
    )
    pulse_sync_client.send_event(job.id, "approved", "Ada")
    assert pulse_worker.drain_sync().suspended == {}
    assert pulse_sync_client.job(job.id).result == "Ada"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_an_event_reaches_a_job_from_asyncio_and_from_trio(
    pulse_clock: PulseClock, pulse_client: Client, pulse_worker: PulseWorker
) -> None:
    job = await pulse_client.enqueue("patient")
    assert set((await pulse_worker.drain()).suspended) == {job.id}
    await pulse_client.send_event(job.id, "approved", "Ada")
    await pulse_worker.drain()
    assert await job.result() == "Ada"
