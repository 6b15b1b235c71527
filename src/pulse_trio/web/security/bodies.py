"""What a request may bring: a form of a bounded size, within a bounded time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import anyio
from starlette.datastructures import FormData

from .hosts import header

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

LARGEST = 4 * 1024 * 1024
"""Bytes: arguments of 1 MiB, enqueued by hand, may need three bytes for each of theirs in a form."""
ONLY_LOGIN = 16 * 1024
"""Bytes of a form from a client without a login."""
_PATIENCE = 30.0
_FIELDS = 2000


class Refusal(Exception):
    """A request that is refused: `status`, and why, for people."""

    def __init__(self, status: int, why: str, **headers: str) -> None:
        super().__init__(why)
        self.status = status
        self.headers = headers


async def form_of(scope: Scope, receive: Receive, most: int) -> FormData:
    """The form in a request's body. Raises `Refusal`: 413 above `most` bytes, 415 for anything that is no plain form, 408 for
    a client that takes too long, 400 for one that goes away."""
    kind = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    length = header(scope, b"content-length")
    if length is not None and (not length.isdecimal() or int(length) > most):
        raise Refusal(413, f"The form is larger than {most:,} bytes.")
    with anyio.move_on_after(_PATIENCE):
        body = await _body(receive, most)
        if not body:
            return FormData()
        if kind != "application/x-www-form-urlencoded":
            raise Refusal(415, "A change is sent as a form (application/x-www-form-urlencoded).")
        return _parsed(body)
    raise Refusal(408, f"The form did not arrive within {_PATIENCE:g} s.")


async def _body(receive: Receive, most: int) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "The client went away.")
        parts += message.get("body", b"")
        if len(parts) > most:
            raise Refusal(413, f"The form is larger than {most:,} bytes.")
        if not message.get("more_body", False):
            return bytes(parts)


def _parsed(body: bytes) -> FormData:
    if body.count(b"&") >= _FIELDS:
        raise Refusal(413, f"The form has more than {_FIELDS:,} fields.")
    # Python's own: Starlette's refuses a field of more than 1 MiB, counted while its bytes are still escaped.
    fields: list[tuple[str, Any]] = [*parse_qsl(body.decode("latin-1"), keep_blank_values=True)]
    return FormData(fields)
