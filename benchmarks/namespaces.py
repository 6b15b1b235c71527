"""Two network namespaces with a distance between them: PostgreSQL in one, what reaches for it in the other.

`namespaces.py DSN DELAY` says the DSN of the far side as a line of JSON, and carries packets until its standard input ends,
each DELAY seconds late in each direction. TCP runs end to end over these packets, so its slow start and its acknowledgements
take round trips as between hosts; a proxy that delays bytes (link.py) has none of that. The kernel's own delay (netem) is
missing from many kernels, so two TUN devices and this process are the wire. It needs root and /dev/net/tun:

    program -- unix socket -- relay | namespace "far" | TUN -- this process -- TUN | namespace "near" | relay -- PostgreSQL

Unix sockets do not belong to a network namespace: the program on the far side needs none of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import trio
from psycopg.conninfo import conninfo_to_dict, make_conninfo

TUN = "/dev/net/tun"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
ADDRESSES = {"near": "10.231.0.1", "far": "10.231.0.2"}
PORT = 5432
SOCKET = ".s.PGSQL.5432"


def possible() -> bool:
    """Whether this process may make network namespaces and TUN devices."""
    return os.geteuid() == 0 and os.access(TUN, os.W_OK) and all(map(shutil.which, ("ip", "unshare")))


# One end, in a namespace of its own


def device(side: str) -> int:
    """The TUN device of this namespace, up and with its address. Packets are read from and written to its descriptor."""
    wire = os.open(TUN, os.O_RDWR)
    fcntl.ioctl(wire, TUNSETIFF, struct.pack("16sH", b"wire", IFF_TUN | IFF_NO_PI))
    other = ADDRESSES["far" if side == "near" else "near"]
    for command in (f"addr add {ADDRESSES[side]} peer {other} dev wire", "link set wire up mtu 1500", "link set lo up"):
        subprocess.run(["ip", *command.split()], check=True)
    return wire


async def carry(source: trio.SocketStream, target: trio.SocketStream) -> None:
    try:
        async for data in source:
            await target.send_all(data)
        await target.send_eof()
    except trio.BrokenResourceError:
        await trio.aclose_forcefully(target)


async def relay(side: str, path: str) -> None:
    """Accepts connections and carries each to the other end: near to PostgreSQL's socket, far to the near relay."""

    async def connected(stream: trio.SocketStream) -> None:
        if side == "near":
            other = await trio.open_unix_socket(path)
        else:
            other = await trio.open_tcp_stream(ADDRESSES["near"], PORT)
        async with stream, other, trio.open_nursery() as nursery:
            nursery.start_soon(carry, stream, other)
            nursery.start_soon(carry, other, stream)

    if side == "near":
        listeners = await trio.open_tcp_listeners(PORT, host=ADDRESSES["near"])
        os.write(1, b"ready\n")
        await trio.serve_listeners(connected, listeners)
    else:
        listening = trio.socket.socket(trio.socket.AF_UNIX)
        await listening.bind(path)
        listening.listen(64)
        os.write(1, b"ready\n")
        await trio.serve_listeners(connected, [trio.SocketListener(listening)])


# The wire


def deliver(wires: dict[int, int], delay: float, until: int) -> None:
    """Writes each packet of one wire to the other, `delay` seconds after it was read, until `until` can be read."""
    late: dict[int, deque[tuple[float, bytes]]] = {wire: deque() for wire in wires}
    while True:
        heads = [packets[0][0] for packets in late.values() if packets]
        wait = max(0.0, min(heads) - time.monotonic()) if heads else None
        readable, _, _ = select.select([*wires, until], [], [], wait)
        if until in readable:
            return
        now = time.monotonic()
        for wire in readable:
            late[wires[wire]].append((now + delay, os.read(wire, 2048)))
        for wire, packets in late.items():
            while packets and packets[0][0] <= now:
                os.write(wire, packets.popleft()[1])


def start(side: str, path: str) -> tuple[subprocess.Popen[bytes], int]:
    """One end in a namespace of its own, and the descriptor of its wire."""
    mine, its = socket.socketpair()
    with its:
        command = ["unshare", "--net", sys.executable, __file__, side, path, str(its.fileno())]
        process = subprocess.Popen(command, pass_fds=[its.fileno()], stdout=subprocess.PIPE)
    with mine:
        _, descriptors, _, _ = socket.recv_fds(mine, 1, 1)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n", f"the {side} end did not start"
    return process, descriptors[0]


def main() -> None:
    """`DSN DELAY`: the whole link. `near|far PATH DESCRIPTOR`: one end, started by it."""
    if sys.argv[1] in ADDRESSES:
        side, path, passed = sys.argv[1], sys.argv[2], int(sys.argv[3])
        with socket.socket(fileno=passed) as parent:
            socket.send_fds(parent, [b"w"], [device(side)])
        trio.run(relay, side, path)
        return
    dsn, delay = sys.argv[1], float(sys.argv[2])
    parts = conninfo_to_dict(dsn)
    ends: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="pulse-trio-far-") as folder:
        Path(folder).chmod(0o755)
        try:
            near, near_wire = start("near", f"{parts['host']}/.s.PGSQL.{parts.get('port', 5432)}")
            ends.append(near)
            far, far_wire = start("far", f"{folder}/{SOCKET}")
            ends.append(far)
            sys.stdout.write(json.dumps({"dsn": make_conninfo(dsn, host=folder, port=PORT)}) + "\n")
            sys.stdout.flush()
            deliver({near_wire: far_wire, far_wire: near_wire}, delay, sys.stdin.fileno())
        finally:
            for process in ends:
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
