"""Two open transactions on one job: one has written and has not committed, the other comes upon what it did.

Nothing sleeps to get an order: the first transaction is open until the test ends it, and that somebody waits for it is seen in
`pg_blocking_pids`. Other races are elsewhere: tests/store/test_locked_rows.py (reports and rescues beside a locked
row), test_rescue.py (two watchdogs), test_unique.py (producers of one key), test_schedules.py (schedulers on one occurrence),
test_limits.py (claimers of one limit), tests/client/test_batches.py (two that finish a batch).
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
import trio

from pulse_trio.errors import InvalidTransition, UnknownJob
from pulse_trio.jobs import CancelRequest
from pulse_trio.states import State
from pulse_trio.store import cancelling, history, operations
from support.stores import Window, claim, claim_one, complete_alone, end, open_store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from pulse_trio.jobs import Claim
    from pulse_trio.store import WorkerStore
    from support.databases import Databases


@pytest.fixture(scope="module")
def room_dsn(databases: Databases) -> Generator[str]:
    with databases.migrated() as dsn:
        yield dsn


@pytest.fixture
def window(room_dsn: str) -> Generator[Window]:
    with Window(room_dsn) as window:
        yield window


@pytest.fixture
async def store(room_dsn: str) -> AsyncGenerator[WorkerStore]:
    async with open_store(room_dsn) as store:
        yield store


@pytest.fixture
def queue() -> str:
    return f"q-{uuid4().hex}"


class Open:
    """A client's transaction that has not been ended."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self.pid = connection.info.backend_pid
        self.commit, self.rollback = connection.commit, connection.rollback

    def do(self, operation: operations.Operation[Any]) -> Any:
        return operations.run_sync(self._connection, "pulse", operation)


@pytest.fixture
def first(window: Window) -> Generator[Open]:
    """The transaction that comes first."""
    with psycopg.connect(window.dsn) as connection:
        yield Open(connection)
        connection.rollback()


@contextmanager
def refused(error: type[Exception], match: str) -> Generator[None]:
    with pytest.raises(error, match=match):
        yield


@asynccontextmanager
async def waiting(window: Window, pid: int, operation: operations.Operation[Any]) -> AsyncGenerator[list[Any]]:
    """Another client does `operation` and is seen to wait for `pid`, which the block lets go. Its answer, or what it raised, is
    there after the block."""
    answers: list[Any] = []

    def work() -> None:
        try:
            answers.append(window.do(operation))
        except (InvalidTransition, UnknownJob) as error:
            answers.append(error)

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, work)
            while not window.run("SELECT FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))", pid):
                assert not answers, f"it did not wait: {answers}"
                await trio.lowlevel.checkpoint()
            yield answers


async def dead(store: WorkerStore, window: Window, queue: str, **options: Any) -> int:
    job_id = window.enqueue(queue, **options)
    await store.settle([end(await claim_one(store, queue), "discarded", error="x")])
    return job_id


# A cancellation that is not committed yet


@pytest.mark.parametrize("committed", [True, False])
async def test_a_claim_passes_by_a_job_that_is_being_cancelled(
    committed: bool, store: WorkerStore, window: Window, queue: str, first: Open
) -> None:
    job_id = window.enqueue(queue)
    first.do(cancelling.cancel(job_id))
    assert await claim(store, queue) == []
    (first.commit if committed else first.rollback)()
    assert [c.id for c in await claim(store, queue)] == ([] if committed else [job_id])
    assert window.state(job_id) == ("cancelled" if committed else "running")


async def test_a_failure_that_meets_a_request_for_cancellation_comes_again_and_obeys_it(
    store: WorkerStore, window: Window, queue: str, first: Open
) -> None:
    job_id = window.enqueue(queue)
    failed = end(await claim_one(store, queue), "failed", error="x")
    first.do(cancelling.cancel(job_id, reason="no more"))
    assert await store.settle([failed]) == ([], [], [failed])
    first.commit()
    assert await store.settle([failed]) == ([failed], [], [])
    job = window.job(job_id)
    assert (job["state"], job["cancel_reason"]) == ("cancelled", "no more")


async def test_a_completion_that_meets_a_request_for_cancellation_comes_again_and_stays_one(
    store: WorkerStore, window: Window, queue: str, first: Open
) -> None:
    job_id = window.enqueue(queue)
    done = end(await claim_one(store, queue))
    first.do(cancelling.cancel(job_id))
    assert await store.settle([done]) == ([], [], [done])
    first.commit()
    assert await store.settle([done]) == ([done], [], [])
    await store.close_cancellations()
    assert window.state(job_id) == "completed"
    (entry,) = window.do(cancelling.cancellations(job_id))
    assert entry.ended_as is State.COMPLETED


async def test_a_beat_does_not_wait_for_a_request_for_cancellation_and_brings_it_when_it_is_there(
    store: WorkerStore, window: Window, queue: str, first: Open
) -> None:
    job_id = window.enqueue(queue)
    ours = await claim_one(store, queue)
    first.do(cancelling.cancel(job_id, reason="no more"))
    beat = await store.beat([ours])
    assert (beat.renewed, beat.locked) == (frozenset(), {ours})
    first.commit()
    beat = await store.beat([ours])
    assert (beat.renewed, beat.cancelling) == ({ours}, {ours: CancelRequest("user", "no more")})


async def test_a_rescue_does_not_wait_for_a_request_for_cancellation_and_obeys_it_when_it_is_there(
    store: WorkerStore, window: Window, queue: str, first: Open
) -> None:
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    window.expire(job_id)
    first.do(cancelling.cancel(job_id))
    assert await store.rescue() == (0, 0)
    first.commit()
    await store.rescue()
    assert window.state(job_id) == "cancelled"


async def test_of_two_cancellations_the_second_finds_it_done(window: Window, queue: str, first: Open) -> None:
    job_id = window.enqueue(queue)
    first.do(cancelling.cancel(job_id))
    async with waiting(window, first.pid, cancelling.cancel(job_id)) as answers:
        first.commit()
    (result,) = answers
    assert (result.state, result.cancellation) == (State.CANCELLED, None)
    assert len(window.do(cancelling.cancellations(job_id))) == 1


# A person's retry or deletion that is not committed yet


async def test_of_two_retries_the_second_finds_it_done(
    store: WorkerStore, window: Window, queue: str, first: Open
) -> None:
    job_id = await dead(store, window, queue)
    first.do(operations.retry(job_id))
    async with waiting(window, first.pid, operations.retry(job_id)) as answers:
        first.commit()
    assert isinstance(answers[0], InvalidTransition)
    assert [c.id for c in await claim(store, queue)] == [job_id]
    assert window.value("SELECT count(*) FROM jobs WHERE queue = %s", queue) == 1


async def test_a_retry_of_a_job_that_is_being_deleted_finds_none(
    store: WorkerStore, window: Window, queue: str, first: Open
) -> None:
    job_id = await dead(store, window, queue)
    first.do(history.delete(job_id))
    async with waiting(window, first.pid, operations.retry(job_id)) as answers:
        first.commit()
    assert isinstance(answers[0], UnknownJob)
    assert window.run("SELECT FROM jobs WHERE id = %s", job_id) == []


async def test_a_deletion_leaves_a_job_that_is_being_retried(
    store: WorkerStore, window: Window, queue: str, first: Open
) -> None:
    job_id = await dead(store, window, queue)
    first.do(operations.retry(job_id))
    with refused(InvalidTransition, "is being retried at this moment"):
        window.do(history.delete(job_id))
    first.commit()
    assert window.state(job_id) == "available"


async def test_of_two_retried_jobs_with_one_unique_key_the_first_goes_back(
    store: WorkerStore, window: Window, queue: str, first: Open
) -> None:
    one = await dead(store, window, queue, unique_key="k")
    two = await dead(store, window, queue, unique_key="k")
    first.do(operations.retry(one))
    async with waiting(window, first.pid, history.retry_batch([two])) as answers:
        first.commit()
    assert (answers[0].retried, list(answers[0].refused)) == ([], [two])
    assert (window.state(one), window.state(two)) == ("available", "dead")


# A completion that is not committed yet: a handler's job.transaction()


@asynccontextmanager
async def completing(store: WorkerStore, ours: Claim) -> AsyncGenerator[int]:
    """Completes the job in an open transaction, which commits after the block; gives its server process."""
    async with store.transactions.open(), store.transactions.begin() as begun:
        assert await complete_alone(begun, end(ours))
        yield begun.connection.info.backend_pid


async def test_a_rescue_passes_by_a_job_that_is_being_completed(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    ours = await claim_one(store, queue)
    window.expire(job_id)
    async with completing(store, ours):
        assert await store.rescue() == (0, 0)
        beat = await store.beat([ours])
        assert (beat.renewed, beat.locked) == (frozenset(), {ours})
    assert await store.rescue() == (0, 0)
    assert window.state(job_id) == "completed"


async def test_a_cancellation_waits_for_a_completion_and_finds_it_done(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    ours = await claim_one(store, queue)
    answers: list[Any] = []
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery, completing(store, ours) as pid:
            nursery.start_soon(trio.to_thread.run_sync, lambda: answers.append(window.do(cancelling.cancel(job_id))))
            while not window.run("SELECT FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))", pid):
                await trio.lowlevel.checkpoint()
    assert (answers[0].state, answers[0].cancellation) == (State.COMPLETED, None)
    assert window.do(cancelling.cancellations(job_id)) == []


async def test_a_producer_does_not_wait_for_the_completion_of_its_keys_holder(
    store: WorkerStore, window: Window, queue: str
) -> None:
    holder = window.enqueue(queue, unique_key="k")
    async with completing(store, await claim_one(store, queue)):
        assert window.enqueue(queue, unique_key="k") == holder
    assert window.enqueue(queue, unique_key="k") != holder
