"""A handler of several tasks gets one result at a time, and the next one when it has come to rest."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pulse_trio import Job, StepFailed, SyncClient
from pulse_trio.jobs import CancelRequest
from pulse_trio.worker.durable import delivering, quiet
from support.trees import running_of
from support.turns import PlainAwait, closing, waits_for_its_turn

if TYPE_CHECKING:
    from pulse_trio.durable_calls import DurableScope
    from support.trees import Trees


async def test_what_is_first_while_another_task_ends_a_race_of_its_own_is_so_in_a_later_attempt(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loser of the inner race closes its connection, so that race ends after the stop has come. No later attempt calls it
    again: there the inner race ended at once, and the handler went on with a winner that no step had seen."""
    ways: list[list[str]] = []
    stop_waits = waits_for_its_turn(monkeypatch, "dispatcher")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        won, cut = list[str](), trio.Event()

        async def near() -> None: ...

        async def far() -> None:
            await closing(cut, stop_waits)

        async def stop() -> None:
            await cut.wait()

        async def customer(race: trio.Nursery) -> None:
            async with trio.open_nursery() as hedge:

                async def asked() -> None:
                    await job.step(near, key="near")
                    hedge.cancel_scope.cancel()

                hedge.start_soon(lambda: job.step(far, key="far"))
                await wait_all_tasks_blocked()
                hedge.start_soon(asked)
            ends("customer", race)

        async def dispatcher(race: trio.Nursery) -> None:
            await job.step(stop, key="stop")
            ends("stop", race)

        def ends(who: str, race: trio.Nursery) -> None:
            won.append(who)
            race.cancel_scope.cancel()

        async with trio.open_nursery() as race:
            race.start_soon(customer, race)
            race.start_soon(dispatcher, race)
        ways.append(won)
        await job.wait_for_event("go on")
        return won[0]

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst()
        SyncClient(trees.dsn).send_event(job_id, "go on")
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "customer")
    assert ways == [["customer", "stop"]] * 2


async def test_two_results_that_come_together_end_the_same_race_again(trees: Trees) -> None:
    """One of them has to end a nursery before it has won."""
    ways: dict[int, list[str]] = {}

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        won: list[str] = []

        async def customer(race: trio.Nursery) -> None:
            async with trio.open_nursery() as nursery:

                async def one(how: str) -> None:
                    await job.wait_for_event(how, key=how)
                    nursery.cancel_scope.cancel()

                nursery.start_soon(one, "mail")
                nursery.start_soon(one, "phone")
            ends("customer", race)

        async def dispatcher(race: trio.Nursery) -> None:
            await job.wait_for_event("stop", key="stop")
            ends("stop", race)

        def ends(who: str, race: trio.Nursery) -> None:
            if not won:
                won.append(who)
                race.cancel_scope.cancel()

        async with trio.open_nursery() as race:
            race.start_soon(customer, race)
            race.start_soon(dispatcher, race)
        ways.setdefault(job.id, []).append(won[0])
        await job.wait_for_event("go on")
        return won[0]

    ids, client = [trees.enqueue("order") for _ in range(8)], SyncClient(trees.dsn)
    with trio.fail_after(60):
        await trees.burst()
        for job_id in ids:
            client.send_event(job_id, "phone")
            client.send_event(job_id, "stop")
        await trees.burst()
        for job_id in ids:
            client.send_event(job_id, "go on")
        await trees.burst()
    assert [trees.job(job_id)["error"] for job_id in ids] == [None] * 8
    assert [len(set(way)) for way in ways.values()] == [1] * 8


async def test_what_draws_a_progress_bar_keeps_no_replay_waiting(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps between two looks, and comes to no durable call. Where the limiter is given to other tasks than before, each
    line took a minute."""
    monkeypatch.setattr(quiet, "_LONGEST", 3600.0)
    calls: list[int] = []

    async def fetch(page: int) -> int:
        calls.append(page)
        return page

    @trees.handlers.job(durable=True, suspend_after=0)
    async def resize(job: Job) -> list[int]:
        limiter, turns = trio.CapacityLimiter(1), [trio.Event() for _ in range(6)]
        pages: list[int] = []

        async def bar() -> None:
            await trio.sleep_forever()

        async def one(page: int) -> None:
            await turns[page].wait()
            async with limiter:
                pages.append(await job.step(fetch, page, key=f"page-{page}"))

        async with trio.open_nursery() as outer:
            outer.start_soon(bar)
            async with trio.open_nursery() as nursery:
                for page in range(6):
                    nursery.start_soon(one, page)
                for turn in turns if job.attempt == 1 else reversed(turns):
                    turn.set()
                    await wait_all_tasks_blocked()
            outer.cancel_scope.cancel()
        await job.wait_for_event("go on")
        return sorted(pages)

    job_id = trees.enqueue("resize")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    with trio.fail_after(20):
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, list(range(6)))
    assert calls == list(range(6))


async def test_a_scope_that_strikes_while_a_result_waits_for_its_turn_has_struck_too_late(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one strikes with it, and cuts its task short, which makes a step in its place before the result has its turn."""
    ways: list[list[object]] = []
    answer_waits = waits_for_its_turn(monkeypatch, "asks")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        scopes: dict[str, DurableScope] = {}
        cut, listed = trio.Event(), trio.Event()
        way: list[object] = []

        async def closes() -> None:
            await closing(cut, listed)

        async def answer() -> str:
            await cut.wait()
            return "answer"

        async def list_price() -> None:
            listed.set()

        async def asks() -> None:
            with job.move_on_after(3600, key="asks") as scopes["asks"]:
                way.append(await job.step(answer, key="answer"))
            way.append(scopes["asks"].cancel_called)

        async def waits() -> None:
            with job.move_on_after(3600, key="waits") as scopes["waits"]:
                await job.wait_for_event("never", key="never")
            await job.step(list_price, key="list price")

        async def hedge() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: job.step(closes, key="closes"))
                await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for task in (asks, waits, hedge):
                nursery.start_soon(task)
            if job.attempt == 1:
                await answer_waits.wait()
                for scope in scopes.values():
                    scope.cancel()
        ways.append(way)
        await job.wait_for_event("go on")
        return "done"

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst()
        SyncClient(trees.dsn).send_event(job_id, "go on")
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "done")
    assert ways == [["answer", True]] * 2


async def test_a_task_in_a_plain_await_is_waited_for_once(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it makes a durable call. Then it is waited for again."""
    waited: list[float] = []
    monkeypatch.setattr(delivering, "_PLAIN", 0.2)

    async def step() -> None: ...

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        called, looked = trio.Event(), trio.Event()

        async def looks() -> None:
            await called.wait()
            await job.step(step, key="looks")
            looked.set()
            await trio.sleep_forever()

        async def measured() -> None:
            began = trio.current_time()
            await job.step(step, key=f"main {len(waited)}")
            waited.append(trio.current_time() - began)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(looks)
            await measured()
            await measured()
            called.set()
            await looked.wait()
            await measured()
            await measured()
            nursery.cancel_scope.cancel()

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["error"] is None
    assert [seconds >= 0.2 for seconds in waited] == [True, False, True, False]


@pytest.mark.parametrize("late", ["the answer waits for its turn", "in the same pass"])
async def test_a_deadline_that_passes_as_a_result_comes_is_first_or_second_in_each_attempt(
    trees: Trees, late: str
) -> None:
    """Where the answer waits for its turn, because another task is being cut short, the patience waits with it. Where both come
    in one pass of Trio's loop, which was late, either may be first."""
    in_turn = late == "the answer waits for its turn"

    async def closes() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.3)

    async def answer() -> None:
        await trio.sleep(0.1 if in_turn else 0.01)
        if not in_turn:
            time.sleep(0.2)  # noqa: ASYNC251 -- the loop is late

    @trees.handlers.job(durable=True, suspend_after=0)
    async def offer(job: Job) -> list[str]:
        won: list[str] = []

        async def slow() -> None:
            with job.move_on_after(0.05, key="budget"):
                await job.step(closes, key="closes")

        async def asks() -> None:
            await job.step(answer, key="answer")
            won.append("price")
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            if in_turn:
                nursery.start_soon(slow)
            nursery.start_soon(asks)
            with job.move_on_after(0.15):
                await trio.sleep_forever()
            won.append("too late")
            nursery.cancel_scope.cancel()
        told = await job.step(_tell, won[0])
        await job.wait_for_event("go on")
        return [won[0], told]

    job_id = trees.enqueue("offer")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    with trio.fail_after(5):
        await trees.burst()
    won, told = trees.job(job_id)["result"]
    assert (trees.job(job_id)["error"], won) == (None, told)
    assert won == "price" or not in_turn


async def test_a_step_that_fails_after_another_one_has_its_result_fails_after_it_again(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That result waits for its turn. The handler had the failure first, and in each later attempt the result."""

    cut, failed, granted_waits = trio.Event(), trio.Event(), waits_for_its_turn(monkeypatch, "grants")

    async def closes() -> None:
        await closing(cut, failed)

    async def granted() -> str:
        await cut.wait()
        return "granted"

    async def fails() -> None:
        await granted_waits.wait()
        failed.set()
        raise LookupError("refused")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def credit(job: Job) -> list[str]:
        won: list[str] = []

        async def slow() -> None:
            with job.move_on_after(0.05, key="budget"):
                await job.step(closes, key="closes")

        async def grants() -> None:
            won.append(await job.step(granted, key="grants"))

        async def refuses() -> None:
            try:
                await job.step(fails, key="refuses")
            except StepFailed:
                won.append("refused")

        async with trio.open_nursery() as nursery:
            for task in (slow, grants, refuses):
                nursery.start_soon(task)
        told = await job.step(_tell, won[0])
        await job.wait_for_event("go on")
        return [*won, told]

    job_id = trees.enqueue("credit")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    with trio.fail_after(5):
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, ["granted", "refused", "granted"])


async def _tell(what: str) -> str:
    return what


async def test_a_cancellation_waits_while_a_result_waits_for_its_turn(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes of the result is done when the job is cancelled, in that attempt and in the next one, which cleans up."""
    done: list[str] = []
    answer_waits = waits_for_its_turn(monkeypatch, "asks")

    async def act(what: str) -> None:
        done.append(what)

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        cut, cancelled = trio.Event(), trio.Event()

        async def closes() -> None:
            await closing(cut, cancelled)

        async def answer() -> None:
            await cut.wait()

        async def hedge() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: job.step(closes, key="closes"))
                await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()

        async def cancels() -> None:
            await answer_waits.wait()
            SyncClient(trees.dsn).cancel(job.id)
            running = running_of(job)
            running.ask(CancelRequest("user", None))
            cancelled.set()

        async with trio.open_nursery() as race:

            async def asks() -> None:
                await job.step(answer, key="answer")
                race.cancel_scope.cancel()

            race.start_soon(hedge)
            race.start_soon(asks)
            job.nursery.start_soon(cancels)
        try:
            await job.step(act, "after the race")
            await job.wait_for_event("never")
        finally:
            with job.cleanup():
                await job.step(act, "undo")  # noqa: ASYNC102 -- job.cleanup() is the shield
                if job.attempt == 1:
                    await trees.lose(job.id)  # noqa: ASYNC102

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst(log=False)
        trees.again()
        await trees.burst(log=False)
    outcomes = [row["outcome"] for row in trees.window.run("SELECT outcome FROM attempt ORDER BY attempt")]
    assert (outcomes, trees.job(job_id)["state"]) == (["rescued", "cancelled"], "cancelled")
    assert done.count("undo") == 1


async def test_a_progress_bar_that_is_cut_short_has_ended_before_the_next_result_is_handed_out_again(
    trees: Trees,
) -> None:
    """That waited for no more tasks to be busy than were when a line before was written, and the bar was one of them: its race
    ended some passes of Trio's loop later, and another task had won."""
    winners: list[list[str]] = []

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        first, won, answered = trio.Event(), list[str](), trio.Event()

        async def bar(depth: int) -> None:
            async with trio.open_nursery() as nursery:
                if depth:
                    nursery.start_soon(bar, depth - 1)
                else:
                    await PlainAwait().wait()

        async def draws() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bar, 5)
                await job.step(_tell, "early", key="early")
                await job.step(_tell, "drawn", key="drawn")
                answered.set()
                nursery.cancel_scope.cancel()
            ends("draws")

        async def answer() -> None:
            await answered.wait()

        async def asks() -> None:
            await job.step(answer, key="answer")
            ends("asks")

        def ends(who: str) -> None:
            won.append(who)
            first.set()

        async with trio.open_nursery() as race:
            race.start_soon(draws)
            race.start_soon(asks)
            await first.wait()
            if job.attempt == 1:
                await wait_all_tasks_blocked()
                winners.append(won)
                await trees.dies(job)
        winners.append(won)
        return won[0]

    job_id = trees.enqueue("order")
    assert (await trees.ended(job_id, lease=3, heartbeat=0.1))["error"] is None
    assert winners == [["draws", "asks"]] * 2
