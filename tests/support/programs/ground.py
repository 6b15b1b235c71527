"""The ground on which drawn programs are played: one database, workers in the test's own Trio run, and what strikes them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from pulse_trio import InvalidTransition, UnknownJob, Worker, open_client
from support.stage import parts
from support.stores import Window, open_store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pulse_trio import Client, Handlers, Job
    from pulse_trio.store import WorkerStore

LOOK = """
SELECT j.id, j.state, j.result, j.error,
  (SELECT json_agg(json_build_array(m.id, m.state)) FROM jobs m
   WHERE m.root_id = j.id AND m.id <> j.id AND m.state NOT IN ('completed', 'dead', 'cancelled')) AS living
FROM jobs j WHERE j.id = ANY(%s) AND j.finished_at IS NOT NULL
"""
HASTEN = """
UPDATE job j SET run_at = clock_timestamp() WHERE state = 1 AND run_at > now() + interval '0.2 s'
AND run_at < now() + interval '3 hours'
AND NOT EXISTS (SELECT FROM durable_job d WHERE d.job_id = j.id AND d.suspended = j.attempt)
"""
"""What was released or failed comes back at once."""
LOSE = """
UPDATE job SET lease_until = now() - interval '1 s' WHERE id =
(SELECT id FROM job WHERE id = %s AND attempt = %s AND state = 2 FOR UPDATE SKIP LOCKED)
"""


class Ground:
    """One database, the workers and whoever strikes."""

    def __init__(self, dsn: str, window: Window, other: WorkerStore, client: Client, nursery: trio.Nursery) -> None:
        self.dsn, self.window, self.other, self.client, self.nursery = dsn, window, other, client, nursery
        self.workers: list[Worker] = []
        self.ended: dict[int, trio.Event] = {}
        self.found: dict[int, Any] = {}

    async def watch(self) -> None:
        """Looks for plays that have ended."""
        while True:
            await trio.sleep(0.02)
            self.window.run(HASTEN)
            waited = [root for root, event in self.ended.items() if not event.is_set()]
            for row in self.window.run(LOOK, waited) if waited else []:
                self.found[row["id"]] = row
                self.ended[row["id"]].set()

    def send(self, job_id: int, name: str, after: float) -> None:
        """Sends an event, once."""
        self.nursery.start_soon(self._send, job_id, name, after)

    async def _send(self, job_id: int, name: str, after: float) -> None:
        await trio.sleep(after)
        try:
            await self.client.send_event(job_id, name, f"payload of {name}", event_key=name)
        except (UnknownJob, InvalidTransition):
            pass

    def running(self, job: Job) -> Any:
        """The worker's record of a job."""
        return job._runtime  # pyright: ignore[reportPrivateUsage] -- faults strike where handlers reach nothing

    async def lose(self, job: Job, *, told: bool) -> None:
        """The lease of an attempt is over, and another worker may have the job."""
        while self.window.run("SELECT 1 FROM job WHERE id = %s AND attempt = %s AND state = 2", job.id, job.attempt):
            self.window.run(LOSE, job.id, job.attempt)
            await self.other.rescue()
        if not told:
            return
        running = self.running(job)
        if not running.ended:
            for worker in self.workers:
                if running in list(parts(worker).jobs.held):
                    parts(worker).jobs.lose(running)
        running.cancel("fence-lost")

    def run_workers(self, handlers: Handlers) -> None:
        """Two, and the watch."""
        for _ in range(2):
            worker = Worker(handlers, self.dsn, poll=0.1, concurrency=24, watchdog=1.0, grace=0.1, log=False)
            self.workers.append(worker)
            self.nursery.start_soon(worker.run)
        self.nursery.start_soon(self.watch)


@asynccontextmanager
async def open_ground(dsn: str) -> AsyncGenerator[tuple[str, Window, WorkerStore, Client, trio.Nursery]]:
    """What a `Ground` is made of. What runs in the nursery ends with the block."""
    async with open_store(dsn) as other, open_client(dsn) as client, trio.open_nursery() as nursery:
        with Window(dsn) as window:
            yield dsn, window, other, client, nursery
            nursery.cancel_scope.cancel()
