"""`pulse_clock`: real jobs in a real database, whose clock the test moves."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest

from pulse_trio import Client, Handlers, Job, RetryAfter, Snooze, SyncClient
from pulse_trio.errors import ConfigurationError
from pulse_trio.postgres import TrioConnection
from pulse_trio.testing import PulseClock, PulseWorker, assert_enqueued, enqueued, pulse_database, refute_enqueued
from pulse_trio.testing.kept import kept_for

LOG: list[tuple[str, object]] = []


@pytest.fixture
def pulse_handlers() -> Handlers:
    LOG.clear()
    handlers = Handlers()
    handlers.queue("slow", rate="1/m")

    @handlers.job(max_attempts=5)
    async def flaky(job: Job) -> int:
        LOG.append(("flaky", job.attempt))
        if job.attempt < 3:
            raise RetryAfter(3600)
        return job.attempt

    @handlers.job
    async def poll(job: Job) -> str:
        LOG.append(("poll", job.attempt))
        if job.attempt < 4:
            raise Snooze(timedelta(days=1))
        return "done"

    @handlers.job(queue="slow")
    async def slow(n: int) -> None:
        LOG.append(("slow", n))

    @handlers.job
    async def fails() -> None:
        raise ValueError("no")

    return handlers


@pytest.fixture
def round_trips(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often this process's connections have waited for their servers."""
    counted, wait = Counter[str](), TrioConnection.wait

    async def counting(self: TrioConnection[Any], *given: Any, **options: Any) -> Any:
        counted["all"] += 1
        return await wait(self, *given, **options)

    monkeypatch.setattr(TrioConnection, "wait", counting)
    return counted


@pytest.fixture
def nightly(pulse_handlers: Handlers) -> Handlers:
    @pulse_handlers.cron("30 2 * * *", timezone="Europe/Berlin", due_as="due")
    @pulse_handlers.job
    async def nightly(due: datetime) -> None:
        LOG.append(("nightly", due))

    return pulse_handlers


@pytest.mark.trio
async def test_a_drain_retries_a_job_at_once_that_would_wait_an_hour(
    pulse_clock: PulseClock, pulse_client: Client, pulse_worker: PulseWorker
) -> None:
    job = await pulse_client.enqueue("flaky")
    began = pulse_clock.now()
    report = await pulse_worker.drain()
    assert report.ended == {"failed": 2, "completed": 1}
    assert await job.result() == 3
    assert timedelta(hours=2) <= pulse_clock.now() - began < timedelta(hours=2, minutes=1)
    # Two hours are two retries of one hour, whatever real time the attempts took.
    again = await pulse_client.enqueue("flaky")
    assert (await pulse_clock.advance(hours=2)).ended == {"failed": 2, "completed": 1}
    assert (await pulse_client.job(again.id)).state == "completed"


@pytest.mark.trio
async def test_time_passes_no_further_than_it_is_told_to(
    pulse_client: Client, pulse_worker: PulseWorker, pulse_clock: PulseClock
) -> None:
    job = await pulse_client.enqueue("flaky")
    assert (await pulse_clock.advance()).ended == {"failed": 1}
    assert (await pulse_clock.advance(minutes=59)).ended == {}
    await assert_enqueued(pulse_client, "flaky", state="retryable")
    assert (await pulse_clock.advance(minutes=1)).ended == {"failed": 1}
    assert (await pulse_clock.advance(timedelta(hours=1))).ended == {"completed": 1}
    assert (await pulse_client.job(job.id)).state == "completed"
    await refute_enqueued(pulse_client, "flaky")


@pytest.mark.trio
async def test_jobs_run_in_the_order_of_time(
    pulse_client: Client, pulse_worker: PulseWorker, pulse_clock: PulseClock
) -> None:
    await pulse_client.enqueue("poll")
    await pulse_client.enqueue("flaky", delay=86400 * 1.5)
    await pulse_worker.drain()
    polls, attempts = [("poll", n) for n in range(1, 5)], [("flaky", n) for n in range(1, 4)]
    assert [polls[0], polls[1], *attempts, polls[2], polls[3]] == LOG


@pytest.mark.trio
async def test_a_handler_finds_the_clock_where_its_job_fell_due(
    pulse_handlers: Handlers, pulse_client: Client, pulse_clock: PulseClock
) -> None:
    """It showed where the move had begun, so what took its time from there reckoned with another one."""
    found: list[datetime] = []

    @pulse_handlers.job
    async def looks(job: Job) -> None:
        found.append(pulse_clock.now())
        if job.attempt < 3:
            raise Snooze(timedelta(days=1))

    began = datetime(2030, 1, 1, 1, tzinfo=UTC)
    await pulse_clock.jump_to(began)
    await pulse_client.enqueue("looks")
    await pulse_clock.advance(days=7)
    late = [now - began - timedelta(days=days) for days, now in enumerate(found)]
    assert len(late) == 3
    assert all(timedelta() <= each < timedelta(minutes=1) for each in late), late
    assert pulse_clock.now() - began >= timedelta(days=7)


@pytest.mark.trio
async def test_a_month_of_cron_fires_at_its_times_of_the_calendar(
    nightly: Handlers, pulse_client: Client, pulse_clock: PulseClock
) -> None:
    berlin = ZoneInfo("Europe/Berlin")
    began = datetime(2030, 3, 1, 12, tzinfo=berlin)
    await pulse_clock.jump_to(began)
    report = await pulse_clock.advance(days=31)
    assert report.ended == {"completed": 31}
    times = [due.astimezone(berlin) for _, due in LOG]  # type: ignore[attr-defined]
    assert times[0] == datetime(2030, 3, 2, 2, 30, tzinfo=berlin)
    assert sorted(times) == times
    # In the night in which the clocks go forward there is no 2:30.
    assert [(t.hour, t.minute) for t in times] == [(2, 30)] * 29 + [(3, 0), (2, 30)]
    assert not await enqueued(pulse_client)


@pytest.mark.trio
async def test_a_rate_of_one_a_minute_takes_a_minute_for_each(
    pulse_client: Client, pulse_worker: PulseWorker, pulse_clock: PulseClock
) -> None:
    for n in range(4):
        await pulse_client.enqueue("slow", {"n": n})
    assert (await pulse_clock.advance()).ended == {"completed": 1}
    assert (await pulse_clock.advance(seconds=59)).ended == {}
    began = pulse_clock.now()
    assert (await pulse_worker.drain()).ended == {"completed": 3}
    assert timedelta(seconds=120) < pulse_clock.now() - began < timedelta(seconds=150)


@pytest.mark.trio
async def test_a_deadline_and_an_expiry_come_in_virtual_time(
    pulse_client: Client, pulse_worker: PulseWorker, pulse_clock: PulseClock
) -> None:
    late = await pulse_client.enqueue("flaky", deadline=5400)
    stale = await pulse_client.enqueue("flaky", expires=60, delay=120)
    await pulse_worker.drain()
    assert (await pulse_client.job(late.id)).state == "cancelled"
    assert (await pulse_client.job(late.id)).attempt == 3
    assert (await pulse_client.job(stale.id)).state == "cancelled"
    assert LOG == [("flaky", 1), ("flaky", 2)]  # neither the third of the one, nor the first of the other


@pytest.mark.trio
async def test_a_unique_key_is_held_for_its_time(pulse_client: Client, pulse_clock: PulseClock) -> None:
    first = await pulse_client.enqueue("fails", max_attempts=1, unique_key="daily", unique_for=86400)
    await pulse_clock.advance(hours=23)
    assert not (await pulse_client.enqueue("fails", unique_key="daily", unique_for=86400)).added
    await pulse_clock.advance(hours=2)
    again = await pulse_client.enqueue("fails", unique_key="daily", unique_for=86400)
    assert again.added
    assert again.id != first.id


@pytest.mark.trio
async def test_a_job_of_a_worker_that_died_is_rescued_when_its_lease_is_over(
    pulse_dsn: str, pulse_client: Client, pulse_clock: PulseClock
) -> None:
    job = await pulse_client.enqueue("slow", {"n": 1})
    with psycopg.connect(pulse_dsn) as connection:
        connection.execute(
            "UPDATE pulse.job SET state = 2, attempt = 1, locked_by = 7, lease_until = now() + interval '5 minutes'"
        )
    await pulse_clock.advance(minutes=4)
    assert (await pulse_client.job(job.id)).state == "running"
    await pulse_clock.advance(minutes=3)
    assert (await pulse_client.job(job.id)).state == "completed"


@pytest.mark.trio
async def test_a_job_without_a_handler_is_named(pulse_client: Client, pulse_dsn: str, pulse_clock: PulseClock) -> None:
    with psycopg.connect(pulse_dsn) as connection:
        connection.execute("SELECT pulse.enqueue('unheard_of')")
    with pytest.raises(LookupError, match="unheard_of"):
        await pulse_clock.advance(days=1)


@pytest.mark.trio
async def test_a_drain_without_the_clock_names_a_job_without_a_handler(
    pulse_client: Client, pulse_dsn: str, pulse_worker: PulseWorker
) -> None:
    with psycopg.connect(pulse_dsn) as connection:
        connection.execute("SELECT pulse.enqueue('unheard_of')")
    with pytest.raises(LookupError, match="without a handler here: unheard_of"):
        await pulse_worker.drain()


@pytest.mark.trio
async def test_a_drain_needs_real_time(pulse_handlers: Handlers, autojump_clock: object) -> None:
    with pytest.raises(ConfigurationError, match="use pulse_clock, not autojump_clock"):
        await PulseWorker("host=127.0.0.1 port=1", pulse_handlers).drain()


@pytest.mark.trio
async def test_a_database_without_a_clock_is_told_how_to_get_one(pulse_dsn: str, pulse_handlers: Handlers) -> None:
    clock = PulseClock(pulse_dsn, pulse_handlers)
    with pytest.raises(ConfigurationError, match=r"pulse_database\(clock=True\)"):
        await clock.advance(seconds=1)
    with pytest.raises(ConfigurationError, match=r"pulse_database\(clock=True\)"):
        await clock.jump_to(datetime(2099, 1, 1, tzinfo=UTC))


@pytest.mark.trio
async def test_a_job_that_is_put_off_for_ever_ends_the_drain_with_its_name(
    pulse_handlers: Handlers, pulse_client: Client, pulse_worker: PulseWorker, pulse_clock: PulseClock
) -> None:
    @pulse_handlers.job
    async def for_ever() -> None:
        raise Snooze(3600)

    await pulse_client.enqueue("for_ever")
    with pytest.raises(TimeoutError, match=r"for_ever \d+ times"):
        await pulse_worker.drain(timeout=1)


@pytest.mark.trio
async def test_time_goes_forward_only(pulse_clock: PulseClock) -> None:
    with pytest.raises(ValueError, match="forward only"):
        await pulse_clock.advance(-1)
    with pytest.raises(ValueError, match="aware"):
        await pulse_clock.advance_to(datetime(2030, 1, 1))
    with pytest.raises(ValueError, match="forward only"):
        await pulse_clock.advance_to(datetime(2020, 1, 1, tzinfo=UTC))


@pytest.mark.trio
async def test_a_moment_that_the_schema_cannot_hold_is_refused(
    pulse_handlers: Handlers, pulse_clock: PulseClock, pulse_client: Client, pulse_worker: PulseWorker
) -> None:
    """It was taken, and the next worker failed with `DatabaseUnavailable`."""

    @pulse_handlers.job
    async def echo(n: int) -> int:
        return n

    said = r"The clock can be moved to 7900-01-01T00:00:00\+00:00 at the latest"
    with pytest.raises(ValueError, match=said):
        await pulse_clock.jump_to(datetime(9990, 1, 1, tzinfo=UTC))
    with pytest.raises(ValueError, match=said):
        await pulse_clock.advance_to(datetime(9990, 1, 1, tzinfo=UTC))
    with pytest.raises(ValueError, match=said):
        await pulse_clock.advance(timedelta(days=999_999_999))
    last = datetime(7900, 1, 1, tzinfo=UTC)
    await pulse_clock.jump_to(last)
    job = await pulse_client.enqueue(echo, 1)
    later = await pulse_client.enqueue(echo.options(delay=timedelta(days=365_000)), 2)
    assert (await pulse_clock.advance(lease=7 * 86_400.0)).ended == {"completed": 1}
    assert (await pulse_client.job(job.id)).state == "completed"
    assert (await pulse_worker.drain()).ended == {}
    assert (await pulse_client.job(later.id)).state == "scheduled"
    with pytest.raises(ValueError, match=f"{said}: 0:00:01 from 7900"):
        await pulse_clock.advance(seconds=1)


@pytest.mark.trio
async def test_a_misspelt_unit_of_time_is_named(pulse_clock: PulseClock) -> None:
    """A worker had no such setting, and its settings were offered."""
    for misspelt, meant in (("minute", "minutes"), ("hour", "hours"), ("day", "days"), ("secs", "seconds")):
        with pytest.raises(ConfigurationError, match=rf"advance\(\) takes no {misspelt!r}. Did you mean {meant}\?$"):
            await pulse_clock.advance(**{misspelt: 5})
    with pytest.raises(ConfigurationError, match=r"A worker has no setting 'concurrncy'. Did you mean concurrency"):
        await pulse_clock.advance(concurrncy=5)


def test_a_test_without_a_loop_moves_the_clock_too(
    pulse_sync_client: SyncClient, pulse_worker: PulseWorker, pulse_clock: PulseClock
) -> None:
    job = pulse_sync_client.enqueue("flaky")
    assert pulse_clock.advance_sync(minutes=59).ended == {"failed": 1}
    assert pulse_worker.drain_sync().ended == {"failed": 1, "completed": 1}
    assert pulse_sync_client.job(job.id).result == 3


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_test_on_asyncio_moves_the_clock_too(
    pulse_client: Client, pulse_worker: PulseWorker, pulse_clock: PulseClock
) -> None:
    job = await pulse_client.enqueue("flaky")
    await pulse_worker.drain()
    assert (await pulse_client.job(job.id)).result == 3


@pytest.mark.trio
async def test_without_the_clock_time_is_postgresqls(pulse_client: Client, pulse_worker: PulseWorker) -> None:
    await pulse_client.enqueue("flaky")
    assert (await pulse_worker.drain()).ended == {"failed": 1}


@pytest.mark.trio
async def test_all_workers_of_a_test_share_their_connections_which_close_with_its_database(
    pulse_handlers: Handlers,
) -> None:
    with pulse_database(clock=True) as dsn:
        client = SyncClient(dsn, handlers=pulse_handlers)
        client.enqueue("flaky")
        clock = PulseClock(dsn, pulse_handlers)
        found: list[set[int]] = []
        for _ in range(3):
            await clock.advance(hours=1)
            found.append(_backends_of_workers(dsn))
        assert found[0]
        assert found[0] == found[1] == found[2]
        with psycopg.connect(dsn) as connection:
            # Each worker had a session of its own, and has ended it.
            assert connection.execute("SELECT state, count(*) FROM pulse.workers GROUP BY 1").fetchall() == [
                ("gone", 3)
            ]
        kept = kept_for(dsn)
        assert kept is not None
        connections = list(kept._idle.values())
        # A lease of another length means other connections: their time-outs depend on it.
        await clock.advance(hours=1, lease=60)
        assert all(connection.closed for connection in connections)
        connections = list(kept._idle.values())
        assert connections
    assert all(connection.closed for connection in connections)
    assert kept_for(dsn) is None


def _backends_of_workers(dsn: str) -> set[int]:
    with psycopg.connect(dsn) as connection:
        found = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'pulse-trio %'"
        )
        return {pid for (pid,) in found.fetchall()}


@pytest.mark.trio
async def test_a_connection_that_the_server_has_ended_meanwhile_is_made_anew(
    pulse_handlers: Handlers,
) -> None:
    with pulse_database(clock=True) as dsn:
        job = SyncClient(dsn, handlers=pulse_handlers).enqueue("flaky")
        clock = PulseClock(dsn, pulse_handlers)
        await clock.advance(hours=1)
        with psycopg.connect(dsn) as connection:
            for pid in _backends_of_workers(dsn):
                connection.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        assert (await clock.advance(hours=1)).ended == {"completed": 1}
        assert SyncClient(dsn).job(job.id).state == "completed"


@pytest.mark.trio
async def test_an_occurrence_of_a_schedule_costs_at_most_thirteen_statements(
    nightly: Handlers, pulse_clock: PulseClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements = 0
    execute = psycopg.AsyncCursor.execute

    async def counted(cursor: Any, *given: Any, **options: Any) -> Any:
        nonlocal statements
        statements += 1
        return await execute(cursor, *given, **options)

    monkeypatch.setattr(psycopg.AsyncCursor, "execute", counted)
    await pulse_clock.jump_to(datetime(2030, 6, 1, tzinfo=UTC))
    counts: list[int] = []
    for days in (5, 5, 25):
        statements = 0
        assert (await pulse_clock.advance(days=days)).ended == {"completed": days}
        counts.append(statements)
    # What a worker's start and end take does not count; the looks at trees, one a second of real time, may.
    assert (counts[2] - counts[1]) / 20 <= 13


@pytest.mark.trio
async def test_an_occurrence_costs_eleven_round_trips(round_trips: Counter[str]) -> None:
    # Virtual months are many moves: whatever each of them asks twice shows here, however fast the machine is.
    handlers = Handlers()

    @handlers.cron("30 * * * *")
    @handlers.job
    async def hourly() -> None:
        pass

    taken: list[int] = []
    with pulse_database(clock=True) as dsn:
        for days in (1, 1, 3):
            before = round_trips["all"]
            report = await PulseClock(dsn, handlers).advance(days=days)
            assert report.ended == {"completed": days * 24}
            taken.append(round_trips["all"] - before)
    # The first begins with connections and checks; a heartbeat in between may add a few.
    assert (taken[2] - taken[1]) / 48 < 12, taken
