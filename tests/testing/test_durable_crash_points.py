"""`crash_points` over durable handlers: each durable call is a point, and planted bugs are found there."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import asynccontextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.lowlevel

from pulse_trio import ChildFailed, ConfigurationError, DatabaseUnavailable, Discard, Handlers, Job, SyncClient
from pulse_trio.postgres import connect_sync
from pulse_trio.store import histories, transactions, trees, waits
from pulse_trio.testing import NeverEnds, PulseWorker, crash_points, crashing
from pulse_trio.testing.crashing import grounds, others
from pulse_trio.testing.faults.proxy import Proxy, open_proxy
from pulse_trio.worker.durable import attempts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from pulse_trio.handlers import Handler
    from pulse_trio.testing import PulseClock

pytestmark = pytest.mark.trio

handlers = Handlers()
done: list[str] = []


@pytest.fixture
def pulse_handlers() -> Handlers:
    return handlers


@pytest.fixture(autouse=True)
def nothing_done() -> Iterator[None]:
    done.clear()
    yield
    done.clear()


async def act(what: str) -> str:
    """An effect with a key, as those of a good provider: a repetition is none."""
    await trio.lowlevel.checkpoint()
    if what not in done:
        done.append(what)
    return what


@handlers.job(max_attempts=5)
async def part(number: int) -> int:
    done.append(f"part {number}")
    return number * 10


@handlers.job(durable=True, max_attempts=5)
async def order(job: Job, number: int) -> int:
    await job.step(act, "charged")
    async with job.durable_nursery() as nursery:
        parts = [nursery.start_soon(part, n) for n in range(number)]
    await job.wait_for_event("approved", type=str, timeout=timedelta(days=3))
    await job.sleep(timedelta(days=14))
    await job.step(act, "shipped")
    return sum(one.result for one in parts)


async def test_each_durable_call_is_a_point_and_an_order_survives_all_of_them(
    pulse_clock: PulseClock, pulse_dsn: str
) -> None:
    said: list[str] = []
    async for run in crash_points(order, 1, dsn=pulse_dsn, handlers=handlers, events={"approved": "Ada"}):
        assert (run.state, run.result, done) == ("completed", 0, ["charged", "part 0", "shipped"]), run
        assert run.reached
        said.append(str(run))
        done.clear()
    file = "test_durable_crash_points.py"
    for about in (
        "before the line of step act was written",
        "after the line of step act was written",
        "before 1 child of it was written",
        "after 1 child of it was written",
        "before the line of the block was written",
        "after the event 'approved' was received",
        "before the line of the sleep was written",
    ):
        for struck in ("was killed at checkpoint", "lost its lease at checkpoint"):
            found = [one for one in said if f"({about})" in one and struck in one]
            assert found, (about, struck)
            assert f"{file}:" in found[0]
            assert 'Again: crash_points(order, ..., only="' in found[0]


async def noted(tx: Any, job_id: int) -> None:
    await tx.execute("INSERT INTO public.ledger (job, amount) VALUES (%s, 1)", [job_id])


@handlers.job(durable=True, max_attempts=5)
async def small_order(job: Job) -> None:
    await job.step(act, "charged")
    async with job.durable_nursery() as nursery:
        nursery.start_soon(part, 1)
    await job.wait_for_event("approved", type=str, timeout=timedelta(days=3))
    await job.sleep(timedelta(days=14))
    await job.transaction_step(noted, job.id)


async def test_a_write_that_the_database_does_not_take_at_once_is_the_same_point(
    pulse_clock: PulseClock, pulse_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each repetition counted as points of its own, so `lost@N` was at another place than `kill@N`: some were never tried."""
    with connect_sync(pulse_dsn) as connection:
        connection.execute("CREATE TABLE public.ledger (job bigint, amount int)")
    given: dict[str, Any] = {"dsn": pulse_dsn, "handlers": handlers, "events": {"approved": "Ada"}}
    places = {run.point: str(run.place) async for run in crash_points(small_order, **given)}
    points = sum(point.startswith("lost@") for point in places)
    seen: Counter[tuple[Any, ...]] = Counter()
    refused: set[str] = set()

    def disturb(owner: Any, name: str, fence_of: Callable[..., tuple[Any, ...]], *, is_lost: bool = False) -> None:
        """The first time that a write is sent another transaction has the job's row locked, the second time the database is
        away, if `is_lost`. Not a coroutine: its frame would be one of the handler's, whose waits are points."""
        ask = getattr(owner, name)

        def disturbed(self: Any, *args: Any) -> Any:
            job_id, *what = fence_of(*args)
            seen[job_id, name, *what] += 1
            times = seen[job_id, name, *what]
            if times == 1:
                other.execute("BEGIN")
                # Not that of the next attempt: the write of one that has lost its lease is not sent again.
                running = "SELECT FROM pulse.job WHERE id = %s AND attempt = %s AND state = 2 FOR UPDATE"
                other.execute(running, [job_id, what[0]])
                refused.add(name)
            elif times == 2:
                other.execute("ROLLBACK")
                if is_lost:
                    raise DatabaseUnavailable("the database is away")
            return ask(self, *args)

        monkeypatch.setattr(owner, name, disturbed)

    def of_lines(some: Any) -> tuple[Any, ...]:
        return some[0].claim.id, some[0].claim.attempt, some[0].lines[0].line

    with connect_sync(pulse_dsn) as other:
        disturb(histories.Histories, "write_lines", of_lines, is_lost=True)
        disturb(transactions.Begun, "remember", lambda lines: of_lines([lines]))
        disturb(trees.Trees, "start_children", lambda fence, *_: (fence.id, fence.attempt), is_lost=True)
        disturb(waits.Waits, "receive", lambda wanted: (wanted[0].claim.id, wanted[0].claim.attempt))
        for number in range(1, points + 1):
            async for run in crash_points(small_order, **given, only=f"lost@{number}"):
                assert run.state == "completed", run
                assert str(run.place) == places[f"lost@{number}"] == places[f"kill@{number}"]
        with pytest.raises(ConfigurationError, match=f"undisturbed, it had {points} checkpoints"):
            await anext(crash_points(small_order, **given, only=f"lost@{points + 1}"))
    assert refused == {"write_lines", "remember", "start_children", "receive"}


# Handlers with planted bugs


@handlers.job(durable=True, max_attempts=5)
async def mails_outside(job: Job) -> None:
    await job.step(act, "charged")
    done.append("mail")
    await job.step(act, "noted")


@handlers.job(durable=True, max_attempts=5)
async def child_of_chance(job: Job) -> None:
    async with job.durable_nursery() as nursery:
        nursery.start_soon(part.options(child_key=f"at {job.attempt}"), 1)
        await nursery.flush()


@handlers.job(durable=True, max_attempts=5)
async def pays_at_the_event(job: Job) -> None:
    name = await job.wait_for_event("approved", type=str)
    done.append(f"paid {name}")


@handlers.job(durable=True, max_attempts=5)
async def refunds_without_cleanup(job: Job) -> None:
    await job.step(act, "charged")
    try:
        await job.step(act, "packed")
    except BaseException:
        await job.step(act, "refunded")  # noqa: ASYNC102 -- the mistake: a cancellation strikes it, too
        raise


@handlers.job(durable=True, max_attempts=5)
async def refunds(job: Job) -> None:
    await job.step(act, "charged")
    try:
        await job.step(act, "packed")
    except BaseException:
        with job.cleanup():
            await job.step(act, "refunded")  # noqa: ASYNC102 -- job.cleanup() is a shield with a deadline
        raise


async def found(dsn: str, handler: Handler[..., Any], expected: list[str], **given: Any) -> tuple[str, str]:
    """The first point at which something else was done, and the text of its line."""
    async for run in crash_points(handler, dsn=dsn, handlers=handlers, **given):
        if done != expected:
            assert run.place is not None
            assert run.place.file == __file__
            return run.point, run.place.source
        done.clear()
    return "none", ""


@pytest.mark.parametrize(
    ("handler", "expected", "given", "at", "source"),
    [
        (mails_outside, ["charged", "mail", "noted"], {}, "lost@3", 'await job.step(act, "charged")'),
        (
            pays_at_the_event,
            ["paid Ada"],
            {"events": {"approved": "Ada"}},
            "lost@1",
            "name = await job.wait_for_event(",
        ),
    ],
    ids=["an effect outside of a step", "an effect of an event outside of a step"],
)
async def test_a_planted_bug_is_found_with_its_line(
    handler: Any,
    expected: list[str],
    given: dict[str, Any],
    at: str,
    source: str,
    pulse_clock: PulseClock,
    pulse_dsn: str,
) -> None:
    point, line = await found(pulse_dsn, handler, expected, **given)
    assert (point, line[: len(source)]) == (at, source)


async def test_a_child_under_another_key_in_each_attempt_is_found(pulse_clock: PulseClock, pulse_dsn: str) -> None:
    with pytest.raises(NeverEnds, match="Are the keys of its children others in each attempt"):
        await found(pulse_dsn, child_of_chance, ["part 1"])
    assert len(done) > 1


@handlers.job(durable=True, max_attempts=5)
async def in_transaction(job: Job) -> int:
    async with job.transaction() as transaction:
        async with job.durable_nursery() as nursery:
            one = nursery.start_soon(part, 1)
        transaction.result = one.result
    return one.result


@handlers.job(durable=True, max_attempts=5)
async def in_a_shield_of_a_scope_that_has_struck(job: Job) -> int:
    results = list[int]()
    with job.move_on_after(0.2):
        try:
            await job.sleep(100)
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                async with job.durable_nursery() as nursery:
                    one = nursery.start_soon(part, 1)
                results.append(one.result)
            raise
    return results[0]


def wait_for(dsn: str) -> int:
    client = SyncClient(dsn)
    return int(client.result(client.enqueue(part, 2).id, timeout=60))


@handlers.job(durable=True, max_attempts=5)
async def in_a_threads_step(job: Job, dsn: str) -> int:
    return await job.step(wait_for, dsn)


@pytest.mark.parametrize(
    "handler",
    [in_transaction, in_a_threads_step, in_a_shield_of_a_scope_that_has_struck],
    ids=lambda handler: handler.kind,
)
async def test_a_handler_that_cannot_be_suspended_where_it_waits_has_others_beside_it(
    handler: Any, pulse_clock: PulseClock, pulse_dsn: str
) -> None:
    args = [pulse_dsn] if handler is in_a_threads_step else []
    async for run in crash_points(handler, *args, dsn=pulse_dsn, handlers=handlers, only="none", timeout=30):
        assert run.state == "completed"


charges: list[str] = []


@handlers.job(max_attempts=1)
async def refuses() -> None:
    charges.append("refused")
    raise Discard("no funds")


@handlers.job(durable=True, max_attempts=6)
async def fails_once_behind_its_child(job: Job) -> None:
    try:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(refuses)
    except* ChildFailed:
        if len(charges) == 1:
            raise OSError("for a moment") from None


async def test_a_dead_child_has_one_more_attempt_for_each_of_its_parents_that_failed(
    pulse_clock: PulseClock, pulse_dsn: str
) -> None:
    """The clock stood still, so its second end was no later than the failure that had started it again."""
    charges.clear()
    async for run in crash_points(
        fails_once_behind_its_child, dsn=pulse_dsn, handlers=handlers, only="none", timeout=30
    ):
        assert (run.state, charges) == ("completed", ["refused"] * 2)


async def test_children_end_after_their_parent_is_suspended_however_long_that_takes(
    pulse_clock: PulseClock, pulse_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a loaded machine: what ran beside its parent by the clock ended before, and no attempt was suspended.
    @asynccontextmanager
    async def open_slow_proxy(dsn: str) -> AsyncGenerator[Proxy]:
        async with open_proxy(dsn) as proxy:
            proxy.delay(0.01)
            yield proxy

    monkeypatch.setattr(grounds, "open_proxy", open_slow_proxy)
    monkeypatch.setattr(others, "_LOOK", 0.01)
    with pytest.raises(NeverEnds, match="was suspended 10 times"):
        await found(pulse_dsn, child_of_chance, ["part 1"])


async def test_a_forgotten_cleanup_is_found_where_the_job_is_cancelled(pulse_clock: PulseClock, pulse_dsn: str) -> None:
    missing: dict[str, list[str]] = {}
    for handler in (refunds_without_cleanup, refunds):
        missing[handler.kind] = []
        async for run in crash_points(handler, dsn=pulse_dsn, cancel=True):
            if (
                run.state == "cancelled"
                and "refunded" not in done
                and run.place is not None
                and "packed" in run.place.source
            ):
                missing[handler.kind].append(run.point)
            done.clear()
    assert missing["refunds"] == []
    assert any(point.startswith("cancel@") for point in missing["refunds_without_cleanup"])


async def pay(tx: Any, job_id: int, amount: int) -> None:
    await tx.execute("INSERT INTO public.ledger (job, amount) VALUES (%s, %s)", [job_id, amount])


@handlers.job(durable=True)
async def sold_out(job: Job) -> None:
    await job.transaction_step(pay, job.id, 100)
    try:
        raise Discard("sold out")
    except BaseException:
        with job.cleanup():
            await job.transaction_step(pay, job.id, -100)  # noqa: ASYNC102 -- job.cleanup() is the shield
        raise


async def test_a_cancellation_in_the_commit_of_a_transaction_step_waits_for_it(
    pulse_clock: PulseClock, pulse_dsn: str
) -> None:
    """The transaction has locked the job's row: whoever cancels it waits for the COMMIT, as in production."""
    with connect_sync(pulse_dsn) as connection:
        connection.execute("CREATE TABLE public.ledger (job bigint, amount int)")
        commits: list[tuple[str, list[int]]] = []
        number = 0
        while len(commits) < 2:
            number += 1
            async for run in crash_points(sold_out, dsn=pulse_dsn, handlers=handlers, only=f"cancel@{number}"):
                rows = connection.execute("SELECT amount FROM public.ledger WHERE job = %s", [run.job_id]).fetchall()
                paid = [amount for (amount,) in rows]
                assert paid in ([], [100, -100])
                assert run.place is not None
                if run.place.about == "before its COMMIT":
                    commits.append((run.state, paid))
    assert commits == [("cancelled", [100, -100])] * 2


async def takes_a_while() -> None:
    """Meanwhile the kit's clock goes on, and what waits in another queue becomes due: that is what is tested."""
    await trio.sleep(0.3)


@handlers.job(durable=True)
async def wakes(job: Job, after: float) -> None:
    await job.sleep(after)
    await job.step(takes_a_while)


@handlers.job(durable=True)
async def of_two_queues(job: Job) -> str:
    async with job.durable_nursery() as nursery:
        nursery.start_soon(wakes.options(queue="flight"), 1.0)
        nursery.start_soon(wakes.options(queue="hotel"), 1.1)
    return "back"


async def test_a_child_that_wakes_while_another_queue_is_served_is_run_too(
    pulse_clock: PulseClock, pulse_dsn: str
) -> None:
    async for run in crash_points(of_two_queues, dsn=pulse_dsn, handlers=handlers, only="none"):
        assert (run.state, run.result) == ("completed", "back")


def backends(dsn: str) -> dict[str, set[int]]:
    """The sessions of the workers' connections, by what they are for."""
    with connect_sync(dsn) as connection:
        found: dict[str, set[int]] = {}
        for name, pid in connection.execute(
            "SELECT application_name, pid FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'pulse-trio %' AND pid <> pg_backend_pid()"
        ).fetchall():
            found.setdefault(name, set()).add(pid)
        return found


async def test_runs_share_the_connections_of_the_workers_that_are_not_killed(
    pulse_clock: PulseClock, pulse_dsn: str
) -> None:
    found: list[dict[str, set[int]]] = []
    for point in ("none", "lost@1", "kill@1", "kill@end"):
        async for run in crash_points(mails_outside, dsn=pulse_dsn, only=point):
            assert run.reached
        found.append(backends(pulse_dsn))
    assert len(found[0]["pulse-trio claims"]) == 1
    assert found[1]["pulse-trio claims"] == found[0]["pulse-trio claims"]
    # Those of the killed workers are gone, with the proxy that they came through.
    assert found[3]["pulse-trio claims"] >= found[0]["pulse-trio claims"]
    assert found[3] == found[2]


@handlers.job(durable=True, max_attempts=5)
async def hangs_when_it_comes_back(job: Job) -> None:
    await job.step(act, f"attempt {job.attempt}")
    if job.attempt > 1:
        await trio.sleep_forever()


async def test_a_later_attempt_that_never_ends_leaves_no_connection_of_its_own(
    pulse_clock: PulseClock, pulse_dsn: str
) -> None:
    with pytest.raises(NeverEnds, match="did not end within"):
        await found(pulse_dsn, hangs_when_it_comes_back, [], only="kill@2", timeout=1.0)
    with trio.fail_after(10):
        # That of whoever rescued the job stays, for the next. The server notices the end of the others soon.
        while list(backends(pulse_dsn)) != ["pulse-trio watchdog"]:  # noqa: ASYNC110 -- PostgreSQL tells nobody
            await trio.sleep(0.01)


async def test_a_durable_handler_without_a_database_is_told_to_take_one() -> None:
    with pytest.raises(
        ConfigurationError, match="'order' is durable, and its history needs a real database: dsn=pulse_dsn"
    ):
        crash_points(order, 1)


async def test_a_wait_that_nothing_ends_says_what_to_pass(pulse_clock: PulseClock, pulse_dsn: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"waits for the event 'approved', and nothing brings it: pass events="
    ):
        async for _ in crash_points(pays_at_the_event, dsn=pulse_dsn):
            pass


async def test_a_sleep_in_a_database_without_a_clock_says_what_to_do(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="time does not pass in this database: put pulse_clock among"):
        async for _ in crash_points(order, 0, dsn=dsn, handlers=handlers, events={"approved": "Ada"}):
            pass


async def test_a_child_without_a_handler_says_what_to_pass(pulse_clock: PulseClock, pulse_dsn: str) -> None:
    with pytest.raises(ConfigurationError, match=r"without a handler here: part\..* Pass the registry"):
        async for _ in crash_points(child_of_chance, dsn=pulse_dsn, only="none"):
            pass


async def test_children_may_have_results_instead_of_running(pulse_clock: PulseClock, pulse_dsn: str) -> None:
    async for run in crash_points(
        order, 2, dsn=pulse_dsn, children={part: lambda n: n + 5}, events={"approved": "Ada"}, only="none"
    ):
        assert (run.state, run.result, done) == ("completed", 11, ["charged", "shipped"])


@handlers.job(durable=True, max_attempts=5)
async def crawl(job: Job) -> list[str]:
    limiter, pages = trio.CapacityLimiter(2), list[str]()

    async def fetch(page: str) -> None:
        async with limiter:
            pages.append(await job.step(act, page, key=page))

    async with trio.open_nursery() as nursery:
        for page in "abcde":
            nursery.start_soon(fetch, page)
    return sorted(pages)


async def test_a_limiter_around_keyed_steps_is_given_to_other_tasks_in_the_next_attempt(
    pulse_clock: PulseClock, pulse_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Trio draws it, where a worker does not keep it: this is what it draws from.
    monkeypatch.setattr(trio._core._run, "_r", random.Random(0))
    monkeypatch.setattr(attempts, "keep_order", lambda: None)
    monkeypatch.setattr(crashing, "order_kept", nullcontext)
    async for run in crash_points(crawl, dsn=pulse_dsn, handlers=handlers, timeout=8.0):
        assert (run.state, run.result) == ("completed", ["a", "b", "c", "d", "e"]), run


async def test_a_retry_that_comes_due_by_itself_is_no_failure_of_the_test(
    pulse_clock: PulseClock, pulse_dsn: str
) -> None:
    async with grounds.open_database(pulse_dsn) as ground:
        job_id = await ground.enqueue(part.request(1))
        assert (await ground.look(job_id)).state == "available"
        await ground.hasten(job_id)
        assert (await ground.look(job_id)).state == "available"


@handlers.job(durable=True)
async def sleeps_in_its_clean_up(job: Job) -> None:
    with job.cleanup():
        await job.sleep(3600)


async def test_a_wait_in_a_clean_up_says_that_it_takes_real_time(pulse_clock: PulseClock, pulse_dsn: str) -> None:
    with pytest.raises(NeverEnds, match=r"There it is not suspended, and waits in real time: it is in job\.cleanup"):
        await found(pulse_dsn, sleeps_in_its_clean_up, [], only="none", timeout=1.0)


async def test_a_parent_whose_children_have_ended_is_looked_at_when_nothing_else_is_left(pulse_dsn: str) -> None:
    """Its row was locked for a moment when its last child ended: `crash_points` said that nothing brings what it waits for."""

    @handlers.job
    async def packed() -> None: ...

    @handlers.job(durable=True, suspend_after=0)
    async def waits_for_it(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(packed)

    client = SyncClient(pulse_dsn)
    parent = client.enqueue(waits_for_it.options(queue=others.QUEUE))
    worker = PulseWorker(pulse_dsn, handlers)
    await worker.drain(queues=[others.QUEUE])
    (child,) = [job.id for job in client.tree(parent.id) if job.id != parent.id]
    with connect_sync(pulse_dsn) as connection:
        # As a worker does that could not have the parent's row: the look is put off.
        connection.execute("DELETE FROM pulse.job WHERE id = %s", [child])
        connection.execute("DELETE FROM pulse.recheck")
        connection.execute(
            "INSERT INTO pulse.recheck (job_id, tries, due_at) VALUES (%s, 1, clock_timestamp())", [parent.id]
        )
    assert client.job(parent.id).state == "suspended"
    with trio.fail_after(30):
        await others.Others(pulse_dsn, handlers).until_due(parent.id)
    assert client.job(parent.id).state == "available"
