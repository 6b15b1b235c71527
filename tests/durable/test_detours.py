"""A compensation of a cancelled job that fails half-way, in handlers which undo on several levels: the retry makes more calls
than it did, and each thing is undone once.

The calls have no keys. Counted on, one that the first try did not come to had the number, and the line, of what an outer level
had undone: it was never done, and the refund was paid twice.
"""

from __future__ import annotations

import math
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Job, RetryAfter, SyncClient
from pulse_trio.jobs import CancelRequest
from pulse_trio.store import family
from pulse_trio.worker.durable import cancelling

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.trees import Trees

THINGS = ("label", "book", "charge")
"""What is undone, in this order."""


class World:
    """What was undone, and what fails: each of `down` once, the one that comes first first."""

    job: Job

    def __init__(self, client: SyncClient | None, *down: str) -> None:
        self.client = client
        self.down = list(down)
        self.undone: list[str] = []
        self.scope = trio.CancelScope()
        self.times_out = False

    async def waits(self) -> None:
        """Until it is cancelled: suspended, or in a plain await."""
        running: Any = self.job._runtime  # pyright: ignore[reportPrivateUsage] -- at once, and not when it has heard of it
        if self.times_out:
            if self.job.attempt == 1:
                running.cancel("timeout")
            await trio.sleep_forever()
        if self.client is None:
            return await self.job.wait_for_event("go")
        self.client.cancel(self.job.id)
        running.ask(CancelRequest("user", None))
        await trio.sleep_forever()

    async def connects(self, what: str) -> None:
        """Plain code in front of a step."""
        await trio.lowlevel.checkpoint()
        if f"plain {what}" in self.down:
            self.down.remove(f"plain {what}")
            raise OSError("no connection")

    async def undo(self, what: str) -> None:
        if what in self.down:
            self.down.remove(what)
            raise OSError(f"{what} is down")
        self.undone.append(what)

    async def label(self) -> None:
        await self.undo("label")

    async def book(self) -> None:
        await self.undo("book")

    async def charge(self) -> None:
        await self.undo("charge")

    async def hangs(self, what: str) -> None:
        if what in self.down:
            self.down.remove(what)
            self.scope.cancel()
            await trio.sleep_forever()
        self.undone.append(what)

    async def alert(self) -> None: ...

    async def tell(self) -> None:
        """Of each thing there is the same to tell."""
        await self.undo("told")


async def _levels(world: World, *calls: Callable[[], Awaitable[Any]]) -> None:
    """The first two are those of an inner level, the last that of an outer one."""
    job = world.job
    label, book, charge = calls
    try:
        try:
            await world.waits()
        except BaseException:
            with job.cleanup():
                await label()  # noqa: ASYNC102 -- job.cleanup() is the shield
                await book()  # noqa: ASYNC102 -- as above
            raise
    except BaseException:
        with job.cleanup():
            await charge()  # noqa: ASYNC102 -- as above
        raise


async def functions(world: World) -> None:
    job = world.job
    await _levels(world, *(partial(job.step, undo) for undo in (world.label, world.book, world.charge)))


async def one_function(world: World) -> None:
    await _levels(world, *(partial(world.job.step, world.undo, what) for what in THINGS))


class Thing:
    """What a team has for each thing that it does."""

    def __init__(self, world: World, what: str) -> None:
        self.world, self.what = world, what

    async def tell(self) -> None:
        self.world.undone.append("told")

    async def undo(self) -> None:
        await self.world.undo(self.what)


async def methods(world: World) -> None:
    async def undo(thing: Thing) -> None:
        with world.job.cleanup():
            await world.job.step(thing.undo)
            await world.job.step(thing.tell)

    async with AsyncExitStack() as stack:
        for what in reversed(THINGS):
            stack.push_async_callback(undo, Thing(world, what))
        await world.waits()


async def partials(world: World) -> None:
    await _levels(world, *(partial(world.job.step, partial(world.undo, what)) for what in THINGS))


async def what_json_cannot_carry(world: World) -> None:
    async def label(_: object) -> None:
        await world.label()

    async def book(_: object) -> None:
        await world.book()

    async def charge(_: object) -> None:
        await world.charge()

    await _levels(world, *(partial(world.job.step, undo, object()) for undo in (label, book, charge)))


async def others_with_keys(world: World) -> None:
    job = world.job
    calls = [partial(job.step, world.undo, what, key="c" if what == "charge" else None) for what in THINGS]
    await _levels(world, *calls)


async def in_the_end(world: World) -> None:
    """One clean-up, with a `finally`."""
    job = world.job
    try:
        await world.waits()
    finally:
        with job.cleanup():
            try:
                await job.step(world.undo, "label")  # noqa: ASYNC102 -- as above
                await job.step(world.undo, "book")  # noqa: ASYNC102 -- as above
            finally:
                await job.step(world.undo, "charge")  # noqa: ASYNC102 -- as above


async def side_by_side(world: World) -> None:
    """A clean-up for each thing, two of them in one `except`."""
    job = world.job
    try:
        try:
            await world.waits()
        except BaseException:
            with job.cleanup():
                await job.step(world.undo, "label")  # noqa: ASYNC102 -- as above
            with job.cleanup():
                await job.step(world.undo, "book")  # noqa: ASYNC102 -- as above
            raise
    finally:
        with job.cleanup():
            await job.step(world.undo, "charge")  # noqa: ASYNC102 -- as above


async def in_a_stack(world: World) -> None:
    job = world.job

    async def undo(what: str) -> None:
        with job.cleanup():
            await job.step(world.tell)
            await job.step(world.undo, what)

    async with AsyncExitStack() as stack:
        for what in reversed(THINGS):
            stack.push_async_callback(undo, what)
        await world.waits()


async def in_a_loop(world: World) -> None:
    """Each is tried, whatever has become of the others."""
    job = world.job
    try:
        await world.waits()
    finally:
        failed: list[Exception] = []
        with job.cleanup():
            for what in THINGS:
                try:
                    await job.step(world.tell)  # noqa: ASYNC102 -- as above
                    await job.step(world.undo, what)  # noqa: ASYNC102 -- as above
                except Exception as error:
                    failed.append(error)
            if failed:
                raise ExceptionGroup("not all is undone", failed)


async def behind_plain_code(world: World) -> None:
    async def undo(what: str) -> None:
        await world.connects(what)
        await world.job.step(world.undo, what)

    await _levels(world, *(partial(undo, what) for what in THINGS))


async def one_after_the_other(world: World) -> None:
    """Each in a clean-up of its own, whatever has become of the others."""
    job = world.job
    try:
        await world.waits()
    finally:
        failed: list[Exception] = []
        for what in THINGS:
            try:
                with job.cleanup():
                    await world.connects(what)  # noqa: ASYNC102 -- as above
                    await job.step(world.undo, what)  # noqa: ASYNC102 -- as above
            except Exception as error:
                failed.append(error)
        if failed:
            raise ExceptionGroup("not all is undone", failed)


async def in_one(world: World) -> None:
    """The same in one clean-up, in which no exception leaves but the last."""
    job = world.job
    try:
        await world.waits()
    finally:
        failed: list[Exception] = []
        with job.cleanup():
            for what in THINGS:
                try:
                    await world.connects(what)  # noqa: ASYNC102 -- as above
                    await job.step(world.undo, what)  # noqa: ASYNC102 -- as above
                except Exception as error:
                    failed.append(error)
        if failed:
            raise ExceptionGroup("not all is undone", failed)


async def logged(world: World) -> None:
    """The handler goes on with the others, and ends as if nothing had failed."""
    job = world.job
    try:
        await world.waits()
    finally:
        for what in THINGS:
            with suppress(Exception), job.cleanup():  # it would be logged
                await world.connects(what)  # noqa: ASYNC102 -- as above
                await job.step(world.undo, what)  # noqa: ASYNC102 -- as above


async def told(world: World) -> None:
    """A step tells the staff of an undo that has failed. The retry has nothing to tell."""
    job = world.job
    try:
        await world.waits()
    finally:
        with job.cleanup():
            for what in THINGS:
                try:
                    await job.step(world.undo, what)  # noqa: ASYNC102 -- as above
                except Exception:
                    await job.step(world.alert)  # noqa: ASYNC102 -- as above
                    raise


async def stacked(world: World) -> None:
    job = world.job

    async def undo(what: str) -> None:
        with job.cleanup():
            await world.connects(what)
            await job.step(world.undo, what)

    async with AsyncExitStack() as stack:
        for what in reversed(THINGS):
            stack.push_async_callback(undo, what)
        await world.waits()


async def cut_short(world: World) -> None:
    """A step of the inner level takes too long."""
    job = world.job

    async def undo(what: str) -> None:
        world.scope = trio.CancelScope()
        with world.scope:
            await job.step(world.hangs, what)
        if world.scope.cancelled_caught:
            raise trio.TooSlowError

    await _levels(world, *(partial(undo, what) for what in THINGS))


TOLD = ("told",) * 3
PLAIN = tuple(f"plain {what}" for what in THINGS)
SHAPES: dict[Callable[[World], Awaitable[None]], tuple[tuple[str, ...], tuple[str, ...]]] = {
    # What may fail, and what is undone besides.
    functions: (THINGS, ()),
    one_function: (THINGS, ()),
    partials: (THINGS, ()),
    methods: (THINGS, TOLD),
    what_json_cannot_carry: (THINGS, ()),
    others_with_keys: (THINGS, ()),
    in_the_end: (THINGS, ()),
    side_by_side: (THINGS, ()),
    in_a_stack: (("told", *THINGS), TOLD),
    in_a_loop: (("told", *THINGS), TOLD),
    behind_plain_code: (("label", *PLAIN), ()),
    one_after_the_other: (("label", *PLAIN), ()),
    in_one: (("label", *PLAIN), ()),
    logged: ((*THINGS, *PLAIN[:1]), ()),
    told: (THINGS, ()),
    stacked: (("label", *PLAIN), ()),
    cut_short: (THINGS, ()),
}


@pytest.fixture(autouse=True)
def at_its_place_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancellation comes again where it came, and never after a time wherever the code is."""
    monkeypatch.setattr(cancelling, "_LONGEST", math.inf)


def _wrong(
    trees: Trees, downs: dict[int, tuple[str, ...]], worlds: dict[int, World], besides: tuple[str, ...]
) -> dict[tuple[str, ...], object]:
    """By what had failed: those in which not each thing was undone once, or that has not failed."""
    expected = sorted([*THINGS, *besides])
    return {
        downs[job_id]: (world.undone, trees.job(job_id)["error"])
        for job_id, world in worlds.items()
        if sorted(world.undone) != expected or world.down
    }


@pytest.mark.parametrize("many", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
async def test_what_a_retry_does_of_the_clean_up_of_a_timeout_that_failed_half_way(
    trees: Trees, shape: Callable[[World], Awaitable[None]], many: int
) -> None:
    """The handler says by `Discard` that it is for good. Each retry comes to the timeout again, and does the rest."""
    may_fail, besides = SHAPES[shape]
    if shape is in_one:
        # What it has caught in the clean-up is not said by the exception that ends the job.
        may_fail = THINGS
    worlds: dict[int, World] = {}

    async def begin() -> None: ...

    @trees.handlers.job(durable=True, timeout=60)
    async def order(job: Job) -> None:
        world = worlds[job.id]
        world.job = job
        await job.step(begin)
        try:
            await shape(world)
        except BaseException:
            if job.cancel_reason == "timeout":
                raise Discard("it took too long") from None  # noqa: ASYNC104 -- as cancel.md shows
            raise

    # Where no step was called the clean-up has not begun, and a retry goes on.
    none = {"plain label", "plain charge"}
    downs = {trees.enqueue("order"): down for down in combinations(may_fail, many) if not none.issubset(down)}
    worlds = {job_id: World(None, *down) for job_id, down in downs.items()}
    for world in worlds.values():
        world.times_out = True
    ids = list(downs)
    client = SyncClient(trees.dsn)
    for _ in range(many + 1):
        await trees.burst(log=False)
        for owing in trees.window.do(family.unfinished_clean_ups(ids)):
            client.retry(owing)
    assert _wrong(trees, downs, worlds, besides) == {}
    assert {trees.job(job_id)["state"] for job_id in ids} == {"dead"}
    assert trees.window.do(family.unfinished_clean_ups(ids)) == []


async def test_a_clean_up_whose_calls_come_later_than_they_did_calls_nothing_twice(trees: Trees) -> None:
    """The plain await that the timeout struck in is quick in the next attempt, so it strikes one level deeper: the undo there
    had the number, and the line, of the outer one, which was paid twice."""
    calls: list[str] = []

    async def do(what: str) -> None:
        calls.append(what)

    @trees.handlers.job(durable=True, timeout=60, max_attempts=3)
    async def order(job: Job) -> None:
        try:
            await job.step(do, "a")
            if job.attempt == 1:
                running: Any = job._runtime  # pyright: ignore[reportPrivateUsage] -- its time is over
                running.cancel("timeout")
                await trio.sleep_forever()
            try:
                await job.step(do, "b")
            except BaseException:
                with job.cleanup():
                    await job.step(do, "undo b")  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise
        except BaseException:
            with job.cleanup():
                await job.step(do, "undo a")  # noqa: ASYNC102 -- as above
            raise

    job_id = trees.enqueue("order")
    for _ in range(3):
        await trees.burst(log=False)
        trees.again()
    found = trees.job(job_id)
    assert (found["state"], calls) == ("dead", ["a", "undo a"])
    assert "its clean-up called do as its call 2 in an attempt before, and now as its call 3" in found["error"]


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("ends", ["raises", "Discard", "RetryAfter(afresh=True)"])
async def test_the_clean_up_of_a_timeout_is_finished_by_a_retry_whatever_its_handler_says_then(
    trees: Trees, ends: str, *, cancelled: bool
) -> None:
    """A person may cancel the job meanwhile: then it is cancelled, also after the retry. Where the handler would begin afresh a
    refund was paid twice and another never, or the job began anew that a person had cancelled."""
    client, calls, fails = SyncClient(trees.dsn), list[str](), ["undo c"]

    async def do(what: str) -> None:
        if what in fails:
            fails.remove(what)
            if cancelled:
                client.cancel(job_id)
            raise OSError(f"{what} is down")
        calls.append(what)

    @trees.handlers.job(durable=True, timeout=60, max_attempts=1)
    async def order(job: Job) -> None:
        try:
            await job.step(do, "a")
            try:
                await job.step(do, "b")
                await job.step(do, "c")
                if job.attempt == 1:
                    running: Any = job._runtime  # pyright: ignore[reportPrivateUsage] -- its time is over
                    running.cancel("timeout")
                await trio.sleep_forever()
            except BaseException:
                with job.cleanup():
                    await job.step(do, "undo c")  # noqa: ASYNC102 -- job.cleanup() is the shield
                    await job.step(do, "undo b")  # noqa: ASYNC102 -- as above
                raise
        except BaseException:
            with job.cleanup():
                await job.step(do, "undo a")  # noqa: ASYNC102 -- as above
            if job.cancel_reason == "timeout" and ends == "Discard":
                raise Discard("it took too long") from None  # noqa: ASYNC104 -- as cancel.md shows
            if job.cancel_reason == "timeout" and ends != "raises":
                raise RetryAfter(3600, afresh=True) from None  # noqa: ASYNC104 -- as above
            raise

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    first = "cancelled" if cancelled else "dead"
    assert (trees.job(job_id)["state"], calls) == (first, ["a", "b", "c", "undo a"])
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == [job_id]
    client.retry(job_id)
    await trees.burst(log=False)
    found = trees.job(job_id)
    assert calls == ["a", "b", "c", "undo a", "undo c", "undo b"], found["error"]
    assert found["state"] == ("cancelled" if cancelled else "dead")
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == []


@pytest.mark.parametrize("suspended", [True, False], ids=["suspended", "in a plain await"])
@pytest.mark.parametrize("many", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
async def test_what_a_retry_does_of_a_clean_up_that_failed_half_way(
    trees: Trees, shape: Callable[[World], Awaitable[None]], many: int, *, suspended: bool
) -> None:
    """The same handler for each choice of what fails, once, in the first attempt that comes to it."""
    client = SyncClient(trees.dsn)
    may_fail, besides = SHAPES[shape]
    worlds: dict[int, World] = {}

    async def begin() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        worlds[job.id].job = job
        await job.step(begin)
        await shape(worlds[job.id])

    downs = {trees.enqueue("order"): down for down in combinations(may_fail, many)}
    worlds = {job_id: World(None if suspended else client, *down) for job_id, down in downs.items()}
    ids = list(downs)
    await trees.burst(log=False)
    for job_id in ids if suspended else ():
        client.cancel(job_id)
    for _ in range(2 * many + 1):
        await trees.burst(log=False)
        for owing in trees.window.do(family.unfinished_clean_ups(ids)):
            client.retry(owing)
    assert _wrong(trees, downs, worlds, besides) == {}
    assert {trees.job(job_id)["state"] for job_id in ids} == {"cancelled"}
    assert trees.window.do(family.unfinished_clean_ups(ids)) == []


@pytest.mark.parametrize("fails", ["mail", "refund"])
async def test_a_step_whose_arguments_are_others_in_each_attempt_comes_again(trees: Trees, fails: str) -> None:
    """The number of the attempt, the time of day: the retry was a mismatch each time, and the rest was never done."""
    done: list[str] = []
    down = [fails]

    async def act(what: str, attempt: int) -> None:
        if what in down:
            down.remove(what)
            raise OSError(f"{what} is down")
        done.append(what)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        await job.step(act, "charge", 0)
        try:
            await job.wait_for_event("approved")
        except BaseException:
            with job.cleanup():
                for what, number in (("label", job.attempt), ("refund", -job.attempt), ("mail", 0)):
                    await job.step(act, what, number)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    client = SyncClient(trees.dsn)
    job_id = trees.enqueue("order")
    await trees.burst()
    client.cancel(job_id)
    await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "cancelled"
    client.retry(job_id)
    await trees.burst()
    assert done == ["charge", "label", "refund", "mail"]
    assert trees.job(job_id)["state"] == "cancelled"
    (row,) = trees.window.run("SELECT owes_clean_up(%s) AS owes", job_id)
    assert row["owes"] is False
