"""Errors as pages: whose fault it is, and what to do."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from ..errors import (
    DatabaseError,
    DatabaseUnavailable,
    InvalidTransition,
    SchemaError,
    TookTooLong,
    UnknownBatch,
    UnknownJob,
    UnknownSchedule,
    UsageError,
    WorkerSilent,
)
from .rendering import page, twin, wants_json
from .security import AuthenticateFailed

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger("pulse_trio.web")


@dataclass(frozen=True)
class Problem:
    """What a page or its twin says instead of an answer."""

    status: int
    title: str
    error: str
    do: str


def problem_of(error: Exception) -> Problem:
    """Which answer an exception gets."""
    match error:
        case HTTPException(status_code=404):
            return Problem(404, "Not found", "There is no page here.", "The address may be mistyped.")
        case HTTPException():
            return Problem(error.status_code, "Refused", error.detail, "")
        case UnknownJob() | UnknownBatch() | UnknownSchedule():
            return Problem(404, "Not found", str(error), "")
        case InvalidTransition():
            return Problem(409, "Not possible now", str(error), "")
        case WorkerSilent():
            return Problem(504, "No answer", str(error), "See its worker: pulse-trio workers")
        case UsageError():
            return Problem(400, "Not understood", str(error), "")
        case TookTooLong():
            return Problem(503, "Too slow", str(error), "Narrow it down: a queue, a kind, or a shorter time.")
        case SchemaError():
            return Problem(503, "Not ready", str(error), "Run: pulse-trio migrate")
        case DatabaseUnavailable():
            return Problem(503, "The database is away", str(error), "This page comes back by itself when it answers.")
        case DatabaseError():
            return Problem(503, "The database refused", str(error), "Run: pulse-trio doctor")
        case AuthenticateFailed():
            return Problem(500, "A mistake in this app's login", str(error), "The server's log has more.")
        case _:
            return Problem(500, "A mistake of ours", "The page failed.", "The server's log has the traceback.")


async def answer(request: Request, error: Exception) -> Response:
    """The answer for an exception: a page, or JSON below /api."""
    problem = problem_of(error)
    if isinstance(error, AuthenticateFailed):
        logger.error("%s (%s %s)", error, request.method, request.url.path, exc_info=error.__cause__)
    elif problem.status == 500:
        logger.error("a page failed: %s %s", request.method, request.url.path, exc_info=error)
    if wants_json(request):
        return twin(request, problem, status=problem.status)
    return page(request, "problem.html", problem, status=problem.status, live=False)


def add_to(app: Starlette) -> None:
    """Makes the app answer all errors so."""
    for kind in (HTTPException, UsageError, WorkerSilent, DatabaseError, Exception):
        app.add_exception_handler(kind, answer)
