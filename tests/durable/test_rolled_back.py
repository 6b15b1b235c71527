"""A rollback for good: the workers that are left release jobs of a newer version seldom, and the doctor names them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio import Handlers, Job, SyncClient
from pulse_trio.doctor import diagnose
from pulse_trio.jobs import CancelRequest
from pulse_trio.store import family, health
from pulse_trio.worker.jobs.runner import Runner

if TYPE_CHECKING:
    from pulse_trio.worker.jobs.running_job import RunningJob
    from support.trees import Trees


class Deploys:
    """Handlers of the kind `order` in version 1 and 2, and one whose author has removed the kind."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.newer, self.older, self.without, self.plain = Handlers(), Handlers(), Handlers(), Handlers()

        async def work(what: str) -> None:
            self.calls.append(what)

        async def order(job: Job) -> None:
            await job.step(work, "charge")
            try:
                await job.wait_for_event("never")
            finally:
                if job.cancel_reason in ("user", "deadline"):
                    with job.cleanup():
                        await job.step(work, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield

        self.newer.job(name="order", durable=True, version=2, suspend_after=0, max_attempts=1)(order)
        self.older.job(name="order", durable=True, suspend_after=0, max_attempts=1)(order)
        self.without.job(name="other")(order)

        @self.plain.job(name="order")
        async def plain(job: Job) -> None:
            self.calls.append("plain")

    def of(self, left: str) -> Handlers:
        return {"an older version": self.older, "none of its kind": self.without, "not durable": self.plain}[left]


async def until_released(trees: Trees, job_id: int, times: int) -> None:
    """Runs what is due until the job was released so often."""
    while waits(trees, job_id)[2] < times:
        # On a busy machine it is due again before the burst ends.
        await trees.burst(log=False)


def waits(trees: Trees, job_id: int) -> tuple[float, int, int]:
    """Seconds from the end of its last attempt until it is due again, attempts that its budget has left, and its releases."""
    (row,) = trees.window.run(
        "SELECT extract(epoch FROM j.run_at - max(a.ended_at))::float8 AS pause, j.max_attempts - j.attempt AS left,"
        " count(*) FILTER (WHERE a.outcome = 'released') AS releases"
        " FROM job j JOIN attempt a ON a.job_id = j.id WHERE j.id = %s GROUP BY j.id",
        job_id,
    )
    return row["pause"], row["left"], row["releases"]


@pytest.mark.parametrize(("left", "most"), [("an older version", 8), ("none of its kind", 2), ("not durable", 2)])
async def test_a_cancelled_job_is_released_by_who_cannot_go_on_with_it_and_compensates_in_the_end(
    left: str, most: int, trees: Trees
) -> None:
    deploys = Deploys()
    trees.handlers = deploys.newer
    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    budget = waits(trees, job_id)[1]
    SyncClient(trees.dsn).cancel(job_id)
    trees.handlers = deploys.of(left)
    releases = 0
    while releases < most:
        await until_released(trees, job_id, releases + 1)
        pause, rest, releases = waits(trees, job_id)
        assert (pause, rest) == (pytest.approx(min(2 ** (releases - 1), 5), abs=0.5), budget)
        trees.again()
    assert trees.job(job_id)["state"] == "available"
    trees.handlers = deploys.newer
    await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "cancelled"
    assert deploys.calls == ["charge", "refund"]


async def test_a_job_that_nobody_goes_on_with_for_minutes_is_tried_once_a_minute(trees: Trees) -> None:
    deploys = Deploys()
    trees.handlers = deploys.newer
    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    for releases, pause in ((1, 1), (2, 2), (3, 4), (4, 5), (32, 5), (33, 60), (50, 60)):
        trees.window.run("DELETE FROM attempt WHERE job_id = %s AND outcome = 'released'", job_id)
        trees.window.run(
            "INSERT INTO attempt (job_id, attempt, session, started_at, ended_at, outcome)"
            " SELECT %s, 1 + n, 1, now(), now(), 'released' FROM generate_series(1, %s) n",
            job_id,
            releases,
        )
        assert trees.window.value("SELECT extract(epoch FROM release_pause(%s))::int", job_id) == pause


@pytest.mark.parametrize("noticed_by", ["the watchdog", "the next worker"])
@pytest.mark.parametrize("left", ["an older version", "none of its kind", "not durable"])
async def test_a_deadline_waits_for_a_worker_that_can_go_on_with_the_job(
    left: str, noticed_by: str, trees: Trees
) -> None:
    deploys = Deploys()
    trees.handlers = deploys.newer
    job_id = trees.enqueue("order", deadline=3600.0)
    await trees.burst(log=False)
    trees.window.run("""UPDATE job SET options = (options::jsonb || '{"deadline": 5}')::text::json""")
    if noticed_by == "the watchdog":
        trees.window.run("UPDATE member_deadline SET deadline = '2020-01-01Z'")
        assert trees.window.value("SELECT end_overdue()") == 1
    else:
        trees.window.run("DELETE FROM member_deadline")
        trees.again()
    trees.handlers = deploys.of(left)
    await until_released(trees, job_id, 1)
    assert trees.job(job_id)["state"] in ("available", "scheduled")
    if noticed_by == "the watchdog":
        # A minute later it waits still, because its queue is served.
        trees.window.run("UPDATE cancellation SET requested_at = requested_at - interval '1 minute'")
        trees.window.run("UPDATE member_deadline SET deadline = '2020-01-01Z'")
        trees.window.run("UPDATE attempt SET ended_at = ended_at - interval '1 minute'")
        trees.window.value("SELECT end_overdue()")
    trees.again()
    trees.handlers = deploys.newer
    await trees.burst(log=False)
    ended = trees.job(job_id)
    assert (ended["state"], ended["cancel_reason"]) == ("cancelled", "deadline")
    assert deploys.calls == ["charge", "refund"]


@pytest.mark.parametrize("compensates", [True, False])
async def test_what_a_deadline_ended_in_a_queue_that_nobody_serves_is_cleaned_up_by_a_retry(
    compensates: bool, trees: Trees
) -> None:
    deploys = Deploys()
    trees.handlers = deploys.newer

    @trees.handlers.job(durable=True, suspend_after=0)
    async def waits_only(job: Job) -> None:
        await job.step(_charge)
        await job.wait_for_event("never")

    job_id = trees.enqueue("order" if compensates else "waits_only", deadline=3600.0)
    await trees.burst(log=False)
    trees.window.run("""UPDATE job SET options = (options::jsonb || '{"deadline": 5}')::text::json""")
    for _ in range(2):
        trees.window.run("UPDATE member_deadline SET deadline = '2020-01-01Z'")
        assert trees.window.value("SELECT end_overdue()") == 1
        trees.window.run("UPDATE cancellation SET requested_at = requested_at - interval '1 minute'")
    assert trees.job(job_id)["state"] == "cancelled"
    client = SyncClient(trees.dsn)
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == [job_id]
    client.retry(job_id)
    await trees.burst(log=False)
    assert (trees.job(job_id)["state"], trees.job(job_id)["cancel_reason"]) == ("cancelled", "deadline")
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == []
    # The next retry begins it anew, or lets it go on where it had nothing to undo.
    client.retry(job_id)
    await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "suspended"
    assert deploys.calls == (["charge", "refund", "charge"] if compensates else [])


async def _charge() -> None: ...


@pytest.mark.parametrize("left", ["none of its kind", "not durable"])
async def test_a_cancellation_that_comes_between_claim_and_beginning_waits_for_a_worker_that_can_go_on_with_the_job(
    left: str, trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploys = Deploys()
    trees.handlers = deploys.newer
    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    trees.handlers = deploys.of(left)
    accept = Runner.accept

    def cancelled(runner: Runner, *args: Any, **more: Any) -> list[RunningJob]:
        accepted = accept(runner, *args, **more)
        SyncClient(trees.dsn).cancel(job_id)
        for job in accepted:
            job.ask(CancelRequest("user", None))
        return accepted

    with monkeypatch.context() as patched:
        patched.setattr(Runner, "accept", cancelled)
        trees.again()
        await until_released(trees, job_id, 1)
    trees.again()
    trees.handlers = deploys.newer
    await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "cancelled"
    assert deploys.calls == ["charge", "refund"]


async def test_a_handler_that_is_not_durable_any_more_does_nothing_over_a_history(trees: Trees) -> None:
    deploys = Deploys()
    trees.handlers = deploys.newer
    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    trees.handlers = deploys.plain
    trees.again()
    await until_released(trees, job_id, 1)
    (released,) = trees.window.run("SELECT error FROM attempt WHERE outcome = 'released'")
    assert released["error"].startswith(
        f"UnfitArguments: job {job_id} has a history, and the handler 'order' of this worker is not durable"
    )
    SyncClient(trees.dsn).send_event(job_id, "never")
    trees.again()
    trees.handlers = deploys.newer
    await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "completed"
    assert deploys.calls == ["charge"]


@pytest.mark.parametrize("late", [False, True])
async def test_a_child_that_is_watched_and_not_durable_is_tried_again_and_ends_with_its_deadline(
    late: bool, trees: Trees
) -> None:
    tried: list[int] = []

    @trees.handlers.job(max_attempts=3)
    async def pack(job: Job) -> str:
        tried.append(job.attempt)
        if job.attempt == 1:
            raise ValueError("for now")
        return "packed"

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        async with job.durable_nursery() as nursery:
            packed = nursery.start_soon(pack)
        return packed.result

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    (child,) = trees.window.run("SELECT id, options::text FROM job WHERE kind = 'pack'")
    assert (tried, '"tree": 1' in child["options"]) == ([1], True)
    if late:
        trees.window.run(
            "UPDATE job SET options = (options::jsonb || '{\"deadline\": 5}')::text::json WHERE id = %s", child["id"]
        )
    trees.window.run("UPDATE job SET run_at = clock_timestamp() WHERE id = %s", child["id"])
    await trees.burst(log=False)
    assert (tried, trees.job(child["id"])["cancel_reason"]) == (([1], "deadline") if late else ([1, 2], None))
    assert trees.job(job_id)["kind"] == "order"


async def test_a_child_that_has_made_no_durable_call_does_not_begin_after_its_deadline(trees: Trees) -> None:
    """No watchdog has come to it yet."""
    tried: list[int] = []

    @trees.handlers.job(durable=True)
    async def pack(job: Job) -> None:
        tried.append(job.attempt)
        if job.attempt == 1:
            raise ValueError("for now")

    job_id = trees.enqueue("pack", deadline=3600.0)
    await trees.burst(log=False)
    trees.window.run("""UPDATE job SET options = (options::jsonb || '{"deadline": 5, "tree": 2}')::text::json""")
    trees.again()
    await trees.burst(log=False)
    assert (tried, trees.job(job_id)["cancel_reason"]) == ([1], "deadline")


async def test_the_doctor_names_jobs_that_only_a_newer_version_of_the_code_can_go_on_with(trees: Trees) -> None:
    deploys = Deploys()
    trees.handlers = deploys.newer
    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    trees.handlers = deploys.older
    for _ in range(3):
        trees.again()
        await trees.burst(log=False)
    assert waits(trees, job_id) == (pytest.approx(15, abs=1), 1, 3)
    found = trees.window.do(health.health(trees.window.do(health.server())))
    (finding,) = [each for each in diagnose(found) if each.check in ("other version", "unknown kind")]
    assert finding.check == "other version"
    assert finding.what.startswith(
        "1 job of kind 'order' was released 3 times within the hour. "
        f"version 2 of 'order' has begun job {job_id}, and this worker"
    )
