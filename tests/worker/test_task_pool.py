"""Tasks that are used again: nothing of one job is seen by the next."""

from __future__ import annotations

import math
from collections import deque
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
import trio.lowlevel
import trio.testing

from pulse_trio import Job  # noqa: TC001 -- a handler is annotated with it
from pulse_trio.worker.jobs import running_job as held
from pulse_trio.worker.jobs import task_pool
from pulse_trio.worker.jobs.job_table import Slots
from pulse_trio.worker.jobs.runner import Runner
from pulse_trio.worker.jobs.task_pool import Place, TaskPool

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from contextlib import AbstractContextManager

    from support.stage import Stage

number: ContextVar[int] = ContextVar("number", default=0)


class Run(Runner):
    """A runner whose jobs are whatever stands for claims here, and which runs them by a function."""

    def __init__(self, run: Callable[[Any, Place | None], Awaitable[object]]) -> None:
        self.due: deque[Any] = deque()
        self.running, self.slots = 0, Slots(1)
        self._jobs = cast("Any", self)
        self._pool = TaskPool(self)
        self._run = run

    @property
    def startable(self) -> int:
        return len(self.due)

    async def run(self, job: Any, place: Any = None) -> Any:
        await self._run(job, place)

    def begin(self, nursery: trio.Nursery, *claims: object) -> None:
        self._pool.open(nursery, self)
        self.due.extend(claims)
        self._pool.send()

    def close(self) -> None:
        self._pool.close()

    def take(self, place: Place) -> object:
        return self._take(place)


async def test_context_variables_of_a_job_end_with_it(stage: Stage) -> None:
    seen: list[int] = []
    tasks: set[trio.lowlevel.Task] = set()

    @stage.handlers.job
    async def count() -> None:
        tasks.add(trio.lowlevel.current_task())
        seen.append(number.get())
        number.set(number.get() + 1)
        await trio.lowlevel.checkpoint()
        seen.append(number.get())

    for _ in range(20):
        stage.enqueue("count")
    await stage.burst(concurrency=2)
    assert seen == [0, 1] * 20 or sorted(seen) == [0] * 20 + [1] * 20
    assert len(tasks) <= 4


async def test_context_variables_of_a_job_that_never_waits_end_with_it(stage: Stage) -> None:
    seen: list[int] = []

    @stage.handlers.job
    async def count() -> None:
        seen.append(number.get())
        number.set(number.get() + 1)

    for _ in range(20):
        stage.enqueue("count")
    await stage.burst(concurrency=20)
    assert seen == [0] * 20


@pytest.mark.parametrize("way", ["as it is", "where Python keeps the variables elsewhere"])
async def test_an_equal_value_that_a_job_sets_is_not_seen_by_the_next(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A list that is equal to the one before is another one all the same: the next job would share it."""
    if way != "as it is":
        monkeypatch.setattr(task_pool, "_referents", task_pool._unknown)
    state: ContextVar[list[str]] = ContextVar("state")
    state.set(first := [])
    seen: list[list[str]] = []

    @stage.handlers.job
    async def count(sets: bool) -> None:
        seen.append(state.get())
        if sets:
            state.set([])

    for n in range(20):
        stage.enqueue("count", sets=n % 3 == 0)
    await stage.burst(concurrency=20)
    assert [each is first for each in seen] == [True] * 20


def test_python_tells_whether_a_context_has_changed() -> None:
    """Else each job costs 0.2 us more, and nothing is wrong: look where this Python keeps a context's variables."""
    assert task_pool._referents is not task_pool._unknown


async def test_the_starters_context_is_seen_by_every_job() -> None:
    seen: list[int] = []

    async def run(_claim: object, _place: Place | None) -> None:
        seen.append(number.get())
        number.set(-1)

    places = Run(run)
    async with trio.open_nursery() as nursery:
        for value in (1, 2, 3):
            number.set(value)
            places.begin(nursery, object())
            await trio.testing.wait_all_tasks_blocked()
        places.close()
    assert seen == [1, 2, 3]


async def test_a_place_that_waits_goes_when_closed_and_one_that_runs_goes_with_its_job() -> None:
    free = trio.Event()

    async def run(claim: object, _place: Place | None) -> None:
        if claim == "long":
            await free.wait()

    places = Run(run)
    async with trio.open_nursery() as nursery:
        for claim in ("long", "short", "long"):
            places.begin(nursery, claim)
        await trio.testing.wait_all_tasks_blocked()
        waiting = len(nursery.child_tasks)
        places.close()
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 2 < waiting
        free.set()


async def test_a_cancelled_place_is_not_used_again() -> None:
    async def run(_claim: object, _place: Place | None) -> None:
        pass

    places = Run(run)
    async with trio.open_nursery() as nursery:
        places.begin(nursery, object())
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    places.close()


async def test_many_jobs_at_once_do_not_all_stay_as_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulse_trio.worker.jobs.task_pool._PLACES", 3)
    free = trio.Event()
    ran: list[object] = []

    async def run(claim: object, _place: Place | None) -> None:
        ran.append(claim)
        await free.wait()

    places = Run(run)
    async with trio.open_nursery() as nursery:
        places.begin(nursery, *range(10))
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(ran) == list(range(10))  # type: ignore[type-var]
        free.set()
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 3
        places.close()


async def test_what_a_job_raises_past_its_runner_ends_the_place() -> None:
    async def run(_claim: object, _place: Place | None) -> None:
        raise KeyError

    places = Run(run)
    with pytest.RaisesGroup(KeyError):
        async with trio.open_nursery() as nursery:
            places.begin(nursery, object())
    places.close()


async def test_jobs_that_end_at_once_run_in_order_in_few_tasks_and_let_others_have_their_turn() -> None:
    ran: list[object] = []
    tasks: set[trio.lowlevel.Task] = set()
    turns: list[int] = []

    async def run(claim: object, place: Place | None) -> None:
        assert place is not None
        tasks.add(trio.lowlevel.current_task())
        ran.append(claim)
        while place.at_hand():
            ran.append(places.take(place))

    async def other() -> None:
        while len(ran) < 500:
            await trio.lowlevel.checkpoint()
            turns.append(len(ran))

    places = Run(run)
    async with trio.open_nursery() as nursery:
        places.begin(nursery, *range(500))
        await other()
        places.close()
    assert ran == list(range(500))
    assert len(tasks) <= 4
    # Between two turns of another task no place has run more than its row, and two places at most were there.
    assert max(b - a for a, b in pairwise(turns)) <= 2 * 32


def of_jobs_that_wait() -> tuple[Run, list[int]]:
    """A pool of jobs that never end, and which of them have begun."""
    begun: list[int] = []

    async def run(claim: int, _place: Place | None) -> None:
        begun.append(claim)
        await trio.sleep_forever()

    return Run(run), begun


async def test_jobs_that_wait_all_begin_within_a_few_turns() -> None:
    places, begun = of_jobs_that_wait()
    async with trio.open_nursery() as nursery:
        places.begin(nursery, *range(300))
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        assert len(begun) == 300
        nursery.cancel_scope.cancel()


async def test_jobs_that_wait_for_a_turn_take_turns_in_few_tasks() -> None:
    tasks: set[trio.lowlevel.Task] = set()
    ran: list[int] = []

    async def run(claim: int, place: Place | None) -> None:
        assert place is not None
        tasks.add(trio.lowlevel.current_task())
        while True:
            await trio.lowlevel.checkpoint()
            ran.append(claim)
            if not place.at_hand():
                return
            claim = cast("int", places.take(place))

    places = Run(run)
    async with trio.open_nursery() as nursery:
        for batch in range(5):
            places.begin(nursery, *range(250 * batch, 250 * (batch + 1)))
            while len(ran) < 250 * (batch + 1):
                await trio.lowlevel.checkpoint()
        places.close()
    assert sorted(ran) == list(range(1250))
    # With a task for each job of a batch they were 240.
    assert len(tasks) <= 160


async def test_what_is_due_begins_even_if_a_job_never_gives_up_its_task() -> None:
    """And if the worker is cancelled meanwhile: each job must be run or released by somebody."""
    places, begun = of_jobs_that_wait()
    async with trio.open_nursery() as nursery:
        places.begin(nursery, *range(50))
        nursery.cancel_scope.cancel()
    assert sorted(begun) == list(range(50))


# A nursery that the next job takes over


async def nurseries(stage: Stage, jobs: int = 2) -> list[trio.Nursery]:
    """Runs `jobs` jobs of the kind `work`, at once, and says in which nursery each probe of the kind `probe` was."""
    seen: list[trio.Nursery] = []

    @stage.handlers.job
    async def probe() -> None:
        seen.append(trio.lowlevel.current_task().child_nurseries[-1])
        assert not seen[-1].child_tasks
        assert not seen[-1].cancel_scope.cancel_called
        assert math.isfinite(trio.current_effective_deadline())

    for _ in range(jobs):
        stage.enqueue("probe")
        stage.enqueue("work")
    stage.enqueue("probe")
    await stage.burst(concurrency=20)
    return seen


async def test_a_job_that_leaves_nothing_leaves_its_nursery_to_the_next(stage: Stage) -> None:
    @stage.handlers.job
    async def work() -> None:
        pass

    seen = await nurseries(stage)
    assert seen[0] is seen[1] is seen[2]


async def test_with_a_trio_that_keeps_its_scopes_elsewhere_every_job_gets_a_new_nursery(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    @stage.handlers.job
    async def work() -> None:
        pass

    monkeypatch.setattr(held, "innermost_scope", lambda owner: owner)  # what it gives where the attribute is missing
    seen = await nurseries(stage)
    assert len({id(nursery) for nursery in seen}) == len(seen) == 3


async def test_nurseries_of_jobs_that_run_at_a_time_are_each_their_own(stage: Stage) -> None:
    seen: list[trio.Nursery] = []

    @stage.handlers.job
    async def work() -> None:
        seen.append(trio.lowlevel.current_task().child_nurseries[-1])
        await trio.sleep(1)

    for _ in range(20):
        stage.enqueue("work")
    await stage.burst(concurrency=10)
    assert len(set(seen[:10])) == len(set(seen[10:])) == 10


@pytest.mark.parametrize("child", [trio.lowlevel.checkpoint, partial(trio.sleep, 0.5)])
async def test_a_job_whose_children_have_ended_leaves_its_nursery_to_the_next(
    child: Callable[[], Awaitable[None]], stage: Stage
) -> None:
    seen: list[trio.Nursery] = []
    ended: list[int] = []

    @stage.handlers.job
    async def work(job: Job) -> None:
        async def run() -> None:
            await child()
            ended.append(job.id)

        assert len(ended) % 3 == 0  # the last job's children have ended
        seen.append(trio.lowlevel.current_task().child_nurseries[-1])
        for _ in range(3):
            job.nursery.start_soon(run)

    ids = [stage.enqueue("work") for _ in range(3)]
    await stage.burst(concurrency=1)
    assert seen[0] is seen[1] is seen[2]
    assert ended == [job_id for job_id in ids for _ in range(3)]
    assert stage.outcomes() == ["completed"] * 3


async def test_a_child_that_fails_after_its_handler_has_returned_fails_its_job_and_no_other(stage: Stage) -> None:
    @stage.handlers.job
    async def work(job: Job) -> None:
        async def fail() -> None:
            await trio.sleep(0.5)
            raise ValueError("of a child")

        job.nursery.start_soon(trio.sleep, 1)
        job.nursery.start_soon(fail)

    jobs = [stage.database.jobs[stage.enqueue("work", max_attempts=1)] for _ in range(2)]
    await stage.burst(concurrency=1)
    assert [(job.state, "ValueError: of a child" in str(job.error)) for job in jobs] == [("dead", True)] * 2


async def test_a_job_whose_timeout_strikes_while_its_children_run_is_cut_short_and_no_other(stage: Stage) -> None:
    cleaned: list[float] = []

    @stage.handlers.job
    async def work(job: Job) -> None:
        async def clean_up() -> None:
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(1)
                    cleaned.append(trio.current_time())

        job.nursery.start_soon(clean_up)

    @stage.handlers.job
    async def noop() -> None:
        assert cleaned == [trio.current_time()]

    late = stage.database.jobs[stage.enqueue("work", timeout=1, max_attempts=1)]
    other = stage.database.jobs[stage.enqueue("noop")]
    await stage.burst(concurrency=1)
    assert "timeout" in (late.error or "").lower()
    assert (late.state, other.state) == ("dead", "completed")


async def test_children_that_wait_for_a_nursery_that_the_handler_left_open_end_with_it(stage: Stage) -> None:
    @stage.handlers.job
    async def work(job: Job) -> None:
        gone = trio.Event()

        async def inner() -> None:
            try:
                await trio.sleep_forever()
            finally:
                gone.set()

        await trio.open_nursery().__aenter__()
        trio.lowlevel.current_task().child_nurseries[-1].start_soon(inner)
        job.nursery.start_soon(gone.wait)
        await trio.lowlevel.checkpoint()

    job = stage.database.jobs[stage.enqueue("work", max_attempts=1)]
    with trio.fail_after(5):
        await stage.burst(concurrency=1)
    assert job.state == "dead"


async def test_a_job_that_fails_takes_its_nursery_with_it(stage: Stage) -> None:
    @stage.handlers.job(max_attempts=1)
    async def work() -> None:
        raise ValueError

    seen = await nurseries(stage)
    assert len(set(seen)) == 3


async def test_who_has_seen_its_nursery_takes_it_along(stage: Stage) -> None:
    """It may keep it, and cancel it when it has ended."""
    kept: list[trio.CancelScope] = []

    @stage.handlers.job
    async def work(job: Job) -> None:
        kept.append(job.nursery.cancel_scope)

    @stage.handlers.job
    async def later() -> None:
        for scope in kept:
            scope.cancel()
        await trio.sleep(1)

    for kind in ("work", "later", "work", "later"):
        stage.enqueue(kind)
    await stage.burst(concurrency=8)
    assert stage.outcomes() == ["completed"] * 4


async def test_a_scope_that_a_handler_left_open_fails_its_job_and_no_other(stage: Stage) -> None:
    left: list[trio.CancelScope] = []

    @stage.handlers.job(max_attempts=1)
    async def work() -> None:
        left.append(trio.CancelScope())
        left[-1].__enter__()

    seen = await nurseries(stage)
    assert len(set(seen)) == 3


def opened(what: str, job: Job) -> AbstractContextManager[object]:
    return trio.CancelScope() if what == "a scope" else job.cleanup()


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("what", ["a scope", "a clean-up"])
async def test_a_scope_that_another_task_closed_fails_its_job_and_no_other(
    what: str, concurrency: int, stage: Stage
) -> None:
    """Trio ends the nursery in which such a task was started, and that was the worker's."""

    @stage.handlers.job(max_attempts=1)
    async def work(job: Job) -> None:
        block = opened(what, job)
        block.__enter__()

        async def closes() -> None:
            block.__exit__(None, None, None)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(closes)

    @stage.handlers.job
    async def beside() -> None:
        await trio.sleep(1)  # on the stage's clock: it still runs when the others have failed

    jobs = [stage.enqueue(kind, max_attempts=1) for kind in ("beside", "work") * 4]
    await stage.burst(concurrency=concurrency)
    assert [stage.database.state(job_id) for job_id in jobs] == ["completed", "dead"] * 4
    errors = [stage.database.jobs[job_id].error or "" for job_id in jobs[1::2]]
    assert all("Cancel scope stack corrupted" in error for error in errors)


@pytest.mark.parametrize("how", ["returns", "raises", "is cancelled"])
async def test_a_nursery_that_a_handler_left_open_fails_its_job_and_no_other(how: str, stage: Stage) -> None:
    kept: list[AsyncGenerator[None]] = []
    cancelled: list[str] = []

    async def child() -> None:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.append(how)

    async def generator() -> AsyncGenerator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
            yield  # noqa: ASYNC101 -- what is tried

    @stage.handlers.job(max_attempts=1)
    async def work() -> None:
        kept.append(generator())
        await anext(kept[-1])
        if how == "raises":
            raise ValueError(how)
        if how == "is cancelled":
            await trio.sleep_forever()

    @stage.handlers.job
    async def later(seconds: float) -> None:
        await trio.sleep(seconds)

    broken = [stage.enqueue("work", timeout=2, max_attempts=1) for _ in range(3)]
    async with stage.working(concurrency=3):
        await trio.sleep(3)
        whole = [stage.enqueue("later", seconds=seconds) for seconds in (0, 0, 1, 1, 20, 25)]
        await trio.sleep(5)
        # What nobody finished is finished by whoever finds it: that is another task, and breaks that task alone.
        for left in kept:
            with pytest.raises((AssertionError, IndexError, RuntimeError)):
                await left.aclose()
        await trio.sleep(60)
    assert [stage.database.state(job_id) for job_id in broken] == ["dead"] * 3
    assert [stage.database.state(job_id) for job_id in whole] == ["completed"] * 6
    assert [stage.database.jobs[job_id].attempt for job_id in whole] == [1] * 6
    assert cancelled == [how] * 3


async def test_whoever_waits_for_a_lock_that_a_job_left_locked_is_told(stage: Stage) -> None:
    lock = trio.Lock()

    @stage.handlers.job
    async def forgetful() -> None:
        await lock.acquire()

    @stage.handlers.job(max_attempts=1)
    async def waiting() -> None:
        await lock.acquire()

    stage.enqueue("forgetful")
    waits = stage.enqueue("waiting", max_attempts=1)
    async with stage.working(concurrency=1):
        await trio.sleep(5)
        assert stage.database.state(waits) == "dead"
    assert "BrokenResourceError" in (stage.database.jobs[waits].error or "")


@pytest.mark.parametrize("comparable", [False, True])
async def test_context_variables_are_compared_by_identity(comparable: bool, stage: Stage) -> None:
    class Value:
        def __eq__(self, other: object) -> bool:
            if not comparable:
                raise TypeError("ask each of my elements")
            return True

        __hash__ = object.__hash__

    variable: ContextVar[object] = ContextVar("variable")
    first = Value()
    seen: list[object] = []

    @stage.handlers.job
    async def sets() -> None:
        seen.append(variable.get())
        variable.set(Value())

    variable.set(first)
    for _ in range(5):
        stage.enqueue("sets")
    await stage.burst(concurrency=5)
    assert stage.outcomes() == ["completed"] * 5
    assert all(value is first for value in seen)


async def test_a_nursery_whose_deadline_passed_while_nobody_used_it_is_given_up(stage: Stage) -> None:
    seen: list[trio.Nursery] = []

    @stage.handlers.job
    async def probe() -> None:
        seen.append(trio.lowlevel.current_task().child_nurseries[-1])
        await trio.lowlevel.checkpoint()

    async with stage.working(concurrency=1, lease=30):
        for _ in range(2):
            stage.enqueue("probe")
            await trio.sleep(100)
    assert stage.outcomes() == ["completed"] * 2
    assert seen[0] is not seen[1]
