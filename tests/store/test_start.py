"""What a worker's start meets: transactions that PostgreSQL ends in favour of others, and rows that somebody has hidden."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from psycopg.conninfo import make_conninfo

from pulse_trio import ConfigurationError, DatabaseUnavailable, Handlers, SchemaError, Worker, WorkerSettings
from pulse_trio.observe import JobEnded
from pulse_trio.store import WorkerStore, health
from support.embedded_workers import working
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator

    from pulse_trio.testing.faults.processes import Processes
    from pulse_trio.testing.faults.proxy import Proxy

handlers = Handlers()
handlers.queue("narrow", limit=3)


@handlers.job
async def noop() -> None: ...


@pytest.fixture
def window(dsn: str) -> Generator[Window]:
    with Window(dsn) as window:
        yield window


# Deadlocks


def disturb(window: Window, table: str, state: str, times: int) -> None:
    """The first so many inserts into `table` fail as if another transaction had been preferred. A sequence counts them, for it
    is not rolled back."""
    window.run("CREATE SEQUENCE public.tries")
    window.run(
        "CREATE FUNCTION public.disturb() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF nextval('public.tries') <= {times} THEN RAISE EXCEPTION 'not now' USING ERRCODE = '{state}'; END IF; "
        "RETURN NEW; END $$"
    )
    window.run(f"CREATE TRIGGER disturb BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION public.disturb()")


@pytest.mark.parametrize("state", ["40P01", "40001"])
@pytest.mark.parametrize("table", ["session", "queue"])
async def test_a_start_that_is_ended_in_favour_of_others_is_tried_again(
    table: str, state: str, dsn: str, window: Window
) -> None:
    disturb(window, table, state, times=2)
    async with working(handlers, dsn, poll=0.1) as heard:
        job_id = window.enqueue()
        await heard.until(JobEnded, job_id=job_id, outcome="completed")
    assert window.run("SELECT max_running FROM queue WHERE name = 'narrow'") == [{"max_running": 3}]
    assert window.value("SELECT count(*) FROM session") == 1


async def test_a_start_that_is_always_ended_in_favour_of_others_gives_up(dsn: str, window: Window) -> None:
    disturb(window, "session", "40P01", times=1000)
    with pytest.raises(DatabaseUnavailable, match="not now"):
        await Worker(handlers, dsn).run()
    assert window.value("SELECT last_value FROM public.tries") == 5


# A slow server


async def test_a_worker_of_short_leases_starts_on_a_server_that_is_slower_than_they_allow(proxy: Proxy) -> None:
    """A statement may take a sixth of the lease: none is held yet when a worker starts."""
    proxy.delay(0.3)
    store = WorkerStore(proxy.dsn, lease=0.6)
    try:
        await store.check_schema()
        assert await store.open_session()
        await store.declare_limits(handlers.queue_limits)
        with pytest.raises(DatabaseUnavailable, match=r"did not answer within 0\.1 s"):
            await store.sweep(None)
    finally:
        await store.aclose()


# Row-level security


def test_the_policies_of_the_schema_itself_are_known(window: Window) -> None:
    assert window.value("SELECT count(*) FROM pg_policy") > 0
    assert window.do(health.row_security()) == []


LOGIN = "pulse_trio_row_security"
FOREIGN = {
    "job": ["ALTER TABLE job ENABLE ROW LEVEL SECURITY"],
    "attempt (policy mine)": ["CREATE POLICY mine ON attempt AS RESTRICTIVE FOR SELECT USING (false)"],
    "session (policy a, policy b)": [
        "ALTER TABLE session ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY a ON session USING (false)",
        "CREATE POLICY b ON session USING (true)",
    ],
}


@pytest.fixture
def login(window: Window, dsn: str) -> Generator[str]:
    """The DSN of a login that may do all in the schema, and is no superuser."""
    window.run(f"DO $$ BEGIN CREATE ROLE {LOGIN} LOGIN PASSWORD 'x'; EXCEPTION WHEN duplicate_object THEN END $$")
    window.run(f"GRANT USAGE ON SCHEMA pulse TO {LOGIN}")
    window.run(f"GRANT ALL ON ALL TABLES IN SCHEMA pulse TO {LOGIN}")
    window.run(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA pulse TO {LOGIN}")
    yield make_conninfo(dsn, user=LOGIN, password="x")
    window.run(f"DROP OWNED BY {LOGIN}")


@pytest.mark.parametrize("said", FOREIGN)
async def test_a_worker_from_whom_somebody_hides_rows_does_not_start(said: str, login: str, window: Window) -> None:
    for command in FOREIGN[said]:
        window.run(command)
    with pytest.raises(SchemaError) as refused:
        await Worker(handlers, login).run()
    assert f"may hide rows of {said.partition(' ')[0]} (" in str(refused.value)
    assert said.partition("(")[2].rstrip(")") in str(refused.value)
    assert "BYPASSRLS" in str(refused.value)


async def test_a_worker_that_row_level_security_does_not_hold_starts_and_doctor_warns(
    dsn: str, window: Window, processes: Processes
) -> None:
    for commands in FOREIGN.values():
        for command in commands:
            window.run(command)
    async with working(handlers, dsn, poll=0.1) as heard:  # a superuser
        job_id = window.enqueue()
        await heard.until(JobEnded, job_id=job_id, outcome="completed")
    found = await processes.run("doctor", f"--dsn={dsn}", code=1)  # the tests' server has no autovacuum
    for said in FOREIGN:
        assert f"may hide rows of {said}" in found


async def test_row_level_security_that_is_forced_on_the_owner_is_found(window: Window) -> None:
    window.run("ALTER TABLE job_archive FORCE ROW LEVEL SECURITY")
    assert window.do(health.row_security()) == [health.RowSecurity("job_archive", [], True, False)]
    window.run(f"DO $$ BEGIN CREATE ROLE {LOGIN} LOGIN PASSWORD 'x'; EXCEPTION WHEN duplicate_object THEN END $$")
    window.run(f"ALTER TABLE job_archive OWNER TO {LOGIN}")
    assert window.do(health.row_security()) == [health.RowSecurity("job_archive", [], True, True)]
    window.run("ALTER TABLE job_archive OWNER TO CURRENT_USER")


# Settings


async def test_the_longest_times_that_settings_allow_are_times_of_the_schema(dsn: str, window: Window) -> None:
    """A lease of 999 years was one to the settings, and none to a constraint: the database was said to be away."""
    longest = WorkerSettings(lease=998 * 360 * 86400.0)
    too_long = 999.5 * 365 * 86400
    with pytest.raises(ConfigurationError, match="'lease' must be above 0 and at most a thousand years"):
        WorkerSettings(lease=too_long)
    async with working(handlers, dsn, lease=longest.lease, poll=0.1) as heard:
        job_id = window.enqueue()
        await heard.until(JobEnded, job_id=job_id, outcome="completed")
