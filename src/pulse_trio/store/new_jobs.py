"""Adds jobs: one, or a batch in one statement, with unique keys and encoded arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..codec import encoded
from ..errors import JobExists
from .arrays import numbers, optional_numbers, request_columns, texts, texts_if_any
from .operations import Query

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..codec import Codec
    from ..jobs import JobRequest
    from .operations import Operation


class Enqueued(NamedTuple):
    """What an enqueue did: the job's id, whether it is new (False: that job had the unique key), and whether that job got the
    new arguments and the new time (`on_conflict="replace"`; False if it runs already)."""

    id: int
    added: bool
    replaced: bool = False


def enqueue(request: JobRequest, codec: Codec | None = None) -> Operation[Enqueued]:
    """Adds one job, encoded by `codec` if there is one. If its unique key is taken, adds nothing and returns the job that has
    the key, or raises `JobExists`, as `on_conflict` says."""
    reserved: int | None = None
    if codec is not None:
        if request.unique_key is None:
            reserved = (yield Query("reserve", {"count": 1}))[0][0]
        request = encoded_request(codec, request, reserved)
    if request.unique_key is not None:
        return (yield from _enqueue_unique([request]))[0]
    rows = yield Query(
        "enqueue",
        {
            "kind": request.kind,
            "args": request.args,
            "queue": request.queue,
            "priority": request.priority,
            "run_at": request.run_at,
            "delay": request.delay,
            "deadline_in": request.deadline_in,
            "expires_in": request.expires_in,
            "max_attempts": request.max_attempts,
            "options": request.options,
            "key": request.key,
            "reserved": reserved,
        },
    )
    return Enqueued(rows[0][0], added=True)


class KeysMovedError(Exception):
    """A job that had a key is gone, and its key sorts before others that are locked already: begin again, `one_by_one`."""


def reserve(count: int) -> Operation[list[int]]:
    """Ids for jobs that are about to be added."""
    rows = yield Query("reserve", {"count": count})
    return [row[0] for row in rows]


def enqueue_many(
    requests: Sequence[JobRequest],
    codec: Codec | None = None,
    *,
    ids: Sequence[int] | None = None,
    one_by_one: bool = False,
) -> Operation[list[Enqueued]]:
    """Adds a batch in one statement; the answers come in the order of the requests. Duplicates take a second statement. `ids`
    are reserved ids. Keys are locked in their order, and none after that.

    Raises `JobExists` when a request asks for that, and `KeysMovedError` unless `one_by_one`, which takes longer: then the
    other jobs have been written, and the transaction must be rolled back."""
    if not requests:
        return []
    plain = not one_by_one and all(_is_plain(request) for request in requests)
    if codec is not None:
        bound: list[int | None] = [None] * len(requests)
        if plain:
            ids = ids or (yield from reserve(len(requests)))
            bound = [new if r.unique_key is None else None for new, r in zip(ids, requests, strict=True)]
        requests = [encoded_request(codec, r, new) for r, new in zip(requests, bound, strict=True)]
    if not plain:
        return (yield from _enqueue_unique(requests))
    reserved = None if ids is None else numbers(ids)
    rows = yield Query("enqueue_many", {**_columns(requests), "reserved": reserved})
    answers = [Enqueued(new_id, added) for _, added, new_id, *_ in rows]
    taken = [n for n, answer in enumerate(answers) if not answer.added]
    if taken:
        keys = {
            "queues": texts([requests[n].queue for n in taken]),
            "unique_keys": texts([requests[n].unique_key for n in taken]),
        }
        for n, (_, holder) in zip(taken, (yield Query("key_holders", keys)), strict=True):
            if holder is None:
                raise KeysMovedError
            answers[n] = Enqueued(holder, added=False)
    return answers


def encoded_request(codec: Codec, request: JobRequest, job_id: int | None) -> JobRequest:
    """The request with its arguments encoded, bound to its future id if that is known."""
    return msgspec.structs.replace(request, args=encoded(codec, request.args, request.kind, job_id))


def _is_plain(request: JobRequest) -> bool:
    """Whether the request's unique key, if it has one, is held only while its job is live, and a duplicate is skipped."""
    return request.on_conflict == "skip" and request.unique_for is None and request.unique_after is None


def _enqueue_unique(requests: Sequence[JobRequest]) -> Operation[list[Enqueued]]:
    columns = {
        **_columns(requests),
        "unique_fors": optional_numbers([r.unique_for for r in requests]),
        "unique_afters": optional_numbers([r.unique_after for r in requests]),
        "replacing": texts(["true" if r.on_conflict == "replace" else "false" for r in requests]),
    }
    rows = yield Query("enqueue_unique", columns)
    answers = [Enqueued(job_id, added, replaced) for _, job_id, added, replaced in rows]
    for request, answer in zip(requests, answers, strict=True):
        if request.on_conflict == "raise" and not answer.added:
            raise JobExists(
                f"Job {answer.id} of queue {request.queue!r} has the unique key {request.unique_key!r} already.",
                job_id=answer.id,
            )
    return answers


def _columns(requests: Sequence[JobRequest]) -> dict[str, str | None]:
    return {**request_columns(requests), "unique_keys": texts_if_any([r.unique_key for r in requests])}
