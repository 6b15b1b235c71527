"""Live pages: server-sent events, from one reading of the database for all who look at the same page.

No task runs in the background: an app that is mounted in another one has nowhere to run it. Of the streams of one page, one
waits for the next tick and reads, and the others wait for it. When its client goes, another stream takes its place.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio.lowlevel import RunVar
from starlette.responses import StreamingResponse

from ..errors import PulseTrioError
from .rendering import rendered
from .site import site_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from starlette.requests import Request

    from .site import Site

T = TypeVar("T")
PERIOD = 2.0
"""Seconds between two readings."""
QUIET = 15.0
"""Seconds after which a stream says that it is still there: proxies end connections that say nothing."""
STREAMS = 200
"""The most streams at a time."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read at one tick: the record, or what was wrong."""

    number: int
    record: Any = None
    problem: str | None = None


class Ticker:
    """The readings of one page with one query."""

    def __init__(self, period: float) -> None:
        self._period = period
        self._turn = anyio.Lock()
        self._latest = Reading(0)
        self._due = 0.0
        self.watchers = 0

    async def newer(self, than: int, read: Callable[[], Awaitable[Any]]) -> Reading:
        """The latest reading after number `than`. One caller reads; the others get what it has read."""
        async with self._turn:
            if self._latest.number <= than:
                await anyio.sleep_until(self._due)
                number = self._latest.number + 1
                try:
                    self._latest = Reading(number, await read())
                except PulseTrioError as error:
                    self._latest = Reading(number, problem=str(error))
                self._due = anyio.current_time() + self._period
        return self._latest


class Recent:
    """A reading that serves all who ask within its age."""

    def __init__(self) -> None:
        self._turn = anyio.Lock()
        self._record: Any = None
        self._until = float("-inf")

    async def get(self, age: float, read: Callable[[], Awaitable[Any]]) -> Any:
        """The last reading if it is not older than `age` seconds; else reads, once for all who wait."""
        async with self._turn:
            if anyio.current_time() >= self._until:
                self._record = await read()
                self._until = anyio.current_time() + age
            return self._record


class Live:
    """The tickers of one app that have watchers, by page and query."""

    def __init__(self, period: float = PERIOD) -> None:
        self._period = period
        self._tickers: RunVar[dict[str, Ticker]] = RunVar(f"pulse-trio web live {id(self)}")
        self._recent: RunVar[dict[str, Recent]] = RunVar(f"pulse-trio web recent {id(self)}")

    @property
    def tickers(self) -> dict[str, Ticker]:
        """Those of this event loop."""
        found = self._tickers.get(None)
        if found is None:
            found = dict[str, Ticker]()
            self._tickers.set(found)
        return found

    async def recent(self, name: str, age: float, read: Callable[[], Awaitable[T]]) -> T:
        """What `read` returned at most `age` seconds ago: for readings that cost more, by one name for the whole app."""
        found = self._recent.get(None)
        if found is None:
            found = dict[str, Recent]()
            self._recent.set(found)
        return await found.setdefault(name, Recent()).get(age, read)

    def full(self) -> bool:
        """Whether as many streams are open as there may be."""
        return sum(ticker.watchers for ticker in self.tickers.values()) >= STREAMS

    async def readings(self, key: str, read: Callable[[], Awaitable[Any]]) -> AsyncGenerator[Reading | None]:
        """One reading a tick; None where nothing came for `QUIET` seconds."""
        tickers = self.tickers
        ticker = tickers.setdefault(key, Ticker(self._period))
        ticker.watchers += 1
        number = 0
        try:
            while True:
                found: Reading | None = None
                with anyio.move_on_after(QUIET):
                    found = await ticker.newer(number, read)
                    number = found.number
                yield found
        finally:
            ticker.watchers -= 1
            if not ticker.watchers and tickers.get(key) is ticker:
                del tickers[key]


def stream(request: Request, template: str, read: Callable[[Request, Site], Awaitable[Any]]) -> StreamingResponse:
    """The stream of a page: the partial template, rendered for this user, whenever it has changed."""
    site = site_of(request)
    key = f"{request.url.path}?{request.url.query}"

    async def events() -> AsyncGenerator[bytes]:
        said: tuple[str, str] | None = None
        yield b"retry: 3000\n\n"
        async for reading in site.live.readings(key, lambda: read(request, site)):
            if reading is None:
                yield b": still here\n\n"
                continue
            if reading.problem is None:
                now = ("shown", rendered(request, template, reading.record, live=True))
            else:
                now = ("problem", reading.problem)
            if now != said:
                said = now
                # As JSON on one line: an event's data ends at a line's end.
                yield f"event: {now[0]}\ndata: {json.dumps(now[1])}\n\n".encode()

    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(events(), 503 if site.live.full() else 200, headers, media_type="text/event-stream")
