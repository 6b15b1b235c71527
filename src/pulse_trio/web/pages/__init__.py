"""The pages, one module each, and how a page becomes routes: its HTML, its JSON twin, and its live stream.

A page reads the database once into a record (a dataclass, from `reading/`); its template and its twin show that record.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from ...errors import UsageError
from ..filters import check_names
from ..live import stream
from ..rendering import page, twin
from ..site import site_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

    from ..site import Site

    Read = Callable[[Request, Site], Awaitable[Any]]


@dataclass(frozen=True)
class Page:
    """A page at `path`.

    `read` returns its record. `template` shows it. `live` names the partial template that the page includes within
    `<div data-live="{{ url('/live' ~ path) }}">`, and that its stream sends again when it has changed; None for a page that
    does not move. `api` has the paths of its twin, by default `/api` and `path`.

    `filters` has a pattern for each parameter of the query: the twin refuses another name or value, which a program would take
    for heeded. None: `read` does that itself.
    """

    path: str
    template: str
    read: Read
    live: str | None = None
    api: Sequence[str] = ()
    filters: Mapping[str, str] | None = field(default_factory=dict[str, str])

    def routes(self) -> Sequence[BaseRoute]:
        """The page, its twin, and its stream."""
        routes = [Route(self.path, self._page)]
        routes += [Route(path, self._twin) for path in self.api or (f"/api{self.path}",)]
        if self.live is not None:
            routes.append(Route(f"/live{self.path}", self._live))
        return routes

    async def _page(self, request: Request) -> Response:
        return page(request, self.template, await self.read(request, site_of(request)), live=True)

    async def _twin(self, request: Request) -> Response:
        if self.filters is not None:
            _check(request.query_params.multi_items(), self.filters)
        return twin(request, await self.read(request, site_of(request)))

    async def _live(self, request: Request) -> Response:
        assert self.live is not None  # noqa: S101 -- no route leads here without it
        return stream(request, self.live, self.read)


def _check(given: Sequence[tuple[str, str]], filters: Mapping[str, str]) -> None:
    check_names(given, filters)
    for name, value in given:
        if value and not re.fullmatch(filters[name], value, re.ASCII):
            raise UsageError(f"The filter {name} cannot be {value[:40]!r}.")
