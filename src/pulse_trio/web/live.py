"""Live pages: server-sent events, from one reading of the database for all who look at the same page.

No task runs in the background: an app that is mounted in another one has nowhere to run it. Of the streams of one page, one
waits for the next tick and reads, and the others wait for it. When its client goes, another stream takes its place.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio.lowlevel import RunVar
from starlette.responses import Response

from ..errors import PulseTrioError
from .rendering import rendered
from .site import site_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from .site import Site

T = TypeVar("T")
PERIOD = 2.0
"""Seconds between two readings."""
SHARE, SLOWEST = 150.0, 10.0
"""After a reading the next one is due in `SHARE` times what it took, so that an open page takes at most a 150th of a
connection's time, but in `SLOWEST` seconds at the latest."""
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
                number, began = self._latest.number + 1, anyio.current_time()
                try:
                    self._latest = Reading(number, await read())
                except PulseTrioError as error:
                    self._latest = Reading(number, problem=str(error))
                now = anyio.current_time()
                self._due = now + max(self._period, min(SLOWEST, SHARE * (now - began)))
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

    @contextmanager
    def watching(self, key: str) -> Generator[Ticker]:
        """The ticker of one page and query, for as long as a stream is open."""
        tickers = self.tickers
        ticker = tickers.setdefault(key, Ticker(self._period))
        ticker.watchers += 1
        try:
            yield ticker
        finally:
            ticker.watchers -= 1
            if not ticker.watchers and tickers.get(key) is ticker:
                del tickers[key]


class Stream(Response):
    """The answer that sends a page's region again whenever it has changed. It ends when its client goes or the server stops.

    Not Starlette's own answer from a generator: nothing closes that generator when the client goes while it is sent to.
    """

    media_type = "text/event-stream"

    def __init__(self, site: Site, key: str, read: Callable[[], Awaitable[Any]], render: Callable[[Any], str]) -> None:
        full = site.live.full()
        super().__init__(
            status_code=503 if full else 200, headers={"cache-control": "no-store", "x-accel-buffering": "no"}
        )
        # Its length is not known.
        del self.headers["content-length"]
        self._full, self._live = full, site.live
        self._key, self._read, self._render = key, read, render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends events until the client goes."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._full:
            await send({"type": "http.response.body", "body": b""})
            return
        async with anyio.create_task_group() as group:

            async def until_gone() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(until_gone)
            with self._live.watching(self._key) as ticker:
                await self._send(ticker, send)

    async def _send(self, ticker: Ticker, send: Send) -> None:
        async def say(text: str) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        await say("retry: 3000\n\n")
        number, said = 0, None
        while True:
            reading: Reading | None = None
            with anyio.move_on_after(QUIET):
                reading = await ticker.newer(number, self._read)
            if reading is None:
                await say(": still here\n\n")
                continue
            number = reading.number
            event = ("problem", reading.problem) if reading.problem else ("shown", self._render(reading.record))
            if event != said:
                said = event
                # As JSON on one line: an event's data ends at a line's end.
                await say(f"event: {event[0]}\ndata: {json.dumps(event[1])}\n\n")


def stream(request: Request, template: str, read: Callable[[Request, Site], Awaitable[Any]]) -> Stream:
    """The stream of a page: the partial template, rendered for this user, whenever it has changed."""
    site = site_of(request)

    def render(record: Any) -> str:
        return rendered(request, template, record, live=True)

    return Stream(site, f"{request.url.path}?{request.url.query}", lambda: read(request, site), render)
