"""The overview's charts in a real Chromium: exact values under the pointer and by the arrow keys, live, light and dark."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from support.browsing import served
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from playwright.sync_api import Locator, Page, Route

    from support.databases import Databases

    Visit = Callable[..., Page]

YESTERDAY = """
DO $$ DECLARE yesterday date := (now() AT TIME ZONE 'UTC')::date - 1; BEGIN
  EXECUTE format('CREATE TABLE IF NOT EXISTS %I PARTITION OF job_archive FOR VALUES FROM (%L) TO (%L)',
    'job_archive_' || to_char(yesterday, 'YYYYMMDD'), yesterday::timestamp AT TIME ZONE 'UTC',
    (yesterday + 1)::timestamp AT TIME ZONE 'UTC'); END $$"""
"""A new database has no part of yesterday, where the jobs finished when the test runs just after midnight, UTC."""
FINISHED = """
INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts, priority,
                         state, queue, kind, args)
SELECT n, f, f - (1 + n % 7) * interval '1 s', f - (3 + n % 11) * interval '1 s', f, 9, 1, 0, 20, 0, 4, 'mail', 'send', '{}'
FROM generate_series(1, 600) n, LATERAL (SELECT now() - interval '20 min' + sqrt(n / 600.0) * interval '20 min' AS f) t
"""
PICTURES = os.environ.get("PULSE_TRIO_PICTURES")


def point(chart: Locator, told: Locator) -> None:
    """Moves the pointer over a chart until it shows a minute: uPlot leaves out a move that comes while it is laid out."""
    for x in range(5, 100):
        chart.hover(position={"x": x, "y": 20})
        if told.is_visible():
            return
    raise AssertionError("the chart shows nothing under the pointer")


@pytest.fixture(scope="module")
def finished(databases: Databases) -> Generator[tuple[str, Window]]:
    """A page over a database where jobs finished."""
    with databases.migrated() as dsn, Window(dsn) as window:
        window.run("SELECT maintain('7 days')")
        window.run(YESTERDAY)
        window.run(FINISHED)
        window.enqueue_many(7, "mail")
        with served(dsn) as address:
            yield address, window


def test_a_pointer_and_the_arrow_keys_show_the_exact_values_of_a_minute(
    finished: tuple[str, Window], visit: Visit
) -> None:
    page = visit()
    page.goto(f"{finished[0]}/")
    expect(page.get_by_role("slider", name="Jobs finished a minute")).to_be_visible()
    told = page.locator(".told").first
    expect(told).to_be_hidden()
    point(page.locator(".canvas").first, told)
    expect(told).to_have_text(re.compile(r"^(\d\d:\d\d:\d\d).(\d\d:\d\d:\d\d) UTC\d+ jobs? finished$"))
    page.mouse.move(0, 0)
    expect(told).to_be_hidden()
    waits = page.get_by_role("slider", name="How long jobs waited")
    waits.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    expect(waits).to_have_attribute("aria-valuenow", "58")
    expect(waits).to_have_attribute("aria-valuetext", re.compile(r"UTC, median \d.*, 95 of 100 within \d"))
    expect(page.locator(".told").nth(1)).to_be_visible()


def test_a_chart_goes_on_with_the_stream_and_nothing_moves(finished: tuple[str, Window], visit: Visit) -> None:
    address, window = finished
    page = visit()
    page.goto(f"{address}/")
    chart = page.locator("[data-chart]").first
    expect(chart.locator("canvas")).to_have_count(1)
    expect(chart).to_be_visible()  # laid out: before, it has no box
    page.evaluate("window.canvas = document.querySelector('[data-chart] canvas')")
    before = (chart.bounding_box(), chart.get_attribute("data-chart"))
    point(chart.locator(".canvas"), chart.locator(".told"))
    window.run(
        "INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,"
        " priority, state, queue, kind, args) SELECT n, now(), now(), now(), now(), 9, 1, 0, 20, 0, 4, 'mail', 'send', '{}'"
        " FROM generate_series(1001, 1900) n"
    )
    page.wait_for_function("old => document.querySelector('[data-chart]').dataset.chart !== old", arg=before[1])
    assert chart.bounding_box() == before[0]
    assert page.evaluate("window.canvas.isConnected"), "the chart was drawn anew"
    last = page.locator(".canvas").first
    last.focus()
    page.keyboard.press("End")
    expect(last).to_have_attribute("aria-valuetext", re.compile(r", 9\d\d jobs finished"))


def test_the_first_event_and_a_notice_that_comes_or_goes_leave_the_charts_and_the_focus_alone(
    finished: tuple[str, Window], visit: Visit
) -> None:
    address, window = finished
    page = visit()
    held: list[Route] = []
    page.route("**/live/**", lambda route: held.append(route))  # the stream: its first event comes when all is prepared
    page.goto(f"{address}/")
    notices = page.get_by_role("region", name="What is wrong")
    expect(notices).to_contain_text("jobs are due")
    expect(page.locator("[data-chart] canvas")).to_have_count(3)
    page.evaluate("window.canvas = document.querySelector('[data-chart] canvas')")
    page.locator(".canvas").first.focus()
    held[0].continue_()
    window.run("UPDATE job SET run_at = now() + interval '1 hour' WHERE state = 1")
    try:
        expect(notices).to_have_count(0)
        assert page.evaluate("window.canvas.isConnected"), "the chart was drawn anew when the notice went"
        expect(page.locator(".canvas").first).to_be_focused()
    finally:
        window.run("UPDATE job SET run_at = now() WHERE state = 1")
    expect(notices).to_have_count(1)
    assert page.evaluate("window.canvas.isConnected"), "the chart was drawn anew when the notice came"
    expect(page.locator(".canvas").first).to_be_focused()


def test_without_javascript_the_server_draws_the_charts(finished: tuple[str, Window], visit: Visit) -> None:
    page = visit(java_script_enabled=False)
    page.goto(f"{finished[0]}/")
    expect(page.get_by_role("img", name="Jobs finished a minute")).to_be_visible()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_the_charts_fit_and_axe_finds_nothing(
    width: int, dark: bool, finished: tuple[str, Window], visit: Visit
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = visit(viewport={"width": width, "height": 900}, color_scheme="light")
    page.goto(f"{finished[0]}/")
    expect(page.locator("[data-chart] canvas")).to_have_count(3)
    if dark:
        # Drawn in light first: the canvas takes the other colours when they change.
        page.emulate_media(color_scheme="dark")
    page.locator(".canvas").nth(1).focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".told").nth(1)).to_be_visible()
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"overview-{width}-{'dark' if dark else 'light'}.png", full_page=True)
