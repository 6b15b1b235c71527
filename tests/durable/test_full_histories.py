"""A history that is full: a step that has no room for its line is not called, by no retry either. A clean-up has its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Job, RetryAfter, SyncClient
from pulse_trio.observe import HistoryFilling
from pulse_trio.store import family
from pulse_trio.worker.durable import room

if TYPE_CHECKING:
    from support.trees import Trees

FULL = "A history has at most 3 lines; put loops into children."


@pytest.fixture(autouse=True)
def of_three_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_LINES", 3)


@pytest.mark.parametrize("call", ["step", "transaction_step"])
@pytest.mark.parametrize("answer", ["", "goes on", "cleans up"])
async def test_a_step_without_room_is_not_called_by_no_retry_either(trees: Trees, call: str, answer: str) -> None:
    called: list[str] = []

    async def note() -> None: ...

    async def charge(*_: Any) -> None:
        called.append("charge")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        for _ in range(3):
            await job.step(note)
        try:
            await getattr(job, call)(charge)
        except Exception:
            if not answer:
                raise
            if answer == "cleans up":
                with job.cleanup():
                    await job.step(charge)  # noqa: ASYNC120 -- job.cleanup() is the shield
        await job.step(charge)

    job_id = trees.enqueue("order")
    await trees.burst()
    for _ in range(2):
        assert (trees.job(job_id)["state"], trees.job(job_id)["error"].partition("\n")[0]) == (
            "dead",
            f"BeyondLimit: {FULL}",
        )
        SyncClient(trees.dsn).retry(job_id)
        await trees.burst()
    assert called == []
    assert len(trees.lines(job_id)) == 3


async def test_steps_at_the_same_time_share_the_room(trees: Trees) -> None:
    called: list[int] = []
    all_begun = trio.Event()

    async def charge(number: int) -> None:
        called.append(number)
        if len(called) == 3:
            all_begun.set()
        await all_begun.wait()

    @trees.handlers.job(durable=True)
    async def keyed(job: Job) -> None:
        async def one(number: int) -> None:
            await job.step(charge, number, key=f"{number}")

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(one, number)

    job_id = trees.enqueue("keyed")
    await trees.burst()
    assert trees.job(job_id)["state"] == "dead"
    assert len(called) == 3
    assert FULL in trees.job(job_id)["error"]


@pytest.mark.parametrize("before", [1, 2])
async def test_a_clean_up_has_room_for_its_steps_and_the_mark_that_it_ended_well(trees: Trees, before: int) -> None:
    bank: list[str] = []

    async def note() -> None: ...

    async def refund(number: int) -> None:
        bank.append(f"refund {number}")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        for _ in range(before):
            await job.step(note)
        try:
            await job.wait_for_event("never")
        finally:
            with job.cleanup():
                for number in range(5):
                    await job.step(refund, number)  # noqa: ASYNC102 -- job.cleanup() is the shield

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["state"] == "suspended"
    SyncClient(trees.dsn).cancel(job_id)
    await trees.burst()
    assert trees.job(job_id)["state"] == "cancelled"
    assert bank == [f"refund {number}" for number in range(5)]
    assert trees.window.do(family.compensated([job_id])) == [job_id]


async def test_a_clean_up_that_goes_on_in_a_later_attempt_has_the_room_too(trees: Trees) -> None:
    bank: list[str] = []

    async def note() -> None: ...

    async def refund(number: int) -> None:
        if number == 2 and bank.count("tried") < 1:
            bank.append("tried")
            raise ConnectionError("the bank is down for a moment")
        bank.append(f"refund {number}")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        for _ in range(2):
            await job.step(note)
        try:
            await job.wait_for_event("never")
        finally:
            with job.cleanup():
                for number in range(5):
                    await job.step(refund, number)  # noqa: ASYNC102 -- job.cleanup() is the shield

    job_id = trees.enqueue("order")
    await trees.burst()
    client = SyncClient(trees.dsn)
    client.cancel(job_id)
    await trees.burst()
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == [job_id]
    client.retry(job_id)
    await trees.burst()
    assert bank == ["refund 0", "refund 1", "tried", "refund 2", "refund 3", "refund 4"]
    assert trees.window.do(family.compensated([job_id])) == [job_id]


@pytest.mark.parametrize("lines", ["steps", "events"])
async def test_a_history_that_has_nearly_all_its_lines_is_a_warning_once(
    trees: Trees, lines: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MOST_LINES", 6)
    monkeypatch.setattr(room, "NEARLY_ALL", 4)

    async def note() -> None: ...

    @trees.handlers.job(durable=True, max_attempts=2)
    async def order(job: Job) -> None:
        for _ in range(5):
            await (job.step(note) if lines == "steps" else job.wait_for_event("more"))
        if job.attempt == 1:
            raise RetryAfter(0)

    job_id = trees.enqueue("order")
    for _ in range(5):
        SyncClient(trees.dsn).send_event(job_id, "more")
    await trees.burst()
    assert trees.job(job_id)["state"] == "completed"
    assert [(event.job_id, event.kind, event.lines) for event in trees.events.of(HistoryFilling)] == [
        (job_id, "order", 4)
    ]
