"""An operator finds all jobs that owe their clean-up, and retries them by that filter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Job, SyncClient
from pulse_trio.cli.application import main
from pulse_trio.doctor import diagnose
from pulse_trio.store import health, history, searching

if TYPE_CHECKING:
    from pulse_trio.store.filtering import JobFilter
    from support.trees import Trees


async def test_the_jobs_that_owe_a_clean_up_are_listed_named_by_the_doctor_and_retried_together(
    trees: Trees, capsys: pytest.CaptureFixture[str]
) -> None:
    bank: list[str] = []
    down = [True]

    async def charge(order: str) -> None:
        bank.append(f"{order} charged")

    async def refund(order: str) -> None:
        if down:
            raise Discard("the bank is down")
        bank.append(f"{order} refunded")

    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job, name: str, *, fails: bool, cancelled: bool) -> None:
        await job.step(charge, name)
        if fails:
            raise Discard("no stock")
        try:
            if cancelled:
                SyncClient(trees.dsn).cancel(job.id)
                await trio.sleep_forever()
        except trio.Cancelled:
            with job.cleanup():
                await job.step(refund, name)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    def enqueue(name: str, *, fails: bool = False, cancelled: bool = False) -> int:
        return trees.enqueue("order", {"name": name, "fails": fails, "cancelled": cancelled})

    owing = [enqueue("a", cancelled=True), enqueue("b", cancelled=True)]
    enqueue("dead", fails=True)
    enqueue("completed")
    with trio.fail_after(30):
        await trees.burst()
    live = enqueue("live")

    client = SyncClient(trees.dsn)
    assert [job.id for job in client.jobs(owes_clean_up=True)] == owing[::-1]
    assert live in [job.id for job in client.jobs(owes_clean_up=False)]
    assert trees.window.do(history.matching({"owes_clean_up": True, "state": "dead"})) == []
    found = trees.window.do(searching.search({"owes_clean_up": True}, limit=10))
    assert ([job.id for job in found.jobs], found.before) == (owing[::-1], None)

    def of_doctor() -> list[Any]:
        readings = trees.window.do(health.health(trees.window.do(health.server())))
        return [each for each in diagnose(readings) if each.check == "clean-ups"]

    (finding,) = of_doctor()
    assert finding.what.startswith(f"2 jobs (the newest is {owing[1]}) owe their clean-up")

    down.clear()
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["jobs", "list", "--owes-clean-up", "--dsn", trees.dsn])
    assert capsys.readouterr().out.count("  cancelled  ") == 2
    assert client.retry_many(state="cancelled", owes_clean_up=True).retried == owing
    with trio.fail_after(30):
        await trees.burst()
    assert sorted(bank) == [
        "a charged", "a refunded", "b charged", "b refunded", "completed charged", "dead charged", "live charged",
    ]  # fmt: skip
    assert list(client.jobs(owes_clean_up=True)) == []
    assert of_doctor() == []


async def test_a_job_that_a_colleague_has_let_do_the_rest_meanwhile_does_not_begin_anew(trees: Trees) -> None:
    bank: list[str] = []
    down = [True]

    async def charge() -> None:
        bank.append("charged")

    async def refund() -> None:
        if down:
            raise Discard("the bank is down")
        bank.append("refunded")

    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> None:
        await job.step(charge)
        try:
            SyncClient(trees.dsn).cancel(job.id)
            await trio.sleep_forever()
        except trio.Cancelled:
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id, client = trees.enqueue("order"), SyncClient(trees.dsn)
    with trio.fail_after(30):
        await trees.burst()
        chosen: JobFilter = {"state": "cancelled", "owes_clean_up": True}
        found = client.run(history.chosen_for_action(chosen))
        down.clear()
        assert client.run(history.retry_batch(found, chosen=chosen)).retried == [job_id]
        await trees.burst()
        again = client.run(history.retry_batch(found, chosen=chosen))
        await trees.burst()
    assert (again.retried, again.refused) == ([], {job_id: f"Job {job_id} owes no clean-up any more."})
    assert bank == ["charged", "refunded"]
