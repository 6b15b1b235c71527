"""A cancelled job whose clean-up did not end well keeps its history: a retry does the rest of it, and charges nobody twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Job, SyncClient
from pulse_trio.observe import CleanupCut
from pulse_trio.store import family
from support.trees import running_of

if TYPE_CHECKING:
    from support.trees import Trees

CLEANUP = 0.3


class Shop:
    """An order that charges, waits, and refunds if it is cancelled. `refunds`: what each call of the refund does, in order."""

    def __init__(self, trees: Trees, *refunds: str, timeout: float | None = None, in_nursery: bool = False) -> None:
        self.trees = trees
        self.client = SyncClient(trees.dsn)
        self.bank: list[str] = []
        self.refunds = list(refunds)
        self.stands = trio.Event()
        """Set when the order has been charged."""
        self.refunding = trio.Event()

        @trees.handlers.job(durable=True, suspend_after=0, timeout=timeout, max_attempts=2)
        async def order(job: Job) -> str:
            charged = await job.step(self.charge)
            try:
                self.stands.set()
                await job.wait_for_event("approved")
            except BaseException:
                with job.cleanup():
                    await job.step(self.note)  # noqa: ASYNC102 -- job.cleanup() is the shield
                    await job.step(self.refund, charged)  # noqa: ASYNC102 -- the same
                raise
            return charged

        @trees.handlers.job(durable=True, suspend_after=0)
        async def in_a_task(job: Job) -> None:
            charged = await job.step(self.charge)

            async def gives_back() -> None:
                try:
                    await job.wait_for_event("approved", key="approval")
                finally:
                    if job.cancel_reason == "user":
                        with job.cleanup():
                            await job.step(self.refund, charged, key="refund")  # noqa: ASYNC102 -- the same

            job.nursery.start_soon(gives_back)
            await job.wait_for_event("never")

    async def charge(self) -> str:
        self.bank.append("charged")
        return f"charge {self.bank.count('charged')}"

    async def note(self) -> None:
        self.bank.append("noted")

    async def refund(self, charged: str) -> None:
        self.refunding.set()
        match self.refunds.pop(0) if self.refunds else "":
            case "fails":
                raise ConnectionError("the bank is down for a moment")
            case "takes too long":
                await trio.sleep_forever()
            case "dies":
                await self.trees.lose(self.job_id)
                await trio.sleep_forever()
            case _:
                self.bank.append(f"refunded {charged}")

    async def ordered(self, kind: str = "order") -> int:
        """The id of an order that waits, suspended."""
        self.job_id = self.trees.enqueue(kind)
        await self.burst()
        assert self.state == "suspended"
        return self.job_id

    async def burst(self) -> None:
        with trio.fail_after(30):
            await self.trees.burst(cleanup=CLEANUP)

    @property
    def state(self) -> str:
        return str(self.trees.job(self.job_id)["state"])

    @property
    def attempt(self) -> tuple[str, str]:
        """The outcome of the last attempt, and the first line of its error."""
        last = self.trees.window.run(
            "SELECT outcome, error FROM attempts WHERE job_id = %s ORDER BY attempt DESC LIMIT 1", self.job_id
        )[0]
        return last["outcome"], (last["error"] or "").partition("\n")[0]

    @property
    def after_a_retry(self) -> str:
        """What a retry would do with it."""
        do = self.trees.window.do
        found = {
            "anew": do(family.compensated([self.job_id])) == [self.job_id],
            "the rest": do(family.unfinished_clean_ups([self.job_id])) == [self.job_id],
        }
        return " and ".join(name for name, is_so in found.items() if is_so)


@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize(
    ("why", "said"), [("fails", "Step refund failed: ConnectionError"), ("takes too long", "CleanupCut: ")]
)
async def test_a_clean_up_that_fails_when_the_deadline_of_a_running_job_has_passed_gets_one_try(
    why: str, said: str, attempts: int, trees: Trees
) -> None:
    shop = Shop(trees, why)

    @trees.handlers.job(durable=True, max_attempts=attempts, deadline=3600.0)
    async def runs(job: Job) -> None:
        charged = await job.step(shop.charge)
        running: Any = job._runtime  # pyright: ignore[reportPrivateUsage] -- it strikes here, and no machine is too slow
        running.cancel("deadline")
        try:
            await trio.sleep_forever()
        finally:
            with job.cleanup():
                await job.step(shop.refund, charged)  # noqa: ASYNC102 -- job.cleanup() is the shield

    shop.job_id = trees.enqueue("runs")
    await shop.burst()
    assert (shop.state, trees.job(shop.job_id)["cancel_reason"]) == ("cancelled", "deadline")
    outcome, error = shop.attempt
    assert (outcome, error.partition(said)[1], trees.job(shop.job_id)["attempt"]) == ("failed", said, 1)
    assert shop.after_a_retry == "the rest"
    shop.client.retry(shop.job_id)
    await shop.burst()
    assert (shop.state, shop.bank) == ("cancelled", ["charged", "refunded charge 1"])
    assert shop.after_a_retry == "anew"


@pytest.mark.parametrize("awaits", [False, True])
async def test_a_call_that_begins_when_the_deadline_has_passed_in_plain_code_is_none_of_the_clean_up(
    trees: Trees, *, awaits: bool
) -> None:
    """Trio cancels at the next await. Each retry was a `ReplayMismatch`."""
    shop = Shop(trees, "fails")

    async def note() -> None:
        if awaits:
            await trio.lowlevel.checkpoint()
        shop.bank.append("noted")

    @trees.handlers.job(durable=True, deadline=3600.0)
    async def parses(job: Job) -> None:
        charged = await job.step(shop.charge)
        try:
            running: Any = job._runtime  # pyright: ignore[reportPrivateUsage] -- plain code that takes an hour
            if job.attempt == 1:
                running.job_deadline = running.scope_nursery.cancel_scope.deadline = trio.current_time()
            await job.step(note)
            await trio.sleep_forever()
        finally:
            with job.cleanup():
                await job.step(shop.refund, charged)  # noqa: ASYNC102 -- job.cleanup() is the shield

    shop.job_id = trees.enqueue("parses")
    await shop.burst()
    assert (shop.state, shop.after_a_retry) == ("cancelled", "the rest")
    shop.client.retry(shop.job_id)
    await shop.burst()
    noted = [] if awaits else ["noted"]
    assert (shop.state, shop.bank) == ("cancelled", ["charged", *noted, "refunded charge 1"])
    assert shop.after_a_retry == "anew"


@pytest.mark.parametrize("why", ["fails", "takes too long"])
async def test_a_retry_does_the_rest_of_a_clean_up_that_failed_or_was_cut_and_the_next_one_begins_anew(
    why: str, trees: Trees
) -> None:
    shop = Shop(trees, why)
    job_id = await shop.ordered()
    shop.client.cancel(job_id, reason="the customer is gone")
    await shop.burst()
    assert (shop.state, shop.bank) == ("cancelled", ["charged", "noted"])
    outcome, error = shop.attempt
    assert outcome == "failed"
    if why == "fails":
        assert "Step refund failed: ConnectionError" in error
    else:
        assert error == (
            "CleanupCut: job.cleanup() was cut short, 0.3 s after the cancellation (user): what it would still have done is "
            "not done"
        )
        assert len(trees.events.of(CleanupCut)) == 1
    assert shop.after_a_retry == "the rest"

    shop.client.retry(job_id)
    assert [row["requested_by"] for row in trees.window.run("SELECT * FROM cancellations WHERE ended_at IS NULL")] == [
        "retry"
    ]
    await shop.burst()
    assert (shop.state, shop.bank) == ("cancelled", ["charged", "noted", "refunded charge 1"])
    assert trees.job(job_id)["cancel_reason"] == "the customer is gone"
    assert trees.window.run("SELECT * FROM cancellations WHERE ended_at IS NULL") == []
    assert shop.after_a_retry == "anew"

    shop.client.retry(job_id)
    await shop.burst()
    assert (shop.state, shop.bank[3:]) == ("suspended", ["charged"])
    shop.client.send_event(job_id, "approved", None)
    await shop.burst()
    assert (shop.state, trees.job(job_id)["result"]) == ("completed", "charge 2")


async def test_a_clean_up_that_fails_again_in_a_retry_is_tried_once_in_each(trees: Trees) -> None:
    shop = Shop(trees, "fails", "fails", "fails")
    job_id = await shop.ordered()
    shop.client.cancel(job_id)
    await shop.burst()
    for _ in range(2):
        shop.client.retry(job_id)
        await shop.burst()
        assert (shop.state, shop.attempt[0], shop.after_a_retry) == ("cancelled", "failed", "the rest")
    shop.client.retry(job_id)
    await shop.burst()
    assert shop.bank == ["charged", "noted", "refunded charge 1"]
    assert shop.after_a_retry == "anew"


async def test_a_clean_up_whose_process_was_lost_for_good_is_finished_by_a_retry(trees: Trees) -> None:
    shop = Shop(trees, *["dies"] * 9)
    job_id = await shop.ordered()
    shop.client.cancel(job_id)
    with trio.fail_after(60):
        while shop.state != "cancelled":
            await trees.burst(watchdog=5, lease=3, heartbeat=0.1, cleanup=CLEANUP, process_slots=0)
            trees.again()
    assert shop.bank == ["charged", "noted"]
    assert shop.after_a_retry == "the rest"
    shop.refunds.clear()
    shop.client.retry(job_id)
    await shop.burst()
    assert (shop.state, shop.bank) == ("cancelled", ["charged", "noted", "refunded charge 1"])
    assert shop.after_a_retry == "anew"


async def test_whoever_ends_a_clean_up_at_once_leaves_the_rest_to_a_retry(trees: Trees) -> None:
    shop = Shop(trees, "fails")
    job_id = await shop.ordered()
    shop.client.cancel(job_id)
    await shop.burst()
    shop.client.retry(job_id)
    assert shop.client.cancel(job_id, now=True).state == "cancelled"
    assert shop.after_a_retry == "the rest"
    # Who knows better may begin anew all the same.
    shop.client.retry(job_id, afresh=True)
    await shop.burst()
    assert (shop.state, shop.bank) == ("suspended", ["charged", "noted", "charged"])


async def test_a_worker_of_the_version_before_leaves_no_word_and_a_retry_does_the_rest_which_is_nothing(
    trees: Trees,
) -> None:
    shop = Shop(trees)
    job_id = await shop.ordered()
    shop.client.cancel(job_id)
    await shop.burst()
    trees.window.run("DELETE FROM history WHERE key = '0:compensated'")
    assert shop.after_a_retry == "the rest"
    shop.client.retry(job_id)
    await shop.burst()
    assert (shop.state, shop.bank) == ("cancelled", ["charged", "noted", "refunded charge 1"])
    assert shop.after_a_retry == "anew"


@pytest.mark.parametrize("why", ["fails", "takes too long", ""])
async def test_a_clean_up_in_a_task_of_the_jobs_nursery_counts_too(why: str, trees: Trees) -> None:
    shop = Shop(trees, *[why] * bool(why))
    job_id = await shop.ordered("in_a_task")
    shop.client.cancel(job_id)
    await shop.burst()
    assert shop.state == "cancelled"
    assert shop.after_a_retry == ("the rest" if why else "anew")
    if why:
        shop.client.retry(job_id)
        await shop.burst()
    assert (shop.state, shop.bank, shop.after_a_retry) == ("cancelled", ["charged", "refunded charge 1"], "anew")


async def test_a_timeout_whose_clean_up_fails_is_cleaned_up_by_the_next_attempt_and_not_forgotten_by_a_retry(
    trees: Trees,
) -> None:
    bank: list[str] = []
    down = [True, True]

    async def charge() -> None:
        bank.append("charged")

    async def refund() -> None:
        if down:
            down.pop()
            raise ConnectionError("the bank is down for a moment")
        bank.append("refunded")

    @trees.handlers.job(durable=True, timeout=0.5, max_attempts=2)
    async def order(job: Job) -> None:
        await job.step(charge)
        try:
            await job.wait_for_event("approved")
        except BaseException:
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    client = SyncClient(trees.dsn)
    job_id = trees.enqueue("order")
    for _ in range(2):
        await trees.burst()
        trees.again()
    assert (trees.job(job_id)["state"], bank) == ("dead", ["charged"])
    client.retry(job_id)
    await trees.burst()
    assert (trees.job(job_id)["state"], bank) == ("dead", ["charged", "refunded"])
    assert trees.window.do(family.compensated([job_id])) == [job_id]


@pytest.mark.parametrize("failures", [1, 3])
async def test_a_parent_starts_a_child_again_only_when_it_has_cleaned_up(failures: int, trees: Trees) -> None:
    """It was cut short because of its sibling. Each attempt of the parent tries its clean-up once; the one in which that ends
    well starts the child anew."""
    bank: list[str] = []
    down = [True] * failures
    stands = trio.Event()

    async def charge() -> None:
        bank.append("charged")

    async def refund() -> None:
        if down:
            down.pop()
            bank.append("down")
            raise ConnectionError("the bank is down for a moment")
        bank.append("refunded")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        await job.step(charge)
        if bank.count("charged") == 1:
            try:
                stands.set()
                await job.wait_for_event("approved")
            except BaseException:
                with job.cleanup():
                    await job.step(refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise
        return "shipped"

    @trees.handlers.job
    async def sibling(job: Job) -> None:
        await stands.wait()
        if job.attempt == 1:
            raise Discard("the first time")

    @trees.handlers.job(durable=True, max_attempts=10)
    async def parent(job: Job) -> str:
        async with job.durable_nursery() as nursery:
            ordered = nursery.start_soon(order)
            nursery.start_soon(sibling)
        return ordered.result

    root = trees.enqueue("parent")
    attempts = 0
    with trio.fail_after(60):
        while trees.job(root)["finished_at"] is None:
            trees.window.run("UPDATE job SET run_at = clock_timestamp() WHERE id = %s AND state = 3", root)
            await trees.burst()
            attempts += 1
    assert (trees.job(root)["state"], trees.job(root)["result"]) == ("completed", "shipped")
    assert bank == ["charged", *["down"] * failures, "refunded", "charged"]
    assert attempts == failures + 1


async def test_a_block_that_collects_failures_waits_for_a_child_anew_whose_clean_up_an_older_worker_has_ended(
    trees: Trees,
) -> None:
    """Such a worker leaves no word of it, so the child does the rest first, which is nothing."""
    bank: list[str] = []
    stands = trio.Event()

    async def charge() -> None:
        bank.append("charged")

    async def refund() -> None:
        bank.append("refunded")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        await job.step(charge)
        try:
            stands.set()
            await job.wait_for_event("approved", timeout=None if bank.count("charged") == 1 else 0)
        except TimeoutError:
            return "shipped"
        except BaseException:
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise
        return "approved"

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> str:
        async with job.durable_nursery(collect=True) as nursery:
            ordered = nursery.start_soon(order)
        return ordered.result

    root = trees.enqueue("parent")
    async with trio.open_nursery() as running:
        running.start_soon(trees.burst)
        await stands.wait()
        await trio.to_thread.run_sync(SyncClient(trees.dsn).cancel, root)
    assert (trees.job(root)["state"], bank) == ("cancelled", ["charged", "refunded"])
    trees.window.run("DELETE FROM history WHERE key = '0:compensated'")

    SyncClient(trees.dsn).retry(root)
    with trio.fail_after(30):
        await trees.burst()
    assert (trees.job(root)["state"], trees.job(root)["result"]) == ("completed", "shipped")
    assert bank == ["charged", "refunded", "charged"]


@pytest.mark.parametrize("cut_too", [False, True])
async def test_a_block_that_waits_in_vain_for_a_childs_clean_up_cuts_none_short(cut_too: bool, trees: Trees) -> None:
    """It waits for half of the time that a clean-up has, the child goes on, and the parent's own clean-up has the rest.
    `cut_too`: that one is cut short."""
    stands, given_back = trio.Event(), trio.Event()
    bank: list[str] = []

    async def give_back(what: str) -> None:
        if what == "the room":
            await given_back.wait()
        elif cut_too:
            await trio.sleep_forever()
        bank.append(what)
        given_back.set()

    @trees.handlers.job(durable=True, suspend_after=60)
    async def hotel(job: Job) -> None:
        try:
            stands.set()
            await job.sleep(3600)
        finally:
            with job.cleanup():
                await job.step(give_back, "the room")  # noqa: ASYNC102 -- job.cleanup() is the shield

    @trees.handlers.job(durable=True, suspend_after=60)
    async def trip(job: Job) -> None:
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(hotel)
        finally:
            with job.cleanup():
                await job.step(give_back, "the deposit")  # noqa: ASYNC102 -- the same

    root = trees.enqueue("trip")
    async with trio.open_nursery() as running:
        running.start_soon(lambda: trees.burst(cleanup=2))
        await stands.wait()
        await trio.to_thread.run_sync(SyncClient(trees.dsn).cancel, root)
    attempts = trees.window.run(
        "SELECT job_id, outcome, error FROM attempts WHERE job_id = %s AND outcome <> 'suspended'", root
    )
    said = [(row["outcome"], (row["error"] or "").partition(":")[0]) for row in attempts]
    owing = trees.window.do(family.unfinished_clean_ups([root]))
    assert trees.job(root)["state"] == "cancelled"
    if cut_too:
        assert (said, owing) == ([("failed", "CleanupCut")], [root])
    else:
        assert (bank, said, owing) == (["the deposit", "the room"], [("cancelled", "user")], [])
    assert len([cut for cut in trees.events.of(CleanupCut) if cut.job_id == root]) == cut_too


@pytest.mark.parametrize("fails", [1, 2])
@pytest.mark.parametrize("where", ["one task", "two tasks"])
async def test_what_failed_in_an_inner_clean_up_is_done_again_though_an_outer_one_has_undone_its_part(
    where: str, fails: int, trees: Trees
) -> None:
    bank: list[str] = []
    down = [True] * fails

    async def charge(what: str) -> None:
        bank.append(f"charged {what}")

    async def refund(what: str) -> None:
        if what == "fee" and down:
            down.pop()
            raise ConnectionError("the bank is down for a moment")
        bank.append(f"refunded {what}")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        async def fee() -> None:
            await job.step(charge, "fee", key="fee")
            try:
                await job.wait_for_event("approved", key="approved")
            except BaseException:
                with job.cleanup():
                    await job.step(refund, "fee", key="refund fee")  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise

        await job.step(charge, "order")
        try:
            if where == "one task":
                await fee()
            else:
                async with trio.open_nursery() as tasks:
                    tasks.start_soon(fee)
        except BaseException:
            with job.cleanup():
                await job.step(refund, "order")  # noqa: ASYNC102 -- the same
            raise

    client, job_id = SyncClient(trees.dsn), trees.enqueue("order")
    with trio.fail_after(60):
        await trees.burst()
        client.cancel(job_id)
        await trees.burst()
        assert bank == ["charged order", "charged fee", "refunded order"]
        for _ in range(fails):
            assert trees.window.do(family.unfinished_clean_ups([job_id])) == [job_id]
            client.retry(job_id)
            await trees.burst()
    assert bank == ["charged order", "charged fee", "refunded order", "refunded fee"]
    assert trees.job(job_id)["state"] == "cancelled"
    assert trees.window.do(family.compensated([job_id])) == [job_id]


async def test_an_attempt_that_is_lost_after_the_inner_clean_up_was_done_again_does_it_no_third_time(
    trees: Trees,
) -> None:
    bank: list[str] = []
    down, dies, killed = [True], [True], trio.Event()

    async def charge(what: str) -> None:
        bank.append(f"charged {what}")

    async def refund(what: str) -> None:
        if what == "fee" and down:
            down.pop()
            raise ConnectionError("the bank is down for a moment")
        bank.append(f"refunded {what}")

    async def tell() -> None:
        if not down and len(bank) == 4 and dies:
            dies.pop()
            await trees.lose(job_id)
            killed.set()
            await trio.sleep_forever()
        bank.append("told")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        await job.step(charge, "order")
        try:
            await job.step(charge, "fee")
            try:
                await job.wait_for_event("approved")
            except BaseException:
                with job.cleanup():
                    await job.step(refund, "fee")  # noqa: ASYNC102 -- the same
                raise
        except BaseException as error:
            with job.cleanup():
                await job.step(refund, "order")  # noqa: ASYNC102 -- the same
                if not isinstance(error, Exception):
                    await job.step(tell)  # noqa: ASYNC102 -- the same
            raise

    client, job_id = SyncClient(trees.dsn), trees.enqueue("order")
    with trio.fail_after(60):
        await trees.burst()
        client.cancel(job_id)
        await trees.burst()
        client.retry(job_id)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trees.burst)
            await killed.wait()
            nursery.cancel_scope.cancel()
        while trees.job(job_id)["finished_at"] is None:
            trees.again()
            await trees.burst()
    assert bank == ["charged order", "charged fee", "refunded order", "refunded fee", "told"]
    assert trees.window.do(family.compensated([job_id])) == [job_id]


@pytest.mark.parametrize("owes", [False, True], ids=["from the cancellation", "of its own"])
async def test_a_handler_that_gives_its_cancellation_a_name_of_its_own_has_cleaned_up(
    trees: Trees, *, owes: bool
) -> None:
    """`raise OrderFailed from error` after the compensation: it owed that for ever, though all was undone. Without `from` it
    may be plain code that failed half-way."""
    undone: list[str] = []
    stands = trio.Event()

    async def refund() -> None:
        undone.append("refunded")

    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> None:
        try:
            stands.set()
            await job.wait_for_event("approved")
        except trio.Cancelled as error:
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
            if owes:
                raise LookupError("no order") from None  # noqa: ASYNC104 -- what the test is about
            raise LookupError("no order") from error  # noqa: ASYNC104 -- what the test is about

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trees.burst)
            await stands.wait()
            SyncClient(trees.dsn).cancel(job_id)
    assert (trees.job(job_id)["state"], undone) == ("cancelled", ["refunded"])
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == ([job_id] if owes else [])


async def test_a_compensation_that_the_cancellation_found_under_way_and_that_failed_is_done_by_a_retry(
    trees: Trees,
) -> None:
    """An outer one had gone on after it: each retry got the same failure, and the charge stayed (drawn saga 3095)."""
    done: list[str] = []

    async def act(what: str) -> None:
        done.append(what)

    async def refused() -> None:
        raise ValueError("out of stock")

    async def refund(job: Job) -> None:
        if job.attempt == 1:
            SyncClient(trees.dsn).cancel(job.id)
            while not running_of(job).asked:  # noqa: ASYNC110 -- it has no event
                await trio.sleep(0.01)
            raise OSError("the bank does not answer")
        done.append("refunded")

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=1)
    async def order(job: Job) -> None:
        await job.step(act, "reserved")
        try:
            try:
                await job.step(act, "charged")
                await job.step(refused)
            except BaseException:
                with job.cleanup():
                    await job.step(refund, job)  # noqa: ASYNC102, ASYNC120 -- job.cleanup() is the shield
                raise
        except BaseException:
            with job.cleanup():
                await job.step(act, "released")  # noqa: ASYNC102, ASYNC120 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    assert (await trees.ended(job_id))["state"] == "cancelled"
    SyncClient(trees.dsn).retry(job_id)
    assert (await trees.ended(job_id))["state"] == "cancelled"
    assert done == ["reserved", "charged", "released", "refunded"]
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == []
