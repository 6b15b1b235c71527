"""Where the handlers of real workers tell what happens to them, and wait to be let go."""

from __future__ import annotations

import json
import shutil
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

WITHIN = 40.0
APP = Path(__file__).with_name("sink_app.py")


@dataclass(frozen=True)
class Told:
    """One event of one attempt; `at` is the machine's monotonic clock in the worker."""

    event: str
    job: int
    attempt: int
    pid: int
    at: float
    reason: str | None = None


class Sink:
    """Collects events; `let_go(...)` lets attempts end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Told] = []
        self._may_go: Callable[[Told], bool] = lambda _: False
        self._news = trio.Event()

    def let_go(self, which: Callable[[Told], bool] = lambda _: True) -> None:
        """From now on attempts may end whose start event `which` is true for."""
        self._may_go = which
        self._tell()

    def all(self, event: str, *, attempt: int | None = None) -> list[Told]:
        """The events of a name so far, of one attempt if given."""
        return [e for e in self.events if e.event == event and attempt in (None, e.attempt)]

    async def until(self, event: str, *, attempt: int | None = None, count: int = 1) -> list[Told]:
        """Waits until `count` such events have come, and gives them."""
        found: list[Told] = []
        with trio.move_on_after(WITHIN):
            while len(found := self.all(event, attempt=attempt)) < count:
                await self._news.wait()
            return found
        raise AssertionError(f"{len(found)} of {count} x {event!r} (attempt {attempt}); heard: {self.events[-20:]}")

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream, trio.open_nursery() as nursery:
            rest = b""
            try:
                async for chunk in stream:
                    *lines, rest = (rest + bytes(chunk)).split(b"\n")
                    for told in (Told(**json.loads(line)) for line in lines):
                        self.events.append(told)
                        if told.event == "start":
                            nursery.start_soon(self._answer, stream, told)
                    self._tell()
            except trio.BrokenResourceError:
                pass  # the worker was killed: what it told stays told
            nursery.cancel_scope.cancel()

    async def _answer(self, stream: trio.SocketStream, start: Told) -> None:
        while not self._may_go(start):
            await self._news.wait()
        try:
            await stream.send_all(b"go")
        except trio.BrokenResourceError:
            pass  # it did not wait for the answer, or was killed

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()


@asynccontextmanager
async def open_sink(folder: Path) -> AsyncGenerator[Sink]:
    """A sink for the workers started in `folder`, which gets the fault tests' `app.py`; `SINK` must be its path."""
    shutil.copy(APP, folder / "app.py")
    # Relative to the workers' folder: a Unix socket's path is short.
    path = folder / "sink"
    socket = trio.socket.socket(trio.socket.AF_UNIX)
    await socket.bind(str(path))
    socket.listen(1000)
    sink = Sink(path)
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, sink.serve, [trio.SocketListener(socket)])
        yield sink
        nursery.cancel_scope.cancel()
