"""The job table: a job's states, and the moves between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, get_args

import pytest
import trio
import trio.testing

from pulse_trio.jobs import Claim, Outcome
from pulse_trio.worker.jobs import job_states
from pulse_trio.worker.jobs.job_states import MOVES, JobState
from pulse_trio.worker.jobs.job_table import IllegalMove, JobTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pulse_trio.worker.jobs.running_job import RunningJob


class Follower:
    def __init__(self) -> None:
        self.ends: list[int] = []
        self.times_empty = 0

    def ended(self, claims: Sequence[Claim]) -> None:
        self.ends += [claim.id for claim in claims]

    def last_job_ended(self) -> None:
        self.times_empty += 1


@dataclass(eq=False)
class Job:
    """What the table needs of a running job."""

    claim: Claim
    state: JobState = job_states.CLAIMED
    beat_due: float = 10.0
    outcome: Outcome | None = None
    ended: bool = False
    cancel_reason: str | None = None
    cancelled: str | None = None

    def cancel(self, reason: str) -> None:
        self.cancelled = reason


class Bench:
    def __init__(self, concurrency: int = 10) -> None:
        self.follower = Follower()
        self.table = JobTable(concurrency, self.follower)
        self.made = 0

    def claimed(self, *, beside: bool = False, **how: Any) -> RunningJob:
        self.made += 1
        job = cast("RunningJob", Job(Claim(self.made, 1, 20, 0, 0, "", "q", "k", "{}", None, 7), **how))
        self.table.add([job], beside=beside)
        return job

    def taken(self) -> RunningJob:
        """A job that runs."""
        job = self.claimed()
        self.table.due.remove(job)
        self.table.begin(job)
        return job

    def in_state(self, state: JobState) -> RunningJob:
        """A job that came to `state` by legal moves."""
        table, job = self.table, self.claimed()
        match state:
            case "claimed":
                pass
            case "running":
                table.begin(job)
            case "ended":
                table.begin(job)
                end(table, job)
            case "reported":
                table.begin(job)
                end(table, job)
                table.report([Outcome(job.claim, "completed")])
            case "lost":
                table.lose(job)
            case "committed":
                table.begin(job)
                table.commit(job)
        assert job.state == state
        return job


def end(table: JobTable, job: RunningJob) -> bool:
    job.outcome = job.outcome or Outcome(job.claim, "completed")
    return table.end(job)


def leave(table: JobTable, job: RunningJob) -> bool:
    job.outcome = None
    return table.end(job)


def report(table: JobTable, job: RunningJob) -> None:
    # Found again even if it has left the table: what is tried is the move.
    table._held[job.claim] = job
    table.report([Outcome(job.claim, "completed")])


TRIED: dict[str, Callable[[JobTable, RunningJob], object]] = {
    "begin": JobTable.begin,
    "end": end,
    "lose": JobTable.lose,
    "commit": JobTable.commit,
    "report": report,
    "leave": leave,
}


@pytest.mark.parametrize("state", get_args(JobState))
@pytest.mark.parametrize("move", MOVES)
def test_a_move_is_made_if_the_table_of_moves_has_it_and_raises_otherwise(state: JobState, move: str) -> None:
    bench = Bench()
    job = bench.in_state(state)
    expected = MOVES[move].get(state)
    if move == "end" and state == "committed":
        expected = MOVES["leave"][state]  # its outcome is written already
    if expected is None:
        with pytest.raises(IllegalMove, match=rf"is {state}: it cannot \w+"):
            TRIED[move](bench.table, job)
    else:
        TRIED[move](bench.table, job)
        assert job.state == expected


def test_every_state_is_reached_by_a_move_and_only_reported_has_none_after_it() -> None:
    reached = {to for rows in MOVES.values() for to in rows.values()}
    left = {state for rows in MOVES.values() for state in rows}
    assert reached | {job_states.CLAIMED} == set(get_args(JobState))
    assert set(get_args(JobState)) - left == {job_states.REPORTED}


def test_a_slot_is_taken_from_the_claim_to_the_handlers_end() -> None:
    bench = Bench(concurrency=2)
    table = bench.table
    first, second = bench.claimed(), bench.claimed()
    assert (table.free, table.running) == (0, 2)
    table.begin(first)
    table.commit(first)
    table.lose(second)
    assert table.free == 0
    table.end(first)
    leave(table, second)
    assert (table.free, table.running, list(table)) == (2, 0, [])
    assert table.tally.ended == {"completed": 1, "lost": 1}
    assert (bench.follower.ends, bench.follower.times_empty) == ([1, 2], 1)


def test_a_lease_is_renewed_from_the_claim_to_the_report() -> None:
    bench = Bench()
    table, job = bench.table, bench.claimed()
    assert table.holds(job)
    table.begin(job)
    assert end(table, job)
    assert table.holds(job)
    assert bench.follower.ends == []
    table.report([Outcome(job.claim, "completed")])
    assert not table.holds(job)
    assert bench.follower.ends == [1]


def test_a_lost_job_that_has_an_outcome_all_the_same_is_reported_and_forgotten() -> None:
    bench = Bench()
    table, job = bench.table, bench.in_state("lost")
    assert end(table, job)
    assert [*table] == [job]
    table.report([Outcome(job.claim, "completed")])
    assert [*table] == []


def test_of_a_report_about_a_job_that_was_never_here_the_follower_is_told() -> None:
    bench = Bench()
    bench.table.report([Outcome(Claim(9, 1, 20, 0, 0, "", "q", "k", "{}", None, 7), "completed")])
    assert bench.follower.ends == [9]


def test_what_is_given_back_because_the_worker_stops_is_counted() -> None:
    bench = Bench()
    for reason in ("shutdown", "lease-unproven", "shutdown"):
        job = bench.claimed(cancel_reason=reason)
        job.outcome = Outcome(job.claim, "released")
        bench.table.end(job)
    assert bench.table.tally.released == 2
    assert bench.table.tally.ended == {"released": 3}


def test_all_that_run_are_cancelled_and_what_is_lost_or_has_its_outcome_is_not() -> None:
    bench = Bench()
    jobs = {state: bench.in_state(state) for state in get_args(JobState)}
    bench.table.cancel_all("shutdown")
    cancelled = {state for state, job in jobs.items() if cast("Job", job).cancelled == "shutdown"}
    assert cancelled == {"claimed", "running", "committed"}


def test_a_crowded_table_has_no_room_and_says_when_it_has_again() -> None:
    bench = Bench()
    bench.table.be_crowded(True)
    assert bench.table.free == 0
    bench.table.be_crowded(False)
    assert bench.table.free == 10


async def test_only_a_beat_that_is_due_sooner_wakes_the_heartbeats() -> None:
    bench = Bench()
    table, woken = bench.table, list[float]()

    async def beats() -> None:
        while True:
            await table.beats.wait()
            woken.append(table.next_beat())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(beats)
        for due in (10.0, 20.0, 5.0, 7.0):
            bench.claimed(beat_due=due)
            await trio.testing.wait_all_tasks_blocked()
        assert woken == [10.0, 5.0]
        nursery.cancel_scope.cancel()


async def test_who_expects_a_job_is_told_once_when_it_is_claimed() -> None:
    bench = Bench()
    expected = bench.table.expected
    expected.ids |= {1, 2}
    bench.claimed()
    with trio.fail_after(1):
        await expected.news.wait()
    assert (expected.ids, expected.arrived) == ({2}, {1})


# Lent slots


async def test_a_lent_slot_is_for_cancelled_jobs_and_no_other_job_may_be_claimed_for_it() -> None:
    bench = Bench(concurrency=2)
    table = bench.table
    waits, _ = bench.taken(), bench.taken()
    assert (table.free, table.lent) == (0, 0)
    table.lend(waits)
    assert (table.free, table.lent, table.full) == (0, 1, True)
    with trio.fail_after(1):
        await table.next_freed()
    cleans_up = bench.claimed(beside=True)
    assert (table.startable, table.free, table.lent) == (1, -1, 0)
    table.due.popleft()
    table.begin(cleans_up)
    assert table.in_slots == table.running == 3


async def test_a_slot_is_lent_once_however_often_its_job_says_so() -> None:
    bench = Bench(concurrency=1)
    waits = bench.taken()
    bench.table.lend(waits)
    bench.table.lend(waits)
    assert bench.table.lent == 1
    bench.table.take_back(waits)
    bench.table.take_back(waits)
    assert bench.table.lent == 0


async def test_no_lent_slot_is_used_while_another_is_free() -> None:
    bench = Bench(concurrency=2)
    waits = bench.taken()
    bench.table.lend(waits)
    assert (bench.table.free, bench.table.lent) == (1, 0)


async def test_a_worker_whose_job_has_taken_its_slot_back_claims_nothing_until_it_is_below_its_concurrency() -> None:
    bench = Bench(concurrency=1)
    table = bench.table
    waits = bench.taken()
    table.lend(waits)
    cleans_up = bench.taken()
    table.take_back(waits)
    assert (table.free, table.lent, table.in_slots) == (-1, 0, 2)
    end(table, cleans_up)
    assert (table.free, table.in_slots) == (0, 1)
    end(table, waits)
    assert table.free == 1


async def test_what_was_claimed_for_a_lent_slot_begins_although_the_slot_is_taken_back_first() -> None:
    bench = Bench(concurrency=1)
    table = bench.table
    waits = bench.taken()
    table.lend(waits)
    bench.claimed(beside=True)
    table.take_back(waits)
    assert table.startable == 1


async def test_what_was_claimed_ahead_begins_in_no_lent_slot() -> None:
    bench = Bench(concurrency=1)
    table = bench.table
    waits = bench.taken()
    table.slots.ahead = 2
    ahead = [bench.claimed(), bench.claimed()]
    table.lend(waits)
    assert (table.free, table.lent, table.startable, table.in_slots) == (-2, 1, 0, 1)
    cleans_up = bench.claimed(beside=True)
    assert (table.lent, table.startable, table.in_slots) == (0, 1, 2)
    table.take_back(waits)
    assert table.startable == 1
    assert table.due.popleft() is cleans_up
    assert (table.startable, table.in_slots) == (0, 2)
    table.begin(cleans_up)
    end(table, cleans_up)
    assert (table.startable, table.in_slots) == (0, 1)
    end(table, waits)
    assert (table.startable, table.in_slots) == (1, 1)
    assert list(table.due) == ahead


async def test_jobs_that_run_beside_a_full_worker_make_room_for_no_other_when_they_have_ended() -> None:
    bench = Bench(concurrency=2)
    table = bench.table
    first, second = bench.taken(), bench.taken()
    beside = [bench.claimed(beside=True) for _ in range(2)]
    assert (table.startable, table.in_slots, table.slots.beside) == (2, 4, 2)
    table.slots.ahead = 4
    bench.claimed()
    for job in beside:
        table.due.remove(job)
        table.begin(job)
    for job, left in zip([first, *beside], [3, 2, 1], strict=True):
        assert table.startable == 0
        end(table, job)
        assert table.in_slots - table.startable == left
    assert (table.startable, table.slots.beside) == (1, 0)
    end(table, second)
    assert table.startable == 1
