"""`SyncClient` has what `Client` has, for programs without an event loop."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import psycopg
import pytest

from pulse_trio import Client, Handlers, SyncClient, UsageError
from pulse_trio.testing import PulseWorker

if TYPE_CHECKING:
    from collections.abc import Callable

handlers = Handlers()


@handlers.job
async def step(n: int) -> int:
    return n


def public(cls: type) -> dict[str, Callable[..., object]]:
    return {name: value for name, value in inspect.getmembers(cls, callable) if not name.startswith("_")}


def test_each_method_takes_the_same_parameters() -> None:
    blocking = public(SyncClient)
    missing = public(Client).keys() - blocking.keys()
    assert not missing
    for name, method in public(Client).items():
        wanted, there = inspect.signature(method).parameters, inspect.signature(blocking[name]).parameters
        assert list(wanted) == list(there), name
        assert [one.default for one in wanted.values()] == [one.default for one in there.values()], name


def test_what_it_tells_of_jobs_and_workers(dsn: str) -> None:
    client = SyncClient(dsn)
    first, second = client.enqueue(step, 1), client.enqueue(step.options(queue="other"), 2)
    PulseWorker(dsn, handlers).drain_sync()
    assert [(one.attempt, one.outcome) for one in client.attempts(first.id)] == [(1, "completed")]
    assert client.count_by_state() == {"completed": 2}
    assert client.count_by_state(queue="other") == {"completed": 1}
    assert client.workers() == []
    assert len(client.workers(gone=True)) == 1
    waiting = [client.enqueue(step.options(delay=60), n).id for n in range(3)]
    assert all(one.cancellation is not None for one in client.cancel_many(waiting, wait=True))
    assert client.count_by_state() == {"completed": 2, "cancelled": 3}
    assert second.added


def test_a_wait_for_cancelled_jobs_has_no_place_in_the_callers_transaction(dsn: str) -> None:
    with psycopg.connect(dsn) as connection, pytest.raises(UsageError, match="wait"):
        SyncClient(connection).cancel_many([1], wait=True)
