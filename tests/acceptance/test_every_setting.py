"""Every setting of PostgreSQL that a database, a role or a DSN may set, one by one, at each of its extremes.

A sample of about twelve is tried each time. `PULSE_TRIO_SETTINGS=0:1` tries them all, and `1:4` every fourth
from the second on.
"""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, NamedTuple

import psycopg
import trio
from psycopg.sql import SQL, Identifier, Literal

from pulse_trio import Handlers, Job, SyncClient, Worker, open_client
from pulse_trio.cli.application import status_of
from pulse_trio.observe import JobStarted
from pulse_trio.postgres import PINNED, UNBOUNDED, connect_sync
from support.embedded_workers import Heard

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLE = 12
WITHIN = 60.0
LEFT_OUT = {
    # The server or the session is then as good as absent, whoever uses it.
    "post_auth_delay": "every connection waits for so long",
    "default_transaction_read_only": "said and waited for: test_configured_sessions.py",
    "transaction_read_only": "a transaction's own; the same",
    "transaction_isolation": "a transaction's own",
    "transaction_deferrable": "a transaction's own",
    "in_hot_standby": "cannot be set",
    # Names of things that there would have to be, or that are loaded.
    "role": "who one is: test_roles.py",
    "session_authorization": "who one is: test_roles.py",
    "is_superuser": "cannot be set",
    # For who develops PostgreSQL.
    "debug_discard_caches": "a hundred times slower on purpose",
}
TEXTS = {
    "search_path": "evil, public",
    "DateStyle": "SQL, DMY",
    "TimeZone": "<+0545>-05:45",
    "client_encoding": "LATIN1",
    "application_name": "<b>'\"\\",
    "timezone_abbreviations": "India",
    "backtrace_functions": "ereport",
    "log_statement": "all",
    "default_text_search_config": "pg_catalog.simple",
    "lc_messages": "C",
    "lc_monetary": "C",
    "lc_numeric": "C",
    "lc_time": "C",
    "createrole_self_grant": "set, inherit",
    "wal_consistency_checking": "all",
    "synchronized_standby_slots": "",
    "restrict_nonsystem_relation_kind": "view, foreign-table",
    "event_source": "x",
    "default_table_access_method": "heap",
    "default_toast_compression": "pglz",
}
"""Settings of text: one value for each that is none of the usual ones. The others name files, roles or libraries."""


class Setting(NamedTuple):
    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


def settings(dsn: str) -> Iterator[Setting]:
    query = (
        "SELECT name, vartype, reset_val, min_val, max_val, enumvals FROM pg_settings WHERE context IN "
        "('user', 'superuser', 'backend', 'superuser-backend') ORDER BY name"
    )
    with psycopg.connect(dsn) as connection:
        for name, kind, usual, low, high, words in connection.execute(query).fetchall():
            if name in LEFT_OUT:
                continue
            if kind == "bool":
                values = ["off" if usual == "on" else "on"]
            elif kind == "enum":
                values = [word for word in words if word != usual]
            elif kind in ("integer", "real"):
                values = [value for value in (low, high) if value != usual]
            else:
                values = [TEXTS[name]] if name in TEXTS else []
            yield from (Setting(name, value) for value in values)


def chosen(found: list[Setting]) -> list[Setting]:
    given = os.environ.get("PULSE_TRIO_SETTINGS")
    first, step = map(int, given.split(":")) if given else (3, max(1, len(found) // SAMPLE))
    return found[first::step]


def set_for_all(connection: psycopg.Connection, setting: Setting) -> bool:
    """Whether this server takes the value at all."""
    value = SQL(", ").join(
        map(Literal, setting.value.split(", ") if setting.name == "search_path" else [setting.value])
    )
    name = SQL(".").join(map(Identifier, setting.name.split(".")))
    try:
        connection.execute(SQL("ALTER DATABASE {} SET {} = {}").format(Identifier(connection.info.dbname), name, value))
    except psycopg.Error:
        return False
    return True


async def jobs_are_run(dsn: str) -> None:
    """Enqueue, claim, complete, fail, retry, cancel, commit in a transaction; and what is said of it all."""
    handlers = Handlers()

    @handlers.job
    async def echo(text: str) -> str:
        return text

    @handlers.job(max_attempts=2, backoff_base=0.001)
    async def fails_once(job: Job) -> int:
        if job.attempt == 1:
            raise ValueError("€ \\ '")
        return job.attempt

    @handlers.job
    async def pays(job: Job) -> None:
        async with job.transaction() as tx:
            await tx.execute("INSERT INTO public.ledger VALUES (%s)", [job.id])

    @handlers.job
    async def waits() -> None:
        await trio.sleep_forever()

    heard = Heard()
    async with open_client(dsn, handlers=handlers) as client, trio.open_nursery() as nursery:
        worker = Worker(
            handlers, dsn, poll=0.05, watchdog=0.2, lease=30.0, heartbeat=0.2, instruments=[heard], log=False
        )
        await nursery.start(worker.run)
        ended = await client.enqueue(waits)
        refs = [await client.enqueue(fails_once), await client.enqueue(pays)]
        refs += await client.enqueue_many([echo.request(f"€ \\ '{n}") for n in range(15)])
        later = await client.enqueue(echo.options(delay=3600, unique_key="€"), "later")
        assert (await client.cancel(later.id)).state == "cancelled"
        await heard.until(JobStarted, job_id=ended.id)
        await client.cancel(ended.id)
        assert [await ref.result() for ref in refs] == [2, None, *(f"€ \\ '{n}" for n in range(15))]
        assert (await ended.wait()).state == "cancelled"
        assert len(await client.attempts(refs[0].id)) == 2
        assert {job.state for job in await client.jobs(limit=100)} == {"completed", "cancelled"}
        worker.stop()


def command(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = status_of(arguments)
    return code, out.getvalue(), err.getvalue()


def commands_work(dsn: str) -> None:
    for arguments, codes in (
        (["enqueue", "echo", '{"text": "€"}'], [0]),
        (["jobs", "list", "--json"], [0]),
        (["queues", "list"], [0]),
        (["workers"], [0]),
        (["migrate", "--check"], [0]),
        (["doctor"], [0, 1]),
    ):
        code, out, err = command(*arguments, f"--dsn={dsn}")
        assert code in codes, (arguments, out, err)
        assert "bug in pulse-trio" not in err, err
        if "--json" in arguments:
            assert json.loads(out)
    sync = SyncClient(dsn)
    assert [job.args for job in sync.jobs(state="available", limit=10)] == [{"text": "€"}]


def test_a_setting_that_a_database_makes_for_its_sessions_bends_nothing(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True, options="-c statement_timeout=0") as admin:
        admin.execute("LOAD 'plpgsql'")
        admin.execute("CREATE SCHEMA evil; CREATE TABLE public.ledger (job bigint)")
        found = list(settings(dsn))
        tried: list[Setting] = []
        bent: dict[str, str] = {}
        for setting in chosen(found):
            admin.execute("TRUNCATE pulse.job; DELETE FROM pulse.job_archive; TRUNCATE public.ledger")
            if not set_for_all(admin, setting):
                continue
            try:
                trio.run(one, dsn)
                commands_work(dsn)
                with connect_sync(dsn, PINNED | UNBOUNDED) as connection:
                    connection.execute(
                        "UPDATE pulse.maintenance SET maintained_at = '-infinity', swept_at = '-infinity'"
                    )
                    connection.execute("SELECT pulse.upkeep('7 days')")
            except (Exception, BaseExceptionGroup) as error:
                bent[str(setting)] = repr(error)
                if os.environ.get("PULSE_TRIO_SETTINGS") is None:
                    raise
            finally:
                admin.execute(SQL("ALTER DATABASE {} RESET ALL").format(Identifier(admin.info.dbname)))
            tried.append(setting)
    assert bent == {}
    assert len(tried) >= 10, tried


async def one(dsn: str) -> None:
    with trio.fail_after(WITHIN):
        await jobs_are_run(dsn)
