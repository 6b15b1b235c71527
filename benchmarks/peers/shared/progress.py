"""What every Python peer says while it works (the protocol of ../../processes.py), and its four commands.

A peer's program is `NAME.py setup DSN | fill DSN COUNT | work DSN | produce DSN COUNT | enqueue DSN COUNT`, run by the peer's
own Python:

- setup: its schema;
- fill: COUNT no-op jobs by its documented bulk way;
- work: one worker process until standard input ends;
- produce: COUNT jobs, one each 50 ms, saying when each commit had returned;
- enqueue: COUNT jobs, one a transaction, by eight tasks at once over eight connections, saying how many a second.

A job's payload is its `mark`: -1 for a no-op, else the number of a timed job. The environment's SHAPE names another shape than
the no-op for `fill`, `work` and `enqueue`, where a peer has it (../../shapes.py): "keys", "limit" or "unique".
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PULSE = 0.01
EVERY = 0.05
BATCH = 1000
PRODUCERS = 8
SHAPE = os.environ.get("SHAPE", "")


def say(**message: Any) -> None:
    """One line of the protocol."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class Counter:
    """Counts handler calls; keeps the starts of timed jobs."""

    def __init__(self) -> None:
        self.ran = 0
        self.last = 0.0
        self.starts: list[tuple[int, float]] = []

    def count(self, mark: int = -1) -> None:
        """One handler was called."""
        self.ran += 1
        self.last = time.monotonic()
        if self.ran == 1:
            say(first=self.last)
        if mark >= 0:
            self.starts.append((mark, self.last))

    async def report(self) -> None:
        """Reports progress until cancelled."""
        said = 0
        while True:
            await asyncio.sleep(PULSE)
            if self.ran != said:
                said = self.ran
                say(ran=said, at=self.last)
            if self.starts:
                starts, self.starts = self.starts, []
                say(starts=starts)


async def end_of_input() -> None:
    """Returns when whoever started us closes our standard input."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


async def until_end_of_input(counter: Counter) -> None:
    """Reports progress until the input ends."""
    reporting = asyncio.create_task(counter.report())
    say(ready=time.monotonic())
    await end_of_input()
    reporting.cancel()


async def produce(count: int, enqueue: Callable[[int], Awaitable[object]]) -> None:
    """One job each 50 ms; says (mark, time at which the enqueue had returned)."""
    committed: list[tuple[int, float]] = []
    due = time.monotonic()
    for mark in range(count):
        due += EVERY
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        await enqueue(mark)
        committed.append((mark, time.monotonic()))
    say(committed=committed)


async def enqueue_at_once(count: int, ones: list[Callable[[int], Awaitable[object]]]) -> None:
    """`count` jobs by as many tasks as `ones` has enqueuing functions, each over a connection of its own; says the rate."""
    each = count // len(ones)

    async def enqueue_some(place: int) -> None:
        for number in range(1, each + 1):
            await ones[place](place * each + number)

    await asyncio.gather(*[one(-place - 1) for place, one in enumerate(ones)])  # prepares statements
    began = time.monotonic()
    await asyncio.gather(*map(enqueue_some, range(len(ones))))
    say(rate=each * len(ones) / (time.monotonic() - began))


def command() -> tuple[str, str, int]:
    """(what, DSN, count) of the command line."""
    what, dsn, *count = sys.argv[1:]
    return what, dsn, int(count[0]) if count else 0
