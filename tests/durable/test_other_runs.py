"""A job's calls in a thread, or in another run of Trio that a thread has begun: refused before they touch the worker's tasks.

A task of the worker that another run puts into its own queue would never go on, and would keep others of the worker waiting."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Job, UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.trees import Trees


async def one() -> str:
    return "one"


async def _nothing(*_: Any) -> None: ...


async def _enters(block: Any) -> None:
    async with block:
        raise AssertionError("it is refused")


async def _enters_scope(block: Any) -> None:
    with block:
        raise AssertionError("it is refused")


async def _calls(function: Callable[..., Any], *args: Any) -> None:
    function(*args)


async def _reads(of: Any, name: str) -> None:
    getattr(of, name)


CALLS: dict[str, Callable[[Job, Any, Any, Any], Awaitable[object]]] = {
    "job.step": lambda job, *_: job.step(one, key="k"),
    "job.transaction_step": lambda job, *_: job.transaction_step(_nothing, key="k"),
    "job.sleep": lambda job, *_: job.sleep(0, key="k"),
    "job.wait_for_event": lambda job, *_: job.wait_for_event("x", timeout=0, key="k"),
    "job.durable_nursery": lambda job, *_: _enters(job.durable_nursery(key="k")),
    "job.move_on_after": lambda job, *_: _enters_scope(job.move_on_after(60, key="k")),
    "job.fail_after": lambda job, *_: _enters_scope(job.fail_after(60, key="k")),
    "job.cleanup()": lambda job, *_: _calls(job.cleanup),
    "job.transaction()": lambda job, *_: _enters(job.transaction()),
    "job.progress": lambda job, *_: job.progress(0.5),
    "job.nursery.start_soon": lambda job, *_: _calls(job.nursery.start_soon, one),
    "job.nursery.start": lambda job, *_: job.nursery.start(one),
    "job.nursery.cancel_scope": lambda job, *_: _reads(job.nursery, "cancel_scope"),
    "nursery.flush": lambda _, nursery, *__: nursery.flush(),
    "scope.cancel": lambda _, __, scope, *___: _calls(scope.cancel),
    "scope.cancel_called": lambda _, __, scope, *___: _reads(scope, "cancel_called"),
    "start_soon(pack)": lambda _, nursery, __, pack: _calls(nursery.start_soon, pack.options(child_key="k")),
}


@pytest.mark.parametrize("loop", [trio, asyncio])
async def test_a_call_in_another_run_is_refused_and_harms_no_job(trees: Trees, loop: Any) -> None:
    said, stepped, refused, over = dict[str, str](), trio.Event(), trio.Event(), trio.Event()

    @trees.handlers.job
    async def pack() -> str:
        return "packed"

    @trees.handlers.job(durable=True)
    async def bystander(job: Job) -> str:
        await job.step(one)
        stepped.set()
        await refused.wait()
        async with job.durable_nursery() as nursery:
            child = nursery.start_soon(pack)
            await nursery.flush()
        await job.step(one)
        over.set()
        return child.result

    @trees.handlers.job(durable=True)
    async def mistaken(job: Job) -> str:
        await stepped.wait()
        with job.move_on_after(3600) as scope:
            async with job.durable_nursery() as nursery:
                child = nursery.start_soon(pack)
                made = job.step(one)

                async def elsewhere() -> None:
                    for name, call in {**CALLS, "made": lambda *_: made}.items():
                        with pytest.raises(UsageError) as caught:
                            await call(job, nursery, scope, pack)
                        said[name] = str(caught.value)
                    assert job.cancel_reason is None or loop is asyncio
                    assert (job.version, child.outcome) == (1, None)

                def in_thread() -> None:
                    loop.run(elsewhere()) if loop is asyncio else trio.run(elsewhere)

                await trio.to_thread.run_sync(in_thread)
                refused.set()
        await over.wait()
        # None of the refused calls has a number, or a line.
        return f"{await job.step(one)} {child.result}"

    jobs = [trees.enqueue("bystander"), trees.enqueue("mistaken")]
    with trio.fail_after(30):
        await trees.burst()
    found = [trees.job(job_id) for job_id in jobs]
    assert [(row["state"], row["attempt"], row["result"]) for row in found] == [
        ("completed", 1, "packed"),
        ("completed", 1, "one packed"),
    ]
    assert [key for _, key, _ in trees.lines(jobs[1]) if "step" in key] == ["3:step"]
    where = "in another run of Trio, in a thread" if loop is trio else "in a thread"
    refusals = dict(said)
    assert refusals.pop("start_soon(pack)").startswith(f"start_soon(pack) {where}: start it in the handler itself.")
    refusals["job.step again"] = refusals.pop("made")
    for name, text in refusals.items():
        named = name.removesuffix(" again")
        assert text == (
            f"{named} {where}: call it in the handler itself, or from the thread through trio.from_thread.run."
        )
    assert len(said) == len(CALLS) + 1


async def test_a_thread_makes_a_durable_call_through_the_workers_run(trees: Trees) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        return await trio.to_thread.run_sync(lambda: trio.from_thread.run(job.step, one))

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst()
    assert trees.job(job_id)["result"] == "one"


async def test_the_reason_of_a_cancellation_does_not_depend_on_the_clock_of_another_run(trees: Trees) -> None:
    """Each run of Trio has a clock that begins at a random moment: most are ahead of the worker's, and no lease is proven."""

    class Ahead(trio.abc.Clock):
        def start_clock(self) -> None: ...

        def current_time(self) -> float:
            return 1e12

        def deadline_to_sleep_time(self, deadline: float) -> float:
            return deadline - 1e12

    @trees.handlers.job
    async def plain(job: Job) -> str:
        async def ask() -> str:
            return f"{job.cancel_reason}"

        return await trio.to_thread.run_sync(lambda: trio.run(ask, clock=Ahead()))

    job_id = trees.enqueue("plain")
    with trio.fail_after(30):
        await trees.burst()
    assert (trees.job(job_id)["attempt"], trees.job(job_id)["result"]) == (1, "None")
