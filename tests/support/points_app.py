"""A handler in a process of its own, which its process can import."""

from __future__ import annotations

from pathlib import Path

from pulse_trio import Handlers, Job

handlers = Handlers()


@handlers.job(runs="process", max_attempts=5)
def append(job: Job, name: str) -> int:
    path = Path(name)
    with path.open("a") as file:
        file.write("x")
    return job.attempt  # it was written


@handlers.job(runs="process", max_attempts=5, retry=lambda _: 0.0)
def appends_again_at_once(job: Job, name: str) -> int:
    with Path(name).open("a") as file:
        file.write(f"{job.attempt}")
    if job.attempt == 1:
        raise ValueError("one failure of its own")
    return job.attempt
