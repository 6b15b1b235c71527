"""The running server: starts it, logs its output, restarts it after a crash, and stops it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from typing import IO, TYPE_CHECKING

from .cluster import environment, explain
from .places import PORT, Places

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .identity import Identity


STOP_FAST = 20.0  # seconds for a fast shutdown, which writes a checkpoint; the immediate one after it loses nothing
STOP_IMMEDIATE = 10.0  # seconds an immediate shutdown may take before SIGKILL
READY = b"database system is ready to accept connections"
# The settings that decide where users find the server; users may not change them.
FIXED_SETTINGS = frozenset(
    {"data_directory", "logging_collector", "port", "unix_socket_directories", "unix_socket_permissions"}
)


class Server:
    """Starts the server, writes its log, restarts it after a crash, and stops it on request."""

    def __init__(self, places: Places, identity: Identity, settings: Mapping[str, str], log: IO[bytes]) -> None:
        fixed = {
            "unix_socket_directories": str(places.sockets),
            "unix_socket_permissions": "0700",
            "port": str(PORT),
            "logging_collector": "off",
        }
        options = [f"-c{name}={value}" for name, value in ({"listen_addresses": ""} | dict(settings) | fixed).items()]
        self._command = [str(places.program / "bin" / "postgres"), "-D", str(places.data), *options]
        self._places = places
        self._identity = identity
        self._log = log
        self._lock = threading.Lock()  # held to start a server and to stop it, so that none starts after the stop
        self._stopping = False
        self._gone = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> bool:
        """Start the server and read its log until it accepts connections; False if it was stopped instead.

        Raises:
            StartError: it ended by itself.
        """
        with self._lock:
            if self._stopping:
                return False
            process = self._process = self._launch()
        said: list[bytes] = []
        for line in self._lines():
            said.append(line)
            if READY in line:
                return True
        process.wait()
        if self._stopping:
            return False
        raise explain(b"".join(said).decode(errors="replace"), "The start of PostgreSQL", self._places)

    def run(self) -> None:
        """Write the server's log until it has stopped for good; restarts a crashed server.

        Raises:
            StartError: the start after a crash failed.
        """
        try:
            while True:
                for _ in self._lines():
                    pass
                assert self._process is not None  # noqa: S101 - start() came before
                if self._process.wait() == 0 or self._stopping:
                    return
                self._write(b"pulse-trio: the server crashed and is started again\n")
                if not self.start():
                    return
        finally:
            self._gone.set()

    def stop(self) -> None:
        """Stop the server: fast, then immediately, then by force. Returns when `run` has seen its end."""
        with self._lock:
            self._stopping = True
        for number, patience in ((signal.SIGINT, STOP_FAST), (signal.SIGQUIT, STOP_IMMEDIATE), (signal.SIGKILL, 2.0)):
            self.signal(number)
            if self._gone.wait(patience):
                return
        # A program that the server started (for example COPY TO PROGRAM) still holds its stderr; it does not matter here.
        os._exit(1)

    def signal(self, number: signal.Signals) -> None:
        """Send the server a signal, if it still runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def _launch(self) -> subprocess.Popen[bytes]:
        identity = self._identity.subprocess_options()
        return subprocess.Popen(  # noqa: S603 - our own binaries
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            env=environment(),
            user=identity.user,
            group=identity.group,
            extra_groups=identity.extra_groups,
        )

    def _lines(self) -> Iterator[bytes]:
        assert self._process is not None  # noqa: S101 - only called once it is started
        assert self._process.stderr is not None  # noqa: S101 - it is a pipe
        for line in self._process.stderr:
            self._write(line)
            yield line

    def _write(self, line: bytes) -> None:
        # On a full disk the log loses lines, but the keeper must not die.
        with contextlib.suppress(OSError):
            self._log.write(line)
            self._log.flush()
