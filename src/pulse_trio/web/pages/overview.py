"""`/`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..reading import overview as reading
from . import Page

if TYPE_CHECKING:
    from starlette.requests import Request

    from ..site import Site


async def read(_: Request, site: Site) -> reading.Overview:
    """The overview."""
    return await reading.read(site)


PAGE = Page("/", "overview.html", read, live="parts/overview.html", api=("/api/overview", "/api/", "/api"))
