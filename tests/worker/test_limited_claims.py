"""A worker and queues with limits: who is tried when, and that neither sort of queue waits for the other."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio.errors import StatementRefused
from pulse_trio.observe import ClaimRefused
from pulse_trio.store import Limited
from pulse_trio.testing.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pulse_trio.jobs import Outcome
    from pulse_trio.store import ClaimCursor, ClaimResult
    from support.stage import Stage


@pytest.fixture
def noop(stage: Stage) -> Stage:
    """A stage with a handler `noop(seconds)` that counts how many of it run, and when each started."""

    @stage.handlers.job
    async def noop(seconds: float = 0) -> None:
        await trio.sleep(seconds)

    return stage


async def test_a_limit_of_the_queue_is_kept_over_two_workers_and_used_to_the_full(stage: Stage) -> None:
    running = most = 0

    @stage.handlers.job
    async def count() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(1)
        running -= 1

    stage.handlers.queue("narrow", limit=3)
    for _ in range(30):
        stage.enqueue("count", queue="narrow")
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for store in (stage.store, MemoryStore(stage.database)):
            nursery.start_soon(stage.worker(store, burst=True).run)
    assert most == 3
    assert {job.state for job in stage.database.jobs.values()} == {"completed"}
    # Ten rounds of a second; a place that came free was taken by the worker that freed it, not at somebody's poll.
    assert trio.current_time() - began < 12


async def test_a_freed_place_is_taken_by_the_worker_that_freed_it_at_once(noop: Stage) -> None:
    noop.handlers.queue("narrow", limit=1)
    for _ in range(5):
        noop.enqueue("noop", queue="narrow", seconds=0.01)
    began = trio.current_time()
    await noop.burst()
    assert trio.current_time() - began < 0.5


async def test_permits_are_removed_each_thousand_jobs_however_fast_they_end(noop: Stage) -> None:
    noop.handlers.queue("narrow", limit=100)
    for _ in range(3000):
        noop.enqueue("noop", queue="narrow")
    began = trio.current_time()
    await noop.burst()
    assert trio.current_time() - began < 1
    assert 2 <= noop.store.calls.count("prune_permits") <= 4


async def test_a_rate_is_waited_for_not_polled_for(stage: Stage) -> None:
    starts: list[float] = []

    @stage.handlers.job(queue="slow")
    async def note() -> None:
        starts.append(trio.current_time())

    stage.handlers.queue("slow", rate="2/10s")
    for _ in range(6):
        stage.enqueue("note", queue="slow")
    await stage.burst()
    # Two at once, then one every five seconds.
    assert [b - a for a, b in itertools.pairwise(starts)] == pytest.approx([0, 5, 5, 5, 5], abs=0.05)
    assert stage.store.calls.count("claim_limited") < 60


async def test_a_worker_without_limits_never_asks_for_them(noop: Stage) -> None:
    for _ in range(10):
        noop.enqueue("noop")
    await noop.burst()
    assert not {"claim_limited", "prune_permits"} & set(noop.store.calls)


@pytest.mark.parametrize("busy", ["keyed", "plain"])
async def test_neither_sort_of_queue_waits_until_the_other_is_empty(busy: str, stage: Stage) -> None:
    order: list[str] = []

    @stage.handlers.job
    async def note(which: str) -> None:
        order.append(which)
        await trio.sleep(0.1)

    for _ in range(60):
        stage.enqueue("note", which="many", key="a" if busy == "keyed" else None)
    for _ in range(3):
        stage.enqueue("note", which="few", key=None if busy == "keyed" else "a")
    await stage.burst(concurrency=4)
    assert len(order) == 63
    assert max(place for place, which in enumerate(order) if which == "few") < 20


async def test_a_burst_waits_for_what_a_limit_holds_back_on_another_worker(noop: Stage) -> None:
    noop.handlers.queue("narrow", limit=1)
    noop.enqueue("noop", queue="narrow", seconds=5)
    last = noop.enqueue("noop", queue="narrow")
    async with noop.working() as worker:
        await trio.sleep(1)
        assert worker.running == 1
        await noop.worker(MemoryStore(noop.database), burst=True).run()
        assert noop.database.state(last) == "completed"


@pytest.mark.parametrize("given", [{"queue": "narrow"}, {"key": "a"}])
async def test_a_burst_leaves_the_jobs_of_a_queue_with_limits_or_keys_that_are_due_later(
    given: dict[str, Any], noop: Stage
) -> None:
    noop.handlers.queue("narrow", limit=1)
    due, later = noop.enqueue("noop", **given), noop.enqueue("noop", delay=1000, **given)
    began = trio.current_time()
    await noop.burst()
    assert (noop.database.state(due), noop.database.state(later)) == ("completed", "scheduled")
    assert trio.current_time() - began < 10


async def test_a_burst_ends_beside_a_paused_queue_with_limits(noop: Stage) -> None:
    noop.handlers.queue("narrow", limit=1)
    noop.database.paused.add("narrow")
    waiting = noop.enqueue("noop", queue="narrow")
    await noop.burst()
    assert noop.database.state(waiting) == "available"


async def test_completions_are_written_while_limited_jobs_take_every_slot(noop: Stage) -> None:
    for n in range(20):
        noop.enqueue("noop", seconds=0.1, key=f"k{n % 2}")
    report = await noop.burst(concurrency=1)
    assert report.ended == {"completed": 20}
    assert noop.outcomes() == ["completed"] * 20


async def test_jobs_with_keys_that_come_due_later_start_on_time(noop: Stage) -> None:
    job = noop.database.jobs[noop.enqueue("noop", key="a", delay=3.3)]
    async with noop.working(poll=2):
        await trio.sleep(3.2)
        assert job.state == "scheduled"
        await trio.sleep(0.2)
        assert job.state == "completed"


async def test_a_kind_paused_and_resumed_takes_effect_within_a_second(noop: Stage) -> None:
    async with noop.working():
        noop.database.paused_kinds.add("noop")
        await trio.sleep(1.1)
        jobs = [noop.database.jobs[noop.enqueue("noop", key=key)] for key in (None, "a")]
        await trio.sleep(5)
        assert [job.state for job in jobs] == ["available"] * 2
        noop.database.paused_kinds.clear()
        await trio.sleep(1.1)
        assert [job.state for job in jobs] == ["completed"] * 2


class Taken(MemoryStore):
    """Another worker claims from the queue at the first tries. Notes for how long each claim may wait for that."""

    tries = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.waits: list[float] = []

    async def claim_limited(self, queue: str, limit: int, turns: str = "{}", *, wait: float = 0.0) -> Limited:
        self.waits.append(wait)
        self.calls.append("turn")
        if len(self.waits) <= self.tries:
            await trio.sleep(wait)
            return Limited([], trio.current_time(), 0.005, True, turns, waited=wait > 0)
        return await super().claim_limited(queue, limit, turns)


async def test_a_turn_at_the_only_queue_is_waited_for_again_and_again_without_a_sweep_between(noop: Stage) -> None:
    store = Taken(noop.database)
    store.tries = 10
    noop.enqueue("noop", key="a")
    began = trio.current_time()
    await noop.worker(store, burst=True, watch=False).run()
    assert {job.state for job in noop.database.jobs.values()} == {"completed"}
    assert store.waits[:11] == [0.05] * 11
    assert trio.current_time() - began < 0.7
    turns = [place for place, call in enumerate(store.calls) if call == "turn"]
    # After the first, a sweep for what was notified before the worker listened.
    assert "sweep" not in store.calls[turns[1] : turns[10]]


@pytest.mark.parametrize("beside", ["a plain job", "another queue with a limit"])
async def test_no_turn_is_waited_for_while_other_queues_have_jobs(beside: str, noop: Stage) -> None:
    store = Taken(noop.database)
    noop.handlers.queue("narrow", limit=1)
    noop.enqueue("noop", key="a", seconds=1)
    if beside == "a plain job":
        noop.enqueue("noop", delay=0.5)
    else:
        noop.enqueue("noop", queue="narrow", seconds=1)
    await noop.worker(store, burst=True).run()
    assert {job.state for job in noop.database.jobs.values()} == {"completed"}
    assert store.waits[0] == 0


class Refusing(MemoryStore):
    """Refuses claims from the queues in `bad`, as PostgreSQL does for what a row holds."""

    bad = ("bad",)

    async def claim_limited(self, queue: str, limit: int, turns: str = "{}", *, wait: float = 0.0) -> Limited:
        if queue in self.bad:
            await trio.lowlevel.checkpoint()
            raise StatementRefused(f"claiming from the queue {queue!r}: integer out of range")
        return await super().claim_limited(queue, limit, turns, wait=wait)

    async def complete_and_claim(
        self, limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome] = ()
    ) -> ClaimResult:
        refused = [(slot, "integer out of range") for slot in slots if slot.queue in self.bad]
        claimed = await super().complete_and_claim(
            limit, [slot for slot in slots if slot.queue not in self.bad], completed
        )
        return claimed._replace(refused=refused)


@pytest.mark.parametrize("limited", [True, False])
async def test_a_queue_that_the_database_refuses_is_said_and_left_alone_and_the_others_go_on(
    stage: Stage, limited: bool
) -> None:
    ran: list[float] = []

    @stage.handlers.job
    async def note() -> None:
        ran.append(trio.current_time())

    if limited:
        stage.handlers.queue("bad", limit=3)
        stage.handlers.queue("good", limit=3)
    stage.enqueue("note", queue="bad")
    began = trio.current_time()
    async with stage.working(Refusing(stage.database)):
        for _ in range(20):
            stage.enqueue("note", queue="good")
            await trio.sleep(1)
    # After 5 and 10 seconds, not at every look.
    refused = stage.events.of(ClaimRefused)
    assert [(event.queue, event.retry_in) for event in refused] == [("bad", 5.0), ("bad", 10.0), ("bad", 20.0)]
    assert len(ran) == 20
    assert trio.current_time() - began < 25


async def test_more_queues_with_keys_than_a_round_takes_in_keep_no_plain_job_waiting(noop: Stage) -> None:
    for n in range(50):
        noop.enqueue("noop", queue=f"keyed-{n:02}", key="a")
    noop.enqueue("noop", queue="plain")
    await noop.burst()
    names = noop.store.calls
    first = names.index("complete_and_claim")
    assert names[:first].count("claim_limited") <= 8
    assert {job.state for job in noop.database.jobs.values()} == {"completed"}
