"""Addresses within the app, whatever prefix it is mounted under."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

if TYPE_CHECKING:
    from starlette.requests import Request

_BEFORE_DOTS = "\x1f"
STATIC = Path(__file__).with_name("static")


def url(request: Request, path: str, **query: object) -> str:
    """The address of `path`, such as "/jobs", for a link or a form. `None` and empty values of the query are left out.

    A part of the path that comes from data, such as a queue's name, goes through `segment` first.
    """
    given = {name.rstrip("_"): value for name, value in query.items() if value is not None and value != ""}
    tail = f"?{urlencode(given, doseq=True)}" if given else ""
    return f"{quote(str(request.scope.get('root_path', '')).rstrip('/'))}{path}{tail}"


def segment(name: object) -> str:
    """`name` as one segment of a path. Browsers take a name of one or two dots for a step up, also where these are escaped
    (the URL standard's dot segments): it goes behind a control character, which no name has."""
    text = str(name)
    return quote(_BEFORE_DOTS + text if set(text) == {"."} else text, safe="")


def named(request: Request, parameter: str) -> str:
    """The name that a path has as this parameter: what `segment` has made of it is undone."""
    return str(request.path_params[parameter]).removeprefix(_BEFORE_DOTS)


def static_url(request: Request, name: str) -> str:
    """The address of a file in `static/`, with its content's hash: browsers may keep it for ever."""
    return url(request, f"/static/{name}", v=_version(name))


@cache
def _version(name: str) -> str:
    return sha256((STATIC / name).read_bytes()).hexdigest()[:12]
