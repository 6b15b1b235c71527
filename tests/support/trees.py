"""Durable handlers, a worker for them on real PostgreSQL, and a look at what they have left there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Handlers, HandlerStuck, SyncClient, Worker
from pulse_trio.observe import HandlerOverran
from pulse_trio.testing.kept import kept_for
from pulse_trio.testing.kept_worker import KeepingWorker
from pulse_trio.worker.durable.afresh import AFRESH
from pulse_trio.worker.durable.begun import BEGUN
from pulse_trio.worker.durable.cancelling import COMPENSATED
from pulse_trio.worker.durable.detours import HALF_WAY
from pulse_trio.worker.durable.interrupted import UNDONE, UNDONE_BY
from pulse_trio.worker.durable.quiet import QUIET
from pulse_trio.worker.durable.under_way import FAILED
from support.stage import Recorder
from support.stores import open_store

if TYPE_CHECKING:
    from pulse_trio import Job, WorkerReport
    from support.stores import Window


def running_of(job: Job) -> Any:
    """The worker's side of a job, so that what strikes it does so at that very moment."""
    return job._runtime  # pyright: ignore[reportPrivateUsage] -- a job's own methods wait for a beat or a notification


def cut_clean_ups(running: Any) -> None:
    """The clean-ups of an attempt that is lost end soon, as those of a killed worker do at once. Its worker would let them go
    on for five seconds, and each test would wait for that."""
    if running._cleanup is not None:
        running._cleanup._end = trio.current_time() + 0.1
        running._cleanup.cancelled()


class Trees:
    """`handlers` to declare, and the database that `window` looks at."""

    def __init__(self, window: Window) -> None:
        self.dsn = window.dsn
        self.handlers = Handlers()
        self.events = Recorder()
        self.window = window

    def worker(self, **settings: Any) -> Worker:
        """A worker of these handlers."""
        settings.setdefault("poll", 0.3)
        return Worker(self.handlers, self.dsn, instruments=[self.events], **settings)

    async def burst(self, **settings: Any) -> WorkerReport:
        """Runs what is due, on the connections of the burst before."""
        settings.setdefault("poll", 0.3)
        worker = KeepingWorker(
            self.handlers, self.dsn, burst=True, instruments=[self.events], kept=kept_for(self.dsn), **settings
        )
        return await worker.run()

    async def ended(self, job_id: int, **settings: Any) -> dict[str, Any]:
        """The job, which is run until it has ended, by workers with these settings."""
        with trio.fail_after(30):
            while self.job(job_id)["finished_at"] is None:
                await self.burst(log=False, **settings)
                self.again()
        return self.job(job_id)

    def enqueue(self, kind: str, args: dict[str, Any] | None = None, **options: Any) -> int:
        """The id of a new job."""
        handler: Any = self.handlers[kind].options(**options)
        return SyncClient(self.dsn).enqueue(handler, **(args or {})).id

    async def lose(self, job_id: int, *, due: bool = True) -> None:
        """The lease of the attempt that runs ends, and another store rescues the job. `due`: it is due at once."""
        attempt = self.job(job_id)["attempt"]
        async with open_store(self.dsn) as other:
            # A beat may have renewed the lease meanwhile, or the worker's own watchdog have been first.
            while self.window.run(
                "UPDATE job SET lease_until = now() - interval '1 s' WHERE id = %s AND attempt = %s AND state = 2 RETURNING id",
                job_id,
                attempt,
            ):
                await other.rescue()
        if due:
            self.again()

    async def dies(self, job: Job) -> None:
        """The worker of this attempt is lost while the task cleans up. Never returns."""
        await self.lose(job.id)
        cut_clean_ups(running_of(job))
        await trio.sleep_forever()

    async def replaced(self, over: trio.Event) -> None:
        """Runs a worker until it would be replaced, for a handler that does not end. `over`: its process ends."""
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def run() -> None:
                    with pytest.raises(HandlerStuck):
                        await self.worker(cleanup=0.1, grace=1000.0).run()

                await self.events.first(HandlerOverran)
                over.set()

    def again(self) -> None:
        """Makes every waiting job due now."""
        self.window.run("UPDATE job SET run_at = clock_timestamp() WHERE state <> 2")

    def time_passes(self, job_id: int, seconds: float = math.inf) -> None:
        """The moments that the job remembers have come: of its sleeps, its waits and its deadlines, if they are not later."""
        self.window.run(
            "UPDATE history SET value = to_json(extract(epoch FROM now())::float8)"
            " WHERE job_id = %s AND kind = 10 AND key <> ALL(%s)"
            # Less than that are numbers of blocks and counts.
            " AND (value #>> '{}')::float8 > 1e9 AND (value #>> '{}')::float8 < extract(epoch FROM now()) + %s",
            job_id,
            [AFRESH, QUIET, BEGUN, UNDONE, UNDONE_BY],
            seconds,
        )
        self.again()

    def job(self, job_id: int) -> dict[str, Any]:
        """The job as `pulse.jobs` shows it."""
        (row,) = self.window.run("SELECT * FROM jobs WHERE id = %s", job_id)
        return row

    def lines(self, job_id: int) -> list[tuple[int, str, str]]:
        """Kind, key and name of each line of its history, in order; without those which say how a clean-up ended, what
        its calls do, or whether it was quiet."""
        found = self.window.run(
            "SELECT kind, key, coalesce(name, '') AS name FROM history"
            " WHERE job_id = %s AND key <> ALL (%s) AND key !~ '^[0-9]+:(un)?does( from)?$' ORDER BY line",
            job_id,
            [AFRESH, BEGUN, COMPENSATED, FAILED, HALF_WAY, QUIET, UNDONE, UNDONE_BY],
        )
        return [(row["kind"], row["key"], row["name"]) for row in found]
