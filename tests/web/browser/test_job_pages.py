"""`/jobs` and `/jobs/ID` in a real Chromium: found, filtered, paged, acted on and watched, by mouse and by keyboard."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from pulse_trio import SyncClient
from support.browsing import served, working
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from playwright.sync_api import Locator, Page

    from support.databases import Databases

    Visit = Callable[..., Page]

FAILED = """
INSERT INTO job_archive (id, queue, kind, key, priority, state, run_at, created_at, attempt, locked_by, started_at, finished_at,
                         failures, max_attempts, args, error)
SELECT n, 'mail', 'send', CASE WHEN n % 3 = 0 THEN 'acme' END, 0, CASE WHEN n % 4 = 0 THEN 4 ELSE 5 END,
       t, t - interval '9 min', 3, 7, t - interval '2 s', t, 3, 3, json_build_object('address', 'person' || n),
       CASE WHEN n % 4 <> 0 THEN concat_ws(chr(10), 'ConnectionRefusedError: no server takes mail',
                                           'Traceback (most recent call last):', '  File "app.py", line 12, in send') END
FROM (SELECT n, now() - make_interval(mins => 200 - n) AS t FROM generate_series(1, 120) n) rows
"""
MANY = """
INSERT INTO job_archive (id, queue, kind, priority, state, run_at, created_at, attempt, locked_by, started_at, finished_at,
                         failures, max_attempts, args, error)
SELECT n, 'mail', 'send', 0, 5, now(), now(), 1, 7, now(), now(), 1, 1, '{}', 'boom' FROM generate_series(1, 10000) n
"""
ATTEMPTS = """
INSERT INTO attempt (job_id, attempt, session, started_at, ended_at, outcome, error)
SELECT n, a, 7, at, at + make_interval(secs => a * 20), CASE WHEN a = 2 THEN 'rescued' ELSE 'failed' END,
       'ConnectionRefusedError: no server takes mail' || chr(10) || '  File "app.py", line ' || a
FROM (SELECT n, a, now() - make_interval(mins => 200 - n) - interval '9 min' + make_interval(mins => 2 * a) AS at
      FROM generate_series(1, 120) n, generate_series(1, 3) a WHERE n % 4 <> 0) rows
"""
SESSION = "INSERT INTO session (id, host, pid, version, concurrency, lease) VALUES (7, 'web-1', 4711, '1', 8, '1 h')"
PICTURES = os.environ.get("PULSE_TRIO_PICTURES")
"""A folder to which the pages are painted, for a person to look at."""


def painted(page: Page, name: str) -> None:
    """Keeps a picture where someone asked for pictures."""
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)


def fits(page: Page) -> bool:
    """Whether nothing makes the page itself scroll sideways."""
    return page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@pytest.fixture(scope="module")
def failed(room: Window) -> Window:
    """120 finished jobs, of which most are dead, and jobs that wait for different reasons."""
    for statement in (SESSION, FAILED, ATTEMPTS):
        room.run(statement)
    room.run("SELECT setval(pg_get_serial_sequence('job', 'id'), 1000)")
    room.enqueue("mail", kind="send", args={"address": "a@example.org"}, delay=3600)
    room.enqueue("night", kind="clean", args={"days": 3})
    room.run("INSERT INTO queue (name, paused_at) VALUES ('night', now() - interval '3 h')")
    return room


def ids(page: Page, count: int) -> list[int]:
    """The ids of the list, when it has so many."""
    rows = page.locator("table.jobs tbody th")
    expect(rows).to_have_count(count)
    return [int(text) for text in rows.all_inner_texts()]


def test_an_empty_list_says_what_to_do_next(databases: Databases, visit: Visit) -> None:
    with databases.migrated() as dsn, served(dsn) as address:
        page = visit()
        page.goto(f"{address}/jobs")
        expect(page.locator(".empty strong")).to_have_text("No jobs yet")
        painted(page, "jobs-empty")
        page.goto(f"{address}/jobs?state=dead&queue=none")
        expect(page.locator(".empty strong")).to_have_text("No job matches")


def test_filters_narrow_the_list_and_pages_go_on_below(failed: Window, site: str, visit: Visit) -> None:
    page = visit()
    page.goto(f"{site}/jobs")
    ids(page, 50)
    painted(page, "jobs")
    page.get_by_role("navigation", name="State").get_by_role("link", name="Dead").click()
    expect(page).to_have_title(re.compile("^Dead jobs"))
    first = ids(page, 50)
    assert {each % 4 != 0 for each in first} == {True}
    page.get_by_role("link", name="Older").click()
    second = ids(page, 40)
    assert max(second) < min(first)
    expect(page.get_by_role("link", name="Older")).to_have_count(0)
    page.get_by_label("Key", exact=True).fill("acme")
    page.get_by_role("button", name="Search").click()
    expect(page).to_have_url(re.compile("state=dead.*key=acme"))
    assert {each % 3 for each in ids(page, 30)} == {0}
    page.get_by_label("Job id").fill("17")
    page.get_by_role("button", name="Search").click()
    assert ids(page, 1) == [17]
    page.get_by_label("Job id").fill("seventeen")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("alert")).to_have_text("A job's id is a whole number above 0, not 'seventeen'.")


def test_the_page_of_a_dead_job_shows_each_attempt_and_its_errors(failed: Window, site: str, visit: Visit) -> None:
    page = visit()
    page.goto(f"{site}/jobs/17")
    expect(page.get_by_role("heading", level=1)).to_have_text("send 17")
    expect(page.locator("#state")).to_have_text("dead")
    expect(page.locator(".timeline rect.ran")).to_have_count(3)
    expect(page.locator("pre.error").first).to_contain_text("Traceback (most recent call last)")
    page.get_by_text("Errors of 3 attempts").click()
    expect(page.get_by_label("Error of attempt 2")).to_be_visible()
    painted(page, "job-dead")


def test_a_job_of_a_paused_queue_says_why_it_waits(failed: Window, site: str, visit: Visit) -> None:
    page = visit()
    page.goto(f"{site}/jobs?queue=night")
    page.locator("table.jobs tbody th a").click()
    reasons = page.get_by_role("region", name="Why it waits")
    expect(reasons).to_contain_text("Its queue, night, is paused.")
    expect(reasons).to_contain_text("Since 3 h ago.")
    painted(page, "job-waits")


def test_every_job_that_matches_is_retried_after_their_number_was_shown(databases: Databases, visit: Visit) -> None:
    with databases.migrated() as dsn, Window(dsn) as window, served(dsn) as address:
        window.run(MANY)
        page = visit()
        page.goto(f"{address}/jobs?state=dead&queue=mail")
        page.get_by_role("button", name="Retry all…").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Retry 10,000 jobs?")
        assert window.value("SELECT count(*) FROM job") == 0
        painted(page, "bulk")
        page.get_by_role("button", name="Retry 10,000 jobs").click()
        expect(page.locator(".flash")).to_contain_text("10,000 jobs retried", timeout=60_000)
        assert window.value("SELECT count(*) FROM job") == 10000


def test_some_jobs_are_selected_and_deleted(failed: Window, site: str, visit: Visit) -> None:
    page = visit()
    page.goto(f"{site}/jobs?state=completed")
    expect(page.get_by_role("button", name="Delete", exact=True)).to_be_disabled()
    chosen = ids(page, 30)[:2]
    for job_id in chosen:
        page.get_by_label(f"Select job {job_id}").check()
    expect(page.locator("[data-selected]")).to_have_text("2 selected:")
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete 2 jobs").click()
    expect(page.locator(".flash")).to_contain_text("2 jobs deleted")
    assert not set(chosen) & set(ids(page, 28))


@pytest.fixture(scope="module")
def worked(databases: Databases) -> Generator[tuple[str, Window]]:
    """A web page, and a worker that has a running job and a durable tree."""
    with databases.migrated() as dsn, Window(dsn) as window, served(dsn) as address, working(dsn):
        yield address, window


def test_a_running_job_shows_its_stack_and_is_cancelled_and_seen_to_end(
    worked: tuple[str, Window], visit: Visit
) -> None:
    address, window = worked
    job_id = window.enqueue("reports", kind="report", args={"title": "November"})
    page = visit()
    page.goto(f"{address}/jobs/{job_id}")
    expect(page.locator("#state")).to_have_text("running")
    expect(page.get_by_text("page 2 of 5 of November")).to_be_visible()
    painted(page, "job-running")
    page.get_by_role("button", name="Show the stack").click()
    expect(page.locator("pre")).to_contain_text("_waiting_for_the_printer")
    painted(page, "stack")
    page.goto(f"{address}/jobs/{job_id}")
    page.evaluate("window.stays = true")
    SyncClient(window.dsn).cancel(job_id, reason="the printer burns")
    expect(page.locator("#state")).to_have_text("cancelled")
    expect(page.get_by_text("the printer burns").first).to_be_visible()
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    assert page.evaluate("window.stays")


def test_the_button_cancels_a_running_job(worked: tuple[str, Window], visit: Visit) -> None:
    address, window = worked
    job_id = window.enqueue("reports", kind="report", args={"title": "October"})
    page = visit()
    page.goto(f"{address}/jobs/{job_id}")
    expect(page.locator("#state")).to_have_text("running")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#state")).to_have_text("cancelled")
    assert window.value("SELECT requested_by FROM cancellation WHERE job_id = %s", job_id)


def test_the_tree_of_a_durable_job_is_drawn_and_goes_on_when_its_event_comes(
    worked: tuple[str, Window], visit: Visit
) -> None:
    address, window = worked
    job_id = window.enqueue("orders", kind="order", args={"order_id": 42})
    page = visit()
    page.goto(f"{address}/jobs/{job_id}")
    tree = page.get_by_role("region", name="Tree").locator("tbody tr")
    expect(tree).to_have_count(3)
    expect(page.get_by_role("region", name="Why it waits")).to_contain_text("It waits for the event approved.")
    painted(page, "job-tree")
    SyncClient(window.dsn).send_event(job_id, "approved", "yes")
    expect(page.locator("#state")).to_have_text("completed")
    expect(page.locator("pre").last).to_contain_text("yes")


@pytest.mark.parametrize("path", ["/jobs", "/jobs?state=dead", "/jobs/17", "/jobs?queue=night"])
def test_everything_is_there_without_javascript(path: str, failed: Window, site: str, visit: Visit) -> None:
    page = visit(java_script_enabled=False)
    page.goto(f"{site}{path}")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    if path == "/jobs?state=dead":
        page.locator("input[name=ids]").first.check()
        page.get_by_role("button", name="Retry", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Retry 1 job?")


def test_the_list_is_used_by_keyboard_alone(failed: Window, site: str, visit: Visit) -> None:
    page = visit()
    page.goto(f"{site}/jobs")

    def press_until(wanted: Locator, key: str = "Tab") -> None:
        for _ in range(60):
            page.keyboard.press(key)
            if wanted.evaluate("element => element === document.activeElement"):
                assert wanted.evaluate("element => getComputedStyle(element).outlineStyle !== 'none'"), (
                    "focus is not seen"
                )
                return
        raise AssertionError(f"{wanted} is not reached")

    press_until(page.get_by_role("link", name="Skip to the content"))
    page.keyboard.press("Enter")
    press_until(page.get_by_role("link", name="Dead"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="Dead")).to_have_attribute("aria-current", "true")
    press_until(page.get_by_label("Job id"))
    page.keyboard.type("17")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("id=17"))
    press_until(page.locator("table.jobs tbody th a"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("send 17")
    press_until(page.get_by_role("button", name="Retry"))


@pytest.mark.parametrize("path", ["/jobs", "/jobs?state=dead&error=refused", "/jobs/17", "/jobs/1002"])
def test_axe_finds_nothing_and_the_page_never_scrolls_sideways(
    path: str, failed: Window, site: str, visit: Visit
) -> None:
    """Wide and narrow, light and dark; one page for all four, whose colours change as those of a visitor who changes them."""
    # Twelve rows have each combination of state and key; axe takes a second for fifty.
    like_others = {"exclude": [["table.jobs tbody tr:nth-child(n+13)"]]}
    from axe_playwright_python.sync_playwright import Axe

    page = visit()
    for width in (1280, 375):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(f"{site}{path}")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            found = Axe().run(page, like_others)
            assert found.violations_count == 0, f"{width}, {scheme}: {found.generate_report()}"
            assert fits(page), f"{width}, {scheme}"
            painted(page, f"axe-{re.sub('[^a-z0-9]+', '-', path)}-{width}-{scheme}")
