"""Every page in a real Chromium, on an empty database and with something to show: what axe-core finds, and whether it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pulse_trio import SyncClient
from support.browsing import served
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from playwright.sync_api import Page

    from support.databases import Databases

    Visit = Callable[..., Page]

PAGES = ["/", "/jobs", "/queues", "/workers", "/schedules", "/batches", "/doctor", "/enqueue"]
OF_SOMETHING = ["/jobs/1", "/queues/mail", "/schedules/nightly"]
LONG = "a-name-" * 8
SESSION = "INSERT INTO session (id, host, pid, version, concurrency, lease) VALUES (7, 'web-1', 4711, '1', 8, '1 h')"


@pytest.fixture(scope="module")
def full(databases: Databases) -> Generator[str]:
    """A page over a database with something of each kind, long names among it."""
    with databases.migrated() as dsn, Window(dsn) as window:
        window.run(SESSION)
        client = SyncClient(dsn)
        for n in range(30):
            client.enqueue("send", {"n": n}, queue="mail")
        client.enqueue(LONG, {"text": "x" * 500}, queue=LONG[:50])
        window.run("UPDATE job SET id = id + 5000000, created_at = created_at - interval '30 min' WHERE id IN (29, 30)")
        client.pause("mail")
        client.limit_queue("mail", limit=3)
        client.schedule("nightly", "report", cron="0 3 * * *")
        window.run("INSERT INTO batch (name) VALUES ('a batch')")
        with served(dsn) as address:
            yield address


@pytest.fixture(scope="module")
def empty(site: str) -> str:
    return site


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (375, True)], ids=["wide, light", "narrow, dark"])
@pytest.mark.parametrize("database", ["empty", "full"])
def test_axe_finds_nothing_on_any_page_and_no_page_scrolls_sideways(
    database: str, width: int, dark: bool, request: pytest.FixtureRequest, visit: Visit
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    address: str = request.getfixturevalue(database)
    page = visit(viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light")
    for path in PAGES if database == "empty" else PAGES + OF_SOMETHING:
        answer = page.goto(f"{address}{path}")
        assert answer is not None
        assert answer.status == 200, path
        found = Axe().run(page)
        assert found.violations_count == 0, f"{path}: {found.generate_report()}"
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"{path} scrolls sideways"
        if path == "/jobs":
            broken = "time => time.checkVisibility() && time.getClientRects().length > 1"
            assert not page.evaluate(f"[...document.querySelectorAll('table.jobs time')].some({broken})")
            framed = "[...document.querySelectorAll('.scroll')].every(frame => frame.scrollWidth <= frame.clientWidth)"
            assert page.evaluate(framed), "a column of the list is cut off"
