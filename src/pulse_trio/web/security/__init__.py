"""Who asks, and what they may see and do: the guard in front of every page.

`secure` puts it there. Templates get `user`, `csrf_token`, `flash` and `logged_in` from `context`; payloads go through
`redacted`, records through `without_payloads`; actions answer with `redirect(request, path, flash=...)`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .guard import Access, Authenticate, AuthenticateFailed, Guard
from .headers import SecurityHeaders
from .login import Login
from .passage import passage_of, redirect, within
from .redaction import HIDDEN, PAYLOAD, redacted, without_payloads
from .settings import WebSettings, check_reach, web_settings
from .users import User, hash_password

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from .guard import Answer


def secure(
    app: Starlette,
    *,
    read_only: bool,
    authenticate: Authenticate | None,
    answer: Answer,
    page: Callable[..., Response],
    settings: WebSettings | None = None,
) -> Access:
    """Puts the guard in front of the app, and adds the login page if there are users. `answer` renders an exception, `page` a
    template; the settings are the environment's unless given. Raises `ConfigurationError`."""
    access = Access(
        settings if settings is not None else web_settings(os.environ), read_only=read_only, authenticate=authenticate
    )
    if access.users:
        app.router.routes[:0] = Login(access.users, page).routes
    # The one that is added last is the outermost.
    app.add_middleware(Guard, access=access, answer=answer)
    app.add_middleware(SecurityHeaders)
    return access


def context(request: Request) -> dict[str, Any]:
    """What templates know of security."""
    passage = passage_of(request)
    return {
        "user": passage.user,
        "csrf_token": passage.token(),
        "flash": passage.flash,
        "logged_in": passage.logs_in,
    }


__all__ = [
    "HIDDEN",
    "PAYLOAD",
    "Access",
    "Authenticate",
    "AuthenticateFailed",
    "User",
    "WebSettings",
    "check_reach",
    "context",
    "hash_password",
    "passage_of",
    "redacted",
    "redirect",
    "secure",
    "web_settings",
    "within",
    "without_payloads",
]
