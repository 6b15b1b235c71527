"""Workers inside the test, on the real PostgreSQL: their events are at hand, and their handlers wait for the test's own."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from pulse_trio import Worker
from support.stage import TOLD

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from pulse_trio import Handlers
    from pulse_trio.observe import Instrument

E = TypeVar("E")
WITHIN = 40.0  # seconds a step may take on a loaded machine


class Heard:
    """An instrument that keeps every event, and lets a test wait for one."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._news = trio.Event()

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        return dict.fromkeys(TOLD, self._hear)

    def _hear(self, event: Any) -> None:
        self.all.append(event)
        self._news.set()
        self._news = trio.Event()

    def of(self, kind: type[E]) -> list[E]:
        """The events of one type so far."""
        return [event for event in self.all if isinstance(event, kind)]

    async def until(self, kind: type[E], /, **fields: Any) -> E:
        """Waits until there is an event of that type with those fields, and gives the first."""
        with trio.move_on_after(WITHIN):
            while True:
                for event in self.of(kind):
                    if all(getattr(event, name) == value for name, value in fields.items()):
                        return event
                await self._news.wait()
        raise AssertionError(f"no {kind.__name__} {fields}; heard: {self.all[-20:]}")


@asynccontextmanager
async def working(
    handlers: Handlers, dsn: str, instrument: Instrument | None = None, /, **settings: Any
) -> AsyncGenerator[Heard]:
    """A worker that runs while the block does, and what it tells."""
    others = [] if instrument is None else [instrument]
    heard = Heard()
    async with trio.open_nursery() as nursery:
        worker = Worker(handlers, dsn, instruments=[heard, *others], **settings)
        await nursery.start(worker.run)
        yield heard
        worker.stop()
