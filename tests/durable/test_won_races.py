"""A race between tasks that is won in the moment in which a remembered scope strikes in another task."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from pulse_trio import Job, SyncClient
from pulse_trio.durable_calls import DurableScope
from pulse_trio.worker.durable import delivering
from support.turns import PlainAwait, closing, waits_for_its_turn

if TYPE_CHECKING:
    import pytest

    from support.trees import Trees


async def test_the_scope_strikes_again_after_the_call_that_lost_has_gone(trees: Trees) -> None:
    """That stood still when the scope struck, for its task had not had its turn. Here the scope's task comes later to where it
    stood then, and by then the loser has gone: the job was dead."""
    ways: list[list[Any]] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def agent(job: Job) -> str:
        stands, gone, scopes = trio.Event(), trio.Event(), list[DurableScope]()

        async def answer() -> None: ...

        async def ask(nursery: trio.Nursery) -> None:
            await stands.wait()
            await job.step(answer, key="answer")
            nursery.cancel_scope.cancel()
            scopes[0].cancel()

        async def other_model() -> None:
            try:
                await job.wait_for_event("never", key="never")
            finally:
                gone.set()

        async def tool() -> None:
            stands.set()
            if job.attempt > 1:
                await gone.wait()
            await job.wait_for_event("tool", key="tool")

        async def race() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, nursery)
                nursery.start_soon(other_model)

        async def bounded() -> None:
            with job.move_on_after(3600, key="patience") as patience:
                scopes.append(patience)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(tool)
            ways.append([job.attempt, await job.step(_late, key="late")])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(race)
            nursery.start_soon(bounded)
        await job.wait_for_event("go on")
        return "done"

    job_id = trees.enqueue("agent")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    with trio.fail_after(30):
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "done")
    assert ways == [[1, "late"], [2, "late"]]


async def _late() -> str:
    return "late"


async def test_a_contender_with_a_progress_bar_wins_when_its_bar_has_ended(trees: Trees) -> None:
    """It cancels its bar, and is the winner a pass of Trio's loop later. The next result came meanwhile, for bars go on and on
    and are not waited for: one of twelve such jobs went on with a winner that no step had seen."""

    @trees.handlers.job(durable=True, suspend_after=0)
    async def ask(job: Job) -> list[int]:
        won: list[int] = []

        async def answer() -> None:
            await trio.sleep(0.03)

        async def draw_bar() -> None:
            while True:  # noqa: ASYNC110 -- a progress bar waits for no event
                await trio.sleep(0.005)

        async def mirror(number: int, race: trio.Nursery) -> None:
            async with trio.open_nursery() as own:
                own.start_soon(draw_bar)
                await job.step(answer, key=f"mirror {number}")
                own.cancel_scope.cancel()
            won.append(number)
            race.cancel_scope.cancel()

        async with trio.open_nursery() as race:
            for number in range(4):
                race.start_soon(mirror, number, race)
        told = await job.step(_first, won, key="told")
        await job.wait_for_event("go on")
        return [told, won[0]]

    job_ids = [trees.enqueue("ask") for _ in range(15)]
    await trees.burst()
    for job_id in job_ids:
        SyncClient(trees.dsn).send_event(job_id, "go on")
    with trio.fail_after(20):
        await trees.burst()
    assert [trees.job(job_id)["error"] for job_id in job_ids] == [None] * len(job_ids)
    results = [trees.job(job_id)["result"] for job_id in job_ids]
    assert [told for told, _ in results] == [won for _, won in results]


async def _first(won: list[int]) -> int:
    return won[0]


async def test_a_call_that_had_begun_has_its_line_again_though_the_attempt_was_lost_as_the_race_was_won(
    trees: Trees,
) -> None:
    """The loser's step had its line, and its plain code is slower in the next attempt: the winner cut it short before it came
    to the step, and the job was dead."""
    plain, asks = PlainAwait(), trio.Event()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        charging, won = trio.Event(), trio.Event()

        async def warm_up() -> None: ...

        async def charge() -> None:
            charging.set()
            await won.wait()

        async def answer() -> None:
            await charging.wait()
            won.set()

        async def fast(nursery: trio.Nursery) -> None:
            await job.step(warm_up, key="warm up")  # the other one is busy
            if job.attempt == 1:
                plain.end()
            else:
                asks.set()
            await job.step(answer, key="answer")  # and stood in its step
            nursery.cancel_scope.cancel()

        async def slow() -> None:
            await plain.wait()
            await job.step(charge, key="charge")

        async with trio.open_nursery() as race:
            race.start_soon(slow)
            race.start_soon(fast, race)
        if job.attempt == 1:
            await trees.lose(job.id)
        return "won"

    job_id = trees.enqueue("order")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(plain.end_after, asks)
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst()
    keys = [
        row["key"]
        for row in trees.window.run("SELECT key FROM history WHERE job_id = %s AND kind = 1 ORDER BY line", job_id)
    ]
    assert keys == ["warm up", "answer", "charge"]
    assert trees.job(job_id)["error"] is None
    assert trees.job(job_id)["result"] == "won"


async def test_a_call_that_began_while_the_winner_waited_for_its_turn_has_begun_again_though_a_scope_was_cut_meanwhile(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scope's line has the higher number, and was handed out first: the loser's step seemed to have begun after it, was cut
    short before it began in the next attempt, and the job was dead (one of 150 drawn races of seed 175)."""
    monkeypatch.setattr(delivering, "_PLAIN", 1.0)
    waits = waits_for_its_turn(monkeypatch, "fast")
    plain, bar, asks, lost = PlainAwait(), PlainAwait(), trio.Event(), trio.Event()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        async def answer() -> None: ...

        charging = trio.Event()

        async def charge() -> None:
            charging.set()

        async def fast(nursery: trio.Nursery) -> None:
            if lost.is_set():
                asks.set()
            await job.step(answer, key="answer")
            nursery.cancel_scope.cancel()

        async def slow() -> None:
            await plain.wait()
            await job.step(charge, key="charge")

        async def picks() -> None:
            with job.move_on_after(3600, key="patience") as patience:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(job.wait_for_event, "never", key="never"))
                    await waits.wait()
                    patience.cancel()
            if job.attempt == 1:
                plain.end()
                await charging.wait()
                bar.end()
            await job.step(_late, key="picked")

        async with trio.open_nursery() as outer:
            outer.start_soon(picks)
            if job.attempt == 1:
                outer.start_soon(bar.wait)  # one more is busy than in the next attempt
            async with trio.open_nursery() as race:
                race.start_soon(slow)
                race.start_soon(fast, race)
        if job.attempt == 1:
            lost.set()
            await trees.lose(job.id)
        return "won"

    async def is_slower() -> None:
        await lost.wait()
        await plain.end_after(asks)

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(is_slower)
            await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "won")
    calls = "SELECT key FROM history WHERE job_id = %s AND kind IN (1, 8) ORDER BY line"
    assert [row["key"] for row in trees.window.run(calls, job_id)] == ["answer", "patience", "charge", "picked"]


async def test_tasks_that_are_cut_short_together_come_out_in_the_order_in_which_they_were_started(trees: Trees) -> None:
    """However long each takes to close what it has open. A later attempt, which has nothing open, has the same order."""
    orders: list[list[int]] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def agent(job: Job) -> list[list[int]]:
        closed = [trio.Event() for _ in range(4)]
        order = list[int]()

        async def ask(number: int) -> None:
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    # The last one is the first that has closed its connection.
                    if number < 3:
                        await closed[number + 1].wait()
                    closed[number].set()

        async def loses(number: int) -> None:
            try:
                await job.step(ask, number, key=f"ask {number}")
            finally:
                with job.cleanup():
                    order.append(number)
                    if order == [number]:
                        await job.step(_same, order, key=f"{number} is first")  # noqa: ASYNC102 -- job.cleanup() is the shield

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(loses, number)
            await job.step(_same, [])
            nursery.cancel_scope.cancel()
        first = await job.step(_same, order)
        orders.append(order)
        await job.wait_for_event("go on")
        return [first, order]

    job_id = trees.enqueue("agent")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    await trees.burst()
    assert trees.job(job_id)["error"] is None
    assert trees.job(job_id)["result"] == [[0, 1, 2, 3]] * 2
    assert orders == [[0, 1, 2, 3]] * 2


async def _same(seen: list[int]) -> list[int]:
    return seen


async def test_a_scope_that_was_opened_while_the_winner_waited_for_its_turn_is_opened_before_it_wins_again(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The winner's line has the lower number than the scope's moment, and was handed out later: in the next attempt the scope's
    task was cut short before it opened that, and the job was dead (one of 200 drawn races of seed 2930)."""
    waits = waits_for_its_turn(monkeypatch, "fast")
    plain, asks, cut, closed, scopes = PlainAwait(), trio.Event(), trio.Event(), trio.Event(), list[DurableScope]()

    async def begins() -> None:
        monkeypatch.setattr(delivering, "_PLAIN", 0.01)
        await closing(cut, closed)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        async def answer() -> None: ...

        async def fast(nursery: trio.Nursery) -> None:
            if job.attempt > 1:
                asks.set()
            await job.step(answer, key="answer")
            nursery.cancel_scope.cancel()

        async def slow() -> None:
            await plain.wait()
            with job.move_on_after(3600, key="patience") as patience:
                scopes.append(patience)
                await job.step(begins, key="ask")

        async def ends_it() -> None:
            # The winner waits for what is busy until the loser's step has begun.
            monkeypatch.setattr(delivering, "_PLAIN", 30.0)
            await waits.wait()
            plain.end()
            await cut.wait()
            scopes[0].cancel()
            await trio.testing.wait_all_tasks_blocked()
            closed.set()

        async with trio.open_nursery() as outer, trio.open_nursery() as race:
            if job.attempt == 1:
                race.start_soon(PlainAwait().wait)  # one more is busy than in the next attempt
                outer.start_soon(ends_it)
            race.start_soon(slow)
            race.start_soon(fast, race)
        await job.step(_late, key="won")
        if job.attempt == 1:
            await trees.lose(job.id)
        return "won"

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(plain.end_after, asks)
            await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "won")
    assert trees.job(job_id)["attempt"] == 2
