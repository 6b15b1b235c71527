"""Web pages in this process: an app over a database, and a client that asks it without a network."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx

from pulse_trio.web import create_app

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

HOST = "http://127.0.0.1"


@asynccontextmanager
async def open_site(dsn: str, *, prefix: str = "", **options: Any) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of an app over `dsn`; `prefix` mounts the app there, as Starlette's Mount does. `options` as `create_app`."""
    app = create_app(dsn, **options)
    # An answer of 500 is what a browser gets too, not the exception.
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=prefix, client=("127.0.0.1", 40000))
    try:
        async with httpx.AsyncClient(transport=transport, base_url=HOST + prefix) as client:
            yield client
    finally:
        await app.state.site.database.aclose()
