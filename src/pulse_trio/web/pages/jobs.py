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
    given = request.query_params
    before = given.get("before", "")
    return await reading.read(
        site.database,
        {"state": given.get("state") or None, "queue": given.get("queue") or None, "kind": given.get("kind") or None},
        before=int(before) if before.isdecimal() and len(before) < 19 else None,
    )


PAGE = Page("/jobs", "jobs.html", read)
