"""Actions on one job: cancel, retry, delete, enqueue again, and its stack."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import anyio
import msgspec

from ...errors import InvalidArguments, UnknownJob
from ...jobs import JobRequest
from ...plain import json_value
from ...store import cancelling, history, new_jobs, operations, stacks
from ...store.audit import by_hand
from ...store.operations import Query, missing
from ...store.rehearsing import rehearse_deletion
from ...text import count_of
from ..rendering import page, twin
from ..security import redirect, within
from ..site import site_of
from .common import SENT_ALREADY, act, back, first_time, is_given, job_id_of, route, text_of, user_of
from .foretold import said_of_lost

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from ...store.operations import Operation

_KEPT = ("timeout", "backoff_base", "backoff_cap", "crash_limit", "limit", "rate", "tags", "meta")
"""Options that a job which is enqueued again keeps. A deadline, an expiry, a trace and a tree are the old job's own."""


class Confirmation(NamedTuple):
    """What a person is asked before something that cannot be undone."""

    title: str
    what: str
    warning: str
    """What is lost with it; empty for nothing."""
    button: str
    where: str
    """The address that the form is sent to."""
    back: str
    """The page to go to afterwards."""
    leave: str
    """The page for those who change their mind."""


async def cancel(request: Request) -> Response:
    """Cancels: a waiting job at once, a running one through its handler."""
    job_id = job_id_of(request)
    done = await act(
        request, cancelling.cancel(job_id, reason=text_of(request, "reason"), by=f"{user_of(request).name} (web)")
    )
    if done.cancellation is None:
        told = f"Job {job_id} is {done.state} already; nothing was changed."
    elif done.state == "running":
        told = f"Job {job_id} is asked to end: its handler is being cancelled."
    else:
        told = f"Job {job_id} is {done.state}."
    return back(request, f"/jobs/{job_id}", told)


async def retry(request: Request) -> Response:
    """Runs a finished job again in place, or a waiting one now."""
    job_id = job_id_of(request)
    if is_given(request, "afresh"):
        done = await act(request, history.retry_batch([job_id], afresh=True))
        if job_id in done.refused:
            return back(request, f"/jobs/{job_id}", done.refused[job_id], failed=True)
    else:
        await act(request, operations.retry(job_id))
    return back(request, f"/jobs/{job_id}", f"Job {job_id} is due now, and runs again.")


async def delete(request: Request) -> Response:
    """Deletes a job for good, when that was confirmed."""
    job_id = job_id_of(request)
    if not is_given(request, "confirmed"):
        return await _confirm_deletion(request, job_id)
    await act(request, history.delete(job_id))
    where = within(text_of(request, "back")) or "/jobs"
    # The job's own page is gone with it.
    gone = re.fullmatch(rf"/jobs/{job_id}(?!\d).*", where) is not None
    return redirect(request, "/jobs" if gone else where, flash=f"Job {job_id} is deleted.")


async def _confirm_deletion(request: Request, job_id: int) -> Response:
    database = site_of(request).database
    found = await database.read(operations.job(job_id))
    done = await database.read(rehearse_deletion([job_id], found.state))
    if job_id in done.refused:
        return back(request, f"/jobs/{job_id}", done.refused[job_id], failed=True)
    started = f"{'more than ' if done.more else ''}{count_of(done.along, 'other')}"
    also = f" It started {started}, which go with it, with their histories." if done.along else ""
    what = (
        f"The job {job_id} ({found.kind}, {found.state}) is removed for good, with its attempts and its result.{also}"
    )
    warning = said_of_lost(done.owing) if done.owing else ""
    where = within(text_of(request, "back"))
    action = f"/actions/jobs/{job_id}/delete"
    asked = Confirmation(
        f"Delete job {job_id}?", what, warning, "Delete it", action, where or "", where or f"/jobs/{job_id}"
    )
    return page(request, "confirm.html", asked, live=False)


async def enqueue_again(request: Request) -> Response:
    """Enqueues a new job with the arguments and options of this one, which stays as it is."""
    job_id = job_id_of(request)
    if not first_time(request):
        return back(request, f"/jobs/{job_id}", SENT_ALREADY, failed=True)
    done = await act(request, again(job_id))
    return back(request, f"/jobs/{done.id}", f"Job {done.id} is enqueued, as job {job_id} was.")


def again(job_id: int) -> Operation[new_jobs.Enqueued]:
    """A new job with the kind, arguments, queue, priority, attempts, key, tags, metadata and options of an old one; due now,
    without its unique key, its deadline and its place in a tree. Raises `UnknownJob`, `InvalidArguments` for arguments of that
    job alone."""
    rows = yield Query("enqueued_as", {"id": job_id})
    if not rows:
        raise UnknownJob(missing(job_id))
    kind, args, queue, priority, max_attempts, options, key = rows[0]
    if _is_bound(args):
        raise InvalidArguments(
            f"The arguments of job {job_id} are encrypted for that job alone. Retry it, or enqueue a new one from a program "
            "that has the codec."
        )
    request = JobRequest(
        kind, args, queue=queue, priority=priority, max_attempts=max_attempts, options=_kept(options), key=key
    )
    return (yield from by_hand(new_jobs.enqueue(request), f"{queue} {kind}"))


def _is_bound(args: str) -> bool:
    if "$codec" not in args:
        return False
    found: Any = json_value(args)
    return isinstance(found, dict) and "$codec" in found and bool(cast("dict[str, Any]", found).get("bound", True))


def _kept(options: str | None) -> str | None:
    if options is None:
        return None
    found: Any = json_value(options)
    given = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    kept = {name: given[name] for name in _KEPT if name in given}
    # As enqueuing writes it: the database finds tags in its text.
    return msgspec.json.encode(kept).decode() if kept else None


async def stack(request: Request) -> Response:
    """Where a running job is now: its worker answers within five seconds, or is silent."""
    job_id = job_id_of(request)
    question = await act(request, stacks.ask(job_id))
    found = None
    for _ in range(stacks.LOOKS):
        await anyio.sleep(stacks.POLL)
        if (found := await act(request, stacks.take(question))) is not None:
            break
    if found is None:
        found = await act(request, stacks.give_up(question))
    if "application/json" in request.headers.get("accept", ""):
        return twin(request, found)
    return page(request, "stack.html", found, live=False)


ROUTES = [
    route(f"/jobs/{{id:int}}/{name}", action, "/jobs/{id}")
    for name, action in (
        ("cancel", cancel),
        ("retry", retry),
        ("delete", delete),
        ("enqueue-again", enqueue_again),
        ("stack", stack),
    )
]
