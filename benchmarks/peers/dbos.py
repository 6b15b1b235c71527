"""DBOS in the settings of its documentation: asynchronous workflows and steps on one event loop, PostgreSQL as its system
database. Run by durable.py: `dbos.py steps DSN WORKFLOWS STEPS`, `event DSN COUNT`, `children DSN COUNT`.

A program prints one JSON object: the seconds, and what they count.
"""

# It runs in an environment of its own, where the name is the package's and not this file's. Pyright takes it for this file.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedFunctionDecorator=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from dbos import DBOS, SetWorkflowID

AT_ONCE = 100
"""Workflows that run at a time, as the default concurrency of ours."""


@DBOS.step()
async def nothing(number: int) -> int:
    return number


@DBOS.workflow()
async def steps_of(count: int) -> int:
    total = 0
    for number in range(count):
        total += await nothing(number)
    return total


@DBOS.workflow()
async def child() -> None:
    return None


@DBOS.workflow()
async def parent(count: int) -> None:
    handles = [await DBOS.start_workflow_async(child) for _ in range(count)]
    for handle in handles:
        await handle.get_result()


@DBOS.workflow()
async def waiter() -> float:
    await DBOS.recv_async("approved", 60)
    return time.monotonic()


async def steps(workflows: int, count: int) -> dict[str, Any]:
    at_once = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with at_once:
            handle = await DBOS.start_workflow_async(steps_of, count)
            await handle.get_result()

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(workflows):
            group.create_task(one())
    return {"seconds": time.monotonic() - began, "steps": workflows * count}


async def event(count: int) -> dict[str, Any]:
    taken: list[float] = []
    for number in range(count):
        with SetWorkflowID(f"waiter-{number}"):
            handle = await DBOS.start_workflow_async(waiter)
        await asyncio.sleep(0.2)
        sent = time.monotonic()
        await DBOS.send_async(f"waiter-{number}", "yes", "approved")
        taken.append((await handle.get_result() - sent) * 1e3)
    return {"latencies": taken}


async def children(count: int) -> dict[str, Any]:
    began = time.monotonic()
    handle = await DBOS.start_workflow_async(parent, count)
    await handle.get_result()
    return {"seconds": time.monotonic() - began, "children": count}


def main() -> None:
    what, dsn, *numbers = sys.argv[1:]
    DBOS(config={"name": "bench", "system_database_url": dsn, "run_admin_server": False, "log_level": "ERROR"})
    DBOS.launch()
    work = {"steps": steps, "event": event, "children": children}[what]
    print(json.dumps(asyncio.run(work(*map(int, numbers)))), flush=True)
    DBOS.destroy()


if __name__ == "__main__":
    main()
