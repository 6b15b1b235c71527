"""Tags and metadata: every way of enqueuing keeps them, one index finds them, and nothing else pays for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from pulse_trio import ConfigurationError, Handlers, InvalidName, Job, SyncClient, UsageError
from pulse_trio.client import request_by_name
from pulse_trio.client.spool import Spool
from pulse_trio.labels import labels_of, pack_meta, pack_tags
from pulse_trio.sql import statement
from pulse_trio.store import history, new_jobs, operations, searching
from pulse_trio.testing import run_job_sync
from pulse_trio.web.security import HIDDEN, without_payloads
from support.stores import Window, claim_one, end

if TYPE_CHECKING:
    from pulse_trio.store import WorkerStore
    from pulse_trio.store.history import JobFilter

TAGS = ["eu", "vip", "Ångström", "a:b/c-d.e_f", "tree", "tags"]
META: dict[str, Any] = {
    "order": 7, "by": 'say "hi" \\ [x] {y} %22 %', "line": "a\nb\tc\x01\x7f", "tree": 'tree"', "é": None, "ok": True,
    "x": -1.5e-9, "big": 2**63 - 1, "": "",
}  # fmt: skip
PLAIN = {"kind": "noop", "args": {}}


def record(window: Window, job_id: int) -> tuple[Any, Any]:
    found = window.do(operations.job(job_id))
    return found.tags, found.meta


def test_every_way_of_enqueuing_keeps_tags_and_metadata(window: Window, queue: str) -> None:
    given: dict[str, Any] = {"queue": queue, "tags": TAGS, "meta": META}
    client = SyncClient(window.dsn)
    ids = [client.enqueue("noop", {}, **given).id, client.enqueue("noop", {}, unique_key="k", deadline=60, **given).id]
    many = [request_by_name("noop", {}, **given) for _ in range(20)]
    ids += [ref.id for ref in client.enqueue_many(many)]
    ids += [ref.id for ref in client.enqueue_many(many[:2])]
    ids += [ref.id for ref in client.enqueue_many([request_by_name("noop", {}, unique_key="m", unique_for=9, **given)])]
    sql = (
        "SELECT enqueue('noop', queue => %s::text, tags => %s::text[], meta => %s::jsonb, unique_key => %s::text) AS id"
    )
    ids += [window.value(sql, queue, TAGS, Jsonb(META), key) for key in (None, "s")]
    sql = "SELECT enqueue_many('noop', ARRAY['{}', '{}']::jsonb[], queue => %s, tags => %s::text[], meta => %s::jsonb) AS id"
    ids += [row["id"] for row in window.run(sql, queue, TAGS, Jsonb(META))]

    assert [record(window, job_id) for job_id in ids] == [(TAGS, META)] * len(ids)
    view = window.run("SELECT tags, meta FROM jobs WHERE queue = %s", queue)
    assert [(row["tags"], row["meta"]) for row in view] == [(TAGS, META)] * len(ids)
    assert [labels_of(r["options"]) for r in window.run("SELECT options::text FROM job WHERE queue = %s", queue)] == [
        (tuple(TAGS), META)
    ] * len(ids)
    assert record(window, window.enqueue(queue)) == (None, None)


def test_a_call_that_sorts_its_unique_keys_in_a_file_keeps_them() -> None:
    given = request_by_name("noop", {}, unique_key="k", tags=TAGS, meta=META)
    with Spool() as spool:
        spool.add([0], [1], [given])
        (part,) = spool.parts()
    assert part.requests == [given]


def test_a_handler_has_defaults_a_call_replaces_them_and_the_job_tells_them() -> None:
    handlers = Handlers()

    @handlers.job(tags=["eu", "eu"], meta={"by": "shop"})
    def told(job: Job) -> list[Any]:
        return [list(job.tags), job.meta]

    def run(handler: Any) -> Any:
        return labels_of(handler.request().options)

    assert run(told) == (("eu",), {"by": "shop"})
    assert run(told.options(tags=("us",), meta={"n": 1})) == (("us",), {"n": 1})
    assert told.options(tags=[], meta={}).request().options is None
    assert labels_of(None) == ((), {})


@pytest.mark.parametrize(
    "options", ["{", "[]", '{"tags": 1, "meta": 2}', '{"tags": null, "meta": "["}', "[" * 5000 + '"tags"']
)
def test_what_cannot_be_read_in_options_is_left_out(options: str) -> None:
    assert labels_of(options) == ((), {})


async def test_an_end_a_retry_and_a_deletion_take_them_along(window: Window, store: WorkerStore, queue: str) -> None:
    job_id = window.enqueue(queue, tags=[queue], meta={"n": 1})
    for kind in ("discarded", "completed"):
        await store.settle([end(await claim_one(store, queue), kind)])
        assert record(window, job_id) == ([queue], {"n": 1})
        assert [j.id for j in window.do(history.jobs({"tag": queue}, limit=9))] == [job_id]
        window.do(operations.retry(job_id))
    assert record(window, job_id) == ([queue], {"n": 1})
    window.do(history.delete(job_id))
    assert window.do(history.jobs({"tag": queue}, limit=9)) == []


def test_a_filter_by_tag_finds_live_and_finished_jobs_page_by_page(window: Window, queue: str) -> None:
    ids = [window.enqueue(queue, tags=["x", queue]) for _ in range(5)]
    window.enqueue(queue, tags=[f"{queue}0"], meta={"x": queue})
    chosen: JobFilter = {"tag": queue}
    assert [j.id for j in window.do(history.jobs(chosen, limit=3))] == ids[:1:-1]
    found = window.do(searching.search(chosen, limit=3))
    rest = window.do(searching.search(chosen, limit=3, before=found.before))
    assert [j.id for j in [*found.jobs, *rest.jobs]] == ids[::-1]
    assert window.do(history.jobs({"tag": "x' OR true"}, limit=3)) == []


@pytest.mark.parametrize(
    "tag", ["", " ", "a b", "a,b", 'a"', "a\\", "[a", "a}", "a\n", "a\0", "a\u202eb", "\ud800", "x" * 65, "é" * 33, 7]
)
def test_a_tag_that_cannot_be_one_is_refused(tag: Any) -> None:
    with pytest.raises(InvalidName, match="tag"):
        request_by_name("noop", tags=[tag])


@pytest.mark.parametrize("tags", ["eu", b"eu", {"eu": 1}, 7, [f"t{n}" for n in range(11)]])
def test_what_is_no_list_of_tags_is_refused(tags: Any) -> None:
    with pytest.raises(ConfigurationError, match="tags"):
        request_by_name("noop", tags=tags)


@pytest.mark.parametrize(
    "meta",
    [
        ["a"],
        "a",
        {1: 2},
        {"a": []},
        {"a": {}},
        {"a": float("nan")},
        {"a": 2**63},
        {"a": 10**5000},
        {"a": "\0"},
        {"\ud800": 1},
        {"a": "x" * 2000},
    ],
)
def test_metadata_that_cannot_be_kept_is_refused(meta: Any) -> None:
    with pytest.raises(ConfigurationError, match="meta"):
        request_by_name("noop", meta=meta)


@pytest.mark.parametrize(
    ("tags", "meta"),
    [
        (["a b"], None), ([None], None), ([""], None), (["x" * 65], None), ([f"t{n}" for n in range(11)], None),
        (["a\\"], None),
        (None, "[]"), (None, '{"a": []}'), (None, '{"a": {}}'), (None, f'{{"a": "{"x" * 2000}"}}'), (None, '"a"'),
    ],
)  # fmt: skip
def test_the_functions_of_sql_refuse_the_same(window: Window, tags: Any, meta: Any) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=r"tag|meta"):
        window.run("SELECT enqueue('noop', tags => %s::text[], meta => %s::jsonb)", tags, meta)


@pytest.mark.parametrize(
    "options",
    ['{"tags": 1}', '{"tags": "eu"}', '{"tags": " a\\"b "}', '{"meta": "{"}', '{"meta": {}}', '{"meta": "%7B%22a%22:007}"}',
     '{"meta": "%7B}"}'],
)  # fmt: skip
def test_options_that_no_client_writes_are_refused_and_harm_no_list_if_they_are_there(
    window: Window, options: str
) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="cannot be"):
        window.run("SELECT check_options(%s::json)", options)
    job_id = window.value("INSERT INTO job (kind, options) VALUES ('noop', %s::json) RETURNING id", options)
    assert record(window, job_id) == (None, None)
    window.run("DELETE FROM job WHERE id = %s", job_id)


async def test_a_tag_named_as_a_mark_keeps_no_job_that_is_not_kept(
    window: Window, store: WorkerStore, queue: str
) -> None:
    job_id = window.enqueue(queue, tags=["tree"], meta={"tree": "tree"})
    options = window.value("SELECT options::text FROM job WHERE id = %s", job_id)
    assert '"tree"' not in options
    assert (
        window.value(
            "SELECT option_number(%s::json, 'crash_limit', 1, 9)", options.replace("{", '{"crash_limit":2,', 1)
        )
        == 2
    )
    assert (await claim_one(store, queue)).options == options


def test_a_list_by_a_rare_tag_reads_the_indexes(alone: Window) -> None:
    alone.run("INSERT INTO job (kind) SELECT 'noop' FROM generate_series(1, 20000)")
    alone.run(
        "INSERT INTO job_archive (id, queue, kind, priority, state, run_at, created_at, attempt, locked_by, started_at,"
        " finished_at, failures, max_attempts, args, options)"
        " SELECT 100000 + n, 'bulk', 'noop', 0, 4, now(), now(), 1, 7, now(), now(), 0, 20,"
        " '{}', CASE WHEN n % 5000 = 0 THEN '{\"tags\": \" eu \"}'::json END FROM generate_series(1, 20000) n"
    )
    alone.do(new_jobs.enqueue(request_by_name("noop", tags=["eu"])))
    alone.run("VACUUM ANALYZE job, job_archive")
    asked = dict.fromkeys(
        (
            "state",
            "queue",
            "kind",
            "workers",
            "unique_key",
            "key",
            "error",
            "since",
            "since_ago",
            "until",
            "until_ago",
            "owes",
        )
    )
    look = {"live": True, "finished": True, "failed": False, "ids": None, "window": 10000, "queues": "{}"}
    for name, more in {"matching_jobs": {"sizes": True}, "look_through_jobs": look}.items():
        parameters = asked | {"tag": "eu", "before": 2**63 - 1, "limit": 50} | more
        rows = alone.connection.execute(b"EXPLAIN (COSTS OFF) " + statement(name, "pulse"), parameters).fetchall()
        plan = "\n".join(row["QUERY PLAN"] for row in rows)
        assert "job_tags" in plan, plan
        assert "tags_of_idx" in plan, plan
        # Of the archive's days only those without a row are read whole.
        assert "Seq Scan on job j" not in plan, plan
        assert alone.pages(statement(name, "pulse"), parameters) < 60


def test_metadata_is_a_payload_to_the_web_page_and_tags_are_not(window: Window) -> None:
    found = window.do(operations.job(window.enqueue(tags=["eu"], meta={"by": "shop"})))
    seen = without_payloads(found, None)
    assert (seen.tags, seen.meta) == (["eu"], HIDDEN)


def test_stored_labels_fit_beside_every_other_option() -> None:
    request = request_by_name("noop", tags=[f"{n}".ljust(64, "x") for n in range(10)], meta={"a": "x" * 1980})
    assert len(request.options or "") < 2_700
    assert pack_tags(["a", "b"]) == " a b "
    assert pack_meta({}) == ""
    with pytest.raises(UsageError):
        request_by_name("noop", tags=["a b"])


def test_a_run_in_a_test_has_none() -> None:
    handlers = Handlers()

    @handlers.job
    def told(job: Job) -> list[Any]:
        return [list(job.tags), job.meta]

    assert run_job_sync("told", {}, handlers=handlers).result == [[], {}]
