"""The effect sink: a process of its own that writes down each effect with the moment it arrived.

`python -m support.chaos.effects SOCKET FILE`; handlers connect to the Unix socket and send lines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial

import trio

from support.chaos.orphans import die_with_parent


async def take(file: int, stream: trio.SocketStream) -> None:
    """Writes down what one worker's handlers send, until it is gone."""
    rest = b""
    try:
        async for chunk in stream:
            at = time.monotonic()
            *lines, rest = (rest + bytes(chunk)).split(b"\n")
            said = [json.dumps({**json.loads(line), "at": at}).encode() + b"\n" for line in lines]
            os.write(file, b"".join(said))
    except trio.BrokenResourceError:
        pass  # the worker was killed: what arrived has arrived


async def serve(socket_path: str, path: str) -> None:
    """Until killed."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    socket = trio.socket.socket(trio.socket.AF_UNIX)
    await socket.bind(socket_path)
    socket.listen(1000)
    await trio.serve_listeners(partial(take, file), [trio.SocketListener(socket)])


if __name__ == "__main__":
    die_with_parent()
    trio.run(serve, sys.argv[1], sys.argv[2])
