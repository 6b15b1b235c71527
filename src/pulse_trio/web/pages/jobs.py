"""`/jobs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..reading import jobs as reading
from . import Page

if TYPE_CHECKING:
    from starlette.requests import Request

    from ..site import Site


async def read(request: Request, site: Site) -> reading.Jobs:
    """The jobs that the query asks for."""
    return await reading.read(site.database, request.query_params)


PAGE = Page("/jobs", "jobs.html", read)
