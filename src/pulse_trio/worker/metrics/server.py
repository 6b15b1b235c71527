"""The HTTP server: Hypercorn on Trio, in the worker's own nursery tree.

It serves three pages to probes and scrapers, and is made for hostile clients all the same: it reads no body, headers are
bounded (16 KiB), and a client that sends a request too slowly is cut off. Whatever goes wrong in it harms no job: it is logged,
and the server starts again.
"""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import trio

from ...errors import ConfigurationError
from ...settings import address_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from .figures import Figures

    Scope = Mapping[str, Any]
    Receive = Callable[[], Awaitable[Mapping[str, Any]]]
    Send = Callable[[Mapping[str, Any]], Awaitable[None]]

logger = logging.getLogger("pulse_trio")
HOW_TO_INSTALL = "pip install 'pulse-trio[metrics]'"
_HEADERS = 16 * 1024
_PATIENCE = 5
"""Seconds that a client has to send its request, and until an idle connection is closed."""
_UNREAD = 10_000
"""Milliseconds until the kernel ends a connection whose client takes nothing of what was sent. Hypercorn sends in a shielded
scope: without this limit such a client would keep the worker from ending."""
_AGAIN = 1.0
_PLAIN = "text/plain; charset=utf-8"
_FAILED = "the server of %s failed; it starts again. No job is concerned"


class Source(Protocol):
    """What is served."""

    def figures(self) -> Figures:
        """All figures at this moment, not to be changed."""
        ...

    def unhealthy(self) -> str | None:
        """Why the process is to be replaced; None if it is well."""
        ...

    def unready(self) -> str | None:
        """Why the process does not take jobs now; None if it does."""
        ...


class App:
    """The ASGI application."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._failed = False
        # Of its own: jobs in threads may have taken all of Trio's.
        self._limiter = trio.CapacityLimiter(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Hypercorn answers 500 where this raises, and says nothing of it: we log the first time."""
        try:
            await self._serve(scope, receive, send)
        except Exception:
            if not self._failed:
                self._failed = True
                logger.exception(
                    "a page of the worker's HTTP server failed; later failures are not logged. No job is concerned"
                )
            raise

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for _ in range(2):
                await send({"type": f"{(await receive())['type']}.complete"})
        elif scope["type"] == "http":
            status, body, headers = await self._answer(scope)
            size = [(b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": [*headers, *size]})
            await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
        else:
            await send({"type": "websocket.close"})

    async def _answer(self, scope: Scope) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
        path = scope["path"]
        if path not in ("/metrics", "/healthz", "/readyz"):
            return _text(404, "not found: /metrics, /healthz and /readyz are here")
        if scope["method"] not in ("GET", "HEAD"):
            status, body, headers = _text(405, "GET only")
            return status, body, [*headers, (b"allow", b"GET, HEAD")]
        if path == "/metrics":
            return await self._metrics(_accepted(scope))
        problem = self._source.unhealthy() if path == "/healthz" else self._source.unready()
        return _text(200, "ok") if problem is None else _text(503, problem)

    async def _metrics(self, accept: str) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
        from .exposition import render

        # In a thread: the text of thousands of buckets takes milliseconds, in which the loop goes on.
        body, content_type = await trio.to_thread.run_sync(
            render, self._source.figures(), accept, limiter=self._limiter
        )
        return 200, body, [(b"content-type", content_type.encode())]


def _accepted(scope: Scope) -> str:
    return ", ".join(value.decode("latin-1") for name, value in scope["headers"] if name.lower() == b"accept")


def _text(status: int, text: str) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
    return status, " ".join(text.split()).encode() + b"\n", [(b"content-type", _PLAIN.encode())]


def check_installed() -> None:
    """Raises `ConfigurationError` if the libraries of the extra are missing."""
    try:
        for name in ("hypercorn.trio", "prometheus_client"):
            import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"The setting 'http' needs libraries that are not installed ({error}). Install them: {HOW_TO_INSTALL}"
        ) from None


def listening(address: str, setting: str = "the setting 'http'") -> socket.socket:
    """A socket that listens at HOST:PORT. Raises `ConfigurationError`, which names the setting that gave the address."""
    host, port = address_of(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # Closed when another program is executed in place of this one, or started by it.
        listener = socket.create_server(where[:2], family=family)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"Cannot listen at {address} ({setting}): {_why(error)}") from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Linux hands it on to the connections that are accepted.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD)
    return listener


def shown_address(listener: socket.socket) -> str:
    """Where it listens, as HOST:PORT."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _why(error: OSError | UnicodeError) -> str:
    match error.errno if isinstance(error, OSError) else None:
        case errno.EADDRINUSE:
            return "another process uses this port. Choose another, or end that process."
        case errno.EACCES:
            return "this user may not use this port. Choose one above 1023."
        case errno.EADDRNOTAVAIL:
            return "this machine does not have that address."
        case _:
            return f"{error}."


@asynccontextmanager
async def serving(address: str, source: Source) -> AsyncGenerator[trio.Nursery]:
    """Serves for as long as the block runs; yields a nursery for what runs as long. Raises `ConfigurationError` where that is
    impossible.

    An exception of the block is raised as it is, not in a group."""
    check_installed()
    with await trio.to_thread.run_sync(listening, address) as listener:
        logger.info("serving /metrics, /healthz and /readyz at http://%s", shown_address(listener))
        async with beside() as nursery:
            nursery.start_soon(keep_serving, listener, App(source))
            yield nursery


@asynccontextmanager
async def beside() -> AsyncGenerator[trio.Nursery]:
    """A nursery whose tasks end with the block. An exception of the block is raised as it is, not in a group."""
    raised: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            except Exception as error:
                raised = error
            nursery.cancel_scope.cancel()
    finally:
        # Before whatever the tasks raise as they are cancelled.
        if raised is not None:
            raise raised


async def keep_serving(listener: socket.socket, app: Any, *, what: str = "/metrics", streams: bool = False) -> None:
    """Serves an ASGI app on that socket until it is cancelled; a server that fails starts again.

    With `streams` an answer may go on for ever while its client says nothing. A request still has to come in time."""
    from hypercorn.config import Config, Sockets

    hypercorn: Any = import_module("hypercorn.trio").serve

    class Ours(Config):
        def create_sockets(self) -> Sockets:
            # Hypercorn's own would pass the port on to every program that is executed in place of this one: a worker that
            # replaces itself could not listen again.
            return Sockets([], [ours], [])

    while True:
        config = Ours()
        config.errorlog = None
        config.include_server_header = False
        config.h11_max_incomplete_size = config.h2_max_header_list_size = _HEADERS
        config.keep_alive_timeout = _PATIENCE
        config.read_timeout = None if streams else _PATIENCE
        config.graceful_timeout = 0
        try:
            # The server closes it when it ends.
            with listener.dup() as ours:
                await hypercorn(app, config, mode="asgi")
        except Exception:
            logger.exception(_FAILED, what)
        except BaseExceptionGroup as group:  # noqa: ASYNC103 -- the program's part is raised
            failed, programs = group.split(Exception)
            if failed is not None:
                logger.error(_FAILED, what, exc_info=failed)
            if programs is not None:
                raise programs from None  # noqa: ASYNC104 -- the program's part of it
        await trio.sleep(_AGAIN)
