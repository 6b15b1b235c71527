"""`/doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..reading import doctor as reading
from . import Page

if TYPE_CHECKING:
    from starlette.requests import Request

    from ..site import Site


async def read(_: Request, site: Site) -> reading.Doctor:
    """The findings."""
    return await reading.read(site)


PAGE = Page("/doctor", "doctor.html", read, live="parts/doctor.html")
