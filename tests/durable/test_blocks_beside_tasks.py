"""Blocks beside other tasks of their handler: a later attempt comes to the same, and at once. (conftest.py: a replay that
stands still never goes on.)"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from pulse_trio import Job, StepFailed, SyncClient
from pulse_trio.worker.durable import entering, resuming
from support.turns import PlainAwait

if TYPE_CHECKING:
    import pytest

    from support.trees import Trees


async def note(what: str) -> str:
    return what


async def fails() -> None:
    raise OSError("no stock")


async def draw_a_bar() -> None:
    while True:  # noqa: ASYNC110 -- a progress bar waits for no event
        await trio.sleep(0.01)


async def end(trees: Trees, kind: str) -> dict[str, Any]:
    """Runs a job to where it waits for the event "go", and then once more from the top to its end."""
    job_id = trees.enqueue(kind)
    with trio.fail_after(30):
        await trees.burst(log=False)
        SyncClient(trees.dsn).send_event(job_id, "go")
        await trees.burst(log=False)
    return trees.job(job_id)


async def test_a_step_that_fails_in_a_body_comes_before_the_end_of_the_block(trees: Trees) -> None:
    """The block's end was said to have begun before the failure that it begins with, and the replay waited for that."""

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        caught = "nothing"
        try:
            async with job.durable_nursery(key="block"), trio.open_nursery() as tasks:
                tasks.start_soon(draw_a_bar)
                await job.step(note, "first", key="first")
                await job.step(fails, key="fails")
        except* StepFailed:
            caught = "the failure"
        await job.step(note, "after", key="after")
        await job.wait_for_event("go", key="go")
        return caught

    assert (await end(trees, "order"))["result"] == "the failure"


async def test_a_child_that_fails_cuts_the_blocks_in_its_body_before_the_end_of_the_block(trees: Trees) -> None:
    begun = trio.Event()

    @trees.handlers.job(max_attempts=1)
    async def child(fails: bool) -> None:
        if not fails:
            begun.set()
            await trio.sleep_forever()
        await begun.wait()
        raise OSError("no stock")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        caught = "nothing"
        async with trio.open_nursery() as bar:
            bar.start_soon(draw_a_bar)
            await job.step(note, "before", key="before")
            try:
                async with job.durable_nursery(key="outer") as outer:
                    outer.start_soon(child.options(child_key="fails"), True)
                    async with job.durable_nursery(key="inner") as inner:
                        inner.start_soon(child.options(child_key="waits"), False)
            except* Exception:
                caught = "the failure"
            await job.step(note, "after", key="after")
            bar.cancel_scope.cancel()
        await job.wait_for_event("go", key="go")
        return caught

    assert (await end(trees, "order"))["result"] == "the failure"


async def test_a_block_that_the_failure_of_a_step_has_cut_short_is_left_after_that_failure(trees: Trees) -> None:
    """It was to be left before the failure's line, and that waited for the block."""
    begun = trio.Event()

    @trees.handlers.job
    async def child() -> None:
        begun.set()
        await trio.sleep_forever()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        caught = "nothing"

        async def packs() -> None:
            async with job.durable_nursery(key="block") as nursery:
                nursery.start_soon(child)

        async with trio.open_nursery() as bar:
            bar.start_soon(draw_a_bar)
            try:
                async with trio.open_nursery() as tasks:
                    tasks.start_soon(packs)
                    await begun.wait()
                    await job.step(note, "first", key="first")
                    await job.step(fails, key="fails")
            except* StepFailed:
                caught = "the failure"
            await job.step(note, "after", key="after")
            bar.cancel_scope.cancel()
        await job.wait_for_event("go", key="go")
        return caught

    assert (await end(trees, "order"))["result"] == "the failure"


async def test_what_is_busy_behind_the_entry_of_a_block_holds_up_no_line_that_came_while_it_was_entered(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    enters, delivered = trio.Event(), trio.Event()
    number = entering._number

    async def slowly(*given: Any) -> int:
        enters.set()
        await delivered.wait()
        return await number(*given)

    monkeypatch.setattr(entering, "_number", slowly)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        packed = trio.Event()

        async def packs() -> None:
            async with job.durable_nursery(key="block"):
                while not packed.is_set():  # noqa: ASYNC110 -- a task that is busy is what is tested
                    await trio.sleep(0.01)

        async with trio.open_nursery() as tasks:
            tasks.start_soon(packs)
            await enters.wait()
            await job.step(note, "first", key="first")
            delivered.set()
            await job.step(note, "second", key="second")
            packed.set()
        await job.wait_for_event("go", key="go")
        return "packed"

    assert (await end(trees, "order"))["result"] == "packed"


async def test_a_block_that_had_ended_as_its_handler_cancelled_it_has_its_end_again(trees: Trees) -> None:
    """A task whose turn comes is cancelled before it has read how its children ended, by the task that had its turn before."""
    begun = trio.Event()
    attempts: list[list[int]] = []

    @trees.handlers.job
    async def child(number: int) -> int:
        if number == 1:
            await begun.wait()
        return number

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> list[int]:
        answers: list[int] = []
        ended = trio.Event()

        async def ask(number: int) -> None:
            async with job.durable_nursery(key=f"block-{number}") as nursery:
                answer = nursery.start_soon(child.options(child_key=str(number)), number)
            answers.append(answer.result)
            if number == 1:
                ended.set()
                await trio.sleep_forever()
            await job.step(note, "won", key="won")
            begun.set()
            # Busy, so that a later attempt hands out the line of the other block as this task goes on.
            while job.attempt == 1 and not ended.is_set():  # noqa: ASYNC110 -- a task that is busy is what is tested
                await trio.sleep(0.01)
            tasks.cancel_scope.cancel()

        async with trio.open_nursery() as tasks:
            tasks.start_soon(ask, 0)
            tasks.start_soon(ask, 1)
        await job.step(note, "after", key="after")
        await job.wait_for_event("go", key="go")
        attempts.append(answers)
        return answers

    found = await end(trees, "order")
    assert (found["state"], attempts) == ("completed", [[0, 1]]), found["error"]


async def test_a_deadline_that_strikes_while_a_block_is_closed_for_an_inner_one_is_the_one_that_is_seen(
    trees: Trees,
) -> None:
    struck = trio.Event()

    @trees.handlers.job
    async def child(job: Job) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with job.cleanup():
                await struck.wait()  # noqa: ASYNC102 -- job.cleanup() is the shield

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> list[str]:
        late: list[str] = []

        async def part(name: str) -> None:
            # Long enough for the child to have begun: else its block is closed at once.
            with job.move_on_after(0.5, key=f"limit-{name}") as limit:
                async with job.durable_nursery(key=f"block-{name}") as nursery:
                    nursery.start_soon(child.options(child_key=name))
            if limit.cancelled_caught:
                late.append(name)
                await trio.sleep_forever()

        async def watch() -> None:
            while not outer.cancel_called:  # noqa: ASYNC110 -- nobody is told when it strikes
                await trio.sleep(0.01)
            struck.set()

        async with trio.open_nursery() as beside:
            with job.move_on_after(1.5) as outer:
                beside.start_soon(watch)
                async with trio.open_nursery() as tasks:
                    tasks.start_soon(part, "a")
                    tasks.start_soon(part, "b")
        first = await job.step(note, ",".join(late), key="late")
        await job.wait_for_event("go", key="go")
        return [first, ",".join(late)]

    assert (await end(trees, "order"))["result"] == ["", ""]


async def test_a_deadline_that_struck_as_the_result_in_it_came_has_cut_nothing_short_in_a_later_attempt_either(
    trees: Trees,
) -> None:
    """Its line comes before that of the result, and did not say so."""

    async def in_spite_of_it() -> None:
        strikes = trio.current_effective_deadline()
        with trio.CancelScope(shield=True):
            await trio.sleep_until(strikes)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> list[str]:
        async with trio.open_nursery() as bar:
            bar.start_soon(draw_a_bar)
            with job.move_on_after(0.1, key="limit") as limit:
                await job.step(in_spite_of_it, key="work")
            first = await job.step(note, f"cut: {limit.cancelled_caught}", key="caught")
            bar.cancel_scope.cancel()
        await job.wait_for_event("go", key="go")
        return [first, f"cut: {limit.cancelled_caught}"]

    assert (await end(trees, "order"))["result"] == ["cut: False"] * 2


async def test_what_is_called_after_two_deadlines_that_struck_around_a_block_has_not_begun_before_either(
    trees: Trees,
) -> None:
    """All in the inner one was cut short already when its line came again, and the clean-up was said to have begun before that:
    the attempt after it kept the line back until the clean-up began, and the block until the line came."""

    async def undo(job: Job) -> None:
        if job.attempt == 2:
            await trees.lose(job.id)

    @trees.handlers.job
    async def child() -> None:
        await trio.sleep_forever()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        async with trio.open_nursery() as bar:
            bar.start_soon(draw_a_bar)
            with job.move_on_after(3600, key="outer"):
                try:
                    with job.move_on_after(3600, key="inner"):
                        async with job.durable_nursery(key="block") as nursery:
                            nursery.start_soon(child)
                            await job.step(note, "started", key="started")
                            if job.attempt == 1:
                                # First: the next attempt may begin as soon as this one is lost.
                                trees.time_passes(job.id)
                                await trees.lose(job.id, due=False)
                            await job.wait_for_event("never", key="never")
                except trio.Cancelled:
                    with job.cleanup():
                        await job.step(undo, job, key="undo")  # noqa: ASYNC102 -- job.cleanup() is the shield
                    raise
            await job.step(note, "after", key="after")
            bar.cancel_scope.cancel()
        await job.wait_for_event("go", key="go")

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        while trees.job(job_id)["state"] != "suspended":
            trees.again()
            await trees.burst(log=False)
    # The block would wait for as long as the lease was proven then.
    with trio.fail_after(15):
        SyncClient(trees.dsn).send_event(job_id, "go")
        await trees.burst(log=False)
    assert (trees.job(job_id)["state"], trees.job(job_id)["attempt"]) == ("completed", 4)


async def test_a_body_that_had_failed_and_does_not_again_is_a_mismatch_beside_a_progress_bar(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for ever for what its failure had led to (one of 60 drawn races of seed 102305)."""
    monkeypatch.setattr(resuming, "_SOON", 0.05)
    bar = PlainAwait()

    @trees.handlers.job
    async def part() -> None: ...

    async def tell() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bar.wait)
                async with job.durable_nursery(key="parts") as parts:
                    parts.start_soon(part)
                    if job.attempt == 1:
                        raise ValueError("the printer is busy")
                    await job.wait_for_event("never")
        except Exception:
            await job.step(tell)  # noqa: ASYNC120 -- as a handler would tell of it
            raise

    found = await trees.ended(trees.enqueue("order"))
    assert (
        "of plain code in its body, and the handler has undone what it did; now the body has not failed"
        in found["error"]
    )
    assert (found["state"], found["attempt"]) == ("dead", 2)
