"""A durable job that waits, and whose code is replaced meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from pulse_trio import Discard, Handlers, Job, SyncClient
from support.trees import Trees  # noqa: TC001 -- the annotations of handlers are read in this module

Body = Callable[["Trial", Job], Awaitable[Any]]
LONG = 3600.0


class Trial:
    """A job that waits, and whose code is replaced. `done`: what its steps have done."""

    def __init__(self, trees: Trees) -> None:
        self.trees = trees
        self.client = SyncClient(trees.dsn)
        self.done: list[str] = []
        self.id = 0

    async def note(self, what: str) -> None:
        self.done.append(what)

    def deploy(self, body: Body, *, version: int = 1) -> None:
        handlers = self.trees.handlers = Handlers()
        trial = self

        @handlers.job(queue="late")
        async def fails() -> None:
            raise Discard("no funds")

        @handlers.job(queue="late")
        async def ends() -> None: ...

        @handlers.job(durable=True, suspend_after=0, version=version)
        async def order(job: Job) -> Any:
            return await body(trial, job)

        self.fails, self.ends = fails, ends

    async def begin(self, body: Body) -> None:
        """The old code runs until it waits."""
        self.deploy(body)
        self.id = self.trees.enqueue("order")
        await self.run("default")

    async def run(self, *queues: str) -> None:
        with trio.fail_after(60):
            await self.trees.burst(queues=queues)

    async def resume(self, body: Body, **declared: Any) -> dict[str, Any]:
        """The new code goes on with the job, before what it waits for is there. Returns the job as it is then."""
        self.deploy(body, **declared)
        self.trees.again()
        await self.run("default")
        return self.trees.job(self.id)

    async def time_passes(self, body: Body, **declared: Any) -> dict[str, Any]:
        """The same, when the moments of what waits have come."""
        self.trees.time_passes(self.id)
        return await self.resume(body, **declared)

    def moments(self) -> dict[str, str]:
        found = self.trees.window.run("SELECT key, value::text FROM history WHERE job_id = %s AND kind = 10", self.id)
        return {row["key"]: row["value"] for row in found}
