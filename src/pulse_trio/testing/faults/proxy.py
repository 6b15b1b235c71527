"""A network between a client and PostgreSQL that can be broken: a proxy on loopback, run by the test itself.

Each direction has a `Flow` of its own:

- `forward()`: bytes pass (what a flow does at first);
- `delay(seconds)`: bytes pass that much later, in order, without limiting the throughput;
- `limit(rate)`: so many bytes pass in a second, of all connections together; who sends more is kept waiting;
- `hold()`: bytes wait in the proxy until the flow forwards again, as in a partition that heals;
- `swallow()`: bytes and ends of stream vanish. What has lost bytes stays lost: its connections remain half-open,
  silent, even when the flow forwards again (a NAT that forgot them); new ones are fine then.

`Proxy.cut()` resets connections: both ends of them, or only the end towards the server or the client, the other end
then being half-open. While `refuse()` is in force new connections are reset as they come. `Proxy.cut_after(...)`
resets one connection when exactly so many of its bytes have passed in one direction.
"""

from __future__ import annotations

import math
import socket
import struct
from contextlib import asynccontextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING, Literal

import trio
from psycopg.conninfo import conninfo_to_dict, make_conninfo

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

CHUNK = 16384
OPENING = 600
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
Direction = Literal["to_server", "to_client"]
LOST = (trio.BrokenResourceError, trio.ClosedResourceError)


class Mode(Enum):
    FORWARD = auto()
    HOLD = auto()
    SWALLOW = auto()


class Flow:
    """One direction of all connections, and what happens to its bytes."""

    def __init__(self) -> None:
        self.mode = Mode.FORWARD
        self.latency = 0.0
        self._rate = math.inf
        self._free_at = -math.inf
        self._changed = trio.Event()
        self._arrivals = trio.lowlevel.ParkingLot()

    def forward(self) -> None:
        """Let bytes pass, those that were held first."""
        self._set(Mode.FORWARD, 0.0)

    def delay(self, seconds: float) -> None:
        """Let bytes pass `seconds` after they came."""
        self._set(Mode.FORWARD, seconds)

    def limit(self, rate: float) -> None:
        """Let `rate` bytes pass in a second."""
        self._rate = rate

    async def admitted(self, count: int) -> None:
        """Wait until so many bytes may pass, after those that came before."""
        if self._rate < math.inf:
            self._free_at = max(self._free_at, trio.current_time()) + count / self._rate
            await trio.sleep_until(self._free_at)

    def hold(self) -> None:
        """Keep bytes back until the flow forwards again."""
        self._set(Mode.HOLD, 0.0)

    def swallow(self) -> None:
        """Let bytes and ends of stream vanish, without a reset."""
        self._set(Mode.SWALLOW, 0.0)

    async def arrival(self) -> None:
        """Wait for the next bytes that come to the proxy in this direction, whatever becomes of them."""
        await self._arrivals.park()

    def arrived(self) -> None:
        """Wakes those that wait for the next bytes."""
        self._arrivals.unpark_all()

    async def released(self) -> None:
        """Wait while bytes are held."""
        while self.mode is Mode.HOLD:
            await self._changed.wait()

    def _set(self, mode: Mode, latency: float) -> None:
        self.mode, self.latency = mode, latency
        self._changed.set()
        self._changed = trio.Event()


class Connection:
    """One client's connection and its twin to the server."""

    def __init__(self, client: trio.SocketStream, server: trio.SocketStream) -> None:
        self.client = client
        self.server = server
        self.opening = b""
        """What the client sent first: the start-up message, which says the session's application_name."""
        self.cut: Cut | None = None

    def reset(self) -> None:
        reset(self.client)
        reset(self.server)


class Cut:
    """What passes of one connection from some moment on: `passed` counts its bytes, and after `limit` in `direction` the
    connection is reset. `done` says that it was."""

    def __init__(self, of: str, direction: Direction, limit: float) -> None:
        self.of = of.encode()
        self.direction: Direction = direction
        self.limit = limit
        self.passed: dict[Direction, int] = {"to_server": 0, "to_client": 0}
        self.done = False

    def admit(self, direction: Direction, chunk: bytes) -> bytes:
        """The part of `chunk` that may still pass."""
        if direction == self.direction and self.passed[direction] + len(chunk) >= self.limit:
            chunk = chunk[: int(self.limit) - self.passed[direction]]
            self.done = True
        self.passed[direction] += len(chunk)
        return chunk


class Proxy:
    """The proxy's controls. `to_server` and `to_client` are the two directions."""

    def __init__(self, dsn: str, upstream: str | tuple[str, int]) -> None:
        self.dsn = dsn
        self.to_server = Flow()
        self.to_client = Flow()
        self._upstream = upstream
        self._connections: set[Connection] = set()
        self._refusing = False
        self._armed: Cut | None = None
        self._count_changed = trio.Event()

    @property
    def connections(self) -> int:
        """How many connections are open through the proxy, half-open ones included."""
        return len(self._connections)

    async def connected(self, count: int) -> None:
        """Wait until exactly `count` connections are open through the proxy."""
        while self.connections != count:
            await self._count_changed.wait()

    def forward(self) -> None:
        """Both directions forward, and new connections are accepted."""
        self._refusing = False
        self.to_server.forward()
        self.to_client.forward()

    def hold(self) -> None:
        """Both directions hold: a partition, which `forward` heals."""
        self.to_server.hold()
        self.to_client.hold()

    def swallow(self) -> None:
        """Both directions swallow: a partition that no connection survives, and that no end is told of."""
        self.to_server.swallow()
        self.to_client.swallow()

    def delay(self, seconds: float) -> None:
        """Each direction takes `seconds` longer."""
        self.to_server.delay(seconds)
        self.to_client.delay(seconds)

    def limit(self, rate: float) -> None:
        """Each direction carries `rate` bytes a second; what is on its way keeps its sender waiting."""
        self.to_server.limit(rate)
        self.to_client.limit(rate)

    def refuse(self) -> None:
        """Reset new connections from now on; `forward` ends it."""
        self._refusing = True

    def cut(self, *, client: bool = True, server: bool = True) -> None:
        """Reset all open connections: their client ends, their server ends, or both."""
        for connection in self._connections:
            if client:
                reset(connection.client)
            if server:
                reset(connection.server)

    def cut_after(self, direction: Direction, count: float, *, of: str) -> Cut:
        """Reset the first connection of the application `of` that sends anything from now on, when exactly `count` of its
        bytes have passed in that direction. With `math.inf` its bytes are counted only."""
        self._armed = Cut(of, direction, count)
        return self._armed

    def passing(self, connection: Connection, direction: Direction, chunk: bytes) -> bytes:
        """The part of `chunk` that may pass."""
        if direction == "to_server":
            armed = self._armed
            if armed is not None and armed.of in connection.opening:
                connection.cut, self._armed = armed, None
            if len(connection.opening) < OPENING:
                connection.opening += chunk
        return connection.cut.admit(direction, chunk) if connection.cut is not None and chunk else chunk

    async def serve(self, client: trio.SocketStream) -> None:
        """Carry one connection until both ends of it are done."""
        async with client:
            if self._refusing:
                reset(client)
                return
            try:
                server = await self._connect()
            except OSError:
                reset(client)  # what a network does when the server is not there
                return
            async with server:
                await self._carry(Connection(client, server))

    async def _connect(self) -> trio.SocketStream:
        if isinstance(self._upstream, str):
            return await trio.open_unix_socket(self._upstream)
        return await trio.open_tcp_stream(*self._upstream)

    async def _carry(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._tell()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(relay, connection, "to_server", self)
                nursery.start_soon(relay, connection, "to_client", self)
        finally:
            self._connections.discard(connection)
            self._tell()

    def _tell(self) -> None:
        self._count_changed.set()
        self._count_changed = trio.Event()


async def relay(connection: Connection, direction: Direction, proxy: Proxy) -> None:
    """Carry one direction of one connection to its end."""
    flow = proxy.to_server if direction == "to_server" else proxy.to_client
    source = connection.client if direction == "to_server" else connection.server
    send, receive = trio.open_memory_channel[tuple[float, bytes]](math.inf)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(deliver, receive, connection, direction, proxy)
        async with send:
            await collect(source, send, flow)


async def collect(source: trio.SocketStream, send: trio.MemorySendChannel[tuple[float, bytes]], flow: Flow) -> None:
    """Queue what comes from `source`, with the time it came; an empty chunk is the end of the stream."""
    while True:
        try:
            chunk = bytes(await source.receive_some(CHUNK))
        except trio.ClosedResourceError:
            return  # cut by the test at this end: the other one is to hear nothing of it
        except trio.BrokenResourceError:
            chunk = b""
        flow.arrived()
        await flow.admitted(len(chunk))
        send.send_nowait((trio.current_time(), chunk))
        if not chunk:
            return


async def deliver(
    receive: trio.MemoryReceiveChannel[tuple[float, bytes]], connection: Connection, direction: Direction, proxy: Proxy
) -> None:
    """Send on what was queued, as the flow's mode and the connection's cut say; after the first loss, nothing more."""
    flow = proxy.to_server if direction == "to_server" else proxy.to_client
    sink = connection.server if direction == "to_server" else connection.client
    lost = False
    async for came, chunk in receive:
        await trio.sleep_until(came + flow.latency)
        await flow.released()
        lost = lost or flow.mode is Mode.SWALLOW
        if lost:
            continue
        passing = proxy.passing(connection, direction, chunk)
        try:
            if passing:
                await sink.send_all(passing)
            elif not chunk:
                await sink.send_eof()
        except LOST:
            lost = True
        if connection.cut is not None and connection.cut.done:
            connection.reset()


def reset(stream: trio.SocketStream) -> None:
    """Close with a reset (on a Unix socket, which has none: at once)."""
    if stream.socket.fileno() == -1:
        return
    if stream.socket.family != socket.AF_UNIX:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    stream.socket.close()


def upstream_of(dsn: str) -> str | tuple[str, int]:
    """Where `dsn` points to: a Unix socket's path, or a host and a port."""
    fields = conninfo_to_dict(dsn)
    host, port = str(fields.get("host") or "localhost"), int(fields.get("port") or 5432)
    return f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port)


@asynccontextmanager
async def open_proxy(dsn: str) -> AsyncGenerator[Proxy]:
    """A proxy in front of the server of `dsn`; `proxy.dsn` is the same database through it."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    proxy = Proxy(make_conninfo(dsn, host="127.0.0.1", port=port), upstream_of(dsn))
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, proxy.serve, listeners)
        yield proxy
        nursery.cancel_scope.cancel()
