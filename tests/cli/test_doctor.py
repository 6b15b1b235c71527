"""`pulse-trio doctor`: what it makes of what it finds, and that it finds it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pulse_trio import DatabaseUnavailable, PulseTrioError, SyncClient, TookTooLong, UsageError
from pulse_trio.cli.doctor import doctor, examine
from pulse_trio.doctor import RUNBOOK, Finding, diagnose, judge_failure, judge_line, judge_server
from pulse_trio.store import health
from pulse_trio.store.family import StuckJobs, StuckTree, StuckTrees
from pulse_trio.store.health import (
    MOST_LEFT,
    Health,
    Holder,
    Left,
    Owing,
    PutBack,
    Quarantined,
    Server,
    Storage,
)
from pulse_trio.store.operations import WorkerRecord
from pulse_trio.store.queues import PausedKind, QueueRecord
from pulse_trio.store.watching import Depths, Failing
from pulse_trio.web.reading import overview
from support.stores import Window, claim, end, open_store

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes

    from .conftest import Command

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
SERVER = Server(180004, "18.4", 0.0, False, True, "on", True, True, "app", True, [], True)
STORAGE = Storage(10_000, 9_990, [], True, 0, False, 60.0)
WORKER = WorkerRecord(7, "web-1", 4711, "running", NOON, NOON, ["*"], 100, 3, "0.1")
QUEUE = QueueRecord("mail", False, 5, 0, 0, 1.0, None, None, None, None)
HEALTHY = Health(SERVER, STORAGE, workers=[WORKER], queues=[QUEUE])


def troubles(findings: Any) -> list[Finding]:
    return [f for f in findings if f.level != "ok"]


def of_server(difference: float = 0.0, unsure: float = 0.001, **changes: Any) -> list[Finding]:
    return troubles(judge_server(replace(SERVER, **changes), difference=difference, unsure=unsure))


def test_a_server_elsewhere_that_is_not_verified_is_warned_of() -> None:
    (found,) = judge_line("host=db.example sslmode=require")
    assert (found.level, found.check) == ("warning", "network")
    assert "sslmode is require" in found.what
    for fine in ("host=db.example sslmode=verify-full", "host=127.0.0.1", "host=/var/run/postgresql", None):
        assert not list(judge_line(fine))


def of_health(**changes: Any) -> list[Finding]:
    return troubles(diagnose(replace(HEALTHY, **changes)))


@pytest.mark.parametrize(
    ("waits", "what", "do"),
    [
        (
            StuckJobs("paused queue", "packers", None, 1, 12),
            "waits for job 12 of the queue packers, which is paused",
            "pulse-trio queues resume packers; or: pulse-trio jobs cancel 7",
        ),
        (
            StuckJobs("paused kind", None, "pack", 300, 12),
            "waits for 300 jobs (the first is 12) of the kind pack, which is paused",
            "pulse-trio queues resume --kind pack; or: pulse-trio jobs cancel 7",
        ),
        (
            StuckJobs("unserved queue", "packers", None, 1_200, 12),
            "waits for 1,200 jobs (the first is 12) of the queue packers, which no live worker serves",
            "Start a worker that serves packers; or: pulse-trio jobs cancel 7",
        ),
        (
            StuckJobs("unwatched", "packers", None, 1, 12),
            "waits for job 12, and nothing would tell it that it may go on (rows deleted by hand?)",
            "Any worker's watchdog looks at job 12 within minutes (see: pulse-trio jobs tree 12); or: pulse-trio jobs cancel 7",
        ),
    ],
    ids=lambda value: value.why.replace(" ", "-") if isinstance(value, StuckJobs) else "",
)
def test_what_a_tree_waits_for_is_one_finding(waits: StuckJobs, what: str, do: str) -> None:
    (found,) = of_health(stuck=StuckTrees([StuckTree(7, [waits])], 1))
    assert (found.level, found.check) == ("warning", "trees")
    assert found.what == f"the tree of job 7 {what}"
    assert found.do == do


def test_a_member_of_a_settled_tree_that_cleans_up_is_not_ended_by_its_root() -> None:
    waits = [StuckJobs("unserved queue", "packers", None, 1, 12)]
    (found,) = of_health(stuck=StuckTrees([StuckTree(7, waits, settled=True)], 1))
    assert found.do == "Start a worker that serves packers; or: pulse-trio jobs cancel 12 --now"


def test_a_tree_that_waits_for_several_things_is_one_finding_and_the_trees_that_are_left_out_are_counted() -> None:
    waits = [
        StuckJobs("unserved queue", "packers", None, 9, 12),
        StuckJobs("paused kind", None, "label", 2, 30),
    ]
    first = [StuckTree(7, waits, others=2), StuckTree(8, waits[:1])]
    one, two, rest = of_health(stuck=StuckTrees(first, 4_321))
    assert one.what == (
        "the tree of job 7 waits for 9 jobs (the first is 12) of the queue packers, which no live worker serves; "
        "waits for 2 jobs (the first is 30) of the kind label, which is paused; and for 2 more reasons"
    )
    assert one.do == (
        "Start a worker that serves packers; pulse-trio queues resume --kind label; or: pulse-trio jobs cancel 7"
    )
    assert two.what.startswith("the tree of job 8 waits for 9 jobs")
    assert rest.what == "4,319 more trees wait like that"
    *_, rest = of_health(stuck=StuckTrees(first, 3, at_least=True))
    assert rest.what == "at least 1 more tree waits like that"
    *_, rest = of_health(stuck=StuckTrees(first, 2, at_least=True))
    assert rest.what == "not all trees were looked at: more may wait like that"


def test_of_a_tree_of_very_many_jobs_that_wait_not_all_are_counted() -> None:
    waits = [StuckJobs("unserved queue", "packers", None, 5_000, 12), StuckJobs("paused kind", None, "label", 1, 30)]
    (found,) = of_health(stuck=StuckTrees([StuckTree(7, waits, at_least=True)], 1))
    assert found.what == (
        "the tree of job 7 waits for at least 5,000 jobs (one is 12) of the queue packers, which no live worker serves; "
        "waits for at least 1 job (one is 30) of the kind label, which is paused"
    )


def test_nothing_is_wrong_with_what_is_healthy() -> None:
    assert of_server() == []
    assert of_health() == []
    assert {f.check for f in diagnose(HEALTHY)} == {
        "HOT updates",
        "archive",
        "old transactions",
        "workers",
        "backlog",
        "quarantine",
    }


@pytest.mark.parametrize(
    ("changes", "level", "check", "what"),
    [
        ({"version": 130011}, "error", "version", "too old"),
        ({"version": 190000}, "warning", "version", "newer"),
        ({"standby": True}, "error", "primary", "standby"),
        ({"fsync": False}, "error", "durability", "fsync is off"),
        ({"synchronous_commit": "off"}, "warning", "synchronous_commit", "may be lost"),
        ({"autovacuum": False}, "error", "autovacuum", "on the server"),
        ({"autovacuum_of_jobs": False}, "error", "autovacuum", "for the table"),
        ({"missing": ["DELETE on job"]}, "error", "rights", "lacks DELETE on job"),
        ({"may_maintain": False}, "warning", "rights", "may not maintain"),
        ({"difference": 5.0}, "warning", "clock", "5 s behind"),
        ({"difference": -5.0}, "warning", "clock", "5 s ahead of"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_every_trouble_of_a_server_is_told_with_what_to_do(
    changes: dict[str, Any], level: str, check: str, what: str
) -> None:
    (found,) = of_server(**changes)
    assert (found.level, found.check) == (level, check)
    assert what in found.what
    assert found.do


def test_a_difference_of_clocks_that_a_slow_answer_explains_is_none() -> None:
    assert of_server(difference=3.0, unsure=1.5) == []


@pytest.mark.parametrize(
    ("left", "what"),
    [
        (None, "nothing is held by them any more"),
        (Left(0, None), "nothing is held by them any more"),
        (Left(1, 21.5), "1 job is held by them until the last lease runs out, in 21.5 s"),
        (
            Left(12, -3.0),
            "12 jobs are still held by them, with leases that have run out: a live worker's watchdog rescues them",
        ),
        (Left(MOST_LEFT, 4.0), "at least 10,000 jobs are held by them until the last lease runs out, in 4 s"),
    ],
    ids=["unread", "nothing", "one", "expired", "many"],
)
def test_stale_workers_are_one_finding_that_says_what_they_hold_now(left: Left | None, what: str) -> None:
    stale = [replace(WORKER, state="stale", pid=n) for n in range(1, 21)]
    (found,) = of_health(workers=[WORKER, *stale], left=left)
    names = "web-1:1, web-1:2, web-1:3, web-1:4, web-1:5 and 15 more"
    assert found.what == f"20 workers show no sign of life ({names}); {what}"


def test_stale_workers_are_one_trouble_of_the_web_page() -> None:
    stale = [replace(WORKER, state="stale", pid=n) for n in range(1, 21)]
    (found,) = overview.troubles(Depths([], 0, False, False), [WORKER, *stale], [])
    assert found.what == "20 workers show no sign of life: web-1:1, web-1:2, web-1:3 and 17 more."
    (found,) = overview.troubles(Depths([], 0, False, False), [WORKER, stale[0]], [])
    assert found.what == "The worker web-1:1 shows no sign of life."


async def test_what_a_stale_worker_holds_is_read_and_what_was_rescued_is_not(dsn: str) -> None:
    with Window(dsn) as window:
        window.run("SELECT upkeep('7 days')")
        window.enqueue_many(3, "q")
        async with open_store(dsn) as dead, open_store(dsn) as live:
            assert look(window).left is None
            held = await claim(dead, "q", limit=2)
            await claim(live, "q")
            silent = "UPDATE session SET seen_at = now() - interval '1 min' WHERE id = %s RETURNING id"
            assert window.run(silent, dead.session)
            left = look(window).left
            assert left is not None
            assert (left.jobs, left.seconds is not None and left.seconds > 0) == (2, True)
            window.expire(*(job.id for job in held))
            left = look(window).left
            assert left is not None
            assert (left.jobs, left.seconds is not None and left.seconds < 0) == (2, True)
            await live.upkeep.rescue()
            assert look(window).left == Left(0, None)


PAUSED = replace(QUEUE, paused=True, oldest_available_age=900.0)


@pytest.mark.parametrize(
    ("changes", "level", "check", "what"),
    [
        ({"storage": replace(STORAGE, cold=["job_state"])}, "error", "indexes", "job_state"),
        ({"storage": replace(STORAGE, hot_updates=5_000)}, "warning", "HOT updates", "only 50%"),
        ({"storage": replace(STORAGE, lease_index=False)}, "warning", "lease index", "upgraded"),
        ({"storage": replace(STORAGE, missing_days=2)}, "warning", "archive", "2 days"),
        ({"storage": replace(STORAGE, astray=True)}, "warning", "archive", "default partition"),
        ({"storage": replace(STORAGE, maintained_ago=None)}, "warning", "archive", "never"),
        ({"storage": replace(STORAGE, maintained_ago=86400.0)}, "warning", "archive", "24 h"),
        ({"holders": [Holder("the idle transaction of psql", 4000.0)]}, "warning", "old transaction", "1 h 6 min old"),
        ({"holders": [Holder("the replication slot 'x'", None)]}, "warning", "old transaction", "unknown age"),
        ({"workers": [WORKER, replace(WORKER, state="stale")]}, "warning", "stale worker", "web-1:4711"),
        ({"workers": []}, "error", "workers", "no worker runs, and 5 jobs wait"),
        ({"workers": [], "queues": []}, "warning", "workers", "no job waits now"),
        (
            {"workers": [], "queues": [], "left": Left(5, -3.0)},
            "error",
            "workers",
            "no worker runs, and 5 jobs of workers that are gone wait to be rescued",
        ),
        (
            {"workers": [replace(WORKER, state="draining")]},
            "warning",
            "workers",
            "every worker is stopping (1 worker; 3 jobs ran at their last sign of life), so none claims, and 5 jobs wait",
        ),
        (
            {"workers": [replace(WORKER, queues=["other"])], "queues": [replace(QUEUE, oldest_available_age=11.0)]},
            "warning",
            "unserved queue",
            "no running worker serves mail; 5 jobs wait, the oldest for 11 s",
        ),
        ({"queues": [PAUSED]}, "warning", "paused queue", "mail is paused; 5 jobs wait, the oldest for 15 min"),
        ({"queues": [replace(QUEUE, oldest_available_age=400.0)]}, "warning", "backlog", "due for 6 min 40 s"),
        ({"queues": [replace(QUEUE, dead=3)]}, "warning", "dead jobs", "3 jobs of mail died within the last 24 h"),
        ({"owing": Owing(1, 17)}, "warning", "clean-ups", "job 17 owes its clean-up"),
        (
            {"paused_kinds": [PausedKind("pay now", datetime(2026, 11, 29, 9, 5, tzinfo=UTC))]},
            "warning",
            "paused kind",
            "jobs of kind 'pay now' are not claimed: it has been paused since 2026-11-29 09:05 UTC",
        ),
        ({"put_back": [PutBack("lost", 12, 2, 99)]}, "warning", "unknown kind", "'lost' were released 12 times"),
        (
            {"put_back": [PutBack("lost", 1, 1, 99)]},
            "warning",
            "unknown kind",
            "1 job of kind 'lost' was released 1 time w",
        ),
        (
            {"put_back": [PutBack("order", 5, 2, 99, "UnfitArguments: version 2 of 'order' has begun job 99.\nmore")]},
            "warning",
            "other version",
            "2 jobs of kind 'order' were released 5 times within the hour. version 2 of 'order' has begun job 99.",
        ),
        (
            {"put_back": [PutBack("mail", 6, 2, 99, "the worker stopped before the job had ended")]},
            "warning",
            "released jobs",
            "2 jobs of kind 'mail' were released 6 times within the hour: the worker stopped before the job had ended",
        ),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_every_trouble_is_told_with_what_to_do(changes: dict[str, Any], level: str, check: str, what: str) -> None:
    (found,) = of_health(**changes)
    assert (found.level, found.check) == (level, check)
    assert what in found.what
    assert found.do


BUSY = replace(WORKER, running=96)
SUSPECT = Quarantined(9, "mail", "bomb", None, 0.0, 3, 1, None, None)


@pytest.mark.parametrize(
    ("alert", "changes", "quiet"),
    [
        ("PulseNoWorkers", {"workers": []}, {}),
        (
            "PulseQueueBacklog",
            {"queues": [replace(QUEUE, oldest_available_age=301.0)]},
            {"queues": [replace(QUEUE, oldest_available_age=300.0)]},
        ),
        ("PulseQueueBacklog", {"queues": [PAUSED]}, {"queues": [replace(PAUSED, oldest_available_age=300.0)]}),
        (
            "PulseJobsFail",
            {"failing": [Failing("mail", "send", 6, 11, 600.0)]},
            {"failing": [Failing("mail", "send", 10, 10, 600.0), Failing("mail", "pay", 10, 20, 600.0)]},
        ),
        ("PulseJobsRescued", {"rescued": 6}, {"rescued": 5}),
        ("PulseQuarantine", {"quarantined": [SUSPECT]}, {}),
        (
            "PulseSlotsFull",
            {"workers": [BUSY], "queues": [replace(QUEUE, oldest_available_age=61.0)]},
            {"workers": [BUSY], "queues": [replace(QUEUE, oldest_available_age=60.0)]},
        ),
        (
            "PulseSlotsFull",
            {"workers": [BUSY], "queues": [replace(QUEUE, oldest_available_age=61.0)]},
            {"workers": [replace(BUSY, running=95)], "queues": [replace(QUEUE, oldest_available_age=61.0)]},
        ),
        ("PulseScheduleLate", {"late": {"nightly": 121.0}}, {"late": {"nightly": 120.0}}),
    ],
)
def test_a_finding_names_its_alert_at_the_alerts_threshold_and_not_below(
    alert: str, changes: dict[str, Any], quiet: dict[str, Any]
) -> None:
    (found,) = [finding for finding in of_health(**changes) if finding.alert is not None]
    assert found.alert == alert
    assert found.runbook == f"{RUNBOOK}#{alert.lower()}"
    assert [finding.alert for finding in of_health(**quiet) if finding.alert is not None] == []


def test_jobs_that_fail_are_found_by_the_remedy_whether_they_are_tried_again_or_dead() -> None:
    (found,) = of_health(failing=[Failing("q", "my kind", 11, 11, 60.0)])
    assert found.do is not None
    assert "pulse-trio jobs list --kind 'my kind' --state retryable" in found.do
    assert "--state dead" in found.do


def test_few_updates_and_old_servers_are_not_complained_about() -> None:
    assert of_health(storage=replace(STORAGE, updates=10, hot_updates=0)) == []
    assert of_health(server=replace(SERVER, version=150000), storage=replace(STORAGE, lease_index=False)) == []


def test_a_backlog_says_whether_anybody_takes_the_queue() -> None:
    late = replace(QUEUE, oldest_available_age=400.0)
    (found,) = of_health(queues=[late], workers=[replace(WORKER, queues=["other"])])
    assert found.do == "No running worker serves that queue: start one with --queues mail"


def test_a_moment_without_a_worker_for_a_queue_and_a_stop_when_nothing_waits_are_no_troubles() -> None:
    assert (
        of_health(workers=[replace(WORKER, queues=["other"])], queues=[replace(QUEUE, oldest_available_age=9.0)]) == []
    )
    assert of_health(workers=[replace(WORKER, state="draining")], queues=[replace(QUEUE, available=0)]) == []


# Looking, on a real database


def look(window: Window, role: str | None = None) -> Health:
    if role is None:
        return window.do(health.health(window.do(health.server())))
    from pulse_trio.store import operations

    with psycopg.connect(window.dsn, autocommit=True, options=f"-crole={role}") as connection:
        server = operations.run_sync(connection, "pulse", health.server())
        return operations.run_sync(connection, "pulse", health.health(server))


async def test_what_is_wrong_in_a_database_is_found(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LONG", 0.0)
    with Window(dsn) as window, psycopg.connect(dsn, application_name="forgotten") as forgotten:
        window.run("UPDATE maintenance SET maintained_at = '-infinity'")
        window.run("SELECT upkeep('7 days')")
        before = look(window)
        assert (before.storage.cold, before.storage.missing_days, before.storage.astray) == ([], 0, False)
        assert before.storage.maintained_ago is not None
        assert 0 <= before.storage.maintained_ago < 300
        assert before.server.version // 10000 >= 14
        # Somebody else's statement may be active just now: with LONG at 0 that is told, too.
        assert not [holder for holder in before.holders if "forgotten" in holder.what]

        window.run("CREATE INDEX slow ON job (state)")
        window.run("CREATE INDEX partly ON job (id) WHERE locked_by <> 0")
        window.run("CREATE INDEX harmless ON job (created_at)")
        window.run("ALTER TABLE job SET (autovacuum_enabled = false)")
        window.run(f"DROP TABLE job_archive_{datetime.now(UTC):%Y%m%d}")
        job_id = window.enqueue("q", kind="lost")
        async with open_store(dsn) as store:
            for _ in range(3):
                window.make_due(job_id)
                (claimed,) = await claim(store, "q")
                await store.settle([end(claimed, "released", delay=60.0)])
            window.enqueue("q")
            await store.settle([end(c) for c in await claim(store, "q")])
            forgotten.execute("SELECT pg_current_xact_id(), count(*) FROM pulse.job")
            found = look(window)
        assert sorted(name.removeprefix("pulse.") for name in found.storage.cold) == ["partly", "slow"]
        assert not found.server.autovacuum_of_jobs
        assert found.storage.missing_days == 1
        assert found.storage.astray
        assert found.put_back == [PutBack("lost", 3, 1, job_id)]
        assert any("the idle in transaction transaction of forgotten" in holder.what for holder in found.holders)
        assert [w.state for w in found.workers] == ["running"]


async def test_kinds_that_fail_rescued_attempts_and_late_schedules_are_found(dsn: str) -> None:
    with Window(dsn) as window:
        window.run("SELECT upkeep('7 days')")
        job_id = window.enqueue("q", kind="bad")
        window.run(
            "INSERT INTO attempt SELECT %s::bigint, n, 7, now(), now(), outcome, 'e' FROM generate_series(1, 6) n,"
            " unnest(ARRAY['failed', 'timeout', 'rescued', 'snoozed']) outcome",
            job_id,
        )
        # Of a job that died, and of one whose attempts ended before.
        window.run(
            "INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures,"
            " max_attempts, priority, state, queue, kind, args) SELECT n, now(), now(), now(), now(), 9, 1, 0, 20, 0,"
            " CASE n WHEN 900 THEN 5 ELSE 4 END, 'q', 'mixed', '{}' FROM generate_series(900, 907) n"
        )
        window.run("INSERT INTO attempt SELECT 900, n, 7, now(), now(), 'failed', 'e' FROM generate_series(1, 3) n")
        window.run(
            "INSERT INTO attempt SELECT %s::bigint, n, 7, now(), now() - interval '20 min', 'failed', 'e'"
            " FROM generate_series(50, 90) n",
            job_id,
        )
        found = look(window)
        assert [(f.queue, f.kind, f.failed, f.ended) for f in found.failing] == [
            ("q", "bad", 12, 18),
            ("q", "mixed", 3, 10),
        ]
        assert found.rescued == 6
        assert {f.alert for f in diagnose(found)} >= {"PulseJobsFail", "PulseJobsRescued"}


async def test_the_share_of_failures_is_right_where_only_the_end_of_a_day_is_read(dsn: str) -> None:
    with Window(dsn) as window:
        window.run("SELECT upkeep('7 days')")
        job_id = window.enqueue("q", kind="busy")
        # 20,000 attempts a minute completed; a tenth of that failed, in rows that take much more room.
        window.run(
            "INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures,"
            " max_attempts, priority, state, queue, kind, args) SELECT n, now() - (60000 - n) * interval '3 ms', now(), now(),"
            " now(), 9, 1, 0, 20, 0, 4, 'q', 'busy', '{}' FROM generate_series(1, 60000) n"
        )
        window.run(
            "INSERT INTO attempt SELECT %s::bigint, n, 7, now(),"
            " now() - (6000 - n) * interval '30 ms', 'failed', repeat(n::text, 400)"
            " FROM generate_series(1, 6000) n",
            job_id,
        )
        (busy,) = look(window).failing
        assert 10 < busy.ended < 60_000
        assert 0.05 < busy.failed / busy.ended < 0.15


def test_a_role_that_may_only_look_is_found_out(dsn: str) -> None:
    with Window(dsn) as window:
        window.run("DO $$ BEGIN CREATE ROLE pulse_trio_reader; EXCEPTION WHEN duplicate_object THEN END $$")
        window.run("GRANT USAGE ON SCHEMA pulse TO pulse_trio_reader")
        window.run("GRANT SELECT ON ALL TABLES IN SCHEMA pulse TO pulse_trio_reader")
        window.enqueue_many(3, "mail")
        found = look(window, "pulse_trio_reader")
    server = found.server
    assert [(q.name, q.available) for q in found.queues] == [("mail", 3)]
    assert server.role == "pulse_trio_reader"
    assert "DELETE on job" in server.missing
    assert not [right for right in server.missing if right.startswith("SELECT")]
    assert not server.may_maintain
    assert not server.sees_others


def test_warnings_alone_are_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding("ok", "version", "fine"), Finding("warning", "clock", "slow", "Wind it.")]
    monkeypatch.setattr("pulse_trio.cli.doctor.examine", lambda *_: findings)
    assert doctor.main([], standalone_mode=False) == 0
    assert "clock: slow\n    Wind it.\n" in capsys.readouterr().out
    findings.append(Finding("error", "workers", "none", "Start one."))
    assert doctor.main([], standalone_mode=False) == 1


async def test_the_command_exits_1_when_something_is_wrong_and_says_what_to_do(
    processes: Processes, command: Command, dsn: str
) -> None:
    running = await processes.command("doctor", "--json", "--dsn", dsn)
    code = await running.ended()
    well = json.loads(running.stdout)
    assert code == int(not well["ok"])
    # The tests' own server is fast and careless.
    assert {f["check"] for f in well["findings"] if f["level"] == "error"} <= {"autovacuum", "durability"}
    assert {f["check"] for f in well["findings"]} >= {
        "connection",
        "version",
        "durability",
        "clock",
        "rights",
        "workers",
    }
    with Window(dsn) as window:
        window.enqueue("q")
        window.run("UPDATE job SET run_at = now() - interval '2 h'")
    ill = await command("doctor", code=1)
    assert "no worker runs, and 1 job wait" in ill.stdout
    assert "Start one: pulse-trio run app:handlers" in ill.stdout
    assert "due for 2 h 0 min" in ill.stdout
    assert f"PulseNoWorkers: {RUNBOOK}#pulsenoworkers" in ill.stdout
    assert not json.loads((await command("doctor", "--json", code=1)).stdout)["ok"]


async def test_without_a_database_or_a_schema_that_is_the_finding(processes: Processes, empty_dsn: str) -> None:
    for dsn, what in ((empty_dsn, "pulse-trio migrate"), ("postgresql://127.0.0.1:1/x", "Is PostgreSQL running there")):
        running = await processes.command("doctor", "--json", "--dsn", dsn)
        assert await running.ended() == 1, running.report()
        (finding,) = json.loads(running.stdout)["findings"]
        assert (finding["level"], finding["check"]) == ("error", "connection")
        assert finding["alert"] == ("PulseDatabaseDown" if dsn != empty_dsn else None)
        assert what in finding["what"]


@pytest.mark.parametrize("table", ["job", "queue", "session", "migration", "schedule"])
def test_it_names_who_has_locked_a_table(table: str, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PATIENCE", 0.3)
    with psycopg.connect(dsn) as locker:
        locker.execute(f"LOCK TABLE pulse.{table} IN ACCESS EXCLUSIVE MODE".encode())
        pid = locker.info.backend_pid
        (found,) = [each for each in examine(dsn, None) if each.check == "looking"]
    assert f"Pid {pid} (user" in (found.do or "")
    assert f"has locked {table} (SELECT pg_terminate_backend({pid})). Wait for that" in (found.do or "")
    assert "because it took too long" in found.what


def refusal() -> UsageError:
    error = UsageError("no")
    error.__cause__ = psycopg.errors.InsufficientPrivilege()
    return error


@pytest.mark.parametrize(
    ("error", "do"),
    [
        (refusal(), "more rights"),
        (UsageError("timestamp too large"), "whatever rights the role has"),
        (TookTooLong("slow"), "are large"),
        (DatabaseUnavailable("away"), "again."),
    ],
)
def test_an_examination_that_fails_says_what_to_do(error: PulseTrioError, do: str) -> None:
    """The owner of the schema was told to run it again as a role with more rights."""
    assert do in (judge_failure(error, str(error), []).do or "")


async def ahead(command: Command) -> dict[str, tuple[str, str]]:
    """What the doctor says of moments that cannot be, and what to do, by what they are of."""
    # 1: the server of the tests has fsync off.
    found = json.loads((await command("doctor", "--json", code=1)).stdout)["findings"]
    said = [(f["what"], f["do"]) for f in found if f["check"] == "server's clock"]
    return {
        next(kind for kind in ("rate", "schedule", "worker", "job") if kind in what[:14]): (what, do)
        for what, do in said
    }


async def test_moments_of_a_server_clock_that_was_ahead_are_named_with_what_mends_them(
    command: Command, dsn: str
) -> None:
    """The clock was an hour ahead for some seconds. A queue and a schedule stood still, jobs of a dead worker were kept, and
    the doctor found nothing."""
    with Window(dsn) as window:
        client = SyncClient(dsn)
        async with open_store(dsn, leases={"slow": 1800.0}, declared=["slow"]) as store:
            client.schedule("nightly", "noop", every=60)
            window.run("INSERT INTO bucket (queue, key, full_at, count, seconds) VALUES ('mail', '', now(), 10, 60)")
            jobs = window.enqueue_many(2, "slow")
            await claim(store, "slow", 2)
            await store.touch(2, set(), draining=False)
            assert window.value("SELECT min(lease_until) > now() + interval '29 min' FROM job")
            assert await ahead(command) == {}

            window.run("UPDATE bucket SET full_at = now() + interval '90 min'")
            window.run("UPDATE session SET seen_at = now() + interval '90 min'")
            window.run("UPDATE job SET lease_until = lease_until + interval '1 h' WHERE id = %s", jobs[0])
            window.run("UPDATE job SET started_at = started_at + interval '1 h' WHERE id = %s", jobs[1])
            window.run(
                "INSERT INTO schedule_fire (name, due_at) SELECT name, next_due + interval '59 min' FROM schedule"
            )
            window.run("UPDATE schedule SET next_due = next_due + interval '1 h'")
            found = await ahead(command)
            assert found["rate"][0].startswith("1 rate of mail would be whole in 1 h 2")
            assert "last gave a sign of life in 1 h 2" in found["worker"][0]
            assert f"2 running jobs ({jobs[0]}, {jobs[1]}) are leased until 1 h 2" in found["job"][0]
            assert "1 schedule (nightly) has been fired for a moment that is still to come" in found["schedule"][0]
            assert "WHERE seen_at > now()" in found["worker"][1]
            assert "  in 1 h 2" in (await command("workers")).stdout

            # As each finding says.
            await store.touch(2, set(), draining=False)
            for job_id in jobs:
                await command("jobs", "release", str(job_id), "--force")
            await command("cron", "pause", "nightly")
            await command("cron", "resume", "nightly")
            assert set(await ahead(command)) == {"rate"}
            assert window.value("SELECT next_due < now() + interval '61 s' FROM schedule")


async def test_a_lease_of_a_worker_of_the_version_before_is_not_judged_by_its_length(
    command: Command, dsn: str
) -> None:
    """What leases its queues have is not known."""
    with Window(dsn) as window:
        async with open_store(dsn, leases={"slow": 1800.0}) as store:
            window.enqueue("slow")
            await claim(store, "slow", 1)
            window.run("UPDATE session SET longest_lease = NULL")
            assert await ahead(command) == {}
