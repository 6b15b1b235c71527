"""A retry of many jobs that finds dead roots and their dead children: the roots start those again themselves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pulse_trio import Job, SyncClient
from pulse_trio.store import history

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes
    from support.trees import Trees

LEFT = "are left to the retried jobs above them in the same trees, which"
GO_ON = f"{LEFT} start failed children again themselves, unless they have gone on after them"


class Dead:
    """A dead root, whose dead child has a dead child of its own; the shop is `down`."""

    def __init__(self, trees: Trees) -> None:
        self.trees = trees
        self.client = SyncClient(trees.dsn)
        self.book: list[str] = []
        self.down = True

        async def buy() -> None:
            if self.down:
                raise OSError("the shop is down")
            self.book.append("ink")

        @trees.handlers.job(durable=True, max_attempts=1, suspend_after=0)
        async def leaf(job: Job) -> None:
            await job.step(buy)

        @trees.handlers.job(durable=True, max_attempts=1, suspend_after=0)
        async def parcel(job: Job) -> None:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(leaf)

        @trees.handlers.job(durable=True, max_attempts=1, suspend_after=0)
        async def order(job: Job) -> None:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(parcel)

        self.parcel = parcel

    async def died(self) -> tuple[int, list[int]]:
        """The ids of the root and its members, when all are dead."""
        root = self.trees.enqueue("order")
        await self.trees.burst(log=False)
        assert self.trees.job(root)["state"] == "dead"
        rows = self.trees.window.run("SELECT job_id FROM member WHERE root_id = %s ORDER BY job_id", root)
        members = [row["job_id"] for row in rows]
        assert {self.trees.job(each)["state"] for each in members} == {"dead"}
        self.down = False
        return root, members


async def test_members_of_retried_roots_are_not_refused(trees: Trees) -> None:
    """They were, with "enqueue it anew": whoever did had the work done twice."""
    dead = Dead(trees)
    root, members = await dead.died()
    done = dead.client.retry_many(state="dead")
    assert (done.retried, done.refused, sorted(done.left_to_parents)) == ([root], {}, members)
    await trees.burst()
    assert (trees.job(root)["state"], dead.book) == ("completed", ["ink"])


async def test_members_of_roots_that_begin_afresh_are_not_refused(trees: Trees) -> None:
    dead = Dead(trees)
    root, members = await dead.died()
    done = trees.window.do(history.retry_batch([root, *members], chosen={"state": "dead"}, afresh=True))
    assert (done.retried, done.refused, sorted(done.left_to_parents)) == ([root], {}, members)
    await trees.burst()
    assert (trees.job(root)["state"], dead.book) == ("completed", ["ink"])
    # All of it has completed now, and begins once more.
    again = [root, *members]
    done = trees.window.do(history.retry_batch(again, chosen=None, afresh=True))
    assert (done.retried, done.refused, sorted(done.left_to_parents)) == ([root], {}, members)


async def test_members_in_a_later_batch_of_the_same_retry_are_not_refused(trees: Trees) -> None:
    dead = Dead(trees)
    root, members = await dead.died()
    first = trees.window.do(history.retry_batch([root], afresh=True))
    rest = trees.window.do(history.retry_batch(members, afresh=True, before=first.retried))
    assert (rest.retried, rest.refused, sorted(rest.left_to_parents)) == ([], {}, members)


async def test_members_keep_the_true_reason_where_their_root_is_not_retried(trees: Trees) -> None:
    dead = Dead(trees)
    root, members = await dead.died()
    reason = f"belongs to the tree of job {root}, which is settled; retry job {root}."
    trees.window.run("UPDATE job_archive SET kind = 'other' WHERE id = %s", root)
    trees.window.run("UPDATE job_archive SET kind = 'member' WHERE id = ANY (%s)", members)
    done = dead.client.retry_many(state="dead", kind="member")
    assert done.refused == {member: f"Job {member} {reason}" for member in members}
    assert (done.retried, done.left_to_parents) == ([], [])


async def test_a_completed_member_keeps_its_reason_beside_its_retried_root(trees: Trees) -> None:
    """Its root does not start it again, and so it is not left to it."""
    dead = Dead(trees)
    root, (first, second) = await dead.died()
    trees.window.run("UPDATE job_archive SET state = 4 WHERE id = %s", first)
    done = trees.window.do(history.retry_batch([root, first, second]))
    assert (done.retried, done.left_to_parents) == ([root], [second])
    assert list(done.refused) == [first]
    assert f"Job {first} is completed, and its result belongs to its parent, job {root}" in done.refused[first]


async def test_the_command_says_in_a_line_what_it_leaves_to_roots(trees: Trees, processes: Processes) -> None:
    """It said that they were refused, and ended with 2; its rehearsal sent to a root that it would retry itself."""

    async def command(*arguments: str) -> tuple[str, str]:
        running = await processes.command("jobs", "retry", *arguments, env={"PULSE_TRIO_DSN": trees.dsn})
        assert await running.ended() == 0, running.report()
        return running.stdout, running.stderr

    dead = Dead(trees)
    root, members = await dead.died()
    by_filter = "--state", "dead", "--rate", "100/s"
    for arguments, what in ((by_filter, f"2 jobs {GO_ON}"), ((*by_filter, "--afresh"), f"2 jobs {LEFT} begin anew")):
        stdout, stderr = await command(*arguments, "--dry-run")
        assert (stdout, stderr.count(what)) == ("1 job would be retried\n", 1)
        assert f"job {members[0]}" not in stderr.lower()
    said = json.loads((await command(*by_filter, "--dry-run", "--json"))[0])
    assert said == {"would_be_retried": [root], "left_to_parents": members}
    # In whichever order they are named.
    stdout, stderr = await command(*map(str, reversed([root, *members])), "--yes", "--json")
    assert json.loads(stdout) == {"retried": [root], "refused": {}, "left_to_parents": members[::-1]}
    assert stderr.count(f"2 jobs {GO_ON}") == 1
    await trees.burst()
    assert (trees.job(root)["state"], dead.book) == ("completed", ["ink"])


async def test_a_member_below_a_retried_one_of_a_live_tree_is_not_refused(trees: Trees) -> None:
    dead = Dead(trees)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def slow(job: Job) -> None:
        await job.wait_for_event("go on")

    @trees.handlers.job(durable=True, max_attempts=1, suspend_after=0)
    async def both(job: Job) -> None:
        async with job.durable_nursery(collect=True) as nursery:
            nursery.start_soon(dead.parcel)
            nursery.start_soon(slow)

    root = trees.enqueue("both")
    await trees.burst(log=False)
    members = trees.window.run("SELECT job_id, parent_id FROM member WHERE root_id = %s ORDER BY job_id", root)
    (leaf,) = (row["job_id"] for row in members if row["parent_id"] != root)
    (parcel,) = (row["parent_id"] for row in members if row["job_id"] == leaf)
    assert [trees.job(each)["state"] for each in (root, parcel, leaf)] == ["suspended", "dead", "dead"]
    dead.down = False
    done = dead.client.retry_many(state="dead")
    assert (done.retried, done.refused, done.left_to_parents) == ([parcel], {}, [leaf])
    await trees.burst()
    assert (trees.job(parcel)["state"], dead.book) == ("completed", ["ink"])
