"""What is no sign that the code has changed under a job which waits: an attempt that does not come to its wait."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import ChildFailed, Discard
from support.trials import LONG, Trial

if TYPE_CHECKING:
    from pulse_trio import Job
    from support.trees import Trees


@pytest.fixture
def trial(trees: Trees) -> Trial:
    return Trial(trees)


async def test_an_attempt_that_has_failed_of_a_child_may_be_followed_by_one_that_goes_another_way(trial: Trial) -> None:
    async def other_way(trial: Trial, job: Job) -> str:
        if job.attempt < 3:
            with job.move_on_after(LONG):
                async with job.durable_nursery() as nursery:
                    nursery.start_soon(trial.fails)
        await job.step(trial.note, "other way")
        if job.attempt < 5:
            await job.sleep(LONG)
        return "fits"

    await trial.begin(other_way)
    await trial.run("late")
    assert (await trial.resume(other_way))["state"] == "retryable"
    found = await trial.resume(other_way)
    assert (found["state"], trial.done) == ("suspended", ["other way"])
    # A wait that has begun since is told of.
    assert (await trial.resume(other_way))["state"] == "suspended"
    assert "sleep (key 2:sleep) is under way" in (await trial.resume(other_way))["error"]


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("in_a_scope", [False, True])
async def test_a_job_that_is_cancelled_before_it_comes_to_its_wait_cleans_up(
    trial: Trial, in_a_scope: bool, runs: bool
) -> None:
    async def careful(trial: Trial, job: Job) -> None:
        try:
            if runs and job.attempt > 1:
                trial.client.cancel(trial.id)
                await trio.sleep_forever()
            await trio.lowlevel.checkpoint()
            await job.sleep(LONG)
        except trio.Cancelled:
            with job.cleanup(), job.move_on_after(LONG) if in_a_scope else nullcontext():
                await job.step(trial.note, "undone")  # noqa: ASYNC102
            raise

    await trial.begin(careful)
    if not runs:
        trial.client.cancel(trial.id)
    found = await trial.resume(careful)
    assert (found["state"], found["error"], trial.done) == ("cancelled", None, ["undone"])


async def test_the_clean_up_in_a_scope_that_has_struck_has_the_number_of_the_wait_in_it(trial: Trial) -> None:
    async def cut(trial: Trial, job: Job) -> str:
        with job.move_on_after(LONG):
            try:
                await trio.lowlevel.checkpoint()
                await job.sleep(LONG)
            except trio.Cancelled:
                with trio.CancelScope(shield=True):
                    await job.step(trial.note, "undone")  # noqa: ASYNC102
                raise
        await job.step(trial.note, "went on")
        return "fits"

    await trial.begin(cut)
    found = await trial.time_passes(cut)
    assert (found["error"], found["result"], trial.done) == (None, "fits", ["undone", "went on"])


@pytest.mark.parametrize("returns", [False, True])
async def test_what_comes_after_a_scope_that_has_struck_has_other_numbers(trial: Trial, returns: bool) -> None:
    async def cut(trial: Trial, job: Job) -> str:
        with job.move_on_after(LONG):
            await trio.lowlevel.checkpoint()
            with job.move_on_after(2 * LONG):
                await job.wait_for_event("paid", timeout=LONG)
        if not returns:
            await job.step(trial.note, "went on")
            await job.sleep(LONG)
        return "fits"

    await trial.begin(cut)
    found = await trial.time_passes(cut)
    if not returns:
        assert (found["state"], found["error"], trial.done) == ("suspended", None, ["went on"])
        found = await trial.time_passes(cut)
    assert (found["error"], found["result"]) == (None, "fits")


async def test_the_body_of_a_block_may_be_cut_short_before_its_wait(trial: Trial) -> None:
    async def cut(trial: Trial, job: Job) -> str:
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(trial.fails)
                if job.attempt > 1:
                    await trio.sleep_forever()
                await job.sleep(LONG)
        except* ChildFailed:
            await job.step(trial.note, "refused")  # noqa: ASYNC120 -- what the test is about
        return "fits"

    await trial.begin(cut)
    await trial.run("late")
    found = await trial.resume(cut)
    assert (found["error"], found["result"], trial.done) == (None, "fits", ["refused"])


@pytest.mark.parametrize("inside", [False, True])
async def test_a_handler_that_sleeps_until_a_child_has_ended_wakes_when_it_has(trial: Trial, inside: bool) -> None:
    async def asks(trial: Trial, job: Job) -> str:
        async with job.durable_nursery(collect=True) as nursery:
            child = nursery.start_soon(trial.ends)
            await nursery.flush()
            while child.outcome is None:
                if job.attempt > 1:
                    await trio.sleep(0.01)  # until it is read that the child has ended
                else:
                    await job.sleep(LONG)
            if inside:
                await job.step(trial.note, "noted")
        await job.step(trial.note, "went on")
        return "fits"

    await trial.begin(asks)
    await trial.run("late")
    found = await trial.resume(asks)
    assert (found["error"], found["result"], trial.done[-1:]) == (None, "fits", ["went on"])


@pytest.mark.parametrize("when", ["before", "now", "still waits"])
@pytest.mark.usefixtures("replay_stands_still")
async def test_another_task_may_have_cut_the_main_one_short(trial: Trial, when: str) -> None:
    async def race(trial: Trial, job: Job) -> str:
        scope = trio.CancelScope()

        async def watch() -> None:
            if when == "before":
                await job.step(trial.note, "beside", key="beside")
            else:
                await job.wait_for_event("paid", key="beside")
            if job.attempt > 1:
                scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            with scope:
                if job.attempt > 1 and when != "still waits":
                    await trio.sleep_forever()
                if job.attempt == 1:
                    await job.sleep(LONG)
            await job.step(trial.note, "went on")
        return "fits"

    await trial.begin(race)
    if when == "now":
        trial.client.send_event(trial.id, "paid")
    found = await trial.resume(race)
    if when == "still waits":
        # It has cut nothing short.
        assert "sleep (key 1:sleep) is under way" in found["error"]
    else:
        assert (found["error"], found["result"], trial.done[-1]) == (None, "fits", "went on")


@pytest.mark.parametrize("ends", [ConnectionError, Discard])
async def test_code_that_is_mended_after_it_has_failed_in_a_scope_may_do_without(
    trial: Trial, ends: type[Exception]
) -> None:
    async def fails(trial: Trial, job: Job) -> None:
        with job.move_on_after(LONG):
            while "1:scope" not in trial.moments():  # noqa: ASYNC110 -- nobody is told when it is written
                await trio.sleep(0.01)
            raise ends("away")

    async def mended(trial: Trial, job: Job) -> str:
        await job.step(trial.note, "mended")
        return "fits"

    await trial.begin(fails)
    if ends is Discard:
        trial.client.retry(trial.id)
    found = await trial.resume(mended)
    assert (found["state"], found["result"], trial.done) == ("completed", "fits", ["mended"])


async def test_so_it_is_after_code_that_did_not_fit(trial: Trial) -> None:
    async def fits(trial: Trial, job: Job) -> str:
        await job.step(trial.note, "begun")
        await job.wait_for_event("paid")
        return "fits"

    async def wrong(trial: Trial, job: Job) -> None:
        with job.move_on_after(LONG), job.move_on_after(LONG), job.move_on_after(LONG):
            await fits(trial, job)

    await trial.begin(fits)
    assert "ReplayMismatch" in (await trial.resume(wrong))["error"]
    assert "2:scope" in trial.moments()
    trial.client.retry(trial.id)
    trial.client.send_event(trial.id, "paid")
    assert (await trial.resume(fits))["result"] == "fits"
