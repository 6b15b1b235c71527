"""What a reader does next with a page's handlers: enqueues each from an asyncio program, and waits for its result.

Run in a page's folder with the arguments DSN MODULE..., in a fork (forking.py) of a process that has imported this. Prints a
line for each handler: its kind, and its result or how it ended. Arguments are made up from the annotations.
"""

from __future__ import annotations

import asyncio
import enum
import gc
import importlib
import inspect
import os
import signal
import sys
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import msgspec

from pulse_trio import Handlers, JobError, open_client
from pulse_trio.cli import main as command_line

SIMPLE: dict[object, Any] = {
    int: 1,
    float: 0.01,
    str: "https://127.0.0.1:1/x",
    bool: True,
    bytes: b"x",
    type(None): None,
    Any: 1,
    object: 1,
    datetime: datetime(2026, 1, 1, tzinfo=UTC),
    date: date(2026, 1, 1),
    timedelta: timedelta(seconds=1),
    Decimal: Decimal(1),
}


def made_up(kind: Any) -> Any:
    """A value of a type."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return made_up(of[0])
    if origin is typing.Literal:
        return of[0]
    if origin in (list, tuple, set):
        return origin([made_up(of[0])])
    if origin is dict or kind is dict:
        return {"a": made_up(of[1]) if of else 1}
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
        return kind(**{f.name: made_up(f.type) for f in msgspec.structs.fields(kind) if f.required})
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
        return kind(**{name: made_up(hints[name]) for name in needed})  # type: ignore[operator]
    if kind.__name__ == "UUID":
        return uuid4()
    raise TypeError(f"no value of {kind!r} can be made up")


class Worker:
    """`pulse-trio run MODULE`: a fork of this process, made before an event loop runs here or a module of the page's is there,
    so that it imports its handlers itself. It saves the start of a Python."""

    def __init__(self, module: str, dsn: str) -> None:
        waits, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._go)
            if os.read(waits, 1) == b"":
                os._exit(0)
            sys.argv = ["pulse-trio", "run", module, "--dsn", dsn, "--grace", "1", "--cleanup", "1"]
            command_line()
        os.close(waits)

    def start(self) -> None:
        os.write(self._go, b"!")

    def end(self) -> None:
        os.kill(self.pid, signal.SIGTERM)
        os.waitpid(self.pid, 0)


async def main(dsn: str, workers: dict[str, Worker]) -> None:
    found: dict[str, Handlers] = {}
    for module in workers:
        for value in vars(importlib.import_module(module)).values():
            if isinstance(value, Handlers):
                found[module] = value
    async with open_client(dsn) as client:
        refs: list[tuple[str, str, Any]] = []
        for module, handlers in found.items():
            for handler in handlers:
                hints = typing.get_type_hints(inspect.unwrap(handler.function))
                needed = {
                    p.name: made_up(hints.get(p.name, Any))
                    for p in handler.signature.parameters
                    if p.default is p.empty
                }
                refs.append((module, handler.kind, await client.enqueue(handler, **needed)))
        for module in found:
            # What waits for the answer of a server that is not there fails; what sleeps is ended by its cancellation below.
            workers[module].start()
            try:
                for of, kind, ref in refs:
                    if of == module:
                        sys.stdout.write(f"{kind} {await ended(client, ref)}\n")
            finally:
                await asyncio.to_thread(workers[module].end)


async def ended(client: Any, ref: Any) -> str:
    try:
        async with asyncio.timeout(5):
            return f"returned {await ref.result()!r}"
    except JobError as error:
        return f"ended: {type(error).__name__}"
    except TimeoutError:
        await client.cancel(ref.id)
    try:
        return f"returned {await ref.result(timeout=20)!r}"
    except JobError as error:
        return f"was cancelled: {type(error).__name__}"
    except TimeoutError:
        # A retry or a schedule far away: it was cancelled while it waited, or waits for its time.
        return f"is {(await client.job(ref.id)).state}"


def run(arguments: list[str]) -> None:
    dsn, *modules = arguments
    gc.freeze()
    asyncio.run(main(dsn, {module: Worker(module, dsn) for module in modules}))
