"""A job is cancelled in a plain await, and its process is lost while it compensates: the next attempt compensates too."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Discard, Job, SyncClient
from pulse_trio.lines import Kind
from pulse_trio.worker.durable import cancelling

if TYPE_CHECKING:
    from support.trees import Trees


class Undoing:
    """Notes the steps of a handler. Its first attempt is lost in `notify`, which the clean-up calls after `refund`."""

    def __init__(self, trees: Trees) -> None:
        self.trees = trees
        self.calls: list[str] = []
        self.stands = trio.Event()
        self.id = 0
        self.stands_for = 0.0
        """Seconds until it is cancelled."""

    async def charge(self) -> None:
        self.calls.append("charge")

    async def refund(self) -> None:
        self.calls.append("refund")

    async def notify(self) -> None:
        self.calls.append("notify")
        if self.calls.count("notify") == 1:
            await self.trees.lose(self.id)
            # As a killed process does no more.
            await trio.sleep_forever()

    async def stand(self) -> None:
        """The plain await that is cut short."""
        self.stands.set()
        await trio.sleep_forever()

    async def clean_up(self, job: Job) -> None:
        with job.cleanup():
            await job.step(self.refund)
            await job.step(self.notify)

    async def run(self, *, cancels: bool = True) -> None:
        """A person cancels the job where it stands; it is lost, and another attempt goes on."""
        self.id = self.trees.enqueue("order")
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._work)
                if not cancels:
                    return
                await self.stands.wait()
                # How long it stood there is in the history, and decides when the next attempt is cut short: it must pass.
                await trio.sleep(self.stands_for)
                SyncClient(self.trees.dsn).cancel(self.id)

    async def _work(self) -> None:
        while self.trees.job(self.id)["finished_at"] is None:
            self.trees.again()
            await self.trees.burst(log=False, lease=3, heartbeat=0.3, cleanup=1)


@pytest.fixture
def undoing(trees: Trees) -> Undoing:
    return Undoing(trees)


def check(undoing: Undoing) -> None:
    found = undoing.trees.job(undoing.id)
    assert (found["state"], found["error"]) == ("cancelled", None)
    assert undoing.calls == ["charge", "refund", "notify", "notify"]


@pytest.mark.parametrize("around", ["a scope", "a block", "a block with a child"])
async def test_in_a_scope_or_a_block_that_was_opened_since_the_last_line(
    around: str, undoing: Undoing, trees: Trees
) -> None:
    """The clean-up's calls have numbers above those."""

    @trees.handlers.job
    async def child() -> None:
        await trio.sleep_forever()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        try:
            await job.step(undoing.charge)
            await trio.sleep(0.01)
            if around == "a scope":
                with job.move_on_after(3600):
                    await undoing.stand()
            else:
                async with job.durable_nursery() as nursery:
                    if around == "a block with a child":
                        nursery.start_soon(child)
                        await nursery.flush()
                    await undoing.stand()
        finally:
            await undoing.clean_up(job)  # noqa: ASYNC102 -- shielded inside

    await undoing.run()
    check(undoing)
    assert [kind for kind, _, _ in trees.lines(undoing.id) if kind != Kind.MOMENT] == [
        Kind.STEP, Kind.CANCELLED, Kind.STEP, Kind.STEP,
    ]  # fmt: skip


async def test_in_a_block_whose_child_is_cancelled_with_the_job(undoing: Undoing, trees: Trees) -> None:
    """The next attempt has not started it again when its clean-up begins, in the block itself."""

    @trees.handlers.job
    async def child() -> None:
        await trio.sleep_forever()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(undoing.charge)
        async with job.durable_nursery() as nursery:
            nursery.start_soon(child)
            await nursery.flush()
            try:
                await undoing.stand()
            finally:
                await undoing.clean_up(job)  # noqa: ASYNC102 -- shielded inside

    await undoing.run()
    check(undoing)


async def test_behind_other_plain_awaits_before_which_nothing_is_to_be_undone(undoing: Undoing, trees: Trees) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(undoing.charge)
        await trio.sleep(0.01)
        try:
            await undoing.stand()
        finally:
            await undoing.clean_up(job)  # noqa: ASYNC102 -- shielded inside

    await undoing.run()
    check(undoing)


@pytest.mark.parametrize("inside", ["a scope", "a block"])
async def test_the_next_attempt_takes_longer_on_its_way_there(inside: str, undoing: Undoing, trees: Trees) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(undoing.charge)
        if job.attempt > 1:
            # The plain code of the next attempt is slower, which is what is tested: no event says so.
            await trio.sleep(2 * undoing.stands_for)
        async with AsyncExitStack() as stack:
            if inside == "a scope":
                stack.enter_context(job.move_on_after(3600))
            else:
                await stack.enter_async_context(job.durable_nursery())
            # Longer than a look that is due meanwhile, and shorter than it stood there.
            await trio.sleep(undoing.stands_for / 4)
            try:
                await undoing.stand()
            finally:
                await undoing.clean_up(job)  # noqa: ASYNC102 -- shielded inside

    undoing.stands_for = 0.4
    await undoing.run()
    check(undoing)


async def test_a_child_fails_while_the_body_of_its_block_stands_there(undoing: Undoing, trees: Trees) -> None:
    @trees.handlers.job
    async def child() -> None:
        await undoing.stands.wait()
        raise Discard("out of stock")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        await job.step(undoing.charge)
        with suppress(ExceptionGroup):
            async with job.durable_nursery() as nursery:
                nursery.start_soon(child)
                await trio.sleep(0.01)
                try:
                    await undoing.stand()
                finally:
                    await undoing.clean_up(job)  # noqa: ASYNC102 -- shielded inside
        return "not packed"

    await undoing.run(cancels=False)
    found = trees.job(undoing.id)
    assert (found["state"], found["result"]) == ("completed", "not packed")
    assert undoing.calls == ["charge", "refund", "notify", "notify"]


@pytest.mark.parametrize("before", ["a plain await", "a step"])
async def test_a_scope_strikes_there_and_its_clean_up_is_inside_of_it(
    before: str, undoing: Undoing, trees: Trees
) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        if before == "a plain await":
            await job.step(undoing.charge)
        with job.move_on_after(0.3):
            if before == "a step":
                await job.step(undoing.charge)
            await trio.sleep(0.01)
            try:
                await undoing.stand()
            finally:
                await undoing.clean_up(job)  # noqa: ASYNC102 -- shielded inside
        return "too late"

    await undoing.run(cancels=False)
    found = trees.job(undoing.id)
    assert (found["state"], found["result"]) == ("completed", "too late")
    assert undoing.calls == ["charge", "refund", "notify", "notify"]


async def test_the_next_attempt_leaves_the_scope_before_it_strikes(undoing: Undoing, trees: Trees) -> None:
    """What it has cut short cannot be undone: that is said."""

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(undoing.charge)
        with job.move_on_after(0.3):
            if job.attempt == 1:
                try:
                    await undoing.stand()
                finally:
                    await undoing.clean_up(job)  # noqa: ASYNC102 -- shielded inside
        await job.step(undoing.notify, key="then")

    await undoing.run(cancels=False)
    found = trees.job(undoing.id)
    assert found["state"] == "dead"
    assert found["error"].startswith("ReplayMismatch")


async def test_before_a_place_that_the_next_attempt_does_not_come_to_in_time(
    undoing: Undoing, trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancelling, "_LONGEST", 0.3)

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        try:
            await job.step(undoing.charge)
            if job.attempt > 1:
                await trio.sleep_forever()
            with job.move_on_after(3600):
                await undoing.stand()
        finally:
            await undoing.clean_up(job)  # noqa: ASYNC102 -- shielded inside

    await undoing.run()
    check(undoing)


@pytest.mark.parametrize("then", ["a step", "a scope"])
async def test_the_next_attempt_does_not_go_on_behind_the_await_that_was_cut_short(
    then: str, undoing: Undoing, trees: Trees
) -> None:
    async def ship() -> None:
        undoing.calls.append("ship")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        try:
            await job.step(undoing.charge)
            if job.attempt == 1:
                await undoing.stand()
            if then == "a scope":
                with job.move_on_after(3600):
                    await job.step(ship)
            else:
                await job.step(ship)
        finally:
            await undoing.clean_up(job)  # noqa: ASYNC102 -- shielded inside

    await undoing.run()
    check(undoing)


async def test_before_the_first_line(undoing: Undoing, trees: Trees) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await trio.sleep(0.01)
        undoing.calls[:1] = ["charge"]
        try:
            await undoing.stand()
        finally:
            await undoing.clean_up(job)  # noqa: ASYNC102 -- shielded inside

    await undoing.run()
    check(undoing)


async def test_the_clean_up_may_begin_with_a_scope(undoing: Undoing, trees: Trees) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        try:
            await job.step(undoing.charge)
            await trio.sleep(0.01)
            with job.move_on_after(3600):
                await undoing.stand()
        finally:
            with job.cleanup(), job.move_on_after(60):
                await job.step(undoing.refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
                await job.step(undoing.notify)  # noqa: ASYNC102 -- as there

    await undoing.run()
    check(undoing)


async def test_in_a_task_beside_the_main_one_which_stands_in_a_durable_call_and_ends_first(
    undoing: Undoing, trees: Trees
) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        main_ends = trio.Event()

        async def ships() -> None:
            await job.step(undoing.charge, key="charge")
            await trio.sleep(0.01)
            try:
                await undoing.stand()
            finally:
                with job.cleanup():
                    await main_ends.wait()  # noqa: ASYNC102 -- as there
                    await job.step(undoing.refund, key="refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
                    await job.step(undoing.notify, key="notify")  # noqa: ASYNC102 -- as there

        job.nursery.start_soon(ships)
        try:
            await job.wait_for_event("never")
        finally:
            main_ends.set()

    await undoing.run()
    check(undoing)
