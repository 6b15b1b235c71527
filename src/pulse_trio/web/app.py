"""Assembles the app: its parts, its routes, and what guards it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from . import problems, rendering, security
from .actions import ROUTES as ACTIONS
from .addresses import STATIC
from .database import Database
from .live import Live
from .pages import batches, doctor, job, jobs, overview, queues, schedules, workers
from .site import Site

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from .security import Authenticate, WebSettings

PAGES = (
    overview.PAGE,
    jobs.PAGE,
    job.PAGE,
    queues.PAGE,
    queues.ONE,
    workers.PAGE,
    schedules.PAGE,
    schedules.FIRES,
    batches.PAGE,
    batches.ONE,
    doctor.PAGE,
)


def build(
    dsn: str, *, read_only: bool, authenticate: Authenticate | None, schema: str, settings: WebSettings | None
) -> Starlette:
    """The app for one database."""
    site = Site(Database(dsn, schema), Live(), read_only)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        await site.database.aclose()

    routes = [route for each in PAGES for route in each.routes()]
    app = Starlette(routes=[*routes, *ACTIONS, Mount("/static", StaticFiles(directory=STATIC))], lifespan=lifespan)
    app.state.site = site
    problems.add_to(app)
    security.secure(
        app,
        read_only=read_only,
        authenticate=authenticate,
        answer=problems.answer,
        page=rendering.page,
        settings=settings,
    )
    return app
