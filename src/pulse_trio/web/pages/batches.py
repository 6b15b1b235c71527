"""`/batches` and `/batches/ID`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UnknownBatch
from ..reading import batches as reading
from . import Page

if TYPE_CHECKING:
    from starlette.requests import Request

    from ..site import Site

_IDS = 2**63


async def read(request: Request, site: Site) -> reading.Batches:
    """One page of batches: those before the id that the query gives."""
    before = request.query_params.get("before", "")
    return await reading.read(
        site.database, before=int(before) if before.isascii() and before.isdecimal() and len(before) < 19 else None
    )


async def read_one(request: Request, site: Site) -> reading.Batch:
    """One batch."""
    batch_id = request.path_params["id"]
    if batch_id >= _IDS - 1:
        raise UnknownBatch("There is no such batch.")
    return await reading.read_one(site.database, batch_id)


PAGE = Page("/batches", "batches.html", read, live="parts/batches.html", filters={"before": r"\d{1,18}"})
ONE = Page("/batches/{id:int}", "batch.html", read_one, live="parts/batch.html")
