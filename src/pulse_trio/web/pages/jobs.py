"""`/jobs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..reading import jobs as reading
from ..rendering import wants_json
from . import Page

if TYPE_CHECKING:
    from starlette.requests import Request

    from ..site import Site


async def read(request: Request, site: Site) -> reading.Jobs:
    """The jobs that the query asks for. A program is refused where a person reads what is wrong with it."""
    if not wants_json(request):
        return await reading.read(site.database, request.query_params)
    reading.check_filters(request.query_params.multi_items())
    return await reading.find(site.database, request.query_params)


PAGE = Page("/jobs", "jobs.html", read, filters=None)
