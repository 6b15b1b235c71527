"""Actions on queues, kinds and schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...handlers import check_queue, queue_limits
from ...store import queues, schedules, watching
from ..addresses import named
from ..site import site_of
from .common import SENT_ALREADY, act, back, first_time, route, text_of, whole_number

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


async def pause_queue(request: Request) -> Response:
    """Stops claims from a queue; running jobs go on."""
    queue = named(request, "queue")
    check_queue(queue)
    unknown = await site_of(request).database.read(watching.unknown(queue))
    new = await act(request, queues.pause(queue))
    if unknown is not None:
        return back(request, "/queues", f"The queue {queue} is paused, but {unknown}")
    told = "is paused; its running jobs go on" if new else "was paused already"
    return back(request, "/queues", f"The queue {queue} {told}.")


async def resume_queue(request: Request) -> Response:
    """Ends a queue's pause."""
    queue = named(request, "queue")
    was = await act(request, queues.resume(queue))
    return back(request, "/queues", f"The queue {queue} {'is resumed' if was else 'was not paused'}.")


async def limit_queue(request: Request) -> Response:
    """Sets all limits of a queue: an empty field is no limit."""
    queue = named(request, "queue")
    limits = queue_limits(
        queue,
        whole_number(text_of(request, "limit"), "A limit"),
        text_of(request, "rate"),
        whole_number(text_of(request, "key_limit"), "A limit"),
        text_of(request, "key_rate"),
    )
    await act(request, queues.limit(limits))
    return back(request, "/queues", f"The limits of the queue {queue} are set.")


async def pause_kind(request: Request) -> Response:
    """Stops claims of one kind, in every queue."""
    kind = named(request, "kind")
    new = await act(request, queues.pause(kind=kind))
    told = "is paused; its running jobs go on" if new else "was paused already"
    return back(request, "/queues", f"The kind {kind} {told}.")


async def resume_kind(request: Request) -> Response:
    """Ends a kind's pause."""
    kind = named(request, "kind")
    was = await act(request, queues.resume(kind=kind))
    return back(request, "/queues", f"The kind {kind} {'is resumed' if was else 'was not paused'}.")


async def pause_schedule(request: Request) -> Response:
    """Stops a schedule."""
    name = named(request, "name")
    await act(request, schedules.pause(name))
    return back(request, "/schedules", f"The schedule {name} is paused.")


async def resume_schedule(request: Request) -> Response:
    """Resumes a schedule that is paused or broken."""
    name = named(request, "name")
    await act(request, schedules.resume(name))
    return back(request, "/schedules", f"The schedule {name} is resumed.")


async def run_schedule(request: Request) -> Response:
    """Enqueues a schedule's job now."""
    name = named(request, "name")
    if not first_time(request):
        return back(request, "/schedules", SENT_ALREADY, failed=True)
    done = await act(request, schedules.run_now(name))
    told = f"Job {done.id} of the schedule {name} is enqueued."
    if not done.added:
        told = f"The live job {done.id} has the schedule's unique key: nothing was enqueued."
    return back(request, "/schedules", told, failed=not done.added)


# `path`: a name may have slashes, and servers decode %2F before an app sees it.
ROUTES = [
    *(
        route(f"/queues/{{queue:path}}/{name}", action, "/queues")
        for name, action in (("pause", pause_queue), ("resume", resume_queue), ("limits", limit_queue))
    ),
    *(
        route(f"/kinds/{{kind:path}}/{name}", action, "/queues")
        for name, action in (("pause", pause_kind), ("resume", resume_kind))
    ),
    *(
        route(f"/schedules/{{name:path}}/{name}", action, "/schedules")
        for name, action in (("pause", pause_schedule), ("resume", resume_schedule), ("run-now", run_schedule))
    ),
]
