"""What all pages of one app share, and how a request finds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from starlette.requests import Request

    from .database import Database
    from .live import Live


@dataclass(frozen=True)
class Site:
    """One app's parts. `read_only`: no user may change anything here."""

    database: Database
    live: Live
    read_only: bool


def site_of(request: Request) -> Site:
    """The app that a request was sent to."""
    return cast("Site", request.app.state.site)
