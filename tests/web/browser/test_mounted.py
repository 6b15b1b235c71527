"""The pages under a prefix of another program's: FastAPI's and Django's ASGI apps, in a real browser."""

from __future__ import annotations

from textwrap import dedent
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from support.browsing import program
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from playwright.sync_api import Page

SERVE = """
import sys
from functools import partial
import trio
from hypercorn.config import Config
{imports}
config = Config()
config.bind = ["127.0.0.1:0"]
sockets = config.create_sockets
def made():
    found = sockets()
    print(f"at http://127.0.0.1:{{found.insecure_sockets[0].getsockname()[1]}}", flush=True)
    return found
config.create_sockets = made
{serve}
"""
FASTAPI = """
from fastapi import FastAPI
from hypercorn.trio import serve
from pulse_trio.web import create_app
app = FastAPI()
app.mount("/ops/pulse", create_app(sys.argv[1]))
"""
DJANGO = """
import asyncio
import django
from django.conf import settings
from hypercorn.asyncio import serve
settings.configure(ALLOWED_HOSTS=["127.0.0.1"], SECRET_KEY="test", ROOT_URLCONF=__name__)
urlpatterns = []
django.setup()
from django.core.asgi import get_asgi_application
from starlette.applications import Starlette
from starlette.routing import Mount
from pulse_trio.web import create_app
app = Starlette(routes=[Mount("/ops/pulse", create_app(sys.argv[1])), Mount("/", get_asgi_application())])
"""


@pytest.mark.parametrize(
    ("imports", "serve"),
    [(FASTAPI, "trio.run(serve, app, config)"), (DJANGO, "asyncio.run(serve(app, config))")],
    ids=["FastAPI on Trio", "Django on asyncio"],
)
def test_every_link_form_and_stream_stays_below_the_prefix(
    imports: str, serve: str, dsn: str, tmp_path: Path, visit: Callable[..., Page]
) -> None:
    (tmp_path / "mounted.py").write_text(SERVE.format(imports=dedent(imports), serve=serve))
    with Window(dsn) as window, program(str(tmp_path / "mounted.py"), dsn, says=r"at (http://\S+)") as found:
        job_id = window.enqueue("mail", kind="send", args={"address": "a"})
        page = visit()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{found[1]}/ops/pulse/jobs")
        page.get_by_role("link", name=str(job_id)).click()
        expect(page.locator("#state")).to_have_text("available")
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#state")).to_have_text("cancelled")
        page.get_by_role("navigation", name="Pages").get_by_role("link", name="Overview").click()
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        assert [url for url in asked if not url.startswith(f"{found[1]}/ops/pulse/")] == []
        assert any("/ops/pulse/live/jobs/" in url for url in asked)
