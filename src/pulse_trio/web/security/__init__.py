"""Who asks, and what they may do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request

if TYPE_CHECKING:
    from typing import Any

    from starlette.applications import Starlette


@dataclass(frozen=True, slots=True)
class User:
    """Who sent a request. `may_act`: change anything; `may_read_payloads`: see arguments and results."""

    name: str
    may_act: bool = True
    may_read_payloads: bool = True


Authenticate = Callable[[Request], Awaitable[User | None]]
"""The caller's own: which user sends this request, or None for nobody."""


class Secured:
    """The ASGI middleware that gives each request its user."""

    def __init__(self, app: Any, *, read_only: bool, authenticate: Authenticate | None) -> None:
        self._app = app
        self._read_only = read_only

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Passes a request on with `request.state.user`."""
        if scope["type"] == "http":
            scope.setdefault("state", {})["user"] = User("local", may_act=not self._read_only)
        await self._app(scope, receive, send)


def secure(app: Starlette, *, read_only: bool, authenticate: Authenticate | None) -> None:
    """Puts what guards the app in front of it."""
    app.add_middleware(Secured, read_only=read_only, authenticate=authenticate)


def context(request: Request) -> dict[str, Any]:
    """What templates know of security: `user`, and `csrf_token` for each form."""
    return {"user": getattr(request.state, "user", None), "csrf_token": ""}
