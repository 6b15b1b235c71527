"""`job.durable_nursery`: children that are jobs, with the rules of a Trio nursery. Workers in the test's own Trio run."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Child, ChildFailed, Discard, Fixed, Job, Snooze, State, SyncClient, UsageError
from pulse_trio.store import trees as store_trees
from pulse_trio.worker.durable import looks
from pulse_trio.worker.durable.keys import KEYED
from pulse_trio.worker.durable.looks import Looks
from support.trees import Trees  # noqa: TC001 -- the annotations of handlers are read in this module

if TYPE_CHECKING:
    from collections.abc import Callable


async def test_a_block_ends_when_its_children_have_and_they_have_their_results(trees: Trees) -> None:
    @trees.handlers.job
    async def double(n: int) -> int:
        return 2 * n

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> list[int | str]:
        async with job.durable_nursery() as nursery:
            children = [nursery.start_soon(double, n) for n in range(3)]
            named = nursery.start_soon(double.options(child_key="named"), n=21)
            with pytest.raises(UsageError, match="no id"):
                _ = named.id
            await nursery.flush()
            assert named.id > job.id
        assert {child.state for child in children} == {State.COMPLETED}
        return [*(child.result for child in children), named.result, named.key, children[2].key]

    job_id = trees.enqueue("parent")
    await trees.burst()
    assert trees.job(job_id)["result"] == [0, 2, 4, 42, "named", "#3"]
    assert trees.lines(job_id) == [(6, "1:block", "")]


async def test_children_that_this_worker_completes_are_not_asked_for(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = trio.Event()
    asked: list[str] = []

    @trees.handlers.job
    async def double(n: int) -> dict[str, int]:
        await looked.wait()
        return {"twice": 2 * n}

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> list[Any]:
        async with job.durable_nursery() as nursery:
            children = [nursery.start_soon(double, n) for n in range(3)]
        return [*(child.result["twice"] for child in children), *(child.state for child in children)]

    look = store_trees.Trees.look

    async def look_and_go_on(self: store_trees.Trees, *given: Any) -> Any:
        found = await look(self, *given)
        asked.append("look")
        looked.set()
        return found

    monkeypatch.setattr(store_trees.Trees, "look", look_and_go_on)
    monkeypatch.setattr(store_trees.Trees, "members", None)
    # The notification of the last child may come before the answer that it is completed: then the block looks, and reads.
    monkeypatch.setattr(Looks, "heard", lambda *_: None)
    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        await trees.burst()
    assert trees.job(job_id)["result"] == [0, 2, 4, "completed", "completed", "completed"]
    assert (asked, trees.job(job_id)["attempt"]) == (["look"], 1)


def fail_of(error: BaseExceptionGroup[Any]) -> list[tuple[str, str]]:
    """Kind and state of each child of a group."""
    return [(leaf.job.kind, leaf.job.state) for leaf in error.exceptions if isinstance(leaf, ChildFailed)]


async def test_a_childs_failure_cancels_its_siblings_and_the_body_and_is_raised_in_a_group(trees: Trees) -> None:
    seen: list[object] = []

    @trees.handlers.job
    async def fails() -> None:
        raise Discard("broken")

    @trees.handlers.job
    async def waits(job: Job) -> None:
        try:
            await trio.sleep_forever()
        finally:
            seen.append(job.cancel_reason)

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> str:
        try:
            async with job.durable_nursery() as nursery:
                sibling = nursery.start_soon(waits)
                nursery.start_soon(fails)
                await trio.sleep_forever()
        except* ChildFailed as group:
            seen.append(fail_of(group))
        assert sibling.state == State.CANCELLED
        return "went on"

    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        await trees.burst()
    assert trees.job(job_id)["result"] == "went on"
    assert seen == ["sibling", [("fails", "dead")]]
    assert [kind for kind, _, _ in trees.lines(job_id)] == [8, 7]


async def test_an_attempt_that_failed_of_a_child_starts_it_again_and_keeps_what_was_completed(trees: Trees) -> None:
    runs: list[str] = []

    @trees.handlers.job
    async def good() -> str:
        runs.append("good")
        return "kept"

    @trees.handlers.job
    async def moody() -> str:
        runs.append("moody")
        if runs.count("moody") == 1:
            raise Discard("not now")
        return "well"

    @trees.handlers.job(durable=True, retry=Fixed(3600))
    async def parent(job: Job) -> list[str]:
        async with job.durable_nursery() as nursery:
            first = nursery.start_soon(good)
        async with job.durable_nursery() as nursery:
            second = nursery.start_soon(moody)
        return [first.result, second.result]

    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        await trees.burst()
        assert trees.job(job_id)["state"] == "retryable"
        assert "not now" in trees.job(job_id)["error"]
        trees.again()
        await trees.burst()
    assert trees.job(job_id)["result"] == ["kept", "well"]
    assert sorted(runs) == ["good", "moody", "moody"]


async def test_a_child_that_an_attempt_failed_of_is_started_again_though_the_next_meets_it_in_its_replay(
    trees: Trees,
) -> None:
    ran: list[int] = []
    stepped = trio.Event()

    async def step() -> None: ...

    @trees.handlers.job
    async def child(job: Job) -> int:
        await stepped.wait()
        ran.append(job.attempt)
        if job.attempt == 1:
            raise Discard("the first time")
        return job.attempt

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> int:
        async with job.durable_nursery() as nursery:
            one = nursery.start_soon(child)
            await nursery.flush()
            # Its line comes before that of the block, so the next attempt knows its child while it replays.
            await job.step(step)
            stepped.set()
        return one.result

    job_id = trees.enqueue("parent")
    await trees.burst()
    assert trees.job(job_id)["state"] == "retryable"
    trees.again()
    await trees.burst()
    assert (trees.job(job_id)["state"], trees.job(job_id)["result"], ran) == ("completed", 2, [1, 2])


@pytest.mark.parametrize("ends", ["group", "snooze", "with a task that goes on"])
async def test_a_failure_of_a_block_that_an_attempt_failed_of_is_forgotten_though_the_attempt_is_on_record_no_more(
    trees: Trees, ends: str
) -> None:
    runs, told = list[int](), trio.Event()

    @trees.handlers.job
    async def moody() -> int:
        runs.append(1)
        if len(runs) == 1:
            raise Discard("not now")
        return 1

    async def tick() -> None: ...

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> int:
        async def other() -> None:
            await told.wait()
            await job.step(tick, key="tick")
            ticked.set()

        ticked = trio.Event()
        if ends == "with a task that goes on":
            job.nursery.start_soon(other)
        try:
            async with job.durable_nursery() as nursery:
                started = nursery.start_soon(moody)
        except* ChildFailed:
            told.set()
            if ends == "snooze":
                raise Snooze(3600) from None
            if ends == "with a task that goes on":
                await ticked.wait()  # noqa: ASYNC120 -- what the test is about
            raise
        return started.result

    job_id = trees.enqueue("parent")
    await trees.burst()
    assert trees.job(job_id)["state"] in ("scheduled", "retryable")
    trees.window.run("DELETE FROM attempt WHERE job_id = %s", job_id)  # as the retention of its day does
    assert not trees.window.value("SELECT block_is_over(%s, 1)", job_id)
    trees.again()
    with trio.fail_after(30):
        await trees.burst()
    assert (trees.job(job_id)["result"], len(runs)) == (1, 2)


async def test_children_that_are_started_during_the_replay_are_written_when_it_is_over(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "_PEEK_EVERY", 3600)
    ran: list[int] = []
    both, looked = trio.Event(), trio.Event()
    flush = vars(looks)["_flush"]

    async def flush_and_say(block: Any) -> None:
        await flush(block)
        looked.set()

    monkeypatch.setattr(looks, "_flush", flush_and_say)

    @trees.handlers.job
    async def child(n: int) -> None:
        ran.append(n)
        if len(ran) == 2:
            both.set()

    async def work() -> None: ...

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            if job.attempt > 1:
                nursery.start_soon(child, 1)
                await looked.wait()  # too early: the replay is not over
            await job.step(work)
            if job.attempt == 1:
                raise ConnectionError("away")
            nursery.start_soon(child, 2)
            await both.wait()

    job_id = trees.enqueue("parent")
    await trees.burst()
    trees.again()
    with trio.fail_after(30):
        await trees.burst()
    assert (trees.job(job_id)["state"], sorted(ran)) == ("completed", [1, 2])


@pytest.mark.parametrize("suspend_after", [0, 3600])
async def test_a_child_that_fails_again_has_failed_whether_or_not_its_parent_was_suspended_meanwhile(
    trees: Trees, suspend_after: float
) -> None:
    ran: list[int] = []

    @trees.handlers.job(max_attempts=1)
    async def child(job: Job) -> None:
        ran.append(job.attempt)
        raise ValueError("as always")

    @trees.handlers.job(durable=True, suspend_after=suspend_after, max_attempts=3, retry=Fixed(3600))
    async def parent(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(child)

    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        for number in (1, 2):
            await trees.burst()
            assert (trees.job(job_id)["state"], len(ran)) == ("retryable", number)
            trees.again()
        await trees.burst()
    # Each failed attempt of the parent lets the child start once more: before, each resumed one did, for ever.
    assert (trees.job(job_id)["state"], ran) == ("dead", [1, 2, 3])


async def test_a_child_that_a_lost_attempt_has_started_again_is_not_started_once_more_when_it_fails(
    trees: Trees,
) -> None:
    """The next attempt finds it alive, and its end is another one: each lost attempt had given it one more, and `on_death` was
    called for each."""
    ran: list[int] = []
    stands = trio.Event()

    @trees.handlers.job(max_attempts=1, queue="children")
    async def child(job: Job) -> None:
        ran.append(job.attempt)
        raise ValueError("as always")

    @trees.handlers.job(durable=True, suspend_after=3600, retry=Fixed(3600), queue="parents")
    async def parent(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(child)
            await nursery.flush()
            if job.attempt == 3:
                stands.set()

    async def until(state: str) -> None:
        while trees.window.run("SELECT state FROM pulse.jobs WHERE kind = 'child'") != [{"state": state}]:  # noqa: ASYNC110 -- a row tells nobody
            await trio.sleep(0.01)

    job_id = trees.enqueue("parent", queue="parents")
    with trio.fail_after(30):
        await trees.burst()
        assert (trees.job(job_id)["state"], ran) == ("retryable", [1])
        trees.again()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trees.burst, queues=["parents"]))
            await until("available")
            await trees.lose(job_id)
            await stands.wait()
            await trees.burst(queues=["children"])
    assert (trees.job(job_id)["state"], trees.job(job_id)["attempt"], ran) == ("retryable", 3, [1, 2])


async def test_a_bodys_exception_cancels_the_children_and_is_in_a_group_always(trees: Trees) -> None:
    reasons: list[object] = []

    running = trio.Event()

    @trees.handlers.job
    async def waits(job: Job) -> None:
        running.set()
        try:
            await trio.sleep_forever()
        finally:
            reasons.append(job.cancel_reason)

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(waits)
            await running.wait()
            raise Discard("enough")

    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        await trees.burst()
    found = trees.job(job_id)
    assert found["state"] == "dead"
    assert "enough" in found["error"]
    assert reasons == ["parent"]


async def test_collect_keeps_failures_in_the_outcome_of_their_child(trees: Trees) -> None:
    @trees.handlers.job
    async def fails() -> None:
        raise Discard("broken")

    @trees.handlers.job
    async def works() -> int:
        return 1

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> list[object]:
        async with job.durable_nursery(collect=True) as nursery:
            children = [nursery.start_soon(fails), nursery.start_soon(works)]
        bad, good = [child.outcome for child in children]
        assert bad is not None
        assert good is not None
        assert isinstance(bad.error, ChildFailed)
        with pytest.raises(ChildFailed, match="broken"):
            bad.unwrap()
        return [bad.state, bad.error.job.kind, good.unwrap()]

    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        await trees.burst()
    assert trees.job(job_id)["result"] == ["dead", "fails", 1]


async def test_a_plain_scope_cancels_the_children_and_the_handler_goes_on(trees: Trees) -> None:
    @trees.handlers.job
    async def waits() -> None:
        await trio.sleep_forever()

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> str:
        with trio.move_on_after(0.2) as scope:
            async with job.durable_nursery() as nursery:
                child = nursery.start_soon(waits)
        assert scope.cancelled_caught
        return trees.job(child.id)["state"]

    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        await trees.burst()
    assert trees.job(job_id)["result"] == "cancelled"


async def test_a_cancelled_parent_takes_its_children_along_and_is_settled_after_them(trees: Trees) -> None:
    reasons: list[object] = []
    running = trio.Event()

    @trees.handlers.job
    async def waits(job: Job) -> None:
        running.set()
        try:
            await trio.sleep_forever()
        finally:
            reasons.append(job.cancel_reason)

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> None:
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(waits)
        finally:
            reasons.append(job.cancel_reason)

    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            worker = await nursery.start(trees.worker().run)
            await running.wait()
            await trio.to_thread.run_sync(lambda: SyncClient(trees.dsn).cancel(job_id, wait=True))
            worker.stop()
    assert trees.job(job_id)["state"] == "cancelled"
    assert reasons == ["parent", "user"]


async def test_the_same_key_with_other_arguments_is_a_mismatch_that_names_the_child(trees: Trees) -> None:
    @trees.handlers.job
    async def one(n: int) -> None: ...

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(one, job.attempt)
            await nursery.flush()
            if job.attempt == 1:
                await trio.sleep_forever()

    job_id = trees.enqueue("parent", timeout=0.3)
    with trio.fail_after(30):
        await trees.burst()
        trees.again()
        await trees.burst()
    found = trees.job(job_id)
    assert found["state"] == "dead"
    assert "ReplayMismatch" in found["error"]
    assert "child '#1'" in found["error"]


@pytest.mark.parametrize("caught", [Exception, BaseException])
async def test_after_a_mismatch_nothing_more_is_done_and_code_that_fits_goes_on(
    trees: Trees, caught: type[BaseException]
) -> None:
    undone: list[str] = []
    deployed = ["kid"]

    async def undo() -> None:
        undone.append("undone")

    @trees.handlers.job
    async def kid() -> None: ...

    @trees.handlers.job
    async def another() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> str:
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(trees.handlers[deployed[0]])
            return await job.wait_for_event("go", type=str)
        except caught:
            with job.cleanup():
                await job.step(undo)  # noqa: ASYNC120 -- shielded by job.cleanup()
            if caught is BaseException:
                raise
            return "as if nothing had happened"

    job_id = trees.enqueue("parent")
    client = SyncClient(trees.dsn)
    with trio.fail_after(30):
        await trees.burst()
        lines = trees.lines(job_id)
        deployed[0] = "another"
        await trio.to_thread.run_sync(lambda: client.send_event(job_id, "go", "gone"))
        await trees.burst()
        assert trees.job(job_id)["state"] == "dead"
        assert "with another kind or other arguments than this 'another'" in trees.job(job_id)["error"]
        # The event was received, or will be; what is remembered of the handler's calls is as before.
        assert (undone, trees.lines(job_id)[: len(lines)]) == ([], lines)
        deployed[0] = "kid"
        await trio.to_thread.run_sync(lambda: client.retry(job_id))
        await trees.burst()
    assert (trees.job(job_id)["state"], trees.job(job_id)["result"], undone) == ("completed", "gone", [])


async def test_what_a_later_attempt_does_not_start_is_cancelled_at_the_end_of_its_block(trees: Trees) -> None:
    @trees.handlers.job(queue="elsewhere")
    async def waits() -> None: ...

    @trees.handlers.job
    async def quick() -> str:
        return "done"

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> str:
        async with job.durable_nursery() as nursery:
            child = nursery.start_soon(quick)
            if job.attempt == 1:
                nursery.start_soon(waits.options(child_key="extra"))
                await nursery.flush()
                worker.stop_now()
                await trio.sleep_forever()
        return child.result

    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        worker = trees.worker(queues=("default",))
        await worker.run()
        trees.again()
        await trees.burst(queues=("default",))
    assert trees.job(job_id)["result"] == "done"
    states = trees.window.run("SELECT state FROM jobs WHERE kind = 'waits'")
    assert [row["state"] for row in states] == ["cancelled"]


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (lambda n, h: (n.start_soon(h.options(child_key="a")), n.start_soon(h.options(child_key="a"))), "used twice"),
        (lambda n, h: n.start_soon(h.options(unique_key="a")), "no unique_key"),
        (lambda n, h: n.start_soon(h, 5), "do not fit"),
        (lambda n, _: n.start_soon("nothing"), "takes a handler"),
    ],
)
async def test_what_cannot_be_a_child_is_refused_where_it_is_started(
    trees: Trees, start: Callable[[Any, Any], Any], said: str
) -> None:
    @trees.handlers.job
    async def nothing() -> None: ...

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> str:
        async with job.durable_nursery() as nursery:
            with pytest.raises(UsageError, match=said):
                start(nursery, nothing)
        with pytest.raises(UsageError, match="has ended"):
            nursery.start_soon(nothing)
        unopened: Any = job.durable_nursery()
        with pytest.raises(AttributeError, match="async with job"):
            unopened.start_soon(nothing)
        return "refused"

    job_id = trees.enqueue("parent")
    await trees.burst()
    assert trees.job(job_id)["result"] == "refused"


async def test_a_second_task_needs_a_child_key_and_a_transaction_is_refused_in_a_block(trees: Trees) -> None:
    @trees.handlers.job
    async def nothing() -> None: ...

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> str:
        async with job.durable_nursery() as nursery:
            with pytest.raises(UsageError, match="still open"):
                async with job.transaction():
                    pass

            async def second() -> None:
                with pytest.raises(UsageError, match="needs a child_key"):
                    nursery.start_soon(nothing)
                nursery.start_soon(nothing.options(child_key="mine"))

            async with trio.open_nursery() as tasks:
                tasks.start_soon(second)
        return "refused"

    job_id = trees.enqueue("parent")
    await trees.burst()
    assert trees.job(job_id)["result"] == "refused"


@pytest.mark.parametrize("discarded", [True, False])
async def test_a_mistake_in_the_handlers_code_is_retried_with_its_history_unless_its_declaration_says_otherwise(
    trees: Trees, *, discarded: bool
) -> None:
    """A deployment that mends it within the backoff costs nobody a look at dead jobs."""
    argument: list[Any] = ["three"]
    charged: list[int] = []

    async def charge() -> None:
        charged.append(1)

    @trees.handlers.job
    async def double(n: int) -> int:
        return 2 * n

    @trees.handlers.job(durable=True, discard_on=UsageError if discarded else ())
    async def parent(job: Job) -> int:
        await job.step(charge)
        async with job.durable_nursery() as nursery:
            child = nursery.start_soon(double, argument[0])
        return child.result

    job_id = trees.enqueue("parent")
    await trees.burst()
    job = trees.job(job_id)
    assert "InvalidArguments" in job["error"]
    assert job["state"] == ("dead" if discarded else "retryable")
    argument[0] = 3
    if discarded:
        SyncClient(trees.dsn).retry(job_id)
    trees.again()
    await trees.burst()
    assert (trees.job(job_id)["result"], charged) == (6, [1])


async def test_a_handler_that_is_not_durable_has_no_durable_nursery(trees: Trees) -> None:
    @trees.handlers.job
    async def plain(job: Job) -> str:
        with pytest.raises(UsageError, match="durable=True"):
            job.durable_nursery()
        return "refused"

    job_id = trees.enqueue("plain")
    await trees.burst()
    assert trees.job(job_id)["result"] == "refused"


async def test_the_states_of_many_children_are_there_while_the_block_waits_for_them(trees: Trees) -> None:
    seen = trio.Event()

    @trees.handlers.job
    async def numbered(n: int) -> int:
        if n == 1199:
            await seen.wait()
        return n

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> int:
        async with trio.open_nursery() as tasks:
            children: list[Child[int]] = []

            async def count() -> None:
                while True:
                    if sum(child.state == State.COMPLETED for child in children) == 1199:
                        break
                    await trio.sleep(0.05)
                seen.set()

            async with job.durable_nursery() as nursery:
                children += [nursery.start_soon(numbered, n) for n in range(1200)]
                tasks.start_soon(count)
            return sum(child.result for child in children)

    job_id = trees.enqueue("parent")
    with trio.fail_after(60):
        await trees.burst()
    assert trees.job(job_id)["result"] == sum(range(1200))


async def test_a_parent_that_is_suspended_in_its_block_goes_on_when_the_children_have_ended(trees: Trees) -> None:
    attempts: list[int] = []
    suspended = trio.Event()

    @trees.handlers.job
    async def works(n: int) -> int:
        await suspended.wait()  # children that had ended before it would let the parent go on at once
        return n

    @trees.handlers.job
    async def fails() -> None:
        raise Discard("broken")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> list[int]:
        attempts.append(job.attempt)
        async with job.durable_nursery() as nursery:
            children = [nursery.start_soon(works, n) for n in range(3)]
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(fails)
        except* ChildFailed as group:
            failed = len(group.exceptions)
        return [*(child.result for child in children), failed]

    job_id = trees.enqueue("parent")
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            worker = await nursery.start(trees.worker().run)
            while trees.job(job_id)["state"] != "suspended":  # noqa: ASYNC110 -- only the database knows
                await trio.sleep(0.01)
            suspended.set()
            found = await trio.to_thread.run_sync(lambda: SyncClient(trees.dsn).wait(job_id, 50))
            worker.stop()
    assert found.result == [0, 1, 2, 1]
    assert attempts == list(range(1, len(attempts) + 1))
    assert len(attempts) > 1
    assert [kind for kind, _, _ in trees.lines(job_id)] == [6, 7]


async def test_a_childs_failure_ends_the_sleep_of_a_body_that_is_suspended(trees: Trees) -> None:
    @trees.handlers.job
    async def fails() -> None:
        raise Discard("broken")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> str:
        said = "slept"
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(fails)
                await job.sleep(3600)
        except* ChildFailed:
            said = "woken"
        return said

    job_id = trees.enqueue("parent")
    with trio.fail_after(40):
        async with trio.open_nursery() as nursery:
            worker = await nursery.start(trees.worker().run)
            found = await trio.to_thread.run_sync(lambda: SyncClient(trees.dsn).wait(job_id, 30))
            worker.stop()
    assert found.result == "woken"


async def test_a_burst_ends_after_the_looks_that_are_left_to_do(trees: Trees) -> None:
    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> Any:
        return await job.wait_for_event("approved")

    job_id = trees.enqueue("parent")
    await trees.burst()
    assert trees.job(job_id)["state"] == "suspended"
    SyncClient(trees.dsn).send_event(job_id, "approved", "yes")
    # As after a look that found the row locked: the next is due later.
    trees.window.run("UPDATE recheck SET due_at = clock_timestamp() + interval '2 s', tries = 10")
    await trees.burst()
    assert trees.job(job_id)["result"] == "yes"


async def test_a_worker_without_durable_handlers_has_no_connection_for_trees(own_trees: Trees) -> None:
    trees = own_trees
    looked = trio.Event()

    @trees.handlers.job
    async def plain() -> None:
        looked.set()

    trees.enqueue("plain")
    worker = trees.worker()
    connections = "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        with trio.fail_after(30):
            await looked.wait()
            # The look at what is due is the last thing that a worker starts.
            trees.window.run("INSERT INTO recheck (job_id) VALUES (1000000)")
            while trees.window.value("SELECT count(*) FROM recheck"):  # noqa: ASYNC110 -- the database tells nobody
                await trio.sleep(0.05)
        names = {row["application_name"] for row in trees.window.run(connections)}
        worker.stop()
    assert "pulse-trio settles" in names
    assert "pulse-trio trees" not in names


async def test_a_durable_call_in_a_handler_that_is_not_durable_fails_for_good(trees: Trees) -> None:
    async def nothing() -> None: ...

    @trees.handlers.job
    async def plain(job: Job) -> None:
        await job.step(nothing)

    job_id = trees.enqueue("plain")
    await trees.burst()
    ended = trees.job(job_id)
    assert (ended["state"], ended["attempt"]) == ("dead", 1)
    assert "need @handlers.job(durable=True)" in ended["error"]


async def test_the_line_of_a_failed_attempt_says_which_child_failed_and_why(
    trees: Trees, caplog: pytest.LogCaptureFixture
) -> None:
    @trees.handlers.job
    async def fails() -> None:
        raise Discard("the printer is on fire")

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(fails.options(child_key="label"))

    trees.enqueue("parent")
    await trees.burst()
    (said,) = [r.message for r in caplog.records if "(parent) attempt 1 failed" in r.message]
    assert "key 'label'" in said
    assert "the printer is on fire" in said


async def test_a_failed_child_that_has_another_end_later_is_a_mismatch_and_no_empty_group(trees: Trees) -> None:
    @trees.handlers.job
    async def child(job: Job) -> None:
        raise Discard("not this time")

    async def undo() -> None: ...

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> None:
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(child)
        except* ChildFailed:
            await job.step(undo)  # noqa: ASYNC120 -- the cancellation says more
            raise

    job_id = trees.enqueue("parent")
    await trees.burst()
    # As the owner's hand may leave it; `jobs retry` refuses that child.
    trees.window.run("UPDATE job_archive SET state = 4, result = 'null', error = NULL WHERE kind = 'child'")
    trees.again()
    await trees.burst()
    found = trees.job(job_id)
    assert found["state"] == "dead"
    assert "ReplayMismatch: " in found["error"]
    assert "have ended otherwise since" in found["error"]


@pytest.mark.parametrize("stands", ["at the end of the block", "in its body"])
async def test_a_failure_that_does_not_count_for_an_attempt_wakes_its_suspended_parent_once(
    stands: str, trees: Trees
) -> None:
    """An earlier attempt had started the child that failed, and this one has not. It woke the parent again each second."""

    @trees.handlers.job
    async def bad() -> None:
        while trees.job(job_id)["state"] != "suspended":  # noqa: ASYNC110 -- the database is asked
            await trio.sleep(0.01)
        raise Discard("no")

    @trees.handlers.job
    async def slow() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> str:
        async with job.durable_nursery() as nursery:
            if job.attempt == 1:
                nursery.start_soon(bad.options(child_key="bad"))
            nursery.start_soon(slow.options(child_key="slow", delay=timedelta(days=2000)))
            if stands == "in its body" and job.attempt > 1:
                await job.sleep(timedelta(days=1000))
        return "completed"

    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        await trees.burst()
    # The attempt that begins because of the failure waits for what it has started.
    assert trees.job(job_id)["state"] == "suspended"
    assert trees.job(job_id)["attempt"] > 1
    far = "SELECT run_at > now() + interval '900 days' AS far FROM job WHERE id = %s"
    assert trees.window.run(far, job_id) == [{"far": True}]


@pytest.mark.parametrize("stands", ["runs", "is suspended"])
async def test_a_block_that_took_a_child_for_dead_waits_for_it_when_a_person_retries_it(
    stands: str, trees: Trees
) -> None:
    seen, go_on, runs_again = trio.Event(), trio.Event(), trio.Event()
    tries: list[int] = []

    @trees.handlers.job
    async def moody() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise Discard("the first time")
        runs_again.set()
        await go_on.wait()
        return "second"

    @trees.handlers.job
    async def good() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=60 if stands == "runs" else 0)
    async def parent(job: Job) -> str:
        async with job.durable_nursery(collect=True) as nursery:
            one = nursery.start_soon(moody)
            nursery.start_soon(good)
            while one.outcome is None and not seen.is_set():
                # Asked for, so that the block keeps it up to date.
                _ = one.state
                await trio.lowlevel.checkpoint()
            seen.set()
            await runs_again.wait()
        return one.result

    job_id = trees.enqueue("parent")
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trees.burst)
            await seen.wait()
            (child,) = trees.window.run("SELECT id FROM jobs WHERE parent_id = %s AND kind = 'moody'", job_id)
            SyncClient(trees.dsn).retry(child["id"])
            await runs_again.wait()
            if stands == "is suspended":
                while trees.job(job_id)["state"] != "suspended":  # noqa: ASYNC110 -- the database is asked
                    await trio.sleep(0.01)
            go_on.set()
    assert (trees.job(job_id)["state"], trees.job(job_id)["result"]) == ("completed", "second")
    assert len(tries) == 2


async def test_a_collecting_block_cuts_a_child_that_only_an_earlier_attempt_started_although_another_is_dead(
    trees: Trees,
) -> None:
    @trees.handlers.job(max_attempts=1)
    async def bad() -> None:
        raise ValueError("no")

    @trees.handlers.job
    async def stranger() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=60)
    async def parent(job: Job) -> str:
        async with job.durable_nursery(collect=True) as nursery:
            one = nursery.start_soon(bad.options(child_key="bad"))
            if job.attempt == 1:
                # No worker serves its queue, so only the block can end it.
                nursery.start_soon(stranger.options(child_key="stranger", queue="elsewhere"))
                await nursery.flush()
                while trees.window.run("SELECT FROM jobs WHERE kind = 'bad' AND state <> 'dead'"):  # noqa: ASYNC110 -- the database is asked
                    await trio.sleep(0.01)
                await trees.lose(job.id)
                await trio.sleep_forever()
        return str(one.outcome.state) if one.outcome is not None else "open"

    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst(queues=["default"], lease=3, heartbeat=0.3)
    assert (trees.job(job_id)["state"], trees.job(job_id)["result"]) == ("completed", "dead")
    (left,) = trees.window.run("SELECT state FROM jobs WHERE kind = 'stranger'")
    assert left["state"] == "cancelled"


async def test_a_key_that_begins_like_what_is_remembered_of_a_block_gives_no_block_its_number(trees: Trees) -> None:
    handlers = trees.handlers

    @handlers.job
    async def double(n: int) -> int:
        return 2 * n

    @handlers.job(durable=True)
    async def parent(job: Job) -> int:
        await job.sleep(0, key="block of the first")
        async with job.durable_nursery(key="the second") as nursery:
            child = nursery.start_soon(double, 4)
        return child.result

    parent_id = trees.enqueue("parent")
    await trees.burst()
    assert trees.job(parent_id)["result"] == 8
    numbers = trees.window.run("SELECT DISTINCT block FROM member WHERE parent_id = %s", parent_id)
    assert numbers == [{"block": KEYED + 1}]
