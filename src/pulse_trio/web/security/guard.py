"""The guard: every request passes it before a page sees it.

In this order: the host name, the place it comes from, the session and its user, and for a change: the origin, the size, the
form's token, the user's right. A page behind it need ask nothing but `request.state.user`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...describing import type_name
from ...errors import ConfigurationError
from .bodies import LARGEST, ONLY_LOGIN, Refusal, form_of
from .headers import route_of
from .hosts import behind, header, host_of, is_allowed, is_local, is_same_origin
from .passage import Passage, redirect
from .sessions import Sessions
from .users import User, Users, parse_users

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .settings import WebSettings

Authenticate = Callable[[Request], "User | Response | Awaitable[User | Response | None] | None"]
"""The caller's own: which user sends this request; None refuses it, a Response answers it (a redirect to a login)."""
Answer = Callable[[Request, Exception], Awaitable[Response]]

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
LOCAL = "local"
"""The name of the one user where there are no logins."""
_OPEN = frozenset({"/login", "/logout"})


class AuthenticateFailed(Exception):
    """The app's own `authenticate` is wrong: the request is answered with its mistake, and passes nowhere."""


async def _asked(authenticate: Authenticate, request: Request) -> User | Response | None:
    """What it says. Raises `AuthenticateFailed`, and as it is the HTTPException with which it refuses a request."""
    try:
        found: Any = authenticate(request)
        found = await found if inspect.isawaitable(found) else found
    except HTTPException:
        raise
    except Exception as error:  # the app's own code may raise anything; none passes
        raise AuthenticateFailed(f"create_app(authenticate=...): it raised {type_name(error)}.") from error
    if found is None or isinstance(found, (User, Response)):
        return found
    raise AuthenticateFailed(
        f"create_app(authenticate=...): it must return a pulse_trio.web.User, None to refuse the request, or a response of "
        f"Starlette's; it returned {type_name(found)}."
    )


class Access:
    """Who may pass: the settings, read once."""

    def __init__(self, settings: WebSettings, *, read_only: bool, authenticate: Authenticate | None) -> None:
        self.settings = settings
        self.read_only = read_only
        self.authenticate = authenticate
        hashes = {} if authenticate is not None else parse_users(*settings.user_entries())
        self.users = Users(hashes, viewers=frozenset(settings.viewers), payloads=settings.payloads)
        if authenticate is None:
            self.users.check_viewers()
            if settings.users_file and not hashes:
                raise ConfigurationError(
                    f"PULSE_TRIO_WEB_USERS_FILE ({settings.users_file}) names no user: the page would have no logins."
                )
        self.sessions = Sessions(settings.secret, settings.session)
        self.proxies = settings.proxies

    @property
    def is_open(self) -> bool:
        """Whether there are no logins: then the page is for this machine alone."""
        return self.authenticate is None and not self.users

    async def user_of(self, passage: Passage, request: Request) -> User | Response | None:
        """The user who sends a request."""
        if self.authenticate is not None:
            return await _asked(self.authenticate, request)
        if self.is_open:
            return User(LOCAL, may_act=True, may_read_payloads=self.settings.payloads != "none")
        session = passage.session
        if session.new or session.name is None or session.fingerprint != self.users.fingerprint(session.name):
            return None
        passage.logs_in = True
        return self.users.user(session.name)


class Guard:
    """The ASGI middleware."""

    def __init__(self, app: ASGIApp, *, access: Access, answer: Answer) -> None:
        self._app = app
        self._access = access
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**behind(scope, self._access.proxies), "state": dict(scope.get("state") or {})}
        if (refusal := self._misplaced(scope)) is not None:
            await PlainTextResponse(f"{refusal}\n", refusal.status)(scope, receive, send)
            return
        sessions = self._access.sessions
        passage = Passage(scope, sessions, sessions.read(scope) or sessions.begin())
        passage.flash = sessions.flash(scope)
        scope["state"] |= {"passage": passage, "user": None}
        request = Request(scope, receive)

        started = False

        async def send_with_cookies(message: Message) -> None:
            nonlocal started
            started = True
            await send(passage.answered(message) if message["type"] == "http.response.start" else message)

        try:
            await self._pass(passage, request, receive, send_with_cookies)
        except Exception as error:
            # Answered here: outside of the guard an answer would have neither the user nor the headers.
            if started:
                raise
            answer = await self._answer(request, error)
            await answer(scope, receive, send_with_cookies)

    async def _pass(self, passage: Passage, request: Request, receive: Receive, send: Send) -> None:
        scope = passage.scope
        try:
            answer = await self._admit(passage, Request(scope), receive)
        except Refusal as refusal:
            answer = await self._answer(request, HTTPException(refusal.status, str(refusal), refusal.headers or None))
        if answer is not None:
            await answer(scope, receive, send)
        elif scope["method"] in SAFE:
            await self._while_it_lasts(passage, receive, send)
        else:
            await self._app(scope, receive, send)

    def _misplaced(self, scope: Scope) -> Refusal | None:
        access = self._access
        if (host := host_of(scope)) is None:
            return Refusal(400, "A request names one host.")
        if not is_allowed(host, access.settings.hosts, any_other=not access.is_open):
            return Refusal(
                421,
                f"This page does not answer under the name {host}. If it is yours, add it to PULSE_TRIO_WEB_HOSTS.",
            )
        if access.is_open and not is_local(scope):
            return Refusal(
                403,
                "This page has no logins, so it answers browsers on its own machine alone, and none through a proxy. Give it "
                "users: PULSE_TRIO_WEB_USERS, or create_app(..., authenticate=...).",
            )
        return None

    async def _admit(self, passage: Passage, request: Request, receive: Receive) -> Response | None:
        """None if the request may pass. Raises `Refusal`."""
        scope = passage.scope
        path = route_of(scope)
        found = await self._access.user_of(passage, request)
        if isinstance(found, Response):
            return found
        if found is not None:
            user = replace(
                found,
                may_act=found.may_act and not self._access.read_only,
                redact=(*self._access.settings.redact, *found.redact),
            )
            passage.user = scope["state"]["user"] = user
        is_login = path in _OPEN and bool(self._access.users)
        if found is None and not is_login and not (path.startswith("/static/") and scope["method"] in SAFE):
            return self._unknown(request, path)
        if scope["method"] not in SAFE:
            await self._check_change(passage, receive, is_login=is_login)
        return None

    def _unknown(self, request: Request, path: str) -> Response | None:
        if not self._access.users:
            raise Refusal(403, "You are not allowed to see this page.")
        if request.method not in ("GET", "HEAD"):
            raise Refusal(401, "Log in first: your session has ended.")
        is_for_programs = path == "/api" or path.startswith("/api/")
        if is_for_programs or header(request.scope, b"sec-fetch-mode") not in (None, "navigate"):
            raise Refusal(401, "Log in first.")
        query = request.scope["query_string"].decode("latin-1")
        there = quote(path) + (f"?{query}" if query else "")
        return redirect(request, "/login" if there == "/" else f"/login?next={quote(there, safe='/')}")

    async def _check_change(self, passage: Passage, receive: Receive, *, is_login: bool) -> None:
        scope = passage.scope
        if not is_same_origin(scope):
            raise Refusal(403, "This form was sent by a page of another site. Nothing was changed.")
        if not is_login and (passage.user is None or not passage.user.may_act):
            raise Refusal(403, "You may look, and change nothing here. Nothing was changed.")
        form = await form_of(scope, receive, ONLY_LOGIN if passage.user is None else LARGEST)
        given = form.get("csrf_token") or header(scope, b"x-csrf-token")
        if passage.session.new or not passage.sessions.is_token(given, passage.session, passage.name):
            raise Refusal(
                403, "This form is of an earlier session. Nothing was changed: load the page again, and repeat it."
            )
        scope["state"]["form"] = form

    async def _while_it_lasts(self, passage: Passage, receive: Receive, send: Send) -> None:
        """Answers for at most as long as the session lasts: a live page must not outlive a logout."""
        sessions, session = passage.sessions, passage.session
        started = ended = False

        async def noting(message: Message) -> None:
            nonlocal started, ended
            started = True
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        left = session.expires - time.time() if passage.logs_in else sessions.seconds
        with anyio.CancelScope(deadline=anyio.current_time() + max(left, 1.0)) as stream:
            sessions.streaming(session, stream)
            try:
                await self._app(passage.scope, receive, noting)
            finally:
                sessions.streamed(session, stream)
        if stream.cancelled_caught and not started:
            await PlainTextResponse("Log in first.\n", 401)(passage.scope, receive, send)
        elif not ended:
            await send({"type": "http.response.body", "body": b""})
