"""What a supervisor does with the jobs of a child that died, in virtual time; the rest is tried on real processes."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.jobs import Claim, Outcome
from pulse_trio.observe import ChildEnded, ChildNotStarted, ChildSilent, Observer, WorkerStale
from pulse_trio.settings import WorkerSettings
from pulse_trio.store import HandedBack, Rescue, Settlement
from pulse_trio.worker import Supervisor
from pulse_trio.worker.processes.child_process import Child
from pulse_trio.worker.processes.children import Children
from pulse_trio.worker.processes.crash_dump import CrashDump
from pulse_trio.worker.processes.handing_back import HandingBack, report
from pulse_trio.worker.processes.handover import QUIET_VARIABLE, REPLACE_ME, encode_outcome
from pulse_trio.worker.processes.spawning import Launch, Spawned
from pulse_trio.worker.upkeep.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from trio.testing import MockClock

    from support.stage import Recorder


class Store:
    """Its table is locked for so many seconds from now."""

    def __init__(self, seconds: float) -> None:
        self._locked_until = trio.current_time() + seconds
        self.handed_back_at: float | None = None

    async def rescue_sessions(self, sessions: Sequence[int], limit: int = 1000) -> HandedBack:
        await trio.sleep(1)
        if trio.current_time() < self._locked_until:
            raise DatabaseUnavailable("canceling statement due to lock timeout")
        self.handed_back_at = trio.current_time()
        return HandedBack(0, 0)


async def hand_back(store: Any) -> None:
    """As for a child that has died; its second part, in the background."""
    child: Any = SimpleNamespace(sessions=[5], process=SimpleNamespace(pid=1), longest=WorkerSettings().lease)
    await HandingBack(store, Observer(), trio.Event()).rescue_late(child)


async def test_what_a_dead_child_held_is_handed_back_when_the_server_answers_again() -> None:
    """Found by `make chaos SEED=5`: the table was locked for a moment, and the jobs waited for the end of their leases."""
    begun = trio.current_time()
    store = Store(7)
    await hand_back(store)
    assert store.handed_back_at is not None
    assert 7 <= store.handed_back_at - begun <= 9


async def test_what_cannot_be_handed_back_within_a_lease_is_left_to_the_watchdog() -> None:
    begun = trio.current_time()
    store = Store(1000)
    await hand_back(store)
    assert store.handed_back_at is None
    assert trio.current_time() - begun <= WorkerSettings().lease


async def test_a_child_that_is_being_started_when_the_supervisor_is_told_to_stop_is_told_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was left out: the supervisor waited for ever for a child that knew nothing."""
    children = Children(Launch([], {}), 30, Observer())
    told: list[signal.Signals] = []

    async def open_process(*_: Any, **__: Any) -> Any:
        children.end(signal.SIGTERM)
        return SimpleNamespace(pid=1, returncode=None, send_signal=told.append)

    monkeypatch.setattr(trio.lowlevel, "open_process", open_process)
    child = await children.start()
    await child.spawned.line.aclose()
    child.spawned.words.close()
    assert told == [signal.SIGTERM]


# What a supervisor does, with processes that are none


class Process:
    """Stands for a worker process: it lives until it is told to go, and speaks through its end of the line."""

    def __init__(self, line: int, environment: dict[str, str]) -> None:
        self.pid = 1
        self.line = socket.socket(fileno=os.dup(line))
        self.environment = environment
        self.returncode: int | None = None
        self.told: list[int] = []
        self._ended = trio.Event()

    def say(self, **message: Any) -> None:
        self.line.sendall(json.dumps(message).encode() + b"\n")

    def end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self.line.close()
            self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.told.append(number)
        if number != signal.SIGUSR1:
            self.end(0)

    def kill(self) -> None:
        self.told.append(signal.SIGKILL)
        self.end(-signal.SIGKILL)


class Kernel:
    """Starts such processes, unless it `refuses`."""

    def __init__(self) -> None:
        self.started: list[Process] = []
        self.refuses: Exception | None = None

    async def open_process(self, _: Any, *, env: dict[str, str], pass_fds: Sequence[int], **__: Any) -> Process:
        await trio.lowlevel.checkpoint()
        if self.refuses is not None:
            raise self.refuses
        process = Process(pass_fds[0], env)
        self.started.append(process)
        return process

    async def process(self, number: int) -> Process:
        while len(self.started) <= number:  # noqa: ASYNC110 -- in virtual time
            await trio.sleep(0.01)
        return self.started[number]


class Server:
    """A store that answers at once, or not at all while it is `silent`; it finds nothing to rescue."""

    def __init__(self) -> None:
        self.silent = False
        self.locked = 0
        self.reports: list[list[int]] = []

    async def _answer(self) -> None:
        if self.silent:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()

    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement:
        await self._answer()
        self.reports.append([outcome.claim.id for outcome in outcomes])
        if len(self.reports) <= self.locked:
            return Settlement([*outcomes[1:]], [], [*outcomes[:1]])
        return Settlement([*outcomes], [], [])

    async def rescue(self, limit: int = 1000) -> Rescue:
        await self._answer()
        return Rescue(0, 0)

    async def rescue_sessions(self, sessions: Sequence[int], limit: int = 1000) -> HandedBack:
        await self._answer()
        return HandedBack(0, 0)

    async def close_cancellations(self) -> None:
        await self._answer()

    async def tend_trees(self) -> bool:
        await self._answer()
        return False

    async def stale_workers(self) -> Sequence[WorkerStale]:
        await self._answer()
        return []

    async def maintain(self, retention: float) -> bool:
        await self._answer()
        return False

    async def finish_batches(self) -> None:
        await self._answer()

    async def prune_results(self, retention: float) -> None:
        await self._answer()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(trio.lowlevel, "open_process", kernel.open_process)
    return kernel


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def supervisor(server: Server, events: Recorder) -> Supervisor:
    return Supervisor([], {}, server, settings=WorkerSettings(processes=2), observer=Observer([events]))


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncGenerator[list[int]]:
    """Runs it beside the block, and yields the list that its exit code is added to."""
    codes: list[int] = []

    async def run() -> None:
        codes.append(await supervisor.run())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        yield codes


def outcome(job_id: int) -> Outcome:
    return Outcome(Claim(job_id, 1, 20, 0, 0, "2026-11-21", "default", "swallows", "{}", None, 5), "timeout")


async def test_what_a_child_said_just_before_its_end_is_heard_to_the_last_line(server: Server) -> None:
    """It was cancelled with the listening: at most one read came of it, and the jobs counted as crashed."""
    ours, theirs = socket.socketpair()
    process = Process(theirs.fileno(), {})
    theirs.close()
    for number in range(70):
        process.say(stuck=encode_outcome(outcome(number)), filler="x" * 1000)
    inherited = process.line.dup()  # by something that the child has started
    process.end(75)
    line = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    child = Child(Spawned(process, line, CrashDump()), 0, 0, 30, 30)  # type: ignore[arg-type] -- no process
    watchdog = Watchdog(server, WorkerSettings(), Observer())
    with inherited, trio.fail_after(5):
        assert (await Children(Launch([], {}), 30, Observer()).watch(child, watchdog))[0] == 75
    assert [outcome.claim.id for outcome in child.stuck] == list(range(70))


async def test_a_report_of_a_row_that_is_locked_is_sent_again(server: Server) -> None:
    server.locked = 3
    assert await report(server, [outcome(1), outcome(2)]) == []
    assert server.reports == [[1, 2], [1], [1], [1]]


async def test_a_report_of_a_row_that_stays_locked_is_left_to_the_rescue(server: Server) -> None:
    server.locked = 1000
    begun = trio.current_time()
    assert len(await report(server, [outcome(1)])) == 1
    assert trio.current_time() - begun <= 6


async def test_a_supervisor_that_stood_still_itself_kills_nobody(
    supervisor: Supervisor, kernel: Kernel, events: Recorder, autojump_clock: MockClock
) -> None:
    """Ctrl-Z, `docker pause`: the first thing it saw was that no sign of life had come for a lease."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        process = await kernel.process(0)
        process.say(session=5)
        other = await kernel.process(1)
        other.say(session=6)
        await trio.sleep(1)
        autojump_clock.jump(100)
        await trio.sleep(0.6)  # Everybody stood still: a sign of life comes with the next turn of the child's loop.
        process.say(alive=True)
        await trio.sleep(0.2)
        assert process.returncode is None
        # The other really is silent.
        await other.wait()
        await trio.sleep(0.1)
        assert [event.seconds for event in events.of(ChildSilent)] == [30]
        process.say(alive=True)
        heard = trio.current_time()
        await process.wait()
        assert 30 <= trio.current_time() - heard <= 30.1
        supervisor.stop()


REFUSALS = [BlockingIOError(errno.EAGAIN, "no more processes"), RuntimeError("can't start new thread")]


@pytest.mark.parametrize("refusal", REFUSALS, ids=["process", "thread"])
async def test_a_child_that_the_system_refuses_costs_the_others_nothing_and_is_tried_again(
    refusal: Exception, supervisor: Supervisor, kernel: Kernel, events: Recorder
) -> None:
    async with running(supervisor) as codes:
        first = await kernel.process(0)
        kernel.refuses = refusal
        first.say(session=5)
        while len(events.of(ChildNotStarted)) < 5:
            await trio.sleep(0.01)
            first.say(alive=True)
        assert all(event.again_in is not None for event in events.of(ChildNotStarted))
        assert first.told == []
        kernel.refuses = None
        await kernel.process(1)
        supervisor.stop()
    assert codes == [0]


async def test_children_of_which_the_system_refuses_the_very_first_are_given_up_and_leave_nothing_open(
    supervisor: Supervisor, kernel: Kernel, events: Recorder
) -> None:
    kernel.refuses = REFUSALS[0]
    before = len(os.listdir("/dev/fd"))
    assert await supervisor.run() == 1
    assert len(os.listdir("/dev/fd")) == before
    told = events.of(ChildNotStarted)
    assert [event.again_in is None for event in told] == [False, False, True]
    assert "no more processes" in told[0].error


async def test_children_that_are_replaced_later_know_that_they_are_to_claim_nothing(
    supervisor: Supervisor, kernel: Kernel
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        first = await kernel.process(0)
        first.say(session=5)
        starting = await kernel.process(1)
        supervisor.quiet()
        assert first.told == [signal.SIGUSR1]
        # A Python that begins would die of it.
        assert starting.told == []
        starting.say(session=6)
        await trio.sleep(0.1)
        assert starting.told == [signal.SIGUSR1]
        first.end(1)
        replaced = await kernel.process(2)
        assert replaced.environment[QUIET_VARIABLE] == "1"
        supervisor.stop()


async def test_what_a_dead_child_held_is_asked_for_once_more_a_second_later(
    supervisor: Supervisor, kernel: Kernel, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may still have been executing a claim of the child when it was asked for the first time."""
    asked: list[tuple[list[int], float]] = []

    async def rescue_sessions(sessions: Sequence[int], limit: int = 1000) -> HandedBack:
        asked.append(([*sessions], trio.current_time()))
        await trio.lowlevel.checkpoint()
        return HandedBack(0, 0)

    monkeypatch.setattr(server, "rescue_sessions", rescue_sessions)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        first = await kernel.process(0)
        first.say(session=5)
        await kernel.process(1)
        first.end(1)
        await trio.sleep(10)
        assert [sessions for sessions, _ in asked] == [[5], [5]]
        assert asked[1][1] - asked[0][1] == pytest.approx(1)
        supervisor.stop()


@pytest.mark.parametrize("when", ["silent before the stop", "silent with the stop", "stopped twice"])
async def test_a_server_that_is_silent_does_not_keep_a_stop(
    when: str, supervisor: Supervisor, kernel: Kernel, server: Server
) -> None:
    """Each place waited in turn for a rescue that has the patience of a minute."""
    begun = 0.0
    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            for number in range(2):
                process = await kernel.process(number)
                process.say(session=number + 5)
                process.say(stuck=encode_outcome(outcome(number)))
            await trio.sleep(0.1)
            server.silent = True
            if when == "silent before the stop":
                kernel.started[0].end(1)
                await trio.sleep(2)
            begun = trio.current_time()
            supervisor.stop()
            if when == "stopped twice":
                await trio.sleep(1)
                supervisor.stop_now()
    assert trio.current_time() - begun <= 5.1


async def test_a_silent_child_is_killed_when_the_shortest_lease_that_it_holds_is_over(
    supervisor: Supervisor, kernel: Kernel, events: Recorder
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        first = await kernel.process(0)
        first.say(leases=[4, 90])
        first.say(session=5)
        second = await kernel.process(1)
        second.say(session=6)
        second.say(lease=4)
        second.say(lease=30)  # that job has ended
        await trio.sleep(1)
        first.say(alive=True)
        second.say(alive=True)
        # A job with a short lease begins, and blocks the loop.
        first.say(lease=4)
        silent = trio.current_time()
        await first.wait()
        assert trio.current_time() - silent == pytest.approx(4, abs=0.1)
        assert second.returncode is None
        await second.wait()
        assert trio.current_time() - silent == pytest.approx(30, abs=0.1)
        await trio.sleep(0.1)
        assert [event.seconds for event in events.of(ChildSilent)] == [4, 30]
        supervisor.stop()


async def test_a_supervisors_watchdog_looks_often_enough_for_its_childrens_shortest_lease(
    supervisor: Supervisor, kernel: Kernel, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    async def rescue(limit: int = 1000) -> Rescue:
        looks.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        return Rescue(0, 0)

    monkeypatch.setattr(server, "rescue", rescue)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        process = await kernel.process(0)
        process.say(leases=[4, 90])
        process.say(session=5)
        await trio.sleep(20)
        supervisor.stop()
    pauses = [after - before for before, after in pairwise(looks[1:])]
    assert pauses == pytest.approx([2.0] * len(pauses), abs=0.1)
    assert len(pauses) >= 5


async def test_a_replaced_child_that_ends_with_a_usage_error_is_tried_again_and_ends_no_other(
    supervisor: Supervisor, kernel: Kernel, events: Recorder
) -> None:
    """A deploy that is half done, or a restart of what a resource connects to, took the whole fleet down."""
    async with running(supervisor) as codes:
        healthy = await kernel.process(0)
        healthy.say(session=5)
        for number in range(1, 6):
            unlucky = await kernel.process(number)
            unlucky.end(2)
            healthy.say(alive=True)
        replaced = await kernel.process(6)
        replaced.say(session=6)
        assert healthy.told == []
        assert all(event.again_in is not None for event in events.of(ChildEnded))
        supervisor.stop()
    assert codes == [0]


async def test_a_child_that_handlers_keep_from_ending_as_all_stop_has_released_its_jobs(
    supervisor: Supervisor, kernel: Kernel
) -> None:
    """Its exit code, which asks for another process, made that of the whole an error."""
    async with running(supervisor) as codes:
        child = await kernel.process(0)
        child.say(session=5)
        await trio.testing.wait_all_tasks_blocked()
        # Its end and the order to stop come together.
        child.end(REPLACE_ME)
        supervisor.stop()
    assert codes == [3]


async def test_a_first_child_that_ends_with_a_usage_error_ends_everything(
    supervisor: Supervisor, kernel: Kernel
) -> None:
    async with running(supervisor) as codes:
        first = await kernel.process(0)
        first.end(2)
    assert codes == [2]
    assert len(kernel.started) == 1
