"""Driving psycopg's generators with Trio.

A psycopg generator says what it waits for (readable, writable, either) and is resumed with the result. There is no timer
here: a descriptor that another task closes wakes its waiters through `notify_closing`, and a deadline is the caller's cancel
scope.

A generator whose wait was interrupted by `Cancelled` has not been resumed yet: calling the same function again drives it on
from where it stopped. "Complete or cancel" in `cancelling` depends on that.

Trade-off: an operation that never blocks (most rounds of a COPY, a pipelined execute) does not yield to the scheduler
each time, which would triple its cost, but once in `LONGEST_TURN` seconds. It still notices cancellation each time, because
`TrioConnection.wait` checks before it starts.
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

PASSES_BEFORE_SLEEP = 8
"""How many scheduler passes (about 5 µs each) a lone operation checks its socket before it lets the loop sleep."""

# Shared by the threads of a process on purpose: the worst a race costs is one pause too many.
_last_pause = 0.0
_last_asked = -1
_futile = 0


async def drive(gen: PQGen[T], pgconn: PGconn, first: Ready | None = None) -> T:
    """Run a generator that works on an open connection to its end, and return its value.

    Cancellation leaves the generator where it was; to go on, call again with `first=Ready.NONE`: a generator that was
    interrupted while sending would take None for its socket's state.

    Raises:
        psycopg.OperationalError: the connection is closed, or another task closed it.
    """
    fileno = pgconn.socket
    try:
        wanted = gen.send(first)  # pyright: ignore[reportArgumentType] -- None begins a generator
        while True:
            if wanted == Wait.R:
                await _wait_for_answer(pgconn, fileno)
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


async def _wait_for_answer(pgconn: PGconn, fileno: int) -> None:
    """Wait until readable; if this descriptor was also the last one waited for, stay awake a moment first.

    A short query is answered in some 20 µs, and a process that went to sleep for it pays 40 µs and more to be woken: over one
    connection 9,500 round trips/s asleep, 17,500 awake, at the same CPU time each. With several connections in use there is
    other work to do, so no operation stays awake.
    """
    global _last_asked, _futile
    alone, _last_asked = _last_asked == fileno, fileno
    # Where it does not help (a worker's claims take milliseconds) it is tried again only occasionally.
    passes = PASSES_BEFORE_SLEEP if alone and (_futile < 4 or _futile % 16 == 0) else 0
    _futile += 1
    for _ in range(passes):
        if ready_now(pgconn.socket, Wait.R):
            _futile = 0
            return
        await trio.lowlevel.cancel_shielded_checkpoint()
        if _last_asked != fileno:
            break
    # Read again: another task may have closed the connection meanwhile, and its descriptor may have been reused.
    await trio.lowlevel.wait_readable(pgconn.socket)


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
    """The exception to propagate: the one that was raised, if any, else the cancellation."""
    raised = [ex for ex in group.exceptions if not isinstance(ex, trio.Cancelled)]
    return (raised or group.exceptions)[0]


def drain(pgconn: PGconn) -> PQGen[None]:
    """Read and drop the server's remaining answers to the current query, so that the connection is free again.

    Ends a COPY in either direction. Drive it after a cancel request; otherwise it may take as long as the query.
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
