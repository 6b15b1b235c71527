"""What is known of one request: its session and user, and what the answer tells the browser of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from starlette.responses import RedirectResponse

from .sessions import Flash, flash_name, forgotten

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Message, Scope

    from .sessions import Session, Sessions
    from .users import User

_WITHIN = re.compile(r"/(?![/\\])[!-\[\]-~]*")
"""A path within the app: no host, no backslash (which browsers read as a slash), no control character."""


@dataclass(slots=True)
class Passage:
    """One request on its way through."""

    scope: Scope
    sessions: Sessions
    session: Session
    user: User | None = None
    logs_in: bool = False
    """Whether the user came by the login page, and can log out."""
    flash: Flash | None = None
    _token: str = ""
    _cookies: list[str] = field(default_factory=list[str])

    @property
    def name(self) -> str:
        """The user's name, to which tokens are bound."""
        return "" if self.user is None else self.user.name

    def token(self) -> str:
        """The token for the forms of this page: one for all of them, so that a live part does not change by it."""
        self._token = self._token or self.sessions.token(self.session, self.name)
        return self._token

    def is_first(self, form: object) -> bool:
        """Whether this form is sent for the first time: a double click, or a page that was gone back to, sends it again."""
        return self.sessions.is_first(f"{self.session.sid} {self.scope['path']} {form}")

    def plan(self, what: Any) -> str:
        """What the user is asked to confirm, signed."""
        return self.sessions.plan(self.session, self.name, what)

    def planned(self, text: object, seconds: int) -> Any:
        """What was planned less than so many seconds ago; None for anything else."""
        return self.sessions.planned(text, self.session, self.name, seconds)

    def log_in(self, name: str, fingerprint: str) -> None:
        """The browser gets a new session, of this user; the old one ends."""
        self.log_out()
        self.session = self.sessions.begin(name, fingerprint)
        self._cookies = [self.sessions.set_cookie(self.scope, self.session)]

    def log_out(self) -> None:
        """The session ends, and the browser gets one without a user at the next page."""
        if not self.session.new:
            self.sessions.end(self.session)
        self.session = self.sessions.begin()
        self._cookies = [self.sessions.set_cookie(self.scope, self.session)]

    def tell(self, text: str, *, failed: bool = False) -> None:
        """The next page shows this line."""
        self._cookies.append(self.sessions.set_flash(self.scope, Flash(text, failed)))

    def answered(self, message: Message) -> Message:
        """The beginning of an answer, with the cookies that it brings."""
        cookies = list(self._cookies)
        if self._is_page(message):
            if self.session.new and not cookies:
                cookies.append(self.sessions.set_cookie(self.scope, self.session))
            if self.flash is not None:
                cookies.append(forgotten(self.scope, flash_name(self.scope)))
        found = [(b"set-cookie", each.encode("latin-1")) for each in cookies]
        return {**message, "headers": [*message["headers"], *found]}

    def _is_page(self, message: Message) -> bool:
        """Whether a browser shows this as a page; a part of one must not use up what is meant for the next page."""
        kind = dict(message["headers"]).get(b"content-type", b"")
        mode = next((value for name, value in self.scope["headers"] if name == b"sec-fetch-mode"), b"navigate")
        return kind.startswith(b"text/html") and mode == b"navigate"


def passage_of(request: Request) -> Passage:
    """The passage that the guard made for this request."""
    return cast("Passage", request.state.passage)


def within(path: object) -> str | None:
    """A path within the app that came from outside; None for anything that leads elsewhere."""
    return path if isinstance(path, str) and len(path) < 4000 and _WITHIN.fullmatch(path) else None


def redirect(request: Request, path: str, *, flash: str | None = None, failed: bool = False) -> RedirectResponse:
    """303 to a page of the app, which shows `flash`; `failed` says that it is a problem."""
    if flash is not None:
        passage_of(request).tell(flash, failed=failed)
    answer = RedirectResponse("/", 303)
    answer.headers["location"] = quote(str(request.scope.get("root_path", "")).rstrip("/")) + path
    return answer
