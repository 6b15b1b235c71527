"""A death is heard: `on_death` enqueues a job of its own with the death, wherever that is written, and with nothing else."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
import pytest
import trio

from pulse_trio import AeadCodec, ConfigurationError, Handlers, Job, Worker, open_client
from pulse_trio.handlers import DEATH_ARGUMENTS, death_hooks
from pulse_trio.migrate import migrate_sync
from pulse_trio.observe import DeathArgumentsLeftOut
from support.held_up import held_up, let_go, until_it_waits
from support.stores import Window, claim, claim_one, end, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pulse_trio.jobs import OutcomeKind
    from pulse_trio.store import WorkerStore
    from support.databases import Databases

DEEP = '{"a":' * 3000 + "1" + "}" * 3000


def app(heard: list[dict[str, Any]] | None = None, **hook: Any) -> Handlers:
    """`doomed` names `mourn`, which takes all that it can be told."""
    handlers = Handlers()

    @handlers.job(max_attempts=1, on_death="mourn")
    async def doomed(n: Any = None) -> None:
        raise RuntimeError(f"died of {n}")

    @handlers.job(**hook)
    async def mourn(
        job_id: int,
        kind: str,
        queue: str,
        error: str,
        attempts: int,
        died_at: datetime,
        args: dict[str, Any] | None = None,
    ) -> None:
        assert heard is not None
        heard.append(
            {"job_id": job_id, "kind": kind, "queue": queue, "error": error, "attempts": attempts, "args": args}
        )
        assert died_at.tzinfo is not None

    return handlers


class Told:
    """Hears of hooks that are called without the arguments."""

    def __init__(self) -> None:
        self.left_out: list[DeathArgumentsLeftOut] = []

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        return {DeathArgumentsLeftOut: self.left_out.append}


async def declare(store: WorkerStore, handlers: Handlers) -> None:
    hooks = death_hooks(handlers)
    named = {hook.kind for hook in hooks}
    await store.declare_deaths(hooks, [h.kind for h in handlers if h.kind not in named])


def hooks_of(window: Window, job_id: int) -> list[dict[str, Any]]:
    """The live jobs that tell of a job's death."""
    columns = "queue, priority, max_attempts, state, options, args"
    return window.run(f"SELECT {columns} FROM job WHERE kind = 'mourn' AND (args ->> 'job_id')::bigint = %s", job_id)


@pytest.mark.parametrize(
    ("outcome", "attempts", "calls"),
    [
        ("failed", 1, 1),
        ("failed", 2, 0),
        ("timeout", 1, 1),
        ("discarded", 9, 1),
        ("cancelled", 1, 0),
        ("snoozed", 1, 0),
        ("released", 1, 0),
        ("completed", 1, 0),
    ],
)
async def test_a_report_that_ends_a_job_as_dead_enqueues_its_hook_and_no_other_does(
    outcome: OutcomeKind, attempts: int, calls: int, store: WorkerStore, window: Window, queue: str
) -> None:
    await declare(store, app(queue="care", priority=3, max_attempts=7, timeout=9))
    job_id = window.enqueue(queue, kind="doomed", args={"n": 1}, max_attempts=attempts)
    claimed = await claim_one(store, queue)
    await store.settle([end(claimed, outcome, error=None if outcome == "completed" else "E: no", result=None)])
    found = hooks_of(window, job_id)
    assert len(found) == calls
    for hook in found:
        assert (hook["queue"], hook["priority"], hook["max_attempts"], hook["state"]) == ("care", 3, 7, 1)
        assert hook["options"] == {"timeout": 9, "death_of": job_id}
        died_at = hook["args"].pop("died_at")
        assert datetime.fromisoformat(died_at) == window.job(job_id)["finished_at"]
        assert hook["args"] == {
            "job_id": job_id,
            "kind": "doomed",
            "queue": queue,
            "error": "E: no",
            "attempts": 1,
            "args": {"n": 1},
        }


@pytest.mark.parametrize("way", ["watchdog", "supervisor", "crash limit", "unfit", "refused"])
async def test_a_death_is_heard_when_the_worker_that_ran_the_job_is_gone(
    way: str, store: WorkerStore, window: Window, queue: str
) -> None:
    await declare(store, app())
    job_id = window.enqueue(queue, kind="doomed", max_attempts=1 if way in ("watchdog", "supervisor") else 9)
    async with open_store(window.dsn) as gone:
        (claimed,) = await claim(gone, queue)
    # What ends the job is another worker, which declared nothing.
    async with open_store(window.dsn, unfit_patience=0) as last:
        match way:
            case "watchdog":
                window.expire(job_id)
                await last.rescue()
            case "supervisor":
                await last.rescue_sessions([claimed.session])
            case "crash limit":
                window.run("UPDATE job SET deaths = 8 WHERE id = %s", job_id)
                assert await last.report_crash(claimed, "killed by signal 9", alone=True)
            case "unfit":
                for _ in range(2):
                    await last.settle([end(claimed, "released", error="UnfitArguments: no")])
                    if claims := await claim(last, queue):
                        (claimed,) = claims
            case _:
                refusing(window)
                try:
                    await last.settle([end(claimed, "failed", error="no")])
                finally:
                    window.run("DROP TRIGGER refuse ON pulse.job; DROP FUNCTION pulse.refuse()")
    assert window.state(job_id) == "dead"
    assert len(hooks_of(window, job_id)) == 1


def refusing(window: Window) -> None:
    """PostgreSQL refuses every retry: the job is buried instead."""
    window.run(
        "CREATE FUNCTION pulse.refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN IF NEW.state = 3 THEN RAISE data_exception; END IF; RETURN NEW; END$$;"
        "CREATE TRIGGER refuse BEFORE UPDATE ON pulse.job FOR EACH ROW EXECUTE FUNCTION pulse.refuse()"
    )


@pytest.mark.parametrize(
    ("args", "kept"),
    [
        ('{"n": "\\u0000"}', False),
        ('{"n": "\\ud800"}', False),
        (DEEP, False),
        ('{"a":' * 63 + "{}" + "}" * 63, False),
        (json.dumps({"n": "x" * 70_000}), False),
        (json.dumps({"n": "x" * 60_000}), True),
        ('{"n": 1e999}', True),
    ],
    ids=["NUL", "half a surrogate pair", "3,000 levels", "64 levels", "70 kB", "60 kB", "1e999"],
)
async def test_whatever_the_dead_jobs_arguments_are_its_death_and_its_neighbours_are_heard(
    args: str, kept: bool, databases: Databases
) -> None:
    with databases.migrated() as dsn, Window(dsn) as window:
        window.run("ALTER DOMAIN arguments DROP CONSTRAINT arguments_are_readable")
        bad, good = (
            window.value(
                "INSERT INTO job (kind, args, max_attempts) VALUES ('doomed', %s::text::json, 1) RETURNING id", a
            )
            for a in (args, "{}")
        )
        window.run(f"ALTER DOMAIN arguments ADD CONSTRAINT arguments_are_readable CHECK ({CONSTRAINT}) NOT VALID")
        async with open_store(dsn) as store:
            await declare(store, app())
            await store.settle([end(c, "failed", error="é" * 50_000) for c in await claim(store)])
        assert {window.state(bad), window.state(good)} == {"dead"}
        for job_id, with_args in ((bad, kept), (good, True)):
            (hook,) = window.run(
                "SELECT args::text, octet_length(args ->> 'error') AS size FROM job WHERE (args ->> 'job_id')::bigint = %s",
                job_id,
            )
            assert ('"args"' in hook["args"]) == with_args
            assert hook["size"] == 40_000
        heard: list[dict[str, Any]] = []
        await Worker(app(heard), dsn, burst=True, log=False).run()
        assert sorted(each["job_id"] for each in heard) == [bad, good]


CONSTRAINT = (
    "CASE WHEN octet_length(VALUE::text) < 130 THEN VALUE::jsonb IS NOT NULL ELSE NOT jsonb_path_exists(VALUE::jsonb,"
    ' \'strict $.**{64} ? (@.type() == "object" || @.type() == "array")\') END'
)


async def test_a_rows_own_options_neither_name_a_hook_nor_silence_one(
    store: WorkerStore, window: Window, queue: str
) -> None:
    await declare(store, app())
    for options in ('{"death_of": 1}', '{"on_death": "mourn"}'):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="there is no option"):
            window.run(
                "SELECT add_job('doomed', '{}', %s, 0, NULL, NULL, NULL, NULL, 1, %s, NULL, NULL)", queue, options
            )
    for planted in ('{"death_of": "x"}', "[1]", DEEP, '{"\\u0000": 1}'):
        job_id = window.value(
            "INSERT INTO job (kind, queue, options, max_attempts) VALUES ('doomed', %s, %s::text::json, 1) RETURNING id",
            queue,
            planted,
        )
        await store.settle([end(await claim_one(store, queue), "failed", error="no")])
        assert len(hooks_of(window, job_id)) == 1


async def test_a_hook_that_dies_calls_no_hook_and_an_ordinary_job_of_its_kind_does(alone: Window) -> None:
    handlers = Handlers()
    ran: list[str] = []

    @handlers.job(max_attempts=1, on_death="mourn")
    async def doomed() -> None:
        raise RuntimeError

    @handlers.job(max_attempts=1, on_death=doomed)
    async def mourn(job: Job, error: str = "") -> None:
        ran.append(error[:12])
        raise RuntimeError("again")

    alone.enqueue(kind="doomed", max_attempts=1)
    await Worker(handlers, alone.dsn, burst=True, log=False).run()
    assert [(j["kind"], j["state"]) for j in alone.run("SELECT kind, state FROM jobs ORDER BY id")] == [
        ("doomed", "dead"),
        ("mourn", "dead"),
    ]
    assert len(ran) == 1
    # One that somebody enqueued has a hook like any other job.
    alone.enqueue(kind="mourn", max_attempts=1)
    await Worker(handlers, alone.dsn, burst=True, log=False).run()
    assert alone.value("SELECT count(*) FROM jobs") == 4


async def test_a_job_that_is_retried_and_dies_again_is_heard_of_twice(alone: Window) -> None:
    heard: list[dict[str, Any]] = []
    handlers = app(heard)
    job_id = alone.enqueue(kind="doomed", args={"n": 3}, max_attempts=1)
    async with open_client(alone.dsn) as client:
        for n in (1, 2):
            await Worker(handlers, alone.dsn, burst=True, log=False).run()
            assert [h["attempts"] for h in heard] == [1, 2][:n]
            await client.retry(job_id)
    assert heard[0]["args"] == {"n": 3}
    assert heard[0]["error"].startswith("RuntimeError: died of 3")


async def test_the_hook_stands_or_falls_with_the_death(store: WorkerStore, window: Window, queue: str) -> None:
    await declare(store, app())
    job_id = window.enqueue(queue, kind="doomed", max_attempts=1)
    claimed = await claim_one(store, queue)
    async with open_store(window.dsn) as stale:
        accepted = await stale.settle(
            [
                end(
                    msgspec.structs.replace(claimed, session=1),
                    "failed",
                    error="no",
                )
            ]
        )
        assert accepted.refused
    assert hooks_of(window, job_id) == []


async def test_an_idle_worker_is_woken_for_the_hook(store: WorkerStore, window: Window, queue: str) -> None:
    await declare(store, app(queue="care"))
    window.enqueue(queue, kind="doomed", max_attempts=1)
    claimed = await claim_one(store, queue)
    async with open_store(window.dsn) as idle, trio.open_nursery() as nursery:
        listening, woken = trio.Event(), trio.Event()

        def hear(name: str) -> None:
            (listening if name == "" else woken if name == "care" else trio.Event()).set()

        nursery.start_soon(idle.listen, hear)
        await listening.wait()
        await idle.announce_idle()
        await store.settle([end(claimed, "failed", error="no")])
        with trio.fail_after(20):
            await woken.wait()
        nursery.cancel_scope.cancel()


# Who declares


async def test_the_newest_declaration_counts_and_a_live_workers_is_not_taken_back(alone: Window) -> None:
    plain = Handlers()

    @plain.job
    async def doomed() -> None: ...

    def named() -> Any:
        found = alone.run("SELECT queue FROM death_hook WHERE kind = 'doomed'")
        return found[0]["queue"] if found else None

    async with open_store(alone.dsn) as older, open_store(alone.dsn) as newer:
        await declare(older, app(queue="one"))
        await declare(newer, app(queue="two"))
        assert named() == "two"
        # A worker without the hook, of an older version of the code: the others live.
        async with open_store(alone.dsn) as another:
            await declare(another, plain)
            assert named() == "two"
            await older.end_sessions()
            await declare(another, plain)
            assert named() == "two"
            alone.run("UPDATE session SET seen_at = now() - interval '50 minutes' WHERE id = %s", newer.session)
            await declare(another, plain)
            assert named() == "two"
            alone.run("UPDATE session SET seen_at = now() - interval '2 hours' WHERE id = %s", newer.session)
            await declare(another, plain)
            assert named() is None
            # Once its worker comes back, it declares again.
            await declare(newer, app(queue="two"))
            assert named() == "two"


async def test_a_hook_outlives_the_workers_that_declared_it(alone: Window) -> None:
    async with open_store(alone.dsn) as gone:
        await declare(gone, app())
        await gone.end_sessions()
    alone.run("DELETE FROM session")
    job_id = alone.enqueue(kind="doomed", max_attempts=1)
    async with open_store(alone.dsn) as store:
        await store.settle([end(await claim_one(store), "failed", error="no")])
    assert len(hooks_of(alone, job_id)) == 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda h: h.job(on_death="nobody")(_plain), "no handler is registered under that name"),
        (lambda h: h.job(on_death="_plain")(_plain), "has itself as on_death"),
        (
            lambda h: (h.job(on_death="_other")(_plain), h.job(_other)),
            "'wrong' is not one of a hook's arguments: job_id",
        ),
        (lambda h: (h.job(on_death="_strict")(_plain), h.job(_strict)), "give its parameter args a default"),
        (lambda h: (h.job(on_death="_plain2")(_plain), h.job(unique_key="k")(_plain2)), "a unique_key or a fixed time"),
        (lambda h: h.job(on_death=7)(_plain), "on_death must be a handler"),
    ],
)
def test_a_hook_that_cannot_work_is_refused_when_the_worker_is_made(make: Callable[[Handlers], Any], said: str) -> None:
    handlers = Handlers()

    def attempt() -> None:
        make(handlers)
        Worker(handlers, "")

    with pytest.raises(ConfigurationError, match=said):
        attempt()


async def _plain() -> None: ...


async def _plain2() -> None: ...


async def _other(wrong: int) -> None: ...


async def _strict(args: dict[str, Any]) -> None: ...


def test_what_a_hook_may_be_told_is_what_the_database_tells(alone: Window) -> None:
    told = alone.value("SELECT pg_get_functiondef('pulse.call_death_hook()'::regprocedure)")
    assert all(f"'{name}'" in told for name in DEATH_ARGUMENTS)
    migrate_sync(alone.dsn)


# Codecs


@pytest.mark.parametrize("accept_plain", [True, False])
async def test_a_hook_is_told_decoded_arguments_and_only_by_the_database(accept_plain: bool, alone: Window) -> None:
    heard: list[dict[str, Any]] = []
    handlers = app(heard, max_attempts=1)
    handlers.codec = AeadCodec({"k": b"k" * 32}, "k", accept_plain=accept_plain)
    async with open_client(alone.dsn, handlers=handlers) as client:
        await client.enqueue(handlers["doomed"], "secret")
    alone.enqueue(
        kind="mourn",
        args={"job_id": 1, "kind": "k", "queue": "q", "error": "", "attempts": 1, "died_at": "2026-11-22T00:00:00Z"},
        max_attempts=1,
    )
    await Worker(handlers, alone.dsn, burst=True, log=False).run()
    told = [h for h in heard if h["kind"] == "doomed"]
    assert [h["args"] for h in told] == [{"n": "secret"}]
    # What a producer enqueued under the hook's kind passes the codec like any job.
    assert len(heard) - len(told) == accept_plain
    assert '"secret"' not in str(alone.run("SELECT args::text FROM jobs"))


async def test_arguments_that_no_key_of_this_worker_reads_are_left_out_and_a_warning_says_so(
    alone: Window, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[dict[str, Any]] = []
    handlers = app(heard)
    handlers.codec = AeadCodec({"old": b"o" * 32}, "old")
    async with open_client(alone.dsn, handlers=handlers) as client:
        job_id = (await client.enqueue(handlers["doomed"], "secret")).id
    handlers.codec = AeadCodec({"new": b"n" * 32}, "new")
    told = Told()
    await Worker(handlers, alone.dsn, burst=True, instruments=[told]).run()
    assert [(h["job_id"], h["args"]) for h in heard] == [(job_id, None)]
    (event,) = told.left_out
    assert (event.kind, event.attempt, event.dead_job_id) == ("mourn", 1, job_id)
    assert event.error.startswith("CodecError: ")
    assert "'old'" in event.error
    (line,) = [r for r in caplog.records if f"hears of the death of job {job_id} without" in r.getMessage()]
    assert line.levelname == "WARNING"


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"n": "x" * 70_000}, "more than 64 KiB"),
        # The hook's parameter is a dictionary of whole numbers.
        ({"n": "text"}, "UnfitArguments: "),
        ({"n": 1}, None),
    ],
    ids=["large", "unfit", "read"],
)
async def test_a_hook_that_asks_for_arguments_it_cannot_have_is_told_of_and_no_other(
    args: dict[str, Any], why: str | None, alone: Window
) -> None:
    handlers, heard, told = Handlers(), list[dict[str, int] | None](), Told()

    @handlers.job(max_attempts=1, on_death="mourn")
    async def doomed(n: Any) -> None:
        raise RuntimeError("no")

    @handlers.job(on_death="mourn_silently", max_attempts=1)
    async def doomed_too(n: Any) -> None:
        raise RuntimeError("no")

    @handlers.job
    async def mourn(args: dict[str, int] | None = None) -> None:
        heard.append(args)

    @handlers.job
    async def mourn_silently(job_id: int) -> None:
        pass

    dead = alone.enqueue(kind="doomed", args=args, max_attempts=1)
    alone.enqueue(kind="doomed_too", args=args, max_attempts=1)
    await Worker(handlers, alone.dsn, burst=True, log=False, instruments=[told]).run()
    assert heard == [args if why is None else None]
    assert [(e.dead_job_id, e.kind) for e in told.left_out] == ([] if why is None else [(dead, "mourn")])
    assert all(why is not None and why in e.error for e in told.left_out)


async def test_a_hook_that_is_declared_while_another_worker_looks_for_unused_ones_stays(dsn: str) -> None:
    """That one had found no live worker with the hook, and removed it although another had just declared it: jobs that died had
    none for up to an hour."""
    hook = json.dumps(
        [{"kind": "doomed", "hook": "mourn", "takes": [], "queue": "care", "priority": 0, "max_attempts": 5}]
    )
    declare = "SELECT pulse.declare_death_hooks(%s, %s::text::jsonb, %s::text[])"
    place = "WHERE o.kind = ANY ($3)\n"
    with_wait = "WHERE o.kind = ANY ($3) AND (SELECT {wait} WHERE o.kind <> '')::text IS NOT NULL\n"

    def declares(session: int, hooks: str, others: list[str]) -> None:
        with psycopg.connect(dsn) as connection:
            connection.execute(declare, [session, hooks, others])

    async with open_store(dsn) as gone, open_store(dsn) as new, open_store(dsn) as other:
        declares(gone.session, hook, [])
        with Window(dsn) as window:
            window.run("UPDATE session SET ended_at = now() WHERE id = %s", gone.session)
        with trio.fail_after(30), held_up(dsn, "pulse.declare_death_hooks", place, with_wait=with_wait) as holder:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, declares, other.session, "[]", ["doomed"])
                await until_it_waits(holder)
                declares(new.session, hook, [])
                let_go(holder)
        with Window(dsn) as window:
            assert window.run("SELECT kind FROM death_hook") == [{"kind": "doomed"}]
