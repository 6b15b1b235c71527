"""`/jobs/ID`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UnknownJob
from ...store.operations import missing
from ..reading import job as reading
from . import Page

if TYPE_CHECKING:
    from starlette.requests import Request

    from ..site import Site


async def read(request: Request, site: Site) -> reading.Job:
    """The job that the path names."""
    job_id: int = request.path_params["job_id"]
    if not 0 < job_id < 2**63:
        raise UnknownJob(missing(job_id))
    return await reading.read(site.database, job_id)


PAGE = Page("/jobs/{job_id:int}", "job.html", read, live="parts/job.html")
