"""Asking where a job is, and the answer, in the database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from pulse_trio import InvalidTransition, SyncClient, UnknownJob, UsageError, WorkerSilent
from pulse_trio.store import stacks
from support.stores import Window, claim_one, end

if TYPE_CHECKING:
    from pulse_trio.store import WorkerStore


def requests(window: Window, job_id: int) -> int:
    return window.value("SELECT count(*) FROM stack_request WHERE job_id = %s", job_id)


async def test_a_request_is_told_to_the_worker_that_runs_the_job_and_goes_with_its_answer(
    store: WorkerStore, window: Window, queue: str
) -> None:
    window.run("LISTEN pulse")
    job_id = window.enqueue(queue, kind="k")
    await claim_one(store, queue)
    request = window.do(stacks.ask(job_id))
    payloads = [notify.payload for notify in window.connection.notifies(timeout=20, stop_after=1)]
    window.run("UNLISTEN pulse")
    assert payloads == [f"look_for_stack {job_id}"]
    assert await store.stack_questions([store.session]) == [(request.id, store.session, job_id)]
    assert (request.kind, request.attempt, request.silent_for is not None) == ("k", 1, True)
    assert window.do(stacks.take(request)) is None
    await store.answer_stack(request.id, store.session, "here")
    answer = window.do(stacks.take(request))
    assert answer is not None
    assert (answer.stack, answer.host, answer.pid) == ("here", request.host, request.pid)
    assert window.do(stacks.take(request)) is None
    assert requests(window, job_id) == 0


async def test_only_the_session_that_was_asked_can_answer_and_only_once(
    store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    request = window.do(stacks.ask(job_id))
    await other.answer_stack(request.id, other.session, "forged")
    assert window.do(stacks.take(request)) is None
    await store.answer_stack(request.id, store.session, "first")
    await store.answer_stack(request.id, store.session, "second")
    answer = window.do(stacks.take(request))
    assert answer is not None
    assert answer.stack == "first"


async def test_a_worker_that_does_not_answer_is_named_and_the_request_goes(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    request = window.do(stacks.ask(job_id))
    with pytest.raises(WorkerSilent, match=rf"{request.host}:{request.pid} runs job {job_id} and did not answer"):
        window.do(stacks.give_up(request))
    assert requests(window, job_id) == 0


async def test_an_answer_that_comes_in_the_last_moment_is_taken(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    request = window.do(stacks.ask(job_id))
    await store.answer_stack(request.id, store.session, "late")
    assert window.do(stacks.give_up(request)).stack == "late"


async def test_only_a_running_job_can_be_asked_for(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    with pytest.raises(InvalidTransition, match="is available: only a running job"):
        window.do(stacks.ask(job_id))
    await store.settle([end(await claim_one(store, queue))])
    with pytest.raises(InvalidTransition, match="is completed"):
        window.do(stacks.ask(job_id))
    with pytest.raises(UnknownJob):
        window.do(stacks.ask(2**62))
    assert requests(window, job_id) == 0


async def test_what_nobody_took_for_an_hour_is_removed_by_the_next_request(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    old, recent = window.do(stacks.ask(job_id)), window.do(stacks.ask(job_id))
    window.run("UPDATE stack_request SET requested_at = requested_at - interval '61 minutes' WHERE id = %s", old.id)
    assert window.do(stacks.ask(job_id)).id > recent.id
    assert requests(window, job_id) == 2


def test_a_stranger_may_not_look_into_handlers(window: Window) -> None:
    window.run("CREATE ROLE stack_stranger")
    try:
        for function in ("ask_stack(bigint)", "take_stack(bigint, boolean)"):
            assert not window.value("SELECT has_function_privilege('stack_stranger', %s, 'EXECUTE')", function)
    finally:
        window.run("DROP ROLE stack_stranger")


def test_no_answer_is_waited_for_in_a_transaction(room_dsn: str) -> None:
    with psycopg.connect(room_dsn) as connection, pytest.raises(UsageError, match="before you commit"):
        SyncClient(connection).stack(1)
