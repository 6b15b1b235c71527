"""A network between a process and PostgreSQL, in a process of its own: far, slow, or both.

`link.py DSN DELAY RATE` carries bytes on loopback until its standard input ends: each direction takes DELAY seconds longer and
lets RATE bytes a second through. It says its own DSN as a line of JSON. A delay of 0 shows what the link itself costs.
It delays bytes, not packets; namespaces.py, where root may make network namespaces, has TCP's own round trips too.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

import namespaces
from pulse_trio.testing.faults.proxy import open_proxy

if TYPE_CHECKING:
    from collections.abc import Generator


class Link:
    """A running link: its DSN and its process."""

    def __init__(self, dsn: str, pid: int) -> None:
        self.dsn = dsn
        self.pid = pid


@contextmanager
def open_link(dsn: str, *, delay: float = 0.0, rate: float = math.inf) -> Generator[Link]:
    """A link to `dsn`, for as long as the block runs: `delay` in seconds each way, `rate` in bytes a second each way."""
    with _started([sys.executable, __file__, dsn, str(delay), str(rate)]) as link:
        yield link


@contextmanager
def open_namespaces(dsn: str, *, delay: float) -> Generator[Link]:
    """The same between two network namespaces (namespaces.py): only root can."""
    with _started([sys.executable, namespaces.__file__, dsn, str(delay)]) as link:
        yield link


@contextmanager
def _started(command: list[str]) -> Generator[Link]:
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Link(json.loads(process.stdout.readline())["dsn"], process.pid)
        finally:
            process.communicate("")


@contextmanager
def near(dsn: str) -> Generator[Link]:
    """No link at all."""
    yield Link(dsn, 0)


async def carry(dsn: str, delay: float, rate: float) -> None:
    async with open_proxy(dsn) as proxy:
        if delay:
            proxy.delay(delay)
        if rate < math.inf:
            proxy.limit(rate)
        sys.stdout.write(json.dumps({"dsn": proxy.dsn}) + "\n")
        sys.stdout.flush()
        await trio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    trio.run(carry, sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
