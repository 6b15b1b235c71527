"""A handler that fails by itself undoes things on two levels with one function; plain code of the inner clean-up fails once."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Discard, Job, RetryAfter, SyncClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.trees import Trees


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ("raises", "FailedBefore: an attempt before failed here (OSError: no connection)"),
        ("Discard", "Discard: undone"),
        ("RetryAfter(afresh=True)", "Discard: the handler asks for RetryAfter(afresh=True), but a job.cleanup() of it"),
    ],
)
@pytest.mark.parametrize("cancelled", [False, True])
async def test_what_the_outer_level_has_undone_is_not_taken_for_what_the_inner_one_would_undo(
    trees: Trees, ends: str, error: str, *, cancelled: bool
) -> None:
    """The inner one's call had the number, and the line, of the outer one's: that was done twice, and the other never."""
    calls: list[str] = []
    fails = ["ship", "plain"]

    async def do(what: str) -> None:
        if what in fails:
            fails.remove(what)
            raise OSError(f"{what} is down")
        calls.append(what)

    def plain() -> None:
        if "plain" in fails:
            fails.remove("plain")
            raise OSError("no connection")

    @trees.handlers.job(durable=True, max_attempts=3)
    async def order(job: Job) -> None:
        try:
            await job.step(do, "charge")
            try:
                await job.step(do, "book")
                try:
                    await job.step(do, "ship")
                except BaseException:
                    with job.cleanup():
                        plain()
                        await job.step(do, "undo book")  # noqa: ASYNC102 -- job.cleanup() is the shield
                    raise
            except BaseException:
                with job.cleanup():
                    await job.step(do, "undo charge")  # noqa: ASYNC102 -- as above
                raise
        except Exception as failed:
            if ends == "Discard":
                raise Discard("undone") from failed
            if ends == "RetryAfter(afresh=True)":
                raise RetryAfter(0, afresh=True) from failed
            raise

    job_id = trees.enqueue("order")
    client = SyncClient(trees.dsn)
    await trees.burst(log=False)
    if cancelled and ends == "raises":
        client.cancel(job_id)
    with trio.fail_after(60):
        for _ in range(3):
            trees.again()
            await trees.burst(log=False)
    found = trees.job(job_id)
    if cancelled and ends == "raises":
        # Each attempt fails so: more of them would do nothing.
        assert (found["state"], found["attempt"]) == ("cancelled", 2)
    else:
        assert (found["state"], found["error"].startswith(error)) == ("dead", True), found["error"]
        client.retry(job_id)
        await trees.burst(log=False)
        assert trees.job(job_id)["state"] == "dead"
    assert calls == ["charge", "book", "undo charge"]


async def test_a_call_with_other_arguments_is_the_same_where_plain_code_fails_again(trees: Trees) -> None:
    """An argument may say why it failed, in other words each time."""
    calls: list[str] = []

    async def note(why: str) -> None:
        calls.append(why)

    @trees.handlers.job(durable=True, max_attempts=3)
    async def order(job: Job) -> None:
        await job.step(note, "begun")
        try:
            raise OSError(f"no connection after {job.attempt} s")
        except OSError as failed:
            with job.cleanup():
                await job.step(note, str(failed))  # noqa: ASYNC120 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    for _ in range(3):
        await trees.burst(log=False)
        trees.again()
    assert trees.job(job_id)["error"].startswith("OSError: no connection after 3 s")
    assert calls == ["begun", "no connection after 1 s"]


class Trip:
    """Books by one function and gives back by another; plain code fails once, and the worker is lost once, at a `place`."""

    def __init__(self, trees: Trees, place: str, *, keyed: bool) -> None:
        self.book: list[str] = []
        self._trees, self._place, self._keyed = trees, place, keyed

    async def books(self, what: str) -> None:
        self.book.append(what)

    async def gives_back(self, what: str, why: str, job: Job) -> None:
        self.book.append(f"no {what}")
        await self.is_lost(job, f"in {what}")

    def step(self, job: Job, what: str) -> Awaitable[None]:
        return job.step(self.books, what, **self._key(what))

    async def undo(self, job: Job, what: str, error: object) -> None:
        """What is called differs in each attempt by the text of the exception."""
        with job.cleanup():
            await job.step(self.gives_back, what, str(error), job, **self._key(f"no {what}"))
            await self.is_lost(job, f"behind {what}")

    def _key(self, key: str) -> dict[str, str]:
        return {"key": key} if self._keyed else {}

    async def is_lost(self, job: Job, place: str) -> None:
        if self._place == place:
            self._place = ""
            await self._trees.lose(job.id)
            await trio.sleep_forever()


async def nested(job: Job, trip: Trip) -> None:
    await trip.step(job, "flight")
    try:
        await trip.step(job, "hotel")
        try:
            if job.attempt == 1:
                raise OSError("a moment")
            try:
                await trip.step(job, "car")
            except BaseException as error:
                await trip.undo(job, "car", error)  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise
        except BaseException as error:
            await trip.undo(job, "hotel", error)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise
    except Exception as error:
        await trip.undo(job, "flight", error)  # noqa: ASYNC120 -- job.cleanup() is the shield
        raise Discard("undone") from error


async def stacked(job: Job, trip: Trip) -> None:
    try:
        async with AsyncExitStack() as stack:
            for what in ("flight", "hotel", "car"):
                stack.push_async_callback(trip.undo, job, what, None)
                await trip.step(job, what)
                if what == "hotel" and job.attempt == 1:
                    raise OSError("a moment")
    except Exception as error:
        raise Discard("undone") from error


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("shape", [nested, stacked])
@pytest.mark.parametrize("place", ["in hotel", "behind hotel", "in flight", "behind flight"])
async def test_a_deeper_level_undoes_nothing_by_the_function_of_the_one_that_had_begun(
    trees: Trees, place: str, shape: Callable[[Job, Trip], Awaitable[None]], *, keyed: bool
) -> None:
    """The call for the car, in whose place `FailedBefore` comes, had the number of the hotel's: it got its line, and the hotel
    was given back twice; or none had a line, and a car was given back that nobody had booked. With keys the job was dead with a
    mismatch."""
    trip = Trip(trees, place, keyed=keyed)

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await shape(job, trip)

    job = trees.enqueue("order")
    await trees.burst(watchdog=5, lease=3, heartbeat=0.3)
    found = await trees.ended(job)
    assert (found["state"], str(found["error"]).partition("\n")[0]) == ("dead", "Discard: undone")
    twice = [f"no {place.removeprefix('in ')}"] if place.startswith("in ") else []
    assert sorted(trip.book) == sorted(["flight", "hotel", "no hotel", "no flight", *twice])
