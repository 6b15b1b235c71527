"""A primary and its streaming standby, of a PostgreSQL that has pg_basebackup (the embedded one has not), as a plain user."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import psycopg
from psycopg.conninfo import make_conninfo

from support.pgbouncer import NOBODY

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

NEEDED = ("initdb", "postgres", "pg_basebackup")
WITHIN = 40.0
SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 60
wal_level = replica
autovacuum = off
fsync = off
"""
"""What is killed here is processes and never the machine, so nothing need reach the disk."""


def find_programs() -> Path | None:
    """The folder of the newest PostgreSQL here that has all that is needed."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    packaged = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    found = [f for f in (*folders, *packaged) if all((f / program).is_file() for program in NEEDED)]
    return found[-1] if found else None


PROGRAMS = find_programs()


class Node:
    """One of the two servers."""

    def __init__(self, folder: Path) -> None:
        self.data = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.dsn = make_conninfo("", host="127.0.0.1", port=self.port, user="postgres", dbname="postgres")
        self.process: subprocess.Popen[Any] | None = None

    def start(self) -> None:
        """Starts it and waits until it answers."""
        with (self.data / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [program("postgres"), "-D", str(self.data), "-p", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **identity(),
            )
        until(lambda: self.ask("SELECT 1") == 1)

    def kill(self) -> None:
        """SIGKILL to all of its processes at once, as if its machine were gone."""
        if self.process is not None:
            for pid in (self.process.pid, *self.children()):
                with suppress(ProcessLookupError):  # one of its processes ended meanwhile
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def children(self) -> list[int]:
        """Its server processes."""
        assert self.process is not None
        pid = self.process.pid
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def ask(self, query: str) -> object:
        """One value."""
        with psycopg.connect(self.dsn, autocommit=True, connect_timeout=5) as connection:
            row = connection.execute(query.encode()).fetchone()
            return row[0] if row else None

    def do(self, *statements: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())


class Pair:
    """A primary, and the standby that follows it."""

    def __init__(self, primary: Node, standby: Node) -> None:
        self.primary = primary
        self.standby = standby
        self.dsn = make_conninfo(
            "",
            host="127.0.0.1,127.0.0.1",
            port=f"{primary.port},{standby.port}",
            user="postgres",
            dbname="postgres",
            target_session_attrs="read-write",
            connect_timeout=3,
        )

    def wait_for_standby(self) -> None:
        """From now on every COMMIT waits for the standby."""
        self.primary.do("ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
        until(lambda: self.primary.ask("SELECT max(sync_state) FROM pg_stat_replication") == "sync")

    def stop_sending(self) -> None:
        """The standby silently receives nothing more."""
        sender = self.primary.ask("SELECT pid FROM pg_stat_replication")
        assert isinstance(sender, int)
        os.kill(sender, signal.SIGSTOP)

    def fail_over(self) -> None:
        """The primary is gone, the standby takes its place."""
        self.primary.kill()
        self.standby.do("SELECT pg_promote(true, 40)")


@contextmanager
def open_pair() -> Generator[Pair]:
    folder = Path(tempfile.mkdtemp(prefix="pulse-trio-pair-"))
    nodes = [Node(folder / "primary"), Node(folder / "standby")]
    primary, standby = nodes
    try:
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        run("initdb", "-D", str(primary.data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        with (primary.data / "postgresql.conf").open("a") as file:
            file.write(SETTINGS)
        primary.start()
        run("pg_basebackup", "-D", str(standby.data), "-R", "-c", "fast", "--no-sync", "-d", primary.dsn)
        standby.start()
        until(lambda: primary.ask("SELECT max(state) FROM pg_stat_replication") == "streaming")
        yield Pair(primary, standby)
    finally:
        for node in nodes:
            node.kill()
        shutil.rmtree(folder)


def program(name: str) -> str:
    assert PROGRAMS is not None
    return str(PROGRAMS / name)


class Identity(TypedDict, total=False):
    """As whom a process runs: arguments of `subprocess.Popen`."""

    user: int
    group: int
    extra_groups: list[int]


def identity() -> Identity:
    """PostgreSQL refuses to be root."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def until(holds: Callable[[], bool]) -> None:
    """Waits, in a thread, until a condition holds of which PostgreSQL sends no notification."""
    deadline = time.monotonic() + WITHIN
    while True:
        with suppress(psycopg.OperationalError):
            if holds():
                return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def run(name: str, *arguments: str) -> None:
    done = subprocess.run(
        [program(name), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
        timeout=120,
        **identity(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
