"""The worker's end of the line to its supervisor, and what a process leaves to its successor."""

from __future__ import annotations

import json
import os
import signal
import socket
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from pulse_trio.jobs import Claim, Outcome
from pulse_trio.worker.processes import channel
from pulse_trio.worker.processes.channel import Channel
from pulse_trio.worker.processes.handover import (
    ADDRESS_VARIABLE,
    QUIET_VARIABLE,
    SIGNALS_VARIABLE,
    STUCK_VARIABLE,
    Address,
    decode_outcome,
    encode_outcome,
    inherited_address,
    inherited_outcomes,
    inherited_quiet,
    inherited_signals,
    leave_to_successor,
)

if TYPE_CHECKING:
    from collections.abc import Generator

LONG = "x" * 900_000


def stuck(job_id: int) -> Outcome:
    claim = Claim(job_id, 3, 20, 1, 0, "2026-11-21", "default", "swallows", f'"{LONG}"', LONG, 77)
    return Outcome(claim, "timeout", delay=2.5, error="HandlerStuck: " + "é" * 100_000)


@pytest.fixture
def ends() -> Generator[tuple[socket.socket, socket.socket]]:
    """The supervisor's and the worker's, with little room between them."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    with ours, theirs:
        yield ours, theirs


def test_what_is_left_to_report_has_the_fence_and_no_arguments() -> None:
    text = encode_outcome(stuck(5))
    left = decode_outcome(text)
    assert (left.claim.id, left.claim.attempt, left.claim.session) == (5, 3, 77)
    assert (left.claim.kind, left.kind, left.delay) == ("swallows", "timeout", 2.5)
    assert left.error is not None
    assert left.error.startswith("HandlerStuck: ")
    assert len(text) < 40_000


def test_a_successor_finds_what_many_large_jobs_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (STUCK_VARIABLE, QUIET_VARIABLE, ADDRESS_VARIABLE, SIGNALS_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    address = Address("dbname=x", "pulse", ends=True)
    signals, told = os.pipe()
    os.write(told, bytes([signal.SIGTERM]))
    leave_to_successor([stuck(n) for n in range(100)], address, quiet=True, signals=signals)
    assert os.get_inheritable(int(os.environ[STUCK_VARIABLE]))
    assert [outcome.claim.id for outcome in inherited_outcomes()] == list(range(100))
    assert inherited_outcomes() == []
    assert (inherited_address(), inherited_address()) == (address, None)
    assert (inherited_quiet(), inherited_quiet()) == (True, False)
    assert (inherited_signals(), inherited_signals()) == ({signal.SIGTERM}, set())
    os.close(told)


async def test_what_finds_no_room_in_the_line_is_sent_later_and_whole(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    line = Channel(theirs)
    for session in range(5000):
        line.tell_session(session)
    came, lacking = b"", 0
    ours.setblocking(False)
    while came.count(b"\n") < 5000:
        try:
            came += ours.recv(65536)
        except BlockingIOError:
            lacking += 1
            line.tell_session(-1)  # as a sign of life does
    assert lacking
    told = [json.loads(text)["session"] for text in came.splitlines()]
    assert [session for session in told if session >= 0] == list(range(5000))


async def test_the_alarm_clock_is_set_with_the_first_session(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It killed a worker whose resource took two leases to open, again and again."""
    alarms: list[float] = []
    # pytest may use the real one.
    monkeypatch.setattr(channel, "_set_alarm", alarms.append)
    _, theirs = ends
    line = Channel(theirs)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(line.run, lambda: None, lease=lambda: 30.0))
        await trio.testing.wait_all_tasks_blocked()
        assert alarms == []
        line.tell_session(1)
        assert alarms == [60.0]
        nursery.cancel_scope.cancel()


async def test_what_is_said_last_waits_for_a_supervisor_that_reads_slowly(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    line = Channel(theirs)

    def read() -> list[int]:
        with ours.makefile("rb") as lines:
            return [decode_outcome(json.loads(next(lines))["stuck"]).claim.id for _ in range(50)]

    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def supervisor() -> None:
            with trio.fail_after(20):
                assert await trio.to_thread.run_sync(read, abandon_on_cancel=True) == list(range(50))

        await trio.testing.wait_all_tasks_blocked()
        line.tell_stuck([stuck(n) for n in range(50)])


async def test_a_supervisor_that_is_gone_keeps_nobody(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    line = Channel(theirs)
    ours.close()
    line.tell_session(1)
    line.tell_stuck([stuck(1)])


async def test_a_shorter_lease_is_told_at_once_and_a_longer_one_with_the_next_sign_of_life(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    line = Channel(theirs)
    held = 30.0
    told = ours.makefile("rb")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(line.run, lambda: None, lease=lambda: held))
        await trio.testing.wait_all_tasks_blocked()
        line.tell_lease(5.0)
        line.tell_lease(20.0)  # a shorter one is held
        held = 20.0
        with trio.fail_after(20):
            messages = [json.loads(await trio.to_thread.run_sync(told.readline)) for _ in range(4)]
        nursery.cancel_scope.cancel()
    assert messages == [{"lease": 30.0}, {"alive": True}, {"lease": 5.0}, {"lease": 20.0}]
