"""`job.sleep` and `job.wait_for_event`.

When a wait ends is remembered as it begins. In memory it waits for a notification or for its moment, and meanwhile the handler
may be suspended; a later attempt goes on with the same wait.
"""

from __future__ import annotations

import inspect
import math
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

import msgspec
import trio

from ...codec import decoded_event
from ...errors import InvalidEvent, UsageError
from ...handlers import check_text
from ...handlers.models import from_builtins
from ...lines import Kind, Line
from ...store.waits import Wanted
from ...text import spelled
from .beginning import begin
from .tree_store import LeaseGone
from .unreadable import decoding

if TYPE_CHECKING:
    from .calls import Call
    from .durable import Durable

_LOOK = 1.0
"""Seconds after which an event is asked for again, because a notification may be lost."""


async def sleep(durable: Durable, seconds: float, key: str | None) -> None:
    """See `Job.sleep`."""
    _comes_to(durable, key)
    call = await begin(durable, "sleep", "", key, "job.sleep")
    if await durable.replayed(call) is None:
        await _sleep(durable, call, durable.moment(call.key, seconds))


async def sleep_until(durable: Durable, moment: datetime, key: str | None) -> None:
    """See `Job.sleep_until`. Raises `UsageError` for a datetime without a time zone."""
    if not isinstance(cast("object", moment), datetime) or moment.utcoffset() is None:
        raise UsageError(f"job.sleep_until takes a datetime with its time zone, got {moment!r}.")
    _comes_to(durable, key)
    call = await begin(durable, "sleep", "", key, "job.sleep_until")
    if await durable.replayed(call) is None:
        # Remembered, because code may compute another moment in a later attempt.
        await _sleep(durable, call, durable.history.moment(call.key, moment.timestamp()))


def _comes_to(durable: Durable, key: str | None) -> None:
    """A task comes to a wait that may have this key."""
    if key is not None:
        durable.history.replay.unopened.waits.keyed.discard(key)


async def _sleep(durable: Durable, call: Call, until: float) -> None:
    call.until = until
    with durable.awaiting(call):
        # A deadline that strikes meanwhile cuts the call short at once: a result that comes after it is not to be first.
        await durable.history.written(may_be_cut=True)
        await durable.suspension.wait(call, trio.Event(), durable.on_our_clock(until))
    await durable.record(call, Kind.SLEPT)


async def wait_for_event(durable: Durable, name: str, type_: Any, limit: float | None, key: str | None) -> Any:
    """See `Job.wait_for_event`."""
    check_text("The name of an event", name, 256)
    try:
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(type_, dec_hook=from_builtins)
    except (TypeError, NameError) as error:
        raise UsageError(f"job.wait_for_event cannot decode a payload as {type_!r}: {error}.") from None
    _comes_to(durable, key)
    durable.history.replay.unopened.waits.events.discard(name)
    call = await begin(durable, "event", name, key, "job.wait_for_event")
    line = await durable.replayed(call)
    if line is None:
        line = await _wait(durable, call, limit)
    if line.kind is Kind.TIMED_OUT:
        raise TimeoutError(
            f"No event {name!r} came" + (f" within {spelled(limit)}." if limit is not None else " in time.")
        )
    job_id = durable.running.claim.id
    with decoding(durable):
        payload = decoded_event(durable.parts.codec, line.value or "null", name, job_id)
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidEvent(
            f"The payload of the event {name!r} of job {job_id} is not the {inspect.formatannotation(type_)} that the "
            f"handler waits for: {error}."
        ) from None


async def _wait(durable: Durable, call: Call, limit: float | None) -> Line:
    # A wait that is under way keeps its end, also where the code has none any more.
    begun = durable.history.replay.moments.get(call.key)
    until = begun if limit is None else durable.moment(call.key, limit)
    call.events, call.until = (call.name,), until
    receiver, job_id = durable.parts.receiver, durable.running.claim.id
    with durable.awaiting(call):
        await durable.history.written(may_be_cut=True)  # as in `_sleep`
        while True:
            if durable.running.cancel_reason == "fence-lost":  # in a shield nothing else ends it
                await trio.lowlevel.checkpoint()
                raise LeaseGone(f"job {job_id} lost its lease: it receives no event")
            news = receiver.news_of(job_id)
            try:
                async with durable.quiet.delivering.writing() as has_others:
                    if has_others:
                        durable.quiet.note(call)
                    line = await _receive(durable, call)
                    if line is not None:
                        await durable.history.follows(line.line)
                now, end = trio.current_time(), math.inf if until is None else durable.on_our_clock(until)
                if line is not None:
                    await durable.quiet.delivered(call, line.line)
                    return line
                if now >= end:
                    break
                await durable.suspension.wait(call, news, min(end, now + _LOOK))
            finally:
                receiver.forget(job_id, news)
    return await durable.record(call, Kind.TIMED_OUT)


async def _receive(durable: Durable, call: Call) -> Line | None:
    """The line of the event, if one is there. A cancellation waits for the answer, because the line may be written."""
    claim = durable.running.claim
    history = durable.history
    async with history.alone() as number:
        wanted = Wanted(claim, number, call.key, call.name)
        received = await durable.parts.receiver.receive(wanted, durable.running)
        if received is not None and received.refused is not None:
            history.is_refused(f"the event {call.name!r}: {received.refused}", "The event stays unreceived.")
            await history.check_lease()
        elif received is not None:
            return Line(number, Kind.EVENT, call.key, call.name, received.payload)
    history.unused(number)
    await trio.lowlevel.checkpoint()
    return None
