"""Carrying out the planned faults. Each is recorded with when it really began and ended, and what it excuses: a pause of a
process, or a time in which nobody could rescue."""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psycopg
import trio

from pulse_trio.postgres import TrioConnection

from .history import Fault, Window

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from support.proxy import Flow

    from .schedule import Planned
    from .stage import Slot, Stage

AGAIN = 5.0
"""Seconds after a hindrance in which watchdogs may still be on their way back: the cap of the backoff between reconnections."""


async def carry_out(stage: Stage, planned: Sequence[Planned], began: float) -> None:
    """Strikes each at its time; returns when the last fault is over."""
    async with trio.open_nursery() as nursery:
        for fault in planned:
            await trio.sleep(max(0.0, began + fault.at - time.monotonic()))
            nursery.start_soon(strike, stage, fault)


async def strike(stage: Stage, fault: Planned) -> None:
    """One fault from its beginning to its end."""
    slot = stage.slots[fault.worker] if fault.worker is not None else None
    pid = slot.process.pid if slot is not None and slot.process is not None else None
    begin = time.monotonic()
    detail = fault.how
    if slot is not None and slot.proxy is not None and fault.kind in NETWORK:
        await disturb(slot, fault)
    elif slot is not None:
        await signal_process(stage, slot, fault)
    else:
        detail = await strike_server(stage, fault) or detail
    end = time.monotonic()
    stage.faults.append(Fault(fault.kind, begin, end, slot.who if slot else None, pid, detail))
    stage.recorder.line("fault", kind=fault.kind, who=slot.who if slot else None, begin=begin, end=end, detail=detail)


PATIENCE = 6.0
"""Seconds in which a fault that needs a connection tries to get one."""
NETWORK = ("swallow", "hold", "latency", "replies lost", "reset")


async def signal_process(stage: Stage, slot: Slot, fault: Planned) -> None:
    """Faults of a process. One that is just being replaced is spared."""
    process = slot.process
    if process is None or process.returncode is not None:
        return
    match fault.kind:
        case "kill":
            process.kill()
            await process.wait()
        case "terminate":
            process.send_signal(signal.SIGTERM)
            with trio.move_on_after(fault.seconds):
                await process.wait()
        case _:
            begin = time.monotonic()
            slot.stopped = True
            process.send_signal(signal.SIGSTOP)
            try:
                await trio.sleep(fault.seconds)
            finally:
                slot.stopped = False
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
                stage.pauses.append(Window(begin, time.monotonic(), slot.who))


async def disturb(slot: Slot, fault: Planned) -> None:
    """Faults of the network before one worker."""
    proxy = slot.proxy
    assert proxy is not None
    flows: list[Flow] = [proxy.to_server, proxy.to_client]
    if fault.how in ("to_server", "to_client"):
        flows = [getattr(proxy, fault.how)]
    try:
        match fault.kind:
            case "reset":
                proxy.cut()
            case "latency":
                proxy.delay(float(fault.how))
            case "replies lost":
                # What was sent is done; the answer never comes, and then the connection breaks.
                proxy.to_client.swallow()
            case "swallow":
                for flow in flows:
                    flow.swallow()
            case _:
                for flow in flows:
                    flow.hold()
        await trio.sleep(fault.seconds)
    finally:
        proxy.forward()
    if fault.kind == "replies lost":
        proxy.cut()


async def strike_server(stage: Stage, fault: Planned) -> str | None:
    """Faults of the server, or in it; returns what to say of it. Another fault may be in the way of this one, or end it."""
    begin = time.monotonic()
    while True:
        tried = time.monotonic()
        try:
            return await strike_server_once(stage, fault)
        except (psycopg.OperationalError, OSError) as error:
            if tried - begin > PATIENCE or time.monotonic() - tried > 0.5:
                return f"{fault.how} (ended early: {str(error).splitlines()[0][:60]})"
        await trio.sleep(0.2)


async def strike_server_once(stage: Stage, fault: Planned) -> str | None:
    match fault.kind:
        case "server restart fast" | "server restart immediate":
            with hindering(stage):
                if fault.kind.endswith("fast"):
                    await trio.to_thread.run_sync(stage.server.restart_fast, fault.seconds)
                else:
                    await trio.to_thread.run_sync(stage.server.restart_immediately)
        case "table lock":
            # Whoever waits for it waits behind it: from the moment it is asked for.
            with hindering(stage):
                async with await locker(stage) as connection, connection.transaction():
                    await connection.execute("LOCK TABLE pulse.job IN ACCESS EXCLUSIVE MODE")
                    await trio.sleep(fault.seconds)
        case "row lock":
            return await lock_row(stage, fault.seconds)
        case "connections full":
            return await fill(stage, fault.seconds)
        case "listener terminated":
            return await terminate(stage, "listener")
        case _:
            return await terminate(stage, fault.how)
    return None


@contextmanager
def hindering(stage: Stage, who: str | None = None) -> Generator[None]:
    """In the block, and shortly after it, `who` cannot be reached (None: nobody can)."""
    begin = time.monotonic()
    try:
        yield
    finally:
        stage.hindrances.append(Window(begin, time.monotonic() + AGAIN, who))


async def locker(stage: Stage) -> TrioConnection[tuple[int, ...]]:
    return await TrioConnection.connect(stage.server.dsn, application_name="chaos locks")


async def lock_row(stage: Stage, seconds: float) -> str:
    """Somebody else's transaction holds one job's row, a running one's if there is any."""
    async with await locker(stage) as connection, connection.transaction():
        cursor = await connection.execute(
            "SELECT id FROM pulse.job ORDER BY state = 2 DESC, lease_until DESC LIMIT 1 FOR UPDATE SKIP LOCKED"
        )
        row = await cursor.fetchone()
        if row is None:
            return "no job to lock"
        with hindering(stage, f"job {row[0]}"):
            await trio.sleep(seconds)
    return f"job {row[0]}"


async def fill(stage: Stage, seconds: float) -> str:
    """Takes every connection that the server has left."""
    taken: list[psycopg.Connection[tuple[object, ...]]] = []

    def take() -> None:
        try:
            while len(taken) < 200:
                taken.append(psycopg.connect(stage.server.dsn, application_name="chaos fills"))
        except psycopg.OperationalError:
            pass

    try:
        await trio.to_thread.run_sync(take)
        end = trio.current_time() + seconds
        while trio.current_time() < end:
            await trio.sleep(0.2)
            await trio.to_thread.run_sync(take)  # what others gave back
    finally:
        for connection in taken:
            connection.close()
    return f"{len(taken)} taken"


async def terminate(stage: Stage, name: str) -> str:
    """Ends every worker's connection of one kind."""
    rows = await stage.ask(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", f"pulse-trio {name}"
    )
    return f"{name}: {len(rows)}"
