"""The real PgBouncer before the tests' PostgreSQL, in transaction mode, with few server connections, or in session mode."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pulse_trio.testing.faults.proxy import open_proxy

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
NOBODY = 65534
CONNECTIONS = 3

SETTINGS = """
[databases]
{dbname} = host=127.0.0.1 port={upstream} user={user} {password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {connections}
max_client_conn = 200
max_db_connections = {connections}
server_tls_sslmode = prefer
"""


class PgBouncer:
    """One that can be killed and started again; `dsn` is the database through it."""

    def __init__(self, folder: Path, port: int, dsn: str) -> None:
        self.dsn = dsn
        self._folder = folder
        self._port = port
        self._process: trio.Process | None = None

    async def start(self) -> None:
        """Starts it and waits until it listens."""
        assert PROGRAM is not None
        root = os.geteuid() == 0
        self._process = process = await trio.lowlevel.open_process(
            [PROGRAM, "-q", str(self._folder / "pgbouncer.ini")],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            user=NOBODY if root else None,
            group=NOBODY if root else None,
            extra_groups=[] if root else None,
        )
        with trio.fail_after(20):
            while True:
                assert process.returncode is None
                try:
                    await (await trio.open_tcp_stream("127.0.0.1", self._port)).aclose()
                    break
                except OSError:
                    await trio.sleep(0.05)

    async def kill(self) -> None:
        """SIGKILL: its clients and the server see their connections end."""
        if self._process is not None:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def open_pgbouncer(dsn: str) -> AsyncGenerator[str]:
    """The DSN of the same database through a PgBouncer of the test's own. The test's loop carries it: block in threads only."""
    async with open_mortal_pgbouncer(dsn) as pooler:
        yield pooler.dsn


@asynccontextmanager
async def open_mortal_pgbouncer(
    dsn: str, mode: str = "transaction", *, connections: int = CONNECTIONS
) -> AsyncGenerator[PgBouncer]:
    """The PgBouncer itself; in session mode with as many connections as anyone may want."""
    fields = conninfo_to_dict(dsn)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="pulse-trio-pgbouncer-"))
    os.chmod(folder, 0o755)  # noqa: S103 -- whoever runs it below reads the file in it
    # It reaches the server by TCP: the embedded one's socket is its owner's alone, and PgBouncer refuses to be root.
    async with open_proxy(dsn) as upstream:
        (folder / "pgbouncer.ini").write_text(
            SETTINGS.format(
                dbname=fields["dbname"],
                user=fields.get("user") or "postgres",
                password=f"password={fields['password']}" if fields.get("password") else "",
                upstream=conninfo_to_dict(upstream.dsn)["port"],
                port=port,
                mode=mode,
                connections=connections if mode == "transaction" else 30,
            )
        )
        through = make_conninfo(
            "", host="127.0.0.1", port=port, dbname=fields["dbname"], user=fields.get("user") or "postgres"
        )
        pooler = PgBouncer(folder, port, through)
        try:
            await pooler.start()
            yield pooler
        finally:
            with trio.CancelScope(shield=True):
                await pooler.kill()
                shutil.rmtree(folder)
