"""A member that owes the rest of its clean-up does it by a retry of its own, also when its parent is settled; and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from pulse_trio import Discard, InvalidTransition, Job, SyncClient
from pulse_trio.states import State
from pulse_trio.store import family, history
from pulse_trio.store.rehearsing import rehearse_retry
from support.held_up import held_up, let_go, until_it_waits

if TYPE_CHECKING:
    from support.trees import Trees

STANDING = "SELECT count(*) FROM jobs WHERE root_id = %s AND state = 'suspended'"


class Claims:
    """A claim whose scope cuts its repair, of which the refund does what `refunds` say, in order."""

    def __init__(self, trees: Trees, *refunds: str, ends: str = "completed") -> None:
        self.trees = trees
        self.client = SyncClient(trees.dsn)
        self.bank: list[str] = []
        self.refunds = list(refunds)
        self.refunding = trio.Event()
        self.open = trio.Event()
        """What a refund that waits, waits for."""

        @trees.handlers.job(durable=True, suspend_after=0)
        async def repair(job: Job) -> str:
            paid = await job.step(self.charge)
            try:
                await job.sleep(3600)
            except BaseException:
                with job.cleanup():
                    await job.step(self.refund, paid)  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise
            return paid

        @trees.handlers.job(durable=True, suspend_after=0)
        async def claim(job: Job) -> str:
            with job.move_on_after(3600):
                async with job.durable_nursery() as nursery:
                    nursery.start_soon(repair)
            if ends == "dead":
                raise Discard("without the repair")
            return "without the repair"

    async def charge(self) -> str:
        self.bank.append("charged")
        return "charge"

    async def refund(self, charge: str) -> None:
        match self.refunds.pop(0) if self.refunds else "":
            case "fails":
                raise OSError("the bank is down")
            case "waits":
                self.refunding.set()
                await self.open.wait()
            case _:
                pass
        self.bank.append(f"refunded {charge}")

    async def settled(self) -> int:
        """A claim that is settled after its scope has cut its repair."""
        root = self.trees.enqueue("claim")
        with trio.fail_after(60):
            # The deadline strikes when both stand.
            while self.trees.window.value(STANDING, root) < 2:
                await self.trees.burst()
            self.trees.time_passes(root)
            while self.trees.job(root)["finished_at"] is None:
                await self.trees.burst()
                self.trees.again()
        return root

    async def cut(self) -> tuple[int, int]:
        """Such a claim, and its repair, which owes the refund."""
        root = await self.settled()
        (member,) = self.trees.window.run("SELECT job_id FROM member WHERE root_id = %s", root)
        assert self.owes(member["job_id"])
        return root, member["job_id"]

    def owes(self, job_id: int) -> bool:
        return self.trees.window.do(family.unfinished_clean_ups([job_id])) == [job_id]

    def state(self, job_id: int) -> str:
        return str(self.trees.job(job_id)["state"])


@pytest.mark.parametrize("ends", ["completed", "dead"])
async def test_a_retry_of_a_cut_child_refunds_although_its_parent_is_settled(ends: str, trees: Trees) -> None:
    claims = Claims(trees, "fails", ends=ends)
    root, child = await claims.cut()
    before = trees.job(root)
    assert (before["state"], claims.state(child), claims.bank) == (ends, "cancelled", ["charged"])
    cut = trees.window.run("SELECT cut, failed FROM member")

    assert claims.client.retry(child) == "available"
    assert [row["requested_by"] for row in trees.window.run("SELECT * FROM cancellations WHERE ended_at IS NULL")] == [
        "retry"
    ]
    await trees.burst()
    assert (claims.state(child), claims.bank) == ("cancelled", ["charged", "refunded charge"])
    assert not claims.owes(child)
    # Its parent has nothing of it, and nothing is left.
    assert trees.job(root) == before
    assert trees.window.run("SELECT cut, failed FROM member") == cut
    assert trees.window.run("SELECT FROM cancellations WHERE ended_at IS NULL") == []
    assert trees.window.run("SELECT FROM job") == trees.window.run("SELECT FROM recheck") == []
    assert trees.window.run("SELECT job_ids FROM audit_entry WHERE act = 'retry'") == [{"job_ids": [child]}]
    with pytest.raises(InvalidTransition, match=rf"Job {child} belongs to the tree of job {root}, which is settled"):
        claims.client.retry(child)


async def test_a_refund_that_fails_again_is_tried_once_in_each_retry(trees: Trees) -> None:
    claims = Claims(trees, "fails", "fails", "fails")
    _, child = await claims.cut()
    cut = trees.window.run("SELECT cut, failed FROM member")
    for _ in range(2):
        claims.client.retry(child)
        await trees.burst()
        assert (claims.state(child), claims.owes(child), claims.bank) == ("cancelled", True, ["charged"])
        assert trees.window.run("SELECT cut, failed FROM member") == cut
    claims.client.retry(child)
    await trees.burst()
    assert (claims.owes(child), claims.bank) == (False, ["charged", "refunded charge"])


async def test_a_retry_by_filter_finds_it_and_no_other_of_a_settled_tree(trees: Trees) -> None:
    claims = Claims(trees, "fails", "", "fails")
    members = [(await claims.cut())[1]]
    other = await claims.settled()
    done = claims.client.retry_many(state="cancelled", kind="repair")
    assert done.retried == members
    (refused,) = done.refused.values()
    assert refused.endswith(f"belongs to the tree of job {other}, which is settled; retry job {other}.")


async def test_doctor_names_one_that_no_worker_serves(trees: Trees) -> None:
    claims = Claims(trees, "fails")
    root, child = await claims.cut()
    assert trees.window.do(family.stuck()).first == []
    claims.client.retry(child)
    trees.window.run("UPDATE job SET queue = 'nobody', run_at = now() - interval '2 min' WHERE id = %s", child)
    trees.window.run("SELECT recheck_jobs(), end_overdue(), look_slowly()")
    (stuck,) = trees.window.do(family.stuck()).first
    assert (stuck.root_id, stuck.settled) == (root, True)
    assert [(each.why, each.first) for each in stuck.waits] == [("unserved queue", child)]
    assert [(job.id, job.state) for job in claims.client.tree(root)] == [(root, "completed"), (child, "available")]
    assert claims.client.tree(root)[0].state is State.COMPLETED


async def test_afresh_forgets_nothing_of_a_member_whose_parent_is_settled(trees: Trees) -> None:
    claims = Claims(trees, "fails")
    _, child = await claims.cut()
    claims.client.retry(child, afresh=True)
    await trees.burst()
    assert (claims.state(child), claims.bank) == ("cancelled", ["charged", "refunded charge"])
    lines = trees.lines(child)
    with pytest.raises(InvalidTransition, match="is settled"):
        claims.client.retry(child, afresh=True)
    assert trees.lines(child) == lines


@pytest.mark.parametrize("how", ["a release by force", "a lost worker", "cancelled now"])
async def test_whatever_ends_its_attempt_its_parent_matters_not(how: str, trees: Trees) -> None:
    claims = Claims(trees, "fails", "waits", "")
    root, child = await claims.cut()
    claims.client.retry(child)
    if how == "cancelled now":
        assert claims.client.cancel(child, now=True).state == "cancelled"
        assert (claims.state(child), claims.owes(child)) == ("cancelled", True)
        assert trees.window.run("SELECT FROM cancellations WHERE ended_at IS NULL") == []
        claims.client.retry(child)
        claims.open.set()
    else:
        trees.window.run("UPDATE job SET max_attempts = attempt + 5 WHERE id = %s", child)
        worker = trees.worker(cleanup=1)
        async with trio.open_nursery() as running:
            running.start_soon(worker.run)
            await claims.refunding.wait()
            with pytest.raises(InvalidTransition, match=rf"Job {child} is running: a job can be retried when"):
                await trio.to_thread.run_sync(claims.client.retry, child)
            if how == "a lost worker":
                await trees.lose(child)
            else:
                trees.window.do(history.release(child, force=True))
            assert claims.state(child) != "cancelled"
            worker.stop_now()
        trees.again()
    with trio.fail_after(30):
        while trees.job(child)["finished_at"] is None:
            await trees.burst()
            trees.again()
    assert claims.state(child) == "cancelled"
    assert not claims.owes(child)
    assert claims.bank[-1] == "refunded charge"
    assert (claims.state(root), trees.window.run("SELECT FROM job")) == ("completed", [])


async def test_a_root_waits_for_it_and_is_not_deleted_nor_pruned_meanwhile(trees: Trees) -> None:
    claims = Claims(trees, "fails", "waits")
    root, child = await claims.cut()
    async with trio.open_nursery() as running:
        claims.client.retry(child)
        worker = trees.worker()
        running.start_soon(worker.run)
        await claims.refunding.wait()
        with pytest.raises(
            InvalidTransition, match=rf"1 job in the tree of job {root} still does the rest of a clean-up"
        ):
            await trio.to_thread.run_sync(claims.client.delete, root)
        with pytest.raises(InvalidTransition, match="may be retried"):
            await trio.to_thread.run_sync(claims.client.delete, child)
        # Retention has taken the root's row, and would take the tree.
        kept = trees.window.run("SELECT * FROM job_archive WHERE id = %s", root)
        lines = trees.lines(child)
        trees.window.run("DELETE FROM job_archive WHERE id = %s", root)
        trees.window.run("UPDATE durable_job SET root_ended_at = '2020-01-01Z' WHERE job_id = %s", root)
        trees.window.run("SELECT prune_trees('7 days')")
        assert trees.lines(child) == lines
        assert trees.window.run("SELECT job_id FROM member WHERE root_id = %s", root) == [{"job_id": child}]
        # A deadline of the watchdog's, looks at its parent and slow looks change nothing.
        for statement in ("SELECT end_overdue()", "SELECT recheck_jobs()", "SELECT look_slowly()"):
            trees.window.run(statement)
        assert claims.state(child) == "running"
        claims.open.set()
        with trio.fail_after(30):
            while claims.state(child) == "running":  # noqa: ASYNC110 -- the database alone says so
                await trio.sleep(0.02)
        worker.stop()
    assert (claims.state(child), claims.owes(child)) == ("cancelled", False)
    # What it ended with is kept for as long as if the root had ended now.
    trees.window.run("SELECT prune_trees('7 days')")
    assert trees.lines(child)
    assert kept


async def test_a_retry_that_is_not_committed_keeps_its_root_from_being_deleted(trees: Trees) -> None:
    claims = Claims(trees, "fails")
    root, child = await claims.cut()
    deleted: list[Any] = []

    def delete() -> None:
        with psycopg.connect(trees.dsn) as connection:
            deleted.extend(connection.execute("SELECT deleted FROM pulse.do_delete_jobs(ARRAY[%s]::bigint[])", [root]))

    place = "FROM job_archive d\n    WHERE d.id = ANY ($1)"
    first = "(SELECT {wait} OFFSET 0) w CROSS JOIN LATERAL (SELECT * FROM job_archive OFFSET 0) d"
    waiting = place.replace("job_archive d", first)
    with trio.fail_after(30), held_up(trees.dsn, "pulse.do_delete_jobs", place, with_wait=waiting) as holder:
        async with trio.open_nursery() as nursery:
            with psycopg.connect(trees.dsn) as connection:
                # It has the root's row first, and nobody sees yet that the child lives.
                SyncClient(connection).retry(child)
                nursery.start_soon(trio.to_thread.run_sync, delete)
                await until_it_waits(holder)
            let_go(holder)
    assert deleted == [(False,)]
    await trees.burst()
    assert (claims.state(root), claims.state(child), claims.owes(child)) == ("completed", "cancelled", False)


@pytest.mark.parametrize("row", ["there", "dropped with its day"])
async def test_all_of_its_tree_stays_while_it_waits_and_for_the_retention_after_its_end(row: str, trees: Trees) -> None:
    claims = Claims(trees, "fails", "fails")
    root, child = await claims.cut()
    _, other = await claims.cut()
    run = trees.window.run
    # One tree of two claims: what is left of the other's root is nothing.
    run("UPDATE member SET root_id = %s, parent_id = %s, child_key = 'other' WHERE job_id = %s", root, root, other)
    run("UPDATE durable_job SET root_id = %s WHERE job_id = %s", root, other)
    run("DELETE FROM job_archive WHERE kind = 'claim' AND id <> %s", root)
    run("DELETE FROM durable_job WHERE depth = 0 AND job_id <> %s", root)

    def time_passes() -> None:
        run("UPDATE durable_job SET root_ended_at = root_ended_at - interval '10 days'")

    def upkeep() -> tuple[list[Any], ...]:
        for _ in range(2):
            run("SELECT prune('7 days')")
            run("SELECT prune_trees('7 days')")
        archived = [one["id"] for one in run("SELECT id FROM job_archive ORDER BY id")]
        return archived, run("SELECT job_id FROM member ORDER BY 1"), trees.lines(child), trees.lines(other)

    # Another than the longest: rows go one by one. These are old enough.
    run("INSERT INTO queue (name, retention) VALUES ('default', '1 day')")
    run(
        "CREATE TABLE job_archive_20200101 PARTITION OF job_archive FOR VALUES FROM ('2020-01-01Z') TO ('2020-01-02Z');"
        "UPDATE job_archive SET finished_at = '2020-01-01 12:00Z'"
    )
    if row != "there":
        run("DELETE FROM job_archive WHERE id = %s", root)
    assert claims.client.run(rehearse_retry([child], None, [child])) == history.Retried([child])
    claims.client.retry(child)
    before = upkeep()
    time_passes()
    assert upkeep() == before
    await trees.burst()
    assert (claims.state(child), claims.owes(child), claims.bank[-1]) == ("cancelled", False, "refunded charge")
    ended = [root, child, other] if row == "there" else [child, other]
    assert upkeep()[:2] == (ended, [{"job_id": child}, {"job_id": other}])
    time_passes()
    run(
        "INSERT INTO queue (name, retention) VALUES ('another', '1 hour')"
    )  # days that are done with are looked at again
    assert upkeep()[:2] == ([], [])


async def test_a_member_of_a_deleted_tree_is_not_retried_for_its_clean_up(trees: Trees) -> None:
    claims = Claims(trees, "fails")
    root, child = await claims.cut()
    claims.client.delete(root)
    rehearsed = claims.client.run(rehearse_retry([child], None, [child]))
    assert rehearsed.retried == []
    assert "was deleted; it will be deleted too" in rehearsed.refused[child]
    with pytest.raises(InvalidTransition, match="was deleted; it will be deleted too"):
        claims.client.retry(child)


async def test_a_retry_of_the_root_meanwhile_waits_for_it(trees: Trees) -> None:
    claims = Claims(trees, "fails", "waits")
    root, child = await claims.cut()
    async with trio.open_nursery() as running:
        claims.client.retry(child)
        worker = trees.worker()
        running.start_soon(worker.run)
        await claims.refunding.wait()
        await trio.to_thread.run_sync(claims.client.retry, root)
        with trio.fail_after(30):
            while claims.state(root) in ("available", "completed"):  # noqa: ASYNC110 -- the same
                await trio.sleep(0.02)
        claims.open.set()
        with trio.fail_after(30):
            while trees.job(root)["finished_at"] is None:  # noqa: ASYNC110 -- the same
                await trio.sleep(0.02)
        worker.stop()
    assert (claims.state(root), claims.state(child), claims.owes(child)) == ("completed", "cancelled", False)
    assert trees.job(root)["finished_at"] >= trees.job(child)["finished_at"]
    assert claims.bank == ["charged", "refunded charge"]


@pytest.mark.parametrize("rest", ["is done", "fails again"])
async def test_the_retry_of_a_root_starts_a_child_again_that_was_retried_for_the_rest_of_its_clean_up(
    rest: str, trees: Trees
) -> None:
    """The root has failed of it already. Its retry failed of it once more, and started nothing."""
    refunds, bank = ["fails", *(["fails"] if rest == "fails again" else [])], list[str]()

    async def charge() -> None:
        bank.append("charged")

    async def refund() -> None:
        if refunds and refunds.pop():
            raise OSError("the bank is down")
        bank.append("refunded")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def repair(job: Job) -> str:
        await job.step(charge)
        try:
            return await job.wait_for_event("repaired", type=str)
        except BaseException:
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=1)
    async def claim(job: Job) -> str:
        async with job.durable_nursery() as nursery:
            repaired = nursery.start_soon(repair)
        return repaired.result

    client, root = SyncClient(trees.dsn), trees.enqueue("claim")
    await trees.burst()
    child = trees.window.value("SELECT job_id FROM member")
    client.cancel(child)
    assert (await trees.ended(root))["state"] == "dead"
    assert client.retry(child)
    assert (await trees.ended(child))["state"] == "cancelled"
    assert trees.window.do(family.unfinished_clean_ups([child])) == ([] if rest == "is done" else [child])
    attempts = trees.job(child)["attempt"]

    assert client.retry(root)
    with trio.fail_after(60):
        while trees.job(child)["attempt"] == attempts:
            await trees.burst(log=False)
        if rest == "fails again":
            # It does the rest first, and fails the block by that. The next retry begins it anew.
            assert (await trees.ended(root))["state"] == "dead"
            assert client.retry(root)
        while trees.job(child)["state"] != "suspended":
            await trees.burst(log=False)
    client.send_event(child, "repaired", "well")
    assert (await trees.ended(root))["result"] == "well"
    assert bank == ["charged", "refunded", "charged"]
