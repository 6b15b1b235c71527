"""Writes the requests of `enqueue_many` slice by slice, without a deadlock between any two calls.

A job with a unique key holds that key until its transaction ends, so two calls with the same keys must take them in one
order. One slice is one statement, which sorts. Of a call with several slices, jobs without keys are written as they come;
jobs with keys are set aside (spool.py) and written last, sorted over the whole call, with ids that were reserved as they
came, so that they still run in the order in which they were given.

Two cases remain: a key's job vanishes between the statement that met it and the look-up of its id, or PostgreSQL ends a
deadlock anyway (with keys that the caller's transaction already holds, or with a program that enqueues in SQL). Then the jobs
with keys are rolled back and written again, one job after the other.

The asynchronous and the blocking form do the same; they share their decisions.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.to_thread

from ..store import batches, new_jobs, operations, refusals
from .spool import Spool
from .streams import SLICE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from ..codec import Codec
    from ..jobs import JobRequest
    from .streams import AsyncStream, Stream

_TRIES = 5
"""How often a call is tried before a deadlock is raised to the caller."""

Done = list[new_jobs.Enqueued]


class Adding(NamedTuple):
    """A transaction in which jobs are added: runs an operation, enqueues a slice of requests, opens a savepoint."""

    run: Callable[[operations.Operation[Any]], Awaitable[Any]]
    write: Callable[[Sequence[JobRequest]], Awaitable[Done]]
    savepoint: Callable[[], AbstractAsyncContextManager[object]]


class AddingSync(NamedTuple):
    """The same, blocking."""

    run: Callable[[operations.Operation[Any]], Any]
    write: Callable[[Sequence[JobRequest]], Done]
    savepoint: Callable[[], AbstractContextManager[object]]


class Tries:
    """Decides whether to start again."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def one_by_one(self) -> bool:
        return self.count > 0

    def pause(self, error: Exception) -> float:
        """Seconds until the next try; raises an error that another try cannot solve."""
        self.count += 1
        if isinstance(error, refusals.Deadlocked) and self.count < _TRIES:
            return random.uniform(0, 0.02 * 2**self.count)  # noqa: S311 -- spreads load, guards nothing
        if isinstance(error, new_jobs.KeysMovedError) and self.count == 1:
            return 0.0
        raise error


def _keyed(requests: Sequence[JobRequest]) -> list[int]:
    return [n for n, request in enumerate(requests) if request.unique_key is not None]


class Answers:
    """The results of a call so far, in the order of its requests."""

    def __init__(self, progress: Callable[[int], object] | None) -> None:
        self._progress = progress
        self._said = 0
        self._by_place: list[new_jobs.Enqueued | None] = []
        self._written = 0

    def extend(self, count: int) -> range:
        """Reserves places for that many results."""
        begin = len(self._by_place)
        self._by_place += [None] * count
        return range(begin, begin + count)

    def put(self, places: Sequence[int], done: Done) -> None:
        for place, one in zip(places, done, strict=True):
            self._written += self._by_place[place] is None
            self._by_place[place] = one
        if self._progress is not None and self._written > self._said:
            self._said = self._written
            self._progress(self._written)

    @property
    def all(self) -> Done:
        return [one for one in self._by_place if one is not None]


async def write_stream(
    stream: AsyncStream,
    adding: Callable[[], AbstractAsyncContextManager[Adding]],
    codec: Codec | None,
    *,
    progress: Callable[[int], object] | None = None,
    batch: int | None = None,
) -> Done:
    """Writes all of a stream in one transaction, as members of a batch if one is given."""
    answers = Answers(progress)
    first = await stream.take(SLICE)
    if not stream.ended:
        async with adding() as to:
            if batch is not None:
                await to.run(batches.lock(batch))
            await _write_slices(first, stream, to, codec, answers)
            await _join(to, batch, answers.all)
        return answers.all
    places, tries = answers.extend(len(first)), Tries()
    while first:
        try:
            async with adding() as to:
                if batch is not None:
                    await to.run(batches.lock(batch))
                if _keyed(first):
                    done = await to.run(new_jobs.enqueue_many(first, codec, one_by_one=tries.one_by_one))
                else:
                    done = await to.write(first)
                await _join(to, batch, done)
                # Before the COMMIT, as of a call of several slices: if `progress` raises, nothing is written.
                answers.put(places, done)
            break
        except (new_jobs.KeysMovedError, refusals.Deadlocked) as error:
            await anyio.sleep(tries.pause(error))
    return answers.all


async def _join(to: Adding, batch: int | None, done: Done) -> None:
    for adding in () if batch is None else _joining(batch, done):
        await to.run(adding)


def _joining(batch: int, done: Done) -> Iterator[operations.Operation[None]]:
    for start in range(0, len(done), SLICE):
        yield batches.add(batch, [one.id for one in done[start : start + SLICE]])


async def _write_slices(
    first: Sequence[JobRequest], stream: AsyncStream, to: Adding, codec: Codec | None, answers: Answers
) -> None:
    requests = first
    with Spool() as spool:
        while requests:
            places, keyed = answers.extend(len(requests)), _keyed(requests)
            if not keyed:
                answers.put(places, await to.write(requests))
            else:
                ids: list[int] = await to.run(new_jobs.reserve(len(requests)))
                await anyio.to_thread.run_sync(spool.add, *_chosen(keyed, places, ids, requests))
                if others := sorted(set(range(len(requests))) - set(keyed)):
                    at, new, plain = _chosen(others, places, ids, requests)
                    answers.put(at, await to.run(new_jobs.enqueue_many(plain, codec, ids=new)))
            requests = await stream.take(SLICE)
        tries = Tries()
        while len(spool):
            try:
                async with to.savepoint():
                    parts = spool.parts()
                    while (part := await anyio.to_thread.run_sync(next, parts, None)) is not None:
                        write = new_jobs.enqueue_many(part.requests, codec, ids=part.ids, one_by_one=tries.one_by_one)
                        answers.put(part.places, await to.run(write))
                break
            except (new_jobs.KeysMovedError, refusals.Deadlocked) as error:
                await anyio.sleep(tries.pause(error))


def _chosen(
    which: Sequence[int], places: Sequence[int], ids: Sequence[int], requests: Sequence[JobRequest]
) -> tuple[list[int], list[int], list[JobRequest]]:
    return [places[n] for n in which], [ids[n] for n in which], [requests[n] for n in which]


def write_stream_sync(
    stream: Stream,
    adding: Callable[[], AbstractContextManager[AddingSync]],
    codec: Codec | None,
    *,
    progress: Callable[[int], object] | None = None,
    batch: int | None = None,
) -> Done:
    """The same, blocking."""
    answers = Answers(progress)
    first = stream.take(SLICE)
    if not stream.ended:
        with adding() as to:
            if batch is not None:
                to.run(batches.lock(batch))
            _write_slices_sync(first, stream, to, codec, answers)
            _join_sync(to, batch, answers.all)
        return answers.all
    places, tries = answers.extend(len(first)), Tries()
    while first:
        try:
            with adding() as to:
                if batch is not None:
                    to.run(batches.lock(batch))
                if _keyed(first):
                    done = to.run(new_jobs.enqueue_many(first, codec, one_by_one=tries.one_by_one))
                else:
                    done = to.write(first)
                _join_sync(to, batch, done)
                answers.put(places, done)
            break
        except (new_jobs.KeysMovedError, refusals.Deadlocked) as error:
            time.sleep(tries.pause(error))
    return answers.all


def _join_sync(to: AddingSync, batch: int | None, done: Done) -> None:
    for adding in () if batch is None else _joining(batch, done):
        to.run(adding)


def _write_slices_sync(
    first: Sequence[JobRequest], stream: Stream, to: AddingSync, codec: Codec | None, answers: Answers
) -> None:
    requests = first
    with Spool() as spool:
        while requests:
            places, keyed = answers.extend(len(requests)), _keyed(requests)
            if not keyed:
                answers.put(places, to.write(requests))
            else:
                ids: list[int] = to.run(new_jobs.reserve(len(requests)))
                spool.add(*_chosen(keyed, places, ids, requests))
                if others := sorted(set(range(len(requests))) - set(keyed)):
                    at, new, plain = _chosen(others, places, ids, requests)
                    answers.put(at, to.run(new_jobs.enqueue_many(plain, codec, ids=new)))
            requests = stream.take(SLICE)
        tries = Tries()
        while len(spool):
            try:
                with to.savepoint():
                    for part in spool.parts():
                        write = new_jobs.enqueue_many(part.requests, codec, ids=part.ids, one_by_one=tries.one_by_one)
                        answers.put(part.places, to.run(write))
                break
            except (new_jobs.KeysMovedError, refusals.Deadlocked) as error:
                time.sleep(tries.pause(error))
