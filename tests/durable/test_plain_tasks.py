"""A task of the handler that makes no durable call, beside others that do: it asks a cache, or draws a progress bar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Job, SyncClient
from pulse_trio.worker.durable.replay import Replay

if TYPE_CHECKING:
    from support.trees import Trees

JOBS = 8
"""Whether its plain await ends before or after a look of the replay is a matter of chance."""


@pytest.mark.parametrize("plain", [0.05, 0.0, None])
async def test_a_deadline_strikes_again_in_a_later_attempt_whenever_that_task_ends(
    trees: Trees, plain: float | None
) -> None:
    """The replay waited until it was as quiet as before. If a look found all tasks standing still in between, the job was
    dead. `plain`: its seconds; None: until the others have ended."""

    async def charge() -> None:
        await trio.sleep_forever()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        paid = ""

        async def pays() -> None:
            nonlocal paid
            with job.move_on_after(0.05, key="patience") as patience:
                await job.step(charge, key="charge")
            if patience.cancelled_caught:
                paid = await job.step(_invoice, key="invoice")

        async def approved() -> None:
            await job.wait_for_event("approved", key="approved")

        async with trio.open_nursery() as outer:
            outer.start_soon(trio.sleep, 3600 if plain is None else plain)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pays)
                nursery.start_soon(approved)
            outer.cancel_scope.cancel()
        await job.wait_for_event("go on")
        return paid

    ids, client = [trees.enqueue("order") for _ in range(JOBS)], SyncClient(trees.dsn)
    with trio.fail_after(60):
        for name in ("approved", "go on"):
            if plain is None and name == "approved":
                # What is in a plain await keeps the handler from being suspended.
                for job_id in ids:
                    client.send_event(job_id, name)
                continue
            await trees.burst()
            for job_id in ids:
                client.send_event(job_id, name)
        await trees.burst()
    assert [(trees.job(job_id)["error"], trees.job(job_id)["result"]) for job_id in ids] == [(None, "invoice")] * JOBS


@pytest.mark.parametrize("fails", [False, True], ids=["move_on_after", "fail_after"])
async def test_deadlines_that_passed_between_two_attempts_strike_in_the_same_order_again(
    trees: Trees, *, fails: bool
) -> None:
    """Each task comes to its scope as soon as its settings are read, and that takes another time in each attempt."""

    async def tool() -> None:
        await trio.sleep_forever()

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=9)
    async def agent(job: Job) -> list[str]:
        answers: list[str] = []
        deadline = job.fail_after if fails else job.move_on_after

        async def asks(number: int) -> None:
            await trio.sleep(0.003 * ((number * 7 + job.attempt * 3 + job.id) % 5))
            try:
                with deadline(0.1, key=f"deadline {number}") as patience:
                    await job.step(tool, key=f"tool {number}")
            except trio.TooSlowError:
                pass
            if patience.cancelled_caught:
                answers.append(await job.step(_invoice, key=f"without {number}"))

        async def fails_once() -> None:
            if job.attempt == 1:
                await trio.sleep(0.05)
                raise OSError("down")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails_once)
            for number in range(4):
                nursery.start_soon(asks, number)
        await job.wait_for_event("go on")
        return answers

    ids, client = [trees.enqueue("agent") for _ in range(JOBS)], SyncClient(trees.dsn)
    with trio.fail_after(60):
        await trees.burst(log=False)
        for job_id in ids:
            trees.time_passes(job_id)
        await trees.burst()
        for job_id in ids:
            client.send_event(job_id, "go on")
        await trees.burst()
    assert [(trees.job(job_id)["error"], trees.job(job_id)["result"]) for job_id in ids] == [
        (None, ["invoice"] * 4)
    ] * JOBS


async def test_deadlines_around_a_limiter_strike_again_whichever_tasks_have_it(trees: Trees) -> None:
    """Those that had it stood in a call when the others were cut short. Now they wait for it, and never come to that call."""

    async def hangs() -> None:
        await trio.sleep_forever()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def quotes(job: Job) -> list[str]:
        limiter, turns = trio.CapacityLimiter(2), [trio.Event() for _ in range(4)]
        found: list[str] = []

        async def one(number: int) -> None:
            await turns[number].wait()
            with job.move_on_after(0.1, key=f"deadline {number}") as scope:
                async with limiter:
                    await job.step(hangs, key=f"ask {number}")
            if scope.cancelled_caught:
                found.append(await job.step(_invoice, key=f"list price {number}"))

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(one, number)
            for turn in turns if job.attempt == 1 else reversed(turns):
                turn.set()
                await trio.sleep(0.005)
        await job.wait_for_event("go on")
        return found

    ids, client = [trees.enqueue("quotes") for _ in range(JOBS)], SyncClient(trees.dsn)
    with trio.fail_after(60):
        await trees.burst()
        for job_id in ids:
            client.send_event(job_id, "go on")
        await trees.burst()
    assert [(trees.job(job_id)["error"], trees.job(job_id)["result"]) for job_id in ids] == [
        (None, ["invoice"] * 4)
    ] * JOBS


async def test_a_deadline_around_a_fan_out_and_its_progress_bar_keeps_no_replay_waiting(trees: Trees) -> None:
    """It ends the bar as well: no task was busy after it, and in the replay, which comes there sooner, the bar still is."""

    async def fetch(page: int) -> int:
        await trio.sleep(0 if page < 2 else 60)
        return page

    @trees.handlers.job(durable=True, suspend_after=0)
    async def pages(job: Job) -> int:
        found: list[int] = []

        async def bar() -> None:
            while True:
                await job.progress(len(found) / 4)
                await trio.sleep(0.02)

        async def one(page: int) -> None:
            found.append(await job.step(fetch, page, key=f"page {page}"))

        with job.move_on_after(0.2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bar)
                for page in range(4):
                    nursery.start_soon(one, page)
        await job.wait_for_event("go on")
        return len(found)

    job_id = trees.enqueue("pages")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    with trio.fail_after(5):
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, 2)


async def test_a_scope_that_its_own_task_cuts_is_not_cut_before_that_task_has_come_there(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in a plain await before, and the others stand in calls. Nothing waits for a limiter, so nothing has to give way."""
    looked, turn = list[str](), Replay.turn

    def noted(replay: Replay, *given: Any, **options: Any) -> Any:
        found = turn(replay, *given, **options)
        if replay.idle and replay.strikes_next:
            looked.append("in vain")
        return found

    monkeypatch.setattr(Replay, "turn", noted)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> list[str]:
        found: list[str] = []

        async def other() -> None:
            await job.wait_for_event("other", key="other")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            with job.move_on_after(3600, key="patience") as patience:
                await job.step(_invoice, key="invoice")
                while job.attempt > 1 and not looked:
                    await trio.lowlevel.checkpoint()
                found.append("looked")
                patience.cancel()
                await trio.sleep_forever()
            await job.step(_invoice, key="again")
            await job.wait_for_event("go on")
            nursery.cancel_scope.cancel()
        return found

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst()
        SyncClient(trees.dsn).send_event(job_id, "go on")
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, ["looked"])


async def _invoice() -> str:
    return "invoice"
