"""Orders that a process of `runs="process"` has before their turn: what becomes of them when its handler takes long, is
cancelled or dies. On a store in memory and the real clock."""

from __future__ import annotations

import math
import os
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio
import trio.testing

from pulse_trio.jobs import Claim
from pulse_trio.worker.jobs.kinds import dealing, line, wire
from pulse_trio.worker.jobs.kinds.child import Child
from pulse_trio.worker.jobs.kinds.in_process import ProcessCalls
from support import kinds_app
from support.ear import WITHIN, Ear
from support.stage import Stage, parts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from pulse_trio import Worker

pytestmark = pytest.mark.real_clock  # There are real processes here.
SETTINGS: dict[str, Any] = {"lease": 10.0, "heartbeat": 0.1, "cleanup": 2.0, "grace": 10.0}


class Posted:
    """Which jobs' orders were put on lines, and on which at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on: dict[int, line.Line] = {}
        self.order: list[int] = []
        """In which order they were, each time that they were."""
        self._put = line.Line.put
        monkeypatch.setattr(line.Line, "put", self._noting())

    def _noting(self) -> Callable[[line.Line, line.Order], None]:
        def noting(on: line.Line, order: line.Order) -> None:
            if order.kind is wire.Call:
                self.on.setdefault(order.running.claim.id, on)
                self.order.append(order.running.claim.id)
            self._put(on, order)

        return noting

    async def has(self, *jobs: int) -> None:
        await until(lambda: set(jobs) <= set(self.on))


class Fifo:
    """What a handler reads, which waits for it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        os.mkfifo(path)

    async def is_read(self) -> int:
        """Waits until a handler reads; returns the end to write at."""
        found: list[int] = []

        def opened() -> bool:
            with suppress(OSError):  # ENXIO: nobody reads
                found.append(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))
            return bool(found)

        await until(opened)
        return found[0]


async def until(holds: Callable[[], object]) -> None:
    with trio.fail_after(WITHIN):
        while not holds():  # noqa: ASYNC110 -- the store in memory and the system's processes tell nobody
            await trio.sleep(0.01)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    # However slow the machine is, and only when a child is idle.
    monkeypatch.setattr(line, "_AHEAD", 3600.0)
    monkeypatch.setattr(dealing, "_PATIENCE", 3600.0)
    stage = Stage()
    stage.handlers.include(kinds_app.handlers)
    return stage


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> Posted:
    return Posted(monkeypatch)


@pytest.fixture
def fifo(tmp_path: Path) -> Fifo:
    return Fifo(tmp_path / "fifo")


@pytest.fixture
async def ear(tmp_path: Path) -> AsyncGenerator[Ear]:
    ear = Ear(tmp_path / "ear")
    await ear.open()
    yield ear
    ear.close()


@asynccontextmanager
async def working(stage: Stage, slots: int = 1) -> AsyncGenerator[Worker]:
    """A worker with processes, each of which has run a job."""
    with trio.fail_after(3 * WITHIN):
        async with stage.working(**SETTINGS, process_slots=slots) as worker:
            first = [stage.enqueue("process", what="succeed", ear="") for _ in range(slots)]
            await until(lambda: all(stage.database.state(job_id) == "completed" for job_id in first))
            yield worker


def tasks_that_run(*functions: Callable[..., Any]) -> int:
    """How many tasks of this run of Trio do."""
    tasks = [trio.lowlevel.current_root_task()]
    for task in tasks:
        tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks] if task else []
    return sum(task is not None and task.coro.cr_code in [f.__code__ for f in functions] for task in tasks)


def succeeding(stage: Stage, **how: Any) -> int:
    return stage.enqueue("process", what="succeed", ear="", **how)


def cancel(worker: Worker, job_id: int) -> None:
    (held,) = [job for job in parts(worker).jobs.held if job.claim.id == job_id]
    held.cancel("user")


@pytest.mark.parametrize("ends", ["returns", "is killed"])
async def test_an_order_behind_a_long_handler_goes_to_a_process_that_is_free(
    ends: str, stage: Stage, posted: Posted, tmp_path: Path
) -> None:
    fifos = [Fifo(tmp_path / name) for name in ("one", "other")]
    async with working(stage, slots=2) as worker:
        long = [stage.enqueue("process", what="read", ear=fifo.path) for fifo in fifos]
        left, right = [await fifo.is_read() for fifo in fifos]
        behind = [succeeding(stage) for _ in range(4)]
        await posted.has(*behind)
        assert {stage.database.state(job_id) for job_id in behind} == {"running"}
        if ends == "returns":
            os.close(left)
        else:
            cancel(worker, long[0])
        await until(lambda: all(stage.database.state(job_id) == "completed" for job_id in behind))
        assert stage.database.state(long[1]) == "running"
        os.close(right)


async def test_orders_behind_a_long_handler_come_before_newer_ones(
    stage: Stage, posted: Posted, tmp_path: Path
) -> None:
    fifos = [Fifo(tmp_path / name) for name in ("one", "other")]
    async with working(stage, slots=2):
        long = [stage.enqueue("process", what="read", ear=fifo.path) for fifo in fifos]
        left, right = [await fifo.is_read() for fifo in fifos]
        jobs = [succeeding(stage) for _ in range(90)]

        def behind_the_other() -> list[int]:
            return [job_id for job_id in jobs if posted.on.get(job_id) == posted.on[long[1]]]

        await until(lambda: len(behind_the_other()) == 31)
        behind, newer = behind_the_other(), set(jobs) - set(posted.on)
        posted.on[long[1]].heard_at = -math.inf  # this process alone has been silent for too long
        # The other process has enough to do to the end, and does these before what has not been given to any.
        os.close(left)
        await until(lambda: all(stage.database.state(job_id) == "completed" for job_id in jobs))
        os.close(right)
    # Not in which order they end: answers come several at a time, and Trio goes on with their jobs in any order.
    again = [posted.order.index(job_id, posted.order.index(job_id) + 1) for job_id in behind]
    assert max(again) < min(map(posted.order.index, newer))


async def test_a_job_whose_order_waits_in_a_process_is_cancelled_before_it_begins(
    stage: Stage, posted: Posted, fifo: Fifo
) -> None:
    async with working(stage) as worker:
        long = stage.enqueue("process", what="read", ear=fifo.path)
        end = await fifo.is_read()
        behind = [stage.enqueue("process", what="leave", ear="", max_attempts=1), succeeding(stage)]
        await posted.has(*behind)
        cancel(worker, behind[0])
        await until(lambda: stage.database.state(behind[0]) == "cancelled")
        assert stage.database.state(long) == "running"
        os.close(end)
        await until(lambda: stage.database.state(behind[1]) == "completed")
        assert stage.database.state(long) == "completed"


async def test_a_job_that_is_cancelled_when_its_process_has_gone_on_has_ended_and_the_next_one_runs(
    stage: Stage, posted: Posted, fifo: Fifo, ear: Ear
) -> None:
    async with working(stage) as worker:
        first = stage.enqueue("process", what="read", ear=fifo.path)
        end = await fifo.is_read()
        second = stage.enqueue("process", what="wait", ear=ear.path)
        await posted.has(second)
        os.close(end)
        # The answer to the first is on its way to the worker, which is cancelling it just now.
        ear.wait_for_word()
        cancel(worker, first)
        await until(lambda: stage.database.state(first) == "completed")
        assert (await ear.hear("started"))["job"] == second
        cancel(worker, second)
        assert (await ear.hear("ended"))["reason"] == "user"
    assert stage.outcomes() == ["completed", "completed", "cancelled"]


async def test_the_orders_behind_a_cancelled_handler_go_to_another_process(
    stage: Stage, posted: Posted, ear: Ear
) -> None:
    async with working(stage) as worker:
        waits = stage.enqueue("process", what="wait", ear=ear.path)
        pid = (await ear.hear("started"))["pid"]
        behind = stage.enqueue("process", what="who", ear="")
        await posted.has(behind)
        cancel(worker, waits)
        assert (await ear.hear("ended"))["reason"] == "user"
        await until(lambda: stage.database.state(behind) == "completed")
    assert msgspec.json.decode(stage.database.jobs[behind].result or "")[5] != pid


@pytest.mark.parametrize(("what", "state"), [("die", "dead"), ("leave", "dead"), ("babble", "dead")])
async def test_the_orders_in_a_process_that_dies_are_run_by_another(
    what: str, state: str, stage: Stage, posted: Posted, fifo: Fifo
) -> None:
    async with working(stage):
        stage.enqueue("process", what="read", ear=fifo.path)
        end = await fifo.is_read()
        dies = stage.enqueue("process", what=what, ear="", max_attempts=1)
        behind = [stage.enqueue("process", what="succeed", ear="", max_attempts=1) for _ in range(5)]
        await posted.has(dies, *behind)
        os.close(end)
        await until(lambda: all(stage.database.state(job_id) == "completed" for job_id in behind))
        assert stage.database.state(dies) == state
        # Nothing waits for the dead one any more.
        await until(lambda: tasks_that_run(line.Line.send, ProcessCalls._serve) == 2)
    assert stage.outcomes().count("discarded") + stage.outcomes().count("failed") == 1


async def test_the_orders_behind_a_handler_that_leaves_processes_are_run_by_another(
    stage: Stage, posted: Posted, fifo: Fifo, tmp_path: Path
) -> None:
    async with working(stage):
        stage.enqueue("process", what="read", ear=fifo.path)
        end = await fifo.is_read()
        leaves = stage.enqueue("process", what="leave a process", ear=str(tmp_path / "started"))
        behind = [stage.enqueue("process", what="who", ear="", max_attempts=1) for _ in range(5)]
        await posted.has(leaves, *behind)
        os.close(end)
        await until(lambda: all(stage.database.state(job_id) == "completed" for job_id in behind))
        assert stage.database.state(leaves) == "completed"
    assert stage.outcomes() == ["completed"] * 8


async def test_the_timeout_of_a_job_whose_order_waits_in_a_process_begins_with_its_handler(
    stage: Stage, posted: Posted, fifo: Fifo, ear: Ear
) -> None:
    async with working(stage):
        stage.enqueue("process", what="read", ear=fifo.path)
        end = await fifo.is_read()
        waiting = succeeding(stage, timeout=3)
        overruns = stage.enqueue("process", what="wait", ear=ear.path, timeout=1, max_attempts=1)
        await posted.has(waiting, overruns)
        await trio.sleep(3.2)  # real time, longer than the timeouts: a process has no virtual one
        os.close(end)
        assert (await ear.hear("started"))["job"] == overruns
        assert (await ear.hear("ended"))["reason"] == "timeout"
        await until(lambda: stage.database.state(overruns) != "running")
    assert stage.database.state(waiting) == "completed"


async def test_a_long_order_is_not_sent_ahead_and_arrives_whole(stage: Stage, posted: Posted, fifo: Fifo) -> None:
    async with working(stage):
        stage.enqueue("process", what="read", ear=fifo.path)
        end = await fifo.is_read()
        long = [stage.enqueue("process", what="succeed", ear="x" * 900_000) for _ in range(2)]
        await until(lambda: all(stage.database.state(job_id) == "running" for job_id in long))
        assert not {*long} & {*posted.on}
        os.close(end)
        await until(lambda: all(stage.database.state(job_id) == "completed" for job_id in long))


async def test_an_order_that_comes_too_late_does_not_begin_and_is_given_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = line.Order.encoded
    encoded: list[int] = []

    def late_at_first(order: line.Order) -> bytes:
        encoded.append(order.running.claim.id)
        data = encode(order)
        if order.kind is wire.Load or encoded.count(encoded[-1]) > 1:
            return data
        call = wire.decode_order(data)
        assert isinstance(call, wire.Call)
        return wire.encode(msgspec.structs.replace(call, begin_by=0.0))

    async with working(stage):
        monkeypatch.setattr(line.Order, "encoded", late_at_first)
        jobs = [succeeding(stage) for _ in range(3)]
        await until(lambda: all(stage.database.state(job_id) == "completed" for job_id in jobs))
    assert [encoded.count(job_id) for job_id in jobs] == [2, 2, 2]
    assert stage.outcomes() == ["completed"] * 4


# One line, without a process: what happens between two of its steps


class Held:
    """As much of a running job as an order asks for."""

    def __init__(self, job_id: int) -> None:
        self.claim = Claim(job_id, 1, 1, 0, 0, "2026-11-26", "default", "kind", "{}", None, 1)
        self.lease_deadline = trio.current_time() + 30
        self.times: list[str] = []

    def stop_time(self) -> float:
        self.times.append("stopped")
        return 3.0

    def start_time(self, limit: float) -> None:
        self.times.append(f"{limit:g} s")


class Ends:
    """A line, and its other end as a child has it."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        tickets, taken = socket.socketpair()
        self.tickets = taken.dup()
        self.line = line.Line(1, ours, tickets, taken)
        self.child = Child(self.theirs, self.tickets)

    def take(self) -> Any:
        return self.child._next_order()

    def answer(self) -> None:
        self.theirs.sendall(wire.encode(wire.Returned(msgspec.Raw(b"1"), 0.0)) + b"\n")

    def close(self) -> None:
        self.line.close()
        self.theirs.close()
        self.tickets.close()


def order(job_id: int) -> tuple[line.Order, Held]:
    held = Held(job_id)
    made = line.Order(wire.Importable("module", "name"), held, "{}", None)  # type: ignore[arg-type]
    made.wait()
    return made, held


async def test_what_a_child_has_taken_is_not_taken_back_and_what_was_taken_back_is_skipped() -> None:
    ends = Ends()
    orders = [order(n)[0] for n in range(4)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.line.send)
        for one in orders[:3]:
            ends.line.put(one)
        await trio.testing.wait_all_tasks_blocked()
        assert ends.take().claim.id == 0
        assert ends.line.take_back() == orders[1:3]
        assert [*ends.line.orders] == orders[:1]
        ends.line.put(orders[3])
        ends.line.put(orders[1])
        await trio.testing.wait_all_tasks_blocked()
        assert [ends.take().claim.id, ends.take().claim.id] == [3, 1]
        assert ends.line.take_back() == []
        # And not sent at all, if it was not yet.
        ends.line.put(orders[2])
        assert ends.line.take_back() == [orders[2]]
        await trio.testing.wait_all_tasks_blocked()
        ends.line.put(orders[0])
        await trio.testing.wait_all_tasks_blocked()
        assert ends.take().claim.id == 0
        nursery.cancel_scope.cancel()
    ends.close()


async def test_once_the_next_order_is_taken_the_answer_to_the_one_before_is_there() -> None:
    # A cancelled job must not end the handler of another.
    ends = Ends()
    (first, _), (second, held) = order(1), order(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.line.send)
        ends.line.put(first)
        ends.line.put(second)
        await trio.testing.wait_all_tasks_blocked()
        ends.take()
        ends.answer()
        ends.take()
        assert held.times == ["stopped"]
        assert ends.line.take_back() == []
        assert first.answer is None
        assert ends.line.take_in() == []
        assert isinstance(first.answer, wire.Returned)
        assert [*ends.line.orders] == [second]
        assert held.times == ["stopped", "3 s"]
        nursery.cancel_scope.cancel()
    ends.close()


async def test_numbers_of_tickets_begin_again() -> None:
    ends = Ends()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.line.send)
        for n in range(3 * wire.NUMBERS):
            one, _ = order(n)
            ends.line.put(one)
            await trio.testing.wait_all_tasks_blocked()
            if n % 5:
                assert ends.take().claim.id == n
                ends.answer()
                assert ends.line.take_in() == []
            else:
                assert ends.line.take_back() == [one]
        nursery.cancel_scope.cancel()
    ends.close()
