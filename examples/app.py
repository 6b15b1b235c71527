"""A small module of handlers. In this folder: `pulse-trio run app:handlers`, and in another terminal

pulse-trio enqueue send_welcome '{"user_id": 42}'
pulse-trio enqueue thumbnail '{"path": "cat.jpg", "sizes": [64, 256]}'
pulse-trio jobs list
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import trio

from pulse_trio import Discard, Handlers, Job

handlers = Handlers()


@handlers.job(queue="mail", max_attempts=5, timeout=60)
async def send_welcome(job: Job, user_id: int, template: str = "default") -> str:
    """Fails one time in four, as mail servers do, and is then tried again."""
    await trio.sleep(0.5)
    if random.random() < 0.25:
        raise ConnectionError("the mail server hung up")
    print(f"welcome, user {user_id}! ({template}; job {job.id}, attempt {job.attempt})")
    return f"sent {template} to user {user_id}"


@handlers.job
async def thumbnail(job: Job, path: str, sizes: list[int]) -> int:
    """Children in the job's nursery are part of the job: it ends when they have, and its cancellation reaches them."""
    if not sizes:
        raise Discard("no sizes: trying again would not help")
    for size in sizes:
        job.nursery.start_soon(resize, path, size)
    return len(sizes)


async def resize(path: str, size: int) -> None:
    """Stands for work."""
    await trio.sleep(size / 1000)
    print(f"{path} at {size} pixels")


@handlers.job
def checksum(path: str) -> str:
    """A plain function runs in a thread, so it may block."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
