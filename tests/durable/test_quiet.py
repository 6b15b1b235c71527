"""A task that had ended before something happened to the others has ended in a later attempt too, before that happens again: no
line tells of its end, so the replay waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Job, StepFailed, SyncClient
from pulse_trio.worker.durable import quiet

if TYPE_CHECKING:
    from pulse_trio.durable_calls import DurableScope
    from support.trees import Trees

ENDS = ["a scope that struck", "a scope that it cut", "two scopes", "a plain await", "a failure that it caught"]


class Trip:
    """A trip whose hotel is booked in a task, which undoes it when it is cut. The task ends before `happens`."""

    def __init__(self, trees: Trees, ends: str, happens: str) -> None:
        self.client = SyncClient(trees.dsn)
        self.trees = trees
        self.calls: list[str] = []
        settled = trio.Event()

        async def book() -> None:
            self.calls.append("book")

        async def unbook() -> None:
            self.calls.append("unbook")

        async def label() -> None:
            self.calls.append("label")
            raise ConnectionError("no printer")

        async def when_settled() -> None:
            self.calls.append("car")
            await settled.wait()
            if happens == "a step fails":
                raise LookupError("no car")

        async def note() -> None:
            self.calls.append("note")

        async def hotel(job: Job) -> None:
            await job.step(book, key="hotel")
            try:
                match ends:
                    case "a plain await":
                        await trio.sleep(0.05)
                    case "a failure that it caught":
                        with pytest.raises(StepFailed):
                            await job.step(label, key="label")
                    case _:
                        for number in range(2 if ends == "two scopes" else 1):
                            with job.move_on_after(0.01, key=f"wish {number}") as wish:
                                if ends == "a scope that it cut":
                                    wish.cancel()
                                await job.wait_for_event("sea", key=f"sea {number}")
            except BaseException:
                with job.cleanup():
                    await job.step(unbook, key="unbook")  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise
            settled.set()

        @trees.handlers.job(durable=True, suspend_after=0)
        async def trip(job: Job) -> str:
            said = "all"
            patience = 3600 if happens == "a deadline passes" else 10**6
            try:
                with job.move_on_after(patience) as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(hotel, job)
                        await job.step(when_settled)
                        if happens == "a nursery is cancelled":
                            nursery.cancel_scope.cancel()
                        elif happens != "a step fails":
                            await job.wait_for_event("go")
                        if happens == "an event comes":
                            nursery.cancel_scope.cancel()
            except* StepFailed:
                said = "no car"
            await job.step(note)
            await job.wait_for_event("go on")
            return f"{said}, {scope.cancelled_caught}"

        self.id = trees.enqueue("trip")

    async def goes_on(self) -> None:
        with trio.fail_after(30):
            await self.trees.burst()


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize(
    "happens", ["a step fails", "a nursery is cancelled", "an event comes", "a deadline passes", "the job is cancelled"]
)
async def test_a_task_that_had_ended_ends_before_that_happens_again(trees: Trees, ends: str, happens: str) -> None:
    trip = Trip(trees, ends, happens)
    await trip.goes_on()
    match happens:
        case "an event comes":
            trip.client.send_event(trip.id, "go")
        case "a deadline passes":
            trees.time_passes(trip.id)
        case "the job is cancelled":
            trip.client.cancel(trip.id)
        case _:
            pass
    await trip.goes_on()
    if happens != "the job is cancelled":
        trip.client.send_event(trip.id, "go on")
        await trip.goes_on()
    job = trees.job(trip.id)
    assert "unbook" not in trip.calls, job["error"]
    assert len(trip.calls) == len(set(trip.calls))
    if happens == "the job is cancelled":
        assert job["state"] == "cancelled"
    else:
        said = "no car" if happens == "a step fails" else "all"
        assert (job["error"], job["result"]) == (None, f"{said}, {happens == 'a deadline passes'}")


async def test_a_task_that_was_on_its_way_is_cut_again(trees: Trees) -> None:
    """In a plain await when the failure came: nobody waits for its end, and it undoes the same again."""
    calls: list[str] = []
    on_its_way = trio.Event()

    async def book() -> None:
        calls.append("book")

    async def unbook() -> None:
        calls.append("unbook")

    async def car() -> None:
        calls.append("car")
        await on_its_way.wait()
        raise LookupError("no car")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def trip(job: Job) -> str:
        async def hotel() -> None:
            await job.step(book, key="hotel")
            try:
                on_its_way.set()
                await trio.sleep_forever()
            except BaseException:
                with job.cleanup():
                    await job.step(unbook, key="unbook")  # noqa: ASYNC102 -- the same
                raise

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hotel)
                await job.step(car)
        except* StepFailed:
            pass
        await job.wait_for_event("go on")
        return "no car"

    job_id = trees.enqueue("trip")
    with trio.fail_after(30):
        await trees.burst()
        SyncClient(trees.dsn).send_event(job_id, "go on")
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "no car")
    assert calls == ["car", "book", "unbook"] or calls == ["book", "car", "unbook"]


async def test_a_task_whose_plain_await_lasts_longer_now_is_waited_for_no_longer_than_said(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiet, "_LONGEST", 0.2)
    ended = trio.Event()

    async def step() -> None:
        await ended.wait()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        async def look() -> None:
            if job.attempt > 1:
                await trio.sleep_forever()
            ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await job.step(step)
            await job.wait_for_event("go on")
            nursery.cancel_scope.cancel()
        return "ok"

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst()
        SyncClient(trees.dsn).send_event(job_id, "go on")
        await trees.burst()
    assert trees.job(job_id)["result"] == "ok"


async def test_a_handler_of_one_task_is_told_nothing_and_one_of_several_only_changes(trees: Trees) -> None:
    async def step() -> None: ...

    async def plain(job: Job) -> None:
        for _ in range(3):
            await job.step(step)

    @trees.handlers.job(durable=True)
    async def alone(job: Job) -> None:
        await plain(job)

    @trees.handlers.job(durable=True)
    async def beside_another(job: Job) -> None:
        job.nursery.start_soon(trio.sleep_forever)
        await plain(job)
        job.nursery.cancel_scope.cancel()

    @trees.handlers.job(durable=True)
    async def in_turn(job: Job) -> None:
        async with trio.open_nursery() as nursery:
            await plain(job)
            nursery.start_soon(trio.sleep_forever)
            await plain(job)
            nursery.cancel_scope.cancel()

    ids = {kind: trees.enqueue(kind) for kind in ("alone", "beside_another", "in_turn")}
    await trees.burst()
    told = {
        kind: trees.window.run(
            "SELECT line, value FROM history WHERE job_id = %s AND key = %s ORDER BY line", job_id, quiet.QUIET
        )
        for kind, job_id in ids.items()
    }
    assert told == {
        "alone": [],
        "beside_another": [{"line": 1, "value": 2.0}],
        "in_turn": [{"line": 1, "value": 1.0}, {"line": 6, "value": 2.0}],
    }


@pytest.mark.parametrize("first", ["the scope", "the failure"])
async def test_a_scope_that_strikes_as_the_failure_of_another_task_comes_does_so_again(
    trees: Trees, first: str
) -> None:
    calls: list[str] = []
    patience: list[DurableScope] = []
    stands = trio.Event()

    async def undo(what: str) -> None:
        calls.append(what)
        # In its clean-up, at the latest, the other one strikes too.
        patience[0].cancel()

    async def car() -> None:
        await stands.wait()
        if first == "the scope":
            patience[0].cancel()
        raise LookupError("no car")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def trip(job: Job) -> str:
        async def hotel() -> None:
            with job.move_on_after(3600, key="patience") as scope:
                patience[:] = [scope]
                try:
                    stands.set()
                    await job.wait_for_event("sea", key="sea")
                except BaseException:
                    with job.cleanup():
                        await job.step(undo, "hotel", key="undo hotel")  # noqa: ASYNC102 -- the same
                    raise

        async def other() -> None:
            try:
                await trio.sleep_forever()
            except BaseException:
                with job.cleanup():
                    await job.step(undo, "other", key="undo other")  # noqa: ASYNC102 -- the same
                raise

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hotel)
                nursery.start_soon(other)
                await job.step(car)
        except* StepFailed:
            await job.wait_for_event("go on")
        return "no car"

    for _ in range(5):
        calls.clear()
        job_id = trees.enqueue("trip")
        with trio.fail_after(30):
            await trees.burst()
            SyncClient(trees.dsn).send_event(job_id, "go on")
            await trees.burst()
        assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "no car")
        assert sorted(calls) == ["hotel", "other"]


@pytest.mark.parametrize("ends", ["the worker is stopped", "plain code fails"])
async def test_what_was_busy_at_the_last_line_of_an_attempt_is_remembered_however_the_attempt_ends(
    trees: Trees, ends: str
) -> None:
    """That it was said with the next line left a line that came as one task more was busy: the next attempt waited for it to
    rest, which draws a progress bar."""
    at_its_end = trio.Event()

    async def step() -> None: ...

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> int:
        async with trio.open_nursery() as bars:
            bars.start_soon(trio.sleep_forever)
            await job.step(step, key="first")
            bars.start_soon(trio.sleep_forever)
            await job.step(step, key="second")
            if job.attempt == 1:
                at_its_end.set()
                if ends == "plain code fails":
                    raise OSError("no stock")
                await trio.sleep_forever()
            bars.cancel_scope.cancel()
        return job.attempt

    job_id, worker = trees.enqueue("order"), trees.worker()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            await at_its_end.wait()
            worker.stop_now()
        trees.again()
        await trees.burst()
    assert trees.job(job_id)["result"] == 2
