"""Gives back the jobs that were claimed ahead of a slot and did not get one soon.

claim_size.py says when jobs are claimed ahead: they begin within some 10 ms if the jobs before them stay as short as the
last ones were. If those are longer all at once, the jobs behind them must not wait here while another worker has free slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ..jobs.job_states import CLAIMED

if TYPE_CHECKING:
    from ..jobs.job_table import JobTable
    from ..jobs.running_job import RunningJob

_PATIENCE = 0.1
"""Seconds. Ten times what claim_size.py foresees, so that a pause of the process seldom gives jobs back."""


class Releaser(Protocol):
    """Releases jobs that have not begun: the runner."""

    def give_back(self, job: RunningJob) -> None: ...


class Ahead:
    """Watches the jobs of one worker that were claimed ahead."""

    def __init__(self, jobs: JobTable, releaser: Releaser) -> None:
        self._jobs = jobs
        self._releaser = releaser

    async def run(self) -> None:
        """Gives jobs back that have waited for 0.1 s or more, until cancelled."""
        jobs = self._jobs
        while True:
            await jobs.slots.claimed_ahead.wait()
            while jobs.startable < len(jobs.due):
                last = jobs.due[-1]
                await trio.sleep(_PATIENCE)
                if last.state is CLAIMED and not last.ended:
                    self.give_back()

    def give_back(self) -> None:
        """Gives back all jobs that wait for a slot, the youngest first."""
        jobs = self._jobs
        jobs.slots.ahead = 0
        while jobs.startable < len(jobs.due):
            self._releaser.give_back(jobs.due.pop())
