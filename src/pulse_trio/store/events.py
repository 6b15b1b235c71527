"""Sends an event to a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InvalidTransition, UnknownJob
from .operations import Query, check_id, missing

if TYPE_CHECKING:
    from .operations import Operation


def send_event(job_id: int, name: str, payload: str, event_key: str | None = None) -> Operation[bool]:
    """Sends one event, whose payload is JSON text. Returns whether it is new: False if the job has had that `event_key`.

    Raises `UnknownJob`, or `InvalidTransition` for a job that receives no more events.
    """
    rows = yield Query(
        "send_event", {"job_id": check_id(job_id), "name": name, "payload": payload, "event_key": event_key}
    )
    said = rows[0][0]
    if said == "unknown":
        raise UnknownJob(missing(job_id))
    if said == "full":
        raise InvalidTransition(f"Job {job_id} has 10,000 events that it has not received: send no more until it does.")
    if said not in ("sent", "again"):
        raise InvalidTransition(f"Job {job_id} is {said}: it receives no more events.")
    return said == "sent"
