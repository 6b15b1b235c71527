"""`/workers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..reading import workers as reading
from . import Page

if TYPE_CHECKING:
    from starlette.requests import Request

    from ..site import Site


async def read(request: Request, site: Site) -> reading.Workers:
    """The workers; with `?gone=1` those too that have ended."""
    return await reading.read(site.database, gone=request.query_params.get("gone") == "1")


PAGE = Page("/workers", "workers.html", read, live="parts/workers.html", filters={"gone": "[01]"})
