"""What does not fit a history is told, never silently wrong. Workers in the test's own Trio run."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from pulse_trio import ChildFailed, Discard, Job, ReplayMismatch, StepFailed
from support.trees import Trees  # noqa: TC001 -- the annotations of handlers are read in this module


async def test_what_a_deleted_child_returned_is_not_none(trees: Trees) -> None:
    seen: list[object] = []

    @trees.handlers.job
    async def label() -> int:
        return 42

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            made = nursery.start_soon(label)
        seen.append(made.result)
        raise ConnectionError("away")

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.window.run("DELETE FROM job_archive WHERE kind = 'label'")
    trees.again()
    await trees.burst()
    assert (trees.job(job_id)["state"], seen) == ("dead", [42])
    error = trees.job(job_id)["error"]
    assert "key '#1') was deleted after its block had ended" in error
    assert f"pulse-trio jobs retry {job_id} --afresh" in error


async def test_a_deleted_child_that_its_block_names_as_failed_is_a_failure_again(trees: Trees) -> None:
    seen: list[object] = []

    @trees.handlers.job
    async def label() -> int:
        raise Discard("no paper")

    async def note() -> None: ...

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(label)
        except* ChildFailed as group:
            (failed,) = (leaf for leaf in group.exceptions if isinstance(leaf, ChildFailed))
            seen.append((failed.job.id > job.id, str(failed).partition(") ")[2].partition(":")[0]))
        await job.step(note)
        if job.attempt == 1:
            raise ConnectionError("away")
        return "went on"

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.window.run("DELETE FROM job_archive WHERE kind = 'label'")
    trees.again()
    await trees.burst()
    assert trees.job(job_id)["result"] == "went on"
    assert seen == [(True, "is dead"), (True, "was deleted.")]


async def test_a_child_that_is_deleted_while_its_block_is_open_has_failed(trees: Trees) -> None:
    @trees.handlers.job
    async def label() -> int:
        return 42

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> int:
        async with job.durable_nursery() as nursery:
            made = nursery.start_soon(label)
            await job.wait_for_event("go")
        return made.result

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.window.run("DELETE FROM job_archive WHERE kind = 'label'")
    trees.window.run("SELECT send_event(%s, 'go', 'null')", job_id)
    await trees.burst()
    assert "key '#1') was deleted." in trees.job(job_id)["error"]


async def test_a_sibling_that_was_cancelled_has_no_result(trees: Trees) -> None:
    seen: list[Any] = []

    @trees.handlers.job
    async def fails() -> None:
        raise Discard("broken")

    @trees.handlers.job
    async def waits() -> int:
        await trio.sleep_forever()
        return 42

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> str:
        try:
            async with job.durable_nursery() as nursery:
                sibling = nursery.start_soon(waits)
                nursery.start_soon(fails)
        except* ChildFailed as group:
            seen.append(len(group.exceptions))
        try:
            return f"returned {sibling.result}"
        except ChildFailed as error:
            return str(error).partition(") ")[2]

    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        await trees.burst()
    assert (trees.job(job_id)["result"], seen) == ("was cancelled: sibling", [1])


async def work() -> int:
    return 1


@pytest.fixture
def paid(trees: Trees) -> Trees:
    """The trees, with a table for what transactions of the handlers write."""
    trees.window.run("CREATE TABLE public.paid (what text)")
    return trees


async def test_a_transaction_is_refused_while_its_handler_is_suspended(paid: Trees) -> None:
    @paid.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        try:
            await job.wait_for_event("approved", type=str)
        finally:
            with job.cleanup():
                async with job.transaction(result="paid") as tx:  # noqa: ASYNC102 -- what the test is about
                    await tx.execute("INSERT INTO public.paid VALUES ('order')")  # noqa: ASYNC102 -- what the test is about
        return "not reached"

    job_id = paid.enqueue("order")
    await paid.burst()
    assert (paid.job(job_id)["state"], paid.window.run("SELECT FROM public.paid")) == ("suspended", [])
    paid.window.run("SELECT send_event(%s, 'approved', '\"yes\"')", job_id)
    await paid.burst()
    assert (paid.job(job_id)["result"], len(paid.window.run("SELECT FROM public.paid"))) == ("paid", 1)


@pytest.mark.parametrize("catches", [False, True])
async def test_a_transaction_completes_no_job_whose_history_does_not_fit(paid: Trees, catches: bool) -> None:
    async def other() -> int:
        return 2

    @paid.handlers.job(durable=True)
    async def order(job: Job) -> None:
        if job.attempt == 1:
            await job.step(work)
            raise ConnectionError("away")
        if catches:
            with pytest.raises(ReplayMismatch):
                await job.step(other)
        async with job.transaction() as tx:
            await tx.execute("INSERT INTO public.paid VALUES ('order')")

    job_id = paid.enqueue("order")
    await paid.burst()
    paid.again()
    await paid.burst()
    assert (paid.job(job_id)["state"], paid.window.run("SELECT FROM public.paid")) == ("dead", [])
    now = "calls step other" if catches else "stands in transaction"
    assert f"line 1 is step work (key 1:step), but the handler now {now}" in paid.job(job_id)["error"]


async def test_a_transaction_begins_when_other_tasks_have_used_up_the_history(paid: Trees) -> None:
    called: list[int] = []

    async def note() -> None:
        called.append(1)

    @paid.handlers.job(durable=True)
    async def order(job: Job) -> None:
        over = trio.Event()

        async def other() -> None:
            for n in range(3):
                await job.step(note, key=f"note-{n}")
            over.set()

        job.nursery.start_soon(other)
        if job.attempt == 1:
            await over.wait()
        async with job.transaction() as tx:
            await tx.execute("INSERT INTO public.paid VALUES ('order')")
            if job.attempt == 1:
                raise ConnectionError("away")

    job_id = paid.enqueue("order")
    await paid.burst()
    paid.again()
    await paid.burst()
    assert (paid.job(job_id)["state"], len(called)) == ("completed", 3)
    assert len(paid.window.run("SELECT FROM public.paid")) == 1


async def test_what_a_transaction_rests_on_is_in_the_history_before_it_begins(paid: Trees) -> None:
    async def fails() -> None:
        raise ConnectionError("away")

    @paid.handlers.job(durable=True)
    async def order(job: Job) -> None:
        with pytest.raises(StepFailed):
            await job.step(fails)
        async with job.transaction():
            assert paid.lines(job.id) == [(2, "1:step", "fails")]

    job_id = paid.enqueue("order")
    await paid.burst()
    assert paid.job(job_id)["state"] == "completed"


async def test_a_block_that_is_opened_during_a_transaction_keeps_it_from_completing_the_job(paid: Trees) -> None:
    @paid.handlers.job
    async def child() -> None: ...

    @paid.handlers.job(durable=True)
    async def order(job: Job) -> None:
        begun, opened = trio.Event(), trio.Event()

        async def other() -> None:
            await begun.wait()
            async with job.durable_nursery(key="block") as nursery:
                nursery.start_soon(child.options(child_key="child"))
                opened.set()
                await trio.sleep_forever()

        job.nursery.start_soon(other)
        async with job.transaction() as tx:
            begun.set()
            await opened.wait()
            await tx.execute("INSERT INTO public.paid VALUES ('order')")

    job_id = paid.enqueue("order")
    with trio.fail_after(30):
        await paid.burst()
    assert "is still open" in paid.job(job_id)["error"]
    assert paid.window.run("SELECT FROM public.paid") == []


class Moody:
    """A step that fails when it is called for the first time."""

    def __init__(self) -> None:
        self.calls = 0
        self.failed = trio.Event()

    async def call(self) -> str:
        self.calls += 1
        if self.calls == 1:
            self.failed.set()
            raise ConnectionError("the network, for a moment")
        return "ok"


@pytest.mark.parametrize("ends", ["task", "nursery", "another exception"])
async def test_a_step_that_the_attempt_failed_of_is_called_again_though_another_task_went_on_meanwhile(
    trees: Trees, ends: str
) -> None:
    moody, ticked = Moody(), trio.Event()

    async def tick() -> None: ...

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        async def beats() -> None:
            await job.step(tick, key="tick-1")
            await moody.failed.wait()
            await job.step(tick, key="tick-2")
            ticked.set()

        async def fetch() -> str:
            try:
                return await job.step(moody.call, key="fetch")
            finally:
                with trio.CancelScope(shield=True):
                    await ticked.wait()  # as a connection that is closed

        if ends == "nursery":

            async def fetch_alone() -> None:
                await fetch()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(beats)
                nursery.start_soon(fetch_alone)
            return "ok"
        job.nursery.start_soon(beats)
        try:
            return await fetch()
        except StepFailed as error:
            if ends == "task":
                raise
            raise RuntimeError("gives up") from error

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["attempt"] == 1
    trees.again()
    with trio.fail_after(30):
        await trees.burst()
    assert (trees.job(job_id)["result"], moody.calls) == ("ok", 2)


async def test_a_failed_step_after_which_its_task_went_on_stays_failed(trees: Trees) -> None:
    moody, undone = Moody(), list[int]()

    async def undo() -> None:
        undone.append(1)

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        async def fetch() -> None:
            await job.step(moody.call, key="fetch")

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fetch)
        except* StepFailed:
            await job.step(undo)  # noqa: ASYNC120 -- what the test is about
            raise
        return "not reached"

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.again()
    await trees.burst()
    assert (moody.calls, undone) == (1, [1])
    assert "the network, for a moment" in trees.job(job_id)["error"]


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (99, "1", "line 2 is of kind 99, which there is not"),
        (-1, "1", "line 2 is of kind -1, which there is not"),
        (2, "[1]", "the value of line 2 (key 2:x) is damaged (Expected `str`, got `array`)"),
        (7, "[1]", "the value of line 2 (key 2:x) is damaged (Expected `object`, got `array`)"),
        (7, '{"failed": ["x"]}', "the value of line 2 (key 2:x) is damaged"),
        (7, "[" * 5000 + "]" * 5000, "the value of line 2 (key 2:x) is damaged"),
        (8, "[1]", "the value of line 2 (key 2:x) is damaged"),
        (9, "[1]", "the value of line 2 (key 2:x) is damaged"),
        (9, '{"at": 1}', "the value of line 2 (key 2:x) is damaged"),
        (10, '"abc"', "the value of line 2 (key 2:x) is damaged"),
        (10, "[1]", "the value of line 2 (key 2:x) is damaged"),
    ],
)
async def test_a_line_that_no_version_has_written_is_named(trees: Trees, kind: int, value: str, said: str) -> None:
    """The job was dead of an exception of pulse-trio's own: "99 is not a valid Kind"."""
    job_id = await _damaged(
        trees,
        "INSERT INTO history (job_id, line, kind, key, value, attempt) SELECT %s, n, k, n || ':x', v::text::json, 1"
        # The failure of a block that is the last line is forgotten.
        " FROM (VALUES (2, %s, %s), (3, 5, '1')) damaged(n, k, v)",
        kind,
        value,
    )
    error, state = trees.job(job_id)["error"], trees.job(job_id)["state"]
    assert (state, error.partition(said)[0]) == (
        "dead",
        f"ReplayMismatch: The history of job {job_id} cannot be read: ",
    )
    assert f"pulse-trio jobs retry {job_id} --afresh" in error


async def test_the_name_of_an_event_that_is_missing_is_told(trees: Trees) -> None:
    job_id = await _damaged(trees, "UPDATE durable_job SET events = ARRAY[NULL], suspended = 1 WHERE job_id = %s")
    error = trees.job(job_id)["error"]
    assert error.startswith(
        f"ReplayMismatch: The history of job {job_id} cannot be read: its row of durable_job is damaged"
    )


@pytest.mark.parametrize("value", [r'"\u0000\ud800"', "[" * 5000 + "]" * 5000])
async def test_a_result_that_is_no_text_of_python_is_told(trees: Trees, value: str) -> None:
    job_id = await _damaged(trees, "UPDATE history SET value = %s::text::json WHERE job_id = %s", value, last=True)
    error = trees.job(job_id)["error"]
    assert error.startswith(f"ReplayMismatch: job {job_id}, line 1: the remembered result of step ")
    assert (trees.job(job_id)["state"], f"jobs retry {job_id} --afresh" in error) == ("dead", True)


async def _damaged(trees: Trees, statement: Any, *values: object, last: bool = False) -> int:
    """A job whose first attempt has written a line and failed, and whose second one begins after this statement."""

    async def note() -> int:
        return 1

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(note)
        raise ConnectionError("away")

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    trees.window.run(statement, *((*values, job_id) if last else (job_id, *values)))
    trees.again()
    await trees.burst(log=False)
    return job_id
