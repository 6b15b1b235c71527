"""Each page and its JSON twin, on an empty database, with data, and without a database."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
from starlette.routing import Route

from pulse_trio import SyncClient
from pulse_trio.lines import Kind
from pulse_trio.postgres import TrioConnection
from pulse_trio.web import User, create_app, database
from pulse_trio.web.reading.job import LONGEST, TOO_LONG
from pulse_trio.web.security import HIDDEN
from pulse_trio.worker.durable.cancelling import COMPENSATED
from support.sites import open_site
from support.stores import open_store

if TYPE_CHECKING:
    import httpx

    from support.stores import Window

PAGES = {
    "/": "/api/overview",
    "/jobs": "/api/jobs",
    "/queues": "/api/queues",
    "/workers": "/api/workers",
    "/schedules": "/api/schedules",
    "/batches": "/api/batches",
    "/doctor": "/api/doctor",
}


def test_the_how_to_lists_every_page_and_its_json(dsn: str) -> None:
    how_to = (Path(__file__).parents[2] / "docs/how-to/web.md").read_text(encoding="utf-8")
    listed = {path for row in re.findall(r"^\| `/.*", how_to, re.MULTILINE) for path in re.findall(r"`(/[^`]*)`", row)}

    app = create_app(dsn)
    read = [route.path for route in app.routes if isinstance(route, Route) and "GET" in (route.methods or ())]
    shown = {re.sub(r"\{(?:\w+_)?(\w+):\w+\}", lambda of: of[1].upper(), path) for path in read}
    assert listed == {path for path in shown if not path.startswith("/live/")}


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_answers_on_an_empty_database(site: httpx.AsyncClient, path: str) -> None:
    answer = await site.get(path)

    assert answer.status_code == 200, answer.text
    assert "<h1>" in answer.text


@pytest.mark.parametrize("prefix", ["", "/ops/pulse"])
async def test_the_first_page_has_its_twin_at_the_root_of_the_others_too(dsn: str, prefix: str) -> None:
    """`/api/` and `/api` were not found."""
    async with open_site(dsn, prefix=prefix) as site:
        twins = [await site.get(path) for path in ("/api/overview", "/api/", "/api")]
    assert [twin.status_code for twin in twins] == [200] * 3
    names = [list(twin.json()) for twin in twins]
    assert names[0] == names[1] == names[2] != []


async def test_a_page_and_its_twin_show_the_same_jobs(site: httpx.AsyncClient, window: Window) -> None:
    job_id = window.enqueue("mail", kind="send")

    page, twin = await site.get("/jobs"), await site.get("/api/jobs")

    assert f'href="/jobs/{job_id}"' in page.text
    assert [job["id"] for job in twin.json()["jobs"]] == [job_id]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("state=nonsense", "nonsense"),
        ("id=zz", "A job's id is a whole number above 0, not 'zz'."),
        ("since=xx", "'xx'"),
        ("before=abc", "not 'abc'"),
        ("owes_clean_up=maybe", "owes_clean_up is 1 or left out, not 'maybe'."),
        ("stat=dead", "There is no filter 'stat'. The filters are: id, state"),
        ("state=dead&state=cancelled", "The filter state is given 2 times"),
        ("state=dead&queue=%00", r"The filter queue is '\x00', which no job has"),
        ("state=dead&queue=mail%00", r"The filter queue is 'mail\x00', which no job has"),
        ("state=dead&queue=%20", "The filter queue is ' ', which no job has"),
    ],
)
async def test_a_program_whose_filter_cannot_be_read_is_refused(
    site: httpx.AsyncClient, window: Window, query: str, reason: str
) -> None:
    """It got 200 and no jobs, or all of them, and took that for its answer. A person reads what is wrong on the page."""
    window.enqueue("mail", kind="send")
    page, twin = await site.get(f"/jobs?{query}"), await site.get(f"/api/jobs?{query}")
    assert (page.status_code, twin.status_code) == (200, 400)
    assert reason in twin.json()["error"]
    assert "jobs" not in twin.json()


async def test_a_last_beat_of_a_clock_that_was_ahead_has_no_negative_age(
    site: httpx.AsyncClient, window: Window
) -> None:
    async with open_store(window.dsn):
        window.run("UPDATE session SET seen_at = now() + interval '90 min'")
        assert re.search(r'data-label="Last beat">in 1 h (30|2\d) min<', (await site.get("/workers")).text)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("batches?before=abc", "The filter before cannot be 'abc'."),
        (f"batches?before={'9' * 25}", "The filter before cannot be '9999"),
        ("batches?before=1&before=2", "The filter before is given 2 times"),
        ("batches?after=1", "There is no filter 'after'. The filters are: before."),
        ("workers?gone=maybe", "The filter gone cannot be 'maybe'."),
        ("queues?x=1", "There is no filter 'x'. This page has none."),
        ("schedules?x=1", "There is no filter 'x'."),
        ("overview?x=1", "There is no filter 'x'."),
        ("doctor?x=1", "There is no filter 'x'."),
    ],
)
async def test_a_program_is_refused_where_a_page_has_no_such_filter(
    site: httpx.AsyncClient, path: str, reason: str
) -> None:
    """It got 200, and all there was."""
    answer = await site.get(f"/api/{path}")
    assert (answer.status_code, reason in answer.json()["error"]) == (400, True)
    assert (await site.get(f"/api/{path.partition('?')[0]}?")).status_code == 200


async def test_blanks_at_the_ends_of_a_key_are_a_part_of_it(site: httpx.AsyncClient, window: Window) -> None:
    """The job was not found, by the link on its own page either."""
    job_id = window.value("SELECT enqueue(' send ', '{}', queue => 'mail', key => ' pad ')")
    window.enqueue("mail", kind="send")
    for query in ("key=%20pad%20", "kind=%20send%20", "key=%20pad%20&queue=%20mail%20"):
        assert [job["id"] for job in (await site.get(f"/api/jobs?{query}")).json()["jobs"]] == [job_id]
    assert (await site.get("/api/jobs?key=pad")).json()["jobs"] == []


async def test_what_a_program_leaves_empty_is_no_filter(site: httpx.AsyncClient, window: Window) -> None:
    job_id = window.enqueue("mail", kind="send")
    twin = await site.get("/api/jobs?state=&owes_clean_up=&queue=mail")
    assert [job["id"] for job in twin.json()["jobs"]] == [job_id]


async def test_the_day_that_a_suspended_job_never_sees_is_shown_nowhere(
    site: httpx.AsyncClient, window: Window
) -> None:
    job_id = window.enqueue("mail", kind="send")
    window.run("UPDATE job SET attempt = 1, run_at = far() WHERE id = %s", job_id)
    window.run("SELECT FROM make_durable(%s)", job_id)
    window.run("UPDATE durable_job SET suspended = 1, events = '{paid}' WHERE job_id = %s", job_id)
    for address in ("/jobs", f"/jobs/{job_id}", "/api/jobs", f"/api/jobs/{job_id}"):
        answer = await site.get(address)
        assert "suspended" in answer.text
        assert "9999" not in answer.text
        assert not re.search(r"in \d+ d\b", answer.text)
    (job,) = (await site.get("/api/jobs")).json()["jobs"]
    assert job["run_at"] is None


async def test_jobs_are_filtered_by_tag_and_a_job_shows_its_tags_and_its_metadata(
    site: httpx.AsyncClient, window: Window
) -> None:
    window.enqueue("mail")
    job_id = window.enqueue("mail", tags=["eu/1", "<b>"], meta={"by": "<i>shop"})

    twin, page = await site.get("/api/jobs", params={"tag": "eu/1"}), await site.get(f"/jobs/{job_id}")

    (job,) = twin.json()["jobs"]
    assert (job["id"], job["tags"], job["meta"]) == (job_id, ["eu/1", "<b>"], {"by": "<i>shop"})
    assert 'href="/jobs?tag=eu%2F1"' in page.text
    assert "&lt;i&gt;shop" in page.text
    assert "<i>shop" not in page.text


async def test_the_page_of_a_cancelled_job_says_that_its_clean_up_did_not_end(
    site: httpx.AsyncClient, window: Window
) -> None:
    job_id = window.enqueue("mail")
    window.run("SELECT FROM make_durable(%s)", job_id)
    lines = "INSERT INTO history (job_id, line, kind, key, value, attempt) VALUES (%s, %s, %s, %s, %s, 1)"
    window.run(lines, job_id, 1, 9, "job", '{"reason": "user"}')
    window.run("SELECT FROM cancel_jobs_now(ARRAY[%s::bigint])", job_id)

    page, twin = await site.get(f"/jobs/{job_id}"), await site.get(f"/api/jobs/{job_id}")
    assert "A retry does the rest of it" in page.text
    assert twin.json()["owes_clean_up"] is True

    window.run(lines, job_id, 2, 10, COMPENSATED, "1.0")
    assert "A retry does the rest of it" not in (await site.get(f"/jobs/{job_id}")).text


@pytest.mark.parametrize("reads", ["all", "some", "nothing"])
async def test_what_a_durable_job_has_recorded_is_shown_to_those_who_may_read_payloads(
    dsn: str, window: Window, reads: str
) -> None:
    """It was shown to nobody, and an event under another name than the one that the job waits for was not to be seen."""
    job_id = window.enqueue("mail")
    window.run("SELECT FROM make_durable(%s)", job_id)
    lines = "INSERT INTO history (job_id, line, kind, key, name, value, attempt) VALUES (%s, %s, %s, %s, %s, %s, 1)"
    window.run(lines, job_id, 1, Kind.STEP, "1:step", "charge", '{"receipt": "<r-17>", "card": "of-ada"}')
    window.run(lines, job_id, 2, Kind.EVENT, "2:event", "paid", '"by ada"')
    window.run(lines, job_id, 3, Kind.STEP, "3:step", "scan", f'"{"x" * LONGEST}"')
    SyncClient(dsn).send_event(job_id, "refunded", {"card": "of-eve"})

    async def user(_: object) -> User:
        return User("ada", may_read_payloads=reads != "nothing", redact=("card",) if reads == "some" else ())

    async with open_site(dsn, authenticate=user) as site:
        page, twin = await site.get(f"/jobs/{job_id}"), await site.get(f"/api/jobs/{job_id}")
    for word, who in [("of-ada", ["all"]), ("of-eve", ["all"]), ("r-17", ["all", "some"]), ("by ada", ["all", "some"])]:
        assert [word in answer.text for answer in (page, twin)] == [reads in who] * 2, word
    assert "<r-17>" not in page.text
    told = {f"{one['what']} {one['name']}": one["payload"] for one in twin.json()["recorded"]}
    assert list(told) == ["step charge", "event paid", "step scan", "event not received refunded"]
    assert told["step scan"] == (HIDDEN if reads == "nothing" else TOO_LONG)
    assert page.text.count("event not received refunded") == 1


async def test_no_value_keeps_a_page_or_its_twin_from_being_shown(dsn: str, window: Window) -> None:
    """The twin of a job that had received 1e400 was a 500. What cannot be read is shown as text, and not to those for whom
    fields are redacted: one of these may be in it."""
    job_id = window.enqueue("mail")
    window.run("SELECT FROM make_durable(%s)", job_id)
    lines = "INSERT INTO history (job_id, line, kind, key, name, value, attempt) VALUES (%s, %s, %s, %s, %s, %s::text::json, 1)"
    values = ["1e400", "9" * 1900, '"\\ud83d"', "[" * 990 + "]" * 990, "1e" + "9" * 40]
    for number, value in enumerate(values):
        window.run(lines, job_id, number + 1, Kind.EVENT, f"{number + 1}:event", "paid", value)
    window.run(lines, job_id, 9, Kind.BLOCK_FAILED, "9:block", "", '{"failed": 7}')
    window.run(lines, job_id, 10, Kind.CANCELLED, "10:cancelled", "", '{"reason": 7}')
    huge = window.value("SELECT enqueue('mail', %s::text::jsonb)", '{"n": 1' + "0" * 400 + ".5}")
    window.value("SELECT enqueue('mail', %s::text::jsonb)", '{"n": ' + "9" * 4301 + "}")

    async def user(_: object) -> User:
        return User("ada", may_read_payloads=True, redact=("card",))

    async with open_site(dsn, authenticate=user) as site:
        for path in (
            f"/jobs/{job_id}",
            f"/api/jobs/{job_id}",
            f"/jobs/{huge}",
            f"/api/jobs/{huge}",
            "/jobs",
            "/api/jobs",
        ):
            answer = await site.get(path)
            assert answer.status_code == 200, path
            assert "Infinity" not in answer.text
        told = [one["payload"] for one in (await site.get(f"/api/jobs/{job_id}")).json()["recorded"]]
    assert told[0] == "1E+400"
    assert told[4] == {"$unreadable": HIDDEN}


async def test_every_address_of_a_page_is_under_the_prefix(dsn: str) -> None:
    async with open_site(dsn, prefix="/ops/pulse") as site:
        page = await site.get("/jobs")

    assert page.status_code == 200
    addresses = [
        part.partition('"')[0] for mark in ('href="', 'src="', 'action="') for part in page.text.split(mark)[1:]
    ]
    assert addresses
    assert [a for a in addresses if not a.startswith(("/ops/pulse/", "#"))] == []


async def test_a_database_that_is_away_is_a_503_that_says_so() -> None:
    async with open_site("postgresql://127.0.0.1:1/none") as site:
        page, twin = await site.get("/jobs"), await site.get("/api/jobs")

    assert (page.status_code, twin.status_code) == (503, 503)
    assert "The database is away" in page.text
    assert twin.json()["title"] == "The database is away"


@pytest.mark.anyio
async def test_a_server_that_does_not_answer_is_away(
    dsn: str, window: Window, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL ends no statement then: the page waited for ever."""
    async with open_site(dsn) as site:
        assert (await site.get("/jobs")).status_code == 200
        of_page = window.value(
            "SELECT pid FROM pg_stat_activity"
            " WHERE application_name = 'pulse-trio web' AND datname = current_database()"
        )
        os.kill(of_page, signal.SIGSTOP)
        try:
            with monkeypatch.context() as shorter, anyio.fail_after(30):
                shorter.setattr(database, "_MOST_STATEMENTS", 0)
                shorter.setattr(database, "PATIENCE_TO_CONNECT", 1)
                for name in ("cancel_timeout", "cleanup_timeout"):
                    shorter.setattr(TrioConnection, name, 0.1)
                page = await site.get("/jobs")
        finally:
            os.kill(of_page, signal.SIGCONT)
        assert (page.status_code, "The database is away" in page.text) == (503, True)
        assert (await site.get("/jobs")).status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_pages_work_on_asyncio(dsn: str, anyio_backend: str) -> None:
    async with open_site(dsn) as site:
        assert (await site.get("/")).status_code == 200
