"""`run_job` of durable handlers, without a database."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import trio

from pulse_trio import Discard, Handlers, Job, State
from pulse_trio.errors import ChildFailed, InvalidArguments
from pulse_trio.testing import ChildRun, StepRun, run_job, run_job_sync

handlers = Handlers()
LOG: list[str] = []


async def charge(order: int) -> str:
    LOG.append(f"charge {order}")
    return f"charge-{order}"


async def refund(charge: str) -> None:
    LOG.append(f"refund {charge}")


def fails() -> None:
    raise ValueError("no luck")


@handlers.job
async def label(order: int) -> str:
    return f"label-{order}.pdf"


@handlers.job(max_attempts=3)
async def pack(job: Job, order: int, parcel: int) -> int:
    if job.attempt == 1 and parcel == 13:
        raise ValueError("dropped")
    await trio.sleep(90 if parcel == 99 else 0)
    return order * 100 + parcel


@handlers.job(durable=True)
async def order(job: Job, number: int, parcels: list[int]) -> str:
    paid = await job.step(charge, number)
    try:
        with job.move_on_after(60) as patience:
            async with job.durable_nursery() as nursery:
                printed = nursery.start_soon(label, number)
                for parcel in parcels:
                    nursery.start_soon(pack.options(child_key=f"parcel-{parcel}"), number, parcel)
        if patience.cancelled_caught:
            raise Discard("not packed in time")
        approved = await job.wait_for_event("approved", type=str, timeout=timedelta(days=3))
        await job.sleep(timedelta(days=30))
    except BaseException:
        with job.cleanup():
            await job.step(refund, paid)  # noqa: ASYNC102 -- job.cleanup() is a shield with a deadline
        raise
    return f"{printed.result} {approved}"


@handlers.job(durable=True)
async def waits(job: Job) -> str:
    return await job.wait_for_event("approved", type=str)


@handlers.job(durable=True)
async def tries(job: Job) -> str:
    try:
        await job.step(fails)
    except Exception as error:
        await job.sleep(1)
        return type(error).__name__
    return ""


@handlers.job(durable=True)
async def nested(job: Job) -> str:
    async with job.durable_nursery() as nursery:
        inner = nursery.start_soon(order, 7, [1])
    return inner.result


@handlers.job(durable=True)
async def pays(job: Job) -> None:
    async def write(tx: Any) -> int:
        await tx.execute("INSERT INTO paid VALUES (1)")
        return 1

    await job.transaction_step(write)
    await job.sleep(10)


@pytest.fixture(autouse=True)
def clean_log() -> None:
    LOG.clear()


async def test_steps_run_once_children_run_in_place_and_months_pass_at_once() -> None:
    run = await run_job(order, 7, [1, 13], handlers=handlers, events={"approved": "Ada"})
    assert (run.outcome, run.result, run.waits_for) == ("completed", "label-7.pdf Ada", None)
    assert LOG == ["charge 7"]
    assert run.steps == [StepRun("charge", "charge-7")]
    assert run.children == [
        ChildRun("label", {"order": 7}, State.COMPLETED, "label-7.pdf", key="#1"),
        ChildRun("pack", {"order": 7, "parcel": 1}, State.COMPLETED, 701, key="parcel-1"),
        ChildRun("pack", {"order": 7, "parcel": 13}, State.COMPLETED, 713, key="parcel-13"),
    ]


async def test_children_may_be_results_exceptions_or_functions_of_their_arguments() -> None:
    stubs: dict[Any, Any] = {label: "a.pdf", "pack": lambda job, order, parcel: parcel}
    run = await run_job(order, 7, [5], handlers=handlers, children=stubs, events={"approved": "Ada"})
    assert run.result == "a.pdf Ada"
    assert [child.result for child in run.children] == ["a.pdf", 5]
    run = await run_job(order, 7, [5], children={label: "a.pdf", pack: OSError("no paper")}, events={"approved": "Ada"})
    assert (run.outcome, [child.state for child in run.children]) == ("failed", ["completed", "dead"])
    assert isinstance(run.exception, ExceptionGroup)
    assert run.exception.subgroup(ChildFailed) is not None
    assert (run.children[1].error or "").startswith("OSError: no paper")
    assert LOG[-1] == "refund charge-7"


async def test_a_wait_that_nobody_ends_passes_to_its_timeout() -> None:
    run = await run_job(order, 7, [], handlers=handlers)
    assert (run.outcome, isinstance(run.exception, TimeoutError)) == ("failed", True)
    assert [step.name for step in run.steps] == ["charge", "refund"]


async def test_a_wait_without_a_timeout_leaves_the_job_suspended_and_says_for_what() -> None:
    run = await run_job(waits)
    assert (run.outcome, run.state, run.waits_for) == ("suspended", "suspended", "the event 'approved'")
    assert run.delay is None
    assert (await run_job(waits, events=[("other", 1), ("approved", "Ada")])).result == "Ada"


async def test_a_remembered_deadline_cancels_children_that_take_too_long(autojump_clock: Any) -> None:
    run = await run_job(order, 7, [99], handlers=handlers, events={"approved": "Ada"})
    assert (run.outcome, (run.error or "").splitlines()[0]) == ("discarded", "Discard: not packed in time")
    assert [child.state for child in run.children] == ["completed", "cancelled"]
    assert LOG == ["charge 7", "refund charge-7"]


async def test_a_cancellation_comes_in_the_jobs_own_time_and_its_compensation_runs() -> None:
    run = await run_job(order, 7, [], handlers=handlers, cancel_after=86400, cancel_message="not needed")
    assert (run.outcome, run.error) == ("cancelled", "not needed")
    assert LOG == ["charge 7", "refund charge-7"]


async def test_a_failed_step_is_remembered_with_its_error() -> None:
    run = await run_job(tries)
    assert (run.outcome, run.result) == ("completed", "StepFailed")
    assert run.steps[0].name == "fails"
    assert "no luck" in (run.steps[0].error or "")


async def test_a_durable_child_runs_in_place_too() -> None:
    run = await run_job(nested, handlers=handlers, children={label: "x.pdf"})
    # Nobody approves: its wait passes to the timeout, twenty times.
    assert (run.outcome, run.children[0].state) == ("failed", "dead")


async def test_a_transaction_step_is_a_step() -> None:
    run = await run_job(pays)
    assert (run.outcome, run.steps) == ("completed", [StepRun("write", 1)])


async def test_a_tree_is_no_deeper_than_with_a_worker() -> None:
    """A handler that starts itself for ever ends as it does there, and not with the time of the test."""
    handlers, levels = Handlers(), list[int]()

    @handlers.job(durable=True, max_attempts=1)
    async def deep(job: Job, level: int) -> None:
        levels.append(level)
        async with job.durable_nursery() as nursery:
            nursery.start_soon(deep, level + 1)

    run = await run_job(deep, 1, handlers=handlers)
    assert (run.outcome, max(levels)) == ("failed", 32)
    assert "ChildFailed: Child 2 (deep" in (run.error or "")


async def test_a_child_without_a_handler_says_what_to_pass() -> None:
    with pytest.raises(InvalidArguments, match=r"starts a child of kind 'label', which has no handler here"):
        await run_job(order, 7, [])


async def test_children_are_for_durable_handlers() -> None:
    with pytest.raises(InvalidArguments, match="children and events are for durable handlers, 'label' is none"):
        await run_job(label, 7, events={"approved": 1})


def test_it_runs_without_an_event_loop() -> None:
    assert run_job_sync(waits, events={"approved": "Ada"}).result == "Ada"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_it_runs_under_asyncio(anyio_backend: str) -> None:
    assert (await run_job(waits, events={"approved": "Ada"})).result == "Ada"


def packed(order: int, parcel: int) -> int:
    return order + parcel


async def packed_later(order: int, parcel: int) -> int:
    await trio.lowlevel.checkpoint()
    return order + parcel


def packed_by_its_job(job: Job, parcel: int, order: int) -> int:
    return order + parcel * job.attempt // job.max_attempts


@pytest.mark.parametrize("function", [packed, packed_later, packed_by_its_job])
async def test_a_function_in_the_place_of_a_child_has_its_arguments_and_not_its_job(function: Any) -> None:
    """Unless it asks for that by its name."""
    run = await run_job(order, 40, [2], children={label: "a.pdf", pack: function}, events={"approved": "Ada"})
    assert (run.outcome, [child.result for child in run.children]) == ("completed", ["a.pdf", 42])


@pytest.mark.parametrize("reason", ["shutdown", "fence-lost", "lease-unproven"])
async def test_what_happens_to_workers_does_not_reach_a_suspended_job(reason: Any) -> None:
    """The run waited for ever, or had the state "scheduled"."""

    async def waits(job: Job) -> None:
        await job.wait_for_event("approved", timeout=3600)

    durable = Handlers().job(durable=True)(waits)
    with trio.fail_after(60):
        run = await run_job(durable, cancel_after=1800, cancel_reason=reason)
    assert (run.outcome, run.state, run.delay) == ("suspended", State.SUSPENDED, None)
    assert run.waits_for == "the event 'approved' or the end of a wait"
