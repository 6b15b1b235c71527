"""Plain code fails in one of several tasks: no progress bar, which never stands in a durable call, keeps that waiting, nor does
a block of another task. (conftest.py: a replay that stands still never goes on.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Job, StepFailed, SyncClient
from pulse_trio.worker.durable import resuming

if TYPE_CHECKING:
    from support.trees import Trees


async def note(what: str) -> str:
    return what


async def draw_a_bar() -> None:
    while True:  # noqa: ASYNC110 -- a progress bar waits for no event
        await trio.sleep(0.01)


async def test_what_is_called_for_a_failure_in_a_replay_is_refused_at_once(trees: Trees) -> None:
    """The replay waited for the progress bar, which comes to no call, until the attempt's timeout."""
    answered: list[int] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        async def answer() -> None:
            answered.append(job.attempt)

        async with trio.open_nursery() as bar:
            bar.start_soon(draw_a_bar)
            await job.step(note, "first", key="first")
            try:
                if job.attempt == 2:
                    raise OSError("no connection")
            except OSError:
                await job.step(answer, key="answer")  # noqa: ASYNC120 -- the call is refused in the replay
                raise
            await job.step(note, "second", key="second")
            bar.cancel_scope.cancel()
        await job.wait_for_event("go", key="go")
        return "done"

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst(log=False)
        SyncClient(trees.dsn).send_event(job_id, "go")
        await trees.burst(log=False)
        assert "no connection" in trees.job(job_id)["error"]
        trees.again()
        await trees.burst(log=False)
    assert (trees.job(job_id)["result"], answered) == ("done", [])


@pytest.mark.parametrize("others", [1, 3])
async def test_tasks_that_are_cut_short_for_it_in_a_replay_end_at_once(trees: Trees, others: int) -> None:
    """They stood in calls that have lines, behind that of the task which had failed: these came no more, because of the bar."""

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        async def leg(name: str) -> None:
            await job.step(note, f"charge {name}", key=f"charge {name}")
            if name == "a" and job.attempt == 2:
                raise OSError("no connection")
            await job.step(note, f"ship {name}", key=f"ship {name}")

        async with trio.open_nursery() as bar:
            bar.start_soon(draw_a_bar)
            async with trio.open_nursery() as legs:
                for name in "abcd"[: 1 + others]:
                    legs.start_soon(leg, name)
            bar.cancel_scope.cancel()
        if job.attempt == 1:
            raise RuntimeError("the first attempt fails")
        return "done"

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        for _ in range(2):
            await trees.burst(log=False)
            trees.again()
        assert "no connection" in trees.job(job_id)["error"]
        await trees.burst(log=False)
    assert trees.job(job_id)["result"] == "done"


async def test_a_failure_that_was_answered_and_does_not_come_again_is_a_mismatch_at_once(trees: Trees) -> None:
    await _is_answered(trees, bars=1)


async def test_so_it_is_after_a_while_beside_more_that_never_stands(trees: Trees, replay_stands_still: None) -> None:
    await _is_answered(trees, bars=2)


async def _is_answered(trees: Trees, *, bars: int) -> None:
    """`bars`: so many in the second attempt."""

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        async with trio.open_nursery() as bar:
            for _ in range(1 if job.attempt == 1 else bars):
                bar.start_soon(draw_a_bar)
            await job.step(note, "first", key="first")
            try:
                if job.attempt == 1:
                    raise OSError("no connection")
            except OSError:
                with job.cleanup():
                    await job.step(note, "answer", key="answer")  # noqa: ASYNC120 -- job.cleanup() is the shield
                raise
            await job.step(note, "second", key="second")
            bar.cancel_scope.cancel()
        return "done"

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst(log=False)
        trees.again()
        await trees.burst(log=False)
    job = trees.job(job_id)
    assert job["state"] == "dead"
    assert "ReplayMismatch" in job["error"]
    assert "no connection" in job["error"]


async def test_what_is_undone_when_the_lines_of_other_tasks_have_come_is_remembered_first(trees: Trees) -> None:
    """The refund began while another task's line was still to come: that plain code had failed was not remembered, and the next
    attempt completed the job."""
    refunding, done = trio.Event(), list[str]()

    async def refund() -> None:
        done.append("refunded")
        refunding.set()
        await trio.sleep_forever()

    async def ship() -> None:
        done.append("shipped")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        async def packs() -> None:
            await job.step(note, "second", key="second")
            if job.attempt == 1:
                raise RuntimeError("the first attempt fails")

        async def pays() -> None:
            await job.step(note, "first", key="first")
            try:
                if job.attempt == 1:
                    await trio.sleep_forever()
                if job.attempt == 2:
                    raise OSError("no connection")
            except OSError:
                with job.cleanup():
                    await job.step(refund, key="refund")  # noqa: ASYNC120 -- job.cleanup() is the shield
                raise
            await job.step(ship, key="ship")

        async with trio.open_nursery() as tasks:
            tasks.start_soon(pays)
            tasks.start_soon(packs)
        return "done"

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst(log=False)
        trees.again()
        async with trio.open_nursery() as workers:
            workers.start_soon(lambda: trees.worker(log=False, grace=0.1).run())
            await refunding.wait()
            await trees.lose(job_id, due=False)
            workers.cancel_scope.cancel()
        trees.again()
        await trees.burst(log=False)
    job = trees.job(job_id)
    assert (job["state"], done[:1]) == ("dead", ["refunded"])
    assert "no connection" in job["error"]


@pytest.mark.parametrize("answers", [True, False])
async def test_a_block_waits_for_no_line_when_its_attempt_ends(answers: bool, trees: Trees) -> None:
    """It had been left after a line of the task that fails now: the attempt stood still for ten seconds."""
    begun, cut, may_end = trio.Event(), trio.Event(), trio.Event()
    answered: list[int] = []

    @trees.handlers.job
    async def child(job: Job) -> None:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            with job.cleanup():
                await may_end.wait()  # noqa: ASYNC102 -- job.cleanup() is the shield

    async def answer() -> None:
        answered.append(1)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        async def packs() -> None:
            with job.move_on_after(60, key="limit") as scope:
                async with job.durable_nursery(key="block") as block:
                    block.start_soon(child.options(child_key="child"))
                    await begun.wait()
                    cut.set()
                    scope.cancel()
            await job.step(note, "packed", key="packed")

        async def pays() -> None:
            await job.step(note, "first", key="first")
            try:
                if job.attempt == 2:
                    raise OSError("no connection")
            except OSError:
                if answers:
                    await job.step(answer, key="answer")  # noqa: ASYNC120 -- the call is refused in the replay
                raise
            await cut.wait()
            await job.step(note, "second", key="second")
            may_end.set()

        async with trio.open_nursery() as tasks:
            tasks.start_soon(packs)
            tasks.start_soon(pays)
        await job.wait_for_event("go", key="go")
        return "done"

    job_id = trees.enqueue("order")
    with trio.fail_after(15):
        await trees.burst(log=False)
        SyncClient(trees.dsn).send_event(job_id, "go")
        await trees.burst(log=False)
        assert "no connection" in trees.job(job_id)["error"]
        trees.again()
        await trees.burst(log=False)
    assert (trees.job(job_id)["result"], answered) == ("done", [])


@pytest.mark.usefixtures("replay_stands_still")
async def test_a_progress_bar_that_a_failure_had_cut_short_keeps_no_replay_waiting_for_ever(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain code does not fail again, so nothing comes for the line of what was called because it had: the history says that
    nothing was busy then, and the replay waited until the attempt's timeout, if it had one."""
    monkeypatch.setattr(resuming, "_VERY_LONG", 1.0)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        try:
            async with trio.open_nursery() as bar:
                bar.start_soon(draw_a_bar)
                await job.step(note, "first", key="first")
                if job.attempt == 1:
                    raise OSError("no connection")
                await job.wait_for_event("go", key="go")
                bar.cancel_scope.cancel()
        except* OSError:
            await job.step(note, "answer", key="answer")  # noqa: ASYNC120 -- as a handler would tell of it
            raise

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst(log=False)
        trees.again()
        await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "dead"
    assert "An attempt before failed of plain code" in trees.job(job_id)["error"]


@pytest.mark.usefixtures("replay_stands_still")
async def test_what_is_called_for_plain_code_that_failed_beside_a_step_has_its_line_though_others_have_none(
    trees: Trees,
) -> None:
    """In the replay plain code of another task has failed before its call came, whose line is the next one: that comes no
    more, and what is called for both failures waited for it."""
    cut: list[int] = []

    async def fails() -> None:
        raise LookupError("no stock")

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=5)
    async def order(job: Job) -> str:
        async def ships() -> None:
            await job.step(note, "ready", key="ready")
            await job.step(fails, key="ship")

        async def tells() -> None:
            if job.attempt == 2:
                cut.append(job.attempt)
                raise OSError("no connection")
            await job.step(note, "told", key="told")

        async with trio.open_nursery() as bar:
            bar.start_soon(draw_a_bar)
            try:
                async with trio.open_nursery() as tasks:
                    tasks.start_soon(tells)
                    tasks.start_soon(ships)
            except* (LookupError, StepFailed, OSError):
                await job.step(note, "answer", key="answer")  # noqa: ASYNC120 -- as a handler would tell of it
                if cut == [job.attempt]:
                    raise
            bar.cancel_scope.cancel()
        await job.wait_for_event("go", key="go")
        return "done"

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst(log=False)
        SyncClient(trees.dsn).send_event(job_id, "go")
        await trees.burst(log=False)
        trees.again()
        await trees.burst(log=False)
    assert (trees.job(job_id)["state"], cut) == ("completed", [2])
