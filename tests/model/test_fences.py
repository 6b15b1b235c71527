"""Every predicate that keeps a held job from the wrong hands, taken away in turn: then something must go wrong.

Each scene plays one stale or foreign caller on a real PostgreSQL, and says whether harm was done: never with the whole
statement, always with the torn one. The fences of the reports and beats themselves (exchange, complete_unlocked, fail, beat,
and the lease in expired) are torn under the chaos run's checker, in tests/chaos/test_checker.py; `test_nothing_is_left_out`
looks at all the others, in sql/ and in the schema's functions.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pulse_trio.jobs import JobRequest, Progress
from pulse_trio.lines import Kind, Line, Lines
from pulse_trio.postgres import TrioConnection
from pulse_trio.sql import statement
from pulse_trio.store import ClaimCursor, cancelling, history, operations, rows
from pulse_trio.store.trees import Fence, NewChild
from support.stores import Window, claim_one, end, forged, open_kept_store, replace_statements

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

    from pulse_trio.jobs import Claim
    from pulse_trio.store import WorkerStore
    from support.connections import KeptLinks
    from support.databases import Databases


class Scene:
    """Two workers' stores on one database, and what a test does with jobs."""

    def __init__(self, window: Window, a: WorkerStore, b: WorkerStore, keepless: WorkerStore) -> None:
        self.w, self.a, self.b, self.keepless = window, a, b, keepless

    async def running(self, store: WorkerStore | None = None, **options: Any) -> Claim:
        """A new job, claimed."""
        self.w.enqueue(**options)
        return await claim_one(store or self.a)

    async def rescued(self, store: WorkerStore | None = None, **options: Any) -> Claim:
        """A new job that was claimed and whose lease ran out."""
        claim = await self.running(store, **options)
        await self.lose(claim)
        return claim

    async def lose(self, claim: Claim) -> None:
        self.w.expire(claim.id)
        await self.b.rescue()

    async def again(self, store: WorkerStore | None = None) -> Claim:
        """The one waiting job, claimed."""
        return await claim_one(store or self.a)

    async def completed(self, store: WorkerStore | None = None, **options: Any) -> Claim:
        claim = await self.running(store, **options)
        await (store or self.a).settle([end(claim)])
        return claim

    def crashes(self, claim: Claim) -> int:
        row = self.w.row(claim.id)
        assert row is not None
        return row["crashes"]

    def as_a(self, claim: Claim) -> Claim:
        """The claim, as A has it when a server that failed over gave the same attempt to B."""
        return forged(claim, session=self.a.session)

    async def accepts(self, claim: Claim, store: WorkerStore | None = None) -> bool:
        """Whether a report that is sent again counts as written."""
        return bool((await (store or self.a).settle([end(claim)], unsure=True)).accepted)

    def max_attempts(self, claim: Claim) -> int:
        return self.w.job(claim.id)["max_attempts"]

    def progress(self, claim: Claim) -> bool:
        return bool(self.w.run("SELECT FROM progress WHERE job_id = %s", claim.id))


# What a worker is told that it lived through


async def crash_of_a_later_attempt(s: Scene) -> bool:
    first = await s.rescued()
    await s.lose(await s.again())
    await s.a.beat([first])
    return s.crashes(first) != 1


async def crash_under_another_session(s: Scene) -> bool:
    claim = await s.rescued()
    await s.a.beat([forged(claim, session=s.b.session)])
    return s.crashes(claim) != 1


async def crash_of_another_job(s: Scene) -> bool:
    one = await s.rescued()
    s.w.run("UPDATE job SET run_at = now() + interval '1 hour'")
    other = await s.rescued()
    await s.a.beat([one])
    return (s.crashes(one), s.crashes(other)) != (0, 1)


async def crash_taken_back_twice(s: Scene) -> bool:
    first = await s.rescued()
    await s.lose(await s.again())
    await s.a.beat([first])
    await s.a.beat([first])
    return s.crashes(first) != 1


# A step back of the database


async def void(s: Scene, claim: Claim) -> None:
    async with s.a.links.claims.using() as connection:
        await s.a.lineage.make_void(connection, [claim])


def is_void(s: Scene, claim: Claim) -> bool:
    row = s.w.row(claim.id)
    return row is not None and row["locked_by"] < 0


async def step_back_under_a_later_attempt(s: Scene) -> bool:
    stale = await s.rescued()
    await s.again()
    await void(s, stale)
    return is_void(s, stale)


async def step_back_under_another_session(s: Scene) -> bool:
    claim = await s.running(s.b)
    await void(s, s.as_a(claim))
    return is_void(s, claim)


async def step_back_under_another_job(s: Scene) -> bool:
    gone = await s.completed()
    other = await s.running()
    await void(s, gone)
    return is_void(s, other)


# Progress


async def progress_of_an_earlier_attempt(s: Scene) -> bool:
    stale = await s.rescued()
    await s.again()
    await s.a.write_progress([Progress(stale, 0.5)])
    return s.progress(stale)


async def progress_of_another_session(s: Scene) -> bool:
    claim = await s.running(s.b)
    await s.a.write_progress([Progress(s.as_a(claim), 0.5)])
    return s.progress(claim)


async def progress_of_a_finished_job(s: Scene) -> bool:
    done = await s.completed()
    await s.running()
    await s.a.write_progress([Progress(done, 0.5)])
    return s.progress(done)


# Cancellation


def delivered(s: Scene, claim: Claim) -> bool:
    return bool(s.w.run("SELECT FROM cancellation WHERE job_id = %s AND delivered_at IS NOT NULL", claim.id))


async def cancellation_reached_an_earlier_attempt(s: Scene) -> bool:
    stale = await s.rescued()
    await s.again(s.b)
    s.w.do(cancelling.cancel(stale.id))
    await s.a.record_delivered([stale])
    return delivered(s, stale)


async def cancellation_reached_another_job(s: Scene) -> bool:
    one, other = await s.running(), await s.running()
    s.w.do(cancelling.cancel_many([one.id, other.id]))
    await s.a.record_delivered([one])
    return delivered(s, other)


async def open_cancellation_closed(s: Scene) -> bool:
    """The ledger row of a running job must stay open; that of a completion that crossed with its request must not."""
    held = await s.running()
    s.w.do(cancelling.cancel(held.id))
    await s.a.close_cancellations()
    return bool(s.w.run("SELECT FROM cancellation WHERE ended_at IS NOT NULL"))


async def crossed_cancellation_left_open(s: Scene) -> bool:
    crossed = await s.running()
    s.w.do(cancelling.cancel(crossed.id))
    await s.a.settle([end(crossed)])  # a completion that has not heard of the request
    s.w.do(operations.retry(crossed.id))
    await s.again()
    s.w.do(cancelling.cancel(crossed.id))  # a second request, about a second attempt
    await s.a.close_cancellations()
    return not s.w.run("SELECT FROM cancellation WHERE attempt = 1 AND ended_at IS NOT NULL")


async def request_that_was_overtaken_left_open(s: Scene) -> bool:
    crossed = await s.running()
    s.w.do(cancelling.cancel(crossed.id))
    await s.a.settle([end(crossed)])
    s.w.do(operations.retry(crossed.id))  # it waits, and its attempt is still the one of the request
    await s.a.close_cancellations()
    return not s.w.run("SELECT FROM cancellation WHERE ended_at IS NOT NULL")


async def cancellation_ended_while_it_runs(s: Scene) -> bool:
    claim = await s.running()
    asked = s.w.do(cancelling.cancel(claim.id))
    return bool(s.w.do(cancelling.ended([asked])))


async def end_of_an_overtaken_cancellation_unknown(s: Scene) -> bool:
    crossed = await s.running()
    asked = s.w.do(cancelling.cancel(crossed.id))
    await s.a.settle([end(crossed)])
    s.w.do(operations.retry(crossed.id))
    await s.again()
    s.w.do(cancelling.cancel(crossed.id))
    return not s.w.do(cancelling.ended([asked]))


async def end_of_a_crossed_cancellation_unknown(s: Scene) -> bool:
    crossed = await s.running()
    asked = s.w.do(cancelling.cancel(crossed.id))
    await s.a.settle([end(crossed)])
    s.w.do(operations.retry(crossed.id))
    return not s.w.do(cancelling.ended([asked]))


async def running_job_cancelled_behind_its_worker(s: Scene) -> bool:
    claim = await s.running()
    s.w.do(cancelling.cancel(claim.id))
    return s.w.state(claim.id) != "running"


async def running_job_deleted(s: Scene) -> bool:
    claim = await s.running()
    s.w.do(history.delete_batch([claim.id]))
    return s.w.row(claim.id) is None


async def running_job_replaced(s: Scene) -> bool:
    claim = await s.running(unique_key="k", args={"n": 1})
    s.w.enqueue(unique_key="k", args={"n": 2}, on_conflict="replace")
    return s.w.job(claim.id)["args"] != {"n": 1}


# Handing back, and the budget


async def jobs_of_the_living_handed_back(s: Scene) -> bool:
    await s.running(s.a)
    held = await s.running(s.b)
    await s.b.rescue_sessions([s.a.session])
    return s.w.state(held.id) != "running"


async def budget_of_a_job_that_goes_on(s: Scene) -> bool:
    lost, held = await s.running(), await s.running()
    s.w.expire(lost.id)
    await s.b.rescue()
    return s.max_attempts(held) != 20


async def budget_of_a_job_that_was_alone(s: Scene) -> bool:
    return s.max_attempts(await s.rescued()) != 20


async def budget_of_a_suspect(s: Scene) -> bool:
    suspect, _ = await s.running(), await s.running()
    s.w.run("UPDATE job SET suspect = true WHERE id = %s", suspect.id)
    await s.lose(suspect)
    return s.max_attempts(suspect) != 20


# A commit without an answer


async def committed(s: Scene, claim: Claim, store: WorkerStore | None = None) -> bool:
    store = store or s.a
    async with store.transactions.open():
        return await store.transactions.committed(claim)


async def commit_of_a_later_attempt(s: Scene) -> bool:
    stale = await s.rescued()
    await s.a.settle([end(await s.again())])
    return await committed(s, stale)


async def commit_of_another_session(s: Scene) -> bool:
    return await committed(s, s.as_a(await s.completed(s.b)))


async def commit_of_another_job(s: Scene) -> bool:
    await s.completed()
    return await committed(s, await s.running())


async def commit_of_a_dead_job(s: Scene) -> bool:
    claim = await s.running()
    await s.a.settle([end(claim, "discarded")])
    return await committed(s, claim)


async def noted_commit_of_a_later_attempt(s: Scene) -> bool:
    stale = await s.rescued()
    await s.a.settle([end(await s.again())])
    s.w.do(operations.retry(stale.id))
    return await committed(s, stale)


async def noted_commit_of_another_session(s: Scene) -> bool:
    claim = await s.completed(s.b)
    s.w.do(operations.retry(claim.id))
    return await committed(s, s.as_a(claim))


async def noted_commit_of_another_job(s: Scene) -> bool:
    done = await s.completed()
    s.w.do(operations.retry(done.id))
    await s.again()
    return await committed(s, await s.running())


async def noted_commit_of_a_failure(s: Scene) -> bool:
    claim = await s.running()
    await s.a.settle([end(claim, "failed")])
    return await committed(s, claim)


async def traceless_commit_of_a_running_job(s: Scene) -> bool:
    claim = await s.running(s.keepless)
    return await committed(s, claim, s.keepless)


async def traceless_commit_of_a_rescued_attempt(s: Scene) -> bool:
    stale = await s.rescued(s.keepless)
    await s.keepless.settle([end(await s.again(s.keepless))])
    return await committed(s, stale, s.keepless)


# A transaction's completion


async def completes(s: Scene, claim: Claim) -> bool:
    async with s.a.transactions.open(), s.a.transactions.begin() as begun:
        return bool(await begun.complete(end(claim)))


async def transaction_of_an_earlier_attempt(s: Scene) -> bool:
    stale = await s.rescued()
    await s.again()
    return await completes(s, stale)


async def transaction_of_another_session(s: Scene) -> bool:
    return await completes(s, s.as_a(await s.running(s.b)))


# A report that is sent again


async def report_of_a_later_attempt(s: Scene) -> bool:
    stale = await s.rescued()
    await s.a.settle([end(await s.again())])
    return await s.accepts(stale)


async def report_of_another_session(s: Scene) -> bool:
    return await s.accepts(s.as_a(await s.completed(s.b)))


async def report_of_another_job(s: Scene) -> bool:
    stale = await s.rescued()
    s.w.run("UPDATE job SET run_at = now() + interval '1 hour'")
    await s.completed()
    return await s.accepts(stale)


async def report_of_a_dead_job(s: Scene) -> bool:
    return await s.accepts(await s.rescued(max_attempts=1))


async def noted_report_of_a_later_attempt(s: Scene) -> bool:
    stale = await s.rescued()
    await s.a.settle([end(await s.again(), "failed", delay=60.0)])
    return await s.accepts(stale)


async def noted_report_of_another_session(s: Scene) -> bool:
    claim = await s.running(s.b)
    await s.b.settle([end(claim, "failed", delay=60.0)])
    return await s.accepts(s.as_a(claim))


async def noted_report_of_another_job(s: Scene) -> bool:
    stale = await s.rescued()
    s.w.run("UPDATE job SET run_at = now() + interval '1 hour'")
    await s.a.settle([end(await s.running(), "failed", delay=60.0)])
    return await s.accepts(stale)


async def noted_report_of_a_rescued_attempt(s: Scene) -> bool:
    return await s.accepts(await s.rescued())


async def traceless_report_of_a_held_job(s: Scene) -> bool:
    claim = await s.running(s.b)
    return await s.accepts(forged(claim, session=s.keepless.session), s.keepless)


async def traceless_report_of_a_rescued_attempt(s: Scene) -> bool:
    stale = await s.rescued(s.keepless)
    await s.keepless.settle([end(await s.again(s.keepless))])
    return await s.accepts(stale, s.keepless)


# Claims


async def claimed_twice(s: Scene) -> bool:
    held = await s.running()
    await s.b.complete_and_claim(1, [ClaimCursor("default", 0)])
    return s.w.job(held.id)["attempt"] != 1


async def suspect_in_company(s: Scene) -> bool:
    s.w.enqueue()
    s.w.run("UPDATE job SET suspect = true")
    return bool((await s.a.complete_and_claim(1, [ClaimCursor("default", 0)])).claims)


async def suspect_claimed_twice(s: Scene) -> bool:
    s.w.enqueue(priority=1)
    s.w.enqueue()
    s.w.run("UPDATE job SET suspect = true")
    (held,) = (await s.a.claim_suspect(None)).claims
    await s.b.claim_suspect(None)
    return s.w.job(held.id)["attempt"] != 1


async def limited_claimed_twice(s: Scene) -> bool:
    s.w.run("INSERT INTO queue (name, max_running) VALUES ('default', 5)")
    s.w.enqueue()
    (held,) = (await s.a.claim_limited("default", 1)).claims
    await s.b.claim_limited("default", 1)
    return s.w.job(held.id)["attempt"] != 1


async def cleanup(s: Scene) -> int:
    """A job that is cancelled, and waits to run once more."""
    job_id = s.w.enqueue()
    s.w.run("UPDATE job SET cancelling = true WHERE id = %s", job_id)
    s.w.run("INSERT INTO cancellation (job_id, cause, requested_by) VALUES (%s, 'parent', 'tree')", job_id)
    return job_id


async def cleanup_claimed_twice(s: Scene) -> bool:
    job_id = await cleanup(s)
    await s.a.claim_cleanups(None, 1)
    await s.b.claim_cleanups(None, 1)
    return s.w.job(job_id)["attempt"] != 1


async def no_cleanup_claimed_as_one(s: Scene) -> bool:
    """Its cancellation crossed with its end, and the ledger has not been closed yet."""
    job_id = await cleanup(s)
    s.w.run("UPDATE job SET cancelling = false WHERE id = %s", job_id)
    return bool((await s.a.claim_cleanups(None, 1)).claims)


async def more_than_the_limit(s: Scene) -> bool:
    s.w.run("INSERT INTO queue (name, max_running) VALUES ('default', 1)")
    s.w.enqueue_many(2)
    await s.a.claim_limited("default", 1)
    return bool((await s.b.claim_limited("default", 1)).claims)


async def more_than_the_limit_of_a_key(s: Scene) -> bool:
    s.w.run("INSERT INTO queue (name, key_max_running) VALUES ('default', 1)")
    s.w.enqueue_many(2, key="k")
    await s.a.claim_limited("default", 1)
    return bool((await s.b.claim_limited("default", 1)).claims)


async def place_taken_by_a_rescued_attempt(s: Scene) -> bool:
    s.w.run("INSERT INTO queue (name, max_running) VALUES ('default', 1)")
    s.w.enqueue()
    (claim,) = (await s.a.claim_limited("default", 1)).claims
    await s.lose(claim)
    return not (await s.a.claim_limited("default", 1)).claims


# What a person asks for


async def running_job_hurried(s: Scene) -> bool:
    """A running job's moment has come, unless the database's clock was set back since."""
    claim = await s.running()
    s.w.run("UPDATE job SET run_at = now() + interval '1 hour' WHERE id = %s", claim.id)
    s.w.run("SELECT retry_jobs(ARRAY[%s::bigint])", claim.id)
    return s.w.value("SELECT run_at <= now() FROM job WHERE id = %s", claim.id)


# The end of a job whose report the database refused


async def buries(s: Scene, claim: Claim) -> bool:
    async with await TrioConnection.connect(s.w.dsn, autocommit=True) as connection:
        fence = (claim.id, claim.attempt, claim.session)
        return await rows.bury(connection, "pulse", fence, "failed", "refused") is not None


async def later_attempt_buried(s: Scene) -> bool:
    stale = await s.rescued()
    await s.again()
    return await buries(s, stale)


async def attempt_of_another_session_buried(s: Scene) -> bool:
    return await buries(s, s.as_a(await s.running(s.b)))


async def another_job_buried(s: Scene) -> bool:
    one, other = await s.running(), await s.running()
    await s.a.settle([end(one)])
    await buries(s, one)
    return s.w.state(other.id) != "running"


# What an attempt remembers


async def writes(s: Scene, claim: Claim) -> bool:
    await s.a.histories.write_lines([Lines(claim, [Line(1, Kind.STEP, "1:step")], 1)])
    return bool(s.w.run("SELECT FROM history"))


async def line_of_an_earlier_attempt(s: Scene) -> bool:
    stale = await s.rescued()
    await s.again()
    return await writes(s, stale)


async def line_of_another_session(s: Scene) -> bool:
    return await writes(s, s.as_a(await s.running(s.b)))


async def reads_on(s: Scene, claim: Claim) -> bool:
    return await s.a.histories.resume(claim) is not None


async def resumed_by_an_earlier_attempt(s: Scene) -> bool:
    stale = await s.rescued()
    await s.again()
    return await reads_on(s, stale)


async def resumed_by_another_session(s: Scene) -> bool:
    return await reads_on(s, s.as_a(await s.running(s.b)))


async def comes_late(s: Scene, claim: Claim) -> bool:
    s.w.run("INSERT INTO history (job_id, line, kind, key, attempt) VALUES (%s, 1, 1, 'k', 1)", claim.id)
    s.w.run('UPDATE job SET options = \'{"tree": 1, "deadline": 1}\' WHERE id = %s', claim.id)
    return await s.a.histories.comes_after_deadline(claim)


async def cancelled_by_an_earlier_attempt(s: Scene) -> bool:
    stale = await s.rescued()
    await s.again()
    return await comes_late(s, stale)


async def cancelled_by_another_session(s: Scene) -> bool:
    return await comes_late(s, s.as_a(await s.running(s.b)))


async def forgets(s: Scene, claim: Claim) -> bool:
    s.w.run("INSERT INTO history (job_id, line, kind, key, attempt) VALUES (%s, 1, 10, '0:afresh', 9)", claim.id)
    return await s.a.histories.begin_afresh(claim)


async def forgotten_by_an_earlier_attempt(s: Scene) -> bool:
    stale = await s.rescued()
    await s.again()
    return await forgets(s, stale)


async def forgotten_by_another_session(s: Scene) -> bool:
    return await forgets(s, s.as_a(await s.running(s.b)))


# What an attempt does with its children


def fence(claim: Claim) -> Fence:
    return Fence(claim.id, claim.attempt, claim.session)


def child(key: str = "0") -> NewChild:
    return NewChild(JobRequest("child", "{}", "children"), key, b"digest")


async def starts(s: Scene, claim: Claim) -> bool:
    await s.a.trees.start_children(fence(claim), 0, [child()])
    return bool(s.w.run("SELECT FROM member"))


async def children_of_an_earlier_attempt(s: Scene) -> bool:
    stale = await s.rescued()
    await s.again()
    return await starts(s, stale)


async def children_of_another_session(s: Scene) -> bool:
    return await starts(s, s.as_a(await s.running(s.b)))


async def children_of_a_job_that_is_being_cancelled(s: Scene) -> bool:
    claim = await s.running()
    s.w.do(cancelling.cancel(claim.id))
    return await starts(s, claim)


async def parent_of_one(s: Scene, store: WorkerStore) -> Claim:
    claim = await s.running(store)
    await store.trees.start_children(fence(claim), 0, [child()])
    return claim


async def stale_parent(s: Scene) -> Claim:
    """A's attempt that was rescued; A has the next one, too."""
    stale = await parent_of_one(s, s.a)
    await s.lose(stale)
    await s.again()
    return stale


async def parent_of_bs(s: Scene) -> Claim:
    """As A would have it, if a failed-over server gave the same attempt to B."""
    return s.as_a(await parent_of_one(s, s.b))


async def cancels(s: Scene, claim: Claim) -> bool:
    await s.a.trees.cancel_block(fence(claim), 0, "sibling")
    return not s.w.run("SELECT FROM job WHERE kind = 'child'")


async def block_of_an_earlier_attempt_cancelled(s: Scene) -> bool:
    return await cancels(s, await stale_parent(s))


async def block_of_another_session_cancelled(s: Scene) -> bool:
    return await cancels(s, await parent_of_bs(s))


async def ends_block(s: Scene, claim: Claim) -> bool:
    return (await s.a.trees.end_block(fence(claim), 0)).refused != "lost"


async def block_ended_by_an_earlier_attempt(s: Scene) -> bool:
    return await ends_block(s, await stale_parent(s))


async def block_ended_by_another_session(s: Scene) -> bool:
    return await ends_block(s, await parent_of_bs(s))


async def fails_block(s: Scene, claim: Claim) -> bool:
    return (await s.a.trees.fail_block(fence(claim), 0, [])).refused != "lost"


async def block_failed_in_an_earlier_attempt(s: Scene) -> bool:
    return await fails_block(s, await stale_parent(s))


async def block_failed_in_another_session(s: Scene) -> bool:
    return await fails_block(s, await parent_of_bs(s))


async def restarts(s: Scene, claim: Claim) -> bool:
    ids = [row["id"] for row in s.w.run("SELECT id FROM job WHERE kind = 'child'")]
    s.w.do(cancelling.cancel_many(ids))
    await s.a.trees.restart_children(fence(claim), ids)
    return bool(s.w.run("SELECT FROM job WHERE kind = 'child'"))


async def child_restarted_by_an_earlier_attempt(s: Scene) -> bool:
    return await restarts(s, await stale_parent(s))


async def child_restarted_by_another_session(s: Scene) -> bool:
    return await restarts(s, await parent_of_bs(s))


async def child_restarted_by_a_job_that_is_being_cancelled(s: Scene) -> bool:
    claim = await parent_of_one(s, s.a)
    s.w.run("UPDATE job SET cancelling = true WHERE id = %s", claim.id)
    return await restarts(s, claim)


async def children_told_to_an_earlier_attempt(s: Scene) -> bool:
    return bool(await s.a.trees.members(fence(await stale_parent(s))))


async def children_told_to_another_session(s: Scene) -> bool:
    return bool(await s.a.trees.members(fence(await parent_of_bs(s))))


async def told_of_like_ones(s: Scene, claim: Claim) -> bool:
    return bool(await s.a.trees.children_like(fence(claim), 0, [child().digest]))


async def children_with_digests_told_to_an_earlier_attempt(s: Scene) -> bool:
    return await told_of_like_ones(s, await stale_parent(s))


async def children_with_digests_told_to_another_session(s: Scene) -> bool:
    return await told_of_like_ones(s, await parent_of_bs(s))


async def block_looked_at_by_an_earlier_attempt(s: Scene) -> bool:
    return (await s.a.trees.look(fence(await stale_parent(s)), 0)).refused != "lost"


async def block_looked_at_by_another_session(s: Scene) -> bool:
    return (await s.a.trees.look(fence(await parent_of_bs(s)), 0)).refused != "lost"


# Events and suspensions


def receives(s: Scene, claim: Claim) -> bool:
    fence = {"ids": [claim.id], "attempts": [claim.attempt], "sessions": [claim.session]}
    waits = {"lines": [1], "keys": ["1:event"], "names": ["e"]}
    rows = s.w.connection.execute(statement("receive_events", "pulse"), fence | waits).fetchall()
    return bool(rows and rows[0]["held"])


async def event_received_by_an_earlier_attempt(s: Scene) -> bool:
    stale = await s.rescued()
    await s.again()
    s.w.run("SELECT send_event(%s, 'e')", stale.id)
    return receives(s, stale)


async def event_received_by_another_session(s: Scene) -> bool:
    claim = await s.running(s.b)
    s.w.run("SELECT send_event(%s, 'e')", claim.id)
    return receives(s, s.as_a(claim))


def suspends(s: Scene, claim: Claim) -> bool:
    fence = {"ids": [claim.id], "attempts": [claim.attempt], "sessions": [claim.session]}
    waits = {"blocks": ["{}"], "fail_blocks": ["{}"], "events": ["{e}"], "moments": [None], "said": [None]}
    rows = s.w.connection.execute(statement("suspend_jobs", "pulse"), fence | waits).fetchall()
    return bool(rows and rows[0]["written"])


async def later_attempt_suspended(s: Scene) -> bool:
    stale = await s.rescued()
    await s.again()
    return suspends(s, stale)


async def attempt_of_another_session_suspended(s: Scene) -> bool:
    return suspends(s, s.as_a(await s.running(s.b)))


def leaves_span(s: Scene, claim: Claim) -> bool:
    """Whether the span of an attempt that is over reaches its job."""
    fence = {"ids": [claim.id], "attempts": [claim.attempt], "sessions": [claim.session]}
    s.w.connection.execute(statement("note_spans", "pulse"), fence | {"spans": [f"00-{1:032x}-{1:016x}-01"]})
    return bool(s.w.run("SELECT options FROM job WHERE id = %s AND options IS NOT NULL", claim.id))


async def span_of_an_earlier_attempt(s: Scene) -> bool:
    stale = await s.rescued()
    await s.again()
    return leaves_span(s, stale)


async def span_under_another_session(s: Scene) -> bool:
    return leaves_span(s, s.as_a(await s.running(s.b)))


class Torn(NamedTuple):
    """One predicate: what it stands in, what it looks like, what stands there instead."""

    where: str
    predicate: str
    scene: Callable[[Scene], Awaitable[bool]]
    instead: str = "true"


TORN = [
    Torn("forgive_crash", r"a\.attempt = r\.attempt", crash_of_a_later_attempt),
    Torn("forgive_crash", r"a\.session = r\.session", crash_under_another_session),
    Torn("forgive_crash", r"a\.job_id = ANY \(ARRAY\[r\.id\]\)", crash_of_another_job),
    Torn("forgive_crash", r"j\.id = ANY \(ARRAY\[held\.id\]\)", crash_of_another_job),
    Torn("forgive_crash", r"a\.error = %\(expired\)s::text", crash_taken_back_twice),
    Torn("void_claims", r"j\.attempt = [rh]\.attempt", step_back_under_a_later_attempt),
    Torn("void_claims", r"j\.locked_by = [rh]\.session", step_back_under_another_session),
    Torn("void_claims", r"j\.id = ANY \(ARRAY\[[rh]\.id\]\)", step_back_under_another_job),
    Torn("progress", r"j\.attempt = s\.attempt", progress_of_an_earlier_attempt),
    Torn("progress", r"j\.locked_by = s\.session", progress_of_another_session),
    Torn("progress", r"j\.id = ANY \(ARRAY\[s\.id\]\)", progress_of_a_finished_job),
    Torn("cancel_delivered", r"c\.attempt = r\.attempt", cancellation_reached_an_earlier_attempt),
    Torn("cancel_delivered", r"c\.job_id = r\.id", cancellation_reached_another_job),
    Torn("cancel_close", r"j\.id = ANY \(ARRAY\[c\.job_id\]\) AND j\.cancelling", open_cancellation_closed, "false"),
    Torn("cancel_close", r"j\.attempt = c\.attempt", crossed_cancellation_left_open),
    Torn("cancel_close", r"j\.cancelling", request_that_was_overtaken_left_open),
    Torn("cancel_ended", r"SELECT j\.cancelling", cancellation_ended_while_it_runs, "SELECT false"),
    Torn("cancel_ended", r"j\.attempt = c\.attempt", end_of_an_overtaken_cancellation_unknown),
    Torn("cancel_ended", r"j\.cancelling", end_of_a_crossed_cancellation_unknown),
    Torn("held_by", r"locked_by = ANY \(%\(sessions\)s::bigint\[\]\)", jobs_of_the_living_handed_back),
    Torn("refund", r"j\.id = ANY \(%\(ids\)s::bigint\[\]\)", budget_of_a_job_that_goes_on),
    Torn("refund", r"\(j\.locked_by IN (?s:.*)s\.crowded\)\)", budget_of_a_job_that_was_alone),
    Torn("refund", r"NOT j\.suspect", budget_of_a_suspect),
    Torn("transaction_done", r"d\.attempt = %\(attempt\)s::int", commit_of_a_later_attempt),
    Torn("transaction_done", r"d\.locked_by = %\(session\)s::bigint", commit_of_another_session),
    Torn("transaction_done", r"d\.id = %\(id\)s::bigint", commit_of_another_job),
    Torn("transaction_done", r"d\.state = 4", commit_of_a_dead_job),
    Torn("transaction_done", r"a\.attempt = %\(attempt\)s::int", noted_commit_of_a_later_attempt),
    Torn("transaction_done", r"a\.session = %\(session\)s::bigint", noted_commit_of_another_session),
    Torn("transaction_done", r"a\.job_id = %\(id\)s::bigint", noted_commit_of_another_job),
    Torn("transaction_done", r"a\.outcome = 'completed'", noted_commit_of_a_failure),
    Torn("transaction_done", r"NOT EXISTS \(SELECT FROM \S+job j WHERE .*::int\)", traceless_commit_of_a_running_job),
    Torn("transaction_done", r"NOT EXISTS \(SELECT FROM \S+attempt a(?s:.*?)::bigint\)", traceless_commit_of_a_rescued_attempt),
    Torn("complete_in_transaction()", r"j\.attempt = \$2", transaction_of_an_earlier_attempt),
    Torn("complete_in_transaction()", r"j\.locked_by = \$3", transaction_of_another_session),
    Torn("settled", r"d\.attempt = r\.attempt", report_of_a_later_attempt),
    Torn("settled", r"d\.locked_by = r\.session", report_of_another_session),
    Torn("settled", r"d\.id = ANY \(ARRAY\[r\.id\]\)", report_of_another_job),
    Torn("settled", r"d\.state = 4", report_of_a_dead_job),
    Torn("settled", r"a\.attempt = r\.attempt", noted_report_of_a_later_attempt),
    Torn("settled", r"a\.session = r\.session", noted_report_of_another_session),
    Torn("settled", r"a\.job_id = ANY \(ARRAY\[r\.id\]\)", noted_report_of_another_job),
    Torn("settled", r"a\.outcome <> 'rescued'", noted_report_of_a_rescued_attempt),
    Torn("settled", r"NOT EXISTS \(SELECT FROM \S+job j WHERE .*?\]\)\)", traceless_report_of_a_held_job),
    Torn("settled", r"NOT EXISTS \(SELECT FROM \S+attempt a .*?r\.attempt\)", traceless_report_of_a_rescued_attempt),
    Torn("complete_and_claim", r"state <> 2", claimed_twice),
    Torn("complete_and_claim", r"NOT suspect", suspect_in_company),
    Torn("claim_suspect", r"state <> 2", suspect_claimed_twice),
    Torn("claim_limited()", r"j\.state <> 2", limited_claimed_twice),
    Torn("claim_limited()", r"SELECT limits\.max_running - count\(\*\)", more_than_the_limit,
         "SELECT limits.max_running - 0 * count(*)"),
    Torn("claim_limited()", r"m\.most_running - m\.running", more_than_the_limit_of_a_key, "m.most_running"),
    Torn("claim_limited()", r"j\.state = 2", place_taken_by_a_rescued_attempt),
    Torn("claim_cleanups()", r"j\.state <> 2", cleanup_claimed_twice),
    Torn("claim_cleanups()", r"j\.cancelling", no_cleanup_claimed_as_one),
    Torn("cancel_row()", r"live\.state = 2", running_job_cancelled_behind_its_worker, "false"),
    Torn("cancel_rows()", r"j\.state <> 2", running_job_cancelled_behind_its_worker),
    Torn("do_delete_jobs()", r"j\.state <> 2", running_job_deleted),
    Torn("do_retry_jobs()", r"j\.state <> 2", running_job_hurried),
    Torn("enqueue_unique()", r"j\.state <> 2", running_job_replaced),
    Torn("receive_events()", r"j\.attempt = r\.attempt", event_received_by_an_earlier_attempt),
    Torn("receive_events()", r"j\.locked_by = r\.session", event_received_by_another_session),
    Torn("note_spans()", r"j\.attempt = r\.attempt", span_of_an_earlier_attempt),
    Torn("note_spans()", r"j\.locked_by = r\.session", span_under_another_session),
    Torn("suspend()", r"j\.attempt = of_attempt", later_attempt_suspended),
    Torn("suspend()", r"j\.locked_by = of_session", attempt_of_another_session_suspended),
    Torn("bury", r"j\.attempt = %\(attempt\)s::int", later_attempt_buried),
    Torn("bury", r"j\.locked_by = %\(session\)s::bigint", attempt_of_another_session_buried),
    Torn("bury", r"j\.id = %\(id\)s::bigint", another_job_buried),
    Torn("write_lines()", r"j\.attempt = r\.attempt", line_of_an_earlier_attempt),
    Torn("write_lines()", r"j\.locked_by = r\.session", line_of_another_session),
    Torn("resume()", r"j\.attempt = of_attempt", resumed_by_an_earlier_attempt),
    Torn("resume()", r"j\.locked_by = of_session", resumed_by_another_session),
    Torn("begin_afresh()", r"j\.attempt = of_attempt", forgotten_by_an_earlier_attempt),
    Torn("begin_afresh()", r"j\.locked_by = of_session", forgotten_by_another_session),
    Torn("comes_after_deadline()", r"j\.attempt = of_attempt", cancelled_by_an_earlier_attempt),
    Torn("comes_after_deadline()", r"j\.locked_by = of_session", cancelled_by_another_session),
    Torn("start_children()", r"j\.attempt = \$2", children_of_an_earlier_attempt),
    Torn("start_children()", r"j\.locked_by = \$3", children_of_another_session),
    Torn("start_children()", r"NOT j\.cancelling", children_of_a_job_that_is_being_cancelled),
    Torn("cancel_block()", r"j\.attempt = \$2", block_of_an_earlier_attempt_cancelled),
    Torn("cancel_block()", r"j\.locked_by = \$3", block_of_another_session_cancelled),
    Torn("end_block()", r"j\.attempt = \$2", block_ended_by_an_earlier_attempt),
    Torn("end_block()", r"j\.locked_by = \$3", block_ended_by_another_session),
    Torn("fail_block()", r"j\.attempt = \$2", block_failed_in_an_earlier_attempt),
    Torn("fail_block()", r"j\.locked_by = \$3", block_failed_in_another_session),
    Torn("restart_children()", r"j\.attempt = \$2", child_restarted_by_an_earlier_attempt),
    Torn("restart_children()", r"j\.locked_by = \$3", child_restarted_by_another_session),
    Torn("restart_children()", r"NOT j\.cancelling", child_restarted_by_a_job_that_is_being_cancelled),
    Torn("members_of()", r"p\.attempt = \$2", children_told_to_an_earlier_attempt),
    Torn("members_of()", r"p\.locked_by = \$3", children_told_to_another_session),
    Torn("children_like()", r"p\.attempt = \$2", children_with_digests_told_to_an_earlier_attempt),
    Torn("children_like()", r"p\.locked_by = \$3", children_with_digests_told_to_another_session),
    Torn("look_among()", r"j\.attempt = \$2", block_looked_at_by_an_earlier_attempt),
    Torn("look_among()", r"j\.locked_by = \$3", block_looked_at_by_another_session),
]  # fmt: skip
"""A name with () is a function of the schema. Every place in which the predicate stands is torn at once: most stand twice,
for what was read before a row was locked."""


def tear(where: str, predicate: str, instead: str) -> Callable[[str, str], bytes]:
    """The statements, one of them torn."""

    def torn(name: str, schema: str) -> bytes:
        text = statement(name, schema)
        if name != where:
            return text
        text, count = re.subn(predicate.encode(), instead.encode(), text)
        assert count, f"{where} has no {predicate}"
        return text

    return torn


@pytest.fixture(scope="module")
def room(databases: Databases) -> Generator[Window]:
    with databases.migrated() as dsn, Window(dsn) as window:
        yield window


# One by one, which is a tenth of what TRUNCATE costs: that makes each of their files, and those of their indexes, anew.
EMPTIED = (
    "job", "job_archive", "attempt", "cancellation", "unique_hold", "queue", "permit", "bucket", "progress", "member",
    "durable_job", "history", "recheck", "member_deadline",
)  # fmt: skip


@pytest.fixture(scope="module")
def links(room: Window) -> Generator[tuple[list[KeptLinks], list[KeptLinks]]]:
    """What the stores of one scene leave to the next: those that keep finished jobs, and those that do not."""
    kept: tuple[list[KeptLinks], list[KeptLinks]] = [], []
    yield kept
    for one in (*kept[0], *kept[1]):
        one.close()


@pytest.fixture
async def scene(room: Window, links: tuple[list[KeptLinks], list[KeptLinks]]) -> AsyncGenerator[Scene]:
    for table in EMPTIED:
        room.run(f"DELETE FROM {table}")
    keeps, keeps_not = links
    async with (
        open_kept_store(room.dsn, keeps) as a,
        open_kept_store(room.dsn, keeps) as b,
        open_kept_store(room.dsn, keeps_not, keep=False) as keepless,
    ):
        yield Scene(room, a, b, keepless)


@pytest.mark.parametrize("play", dict.fromkeys(torn.scene for torn in TORN), ids=lambda scene: scene.__name__)
async def test_with_the_whole_statement_no_harm_is_done(play: Any, scene: Scene) -> None:
    assert not await play(scene)


@pytest.mark.parametrize("torn", TORN, ids=lambda torn: f"{torn.where} {torn.predicate}".replace("\\", ""))
async def test_without_the_predicate_harm_is_done(torn: Torn, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torn.where.endswith("()"):
        replace_statements(monkeypatch, tear(torn.where, torn.predicate, torn.instead))
        assert await torn.scene(scene)
        return
    whole = definition(scene.w, torn.where)
    text, count = re.subn(torn.predicate, torn.instead, whole)
    assert count, f"{torn.where} has no {torn.predicate}"
    scene.w.run(text)
    try:
        assert await torn.scene(scene)
    finally:
        scene.w.run(whole)


def definition(window: Window, function: str) -> str:
    return window.value(
        "SELECT pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.proname = %s AND p.pronamespace = 'pulse'::regnamespace",
        function.removesuffix("()"),
    )


# Where a fence may be, and why it needs no scene of its own here

FENCE = re.compile(r"locked_by (?:=|IN)|\battempt = |state (?:=|<>) 2|lease_until <|session = |cancelling\b")
ELSEWHERE = {"complete_and_claim", "complete_unlocked", "fail", "beat", "expired"}
"""Torn in tests/chaos/test_checker.py."""
HARMLESS = {
    "still_in()": "it locks rows and writes none",
    "retry_jobs_afresh()": "the rows that it writes are of this transaction: no other sees them",
    "matching_jobs": "a person's list of jobs",
    "look_through_jobs": "a person's list of jobs",
    "live_ids": "a person's list of jobs",
    "running_of": "a count",
    "doctor_left": "a count",
    "queue_keys": "a count",
    "slots": "says where to look; the claim decides",
    "suspects_due": "says where to look; the claim decides",
    "quarantined": "a person's list",
    "why_waits": "why one job waits, for a person",
    "metrics_queues": "a count",
    "prune_permits": "removes what claim_limited does not count",
    "ask_stack()": "a question",
    "stack_questions()": "the open questions to a worker; its answer is fenced",
    "cancel_requested": "a look at the row; the worker compares the fence",
    "running_fences": "a look at the row; the beat decides",
    "doctor_ahead": "a person's list",
    "missing_lines()": "a look; what it finds makes the attempts void, which is fenced",
    "release_jobs()": "an operator breaks the fence; the row is locked, and must be running (tests/store/test_force.py)",
    "complete_jobs()": "an operator breaks the fence; the row is locked, and must be running (tests/store/test_force.py)",
    "answer_stack()": "an answer to a person's question, by request and session",
    "batch_counts()": "a count",
    "block_is_over()": "a question about a history; its caller has locked the parent (tests/store/test_trees_kept.py)",
    "block_ends()": "a question; its caller has locked the parent (tests/store/test_tree_operations.py)",
    "lives_on()": "a part of member_ended: the end of an attempt, which the statement that writes the archive has fenced",
    "sweep_children()": "a request, as cancel_jobs; its caller has locked the parent (tests/store/test_trees.py)",
    "make_due()": "what was told is locked; what waits becomes due (tests/store/test_tree_operations.py)",
    "end_overdue()": "what runs is left to its worker, by a locked row (tests/store/test_tree_operations.py)",
    "look_slowly()": "says where to look; the look decides",
    "begin_anew()": "a part of a retry, which has put the row back before (tests/durable/test_unfinished_clean_ups.py)",
    "tree_places()": "why something was refused",
    "stuck_trees()": "a person's list",
    "trees_that_wait()": "a person's list",
    "look_at()": "its caller has locked the job; what runs is left alone (tests/store/test_trees.py)",
}


def test_nothing_is_left_out(room: Window) -> None:
    texts = {name: statement(name, "pulse").decode() for name in statements()}
    for row in room.run("SELECT proname FROM pg_proc WHERE pronamespace = 'pulse'::regnamespace AND prokind = 'f'"
                        " GROUP BY proname HAVING count(*) = 1"):  # fmt: skip
        texts[f"{row['proname']}()"] = definition(room, f"{row['proname']}()")
    fenced = {name for name, text in texts.items() if FENCE.search(re.sub(r"--.*", "", text))}
    known = {torn.where for torn in TORN} | ELSEWHERE | HARMLESS.keys()
    assert fenced - known == set()
    assert HARMLESS.keys() - fenced == set()


def statements() -> list[str]:
    return [f.name.removesuffix(".sql") for f in files("pulse_trio.sql").iterdir() if f.name.endswith(".sql")]
