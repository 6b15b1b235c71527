"""Enqueuing by hand: a page with a form, and what it is sent to."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

from starlette.routing import Route

from ...client import request_by_name
from ...errors import InvalidArguments, UsageError
from ...store import new_jobs
from ...store.audit import by_hand
from ..rendering import page
from .common import SENT_ALREADY, act, back, first_time, form_of, text_of, whole_number

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


@dataclass(frozen=True)
class Draft:
    """What the form holds, as it was typed."""

    kind: str = ""
    args: str = "{}"
    queue: str = ""
    priority: str = ""
    delay: str = ""
    max_attempts: str = ""
    unique_key: str = ""
    key: str = ""
    tags: str = ""
    meta: str = ""
    problem: str = ""


FIELDS = ("kind", "args", "queue", "priority", "delay", "max_attempts", "unique_key", "key", "tags", "meta")


async def show(request: Request) -> Response:
    """The form; the query may fill it in, as a link from a queue's page does."""
    given = {name: request.query_params[name][:2000] for name in FIELDS if name in request.query_params}
    return page(request, "enqueue.html", Draft(**given), live=False)


async def enqueue(request: Request) -> Response:
    """Enqueues one job. A mistake shows the form again, as it was filled in."""
    form = form_of(request)
    draft = Draft(**{name: str(form.get(name, "")) for name in FIELDS})
    try:
        job = request_by_name(draft.kind.strip(), _object(draft.args, "arguments"), **_options(request))
        if not first_time(request):
            return back(request, "/jobs", SENT_ALREADY, failed=True)
        done = await act(request, by_hand(new_jobs.enqueue(job), f"{job.queue} {job.kind}"))
    except UsageError as error:
        return page(request, "enqueue.html", replace(draft, problem=str(error)), status=400, live=False)
    if not done.added:
        told = f"Nothing was enqueued: the live job {done.id} has that unique key."
        return back(request, f"/jobs/{done.id}", told, failed=True)
    return back(request, f"/jobs/{done.id}", f"Job {done.id} is enqueued.")


def _options(request: Request) -> dict[str, Any]:
    options: dict[str, Any] = {
        "queue": text_of(request, "queue"),
        "priority": whole_number(text_of(request, "priority"), "The priority"),
        "max_attempts": whole_number(text_of(request, "max_attempts"), "The number of attempts"),
        "unique_key": text_of(request, "unique_key"),
        "key": text_of(request, "key"),
        "delay": _seconds(text_of(request, "delay")),
        "tags": None if (tags := text_of(request, "tags")) is None else tags.split(),
        "meta": None if (meta := text_of(request, "meta")) is None else _object(meta, "metadata"),
    }
    return {name: value for name, value in options.items() if value is not None}


def _seconds(text: str | None) -> float | None:
    try:
        value = None if text is None else float(text)
    except ValueError:
        value = math.nan
    if value is not None and not math.isfinite(value):
        raise InvalidArguments(f"The delay is a number of seconds, not {text!r:.40}.")
    return value


def _object(text: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text.strip() or "{}", parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise InvalidArguments(
            f"The {what} are not valid JSON: {error.msg.lower()} at line {error.lineno}, column {error.colno}."
        ) from None
    except (RecursionError, ValueError) as error:
        raise InvalidArguments(f"The {what} cannot be read: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise InvalidArguments(f'The {what} are a JSON object, as in {{"user_id": 42}}.')
    return cast("dict[str, Any]", value)


def _refuse(name: str) -> NoReturn:
    raise InvalidArguments(f"JSON has no {name}.")


ROUTES = [Route("/enqueue", show), Route("/actions/jobs/enqueue", enqueue, methods=["POST"])]
