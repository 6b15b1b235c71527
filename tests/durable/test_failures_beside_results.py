"""Steps that fail in a handler of several tasks while results of others come, and deadlines that strike then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Job, StepFailed, SyncClient
from pulse_trio.lines import Kind, Line
from pulse_trio.worker.durable import delivering
from pulse_trio.worker.durable.begun import BEGUN, Begun
from pulse_trio.worker.durable.calls import Call
from pulse_trio.worker.durable.replay import Replay
from support.turns import closing, waits_for_its_turn

if TYPE_CHECKING:
    from support.trees import Trees


async def _nothing() -> None: ...


class Closing:
    """A task of a handler that is cut short and takes its time to close, so that results wait for their turn meanwhile."""

    def __init__(self) -> None:
        self.begins, self.may_end = trio.Event(), trio.Event()

    async def run(self, job: Job) -> None:
        with job.move_on_after(0.02, key="patience"):
            await job.step(closing, self.begins, self.may_end, key="closes")


async def test_steps_that_fail_one_after_the_other_behind_a_result_all_raise(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task of that result was waited for by the one failure, and failed next: each waited for the other, until the lease
    was over."""
    waits, closing = waits_for_its_turn(monkeypatch, "asks"), Closing()
    monkeypatch.setattr(delivering, "_PAUSE", 0.1)  # the second one fails before the first one looks again

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> list[str]:
        failed: list[str] = []

        async def begins() -> None:
            await closing.begins.wait()

        async def fails_too() -> None:
            raise ValueError

        async def fails() -> None:
            await waits.wait()
            closing.may_end.set()
            raise ValueError

        async def asks() -> None:
            await job.step(begins, key="begins")
            try:
                await job.step(fails_too, key="fails too")
            except StepFailed:
                failed.append("asks")

        async def other() -> None:
            try:
                await job.step(fails, key="fails")
            except StepFailed:
                failed.append("other")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(closing.run, job)
            nursery.start_soon(asks)
            nursery.start_soon(other)
        await job.step(_nothing)
        return sorted(failed)

    job_id = trees.enqueue("order")
    with trio.fail_after(10):
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, ["asks", "other"])


async def test_a_result_that_comes_while_a_failure_waits_has_its_line_after_it(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later attempt hands the failure out first, as it was: else what it cuts short would go on there for a while."""
    waits, closing, fails_now = waits_for_its_turn(monkeypatch, "asks"), Closing(), trio.Event()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        async def begins() -> None:
            await closing.begins.wait()

        async def fails() -> None:
            await waits.wait()
            fails_now.set()
            raise ValueError

        async def late() -> None:
            await fails_now.wait()
            closing.may_end.set()

        async def asks() -> None:
            await job.step(begins, key="begins")

        async def other() -> None:
            with pytest.raises(StepFailed):
                await job.step(fails, key="fails")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(closing.run, job)
            nursery.start_soon(asks)
            nursery.start_soon(other)
            nursery.start_soon(lambda: job.step(late, key="late"))
        await job.step(_nothing)

    job_id = trees.enqueue("order")
    with trio.fail_after(10):
        await trees.burst()
    assert trees.job(job_id)["error"] is None
    keys = [key for kind, key, _ in trees.lines(job_id) if kind in (Kind.STEP, Kind.STEP_FAILED)]
    assert keys[:3] == ["begins", "fails", "late"]


async def test_a_scope_that_strikes_as_it_is_opened_does_so_again_whatever_was_on_its_way(trees: Trees) -> None:
    """The line of a result that has not been handed out yet stands before that of the scope, whose task comes to it before: a
    later attempt waited for that task to rest, and it went on in the scope."""
    beyond: list[int] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        priced = trio.Event()

        async def price() -> None:
            priced.set()

        async def at_once() -> None:
            if job.attempt == 1:
                await priced.wait()
            with job.move_on_after(0, key="at once"):
                await trio.lowlevel.checkpoint()
                beyond.append(job.attempt)
            await job.step(_nothing, key="at the end")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: job.step(price, key="price"))
            nursery.start_soon(at_once)
        await job.wait_for_event("go on")
        return "ok"

    job_id = trees.enqueue("order")
    await trees.burst()
    kinds = [kind for kind, _, _ in trees.lines(job_id) if kind in (Kind.STEP, Kind.SCOPE_CANCELLED)]
    assert kinds[:2] == [Kind.STEP, Kind.SCOPE_CANCELLED]
    SyncClient(trees.dsn).send_event(job_id, "go on")
    with trio.fail_after(8):
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"], beyond) == (None, "ok", [])


async def test_a_replay_does_not_wait_for_what_a_deadline_has_cut_short_while_it_drew(trees: Trees) -> None:
    """That had ended before anyone noted that the deadline had struck, and each replay waited ten seconds until it had."""

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        async def draw_bar() -> None:
            while True:  # noqa: ASYNC110 -- a progress bar waits for no event
                await trio.sleep(0.002)

        async def work() -> None:
            async with trio.open_nursery() as bars:
                for _ in range(3):
                    bars.start_soon(draw_bar)
                await job.step(trio.sleep, 3600, key="works")

        with job.move_on_after(0.05):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(work)
        await job.step(_nothing)
        await job.wait_for_event("go on")
        return "ok"

    job_ids = [trees.enqueue("order") for _ in range(5)]
    await trees.burst()
    for job_id in job_ids:
        SyncClient(trees.dsn).send_event(job_id, "go on")
    with trio.fail_after(8):
        await trees.burst()
    assert [(trees.job(job_id)["error"], trees.job(job_id)["result"]) for job_id in job_ids] == [(None, "ok")] * 5


def _line(number: int, kind: Kind, key: str, name: str = "", value: Any = None) -> Line:
    return Line(number, kind, key, name, value)


FAILED = [
    _line(1, Kind.STEP_FAILED, "fails", "fails", '"no"'),
    _line(2, Kind.MOMENT, "1:open", value="1.0"),
    _line(3, Kind.STEP, "hedge", "hedge", "1"),
    _line(4, Kind.MOMENT, "1:taken", value="1.0"),
    _line(5, Kind.STEP, "then", "then", "2"),
    _line(6, Kind.STEP, "last", "last", "3"),
]


def replay_of(lines: list[Line], *waiting: str) -> Replay:
    """One that has handed the failure out, and in which these calls wait."""
    replay = Replay(1, lines)
    failing = Call("step", "fails", "fails")
    replay.begin(failing)
    assert replay.turn() is not None
    replay.taken(failing)
    for key in waiting:
        replay.begin(Call("step", key, key))
    return replay


def test_a_line_that_was_written_while_a_failure_was_on_its_way_may_have_no_call_any_more() -> None:
    replay = replay_of(FAILED, "then")
    assert replay.turn() is None
    assert replay.goes_on_without()
    turn = replay.turn()
    assert turn is not None
    assert turn.line == FAILED[4]


def test_a_call_without_a_line_goes_on_where_all_that_are_left_may_have_none_any_more() -> None:
    """A scope was opened and struck, too late to cut anything short, while the failure was on its way; the refund that came
    then has no line yet."""
    late = _line(5, Kind.SCOPE_CANCELLED, "limit", value='{"late": true}')
    replay = replay_of([*FAILED[:4], late], "refund")
    assert replay.turn() is None
    assert replay.goes_on_without()
    assert replay.turn() is None
    assert replay.goes_on_without()
    turn = replay.turn()
    assert turn is not None
    assert turn.call is not None
    assert (turn.call.key, turn.line) == ("refund", None)


OPENED = [
    *FAILED[:2],
    _line(3, Kind.MOMENT, "limit", "0:job", "100.0"),
    FAILED[3],
    _line(5, Kind.SCOPE_CANCELLED, "limit", value='{"at": ["children"]}'),
]
"""A task opened a scope while the failure was on its way, which cut that task short after it did others."""


def test_a_scope_that_was_opened_while_a_failure_was_on_its_way_may_be_opened_no_more() -> None:
    """Tasks of the failed one had steps under way, and took longer to close than in the attempts that came after."""
    replay = replay_of([*OPENED, FAILED[5]], "last")
    assert replay.turn() is None
    assert replay.goes_on_without()
    turn = replay.turn()
    assert turn is not None
    assert turn.line == FAILED[5]


def test_a_line_that_was_written_before_the_first_task_goes_on_after_a_failure_may_have_no_call_any_more() -> None:
    """The attempt was lost with its worker before one did."""
    event = _line(3, Kind.EVENT, "event", "event", "1")
    replay = replay_of([*FAILED[:2], event], "then")
    assert replay.turn() is None
    assert not replay.goes_on_without()
    replay.left_out.goes_on_after(1)
    assert replay.goes_on_without()
    turn = replay.turn()
    assert turn is not None
    assert turn.call is not None
    assert (turn.call.key, turn.line) == ("then", None)


@pytest.mark.parametrize(
    ("lines", "waiting"),
    [
        ([*OPENED[:2], *OPENED[3:], FAILED[5]], ["last"]),
        (FAILED, ["then", "another"]),
        ([*FAILED[:3], *FAILED[4:]], ["then"]),
        ([FAILED[0], *FAILED[3:]], ["last"]),
        ([FAILED[0], FAILED[1], FAILED[3], FAILED[4], FAILED[5]], ["last"]),
    ],
    ids=[
        "the scope had been opened before it",
        "a call without a line waits",
        "no task has gone on after it",
        "the line is another's",
        "the line came after it",
    ],
)
def test_else_a_line_without_a_call_is_a_mismatch(lines: list[Line], waiting: list[str]) -> None:
    replay = replay_of(lines, *waiting)
    assert replay.turn() is None
    assert not replay.goes_on_without()


@pytest.mark.parametrize("name", ["3", "=third"])
def test_a_call_that_had_begun_is_missing_until_it_begins_again(name: str) -> None:
    lines = [
        _line(1, Kind.STEP, "first"),
        _line(2, Kind.STEP, "second"),
        _line(3, Kind.STEP, "third"),
        _line(4, Kind.MOMENT, BEGUN, name, "1.0"),
        _line(5, Kind.MOMENT, BEGUN, "no number", "1.0"),
        _line(6, Kind.MOMENT, BEGUN, "=no call", "1.0"),
    ]
    begun = Begun(lines)
    assert not begun.is_missing(1, {"none"}.__contains__)
    assert begun.is_missing(2, {"second"}.__contains__)
    assert not begun.is_missing(2, {"third"}.__contains__)
    assert not Begun(lines).is_missing(3, {"none"}.__contains__)


def test_a_scope_that_was_open_or_left_is_missing_until_it_is_so_again() -> None:
    lines = [
        _line(1, Kind.MOMENT, "patience", "0:job", "9.0"),
        _line(2, Kind.STEP, "second"),
        _line(3, Kind.SCOPE_CANCELLED, "patience"),
        _line(4, Kind.MOMENT, BEGUN, "-patience", "2.0"),
        _line(5, Kind.STEP, "fifth"),
    ]
    begun = Begun(lines)
    assert begun.is_missing(2, {"none"}.__contains__)
    begun.opens("patience")
    assert not begun.is_missing(2, {"none"}.__contains__)
    assert not begun.is_missing(3, {"none"}.__contains__)
    assert begun.is_missing(5, {"none"}.__contains__)
    begun.leaves("patience")
    assert not begun.is_missing(5, {"none"}.__contains__)


def test_where_tasks_are_busy_it_is_told_once_that_a_scope_which_has_struck_was_left() -> None:
    begun = Begun()
    begun.leaves("in time")
    begun.leaves("patience")
    begun.left("patience", 4)
    assert begun.left_before(4) == []
    assert begun.left_before(5) == [("patience", 4)]
    assert begun.left_before(6) == []


@pytest.mark.parametrize("fail", [False, True])
async def test_a_scope_that_struck_has_struck_though_its_block_ends_in_time_now(trees: Trees, fail: bool) -> None:
    """What it awaits is quicker than the way of another task to the call that it stood in then: the job was dead."""

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        said, left = list[str](), trio.Event()

        async def asks() -> None:
            if job.attempt > 1:
                await left.wait()
            await job.wait_for_event("answer", key="answer")

        async def looks() -> None:
            scope = (job.fail_after if fail else job.move_on_after)(0.05, key="patience")
            try:
                with scope as patience:
                    if job.attempt == 1:
                        await trio.sleep_forever()
                said.append("struck" if patience.cancelled_caught else "in time")
            except trio.TooSlowError:
                said.append("struck")
            left.set()
            await job.step(_nothing, key="then")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(asks)
            nursery.start_soon(looks)
        return said[0]

    job_id = trees.enqueue("order")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "answer")
    with trio.fail_after(8):
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "struck")
