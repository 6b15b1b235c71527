"""A rollback for good: the workers that are left release jobs of a newer version seldom, and the doctor names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pulse_trio import Handlers, Job, SyncClient
from pulse_trio.doctor import diagnose
from pulse_trio.store import health

if TYPE_CHECKING:
    from support.trees import Trees


class Deploys:
    """Handlers of the kind `order` in version 1 and 2, and one whose author has removed the kind."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.newer, self.older, self.without = Handlers(), Handlers(), Handlers()

        async def work(what: str) -> None:
            self.calls.append(what)

        async def order(job: Job) -> None:
            await job.step(work, "charge")
            try:
                await job.wait_for_event("never")
            finally:
                if job.cancel_reason == "user":
                    with job.cleanup():
                        await job.step(work, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield

        self.newer.job(name="order", durable=True, version=2, suspend_after=0, max_attempts=1)(order)
        self.older.job(name="order", durable=True, suspend_after=0, max_attempts=1)(order)
        self.without.job(name="other")(order)


def waits(trees: Trees, job_id: int) -> tuple[float, int, int]:
    """Seconds from the end of its last attempt until it is due again, attempts that its budget has left, and its releases."""
    (row,) = trees.window.run(
        "SELECT extract(epoch FROM j.run_at - max(a.ended_at))::float8 AS pause, j.max_attempts - j.attempt AS left,"
        " count(*) FILTER (WHERE a.outcome = 'released') AS releases"
        " FROM job j JOIN attempt a ON a.job_id = j.id WHERE j.id = %s GROUP BY j.id",
        job_id,
    )
    return row["pause"], row["left"], row["releases"]


@pytest.mark.parametrize(("left", "most"), [("an older version", 8), ("none of its kind", 2)])
async def test_a_cancelled_job_is_released_ever_less_often_and_compensates_in_the_end(
    left: str, most: int, trees: Trees
) -> None:
    deploys = Deploys()
    trees.handlers = deploys.newer
    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    budget = waits(trees, job_id)[1]
    SyncClient(trees.dsn).cancel(job_id)
    trees.handlers = deploys.older if left == "an older version" else deploys.without
    releases = 0
    while releases < most:
        # On a busy machine it is due again before the burst ends.
        await trees.burst(log=False)
        pause, rest, releases = waits(trees, job_id)
        assert (pause, rest) == (pytest.approx(min(2 ** (releases - 1), 60), abs=0.5), budget)
        trees.again()
    assert trees.job(job_id)["state"] == "available"
    trees.handlers = deploys.newer
    await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "cancelled"
    assert deploys.calls == ["charge", "refund"]


async def test_the_doctor_names_jobs_that_only_a_newer_version_of_the_code_can_go_on_with(trees: Trees) -> None:
    deploys = Deploys()
    trees.handlers = deploys.newer
    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    trees.handlers = deploys.older
    for _ in range(3):
        trees.again()
        await trees.burst(log=False)
    assert waits(trees, job_id) == (pytest.approx(120, abs=1), 1, 3)
    found = trees.window.do(health.health(trees.window.do(health.server())))
    (finding,) = [each for each in diagnose(found) if each.check in ("other version", "unknown kind")]
    assert finding.check == "other version"
    assert finding.what.startswith(
        "1 job of kind 'order' was released 3 times within the hour. "
        f"version 2 of 'order' has begun job {job_id}, and this worker"
    )
