"""The call of a handler that is the `on_death` hook of others, for the jobs that the database enqueued to report a death.

No codec has encoded such a job's arguments: the database has no key. The dead job's own arguments among them may be encoded,
and may be the cause of its death. So they are left out if they cannot be read, and an event says so: the hook must still learn
of the death. The option `death_of` distinguishes such a job from others of its kind; producers cannot write it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ....codec import coded_result, decoded_value
from ....describing import message_of, type_name
from ....observe import DeathArgumentsLeftOut
from ....states import options_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ....codec import Codec
    from ....handlers import Handler
    from ....observe import Observer
    from ..running_job import RunningJob

    Call = Callable[[RunningJob, str], Awaitable[Any]]

_NOT_TOLD = "the database left them out: they take more than 64 KiB, or jsonb cannot hold them"


def told_of_deaths(
    handler: Handler[..., Any], codec: Codec | None, plain: Call, coded: Call, observer: Observer
) -> Call:
    """`plain` for jobs that report a death, with a value that is encoded; `coded` for all others of the kind."""

    async def call(running: RunningJob, args: str) -> Any:
        claim = running.claim
        dead = options_of(claim).death_of
        if dead is None:
            return await coded(running, args)
        args, problem = readable(handler, codec, args, dead)
        if problem is not None:
            observer.emit(DeathArgumentsLeftOut(claim.id, claim.kind, claim.attempt, dead, problem))
        value = await plain(running, args)
        return value if codec is None else coded_result(codec, claim.kind, claim.id, value)

    return call


def readable(handler: Handler[..., Any], codec: Codec | None, args: str, dead: int) -> tuple[str, str | None]:
    """The hook's arguments, with the dead job's arguments decoded; or without them, and the reason."""
    try:
        told = msgspec.json.decode(args, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return args, None  # the handler's own check reports the error
    if "args" not in told:
        asked = any(p.name == "args" for p in handler.signature.parameters)
        return _of(told, handler), _NOT_TOLD if asked else None
    try:
        if codec is not None:
            kind = msgspec.json.decode(told["kind"], type=str)
            value = decoded_value(codec, msgspec.json.decode(told["args"]), kind, dead)
            told = told | {"args": msgspec.Raw(msgspec.json.encode(value))}
        with_args = _of(told, handler)
        handler.signature.decode(with_args)
    except Exception as error:
        # A codec is the user's and may raise any exception, JSON may be nested too deep, and the arguments may have killed the
        # job: the handler is called without them.
        problem = f"{type_name(error)}: {message_of(error)}"[:2000]
    else:
        return with_args, None
    del told["args"]
    return _of(told, handler), problem


def _of(told: dict[str, msgspec.Raw], handler: Handler[..., Any]) -> str:
    takes = {p.name for p in handler.signature.parameters}
    return msgspec.json.encode({name: value for name, value in told.items() if name in takes}).decode()
