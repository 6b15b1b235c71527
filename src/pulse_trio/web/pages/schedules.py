"""`/schedules` and `/schedules/NAME`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..addresses import named
from ..reading import schedules as reading
from . import Page

if TYPE_CHECKING:
    from starlette.requests import Request

    from ..site import Site


async def read(_: Request, site: Site) -> reading.Schedules:
    """All schedules."""
    return await reading.read(site.database)


async def read_fires(request: Request, site: Site) -> reading.Fires:
    """What one has fired."""
    return await reading.read_fires(site.database, named(request, "name"))


PAGE = Page("/schedules", "schedules.html", read, live="parts/schedules.html")
FIRES = Page("/schedules/{name:path}", "fires.html", read_fires)
