"""The tests' PostgreSQL: the one you name, programs that you name, a container, or the embedded one. Never none."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from psycopg.conninfo import conninfo_to_dict

from pulse_trio.embedded import embedded_server
from support.in_memory import in_memory

if TYPE_CHECKING:
    from collections.abc import Generator

IMAGE = "postgres:18-alpine"
QUICK = {
    # Its snapshots keep dead rows from being pruned at moments no test can foresee.
    "autovacuum": "off",
    # A test loses nothing: PostgreSQL may crash in it, the machine under it may not. Each database that a test drops costs a
    # checkpoint, whose fsyncs took longer than the test.
    "fsync": "off",
}
"""Settings of the tests' servers."""
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

    with PostgresContainer(IMAGE, driver=None).with_command("postgres -c max_connections=200 -c fsync=off") as postgres:
        yield TestServer(postgres.get_connection_url(), f"container {IMAGE}")


@contextmanager
def embedded() -> Generator[TestServer]:
    """The embedded PostgreSQL in a folder of its own, with a short name (socket paths are limited)."""
    folder = Path(tempfile.mkdtemp(prefix="pulse-trio-tests-", dir=in_memory()))
    folder.chmod(0o711)  # root in a container runs PostgreSQL as `nobody`, who has to come through
    try:
        with embedded_server(folder / "pg", settings=QUICK) as server:
            yield TestServer(server.dsn, f"embedded {server.version}")
    finally:
        shutil.rmtree(folder)


@contextmanager
def of_programs(programs: Path) -> Generator[TestServer]:
    """A PostgreSQL of any version, made and started with the programs in a folder, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="pulse-trio-tests-"))
    folder.chmod(0o711)
    data, log, nobody = folder / "pg", folder / "pg" / "log", None
    try:
        data.mkdir(mode=0o700)
        if os.geteuid() == 0:  # PostgreSQL refuses to be run by root
            nobody = pwd.getpwnam("nobody")
            programs = reachable(programs, folder, nobody)
            os.chown(data, nobody.pw_uid, nobody.pw_gid)
        access = ("--username=postgres", "--auth-local=trust", "--auth-host=reject")
        run(
            [programs / "initdb", "-D", data, *access, "--encoding=UTF8", "--locale=C", "--data-checksums"],
            folder,
            nobody,
        )
        settings = {
            **QUICK,
            "listen_addresses": "",
            "unix_socket_directories": data,
            "max_connections": 200,
        }
        with (data / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = '{value}'\n" for name, value in settings.items())
        control = [programs / "pg_ctl", "-D", data, "--silent", "--wait"]
        run([*control, "-l", log, "start"], folder, nobody)
        try:
            yield TestServer(
                f"host={data} user=postgres dbname=postgres", run([programs / "postgres", "--version"], folder)
            )
        finally:
            run([*control, "--mode=fast", "stop"], folder, nobody)
    finally:
        shutil.rmtree(folder)


def run(command: list[str | Path], folder: Path, user: pwd.struct_passwd | None = None) -> str:
    """What a program says, run in a folder as a user. Raises `RuntimeError` with what it says if it fails."""
    ids = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    # Not a pipe: the server, which pg_ctl leaves running, would hold it open.
    with tempfile.TemporaryFile("w+") as said:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said, check=False, **ids
        )
        said.seek(0)
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} failed: {said.read()}")
        return said.read().strip()


def reachable(programs: Path, folder: Path, user: pwd.struct_passwd) -> Path:
    """The programs where a user can run them: where they are, or else copied to `folder` with what lies beside theirs."""
    try:
        run([programs / "postgres", "--version"], folder, user)
    except PermissionError:
        shutil.copytree(programs.parent, folder / "programs", symlinks=True)
        return folder / "programs" / programs.name
    return programs


@contextmanager
def open_server() -> Generator[TestServer]:
    """The server that the environment names, else a container where a Docker engine answers, else the embedded PostgreSQL.

    `PULSE_TRIO_TEST_DSN` names a running server, as a superuser; `PULSE_TRIO_TEST_PROGRAMS` a folder with `initdb` and
    `postgres`, for a server of the run's own.
    """
    named = os.environ.get("PULSE_TRIO_TEST_DSN")
    if named:
        yield TestServer(named, f"PULSE_TRIO_TEST_DSN (database {conninfo_to_dict(named).get('dbname', 'default')})")
        return
    programs = os.environ.get("PULSE_TRIO_TEST_PROGRAMS")
    if programs:
        with of_programs(Path(programs)) as server:
            yield server
        return
    if docker_answers():
        # As in `container`: most runs have no engine.
        from docker.errors import DockerException

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
