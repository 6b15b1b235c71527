"""Code that has changed under a job which waits: a sleep, a wait or a deadline under way does not begin anew in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio.worker.durable.unopened import Unopened
from support.trials import LONG, Body, Trial

if TYPE_CHECKING:
    from pulse_trio import Job
    from support.trees import Trees


@pytest.fixture
def trial(trees: Trees) -> Trial:
    return Trial(trees)


async def sleeps(trial: Trial, job: Job) -> str:
    await job.step(trial.note, "begun")
    await job.sleep(LONG)
    await job.step(trial.note, "ended")
    return "fits"


async def waits(trial: Trial, job: Job) -> str:
    await job.step(trial.note, "begun")
    await job.wait_for_event("paid", timeout=LONG)
    return "fits"


async def patient(trial: Trial, job: Job) -> str:
    await job.step(trial.note, "begun")
    with job.move_on_after(LONG):
        await job.wait_for_event("paid")
    return "fits"


async def in_a_block(trial: Trial, job: Job) -> str:
    async with job.durable_nursery() as nursery:
        nursery.start_soon(trial.ends)
        await job.sleep(LONG)
    return "fits"


async def step_before(trial: Trial, job: Job) -> None:
    await job.step(trial.note, "begun")
    await job.step(trial.note, "new")
    await job.sleep(LONG)


async def step_with_a_key_before(trial: Trial, job: Job) -> None:
    await job.step(trial.note, "begun")
    await job.step(trial.note, "new", key="new")
    await job.sleep(LONG)


async def block_before(trial: Trial, job: Job) -> None:
    await job.step(trial.note, "begun")
    async with job.durable_nursery() as nursery:
        nursery.start_soon(trial.ends)
    await job.sleep(LONG)


async def scope_around(trial: Trial, job: Job) -> None:
    await job.step(trial.note, "begun")
    with job.move_on_after(LONG):
        await job.sleep(LONG)


async def with_a_key(trial: Trial, job: Job) -> None:
    await job.step(trial.note, "begun")
    await job.sleep(LONG, key="pause")


async def removed(trial: Trial, job: Job) -> None:
    await job.step(trial.note, "begun")


async def a_transaction_instead(trial: Trial, job: Job) -> None:
    await job.step(trial.note, "begun")
    async with job.transaction(result="new"):
        trial.done.append("new")


async def step_in_the_block(trial: Trial, job: Job) -> None:
    async with job.durable_nursery() as nursery:
        nursery.start_soon(trial.ends)
        await job.step(trial.note, "new")
        await job.sleep(LONG)


async def step_in_the_scope(trial: Trial, job: Job) -> None:
    await job.step(trial.note, "begun")
    with job.move_on_after(LONG):
        await job.step(trial.note, "new")
        await job.wait_for_event("paid", timeout=LONG)


async def patient_with_a_timeout(trial: Trial, job: Job) -> str:
    await job.step(trial.note, "begun")
    with job.move_on_after(LONG):
        await job.wait_for_event("paid", timeout=LONG)
    return "fits"


CHANGES = [
    (sleeps, step_before, "sleep (key 2:sleep)", "now calls step note (key 2:step)"),
    (sleeps, step_with_a_key_before, "sleep (key 2:sleep)", "now calls step note (key new)"),
    (sleeps, block_before, "sleep (key 2:sleep)", "now calls block (key 2:block)"),
    (sleeps, scope_around, "sleep (key 2:sleep)", "now calls scope (key 2:scope)"),
    (sleeps, with_a_key, "sleep (key 2:sleep)", "now calls sleep (key pause)"),
    (sleeps, waits, "sleep (key 2:sleep)", "now calls event paid (key 2:event)"),
    (sleeps, removed, "sleep (key 2:sleep)", "has returned"),
    (sleeps, a_transaction_instead, "sleep (key 2:sleep)", "now calls job.transaction(), which completes the job"),
    (waits, step_before, "event (key 2:event)", "now calls step note (key 2:step)"),
    (waits, sleeps, "event (key 2:event)", "now calls sleep (key 2:sleep)"),
    (waits, removed, "event (key 2:event)", "has returned"),
    (patient, step_before, "scope (key 2:scope)", "now calls step note (key 2:step)"),
    (patient, waits, "scope (key 2:scope)", "now calls event paid (key 2:event)"),
    (patient, removed, "scope (key 2:scope)", "has returned"),
    (patient_with_a_timeout, step_in_the_scope, "event (key 3:event)", "now calls step note (key 3:step)"),
    (in_a_block, step_in_the_block, "sleep (key 2:sleep)", "now calls step note (key 2:step)"),
]


# Where a deadline is over it strikes before the next call.
CASES = [(*change, False) for change in CHANGES] + [
    (*change, True)
    for change in CHANGES
    if change[0] not in (patient, patient_with_a_timeout) or change[1] is step_before
]


@pytest.mark.parametrize(("old", "new", "what", "now", "over"), CASES, ids=lambda one: getattr(one, "__name__", ""))
async def test_another_call_in_the_place_of_a_wait_is_a_mismatch(
    trial: Trial, old: Body, new: Body, what: str, now: str, over: bool
) -> None:
    await trial.begin(old)
    lines = trial.trees.lines(trial.id)
    if over:
        # Not the deadline around it.
        key = what.partition("key ")[2].rstrip(")")
        value = "to_json(extract(epoch FROM now())::float8)"
        trial.trees.window.run(f"UPDATE history SET value = {value} WHERE job_id = %s AND key = %s", trial.id, key)
    found = await trial.resume(new)
    assert f"ReplayMismatch: job {trial.id}, {what} is under way since an earlier attempt, until 20" in (
        found["error"] or trial.trees.window.run("SELECT outcome::text AS error FROM durable_job")[0]["error"]
    )
    assert "new" not in trial.done
    assert trial.trees.lines(trial.id) == lines
    if old is in_a_block:
        return
    assert (found["state"], trial.trees.window.run("SELECT count(*) AS n FROM job")[0]["n"]) == ("dead", 0)
    assert f"but the handler {now}. The code changed" in found["error"]
    # Code that fits again goes on.
    trial.deploy(old)
    trial.client.retry(trial.id)
    if old is not sleeps and not over:
        trial.client.send_event(trial.id, "paid")
    trial.trees.time_passes(trial.id)
    if old is not sleeps:
        trial.client.send_event(trial.id, "paid")
    await trial.run("default")
    found = trial.trees.job(trial.id)
    late = old is waits and over
    assert (found["state"], found["result"], trial.done[0]) == (
        ("retryable", None, "begun") if late else ("completed", "fits", "begun")
    )


async def keyed(trial: Trial, job: Job) -> None:
    await job.step(trial.note, "begun", key="begun")


async def sleeps_after_a_key(trial: Trial, job: Job) -> str:
    await keyed(trial, job)
    await job.sleep(LONG)
    return "fits"


async def scope_around_a_key(trial: Trial, job: Job) -> None:
    with job.move_on_after(2 * LONG):
        await keyed(trial, job)
    await job.sleep(LONG)


async def nursery_around_a_key(trial: Trial, job: Job) -> None:
    async with job.durable_nursery():
        await keyed(trial, job)
    await job.sleep(LONG)


async def patient_with_keys(trial: Trial, job: Job) -> str:
    with job.move_on_after(LONG):
        await keyed(trial, job)
        await job.wait_for_event("paid", key="paid")
    return "fits"


async def no_scope_around_keys(trial: Trial, job: Job) -> None:
    await keyed(trial, job)
    await job.wait_for_event("paid", key="paid")


async def patient_before_a_wait(trial: Trial, job: Job) -> str:
    with job.move_on_after(2 * LONG):
        await keyed(trial, job)
        await job.wait_for_event("paid", timeout=LONG)
    return "fits"


async def no_scope_around_a_wait(trial: Trial, job: Job) -> None:
    await keyed(trial, job)
    await job.wait_for_event("paid", timeout=LONG)
    await job.step(trial.note, "new")


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (sleeps_after_a_key, scope_around_a_key, "sleep (key 2:sleep)"),
        (sleeps_after_a_key, nursery_around_a_key, "sleep (key 2:sleep)"),
        (patient_with_keys, no_scope_around_keys, "scope (key 1:scope)"),
        (patient_before_a_wait, no_scope_around_a_wait, "scope (key 1:scope)"),
    ],
)
async def test_a_call_with_a_key_in_the_place_of_a_wait_is_a_mismatch(
    trial: Trial, old: Body, new: Body, what: str
) -> None:
    """Its line, which has no number, was taken for that of another way to the same."""
    await trial.begin(old)
    trial.client.send_event(trial.id, "another")
    found = await trial.resume(new)
    if found["state"] == "suspended":  # in what it called in that place
        trial.client.send_event(trial.id, "paid")
        found = await trial.resume(new)
    assert (found["state"], trial.done) == ("dead", ["begun"])
    assert f"{what} is under way since an earlier attempt, until 20" in found["error"]
    trial.deploy(old)
    trial.client.retry(trial.id)
    found = await trial.time_passes(old)
    assert (found["state"], found["result"], trial.done) == ("completed", "fits", ["begun"])


@pytest.mark.parametrize("body", [sleeps, patient, in_a_block])
async def test_code_that_fits_is_none(trial: Trial, body: Body) -> None:
    await trial.begin(body)
    assert (await trial.resume(body))["state"] == "suspended"
    await trial.run("late")
    found = await trial.time_passes(body)
    assert (found["result"], found["error"]) == ("fits", None)


async def test_a_branch_on_the_version_is_none(trial: Trial) -> None:
    async def newer(trial: Trial, job: Job) -> Any:
        return await (step_before if job.version >= 2 else sleeps)(trial, job)

    await trial.begin(sleeps)
    found = await trial.time_passes(newer, version=2)
    assert (found["state"], found["result"], trial.done) == ("completed", "fits", ["begun", "ended"])


async def test_a_wait_with_a_key_keeps_its_end_wherever_it_is(trial: Trial) -> None:
    async def later(trial: Trial, job: Job) -> str:
        await job.step(trial.note, "begun")
        await job.step(trial.note, "new")
        await job.sleep(2 * LONG, key="pause")
        return "fits"

    await trial.begin(with_a_key)
    ends = trial.moments()
    assert (await trial.resume(later))["state"] == "suspended"
    assert (trial.moments(), trial.done) == (ends, ["begun", "new"])


async def test_a_wait_that_lasts_longer_in_the_new_code_keeps_its_end(trial: Trial) -> None:
    async def longer(trial: Trial, job: Job) -> str:
        await job.step(trial.note, "begun")
        await job.sleep(2 * LONG)
        await job.step(trial.note, "reminded")
        await job.sleep(0.01)
        return "fits"

    await trial.begin(sleeps)
    ends = trial.moments()
    assert (await trial.resume(longer))["state"] == "suspended"
    assert trial.moments() == ends
    await trial.time_passes(longer)
    await trial.time_passes(longer)
    assert (trial.trees.job(trial.id)["result"], trial.done) == ("fits", ["begun", "reminded"])


async def test_a_history_without_waits_is_told_of_no_call(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(Unopened, "begins", lambda *call, **_: told.append(call))

    async def plain(trial: Trial, job: Job) -> str:
        await job.step(trial.note, "begun")
        await job.wait_for_event("paid")
        return "fits"

    await trial.begin(plain)
    trial.client.send_event(trial.id, "paid")
    found = await trial.resume(plain)
    assert (found["result"], told) == ("fits", [])


async def test_a_deadline_that_has_struck_stays_so_where_the_new_code_awaits_nothing_in_it(trial: Trial) -> None:
    """The first attempt of the new code found that it had struck, and noted that it had cut nothing short: the next one took
    the other way."""

    def hurries(*, awaits: bool) -> Body:
        async def body(trial: Trial, job: Job) -> str:
            with job.move_on_after(LONG) as patience:
                if awaits:
                    await job.wait_for_event("paid")
            for _ in range(3):
                await job.wait_for_event("paid late" if patience.cancelled_caught else "shipped")
            return "late" if patience.cancelled_caught else "in time"

        return body

    await trial.begin(hurries(awaits=True))
    await trial.time_passes(hurries(awaits=True))
    for _ in range(3):
        trial.client.send_event(trial.id, "paid late")
        found = await trial.resume(hurries(awaits=False))
    assert found["result"] == "late"
