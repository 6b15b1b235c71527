"""What goes wrong in an attempt of a durable handler before its function begins, in a middleware or with arguments that nobody
can read, loses nothing of what the attempts before have done."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Handlers, Job, RetryAfter, SyncClient
from pulse_trio.jobs import CancelRequest
from pulse_trio.store import family
from pulse_trio.worker.durable import once_more
from support.trees import running_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.trees import Trees


class Shop:
    """An order that waits for events, with a charge to undo. `around` is what a middleware does before the handler begins."""

    def __init__(self, trees: Trees) -> None:
        self.trees = trees
        self.client = SyncClient(trees.dsn)
        self.bank: list[str] = []
        self.around: Callable[[Job], Awaitable[object]] | None = None
        self.calls = True

        @trees.handlers.middleware
        async def of_tenant(job: Job, call: Callable[[], Awaitable[Any]]) -> Any:
            if self.around is not None and job.attempt > 1:
                await self.around(job)
            return await call() if self.calls else None

        @trees.handlers.job(durable=True, suspend_after=0)
        async def order(job: Job) -> str:
            await job.step(self.act, "charge")
            try:
                await job.wait_for_event("packed")
                await job.wait_for_event("sent")
            except trio.Cancelled:
                with job.cleanup():
                    await job.step(self.act, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise
            return "shipped"

        self.id = SyncClient(trees.dsn, handlers=trees.handlers).enqueue("order").id

    async def act(self, what: str) -> None:
        self.bank.append(what)

    async def ended(self) -> str:
        """Runs the job until it has ended. Returns its state."""
        found = await self.trees.ended(self.id)
        return found["state"]

    @property
    def owes(self) -> bool:
        return self.trees.window.do(family.unfinished_clean_ups([self.id])) == [self.id]


@pytest.fixture
async def shop(trees: Trees) -> Shop:
    """One that is suspended after its charge."""
    shop = Shop(trees)
    await trees.burst()
    assert shop.bank == ["charge"]
    return shop


@pytest.mark.parametrize("reason", ["user", "deadline"])
async def test_a_cancellation_in_a_middleware_reaches_the_handler_where_it_stood(reason: Any, shop: Shop) -> None:
    """The attempt ended there as cancelled: no refund, nobody owed one, and a retry shipped the order."""

    async def is_cancelled(job: Job) -> None:
        running_of(job).ask(CancelRequest(reason, None))
        await trio.lowlevel.checkpoint()

    shop.around = is_cancelled
    shop.client.cancel(shop.id)
    assert await shop.ended() == "cancelled"
    assert (shop.bank, shop.owes) == (["charge", "refund"], False)
    assert shop.trees.job(shop.id)["attempt"] == 2


async def test_a_cancellation_that_comes_first_in_a_middleware_does_so_too(shop: Shop) -> None:
    """The attempt was to go on: an event had come."""

    async def is_cancelled(job: Job) -> None:
        if job.attempt == 2:
            shop.client.cancel(job.id)
            running_of(job).ask(CancelRequest("user", None))
            await trio.lowlevel.checkpoint()

    shop.around = is_cancelled
    shop.client.send_event(shop.id, "packed")
    assert await shop.ended() == "cancelled"
    assert (shop.bank, shop.owes) == (["charge", "refund"], False)


async def test_a_timeout_in_a_middleware_leaves_the_clean_up_owed(shop: Shop) -> None:
    async def takes_too_long(job: Job) -> None:
        running = running_of(job)
        running.timeout_deadline = -math.inf
        running._deadline_moved()
        await trio.sleep_forever()

    shop.around = takes_too_long
    shop.client.cancel(shop.id)
    assert await shop.ended() == "cancelled"
    assert (shop.bank, shop.owes) == (["charge"], True)
    shop.around = None
    shop.client.retry(shop.id)
    assert await shop.ended() == "cancelled"
    assert (shop.bank, shop.owes) == (["charge", "refund"], False)


@pytest.mark.parametrize(
    "error", [ConnectionError("the tenants' database is away"), Discard("no"), RetryAfter(5), None]
)
@pytest.mark.parametrize("too_often", [False, True])
async def test_a_middleware_that_fails_is_tried_again(error: Exception | None, too_often: bool, shop: Shop) -> None:
    """The job ended as cancelled with its first failure. Without an error it returns, and has not called."""
    most = once_more.MOST_DISCARDED if isinstance(error, Discard) else once_more.MOST
    last = 1 + most + too_often

    async def fails(job: Job) -> None:
        shop.calls = error is not None or job.attempt > last
        if error is not None and job.attempt <= last:
            raise error

    shop.around = fails
    shop.client.cancel(shop.id)
    assert await shop.ended() == "cancelled"
    assert (shop.bank, shop.owes) == (["charge", "refund"] if not too_often else ["charge"], too_often)
    if too_often:
        shop.around, shop.calls = None, True
        shop.client.retry(shop.id)
        assert await shop.ended() == "cancelled"
        assert (shop.bank, shop.owes) == (["charge", "refund"], False)


class Key:
    """A codec that has its key, or not."""

    def __init__(self) -> None:
        self.is_there = True

    def encode(self, plain: bytes, *, kind: str, job_id: int | None) -> str:
        return '{"is": "' + plain.hex() + '"}'

    def decode(self, coded: str, *, kind: str, job_id: int) -> bytes:
        if not self.is_there:
            raise KeyError("k1")
        return bytes.fromhex(json.loads(coded)["is"])


async def test_a_worker_without_the_codecs_key_does_not_end_a_cancelled_job(trees: Trees) -> None:
    key = Key()
    trees.handlers = Handlers(codec=key)
    shop = Shop(trees)
    await trees.burst()
    key.is_there = False
    shop.client.cancel(shop.id)
    await trees.burst(log=False)
    key.is_there = True
    trees.again()
    assert await shop.ended() == "cancelled"
    assert (shop.bank, shop.owes) == (["charge", "refund"], False)


@pytest.mark.parametrize("version", [1, None])
async def test_a_cancelled_job_that_no_worker_can_undo_waits_for_one(version: int | None, trees: Trees) -> None:
    """A rollback: version 2 has begun it, and version 1, or a handler that is not durable, gives it back. After the
    `unfit_patience` it ended as cancelled, with nothing owed."""
    bank: list[str] = []

    def order_of(version: int | None) -> Handlers:
        handlers = Handlers()
        durable: dict[str, Any] = {} if version is None else {"durable": True, "version": version, "suspend_after": 0}

        @handlers.job(**durable)
        async def order(job: Job) -> str:
            await job.step(act, "charge")
            try:
                await job.wait_for_event("packed")
            except trio.Cancelled:
                with job.cleanup():
                    await job.step(act, "refund")  # noqa: ASYNC102 -- the same
                raise
            return "shipped"

        return handlers

    async def act(what: str) -> None:
        bank.append(what)

    trees.handlers = order_of(2)
    job_id = trees.enqueue("order")
    await trees.burst()
    SyncClient(trees.dsn).cancel(job_id)
    trees.handlers = order_of(version)
    for _ in range(3):
        await trees.burst(log=False, unfit_patience=0.001)
        trees.again()
    assert trees.job(job_id)["finished_at"] is None
    trees.handlers = order_of(2)
    assert (await trees.ended(job_id))["state"] == "cancelled"
    assert bank == ["charge", "refund"]


async def test_a_middleware_that_makes_durable_calls_has_them_in_the_history(trees: Trees) -> None:
    done: list[str] = []

    async def act(what: str) -> str:
        done.append(what)
        return what

    @trees.handlers.middleware
    async def reserves(job: Job, call: Callable[[], Awaitable[Any]]) -> Any:
        place = await job.step(act, "reserve")
        value = await call()
        return f"{place}, {value}, {await job.step(act, 'release')}"

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        await job.wait_for_event("packed")
        return "shipped"

    job_id = trees.enqueue("order")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "packed")
    assert (await trees.ended(job_id))["result"] == "reserve, shipped, release"
    assert done == ["reserve", "release"]


async def test_a_mismatch_that_a_middleware_swallows_makes_the_job_dead_all_the_same(shop: Shop) -> None:
    @shop.trees.handlers.middleware
    async def swallows(job: Job, call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await call()
        except Exception:
            return "as if nothing had been"

    async def other(job: Job) -> str:
        await job.step(shop.act, "another call", key="another")
        return "shipped"

    shop.trees.handlers.job(durable=True, name="another")(other)
    shop.trees.window.run("UPDATE job SET kind = 'another' WHERE id = %s", shop.id)
    shop.client.send_event(shop.id, "packed")
    assert await shop.ended() == "dead"
    assert "ReplayMismatch" in shop.trees.job(shop.id)["error"]
    assert shop.bank == ["charge"]


class Keys:
    """A codec with keys: what is encoded with one that it has not got cannot be decoded."""

    def __init__(self, *keys: str) -> None:
        self.keys = list(keys)
        self.of: dict[str, str] = {}
        """That of other workers, for the kinds that these run."""

    def encode(self, plain: bytes, *, kind: str, job_id: int | None) -> str:
        return json.dumps({"key": self.of.get(kind, self.keys[-1]), "is": plain.hex()})

    def decode(self, coded: str, *, kind: str, job_id: int) -> bytes:
        said = json.loads(coded)
        if "key" not in said:
            return coded.encode()
        if said["key"] not in self.keys:
            raise KeyError(said["key"])
        return bytes.fromhex(said["is"])


@pytest.mark.parametrize(
    ("what", "cancelled"),
    [("a line", False), ("a line", True), ("an event", False), ("a child's result", False)],
)
async def test_what_cannot_be_decoded_in_a_try_is_no_reason_to_undo(what: str, cancelled: bool, trees: Trees) -> None:
    """The handler undid what it knew of, and was dead when the key came; cancelled, it had undone nothing and owed nothing."""
    bank: list[str] = []
    codec = Keys("a")
    trees.handlers = Handlers(codec=codec)

    async def act(what: str) -> str:
        bank.append(what)
        return what

    @trees.handlers.job
    async def part() -> str:
        return "packed"

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        done: list[str] = []
        try:
            done.append(await job.step(act, "charge"))
            if what == "a child's result":
                async with job.durable_nursery() as parts:
                    packed = parts.start_soon(part)
                assert packed.result == "packed"
            await job.wait_for_event("sent", type=str)
            await job.wait_for_event("signed", type=str)
        except BaseException:
            with job.cleanup():
                for _ in done:
                    await job.step(act, "refund")  # noqa: ASYNC102 -- the same
                await job.step(act, "tell")  # noqa: ASYNC102 -- the same
            raise
        return "shipped"

    if what == "a child's result":
        codec.of["part"] = "b"
    # Not encoded, as by SQL.
    job_id = SyncClient(trees.dsn).enqueue("order").id
    await trees.burst(log=False)
    client = SyncClient(trees.dsn, codec=Keys("b") if what == "an event" else codec)
    client.send_event(job_id, "sent", "x")
    if cancelled:
        client.cancel(job_id)
    if what == "a line":
        codec.keys = ["b"]
    for _ in range(2):
        trees.again()
        await trees.burst(log=False)
    assert bank == ["charge"]
    assert trees.job(job_id)["finished_at"] is None
    codec.keys = ["a", "b"]
    if not cancelled:
        client.send_event(job_id, "signed", "y")
    done = await trees.ended(job_id)
    undone = ["refund", "tell"] if cancelled else []
    assert (done["state"], done["error"]) == ("cancelled" if cancelled else "completed", None)
    assert bank == ["charge", *undone]
