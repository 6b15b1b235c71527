"""A deadline that passes in a remembered scope and cuts nothing short: what ran could not be interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from pulse_trio import Job, SyncClient
from pulse_trio.worker.durable.scopes import Scope

if TYPE_CHECKING:
    from support.trees import Trees


@pytest.mark.parametrize("fails", [False, True], ids=["move_on_after", "fail_after"])
async def test_a_task_beside_it_does_not_make_a_mismatch_of_it(trees: Trees, fails: bool) -> None:
    called: list[Any] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        async def other() -> None:
            await job.wait_for_event("other", key="other")

        async with trio.open_nursery() as tasks:
            tasks.start_soon(other)
            with (job.fail_after if fails else job.move_on_after)(0.05) as patience:

                async def report() -> str:
                    with trio.CancelScope(shield=True):
                        while not patience.cancel_called:  # noqa: ASYNC110 -- it has no event
                            await trio.sleep(0.01)
                    called.append("report")
                    return "reported"

                await job.step(report)
                called.append(patience.cancel_called)
            called.append((patience.cancel_called, patience.cancelled_caught))
            await job.wait_for_event("main")
        return "done"

    job_id = trees.enqueue("order")
    await trees.burst()
    client = SyncClient(trees.dsn)
    client.send_event(job_id, "other")
    await trees.burst()
    client.send_event(job_id, "main")
    await trees.burst()
    assert trees.job(job_id)["error"] is None
    assert trees.job(job_id)["result"] == "done"
    assert called.count("report") == 1
    assert called[1:] == [True, (True, False)] * (len(called) // 2)


async def test_two_scopes_that_end_at_once_in_two_tasks(trees: Trees) -> None:
    steps: list[str] = []
    both = trio.Event()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def claim(job: Job) -> str:
        async def assessor(name: str) -> None:
            with job.move_on_after(0.05, key=f"patience-{name}") as patience:

                async def report() -> str:
                    with trio.CancelScope(shield=True):
                        while not patience.cancel_called:  # noqa: ASYNC110 -- it has no event
                            await trio.sleep(0.01)
                        steps.append(name)
                        if len(steps) == 2:
                            both.set()
                        await both.wait()
                    return name

                await job.step(report, key=f"report-{name}")
            await job.wait_for_event("go on", key=f"pause-{name}")

        async with trio.open_nursery() as tasks:
            tasks.start_soon(assessor, "a")
            tasks.start_soon(assessor, "b")
        return "done"

    job_id = trees.enqueue("claim")
    await trees.burst()
    client = SyncClient(trees.dsn)
    for _ in range(2):
        client.send_event(job_id, "go on")
        await trees.burst()
    assert trees.job(job_id)["error"] is None
    assert (trees.job(job_id)["result"], sorted(steps)) == ("done", ["a", "b"])


async def test_the_code_after_the_step_is_not_cut_short_in_a_later_attempt(trees: Trees) -> None:
    ways: list[str] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        way = ""
        with job.move_on_after(2) as patience:
            way += await job.step(_quick)
            await trio.lowlevel.checkpoint()
            way += " and plain code"
            with trio.CancelScope(shield=True):
                while not patience.cancel_called:  # noqa: ASYNC110 -- it has no event
                    await trio.sleep(0.01)
        ways.append(f"{way} {patience.cancel_called} {patience.cancelled_caught}")
        await job.wait_for_event("go on")
        return way

    job_id = trees.enqueue("order")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    await trees.burst()
    assert ways == ["quick and plain code True False"] * 2
    assert trees.job(job_id)["result"] == "quick and plain code"


async def _quick() -> str:
    return "quick"


async def test_a_scope_that_its_own_task_ends_is_ended_there_again_wherever_the_others_stand(trees: Trees) -> None:
    ways: list[list[str]] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        way = list[str]()

        async def other() -> None:
            for _ in range(0 if job.attempt == 1 else 20):
                await trio.lowlevel.checkpoint()
            await job.wait_for_event("other", key="other")

        async with trio.open_nursery() as tasks:
            tasks.start_soon(other)
            for _ in range(20 if job.attempt == 1 else 0):
                await trio.lowlevel.checkpoint()
            with job.move_on_after(3600) as scope:
                way.append(await job.step(_quick))
                scope.cancel()
                await trio.lowlevel.checkpoint()
                way.append("not cut")
            way.append(await job.step(_quick))
            ways.append(way)
            await job.wait_for_event("main")
        return "done"

    job_id = trees.enqueue("order")
    await trees.burst()
    client = SyncClient(trees.dsn)
    client.send_event(job_id, "main")
    client.send_event(job_id, "other")
    await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "done")
    assert ways == [["quick", "quick"]] * 2


async def test_what_the_handler_reads_in_the_scope_is_the_same_in_a_later_attempt(trees: Trees) -> None:
    """It does something else if the deadline has passed."""
    ways: list[list[Any]] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        way = list[Any]()

        async def other() -> None:
            await job.wait_for_event("other", key="other")

        async with trio.open_nursery() as tasks:
            tasks.start_soon(other)
            with job.move_on_after(0.05) as patience:

                async def report() -> None:
                    with trio.CancelScope(shield=True):
                        while not patience.cancel_called:  # noqa: ASYNC110 -- it has no event
                            await trio.sleep(0.01)

                way.append(patience.cancel_called)
                await job.step(report)
                way.append(patience.cancel_called)
                await job.step(_late if patience.cancel_called else _quick)
                way.append("not cut")
            ways.append([*way, patience.cancelled_caught])
            await job.wait_for_event("main")
        return "done"

    job_id = trees.enqueue("order")
    await trees.burst()
    client = SyncClient(trees.dsn)
    for name in ("other", "main"):
        client.send_event(job_id, name)
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "done")
    assert ways == [[False, True, True]] * len(ways)


async def _late() -> str:
    return "late"


@pytest.mark.parametrize("waits", ["sleep", "event"])
async def test_a_deadline_that_strikes_as_its_wait_is_being_written_comes_before_a_result_that_is_later(
    trees: Trees, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """The wait is cut short at once. It went on until its moment was written, and the result had its line first."""
    struck, strikes = trio.Event(), Scope._strikes  # pyright: ignore[reportPrivateUsage] -- no event tells that

    def strike(scope: Scope) -> None:
        strikes(scope)
        struck.set()

    monkeypatch.setattr(Scope, "_strikes", strike)

    async def ask() -> str:
        await struck.wait()
        return "answered"

    async def same(seen: list[str]) -> list[str]:
        return seen

    with psycopg.connect(trees.dsn) as other:

        @trees.handlers.job(durable=True, backoff_base=0.01)
        async def race(job: Job) -> list[list[str]]:
            seen = list[str]()

            async def impatient() -> None:
                with job.move_on_after(0.05, key="deadline"):
                    if job.attempt == 1:
                        # Nothing of the job is written any more.
                        other.execute("SELECT FROM pulse.job WHERE id = %s FOR UPDATE", [job.id])
                    if waits == "sleep":
                        await job.sleep(60, key="wait")
                    else:
                        await job.wait_for_event("never", timeout=60, key="wait")
                seen.append("late")

            async def patient() -> None:
                seen.append(await job.step(ask, key="ask"))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(impatient)
                nursery.start_soon(patient)
                if job.attempt == 1:
                    await struck.wait()
                    for _ in range(50):
                        await trio.lowlevel.checkpoint()
                    other.rollback()
            first = await job.step(same, seen)
            if job.attempt == 1:
                raise ValueError("something else")
            return [first, seen]

        job_id = trees.enqueue("race")
        with trio.fail_after(30):
            while trees.job(job_id)["finished_at"] is None:
                await trees.burst(log=False)
                trees.again()
    assert trees.job(job_id)["error"] is None
    assert trees.job(job_id)["result"] == [["late", "answered"]] * 2


@pytest.mark.parametrize("then", ["fails", "sleeps", "is lost"])
@pytest.mark.parametrize("calls", [2, "a block"])
@pytest.mark.parametrize(("shield", "which"), [("job.cleanup()", "move_on_after"), ("a scope", "fail_after")])
async def test_one_that_passes_in_a_shield_cuts_short_the_same_call_again(
    trees: Trees, shield: str, which: str, calls: object, then: str
) -> None:
    """A later step of the shield was taken for the clean-up: the call behind it had no number in the next attempt, whose code
    was said to have changed."""
    done, scopes = list[str](), list[Any]()

    async def act(what: str) -> None:
        done.append(what)
        while what == "book" and not scopes[-1].cancel_called:
            await trio.lowlevel.checkpoint()

    @trees.handlers.job
    async def child() -> None: ...

    @trees.handlers.job(durable=True, max_attempts=5, suspend_after=0)
    async def order(job: Job) -> str:
        too_late = False
        try:
            with getattr(job, which)(0.2) as patience:
                scopes.append(patience)
                with job.cleanup() if shield == "job.cleanup()" else trio.CancelScope(shield=True):
                    await job.step(act, "book")
                    await job.step(act, "confirm")
                    if calls == "a block":
                        async with job.durable_nursery() as nursery:
                            nursery.start_soon(child)
                    if calls != 2:
                        await job.step(act, "file")
                await job.step(act, "advertise")
        except trio.TooSlowError:
            too_late = True
        await job.step(act, "close")
        if job.attempt == 1:
            if then == "fails":
                raise OSError("once")
            if then == "is lost":
                await trees.dies(job)
        if then == "sleeps":
            await job.sleep(0.1)
        return f"cut short: {patience.cancelled_caught or too_late}"

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst(lease=3, heartbeat=0.1, log=False)
    found = await trees.ended(job_id)
    assert (found["error"], found["result"]) == (None if then == "sleeps" else found["error"], "cut short: True")
    assert done == ["book", "confirm", *["file"] * (calls != 2), "close"]
