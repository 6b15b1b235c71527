"""The real PgBouncer before the tests' PostgreSQL, in transaction mode, with few server connections."""

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

from support.proxy import open_proxy

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
pool_mode = transaction
default_pool_size = {connections}
max_client_conn = 200
max_db_connections = {connections}
server_tls_sslmode = prefer
"""


@asynccontextmanager
async def open_pgbouncer(dsn: str) -> AsyncGenerator[str]:
    """The DSN of the same database through a PgBouncer of the test's own. The test's loop carries it: block in threads only."""
    assert PROGRAM is not None
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
                connections=CONNECTIONS,
            )
        )
        root = os.geteuid() == 0
        process = await trio.lowlevel.open_process(
            [PROGRAM, "-q", str(folder / "pgbouncer.ini")],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            **({"user": NOBODY, "group": NOBODY, "extra_groups": []} if root else {}),
        )
        try:
            with trio.fail_after(20):
                while True:
                    assert process.returncode is None
                    try:
                        await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
                        break
                    except OSError:
                        await trio.sleep(0.05)
            yield make_conninfo(
                "", host="127.0.0.1", port=port, dbname=fields["dbname"], user=fields.get("user") or "postgres"
            )
        finally:
            with trio.CancelScope(shield=True):
                process.terminate()
                await process.wait()
                shutil.rmtree(folder)
