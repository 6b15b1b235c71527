"""Schedules on a real database: declared, fired once, caught up, changed at run time, broken."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio
from psycopg.conninfo import make_conninfo

from pulse_trio import (
    ConfigurationError,
    DatabaseUnavailable,
    Handlers,
    SyncClient,
    UnknownSchedule,
    UsageError,
    open_client,
)
from pulse_trio.client import request_by_name
from pulse_trio.handlers import schedule
from pulse_trio.migrate import migrate_sync
from pulse_trio.store import schedules
from pulse_trio.timing import timing
from support.stores import Window, open_store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pulse_trio.handlers import Schedule
    from pulse_trio.store import WorkerStore


def make(
    name: str = "s", *, cron: str | None = None, every: float | None = None, timezone: str | None = None, **how: Any
) -> Schedule:
    """A schedule of a kind `noop`; hourly unless said otherwise."""
    when = {key: how.pop(key) for key in ("catch_up", "due_as") if key in how}
    args = how.pop("args", None)
    chosen = timing(cron or (None if every else "0 * * * *"), every, timezone)
    return schedule(name, lambda given: request_by_name("noop", given, **how), args, chosen, **when)


@pytest.fixture
async def worker(alone: Window) -> AsyncGenerator[WorkerStore]:
    async with open_store(alone.dsn) as store:
        yield store


def move(window: Window, name: str, back: str) -> None:
    """Moves a schedule's next occurrence so far back, as if nobody had worked meanwhile."""
    window.run("UPDATE schedule SET next_due = next_due - %s::interval WHERE name = %s", back, name)


def come(window: Window, name: str = "s") -> datetime:
    """Lets the next occurrence come now; returns it."""
    return window.value(
        "UPDATE schedule SET next_due = clock_timestamp() WHERE name = %s RETURNING next_due::timestamptz", name
    )


def row(window: Window, name: str = "s") -> dict[str, Any]:
    (found,) = window.run("SELECT * FROM schedules WHERE name = %s", name)
    return found


def fires(window: Window, name: str = "s") -> list[dict[str, Any]]:
    return window.run("SELECT * FROM fires WHERE name = %s ORDER BY due_at", name)


# Declaring


async def test_a_declaration_is_written_as_it_was_made(alone: Window, worker: WorkerStore) -> None:
    made = make(
        cron="30 2 * * *",
        timezone="Europe/Berlin",
        catch_up="all",
        args={"n": 1},
        queue="q",
        priority=3,
        max_attempts=2,
    )
    await worker.declare_schedules([made, make("t", every=90.5)])
    found = row(alone)
    assert found | {
        "state": "active", "kind": "noop", "args": {"n": 1}, "queue": "q", "priority": 3, "cron": "30 2 * * *",
        "timezone": "Europe/Berlin", "every": None, "catch_up": "all", "declared": True, "declared_by": 1, "last_due": None,
    } == found  # fmt: skip
    assert found["next_due"] == made.timing.after(datetime.now(UTC))
    assert row(alone, "t")["every"] == timedelta(seconds=90.5)


async def test_what_is_unchanged_keeps_its_next_occurrence_and_a_new_timing_has_a_new_one(
    alone: Window, worker: WorkerStore
) -> None:
    await worker.declare_schedules([make()])
    move(alone, "s", "3 hours")
    stood = row(alone)["next_due"]
    await worker.declare_schedules([make(queue="other")])
    assert (row(alone)["next_due"], row(alone)["queue"]) == (stood, "other")
    await worker.declare_schedules([make(cron="5 * * * *")])
    assert row(alone)["next_due"] > stood + timedelta(hours=3) - timedelta(hours=1)
    assert row(alone)["next_due"].minute == 5


async def test_a_declaration_that_changes_nothing_writes_nothing(alone: Window, worker: WorkerStore) -> None:
    await worker.declare_schedules([make(args={"n": 1}, every=5)])
    before = alone.value("SELECT xmin::text || ctid::text FROM schedule")
    await worker.declare_schedules([make(args={"n": 1}, every=5)])
    assert alone.value("SELECT xmin::text || ctid::text FROM schedule") == before


async def test_a_schedule_that_no_live_worker_declares_is_shown_so_and_stays(
    alone: Window, worker: WorkerStore
) -> None:
    async with open_store(alone.dsn) as old:
        await old.declare_schedules([make("s"), make("gone")])
        await worker.declare_schedules([make("s")])
        assert (row(alone, "s")["declared_by"], row(alone, "gone")["declared_by"]) == (2, 1)
        await old.end_sessions()
    assert (row(alone, "s")["declared_by"], row(alone, "gone")["declared_by"]) == (1, 0)
    assert row(alone, "gone")["state"] == "active"
    alone.run("DELETE FROM session")
    assert alone.value("SELECT count(*) FROM schedule_declaration") == 0


async def test_a_paused_schedule_stays_paused_when_a_worker_declares_it(alone: Window, worker: WorkerStore) -> None:
    await worker.declare_schedules([make()])
    alone.do(schedules.pause("s"))
    await worker.declare_schedules([make(cron="5 * * * *")])
    assert row(alone)["state"] == "paused"


# Firing


async def test_an_occurrence_enqueues_the_job_and_moves_on(alone: Window, worker: WorkerStore) -> None:
    made = make(args={"n": 1.10}, queue="q", priority=3, max_attempts=2, timeout=9)
    await worker.declare_schedules([made])
    assert 0 < (await worker.next_schedule() or 0) <= 3600
    assert await worker.fire_schedules() == ([], [])
    due_at = come(alone)
    assert (await worker.next_schedule() or 0) < 0
    (fired,), broken = await worker.fire_schedules()
    assert (fired.name, fired.due_at, fired.added, broken) == ("s", due_at, True, [])
    assert 0 <= fired.late < 5
    job = alone.job(fired.job_id)
    assert (job["kind"], job["args"], job["queue"], job["priority"], job["max_attempts"]) == (
        "noop",
        {"n": 1.1},
        "q",
        3,
        2,
    )
    assert alone.value("SELECT options->>'timeout' FROM job") in ("9", "9.0")
    assert job["state"] == "available"
    (kept,) = fires(alone)
    assert (kept["due_at"], kept["job_id"], kept["added"]) == (due_at, fired.job_id, True)
    assert (row(alone)["last_due"], row(alone)["last_job"]) == (due_at, fired.job_id)
    assert row(alone)["next_due"] == made.timing.after(due_at)
    assert await worker.fire_schedules() == ([], [])


async def test_an_occurrence_wakes_idle_workers(alone: Window, worker: WorkerStore) -> None:
    heard: list[str] = []
    listening, got = trio.Event(), trio.Event()

    def on_notify(queue: str) -> None:
        heard.append(queue)
        (got if queue else listening).set()

    await worker.declare_schedules([make(queue="q")])
    async with open_store(alone.dsn) as idle, trio.open_nursery() as nursery:
        nursery.start_soon(idle.listen, on_notify)
        await listening.wait()
        await idle.announce_idle()
        come(alone)
        await worker.fire_schedules()
        with trio.fail_after(10):
            await got.wait()
        nursery.cancel_scope.cancel()
    assert heard == ["", "q"]


async def test_an_occurrence_that_was_fired_is_never_fired_again(alone: Window, worker: WorkerStore) -> None:
    await worker.declare_schedules([make(every=3600, catch_up="all")])
    move(alone, "s", "4 hours")
    assert len((await worker.fire_schedules())[0]) == 4
    move(alone, "s", "6 hours")
    # Six came in that time, but four of them had been fired.
    assert len((await worker.fire_schedules())[0]) == 2
    assert alone.value("SELECT count(*) FROM job") == len(fires(alone)) == 6


async def test_many_workers_at_once_fire_each_occurrence_once(alone: Window, worker: WorkerStore) -> None:
    await worker.declare_schedules([make(f"s{n}") for n in range(40)])
    alone.run("UPDATE schedule SET next_due = clock_timestamp() - interval '1 s'")
    counts: list[int] = []

    async def race(store: WorkerStore) -> None:
        counts.append(len((await store.fire_schedules())[0]))

    for _ in range(3):
        async with open_store(alone.dsn) as a, open_store(alone.dsn) as b, trio.open_nursery() as nursery:
            for store in (worker, a, b):
                nursery.start_soon(race, store)
    assert sum(counts) == 40
    assert alone.value("SELECT count(*) FROM job") == alone.value("SELECT count(*) FROM fires") == 40


async def test_what_another_worker_has_taken_is_skipped_and_comes_back_when_it_dies(
    alone: Window, worker: WorkerStore
) -> None:
    await worker.declare_schedules([make("s"), make("t")])
    come(alone, "s")
    come(alone, "t")
    with psycopg.connect(alone.dsn) as other:
        other.execute("SELECT FROM pulse.schedule WHERE name = 's' FOR NO KEY UPDATE")
        assert [f.name for f in (await worker.fire_schedules())[0]] == ["t"]
        other.rollback()
    assert [f.name for f in (await worker.fire_schedules())[0]] == ["s"]


async def test_a_lost_transaction_leaves_nothing(
    alone: Window, worker: WorkerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker.declare_schedules([make()])
    come(alone)

    def vanish(*_: Any) -> Any:
        raise DatabaseUnavailable("cut off after the job was written")

    with monkeypatch.context() as patch:
        patch.setattr(schedules, "_move", vanish)
        with pytest.raises(DatabaseUnavailable):
            await worker.fire_schedules()
    assert alone.value("SELECT (SELECT count(*) FROM job) + (SELECT count(*) FROM fires)") == 0
    assert len((await worker.fire_schedules())[0]) == 1


@pytest.mark.parametrize(("catch_up", "count"), [("skip", 0), ("last", 1), ("all", 10)])
async def test_ten_minutes_down(catch_up: Any, count: int, alone: Window, worker: WorkerStore) -> None:
    await worker.declare_schedules([make(cron="* * * * *", catch_up=catch_up)])
    move(alone, "s", "10 minutes")
    began = alone.value("SELECT clock_timestamp()")
    fired, _ = await worker.fire_schedules()
    # A minute may have ended since the declaration.
    assert len(fired) in ((count, count + 1) if catch_up == "all" else (count,))
    assert alone.value("SELECT count(*) FROM job") == len(fired)
    ((due_at,),) = [[max(f.due_at for f in fired)]] if fired else [[began]]
    assert began - due_at < timedelta(minutes=1, seconds=5)
    assert row(alone)["next_due"] > began
    # Back on time, every policy does the same.
    come(alone)
    assert len((await worker.fire_schedules())[0]) == 1


async def test_the_parameter_named_by_due_as_is_given_the_time_of_the_occurrence(
    alone: Window, worker: WorkerStore
) -> None:
    handlers = Handlers()

    @handlers.cron(every=3600, due_as="at", catch_up="all", args={"big": 2**63 - 1})
    @handlers.job
    async def report(big: int, at: datetime) -> None: ...

    await worker.declare_schedules(handlers.schedules)
    move(alone, "report", "3 hours")
    fired, _ = await worker.fire_schedules()
    assert len(fired) == 3
    for one in fired:
        args = alone.value("SELECT args::text FROM job WHERE id = %s", one.job_id)
        assert report.signature.decode(args) == ((2**63 - 1, one.due_at), {})


async def test_a_unique_key_keeps_the_jobs_of_a_schedule_apart(alone: Window, worker: WorkerStore) -> None:
    await worker.declare_schedules([make(unique_key="only")])
    come(alone)
    ((first,), _) = await worker.fire_schedules()
    come(alone)
    ((second,), _) = await worker.fire_schedules()
    assert (second.job_id, second.added) == (first.job_id, False)
    assert [f["added"] for f in fires(alone)] == [True, False]


async def test_a_paused_schedule_is_not_fired(alone: Window, worker: WorkerStore) -> None:
    await worker.declare_schedules([make()])
    come(alone)
    alone.do(schedules.pause("s"))
    assert await worker.next_schedule() is None
    assert await worker.fire_schedules() == ([], [])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("cron = '61 * * * *'", "bad minute field"),
        ("timezone = 'Nowhere'", "no time zone 'Nowhere'"),
        ("options = '{\"max_attempts\": 0}'", "refused that"),
        ('options = \'{"max_attempts": "many"}\'', "max_attempts"),
        ("options = '[]'", "array"),
        ('options = \'{"unique_key": "taken", "on_conflict": "raise"}\'', "unique key 'taken'"),
    ],
)
async def test_a_schedule_that_cannot_go_on_says_why_and_harms_nobody(
    damage: str, said: str, alone: Window, worker: WorkerStore
) -> None:
    await worker.declare_schedules([make("bad"), make("good")])
    alone.enqueue(unique_key="taken")
    alone.run(f"UPDATE schedule SET {damage} WHERE name = 'bad'")
    come(alone, "bad")
    come(alone, "good")
    fired, broken = await worker.fire_schedules()
    assert ([f.name for f in fired], [b.name for b in broken]) == (["good"], ["bad"])
    assert said in broken[0].error
    assert (row(alone, "bad")["state"], row(alone, "bad")["problem"]) == ("broken", broken[0].error)
    assert fires(alone, "bad") == []
    assert await worker.fire_schedules() == ([], [])
    # Declared again, it goes on.
    await worker.declare_schedules([make("bad")])
    assert row(alone, "bad")["state"] == "active"
    assert row(alone, "bad")["next_due"] > datetime.now(UTC)


async def test_fires_are_forgotten_after_their_retention(alone: Window, worker: WorkerStore) -> None:
    await worker.declare_schedules([make(every=3600, catch_up="all")])
    move(alone, "s", "3 hours")
    await worker.fire_schedules()
    alone.run(
        "UPDATE schedule_fire SET fired_at = fired_at - interval '2 days' WHERE due_at < now() - interval '1 hour'"
    )
    await worker.prune_fires(86400.0)
    assert len(fires(alone)) == 1


async def test_a_role_that_may_not_is_told_and_the_worker_lives(alone: Window) -> None:
    alone.run("DROP ROLE IF EXISTS pulse_trio_no_schedules")
    alone.run("CREATE ROLE pulse_trio_no_schedules")
    try:
        alone.run(
            "GRANT USAGE ON SCHEMA pulse TO pulse_trio_no_schedules;"
            "GRANT SELECT, INSERT ON pulse.session TO pulse_trio_no_schedules"
        )
        dsn = make_conninfo(alone.dsn, options="-c role=pulse_trio_no_schedules")
        async with open_store(dsn) as store:
            for call in (store.next_schedule, store.fire_schedules, lambda: store.declare_schedules([make()])):
                with pytest.raises(DatabaseUnavailable, match=r"cannot fire schedules.*permission denied"):
                    await call()
    finally:
        alone.run("DROP OWNED BY pulse_trio_no_schedules; DROP ROLE pulse_trio_no_schedules")


# At run time


def test_a_schedule_is_made_changed_paused_resumed_run_and_removed(alone: Window) -> None:
    client = SyncClient(alone.dsn)
    client.schedule("daily", "noop", {"n": 1}, cron="@daily", timezone="Asia/Tokyo", queue="q", catch_up="skip")
    (found,) = client.schedules()
    assert (found.name, found.state, found.declared, found.args, found.queue) == (
        "daily",
        "active",
        False,
        {"n": 1},
        "q",
    )
    client.schedule("daily", "noop", {"n": 2}, every=timedelta(hours=1))
    (found,) = client.schedules()
    assert (found.args, found.cron, found.every, found.queue, found.catch_up) == (
        {"n": 2},
        None,
        3600.0,
        "default",
        "last",
    )

    client.pause_schedule("daily")
    move(alone, "daily", "5 hours")
    assert client.schedules()[0].state == "paused"
    assert client.schedules()[0].next_due is None
    done = client.run_schedule("daily")
    assert alone.job(done.id)["args"] == {"n": 2}
    (fire,) = client.fires("daily")
    assert (fire.job_id, fire.added, fire.job_state) == (done.id, True, "available")

    next_due = client.resume_schedule("daily")
    assert next_due is not None
    # What came while it was paused was not wanted.
    assert datetime.now(UTC) < next_due <= datetime.now(UTC) + timedelta(hours=1)
    assert client.schedules()[0].next_due == next_due

    client.remove_schedule("daily")
    assert client.schedules() == []
    assert [f.job_id for f in client.fires("daily")] == [done.id]


async def test_a_handlers_schedule_is_typed_and_may_be_made_in_a_transaction_of_the_callers(alone: Window) -> None:
    handlers = Handlers()

    @handlers.job(queue="mail", max_attempts=3)
    async def greet(name: str) -> None: ...

    async with open_client(alone.dsn) as client:
        await client.schedule("greet", greet, {"name": "Ada"}, cron="0 9 * * *", timezone="Europe/Berlin")
        (found,) = await client.schedules()
        assert (found.kind, found.args, found.queue, found.timezone) == (
            "greet",
            {"name": "Ada"},
            "mail",
            "Europe/Berlin",
        )
        await client.pause_schedule("greet")
        ref = await client.run_schedule("greet")
        assert alone.job(ref.id)["max_attempts"] == 3
        assert (await client.resume_schedule("greet") or found.created_at) > found.created_at
        assert [f.job_id for f in await client.fires("greet")] == [ref.id]
        await client.remove_schedule("greet")
        with pytest.raises(ConfigurationError, match=r"greet.*name"):
            await client.schedule("greet", greet, {"nam": "Ada"}, cron="0 9 * * *")
        with pytest.raises(ConfigurationError, match="one of them"):
            await client.schedule("greet", greet, {"name": "Ada"}, cron="0 9 * * *", every=5)
        assert await client.schedules() == []
    with psycopg.connect(alone.dsn) as connection:
        SyncClient(connection).schedule("greet", greet, {"name": "Ada"}, every=5)
        connection.rollback()
    assert SyncClient(alone.dsn).schedules() == []


def test_an_unknown_schedule_is_told_with_names_like_it(alone: Window) -> None:
    client = SyncClient(alone.dsn)
    client.schedule("nightly", "noop", every=60)
    calls = (client.pause_schedule, client.resume_schedule, client.remove_schedule, client.run_schedule, client.fires)
    for call in calls:
        with pytest.raises(UnknownSchedule, match=r"no schedule 'nigthly'\. Did you mean 'nightly'"):
            call("nigthly")
    assert client.fires("nightly") == []


async def test_what_code_declares_is_changed_in_code(alone: Window, worker: WorkerStore) -> None:
    await worker.declare_schedules([make()])
    with pytest.raises(UsageError, match="declared in code"):
        SyncClient(alone.dsn).schedule("s", "noop", every=60)
    assert alone.do(schedules.remove("s")) == 1


def test_pausing_waits_for_no_firing_and_neither_deadlocks(alone: Window) -> None:
    client = SyncClient(alone.dsn)
    for n in range(5):
        client.schedule(f"s{n}", "noop", every=1)
    stop = threading.Event()
    errors: list[BaseException] = []

    def toggle() -> None:
        try:
            while not stop.is_set():
                for n in range(5):
                    client.pause_schedule(f"s{n}")
                    client.resume_schedule(f"s{n}")
        except BaseException as error:  # noqa: ASYNC103 -- looked at below
            errors.append(error)

    thread = threading.Thread(target=toggle)
    thread.start()

    async def fire() -> None:
        async with open_store(alone.dsn) as store:
            for _ in range(30):
                alone.run("UPDATE schedule SET next_due = clock_timestamp() WHERE paused_at IS NULL")
                await store.fire_schedules()

    try:
        trio.run(fire)
    finally:
        stop.set()
        thread.join()
    assert errors == []


def test_the_operations_leave_the_callers_time_zone_and_styles_alone(alone: Window) -> None:
    with psycopg.connect(alone.dsn) as connection:
        connection.execute("SET TimeZone = 'Asia/Tokyo'; SET IntervalStyle = 'iso_8601'")
        client = SyncClient(connection)
        client.schedule("s", "noop", every=7.5, due_as="at")
        done = client.run_schedule("s")
        assert client.resume_schedule("s") is not None
        ((args,),) = connection.execute("SELECT args FROM pulse.jobs WHERE id = %s", [done.id]).fetchall()
    assert datetime.fromisoformat(args["at"]).utcoffset() == timedelta(0)


async def test_a_hostile_schema_name_serves_a_schedule_from_declaration_to_removal(empty_dsn: str) -> None:
    schema = """it's "%s" :"schema" \\ $$"""
    migrate_sync(empty_dsn, schema)
    client = SyncClient(empty_dsn, schema=schema)
    with Window(empty_dsn, schema=schema) as window:
        async with open_store(empty_dsn, schema=schema) as store:
            await store.declare_schedules([make()])
            come(window)
            assert len((await store.fire_schedules())[0]) == 1
            await store.prune_fires(60.0)
            assert await store.next_schedule() is not None
        assert [f.job_state for f in client.fires("s")] == ["available"]
    client.pause_schedule("s")
    client.resume_schedule("s")
    client.run_schedule("s")
    client.remove_schedule("s")
    assert client.schedules() == []


@pytest.mark.parametrize(
    ("night", "expression", "expected"),
    [
        ("2026-03-28T23:30Z", "30 2 * * *", ["03-29T01:00"]),
        ("2026-10-24T23:30Z", "30 2 * * *", ["10-25T00:30"]),
        ("2026-03-28T23:30Z", "0 * * * *", ["03-29T00:00", "03-29T01:00", "03-29T02:00", "03-29T03:00"]),
        ("2026-10-24T23:30Z", "0 * * * *", ["10-25T00:00", "10-25T01:00", "10-25T02:00", "10-25T03:00"]),
    ],
)
def test_a_night_of_four_hours_in_berlin_with_a_look_every_minute(
    night: str, expression: str, expected: list[str]
) -> None:
    """The operation that a worker runs, given the rows a server would give."""
    clock, fired = datetime.fromisoformat(night), []
    next_due = timing(expression, None, "Europe/Berlin").after(clock)
    for minute in range(4 * 60):
        now = clock + timedelta(minutes=minute, seconds=1)
        if next_due is None or next_due > now:
            continue
        row = ("s", "noop", "{}", "default", 0, None, expression, "Europe/Berlin", None, "last", None, next_due, now)
        operation = schedules._catch_up(row)
        answers: dict[str, list[tuple[Any, ...]]] = {
            "schedule_fire": [(next_due,)], "enqueue_many": [(1, True, 7)], "schedule_fired": [], "schedule_move": [],
        }  # fmt: skip
        query = next(operation)
        try:
            while True:
                if query.name == "schedule_move":
                    next_due = query.parameters["next_due"]
                query = operation.send(answers[query.name])
        except StopIteration as stop:
            fired += [f"{one.due_at:%m-%dT%H:%M}" for one in stop.value]
    assert fired == expected


def test_a_schedule_that_is_active_is_resumed_as_it_is(dsn: str, window: Window) -> None:
    """Its missed occurrences were left out, and the one that was due."""
    client = SyncClient(dsn)
    client.schedule("s", "greet", {"name": "ada"}, every=60, catch_up="all")
    window.run("UPDATE schedule SET next_due = next_due - interval '1 h'")
    (before,) = client.schedules()
    assert client.resume_schedule("s") == before.next_due
    assert client.schedules() == [before]


def test_two_runs_at_one_moment_are_two(dsn: str, window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a test stands still between two moves. The second was a bare ValueError."""
    client = SyncClient(dsn)
    client.schedule("s", "greet", {"name": "ada"}, every=3600)
    moment = window.value("SELECT clock_timestamp()")
    taken = schedules._due
    monkeypatch.setattr(schedules, "_due", lambda row: taken(row)._replace(now=moment))
    refs = [client.run_schedule("s") for _ in range(3)]
    assert len({ref.id for ref in refs}) == 3
    assert [fire.job_id for fire in client.fires("s")] == [ref.id for ref in reversed(refs)]
