"""The call of a handler that is the `on_death` of others, for the jobs that the database enqueued to tell of a death.

No codec has encoded such a job's arguments: the database has no key. What they hold of the dead job's own arguments may be
encoded, and may be what that job died of, so it is left out if it cannot be read: a death must be heard all the same. The
option `death_of` tells such a job from others of its kind; producers cannot write it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ....codec import coded_result, decoded_value
from ....handlers import UnfitArguments
from ....states import options_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ....codec import Codec
    from ....handlers import Handler
    from ..running_job import RunningJob

    Call = Callable[[RunningJob, str], Awaitable[Any]]


def told_of_deaths(handler: Handler[..., Any], codec: Codec | None, plain: Call, coded: Call) -> Call:
    """`plain` for jobs that tell of a death, with a value that is encoded; `coded` for all others of the kind."""

    async def call(held: RunningJob, args: str) -> Any:
        claim = held.claim
        dead = options_of(claim).death_of
        if dead is None:
            return await coded(held, args)
        value = await plain(held, readable(handler, codec, args, dead))
        return value if codec is None else coded_result(codec, claim.kind, claim.id, value)

    return call


def readable(handler: Handler[..., Any], codec: Codec | None, args: str, dead: int) -> str:
    """The hook's arguments, with those of the dead job decoded, or without them if they cannot be."""
    try:
        told = msgspec.json.decode(args, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return args  # the handler's own check says what is wrong
    if "args" not in told:
        return _of(told, handler)
    with_args = _decoded(told, codec, dead, handler)
    if with_args is not None:
        try:
            handler.signature.decode(with_args)
        except UnfitArguments:
            pass
        else:
            return with_args
    del told["args"]
    return _of(told, handler)


def _of(told: dict[str, msgspec.Raw], handler: Handler[..., Any]) -> str:
    takes = {p.name for p in handler.signature.parameters}
    return msgspec.json.encode({name: value for name, value in told.items() if name in takes}).decode()


def _decoded(told: dict[str, msgspec.Raw], codec: Codec | None, dead: int, handler: Handler[..., Any]) -> str | None:
    try:
        if codec is not None:
            kind = msgspec.json.decode(told["kind"], type=str)
            value = decoded_value(codec, msgspec.json.decode(told["args"]), kind, dead)
            told = told | {"args": msgspec.Raw(msgspec.json.encode(value))}
        return _of(told, handler)
    except Exception:
        # A codec is the user's and may raise anything, and JSON may be nested too deep: the handler is told without them.
        return None
