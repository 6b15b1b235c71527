"""Which failures the next attempt does again, and which bind it: those that the attempt failed of, and all others."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Job, RetryAfter, StepFailed, SyncClient
from pulse_trio.worker.durable import resuming
from pulse_trio.worker.durable.begun import BEGUN
from pulse_trio.worker.durable.quiet import QUIET
from support.turns import PlainAwait

if TYPE_CHECKING:
    from support.trees import Trees


class Moody:
    """Fails when it is called for the first time: as a step, or as the child `pack`."""

    def __init__(self, trees: Trees) -> None:
        self.calls = 0
        self.failed = trio.Event()

        @trees.handlers.job
        async def pack() -> str:
            try:
                return await self.step()
            except ConnectionError:
                raise Discard("out of stock") from None

        self.pack = pack

    async def step(self) -> str:
        self.calls += 1
        if self.calls == 1:
            self.failed.set()
            raise ConnectionError("the network, for a moment")
        return "packed"

    async def block(self, job: Job) -> str:
        """A block with the child."""
        async with job.durable_nursery() as nursery:
            packed = nursery.start_soon(self.pack)
        return packed.result


@pytest.fixture
def moody(trees: Trees) -> Moody:
    return Moody(trees)


async def after(attempts: int, trees: Trees, job_id: int) -> dict[str, Any]:
    """The job after so many attempts more."""
    for _ in range(attempts):
        trees.again()
        with trio.fail_after(60):
            await trees.burst()
    return trees.job(job_id)


async def note() -> None: ...


# What the handler has caught


@pytest.mark.parametrize("fails", [ConnectionError("a log server is away"), RetryAfter(3600)])
async def test_a_block_s_failure_that_the_handler_has_caught_binds_the_next_attempt_though_it_failed_of_something_else(
    trees: Trees, moody: Moody, fails: Exception
) -> None:
    handled: list[int] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        refused = False
        try:
            await moody.block(job)
        except* Exception:
            refused = True
        if not refused:
            return "shipped"
        handled.append(job.attempt)
        if len(handled) == 2:
            raise fails
        await job.wait_for_event("refund it")
        return "refunded"

    job_id = trees.enqueue("order")
    assert (await after(1, trees, job_id))["state"] == "suspended"
    assert (await after(1, trees, job_id))["state"] == "retryable"
    SyncClient(trees.dsn).send_event(job_id, "refund it")
    assert ((await after(1, trees, job_id))["result"], moody.calls) == ("refunded", 1)


async def test_a_block_s_failure_binds_though_nothing_came_after_it_but_the_failure_of_the_attempt(
    trees: Trees, moody: Moody
) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        try:
            await moody.block(job)
        except* Exception:
            refused = True
        else:
            refused = False
        if job.attempt == 1:
            raise ConnectionError("away")
        return f"refused: {refused}"

    job_id = trees.enqueue("order")
    assert ((await after(2, trees, job_id))["result"], moody.calls) == ("refused: True", 1)


@pytest.mark.parametrize("what", ["step", "block"])
async def test_a_failure_after_which_the_handler_has_waited_binds_an_attempt_that_fails_where_it_handles_it(
    trees: Trees, moody: Moody, what: str
) -> None:
    """The wait has no line. The exception of the second attempt came from the remembered one, as far as Python can tell."""
    handled: list[int] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        try:
            if what == "step":
                await job.step(moody.step)
            else:
                await moody.block(job)
        except (StepFailed, ExceptionGroup):
            handled.append(job.attempt)
            if len(handled) == 2:
                raise ConnectionError("a log server is away") from None
            await job.wait_for_event("refund it")  # noqa: ASYNC120 -- what the test is about
            return "refunded"
        return "shipped"

    job_id = trees.enqueue("order")
    assert (await after(1, trees, job_id))["state"] == "suspended"
    assert (await after(1, trees, job_id))["state"] == "retryable"
    trees.window.run("DELETE FROM attempt WHERE job_id = %s", job_id)  # as the retention of its day does
    SyncClient(trees.dsn).send_event(job_id, "refund it")
    assert ((await after(1, trees, job_id))["result"], moody.calls) == ("refunded", 1)


async def test_a_failure_of_the_body_binds_after_a_wait_though_the_attempt_is_on_record_no_more(
    trees: Trees, moody: Moody
) -> None:
    raised: list[int] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        try:
            async with job.durable_nursery():
                if job.attempt != 2:
                    raised.append(job.attempt)
                    raise ConnectionError("for now")
        except* ConnectionError:
            await job.wait_for_event("go")
        return f"raised in {raised}"

    job_id = trees.enqueue("order")
    assert (await after(1, trees, job_id))["state"] == "suspended"
    trees.window.run("DELETE FROM attempt WHERE job_id = %s", job_id)
    found = await after(1, trees, job_id)
    # Never silently the other branch.
    assert (found["result"], "ReplayMismatch" in found["error"]) == (None, True)


# What the attempt failed of


@pytest.mark.parametrize("what", ["step", "block"])
async def test_what_an_attempt_failed_of_is_done_again_though_its_timeout_struck_meanwhile(
    trees: Trees, moody: Moody, what: str
) -> None:
    @trees.handlers.job(durable=True, timeout=2)
    async def order(job: Job) -> str:
        async def beats() -> None:
            await moody.failed.wait()
            await job.step(note, key="tick")

        if what == "step":
            job.nursery.start_soon(beats)
        try:
            return await (job.step(moody.step) if what == "step" else moody.block(job))
        finally:
            if job.attempt == 1:
                await trio.sleep_forever()  # noqa: ASYNC102 -- as a connection that is closed

    job_id = trees.enqueue("order")
    await after(1, trees, job_id)
    assert trees.window.value("SELECT outcome FROM attempt WHERE job_id = %s", job_id) == "timeout"
    assert ((await after(1, trees, job_id))["result"], moody.calls) == ("packed", 2)


@pytest.mark.parametrize("cleans_up", [False, True])
async def test_what_a_task_of_the_job_s_nursery_failed_of_is_done_again(
    trees: Trees, moody: Moody, cleans_up: bool
) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        ticked = trio.Event()

        async def fetch() -> None:
            try:
                await job.step(moody.step, key="fetch")
            finally:
                with trio.CancelScope(shield=True):
                    await ticked.wait()

        job.nursery.start_soon(fetch)
        await moody.failed.wait()
        await job.step(note, key="tick")
        ticked.set()
        try:
            if job.attempt == 1:
                await trio.sleep_forever()
        finally:
            if cleans_up:
                # The handler has not got the exception of that task, and never will.
                with trio.CancelScope(shield=True):
                    await job.step(note, key="log")
        return "ok"

    job_id = trees.enqueue("order")
    assert (await after(1, trees, job_id))["state"] == "retryable"
    assert ((await after(1, trees, job_id))["result"], moody.calls) == ("ok", 2)


async def test_a_task_that_fails_before_it_has_started_fails_its_caller_who_may_handle_that(
    trees: Trees, moody: Moody
) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        ticked = trio.Event()

        async def beats() -> None:
            await moody.failed.wait()
            await job.step(note, key="tick")
            ticked.set()

        async def fetch(*, task_status: trio.TaskStatus[str]) -> None:
            task_status.started(await job.step(moody.step, key="fetch"))

        job.nursery.start_soon(beats)
        packed = "refused"
        with suppress(StepFailed):
            packed = await job.nursery.start(fetch)
        await ticked.wait()
        if job.attempt == 1:
            raise ConnectionError("away")
        return packed

    job_id = trees.enqueue("order")
    assert ((await after(2, trees, job_id))["result"], moody.calls) == ("refused", 1)


# The deadline of what is done again


@pytest.mark.parametrize("fails", ["a step", "plain code", "a task beside it"])
@pytest.mark.usefixtures("replay_stands_still")
async def test_a_deadline_counts_again_where_an_attempt_failed_of_what_has_left_its_scope(
    trees: Trees, fails: str
) -> None:
    """Another task makes a durable call meanwhile, whose line is what the failed attempt leaves."""
    left, ticked, calls = trio.Event(), trio.Event(), list[int]()

    async def fetch(which: str) -> None:
        if fails == which and not calls:
            calls.append(1)
            raise ConnectionError("the network, for a moment")
        await trio.sleep_forever()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        async def beats() -> None:
            await left.wait()
            await job.step(note, key="tick")
            ticked.set()

        job.nursery.start_soon(beats)
        async with trio.open_nursery() as tasks:
            if fails == "a task beside it" and job.attempt == 1:
                tasks.start_soon(fetch, "a task beside it")
            try:
                with job.move_on_after(3600) as patience:
                    await (job.step(fetch, "a step") if fails == "a step" else fetch("plain code"))
            finally:
                left.set()
                with trio.CancelScope(shield=True):
                    await ticked.wait()
        return f"cut short: {patience.cancelled_caught}"

    job_id = trees.enqueue("order")
    assert (await after(1, trees, job_id))["state"] == "retryable"
    trees.window.run("UPDATE history SET value = '0.0' WHERE job_id = %s AND key = '1:scope'", job_id)  # long ago
    with trio.fail_after(20):
        assert (await after(1, trees, job_id))["result"] == "cut short: True"


@pytest.mark.parametrize("where", ["in the task itself", "in the task around it"])
async def test_that_a_scope_has_ended_is_remembered_when_its_exception_was_handled(trees: Trees, where: str) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        async def fetch() -> None:
            with job.move_on_after(3600, key="fetching"):
                raise ConnectionError("the network, for a moment")

        try:
            if where == "in the task itself":
                await fetch()
            else:
                async with trio.open_nursery() as tasks:
                    tasks.start_soon(fetch)
        except* ConnectionError:
            await job.step(note, key="log")
        return "ok"

    job_id = trees.enqueue("order")
    assert (await after(1, trees, job_id))["result"] == "ok"
    assert [key for _, key, _ in trees.lines(job_id)] == ["fetching", "fetching ended", "log"]


# What rests on a failure that the attempt failed of


@pytest.mark.parametrize("waits", ["in a durable call", "in a plain one"])
async def test_a_failure_on_which_lines_of_other_tasks_rest_is_got_again(
    trees: Trees, moody: Moody, waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network fails for a moment, Trio cancels the other task for it, and that one undoes what it has done."""
    undone: list[int] = []

    async def undo() -> None:
        undone.append(1)

    @trees.handlers.job(durable=True, max_attempts=3)
    async def order(job: Job) -> str:
        reserved = trio.Event()

        async def reserve() -> None:
            await job.step(note, key="reserve")
            reserved.set()
            try:
                if waits == "in a plain one":
                    await trio.sleep_forever()
                await job.wait_for_event("go", key="go")
            except trio.Cancelled:
                with trio.CancelScope(shield=True):
                    await job.step(undo, key="undo")
                raise

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reserve)
            await reserved.wait()
            await job.step(moody.step)
        return "ok"

    job_id = trees.enqueue("order")
    assert (await after(1, trees, job_id))["state"] == "retryable"
    if waits == "in a plain one":
        monkeypatch.setattr(resuming, "_LONG", 0.1)
    assert (await after(1, trees, job_id))["state"] == "retryable"
    # From then on it is known.
    monkeypatch.setattr(resuming, "_LONG", 3600)
    found = await after(1, trees, job_id)
    assert (found["state"], moody.calls, undone) == ("dead", 1, [1])
    assert "the network, for a moment" in found["error"]
    assert "ReplayMismatch" not in found["error"]
    marks = [key for kind, key, _ in trees.lines(job_id) if kind == 10]
    assert [one.partition(":")[2] for one in marks] == ["open", "forgotten", "needed"]
    assert len({one.partition(":")[0] for one in marks}) == 1


async def test_a_job_whose_timeout_is_short_gets_a_failure_again_before_it_strikes(trees: Trees, moody: Moody) -> None:
    @trees.handlers.job(durable=True, timeout=4)
    async def order(job: Job) -> str:
        told = trio.Event()

        async def other() -> None:
            await told.wait()
            await job.step(note, key="note")
            told_of.set()

        told_of = trio.Event()
        job.nursery.start_soon(other)
        try:
            return await moody.block(job)
        except ExceptionGroup:
            told.set()
            await told_of.wait()  # noqa: ASYNC120 -- what the test is about
            raise

    job_id = trees.enqueue("order")
    found = await after(2, trees, job_id)
    assert (found["state"], moody.calls) == ("retryable", 1)
    assert "out of stock" in found["error"]
    outcomes = trees.window.run("SELECT outcome FROM attempt WHERE job_id = %s", job_id)
    assert outcomes == [{"outcome": "failed"}] * 2


async def test_a_failure_is_not_read_again_once_an_attempt_has_gone_on_without_it(trees: Trees) -> None:
    read: list[list[int]] = []
    calls: list[int] = []
    failed = trio.Event()

    async def fetch() -> None:
        calls.append(1)
        if len(calls) < 3:
            failed.set()
            raise ConnectionError("away")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        found = trees.window.run(
            "SELECT r.line, r.key FROM job j, resume(j.id, j.attempt, j.locked_by) r WHERE j.id = %s", job.id
        )
        read.append([row["line"] for row in found if row["line"] and row["key"] not in (QUIET, BEGUN)])
        ticked = trio.Event()

        async def beats() -> None:
            await failed.wait()
            for n in range(job.attempt):
                await job.step(note, key=f"tick-{n}")
            ticked.set()

        job.nursery.start_soon(beats)
        if job.attempt == 2:
            await ticked.wait()
        try:
            await job.step(fetch)
        finally:
            with trio.CancelScope(shield=True):
                await ticked.wait()
        return "ok"

    job_id = trees.enqueue("order")
    assert (await after(3, trees, job_id))["result"] == "ok"
    # The failure, its mark, tick-0, forgotten; tick-1, written without it.
    assert [len(lines) for lines in read] == [0, 4, 4]
    assert read[1][1:] == read[2][:3]


# Workers of the version before


def as_of_an_old_worker(trees: Trees, job_id: int, attempt: int) -> None:
    """That attempt was one of a worker that knows no marks."""
    trees.window.run(
        "UPDATE session s SET marks = NULL FROM attempt a WHERE a.job_id = %s AND a.attempt = %s AND s.id = a.session",
        job_id, attempt,
    )  # fmt: skip
    trees.window.run("DELETE FROM history WHERE job_id = %s AND kind = 10 AND attempt = %s", job_id, attempt)


@pytest.mark.parametrize("first", ["old", "new"])
async def test_an_attempt_of_an_old_worker_counts_by_its_row_whoever_came_before_it(
    trees: Trees, moody: Moody, first: str
) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        try:
            return await moody.block(job)
        except ExceptionGroup:
            if first == "old" or job.attempt == 2:
                raise
        raise ConnectionError("away")

    job_id = trees.enqueue("order")
    old = 1 if first == "old" else 2
    await after(old, trees, job_id)
    as_of_an_old_worker(trees, job_id, old)
    assert not trees.window.value("SELECT block_is_over(%s, 1)", job_id)
    assert ((await after(1, trees, job_id))["result"], moody.calls) == ("packed", 2)


async def test_an_attempt_of_a_new_worker_after_an_old_one_counts_by_its_marks(trees: Trees, moody: Moody) -> None:
    handled: list[int] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        try:
            return await moody.block(job)
        except* Exception:
            handled.append(job.attempt)
        if len(handled) == 2:
            raise ConnectionError("away")
        await job.wait_for_event("refund it")
        return "refunded"

    job_id = trees.enqueue("order")
    found = await after(1, trees, job_id)
    assert found["state"] == "suspended"
    for attempt in range(1, found["attempt"] + 1):
        as_of_an_old_worker(trees, job_id, attempt)
    assert (await after(1, trees, job_id))["state"] == "retryable"
    assert trees.window.value("SELECT block_is_over(%s, 1)", job_id)
    SyncClient(trees.dsn).send_event(job_id, "refund it")
    assert ((await after(1, trees, job_id))["result"], moody.calls) == ("refunded", 1)


async def test_plain_code_that_fails_in_a_body_again_does_not_undo_the_end_of_its_block(trees: Trees) -> None:
    children: list[int] = []
    bad = [2, 3]

    @trees.handlers.job
    async def child() -> int:
        children.append(1)
        return 7

    @trees.handlers.job(durable=True, max_attempts=9)
    async def order(job: Job) -> int:
        async with job.durable_nursery() as nursery:
            one = nursery.start_soon(child)
            if job.attempt in bad:
                raise OSError("the network, for a moment")
        if job.attempt == 1:
            raise OSError("the network, for a moment")
        await job.step(_done)
        if job.attempt == 4:
            raise OSError("the network, for a moment")
        return one.result

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst()
            trees.again()
    assert (trees.job(job_id)["state"], trees.job(job_id)["result"], trees.job(job_id)["attempt"]) == (
        "completed",
        7,
        5,
    )
    assert children == [1]
    assert trees.window.value("SELECT count(*) FROM history WHERE key LIKE '%%:forgotten'") == 0


async def _done() -> None: ...


async def test_a_failure_that_is_needed_comes_soon_beside_a_progress_bar_and_says_that_it_is_remembered(
    trees: Trees,
) -> None:
    """A sibling's refund was made because of it. The bar is busy, as it was then, and no reason to wait for ten seconds."""
    called: list[str] = []

    async def act(what: str) -> None:
        called.append(what)
        if what == "print":
            raise OSError("the printer is out of paper")

    @trees.handlers.job(durable=True, max_attempts=2, backoff_base=0.01)
    async def order(job: Job) -> None:
        charged = trio.Event()

        async def pays() -> None:
            await job.step(act, "charge", key="charge")
            charged.set()
            try:
                await job.wait_for_event("settled", key="settled")
            except BaseException:
                with job.cleanup():
                    await job.step(act, "refund", key="refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise

        async with trio.open_nursery() as bars:
            bars.start_soon(PlainAwait().wait)
            async with trio.open_nursery() as tasks:
                tasks.start_soon(pays)
                await charged.wait()
                await job.step(act, "print")

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    trees.again()
    await trees.burst(log=False)
    found = trees.job(job_id)
    assert (found["state"], found["attempt"], called) == ("dead", 2, ["charge", "print", "refund"])
    assert "This failure is remembered" in found["error"]
    (row,) = trees.window.run(
        "SELECT extract(epoch FROM ended_at - started_at)::float8 AS took FROM attempts WHERE job_id = %s AND attempt = 2",
        job_id,
    )
    assert row["took"] < 5
