"""The web page over a database of jobs, as an ASGI app; needs the extra `pulse-trio[web]`.

    app = create_app("postgresql://user@host/database")

It runs on Trio and asyncio, by itself or mounted in another app, under any prefix.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from .security import Authenticate, User, WebSettings

HOW_TO_INSTALL = "pip install 'pulse-trio[web]'"
_NEEDED = ("starlette", "jinja2", "itsdangerous", "argon2")


def create_app(
    dsn: str,
    *,
    read_only: bool = False,
    authenticate: Authenticate | None = None,
    schema: str = "pulse",
    settings: WebSettings | None = None,
) -> Starlette:
    """The ASGI app: for Hypercorn or another server, or to mount in an app of one's own.

    Args:
        dsn: the database. Connections are made when a page is first asked for, and closed by the app's lifespan; mounted
            apps get no lifespan in most frameworks, and then keep at most four idle connections until the process ends.
        read_only: shows everything and changes nothing.
        authenticate: says which user sends a request: takes Starlette's Request, returns (or awaits) a `User`, None to refuse
            it, or a response such as a redirect to a login. Without it and without users in the settings the page answers
            browsers on this machine alone.
        schema: where pulse-trio's tables are.
        settings: how the page is protected; by default the environment's, `PULSE_TRIO_WEB_...`.

    Raises `ConfigurationError` for settings that cannot work, or when the extra's libraries are not installed.
    """
    check_installed()
    from .app import build

    return build(dsn, read_only=read_only, authenticate=authenticate, schema=schema, settings=settings)


def check_installed() -> None:
    """Raises `ConfigurationError` if the libraries of the extra are missing."""
    try:
        for name in _NEEDED:
            import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"The web page needs libraries that are not installed ({error}). Install them: {HOW_TO_INSTALL}"
        ) from None


def __getattr__(name: str) -> Any:
    # Not imported above: without the extra the package still says what is missing.
    if name not in ("User", "WebSettings"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_installed()
    return getattr(import_module(f"{__name__}.security"), name)


__all__ = ["User", "WebSettings", "create_app"]
