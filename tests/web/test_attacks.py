"""Texts from rows are texts on every page: nothing that a producer, a worker or an operator wrote becomes an element, an
attribute or an address. The pages are those of the app's own routes: a page that is added is attacked too."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from starlette.routing import Mount, Route

from pulse_trio import SyncClient
from pulse_trio.client import request_by_name
from pulse_trio.store import schedules
from pulse_trio.timing import Timing
from pulse_trio.web import User, create_app
from support.sites import open_site
from support.stores import Window, claim_one, end, open_store

if TYPE_CHECKING:
    import httpx
    from starlette.requests import Request

EVIL = (
    "\"'></title></script></textarea></pre><script>boom()</script><img src=x onerror=boom()>"
    "<a href=javascript:boom()>{{ 7 * 191 }}{% raw %}<style>*{}</style>"
)
WORSE = f"{EVIL}\u202ereversed\x1b[2J\x07\u2028<!--"
SECRET = "what-only-some-may-read"  # noqa: S105
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
ADDRESSES = {"href", "src", "action", "formaction", "data-live", "data", "poster", "xlink:href"}
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def authenticate(request: Request) -> User:
    """Sees and does all; with the header x-reads: no the payloads are not theirs."""
    return User(f"ada{EVIL}"[:150], may_act=True, may_read_payloads=request.headers.get("x-reads") != "no")


async def fill(dsn: str) -> dict[str, Any]:
    """A database in which every text that others write is EVIL, and every payload holds SECRET. Returns what addresses name."""
    client = SyncClient(dsn)
    args = {"text": WORSE, EVIL: [{"secret": SECRET, "plain": SECRET}]}
    with Window(dsn) as window:
        async with open_store(dsn, queues=["q", "r"]) as store:
            dead = client.enqueue("dies", args, queue="q", max_attempts=1).id
            error = f"Traceback (most recent call last):\n  {WORSE}\nValueError: {WORSE}"
            await store.settle([end(await claim_one(store, "q"), "failed", error=error)])
            done = client.enqueue("done", args, queue="q").id
            await store.settle([end(await claim_one(store, "q"), result=json.dumps({"said": WORSE, "all": SECRET}))])
            running = client.enqueue(EVIL, args, queue="r").id
            await claim_one(store, "r")
            waiting = client.enqueue(EVIL, args, queue="q", delay=3600, unique_key=EVIL, key=EVIL).id
            cancelled = client.enqueue("noop", args, queue="q", delay=3600).id
            client.cancel(cancelled, reason=EVIL)
            schedule = schedules.Schedule(
                EVIL, request_by_name(EVIL, args, queue="q"), Timing(every=None, cron="0 3 * * *")
            )
            client.run(schedules.put(schedule))
            client.pause(kind=EVIL)
            client.limit_queue("q", rate="5/s")
            window.run("UPDATE session SET host = %s, version = %s", WORSE, WORSE)
            window.run("UPDATE cancellation SET requested_by = %s", WORSE)
            window.run("UPDATE schedule SET problem = %s", WORSE)
            window.run(
                "INSERT INTO progress (job_id, attempt, fraction, message, updated_at) VALUES (%s, 1, 0.5, %s, now())",
                running,
                WORSE,
            )
            batch_id = window.value(
                "INSERT INTO batch (name, callback_error) VALUES (%s, %s) RETURNING id", WORSE, WORSE
            )
    return {"jobs": [dead, done, running, waiting, cancelled], "batch": batch_id}


def pages(there: dict[str, Any]) -> list[str]:
    """Every address of the app that is read, streams excepted, with what the database holds in the place of ids."""
    found: list[str] = []
    for route in create_app("", authenticate=authenticate).routes:
        if isinstance(route, Mount):
            continue
        assert isinstance(route, Route), route
        if "GET" not in (route.methods or ()) or route.path.startswith("/live"):
            continue
        if "{" not in route.path:
            found.append(route.path)
            continue
        ids = [there["batch"]] if "batch" in route.path else there["jobs"]
        found += [re.sub(r"\{[^}]+\}", str(each), route.path) for each in ids]
    evil = "%22%3E%3Cscript%3Eboom()"
    names = ("queue", "kind", "since", "until", "state", "before", "worker", "key", "unique_key", "error", "none")
    queries = ["state=dead", "error=ValueError", *(f"{name}={evil}" for name in names)]
    found += [f"{path}?{query}" for path in found if path.endswith("/jobs") for query in queries]
    return [
        *found,
        "/enqueue?kind=%22%3E%3Cscript%3Eboom()&args=%3C/textarea%3E%3Cscript%3Eboom()",
        "/%3Cscript%3Eboom()",
    ]


class Elements(HTMLParser):
    """Collects what is wrong with a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.wrong: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "style", "img", "iframe", "object", "embed", "base", "link", "svg") and (
            tag in ("style", "iframe", "object", "embed", "base")
            or any("/static/" not in (given.get(name) or "/static/") for name in ("src", "href"))
            or (tag == "script" and "src" not in given)
        ):
            self.wrong.append(f"<{tag} {given}>")
        for name, value in attrs:
            if name.startswith("on") or name == "style" or not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9:-]*", name):
                self.wrong.append(f"{tag} {name}={value}")
            if name in ADDRESSES and not (value or "").startswith(("/", "#")):
                self.wrong.append(f"{tag} {name}={value}")
            if name in ADDRESSES and (value or "").startswith("//"):
                self.wrong.append(f"{tag} {name}={value}")

    def handle_comment(self, data: str) -> None:
        self.wrong.append(f"<!--{data}")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check(path: str, answer: httpx.Response) -> None:
    assert answer.status_code < 500, (path, answer.text)
    assert answer.headers["cache-control"] == "no-store", path
    kind = answer.headers.get("content-type", "")
    if kind.startswith("application/json"):
        answer.json()
        return
    if answer.status_code == 303:
        return
    assert kind == "text/html; charset=utf-8", (path, kind)
    elements = Elements()
    elements.feed(answer.text)
    elements.close()
    assert elements.wrong == [], path
    # What {{7*191}} would come to; a token may have these digits among its own.
    assert re.search(r"(?<!\w)1337(?!\w)", answer.text) is None, path
    assert CONTROLS.findall(answer.text) == [], path


async def test_no_text_of_a_row_becomes_markup_on_any_page_and_no_payload_is_shown_to_who_may_not_read_it(
    dsn: str,
) -> None:
    there = await fill(dsn)
    async with open_site(dsn, authenticate=authenticate) as site:
        showing = 0
        for path in pages(there):
            seen = await site.get(path)
            check(path, seen)
            showing += SECRET in seen.text
            # A field that the setting names is shown to no one.
            assert not re.search(rf"secret[^a-z]+{SECRET}", seen.text), path
            refused = await site.get(path, headers={"x-reads": "no"})
            check(path, refused)
            assert SECRET not in refused.text, path
        # The test sees what is there: a page of a job shows its payload to who may read it.
        assert showing > 0
        token = re.search(r'name="csrf_token" value="([^"]+)"', (await site.get("/enqueue")).text)
        assert token is not None
        ids = [str(each) for each in there["jobs"]]
        for path, fields in [
            ("/actions/jobs/preview", {"verb": "retry", "ids": ids, "back": '/jobs?"><script>boom()'}),
            ("/actions/jobs/preview", {"verb": "retry", "state": "dead", "error": EVIL}),
            ("/actions/jobs/preview", {"verb": EVIL}),
            *((f"/actions/jobs/{each}/delete", {"back": "javascript:boom()"}) for each in ids),
            ("/actions/jobs/enqueue", {"kind": EVIL, "args": EVIL, "queue": EVIL, "priority": EVIL}),
            ("/actions/queues/x/limits", {"limit": EVIL}),
        ]:
            for reads in ("yes", "no"):
                answer = await site.post(path, data={"csrf_token": token[1]} | fields, headers={"x-reads": reads})
                check(path, answer)
                after = await site.get("/enqueue")
                check(path, after)


@pytest.mark.parametrize(
    "where", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:boom()", "jobs"]
)
async def test_a_form_leads_nowhere_else(dsn: str, where: str) -> None:
    with Window(dsn) as window:
        job_id = window.enqueue()
    async with open_site(dsn, authenticate=authenticate) as site:
        token = re.search(r'name="csrf_token" value="([^"]+)"', (await site.get("/enqueue")).text)
        assert token is not None
        fields = {"csrf_token": token[1], "back": where}
        assert (await site.post(f"/actions/jobs/{job_id}/cancel", data=fields)).headers["location"] == f"/jobs/{job_id}"
        done = await site.post(f"/actions/jobs/{job_id}/delete", data=fields | {"confirmed": "yes"})
        assert done.headers["location"] == "/jobs"


async def test_no_path_leads_out_of_the_static_files(dsn: str) -> None:
    async with open_site(dsn, authenticate=authenticate) as site:
        out = (
            "../app.py",
            "%2e%2e/app.py",
            "..%2fapp.py",
            "%2e%2e%2f%2e%2e%2fsettings.py",
            "/etc/passwd",
            "%2fetc/passwd",
        )
        for path in (f"/static/{name}" for name in (*out, "%00", "", "style.css/%2e%2e", "a" * 5000)):
            answer = await site.get(path)
            assert answer.status_code in (404, 405), path
            assert "import" not in answer.text
            assert "root:" not in answer.text
