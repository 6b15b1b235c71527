"""The roles, on a real PostgreSQL: each can do all of its work, and nothing else."""

from __future__ import annotations

import re
from contextlib import contextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.errors import InsufficientPrivilege

from pulse_trio import Handlers, Job, SyncClient, Worker, open_client
from pulse_trio.errors import UsageError
from pulse_trio.grants import FUNCTIONS, TABLES, grant_sync, grants_sql
from pulse_trio.sql import statement
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator

    from support.databases import Databases

ROLES = ("producer", "waiter", "worker", "operator")


class Stage:
    """A database and the three roles that were granted their work in it."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        suffix = uuid4().hex[:8]
        self.names: dict[Any, str] = {kind: f"pulse_trio_{kind}_{suffix}" for kind in ROLES}

    def as_(self, kind: str) -> str:
        """The DSN for a role."""
        return make_conninfo(self.dsn, options=f"-crole={self.names[kind]}")

    @contextmanager
    def window(self, kind: str) -> Generator[Window]:
        with Window(self.as_(kind)) as window:
            yield window


@pytest.fixture(scope="module")
def stage(databases: Databases) -> Generator[Stage]:
    with databases.migrated() as dsn, Window(dsn) as window:
        stage = Stage(dsn)
        for name in stage.names.values():
            window.run(f"CREATE ROLE {name}")
        try:
            grant_sync(dsn, stage.names)
            yield stage
        finally:
            for name in stage.names.values():
                window.run(f"DROP OWNED BY {name}; DROP ROLE {name}")


ENQUEUING = {"reserve", "key_holders", "enqueue", "enqueue_many", "enqueue_unique"}
READING = {
    "batches",
    "attempts", "audit", "batch_failures", "batch_finished", "batch_live", "batch_status", "batch_unfinished", "cancel_ended",
    "cancel_requested", "running_fences",
    "cancel_ledger", "quarantined", "count_by_state", "doctor_put_back", "doctor_recent", "doctor_storage", "doctor_ids",
    "doctor_left", "doctor_owing", "doctor_ahead",
    "ended", "enqueued_as", "job",
    "metrics_queues", "metrics_schedules", "queue_settings", "recently_dead", "recent_figures",
    "tree", "lines_of", "history_of", "unreceived_of", "compensated", "unfinished_clean_ups", "owing_members",
    "tree_places", "stuck_trees", "why_waits",
    "jobs", "keys_of_finished", "limits_of_queue", "matching_jobs", "outcome",
    "which_copy_and_sign", "left_leases",
    "look_through_jobs", "live_ids", "live_queues", "paused_kinds", "queue_keys", "queues", "retentions", "running_of",
    "schedule_clock",
    "schedule_fires", "schedule_next", "schedules", "sessions_of", "settled", "suspects_due", "transaction_done",
    "workers",
}  # fmt: skip
FOR_ALL = {"hold_waits", "drop_waits", "waiting_place", "announce_idle", "withdraw_idle",
           "doctor_holders", "doctor_lockers", "doctor_may_ids", "table_counters", "queue_estimates",
           "doctor_server", "end_transaction", "which_copy", "act_as", "missing_rights", "row_security"}  # fmt: skip
"""Locks in memory and names, on no table: whoever is connected to the database may."""
BATCHES = {"batch_open", "batch_keep", "batch_add", "batch_close", "batch_due", "batch_lock"}
WAITING = BATCHES - {"batch_due"} | {
    "batch_failures", "batch_finished", "batch_live", "batch_status", "batch_unfinished", "count_by_state", "ended",
    "note_enqueue", "note_event", "outcome", "send_event",
}  # fmt: skip
OPERATORS = {
    "cancel_jobs", "cancel_jobs_now", "delete_jobs", "retry_job_afresh",
    "limit_queue", "pause_kind", "pause_queue", "resume_kind", "resume_queue", "retry_job",
    "note_enqueue", "note_event", "send_event", "set_retention", "stack_ask", "stack_take", "wake", "release_jobs",
    "complete_jobs",
    "schedule_fire", "schedule_fired", "schedule_move", "schedule_one", "schedule_pause", "schedule_put", "schedule_remove",
    "schedule_due",
}  # fmt: skip
NOT_THE_WORKERS = {
    "tree",
    "lines_of",
    "history_of",
    "unreceived_of",
    "compensated",
    "unfinished_clean_ups",
    "doctor_owing",
    "owing_members",
    "why_waits",
    "tree_places",
    "audit",
    "cancel_jobs",
    "cancel_jobs_now",
    "delete_jobs",
    "retry_job_afresh",
    "release_jobs",
    "complete_jobs",
    "retry_job",
    "pause_kind",
    "resume_kind",
    "stack_ask",
    "stack_take",
}
"""A stolen worker can spoil jobs, as it holds them; the ledger of cancellations and what was finished it cannot."""


def explained(window: Window, name: str) -> bool:
    """Whether the role may run a statement: PostgreSQL checks that before it makes the first step."""
    text = re.sub(r"%\(\w+\)s", "NULL", statement(name, "pulse").decode()).replace("%%", "%")
    try:
        window.run(f"EXPLAIN {text}")
    except InsufficientPrivilege:
        return False
    return True


@pytest.mark.parametrize("kind", ROLES)
def test_each_role_may_run_the_statements_of_its_work_and_no_others(kind: str, stage: Stage) -> None:
    every = {path.name.removesuffix(".sql") for path in files("pulse_trio.sql").iterdir() if path.name.endswith(".sql")}
    # Ids by COPY's way are refused by their number, not by a right.
    every -= {"reserve_ids"}
    may = {
        "producer": ENQUEUING | FOR_ALL,
        "waiter": ENQUEUING | FOR_ALL | WAITING,
        "operator": ENQUEUING | FOR_ALL | READING | BATCHES | OPERATORS,
        "worker": every - NOT_THE_WORKERS,
    }[kind]
    with stage.window(kind) as window:
        assert {name for name in every if explained(window, name)} == may


def test_the_table_of_rights_names_only_what_is_there_and_once(stage: Stage) -> None:
    with Window(stage.dsn) as window:
        there = {
            row["name"]
            for row in window.run("SELECT relname AS name FROM pg_class WHERE relnamespace = 'pulse'::regnamespace")
        }
        functions = {
            row["name"]
            for row in window.run("SELECT proname AS name FROM pg_proc WHERE pronamespace = 'pulse'::regnamespace")
        }
    for rights in TABLES.values():
        assert {name for names in rights.values() for name in names.split(", ")} <= there
    assert {name for names in FUNCTIONS.values() for name in names} <= functions


DENIED = {
    "producer": [
        "SELECT FROM job", "SELECT FROM jobs", "SELECT args FROM job_archive", "SELECT FROM attempts",
        "SELECT FROM workers", "SELECT FROM migration", "SELECT nextval('job_id_seq')",
        "INSERT INTO job (kind) VALUES ('a')", "UPDATE job SET args = '{}'", "DELETE FROM job",
        "COPY job (kind) FROM STDIN", "SELECT cancel(1)", "SELECT retry_jobs('{1}')", "SELECT delete_jobs('{1}')",
        "SELECT take_back_held('{1}')", "SELECT prune_unique_holds()", "SELECT maintain()", "SELECT upkeep('1 day')",
        "SELECT prune('1 day')", "SELECT wake('default')", "TRUNCATE job", "CREATE TABLE pulse.mine ()",
        "INSERT INTO queue (name, paused_at) VALUES ('default', now())",
    ],
    "worker": [
        "CREATE TABLE pulse.mine ()", "CREATE FUNCTION pulse.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "DROP TABLE job", "ALTER TABLE job ADD COLUMN mine int", "TRUNCATE job", "DROP TABLE job_archive_default",
        "CREATE INDEX ON job (kind)", "DELETE FROM job_archive", "UPDATE job_archive SET result = 'null'",
        "DELETE FROM attempt", "DELETE FROM session", "SELECT maintain()", "SELECT prune('1 day')",
        "SELECT cancel(1)", "SELECT retry_jobs('{1}')", "SELECT delete_jobs('{1}')", "SELECT take_back_held('{1}')",
        "INSERT INTO job (kind) VALUES ('a')", "COPY job (kind) FROM STDIN", "UPDATE job SET id = 1",
        "UPDATE job SET args = '{}'", "SELECT nextval('job_id_seq')", "UPDATE queue SET name = 'a'",
        "UPDATE schedule SET name = 'a'", "INSERT INTO migration VALUES (9999, 'mine', '')",
        "INSERT INTO cancellation (job_id, requested_by) VALUES (1, 'a')",
        "ALTER FUNCTION enqueue OWNER TO CURRENT_USER", "GRANT EXECUTE ON FUNCTION maintain TO PUBLIC",
        "CREATE TRIGGER mine AFTER INSERT ON job EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    ],
    "operator": [
        "INSERT INTO job (kind) VALUES ('a')", "UPDATE job SET state = 2", "DELETE FROM job",
        "COPY job (kind) FROM STDIN", "INSERT INTO job_archive SELECT * FROM job_archive", "DELETE FROM job_archive",
        "UPDATE attempt SET outcome = 'completed'", "DELETE FROM session",
        "UPDATE cancellation SET requested_by = 'somebody else'", "DELETE FROM cancellation", "TRUNCATE queue",
        "DROP TABLE job", "CREATE TABLE pulse.mine ()", "SELECT maintain()", "SELECT upkeep('1 day')",
        "SELECT prune('1 day')", "SELECT take_back_held('{1}')", "UPDATE migration SET checksum = ''",
        "UPDATE queue SET name = 'a'", "UPDATE schedule SET name = 'a'",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "query"), [(kind, query) for kind in DENIED for query in DENIED[kind]])
def test_every_denial(kind: str, query: str, stage: Stage) -> None:
    with stage.window(kind) as window, pytest.raises(InsufficientPrivilege):
        window.run(query)


async def test_a_producer_enqueues_in_every_way(stage: Stage) -> None:
    handlers = Handlers()

    @handlers.job(queue="made", timeout=30)
    async def made(n: int) -> None: ...

    async with open_client(stage.as_("producer")) as client:
        one = await client.enqueue(made, 1)
        many = await client.enqueue_many(made.request(n) for n in range(20))
        keyed = await client.enqueue(made.options(unique_key="k"), 2)
        again = await client.enqueue(made.options(unique_key="k"), 3)
        lasting = await client.enqueue(made.options(unique_key="l", unique_for=60, delay=60, deadline=90), 2)
        mixed = await client.enqueue_many([made.options(unique_key="k").request(1), made.request(2)])
    assert (again.id, again.added, lasting.added) == (keyed.id, False, True)
    assert [ref.added for ref in mixed] == [False, True]
    with SyncClient(stage.as_("producer"))._connection() as connection, connection.transaction():
        SyncClient(connection).enqueue_many([made.request(n) for n in range(20)])
    with stage.window("producer") as window:
        by_sql = window.value("SELECT pulse.enqueue('made', '{\"n\": 1}', queue => 'made')")
        window.run("SELECT pulse.enqueue_many('made', ARRAY['{\"n\": 1}'::jsonb], queue => 'made')")
    with Window(stage.dsn) as window:
        found = {row["id"] for row in window.run("SELECT id FROM pulse.jobs WHERE queue = 'made'")}
    assert {one.id, keyed.id, by_sql, *(ref.id for ref in many)} <= found
    assert len(found) == 1 + 20 + 1 + 1 + 1 + 20 + 2


async def test_a_worker_does_all_of_its_work(stage: Stage) -> None:
    handlers = Handlers()
    handlers.queue("limited", limit=2, rate="1000/s")
    seen: list[str] = []

    @handlers.job(queue="work")
    async def done(job: Job) -> int:
        await job.progress(0.5, "half")
        return 7

    @handlers.job(queue="work", max_attempts=1)
    async def failing() -> None:
        raise ValueError

    @handlers.job(queue="limited", key=lambda n: str(n % 3))
    async def limited(n: int) -> None:
        seen.append("limited")

    @handlers.cron(every=1, name="ticks")
    @handlers.job(queue="work")
    async def ticking() -> None:
        seen.append("ticking")

    @handlers.job(queue="work")
    async def after() -> None:
        seen.append("after")

    @handlers.job(queue="work")
    async def booking(job: Job) -> None:
        async with job.transaction() as tx:
            tx.result = 1

    dsn = stage.as_("worker")
    async with open_client(dsn) as client:
        async with client.batch(on_complete=after.request()) as batch:
            first = await batch.enqueue(done)
            second = await batch.enqueue(failing)
        await client.enqueue_many(limited.request(n) for n in range(12))
        booked = await client.enqueue(booking)
        with Window(stage.dsn) as window:
            # Due at once: the schedule fires in this burst.
            worker = Worker(handlers, dsn, queues=["work", "limited"], burst=True)
            await worker.run()
            window.run("UPDATE schedule SET next_due = now() - interval '1 s'")
            await Worker(handlers, dsn, queues=["work", "limited"], burst=True).run()
            states = {row["id"]: row["state"] for row in window.run("SELECT id, state FROM pulse.jobs")}
            fired = window.value("SELECT count(*) FROM schedule_fire")
    assert states[first.id] == states[booked.id] == "completed"
    assert states[second.id] == "dead"
    assert seen.count("limited") == 12
    assert "after" in seen
    assert fired > 0


async def test_an_operator_does_all_of_its_work(stage: Stage) -> None:
    with Window(stage.dsn) as window:
        ids = [window.enqueue("operated") for _ in range(4)]
    async with open_client(stage.as_("operator")) as client:
        assert (await client.cancel(ids[0], reason="tried")).state == "cancelled"
        assert (await client.job(ids[0])).cancel_reason == "tried"
        assert await client.retry(ids[0]) == "available"
        await client.delete(ids[1])
        assert (await client.delete_many(queue="operated", state="available", limit=1)).deleted
        assert await client.pause("operated")
        assert await client.resume("operated")
        assert await client.pause(kind="noop")
        assert await client.resume(kind="noop")
        await client.limit_queue("operated", limit=3)
        assert [q.limit for q in await client.queues() if q.name == "operated"] == [3]
        await client.workers(gone=True)
        await client.cancellations(ids[0])
        await client.attempts(ids[0])
        await client.count_by_state()
        await client.schedule("by hand", "noop", cron="@yearly")
        await client.pause_schedule("by hand")
        await client.resume_schedule("by hand")
        assert (await client.run_schedule("by hand")).added
        await client.remove_schedule("by hand")


DEFINERS_SEARCH_PATH = "search_path=pulse, pg_temp"
PUBLIC = {
    "rate_text": "pure, and whoever reads the view queues needs it",
    "readable": "pure, and whoever reads the views jobs and schedules needs it",
    "is_readable": "what readable calls",
    "numbers_fit": "what is_readable calls",
    "has_tags": "pure, and whoever reads the view jobs, or archives a job, needs it",
    "has_meta": "pure, and whoever reads the view jobs needs it",
    "tags_of": "pure, and whoever reads the view jobs, or archives a job with tags, needs it",
    "meta_of": "pure, and whoever reads the view jobs needs it",
    "option_text": "what tags_of and meta_of call",
    "option_number": "pure, and statements that end attempts need it",
    "json_number": "what option_number calls",
    "moment": "pure, and what clients ask for needs it",
    "first_of_size": "pure, and claims need it",
    "has_mark": "pure, and the archive's trigger and completions need it",
    "ends_in_tree": "pure, and the archive's trigger needs it",
}


def test_every_function_is_safe_and_nobody_may_call_it_unasked(stage: Stage) -> None:
    with Window(stage.dsn) as window:
        found = window.run(
            "SELECT proname, prosecdef, proconfig, has_function_privilege('public', oid, 'EXECUTE') AS public"
            " FROM pg_proc WHERE pronamespace = 'pulse'::regnamespace"
        )
    assert len(found) > 15
    for function in found:
        if function["prosecdef"]:
            # Those that write times have settings of their own besides (tests/store/test_function_settings.py).
            assert DEFINERS_SEARCH_PATH in function["proconfig"], function["proname"]
        assert not function["public"] or function["proname"] in PUBLIC, f"PUBLIC may execute {function['proname']}"


def test_nobody_has_a_right_on_a_table_unasked(stage: Stage) -> None:
    with Window(stage.dsn) as window:
        assert not window.run(
            "SELECT FROM pg_class WHERE relnamespace = 'pulse'::regnamespace AND has_table_privilege('public', oid, 'SELECT')"
        )
        assert not window.value("SELECT has_schema_privilege('public', 'pulse', 'USAGE')")


def test_a_temporary_table_cannot_take_the_place_of_a_table_of_ours(stage: Stage) -> None:
    with stage.window("producer") as window:
        window.run("CREATE TEMPORARY TABLE job (LIKE pg_class); SET search_path = pg_temp, pulse")
        made = window.value("SELECT pulse.enqueue('real')")
    with Window(stage.dsn) as window:
        assert window.value("SELECT count(*) FROM pulse.job WHERE id = %s", made) == 1


def test_the_functions_that_write_for_others_walk_indexes(stage: Stage, databases: Databases) -> None:
    with databases.migrated() as dsn, Window(dsn) as window:
        window.run("INSERT INTO job (kind, queue) SELECT 'noop', 'q' || n % 3 FROM generate_series(1, 20000) n")
        window.run("VACUUM ANALYZE job")
        window.publish_statistics()

        def scanned() -> int:
            window.publish_statistics()
            return window.value("SELECT seq_scan FROM pg_stat_user_tables WHERE relid = 'job'::regclass")

        before = scanned()
        for _ in range(8):  # past PostgreSQL's five tries with plans of their own
            window.run("SELECT * FROM retry_jobs('{7,8}')")
            window.run("SELECT * FROM delete_jobs('{9,10}')")
            window.enqueue("q1")
            window.enqueue_many(20, "q1", unique_key="u")
        assert scanned() == before


def test_granting_says_whose_mistake_it_is(stage: Stage) -> None:
    with pytest.raises(UsageError, match=r"does not exist.*CREATE ROLE"):
        grant_sync(stage.dsn, {"worker": "pulse_trio_no_such_role"})
    with pytest.raises(UsageError, match="Grant as the owner"):
        grant_sync(stage.as_("worker"), {"producer": stage.names["producer"]})
    with psycopg.connect(stage.dsn) as connection:
        owner = connection.info.user
    with pytest.raises(UsageError, match="owns the schema"):
        grant_sync(stage.dsn, {"worker": owner})


def test_hostile_role_and_schema_names_are_quoted() -> None:
    name = 'x"; DROP SCHEMA pulse; --'
    for line in grants_sql({"producer": name, "worker": name}, schema=name):
        assert line.count('"x""; DROP SCHEMA pulse; --"') >= (1 if line.endswith("PUBLIC;") else 2)
        assert 'x"; DROP' not in line.replace('x""; DROP', "")
