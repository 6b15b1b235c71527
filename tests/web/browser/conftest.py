"""One browser for each module, a context of its own for each test, and a page that must stay without errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.browsing import ARGUMENTS, CHROMIUM, served
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from playwright.sync_api import Browser, Page

    from support.databases import Databases

PATIENCE = 15_000
"""Milliseconds that a step may take on a loaded machine."""


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    """Ends with its module: while it is open, Playwright runs an asyncio loop in this thread, and no other loop can run."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    playwright.expect.set_options(timeout=PATIENCE)
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture
def visit(browser: Browser) -> Generator[Callable[..., Page]]:
    """Makes a page in a context of its own. What the page's script or its security policy complains of fails the test."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def make(**options: Any) -> Page:
        context = browser.new_context(viewport=options.pop("viewport", {"width": 1280, "height": 900}), **options)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        # A stream that ends with its server is no complaint of the page's.
        page.on(
            "console", lambda m: complaints.append(m.text) if m.type == "error" and "net::ERR_" not in m.text else None
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        return page

    yield make
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def room(databases: Databases) -> Generator[Window]:
    """The module's database."""
    with databases.migrated() as dsn, Window(dsn) as window:
        yield window


@pytest.fixture(scope="module")
def site(room: Window) -> Generator[str]:
    """The address of a web page on the module's database."""
    with served(room.dsn) as address:
        yield address
