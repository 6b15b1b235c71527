"""Workers that are lost between two calls of a compensation for a failure of plain code: the next attempt, whose code does not
fail again, does the rest."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Discard, FailedBefore, Handlers, Job, RetryAfter, Snooze, SyncClient
from pulse_trio.testing import crash_points

if TYPE_CHECKING:
    from pulse_trio.handlers import Handler
    from support.trees import Trees

PLACES = ["in the first", "between", "in the second", "behind"]


class Warehouse:
    """Its steps write down that they ran; the worker is lost once, at a place of the compensation."""

    def __init__(self, trees: Trees, place: str) -> None:
        self.book: list[str] = []
        self._trees = trees
        self._place = place

    async def charge(self) -> None:
        self.book.append("charged")

    async def ship(self) -> None:
        self.book.append("shipped")

    async def note(self) -> None:
        self.book.append("noted")

    async def call_back(self, job: Job) -> None:
        self.book.append("called back")
        await self.is_lost(job, "in the first")

    async def refund(self, job: Job) -> None:
        self.book.append("refunded")
        await self.is_lost(job, "in the second")

    async def undo(self, job: Job) -> None:
        """The compensation."""
        await job.step(self.call_back, job)
        await self.is_lost(job, "between")
        await job.step(self.refund, job)
        await self.is_lost(job, "behind")

    async def is_lost(self, job: Job, place: str) -> None:
        if self._place == place:
            self._place = ""
            await self._trees.lose(job.id)
            await trio.sleep_forever()

    def fails_once(self, job: Job) -> None:
        if job.attempt == 1:
            raise ConnectionError("away for a moment")


def undone_at(place: str) -> list[str]:
    """What the compensation has written down when all is undone: a step in which the worker was lost is called twice."""
    twice = {
        "in the first": ["called back", "called back", "refunded"],
        "in the second": ["called back", "refunded", "refunded"],
    }
    return twice.get(place, ["called back", "refunded"])


async def end(trees: Trees, job_id: int) -> dict[str, object]:
    await trees.burst(watchdog=5, lease=3, heartbeat=0.3)
    return await trees.ended(job_id)


def compensating(trees: Trees, house: Warehouse, ends: Callable[[BaseException], Exception]) -> None:
    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> str:
        await job.step(house.charge)
        try:
            house.fails_once(job)
            await job.step(house.ship)
        except Exception as error:
            with job.cleanup():
                await house.undo(job)  # noqa: ASYNC120 -- job.cleanup() is the shield
            raise ends(error) from error
        return "done"


@pytest.mark.parametrize("place", PLACES)
async def test_the_rest_is_undone_and_the_job_begins_afresh(trees: Trees, place: str) -> None:
    house = Warehouse(trees, place)
    compensating(trees, house, lambda _: RetryAfter(0, afresh=True))
    assert (await end(trees, trees.enqueue("order")))["state"] == "completed"
    assert house.book == ["charged", *undone_at(place), "charged", "shipped"]


@pytest.mark.parametrize("place", PLACES)
async def test_the_rest_is_undone_and_the_job_is_given_up(trees: Trees, place: str) -> None:
    house = Warehouse(trees, place)
    compensating(trees, house, lambda _: Discard("undone"))
    found = await end(trees, trees.enqueue("order"))
    assert found["state"] == "dead"
    assert str(found["error"]).startswith("Discard: undone")
    assert house.book[-1] == "refunded"
    assert "shipped" not in house.book


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("afresh", [False, True])
async def test_the_body_of_a_block_fails_in_its_place(trees: Trees, place: str, *, afresh: bool) -> None:
    house = Warehouse(trees, place)

    @trees.handlers.job
    async def pack() -> None: ...

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> str:
        await job.step(house.charge)
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(pack)
                house.fails_once(job)
            await job.step(house.ship)
        except Exception as error:
            with job.cleanup():
                await house.undo(job)  # noqa: ASYNC120 -- job.cleanup() is the shield
            raise (RetryAfter(0, afresh=True) if afresh else Discard("undone")) from error
        return "done"

    found = await end(trees, trees.enqueue("order"))
    assert found["state"] == ("completed" if afresh else "dead")
    assert afresh or str(found["error"]).startswith("Discard: undone")
    undone = house.book[1:-2] if afresh else house.book[1:]
    assert list(dict.fromkeys(undone)) == ["called back", "refunded"]
    assert undone.count("called back") == 1 + (place == "in the first")
    assert undone.count("refunded") == 1 + (place == "in the second")
    assert not afresh or house.book[-2:] == ["charged", "shipped"]


@pytest.mark.parametrize("place", PLACES)
async def test_tasks_in_the_body_of_a_block_fail_in_its_place(trees: Trees, place: str) -> None:
    """The handler's own task stood in a nursery of the body, in no call of its own: the job was dead with a mismatch, and the
    rest was undone by nobody."""
    house = Warehouse(trees, place)

    @trees.handlers.job
    async def pack() -> None: ...

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> str:
        async def pays() -> None:
            house.fails_once(job)
            await job.step(house.ship, key="ship")

        await job.step(house.charge)
        try:
            async with job.durable_nursery() as children:
                children.start_soon(pack)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(pays)
                    nursery.start_soon(partial(job.wait_for_event, "packed", key="packed"))
            await job.step(house.note)
        except Exception as error:
            with job.cleanup():
                await house.undo(job)  # noqa: ASYNC120 -- job.cleanup() is the shield
            raise Discard("undone") from error
        return "done"

    found = await end(trees, trees.enqueue("order"))
    assert str(found["error"]).startswith("Discard: undone")
    assert house.book == ["charged", *undone_at(place)]


Shape = Callable[[Job, Warehouse], Awaitable[None]]


async def a_fan_out_before(job: Job, house: Warehouse) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(job.step, house.note, key="a"))
        nursery.start_soon(partial(job.step, house.note, key="b"))
    house.fails_once(job)


async def one_of_the_tasks(job: Job, house: Warehouse) -> None:
    async def fails() -> None:
        await job.step(house.note, key="a")
        house.fails_once(job)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fails)
        nursery.start_soon(partial(job.step, house.note, key="b"))


async def one_that_would_go_on(job: Job, house: Warehouse) -> None:
    async def fails() -> None:
        await job.step(house.note, key="a")
        house.fails_once(job)
        await job.step(house.note, key="and")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fails)
        nursery.start_soon(partial(job.wait_for_event, "packed", timeout=0.5, key="b"))


async def beside_a_progress_bar(job: Job, house: Warehouse) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        await job.step(house.note)
        house.fails_once(job)
        await job.step(house.note)
        nursery.cancel_scope.cancel()


async def while_the_main_task_waits(job: Job, house: Warehouse) -> None:
    async def fails() -> None:
        await job.step(house.note, key="a")
        house.fails_once(job)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fails)
        with suppress(TimeoutError):
            await job.wait_for_event("packed", timeout=0.5)


SHAPES = [
    a_fan_out_before, one_of_the_tasks, one_that_would_go_on, beside_a_progress_bar, while_the_main_task_waits,
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("place", ["in the first", "between"])
async def test_handlers_with_several_tasks_undo_the_rest(trees: Trees, place: str, shape: Shape) -> None:
    """They were dead, and where the first refund had no line yet all that comes after it was done before."""
    house = Warehouse(trees, place)

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(house.charge)
        try:
            await shape(job, house)
            await job.step(house.ship)
        except Exception as error:
            with job.cleanup():
                await house.undo(job)  # noqa: ASYNC120 -- job.cleanup() is the shield
            raise Discard("undone") from error

    found = await end(trees, trees.enqueue("order"))
    assert str(found["error"]).startswith("Discard: undone"), found["error"]
    assert [what for what in house.book if what != "noted"] == [
        "charged", *["called back"] * (1 + (place == "in the first")), "refunded",
    ]  # fmt: skip


async def test_a_task_that_undoes_its_own_part_does_the_rest_of_it(trees: Trees) -> None:
    house = Warehouse(trees, "between")

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        async def part() -> None:
            await job.step(house.charge, key="charge")
            try:
                house.fails_once(job)
                await job.step(house.ship, key="ship")
            except Exception:
                with job.cleanup():
                    await job.step(house.call_back, job, key="call back")  # noqa: ASYNC120 -- job.cleanup() is the shield
                    await house.is_lost(job, "between")  # noqa: ASYNC120 -- job.cleanup() is the shield
                    await job.step(house.refund, job, key="refund")  # noqa: ASYNC120 -- job.cleanup() is the shield
                raise

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(part)
                nursery.start_soon(partial(job.step, house.note, key="b"))
        except* OSError as group:
            raise Discard("undone") from group
        except* FailedBefore as group:
            raise Discard("undone again") from group

    found = await end(trees, trees.enqueue("order"))
    assert str(found["error"]).startswith("Discard: undone again"), found["error"]
    assert [what for what in house.book if what != "noted"] == ["charged", "called back", "refunded"]


@pytest.mark.parametrize("stands", ["in a step", "in a plain await"])
@pytest.mark.parametrize("place", [*PLACES, "nowhere"])
async def test_a_task_of_the_jobs_nursery_undoes_its_part_for_the_handlers_failure(
    trees: Trees, place: str, stands: str, replay_stands_still: None
) -> None:
    """Nothing said that the handler had failed: the next attempt was dead of a mismatch before the rest was undone."""
    house = Warehouse(trees, place)

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        ready = trio.Event()

        async def part() -> None:
            try:
                await job.step(house.charge, key="charge")
                ready.set()
                if stands == "in a step":
                    await job.step(trio.sleep_forever, key="never")
                await trio.sleep_forever()
            except BaseException:
                with job.cleanup():
                    await job.step(house.call_back, job, key="call back")  # noqa: ASYNC102 -- job.cleanup() is the shield
                    await house.is_lost(job, "between")  # noqa: ASYNC102 -- job.cleanup() is the shield
                    await job.step(house.refund, job, key="refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
                    await house.is_lost(job, "behind")  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise

        await job.step(house.note)
        job.nursery.start_soon(part)
        await ready.wait()
        house.fails_once(job)
        await job.step(house.ship)

    found = await trees.ended(trees.enqueue("order"))
    assert found["state"] == "dead", found
    assert "away for a moment" in found["error"]
    assert house.book == ["noted", "charged", *undone_at(place)]


@pytest.mark.parametrize("key", [None, "block"])
@pytest.mark.parametrize("fails", ["in each attempt", "once"])
@pytest.mark.parametrize("place", PLACES)
async def test_a_body_with_a_compensation_of_its_own_is_come_to_again(
    trees: Trees, place: str, fails: str, key: str | None
) -> None:
    """The block was taken for the call that comes in the place of what had failed in its body: its own compensation was left
    out, and the one around it came to nothing."""
    house = Warehouse(trees, place)

    @trees.handlers.job
    async def part() -> None:
        await trio.sleep_forever()

    async def settle() -> None:
        house.book.append("settled")

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(house.charge)
        try:
            async with job.durable_nursery(key=key) as nursery:
                nursery.start_soon(part)
                try:
                    if fails == "in each attempt" or job.attempt == 1:
                        raise ConnectionError("away")
                    await job.step(house.ship)
                finally:
                    with job.cleanup():
                        await house.undo(job)  # noqa: ASYNC102 -- job.cleanup() is the shield
        except BaseException as error:
            with job.cleanup():
                await job.step(settle)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise Discard("undone") from error  # noqa: ASYNC104 -- what it raises is its word on the job

    found = await end(trees, trees.enqueue("order"))
    assert str(found["error"]).startswith("Discard: undone")
    assert house.book == ["charged", *undone_at(place), "settled"]


async def test_where_it_is_not_known_which_task_had_failed_nothing_is_done_after_it(trees: Trees) -> None:
    """The task itself had begun to undo its part, and no line says which one it is."""
    house = Warehouse(trees, "in the first")

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        async def part() -> None:
            await job.step(house.charge, key="charge")
            try:
                house.fails_once(job)
            except Exception:
                with job.cleanup():
                    await job.step(house.call_back, job, key="call back")  # noqa: ASYNC120 -- job.cleanup() is the shield
                raise

        async with trio.open_nursery() as nursery:
            nursery.start_soon(part)
            nursery.start_soon(partial(job.step, house.note, key="b"))
        await job.step(house.ship)

    found = await end(trees, trees.enqueue("order"))
    assert "had begun to undo what it did when its worker was lost" in str(found["error"])
    assert "shipped" not in house.book
    # A person has looked.
    SyncClient(trees.dsn).retry(int(str(found["id"])))
    await trees.burst()
    assert trees.job(int(str(found["id"])))["state"] == "completed"
    assert house.book[-1] == "shipped"


async def test_when_all_is_undone_and_the_attempt_has_failed_of_it_a_person_decides(trees: Trees) -> None:
    """As where no worker is lost: its attempts would all come to the same."""
    house = Warehouse(trees, "between")
    compensating(trees, house, lambda error: RuntimeError(f"sorry: {error}"))
    job_id = trees.enqueue("order")
    found = await end(trees, job_id)
    assert (found["state"], found["attempt"]) == ("dead", 3)
    assert house.book == ["charged", "called back", "refunded"]
    assert "failed of plain code (ConnectionError: away for a moment)" in str(found["error"])
    assert f"jobs retry {job_id} --afresh" in str(found["error"])


async def test_two_compensations_in_a_row_are_told_apart(trees: Trees) -> None:
    """The handler tries again by itself; the worker is lost in the second refund. Each failure comes in its own place."""
    house, said = Warehouse(trees, ""), list[str]()
    fails = ["the first", "the second"]

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> int:
        for n in range(3):
            await job.step(house.charge)
            try:
                if fails:
                    raise ConnectionError(fails.pop(0))
                await job.step(house.ship)
            except Exception as error:
                said.append(error.failure if isinstance(error, FailedBefore) else str(error))
                with job.cleanup():
                    await job.step(house.refund, job)  # noqa: ASYNC120 -- job.cleanup() is the shield
                    if n == 1 and job.attempt == 1:
                        await trees.lose(job.id)  # noqa: ASYNC120 -- job.cleanup() is the shield
                        await trio.sleep_forever()  # noqa: ASYNC120 -- job.cleanup() is the shield
            else:
                return n
        return -1

    found = await end(trees, trees.enqueue("order"))
    assert (found["state"], found["result"]) == ("completed", 2)
    assert house.book == ["charged", "refunded"] * 2 + ["charged", "shipped"]
    assert said == ["the first", "the second", "ConnectionError: the first", "ConnectionError: the second"]


async def test_what_is_called_in_any_case_does_not_fail(trees: Trees) -> None:
    """A `finally` whose call fits the history, whether plain code fails or not."""
    house = Warehouse(trees, "behind")

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> str:
        await job.step(house.charge)
        try:
            house.fails_once(job)
        finally:
            with job.cleanup():
                await job.step(house.call_back, job)  # noqa: ASYNC102 -- job.cleanup() is the shield
                await house.is_lost(job, "behind")  # noqa: ASYNC102 -- job.cleanup() is the shield
        await job.step(house.ship)
        return "done"

    assert (await end(trees, trees.enqueue("order")))["result"] == "done"
    assert house.book == ["charged", "called back", "shipped"]


@pytest.mark.parametrize("swallows", [False, True])
async def test_a_handler_that_does_not_answer_it_is_left_to_a_person_and_goes_on_when_it_does(
    trees: Trees, *, swallows: bool
) -> None:
    house = Warehouse(trees, "between")
    answers: list[type[Exception]] = [ConnectionError]

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> str:
        await job.step(house.charge)
        try:
            house.fails_once(job)
            await job.step(house.ship)
        except tuple(answers):
            with job.cleanup():
                await house.undo(job)  # noqa: ASYNC120 -- job.cleanup() is the shield
            raise Discard("undone") from None
        except FailedBefore:
            if not swallows:
                raise
            await job.step(house.ship, key="otherwise")
        return "done"

    job_id = trees.enqueue("order")
    found = await end(trees, job_id)
    assert (found["state"], found["attempt"]) == ("dead", 2)
    assert str(found["error"]).startswith("ReplayMismatch")
    assert f"undo the rest where the handler catches FailedBefore, and pulse-trio jobs retry {job_id}" in str(
        found["error"]
    )
    answers.append(FailedBefore)
    SyncClient(trees.dsn).retry(job_id)
    found = await end(trees, job_id)
    assert str(found["error"]).startswith("Discard: undone")
    assert house.book == ["charged", "called back", "refunded"]


async def test_a_job_that_is_cancelled_meanwhile_undoes_the_rest(trees: Trees) -> None:
    house = Warehouse(trees, "")

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(house.charge)
        try:
            house.fails_once(job)
            await job.step(house.ship)
        except BaseException as error:
            with job.cleanup():
                await job.step(house.call_back, job)  # noqa: ASYNC102 -- job.cleanup() is the shield
                if job.attempt == 1:
                    SyncClient(trees.dsn).cancel(job.id)
                    await trees.lose(job.id)  # noqa: ASYNC102 -- job.cleanup() is the shield
                    await trio.sleep_forever()  # noqa: ASYNC102 -- job.cleanup() is the shield
                await job.step(house.refund, job)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise Discard("undone") from error  # noqa: ASYNC104 -- its word on the job

    job_id = trees.enqueue("order")
    assert (await end(trees, job_id))["state"] == "cancelled"
    assert house.book == ["charged", "called back", "refunded"]


@pytest.fixture
def pulse_handlers() -> Handlers:
    return Handlers()


@pytest.mark.usefixtures("pulse_clock")
async def test_every_crash_point_of_it(pulse_dsn: str, pulse_handlers: Handlers) -> None:
    handlers, bank, once = pulse_handlers, list[str](), ["plain"]

    async def does(what: str) -> None:
        bank.append(what)

    @handlers.job(durable=True, max_attempts=8)
    async def order(job: Job) -> None:
        try:
            await job.step(does, "charge", key="charge")
            if once:
                raise OSError(once.pop())
            await job.step(does, "ship", key="ship")
        except BaseException as error:
            with job.cleanup():
                await job.step(does, "call back", key="call back")  # noqa: ASYNC102 -- job.cleanup() is the shield
                await job.step(does, "refund", key="refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise RetryAfter(1, afresh=True) from error  # noqa: ASYNC104 -- its word on the job

    async for run in crash_points(order, dsn=pulse_dsn, handlers=handlers, cancel=True):
        charged, refunded = bank.count("charge"), bank.count("refund")
        assert "Mismatch" not in (run.error or ""), (run.point, bank, run.error)
        assert run.state in ("completed", "cancelled"), (run.point, bank, run.error)
        assert refunded or charged == 1, (run.point, bank)
        assert bank[-1] == ("ship" if run.state == "completed" else "refund"), (run.point, bank)
        bank.clear()
        once[:] = ["plain"]


@pytest.mark.usefixtures("pulse_clock")
async def test_every_crash_point_of_a_body_that_fails_when_it_is_resumed(
    pulse_dsn: str, pulse_handlers: Handlers
) -> None:
    handlers, bank, entries = pulse_handlers, list[str](), list[int]()

    async def does(what: str) -> None:
        bank.append(what)

    @handlers.job
    async def pack() -> None: ...

    @handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> str:
        entries.append(job.attempt)
        try:
            await job.step(does, "charge")
            # The first attempt is suspended in it.
            async with job.durable_nursery() as nursery:
                nursery.start_soon(pack)
                if len(entries) == 2:
                    raise OSError("plain")
        except BaseException as error:
            with job.cleanup():
                await job.step(does, "call back")  # noqa: ASYNC102 -- job.cleanup() is the shield
                await job.step(does, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise Discard("undone") from error  # noqa: ASYNC104 -- its word on the job
        return "kept"

    async for run in crash_points(order, dsn=pulse_dsn, handlers=handlers):
        assert "Mismatch" not in (run.error or ""), (run.point, bank, run.error)
        assert run.state == ("dead" if "refund" in bank else "completed"), (run.point, bank, run.error)
        assert run.state != "dead" or str(run.error).startswith("Discard: undone"), (run.point, run.error)
        bank.clear()
        entries.clear()


async def nested(job: Job, house: Warehouse) -> None:
    await job.step(house.charge)
    try:
        house.fails_once(job)
        try:
            await job.step(house.ship)
        except BaseException:
            with job.cleanup():
                await job.step(house.note)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise
    except Exception as error:
        with job.cleanup():
            await house.undo(job)  # noqa: ASYNC120 -- job.cleanup() is the shield
        raise Discard("undone") from error


async def stacked(job: Job, house: Warehouse) -> None:
    async def undone_by(undo: Callable[[], Awaitable[None]], error: object) -> None:
        if error is not None:
            with job.cleanup():
                await undo()

    try:
        async with AsyncExitStack() as stack:
            stack.push_async_exit(lambda *error: undone_by(partial(house.undo, job), error[1]))
            await job.step(house.charge)
            house.fails_once(job)
            stack.push_async_exit(lambda *error: undone_by(partial(job.step, house.note), error[1]))
            await job.step(house.ship)
    except Exception as error:
        raise Discard("undone") from error


@pytest.mark.parametrize("shape", [nested, stacked])
@pytest.mark.parametrize("place", PLACES)
async def test_a_level_that_the_attempt_before_had_not_come_to_undoes_nothing(
    trees: Trees, place: str, shape: Callable[[Job, Warehouse], Awaitable[None]]
) -> None:
    """`FailedBefore` comes in the next durable call, which stands one `try` deeper: its compensation has no line there. The job
    was dead with a mismatch, and the rest undone by nobody."""
    house = Warehouse(trees, place)

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await shape(job, house)

    found = await end(trees, trees.enqueue("order"))
    assert (found["state"], str(found["error"]).partition("\n")[0]) == ("dead", "Discard: undone")
    assert house.book[0] == "charged"
    assert house.book[1:] == undone_at(place)


async def a_scope_next(job: Job, house: Warehouse, pack: object) -> None:
    house.fails_once(job)
    with job.move_on_after(600):
        await job.step(house.ship)


async def a_failing_scope_next(job: Job, house: Warehouse, pack: object) -> None:
    house.fails_once(job)
    with job.fail_after(600):
        async with job.durable_nursery():
            await job.step(house.ship)


async def in_a_body(job: Job, house: Warehouse, pack: Handler[..., None]) -> None:
    async with job.durable_nursery() as nursery:
        nursery.start_soon(pack)
        house.fails_once(job)
        await job.step(house.ship)


@pytest.mark.parametrize("shape", [a_scope_next, a_failing_scope_next, in_a_body])
@pytest.mark.parametrize("place", PLACES)
async def test_what_stands_where_plain_code_failed_has_no_number(
    trees: Trees, place: str, shape: Callable[[Job, Warehouse, Handler[..., None]], Awaitable[None]]
) -> None:
    """A scope took the number of the compensation's first step, a step in a block's body stood before the block's line: the job
    was dead with a mismatch, and the rest undone by nobody."""
    house = Warehouse(trees, place)

    @trees.handlers.job
    async def pack() -> None: ...

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(house.charge)
        try:
            await shape(job, house, pack)
        except Exception as error:
            with job.cleanup():
                await house.undo(job)  # noqa: ASYNC120 -- job.cleanup() is the shield
            raise Discard("undone") from error

    found = await end(trees, trees.enqueue("order"))
    assert (found["state"], str(found["error"]).partition("\n")[0]) == ("dead", "Discard: undone")
    assert list(dict.fromkeys(house.book)) == ["charged", "called back", "refunded"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "wish", [Discard("no stock"), RetryAfter(0), Snooze(0)], ids=["Discard", "RetryAfter", "Snooze"]
)
async def test_a_wish_that_a_step_has_raised_is_no_plain_code_that_failed(
    trees: Trees, place: str, wish: Exception
) -> None:
    """It goes through the step as it is, and later attempts get it again there. What was called for it was said to be called
    for plain code, which the next attempt missed: the job was dead, and its refund not made."""
    house = Warehouse(trees, place)

    async def ship() -> None:
        raise wish

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(house.charge)
        try:
            await job.step(ship)
        except BaseException:
            with job.cleanup():
                await house.undo(job)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise Discard("undone") from None  # noqa: ASYNC104 -- what it raises is its word on the job

    found = await end(trees, trees.enqueue("order"))
    assert str(found["error"]).startswith("Discard: undone")
    assert house.book == ["charged", *undone_at(place)]
