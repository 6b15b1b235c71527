"""Driving psycopg's generators with Trio.

A psycopg generator says what it waits for (readable, writable, either) and is resumed with what happened. There is no
timer here: a descriptor that another task closes wakes its waiters through `notify_closing`, and a deadline is the
caller's cancel scope.

A generator interrupted by `Cancelled` has only been told nothing yet: it can be driven on from where it stopped by
calling the same function again, which is what "complete or cancel" in `connection.py` rests on.

Trade-off: an operation that never blocks (most rounds of a COPY, a pipelined execute) does not yield to the scheduler
each time, which would triple its cost, but once in `LONGEST_TURN` seconds. It still notices cancellation each time,
since `TrioConnection.wait` asks before it starts.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import trio
from psycopg import errors as e
from psycopg import generators, pq
from psycopg.waiting import Ready, Wait

from pulse_trio.postgres.contract import ready_now

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from psycopg.abc import PQGen, PQGenConn
    from psycopg.pq.abc import PGconn

T = TypeVar("T")

LONGEST_TURN = 0.005
"""Seconds a task may go on without yielding while its socket never makes it wait."""

# Shared by the threads of a process on purpose: the worst a race costs is one pause too many.
_last_pause = 0.0


async def drive(gen: PQGen[T], fileno: int) -> T:
    """Run a generator that works on one descriptor to its end, and return its value.

    Cancellation leaves the generator where it was; call again to go on.

    Raises:
        psycopg.OperationalError: the descriptor was closed by another task.
    """
    try:
        wanted = next(gen)
        while True:
            if wanted == Wait.R:
                await trio.lowlevel.wait_readable(fileno)
                wanted = gen.send(Ready.R)
            else:
                # A socket asked for writing is nearly always writable, and asking costs a tenth of a scheduler pass.
                ready = ready_now(fileno, wanted) or await _wait_writing(fileno, wanted)
                await _pause_if_long()
                wanted = gen.send(ready)
    except StopIteration as stop:
        await _pause_if_long()
        return stop.value
    except (OSError, trio.ClosedResourceError) as ex:
        raise e.OperationalError("connection socket closed while it was in use") from ex


async def drive_connecting(gen: PQGenConn[T]) -> T:
    """Like `drive`, for the generators that connect or send a cancel request: their descriptor may change at each
    step.
    """
    try:
        fileno, wanted = next(gen)
        while True:
            if wanted == Wait.R:
                await trio.lowlevel.wait_readable(fileno)
            else:
                await trio.lowlevel.wait_writable(fileno)
            fileno, wanted = gen.send(Ready.R if wanted == Wait.R else Ready.W)
    except StopIteration as stop:
        return stop.value
    except OSError as ex:
        raise e.OperationalError(f"the connection attempt lost its socket: {ex}") from ex


async def _pause_if_long() -> None:
    global _last_pause
    if perf_counter() - _last_pause >= LONGEST_TURN:
        await trio.lowlevel.cancel_shielded_checkpoint()
        _last_pause = perf_counter()


async def _wait_writing(fileno: int, wanted: int) -> int:
    if wanted == Wait.W:
        await trio.lowlevel.wait_writable(fileno)
        return Ready.W
    return await _wait_either(fileno)


async def _wait_either(fileno: int) -> int:
    """Wait in both directions: a server that stopped reading because we did not read would otherwise never be
    writable.
    """
    ready = 0

    async def watch(wait: Callable[[int], Awaitable[None]], flag: int) -> None:
        nonlocal ready
        await wait(fileno)
        ready |= flag
        nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, trio.lowlevel.wait_readable, Ready.R)
            nursery.start_soon(watch, trio.lowlevel.wait_writable, Ready.W)
    except BaseExceptionGroup as group:
        raise _one_of(group) from None
    return ready


def _one_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception to go on with: what was raised, if anything was, else the cancellation."""
    raised = [ex for ex in group.exceptions if not isinstance(ex, trio.Cancelled)]
    return (raised or group.exceptions)[0]


def drain(pgconn: PGconn) -> PQGen[None]:
    """Read and drop whatever the server still has to say about the current query, so that the connection is free again.

    Ends a COPY in either direction. To be driven after a cancel request, or it may take as long as the query does.
    """
    while (result := (yield from generators.fetch(pgconn))) is not None:
        try:
            if result.status == pq.ExecStatus.COPY_OUT:
                while isinstance((yield from generators.copy_from(pgconn)), memoryview):
                    pass
            elif result.status == pq.ExecStatus.COPY_IN:
                yield from generators.copy_end(pgconn, b"cancelled")
        except e.DatabaseError:
            # The COPY's own error, expected here. A lost connection raises again from the next fetch.
            continue
