"""`/queues` and `/queues/NAME`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..addresses import named
from ..reading import queues as reading
from . import Page

if TYPE_CHECKING:
    from starlette.requests import Request

    from ..site import Site


async def read(_: Request, site: Site) -> reading.Queues:
    """All queues."""
    return await reading.read(site.database)


async def read_one(request: Request, site: Site) -> reading.Queue:
    """What is set for one queue."""
    return await reading.read_one(site.database, named(request, "name"))


ONE = Page("/queues/{name:path}", "queue.html", read_one)
PAGE = Page("/queues", "queues.html", read, live="parts/queues.html")
