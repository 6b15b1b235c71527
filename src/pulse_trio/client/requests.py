"""Requests by name, checked against the registry if there is one."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from types import NoneType
from typing import TYPE_CHECKING, Any, cast

from ..codec import decoded_value
from ..errors import ConfigurationError, InvalidArguments
from ..handlers import (
    OPTION_NAMES,
    Defaults,
    Handler,
    check_text,
    encode_payload,
    given_options,
    refuse_unknown,
    request_of,
    said_of,
)
from ..store.filtering import JobFilter

if TYPE_CHECKING:
    from ..codec import Codec
    from ..handlers import Handlers
    from ..jobs import JobRequest
    from ..records import JobRecord


def decoded_record(codec: Codec | None, job: JobRecord, *, only_result: bool = False) -> JobRecord:
    """The job with its arguments and its result decoded. Raises `CodecError`."""
    if codec is None:
        return job
    args = job.args if only_result else decoded_value(codec, job.args, job.kind, job.id)
    return replace(job, args=args, result=decoded_value(codec, job.result, job.kind, job.id, result=True))


_TAKES: dict[str, tuple[tuple[type, ...], str]] = {
    "since": ((datetime, timedelta), "a datetime with its offset, or a timedelta before now"),
    "until": ((datetime, timedelta), "a datetime with its offset, or a timedelta before now"),
    "worker": ((str, int), "a session's id or host:pid"),
    "owes_clean_up": ((bool,), "True or False"),
}
"""What filters take that take no text."""


def checked_filter(chosen: JobFilter, *also: str) -> JobFilter:
    """The filter that a method was given as keywords. Raises `ConfigurationError` for one that does not exist: left alone, it
    would restrict nothing, and all jobs would match. Or for a value of another type: PostgreSQL would make a text of a list of
    queues, which no queue has for a name. `also` has the method's other keywords, which may have been meant."""
    known = JobFilter.__annotations__.keys()
    refuse_unknown("filter", chosen.keys() - known, {*known, *also})
    for name, value in chosen.items():
        types, what = _TAKES.get(name, ((str,), "one text"))
        if value is not None and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            raise ConfigurationError(f"The filter {name!r} takes {what}, got {reprlib.repr(value)}.")
    return chosen


def request_by_name(kind: str, args: Mapping[str, Any] | None = None, **options: Any) -> JobRequest:
    """A job of a kind whose handler is in another program: its parameters are unknown, so only the JSON is checked.

    `options` are those of `Handler.options`. Raises `InvalidName`, `InvalidArguments` or `ConfigurationError`.
    """
    check_text("kind", kind, 256)
    what = f"Arguments of {kind!r}"
    try:
        given = dict(args or {})
    except Exception as error:
        raise InvalidArguments(f"{what} cannot be written as JSON: {said_of(error)}.") from None
    return request_of(kind, encode_payload(given, what), Defaults(**given_options(**options)))


def request_and_type(
    handler: Handler[Any, Any] | str, handlers: Handlers | None, args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[JobRequest, Any]:
    """The request of a call of `enqueue`, and the type of its result. If `handlers` is given, the kind is looked up there,
    its arguments are checked, and its handler's options are the defaults.

    Raises `UnknownKind`, naming near ones, `InvalidName`, `InvalidArguments` or `ConfigurationError`; nothing was written."""
    if isinstance(handler, Handler):
        return handler.request(*args, **options), handler.result_type
    if not isinstance(cast("object", handler), str):
        raise InvalidArguments(
            f"enqueue takes a handler (a function decorated with @handlers.job) or the name of a kind, got {handler!r:.200}."
        )
    given: Any = args[0] if args else None
    if len(args) > 1 or not isinstance(given, (Mapping, NoneType)):
        raise InvalidArguments(f"Arguments of {handler!r} are given by name, in one dictionary, got {args!r:.200}.")
    if not args and options:
        _check_options(handler, options)
    if handlers is None:
        return request_by_name(handler, cast("Mapping[str, Any]", given or {}), **options), Any
    known = handlers[handler].options(**options)
    return known.request_by_name(cast("Mapping[str, Any]", given or {})), known.result_type


def _check_options(kind: str, options: Mapping[str, Any]) -> None:
    """A call by name without arguments may have given them as it would have to a handler: as keywords."""
    if unknown := sorted(options.keys() - OPTION_NAMES):
        raise ConfigurationError(
            f"There is no option {unknown[0]!r}. The arguments of a job by name are given in one dictionary: "
            f"enqueue({kind!r}, {{{unknown[0]!r}: ...}})."
        )
