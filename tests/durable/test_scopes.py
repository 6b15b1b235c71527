"""`job.move_on_after` and `job.fail_after`: deadlines that later attempts keep."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import trio
import trio.lowlevel

from pulse_trio import Discard, Job, SyncClient, UsageError
from pulse_trio.observe import CancellationDelivered
from pulse_trio.worker.durable import scopes
from support.stage import Recorder

if TYPE_CHECKING:
    from support.trees import Trees

STEP, SCOPE_CANCELLED, MOMENT, CANCELLED = 1, 8, 10, 9


def pass_deadlines(trees: Trees, job_id: int, *keys: str) -> None:
    """The remembered deadlines with these keys pass while no worker has the job, which is due now."""
    trees.window.run(
        "UPDATE history SET value = to_json(extract(epoch FROM now())::float8) "
        "WHERE job_id = %s AND kind = 10 AND key = ANY (%s)", job_id, list(keys)
    )  # fmt: skip
    trees.again()


def states(trees: Trees, job_id: int, kind: str = "child") -> list[str]:
    """Those of its children of that kind."""
    found = trees.window.run("SELECT state FROM jobs WHERE parent_id = %s AND kind = %s ORDER BY id", job_id, kind)
    return [row["state"] for row in found]


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


@pytest.mark.parametrize("way", ["suspended", "rescued", "begun by an older version"])
async def test_a_deadline_that_passes_between_two_attempts_reaches_the_children_of_the_block_around_which_it_is(
    trees: Trees, way: str
) -> None:
    seen: list[list[str]] = []

    @trees.handlers.job(queue="elsewhere")
    async def child() -> None: ...

    async def note() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> str:
        with job.move_on_after(3600) as patience:
            await job.progress(0.1, "packing")  # a plain await
            async with job.durable_nursery() as nursery:
                nursery.start_soon(child)
        seen.append(states(trees, job.id))
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
    elif way == "begun by an older version":
        # It did not write what stands in which scope.
        trees.window.run("DELETE FROM history WHERE job_id = %s AND key LIKE '%%body'", job_id)
        trees.window.run("UPDATE history SET name = NULL WHERE job_id = %s", job_id)
    pass_deadlines(trees, job_id, "1:scope")
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
    pass_deadlines(trees, job_id, "1:scope")
    with trio.fail_after(30):
        await trees.burst(queues=("default",))
    found = trees.job(job_id)
    assert (found["state"], found["result"], states(trees, job_id)) == ("completed", "cut", ["cancelled"])


async def test_a_deadline_does_not_wait_for_blocks_outside_of_its_scope(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scopes, "REOPENED_WITHIN", 3600.0)
    cut: list[str] = []
    free = trio.Event()

    @trees.handlers.job(queue="elsewhere")
    async def child() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> None:
        async def pack(name: str) -> None:
            if name == "late" and job.attempt > 1:
                await free.wait()  # as for a slot of a limiter
            with job.move_on_after(3600, key=name) as patience:
                async with job.durable_nursery(key=f"block of {name}") as nursery:
                    nursery.start_soon(child.options(child_key="one"))
            if patience.cancelled_caught:
                cut.append(name)
            if name == "early":
                with job.move_on_after(0.05, key="new") as patience:  # no attempt before came here
                    await trio.sleep_forever()
                cut.append("new")
                free.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pack, "early")
            nursery.start_soon(pack, "late")

    job_id = trees.enqueue("parent")
    await trees.burst(queues=("default",))
    assert trees.job(job_id)["state"] == "suspended"
    pass_deadlines(trees, job_id, "early", "late")
    with trio.fail_after(30):
        await trees.burst(queues=("default",))
    assert (trees.job(job_id)["state"], cut) == ("completed", ["early", "new", "late"])
    assert states(trees, job_id) == ["cancelled"] * 2


async def test_a_deadline_waits_for_what_is_in_scopes_inside_of_its_own_and_not_for_what_is_beside_it(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scopes, "REOPENED_WITHIN", 3600.0)
    cut: list[str] = []
    beside = trio.Event()

    @trees.handlers.job(queue="elsewhere")
    async def child() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> None:
        async def pack() -> None:
            if job.attempt > 1:
                await beside.wait()  # cut short here if the outer scope did not wait for the block
            with job.move_on_after(7200, key="inner"):
                async with job.durable_nursery(key="packing") as nursery:
                    nursery.start_soon(child.options(child_key="one"))

        async def approve() -> None:
            with job.move_on_after(3600, key="beside") as patience:
                await job.wait_for_event("approved", key="approval")
            if patience.cancelled_caught:
                cut.append("beside")
                beside.set()

        with job.move_on_after(3600, key="outer") as patience:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pack)
                nursery.start_soon(approve)
        if patience.cancelled_caught:
            cut.append("outer")
        assert states(trees, job.id) == ["cancelled"]

    job_id = trees.enqueue("parent")
    await trees.burst(queues=("default",))
    pass_deadlines(trees, job_id, "outer", "beside")
    with trio.fail_after(30):
        await trees.burst(queues=("default",))
    assert (trees.job(job_id)["state"], cut) == ("completed", ["beside", "outer"])


@pytest.mark.parametrize("second", ["comes to the block", "stands before it", "is lost after that", "opens it no more"])
@pytest.mark.parametrize("key", [None, "packing"])
async def test_the_children_of_a_block_end_with_its_deadline_wherever_that_finds_the_next_attempt(
    second: str, key: str | None, trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scopes, "REOPENED_WITHIN", 0.2)
    calls: list[object] = []

    @trees.handlers.job(queue="elsewhere")
    async def child() -> None: ...

    @trees.handlers.job
    async def refund() -> None:
        calls.append("refund")

    async def look(job_id: int) -> list[str]:
        calls.append("look")
        return states(trees, job_id)

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=9)
    async def parent(job: Job) -> list[str]:
        with job.move_on_after(3600), job.move_on_after(7200):
            if job.attempt == 2 and second != "comes to the block":
                await trio.sleep_forever()  # a request that gets no answer
            await trio.lowlevel.checkpoint()
            if job.attempt < 2 or second != "opens it no more":
                async with job.durable_nursery(key=key) as nursery:
                    nursery.start_soon(child)
        if job.attempt == 2 and second == "is lost after that":
            raise ValueError("before anything rests on it")
        seen = await job.step(look, job.id)
        async with job.durable_nursery() as nursery:
            nursery.start_soon(refund)
        if job.attempt < 4:
            raise ValueError("not yet")
        return seen

    job_id = trees.enqueue("parent")
    await trees.burst(queues=("default",))
    pass_deadlines(trees, job_id, "1:scope")
    with trio.fail_after(30):
        while trees.job(job_id)["attempt"] < 4 or trees.job(job_id)["state"] == "suspended":
            await trees.burst(queues=("default",))
            trees.again()
    found = trees.job(job_id)
    assert (found["result"], found["error"]) == (["cancelled"], None)
    assert calls == ["look", "refund"]


async def test_the_next_durable_call_waits_for_the_children_of_a_block_that_was_not_opened_again(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scopes, "REOPENED_WITHIN", 0.0)
    calls: list[str] = []
    runs, cleans_up = trio.Event(), trio.Event()

    @trees.handlers.job(queue="elsewhere")
    async def child(job: Job) -> None:
        runs.set()
        try:
            await trio.sleep_forever()
        finally:
            with job.cleanup():
                cleans_up.set()
                for _ in range(20):
                    await trio.lowlevel.checkpoint()  # noqa: ASYNC102
                calls.append("child has ended")

    async def note() -> None:
        calls.append("note")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> None:
        with job.move_on_after(3600):
            if job.attempt > 1:
                await trio.sleep_forever()
            async with job.durable_nursery() as nursery:
                nursery.start_soon(child)
        await job.step(note)

    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await trees.burst(queues=("default",))
            nursery.start_soon(trees.worker(queues=("elsewhere",)).run)
            await runs.wait()
            pass_deadlines(trees, job_id, "1:scope")
            await trees.burst(queues=("default",))
            nursery.cancel_scope.cancel()
    assert (trees.job(job_id)["state"], calls) == ("completed", ["child has ended", "note"])


@pytest.mark.usefixtures("replay_stands_still")
async def test_children_that_were_left_behind_are_waited_for_by_the_task_of_their_scope_alone_and_after_a_replay_too(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scopes, "REOPENED_WITHIN", 0.0)
    calls: list[str] = []
    runs, cleans_up, clean, replayed = trio.Event(), trio.Event(), trio.Event(), trio.Event()

    @trees.handlers.job(queue="elsewhere")
    async def child(job: Job) -> None:
        runs.set()
        try:
            await trio.sleep_forever()
        finally:
            with job.cleanup():
                cleans_up.set()
                await clean.wait()  # noqa: ASYNC102
                calls.append("child has ended")

    async def note(what: str) -> None:
        calls.append(what)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> None:
        async def approve() -> None:
            await job.wait_for_event("approved", key="approval")
            for _ in range(20):
                await trio.lowlevel.checkpoint()  # in a replay the other task comes to its step meanwhile
            await job.step(note, "approved", key="stamp")
            if job.attempt > 2:
                replayed.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(approve)
            with job.move_on_after(3600):
                if job.attempt > 1:
                    await trio.sleep_forever()
                async with job.durable_nursery() as block:
                    block.start_soon(child)
            with job.move_on_after(3600):  # now it is written that the other one struck
                await job.step(note, "cut")

    job_id = trees.enqueue("parent")
    with trio.fail_after(40):
        await trees.burst(queues=("default",))
        async with trio.open_nursery() as children:
            children.start_soon(trees.worker(queues=("elsewhere",), cleanup=30.0).run)
            await runs.wait()
            pass_deadlines(trees, job_id, "1:scope")
            async with trio.open_nursery() as second:
                second.start_soon(trees.worker(queues=("default",)).run)
                await cleans_up.wait()
                SyncClient(trees.dsn).send_event(job_id, "approved", None)
                while (STEP, "stamp", "note") not in trees.lines(job_id):  # noqa: ASYNC110 -- no event tells of it
                    await trio.sleep(0.01)
                second.cancel_scope.cancel()
            trees.again()
            async with trio.open_nursery() as third:
                third.start_soon(trees.worker(burst=True, queues=("default",)).run)
                await replayed.wait()
                for _ in range(20):
                    await trio.lowlevel.checkpoint()
                clean.set()
            children.cancel_scope.cancel()
    assert (trees.job(job_id)["state"], calls) == ("completed", ["approved", "child has ended", "cut"])


@pytest.mark.parametrize("end", ["transaction", "return"])
async def test_a_job_is_not_completed_before_the_children_of_a_block_that_was_not_opened_again_have_ended(
    end: str, trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scopes, "REOPENED_WITHIN", 0.0)
    seen: list[list[str]] = []

    @trees.handlers.job(queue="elsewhere")
    async def child() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> None:
        with job.move_on_after(3600):
            if job.attempt > 1:
                await trio.sleep_forever()
            async with job.durable_nursery() as nursery:
                nursery.start_soon(child)
        if end == "transaction":
            async with job.transaction():
                seen.append(states(trees, job.id))

    job_id = trees.enqueue("parent")
    await trees.burst(queues=("default",))
    pass_deadlines(trees, job_id, "1:scope")
    with trio.fail_after(30):
        await trees.burst(queues=("default",))
    assert (trees.job(job_id)["state"], states(trees, job_id)) == ("completed", ["cancelled"])
    assert seen == ([["cancelled"]] if end == "transaction" else [])


async def test_a_person_can_cancel_a_job_whose_handler_has_returned_and_waits_for_such_children(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scopes, "REOPENED_WITHIN", 0.0)
    runs, cleans_up, clean = trio.Event(), trio.Event(), trio.Event()

    @trees.handlers.job(queue="elsewhere")
    async def child(job: Job) -> None:
        runs.set()
        try:
            await trio.sleep_forever()
        finally:
            with job.cleanup():
                cleans_up.set()
                await clean.wait()  # noqa: ASYNC102

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> None:
        with job.move_on_after(3600):
            if job.attempt > 1:
                await trio.sleep_forever()
            async with job.durable_nursery() as nursery:
                nursery.start_soon(child)

    job_id = trees.enqueue("parent")
    with trio.fail_after(40):
        await trees.burst(queues=("default",))
        async with trio.open_nursery() as children:
            children.start_soon(trees.worker(queues=("elsewhere",), cleanup=30.0).run)
            await runs.wait()
            trees.events = Recorder()
            pass_deadlines(trees, job_id, "1:scope")
            async with trio.open_nursery() as second:
                second.start_soon(trees.worker(burst=True, queues=("default",)).run)
                await cleans_up.wait()
                SyncClient(trees.dsn).cancel(job_id)
                await trees.events.first(CancellationDelivered)
                clean.set()
            children.cancel_scope.cancel()
    assert trees.job(job_id)["state"] == "cancelled"


async def test_the_calls_after_a_scope_do_not_get_what_was_remembered_for_those_in_it(trees: Trees) -> None:
    async def note() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=9)
    async def order(job: Job) -> str:
        with job.move_on_after(3600):
            await trio.lowlevel.checkpoint()
            await job.sleep(7200)
        await job.sleep(0.01)
        await job.step(note)
        if job.attempt < 5:
            raise ValueError("not yet")
        return "slept"

    job_id = trees.enqueue("order")
    await trees.burst()
    pass_deadlines(trees, job_id, "1:scope")
    for _ in range(5):
        with trio.fail_after(30):
            await trees.burst()
        trees.again()
    assert trees.job(job_id)["result"] == "slept"


async def test_a_block_after_a_scope_is_not_one_that_an_earlier_attempt_entered_in_it(trees: Trees) -> None:
    @trees.handlers.job(queue="elsewhere")
    async def child() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=9)
    async def order(job: Job) -> None:
        with job.move_on_after(3600):
            await trio.lowlevel.checkpoint()
            if job.attempt == 1:
                async with job.durable_nursery():
                    raise ValueError("before a child is started")
            await trio.sleep_forever()
        async with job.durable_nursery() as nursery:
            nursery.start_soon(child)

    job_id = trees.enqueue("order")
    await trees.burst(queues=("default",))
    pass_deadlines(trees, job_id, "1:scope")
    with trio.fail_after(30):
        await trees.burst(queues=("default",))
    # Else a later attempt takes it for that one, which it has left behind, and cancels its children.
    assert trees.window.run("SELECT block FROM member WHERE parent_id = %s", job_id) == [{"block": 3}]


async def test_a_scope_after_one_that_struck_keeps_its_deadline_where_no_durable_call_came_after_them(
    trees: Trees,
) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        with job.move_on_after(0.05):
            await trio.sleep_forever()
        with job.move_on_after(3600):
            if job.attempt == 1:
                raise ValueError("not yet")

    job_id = trees.enqueue("order")
    for _ in range(2):
        await trees.burst()
        trees.again()
    assert trees.job(job_id)["state"] == "completed"
    assert [(kind, key) for kind, key, _ in trees.lines(job_id)] == [
        (MOMENT, "1:scope"), (SCOPE_CANCELLED, "1:scope"), (MOMENT, "2:scope"),
    ]  # fmt: skip


async def test_a_person_who_cancels_a_job_whose_deadline_has_passed_finds_its_compensation(trees: Trees) -> None:
    calls: list[str] = []

    @trees.handlers.job(queue="elsewhere")
    async def child() -> None: ...

    async def refund() -> None:
        calls.append("refund")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> None:
        try:
            with job.move_on_after(3600):
                await trio.lowlevel.checkpoint()
                async with job.durable_nursery() as nursery:
                    nursery.start_soon(child)
            calls.append("cut by the deadline")
        except trio.Cancelled:
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC102
            raise

    job_id = trees.enqueue("parent")
    await trees.burst(queues=("default",))
    pass_deadlines(trees, job_id, "1:scope")
    SyncClient(trees.dsn).cancel(job_id)
    with trio.fail_after(30):
        await trees.burst(queues=("default",))
    assert (trees.job(job_id)["state"], states(trees, job_id), calls) == ("cancelled", ["cancelled"], ["refund"])


async def test_a_deadline_that_passes_while_a_failure_leaves_the_scope_has_cut_nothing_short(trees: Trees) -> None:
    """The attempt fails of it, and another task has undone something because of it."""
    done: list[str] = []

    async def act(what: str) -> None:
        done.append(what)

    @trees.handlers.job(max_attempts=1)
    async def child() -> None:
        raise Discard("out of stock")

    async def charges(job: Job) -> None:
        await job.step(act, "charge", key="charge")
        try:
            await job.sleep(3600, key="sleep")
        finally:
            with job.cleanup():
                await job.step(act, "refund", key="refund")  # noqa: ASYNC102 -- job.cleanup() is the shield

    async def packs(job: Job) -> None:
        with job.move_on_after(3600, key="outer"):
            with job.move_on_after(2, key="patience") as patience:
                try:
                    async with job.durable_nursery(key="packing") as nursery:
                        nursery.start_soon(child.options(child_key="child"))
                finally:
                    while job.attempt == 1 and not patience.cancel_called:
                        time.sleep(0.01)  # noqa: ASYNC251 -- so that no task goes on before the deadline passes
            await job.step(act, "after", key="after")

    @trees.handlers.job(durable=True, max_attempts=2)
    async def order(job: Job) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(charges, job)
            nursery.start_soon(packs, job)

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst(log=False)
            trees.again()
    found = trees.job(job_id)
    assert found["state"] == "dead"
    assert "ChildFailed" in found["error"]
    assert done == ["charge", "refund"]
