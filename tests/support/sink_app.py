"""The handlers of the fault tests, copied as `app.py` into the folder of a real worker process.

Each tells the test's sink (a Unix socket, `SINK`) what happens to it, with the machine's monotonic clock.
"""

import json
import os
import socket
import time
from pathlib import Path

import trio

from pulse_trio import Handlers, Job

handlers = Handlers()


def told(event: str, job: Job, **more: object) -> bytes:
    """One line to the sink."""
    about = {"job": job.id, "attempt": job.attempt, "pid": os.getpid(), "at": time.monotonic()}
    return json.dumps({"event": event, **about, **more}).encode() + b"\n"


class Teller:
    """The handler's end of the line to the sink."""

    def __init__(self, stream: trio.SocketStream, job: Job) -> None:
        self._stream = stream
        self._job = job

    async def tell(self, event: str, **more: object) -> None:
        await self._stream.send_all(told(event, self._job, **more))

    async def told_to_go(self) -> None:
        assert await self._stream.receive_some(2) == b"go"


@handlers.job(max_attempts=5, backoff_base=0.01)
async def held(job: Job) -> str:
    """Runs until the sink says go."""
    async with await trio.open_unix_socket(os.environ["SINK"]) as stream:
        teller = Teller(stream, job)
        await teller.tell("start")
        try:
            await teller.told_to_go()
        except trio.Cancelled:
            with job.cleanup():
                # job.cleanup() is a shield with a deadline, which the checker cannot know.
                await teller.tell("cancelled", reason=job.cancel_reason)  # noqa: ASYNC102
            raise
        await teller.tell("end")
    return f"attempt {job.attempt}"


@handlers.job
async def family(job: Job) -> None:
    """Has a child in the job's nursery, one in a nursery of its own, and one below; each takes its time to end."""

    async def tell(event: str) -> None:
        # A line for each: the handler may be gone before its child.
        async with await trio.open_unix_socket(os.environ["SINK"]) as stream:
            await Teller(stream, job).tell(event)

    async def child() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                await trio.sleep(0.3)
                await tell("gone")

    job.nursery.start_soon(child)
    async with trio.open_nursery() as own:
        own.start_soon(child)
        async with trio.open_nursery() as deeper:
            deeper.start_soon(child)
            await tell("start")


@handlers.job(max_attempts=5)
async def blocking(job: Job, folder: str) -> str:
    """Blocks the whole loop until the file go-ATTEMPT is there: what a handler must not do, and some will.

    Not one checkpoint in it: whatever happens meanwhile, it returns its value.
    """
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ["SINK"])
        line.sendall(told("start", job))
    while not Path(folder, f"go-{job.attempt}").exists():  # noqa: ASYNC240 -- blocking is what it is for
        time.sleep(0.01)  # noqa: ASYNC251
    return f"attempt {job.attempt}"
