"""A bad row harms itself alone: whatever stands in a job's columns, it ends as dead, it is named, and the others go on."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio
from psycopg.types.json import Jsonb

from pulse_trio import Handlers, Worker, open_client
from pulse_trio.errors import DatabaseUnavailable, InvalidArguments, InvalidTransition
from pulse_trio.jobs import Outcome
from pulse_trio.migrate import migrate_sync
from pulse_trio.observe import BadRow, JobsRescued
from pulse_trio.store import health
from pulse_trio.store.trees import Fence
from support.stores import Window, claim, claim_one, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from support.databases import Databases

DEEP = '{"a":' * 3000 + "1" + "}" * 3000
OPTIONS = {
    "a crash_limit above every number": '{"crash_limit":1e999}',
    "a crash_limit below every number": '{"crash_limit":1e-999}',
    "options of another type": '{"timeout":"soon"}',
    "a list": "[1, 2]",
    "a name with an escaped NUL": '{"\\u0000":1,"crash_limit":2}',
    "3,000 levels": DEEP,
    "64 KiB": '{"x":"' + "x" * 65536 + '"}',
}


class Seen:
    """What a worker says of bad rows."""

    def __init__(self) -> None:
        self.bad: list[BadRow] = []
        self.rescues: list[JobsRescued] = []

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        return {BadRow: self.bad.append, JobsRescued: self.rescues.append}


@pytest.fixture
def window(dsn: str) -> Generator[Window]:
    with Window(dsn) as window:
        yield window


def plant(window: Window, **columns: Any) -> int:
    """A row as an older version, or the owner, may have written it: no function and no domain looks at it."""
    given = {"kind": "noop", "queue": "default", "args": "{}", "options": None, "run_at": "-1 s"} | columns
    window.run("ALTER DOMAIN arguments DROP CONSTRAINT IF EXISTS arguments_are_readable")
    row = window.run(
        "INSERT INTO job (kind, queue, args, options, run_at, attempt, max_attempts, failures, crashes)"
        " VALUES (%s, %s, %s::text::json, %s::text::json, now() + %s::interval, %s, %s, %s, %s) RETURNING id",
        *(given[name] for name in ("kind", "queue", "args", "options", "run_at")),
        *(given.get(name, usual) for name, usual in _USUAL.items()),
    )
    return row[0]["id"]


_USUAL = {"attempt": 0, "max_attempts": 20, "failures": 0, "crashes": 0}


def handlers_of(done: list[int]) -> Handlers:
    handlers = Handlers()

    @handlers.job
    async def noop() -> None: ...

    @handlers.job
    async def count(n: int) -> None:
        done.append(n)

    return handlers


async def burst(dsn: str, handlers: Handlers, seen: Seen) -> None:
    with trio.fail_after(30):
        await Worker(handlers, dsn, burst=True, instruments=[seen]).run()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
async def test_a_row_whose_options_cannot_be_read_is_dead_and_named_and_the_others_complete(
    dsn: str, window: Window, options: str
) -> None:
    bad = [plant(window, options=options) for _ in range(3)]
    good = [window.enqueue(kind="count", args={"n": n}) for n in range(10)]
    done: list[int] = []
    seen = Seen()
    await burst(dsn, handlers_of(done), seen)
    assert sorted(done) == list(range(10))
    assert [window.state(job_id) for job_id in good] == ["completed"] * 10
    found = [window.job(job_id) for job_id in bad]
    if not all(job["state"] == "completed" for job in found):
        # What a worker can read of them all the same is read; the rest is dead at its first attempt.
        assert [(job["state"], job["attempt"]) for job in found] == [("dead", 1)] * 3
        assert all("UnreadableOptions" in job["error"] for job in found)
        assert sorted(event.job_id or 0 for event in seen.bad) == bad
    else:
        assert "crash_limit" in options


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
async def test_a_row_whose_options_cannot_be_read_is_rescued_like_any_other(
    dsn: str, window: Window, options: str
) -> None:
    async with open_store(dsn) as store, open_store(dsn) as other:
        bad = plant(window, options=options)
        good = window.enqueue()
        held = await claim(store)
        assert {c.id for c in held} == {bad, good}
        window.expire(bad, good)
        assert (await other.rescue()) == (2, 0)
        # The worker reports all the same: it lives, and both jobs are absolved.
        refused = await store.settle([Outcome(c, "failed", error="late") for c in held])
        assert {o.claim.id for o in refused.refused} == {bad, good}
        assert [row["crashes"] for row in window.run("SELECT crashes FROM job")] == [0, 0]


async def test_the_last_attempt_that_a_number_can_have_is_dead_and_stops_no_claim(dsn: str, window: Window) -> None:
    bad = plant(window, attempt=2**31 - 1, max_attempts=2**31 - 1, failures=2**31 - 1, crashes=32767)
    good = window.enqueue(kind="count", args={"n": 1})
    done: list[int] = []
    seen = Seen()
    await burst(dsn, handlers_of(done), seen)
    assert done == [1]
    assert window.state(good) == "completed"
    assert window.state(bad) == "dead"
    assert [event.job_id for event in seen.bad] == [bad]


def refuse(window: Window, table: str, event: str, rows: str) -> None:
    """A trigger of the owner's that refuses certain rows: it stands for what a row may do that nobody thought of."""
    window.run(
        f"CREATE FUNCTION refuse_{table}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " RAISE 'no' USING ERRCODE = 'numeric_value_out_of_range'; END $$"
    )
    window.run(
        f"CREATE TRIGGER refuse BEFORE {event} ON {table} FOR EACH ROW WHEN ({rows}) EXECUTE FUNCTION refuse_{table}()"
    )


THE_THIRD = "NEW.state = 3 AND NEW.args::text = '{\"n\": 3}'"


async def test_a_report_that_is_refused_for_one_row_is_written_for_all_others(dsn: str, window: Window) -> None:
    refuse(window, "job", "UPDATE", THE_THIRD)
    seen: list[BadRow] = []
    async with open_store(dsn, on_event=seen.append) as store:
        ids = [window.value("SELECT enqueue('noop', %s)", Jsonb({"n": n})) for n in range(10)]
        held = await claim(store)
        settled = await store.settle([Outcome(c, "failed", error="it failed") for c in held])
    assert len(settled.accepted) == 10
    states = [window.state(job_id) for job_id in ids]
    assert states == ["available" if n != 3 else "dead" for n in range(10)]
    buried = window.job(ids[3])
    assert "BadRow" in buried["error"]
    assert "it failed" in buried["error"]
    assert buried["args"] == {"n": 3}
    assert [(event.job_id, event.during) for event in seen if isinstance(event, BadRow)] == [
        (ids[3], "report of failed")
    ]
    assert [a["outcome"] for a in window.attempts(ids[3])] == ["failed"]


async def test_a_statement_for_one_parent_that_fails_of_its_row_names_that_job(dsn: str, window: Window) -> None:
    """The log said that a row blocks trees, and not which."""
    seen: list[BadRow] = []
    async with open_store(dsn, on_event=seen.append) as store:
        window.enqueue("roots")
        parent = await claim_one(store, "roots")
        with pytest.raises(DatabaseUnavailable, match=f"trees: job {parent.id}: a row made a statement fail"):
            # As where `durable_job.first_block` is damaged: the numbers of blocks go on from there.
            await store.trees.look(Fence(parent.id, parent.attempt, parent.session), 2**31)
    (event,) = [event for event in seen if isinstance(event, BadRow)]
    assert (event.job_id, event.during) == (None, "trees")
    assert event.error.startswith(f"job {parent.id}: NumericValueOutOfRange: ")


async def test_a_rescue_that_is_refused_for_one_row_is_done_for_all_others(dsn: str, window: Window) -> None:
    refuse(window, "job", "UPDATE", THE_THIRD)
    seen: list[BadRow] = []
    async with open_store(dsn) as gone, open_store(dsn, on_event=seen.append) as store:
        ids = [window.value("SELECT enqueue('noop', %s)", Jsonb({"n": n})) for n in range(10)]
        assert len(await claim(gone)) == 10
        found = await store.rescue_sessions([gone.session])
        assert (found.rescued, found.dead, len(found.jobs)) == (9, 1, 10)
        assert not any(await store.rescue_sessions([gone.session]))
    assert [window.state(job_id) for job_id in ids] == ["available" if n != 3 else "dead" for n in range(10)]
    assert [(event.job_id, event.during) for event in seen if isinstance(event, BadRow)] == [(ids[3], "rescue")]


async def test_a_row_that_cannot_even_be_made_dead_keeps_no_other_from_its_rescue(dsn: str, window: Window) -> None:
    refuse(window, "job", "UPDATE", THE_THIRD)
    refuse(window, "job_archive", "INSERT", "true")
    async with open_store(dsn) as gone, open_store(dsn) as store:
        ids = [window.value("SELECT enqueue('noop', %s)", Jsonb({"n": n})) for n in range(10)]
        assert len(await claim(gone)) == 10
        found = await store.rescue_sessions([gone.session])
        assert (found.rescued, found.dead) == (9, 0)
        # What was found again and could not be moved is no reason to look for ever.
        assert not any(await store.rescue_sessions([gone.session]))
    assert [window.state(job_id) for job_id in ids] == ["available" if n != 3 else "running" for n in range(10)]


UNREADABLE = {
    "an escaped NUL": '{"a":"\\u0000"}',
    "half a surrogate pair": '{"a":"\\ud83d"}',
    "a number above numeric": '{"a":1e200000}',
    "a number below numeric": '{"a":1e-20000}',
    "3,000 levels": DEEP,
    "10,000 levels and lists": '{"a":' + "[" * 10000 + "]" * 10000 + "}",
}


async def test_lists_and_views_show_every_row(dsn: str, window: Window) -> None:
    ids = [plant(window, args=args) for args in UNREADABLE.values()]
    good = window.enqueue(kind="count", args={"n": 1, "text": "\\u0000 is no NUL, 1e200000 no number"})
    async with open_client(dsn) as client:
        found = {job.id: job for job in await client.jobs()}
        assert set(found) == {*ids, good}
        assert found[good].args == {"n": 1, "text": "\\u0000 is no NUL, 1e200000 no number"}
        for job_id in ids:
            assert found[job_id].args.keys() == {"$unreadable"}
            assert (await client.job(job_id)).args == found[job_id].args
            # Whatever is done with one that nobody can read.
            assert (await client.cancel(job_id)).state == "cancelled"
        window.run("UPDATE job_archive SET result = args")
        assert {job.id for job in await client.jobs()} == {*ids, good}
    assert len(window.run("SELECT args, result FROM jobs")) == len(ids) + 1


async def test_processes_that_read_jobs_together_show_every_row(dsn: str, window: Window) -> None:
    """A server may split a query among processes, and a function with an exception block fails in them."""
    ids = {plant(window, args=args) for args in UNREADABLE.values()}
    async with open_client(dsn) as client:
        for job_id in ids:
            await client.cancel(job_id)
    window.run("UPDATE job_archive SET result = args")
    window.run("SET max_parallel_workers_per_gather = 2; SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0")
    window.run(
        "SET min_parallel_table_scan_size = 0; SET enable_indexscan = off; SET parallel_leader_participation = off"
    )
    plan = "\n".join(row["QUERY PLAN"] for row in window.run("EXPLAIN (ANALYZE) SELECT id, args, result FROM jobs"))
    assert "Workers Launched: 2" in plan
    assert {row["id"] for row in window.run("SELECT id, args, result FROM jobs")} == ids


async def test_readable_says_what_jsonb_can_hold(window: Window) -> None:
    """Held against PostgreSQL's own reading; what is below is shown as it was before."""
    for text in (
        '{"a": "\\\\u0000"}',
        '{"a": "\\ud83d\\ude00 \\u00e9"}',
        '{"a": "1e200000 \\"1e200000\\" [[["}',
        '{"a": 1e300, "b": 1e-300, "c": 123456789012345678901234567890}',
        "[" + '{"a":[1]},' * 3000 + "1]",
        '{"a":' * 200 + "1" + "}" * 200,
        '{"a":' + "9" * 5000 + "}",
        "null",
        '"\\\\\\"\\\\"',
    ):
        assert window.value("SELECT readable(%s::text::json) = %s::text::jsonb", text, text), text[:50]


async def test_a_bulk_retry_takes_what_it_can(dsn: str, window: Window) -> None:
    bad = [
        plant(window, args=UNREADABLE["an escaped NUL"]),
        plant(window, options='{"deadline":"x"}'),
        plant(window, options='{"deadline":1,"x":1e999999}'),
        plant(window, attempt=2**31 - 1),
    ]
    good = [window.enqueue() for _ in range(3)]
    window.run(
        "ALTER DOMAIN arguments ADD CONSTRAINT arguments_are_readable CHECK (VALUE::jsonb IS NOT NULL) NOT VALID"
    )
    async with open_client(dsn) as client:
        for job_id in (*bad, *good):
            await client.cancel(job_id)
        done = await client.retry_many(state="cancelled")
        assert set(done.retried) == {*good, bad[1], bad[2]}
        assert done.refused.keys() == {bad[0], bad[3]}
        with pytest.raises(InvalidTransition, match="no longer accepted"):
            await client.retry(bad[0])


class TestProducers:
    """What a producer may not write, however it calls."""

    OPTIONS = (
        *OPTIONS.values(),
        '{"timeout":0}',
        '{"timeout":1e11}',
        '{"timeout":null}',
        '{"crash_limit":1.5}',
        '{"crash_limit":40000}',
        '{"limit":0}',
        '{"limit":1e999}',
        '{"rate":["x",1]}',
        '{"rate":[0,1]}',
        '{"rate":[1]}',
        '{"rate":[1,2,3]}',
        '{"rate":5}',
        '{"deadline":"x"}',
        '{"deadline":1e300}',
        '{"nobody":1}',
        "null",
    )

    @pytest.mark.parametrize("options", OPTIONS)
    def test_options_are_an_object_of_known_names_and_numbers_in_their_ranges(
        self, window: Window, options: str
    ) -> None:
        with pytest.raises(psycopg.DataError):
            window.run(ADD_JOB.format(options="%s::json", args="'{}'"), options)
        with pytest.raises(psycopg.DataError):
            window.run(ADD_JOBS, [options])
        with pytest.raises(psycopg.DataError):
            window.run(ENQUEUE_UNIQUE, options)
        assert window.value("SELECT count(*) FROM job") == 0

    def test_what_a_client_writes_is_taken(self, window: Window) -> None:
        options = '{"timeout":5,"backoff_base":0.5,"backoff_cap":60,"crash_limit":5,"limit":3,"rate":[10,1.0],"deadline":1.9e9}'
        window.run(ADD_JOB.format(options="%s::json", args="'{}'"), options)
        window.run(ADD_JOBS, [options])
        window.run(ENQUEUE_UNIQUE, options)
        assert window.value("SELECT count(*) FROM job") == 3

    @pytest.mark.parametrize("args", [*UNREADABLE.values(), '{"a":' * 65 + "1" + "}" * 65])
    def test_arguments_are_readable_and_no_deeper_than_64(self, window: Window, args: str) -> None:
        with pytest.raises((psycopg.DataError, psycopg.errors.CheckViolation)):
            window.run(ADD_JOB.format(options="NULL", args="%s::json"), args)
        window.run(ADD_JOB.format(options="NULL", args="%s::json"), '{"a":' * 64 + "1" + "}" * 64)

    @pytest.mark.parametrize("seconds", ["NaN", "Infinity", "-Infinity", "1e300", "4e10"])
    def test_a_deadline_is_within_a_thousand_years(self, window: Window, seconds: str) -> None:
        with pytest.raises(psycopg.DataError):
            window.run(
                ADD_JOB.replace("NULL, NULL, NULL, 20", f"NULL, '{seconds}', NULL, 20").format(
                    options="NULL", args="'{}'"
                )
            )

    @pytest.mark.parametrize("period", ["NaN", "Infinity", "0", "-5", "9e12"])
    def test_a_key_is_held_for_a_thousand_years_at_most(self, window: Window, period: str) -> None:
        for unique_for, unique_after in ((period, None), (None, period)):
            with pytest.raises(psycopg.DataError):
                window.run(
                    "SELECT enqueue_unique('k', '{}', 'q', 0, now(), 20, NULL, NULL, 'u', %s::float8, %s::float8, false)",
                    unique_for,
                    unique_after,
                )

    async def test_clients_say_whose_fault_it_is(self, dsn: str) -> None:
        async with open_client(dsn) as client:
            nested: Any = 1
            for _ in range(65):
                nested = [nested]
            with pytest.raises(InvalidArguments, match="64"):
                await client.enqueue("noop", {"a": nested})


ADD_JOB = "SELECT add_job('k', {args}, 'q', 0, NULL, NULL, NULL, NULL, 20, {options}, NULL, NULL)"
ADD_JOBS = (
    "SELECT * FROM add_jobs('{k}', '{\"{}\"}', '{q}', '{0}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{20}', %s::text[],"
    " '{NULL}', '{NULL}', '{NULL}')"
)
ENQUEUE_UNIQUE = "SELECT enqueue_unique('k', '{}', 'q', 0, now(), 20, %s::json, NULL, 'u', NULL, NULL, false)"


class TestReservedIds:
    """Ids are given out, not chosen."""

    @pytest.mark.parametrize("chosen", [7, 10**6, -1, 0, 2**63 - 1])
    def test_an_id_that_was_not_reserved_is_refused(self, window: Window, chosen: int) -> None:
        with pytest.raises(psycopg.DataError, match="given out by reserve"):
            window.run(RESERVED, chosen)
        with pytest.raises(psycopg.DataError, match="given out by reserve"):
            window.run(RESERVED_MANY, ["{}"] * 2, [None, chosen])
        assert window.enqueue()

    def test_a_reserved_id_can_be_used_once(self, window: Window) -> None:
        first, second, third = (row["reserve"] for row in window.run("SELECT reserve(3)"))
        assert window.value(RESERVED, second) == second
        with pytest.raises(psycopg.DataError):
            window.run(RESERVED, second)
        assert [row["id"] for row in window.run(RESERVED_MANY, ["{}"] * 3, [third, None, first])][::2] == [third, first]
        for used in (first, third):
            window.run("SELECT cancel(%s)", used)
            with pytest.raises(psycopg.DataError):
                window.run(RESERVED, used)
        assert window.value("SELECT count(*) FROM reservation") == 0

    def test_an_id_is_reserved_for_one_role(self, window: Window, databases: Databases) -> None:
        role = f"pulse_trio_rival_{window.connection.info.dbname}"
        window.run(f"CREATE ROLE {role} SUPERUSER")
        try:
            reserved = window.value("SELECT reserve(1)")
            window.run(f"SET SESSION AUTHORIZATION {role}")
            with pytest.raises(psycopg.DataError):
                window.run(RESERVED, reserved)
            window.run("RESET SESSION AUTHORIZATION")
            assert window.value(RESERVED, reserved) == reserved
        finally:
            window.run("RESET SESSION AUTHORIZATION")
            window.run(f"DROP ROLE {role}")

    def test_what_was_reserved_and_rolled_back_is_nobodys(self, window: Window) -> None:
        with window.connection.transaction(force_rollback=True):
            reserved = window.value("SELECT reserve(1)")
        with pytest.raises(psycopg.DataError):
            window.run(RESERVED, reserved)

    def test_reservations_that_nobody_used_are_forgotten(self, window: Window) -> None:
        window.run("SELECT reserve(5)")
        window.run("UPDATE reservation SET reserved_at = now() - interval '2 days'")
        window.run("SELECT reserve(1)")
        assert window.value("SELECT count(*) FROM reservation") == 1


RESERVED = "SELECT add_job('k', '{}', 'q', 0, NULL, NULL, NULL, NULL, 20, NULL, NULL, %s)"
RESERVED_MANY = (
    "SELECT a.* FROM (SELECT %s::text[] AS args, %s::bigint[] AS ids) g,"
    " LATERAL (SELECT ARRAY[cardinality(ids)] AS n) size,"
    " LATERAL add_jobs(array_fill('k'::text, n), args, array_fill('q'::text, n), array_fill(0, n), NULL, NULL, NULL, NULL,"
    " array_fill(20, n), NULL, NULL, NULL, ids) a"
)


async def test_a_sequence_that_fell_behind_is_seen_and_moved_forward(dsn: str, window: Window) -> None:
    """As a restore of the rows without the sequence leaves it."""
    finished = window.enqueue()
    window.run("SELECT cancel(%s)", finished)
    live = window.enqueue()
    window.run("SELECT setval('job_id_seq', 1)")
    assert window.do(health.health(window.do(health.server()))).ids_behind == live - 1
    assert await trio.to_thread.run_sync(migrate_sync, dsn) == []
    assert window.do(health.health(window.do(health.server()))).ids_behind == 0
    assert window.enqueue() > live


def test_an_id_that_no_sequence_gave_does_not_use_up_the_sequence(window: Window) -> None:
    window.run("INSERT INTO job (id, kind) VALUES (%s, 'noop')", 2**63 - 1)
    window.run("SELECT mend_ids()")
    assert window.enqueue() < 2**62


TWINS = {"completed": 4, "dead": 5, "cancelled": 6}


def plant_twins(window: Window, live: str | None, finished: str) -> int:
    """A finished job, and another one of the same id: live in that state, or finished too."""
    job_id = plant(window, queue="twins")
    window.run("SELECT cancel_jobs(ARRAY[%s]::bigint[])", job_id)
    window.run("UPDATE job_archive SET state = %s WHERE id = %s", TWINS[finished], job_id)
    if live is None:
        window.run("INSERT INTO job_archive SELECT * FROM job_archive WHERE id = %s", job_id)
        return job_id
    lease = "now() + interval '1 h'" if live == "running" else "'infinity'"
    window.run(
        "INSERT INTO job (id, kind, queue, args, attempt, state, locked_by, lease_until, run_at)"
        f" VALUES (%s, 'noop', 'twins', '{{}}', 1, %s, %s, {lease}, now() + %s::interval)",
        job_id,
        2 if live == "running" else 1,
        1 if live == "running" else 0,
        "1 h" if live == "scheduled" else "-1 s",
    )
    return job_id


@pytest.mark.parametrize(
    "act", ["job", "jobs", "cancel", "cancel_many", "retry", "retry_many", "delete", "delete_many"]
)
async def test_jobs_that_share_one_id_keep_no_other_job_from_being_read_cancelled_retried_or_deleted(
    act: str, dsn: str, window: Window
) -> None:
    twins = [
        plant_twins(window, live, finished)
        for live in ("scheduled", "available", "running", None)
        for finished in TWINS
    ]
    other = plant(window, queue="twins")
    window.run("SELECT cancel_jobs(ARRAY[%s]::bigint[])", other)

    async with open_client(dsn) as client:
        match act:
            case "jobs":
                assert {job.id for job in await client.jobs()} == {*twins, other}
            case "cancel_many":
                results = await client.cancel_many([*twins, other])
                assert {result.job_id for result in results} == {*twins, other}
            case "retry_many":
                done = [await client.retry_many(queue="twins", state=state) for state in TWINS]
                assert any(other in each.retried for each in done)
            case "delete_many":
                gone = [await client.delete_many(queue="twins", state=state) for state in TWINS]
                ids = [job_id for each in gone for job_id in each.deleted]
                assert other in ids
                assert len(ids) == len(set(ids))
            case _:
                for job_id in [*twins, other]:
                    with suppress(InvalidTransition):
                        await getattr(client, act)(job_id)


async def test_a_queue_with_a_name_too_long_to_be_told_keeps_no_other_job_from_being_retried(
    dsn: str, window: Window
) -> None:
    window.run("ALTER DOMAIN queue_name DROP CONSTRAINT queue_name_check")
    other = plant(window, run_at="1 h")
    plant(window, queue="x" * 9000, run_at="1 h")
    async with open_store(dsn) as waiting:
        # Workers wait for something to do: they are told.
        await waiting.announce_idle()
        async with open_client(dsn) as client:
            done = await client.retry_many(state="scheduled")
            assert other in done.retried
            assert len(done.retried) == 2


async def test_jobs_that_share_one_id_count_once_in_their_batch_and_hold_no_other_batch_up(
    dsn: str, window: Window
) -> None:
    def batch_of(*members: int) -> int:
        (row,) = window.run("INSERT INTO batch (closed_at) VALUES (now()) RETURNING id")
        for member in members:
            window.run("INSERT INTO batch_job (batch_id, job_id) VALUES (%s, %s)", row["id"], member)
        return row["id"]

    async with open_client(dsn) as client, open_store(dsn) as store:
        finished = [plant_twins(window, None, state) for state in TWINS]
        waiting = plant_twins(window, "scheduled", "dead")
        other = plant(window, queue="twins")
        window.run("SELECT cancel_jobs(ARRAY[%s]::bigint[])", other)
        shared, held_up, clean = batch_of(*finished), batch_of(waiting, finished[0]), batch_of(other)

        status = await (await client.open_batch(held_up)).status()
        assert (status.total, status.waiting, status.completed, status.dead) == (2, 1, 1, 0)
        assert sorted(await store.finish_batches() or []) == sorted([shared, clean])
        status = await (await client.open_batch(shared)).status()
        assert (status.total, status.completed, status.dead, status.cancelled, status.removed) == (3, 1, 1, 1, 0)
        assert (await (await client.open_batch(clean)).wait(timeout=0)).status.cancelled == 1

        # Of two finished ones the first counts, whatever the other is.
        window.run(
            "UPDATE job_archive SET state = 5, finished_at = finished_at + interval '1 ms'"
            " WHERE id = %s AND ctid = (SELECT max(ctid) FROM job_archive WHERE id = %s)",
            finished[0],
            finished[0],
        )
        await client.cancel(waiting)
        assert await store.finish_batches() == [held_up]
        result = await (await client.open_batch(held_up)).wait(timeout=0)
        assert (result.status.total, result.status.completed) == (2, 1)
        assert not result.succeeded
