"""A signal that one task waits for."""

from __future__ import annotations

import trio
from trio.testing import Sequencer, wait_all_tasks_blocked

from pulse_trio.worker.signal import Signal


async def test_a_signal_given_before_is_not_lost() -> None:
    signal = Signal()
    signal.give()
    await signal.wait()


async def test_a_signal_given_twice_is_given_once() -> None:
    signal = Signal()
    signal.give()
    signal.give()
    await signal.wait()
    with trio.move_on_after(0) as scope:
        await signal.wait()
    assert scope.cancelled_caught


async def test_a_waiter_is_woken() -> None:
    signal = Signal()
    order = Sequencer()

    async def wait() -> None:
        async with order(0):
            pass
        await signal.wait()
        async with order(2):
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        async with order(1):
            await wait_all_tasks_blocked()
            signal.give()


async def test_a_cancelled_wait_consumes_nothing() -> None:
    signal = Signal()
    with trio.CancelScope() as scope:
        scope.cancel()
        await signal.wait()
    signal.give()
    with trio.CancelScope() as scope:
        scope.cancel()
        await signal.wait()
    assert scope.cancelled_caught
    with trio.fail_after(5):
        await signal.wait()


async def test_waiting_is_a_checkpoint_even_if_given() -> None:
    signal = Signal()
    signal.give()
    with trio.testing.assert_checkpoints():
        await signal.wait()
