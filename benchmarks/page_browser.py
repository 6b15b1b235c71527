"""What a reader of the web page waits for: pages.py's part in Chromium.

Each visit is a browser's first: a context of its own, with nothing in its cache. The milliseconds are the browser's own, from
the start of the navigation.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from common import percentile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from playwright.sync_api import Browser, ConsoleMessage

    from common import Row

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WATCH = """
window.refused = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.refused.push(`${event.violatedDirective} refused ${event.blockedURI}`));
"""
TIMES = """() => new Promise((done) => {
  const look = () => {
    const paint = performance.getEntriesByName("first-contentful-paint")[0];
    const page = performance.getEntriesByType("navigation")[0];
    if (paint && page.loadEventEnd) {
      done([page.responseStart, paint.startTime, page.loadEventEnd, window.refused]);
    } else requestAnimationFrame(look);
  };
  look();
})"""
MEASURED = ("response", "paint", "loaded")
COLUMNS = {
    "page": "page",
    "response_p50_ms": "first byte p50 ms",
    "response_p95_ms": "p95",
    "paint_p50_ms": "first paint p50 ms",
    "paint_p95_ms": "p95",
    "loaded_p50_ms": "loaded p50 ms",
    "loaded_p95_ms": "p95",
    "complaints": "complaints",
}


def visits(port: int, paths: Iterable[str], times: int) -> list[Row]:
    """Each page `times` times, and once before, which does not count: the server has not rendered it yet."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("--browser needs chromium on the PATH")
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=program, args=ARGUMENTS)
        try:
            return [_measured(browser, port, path, times) for path in paths]
        finally:
            browser.close()


def _measured(browser: Browser, port: int, path: str, times: int) -> Row:
    complaints: list[str] = []
    took = [_visit(browser, f"http://127.0.0.1:{port}{path}", complaints) for _ in range(times + 1)][1:]
    row: Row = {"page": path, "visits": times}
    for name, values in zip(MEASURED, zip(*took, strict=True), strict=True):
        row |= {
            f"{name}_p50_ms": round(percentile(values, 0.5), 1),
            f"{name}_p95_ms": round(percentile(values, 0.95), 1),
        }
    return row | {"complaints": sorted(set(complaints))}


def _visit(browser: Browser, address: str, complaints: list[str]) -> list[float]:
    """The milliseconds of `MEASURED`. Complaints of the console, of scripts and of the security policy join `complaints`."""

    def console(message: ConsoleMessage) -> None:
        if message.type == "error":
            complaints.append(message.text)

    context = browser.new_context(viewport={"width": 1280, "height": 900})
    try:
        page = context.new_page()
        page.add_init_script(WATCH)
        page.on("console", console)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        answer = page.goto(address)
        if answer is None or answer.status != 200:
            complaints.append(f"status {answer.status if answer else None}")
        *times, refused = page.evaluate(TIMES)
        complaints.extend(refused)
        return times
    finally:
        context.close()
