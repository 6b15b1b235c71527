"""What is asked for: requests by name, and streams of them in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import InvalidArguments
from ..handlers import Defaults, check_json, check_text, given_options, request_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ..jobs import JobRequest

CHUNK = 5000
"""Requests written at once by `enqueue_many`: what is held in memory of a stream of them."""


def request_by_name(kind: str, args: Mapping[str, Any] | None = None, **options: Any) -> JobRequest:
    """A job of a kind whose handler lives elsewhere: nothing is known of its parameters, so only the JSON is checked.

    `options` are those of `Handler.options`. Raises `InvalidName`, `InvalidArguments` or `ConfigurationError`.
    """
    check_text("kind", kind, 256)
    try:
        encoded = msgspec.json.encode(dict(args or {}))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidArguments(f"Arguments of {kind!r} cannot be written as JSON: {error}.") from None
    return request_of(kind, check_json(encoded, f"Arguments of {kind!r}"), Defaults(**given_options(**options)))


def chunks_of(requests: Iterable[JobRequest]) -> Iterator[list[JobRequest]]:
    chunk: list[JobRequest] = []
    for request in requests:
        chunk.append(request)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
