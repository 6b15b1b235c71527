"""Sorts one call's requests with unique keys by key: in memory, and from 16 MiB on in a file.

Keys are locked in their order over a whole call, so that no two calls deadlock; the last request may have the first key. What
an iterable gives can be asked for once, and a call that is begun anew needs it twice.
"""

from __future__ import annotations

from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..jobs import JobRequest
from .streams import SLICE, SLICE_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

_IN_MEMORY = 16 * 1024 * 1024
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(JobRequest).decode


class Part(NamedTuple):
    """Requests to write at once: their places in the call, their reserved ids, and themselves."""

    places: list[int]
    ids: list[int]
    requests: list[JobRequest]


class Spool:
    """A context manager; the file goes with it."""

    def __init__(self) -> None:
        self._file = SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115 -- closed by __exit__
        self._index: list[tuple[str, str, int, int, int, int]] = []
        """(queue, key, place, id, offset, length)"""
        self._end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._index)

    def add(self, places: Sequence[int], ids: Sequence[int], requests: Sequence[JobRequest]) -> None:
        """Takes requests that have a key."""
        for place, job_id, request in zip(places, ids, requests, strict=True):
            data = _encode(request)
            self._file.write(data)
            self._index.append((request.queue, request.unique_key or "", place, job_id, self._end, len(data)))
            self._end += len(data)

    def parts(self) -> Iterator[Part]:
        """All of them, in the order of queues and keys as the database sorts them, by bytes."""
        self._index.sort()
        part, size = Part([], [], []), 0
        for _, _, place, job_id, offset, length in self._index:
            self._file.seek(offset)
            part.places.append(place)
            part.ids.append(job_id)
            part.requests.append(_decode(self._file.read(length)))
            size += length
            if size >= SLICE_SIZE or len(part.places) == SLICE:
                yield part
                part, size = Part([], [], []), 0
        if part.places:
            yield part
        self._file.seek(self._end)
