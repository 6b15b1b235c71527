"""What is written of a job whose quarantine process has ended, and how often that is tried."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio.observe import Observer, QuarantineEnded, QuarantineNotStarted
from pulse_trio.states import State
from pulse_trio.testing.memory.store import unavailable
from pulse_trio.worker.processes.verdicts import NOT_UP_PAUSE, Verdicts
from support.stores import claim_one, end

if TYPE_CHECKING:
    from pulse_trio.testing.memory import MemoryJob
    from support.stage import Stage

LEASE = 5.0


@pytest.fixture(autouse=True)
def half_a_second_between_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pauses are random, and may be longer than what is left of a lease."""
    monkeypatch.setattr("pulse_trio.worker.processes.verdicts.reconnect_delay", lambda failures: 0.5)


class Case:
    """A job that a worker has claimed and given to a process, and the worker's verdicts."""

    def __init__(self, stage: Stage, claim: Any) -> None:
        self.stage = stage
        self.claim = claim
        self.verdicts = Verdicts(stage.store, Observer([stage.events]))
        kept = SimpleNamespace(claim=claim, terms=SimpleNamespace(lease=LEASE))
        self.patient: Any = SimpleNamespace(claim=claim, kept=kept, since=trio.current_time())

    @property
    def job(self) -> MemoryJob:
        return self.stage.database.jobs[self.claim.id]

    def ward(self, *, code: int, first: bool = True, ended_by_us: str | None = None) -> Any:
        process = SimpleNamespace(returncode=code)
        return SimpleNamespace(
            patient=self.patient, spawned=SimpleNamespace(process=process), pid=77, first=first, ended_by_us=ended_by_us
        )


async def case(stage: Stage) -> Case:
    if not stage.store.session:
        await stage.store.open_session()
    stage.enqueue("poison", max_attempts=5)
    return Case(stage, await claim_one(stage.store))


@pytest.mark.parametrize(
    ("code", "first", "ended_by_us", "counts"),
    [
        (-signal.SIGSEGV, True, None, True),
        (1, True, None, True),
        # Another job had run in that process before; this worker killed it; its own alarm clock did, because the loop was held.
        (-signal.SIGSEGV, False, None, False),
        (-signal.SIGKILL, True, "it gave no sign of life", False),
        (-signal.SIGALRM, True, None, False),
    ],
)
async def test_a_crash_is_a_death_of_the_jobs_own_only_if_nothing_else_can_have_caused_it(
    stage: Stage, code: int, first: bool, ended_by_us: str | None, counts: bool
) -> None:
    it = await case(stage)
    await it.verdicts.report_death(it.ward(code=code, first=first, ended_by_us=ended_by_us), code, "")
    assert (it.job.session, it.job.crashes, it.job.deaths) == (0, 1, counts)
    (ended,) = stage.events.of(QuarantineEnded)
    assert (ended.job_id, ended.pid, ended.counts) == (it.claim.id, 77, counts)
    assert (ended_by_us or "signal" if code < 0 else "exit code 1") in (ended.crash or "")


async def test_a_process_that_did_not_come_up_gives_its_job_back_for_later_and_no_attempt_is_counted(
    stage: Stage,
) -> None:
    it = await case(stage)
    await it.verdicts.did_not_come_up(it.ward(code=3))
    assert it.job.state in (State.SCHEDULED, State.AVAILABLE)
    assert it.job.run_at - trio.current_time() == pytest.approx(NOT_UP_PAUSE)
    (told,) = stage.events.of(QuarantineNotStarted)
    assert told.job_id == it.claim.id


async def test_a_refused_process_gives_its_job_back_for_later_and_a_cancelled_worker_at_once(stage: Stage) -> None:
    refused, cancelled = await case(stage), await case(stage)
    await refused.verdicts.not_started(refused.patient, OSError("no more processes"))
    await cancelled.verdicts.not_started(cancelled.patient, None)
    assert refused.job.run_at - trio.current_time() == pytest.approx(NOT_UP_PAUSE)
    assert cancelled.job.run_at <= trio.current_time()
    assert [told.job_id for told in stage.events.of(QuarantineNotStarted)] == [refused.claim.id]


async def test_a_verdict_is_written_when_the_lock_on_its_row_is_gone(stage: Stage) -> None:
    it = await case(stage)
    stage.database.locked.add(it.claim.id)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(it.verdicts.settle, it.patient, [end(it.claim)])
        await trio.sleep(LEASE / 2)
        assert it.job.state == State.RUNNING
        stage.database.locked.clear()
    assert it.job.state == State.COMPLETED


async def test_a_verdict_is_written_when_the_database_is_back(stage: Stage) -> None:
    it = await case(stage)
    stage.store.trouble["report_crash"] = unavailable
    async with trio.open_nursery() as nursery:
        nursery.start_soon(it.verdicts.report_death, it.ward(code=1), 1, "")
        await trio.sleep(LEASE / 2)
        assert stage.store.calls.count("report_crash") > 1
        del stage.store.trouble["report_crash"]
    assert (it.job.session, it.job.deaths) == (0, 1)


async def test_a_verdict_that_cannot_be_written_is_given_up_when_the_lease_has_run_out(stage: Stage) -> None:
    it = await case(stage)
    stage.database.locked.add(it.claim.id)
    start = trio.current_time()
    await it.verdicts.settle(it.patient, [end(it.claim)])
    assert trio.current_time() - start == pytest.approx(LEASE)
    assert it.job.state == State.RUNNING
