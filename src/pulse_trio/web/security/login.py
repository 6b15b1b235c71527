"""The login page, and the way out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from starlette.routing import Route

from ...text import shown
from .hosts import client_of
from .passage import passage_of, redirect, within
from .throttle import LoginThrottle
from .users import NAME_LIMIT, TooBusyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from .users import Users

    Page = Callable[..., Response]

logger = logging.getLogger("pulse_trio.web")
_WRONG = "That name and password do not belong together."


class Login:
    """`/login` and `/logout`, for the users of the settings."""

    def __init__(self, users: Users, page: Page, throttle: LoginThrottle | None = None) -> None:
        self._users = users
        self._page = page
        self._throttle = throttle or LoginThrottle()
        self.routes = [
            Route("/login", self._show, methods=["GET"]),
            Route("/login", self._log_in, methods=["POST"]),
            Route("/logout", self._log_out, methods=["POST"]),
        ]

    async def _show(self, request: Request) -> Response:
        there = within(request.query_params.get("next")) or "/"
        if request.state.user is not None:
            return redirect(request, there)
        return self._form(request, there)

    def _form(self, request: Request, there: str, *, problem: str = "", name: str = "", status: int = 200) -> Response:
        return self._page(
            request, "login.html", None, status=status, live=False, there=there, problem=problem, name=name
        )

    async def _log_in(self, request: Request) -> Response:
        form = request.state.form
        name, password = str(form.get("name", "")).strip(), str(form.get("password", ""))
        there = within(form.get("next")) or "/"
        address = client_of(request.scope)
        if len(name) > NAME_LIMIT:
            return self._form(request, there, problem=_WRONG, status=403)
        if (seconds := self._throttle.begin(name, address)) > 0:
            return self._later(request, there, name, seconds)
        try:
            user = await self._users.check(name, password)
        except TooBusyError:
            return self._later(request, there, name, 5.0)
        if user is None:
            # A password is often typed into the field of the name: only names that exist are logged.
            who = repr(shown(name)) if self._users.user(name) is not None else "an unknown name"
            logger.warning("login refused: %s from %s", who, shown(address))
            return self._form(request, there, problem=_WRONG, name=name, status=403)
        self._throttle.succeeded(name, address)
        logger.info("login: %r from %s", shown(name), shown(address))
        passage_of(request).log_in(user.name, self._users.fingerprint(user.name))
        return redirect(request, there)

    def _later(self, request: Request, there: str, name: str, seconds: float) -> Response:
        minutes = f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"
        problem = f"Too many attempts. Try again in {minutes}; sessions that are open go on."
        answer = self._form(request, there, problem=problem, name=name, status=429)
        answer.headers["retry-after"] = f"{seconds:.0f}"
        return answer

    async def _log_out(self, request: Request) -> Response:
        passage = passage_of(request)
        passage.log_out()
        return redirect(request, "/login", flash="You are logged out.")
