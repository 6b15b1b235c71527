"""A cancellation of a tree, from the client's call to the handlers of its members."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from pulse_trio import ChildFailed, Discard, Handlers, Job, SyncClient, Worker, open_client
from pulse_trio.lines import Kind
from pulse_trio.migrate import known_migrations
from pulse_trio.sql import render
from support.held_up import held_up, let_go, until_it_waits

if TYPE_CHECKING:
    from support.databases import Databases
    from support.trees import Trees


async def test_a_cancelled_parent_ends_after_its_children_each_of_which_hears_why(databases: Databases) -> None:
    handlers = Handlers()
    heard: list[tuple[str, str | None, str | None]] = []
    all_run = trio.Event()
    began: list[int] = []

    @handlers.job
    async def child(job: Job, number: int) -> None:
        began.append(number)
        if len(began) == 3:
            all_run.set()
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            heard.append((f"child {number}", job.cancel_reason, job.cancel_message))
            raise

    @handlers.job(durable=True)
    async def parent(job: Job) -> None:
        try:
            async with job.durable_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(child, number)
        except trio.Cancelled:
            heard.append(("parent", job.cancel_reason, job.cancel_message))
            raise

    with databases.migrated() as dsn:
        async with trio.open_nursery() as nursery, open_client(dsn) as client:
            worker = Worker(handlers, dsn=dsn, log=False)
            nursery.start_soon(worker.run)
            ref = await client.enqueue(parent)
            with trio.fail_after(60):
                await all_run.wait()
                ended = await client.cancel(ref.id, reason="enough", wait=True)
            tree = await client.tree(ref.id)
            worker.stop_now()
    assert ended.state == "cancelled"
    assert [(job.state, job.cancel_reason) for job in tree] == [("cancelled", "enough"), *[("cancelled", "parent")] * 3]
    assert sorted(heard[:3]) == [(f"child {number}", "parent", None) for number in range(3)]
    assert heard[3:] == [("parent", "user", "enough")]


@pytest.mark.parametrize("again", ["a retry of the root", "the next attempt of its parent"])
async def test_a_cancelled_job_that_has_compensated_begins_anew_when_it_goes_back(again: str, trees: Trees) -> None:
    """Its history holds the cancellation: to go on after it would be to be cancelled for ever."""
    calls: list[str] = []
    stands = trio.Event()

    async def call(what: str) -> None:
        calls.append(what)

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        await job.step(call, "charge")
        if calls.count("charge") == 1:
            try:
                stands.set()
                await trio.sleep_forever()
            except trio.Cancelled:
                with job.cleanup():
                    await job.step(call, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise
        return "shipped"

    @trees.handlers.job
    async def sibling(job: Job) -> None:
        await stands.wait()
        if job.attempt == 1:
            raise Discard("the first time")

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> str:
        async with job.durable_nursery() as nursery:
            ordered = nursery.start_soon(order)
            nursery.start_soon(sibling)
        return ordered.result

    if again == "a retry of the root":
        root = trees.enqueue("order")
        async with trio.open_nursery() as workers:
            workers.start_soon(trees.burst)
            await stands.wait()
            SyncClient(trees.dsn).cancel(root)
        assert (trees.job(root)["state"], calls) == ("cancelled", ["charge", "refund"])
        SyncClient(trees.dsn).retry(root)
    else:
        root = trees.enqueue("parent")
        await trees.burst()
        assert (trees.job(root)["state"], calls) == ("retryable", ["charge", "refund"])
        trees.again()
    with trio.fail_after(30):
        await trees.burst()
    assert (trees.job(root)["state"], trees.job(root)["result"]) == ("completed", "shipped")
    # What was refunded is charged again.
    assert calls == ["charge", "refund", "charge"]


@pytest.mark.parametrize("standing", ["in a durable call", "in a plain await"])
async def test_a_cancellation_is_in_the_history_before_its_compensation_wherever_the_job_stood(
    standing: str, trees: Trees
) -> None:
    """Else an attempt that comes after a lost one would stand in the plain await, and wait for the end of its replay."""
    stands = trio.Event()

    async def charge() -> None: ...

    async def refund() -> None: ...

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(charge)
        try:
            stands.set()
            if standing == "in a plain await":
                await trio.sleep_forever()
            await job.wait_for_event("never")
        except trio.Cancelled:
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trees.burst)
            await stands.wait()
            SyncClient(trees.dsn).cancel(job_id)
    assert trees.job(job_id)["state"] == "cancelled"
    kinds = [Kind(int(kind)) for kind, _, _ in trees.lines(job_id)]
    assert kinds == [Kind.STEP, Kind.CANCELLED, Kind.STEP]


async def test_the_async_client_ends_a_waiting_job_without_its_clean_up_and_lets_one_begin_anew(trees: Trees) -> None:
    calls: list[str] = []

    async def note(what: str) -> None:
        calls.append(what)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        try:
            await job.step(note, "begun")
            await job.wait_for_event("go")
        except trio.Cancelled:
            with job.cleanup():
                await job.step(note, "undone")  # noqa: ASYNC102 -- job.cleanup() is shielded
            raise

    one, two = trees.enqueue("order"), trees.enqueue("order")
    await trees.burst()
    async with open_client(trees.dsn) as client:
        assert (await client.cancel(one, now=True)).state == "cancelled"
        await client.cancel_many([two], now=True)
        assert calls == ["begun", "begun"]
        # Its history stands: a retry goes on with it, but for one that begins anew.
        await client.retry(one)
        await client.retry(two, afresh=True)
        await trees.burst()
        assert calls == ["begun"] * 3
        # Without `now` it runs once more, and undoes what it has done.
        await client.cancel(one)
        await trees.burst()
    assert calls == [*["begun"] * 3, "undone"]
    assert [trees.job(job_id)["state"] for job_id in (one, two)] == ["cancelled", "suspended"]


@pytest.mark.parametrize("stands", ["runs", "waits"])
@pytest.mark.parametrize("reason", ["sibling", "parent"])
async def test_a_child_that_a_person_cancels_has_failed_whatever_the_person_says(
    reason: str, stands: str, trees: Trees
) -> None:
    """What a block has cancelled itself says the same words, and is started again."""
    began: list[int] = []
    heard: list[str | None] = []
    runs = trio.Event()

    @trees.handlers.job
    async def child() -> None:
        began.append(1)
        runs.set()
        await trio.sleep_forever()

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> list[str | None]:
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(child.options(delay=0 if stands == "runs" else 3600))
                await nursery.flush()
                if stands == "waits":
                    runs.set()
        except* ChildFailed as failures:
            heard.extend(leaf.job.cancel_reason for leaf in failures.exceptions if isinstance(leaf, ChildFailed))
        return heard

    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trees.burst)
            await runs.wait()
            (found,) = trees.window.run("SELECT id FROM jobs WHERE parent_id = %s", job_id)
            SyncClient(trees.dsn).cancel(found["id"], reason=reason)
    assert trees.job(job_id)["result"] == [reason]
    assert len(began) == (stands == "runs")


def said(child: Any) -> tuple[str, object]:
    """What the outcome of a child says: its result, or why it was cancelled."""
    ended = child.outcome
    return str(ended.state), ended.unwrap() if ended.error is None else ended.error.job.cancel_reason


@pytest.mark.parametrize("collect", [True, False])
async def test_one_child_alone_is_cancelled_by_its_id(collect: bool, trees: Trees) -> None:
    """From outside, while its parent is suspended. A collecting block goes on; another cancels the siblings."""
    both = [trio.Event(), trio.Event()]

    @trees.handlers.job(durable=True, suspend_after=0)
    async def vote(job: Job, number: int) -> int:
        both[number].set()
        return await job.wait_for_event("answer", type=int)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def ask(job: Job) -> list[Any]:
        failed: list[Any] = []
        children: list[Any] = []
        try:
            async with job.durable_nursery(collect=collect) as nursery:
                children += [nursery.start_soon(vote, number) for number in range(2)]
        except* ChildFailed as failures:
            failed += [leaf.job for leaf in failures.exceptions if isinstance(leaf, ChildFailed)]
        return [(one.id, one.cancel_reason) for one in failed] if failed else list(map(said, children))

    job_id = trees.enqueue("ask")
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery, open_client(trees.dsn) as client:
            worker = trees.worker(log=False)
            nursery.start_soon(worker.run)
            for one in both:
                await one.wait()
            members = await client.tree(job_id)
            withdrawn, kept = sorted(member.id for member in members if member.parent_id == job_id)
            await client.cancel(withdrawn, reason="withdrawn")
            if collect:
                await client.send_event(kept, "answer", 7)
            await client.wait(job_id)
            worker.stop()
    states = {row["id"]: str(row["state"]) for row in trees.window.run("SELECT id, state FROM jobs")}
    if collect:
        assert trees.job(job_id)["result"] == [["cancelled", "withdrawn"], ["completed", 7]]
        assert states == {job_id: "completed", withdrawn: "cancelled", kept: "completed"}
    else:
        assert trees.job(job_id)["result"] == [[withdrawn, "withdrawn"]]
        assert states == {job_id: "completed", withdrawn: "cancelled", kept: "cancelled"}
        assert trees.job(kept)["cancel_reason"] == "sibling"


async def test_a_parent_cancels_one_child_alone_in_a_step_and_later_attempts_find_it_so(trees: Trees) -> None:
    withdrawals: list[int] = []

    async def withdraw(child_id: int) -> None:
        withdrawals.append(child_id)
        async with open_client(trees.dsn) as client:
            await client.cancel(child_id, reason="withdrawn")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def vote(job: Job, number: int) -> int:
        return await job.wait_for_event("answer", type=int) if number == 0 else number

    @trees.handlers.job(durable=True, suspend_after=0)
    async def ask(job: Job) -> list[Any]:
        async with job.durable_nursery(collect=True) as nursery:
            children = [nursery.start_soon(vote, number) for number in range(2)]
            await nursery.flush()
            await job.step(withdraw, children[0].id)
        await job.wait_for_event("go on")
        return list(map(said, children))

    job_id = trees.enqueue("ask")
    await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "suspended"
    SyncClient(trees.dsn).send_event(job_id, "go on", None)
    await trees.burst(log=False)
    assert trees.job(job_id)["result"] == [["cancelled", "withdrawn"], ["completed", 1]]
    assert len(withdrawals) == 1


async def test_the_upgrade_opens_the_requests_of_jobs_that_live_and_no_others(own_trees: Trees) -> None:
    """A version before closed the request with the first attempt that was lost."""
    trees = own_trees
    heard: list[tuple[str | None, str | None]] = []

    async def charge() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        await job.step(charge)
        try:
            await job.wait_for_event("never")
        except trio.Cancelled:
            if job.cancel_reason != "suspended":
                heard.append((job.cancel_reason, job.cancel_message))
            raise

    client = SyncClient(trees.dsn)
    ended, lives = trees.enqueue("order"), trees.enqueue("order")
    await trees.burst()
    client.cancel(ended, reason="the first")
    await trees.burst()
    client.cancel(lives, reason="the second")
    trees.window.run("UPDATE cancellation SET ended_at = now(), ended_as = 'cancelled' WHERE job_id = %s", lives)
    (upgrade,) = (m for m in known_migrations() if m.name == "requests_of_live_jobs_are_open")
    trees.window.connection.execute(render(upgrade.text, "pulse").encode())
    left = trees.window.run("SELECT job_id FROM cancellations WHERE ended_at IS NULL")
    assert [row["job_id"] for row in left] == [lives]
    await trees.burst()
    assert heard == [("user", "the first"), ("user", "the second")]
    assert trees.window.value("SELECT count(*) FROM cancellations WHERE ended_as = 'cancelled'") == 2


async def test_a_child_that_writes_its_first_line_while_its_block_is_swept_owes_its_clean_up(trees: Trees) -> None:
    """It had no line when the sweep began to read, and was suspended when the sweep locked it: it was ended as if it had not
    begun, and its charge was left."""
    undone: list[str] = []

    async def charge() -> None: ...

    async def refund() -> None:
        undone.append("refund")

    @trees.handlers.job(durable=True, suspend_after=0, queue="children")
    async def child(job: Job) -> None:
        await job.step(charge)
        try:
            await job.wait_for_event("never")
        except trio.Cancelled:
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    @trees.handlers.job(durable=True, suspend_after=0, queue="parents")
    async def parent(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(child)

    def sweep() -> None:
        with psycopg.connect(trees.dsn) as connection:
            connection.execute("SELECT pulse.sweep_children(%s, 'parent', NULL, 100)", [job_id])

    job_id = trees.enqueue("parent", queue="parents")
    await trees.burst(queues=["parents"])
    place, with_wait = (
        "FROM unnest(below) b\n",
        "FROM unnest(below) b CROSS JOIN LATERAL (SELECT {wait} WHERE b > 0 OFFSET 0) w\n",
    )
    with trio.fail_after(30), held_up(trees.dsn, "pulse.sweep_children", place, with_wait=with_wait) as holder:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, sweep)
            await until_it_waits(holder)
            await trees.burst(queues=["children"])
            let_go(holder)
        await trees.burst(queues=["children"])
    assert undone == ["refund"]
    assert trees.window.run("SELECT state FROM jobs WHERE kind = 'child'") == [{"state": "cancelled"}]
