"""The tests' PostgreSQL: the one you name, a container, or the embedded one. Never none."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from docker.errors import DockerException
from psycopg.conninfo import conninfo_to_dict

from pulse_trio.embedded import embedded_server

if TYPE_CHECKING:
    from collections.abc import Generator

IMAGE = "postgres:18-alpine"
PROBE_LIMIT = 3  # seconds a Docker engine has to answer


@dataclass(frozen=True)
class TestServer:
    """A running PostgreSQL; tests make their databases on it through `dsn`, which names a superuser."""

    __test__ = False

    dsn: str
    origin: str


def docker_answers() -> bool:
    """Whether a Docker engine answers at `DOCKER_HOST`, or the usual socket; downloads nothing, and never hangs."""
    address = urlsplit(os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock")
    try:
        with connect(address) as engine:
            engine.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return b" 200 " in engine.recv(100)
    except OSError:
        return False


def connect(address: SplitResult) -> socket.socket:
    """A connection to a Docker engine, whose answers may take `PROBE_LIMIT` seconds."""
    if address.scheme != "unix":
        return socket.create_connection((address.hostname or "localhost", address.port or 2375), timeout=PROBE_LIMIT)
    engine = socket.socket(socket.AF_UNIX)
    engine.settimeout(PROBE_LIMIT)
    try:
        engine.connect(address.path)
    except OSError:
        engine.close()
        raise
    return engine


@contextmanager
def container() -> Generator[TestServer]:
    """A PostgreSQL of the image `IMAGE`, which is downloaded if need be."""
    # Imported here: it costs a third of a second, and most runs have no engine.
    from testcontainers.community.postgres import PostgresContainer

    with PostgresContainer(IMAGE, driver=None).with_command("postgres -c max_connections=200") as postgres:
        yield TestServer(postgres.get_connection_url(), f"container {IMAGE}")


@contextmanager
def embedded() -> Generator[TestServer]:
    """The embedded PostgreSQL in a folder of its own, with a short name (socket paths are limited)."""
    folder = Path(tempfile.mkdtemp(prefix="pulse-trio-tests-"))
    folder.chmod(0o711)  # root in a container runs PostgreSQL as `nobody`, who has to come through
    try:
        # No autovacuum: its snapshots keep dead rows from being pruned at moments no test can foresee.
        with embedded_server(folder / "pg", settings={"autovacuum": "off"}) as server:
            yield TestServer(server.dsn, f"embedded {server.version}")
    finally:
        shutil.rmtree(folder)


@contextmanager
def open_server() -> Generator[TestServer]:
    """`PULSE_TRIO_TEST_DSN` if set, else a container where a Docker engine answers, else the embedded PostgreSQL."""
    named = os.environ.get("PULSE_TRIO_TEST_DSN")
    if named:
        yield TestServer(named, f"PULSE_TRIO_TEST_DSN (database {conninfo_to_dict(named).get('dbname', 'default')})")
        return
    if docker_answers():
        with ExitStack() as stack:
            try:
                server = stack.enter_context(container())
            except (DockerException, OSError) as error:
                remark = f" (no container: {error})"  # an engine without the image, and without a way to get it
            else:
                yield server
                return
    else:
        remark = ""
    with embedded() as server:
        yield TestServer(server.dsn, server.origin + remark)
