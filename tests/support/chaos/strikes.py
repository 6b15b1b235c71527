"""Carrying out the planned faults. Each is recorded with when it really began and ended, and what it excuses: a pause of a
process, or a time in which nobody could rescue."""

from __future__ import annotations

import json
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
import trio

from pulse_trio import SyncClient
from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.postgres import TrioConnection
from pulse_trio.testing.faults.processes import children_of, send

from . import handlers, strangers
from .history import Fault, Window
from .schedule import LEASE, TO_NETWORKS

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

    from pulse_trio.testing.faults.proxy import Flow

    from .schedule import Planned
    from .stage import ClaimCursor, Stage


async def carry_out(stage: Stage, planned: Sequence[Planned], began: float) -> None:
    """Strikes each at its time; returns when the last fault is over."""
    async with trio.open_nursery() as nursery:
        for fault in planned:
            await trio.sleep(max(0.0, began + fault.at - time.monotonic()))
            nursery.start_soon(strike, stage, fault)


async def strike(stage: Stage, fault: Planned) -> None:
    """One fault from its beginning to its end."""
    slot = stage.slots[fault.worker] if fault.worker is not None else None
    pid: int | None = None
    begin = time.monotonic()
    detail = fault.how
    if slot is not None and slot.proxy is not None and fault.kind in TO_NETWORKS:
        await disturb(slot, fault)
    elif slot is not None and fault.kind == "blocked loop":
        detail = await block(stage, slot, fault.seconds)
    elif slot is not None:
        pid = await signal_process(stage, slot, fault)
        if pid is None:
            detail = "spared: it was just being replaced"
    else:
        detail = await strike_server(stage, fault) or detail
    end = time.monotonic()
    stage.faults.append(Fault(fault.kind, begin, end, slot.who if slot else None, pid, detail))
    stage.recorder.line("fault", kind=fault.kind, who=slot.who if slot else None, begin=begin, end=end, detail=detail)


PATIENCE = 6.0
"""Seconds in which a fault that needs a connection tries to get one."""


async def signal_process(stage: Stage, slot: ClaimCursor, fault: Planned) -> int | None:
    """Faults of a process, whose number it returns. One that is just being replaced is spared."""
    process = slot.process
    if process is None or process.returncode is not None:
        return None
    pid = process.pid
    if fault.kind in ("kill child", "stop child"):
        children = await trio.to_thread.run_sync(children_of, process.pid)
        if not children:
            return None
        pid = children[int(fault.how) % len(children)]
    match fault.kind:
        case "kill child":
            send(pid, signal.SIGKILL)
            await trio.sleep(fault.seconds)
        case "kill" | "kill supervisor":
            process.kill()
            await process.wait()
        case "terminate":
            process.send_signal(signal.SIGTERM)
            with trio.move_on_after(fault.seconds):
                await process.wait()
        case _:
            begin = time.monotonic()
            slot.stopped = pid
            send(pid, signal.SIGSTOP)
            try:
                if fault.seconds > LEASE:
                    await stop_in_a_job(stage, slot, pid)
                await trio.sleep(fault.seconds)
            finally:
                slot.stopped = None
                send(pid, signal.SIGCONT)
                stage.pauses.append(Window(begin, time.monotonic(), slot.who, pid))
    return pid


async def stop_in_a_job(stage: Stage, slot: ClaimCursor, pid: int) -> None:
    """Lets a stopped process go on, and stops it again, until a handler of it was running when it was stopped: its lease is
    what a stop of more than one is about."""
    with trio.move_on_after(PATIENCE):
        while not runs_a_job(stage.folder / f"worker-{slot.who}.jsonl", pid):
            send(pid, signal.SIGCONT)
            await trio.sleep(0.05)
            send(pid, signal.SIGSTOP)


def runs_a_job(log: Path, pid: int) -> bool:
    """Whether that process says of a job that it began, and has not said that it ended."""
    running: set[tuple[int, int]] = set()
    # Whole lines only: the process's siblings go on writing.
    for line in log.read_text().splitlines(keepends=True):
        said = json.loads(line) if line.endswith("\n") else {}
        if said.get("pid") == pid and said["event"] in ("started", "ended"):
            (running.add if said["event"] == "started" else running.discard)((said["job"], said["attempt"]))
    return bool(running)


async def block(stage: Stage, slot: ClaimCursor, seconds: float) -> str:
    """The next handler on Trio of that worker calls `time.sleep` instead of going on."""
    order = stage.folder / f"block-{slot.who}"
    draft = order.with_suffix(".draft")
    draft.write_text(str(seconds))
    draft.rename(order)
    with trio.move_on_after(PATIENCE):
        while order.exists():  # noqa: ASYNC110 -- another process takes it
            await trio.sleep(0.05)
    try:
        order.unlink()
    except FileNotFoundError:
        await trio.sleep(seconds)
        return ""
    return "no handler ran"


async def disturb(slot: ClaimCursor, fault: Planned) -> None:
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
        except (psycopg.OperationalError, DatabaseUnavailable, OSError) as error:
            if tried - begin > PATIENCE or time.monotonic() - tried > 0.5:
                return f"{fault.how} (ended early: {str(error).splitlines()[0][:60]})"
        await trio.sleep(0.2)


async def strike_server_once(stage: Stage, fault: Planned) -> str | None:
    match fault.kind:
        case "server restart fast" | "server restart immediate":
            with hindering(stage):
                if fault.kind.endswith("fast"):
                    await trio.to_thread.run_sync(stage.server.restart, fault.seconds)
                else:
                    await trio.to_thread.run_sync(stage.server.crash)
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
        case "hostile producer":
            return await trio.to_thread.run_sync(strangers.fuzz, stage.server.dsn, int(fault.how), fault.seconds)
        case "forged notifications":
            return await trio.to_thread.run_sync(strangers.notify, stage.server.dsn, int(fault.how), fault.seconds)
        case "advisory locks":
            return await trio.to_thread.run_sync(strangers.hold, stage.server.dsn, fault.seconds)
        case "planted rows":
            with hindering(stage):  # the table is locked for a moment
                return await trio.to_thread.run_sync(strangers.plant, stage.server.dsn, int(fault.how))
        case "rolling deploy":
            return await stage.deployed(fault.seconds)
        case "poison pill":
            await trio.to_thread.run_sync(enqueue_poison, stage.server.dsn)
            await trio.sleep(fault.seconds)
        case "deaf handler":
            await trio.to_thread.run_sync(enqueue_deaf, stage.server.dsn)
            await trio.sleep(fault.seconds)
        case _:
            return await terminate(stage, fault.how)
    return None


def enqueue_deaf(dsn: str) -> None:
    """A job whose handler does not end. Without a token: no producer answers for it."""
    SyncClient(dsn).enqueue(handlers.deaf, "", 30.0)


def enqueue_poison(dsn: str) -> None:
    """A job that kills each process that runs it. Without a token, as above."""
    SyncClient(dsn).enqueue(handlers.poison, "")


@contextmanager
def hindering(stage: Stage, who: str | None = None) -> Generator[None]:
    """In the block `who` cannot be reached (None: no client can reach the server)."""
    begin = time.monotonic()
    try:
        yield
    finally:
        stage.hindrances.append(Window(begin, time.monotonic(), who))


async def locker(stage: Stage) -> TrioConnection[tuple[int, ...]]:
    return await TrioConnection.connect(stage.server.dsn, application_name="chaos locks")


async def lock_row(stage: Stage, seconds: float) -> str:
    """Another transaction holds one job's row, a running one's if there is any."""
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
            while len(taken) < 300:
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
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = %s",
        f"pulse-trio {name}",
    )
    return f"{name}: {len(rows)}"
