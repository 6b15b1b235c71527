"""`job.move_on_after` and `job.fail_after`: deadlines that later attempts keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.lowlevel

from pulse_trio import Job, UsageError

if TYPE_CHECKING:
    from support.trees import Trees

SCOPE_CANCELLED, MOMENT, CANCELLED = 8, 10, 9


async def test_a_deadline_that_struck_strikes_again_at_the_same_place_and_at_once(trees: Trees) -> None:
    calls: list[str] = []

    async def quick() -> int:
        calls.append("quick")
        return 1

    async def slow() -> None:
        calls.append("slow")
        await trio.sleep_forever()

    async def refund(charge: int) -> str:
        calls.append("refund")
        return f"refunded {charge}"

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> list[object]:
        charge, said = 0, ""
        began = trio.current_time()
        with job.move_on_after(0.3) as patience:
            charge = await job.step(quick)
            await job.step(slow)
        if patience.cancelled_caught:
            said = await job.step(refund, charge)
        if job.attempt < 3:
            raise ValueError("not yet")
        return [said, trio.current_time() - began < 0.25]

    job_id = trees.enqueue("order")
    for _ in range(3):
        trees.again()
        await trees.burst()
    assert trees.job(job_id)["result"] == ["refunded 1", True]
    assert calls == ["quick", "slow", "refund"]
    assert [(kind, key) for kind, key, _ in trees.lines(job_id)] == [
        (MOMENT, "1:scope"), (1, "2:step"), (SCOPE_CANCELLED, "1:scope"), (1, "4:step"),
    ]  # fmt: skip


async def test_the_time_counts_from_the_first_attempt(trees: Trees) -> None:
    left: list[bool] = []

    async def mark() -> None: ...

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        with job.move_on_after(0.5) as patience:
            await job.step(mark)
            if job.attempt == 1:
                raise ValueError("not yet")
            await trio.sleep_forever()
        left.append(patience.cancelled_caught)

    trees.enqueue("order")
    await trees.burst()
    await trio.sleep(0.6)
    trees.again()
    with trio.fail_after(10):
        await trees.burst()
    assert left == [True]


async def test_a_plain_await_that_a_deadline_cut_short_is_cut_short_again(trees: Trees) -> None:
    async def mark(text: str) -> str:
        return text

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        with job.move_on_after(0.2):
            await trio.sleep_forever()
        said = await job.step(mark, "after")
        if job.attempt == 1:
            raise ValueError("not yet")
        return said

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.again()
    with trio.fail_after(10):
        await trees.burst()
    assert trees.job(job_id)["result"] == "after"


async def test_fail_after_raises_trios_own_error_in_each_attempt(trees: Trees) -> None:
    async def slow() -> None:
        await trio.sleep_forever()

    async def note() -> str:
        return "noted"

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        try:
            with job.fail_after(0.2):
                await job.step(slow)
        except trio.TooSlowError:
            said = await job.step(note)  # noqa: ASYNC120
            if job.attempt == 1:
                raise ValueError("not yet") from None
            return said
        return "?"

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.again()
    await trees.burst()
    assert trees.job(job_id)["result"] == "noted"


async def test_a_plain_scope_works_within_its_attempt_and_a_later_one_is_told_of_the_remembered_kind(
    trees: Trees,
) -> None:
    async def slow() -> None:
        await trio.sleep_forever()

    async def note() -> str:
        return "noted"

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        with trio.move_on_after(0.2):
            await job.step(slow)
        said = await job.step(note)
        if job.attempt == 1 and job.queue == "fails":
            raise ValueError("not yet")
        return said

    good, bad = trees.enqueue("order"), trees.enqueue("order", queue="fails")
    await trees.burst()
    assert trees.job(good)["result"] == "noted"
    trees.again()
    await trees.burst()
    assert trees.job(bad)["state"] == "dead"
    assert "use job.move_on_after" in trees.job(bad)["error"]


async def test_a_timeout_with_compensation_comes_again_where_it_came(trees: Trees) -> None:
    calls: list[str] = []

    async def slow() -> None:
        calls.append("slow")
        await trio.sleep_forever()

    async def refund() -> None:
        calls.append("refund")

    @trees.handlers.job(durable=True, timeout=0.5, max_attempts=2)
    async def order(job: Job) -> None:
        try:
            await job.step(slow)
        except trio.Cancelled:
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC102
            raise

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.again()
    await trees.burst()
    assert (trees.job(job_id)["state"], calls) == ("dead", ["slow", "refund"])
    assert [kind for kind, _, _ in trees.lines(job_id)] == [CANCELLED, 1]


async def test_a_timeout_without_compensation_leaves_no_line_and_the_next_attempt_goes_on(trees: Trees) -> None:
    calls: list[int] = []

    async def first() -> int:
        return 1

    async def slow() -> str:
        calls.append(1)
        if len(calls) == 1:
            await trio.sleep_forever()
        return "done"

    @trees.handlers.job(durable=True, timeout=0.5)
    async def order(job: Job) -> str:
        await job.step(first)
        return await job.step(slow)

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.again()
    await trees.burst()
    assert trees.job(job_id)["result"] == "done"
    assert [kind for kind, _, _ in trees.lines(job_id)] == [1, 1]


@pytest.mark.parametrize("last", ["block", "step"])
async def test_a_block_that_ended_in_time_is_not_cut_short_in_an_attempt_that_comes_after_its_deadline(
    last: str, trees: Trees
) -> None:
    branches: list[str] = []

    @trees.handlers.job
    async def child() -> None: ...

    async def quick() -> None: ...

    async def act(branch: str) -> None:
        branches.append(branch)
        if len(branches) == 1:
            raise ValueError("the process dies here, before the line of this step")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        with job.move_on_after(30) as patience:
            if last == "block":
                async with job.durable_nursery() as nursery:
                    nursery.start_soon(child)
            else:
                await job.step(quick)
                await trio.lowlevel.checkpoint()
        await job.step(act, "refund" if patience.cancelled_caught else "ship")

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["state"] == "retryable"
    # An hour later.
    trees.window.run("UPDATE history SET value = '1.0' WHERE kind = %s AND key = '1:scope'", MOMENT)
    trees.again()
    await trees.burst()
    assert branches == ["ship", "ship"]
    assert trees.job(job_id)["state"] == "completed"


async def test_the_names_that_the_history_derives_from_a_key_are_no_keys_of_other_calls(trees: Trees) -> None:
    said: list[str] = []

    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> None:
        async with job.durable_nursery(key="a"):
            pass
        for key in ("block a", "a body"):
            try:
                with job.move_on_after(5, key=key):
                    await trio.lowlevel.checkpoint()
            except UsageError as error:
                said.append(str(error))
        with job.move_on_after(5, key="b"):
            pass
        try:
            await job.sleep(0, key="b ended")
        except UsageError as error:
            said.append(str(error))

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["state"] == "completed"
    assert [error.split(": ")[1].split(";")[0] for error in said] == [
        f"the key {key!r} is used twice in this job (as {key!r})" for key in ("block a", "a body", "b ended")
    ]


@pytest.mark.parametrize("way", ["suspended", "rescued"])
async def test_a_deadline_that_passes_between_two_attempts_reaches_the_children_of_the_block_around_which_it_is(
    trees: Trees, way: str
) -> None:
    seen: list[object] = []

    @trees.handlers.job(queue="elsewhere")
    async def child() -> None: ...

    async def note() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> str:
        with job.move_on_after(3600) as patience:
            await job.progress(0.1, "packing")  # a plain await
            async with job.durable_nursery() as nursery:
                nursery.start_soon(child)
        seen.append([row["state"] for row in trees.window.run("SELECT state FROM jobs WHERE parent_id = %s", job.id)])
        await job.step(note)
        return "cut" if patience.cancelled_caught else "waited"

    job_id = trees.enqueue("parent")
    await trees.burst(queues=("default",))
    assert trees.job(job_id)["state"] == "suspended"
    if way == "rescued":
        # As if its worker had died: nothing says any more that it was suspended.
        trees.window.run(
            "UPDATE durable_job SET blocks = '{}', fail_blocks = '{}', suspended = NULL WHERE job_id = %s", job_id
        )
    trees.window.run(
        "UPDATE history SET value = to_json(extract(epoch FROM now())::float8) WHERE job_id = %s AND kind = 10", job_id
    )
    trees.again()
    with trio.fail_after(30):
        await trees.burst(queues=("default",))
    assert (trees.job(job_id)["result"], seen) == ("cut", [["cancelled"]])


async def test_a_deadline_strikes_elsewhere_if_the_code_does_not_open_its_block_again(trees: Trees) -> None:
    @trees.handlers.job(queue="elsewhere")
    async def child() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> str:
        with job.move_on_after(3600) as patience:
            if job.attempt == 1:
                async with job.durable_nursery(key="packing") as nursery:
                    nursery.start_soon(child)
            await job.wait_for_event("packed", key="packed")
        return "cut" if patience.cancelled_caught else "waited"

    job_id = trees.enqueue("parent")
    await trees.burst(queues=("default",))
    trees.window.run(
        "UPDATE history SET value = to_json(extract(epoch FROM now())::float8) "
        "WHERE job_id = %s AND kind = 10 AND key LIKE '%%scope'", job_id
    )  # fmt: skip
    trees.again()
    with trio.fail_after(30):
        await trees.burst(queues=("default",))
    assert (trees.job(job_id)["state"], trees.job(job_id)["result"]) == ("completed", "cut")
