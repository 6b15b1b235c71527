"""Absurd in the settings of its documentation: the synchronous worker with threads, or the asynchronous one on one event loop.
Both have one connection. Run by durable.py: `absurd.py setup DSN`, `steps DSN WORKFLOWS STEPS [async]`, `event DSN COUNT`.

A program prints one JSON object: the seconds, and what they count.
"""

# It runs in an environment of its own. Pyright cannot see the packages.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

import psycopg
from absurd_sdk import Absurd, AsyncAbsurd
from absurdctl import BUNDLED_SCHEMA_SQL

AT_ONCE = 100
"""Tasks that run at a time, as the default concurrency of ours."""


def setup(dsn: str) -> dict[str, Any]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(BUNDLED_SCHEMA_SQL)
        connection.execute("SELECT absurd.create_queue('default')")
    return {}


def steps(dsn: str, workflows: str, count: str, kind: str = "threads") -> dict[str, Any]:
    total, each = int(workflows), int(count)
    client = Absurd(dsn)
    for _ in range(total):
        client.spawn("steps", {"count": each}, queue="default")
    began = time.monotonic()
    if kind == "async":
        asyncio.run(_work_async(dsn, total))
    else:
        _work_in_threads(dsn, total)
    return {"seconds": time.monotonic() - began, "steps": total * each}


def _work_in_threads(dsn: str, total: int) -> None:
    app, left = Absurd(dsn), [total]

    @app.register_task("steps")
    def task(params: Any, ctx: Any) -> None:
        for number in range(params["count"]):
            ctx.step(f"nothing-{number}", lambda number=number: number)
        left[0] -= 1
        if not left[0]:
            app.stop_worker()

    app.start_worker(concurrency=AT_ONCE)


async def _work_async(dsn: str, total: int) -> None:
    app, left = AsyncAbsurd(dsn), [total]

    @app.register_task("steps")
    async def task(params: Any, ctx: Any) -> None:
        async def nothing() -> int:
            return 1

        for number in range(params["count"]):
            await ctx.step(f"nothing-{number}", nothing)
        left[0] -= 1
        if not left[0]:
            app.stop_worker()

    await app.start_worker(concurrency=AT_ONCE)


def event(dsn: str, count: str) -> dict[str, Any]:
    app, client = Absurd(dsn), Absurd(dsn)
    got: dict[int, float] = {}

    @app.register_task("waiter")
    def task(params: Any, ctx: Any) -> None:
        ctx.await_event(f"approved-{params['number']}")
        got[params["number"]] = time.monotonic()

    client._registry.update(app._registry)
    worker = threading.Thread(target=app.start_worker, kwargs={"concurrency": AT_ONCE}, daemon=True)
    worker.start()
    taken: list[float] = []
    for number in range(int(count)):
        client.spawn("waiter", {"number": number})
        time.sleep(0.6)
        sent = time.monotonic()
        client.emit_event(f"approved-{number}", {"yes": True})
        while number not in got:
            time.sleep(0.001)
        taken.append((got[number] - sent) * 1e3)
    app.stop_worker()
    return {"latencies": taken}


def main() -> None:
    what, *given = sys.argv[1:]
    print(json.dumps({"setup": setup, "steps": steps, "event": event}[what](*given)), flush=True)


if __name__ == "__main__":
    main()
