"""What a client checks and encodes before it sends an event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..codec import encoded, event_context
from ..handlers import check_text, encode_payload
from ..store import events
from ..store.operations import check_id

if TYPE_CHECKING:
    from ..codec import Codec
    from ..store.operations import Operation


def sending(codec: Codec | None, job_id: int, name: str, payload: Any, event_key: str | None) -> Operation[bool]:
    """The operation that sends this event. Raises `InvalidName` or `InvalidArguments` before anything is written."""
    check_id(job_id)
    check_text("The name of an event", name, 256)
    if event_key is not None:
        check_text("An event_key", event_key, 256)
    what = f"The payload of the event {name!r}"
    text = encode_payload(payload, what)
    if codec is not None:
        text = encoded(codec, text, event_context(name), job_id)
    return events.send_event(job_id, name, text, event_key)
