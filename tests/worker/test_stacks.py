"""A worker that is asked where a job is, in virtual time."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pulse_trio import Job  # noqa: TC001 -- read from the annotations of handlers
from pulse_trio.testing.memory import unavailable
from pulse_trio.worker.diagnosis.stack import LIMIT

if TYPE_CHECKING:
    from support.stage import Stage


async def asked(stage: Stage, job_id: int) -> str | None:
    """What the worker answers."""
    request = stage.database.ask_stack(job_id)
    await wait_all_tasks_blocked()
    return stage.database.stacks[request][1]


async def child_of_the_test(note: str) -> None:
    await trio.sleep_forever()


@pytest.fixture
def parent(stage: Stage) -> Stage:
    """A stage with a handler `parent(children)`, which has so many."""

    @stage.handlers.job
    async def parent(job: Job, children: int = 2) -> None:
        for n in range(children):
            job.nursery.start_soon(child_of_the_test, "x", name=f"child {n}")
        await trio.sleep(1000)

    return stage


async def test_the_answer_is_the_handler_and_its_children_with_their_lines(parent: Stage) -> None:
    job_id, other = parent.enqueue("parent"), parent.enqueue("parent", children=0)
    async with parent.working(grace=0):
        await trio.sleep(15)  # longer than a heartbeat: its task is in the job's nursery by now
        answer = await asked(parent, job_id) or ""
        assert re.search(r'test_stacks.py", line \d+, in parent\n +await trio.sleep\(1000\)', answer)
        assert re.findall(r"task (child \d)\n.*test_stacks.py\", line \d+, in child_of_the_test", answer) == [
            "child 0",
            "child 1",
        ]
        # Nothing of how the worker runs a job.
        assert "runner.py" not in answer
        assert "heartbeat" not in answer
        assert "child" not in (await asked(parent, other) or "child")


async def test_thousands_of_children_are_cut_to_what_a_row_holds(parent: Stage) -> None:
    job_id = parent.enqueue("parent", children=2000)
    async with parent.working(grace=0):
        await trio.sleep(1)
        answer = await asked(parent, job_id) or ""
        assert LIMIT - 100 < len(answer.encode()) <= LIMIT
        assert answer.endswith("(there is more)")


async def test_a_question_about_another_workers_job_is_left_to_that_worker(parent: Stage) -> None:
    job_id = parent.enqueue("parent")
    async with parent.working(grace=0):
        await trio.sleep(1)
        parent.database.steal(job_id)
        assert await asked(parent, job_id) is None
        # It is still held here under the old session, until the next beat.
        for payload in ("look_for_stack", "look_for_stack 1", "look_for_stack a b c", "stack 1 2 3"):
            for listener in parent.database.listeners:
                listener(payload)
        await wait_all_tasks_blocked()
        assert "answer_stack" not in parent.store.calls


async def test_a_job_that_is_not_here_any_more_is_said_to_have_ended(parent: Stage) -> None:
    job_id = parent.enqueue("parent")
    async with parent.working(grace=0):
        await trio.sleep(1)
        parent.database.jobs[8] = parent.database.jobs[job_id]
        assert "just ended" in (await asked(parent, 8) or "")


@pytest.mark.parametrize("statement", ["stack_questions", "answer_stack"])
async def test_a_question_is_answered_though_the_connection_fails_at_its_first_use_after_a_restart(
    statement: str, parent: Stage
) -> None:
    job_id = parent.enqueue("parent")

    async def fails_once() -> None:
        del parent.store.trouble[statement]
        await unavailable()

    async with parent.working(grace=0):
        await wait_all_tasks_blocked()
        parent.store.trouble[statement] = fails_once
        assert "in parent" in (await asked(parent, job_id) or "")
        assert statement not in parent.store.trouble


async def test_an_answer_that_cannot_be_written_is_dropped_and_the_next_is_not(parent: Stage) -> None:
    job_id = parent.enqueue("parent")
    async with parent.working(grace=0):
        await trio.sleep(1)
        parent.store.trouble["answer_stack"] = unavailable
        assert await asked(parent, job_id) is None
        del parent.store.trouble["answer_stack"]
        assert "in parent" in (await asked(parent, job_id) or "")


async def test_a_thread_is_shown_where_it_stands(stage: Stage) -> None:
    release, began = threading.Event(), [trio.Event(), trio.Event()]
    token = trio.lowlevel.current_trio_token()

    @stage.handlers.job
    def in_a_thread(n: int) -> None:
        token.run_sync_soon(began[n].set)
        release.wait()

    first, second = stage.enqueue("in_a_thread", n=0), stage.enqueue("in_a_thread", n=1)
    async with stage.working():
        try:
            for event in began:
                await event.wait()
            with trio.fail_after(1000):
                answers: list[Any] = [await waiting_in_real_time(stage, job_id) for job_id in (first, second)]
        finally:
            release.set()
    for answer in answers:
        assert re.match(r"thread \d+\n", answer)
        assert re.search(r"test_stacks.py\", line \d+, in in_a_thread\n +release.wait\(\)", answer)
    assert answers[0].splitlines()[0] != answers[1].splitlines()[0]


async def waiting_in_real_time(stage: Stage, job_id: int) -> str | None:
    # It says that it began before it waits.
    while "release.wait()" not in ((answer := await asked_in_real_time(stage, job_id)) or ""):
        pass
    return answer


async def asked_in_real_time(stage: Stage, job_id: int) -> str | None:
    request = stage.database.ask_stack(job_id)
    while (answer := stage.database.stacks[request][1]) is None:
        await trio.lowlevel.checkpoint()
    return answer
