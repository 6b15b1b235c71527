"""Live pages: one reading of the database a tick for all who look, and streams that end with their clients."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.web import create_app
from pulse_trio.web.live import PERIOD, Live, Reading

if TYPE_CHECKING:
    from trio.testing import MockClock

    from support.stores import Window


LIVE = ("queues", "workers", "schedules", "batches", "doctor")


class Source:
    """What is read, and how often it was."""

    def __init__(self) -> None:
        self.reads = 0
        self.takes = 0.0
        self.fails = False

    async def read(self) -> int:
        self.reads += 1
        await trio.sleep(self.takes)
        if self.fails:
            raise DatabaseUnavailable("away")
        return self.reads


async def take(live: Live, source: Source, count: int, into: list[Reading]) -> None:
    with live.watching("/") as ticker:
        while len(into) < count:
            into.append(await ticker.newer(into[-1].number if into else 0, source.read))


async def test_all_who_look_at_a_page_share_one_reading_a_tick(autojump_clock: MockClock) -> None:
    live, source = Live(), Source()
    seen: list[list[Reading]] = [[], [], []]

    async with trio.open_nursery() as nursery:
        for each in seen:
            nursery.start_soon(take, live, source, 4, each)

    assert source.reads == 4
    assert [[r.record for r in each] for each in seen] == [[1, 2, 3, 4]] * 3
    assert trio.current_time() >= 3 * PERIOD
    assert live.tickers == {}


async def test_when_the_stream_that_reads_goes_another_reads(autojump_clock: MockClock) -> None:
    live, source = Live(), Source()
    source.takes = 1.0
    seen: list[Reading] = []

    async with trio.open_nursery() as nursery:
        gone = trio.CancelScope()

        async def leaves() -> None:
            with gone:
                await take(live, source, 9, [])

        nursery.start_soon(leaves)
        await trio.sleep(0.1)
        nursery.start_soon(take, live, source, 2, seen)
        await trio.sleep(0.1)
        gone.cancel()

    assert [r.record for r in seen] == [2, 3]


async def test_a_reading_that_fails_is_told_once_a_tick_to_all(autojump_clock: MockClock) -> None:
    live, source = Live(), Source()
    source.fails = True
    seen: list[list[Reading]] = [[], []]

    async with trio.open_nursery() as nursery:
        for each in seen:
            nursery.start_soon(take, live, source, 2, each)

    assert source.reads == 2
    assert [[r.problem for r in each] for each in seen] == [["away", "away"]] * 2


async def test_an_expensive_reading_serves_all_within_its_age(autojump_clock: MockClock) -> None:
    live, source = Live(), Source()

    first = [await live.recent("rates", 10.0, source.read) for _ in range(3)]
    await trio.sleep(10.1)

    assert first == [1, 1, 1]
    assert await live.recent("rates", 10.0, source.read) == 2


async def events_of(app: Any, path: str, until: int) -> list[tuple[str, str]]:
    """The first events of a stream; then its client goes."""
    sends: trio.MemorySendChannel[dict[str, Any]]
    receives: trio.MemoryReceiveChannel[dict[str, Any]]
    sends, receives = trio.open_memory_channel(100)
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": [(b"host", b"127.0.0.1")],
        "client": ("127.0.0.1", 40000), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    gone = trio.Event()
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:
            await gone.wait()
            return {"type": "http.disconnect"}
        asked = True
        return {"type": "http.request", "body": b"", "more_body": False}

    events: list[tuple[str, str]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app, scope, receive, sends.send)
        text = ""
        async for message in receives:
            if message["type"] == "http.response.start":
                assert message["status"] == 200
                continue
            text += message.get("body", b"").decode()
            *whole, text = text.split("\n\n")
            for event in whole:
                fields = dict(line.split(": ", 1) for line in event.splitlines() if line[:1] != ":")
                if "event" in fields:
                    events.append((fields["event"], json.loads(fields["data"])))
            if len(events) >= until:
                break
        gone.set()
    return events


@pytest.mark.parametrize("path", ["/live/", *(f"/live/{each}" for each in LIVE)])
async def test_a_stream_sends_the_region_of_its_page_and_ends_with_its_client(dsn: str, path: str) -> None:
    app = create_app(dsn)
    with trio.fail_after(30):
        events = await events_of(app, path, 1)
    await app.state.site.database.aclose()

    assert [kind for kind, _ in events] == ["shown"]
    assert "<html" not in events[0][1]
    assert "<table" in events[0][1]
    assert app.state.site.live.tickers == {}


async def test_a_stream_says_that_the_database_is_away() -> None:
    with trio.fail_after(30):
        events = await events_of(create_app("postgresql://127.0.0.1:1/none"), "/live/queues", 1)

    assert [kind for kind, _ in events] == ["problem"]


async def test_a_stream_shows_a_queue_that_is_new(dsn: str, window: Window) -> None:
    app = create_app(dsn)
    window.enqueue("mail")
    with trio.fail_after(30):
        ((_, shown),) = await events_of(app, "/live/queues", 1)
    await app.state.site.database.aclose()

    assert 'data-key="mail"' in shown
