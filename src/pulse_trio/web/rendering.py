"""Answers: a page from a template, or its JSON twin from the same record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from starlette.responses import HTMLResponse, Response

from ..plain import to_json
from ..store import watching
from ..store.branches import standing
from ..store.life import due_of, moment_of
from ..text import count_of, duration, headline, one_line, shown
from . import words
from .addresses import segment, static_url, url
from .security import HIDDEN, redacted, without_payloads
from .security import context as security_context
from .site import site_of

if TYPE_CHECKING:
    from jinja2.runtime import Context
    from starlette.requests import Request

NAVIGATION = (
    ("/", "Overview"),
    ("/jobs", "Jobs"),
    ("/queues", "Queues"),
    ("/workers", "Workers"),
    ("/schedules", "Schedules"),
    ("/batches", "Batches"),
    ("/doctor", "Doctor"),
)


@pass_context
def _url(context: Context, path: str, **query: object) -> str:
    return url(context["request"], path, **query)


@pass_context
def _static(context: Context, name: str) -> str:
    return static_url(context["request"], name)


@pass_context
def payload(context: Context, value: object) -> str:
    """Arguments or a result as this user may see them, as text."""
    seen = redacted(value, context["user"])
    return seen if seen is HIDDEN else shown(to_json(seen, indented=True, of_user=True, ascii_only=False))


def _environment() -> Any:
    # Escaped always, whatever a template is called: there is no template of anything but HTML.
    environment: Any = Environment(
        loader=PackageLoader("pulse_trio.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "url": _url,
        "static": _static,
        "navigation": NAVIGATION,
        "most": watching.MOST,
        "due_of": due_of,
        "moment_of": moment_of,
        "standing": standing,
    }
    environment.filters |= {
        each.__name__: each for each in (segment, shown, one_line, headline, duration, count_of, payload)
    } | words.FILTERS
    return environment


TEMPLATES: Environment = _environment()


def rendered(request: Request, template: str, data: object = None, /, **more: Any) -> str:
    """A template's text. It knows `data`, `request`, `path` (within the app), `read_only`, `may_act`, `user`, `csrf_token`."""
    safe = security_context(request)
    user = safe["user"]
    read_only = site_of(request).read_only
    return TEMPLATES.get_template(template).render(
        request=request,
        data=data,
        path=request.scope["path"][len(request.scope.get("root_path", "")) :] or "/",
        read_only=read_only,
        may_act=not read_only and user is not None and user.may_act,
        now=words.now(),
        **safe,
        **more,
    )


def page(request: Request, template: str, data: object = None, /, *, status: int = 200, **more: Any) -> Response:
    """A page."""
    return HTMLResponse(rendered(request, template, data, **more), status)


def twin(request: Request, data: object, *, status: int = 200) -> Response:
    """The JSON twin of a page, with payloads as the user may see them. Session ids are text: they are greater than
    JavaScript's numbers."""
    text = to_json(without_payloads(data, request.state.user))
    return Response(text, status, media_type="application/json")


def wants_json(request: Request) -> bool:
    """Whether the answer is for a program: everything below /api."""
    path = request.scope["path"][len(request.scope.get("root_path", "")) :]
    return path == "/api" or path.startswith("/api/")
