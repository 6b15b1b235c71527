"""Code that has changed under a job whose block has started children: what those have done is neither done again nor lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio

from pulse_trio import ChildFailed, Discard, Handlers, Job, SyncClient
from pulse_trio.worker.durable import changed
from pulse_trio.worker.durable.tree_store import LeaseGone
from support.trees import Trees, running_of

Body = Callable[["Shop", Job], Awaitable[Any]]


class Shop:
    """A parent whose children charge a card and wait, and whose code is replaced. `charged`: what they were called with."""

    def __init__(self, trees: Trees) -> None:
        self.trees = trees
        self.charged: list[int] = []
        self.done: list[str] = []
        self.beside = trio.Event()
        """Set when the task beside the main one has done its step."""
        self.client = SyncClient(trees.dsn)
        self.id = 0

    async def charge(self, order: int) -> int:
        self.charged.append(order)
        return order

    async def note(self, what: str) -> None:
        self.done.append(what)

    def deploy(self, body: Body, *, version: int = 1) -> None:
        handlers = self.trees.handlers = Handlers()
        shop = self

        @handlers.job(queue="cards", durable=True, suspend_after=0)
        async def pay(job: Job, order: int) -> int:
            charged = await job.step(shop.charge, order)
            await job.wait_for_event("confirmed")
            return charged

        @handlers.job(queue="late")
        async def fails() -> None:
            raise Discard("no funds")

        @handlers.job(durable=True, suspend_after=0, version=version)
        async def order(job: Job) -> Any:
            return await body(shop, job)

        @handlers.job
        async def check() -> None:
            pass

        self.pay, self.fails, self.check = pay, fails, check

    async def begin(self, body: Body) -> None:
        """The old code runs until it waits."""
        self.deploy(body)
        self.id = self.trees.enqueue("order")
        await self.run("default", "cards")

    async def run(self, *queues: str) -> None:
        with trio.fail_after(60):
            await self.trees.burst(queues=queues)

    async def resume(self, body: Body, **declared: Any) -> dict[str, Any]:
        """The new code goes on with the job. Returns it as it is then."""
        self.deploy(body, **declared)
        self.trees.window.run("UPDATE job SET run_at = clock_timestamp() WHERE id = %s", self.id)
        await self.run("default")
        return self.trees.job(self.id)

    def states(self) -> list[str]:
        found = self.trees.window.run("SELECT state::text AS state FROM jobs WHERE kind = 'pay' ORDER BY id")
        return [row["state"] for row in found]

    async def confirm(self) -> None:
        """The children end."""
        for row in self.trees.window.run("SELECT id FROM jobs WHERE kind = 'pay' AND finished_at IS NULL"):
            self.client.send_event(row["id"], "confirmed")
        await self.run("cards")


@pytest.fixture
def shop(trees: Trees) -> Shop:
    return Shop(trees)


async def block(shop: Shop, job: Job) -> Any:
    async with job.durable_nursery() as nursery:
        paid = [nursery.start_soon(shop.pay, n) for n in range(2)]
    return [one.result for one in paid]


async def block_in_a_scope(shop: Shop, job: Job) -> Any:
    with job.move_on_after(3600):
        return await block(shop, job)


async def block_that_writes(shop: Shop, job: Job) -> Any:
    async with job.durable_nursery() as nursery:
        for n in range(2):
            nursery.start_soon(shop.pay, n)
        await shop.beside.wait()
        await nursery.flush()


async def step_before(shop: Shop, job: Job) -> Any:
    await job.step(shop.note, "new")
    return await block(shop, job)


async def sleep_before(shop: Shop, job: Job) -> Any:
    await job.sleep(0.01)
    return await block(shop, job)


async def block_before(shop: Shop, job: Job) -> Any:
    async with job.durable_nursery(key="new") as nursery:
        nursery.start_soon(shop.pay, 7)
    return await block(shop, job)


async def with_a_key(shop: Shop, job: Job) -> Any:
    async with job.durable_nursery(key="payments") as nursery:
        for n in range(2):
            nursery.start_soon(shop.pay, n)


async def removed(shop: Shop, job: Job) -> Any:
    return "no block"


async def a_step_instead(shop: Shop, job: Job) -> Any:
    await job.step(shop.note, "new")


async def a_transaction_instead(shop: Shop, job: Job) -> Any:
    async with job.transaction(result="no block"):
        shop.done.append("new")


CHANGES = [
    (block, step_before, "now calls step note (key 1:step)"),
    (block, sleep_before, "now calls sleep (key 1:sleep)"),
    (block, block_before, "now calls block (key new)"),
    (block, block_in_a_scope, "now calls scope (key 1:scope)"),
    (block, with_a_key, "now calls block (key payments)"),
    (block, removed, "has returned"),
    (block, a_step_instead, "now calls step note (key 1:step)"),
    (block, a_transaction_instead, "now calls job.transaction(), which completes the job"),
    (block_in_a_scope, block, "now calls block (key 1:block) where it called 1:scope"),
    (block_in_a_scope, step_before, "now calls step note (key 1:step) where it called 1:scope"),
]


@pytest.mark.parametrize(("old", "new", "now"), CHANGES, ids=lambda one: getattr(one, "__name__", ""))
@pytest.mark.parametrize("ended", [False, True], ids=["waits", "ended"])
async def test_a_block_that_is_open_and_is_not_opened_again_is_a_mismatch(
    shop: Shop, old: Body, new: Body, now: str, ended: bool
) -> None:
    await shop.begin(old)
    if ended:
        await shop.confirm()
    assert shop.states() == ["completed" if ended else "suspended"] * 2
    found = await shop.resume(new)
    assert (shop.charged, shop.done) == ([0, 1], [])
    error = found["error"] or shop.trees.window.run("SELECT outcome::text AS error FROM durable_job")[0]["error"]
    number = 1 if old is block else 2
    assert f"ReplayMismatch: job {shop.id}, block {number}:block is open since an earlier attempt" in error
    assert f"but the handler {now}. The code changed" in error
    assert f"its child #1 is job {shop.id + 1}, {shop.states()[0] if ended else 'suspended'}; its child #2" in error
    # Those that wait are cancelled, and clean up before the job is dead.
    await shop.run("cards", "default")
    await shop.run("cards", "default")
    assert shop.states() == ["completed" if ended else "cancelled"] * 2
    assert shop.trees.job(shop.id)["state"] == "dead"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (block, step_before),
        (block, block_in_a_scope),
        (block_in_a_scope, block),
        (block_in_a_scope, block_that_writes),
    ],
)
async def test_so_it_is_where_the_history_has_lines_of_another_task(shop: Shop, old: Body, new: Body) -> None:
    def beside(body: Body) -> Body:
        async def both(shop: Shop, job: Job) -> Any:
            async def other() -> None:
                await trio.lowlevel.checkpoint()  # the main task is at its call before
                await trio.lowlevel.checkpoint()
                await job.step(shop.note, "other", key="other")
                shop.beside.set()

            shop.beside = trio.Event()
            job.nursery.start_soon(other)
            return await body(shop, job)

        return both

    await shop.begin(beside(old))
    await shop.confirm()
    found = await shop.resume(beside(new))
    assert (found["state"], shop.charged, shop.done) == ("dead", [0, 1], ["other"])
    assert len(shop.states()) == 2
    assert "block is open since an earlier attempt" in found["error"]


async def test_code_that_fits_again_goes_on_with_it(shop: Shop) -> None:
    await shop.begin(block)
    await shop.confirm()
    assert (await shop.resume(block_in_a_scope))["state"] == "dead"
    shop.deploy(block)
    shop.client.retry(shop.id)
    await shop.run("default")
    assert (shop.trees.job(shop.id)["result"], shop.charged) == ([0, 1], [0, 1])


async def test_a_branch_on_the_version_is_none(shop: Shop) -> None:
    async def newer(shop: Shop, job: Job) -> Any:
        return await (step_before if job.version >= 2 else block)(shop, job)

    await shop.begin(block)
    await shop.confirm()
    found = await shop.resume(newer, version=2)
    assert (found["state"], found["result"], shop.charged, shop.done) == ("completed", [0, 1], [0, 1], [])


async def test_code_that_fits_asks_for_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(changed, "answered", asked.append)
    await shop.begin(block_in_a_scope)
    await shop.confirm()
    assert ((await shop.resume(block_in_a_scope))["result"], asked) == ([0, 1], [])


async def test_the_children_of_a_block_that_the_body_ended_are_no_reason(shop: Shop) -> None:
    async def other_way(shop: Shop, job: Job) -> str:
        if job.attempt == 1:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(shop.pay, 1)
                await nursery.flush()
                raise ConnectionError("away")
        await job.step(shop.note, "other way")
        return "went on"

    await shop.begin(other_way)
    assert shop.states() == ["cancelled"]
    found = await shop.resume(other_way)
    assert (found["result"], found["error"], shop.done) == ("went on", None, ["other way"])


async def test_neither_is_a_child_that_an_attempt_has_failed_of(shop: Shop) -> None:
    async def other_way(shop: Shop, job: Job) -> str:
        if job.attempt < 3:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(shop.fails)
        return "went on"

    await shop.begin(other_way)
    await shop.run("late")
    assert (await shop.resume(other_way))["state"] == "retryable"
    found = await shop.resume(other_way)
    assert (found["result"], found["error"]) == ("went on", None)


async def test_a_block_in_the_body_of_one_that_a_child_has_cut_short_is_left_out(shop: Shop) -> None:
    async def nested(shop: Shop, job: Job) -> str:
        try:
            async with job.durable_nursery() as outer:
                outer.start_soon(shop.fails)
                if job.attempt > 1:
                    await trio.sleep_forever()
                async with job.durable_nursery() as inner:
                    inner.start_soon(shop.pay, 1)
        except* ChildFailed:
            await job.step(shop.note, "refused")  # noqa: ASYNC120 -- what the test is about
        return "went on"

    await shop.begin(nested)
    assert shop.states() == ["suspended"]
    await shop.run("late")
    found = await shop.resume(nested)
    await shop.run("cards")
    await shop.run("cards")
    found = shop.trees.job(shop.id)
    assert (found["error"], found["result"], shop.done) == (None, "went on", ["refused"])


async def test_a_job_that_is_cancelled_before_it_opens_its_block_again_cleans_up(shop: Shop) -> None:
    async def careful(shop: Shop, job: Job) -> Any:
        await job.step(shop.note, "begun")
        try:
            await trio.lowlevel.checkpoint()
            return await block(shop, job)
        except trio.Cancelled:
            with job.cleanup():
                await job.step(shop.note, "undone")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    await shop.begin(careful)
    shop.client.cancel(shop.id)
    await shop.run("default", "cards")
    await shop.run("default", "cards")
    assert (shop.trees.job(shop.id)["state"], shop.trees.job(shop.id)["error"]) == ("cancelled", None)
    assert shop.done == ["begun", "undone"]


@pytest.mark.parametrize(("old", "new"), [(None, "pay"), ("pay", None)])
async def test_a_child_that_has_done_its_work_is_not_started_again_under_a_key_of_another_kind(
    shop: Shop, old: str | None, new: str | None
) -> None:
    def starts_with(key: str | None) -> Body:
        async def body(shop: Shop, job: Job) -> Any:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(shop.pay.options(child_key=key), 7)
                nursery.start_soon(shop.pay.options(child_key="another"), 8)

        return body

    await shop.begin(starts_with(old))
    await shop.confirm()
    found = await shop.resume(starts_with(new))
    assert (found["state"], shop.charged) == ("dead", [7, 8])
    assert "an earlier attempt has started the same as child" in found["error"]


async def keyed_block(shop: Shop, job: Job) -> Any:
    async with job.durable_nursery() as nursery:
        paid = [nursery.start_soon(shop.pay.options(child_key=f"card {n}"), n) for n in range(2)]
    return [one.result for one in paid]


async def a_nursery_before(shop: Shop, job: Job) -> Any:
    async with job.durable_nursery() as nursery:
        nursery.start_soon(shop.check)
    return await keyed_block(shop, job)


async def a_nursery_before_that_waits(shop: Shop, job: Job) -> Any:
    async with job.durable_nursery() as nursery:
        nursery.start_soon(shop.check.options(queue="late"))
    return await keyed_block(shop, job)


async def an_empty_nursery_before(shop: Shop, job: Job) -> Any:
    async with job.durable_nursery():
        pass
    return await keyed_block(shop, job)


async def a_nursery_and_a_wait_before(shop: Shop, job: Job) -> Any:
    async with job.durable_nursery():
        pass
    await job.wait_for_event("go")
    return await keyed_block(shop, job)


@pytest.mark.parametrize(
    "new",
    [a_nursery_before, a_nursery_before_that_waits, an_empty_nursery_before, a_nursery_and_a_wait_before],
)
async def test_a_child_that_has_done_its_work_is_not_started_again_behind_a_new_nursery(shop: Shop, new: Body) -> None:
    """The new block had the number of the old one and ended without its children, and the old one started them again."""
    await shop.begin(keyed_block)
    await shop.confirm()
    found = await shop.resume(new)
    if found["state"] == "suspended":  # in the new nursery, or behind it
        shop.client.send_event(shop.id, "go")
        await shop.run("late")
        found = await shop.resume(new)
    await shop.run("cards")
    assert (found["state"], shop.charged) == ("dead", [0, 1])
    assert "The code has another block there now" in found["error"]


async def test_nor_if_the_worker_is_lost_before_the_body_of_that_has_ended(shop: Shop) -> None:
    """The new child was one of the block's own then, and nothing told that the code had left the others out."""

    async def a_nursery_before(shop: Shop, job: Job) -> Any:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(shop.check)
            await nursery.flush()
            if not shop.done:
                shop.done.append("lost")
                await shop.trees.lose(job.id)
                await trio.sleep_forever()
        return await keyed_block(shop, job)

    await shop.begin(keyed_block)
    await shop.confirm()
    await shop.resume(a_nursery_before)
    found = await shop.resume(a_nursery_before)
    await shop.run("cards")
    assert (found["state"], shop.charged) == ("dead", [0, 1])
    assert "The code has another block there now" in found["error"]


async def a_nursery_around(shop: Shop, job: Job) -> Any:
    async with job.durable_nursery() as nursery:
        nursery.start_soon(shop.check.options(child_key="check"))
        return await keyed_block(shop, job)


async def an_empty_nursery_around(shop: Shop, job: Job) -> Any:
    async with job.durable_nursery():
        return await keyed_block(shop, job)


async def an_empty_nursery_around_the_block(shop: Shop, job: Job) -> Any:
    async with job.durable_nursery():
        return await block(shop, job)


async def with_another_key(shop: Shop, job: Job) -> Any:
    async with job.durable_nursery(key="new") as nursery:
        for n in range(2):
            nursery.start_soon(shop.pay, n)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (keyed_block, a_nursery_around),
        (keyed_block, an_empty_nursery_around),
        (block, an_empty_nursery_around_the_block),
        (with_a_key, with_another_key),
        (with_a_key, block),
    ],
)
async def test_a_child_is_not_started_again_in_another_block(shop: Shop, old: Body, new: Body) -> None:
    await shop.begin(old)
    await shop.confirm()
    found = await shop.resume(new)
    await shop.run("cards")
    assert (found["state"], shop.charged) == ("dead", [0, 1])
    assert "an earlier attempt has started the same in another block" in found["error"]


async def test_none_is_started_again_beside_a_child_that_has_the_key_of_another(shop: Shop) -> None:
    """The last one was charged twice."""

    def starting(*orders: int) -> Body:
        async def body(shop: Shop, job: Job) -> Any:
            async with job.durable_nursery() as nursery:
                for order in orders:
                    nursery.start_soon(shop.pay, order)

        return body

    await shop.begin(starting(1, 2))
    await shop.confirm()
    found = await shop.resume(starting(1, 7, 2))
    await shop.run("cards")
    assert (found["state"], shop.charged) == ("dead", [1, 2])
    assert "child '#2' is job" in found["error"]


async def test_a_loop_that_starts_a_child_later_than_before_goes_on(shop: Shop) -> None:
    """Which children a turn of it starts is not decided by a step: the first starts one of those that it had started."""

    def starting(*turns: list[int]) -> Body:
        async def body(shop: Shop, job: Job) -> Any:
            for turn in turns:
                async with job.durable_nursery() as nursery:
                    for n in turn:
                        nursery.start_soon(shop.pay.options(child_key=f"card {n}"), n)

        return body

    await shop.begin(starting([0, 1], [2]))
    await shop.resume(starting([0], [1, 2]))
    await shop.confirm()
    await shop.resume(starting([0], [1, 2]))
    await shop.run("cards")
    await shop.confirm()
    found = await shop.resume(starting([0], [1, 2]))
    assert (found["state"], shop.charged) == ("completed", [0, 1, 1, 2])


async def test_code_that_fits_goes_on_after_a_scope_and_its_nursery_were_moved_for_a_while(shop: Shop) -> None:
    """What the attempt that did not fit had remembered of its nursery was taken for a call of the code that does."""

    async def fits(shop: Shop, job: Job) -> Any:
        await job.step(shop.note, "begun")
        return await block_in_a_scope(shop, job)

    async def moved(shop: Shop, job: Job) -> Any:
        await block_in_a_scope(shop, job)
        await job.step(shop.note, "begun")

    await shop.begin(fits)
    await shop.confirm()
    found = await shop.resume(moved)
    assert (found["state"], shop.charged) == ("dead", [0, 1])
    shop.client.retry(shop.id)
    found = await shop.resume(fits)
    assert (found["state"], found["error"], shop.charged, shop.done) == ("completed", None, [0, 1], ["begun"])


@pytest.mark.parametrize("new", [a_step_instead, step_before, removed])
async def test_a_job_that_is_cancelled_calls_nothing_new_where_its_block_was(shop: Shop, new: Body) -> None:
    """The cancellation waited for the block to be opened again. Meanwhile the new code went on, and the job was completed."""
    undoes = new is not removed

    def careful(body: Body) -> Body:
        async def order(shop: Shop, job: Job) -> Any:
            await job.step(shop.note, "begun")
            try:
                return await body(shop, job)
            except trio.Cancelled:
                with job.cleanup():
                    await job.step(shop.note, "undone")  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise

        return order

    await shop.begin(careful(block))
    shop.client.cancel(shop.id)
    await shop.resume(careful(new))
    await shop.run("default", "cards")
    assert (shop.trees.job(shop.id)["state"], shop.done) == ("cancelled", ["begun", "undone"] if undoes else ["begun"])
    ends = shop.trees.window.run("SELECT error FROM attempts WHERE job_id = %s ORDER BY attempt", shop.id)
    assert ("2:block is open since an earlier attempt" in (ends[1]["error"] or "")) is not undoes


# Blocks that have ended


def starts(count: int, *, read: bool = False, first: str | None = None) -> Body:
    async def body(shop: Shop, job: Job) -> Any:
        async with job.durable_nursery() as nursery:
            paid = [nursery.start_soon(shop.pay.options(child_key=first and f"{first}{n}"), n) for n in range(count)]
        await job.wait_for_event("go")
        return [one.result if read else str(one.state) for one in paid]

    return body


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("new", ["more", "with keys"])
async def test_a_child_that_is_new_in_a_block_that_has_ended_is_a_mismatch(shop: Shop, new: str, read: bool) -> None:
    await shop.begin(starts(2))
    await shop.confirm()
    await shop.run("default")
    shop.client.send_event(shop.id, "go")
    found = await shop.resume(starts(6, read=read) if new == "more" else starts(2, read=read, first="k"))
    assert (found["state"], shop.charged) == ("dead", [0, 1])
    named = "'#3' (pay), '#4' (pay), '#5' (pay) and 1 more" if new == "more" else "'k0' (pay), 'k1' (pay)"
    assert (
        f"ReplayMismatch: job {shop.id}, block (key 1:block) has ended in an earlier attempt, but the handler now starts more "
        f"children in it: {named}. The code changed"
    ) in found["error"]


async def test_one_that_is_not_started_again_in_it_is_none(shop: Shop) -> None:
    await shop.begin(starts(2))
    await shop.confirm()
    await shop.run("default")
    shop.client.send_event(shop.id, "go")
    found = await shop.resume(starts(1, read=True))
    assert (found["result"], found["error"]) == ([0], None)


async def test_a_child_of_a_block_that_was_cut_short_before_it_is_said_to_be_not_started(shop: Shop) -> None:
    async def cut(shop: Shop, job: Job) -> Any:
        with job.move_on_after(3600) as scope:
            async with job.durable_nursery() as nursery:
                child = nursery.start_soon(shop.pay, 1)
                scope.cancel()
                await trio.lowlevel.checkpoint()
        assert child.outcome is None
        return child.result

    await shop.begin(cut)
    error = shop.trees.job(shop.id)["error"]
    assert "The child '#1' was never started, so it has no result: its block was cut short before" in error


def refunding(order: int, *, waits: bool = False, notes: bool = False) -> Body:
    async def body(shop: Shop, job: Job) -> Any:
        await job.step(shop.note, "charged")
        try:
            if notes:
                await job.step(shop.note, "noted")
            async with job.durable_nursery() as nursery:
                nursery.start_soon(shop.pay, order)
                if waits:
                    await job.wait_for_event("never")
        except BaseException:
            with job.cleanup():
                await job.step(shop.note, "refunded")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    return body


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (refunding(1), refunding(2)),
        (refunding(1), refunding(2, waits=True)),
        (refunding(1, waits=True), refunding(2)),
        (refunding(1, notes=True), refunding(2)),
    ],
)
async def test_a_cancelled_job_is_undone_by_code_that_fits_after_code_that_did_not(
    shop: Shop, old: Body, new: Body
) -> None:
    """The line of the cancellation had the calls of the code that did not fit: no retry came to them, nothing was refunded."""

    async def goes_on(body: Body) -> str:
        shop.deploy(body)
        await shop.run("default", "cards")
        return shop.trees.job(shop.id)["state"]

    await shop.begin(old)
    shop.client.cancel(shop.id)
    assert await goes_on(new) == "cancelled"
    assert "refunded" not in shop.done
    shop.client.retry(shop.id)
    assert await goes_on(old) == "cancelled"
    assert shop.done.count("refunded") == 1
    # It has compensated: the next one begins it anew.
    shop.client.retry(shop.id)
    assert await goes_on(old) == "suspended"
    assert shop.done.count("charged") == 2


async def test_a_lease_that_is_lost_as_others_are_started_ends_the_look_alone(shop: Shop) -> None:
    """A task of the worker's writes children that wait to be written. That they are others than before is a line, which the
    attempt cannot write any more: the worker ended of that."""
    said: list[str] = []

    async def another(shop: Shop, job: Job) -> Any:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(shop.check)
            durable = running_of(job).durability
            durable.history.is_lost()
            try:
                await durable.blocks[0].flush()
            except LeaseGone as gone:
                said.append(str(gone))
            raise Discard("seen")

    await shop.begin(keyed_block)
    shop.deploy(another)
    shop.trees.window.run("UPDATE job SET run_at = clock_timestamp() WHERE id = %s", shop.id)
    async with trio.open_nursery() as tasks:
        tasks.start_soon(partial(shop.trees.burst, queues=["default"], log=False))
        while not said:
            await trio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert "lost its lease" in said[0]
